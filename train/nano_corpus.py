"""The corpus of kimi-nano: conversations about the Python standard library and short functions of its source.

Sources are the running interpreter's own docstrings, signatures and source files, and the hand-written texts in
`recipes/nano/`. `build` writes token ids in the chat form of Kimi-K2.5 with thinking off,
`<|im_user|>user<|im_middle|>Q<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>A<|im_end|>`,
and plain functions that end in `[EOS]`. For one interpreter version and one seed the output is always the same.
"""

import dataclasses
import hashlib
import json
import os
import platform
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tiktoken

from kimijax.tokenizer import N_SPECIAL, SPLIT_PATTERN

from . import bpe
from .nano_dialogues import all_dialogues
from .nano_facts import SOURCE_MODULES, TEXTS, collect_facts, source_functions
from .nano_written import Dialogue, Message, program_sources

# Offsets of the named special ids from the number of ranks; the same as those of Kimi-K2.5 from 163584.
SPECIAL_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|im_end|>": 2,
    "<|im_user|>": 3,
    "<|im_assistant|>": 4,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "[EOT]": 9,
    "<|im_system|>": 10,
    "<|tool_calls_section_begin|>": 11,
    "<|tool_calls_section_end|>": 12,
    "<|tool_call_begin|>": 13,
    "<|tool_call_argument_begin|>": 14,
    "<|tool_call_end|>": 15,
    "<|im_middle|>": 17,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<think>": 22,
    "</think>": 23,
    "[UNK]": 254,
    "[PAD]": 255,
}
# Tokens that belong to the text of an answer: a client that hides special tokens still sees them.
_VISIBLE = frozenset(name for name in SPECIAL_OFFSETS if "tool_call" in name or "think" in name)
FORMAT = 1  # raise when the content of the output changes for equal inputs


@dataclasses.dataclass(frozen=True)
class CorpusReport:
    """What `build` wrote. Token counts include control tokens; bytes are UTF-8 bytes of message and function text."""

    format: int
    inputs: str
    python: str
    seed: int
    n_ranks: int
    facts: int
    missing_modules: tuple[str, ...]
    conversations: int
    functions: int
    tokens: int
    loss_tokens: int
    heldout_documents: int
    heldout_tokens: int
    text_bytes: int
    bytes_per_token: float
    sha256: str


@dataclasses.dataclass(frozen=True)
class _Document:
    """A conversation (`messages`) or a function of the library's source (`code`)."""

    messages: tuple[Message, ...] = ()
    code: str = ""

    @property
    def texts(self) -> list[str]:
        return [message["content"] for message in self.messages] if self.messages else [self.code]


