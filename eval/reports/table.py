"""Rows of results.json as text: for a terminal of 80 columns, as Markdown and as CSV. Pure functions."""

import csv
import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eval.results import ANY_SUBSET, AR, AR_OF_BASE, DIFFUSION, UNTRUSTED, ResultRow, baseline_label

WIDTH = 80
GOLD_LENGTH = "gold length"  # in the line above the rows of a benchmark that tells how long the reference is
LOSSLESS = "="  # suffix of the quality of a row whose outputs have the distribution of its baseline's


def number(value: float | None, form: str) -> str:
    """The formatted number; a dash for None."""
    return "–" if value is None else format(value, form)


def quality(row: ResultRow) -> str:
    """Quality in per cent, and its 95 % interval."""
    if row["quality"] is None:
        return "–"
    low, high = row["interval_95"]["quality"]
    return f"{100 * row['quality']:.1f} ({100 * low:.0f}-{100 * high:.0f})"


def marked_lossless(row: ResultRow) -> bool:
    """Whether the row's outputs have the distribution of its baseline's: differences in quality are chance or
    rounding. A baseline itself is not marked."""
    return bool(row["lossless"]) and row["decoder"]["name"] != row["baseline"]


def _label(rows: Sequence[ResultRow]) -> str:
    return baseline_label(row["baseline"] for row in rows)


def _other_reference(rows: Sequence[ResultRow]) -> str | None:
    """The header of the speedups over the reference; None if they equal those over the baseline."""
    if all(row["speedup"] == row["speedup_vs_base_ar"] for row in rows):
        return None
    return "x base" if {row["reference"] for row in rows} == {AR_OF_BASE} else "x reference"


def over_ar(decoder: str) -> bool:
    """Whether speedups over this decoder are over plain AR: no other loop can be timed against generate."""
    return decoder in (AR, AR_OF_BASE)


def _speedup(value: float, over: str, *, trusted: bool) -> str:
    return f"{value:.2f}{'' if trusted and over_ar(over) else UNTRUSTED}"


def papers_differ(rows: Sequence[ResultRow]) -> bool:
    """Whether papers on diffusion LMs would report other tokens per pass for a row: slots were filled after an answer's
    end."""
    return any(row["slots_filled"] > row["tokens"] for row in rows)


def group(row: ResultRow) -> tuple[str, float]:
    return row["benchmark"], row["decoder"]["temperature"]


def _columns(rows: Sequence[ResultRow], *, trusted: bool) -> dict[str, Callable[[ResultRow], str]]:
    """Header -> cell."""
    columns: dict[str, Callable[[ResultRow], str]] = {
        "method": lambda r: r["method"],
        "quality %": lambda r: quality(r) + (LOSSLESS if marked_lossless(r) else " "),
        "tau": lambda r: number(r["tau"], ".2f"),
        "tpf": lambda r: number(r["tpf"], ".2f"),
    }
    if papers_differ(rows):
        columns["tpf_paper"] = lambda r: number(r["tpf_paper"], ".2f")
    columns |= {
        "NFE": lambda r: str(r["nfe"]),
        "tok/s": lambda r: f"{r['tokens_per_second']:.0f}",
        f"x {_label(rows)}": lambda r: _speedup(r["speedup"], r["baseline"], trusted=trusted),
    }
    if (header := _other_reference(rows)) is not None:
        columns[header] = lambda r: _speedup(r["speedup_vs_base_ar"], r["reference"], trusted=trusted)
    columns["diff"] = lambda r: number(r["mismatches"], "d")
    return columns


def title(row: ResultRow) -> str:
    """The line above the rows of a benchmark and temperature; it also counts answers without a verdict, and says
    whether decoders are told the reference's length."""
    named = f", {row['quality_name']}" if row["quality_name"] else ""
    undecided = row.get("verdicts", {}).get("undecided", 0.0)
    left = f", {100 * undecided:.1f} % undecided" if undecided else ""
    out = f" ({row['left_out']} left out: they do not fit)" if row.get("left_out") else ""
    told = f", {GOLD_LENGTH}" if row.get("gold_length") else ""
    return f"{row['benchmark']}, T={row['decoder']['temperature']:g}, {row['n']} prompts{out}{named}{told}{left}"


