"""Compares the noise schedules as in the paper's table: accuracy and forward passes per token.

    python -m dspec.train -m recipe=jacobi_forcing \
        method/schedule=random,progressive,reverse method.window=null
    python -m eval.ablation runs/sweep/<time>/*/

Reads results.json of each run; quality and passes are pooled over the benchmarks' prompts, for one decoder, each
temperature separately.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspec.config.compose import one_line_errors
from dspec.errors import UserError
from eval.reports.table import aligned
from eval.results import load, pool_rows

DECODER = "jacobi_single"
HEADERS = ("schedule", "window", "T", "acc.", "passes/token", "base acc.", "base passes/token")


def ablation(folders: Sequence[Path], *, decoder: str) -> list[list[str]]:
    """The table's cells, under HEADERS: one line per run and temperature; `decoder` on the trained target and its base.

    Raises UserError for a folder without results, without a noise schedule, or without that decoder.
    """
    lines = []
    for folder in folders:
        results = load(folder)
        method = results["run"]["config"].get("method")
        if not isinstance(method, dict) or "schedule" not in method or "window" not in method:
            raise UserError(f"{folder} is not a run with a noise schedule: pass runs of recipe=jacobi_forcing")
        schedule = (method["schedule"] or {}).get("_target_", "none").rpartition(".")[2].removesuffix("Schedule")
        window = "–" if method["window"] is None else str(method["window"])
        for temperature in sorted({row["decoder"]["temperature"] for row in results["rows"]}):
            rows = [row for row in results["rows"] if row["decoder"]["temperature"] == temperature]
            trained, base = (_pooled(rows, name, folder) for name in (decoder, f"base_{decoder}"))
            lines.append([schedule, window, f"{temperature:g}", *trained, *base])
    return lines


def _pooled(rows: Sequence[dict[str, Any]], decoder: str, folder: Path) -> tuple[str, str]:
    """Accuracy in per cent, and passes per token over all benchmarks, prefill excluded."""
    chosen = [row for row in rows if row["decoder"]["name"] == decoder]
    if not chosen:
        raise UserError(f"{folder} has no decoder {decoder}: run the recipe with it")
    pooled = pool_rows(chosen)
    accuracy = "–" if pooled["quality"] is None else f"{100 * pooled['quality']:.1f}"
    return accuracy, f"{1 / pooled['tpf']:.3f}" if pooled["tpf"] else "–"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.ablation", description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="folders of finished runs of recipe=jacobi_forcing")
    with one_line_errors():
        cells = ablation(parser.parse_args().folders, decoder=DECODER)
        print(f"noise schedules, decoder {DECODER}\n{aligned(HEADERS, cells)}")
