"""The embedded model: its files are those of a Kimi-K2.5, and its answers are about Python."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import kimijax
from kimijax import checkpoint
from kimijax.acceptance import Acceptance
from kimijax.config import Int4Config, load_config, read_json
from kimijax.draft_checkpoint import load_draft
from kimijax.draft_record import resolve_draft
from kimijax.drafter import Drafter
from kimijax.fingerprint import fingerprint_target
from kimijax.loader import NANO, NANO_DRAFTER, load_tokenizer
from kimijax.model import Target
from kimijax.probe import PROBE_FILE, Probe, check, replay
from kimijax.sampling import SamplingRows
from kimijax.speculator import Speculator

ROOT = Path(__file__).resolve().parents[1]
SIZE_LIMIT = 20e6  # bytes that the repository spends on embedded models


def test_files_are_those_of_a_kimi_k25() -> None:
    config = load_config(NANO)
    assert (config.model_type, config.text_type) == ("kimi_k25", "kimi_k2")
    assert config.q_lora_rank is not None
    assert config.yarn is not None
    assert config.moe is not None
    assert config.moe.scoring == "sigmoid"
    assert config.n_dense_layers == 1
    assert config.quantization == Int4Config(32)
    index = checkpoint.inspect(NANO)
    assert index.prefix == "language_model."
    kinds = {name.removesuffix(".weight_packed") for name in index.tensors if name.endswith(".weight_packed")}
    experts = config.moe.n_experts * 3 * (config.n_layers - config.n_dense_layers)
    assert len(kinds) == experts
    assert all(".mlp.experts." in name for name in kinds)
    plain = {t.dtype for n, t in index.tensors.items() if n.endswith((".weight", ".weight_scale"))}
    assert plain == {"BF16"}
    nested = json.loads((NANO / "config.json").read_text())["text_config"]["quantization_config"]
    assert nested["format"] == "pack-quantized"
    assert sum(f.stat().st_size for f in NANO.rglob("*") if f.is_file()) < SIZE_LIMIT


QUESTIONS = {
    "What does os.path.join do?": ("os.path.join", "join"),
    "How do I use itertools.chain?": ("itertools.chain",),
    "What is the json module for?": ("json",),
    "What does len do?": ("len",),
    "What is a list comprehension?": ("[", "for"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_answers_name_what_was_asked_for(nano: kimijax.LLM, question: str) -> None:
    out = nano.generate([{"role": "user", "content": question}], temperature=0, max_tokens=150)
    assert out.finish_reason == "stop", out.text
    assert not [word for word in QUESTIONS[question] if word not in out.text], out.text
    assert "�" not in out.text


def test_plain_code_is_completed(nano: kimijax.LLM) -> None:
    out = nano.generate("def fibonacci(n):\n", temperature=0, max_tokens=60)
    assert "return" in out.text or "yield" in out.text


def test_batch_seeds_and_streams_agree(nano: kimijax.LLM) -> None:
    """A mixed batch: greedy and seeded, text and chat; each as it is alone, streamed or not; nothing is compiled."""
    compiled = nano.engine.n_compiled()
    chats = [[{"role": "user", "content": q}] for q in QUESTIONS]
    together = nano.generate(chats, temperature=0, max_tokens=40)
    for chat, out in zip(chats, together, strict=True):
        assert "".join(d.text for d in nano.stream(chat, temperature=0, max_tokens=40)) == out.text
    seeded = [nano.generate(chats[0], temperature=1.0, seed=3, max_tokens=40).token_ids for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert nano.engine.n_compiled() == compiled
    nano.engine.check_integrity()
    assert nano.engine.stats().free_pages == nano.engine.stats().total_pages


@pytest.mark.slow
def test_eight_devices_give_the_same_text(nano: kimijax.LLM) -> None:
    sizes = kimijax.EngineConfig(max_batch=1, context_length=256, chunk_size=64, burst=4)
    split = kimijax.load("nano", engine=sizes, devices=8)
    assert len(jax.devices()) == 8
    for question in list(QUESTIONS)[:2]:
        chat = [{"role": "user", "content": question}]
        right = nano.generate(chat, temperature=0, max_tokens=30).token_ids
        assert split.generate(chat, temperature=0, max_tokens=30).token_ids == right


@functools.cache
def with_drafter() -> tuple[Target, Drafter]:
    """Nano and its drafter, as a server would put them together."""
    config = load_config(NANO)
    tokenizer, _ = load_tokenizer(NANO, config)
    assert tokenizer is not None
    found = resolve_draft(NANO_DRAFTER, fingerprint_target(NANO, config), tokenizer.fingerprint, algorithm="EAGLE3")
    assert found.record is not None
    assert (found.config.is_reduced, found.config.is_mla) == (True, False)
    target = checkpoint.load(NANO, config, dtype=jnp.float32, unpack_int4=True)
    return target, load_draft(NANO_DRAFTER, found.wiring, target, dtype=jnp.float32)


def test_the_drafter_replays_its_probe() -> None:
    target, drafter = with_drafter()
    probe = Probe.from_json(read_json(NANO_DRAFTER / PROBE_FILE))
    check(replay(probe, target, drafter))
    assert probe.acceptance is not None
    assert probe.acceptance.draft_tokens == 3


def test_drafts_are_accepted_on_held_out_prompts() -> None:
    """Questions that the drafter was not trained on: a chain of three makes 2.8 tokens a round, and changes none."""
    target, drafter = with_drafter()
    config = load_config(NANO)
    tokenizer, _ = load_tokenizer(NANO, config)
    assert tokenizer is not None
    prompts = json.loads((ROOT / "tests" / "fixtures" / "nano_prompts.json").read_text())
    made = Speculator(
        target,
        drafter,
        n_tokens=tokenizer.vocab_size,
        stop_ids=sorted(tokenizer.stop_ids),
        batch=len(prompts),
        context_length=128,
        chunk=64,
    )
    n = len(prompts)
    rows = SamplingRows.of([0.0] * n, [0] * n, [1.0] * n, [0.0] * n, [0] * n)
    drafted = made.generate(prompts, rows, [60] * n, k=3)
    plain = made.generate(prompts, rows, [60] * n, k=0)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert sum((g.acceptance for g in drafted), Acceptance()).length >= 2.8
