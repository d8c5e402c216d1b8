"""A load report as text: for a terminal, and as Markdown. Pure functions of results.json's content."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from eval.reports.table import aligned, markdown_table, number

Row = Mapping[str, Any]
HEADERS = (
    "variant",
    "tok/s",
    "sim",
    "error %",
    "x AR (95 %)",
    "tok/s/user",
    "drafts",
    "waste %",
    "ms/step",
    "us",
    "diff",
)
LEGEND = """\
tok/s: tokens of answers per second of the engine, all seats full; sim, error %: the simulator's and how far it is off;
x AR: median over repeats in which all variants took turns; tok/s/user: mean over answers, from admission to end;
drafts: verified per request and step; waste: verified but rejected; us: the scheduler's own microseconds per step;
diff: greedy answers that differ from AR's, of those compared (sampled: lossless in law, not compared)"""


def cells(row: Row) -> list[str]:
    differ = row["answers_that_differ"]
    return [
        row["variant"],
        f"{row['throughput']:.0f}",
        f"{row['predicted']['throughput']:.0f}",
        f"{100 * row['error']:+.1f}",
        interval(row["over_ar"]),
        number(row["tokens_per_second_per_user"], ".1f"),
        f"{row['budget']:.2f}",
        f"{100 * row['waste']:.0f}",
        f"{row['milliseconds_per_step']:.1f}",
        number(row["scheduler_microseconds"], ".0f"),
        "–" if differ is None else f"{differ}/{row['answers_compared']}",
    ]


def interval(ratio: Mapping[str, Any]) -> str:
    if ratio["interval_95"] is None:
        return f"{ratio['median']:.2f}"
    low, high = ratio["interval_95"]
    return f"{ratio['median']:.2f} ({low:.2f}-{high:.2f})"


def text(rows: Sequence[Row], *, clock: str) -> str:
    """For a terminal."""
    titles = [f"{row['concurrency']} in flight" for row in rows]
    return f"seconds of the {clock} clock\n{aligned(HEADERS, [cells(row) for row in rows], titles=titles)}\n{LEGEND}"


def markdown(rows: Sequence[Row], lines: Sequence[Mapping[str, Any]], *, clock: str) -> str:
    """All cells, and the scheduled variants' verdicts."""
    head = ("in flight", *HEADERS)
    body = [[str(row["concurrency"]), *cells(row)] for row in rows]
    best = (
        "in flight",
        "best static",
        "better scheduled",
        "over it (95 %)",
        "simulated",
        "over AR (95 %)",
        "simulated",
    )
    tables = [
        markdown_table(head, body, left=1),
        LEGEND,
        markdown_table(best, [verdict_cells(line) for line in lines], left=1),
    ]
    return "\n\n".join([f"Seconds of the {clock} clock.", *tables]) + "\n"


def verdict_cells(line: Mapping[str, Any]) -> list[str]:
    return [
        str(line["concurrency"]),
        line["static"],
        line["scheduled"],
        interval(line["over_static"]),
        f"{line['simulated_over_static']:.2f}",
        interval(line["over_ar"]),
        f"{line['simulated_over_ar']:.2f}",
    ]


def verdict_text(lines: Sequence[Mapping[str, Any]]) -> str:
    headers = ("in flight", "best static", "scheduled", "over it (95 %)", "sim", "over AR (95 %)", "sim")
    return aligned(headers, [verdict_cells(line) for line in lines])


def errors(rows: Sequence[Row]) -> str:
    """One line: how far the simulator is off."""
    off = [abs(row["error"]) for row in rows]
    worst = max(rows, key=lambda row: abs(row["error"]))
    return (
        f"predicted throughput is off by {100 * median(off):.1f} % at the median cell, by "
        f"{100 * max(off):.1f} % at most ({worst['variant']}, {worst['concurrency']} in flight)"
    )
