"""The report of a fitted drafter: what the run was, held-out acceptance, and plots as SVG files beside it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from .draft_recipe import DraftRecipe
from .metrics import METRICS, series

REPORT, LOSS_PLOT, ACCEPTANCE_PLOT = "report.md", "loss.svg", "acceptance.svg"

type Line = Sequence[tuple[float, float]]  # points (x, y)

_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 32, 40  # room around the plotting area
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
_POINTS = 400  # of a line; more cannot be seen


def write_report(recipe: DraftRecipe, folder: Path, facts: Mapping[str, str]) -> None:
    """Write `report.md`, `loss.svg` and `acceptance.svg` from the run's `metrics.jsonl`.

    Args:
      recipe: of the run.
      folder: `fit/` of the run's folder.
      facts: further rows of the table of facts.
    """
    n = recipe.fit.ttt_steps
    losses = {"training": series(folder, "loss")}
    (folder / LOSS_PLOT).write_text(line_plot("Loss", "update", losses), encoding="utf-8")
    shares = {
        "greedy (accuracy)": _by_step(folder, "heldout/acc", n),
        "sampled (1 - TV)": _by_step(folder, "heldout/accept", n),
    }
    text = line_plot("Held-out acceptance by position", "draft token", shares, low=0.0, high=1.0)
    (folder / ACCEPTANCE_PLOT).write_text(text, encoding="utf-8")
    (folder / REPORT).write_text(markdown(recipe, folder, facts), encoding="utf-8")


def markdown(recipe: DraftRecipe, folder: Path, facts: Mapping[str, str]) -> str:
    """The report's text."""
    f, final = recipe.fit, _final(folder)
    seconds = training_seconds(folder)
    rows = {
        "recipe": recipe.name,
        **facts,
        "loss": f"{f.loss}, {f.ttt_steps} steps, decay {f.decay:g}, divided by {f.normaliser}",
        "optimiser": f"AdamW, {f.schedule}, peak {f.learning_rate:g}, clipped at {f.clip_norm:g}, {f.compute_dtype}",
        "training time": f"{seconds / 3600:.2f} h" if seconds >= 360 else f"{seconds:.0f} s",
    }
    lines = [
        "# Drafter",
        "",
        "Written by `python -m kimijax.train fit`.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
        "## Held-out documents",
        "",
        "The target's own tokens are forced: these are promises, the stage `evaluate` measures what is served.",
        "",
        "| draft token | loss | accuracy (greedy) | 1 - TV (sampled) |",
        "|---|---|---|---|",
        *(
            f"| {j + 1} | {final[f'heldout/loss/{j}']:.3f} | {final[f'heldout/acc/{j}']:.3f} "
            f"| {final[f'heldout/accept/{j}']:.3f} |"
            for j in range(f.ttt_steps)
        ),
        "",
        f"![acceptance by position]({ACCEPTANCE_PLOT})",
        "",
        "| simulated acceptance length | drafts alone | with the target's own token |",
        "|---|---|---|",
    ]
    for kind in ("greedy", "sampled"):
        prefix = f"heldout/length/{kind}_k"
        for k in sorted(int(name.removeprefix(prefix)) for name in final if name.removeprefix(prefix).isdigit()):
            bare, bonus = final[f"{prefix}{k}"], final[f"{prefix}{k}_with_bonus"]
            lines.append(f"| {kind}, chain of {k} | {bare:.3f} | {bonus:.3f} |")
    return "\n".join([*lines, "", "## Loss", "", f"![loss]({LOSS_PLOT})", ""])


def training_seconds(folder: Path) -> float:
    """Time that the run's updates took, over all sessions, evaluations between them included."""
    seconds, tokens = 0.0, 0.0
    rates = dict(series(folder, "tokens_per_second"))
    for step, total in series(folder, "tokens"):
        seconds += (total - tokens) / rates[step]
        tokens = total
    return seconds


def _final(folder: Path) -> dict[str, float]:
    """The last held-out evaluation."""
    rows = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "heldout/acc/0" in row][-1]


def _by_step(folder: Path, name: str, n: int) -> Line:
    final = _final(folder)
    return [(j + 1, final[f"{name}/{j}"]) for j in range(n)]


def line_plot(
    title: str, x_label: str, lines: Mapping[str, Line], *, low: float | None = None, high: float | None = None
) -> str:
    """An SVG drawing of lines over one pair of axes.

    Args:
      title: above it.
      x_label: below it.
      lines: points by name, at least one in all.
      low: of the y axis; None: the least y.
      high: likewise; None: the greatest.
    """
    xs = [x for line in lines.values() for x, _ in line]
    ys = [y for line in lines.values() for _, y in line]
    x0, x1 = _range(min(xs), max(xs))
    y0, y1 = _range(min(ys) if low is None else low, max(ys) if high is None else high)

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = (x - x0) / (x1 - x0), (y - y0) / (y1 - y0)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for i in range(5):
        y = y0 + (y1 - y0) * i / 4
        left, height = at(x0, y)
        out.append(f'<path d="M{left:.1f} {height:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 6:.1f}" y="{height + 4:.1f}" text-anchor="end">{y:.3g}</text>')
        x = x0 + (x1 - x0) * i / 4
        across, bottom = at(x, y0)
        out.append(f'<text x="{across:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{x:.4g}</text>')
    out.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">{escape(x_label)}</text>')
    for i, (name, line) in enumerate(lines.items()):
        colour, points = _COLOURS[i % len(_COLOURS)], line[:: -(-len(line) // _POINTS) or 1]
        path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        right = _WIDTH - _RIGHT - 8
        out.append(
            f'<text x="{right}" y="{_TOP + 14 * (i + 1)}" text-anchor="end" fill="{colour}">{escape(name)}</text>'
        )
    return "\n".join([*out, "</svg>", ""])


def _range(low: float, high: float) -> tuple[float, float]:
    """Ends of an axis that are apart."""
    return (low, high) if high > low else (low - 0.5, high + 0.5)
