"""The cells of results.json as text of at most 80 columns and as Markdown. Pure functions.

Terms: a cell is a scenario on a step table with a scheduler and a number of requests in flight.
"""

import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from eval.reports.table import aligned, markdown_table, number
from eval.serving_study.scenarios import HINDSIGHT, LOGISTIC, ONLINE, ORACLE, RAW, SLOTS, STS
from eval.serving_study.simulate import DEARER, MEASURED, Cell

SHORT = {RAW: "raw", STS: "STS", ONLINE: "online", LOGISTIC: "logistic", SLOTS: "slots", HINDSIGHT: "hindsight",
         ORACLE: "oracle"}  # fmt: skip
ALGORITHMS = {"synchronous": "Algorithm 1", "asynchronous": "asynchronous"}
_BRIEF = {"synchronous": "Alg.1", "asynchronous": "async"}
LEGEND = """\
SIMULATED on recorded traces, n requests in flight. raw: tokens/s; gains over it
in %, ± half of the 95 % interval over batches of answers. online: STS refitted
to the rounds served so far; slots: mean acceptance of each slot; hindsight: STS
fitted to the served answers themselves; oracle: a search over what will be
accepted, the same for both schedulers"""


def estimators(cells: Sequence[Cell]) -> list[str]:
    """Of any of the cells, in a fixed order."""
    return [name for name in SHORT if any(name in cell["estimators"] for cell in cells)]


def gains(cells: Sequence[Cell]) -> str:
    """A table for each scenario: a line for each step table, scheduler and number of requests."""
    return "\n\n".join(f"{_title(group[0])}\n{aligned(*_gains(group))}" for group in _groups(cells))


def _gains(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    names = estimators(cells)
    lines = [
        [
            f"{'dear' if cell['steps'] == DEARER else 'measured'} {_BRIEF[cell['scheduler']]} {cell['concurrency']}",
            *[_gain(cell["estimators"].get(name)) for name in names],
        ]
        for cell in cells
    ]
    return ["steps, scheduler, n", *[SHORT[name] for name in names]], lines


def _gain(measured: Mapping[str, Any] | None) -> str:
    if measured is None:
        return number(None, "")
    if "gain" not in measured:
        return f"{measured['throughput']:.0f}"
    gain = measured["gain"]
    return f"{100 * gain['mean']:+.1f}±{50 * (gain['high'] - gain['low']):.1f}"


def waste(cells: Sequence[Cell]) -> str:
    """Drafts verified per request and step, and the share of them that was rejected, in %."""
    names = estimators(cells)
    lines = []
    for cell in cells:
        values = [cell["estimators"].get(name) for name in names]
        lines.append([_where(cell), *["–" if v is None else _waste(v) for v in values]])
    return aligned(["drafts sent, rejected %", *[SHORT[name] for name in names]], lines)


def _waste(measured: Mapping[str, Any]) -> str:
    share = measured["waste"]
    return f"{measured['budget']:.2f} {number(None if share is None else 100 * share, '.0f')}"


def calibration(cells: Sequence[Cell]) -> str:
    """ECE in % and Brier score of each estimator."""
    names = [name for name in estimators(cells) if name != ORACLE]
    lines = []
    for cell in cells:
        values = [cell["estimators"].get(name) for name in names]
        lines.append(
            [
                _where(cell),
                *["–" if v is None or v["ece"] is None else f"{100 * v['ece']:.1f} {v['brier']:.3f}" for v in values],
            ]
        )
    return aligned(["ECE %, Brier score", *[SHORT[name] for name in names]], lines)


def _where(cell: Cell) -> str:
    return f"T={cell['temperature']:g} {cell['scenario']}"


def _title(cell: Cell) -> str:
    return f"T = {cell['temperature']:g}, {cell['scenario']}"


def at(cells: Sequence[Cell], *, focus: int, scheduler: str) -> list[Cell]:
    """One cell of each scenario: on the measured steps, at `focus` requests."""
    return [c for c in cells if (c["steps"], c["concurrency"], c["scheduler"]) == (MEASURED, focus, scheduler)]


def verdict(cells: Sequence[Cell]) -> str:
    """Of each estimator: in how many cells its interval lies above or below the raw head, its gains, and the share of
    the oracle's gain that it reaches in the median cell where the oracle gains anything."""
    return aligned(*_verdict(cells))


def _verdict(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    lines = []
    for title, distorted in (("as trained", False), ("distorted", True)):
        chosen = [c["estimators"] for c in cells if (c["kind"] == "distorted") == distorted]
        for name in SHORT:
            if measured := [one[name] for one in chosen if "gain" in one.get(name, {})]:
                lines.append([f"{title}, {SHORT[name]}", *_summary(measured)])
    return ["head, estimator", "better", "worse", "of cells", "gains %", "of the oracle's %"], lines


def _summary(measured: Sequence[Mapping[str, Any]]) -> list[str]:
    gains_of = [one["gain"] for one in measured]
    means = [100 * gain["mean"] for gain in gains_of]
    shares = [100 * one["share_of_oracle"] for one in measured if one["share_of_oracle"] is not None]
    counts = sum(gain["low"] > 0 for gain in gains_of), sum(gain["high"] < 0 for gain in gains_of), len(gains_of)
    return [
        *map(str, counts),
        f"{min(means):+.1f} to {max(means):+.1f}",
        number(statistics.median(shares) if shares else None, ".0f"),
    ]


def markdown(cells: Sequence[Cell], *, focus: int, scheduler: str, steps: str) -> str:
    """The whole report."""
    picked = at(cells, focus=focus, scheduler=scheduler)
    blocks = [
        "# Does calibration pay for scheduling?",
        f"Simulated on recorded traces. {steps}",
        "## Gains in throughput",
        *[f"{_title(group[0])}\n\n{markdown_table(*_gains(group), left=1)}" for group in _groups(cells)],
        LEGEND.replace("\n", " "),
        f"## Waste and calibration (measured steps, {ALGORITHMS[scheduler]}, {focus} requests)",
        f"```\n{waste(picked)}\n\n{calibration(picked)}\n```",
        "## In short",
        markdown_table(*_verdict(cells), left=1),
    ]
    return "\n\n".join(blocks) + "\n"


def _groups(cells: Sequence[Cell]) -> list[list[Cell]]:
    return [list(group) for _, group in groupby(cells, key=_title)]
