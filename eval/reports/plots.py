"""Plots of a run as PNG files: loss, acceptance per slot, reliability of the confidence before and after STS.

Each function plots plain numbers and writes one file atomically; it knows nothing of models, trackers or where the
numbers come from. Colours are Okabe and Ito's, which are colour-blind safe, and series also differ in marker or dash.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from dspec.atomic import atomic_file

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":")
_STAGES = (("before", "before STS", "#D55E00", "s", "--"), ("after", "after STS", "#0072B2", "o", "-"))
_STYLE: Any = {  # Any: matplotlib types its keys as a Literal of all settings
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
    "legend.handlelength": 2.8,
}


def plot_loss(steps: Sequence[int], series: Mapping[str, Sequence[float]], path: Path) -> None:
    """Loss terms against the optimizer step. Non-finite values (terms not measured at that step) are left out; a long
    series is drawn faintly with its running mean on top."""
    _check(series, length=len(steps))
    with rc_context(_STYLE):
        figure = _figure(7.0, 4.2)
        axes = figure.add_subplot()
        for (label, values), look in zip(series.items(), _looks(), strict=False):
            _draw_loss(axes, label, [p for p in zip(steps, values, strict=True) if math.isfinite(p[1])], look)
        axes.set(title="Training loss", xlabel="optimizer step", ylabel="loss (mean per supervised token)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(figure, axes)
        _save(figure, path)


def plot_acceptance(rows: Mapping[str, Sequence[float]], path: Path) -> None:
    """Conditional acceptance per slot, one line per label: the fraction of rounds whose token at slot k was accepted
    among those whose slots 1..k-1 were. Rows may differ in length; NaN (slot rarely reached) leaves a gap."""
    _check(rows, length=None)
    with rc_context(_STYLE):
        figure = _figure(7.0, 4.2)
        axes = figure.add_subplot()
        for (label, values), (colour, dash, marker) in zip(rows.items(), _looks(), strict=False):
            slots = range(1, len(values) + 1)
            axes.plot(slots, values, color=colour, ls=dash, marker=marker, ms=6, lw=1.8, label=label)
        lowest = min(value for values in rows.values() for value in values if math.isfinite(value))
        axes.set(title="Conditional acceptance per draft slot", xlabel="draft slot k (tokens after the anchor)")
        axes.set(ylabel="accepted, given slots 1..k-1 accepted (%)")
        axes.set_ylim(max(0.0, math.floor(lowest * 10 - 0.5) / 10), 1.005)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(figure, axes)
        _save(figure, path)


def plot_pareto(
    points: Mapping[str, tuple[float, float]], *, reference: tuple[str, float, float, float], title: str, path: Path
) -> None:
    """Tokens per forward pass against quality (a fraction), one marker per decoder. `reference` names the decoder that
    emits one token per pass, with its quality and interval, drawn as a line in a band: lossless decoders lie on the
    line up to chance."""
    _check(points, length=2)
    baseline, _, low, high = reference
    with rc_context(_STYLE):
        figure = _figure(7.0, 3.6)
        axes = figure.add_subplot()
        _draw_reference(axes, reference)
        for i, ((label, point), (colour, _, marker)) in enumerate(zip(points.items(), _looks(), strict=False)):
            fill = colour if i < len(_COLOURS) else "white"
            axes.plot(*point, color=colour, marker=marker, ls="", ms=10, mfc=fill, mew=1.8, label=label, clip_on=False)
        values = [low, high, *(y for _, y in points.values())]
        axes.set_ylim(max(0.0, min(values) - 0.05), min(1.0, max(values) + 0.05))
        axes.set_xlim(0.8, max(x for x, _ in points.values()) * 1.06)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol="", decimals=0))
        axes.set_title(title, fontsize=10)
        axes.set(xlabel=f"tokens per forward pass after prefill ({baseline}: 1)", ylabel="quality (%)")
        _legend(figure, axes)
        _save(figure, path)


def plot_filled(panels: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """The trace of diffusion decoding: tokens of the answer that the first, second, ... pass filled in, one panel per
    benchmark, one line per decoder."""
    with rc_context(_STYLE):
        figure = _figure(max(4.5 * len(panels), 7.0), 3.6)
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, (benchmark, curves) in zip(grid, panels.items(), strict=True):
            _check(curves, length=None)
            for (label, values), (colour, dash, _) in zip(curves.items(), _looks(), strict=False):
                axes.plot(range(1, len(values) + 1), values, color=colour, ls=dash, lw=1.6, label=label)
            axes.set_xscale("log", base=2)  # the baseline has many passes, the others few
            axes.set(title=benchmark, xlabel="forward pass")
            axes.xaxis.set_major_formatter(FormatStrFormatter("%d"))
        grid[0].set_ylabel("tokens of the answer filled")
        grid[0].set_ylim(bottom=0)
        _legend(figure, grid[0])
        _save(figure, path)


def plot_frontier(
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    reference: tuple[str, float, float, float],
    title: str,
    path: Path,
) -> None:
    """Tokens per forward pass against quality: one line per curve, its points labelled by their setting (`at`), with
    both 95 % intervals; a ring marks points on the Pareto frontier. `reference` as in `plot_pareto`."""
    with rc_context(_STYLE):
        figure = _figure(8.0, 4.8)
        axes = figure.add_subplot()
        _draw_reference(axes, reference)
        for i, ((label, points), look) in enumerate(zip(curves.items(), _looks(), strict=False)):
            _draw_curve(axes, label, points, look, x="tpf", y="quality", filled=i < len(_COLOURS))
            for point in (p for p in points if p["at"] is not None):
                axes.annotate(
                    f"{point['at']:g}",
                    (point["tpf"], point["quality"]),
                    xytext=(5, 4),
                    textcoords="offset points",
                    fontsize=7,
                    color=look[0],
                )
        best = [p for points in curves.values() for p in points if p["optimal"]]
        ringed = [[p[name] for p in best] for name in ("tpf", "quality")]
        axes.plot(*ringed, ls="", marker="o", ms=13, mfc="none", mec="#000000", mew=1.0, label="Pareto-optimal")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol="", decimals=0))
        axes.set_title(title, fontsize=10)
        axes.set(xlabel="tokens per forward pass after prefill", ylabel=f"quality (%; {reference[0]}: dotted)")
        _legend(figure, axes)
        _save(figure, path)


def plot_scaling(
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    setting: str,
    reference: tuple[str, float, float, float],
    title: str,
    path: Path,
) -> None:
    """Tokens per forward pass, and quality, against a `setting` of the decoders: two panels, one line per curve whose
    points have a value of it, with 95 % intervals. `reference` as in `plot_pareto`."""
    with rc_context(_STYLE):
        figure = _figure(10.0, 4.0)
        tpf, quality = figure.subplots(1, 2)
        _draw_reference(quality, reference)
        for axes, y in ((tpf, "tpf"), (quality, "quality")):
            for (label, points), look in zip(curves.items(), _looks(), strict=False):  # as in the frontier's picture
                if points[0]["at"] is not None:
                    _draw_curve(axes, label, points, look, x="at", y=y, filled=True)
            axes.set_xticks(sorted({p["at"] for points in curves.values() for p in points if p["at"] is not None}))
            axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
            axes.set_xlabel(setting)
        tpf.set_ylabel("tokens per forward pass after prefill")
        quality.set_ylabel(f"quality (%; {reference[0]}: dotted)")
        quality.yaxis.set_major_formatter(PercentFormatter(1.0, symbol="", decimals=0))
        figure.suptitle(title, fontsize=10)
        _legend(figure, tpf)
        _save(figure, path)


def plot_roofline(
    groups: Mapping[str, Sequence[tuple[float, float]]],
    *,
    notes: Mapping[str, tuple[float, float]],
    bandwidth: float,
    flops: float,
    path: Path,
) -> None:
    """Measured passes (FLOP per byte, FLOP per second), one colour per group, under the device's roofline; `notes` are
    written next to their points."""
    points = [point for group in groups.values() for point in group]
    _check({str(i): list(point) for i, point in enumerate(points)}, length=2)
    ridge = flops / bandwidth
    lowest, highest = (edge(x for x, _ in points) for edge in (min, max))
    left, right = min(lowest, ridge) / 2, max(highest, ridge) * 2
    with rc_context(_STYLE):
        figure = _figure(9.0, 5.0)
        axes = figure.add_subplot()
        axes.plot([left, ridge, right], [left * bandwidth, flops, flops], color="#000000", lw=1.5)
        axes.axvline(ridge, color="#999999", ls=":", lw=1.0)
        axes.annotate(f"ridge point: {ridge:.1f} FLOP/byte", (ridge, flops), xytext=(4, 6), textcoords="offset points")
        for (label, group), (colour, _, marker) in zip(groups.items(), _looks(), strict=False):
            axes.plot(*zip(*group, strict=True), color=colour, marker=marker, ls="", ms=6, label=label)
        for (note, point), height in zip(notes.items(), (-42, -84), strict=False):
            arrow = {"arrowstyle": "-", "color": "#666666", "lw": 0.8}
            axes.annotate(note, point, xytext=(24, height), textcoords="offset points", fontsize=8, arrowprops=arrow)
        axes.set(title="Passes of each configuration under the measured roofline", xscale="log", yscale="log")
        axes.set(xlabel="FLOP per byte read", ylabel="FLOP per second", xlim=(left, right))
        axes.legend(loc="upper left")
        _save(figure, path)


def plot_reliability(report: Mapping[str, Any], path: Path) -> None:
    """Observed against predicted survival per slot, before and after STS, from `calibration_report`'s dict. Light bars:
    rounds per bin; the slot's fullest bin is a quarter of the panel high."""
    slots = report["slots"]
    columns = min(4, len(slots))
    lines = math.ceil(len(slots) / columns)
    with rc_context(_STYLE):
        figure = _figure(max(2.7 * columns + 0.5, 5.0), 2.75 * lines + 1.0)
        grid = figure.subplots(lines, columns, squeeze=False).flatten()
        for axes, slot in zip(grid, slots, strict=False):
            _draw_reliability(axes, slot, report["bins"])
        for axes in grid[len(slots) :]:
            axes.set_visible(False)
        figure.supxlabel("predicted probability that draft tokens 1..k are all accepted", fontsize=10)
        figure.supylabel("observed share of rounds", fontsize=10)
        handles, labels = grid[0].get_legend_handles_labels()
        bars = Patch(color="#7F7F7F", alpha=0.3, lw=0)
        handles, labels = [*handles, bars], [*labels, "rounds in the bin"]
        figure.legend(handles, labels, loc="outside upper center", ncols=4 if columns > 2 else 2)
        _save(figure, path)


