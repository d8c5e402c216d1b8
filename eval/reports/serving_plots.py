"""Plots of serving: what steps cost, throughput under load, what estimates of acceptance gain.

As plots.py: plain numbers in, one PNG file written atomically."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator, PercentFormatter

from eval.reports.canvas import STYLE, check_series, legend_below, looks, new_figure, save

_SERVING = {
    "concurrency": "requests in flight",
    "throughput": "tokens per second, all requests",
    "tokens_per_second_per_user": "tokens per second of one request",
    "budget": "drafts verified per request and step",
}


def plot_steps(
    points: Mapping[tuple[int, int], float], fitted: Callable[[int, Sequence[int]], Iterable[float]], path: Path
) -> None:
    """Milliseconds of a step against the tokens that it verifies: a line for each number of requests, measured at
    (requests, drafts verified of each) and `fitted(requests, tokens)` in seconds; hollow: steps that do not draft."""
    with rc_context(STYLE):
        figure = new_figure(7.0, 4.2)
        axes = figure.add_subplot()
        for R, (colour, dash, marker) in zip(sorted({R for R, _ in points}), looks(), strict=False):
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
        save(figure, path)


def plot_serving(curves: Mapping[str, Sequence[Mapping[str, Any]]], *, x: str, y: str, note: str, path: Path) -> None:
    """Cells of a load report: one line per variant, its points by `x` and `y`. Against anything but the concurrency,
    points are labelled with it."""
    check_series({name: [point[y] for point in points] for name, points in curves.items()}, length=None)
    with rc_context(STYLE):
        figure = new_figure(7.0, 4.4)
        axes = figure.add_subplot()
        for (label, points), (colour, dash, marker) in zip(curves.items(), looks(), strict=False):
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
        legend_below(figure, axes)
        save(figure, path)


def plot_predicted(curves: Mapping[str, Sequence[Mapping[str, Any]]], *, note: str, path: Path) -> None:
    """Throughput that the simulator predicts against the measured one, one marker per variant; the band is 10 %."""
    points = [point for line in curves.values() for point in line]
    low, high = (edge(p["throughput"] for p in points) for edge in (min, max))
    ends = [low * 0.8, high * 1.25]
    with rc_context(STYLE):
        figure = new_figure(5.6, 5.0)
        axes = figure.add_subplot()
        axes.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="#EEEEEE", label="within 10 %")
        axes.plot(ends, ends, color="#999999", lw=1.0)
        for (label, line), (colour, _, marker) in zip(curves.items(), looks(), strict=False):
            xs, ys = [p["throughput"] for p in line], [p["predicted"]["throughput"] for p in line]
            axes.plot(xs, ys, color=colour, marker=marker, ls="", ms=6, mfc="none", mew=1.4, label=label)
        axes.set(xscale="log", yscale="log", xlabel=f"measured tokens per second ({note})", ylabel="simulated")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FormatStrFormatter("%d"))
        axes.set_title("Predicted from traces at one concurrency", fontsize=10)
        legend_below(figure, axes)
        save(figure, path)


def plot_gains(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, float, float]]]], path: Path) -> None:
    """Gains in throughput (fractions) over a reference against requests in flight: a panel per setting, a line per
    series, points (requests, gain, low, high)."""
    with rc_context(STYLE):
        figure = new_figure(3.6 * len(panels) + 0.6, 3.8)
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, (title, series) in zip(grid, panels.items(), strict=True):
            axes.axhline(0, color="#7F7F7F", lw=1.0)
            for i, ((label, points), (colour, dash, marker)) in enumerate(zip(series.items(), looks(), strict=False)):
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
        legend_below(figure, grid[0])
        save(figure, path)


def plot_reliabilities(panels: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], path: Path) -> None:
    """Observed against predicted survival of drafts: a panel per setting, a line per series with the means of its bins
    (predicted, observed, count); larger markers: more drafts in the bin."""
    with rc_context(STYLE):
        columns = min(3, len(panels))
        lines = math.ceil(len(panels) / columns)
        figure = new_figure(3.3 * columns + 0.5, 3.3 * lines + 0.4)
        grid = figure.subplots(lines, columns, squeeze=False).flatten()
        for axes, (title, series) in zip(grid, panels.items(), strict=False):
            axes.plot([0, 1], [0, 1], color="#7F7F7F", ls=":", lw=1.2, label="perfect calibration")
            for (label, bins), (colour, dash, marker) in zip(series.items(), looks(), strict=False):
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
        save(figure, path)


def plot_waste(bars: Mapping[str, Mapping[str, tuple[float, float]]], path: Path) -> None:
    """Drafts verified per token emitted: a group of bars per setting, one bar per series of (accepted, rejected); the
    rejected part is hatched."""
    with rc_context(STYLE):
        names = list(dict.fromkeys(name for group in bars.values() for name in group))
        figure = new_figure(max(7.0, 1.0 + 1.1 * len(bars)), 3.8)
        axes = figure.add_subplot()
        width = 0.8 / len(names)
        for name, (colour, _, _) in zip(names, looks(), strict=False):
            at = names.index(name)
            x = [i + (at - (len(names) - 1) / 2) * width for i, group in enumerate(bars.values()) if name in group]
            accepted, rejected = zip(*(group[name] for group in bars.values() if name in group), strict=True)
            axes.bar(x, accepted, width=0.9 * width, color=colour, label=name)
            axes.bar(x, rejected, width=0.9 * width, bottom=accepted, color=colour, alpha=0.35, hatch="////", lw=0)
        axes.set_xticks(range(len(bars)), list(bars), fontsize=8)
        axes.grid(axis="x", visible=False)
        axes.set(title="What verification is spent on (hatched: drafts verified and rejected)")
        axes.set_ylabel("drafts verified per token emitted")
        legend_below(figure, axes)
        save(figure, path)
