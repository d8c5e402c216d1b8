"""The noise schedules side by side, as the paper's table has them: accuracy and passes a token.

    python -m dspec.train -m recipe=jacobi_forcing \
        method/schedule=random,progressive,reverse method.window=null
    python -m eval.ablation runs/sweep/<time>/*/

Reads results.json of each run; quality and passes are pooled over the benchmarks' prompts, under one decoder.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dspec.config import one_line_errors
from dspec.errors import UserError

DECODER = "jacobi_single"


def ablation(folders: Sequence[Path], *, decoder: str) -> Table:
    """A line a run: schedule, accuracy and passes a token of `decoder`, and the same of the base.

    Raises UserError for a folder without results, or whose results lack that decoder.
    """
    table = Table(title=f"noise schedules, decoder {decoder}", title_justify="left")
    for column in ("schedule", "mask window", "acc.", "passes/token", "base acc.", "base passes/token"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for folder in folders:
        path = folder / "results.json"
        if not path.is_file():
            raise UserError(f"no results in {folder}: give folders of finished runs")
        results = json.loads(path.read_text(encoding="utf-8"))
        method = results["run"]["config"]["method"]
        own, base = (_pooled(results["rows"], name, path) for name in (decoder, f"base_{decoder}"))
        window = "–" if method["window"] is None else str(method["window"])
        table.add_row(method["schedule"]["_target_"].rpartition(".")[2], window, *own, *base)
    return table


def _pooled(rows: Sequence[dict[str, Any]], decoder: str, path: Path) -> tuple[str, str]:
    """Accuracy and passes a token over all benchmarks; the prefill's token and pass are left out."""
    own = [row for row in rows if row["decoder"]["name"] == decoder]
    if not own:
        raise UserError(f"{path} has no decoder {decoder}: run the recipe with it")
    right, prompts = sum(row["quality"] * row["n"] for row in own), sum(row["n"] for row in own)
    tokens = sum(row["tokens"] - row["n"] for row in own)
    passes = sum(row["nfe"] - row["nfe_prefill"] for row in own)
    return f"{100 * right / prompts:.1f}", f"{passes / tokens:.3f}"


def main() -> None:
    with one_line_errors():
        if len(sys.argv) < 2:
            raise UserError("say which runs: python -m eval.ablation runs/sweep/<time>/*/")
        Console().print(ablation([Path(a) for a in sys.argv[1:]], decoder=DECODER))


if __name__ == "__main__":
    main()