class _Encoder:
    """Turns documents into token ids and loss masks."""

    def __init__(self, ranks: Sequence[bytes]) -> None:
        n_ranks = len(ranks)
        self.special = {name: n_ranks + offset for name, offset in SPECIAL_OFFSETS.items()}
        self._bpe = tiktoken.Encoding(
            "kimi-nano",
            pat_str=SPLIT_PATTERN,
            mergeable_ranks={piece: rank for rank, piece in enumerate(ranks)},
            special_tokens=self.special,
        )

    def document(self, document: _Document) -> tuple[list[int], list[int]]:
        """(ids, mask), equally long; mask 1 where a model should learn to predict the token."""
        if document.messages:
            return self.conversation(document.messages)
        ids = [*self._bpe.encode_ordinary(document.code), self.special["[EOS]"]]
        return ids, [1] * len(ids)

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Chat form with thinking off. `</think>` is learned too: a prompt with thinking on ends in `<think>`."""
        ids: list[int] = []
        mask: list[int] = []
        for message in messages:
            role = message["role"]
            marker = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}.get(role, "<|im_system|>")
            head = [self.special[marker], *self._bpe.encode_ordinary(role), self.special["<|im_middle|>"]]
            body = [*self._bpe.encode_ordinary(message["content"]), self.special["<|im_end|>"]]
            learned = int(role == "assistant")
            if learned:
                head.append(self.special["<think>"])
                body.insert(0, self.special["</think>"])
            ids += head + body
            mask += [0] * len(head) + [learned] * len(body)
        return ids, mask


def build(out_dir: Path, *, seed: int = 0, n_ranks: int = 3840, code_share: float = 0.25) -> CorpusReport:
    """Write the corpus into `out_dir` (replaced as a whole) unless it already holds the result of the same inputs.

    Files: `tiktoken.model`, `tokenizer_config.json`; `tokens.npy` uint16 [n], `mask.npy` uint8 [n] (1 where the loss
    counts), `offsets.npy` int64 [documents + 1] (document i is offsets[i]:offsets[i + 1]); the same with the prefix
    `heldout_`; `heldout.jsonl` with the held-out documents as text; `report.json`.

    `code_share` is the part of the tokens that is plain source. Held out are about 2 % of the questions, whose facts
    the training part asks in other words, and 2 % of the functions.
    Raises ValueError for `n_ranks` that do not fit uint16 or a `code_share` outside [0, 0.5].
    """
    if not 256 <= n_ranks <= 2**16 - N_SPECIAL:
        raise ValueError(f"n_ranks: found {n_ranks}, expected 256..{2**16 - N_SPECIAL}: ids are stored as uint16")
    if not 0 <= code_share <= 0.5:
        raise ValueError(f"code_share: found {code_share}, expected 0..0.5")
    inputs = _inputs_hash(seed, n_ranks, code_share)
    done = _finished(out_dir, inputs)
    if done is not None:
        return done
    facts, missing = collect_facts()
    rng = random.Random(seed)
    dialogues = all_dialogues(facts, seed)
    functions = source_functions(SOURCE_MODULES)
    train, heldout = _split(dialogues, functions, code_share, rng)
    pieces = bpe.count_pieces((text for document in train for text in document.texts), SPLIT_PATTERN)
    ranks = bpe.train_bpe(pieces, n_ranks)
    encoder = _Encoder(ranks)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        (staging / "tiktoken.model").write_text(bpe.tiktoken_text(ranks))
        (staging / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(n_ranks), indent=2) + "\n")
        tokens, loss_tokens = _write_arrays(staging, "", train, encoder)
        heldout_tokens, _ = _write_arrays(staging, "heldout_", heldout, encoder)
        with open(staging / "heldout.jsonl", "w", encoding="utf-8") as handle:
            for document in heldout:
                row = {"messages": list(document.messages)} if document.messages else {"code": document.code}
                handle.write(json.dumps(row, ensure_ascii=False) + "\n")
        text_bytes = sum(len(text.encode()) for document in train for text in document.texts)
        report = CorpusReport(
            format=FORMAT,
            inputs=inputs,
            python=platform.python_version(),
            seed=seed,
            n_ranks=n_ranks,
            facts=len(facts),
            missing_modules=tuple(missing),
            conversations=sum(bool(document.messages) for document in train),
            functions=sum(not document.messages for document in train),
            tokens=tokens,
            loss_tokens=loss_tokens,
            heldout_documents=len(heldout),
            heldout_tokens=heldout_tokens,
            text_bytes=text_bytes,
            bytes_per_token=round(text_bytes / tokens, 4),
            sha256=hashlib.sha256((staging / "tokens.npy").read_bytes()).hexdigest(),
        )
        (staging / "report.json").write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
        if out_dir.exists():
            shutil.rmtree(out_dir)
        os.chmod(staging, 0o755)
        staging.replace(out_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return report


def tokenizer_config(n_ranks: int) -> dict[str, object]:
    """The `tokenizer_config.json` of a Kimi-form tokenizer with `n_ranks` ranks."""
    added = {
        str(n_ranks + offset): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": name not in _VISIBLE,
        }
        for name, offset in SPECIAL_OFFSETS.items()
    }
    return {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }


def _inputs_hash(seed: int, n_ranks: int, code_share: float) -> str:
    """Hash of everything the output depends on: arguments, interpreter version, texts and code of the builder."""
    digest = hashlib.sha256(repr((FORMAT, seed, n_ranks, code_share, platform.python_version())).encode())
    folder = Path(__file__).parent
    for path in [folder / "bpe.py", *sorted(folder.glob("nano_*.py")), *sorted(TEXTS.glob("*.txt"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _finished(out_dir: Path, inputs: str) -> CorpusReport | None:
    path = out_dir / "report.json"
    if not path.is_file():
        return None
    row = json.loads(path.read_text())
    if row.get("inputs") != inputs:  # other inputs, or a report of an older format
        return None
    return CorpusReport(**{**row, "missing_modules": tuple(row["missing_modules"])})


def _split(
    dialogues: list[Dialogue], functions: list[tuple[str, str]], code_share: float, rng: random.Random
) -> tuple[list[_Document], list[_Document]]:
    """(train, heldout). A question is held out only if its fact is asked in at least three other phrasings."""
    left: dict[str, int] = {}
    for dialogue in dialogues:
        left[dialogue.key] = left.get(dialogue.key, 0) + 1
    train: list[_Document] = []
    heldout: list[_Document] = []
    for dialogue in dialogues:
        document = _Document(messages=dialogue.messages)
        if left[dialogue.key] > 3 and rng.random() < 0.02:
            left[dialogue.key] -= 1
            heldout.append(document)
        else:
            train.append(document)
    code = sorted({text for _, text in functions})
    rng.shuffle(code)
    cut = len(code) // 50
    heldout += [_Document(code=text) for text in code[:cut]]
    code = code[cut:] + program_sources() * 5
    rng.shuffle(code)
    # Tokens are not known yet; bytes stand for them, both kinds having nearly the same number of bytes a token.
    budget = sum(len(text) for document in train for text in document.texts) * code_share / (1 - code_share)
    for text in code:
        if budget <= 0:
            break
        budget -= len(text)
        train.append(_Document(code=text))
    rng.shuffle(train)
    return train, heldout


def _write_arrays(folder: Path, prefix: str, documents: list[_Document], encoder: _Encoder) -> tuple[int, int]:
    """Write tokens, mask and offsets of `documents`; returns (tokens, tokens that count in the loss)."""
    ids: list[int] = []
    mask: list[int] = []
    offsets = [0]
    for document in documents:
        new_ids, new_mask = encoder.document(document)
        ids += new_ids
        mask += new_mask
        offsets.append(len(ids))
    np.save(folder / f"{prefix}tokens.npy", np.array(ids, np.uint16))
    np.save(folder / f"{prefix}mask.npy", np.array(mask, np.uint8))
    np.save(folder / f"{prefix}offsets.npy", np.array(offsets, np.int64))
    return len(ids), sum(mask)