def plot_gains(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, float, float]]]], path: Path) -> None:
    """Gains in throughput (fractions) over a reference against requests in flight: a panel per setting, a line per
    series, points (requests, gain, low, high)."""
    with rc_context(_STYLE):
        figure = _figure(3.6 * len(panels) + 0.6, 3.8)
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, (title, series) in zip(grid, panels.items(), strict=True):
            axes.axhline(0, color="#7F7F7F", lw=1.0)
            for i, ((label, points), (colour, dash, marker)) in enumerate(zip(series.items(), _looks(), strict=False)):
                x = [requests * 2 ** (0.06 * (i - len(series) / 2)) for requests, *_ in points]  # side by side
                y, low, high = zip(*(point[1:] for point in points), strict=True)
                bars = [[m - a for m, a in zip(y, low, strict=True)], [b - m for m, b in zip(y, high, strict=True)]]
                look: Any = {"color": colour, "ls": dash, "marker": marker, "ms": 5, "lw": 1.4, "capsize": 2}
                axes.errorbar(x, y, yerr=bars, label=label, **look)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted({point[0] for points in series.values() for point in points}))
            axes.xaxis.set_major_formatter(FormatStrFormatter("%d"))
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("requests in flight")
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
        grid[0].set_ylabel("throughput over the raw head (%)")
        _legend(figure, grid[0])
        _save(figure, path)


