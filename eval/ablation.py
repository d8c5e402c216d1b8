"""The noise schedules side by side, as the paper's table has them: accuracy and passes a token.

    python -m dspec.train -m recipe=jacobi_forcing \
        method/schedule=random,progressive,reverse method.window=null
    python -m eval.ablation runs/sweep/<time>/*/

Reads results.json of each run; quality and passes are pooled over the benchmarks' prompts, under one decoder, each
temperature by itself.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dspec.config import one_line_errors
from dspec.errors import UserError
from eval.results import read_results

DECODER = "jacobi_single"


def ablation(folders: Sequence[Path], *, decoder: str) -> Table:
    """A line a run and temperature: schedule, accuracy and passes a token of `decoder`, and the same of the base.

    Raises UserError for a folder without results, whose run trained without a schedule, or that lack that decoder.
    """
    table = Table(title=f"noise schedules, decoder {decoder}", title_justify="left")
    for column in ("schedule", "mask window", "T", "acc.", "passes/token", "base acc.", "base passes/token"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for folder in folders:
        results = read_results(folder)
        method = results["run"]["config"].get("method")
        if not isinstance(method, dict) or "schedule" not in method or "window" not in method:
            raise UserError(f"{folder} is no training run with a noise schedule: give runs of recipe=jacobi_forcing")
        schedule = (method["schedule"] or {}).get("_target_", "none").rpartition(".")[2].removesuffix("Schedule")
        window = "–" if method["window"] is None else str(method["window"])
        for temperature in sorted({row["decoder"]["temperature"] for row in results["rows"]}):
            rows = [row for row in results["rows"] if row["decoder"]["temperature"] == temperature]
            own, base = (_pooled(rows, name, folder) for name in (decoder, f"base_{decoder}"))
            table.add_row(schedule, window, f"{temperature:g}", *own, *base)
    return table


def _pooled(rows: Sequence[dict[str, Any]], decoder: str, folder: Path) -> tuple[str, str]:
    """Accuracy and passes a token over all benchmarks; the prefill's token and pass are left out."""
    own = [row for row in rows if row["decoder"]["name"] == decoder]
    if not own:
        raise UserError(f"{folder} has no decoder {decoder}: run the recipe with it")
    judged = [row for row in own if row["quality"] is not None]
    right, prompts = sum(row["quality"] * row["n"] for row in judged), sum(row["n"] for row in judged)
    tokens = sum(row["tokens"] - row["n"] for row in own)
    passes = sum(row["nfe"] - row["nfe_prefill"] for row in own)
    return f"{100 * right / prompts:.1f}" if prompts else "–", f"{passes / tokens:.3f}" if tokens else "–"


def main() -> None:
    with one_line_errors():
        if len(sys.argv) < 2:
            raise UserError("say which runs: python -m eval.ablation runs/sweep/<time>/*/")
        Console().print(ablation([Path(a) for a in sys.argv[1:]], decoder=DECODER))


if __name__ == "__main__":
    main()
