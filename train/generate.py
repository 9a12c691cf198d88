"""Stage generate: the target answers every assistant turn anew, and its answers become the documents to learn from.

A drafter learns to guess what the target says, so it learns best from what the target says. Turns are answered in
order, each with the answers that came before it. What is learned from is, token for token, the prompt as it was fed and
the tokens as they were drawn; no text is encoded a second time.

The random numbers of an answer depend on `generate.seed`, its conversation and its turn, not on batch or order. So a
stage that is stopped, or killed, and run again ends with the files of a run without a stop, as far as the target's own
arithmetic does not depend on the size of a batch: in bfloat16 on a GPU it may round otherwise.
"""

import hashlib
import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimijax.engine.config import EngineConfig
from kimijax.engine.request import Request, Sampling, StepOutput
from kimijax.errors import ConfigError
from kimijax.generate import LLM
from kimijax.loading import load
from kimijax.text_stream import TextStream

from . import corpus
from .answers import Answer, AnswerFile
from .conversations import Conversation
from .document_files import (
    HELDOUT,
    PROMPTS,
    TRAIN,
    DocumentWriter,
    read_prompts,
    read_report,
    write_json_lines,
    write_report,
)
from .draft_recipe import DraftRecipe
from .draft_target import DraftTarget
from .regeneration import Regeneration
from .turns import Turn, TurnEncoder, TurnError, join

FORMAT = 1
FOLDER = "generated"
FAILED = "failed.jsonl"
_TOOL_CALL = "<|tool_calls_section_begin|>"
_REPORT_SECONDS = 10.0


def generate(recipe: DraftRecipe, out: Path, stop: Callable[[], bool]) -> bool:
    """Answer the conversations of `out/corpus` into `out/generated`; goes on where an earlier call ended.

    Args:
      recipe: what to make.
      out: the run's folder.
      stop: asked between steps of the engine; once true, what is answered is kept and the call returns.
    Returns:
      Whether all is done.
    Raises:
      ConfigError: the stage is not enabled, there is no corpus, or the folder holds other answers.
    """
    if not recipe.generate.enabled:
        raise ConfigError("generate.enabled", False, "true for this stage", "the answers in the files are used")
    target = DraftTarget.of(recipe)
    settings = _settings(target, out)
    inputs = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    folder = out / FOLDER
    with AnswerFile(folder, settings) as answers:
        if read_report(folder) is not None:
            return True
        encoder = TurnEncoder(
            target.chat, target.tokenizer, thinking=recipe.corpus.thinking, name=str(target.directory)
        )
        tool_call = target.tokenizer.special_ids.get(_TOOL_CALL)
        states = (state for c, _ in _conversations(out) if (state := Regeneration.replay(c, answers, tool_call)).open)
        first = next(states, None)
        if first is not None:
            total = sum(len(c.turns) for c, _ in _conversations(out))
            driver = _Driver(recipe, load_engine(target), encoder, answers, total)
            if not driver.run(itertools.chain((first,), states), stop):
                return False
        report = _Assembly(target, answers, tool_call, folder).run(out, inputs)
    side = report["train"]
    _say(f"generate: {side['documents']} documents, {side['tokens']} tokens, {report['failed']} turns apart, {folder}")
    return True


@dataclass
class _Asked:
    """A request in the engine."""

    state: Regeneration
    request: Request
    stream: TextStream
    text: str = ""
    reasoning: str = ""


