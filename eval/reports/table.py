"""Rows of results.json as text: for a terminal of 80 columns, as Markdown and as CSV. Pure functions."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

WIDTH = 80
LOSSLESS = "="  # behind the quality of a row that has the law of another row
UNTRUSTED = "*"  # behind a speedup over an AR loop that does not keep up


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _quality(row: Row) -> str:
    """Per cent, and the 95 % interval."""
    if row["quality"] is None:
        return "–"
    low, high = row["interval_95"]["quality"]
    return f"{100 * row['quality']:.1f} ({100 * low:.0f}-{100 * high:.0f})"


def marked_lossless(row: Row) -> bool:
    """Whether the row's law is that of its serial row: other quality than there is chance, or rounding."""
    return bool(row["lossless"]) and row["decoder"]["name"] != row["serial"]


def group(row: Row) -> tuple[str, float]:
    return row["benchmark"], row["decoder"]["temperature"]


def _columns(rows: Sequence[Row], *, mark: str) -> dict[str, Callable[[Row], str]]:
    """Header -> cell; `mark` stands behind speedups."""
    columns: dict[str, Callable[[Row], str]] = {
        "method": lambda r: r["method"],
        "quality %": lambda r: _quality(r) + (LOSSLESS if marked_lossless(r) else " "),
        "tau": lambda r: _number(r["tau"], ".2f"),
        "tpf": lambda r: _number(r["tpf"], ".2f"),
        "NFE": lambda r: str(r["nfe"]),
        "tok/s": lambda r: f"{r['tokens_per_second']:.0f}",
        "x AR": lambda r: f"{r['speedup']:.2f}{mark}",
    }
    if any(row["speedup"] != row["speedup_vs_base_ar"] for row in rows):  # the target's own weights were trained
        columns["x base"] = lambda r: f"{r['speedup_vs_base_ar']:.2f}{mark}"
    columns["diff"] = lambda r: _number(r["mismatches"], "d")
    return columns


def title(row: Row) -> str:
    named = f", {row['quality_name']}" if row["quality_name"] else ""
    return f"{row['benchmark']}, T={row['decoder']['temperature']:g}, {row['n']} prompts{named}"


def table(rows: Sequence[Row], *, trusted: bool) -> str:
    """Lines of at most `WIDTH` characters (a method's name too long for its column has a line of its own), one a row,
    under a line for each benchmark and temperature; quality before speed."""
    columns = _columns(rows, mark="" if trusted else UNTRUSTED)
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    widths[0] = min(2 + max([len("method"), *(len(row[0]) for row in cells)]), WIDTH - sum(w + 1 for w in widths[1:]))
    lines, previous = [_line(list(columns), widths)], None
    for row, own in zip(rows, cells, strict=True):
        if group(row) != previous:
            lines.append(title(row))
        previous = group(row)
        name = f"  {own[0]}"
        if len(name) > widths[0]:
            lines.append(name)
            name = ""
        lines.append(_line([name, *own[1:]], widths))
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    return " ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]).rstrip()


def legend(rows: Sequence[Row]) -> str:
    """What the table's headers and marks mean, as far as they occur."""
    lines = ["(low-high): 95 % interval over prompts (Wilson)."]
    if any(map(marked_lossless, rows)):
        lines.append(f"{LOSSLESS}: lossless, the law of its AR row: another quality there is chance or rounding.")
    lines.append("x AR: tokens per second over AR of the same weights, median over prompts.")
    if any(row["speedup"] != row["speedup_vs_base_ar"] for row in rows):
        lines.append("x base: the same over AR of the base that was trained.")
    lines.append("diff: greedy answers that differ from AR's.")
    return "\n".join(lines)


def gate_note(check: Mapping[str, Any]) -> str:
    """How our AR loop stands against transformers' generate."""
    if check["trusted"] is None:
        return f"{UNTRUSTED} AR was not timed against transformers' generate (generate_prompts=0)"
    spread = f"{check['batches']} batches of {check['batch_size']}"
    if check["interval_95"] is not None:
        low, high = check["interval_95"]
        spread = f"{low:.2f} to {high:.2f}, {spread}"
    found = f"AR runs at {check['ar_over_generate']:.2f}x the speed of transformers' generate"
    if check["trusted"]:
        return f"{found}\n  ({spread})"
    return f"{UNTRUSTED} {found},\n  below {check['floor']:g} ({spread}): speedups over it may flatter"


def line(row: Row) -> str:
    """A row that is done, in one line."""
    found = [f"tpf {_number(row['tpf'], '.2f')}", f"x AR {row['speedup']:.2f}"]
    if row["quality"] is not None:
        found.insert(0, f"{_quality(row)} %")
    return f"  {row['benchmark']} T={row['decoder']['temperature']:g}, {row['method']}: {', '.join(found)}"


def markdown(rows: Sequence[Row], *, trusted: bool) -> str:
    """The table, with benchmark, T and n in columns of their own."""
    columns = _columns(rows, mark="" if trusted else r"\*")
    headers = ["benchmark", "T", "n", *columns]
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * 4 + "---:|" * (len(headers) - 4)]
    for row in rows:
        cells = [row["benchmark"], f"{row['decoder']['temperature']:g}", str(row["n"])]
        cells += [cell(row).strip().replace("|", r"\|") for cell in columns.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


_PLAIN = ("quality", "quality_name", "tau", "tpf", "tpf_with_prefill", "nfe", "tokens", "tokens_per_second", "speedup",
          "speedup_vs_base_ar", "mismatches", "lossless")  # fmt: skip


def as_csv(rows: Sequence[Row], *, trusted: bool | None) -> str:
    """Numbers in full, one line a row; `trusted` of its speedups."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    ends = [f"{name}_{end}" for name in ("quality", "tau", "tpf", "speedup") for end in ("low", "high")]
    writer.writerow(["benchmark", "temperature", "method", "decoder", "target", "n", *_PLAIN, *ends, "speedup_trusted"])
    for row in rows:
        own = [row["benchmark"], row["decoder"]["temperature"], row["method"], row["decoder"]["name"], row["target"]]
        intervals = [row["interval_95"][name] or (None, None) for name in ("quality", "tau", "tpf", "speedup")]
        writer.writerow([*own, row["n"], *(row[name] for name in _PLAIN), *(x for i in intervals for x in i), trusted])
    return file.getvalue()