def table(rows: Sequence[ResultRow], *, trusted: bool) -> str:
    """One line per row, under a line for each benchmark and temperature; quality before speed."""
    columns = _columns(rows, trusted=trusted)
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    undecided = {group(row): title(row) for row in sorted(rows, key=_undecided)}  # the most of the group
    return aligned(list(columns), cells, titles=[undecided[group(row)] for row in rows])


def _undecided(row: ResultRow) -> float:
    return float(row.get("verdicts", {}).get("undecided", 0.0))


def aligned(headers: Sequence[str], cells: Sequence[Sequence[str]], *, titles: Sequence[str] = ()) -> str:
    """Lines of at most `WIDTH` characters: headers, then the rows, the first column left-aligned, the others right-
    aligned. A first cell too long for its column gets its own line. `titles` (one per row) are printed above the rows
    that share them."""
    indent = "  " if titles else ""
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    longest = max([len(headers[0]), *(len(indent) + len(row[0]) for row in cells)])
    widths[0] = max(len(headers[0]), min(longest, WIDTH - sum(w + 1 for w in widths[1:])))
    lines, previous = [_line(headers, widths)], None
    for i, (first, *rest) in enumerate(cells):
        if titles and titles[i] != previous:
            lines.append(titles[i])
            previous = titles[i]
        name = indent + first
        if len(name) > widths[0]:
            lines.append(name)
            name = ""
        lines.append(_line([name, *rest], widths))
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    return " ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]).rstrip()


def legend(rows: Sequence[ResultRow]) -> str:
    """Explains the headers and marks that occur in the table."""
    label, lines = _label(rows), ["(low-high): 95 % interval over prompts (Wilson)."]
    named = "the baseline" if label == "baseline" else label
    if any(map(marked_lossless, rows)):
        lines.append(f"{LOSSLESS}: lossless, distributed as its {label} row: other quality is chance or rounding.")
    if label == "baseline":
        lines.append(f"baseline: {_baselines_by_decoder(rows)}.")
    lines.append(f"x {label}: tokens per second over {named} of the same weights, median over prompts.")
    if (header := _other_reference(rows)) is not None:
        lines.append(f"{header}: the same over {_named_references(rows)}.")
    lines.append(f"diff: greedy answers that differ from {named}'s.")
    for method, differences in _not_as_trained(rows).items():
        lines.append(f"{method}: {'; '.join(differences)}.")
    if papers_differ(rows):
        lines.append("tpf_paper: all slots filled per pass, also those after the answer's end, as papers count.")
    if any(row.get("gold_length") for row in rows):
        lines.append(f"{GOLD_LENGTH}: decoders are told how many tokens of the reference are hidden.")
    if any(map(_undecided, rows)):
        lines.append("undecided: the judge did not finish (the most of any row); counted as wrong.")
    return "\n".join(textwrap.fill(text, WIDTH, subsequent_indent="  ") for text in lines)


def _not_as_trained(rows: Sequence[ResultRow]) -> dict[str, list[str]]:
    """By method: where its decoder's mask is not the one that the model was trained under."""
    return {row["method"]: found for row in rows if (found := row["decoder"].get("not_as_trained"))}


def _baselines_by_decoder(rows: Sequence[ResultRow]) -> str:
    """Which decoders each baseline of the table is for."""
    decoders = {ANY_SUBSET: "decoders that can fill holes", DIFFUSION: "those of diffusion LMs", AR: "the others"}
    kinds = {row["baseline"].removeprefix("base_") for row in rows}
    return ", ".join(f"{baseline_label([kind])} for {decoders[kind]}" for kind in decoders if kind in kinds)


def _named_references(rows: Sequence[ResultRow]) -> str:
    names = {row["reference"] for row in rows}
    of_base = {name: " of the base that was trained" if name.startswith("base_") else "" for name in names}
    texts = {baseline_label([name]) + end for name, end in of_base.items()}
    return " or ".join(sorted(texts))


def gate_note(check: Mapping[str, Any], rows: Sequence[ResultRow]) -> str:
    """How the baselines of these rows compare with transformers' generate: our AR loop by `check`."""
    baselines, notes = {row["baseline"] for row in rows}, []
    if any(map(over_ar, baselines)):
        notes.append(_ar_note(check))
    if others := {name for name in baselines if not over_ar(name)}:
        notes.append(f"{UNTRUSTED} {baseline_label(others)} cannot be timed against transformers' generate")
    return "\n".join(notes)


