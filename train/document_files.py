"""The files that hand documents from one stage to the next: written in pieces, never held in memory as a whole.

A folder of documents has `tokens.npy`, `mask.npy`, `offsets.npy` (see `packing.Documents`), the same with the prefix
`heldout_`, `conversations.jsonl`, `heldout.jsonl`, `prompts.jsonl` and `report.json`, which is written last.
"""

import json
import os
import shutil
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from kimijax.errors import ConfigError
from kimijax.safetensors_io import sync_directory

from .conversations import Conversation
from .draft_recipe import DraftRecipe
from .turns import Document, Ids

REPORT = "report.json"
TRAIN, HELDOUT = "conversations.jsonl", "heldout.jsonl"
PROMPTS = "prompts.jsonl"


@dataclass(frozen=True)
class Counts:
    """What a side, training or held-out, holds."""

    conversations: int
    documents: int
    tokens: int
    loss_tokens: int

    @property
    def loss_share(self) -> float:
        return round(self.loss_tokens / max(self.tokens, 1), 4)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "loss_share": self.loss_share}


class DocumentWriter:
    """Writes the documents and conversations of one side, training or held-out; use as a context manager."""

    def __init__(self, folder: Path, *, heldout: bool, vocab_size: int) -> None:
        """
        Args:
          folder: exists.
          heldout: which side.
          vocab_size: of the target; tokens are stored as uint16 where they fit, else as int32.
        """
        self._folder = folder
        self._prefix = "heldout_" if heldout else ""
        self._dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.int32)
        self._conversations = (folder / (HELDOUT if heldout else TRAIN)).open("w", encoding="utf-8")
        self._tokens = (folder / f".{self._prefix}tokens").open("w+b")
        self._mask = (folder / f".{self._prefix}mask").open("w+b")
        self._offsets = array("q", [0])
        self._n_conversations = self._loss_tokens = 0

    def __enter__(self) -> "DocumentWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        for file in (self._conversations, self._tokens, self._mask):
            file.close()

    def conversation(self, conversation: Conversation) -> None:
        self._conversations.write(conversation.to_line())
        self._n_conversations += 1

    def document(self, document: Document) -> None:
        mask = np.zeros(len(document.ids), np.uint8)
        for start, stop in document.spans:
            mask[start:stop] = 1
        self._tokens.write(np.asarray(document.ids, self._dtype).tobytes())
        self._mask.write(mask.tobytes())
        self._offsets.append(self._offsets[-1] + len(mask))
        self._loss_tokens += int(mask.sum())

    def finish(self) -> Counts:
        """Writes the arrays and says what is in them."""
        _synced(self._conversations)
        self._array("tokens", self._tokens, self._dtype)
        self._array("mask", self._mask, np.dtype(np.uint8))
        with (self._folder / f"{self._prefix}offsets.npy").open("wb") as file:
            np.save(file, np.frombuffer(self._offsets, np.int64))
            _synced(file)
        return Counts(self._n_conversations, len(self._offsets) - 1, self._offsets[-1], self._loss_tokens)

    def _array(self, name: str, raw: Any, dtype: np.dtype[Any]) -> None:
        """Gives the raw values the header of a .npy file, which needs to know how many there are."""
        header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (self._offsets[-1],)}
        raw.seek(0)
        with (self._folder / f"{self._prefix}{name}.npy").open("wb") as file:
            npy.write_array_header_1_0(file, header)
            shutil.copyfileobj(raw, file, 1 << 20)
            _synced(file)
        raw.close()
        Path(raw.name).unlink()


def write_json_lines(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    """Writes one object a line; returns how many."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
        _synced(file)
    return count


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Writes `report.json`, after which the folder counts as finished."""
    part = folder / f".{REPORT}.part"
    with part.open("w", encoding="utf-8") as file:
        file.write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        _synced(file)
    sync_directory(folder)
    part.replace(folder / REPORT)
    sync_directory(folder)


def read_report(folder: Path) -> dict[str, Any] | None:
    """The report of a finished folder; None where it is not finished. ConfigError: it is no JSON object."""
    path = folder / REPORT
    if not path.is_file():
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ConfigError(str(path), str(e), "valid JSON", "remove the folder and run its stage again") from e
    if not isinstance(report, dict):
        raise ConfigError(str(path), report, "a JSON object", "remove the folder and run its stage again")
    return report


def read_prompts(folder: Path) -> Iterator[tuple[str, str, list[int]]]:
    """(id, dataset, token ids) of each held-out prompt."""
    with (folder / PROMPTS).open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            yield row["id"], row["dataset"], row["ids"]


def prompt_row(conversation: Conversation, ids: Ids) -> dict[str, Any]:
    """A line of `prompts.jsonl`."""
    return {"id": conversation.id, "dataset": conversation.dataset, "ids": list(ids)}


def documents_folder(recipe: DraftRecipe, out: Path) -> Path:
    """Where the run's documents are: `generated/` if the target answers anew, else, or if imported, in `corpus/`.

    Raises:
      ConfigError: the stage that makes them has not finished.
    """
    report = read_report(out / "corpus")
    if report is not None and "imported" in report:
        return out / "corpus"  # with its states: there is nothing to answer anew
    name = "generated" if recipe.generate.enabled else "corpus"
    if read_report(out / name) is None:
        fix = "run the stage " + ("corpus" if report is None else "generate")
        raise ConfigError(str(out / name), "no finished documents", f"a {REPORT}", fix)
    return out / name


def _synced(file: Any) -> None:
    """Closes a file once it is on the disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