def plot_reliabilities(panels: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], path: Path) -> None:
    """Observed against predicted survival of drafts: a panel per setting, a line per series with the means of its bins
    (predicted, observed, count); larger markers: more drafts in the bin."""
    with rc_context(_STYLE):
        columns = min(3, len(panels))
        lines = math.ceil(len(panels) / columns)
        figure = _figure(3.3 * columns + 0.5, 3.3 * lines + 0.4)
        grid = figure.subplots(lines, columns, squeeze=False).flatten()
        for axes, (title, series) in zip(grid, panels.items(), strict=False):
            axes.plot([0, 1], [0, 1], color="#7F7F7F", ls=":", lw=1.2, label="perfect calibration")
            for (label, bins), (colour, dash, marker) in zip(series.items(), _looks(), strict=False):
                most = max(bins["count"])
                sizes = [4 + 46 * count / most for count in bins["count"]]
                axes.plot(bins["predicted"], bins["observed"], color=colour, ls=dash, lw=1.1, label=label)
                axes.scatter(bins["predicted"], bins["observed"], s=sizes, color=colour, marker=marker, clip_on=False)
            axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", title=title)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        figure.supxlabel("estimated probability that drafts 1..k are all accepted", fontsize=10)
        figure.supylabel("observed share", fontsize=10)
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8)
        _save(figure, path)


