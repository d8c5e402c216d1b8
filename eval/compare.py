"""Two methods over several seeds: the paired difference of tau, with a 95 % t interval.

python -m eval.compare runs/sweep/<time>/*/       (run folders with results.json)
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dspec.config import one_line_errors
from dspec.errors import UserError

# two-sided 95 % quantiles of Student's t for 1..9 degrees of freedom
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Taus = dict[tuple[str, float], dict[int, float]]  # (method, temperature) -> seed -> tau


def pooled_taus(results: Sequence[Mapping[str, Any]]) -> Taus:
    """tau over all benchmarks of a run: pooled tokens over pooled verify rounds."""
    taus: Taus = defaultdict(dict)
    for result in results:
        sums: dict[tuple[str, float], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for row in result["rows"]:
            if row["tau"] is not None:
                rounds = row["nfe"] - row["nfe_prefill"]
                total = sums[row["method"], row["decoder"]["temperature"]]
                total[0] += row["tau"] * rounds
                total[1] += rounds
        for key, (tokens, rounds) in sums.items():
            if result["run"]["seed"] in taus[key]:
                raise UserError(f"two runs of {key[0]!r} have seed {result['run']['seed']}: give each once")
            taus[key][result["run"]["seed"]] = tokens / rounds
    return dict(taus)


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % t interval; raises UserError for fewer than 2 or more than 10 pairs."""
    if not 2 <= len(differences) <= 1 + len(_T95):
        raise UserError(f"{len(differences)} paired seeds: an interval needs 2 to {1 + len(_T95)}")
    mean = statistics.fmean(differences)
    half = _T95[len(differences) - 2] * statistics.stdev(differences) / len(differences) ** 0.5
    return mean, mean - half, mean + half


def compare(folders: Sequence[Path]) -> Table:
    """Methods by temperature and seed, and the differences of each two with seeds in common."""
    results = []
    for folder in folders:
        path = folder / "results.json"
        if not path.is_file():
            raise UserError(f"{path} is missing: give folders of finished runs")
        results.append(json.loads(path.read_text(encoding="utf-8")))
    taus = pooled_taus(results)
    table = Table("T", "method", "tau by seed", "mean", title="tau, pooled over benchmarks")
    for (method, temperature), by_seed in taus.items():
        shown = "  ".join(f"{seed}: {tau:.3f}" for seed, tau in sorted(by_seed.items()))
        table.add_row(f"{temperature:g}", method, shown, f"{statistics.fmean(by_seed.values()):.3f}")
    for (a, ta), (b, tb) in combinations(taus, 2):
        seeds = sorted(taus[a, ta].keys() & taus[b, tb].keys())
        if ta == tb and len(seeds) > 1:
            mean, low, high = interval([taus[a, ta][s] - taus[b, tb][s] for s in seeds])
            table.add_row(f"{ta:g}", f"{a} − {b}", f"{mean:+.3f}, 95 % interval {low:+.3f} to {high:+.3f}", "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.compare", description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="run folders with results.json")
    with one_line_errors():
        console = Console()
        console.width = max(console.width, 110)
        console.print(compare(parser.parse_args().folders))


if __name__ == "__main__":
    main()
