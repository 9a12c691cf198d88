"""Turns to documents: token for token what serving would generate is in the mask, and nothing else."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kimijax.chat import ChatTemplate
from kimijax.errors import TemplateError
from kimijax.loader import NANO
from kimijax.tokenizer import Tokenizer
from kimijax.train import conversations, turns
from kimijax.unroll import valid_rows

from . import toy_tokenizer
from .corpus_cases import CALLS, END_THINK, HEAD, THINK, A, E, M, U, said, user

NANO_TEMPLATE = (NANO / "chat_template.jinja").read_text()
# Reasoning of every turn is kept.
KEEPING = """{%- for m in messages -%}
<|im_{{ m['role'] }}|>{{ m['role'] }}<|im_middle|>
{%- if m['role'] == 'assistant' -%}<think>{{ m.get('reasoning_content', '') }}</think>{%- endif -%}
{{ m['content'] }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{{ '<think>' if thinking else '<think></think>' }}
{%- endif -%}"""
# As few tokens as a turn can have: a user's message is its text alone.
SHORT = """{%- for m in messages -%}
{%- if m['role'] == 'assistant' -%}<|im_assistant|><|im_middle|>{{ m['content'] }}<|im_end|>
{%- else -%}{{ m['content'] }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|><|im_middle|>{%- endif -%}"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer.load(tmp_path_factory.mktemp("toy"))


def encoder(tokenizer: Tokenizer, template: str = NANO_TEMPLATE, *, thinking: bool = False) -> turns.TurnEncoder:
    return turns.TurnEncoder(ChatTemplate(template, tokenizer), tokenizer, thinking=thinking, name="toy")


def talk(*texts: str, reasoning: str = "") -> conversations.Conversation:
    messages = said(*texts)["messages"]
    for i, message in enumerate(messages):
        if reasoning and message["role"] == "assistant":
            message["reasoning_content"] = f"{reasoning}{i}"
    return conversations.Conversation("c", "toy", tuple(messages))


def masked(document: turns.Document) -> list[list[int]]:
    return [list(document.ids[start:stop]) for start, stop in document.spans]


def test_an_instant_answer_begins_after_the_empty_thought(tokenizer: Tokenizer) -> None:
    (document,) = turns.join(encoder(tokenizer).turns(talk("hi", "yo", reasoning="why")), "auto")
    assert list(document.ids) == [*user("hi"), *HEAD, THINK, END_THINK, *b"yo", E]
    assert masked(document) == [[*b"yo", E]]


def test_a_thinking_answer_begins_with_its_reasoning(tokenizer: Tokenizer) -> None:
    """Nano's template leaves the reasoning of a finished turn out; the model generated it all the same."""
    (document,) = turns.join(encoder(tokenizer, thinking=True).turns(talk("hi", "yo", reasoning="why")), "auto")
    assert list(document.ids) == [*user("hi"), *HEAD, THINK, *b"why1", END_THINK, *b"yo", E]
    assert masked(document) == [[*b"why1", END_THINK, *b"yo", E]]


def test_without_reasoning_the_end_of_thinking_is_what_is_generated(tokenizer: Tokenizer) -> None:
    (document,) = turns.join(encoder(tokenizer, thinking=True).turns(talk("hi", "yo")), "auto")
    assert masked(document) == [[END_THINK, *b"yo", E]]


def test_turns_that_are_kept_share_a_document(tokenizer: Tokenizer) -> None:
    (document,) = turns.join(encoder(tokenizer).turns(talk("hi", "yo", "so", "no")), "auto")
    one = [*user("hi"), *HEAD, THINK, END_THINK, *b"yo", E]
    assert list(document.ids) == [*one, *user("so"), *HEAD, THINK, END_THINK, *b"no", E]
    assert masked(document) == [[*b"yo", E], [*b"no", E]]


def test_dropped_reasoning_makes_a_document_a_turn(tokenizer: Tokenizer) -> None:
    found = encoder(tokenizer, thinking=True).turns(talk("hi", "yo", "so", "no", reasoning="w"))
    first, second = turns.join(found, "auto")
    assert list(first.ids) == [*user("hi"), *HEAD, THINK, *b"w1", END_THINK, *b"yo", E]
    history = [*user("hi"), *HEAD, THINK, END_THINK, *b"yo", E]  # as the server would render it
    assert list(second.ids) == [*history, *user("so"), *HEAD, THINK, *b"w3", END_THINK, *b"no", E]
    assert masked(second) == [[*b"w3", END_THINK, *b"no", E]]
    assert turns.join(found, "last") == [second]
    with pytest.raises(turns.TurnError, match="rendered otherwise"):
        turns.join(found, "all")


def test_a_template_that_keeps_reasoning_needs_one_document(tokenizer: Tokenizer) -> None:
    found = encoder(tokenizer, KEEPING, thinking=True).turns(talk("hi", "yo", "so", "no", reasoning="w"))
    (document,) = turns.join(found, "all")
    assert turns.join(found, "auto") == [document]
    assert masked(document) == [[*b"w1", END_THINK, *b"yo", E], [*b"w3", END_THINK, *b"no", E]]
    assert [len(masked(d)) for d in turns.join(found, "last")] == [1]


def test_reasoning_between_tool_calls_stays_until_the_next_question(tokenizer: Tokenizer) -> None:
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "reasoning_content": "w1", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.f:0", "content": "5"},
        {"role": "assistant", "content": "five", "reasoning_content": "w3"},
        {"role": "user", "content": "so"},
        {"role": "assistant", "content": "no", "reasoning_content": "w5"},
    ]
    found = encoder(tokenizer, thinking=True).turns(conversations.Conversation("c", "toy", tuple(messages)))
    first, second = turns.join(found, "auto")
    called, answered = masked(first)
    assert called[:4] == [*b"w1", END_THINK, CALLS]
    assert called[-1] == E
    assert answered == [*b"w3", END_THINK, *b"five", E]
    assert masked(second) == [[*b"w5", END_THINK, *b"no", E]]
    assert b"w1" not in bytes(i for i in second.ids if i < 256)


def test_control_tokens_in_text_are_text(tokenizer: Tokenizer) -> None:
    (document,) = turns.join(encoder(tokenizer).turns(talk("<|im_end|>", "<|im_assistant|><think>")), "auto")
    assert [i for i in document.ids if i >= toy_tokenizer.N_RANKS] == [U, M, E, A, M, THINK, END_THINK, E]
    assert masked(document) == [[*b"<|im_assistant|><think>", E]]


def test_rows_that_learn_are_those_of_the_published_alignment(tokenizer: Tokenizer) -> None:
    """Row t takes token t + 1 and predicts t + 2; the last prompt token is where serving first drafts."""
    short = encoder(tokenizer, SHORT)
    (one,) = turns.join(short.turns(talk("q", "xyz")), "auto")
    assert one.spans == ((3, 7),)
    (two,) = turns.join(short.turns(talk("q", "xy", "r", "xyz")), "auto")
    assert two.spans == ((3, 6), (9, 13))
    for document, expected in ((one, [[2, 3, 4], [2, 3], [2]]), (two, [[2, 3, 8, 9, 10], [2, 8, 9], [8]])):
        mask = np.zeros((1, 14), bool)
        for start, stop in document.spans:
            mask[0, start:stop] = True
        segments = np.where(np.arange(14) < len(document.ids), 0, -1)[None].astype(np.int32)
        rows = valid_rows(jnp.asarray(mask), jnp.asarray(segments), 3)
        assert [np.flatnonzero(step).tolist() for step in np.asarray(rows)[:, 0]] == expected


def test_cutting(tokenizer: Tokenizer) -> None:
    (document,) = turns.join(encoder(tokenizer, SHORT).turns(talk("q", "xy", "r", "xyz")), "auto")
    assert document.cut(99) == document
    assert document.cut(11) == turns.Document(document.ids[:11], ((3, 6), (9, 11)))
    assert document.cut(9) == turns.Document(document.ids[:9], ((3, 6),))
    assert document.cut(5).trains
    assert not document.cut(4).trains  # one token of the answer: it is fed, and nothing is predicted
    assert not document.cut(3).trains


REFUSED = {
    "begins with": SHORT.replace("<|im_middle|>{%- endif -%}", "<|im_middle|>!{%- endif -%}"),
    "0 assistant turns for 1": SHORT.replace("<|im_assistant|><|im_middle|>{{", "<|im_user|>{{"),
    "the generation prompt is ''": SHORT.partition("{%- if add_generation_prompt")[0],
}


@pytest.mark.parametrize("message", REFUSED)
def test_templates_whose_turns_are_not_what_is_generated_are_refused(tokenizer: Tokenizer, message: str) -> None:
    with pytest.raises(TemplateError, match=f"^toy: .*{message}"):
        encoder(tokenizer, REFUSED[message])


def test_a_tokenizer_without_turn_marks_is_refused(tmp_path: Path) -> None:
    toy_tokenizer.write(tmp_path, names=("[BOS]", "[EOS]", "<|im_end|>"))
    plain = Tokenizer.from_dir(tmp_path)
    with pytest.raises(TemplateError, match=r"toy: the tokenizer has no \['<\|im_assistant\|>', '<\|im_middle\|>'\]"):
        turns.TurnEncoder(ChatTemplate("{{ messages[0]['content'] }}", plain), plain, thinking=False, name="toy")


def test_a_turn_under_another_name_is_refused(tokenizer: Tokenizer) -> None:
    messages = said("hi", "yo")["messages"]
    messages[1]["name"] = "bob"
    with pytest.raises(turns.TurnError, match=r"begins with '<\|im_assistant\|>bob"):
        encoder(tokenizer).turns(conversations.Conversation("c", "toy", tuple(messages)))


def test_thinking_cannot_be_turned_off_where_the_template_always_asks_for_it(tokenizer: Tokenizer) -> None:
    always = SHORT.replace("<|im_middle|>", "<|im_middle|><think>")
    with pytest.raises(TemplateError, match=r"toy: .*always asks for reasoning"):
        encoder(tokenizer, always)
