"""Rows of benchmarks scored by log-likelihood as text. Pure functions."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from eval.reports.table import aligned, number
from eval.results import ResultRow


def perplexity(row: ResultRow) -> float | None:
    """exp of minus the mean log-likelihood of an answer; None where the benchmark has no such score."""
    found = row["scores"].get("log_likelihood")
    return None if found is None else math.exp(-found["mean"])


def score_table(rows: Sequence[ResultRow]) -> str:
    """One line per row, under a line for each benchmark."""
    verdicts = list(dict.fromkeys(verdict for r in rows for verdict in r["verdicts"]))
    continuous = list(dict.fromkeys(score for r in rows for score in r["scores"]))
    headers = ["distribution", *(f"{verdict} %" for verdict in verdicts), *continuous]
    headers += ["perplexity"] if any(r["perplexity"] is not None for r in rows) else []
    cells = []
    for r in rows:
        low, high = (100 * end for end in r["interval_95"]["quality"])
        shares = [number(100 * r["verdicts"][v] if v in r["verdicts"] else None, ".1f") for v in verdicts]
        shares[verdicts.index(r["quality_name"])] += f" ({low:.0f}-{high:.0f})"
        means = [_mean(r["scores"].get(score)) for score in continuous]
        cells.append([r["method"], *shares, *means, number(r["perplexity"], ".2f")][: len(headers)])
    return aligned(headers, cells, titles=[_title(r) for r in rows])


def _mean(score: Mapping[str, Any] | None) -> str:
    if score is None:
        return number(None, ".2f")
    return f"{score['mean']:.2f}" + (f" ± {score['se']:.2f}" if score["se"] is not None else "")


def _title(r: ResultRow) -> str:
    out = f" ({r['left_out']} left out: they do not fit)" if r["left_out"] else ""
    return f"{r['benchmark']}, {r['n']} questions{out}; log-likelihoods in nats"
