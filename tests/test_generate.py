"""The notebook API: text streams over step outputs, and a loaded model from prompt to text."""

import copy
import dataclasses
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kimijax
from kimijax.config import load_config
from kimijax.engine.config import EngineConfig
from kimijax.engine.request import FinishReason, Request, Sampling, StepOutput
from kimijax.errors import ConfigError, RequestError, TokenizerError
from kimijax.generate import LLM, Prompt, TextStream
from kimijax.grammar import GrammarSpec
from kimijax.loader import load_tokenizer
from kimijax.tokenizer import Tokenizer

from . import golden, reference, toy_tokenizer

EOS, IM_END, THINK, END_THINK = 262, 263, 268, 269  # of the toy tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer.load(tmp_path_factory.mktemp("toy"))


def request(prompt: tuple[int, ...] = (97,), stop: tuple[int, ...] = (EOS, IM_END)) -> Request:
    return Request("r", prompt, Sampling(), 0, frozenset(stop), 1000)


def feed(stream: TextStream, ids: list[int], chunk: int, reason: FinishReason = "length") -> tuple[str, str, int]:
    """Text, reasoning and number of feeds after which the stream was done."""
    text, reasoning, n = "", "", 0
    for at in range(0, len(ids), chunk):
        last = at + chunk >= len(ids)
        delta = stream.feed(StepOutput("r", tuple(ids[at : at + chunk]), reason if last else None))
        text, reasoning, n = text + delta.text, reasoning + delta.reasoning, n + 1
        if delta.done:
            break
    return text, reasoning, n


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 100])
def test_stream_parts_thinking_from_text(tokenizer: Tokenizer, chunk: int) -> None:
    answer = [*b"why \xe4\xb8\x96", END_THINK, *b"so: <think>"]
    prompt_thinks = TextStream(tokenizer, request((97, THINK)))
    assert feed(prompt_thinks, answer, chunk)[:2] == ("so: <think>", "why 世")
    model_thinks = TextStream(tokenizer, request())
    assert feed(model_thinks, [THINK, *answer], chunk)[:2] == ("so: <think>", "why 世")
    raw = TextStream(tokenizer, request((97, THINK)), raw=True)
    assert feed(raw, answer, chunk)[:2] == ("why 世</think>so: <think>", "")
    late = TextStream(tokenizer, request())
    assert feed(late, [*b"a", THINK, *b"b", END_THINK], chunk)[:2] == ("a<think>b</think>", "")


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_stream_ends_at_a_stop_string_and_counts_to_it(tokenizer: Tokenizer, chunk: int) -> None:
    stream = TextStream(tokenizer, request(), stop=["END"])
    text, _, _ = feed(stream, list(b"one END two"), chunk)
    assert (text, stream.finish_reason, stream.completion_tokens) == ("one ", "stop", 7)
    thinking = TextStream(tokenizer, request((THINK,)), stop=["END"])
    assert feed(thinking, [*b"END", END_THINK, *b"x END"], chunk)[:2] == ("x ", "END")


@pytest.mark.parametrize("end", [EOS, IM_END])
def test_end_tokens_are_counted_and_not_shown(tokenizer: Tokenizer, end: int) -> None:
    stream = TextStream(tokenizer, request())
    text, _, _ = feed(stream, [*b"hi", end], 1, "stop")
    assert (text, stream.finish_reason, stream.completion_tokens) == ("hi", "stop", 3)


def test_cut_off_text_keeps_its_broken_character(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, request())
    assert feed(stream, [65, 0xE4, 0xB8], 1)[0] == "A�"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Kimi-K2.5 with the toy tokenizer and nano's template."""
    folder = tmp_path_factory.mktemp("tiny")
    config = copy.deepcopy(golden.FAMILIES["kimi_k25"])
    config["text_config"] |= {"vocab_size": 528, "num_hidden_layers": 2}
    tensors = {name: np.asarray(value, np.float32) for name, value in golden.hf_weights(config).items()}
    golden.write_tensors(tensors, folder, 2)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": 263, "temperature": 0.6, "top_p": 0.95}')
    toy_tokenizer.write(folder)
    template = Path(kimijax.__file__).parent / "nano" / "chat_template.jinja"
    (folder / "chat_template.jinja").write_text(template.read_text())
    return folder


SIZES = EngineConfig(max_batch=2, context_length=128, page_size=16, chunk_size=64, burst=4, batch_factor=2)


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return kimijax.load(directory, engine=SIZES, dtype=jnp.float32)


