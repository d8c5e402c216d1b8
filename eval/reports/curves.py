"""Curves of one run: quality against tokens per forward pass, along one setting of the decoders.

    python -m eval.curves runs/eval/<time> --along threshold       (folder of a finished run)

Decoders that differ in that setting alone are the points of a curve, named by what their labels share. All is pooled
over the benchmarks that have verdicts, each temperature separately. Differences in quality are those to the reference,
the decoder that emits one token per pass, paired by prompt (Student's t, as in eval.compare). A point is Pareto-optimal
if no other is at least as good in both and better in one. Writes curves.json, and plots of the frontier (quality
against tokens per pass) and of both against the setting.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dspec.atomic import write_json
from dspec.config.compose import one_line_errors
from dspec.errors import UserError
from eval.intervals import student, wilson
from eval.reports.plots import plot_frontier, plot_scaling
from eval.reports.report import Report
from eval.reports.table import aligned
from eval.results import ResultRow, load, pool_rows, reference
from eval.rows import tpf_interval
from eval.samples import Sample, read_samples

OPTIMAL = "^"  # suffix of the tokens per pass of a Pareto-optimal decoder
LEGEND = f"""\
(low-high), (low to high): 95 % intervals over prompts. −: the difference in
points, paired by prompt; won, lost: prompts that only this decoder, or only the
other one solves. {OPTIMAL}: Pareto-optimal. Per pass: branches (a pass over k + 1
branches is one forward pass) and positions computed."""

Point = dict[str, Any]  # JSON-ready
Answers = Mapping[tuple[str, str], tuple[Sample, bool]]  # by benchmark and prompt id, with the headline verdict


def points(
    results: Mapping[str, Any], samples: Sequence[Sample], *, temperature: float, along: str | None
) -> list[Point]:
    """One per decoder, in the order of the results; `at` is its value of the setting `along`, None for decoders without
    it and for those that others are measured against. Raises UserError if there is no verdict or no pass to measure, or
    no decoder has a number for `along`."""
    rows = [r for r in results["rows"] if r["decoder"]["temperature"] == temperature and r["quality"] is not None]
    if not rows:
        raise UserError(f"no benchmark has verdicts at temperature {temperature:g}: there is no quality to draw")
    by_decoder: dict[str, list[ResultRow]] = {}
    for row in rows:
        by_decoder.setdefault(row["decoder"]["name"], []).append(row)
    baselines = {row["baseline"] for row in rows}
    at = {name: None if name in baselines else _number(same[0], along) for name, same in by_decoder.items()}
    if along is not None and set(at.values()) == {None}:
        raise UserError(f"no decoder of the run has a number for {along}: name a setting that they differ in")
    answers = {name: _answers(same, samples) for name, same in by_decoder.items()}
    base = reference(by_decoder)
    made = [
        {"decoder": name, "method": same[0]["method"], "at": at[name], "reference": name == base}
        | _measured(same, answers[name], answers[base], seed=results["run"]["seed"])
        for name, same in by_decoder.items()
    ]
    curve = _curve_names(by_decoder, at, along)
    return [
        point | {"curve": curve[point["decoder"]], "optimal": not any(_dominates(other, point) for other in made)}
        for point in made
    ]


def _number(row: ResultRow, setting: str | None) -> float | None:
    value = row["decoder"].get(setting)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _answers(rows: Sequence[ResultRow], samples: Sequence[Sample]) -> Answers:
    """One decoder's answers."""
    verdict = {row["benchmark"]: row["quality_name"] for row in rows}
    decoder = rows[0]["decoder"]
    return {
        (s.benchmark, s.id): (s, s.verdicts[verdict[s.benchmark]])
        for s in samples
        if (s.decoder, s.temperature) == (decoder["name"], decoder["temperature"]) and s.benchmark in verdict
    }


def _measured(rows: Sequence[ResultRow], answers: Answers, base: Answers, *, seed: int) -> Point:
    """One decoder's quality, its tokens per pass and what a pass costs; the difference in percentage points to `base`,
    whose answers are to the same prompts."""
    pooled = pool_rows(rows)
    passes = pooled["nfe"] - pooled["nfe_prefill"]
    if not passes:
        raise UserError("every answer ended with its first token: there is no pass to measure; use other prompts")
    gaps = [100 * (right - base[prompt][1]) for prompt, (_, right) in answers.items()]
    return {
        "n": pooled["n"],
        "quality": pooled["quality"],
        "quality_interval": wilson(sum(right for _, right in answers.values()), len(answers)),
        "difference": sum(gaps) / len(gaps),
        "difference_interval": list(student(gaps)[1:]) if len(set(gaps)) > 1 else None,  # no spread, no interval
        "won": sum(gap > 0 for gap in gaps),
        "lost": sum(gap < 0 for gap in gaps),
        "tpf": pooled["tpf"],
        "tpf_interval": tpf_interval([sample.generation for sample, _ in answers.values()], seed=seed),
        "tpf_paper": pooled["tpf_paper"],
        "branches_per_pass": pooled["branch_forwards"] / passes,
        "positions_per_pass": pooled["positions_computed"] / passes,
    }


def _dominates(other: Point, point: Point) -> bool:
    ours, theirs = ((p["tpf"], p["quality"]) for p in (point, other))
    return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))