def plot_waste(bars: Mapping[str, Mapping[str, tuple[float, float]]], path: Path) -> None:
    """Drafts verified per token emitted: a group of bars per setting, one bar per series of (accepted, rejected); the
    rejected part is hatched."""
    with rc_context(_STYLE):
        names = list(dict.fromkeys(name for group in bars.values() for name in group))
        figure = _figure(max(7.0, 1.0 + 1.1 * len(bars)), 3.8)
        axes = figure.add_subplot()
        width = 0.8 / len(names)
        for name, (colour, _, _) in zip(names, _looks(), strict=False):
            at = names.index(name)
            x = [i + (at - (len(names) - 1) / 2) * width for i, group in enumerate(bars.values()) if name in group]
            accepted, rejected = zip(*(group[name] for group in bars.values() if name in group), strict=True)
            axes.bar(x, accepted, width=0.9 * width, color=colour, label=name)
            axes.bar(x, rejected, width=0.9 * width, bottom=accepted, color=colour, alpha=0.35, hatch="////", lw=0)
        axes.set_xticks(range(len(bars)), list(bars), fontsize=8)
        axes.grid(axis="x", visible=False)
        axes.set(title="What verification is spent on (hatched: drafts verified and rejected)")
        axes.set_ylabel("drafts verified per token emitted")
        _legend(figure, axes)
        _save(figure, path)