def test_generate_follows_the_reference(llm: LLM, directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    weights, prompt = golden.hf_weights(config), list(b"def main():")
    ids = list(prompt)
    for _ in range(6):  # ids from 517 on belong to no token and are never drawn
        ids.append(int(np.argmax(reference.forward(config, weights, np.asarray(ids)).logits[-1, :517])))
    out = llm.generate(prompt, temperature=0, max_tokens=6, ignore_eos=True)
    assert list(out.token_ids) == ids[len(prompt) :]
    assert out.finish_reason == "length"
    assert out.prompt_tokens == len(prompt)


def test_one_prompt_or_many_alone_or_together(llm: LLM) -> None:
    """Text, ids and messages; a batch gives each prompt what it gets alone."""
    prompts: list[Prompt] = ["ab", list(b"cd"), [{"role": "user", "content": "ef"}]]
    together = llm.generate(prompts, temperature=0, max_tokens=5, ignore_eos=True)
    alone = [llm.generate(p, temperature=0, max_tokens=5, ignore_eos=True) for p in prompts]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert together[2].prompt_tokens > 5
    llm.engine.check_integrity()
    assert llm.engine.stats().free_pages == llm.engine.stats().total_pages


def test_stream_joins_to_generate_and_frees_pages_when_dropped(llm: LLM) -> None:
    whole = llm.generate("abc", temperature=0, max_tokens=12, ignore_eos=True)
    deltas = list(llm.stream("abc", temperature=0, max_tokens=12, ignore_eos=True))
    assert "".join(d.text for d in deltas) == whole.text
    assert len(deltas) > 1
    dropped = llm.stream("abc", temperature=0, max_tokens=100, ignore_eos=True)
    next(dropped)
    dropped.close()
    assert not llm.engine.has_work
    assert llm.engine.stats().free_pages == llm.engine.stats().total_pages


def test_sampling_defaults_come_from_the_checkpoint(llm: LLM) -> None:
    assert (llm.default_sampling.temperature, llm.default_sampling.top_p) == (0.6, 0.95)
    a, b = (llm.generate("abc", seed=5, max_tokens=8, ignore_eos=True) for _ in range(2))
    assert a.token_ids == b.token_ids


def test_logits_and_taps_are_those_of_the_reference(llm: LLM, directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    ids = list(b"import os")
    right = reference.forward(config, golden.hf_weights(config), np.asarray(ids))
    found = llm.logits(ids, taps=(0, 1, 2))
    assert found.logits.shape == (9, 528)
    assert np.abs(found.logits - right.logits).max() / np.abs(right.logits).max() < 1e-4
    for tap, residual in found.taps.items():
        assert np.abs(residual - right.taps[tap]).max() / np.abs(right.taps[tap]).max() < 1e-4
    with pytest.raises(ValueError, match="tap 3: expected 0"):
        llm.logits(ids, taps=(3,))
    with pytest.raises(RequestError, match="token_ids"):
        llm.logits([528])


def test_several_consumers_take_turns(llm: LLM) -> None:
    """A stream that is half read, a call in between, and threads: everybody gets what it gets alone."""
    settings = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    right = {text: llm.generate(text, **settings).text for text in ("abc", "de", "fgh")}
    stream = llm.stream("abc", **settings)
    first = next(stream).text
    assert llm.generate("de", **settings).text == right["de"]
    assert first + "".join(d.text for d in stream) == right["abc"]
    with ThreadPoolExecutor(3) as pool:
        found = dict(zip(right, pool.map(lambda text: llm.generate(text, **settings).text, right), strict=True))
    assert found == right
    assert llm.engine.stats().free_pages == llm.engine.stats().total_pages


def test_more_prompts_than_the_queue_holds(directory: Path) -> None:
    llm = kimijax.load(directory, engine=dataclasses.replace(SIZES, max_queued=1), dtype=jnp.float32)
    out = llm.generate([[i] for i in range(9)], temperature=0, max_tokens=2, ignore_eos=True)
    assert [len(c.token_ids) for c in out] == [2] * 9


def test_an_interrupted_step_leaves_a_usable_model(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    right = llm.generate("abc", temperature=0, max_tokens=5, ignore_eos=True).text
    programs = llm.engine._programs
    rounds = programs.rounds

    def interrupted(*args: Any, **options: Any) -> Any:
        rounds(*args, **options)  # the cache is donated, its successor lost
        raise KeyboardInterrupt

    monkeypatch.setattr(programs, "rounds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc", temperature=0, max_tokens=5, ignore_eos=True)
    monkeypatch.undo()
    assert llm.generate("abc", temperature=0, max_tokens=5, ignore_eos=True).text == right


def test_prompts_in_every_form(llm: LLM) -> None:
    ids = llm.generate("abc", temperature=0, max_tokens=3, ignore_eos=True).token_ids
    forms: list[Any] = [np.frombuffer(b"abc", np.uint8), [np.int64(i) for i in b"abc"], tuple(b"abc")]
    for prompt in forms:
        assert llm.generate(prompt, temperature=0, max_tokens=3, ignore_eos=True).token_ids == ids
    assert llm.generate([]) == []
    wrong: Any
    for wrong in ([1.5], [97, "b"], [None]):
        with pytest.raises((RequestError, TypeError)):
            llm.generate(wrong)
    with pytest.raises(RequestError, match="top_k: found 1099511627776"):
        llm.generate("abc", top_k=1 << 40)
    with pytest.raises(RequestError, match="temperature"):
        llm.stream("abc", temperature=1e39)  # at the call, not at the first piece


def test_broken_weights_end_the_request_with_an_error(directory: Path) -> None:
    llm = kimijax.load(directory, engine=SIZES, dtype=jnp.float32)
    leaves = llm.engine._programs.leaves
    llm.engine._programs.leaves = [jnp.full_like(x, jnp.nan) if x.ndim == 1 else x for x in leaves]
    with pytest.raises(RuntimeError, match="not a number"):
        llm.generate("abc", temperature=0, max_tokens=3)
    assert llm.engine.stats().free_pages == llm.engine.stats().total_pages


def test_paged_decoding_draws_the_same_tokens(llm: LLM, directory: Path) -> None:
    paged = kimijax.load(directory, engine=dataclasses.replace(SIZES, decode_view="paged"), dtype=jnp.float32)
    prompts = ["ab", "a longer prompt that fills more than one page of the cache"]
    for llm_ in (llm, paged):
        llm_.generate(prompts, temperature=0, max_tokens=4)  # both have used their pages before
    right = [c.token_ids for c in llm.generate(prompts, temperature=0, max_tokens=30, ignore_eos=True)]
    assert [c.token_ids for c in paged.generate(prompts, temperature=0, max_tokens=30, ignore_eos=True)] == right


def test_texts_of_a_request_become_token_ids(llm: LLM) -> None:
    made = llm.request("ab", Sampling(bad_words=((1, 2),)), bad_words=["b"])
    assert made.sampling.bad_words == ((1, 2), (98,), (260,))
    assert made.constraint is None
    spec = GrammarSpec.of_choices(["yes", "no"])
    first, second = (llm.request("x<think>", Sampling(), grammar=spec).constraint for _ in range(2))
    assert first is not None
    assert first is not second  # each answer moves its own
    starts = np.flatnonzero(np.unpackbits(first.masks(())[0].view(np.uint8), bitorder="little"))
    assert starts.tolist() == [ord("n"), ord("y")]
    question = [{"role": "user", "content": "x"}]
    thinking = llm.request(question, Sampling(), grammar=spec, chat={"thinking": True}).constraint
    assert thinking is not None
    assert thinking.masks(())[0].sum() != first.masks(())[0].sum()  # what is thought is free


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    """Whatever filters, temperature and rules do to the distribution that is drawn from."""
    prompt = list(b"def f")
    settings: dict[str, Any] = {
        "temperature": 0.7,
        "top_k": 20,
        "seed": 3,
        "frequency_penalty": 1.5,
        "logit_bias": {65: 5.0},
    }
    out = llm.generate(prompt, logprobs=3, max_tokens=8, ignore_eos=True, **settings)
    assert out.token_ids == llm.generate(prompt, max_tokens=8, ignore_eos=True, **settings).token_ids
    assert tuple(entry.token for entry in out.logprobs) == out.token_ids
    logits = llm.logits([*prompt, *out.token_ids]).logits[len(prompt) - 1 : -1, :517].astype(np.float64)
    right = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    for row, entry in zip(right, out.logprobs, strict=True):
        assert abs(entry.logprob - row[entry.token]) < 1e-4
        assert [i for i, _ in entry.top] == np.argsort(-row)[:3].tolist()
        assert np.abs(np.asarray([p for _, p in entry.top]) - np.sort(row)[::-1][:3]).max() < 1e-4
    assert llm.generate(prompt, max_tokens=2, ignore_eos=True).logprobs == ()


def test_streamed_log_probabilities_join_to_the_whole(llm: LLM) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 1, "logprobs": 0, "max_tokens": 20, "ignore_eos": True}
    whole = llm.generate("abc", **settings)
    deltas = list(llm.stream("abc", **settings))
    assert tuple(entry for d in deltas for entry in d.logprobs) == whole.logprobs
    shown = [p.entry.token for d in deltas for p in d.text_logprobs]
    hidden = set(range(261, 517)) - {toy_tokenizer.N_RANKS + toy_tokenizer.NAMES.index(n) for n in toy_tokenizer.SHOWN}
    assert shown == [token for token in whole.token_ids if token not in hidden]


def test_rules_hold(llm: LLM) -> None:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    plain = llm.generate("abc", **settings)
    assert llm.generate("abc", logit_bias={66: 100.0}, **settings).text == "BBBBBB"
    banned = llm.generate("abc", Sampling(bad_words=((plain.token_ids[0],),), temperature=0, max_tokens=6))
    assert plain.token_ids[0] not in banned.token_ids
    apart = llm.generate("abc", logit_bias={66: 100.0}, bad_words=["BB"], **settings).token_ids
    assert 66 in apart
    assert (66, 66) not in pairwise(apart)
    ends: dict[str, Any] = {"logit_bias": {IM_END: 100.0}, "temperature": 0, "max_tokens": 6}
    assert llm.generate("abc", **ends).token_ids == (IM_END,)
    late = llm.generate("abc", min_tokens=3, **ends)
    assert (len(late.token_ids), late.token_ids[-1], late.finish_reason) == (4, IM_END, "stop")
    with pytest.raises(RequestError, match="presence_penalty"):
        llm.generate("abc", presence_penalty=3.0)


def test_answers_fit_their_grammar(llm: LLM) -> None:
    """A model of random weights writes what the schema asks for, each of several answers by itself."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 20, 300]}, "b": {"enum": ["x", "zz"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    spec = GrammarSpec.of_json_schema(schema)
    outs = llm.generate([list(b"abc")] * 3, grammar=spec, temperature=1.0, max_tokens=60, logprobs=0)
    for out in outs:
        value = json.loads(out.text)
        assert value["a"] in (1, 20, 300)
        assert value["b"] in ("x", "zz")
        assert out.finish_reason == "stop"
        assert len(out.logprobs) == len(out.token_ids)
    assert llm.engine.stats().free_pages == llm.engine.stats().total_pages
    with pytest.raises(RequestError, match="response_format"):
        llm.generate("abc", grammar=GrammarSpec.of_json_schema({"type": "nothing"}))


def test_ids_without_a_token_are_refused_in_prompts(llm: LLM) -> None:
    assert llm.engine.n_tokens == 517  # the model's vocabulary is padded to 528
    with pytest.raises(RequestError, match=r"prompt: found token id 520, expected 0 \.\.\. 516"):
        llm.generate([520])


def test_a_directory_without_tokenizer_loads_for_ids_only(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in directory.iterdir():
        if file.name not in ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja"):
            (tmp_path / file.name).symlink_to(file)
    with caplog.at_level(logging.WARNING):
        llm = kimijax.load(tmp_path, engine=SIZES, dtype=jnp.float32)
    assert "token ids only" in caplog.text
    assert llm.logits([1, 2]).logits.shape == (2, 528)
    out = llm.generate([1, 2], temperature=0, max_tokens=3, ignore_eos=True)
    assert (len(out.token_ids), out.text) == (3, "")
    needs: list[tuple[Any, dict[str, Any]]] = [("text", {}), ([1], {"stop": ["."]}), ([1], {"bad_words": ["a"]})]
    for prompt, fields in needs:
        with pytest.raises(RequestError, match="no tokenizer files"):
            llm.generate(prompt, **fields)
    with pytest.raises(RequestError, match="no tokenizer files"):
        llm.generate([1, 2], grammar=GrammarSpec("json_object"))
    (tmp_path / "tiktoken.model").symlink_to(directory / "tiktoken.model")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        kimijax.load(tmp_path, engine=SIZES)
    (tmp_path / "tiktoken.model").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tiktoken\.model"):
        kimijax.load(tmp_path, engine=SIZES)
    (tmp_path / "tokenizer.json").write_text("{}")  # another format of tokenizer, as DeepSeek's checkpoints have
    assert load_tokenizer(tmp_path, llm.config) == (None, None)


def test_a_template_of_null_is_no_template(directory: Path, tmp_path: Path) -> None:
    config = json.loads((directory / "tokenizer_config.json").read_text()) | {"chat_template": None}
    (tmp_path / "tiktoken.model").symlink_to(directory / "tiktoken.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, chat = load_tokenizer(tmp_path, load_config(directory))
    assert tokenizer is not None
    assert chat is None


def test_what_cannot_be_loaded_is_refused_by_name(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(ConfigError, match="model: found"):
        kimijax.load(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="devices: found 9"):
        kimijax.load(directory, devices=9)
    with pytest.raises(ConfigError, match="context_length"):
        kimijax.load(directory, engine=EngineConfig(context_length=1 << 20))
