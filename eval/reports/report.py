"""From results to what a person sees: results.json, tables, plots, the model card."""

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dspec.atomic import atomic_file, write_json
from eval.reports.plots import plot_acceptance, plot_filled, plot_loss, plot_reliability
from eval.reports.scores import scores_table
from eval.reports.table import as_csv, gate_note, legend, markdown, table

Rows = Sequence[dict[str, Any]]
_FEWEST = 20  # rounds that must reach a slot for its acceptance to be plotted
_LEAST_SHARE = 0.1  # of the prompts must still have a pass for its tokens to be plotted


class Report:
    """Writes results.json, table.md, table.csv and the plots into the run folder and prints the table."""

    def __call__(
        self,
        *,
        results: dict[str, Any],
        history: Sequence[dict[str, float]],
        run_dir: Path,
        logger: object = None,
    ) -> None:
        """`logger` is the run's Lightning logger; W&B's also gets the config, the rows and the plots."""
        write_json(run_dir / "results.json", results)
        rows, check = results["rows"], results["run"]["ar_check"]
        note = gate_note(check, rows)
        scores = scores_table(rows)
        text = f"{markdown(rows, trusted=bool(check['trusted']))}\n{legend(rows)}\n{note}\n"
        _write(run_dir / "table.md", text + (f"\n```\n{scores}\n```\n" if scores else ""))
        _write(run_dir / "table.csv", as_csv(rows, trusted=check["trusted"]))
        plots = run_dir / "plots"
        _loss(history, plots / "loss.png")
        _acceptance(rows, plots)
        _filled(rows, plots)
        shown = [table(rows, trusted=bool(check["trusted"])), "", legend(rows), note]
        shown += ["", scores, ""] if scores else []
        if results["calibration"] is not None:
            plot_reliability(results["calibration"], plots / "reliability.png")
            before, after = (100 * results["calibration"][f"mean_ece_{when}"] for when in ("before", "after"))
            shown.append(f"STS: mean ECE over slots {before:.1f} % before, {after:.1f} % after (held-out report split)")
        if logger is not None:
            _track(logger, results, sorted(plots.glob("*.png")))
        shown.append(f"results, tables and plots: {run_dir}")
        Console().print("\n".join(shown), markup=False, highlight=False, soft_wrap=True)

    def card(self, *, target: str, run: dict[str, Any], command: str | None, drafter: bool) -> str:
        """The README.md of an exported drafter, or of a trained target."""
        loader = (
            "dspec.models.checkpoint.from_pretrained(folder, target=...)"
            if drafter
            else "target=hf target.path=<folder>"
        )
        tags = "---\nlibrary_name: dspec\n---\n"
        return (
            f"{tags}# Trained by dspec, recipe {command or 'custom'}\n\n"
            f"Target: {target}. Seed {run['seed']}, dtype {run['dtype']}, "
            f"dspec {run['versions']['dspec']}, git {run['git']['sha']}.\n\n"
            f"Load with `{loader}`; the run's results.json has its measurements.\n"
        )


def _loss(history: Sequence[dict[str, float]], path: Path) -> None:
    rows = [row for row in history if "train/loss" in row]
    if rows:
        names = [n for n in ("loss", "ce", "tv", "kl", "confidence") if f"train/{n}" in rows[0]]
        plot_loss([int(row["step"]) for row in rows], {n: [row[f"train/{n}"] for row in rows] for n in names}, path)


def _acceptance(rows: Rows, folder: Path) -> None:
    for temperature in sorted({row["decoder"]["temperature"] for row in rows}):
        curves = {
            f"{row['method']} – {row['benchmark']}": drawn_acceptance(row["acceptance"])
            for row in rows
            if row["acceptance"] is not None and row["decoder"]["temperature"] == temperature
        }
        if curves := {name: curve for name, curve in curves.items() if any(map(math.isfinite, curve))}:
            plot_acceptance(curves, folder / f"acceptance_T{temperature:g}.png")


def _filled(rows: Rows, folder: Path) -> None:
    for temperature in sorted({row["decoder"]["temperature"] for row in rows}):
        panels: dict[str, dict[str, list[float]]] = {}
        for row in rows:
            if row["filled_per_pass"] is not None and row["decoder"]["temperature"] == temperature:
                panels.setdefault(row["benchmark"], {})[row["method"]] = drawn_passes(row)
        if panels:
            plot_filled(panels, folder / f"filled_per_pass_T{temperature:g}.png")


def drawn_passes(row: dict[str, Any]) -> list[float]:
    """The tokens that each pass filled, up to the last pass that a tenth of the prompts still had: after that the mean
    over those is noise."""
    passes = zip(row["filled_per_pass"], row["prompts_per_pass"], strict=True)
    return [filled for filled, prompts in passes if prompts >= _LEAST_SHARE * row["n"]]


def drawn_acceptance(acceptance: dict[str, Any]) -> list[float]:
    """Conditional acceptance by slot, NaN if fewer than `_FEWEST` rounds reached the slot: below that it is noise."""
    pairs = zip(acceptance["conditional"], acceptance["reached"], strict=True)
    return [share if reached >= _FEWEST else math.nan for share, reached in pairs]


def _track(logger: object, results: dict[str, Any], plots: Sequence[Path]) -> None:
    from lightning.pytorch.loggers import WandbLogger  # heavy, and only needed with a logger

    if not isinstance(logger, WandbLogger):
        return
    logger.log_hyperparams(results["run"]["config"])
    header, *lines = csv.reader(io.StringIO(as_csv(results["rows"], trusted=results["run"]["ar_check"]["trusted"])))
    logger.log_table("rows", columns=header, data=lines)
    if plots:
        logger.log_image("plots", [str(path) for path in plots], caption=[path.stem for path in plots])


def _write(path: Path, text: str) -> None:
    with atomic_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8")