def plot_rounds(bars: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Milliseconds of one round as stacked bars, one bar per method, one segment per span."""
    with rc_context(_STYLE):
        figure = _figure(8.0, 1.4 + 0.5 * len(bars))
        axes = figure.add_subplot()
        left = dict.fromkeys(bars, 0.0)
        names = list(dict.fromkeys(name for spans in bars.values() for name in spans))
        for i, name in enumerate(names):
            widths = [spans.get(name, 0.0) for spans in bars.values()]
            hatch = "//" if i >= len(_COLOURS) else None
            colour = _COLOURS[i % len(_COLOURS)]
            axes.barh(list(bars), widths, left=list(left.values()), color=colour, hatch=hatch, label=name, alpha=0.85)
            left = {method: left[method] + w for method, w in zip(bars, widths, strict=True)}
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set(title="Where a round's time goes (plain AR: one token)", xlabel="milliseconds")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
        _save(figure, path)


def plot_costs(verify: Sequence[Mapping[str, Any]], draft: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Milliseconds against K, one line per context length: verifying (its attention alone dashed) and drafting."""
    with rc_context(_STYLE):
        figure = _figure(9.0 if draft else 5.5, 4.0)
        panels = figure.subplots(1, 2 if draft else 1, squeeze=False)[0]
        contents = (
            ("Verify K tokens", verify, ("attention", "rest", "lm_head")),
            ("Draft K slots", draft, ("forward", "lm_head", "sequential_head")),
        )
        for axes, (title, lines, parts) in zip(panels, contents, strict=False):
            for context, (colour, _, marker) in zip(
                dict.fromkeys(line["context"] for line in lines), _looks(), strict=False
            ):
                chosen = [line for line in lines if line["context"] == context]
                tokens = [line["tokens"] for line in chosen]
                whole = [sum(line[part] for part in parts) for line in chosen]
                axes.plot(tokens, whole, color=colour, marker=marker, ms=5, lw=1.6, label=f"L = {context}")
                if "attention" in parts:
                    axes.plot(tokens, [line["attention"] for line in chosen], color=colour, ls="--", lw=1.2)
            axes.set_xscale("log", base=2)
            axes.set(title=title, xlabel="K", ylabel="milliseconds")
            axes.set_ylim(bottom=0)
            axes.set_xticks(sorted({line["tokens"] for line in lines}), minor=False)
            axes.xaxis.set_major_formatter(FormatStrFormatter("%d"))
            axes.legend(title="dashed: attention" if "attention" in parts else None)
        _save(figure, path)


def plot_steps(
    points: Mapping[tuple[int, int], float], fitted: Callable[[int, Sequence[int]], Iterable[float]], path: Path
) -> None:
    """Milliseconds of a step against the tokens that it verifies: a line for each number of requests, measured at
    (requests, drafts verified of each) and `fitted(requests, tokens)` in seconds; hollow: steps that do not draft."""
    with rc_context(_STYLE):
        figure = _figure(7.0, 4.2)
        axes = figure.add_subplot()
        for R, (colour, dash, marker) in zip(sorted({R for R, _ in points}), _looks(), strict=False):
            drafted = sorted((R * (1 + n), 1000 * t) for (r, n), t in points.items() if r == R and n)
            tokens = [m for m, _ in drafted]
            axes.plot(tokens, [t for _, t in drafted], color=colour, marker=marker, ms=5, ls="", label=f"{R}")
            axes.plot(tokens, [1000 * t for t in fitted(R, tokens)], color=colour, ls=dash, lw=1.4)
            axes.plot(R, 1000 * points[R, 0], color=colour, marker=marker, ms=6, mfc="white", ls="")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FormatStrFormatter("%d"))
        axes.set(title="Time of a step", xlabel="tokens verified (hollow: nothing drafted)", ylabel="milliseconds")
        axes.set_ylim(bottom=0)
        axes.legend(title="requests; lines: fit")
        _save(figure, path)


_SERVING = {
    "concurrency": "requests in flight",
    "throughput": "tokens per second, all requests",
    "tokens_per_second_per_user": "tokens per second of one request",
    "budget": "drafts verified per request and step",
}