def _ar_note(check: Mapping[str, Any]) -> str:
    if check["trusted"] is None:
        return f"{UNTRUSTED} AR was not timed against transformers' generate (generate_prompts=0)"
    count, floor, found = check["batches"], check["floor"], f"{check['ar_over_generate']:.2f}x"
    spread = f"{count} batch{'es' if count != 1 else ''} of {check['batch_size']}"
    undecided = ""
    if check["interval_95"] is not None:
        low, high = check["interval_95"]
        spread = f"{low:.2f} to {high:.2f}, {spread}"
        undecided = f",\n  undecided: {floor:g} lies between" if low < floor <= high else ""
    found = f"AR runs at {found} the speed of transformers' generate"
    if check["trusted"]:
        return f"{found}\n  ({spread}){undecided}"
    return f"{UNTRUSTED} {found},\n  below {floor:g} ({spread}){undecided}: speedups over it may be inflated"


def line(row: ResultRow, *, trusted: bool) -> str:
    """A finished row, in one line."""
    speedup = _speedup(row["speedup"], row["baseline"], trusted=trusted)
    found = [f"tpf {number(row['tpf'], '.2f')}", f"x {_label([row])} {speedup}"]
    if row["quality"] is not None:
        found.insert(0, f"{quality(row)} %")
    return f"  {row['benchmark']} T={row['decoder']['temperature']:g}, {row['method']}: {', '.join(found)}"


def markdown(rows: Sequence[ResultRow], *, trusted: bool) -> str:
    """The table as Markdown, with separate columns for benchmark, T and n."""
    columns = _columns(rows, trusted=trusted)
    headers = ["benchmark", "T", "n", *columns]
    lines = []
    for row in rows:
        named = row["benchmark"] + (f" ({GOLD_LENGTH})" if row.get("gold_length") else "")
        cells = [named, f"{row['decoder']['temperature']:g}", str(row["n"])]
        cells += [cell(row).strip().replace("|", r"\|").replace("*", r"\*") for cell in columns.values()]
        lines.append(cells)
    return markdown_table(headers, lines, left=4) + "\n"


def markdown_table(headers: Sequence[str], lines: Sequence[Sequence[str]], *, left: int) -> str:
    """The first `left` columns are left-aligned, the others right-aligned."""
    rule = "|" + "---|" * left + "---:|" * (len(headers) - left)
    first, *rest = (f"| {' | '.join(line)} |" for line in (headers, *lines))
    return "\n".join([first, rule, *rest])


_PLAIN = ("quality", "quality_name", "tau", "tpf", "tpf_with_prefill", "tpf_paper", "nfe", "branch_forwards",
          "positions_computed", "tokens", "slots_filled", "tokens_per_second", "speedup", "speedup_vs_base_ar",
          "mismatches", "lossless")  # fmt: skip


def as_csv(rows: Sequence[ResultRow], *, trusted: bool | None) -> str:
    """The rows as CSV with full precision, one line per row; `trusted` is whether AR kept up with generate (None: not
    timed), and empty for a row with another baseline."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    ends = [f"{name}_{end}" for name in ("quality", "tau", "tpf", "speedup") for end in ("low", "high")]
    scores = [
        (name, part) for name in dict.fromkeys(n for r in rows for n in r.get("scores", {})) for part in ("mean", "se")
    ]
    first = ["benchmark", "temperature", "method", "decoder", "target", "n"]
    last = ["speedup_trusted", "gold_length", *(f"{name}_{part}" for name, part in scores)]
    writer.writerow([*first, *_PLAIN, *ends, *last])
    for row in rows:
        named = [row["benchmark"], row["decoder"]["temperature"], row["method"], row["decoder"]["name"], row["target"]]
        intervals = [row["interval_95"][name] or (None, None) for name in ("quality", "tau", "tpf", "speedup")]
        found = [row.get("scores", {}).get(name, {}).get(part) for name, part in scores]
        writer.writerow(
            [
                *named,
                row["n"],
                *(row[name] for name in _PLAIN),
                *(x for i in intervals for x in i),
                trusted if over_ar(row["baseline"]) else None,
                bool(row.get("gold_length")),
                *found,
            ]
        )
    return file.getvalue()
