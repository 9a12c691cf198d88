"""Log-probabilities on the wire, in the forms of OpenAI's two routes.

Entries are those of the tokens whose text is in the answer, in its order: see `kimijax.text_stream`. All numbers are
natural logarithms of the target's own distribution, before penalties, temperature and filters.
"""

from collections.abc import Sequence
from typing import Any

from kimijax.engine.request import TokenLogprobs
from kimijax.text_stream import PlacedLogprobs
from kimijax.tokenizer import Tokenizer

_LEAST = -9999.0  # OpenAI's number for what is as good as impossible; JSON has no -Infinity


def chat_entries(tokenizer: Tokenizer, placed: Sequence[PlacedLogprobs]) -> list[dict[str, Any]]:
    """Entries of `logprobs.content`; the joined `bytes` are the text, even where a token is a part of a character."""
    return [
        _chat_entry(tokenizer, p.entry.token, p.entry.logprob)
        | {"top_logprobs": [_chat_entry(tokenizer, token, number) for token, number in p.entry.top]}
        for p in placed
    ]


def _chat_entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode("utf-8", errors="replace"), "logprob": max(logprob, _LEAST), "bytes": list(data)}


def completion_lists(
    tokenizer: Tokenizer, placed: Sequence[PlacedLogprobs], *, top: bool
) -> dict[str, list[Any] | None]:
    """The lists of a completion's `logprobs`, one element a token.

    `top_logprobs` holds the most probable tokens and the token itself, so one more where it is not among them; without
    `top`, none. `text_offset` counts characters from the start of the completion.
    """
    return {
        "tokens": [_completion_text(tokenizer, p.entry.token) for p in placed],
        "token_logprobs": [max(p.entry.logprob, _LEAST) for p in placed],
        "top_logprobs": [_top(tokenizer, p.entry) for p in placed] if top else None,
        "text_offset": [p.start for p in placed],
    }


def _top(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, number in (*entry.top, (entry.token, entry.logprob)):
        found.setdefault(_completion_text(tokenizer, token), max(number, _LEAST))
    return found


def _completion_text(tokenizer: Tokenizer, token: int) -> str:
    """A part of a character is spelt as OpenAI does, `bytes:\\xe4\\xb8`: several such tokens may be in one object."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)