def plot_serving(curves: Mapping[str, Sequence[Mapping[str, Any]]], *, x: str, y: str, note: str, path: Path) -> None:
    """Cells of a load report: one line per variant, its points by `x` and `y`. Against anything but the concurrency,
    points are labelled with it."""
    _check({name: [point[y] for point in points] for name, points in curves.items()}, length=None)
    with rc_context(_STYLE):
        figure = _figure(7.0, 4.4)
        axes = figure.add_subplot()
        for (label, points), (colour, dash, marker) in zip(curves.items(), _looks(), strict=False):
            known = [point for point in points if point[x] is not None]
            xs, ys = ([point[name] for point in known] for name in (x, y))
            axes.plot(xs, ys, color=colour, ls=dash, marker=marker, ms=5, lw=1.6, label=label)
            for point in known if x != "concurrency" and label in list(curves)[:1] else ():
                at = (point[x], point[y])
                axes.annotate(f"{point['concurrency']}", at, xytext=(4, -10), textcoords="offset points", fontsize=7)
        if x == "concurrency":
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FormatStrFormatter("%d"))
        axes.set(xlabel=_SERVING[x], ylabel=_SERVING[y])
        axes.set_title(f"{_SERVING[y].capitalize()}{f' ({note})' if note else ''}", fontsize=10)
        axes.set_ylim(bottom=0)
        _legend(figure, axes)
        _save(figure, path)


def plot_predicted(curves: Mapping[str, Sequence[Mapping[str, Any]]], *, note: str, path: Path) -> None:
    """Throughput that the simulator predicts against the measured one, one marker per variant; the band is 10 %."""
    points = [point for line in curves.values() for point in line]
    low, high = (edge(p["throughput"] for p in points) for edge in (min, max))
    ends = [low * 0.8, high * 1.25]
    with rc_context(_STYLE):
        figure = _figure(5.6, 5.0)
        axes = figure.add_subplot()
        axes.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="#EEEEEE", label="within 10 %")
        axes.plot(ends, ends, color="#999999", lw=1.0)
        for (label, line), (colour, _, marker) in zip(curves.items(), _looks(), strict=False):
            xs, ys = [p["throughput"] for p in line], [p["predicted"]["throughput"] for p in line]
            axes.plot(xs, ys, color=colour, marker=marker, ls="", ms=6, mfc="none", mew=1.4, label=label)
        axes.set(xscale="log", yscale="log", xlabel=f"measured tokens per second ({note})", ylabel="simulated")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FormatStrFormatter("%d"))
        axes.set_title("Predicted from traces at one concurrency", fontsize=10)
        _legend(figure, axes)
        _save(figure, path)


