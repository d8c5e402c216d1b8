"""Plots of a run as PNG files: loss, acceptance per slot, reliability of the confidence before and after STS.

Each function plots plain numbers and writes one file atomically; it knows nothing of models, trackers or where the
numbers come from. Those of serving: serving_plots.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FormatStrFormatter, MaxNLocator, PercentFormatter

from eval.reports.canvas import COLOURS, STYLE, check_series, legend_below, looks, new_figure, save

_STAGES = (("before", "before STS", "#D55E00", "s", "--"), ("after", "after STS", "#0072B2", "o", "-"))


def plot_loss(steps: Sequence[int], series: Mapping[str, Sequence[float]], path: Path) -> None:
    """Loss terms against the optimizer step. Non-finite values (terms not measured at that step) are left out; a long
    series is drawn faintly with its running mean on top."""
    check_series(series, length=len(steps))
    with rc_context(STYLE):
        figure = new_figure(7.0, 4.2)
        axes = figure.add_subplot()
        for (label, values), look in zip(series.items(), looks(), strict=False):
            _draw_loss(axes, label, [p for p in zip(steps, values, strict=True) if math.isfinite(p[1])], look)
        axes.set(title="Training loss", xlabel="optimizer step", ylabel="loss (mean per supervised token)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend_below(figure, axes)
        save(figure, path)


def plot_acceptance(rows: Mapping[str, Sequence[float]], path: Path) -> None:
    """Conditional acceptance per slot, one line per label: the fraction of rounds whose token at slot k was accepted
    among those whose slots 1..k-1 were. Rows may differ in length; NaN (slot rarely reached) leaves a gap."""
    check_series(rows, length=None)
    with rc_context(STYLE):
        figure = new_figure(7.0, 4.2)
        axes = figure.add_subplot()
        for (label, values), (colour, dash, marker) in zip(rows.items(), looks(), strict=False):
            slots = range(1, len(values) + 1)
            axes.plot(slots, values, color=colour, ls=dash, marker=marker, ms=6, lw=1.8, label=label)
        lowest = min(value for values in rows.values() for value in values if math.isfinite(value))
        axes.set(title="Conditional acceptance per draft slot", xlabel="draft slot k (tokens after the anchor)")
        axes.set(ylabel="accepted, given slots 1..k-1 accepted (%)")
        axes.set_ylim(max(0.0, math.floor(lowest * 10 - 0.5) / 10), 1.005)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend_below(figure, axes)
        save(figure, path)


def plot_pareto(
    points: Mapping[str, tuple[float, float]], *, reference: tuple[str, float, float, float], title: str, path: Path
) -> None:
    """Tokens per forward pass against quality (a fraction), one marker per decoder. `reference` names the decoder that
    emits one token per pass, with its quality and interval, drawn as a line in a band: lossless decoders lie on the
    line up to chance."""
    check_series(points, length=2)
    baseline, _, low, high = reference
    with rc_context(STYLE):
        figure = new_figure(7.0, 3.6)
        axes = figure.add_subplot()
        _draw_reference(axes, reference)
        for i, ((label, point), (colour, _, marker)) in enumerate(zip(points.items(), looks(), strict=False)):
            fill = colour if i < len(COLOURS) else "white"
            axes.plot(*point, color=colour, marker=marker, ls="", ms=10, mfc=fill, mew=1.8, label=label, clip_on=False)
        values = [low, high, *(y for _, y in points.values())]
        axes.set_ylim(max(0.0, min(values) - 0.05), min(1.0, max(values) + 0.05))
        axes.set_xlim(0.8, max(x for x, _ in points.values()) * 1.06)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol="", decimals=0))
        axes.set_title(title, fontsize=10)
        axes.set(xlabel=f"tokens per forward pass after prefill ({baseline}: 1)", ylabel="quality (%)")
        legend_below(figure, axes)
        save(figure, path)


def plot_filled(panels: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """The trace of diffusion decoding: tokens of the answer that the first, second, ... pass filled in, one panel per
    benchmark, one line per decoder."""
    with rc_context(STYLE):
        figure = new_figure(max(4.5 * len(panels), 7.0), 3.6)
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, (benchmark, curves) in zip(grid, panels.items(), strict=True):
            check_series(curves, length=None)
            for (label, values), (colour, dash, _) in zip(curves.items(), looks(), strict=False):
                axes.plot(range(1, len(values) + 1), values, color=colour, ls=dash, lw=1.6, label=label)
            axes.set_xscale("log", base=2)  # the baseline has many passes, the others few
            axes.set(title=benchmark, xlabel="forward pass")
            axes.xaxis.set_major_formatter(FormatStrFormatter("%d"))
        grid[0].set_ylabel("tokens of the answer filled")
        grid[0].set_ylim(bottom=0)
        legend_below(figure, grid[0])
        save(figure, path)


def plot_frontier(
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    reference: tuple[str, float, float, float],
    title: str,
    path: Path,
) -> None:
    """Tokens per forward pass against quality: one line per curve, its points labelled by their setting (`at`), with
    both 95 % intervals; a ring marks points on the Pareto frontier. `reference` as in `plot_pareto`."""
    with rc_context(STYLE):
        figure = new_figure(8.0, 4.8)
        axes = figure.add_subplot()
        _draw_reference(axes, reference)
        for i, ((label, points), look) in enumerate(zip(curves.items(), looks(), strict=False)):
            _draw_curve(axes, label, points, look, x="tpf", y="quality", filled=i < len(COLOURS))
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
        legend_below(figure, axes)
        save(figure, path)


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
    with rc_context(STYLE):
        figure = new_figure(10.0, 4.0)
        tpf, quality = figure.subplots(1, 2)
        _draw_reference(quality, reference)
        for axes, y in ((tpf, "tpf"), (quality, "quality")):
            for (label, points), look in zip(curves.items(), looks(), strict=False):  # as in the frontier's picture
                if points[0]["at"] is not None:
                    _draw_curve(axes, label, points, look, x="at", y=y, filled=True)
            axes.set_xticks(sorted({p["at"] for points in curves.values() for p in points if p["at"] is not None}))
            axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
            axes.set_xlabel(setting)
        tpf.set_ylabel("tokens per forward pass after prefill")
        quality.set_ylabel(f"quality (%; {reference[0]}: dotted)")
        quality.yaxis.set_major_formatter(PercentFormatter(1.0, symbol="", decimals=0))
        figure.suptitle(title, fontsize=10)
        legend_below(figure, tpf)
        save(figure, path)


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
    check_series({str(i): list(point) for i, point in enumerate(points)}, length=2)
    ridge = flops / bandwidth
    lowest, highest = (edge(x for x, _ in points) for edge in (min, max))
    left, right = min(lowest, ridge) / 2, max(highest, ridge) * 2
    with rc_context(STYLE):
        figure = new_figure(9.0, 5.0)
        axes = figure.add_subplot()
        axes.plot([left, ridge, right], [left * bandwidth, flops, flops], color="#000000", lw=1.5)
        axes.axvline(ridge, color="#999999", ls=":", lw=1.0)
        axes.annotate(f"ridge point: {ridge:.1f} FLOP/byte", (ridge, flops), xytext=(4, 6), textcoords="offset points")
        for (label, group), (colour, _, marker) in zip(groups.items(), looks(), strict=False):
            axes.plot(*zip(*group, strict=True), color=colour, marker=marker, ls="", ms=6, label=label)
        for (note, point), height in zip(notes.items(), (-42, -84), strict=False):
            arrow = {"arrowstyle": "-", "color": "#666666", "lw": 0.8}
            axes.annotate(note, point, xytext=(24, height), textcoords="offset points", fontsize=8, arrowprops=arrow)
        axes.set(title="Passes of each configuration under the measured roofline", xscale="log", yscale="log")
        axes.set(xlabel="FLOP per byte read", ylabel="FLOP per second", xlim=(left, right))
        axes.legend(loc="upper left")
        save(figure, path)


def plot_reliability(report: Mapping[str, Any], path: Path) -> None:
    """Observed against predicted survival per slot, before and after STS, from `calibration_report`'s dict. Light bars:
    rounds per bin; the slot's fullest bin is a quarter of the panel high."""
    slots = report["slots"]
    columns = min(4, len(slots))
    lines = math.ceil(len(slots) / columns)
    with rc_context(STYLE):
        figure = new_figure(max(2.7 * columns + 0.5, 5.0), 2.75 * lines + 1.0)
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
        save(figure, path)


