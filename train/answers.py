"""The answers of stage generate as they come in: one JSON line each, appended, on the disk every few seconds.

After any end of the process, kill -9 included, the file holds whole lines and at most one torn one, which is cut off.
Beside it lies what the answers were made with; other settings are refused, so that no two of them mix.
"""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimijax.errors import ConfigError
from kimijax.safetensors_io import sync_directory

from .turns import Ids

ANSWERS, SETTINGS = "answers.jsonl", "answers.json"
_SYNC_SECONDS = 5.0


@dataclass(frozen=True)
class Answer:
    """What became of one turn.

    Attributes:
      id: of the conversation.
      turn: 0 for its first assistant turn.
      reason: stop: the model ended its answer. Else why there is none: length, it was cut; empty, it says nothing;
        abort, the engine gave it up; prompt, there is no room for it; template, the prompt cannot be rendered.
      prompt: token ids that were answered.
      ids: token ids drawn, the end mark included.
      text, reasoning: what they say.
      error: more about the reason.
    """

    id: str
    turn: int
    reason: str
    prompt: Ids = ()
    ids: Ids = ()
    text: str = ""
    reasoning: str = ""
    error: str = ""

    @property
    def good(self) -> bool:
        return self.reason == "stop"

    def to_line(self) -> bytes:
        return json.dumps(vars(self), ensure_ascii=False).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> "Answer":
        row = json.loads(line)
        return Answer(**{**row, "prompt": tuple(row["prompt"]), "ids": tuple(row["ids"])})


class AnswerFile:
    """Answers by conversation and turn, in a file that only grows. Use as a context manager."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Open the answers of a folder, or begin.

        Args:
          folder: made if it is not there.
          settings: what an answer depends on, as JSON data.
        Raises:
          ConfigError: the answers there were made with other settings, another process is writing them, or the file
            is damaged elsewhere than at its end.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / ANSWERS
        self._file = self._path.open("a+b")
        try:
            self._lock()
            self._check_settings(folder / SETTINGS, dict(settings))
            self._at = self._index()
        except BaseException:
            self._file.close()
            raise
        self._synced = time.monotonic()

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, *exception: object) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def __len__(self) -> int:
        return len(self._at)

    def get(self, id: str, turn: int) -> Answer | None:
        """The answer of a turn, if it has one."""
        at = self._at.get((id, turn))
        if at is None:
            return None
        self._file.seek(at)
        return Answer.from_line(self._file.readline())

    def add(self, answer: Answer) -> None:
        """Append an answer. ValueError: the turn has one."""
        key = (answer.id, answer.turn)
        if key in self._at:
            raise ValueError(f"{answer.id}, turn {answer.turn}: has an answer already")
        self._at[key] = self._file.seek(0, os.SEEK_END)
        self._file.write(answer.to_line())
        self._file.flush()
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise ConfigError(str(self._path), "in use by another process", "no other one", "wait, or stop it") from e

    def _check_settings(self, path: Path, settings: dict[str, Any]) -> None:
        if path.is_file():
            try:
                old: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as e:
                raise ConfigError(str(path), str(e), "the settings of the answers", "remove the folder") from e
            for name in sorted(old.keys() | settings.keys()):
                if old.get(name) != settings.get(name):
                    expected = f"{old.get(name)!r}, with which the answers of {path.parent} were begun"
                    raise ConfigError(name, settings.get(name), expected, "remove that folder, or use another --out")
            return
        if self._file.seek(0, os.SEEK_END):
            raise ConfigError(str(path), "no such file", f"what {self._path.name} was made with", "remove the folder")
        part = path.with_name(f".{path.name}.part")
        with part.open("w", encoding="utf-8") as file:
            file.write(json.dumps(settings, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_directory(path.parent)

    def _index(self) -> dict[tuple[str, int], int]:
        """Where each answer begins; what a killed process left of a line is cut off."""
        found: dict[tuple[str, int], int] = {}
        self._file.seek(0)
        at = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                self._file.truncate(at)
                break
            try:
                row = json.loads(line)
                key = (row["id"], row["turn"])
            except (ValueError, TypeError, KeyError) as e:
                raise ConfigError(f"{self._path}, line {number}", str(e), "an answer", "remove the folder") from e
            if key in found:
                raise ConfigError(f"{self._path}, line {number}", key, "one answer a turn", "remove the folder")
            found[key] = at
            at += len(line)
        return found
