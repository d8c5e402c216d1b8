"""A speed report as text of at most 80 columns, and its plots. Pure functions of speed.json's parts."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.reports.plots import plot_costs, plot_rounds, plot_tau_by_position
from eval.reports.table import WIDTH, aligned, number, over_ar
from eval.results import UNTRUSTED, baseline_label

_ABREAST = 4  # decoders per table of rounds
_HEADS = {"forward": "pass", "lm_head": "LM head", "sequential_head": "seq. head"}

Line = dict[str, Any]


def speed_table(lines: Sequence[Line], *, trusted: bool) -> str:
    """Quality, then tokens per second as in LoPA's table: over all, of the fastest batch, of the ten fastest.
    `trusted` is whether AR kept up with generate; speedups over another baseline stay marked."""
    priced = any(line["price_per_million"] is not None for line in lines)
    headers = [
        "method",
        "quality %",
        "tau",
        "tok/s",
        "max",
        "top 10",
        "s/sample",
        f"x {baseline_label(line['baseline'] for line in lines)}",
        *(["per 1M"] if priced else []),
    ]
    cells = [
        [
            line["method"],
            number(None if line["quality"] is None else 100 * line["quality"], ".1f"),
            number(line["tau"], ".2f"),
            *(f"{line[name]:.0f}" for name in ("average", "max", "top10")),
            f"{line['seconds_per_sample']:.3f}",
            f"{line['speedup']:.2f}{_mark(line, trusted=trusted)}",
            *([number(line["price_per_million"], ".2f")] if priced else []),
        ]
        for line in lines
    ]
    return aligned(headers, cells, titles=[f"{line['benchmark']}, T={line['temperature']:g}" for line in lines])


def _mark(line: Line, *, trusted: bool) -> str:
    return "" if trusted and over_ar(line["baseline"]) else UNTRUSTED


def round_tables(rounds: Sequence[Line], *, trusted: bool) -> str:
    """Milliseconds of a round and their fraction, span by span; then the ideal speedup. `_ABREAST` decoders side by
    side, the others below."""
    batch = f", a row's share at batch {rounds[0]['batch_size']}" if rounds[0]["batch_size"] > 1 else ""
    parts = [f"a round on {rounds[0]['benchmark']}: ms, share{batch}"]
    for start in range(0, len(rounds), _ABREAST):
        parts.append(_round_table(rounds[start : start + _ABREAST], span_names(rounds), trusted=trusted))
    return "\n".join(parts)


def _round_table(rounds: Sequence[Line], names: Sequence[str], *, trusted: bool) -> str:
    cells = [
        [
            ("  of it " + n.split("/")[1]) if "/" in n else n,
            *(_share(r["spans"].get(n), r["milliseconds"]) for r in rounds),
        ]
        for n in names
    ]
    cells.append(["between spans", *(_share(r["between spans"], r["milliseconds"]) for r in rounds)])
    cells.append(["round", *(f"{r['milliseconds']:.2f}     " for r in rounds)])
    cells.append(["without barriers", *(f"{r['unsynchronised']:.2f}     " for r in rounds)])
    for key, label, form in (("ideal", "ideal speedup", ".2f"), ("achieved", "achieved of it", ".0%")):
        shown = ["–" if r["ideal"] is None else f"{r['ideal'][key]:{form}}{_mark(r, trusted=trusted)}" for r in rounds]
        cells.append([label, *shown])
    methods = [textwrap.wrap(r["method"], 13) for r in rounds]
    deep = max(map(len, methods))
    heads = [["", *(lines[i] if i < len(lines) else "" for lines in methods)] for i in range(deep)]
    return aligned(heads[0], [*heads[1:], *cells])


def span_names(rounds: Sequence[Line]) -> list[str]:
    """All spans, each nested one after its outer one."""
    names = list(dict.fromkeys(name for line in rounds for name in line["spans"]))
    outer = [name for name in names if "/" not in name]
    return [n for top in outer for n in (top, *(m for m in names if m.startswith(f"{top}/")))]


def _share(milliseconds: float | None, whole: float) -> str:
    return "–" if milliseconds is None else f"{milliseconds:.2f} {milliseconds / whole:4.0%}"


def cost_table(title: str, lines: Sequence[Line], parts: Sequence[str]) -> str:
    """One row per context length L and K: milliseconds of the parts and in total, and relative to the smallest K."""
    cells = [
        [
            str(line["tokens"]),
            *(f"{line[part]:.2f}" for part in parts),
            f"{sum(line[part] for part in parts):.2f}",
            f"{line['ratio']:.2f}x",
        ]
        for line in lines
    ]
    heads = ["K", *(_HEADS.get(part, part) for part in parts), "all", "ratio"]
    titles = [f"{title} after L={line['context']} tokens, ms" for line in lines]
    return aligned(heads, cells, titles=titles)


def position_text(lines: Sequence[Line], width: int) -> str:
    """tau, and in brackets the number of rounds, by where in the answer a round started."""
    shown = [f"tau (rounds) of the rounds started in each {width} tokens of an answer"]
    for line in (line for line in lines if line["tau_by_position"]):
        bins = (f"{b['start']}+: {b['tau']:.2f} ({b['rounds']})" for b in line["tau_by_position"])
        shown.append(f"{line['benchmark']}, T={line['temperature']:g}, {line['method']}")
        shown.append(textwrap.fill(", ".join(bins), WIDTH, initial_indent="  ", subsequent_indent="  "))
    return "\n".join(shown)


def report(done: Line, *, width: int, trusted: bool, run_dir: Path) -> None:
    """Prints the tables and draws the plots."""
    texts = [speed_table(done["speeds"], trusted=trusted), round_tables(done["rounds"], trusted=trusted)]
    texts.append(cost_table("verify K tokens", done["verify_cost"], ("attention", "rest", "lm_head")))
    if done["draft_cost"]:
        texts.append(cost_table("draft K slots", done["draft_cost"], ("forward", "lm_head", "sequential_head")))
    if any(line["tau_by_position"] for line in done["speeds"]):
        texts.append(position_text(done["speeds"], width))
    if notes := untrusted_notes(done["speeds"], trusted=trusted):
        texts.append(notes)
    print("\n\n".join(texts))
    _plots(done, run_dir / "plots")
    print(f"speed.json and plots: {run_dir}")


def untrusted_notes(lines: Sequence[Line], *, trusted: bool) -> str:
    """What the mark says; "" if no line bears it."""
    baselines, notes = {line["baseline"] for line in lines}, []
    if not trusted and any(map(over_ar, baselines)):
        notes.append(f"{UNTRUSTED} speedups over an AR loop not shown to keep up (see above)")
    if others := {name for name in baselines if not over_ar(name)}:
        notes.append(f"{UNTRUSTED} {baseline_label(others)} cannot be timed against transformers' generate")
    return "\n".join(notes)


def _plots(done: Line, folder: Path) -> None:
    names = [name for name in span_names(done["rounds"]) if "/" not in name]
    bars = {
        line["method"]: {n: line["spans"].get(n, 0.0) for n in names} | {"between spans": line["between spans"]}
        for line in done["rounds"]
    }
    plot_rounds(bars, folder / "rounds.png")
    plot_costs(done["verify_cost"], done["draft_cost"], folder / "costs.png")
    curves = {
        f"{line['method']}, {line['benchmark']}": [(b["start"], b["tau"]) for b in line["tau_by_position"]]
        for line in done["speeds"]
        if line["tau_by_position"] and line["temperature"] == done["speeds"][0]["temperature"]
    }
    if curves:
        plot_tau_by_position(curves, folder / "tau_by_position.png")