class _Driver:
    """Keeps `generate.batch` requests in the engine until every turn has an answer."""

    def __init__(self, recipe: DraftRecipe, llm: LLM, encoder: TurnEncoder, answers: AnswerFile, total: int) -> None:
        self._recipe, self._llm, self._engine = recipe, llm, llm.engine
        self._encoder, self._answers = encoder, answers
        self._asked: dict[str, _Asked] = {}
        self._progress = _Progress(total, len(answers))

    def run(self, states: Iterator[Regeneration], stop: Callable[[], bool]) -> bool:
        """False if `stop` ended it."""
        while True:
            while len(self._asked) < self._recipe.generate.batch:
                state = next(states, None)
                if state is None:
                    break
                self._ask(state)
            if not self._asked:
                return True
            if stop():
                for request_id in self._asked:
                    self._engine.cancel(request_id)
                return False
            for output in self._engine.step():
                self._feed(output)

    def _ask(self, state: Regeneration) -> None:
        """Put a conversation's next turn into the engine, or record why it cannot be."""
        g, limit = self._recipe.generate, self._recipe.target.max_tokens
        c = state.conversation
        try:
            prompt = self._encoder.prompt(state.messages, c.tools)
        except TurnError as e:
            self._record(state, Answer(c.id, state.turn, "template", error=str(e)))
            return
        room = limit - len(prompt)
        if room < 1:
            error = f"{len(prompt)} tokens, target.max_tokens is {limit}"
            self._record(state, Answer(c.id, state.turn, "prompt", error=error))
            return
        sampling = Sampling(
            temperature=g.temperature,
            top_p=g.top_p,
            top_k=g.top_k,
            seed=answer_seed(g.seed, c.id, state.turn),
            max_tokens=min(g.max_tokens, room),
        )
        request = self._engine.make_request(prompt, sampling, id=f"{state.turn} {c.id}")
        self._engine.add(request)
        self._asked[request.id] = _Asked(state, request, self._llm.text_stream(request))

    def _feed(self, output: StepOutput) -> None:
        asked = self._asked[output.request_id]
        delta = asked.stream.feed(output)
        asked.text += delta.text
        asked.reasoning += delta.reasoning
        self._progress.tokens += len(output.tokens)
        if output.finish_reason is None:
            return
        del self._asked[output.request_id]
        state, request = asked.state, asked.request
        reason: str = output.finish_reason
        if reason == "stop" and not asked.text.strip():
            reason = "empty"
        answer = Answer(
            state.conversation.id,
            state.turn,
            reason,
            prompt=request.prompt,
            ids=tuple(request.output),
            text=asked.text,
            reasoning=asked.reasoning,
            error=output.error or "",
        )
        self._record(state, answer)
        if state.open:
            self._ask(state)

    def _record(self, state: Regeneration, answer: Answer) -> None:
        self._answers.add(answer)
        state.take(answer)
        self._progress.answers += 1 if state.open else len(state.conversation.turns) - answer.turn
        self._progress.show()


class _Progress:
    """A line on stderr now and then."""

    def __init__(self, total: int, answers: int) -> None:
        self.total, self.answers, self.tokens = total, answers, 0
        self._first = answers
        self._started = self._shown = time.monotonic()

    def show(self) -> None:
        now = time.monotonic()
        if now - self._shown < _REPORT_SECONDS and self.answers < self.total:
            return
        self._shown = now
        seconds = now - self._started
        left = (self.total - self.answers) * seconds / max(self.answers - self._first, 1)
        speed = self.tokens / max(seconds, 1e-9)
        _say(f"generate: {self.answers} of {self.total} turns, {speed:.0f} tokens/s, {left / 60:.1f} min left")


