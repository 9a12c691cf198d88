"""What measured readings say about a draft: which one it was trained with, how sure that is, and what to change."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from .draft_parts import DraftParts
from .hypotheses import OTHER_FIXES, Reading, fixes
from .teacher_forced import STEPS, Forcing, Measured

NOISE = 3.0  # standard errors within which two readings are not told apart,
EFFECT = 0.02  # and the least difference in tokens a round: what costs less is not worth a change


@dataclass(frozen=True)
class Diagnosis:
    """The answer.

    Attributes:
      measured: every reading, the best first.
      trained: the reading that the draft was trained with: of those that cannot be told from the best, the one that
        differs least from the configured one. None where no reading is above chance.
      subject: the reading in question: as configured, or as assumed; None where the files have no single meaning.
      assumed: whether it is an assumption.
      configured: what rows of the table are described against.
      rivals: readings with another effect that cannot be told from `trained`.
      chance: share of first drafts that always naming the commonest token matches.
      n_rows: that readings are compared on.
      fixes: what makes the subject the trained reading.
      refusal: why the strict loader refuses the draft.
      named: readings by name, of `negative_controls`.
    """

    measured: tuple[Measured, ...]
    trained: Measured | None
    subject: Measured | None
    assumed: bool
    configured: Reading
    rivals: tuple[Measured, ...]
    chance: float
    n_rows: int
    fixes: tuple[str, ...]
    refusal: str
    named: Mapping[str, Measured] = field(default_factory=dict[str, Measured])

    @property
    def is_right(self) -> bool:
        """Whether the subject runs as the draft was trained, as far as can be told."""
        return self.trained is not None and self.subject is not None and not told_apart(self.trained, self.subject)

    @property
    def exit_code(self) -> int:
        """0: as it was trained, and loadable; 1: not."""
        return 0 if self.is_right and not self.refusal else 1

    @property
    def verdict(self) -> str:
        """In words."""
        name = "assumed" if self.assumed else "configured"
        lines = [self._chance() if self.trained is None else self._trained(self.trained, name)]
        if self.fixes:
            lines += [
                f"to run it as it was trained{' there' if self.assumed else ''}:",
                *(f"  {f}" for f in self.fixes),
            ]
        if self.refusal:
            lines += ["the loader refuses the draft as it is:", *(f"  {line}" for line in self.refusal.splitlines())]
        return "\n".join(lines)

    def _chance(self) -> str:
        best = max(m.matches[0] for m in self.measured)
        return (
            f"no reading is above chance: {best:.1%} of first drafts match at the most, and {self.chance:.1%} would by "
            "always naming the commonest token. The draft is untrained, or belongs to another target or tokenizer, or "
            "its tensors are damaged."
        )

    def _trained(self, trained: Measured, name: str) -> str:
        if self.is_right:
            first = f"the draft runs as {name}: {trained.reading.describe()}; {_figures(trained)}."
            if self.subject is not None and self.subject.reading.positions == "t+1":
                first += " A shift of all positions by one is harmless: rotary attention only sees differences."
        else:
            first = f"the draft was trained with: {trained.reading.describe()}; {_figures(trained)}."
            if self.subject is None:
                first += f"\nas {name} it has no single meaning."
            else:
                what, error = self.subject.reading.describe(trained.reading), trained.lead(self.subject)
                first += (
                    f"\nas {name} it runs with: {what}; {_figures(self.subject)}, {error:.0f} standard errors less."
                )
        if self.rivals:
            others = "; ".join(m.reading.describe(trained.reading) for m in self.rivals[:3])
            return f"{first}\ncannot tell it from: {others}."
        runner_up = next((m for m in self.measured if m is not trained and not same_effect(m, trained)), None)
        if runner_up is None:
            return first
        what, error = runner_up.reading.describe(trained.reading), trained.lead(runner_up)
        return f"{first}\nnext best: {what}; {_figures(runner_up)}, {error:.0f} standard errors less."

    def table(self, rows: int = 0) -> Table:
        """The best `rows` readings (0: all) and those that the verdict speaks of."""
        title = f"{len(self.measured)} readings over {self.n_rows} rows; chance {self.chance:.1%}"
        out = Table(title=title)
        out.add_column("reading, against the configured one")
        for header in (*(f"match {j}" for j in range(STEPS)), "length T=0", "length T=1"):
            out.add_column(header, justify="right", no_wrap=True)
        out.add_column("")
        shown = set(self.measured[: rows or None])
        hidden = 0
        for m in self.measured:
            mark = self._mark(m)
            if m not in shown and not mark:
                hidden += 1
                continue
            what = m.reading.describe(self.configured) if m.reading != self.configured else m.reading.describe()
            out.add_row(what, *(f"{x:.1%}" for x in m.matches), f"{m.greedy:.2f}", f"{m.sampled:.2f}", mark)
        if hidden:
            out.caption = f"{hidden} more readings are worse"
        return out

    def _mark(self, m: Measured) -> str:
        marks = ["trained"] if m is self.trained else []
        if m is self.subject:
            marks.append("as assumed" if self.assumed else "as configured")
        elif m.reading == self.configured:
            marks.append("as configured" if self.assumed else "likeliest reading of the files")
        if self.trained is not None and m is not self.trained and same_effect(m, self.trained):
            marks.append("harmless")
        return ", ".join(marks)

    def controls(self) -> str:
        """The table of `negative_controls`, in Markdown."""
        heads = ("draft run with", *(f"match {j}" for j in range(STEPS)), "length T=0", "length T=1")
        lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for name, m in self.named.items():
            cells = (name, *(f"{x:.1%}" for x in m.matches), f"{m.greedy:.2f}", f"{m.sampled:.2f}")
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "exit_code": self.exit_code,
            "verdict": self.verdict,
            "trained": None if self.trained is None else self.trained.to_json(),
            "assumed" if self.assumed else "configured": None if self.subject is None else self.subject.to_json(),
            "cannot_tell_from": [m.reading.to_json() for m in self.rivals],
            "fixes": list(self.fixes),
            "refusal": self.refusal,
            "chance": self.chance,
            "rows": self.n_rows,
            "measured": [m.to_json() for m in self.measured],
        }


def _figures(m: Measured) -> str:
    return f"{m.matches[0]:.1%} of first drafts match, length {m.greedy:.2f} (temperature 0), {m.sampled:.2f} (1)"


def told_apart(better: Measured, other: Measured) -> bool:
    """Whether the first is better by more than the noise, and enough to matter."""
    return better.lead(other) > NOISE and better.sampled - other.sampled > EFFECT


def same_effect(a: Measured, b: Measured) -> bool:
    """Whether two readings differ in a shift of all positions at the most."""
    return set(a.reading.differences(b.reading)) <= {"positions"} and "steps+1" not in (
        a.reading.positions,
        b.reading.positions,
    )


def indistinguishable(done: Sequence[Measured]) -> list[Measured]:
    """Of readings, the best first, those that cannot be told from the best; a shift of all positions is none."""
    candidates = [m for m in done if m.reading.positions != "t+1"]
    return [m for m in candidates if not told_apart(candidates[0], m)]


def preferred(done: Sequence[Measured], base: Reading) -> Measured:
    """Of the readings that cannot be told from the best the one that differs least from `base`, then the best."""
    return min(indistinguishable(done), key=lambda m: (len(m.reading.differences(base)), -m.sampled))


def conclude(forcing: Forcing, parts: DraftParts, *, assumed: Reading | None = None, refusal: str = "") -> Diagnosis:
    """The diagnosis of what was measured."""
    done = forcing.done
    chance, n = forcing.chance(), forcing.n_rows
    bar = chance + NOISE * (chance * (1 - chance) / n) ** 0.5
    reading = assumed or parts.configured
    subject = None if reading is None else forcing.measure(reading)
    trained: Measured | None = None
    rivals: Sequence[Measured] = ()
    advice: list[str] = []
    if max(m.matches[0] for m in done) > bar:
        trained = preferred(done, parts.base)
        rivals = [m for m in indistinguishable(done) if m is not trained]
        if subject is None or told_apart(trained, subject):
            advice = _advice(parts, trained.reading, reading, elsewhere=assumed is not None)
        if refusal and ("embed",) in parts.arrays and "embedding" in parts.available:
            advice.append(OTHER_FIXES["embedding", trained.reading.embedding])
    return Diagnosis(
        tuple(done), trained, subject, assumed is not None, parts.base, tuple(rivals), chance, n,
        tuple(dict.fromkeys(advice)), refusal,
    )  # fmt: skip


def _advice(parts: DraftParts, trained: Reading, run: Reading | None, *, elsewhere: bool) -> list[str]:
    """How to run a draft as it was trained; `elsewhere`: its files are not at fault, only how they are run."""
    fc_width = parts.config.fused_width if parts.has_fc else None
    run = run or dataclasses.replace(parts.base, taps=())
    return fixes({} if elsewhere else parts.data, trained, run, wiring=parts.wiring, fc_width=fc_width)
