"""Plots finished runs: tokens per forward pass against quality, one marker per decoder.

    python -m eval.pareto docs/pareto.png runs/dspark/<time> runs/jacobi_forcing/<time>
    python -m eval.pareto t1.png runs/dspark/<time> --temperature 1

Both are pooled over the benchmarks that all runs have in common, at one temperature. Runs must have the same prompts
and the same commit; a row that several runs share with the same numbers (plain AR) is one marker. The line and its band
are the quality of plain AR, or of any_subset where holes are filled in.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspec.config.compose import one_line_errors
from dspec.errors import UserError
from eval.intervals import wilson
from eval.reports.plots import plot_pareto
from eval.reports.table import aligned
from eval.results import ResultRow, load, pool_rows, reference

Runs = Mapping[Path, Mapping[str, Any]]


def pooled(runs: Runs, *, temperature: float) -> dict[str, ResultRow]:
    """Each decoder's row by label, pooled over the benchmarks that all runs share; `name` is the decoder's.

    Raises UserError if the runs share no benchmark with a verdict at this temperature.
    """
    tables = {
        folder: [r for r in run["rows"] if r["decoder"]["temperature"] == temperature and r["quality"] is not None]
        for folder, run in runs.items()
    }
    shared = set.intersection(*({row["benchmark"] for row in rows} for rows in tables.values()))
    if not shared:
        raise UserError(f"no benchmark with a quality at temperature {temperature:g} is in all of the runs")
    found: dict[str, ResultRow] = {}
    for folder, rows in tables.items():
        for method in dict.fromkeys(row["method"] for row in rows):
            chosen = [row for row in rows if row["method"] == method and row["benchmark"] in shared]
            row = pool_rows(chosen) | {"name": chosen[0]["decoder"]["name"], "benchmarks": sorted(shared)}
            same = method in found and all(found[method][key] == row[key] for key in ("tokens", "nfe", "quality"))
            found[method if same or method not in found else f"{method} ({folder.name})"] = row
    return found


def check_comparable(runs: Runs) -> None:
    """Raises UserError if the runs are of several commits, or a benchmark's prompts differ between them."""
    if len(commits := {str(run["run"]["git"]["sha"])[:7] for run in runs.values()}) > 1:
        raise UserError(f"the runs are of commits {', '.join(sorted(commits))}: plot only runs of one commit together")
    prompts: dict[str, set[Any]] = {}
    for run in runs.values():
        for row in run["rows"]:
            source = run["run"].get("benchmarks", {}).get(row["benchmark"], {})
            prompts.setdefault(row["benchmark"], set()).add((row["n"], str(source.get("sha256"))))
    if odd := sorted(name for name, kinds in prompts.items() if len(kinds) > 1):
        raise UserError(
            f"the runs used different prompts of {', '.join(odd)}: pass runs with the same benchmarks and limits"
        )


def draw(folders: Sequence[Path], *, temperature: float, path: Path) -> str:
    """Writes the plot as a PNG file and returns its points as text. Raises UserError for runs that cannot be plotted
    together."""
    runs = {folder: load(folder) for folder in folders}
    check_comparable(runs)
    rows = pooled(runs, temperature=temperature)
    name = reference({row["name"] for row in rows.values()})
    label, base = next((label, row) for label, row in rows.items() if row["name"] == name)
    run = next(iter(runs.values()))
    low, high = wilson(round(base["quality"] * base["n"]), base["n"]) or (0.0, 1.0)
    prompts = f"{base['n']} prompts ({', '.join(base['benchmarks'])})"
    title = (
        f"{run['rows'][0]['target']}, T={temperature:g}, {prompts}, commit {str(run['run']['git']['sha'])[:7]}\n"
        f"band: 95 % interval of {label}'s quality"
    )
    points = {label: (row["tpf"], row["quality"]) for label, row in rows.items()}
    plot_pareto(points, reference=(label, base["quality"], low, high), title=title, path=path)
    cells = [[label, f"{100 * quality:.1f}", f"{tpf:.2f}"] for label, (tpf, quality) in points.items()]
    return aligned(("decoder", "quality %", "tpf"), cells)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.pareto", description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="the PNG file to write")
    parser.add_argument("folders", nargs="+", type=Path, help="run folders with results.json")
    parser.add_argument("--temperature", type=float, default=0.0, help="rows of this temperature (0: greedy)")
    args = parser.parse_args()
    with one_line_errors():
        print(draw(args.folders, temperature=args.temperature, path=args.path))