class _Assembly:
    """Writes the stage's files from the answers, in the order of the corpus."""

    def __init__(self, target: DraftTarget, answers: AnswerFile, tool_call: int | None, folder: Path) -> None:
        self._target, self._answers, self._tool_call, self._folder = target, answers, tool_call, folder
        self._reasons: dict[str, int] = {}
        self._n_good = self._prompt_tokens = self._answer_tokens = 0

    def run(self, out: Path, inputs: str) -> dict[str, Any]:
        """Returns the report. A kill in between leaves no report, and the next run writes everything again."""
        part = self._folder / ".part"
        if part.exists():
            shutil.rmtree(part)
        part.mkdir()
        size = self._target.config.vocab_size
        with (
            DocumentWriter(part, heldout=False, vocab_size=size) as train,
            DocumentWriter(part, heldout=True, vocab_size=size) as heldout,
        ):
            failed = (
                row
                for conversation, held in _conversations(out)
                for row in self._add(
                    Regeneration.replay(conversation, self._answers, self._tool_call), heldout if held else train
                )
            )
            n_failed = write_json_lines(part / FAILED, failed)
            counts = {False: train.finish(), True: heldout.finish()}
        for held, side in ((False, "training"), (True, "held-out")):
            if not counts[held].documents:
                expected = f"settings under which a {side} conversation is answered: {self._reasons}"
                raise ConfigError("generate", f"no {side} answer", expected, f"see {part / FAILED}")
        prompts = read_prompts(out / corpus.FOLDER)
        write_json_lines(part / PROMPTS, ({"id": id, "dataset": name, "ids": ids} for id, name, ids in prompts))
        report = {
            "format": FORMAT,
            "inputs": inputs,
            "turns": self._n_good + n_failed,
            "answered": self._n_good,
            "failed": n_failed,
            "reasons": dict(sorted(self._reasons.items())),
            "mean_prompt_tokens": round(self._prompt_tokens / self._n_good, 2),
            "mean_answer_tokens": round(self._answer_tokens / self._n_good, 2),
            "train": counts[False].to_json(),
            "heldout": counts[True].to_json(),
        }
        for path in sorted(part.iterdir()):
            path.replace(self._folder / path.name)
        part.rmdir()
        write_report(self._folder, report)
        return report

    def _add(self, state: Regeneration, writer: DocumentWriter) -> Iterator[dict[str, Any]]:
        """Write a conversation's documents; yields the turns that go to none of them."""
        mode = self._target.recipe.corpus.turns
        complete = len(state.good) == len(state.conversation.turns)
        good = state.good if mode != "last" or complete else []
        try:
            documents = join([Turn(a.prompt, a.ids) for a in good], mode)
        except TurnError as e:
            yield from (self._failed(state, a.turn, "turns", a, str(e)) for a in good)
            documents, good = [], []
        if documents:
            writer.conversation(state.regenerated)
        for document in documents:
            writer.document(document)
        self._n_good += len(good)
        self._prompt_tokens += sum(len(a.prompt) for a in good)
        self._answer_tokens += sum(len(a.ids) for a in good)
        for answer in state.answers:
            if not answer.good:
                yield self._failed(state, answer.turn, answer.reason, answer, answer.error)
            elif mode == "last" and not complete:
                yield self._failed(state, answer.turn, "incomplete", answer, state.unasked)
        for turn in range(state.turn, len(state.conversation.turns)):
            yield self._failed(state, turn, "not asked", None, state.unasked)

    def _failed(self, state: Regeneration, turn: int, reason: str, answer: Answer | None, error: str) -> dict[str, Any]:
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
        row: dict[str, Any] = {"id": state.conversation.id, "dataset": state.conversation.dataset, "turn": turn}
        row |= {"reason": reason, "error": error}
        if answer is not None:
            row |= {"text": answer.text, "reasoning": answer.reasoning, "tokens": len(answer.ids)}
        return row


def answer_seed(seed: int, conversation: str, turn: int) -> int:
    """The seed of one answer, below 2**63: a hash, so that no two turns draw the same numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}\n{turn}\n{conversation}".encode()).digest()[:8], "little") >> 1


def _conversations(out: Path) -> Iterator[tuple[Conversation, bool]]:
    """Each conversation of the corpus and whether it is held out, in order."""
    for name, held in ((TRAIN, False), (HELDOUT, True)):
        with (out / corpus.FOLDER / name).open("rb") as file:
            for line in file:
                yield Conversation.from_line(line), held


def _settings(target: DraftTarget, out: Path) -> dict[str, Any]:
    """What the answers depend on; batch and devices are not among it."""
    recipe, folder = target.recipe, out / corpus.FOLDER
    report = read_report(folder)
    if report is None:
        raise ConfigError(str(folder), "no finished corpus", "one", "run the stage corpus")
    if "imported" in report:
        fix = "finish the import, or use another --out"
        raise ConfigError(str(folder), f"documents imported from {report['imported']}", "conversations to answer", fix)
    g = recipe.generate
    fingerprint = json.dumps(target.contract.target.to_json(), sort_keys=True)
    return {
        "format": FORMAT,
        **{f"generate.{name}": vars(g)[name] for name in ("seed", "temperature", "top_p", "top_k", "max_tokens")},
        "target.dtype": recipe.target.dtype,
        "target.max_tokens": recipe.target.max_tokens,
        "target.fingerprint": hashlib.sha256(fingerprint.encode()).hexdigest(),
        "target.tokenizer": target.tokenizer.fingerprint,
        "corpus.inputs": report["inputs"],
    }


def engine_config(recipe: DraftRecipe, max_positions: int) -> EngineConfig:
    """An engine for the batch, whose context holds the longest document in whole pages."""
    n = recipe.target.max_tokens
    page = next(p for p in (64, 32, 16, 8, 4, 2, 1) if -(-n // p) * p <= max_positions)
    return EngineConfig(
        max_batch=recipe.generate.batch, context_length=-(-n // page) * page, page_size=page, max_queued=0
    )


def load_engine(target: DraftTarget) -> LLM:
    """The target with its engine."""
    recipe = target.recipe
    return load(
        target.directory,
        engine=engine_config(recipe, target.config.max_positions),
        dtype=recipe.target.dtype,
        devices=recipe.target.devices,
        preset=recipe.target.preset,
        progress=True,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
