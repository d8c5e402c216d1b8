"""What all plots share: style, series' looks, legend below the panel, atomic writing.

Colours are Okabe and Ito's and Tol's wine, which are colour-blind safe; series also differ in marker or dash."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dspec.atomic import atomic_file

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES = ("-", "--", "-.", ":")
STYLE: Any = {  # Any: matplotlib types its keys as a Literal of all settings
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


def looks() -> Iterator[tuple[str, str, str]]:
    """Colour, dash and marker of each series in turn."""
    return zip(cycle(COLOURS), cycle(_DASHES), cycle(_MARKERS), strict=False)


def check_series(series: Mapping[str, Sequence[float]], *, length: int | None) -> None:
    for label, values in series.items():
        if length is not None and len(values) != length:
            raise ValueError(f"{label}: {len(values)} values for {length} steps")
    if not any(math.isfinite(value) for values in series.values() for value in values):
        raise ValueError("nothing to plot: no finite value in any series")


def legend_below(figure: Figure, axes: Axes) -> None:
    """The legend below the panel, never over a curve; two columns, since labels may be long."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 2 if len(labels) > 1 and max(map(len, labels)) > 12 else min(4, len(labels))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.18 * -(-len(labels) // columns))


def new_figure(width: float, height: float) -> Figure:
    """A standalone figure (inches): no pyplot, no global state."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    with atomic_file(path) as scratch:
        figure.savefig(scratch, format="png")
