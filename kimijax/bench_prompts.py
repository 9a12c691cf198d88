"""What `python -m kimijax.bench` asks: random ids, a draft's own probe, or prompts from a file.

Drafters are good at text like what they were trained on and at nothing else, so a figure of speculation says little
without the prompts that it is of. Random ids are the worst case, and prompts that the drafter was not trained on, in
the target's chat form, are what a server gets.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .bench_runs import Work
from .chat import ChatTemplate
from .errors import ConfigError
from .probe import Probe

FIRST_ID = 16  # the ids below are special in many vocabularies
RANDOM, HELD_OUT = "random", "held-out"


@dataclass(frozen=True)
class Prompts:
    """What a benchmark asks, in this order, from the start again where more is needed.

    Attributes:
      name: of the source, for the report.
      ids: token ids of each.
      is_text: whether answers have an end; behind it nothing is text, and random ids have none.
    """

    name: str
    ids: tuple[tuple[int, ...], ...]
    is_text: bool

    def first(self, n: int) -> list[tuple[int, ...]]:
        return [self.ids[i % len(self.ids)] for i in range(n)]

    @property
    def longest(self) -> int:
        return max(map(len, self.ids))


@dataclass(frozen=True)
class Workload:
    """What is run: `runs` counted runs of up to `gen_len` output tokens a prompt for each batch size.

    Attributes:
      prompt_len: of random prompts.
      requests: of each run; None: `batch` random ones, or all prompts of a text, `batch` at least.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    prompt_len: int = 512
    gen_len: int = 128
    runs: int = 5
    requests: int | None = None
    temperature: float = 0.0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for batch in self.batches:
            if batch < 1:
                raise ConfigError("batch", batch, "positive integers, separated by commas")
            if self.requests is not None and self.requests < batch:
                raise ConfigError("requests", self.requests, f"at least the batch size ({batch})")
        if self.prompt_len < 1:
            raise ConfigError("prompt_len", self.prompt_len, "a positive integer")
        if self.gen_len < 2:
            raise ConfigError("gen_len", self.gen_len, "2 or more")
        if self.runs < 1:
            raise ConfigError("runs", self.runs, "a positive integer")
        if not 0 <= self.temperature <= 100:
            raise ConfigError("temperature", self.temperature, "a number from 0 (greedy) to 100")

    def of_batch(self, batch: int, prompts: Prompts) -> Work:
        """One run at this batch size."""
        n = self.requests or (max(batch, len(prompts.ids)) if prompts.is_text else batch)
        ignore_eos = self.ignore_eos or not prompts.is_text
        return Work(prompts.first(n), batch, self.gen_len, self.temperature, ignore_eos)


def random_prompts(vocab_size: int, batch: int, length: int, seed: int = 0) -> list[list[int]]:
    """Ids FIRST_ID ... vocab_size - 1 from NumPy's default generator, [batch, length]: the same for every program that
    draws them so, whatever it is written in. Raises ConfigError for a vocabulary without such ids."""
    if vocab_size <= FIRST_ID:
        raise ConfigError("vocab_size", vocab_size, f"more than {FIRST_ID}: prompts are drawn from the ids above")
    return np.random.default_rng(seed).integers(FIRST_ID, vocab_size, size=(batch, length)).tolist()


def probe_prompts(probe: Probe | None) -> Prompts:
    """The first half of each of the probe's sequences, which are held-out text. ConfigError: there is no probe."""
    if probe is None:
        fix = "name a file of prompts (--prompts), or measure with --data random"
        raise ConfigError("data", HELD_OUT, "a draft with a probe, whose text is held out", fix)
    return Prompts("the draft's probe", tuple(s.ids[: len(s.ids) // 2] for s in probe.sequences), is_text=True)


def read_prompts(path: Path, chat: ChatTemplate | None, vocab_size: int) -> Prompts:
    """A file of prompts: a JSON list of lists of ids; or JSON lines, each a list of ids, {"ids": [...]}, or
    {"messages": [...]} in OpenAI's form, whose last answer is left out.

    Args:
      path: the file.
      chat: the target's template; None: it has none, and there can be no messages.
      vocab_size: ids are below it.
    Raises:
      ConfigError: no such file, or an entry that is none of these, by its number.
      RequestError: messages that are none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError("prompts", str(path), f"a file of prompts ({e.strerror})") from e
    entries = _entries(path, text)
    prompts = [_prompt(entry, f"{path}, prompt {i + 1}", chat, vocab_size) for i, entry in enumerate(entries)]
    if not prompts:
        raise ConfigError("prompts", str(path), "at least one prompt")
    return Prompts(str(path), tuple(prompts), is_text=True)


def _entries(path: Path, text: str) -> list[Any]:
    try:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        data = json.loads(text)
    except ValueError as e:
        raise ConfigError("prompts", str(path), f"JSON, or JSON lines in a file named *.jsonl ({e})") from e
    if not isinstance(data, list):
        raise ConfigError("prompts", f"{path}: {type(data).__name__}", "a list of lists of token ids")
    return data


def _prompt(entry: Any, where: str, chat: ChatTemplate | None, vocab_size: int) -> tuple[int, ...]:
    if isinstance(entry, dict) and entry.keys() >= {"messages"}:
        return _rendered(entry["messages"], where, chat)
    ids: Any = entry.get("ids") if isinstance(entry, dict) else entry
    if not isinstance(ids, list) or not ids or not all(type(t) is int and 0 <= t < vocab_size for t in ids):
        found = json.dumps(entry)
        expected = f"a list of token ids from 0 to {vocab_size - 1}, or an object with `ids` or `messages`"
        raise ConfigError(where, found if len(found) < 80 else f"{found[:80]}...", expected)
    return tuple(ids)


def _rendered(messages: Sequence[Any], where: str, chat: ChatTemplate | None) -> tuple[int, ...]:
    if chat is None:
        raise ConfigError(where, "messages", "token ids: the model has no tokenizer with a chat template")
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        last: dict[str, Any] = messages[-1]
        messages = messages[:-1] if last.get("role") == "assistant" else messages
    return chat.encode(messages).ids