def plot_rounds(bars: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Milliseconds of one round as stacked bars, one bar per method, one segment per span."""
    with rc_context(STYLE):
        figure = new_figure(8.0, 1.4 + 0.5 * len(bars))
        axes = figure.add_subplot()
        left = dict.fromkeys(bars, 0.0)
        names = list(dict.fromkeys(name for spans in bars.values() for name in spans))
        for i, name in enumerate(names):
            widths = [spans.get(name, 0.0) for spans in bars.values()]
            hatch = "//" if i >= len(COLOURS) else None
            colour = COLOURS[i % len(COLOURS)]
            axes.barh(list(bars), widths, left=list(left.values()), color=colour, hatch=hatch, label=name, alpha=0.85)
            left = {method: left[method] + w for method, w in zip(bars, widths, strict=True)}
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set(title="Where a round's time goes (plain AR: one token)", xlabel="milliseconds")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
        save(figure, path)


def plot_costs(verify: Sequence[Mapping[str, Any]], draft: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Milliseconds against K, one line per context length: verifying (its attention alone dashed) and drafting."""
    with rc_context(STYLE):
        figure = new_figure(9.0 if draft else 5.5, 4.0)
        panels = figure.subplots(1, 2 if draft else 1, squeeze=False)[0]
        contents = (
            ("Verify K tokens", verify, ("attention", "rest", "lm_head")),
            ("Draft K slots", draft, ("forward", "lm_head", "sequential_head")),
        )
        for axes, (title, lines, parts) in zip(panels, contents, strict=False):
            for context, (colour, _, marker) in zip(
                dict.fromkeys(line["context"] for line in lines), looks(), strict=False
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
        save(figure, path)


def plot_tau_by_position(curves: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> None:
    """tau of the rounds that started in each section of the answer, one line per label."""
    with rc_context(STYLE):
        figure = new_figure(7.0, 4.2)
        axes = figure.add_subplot()
        for (label, points), (colour, dash, marker) in zip(curves.items(), looks(), strict=False):
            starts, taus = zip(*points, strict=True)
            axes.plot(starts, taus, color=colour, ls=dash, marker=marker, ms=5, lw=1.6, label=label)
        axes.set(title="tau along the answer", xlabel="tokens of the answer so far", ylabel="tokens per round")
        axes.set_ylim(bottom=1.0)
        legend_below(figure, axes)
        save(figure, path)


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
