"""The continuous scores of rows of results.json as text. Pure functions."""

from collections.abc import Mapping, Sequence
from typing import Any

from eval.reports.table import aligned, title
from eval.results import ResultRow

NOTE = "mean ± standard error over prompts"


def scores_table(rows: Sequence[ResultRow]) -> str:
    """One line per row that has scores, under a line for each benchmark and temperature; "" if none has. Rows with the
    same scores share their headers."""
    groups: dict[tuple[str, ...], list[ResultRow]] = {}
    for row in rows:
        if row.get("scores"):
            groups.setdefault(tuple(row["scores"]), []).append(row)
    tables = [
        aligned(
            ("method", *names),
            [[row["method"], *(mean_cell(row["scores"][name]) for name in names)] for row in members],
            titles=[title(row) for row in members],
        )
        for names, members in groups.items()
    ]
    return "\n\n".join([*tables, NOTE]) if tables else ""


def mean_cell(found: Mapping[str, Any] | None) -> str:
    """Mean and standard error; a dash for None."""
    if found is None:
        return "–"
    return _number(found["mean"]) if found["se"] is None else f"{_number(found['mean'])} ± {_number(found['se'])}"


def _number(value: float) -> str:
    """Three decimals below 10, none from 1000 on."""
    size = abs(value)
    return f"{value:.{0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3}f}"
