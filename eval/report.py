"""From results to what a person sees: results.json, the terminal table, the plots, the model card."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dspec.atomic import write_json
from eval.plots import plot_acceptance, plot_loss, plot_reliability

Rows = Sequence[dict[str, Any]]


class Report:
    """Writes results.json and the plots into the run folder and prints the table."""

    def __call__(self, *, results: dict[str, Any], history: Sequence[dict[str, float]], run_dir: Path) -> None:
        write_json(run_dir / "results.json", results)
        plots = run_dir / "plots"
        _loss(history, plots / "loss.png")
        _acceptance(results["rows"], plots)
        if results["calibration"] is not None:
            plot_reliability(results["calibration"], plots / "reliability.png")
        console = Console()
        console.width = max(console.width, 120)  # a log file has room too
        console.print(table(results["rows"]))
        check = results["run"]["ar_check"]
        note = f"AR runs at {check['ar_over_generate']:.2f}x the speed of transformers' generate"
        console.print(note if check["trusted"] else f"{note}, below {check['floor']}: no speedup is shown")
        if results["calibration"] is not None:
            before, after = (100 * results["calibration"][f"mean_ece_{when}"] for when in ("before", "after"))
            console.print(
                f"STS: mean ECE over slots {before:.1f} % before, {after:.1f} % after (held-out report split)"
            )
        console.print(f"results, plots and checkpoint: {run_dir}", soft_wrap=True)

    def card(self, *, target: str, run: dict[str, Any], command: str | None) -> str:
        """The README.md of an exported checkpoint."""
        tags = "---\nlibrary_name: dspec\n---\n"
        return (
            f"{tags}# Trained by dspec, recipe {command or 'custom'}\n\n"
            f"Target: {target}. Seed {run['seed']}, dtype {run['dtype']}, "
            f"dspec {run['versions']['dspec']}, git {run['git']['sha']}.\n\n"
            "Load with `dspec.models.checkpoint.from_pretrained(folder, target=...)`; "
            "the run's results.json has what it measured.\n"
        )


def _loss(history: Sequence[dict[str, float]], path: Path) -> None:
    rows = [row for row in history if "train/loss" in row]
    if rows:
        names = [n for n in ("loss", "ce", "tv", "kl", "confidence") if f"train/{n}" in rows[0]]
        plot_loss([int(row["step"]) for row in rows], {n: [row[f"train/{n}"] for row in rows] for n in names}, path)


def _acceptance(rows: Rows, folder: Path) -> None:
    for temperature in sorted({row["decoder"]["temperature"] for row in rows}):
        curves = {
            f"{row['method']} – {row['benchmark']}": [x for x in row["acceptance"]["conditional"] if x is not None]
            for row in rows
            if row["acceptance"] is not None and row["decoder"]["temperature"] == temperature
        }
        if curves:
            plot_acceptance(curves, folder / f"acceptance_T{temperature:g}.png")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def table(rows: Rows) -> Table:
    """One line a row, grouped by benchmark and temperature, quality before speed."""
    result = Table(title="dspec", title_justify="left")
    for name in ("benchmark", "T", "method"):
        result.add_column(name, no_wrap=name != "method")
    two = any(row["speedup"] != row["speedup_vs_base_ar"] for row in rows)  # the target's own weights were trained
    for name in ("quality", "tau", "tpf", "NFE", "tok/s", "speedup", *(["vs base"] if two else []), "mismatches"):
        result.add_column(name, justify="right")
    previous = None
    for row in rows:
        group = (row["benchmark"], row["decoder"]["temperature"])
        shown = group != previous
        if shown and previous is not None:
            result.add_section()
        previous = group
        result.add_row(
            f"{row['benchmark']} (n={row['n']})" if shown else "",
            f"{group[1]:g}" if shown else "",
            row["method"],
            "–" if row["quality"] is None else f"{100 * row['quality']:.1f} %",
            _number(row["tau"], ".2f"),
            _number(row["tpf"], ".2f"),
            str(row["nfe"]),
            f"{row['tokens_per_second']:.0f}",
            _number(row["speedup"], ".2f"),
            *([_number(row["speedup_vs_base_ar"], ".2f")] if two else []),
            _number(row["mismatches"], "d"),
        )
    return result