def plot_tau_by_position(curves: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> None:
    """tau of the rounds that started in each section of the answer, one line per label."""
    with rc_context(_STYLE):
        figure = _figure(7.0, 4.2)
        axes = figure.add_subplot()
        for (label, points), (colour, dash, marker) in zip(curves.items(), _looks(), strict=False):
            starts, taus = zip(*points, strict=True)
            axes.plot(starts, taus, color=colour, ls=dash, marker=marker, ms=5, lw=1.6, label=label)
        axes.set(title="tau along the answer", xlabel="tokens of the answer so far", ylabel="tokens per round")
        axes.set_ylim(bottom=1.0)
        _legend(figure, axes)
        _save(figure, path)


def _draw_loss(axes: Axes, label: str, points: Sequence[tuple[int, float]], look: tuple[str, str, str]) -> None:
    colour, dash, marker = look
    steps, values = [step for step, _ in points], [value for _, value in points]
    reach = len(points) // 60
    if reach:
        axes.plot(steps, values, color=colour, lw=0.8, alpha=0.25)
        label = f"{label} (mean of {2 * reach + 1})"
    sparse = len(points) <= 40
    axes.plot(
        steps, _running_mean(values, reach), color=colour, ls=dash, marker=marker if sparse else None, label=label
    )


def _draw_reference(axes: Axes, reference: tuple[str, float, float, float]) -> None:
    """The quality of the decoder that emits one token per pass as a line, in the band of its interval."""
    _, quality, low, high = reference
    axes.axhspan(low, high, color="#7F7F7F", alpha=0.12, lw=0)
    axes.axhline(quality, color="#7F7F7F", ls=":", lw=1.2)


def _draw_curve(
    axes: Axes,
    label: str,
    points: Sequence[Mapping[str, Any]],
    look: tuple[str, str, str],
    *,
    x: str,
    y: str,
    filled: bool,
) -> None:
    """Points joined by a line, with the intervals (`<name>_interval`) of those of `x` and `y` that have one."""
    colour, dash, marker = look
    values = {axis: [point[name] for point in points] for axis, name in (("x", x), ("y", y))}
    measured = [(axis, name) for axis, name in (("x", x), ("y", y)) if f"{name}_interval" in points[0]]
    bars: Any = {f"{axis}err": _bars(points, name) for axis, name in measured}
    axes.errorbar(values["x"], values["y"], **bars, fmt="none", ecolor=colour, elinewidth=0.9, capsize=2, alpha=0.5)
    fill = colour if filled else "white"
    axes.plot(values["x"], values["y"], color=colour, ls=dash, marker=marker, ms=5, mfc=fill, lw=1.6, label=label)


def _bars(points: Sequence[Mapping[str, Any]], name: str) -> list[list[float]]:
    """Lengths of error bars below and above each point; 0 where its interval does not hold it: those of a bootstrap
    need not, and rounding may put it just outside."""
    ends = [(point[name], *point[f"{name}_interval"]) for point in points]
    return [[max(0.0, value - low) for value, low, _ in ends], [max(0.0, high - value) for value, _, high in ends]]


def _running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Mean over i - reach .. i + reach, cut at the ends."""
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _draw_reliability(axes: Axes, slot: Mapping[str, Any], bins: int) -> None:
    axes.plot([0, 1], [0, 1], color="#7F7F7F", ls=":", lw=1.2, label="perfect calibration")
    fullest = max(1, *slot["curve_before"]["count"], *slot["curve_after"]["count"])
    for side, (when, label, colour, marker, dash) in enumerate(_STAGES):
        curve = slot[f"curve_{when}"]
        left = [centre + (side - 1) * 0.45 / bins for centre in curve["centre"]]
        height = [0.25 * count / fullest for count in curve["count"]]
        axes.bar(left, height, width=0.45 / bins, align="edge", color=colour, alpha=0.3, lw=0)
        x, y = ([math.nan if v is None else v for v in curve[name]] for name in ("predicted", "observed"))
        axes.plot(x, y, color=colour, ls=dash, marker=marker, ms=3.5, lw=1.2, label=label, clip_on=False)
    ticks = ["0", "0.5", "1"]
    before, after = (_percent(slot[f"ece_{when}"]) for when, *_ in _STAGES)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", title=f"slot {slot['slot']}: ECE {before} → {after} %")
    axes.set(xticks=[0, 0.5, 1], yticks=[0, 0.5, 1], xticklabels=ticks, yticklabels=ticks)
    axes.text(0.04, 0.95, f"{slot['valid']:,} rounds", va="top", fontsize=8, color="#555555")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _looks() -> Iterator[tuple[str, str, str]]:
    """Colour, dash and marker of each series in turn."""
    return zip(cycle(_COLOURS), cycle(_DASHES), cycle(_MARKERS), strict=False)


def _check(series: Mapping[str, Sequence[float]], *, length: int | None) -> None:
    for label, values in series.items():
        if length is not None and len(values) != length:
            raise ValueError(f"{label}: {len(values)} values for {length} steps")
    if not any(math.isfinite(value) for values in series.values() for value in values):
        raise ValueError("nothing to plot: no finite value in any series")


def _legend(figure: Figure, axes: Axes) -> None:
    """The legend below the panel, never over a curve; two columns, since labels may be long."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 2 if len(labels) > 1 and max(map(len, labels)) > 12 else min(4, len(labels))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.18 * -(-len(labels) // columns))


def _figure(width: float, height: float) -> Figure:
    """A standalone figure (inches): no pyplot, no global state."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    with atomic_file(path) as scratch:
        figure.savefig(scratch, format="png")
