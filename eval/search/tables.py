"""The results of a search as text of at most 80 columns and as a plot. Pure functions of search.json's points.

Terms: the ridge point is the intensity (FLOP per byte read) above which a device is compute-bound.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.reports.plots import plot_roofline
from eval.reports.table import aligned, number
from eval.results import UNTRUSTED
from eval.search.roofline import Roofline

NEAR = 2.0  # a configuration within this factor of the ridge point is near it
HEADERS = ("configuration", "quality %", "tpf", "tok/s", "x AR", "pos.", "FLOP/B", "roof %", "diff")
LEGEND = f"""\
pos.: positions per forward pass; roof %: of the FLOP/s that the roofline allows
at FLOP/B; diff: answers that differ from AR's; {UNTRUSTED}: AR itself was not timed
against transformers' generate here (eval.run does that)"""

Point = dict[str, Any]


def name(config: Mapping[str, Any] | None) -> str:
    """n: block size, K: blocks in flight, r: activation, c: recycled candidates."""
    if config is None:
        return "AR"
    ratio = f" r={config['activation']:g}" if config["blocks"] > 1 else ""
    return f"n={config['block_size']} K={config['blocks']}{ratio} c={config['candidates']}"


def show(points: Sequence[Point], roofline: Roofline) -> str:
    """The table: one line per configuration, fastest first. `points[0]` is plain AR's."""
    title = (
        f"Jacobi configurations; this device reads {roofline.bandwidth / 1e9:.1f} GB/s, does "
        f"{roofline.flops / 1e9:.0f} GFLOP/s:\nits ridge point is at {roofline.ridge_point:.1f} FLOP/byte"
    )
    cells = [
        [
            name(p["config"]),
            number(None if p["quality"] is None else 100 * p["quality"], ".1f"),
            f"{p['tpf']:.2f}",
            f"{p['tokens_per_second']:.0f}",
            _times_ar(p, points),
            f"{p['positions_per_pass']:.1f}",
            f"{p['intensity']:.1f}",
            f"{100 * p['share_of_roofline']:.0f}",
            str(p["mismatches"]),
        ]
        for p in sorted(points, key=lambda p: -p["tokens_per_second"])
    ]
    return f"{title}\n{aligned(HEADERS, cells)}\n{LEGEND}"


def _times_ar(point: Point, points: Sequence[Point]) -> str:
    return f"{point['tokens_per_second'] / points[0]['tokens_per_second']:.2f}{UNTRUSTED}"


def picks(points: Sequence[Point], roofline: Roofline) -> dict[str, Point]:
    """The fastest configuration, and the fastest within a factor of `NEAR` of the ridge point, by description."""
    tried = [p for p in points if p["config"] is not None]
    near = [p for p in tried if _from_ridge(p, roofline) <= math.log(NEAR)]
    found = {"fastest": _fastest(tried)}
    if near:
        return found | {"fastest near the ridge point": _fastest(near)}
    return found | {"none is near the ridge point; the nearest": min(tried, key=lambda p: _from_ridge(p, roofline))}


def _fastest(points: Sequence[Point]) -> Point:
    return max(points, key=lambda p: p["tokens_per_second"])


def _from_ridge(point: Point, roofline: Roofline) -> float:
    return abs(math.log(point["intensity"] / roofline.ridge_point))


def verdict(points: Sequence[Point], roofline: Roofline) -> str:
    """Two lines for each of `picks`."""
    return "\n".join(
        f"{role}: {name(p['config'])},\n  {p['tpf']:.2f} tokens per pass, {_times_ar(p, points)} x AR's tokens/s, at "
        f"{p['intensity'] / roofline.ridge_point:.2f} of the ridge point"
        for role, p in picks(points, roofline).items()
    )


def plot(points: Sequence[Point], roofline: Roofline, path: Path) -> None:
    """The configurations under the roofline, one colour per block size."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for p in points:
        group = "AR" if p["config"] is None else f"n={p['config']['block_size']}"
        groups.setdefault(group, []).append((p["intensity"], p["flops"]))
    picked = picks(points, roofline).items()
    notes = {f"{role}: {name(p['config'])}": (p["intensity"], p["flops"]) for role, p in picked}
    plot_roofline(groups, notes=notes, bandwidth=roofline.bandwidth, flops=roofline.flops, path=path)