def _curve_names(
    by_decoder: Mapping[str, Sequence[ResultRow]], at: Mapping[str, float | None], along: str | None
) -> dict[str, str]:
    """The curve of each decoder: what the labels of those that differ in `along` alone share, part by part."""
    groups: dict[Any, list[str]] = {}
    for name, rows in by_decoder.items():
        settings = {key: str(value) for key, value in rows[0]["decoder"].items() if key not in ("name", along)}
        key = name if at[name] is None else (rows[0]["baseline"], *sorted(settings.items()))
        groups.setdefault(key, []).append(name)
    curves: dict[str, str] = {}
    for names in groups.values():
        labels = [by_decoder[name][0]["method"] for name in names]
        shared = [part for part in labels[0].split(", ") if all(part in label.split(", ") for label in labels)]
        curve = ", ".join(shared) or labels[0]
        curves |= dict.fromkeys(names, curve if curve not in curves.values() else f"{curve} ({names[0]})")
    return curves


def curves(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points of each curve, by their setting."""
    found: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda p: -1 if p["at"] is None else p["at"]):
        found.setdefault(point["curve"], []).append(point)
    return {name: found[name] for name in dict.fromkeys(p["curve"] for p in points)}


def show(points: Sequence[Point]) -> str:
    """Quality and tokens per pass, then what a pass costs."""
    base = next(point["method"] for point in points if point["reference"])
    quality = aligned(
        ("decoder", "quality %", f"− {base}", "won", "lost", "tpf"),
        [[p["method"], _quality(p), _difference(p), str(p["won"]), str(p["lost"]), _tpf(p)] for p in points],
    )
    costs = aligned(
        ("decoder", "tpf", "tpf_paper", "branches", "positions"),
        [
            [p["method"], f"{p['tpf']:.2f}", f"{p['tpf_paper']:.2f}"]
            + [f"{p[name]:.1f}" for name in ("branches_per_pass", "positions_per_pass")]
            for p in points
        ],
    )
    return f"{quality}\n\n{costs}"


def _quality(point: Point) -> str:
    low, high = point["quality_interval"]
    return f"{100 * point['quality']:.1f} ({100 * low:.0f}-{100 * high:.0f})"


def _difference(point: Point) -> str:
    if point["reference"]:
        return "–"
    if point["difference_interval"] is None:
        return f"{point['difference']:+.1f} each time"
    low, high = point["difference_interval"]
    return f"{point['difference']:+.1f} ({low:+.1f} to {high:+.1f})"


def _tpf(point: Point) -> str:
    low, high = point["tpf_interval"]
    return f"{point['tpf']:.2f} ({low:.2f}-{high:.2f}){OPTIMAL if point['optimal'] else ' '}"


def draw(points: Sequence[Point], *, along: str | None, title: str, folder: Path, suffix: str) -> None:
    """Writes frontier<suffix>.png and, with a setting `along`, <along><suffix>.png into `folder`."""
    base = next(point for point in points if point["reference"])
    reference = (base["method"], base["quality"], *base["quality_interval"])
    title = f"{title}\nband: 95 % interval of {base['method']}'s quality"
    by_curve = curves(points)
    plot_frontier(by_curve, reference=reference, title=title, path=folder / f"frontier{suffix}.png")
    if along is not None:
        path = folder / f"{along}{suffix}.png"
        plot_scaling(by_curve, setting=along, reference=reference, title=title, path=path)


def report(folder: Path, *, along: str | None) -> str:
    """Writes curves.json and the plots, and returns the tables. Raises UserError for a folder that is no finished
    run's."""
    results, path = load(folder), folder / "samples.jsonl"
    if not path.is_file():
        raise UserError(f"{path} is missing: quality is compared prompt by prompt")
    samples = read_samples(path)
    by_temperature: dict[str, list[Point]] = {}
    for temperature in sorted({row["decoder"]["temperature"] for row in results["rows"]}):
        at_t = points(results, samples, temperature=temperature, along=along)
        benchmarks = ", ".join(dict.fromkeys(row["benchmark"] for row in results["rows"] if row["quality"] is not None))
        about = f"{results['rows'][0]['target']}, T={temperature:g}, {at_t[0]['n']} prompts ({benchmarks})"
        draw(at_t, along=along, title=about, folder=folder / "plots", suffix=f"_T{temperature:g}")
        by_temperature[about] = at_t
    write_json(folder / "curves.json", {"run": results["run"], "along": along, "points": by_temperature})
    return "\n\n".join([*(f"{about}\n{show(at_t)}" for about, at_t in by_temperature.items()), LEGEND])


class CurveReport(Report):
    """A run's report, and then its curves (report._target_ of a page in recipes/sweeps)."""

    def __init__(self, *, along: str | None) -> None:
        """`along` is the setting that varies along a curve; None: every decoder is a point of its own."""
        self.along = along

    def __call__(
        self, *, results: dict[str, Any], history: Sequence[dict[str, float]], run_dir: Path, logger: object = None
    ) -> None:
        super().__call__(results=results, history=history, run_dir=run_dir, logger=logger)
        _print(f"\n{report(run_dir, along=self.along)}")


def _print(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.curves", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="of a finished run")
    parser.add_argument("--along", help="the setting that varies along a curve, such as threshold or branches")
    args = parser.parse_args()
    with one_line_errors():
        _print(report(args.folder, along=args.along))
