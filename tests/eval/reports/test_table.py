"""The table as text, Markdown and CSV: its width, its marks, its numbers."""

import csv
import io
import math
from pathlib import Path
from typing import Any

import pytest

from eval.reports.report import Report, drawn_acceptance
from eval.reports.table import as_csv, gate_note, legend, line, markdown, table


def made(method: str, **change: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "method": method, "target": "t", "decoder": {"name": method, "temperature": 0.0}, "serial": "AR",
        "lossless": True, "benchmark": "problems", "n": 30, "quality": 0.9, "quality_name": "exact match",
        "tau": 3.434, "tpf": 3.434, "tpf_with_prefill": 3.3, "nfe": 123456, "tokens": 4000,
        "tokens_per_second": 12345.6, "speedup": 1.74, "speedup_vs_base_ar": 1.74, "mismatches": 0,
        "interval_95": {"quality": [0.786, 0.957], "tau": [3.0, 4.0], "tpf": None, "speedup": [1.5, 2.0]},
    }  # fmt: skip
    return row | change


def test_it_fits_80_columns_whatever_the_names() -> None:
    rows = [
        made("AR", speedup=1.0),
        made("a very long label of a drafter, K=2 + recycling, refined twice, and then some more"),
        made("base, K=2 + recycling", speedup=12.34, speedup_vs_base_ar=23.45, mismatches=1000),
        made("other", benchmark="a_benchmark_with_a_long_name", decoder={"name": "o", "temperature": 1.0}),
    ]
    text = table(rows, trusted=False)
    assert max(len(part) for part in text.splitlines() if "label of a drafter" not in part) <= 80
    assert "\n  a very long label of a drafter, K=2 + recycling, refined twice, and then some more\n" in text
    assert max(map(len, legend(rows).splitlines())) <= 80
    check = {"trusted": False, "ar_over_generate": 0.84, "interval_95": [0.75, 0.88], "batches": 24, "batch_size": 16,
             "floor": 0.9}  # fmt: skip
    for trusted in (True, False, None):
        assert max(map(len, gate_note(check | {"trusted": trusted, "floor": 0.8}).splitlines())) <= 80
        assert max(map(len, gate_note(check | {"trusted": trusted}).splitlines())) <= 80


def test_marks() -> None:
    rows = [made("AR", speedup=1.0), made("ours"), made("lossy", lossless=False)]
    lines = {part.split()[0]: part for part in table(rows, trusted=False).splitlines()}
    assert "90.0 (79-96) " in lines["AR"]  # a row is no copy of itself
    assert "90.0 (79-96)= " in lines["ours"]
    assert "90.0 (79-96) " in lines["lossy"]
    assert "1.74*" in lines["ours"]
    assert "*" not in table(rows, trusted=True)
    assert "=: lossless" in legend(rows)
    assert "=" not in legend([rows[0], rows[2]])
    zero = made("z", quality=0.0, interval_95={"quality": [0.0, 0.1135]})
    assert "0.0 (0-11)" in table([zero], trusted=True)  # none of 30 says no less than that
    assert "–" in table([made("z", quality=None, quality_name=None)], trusted=True)


def test_a_gate_that_came_to_no_end_is_undecided() -> None:
    check = {"trusted": True, "ar_over_generate": 0.92, "interval_95": [0.85, 0.97], "batches": 1, "batch_size": 2,
             "floor": 0.9}  # fmt: skip
    assert "undecided: 0.9 lies between" in gate_note(check)
    assert "1 batch of 2" in gate_note(check)
    for clear in ({"interval_95": [0.91, 0.97]}, {"interval_95": None}):
        assert "undecided" not in gate_note(check | clear)
    assert "undecided" in gate_note(check | {"trusted": False, "ar_over_generate": 0.89})


def test_answers_without_a_verdict_are_counted() -> None:
    rows = [made("AR", verdicts={"undecided": 0.0}), made("ours", verdicts={"undecided": 0.1})]
    assert "problems, T=0, 30 prompts, exact match, 10.0 % undecided\n" in table(rows, trusted=True)
    assert "undecided: the judge" in legend(rows)
    assert max(map(len, legend(rows).splitlines())) <= 80
    assert "undecided" not in table(rows[:1], trusted=True) + legend(rows[:1])


def test_a_row_that_is_done_shows_whether_its_speedup_is_trusted() -> None:
    assert line(made("ours"), trusted=False).endswith("x AR 1.74*")
    assert line(made("ours"), trusted=True).endswith("x AR 1.74")


def test_markdown_and_csv_hold_every_row() -> None:
    rows = [made("AR", speedup=1.0), made("ours, a|b", speedup_vs_base_ar=2.0)]
    lines = markdown(rows, trusted=True).splitlines()
    assert len(lines) == 4
    assert {line.replace(r"\|", "").count("|") for line in lines} == {13}
    assert "x base" in lines[0]
    read = list(csv.DictReader(io.StringIO(as_csv(rows, trusted=True))))
    assert [r["method"] for r in read] == ["AR", "ours, a|b"]
    assert (read[1]["speedup"], read[1]["quality_low"], read[1]["tpf_low"]) == ("1.74", "0.786", "")


def test_wandb_gets_config_rows_and_plots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import WandbLogger

    seen: dict[str, Any] = {}

    class Recorded(WandbLogger):
        def __init__(self) -> None:
            pass

        def log_hyperparams(self, params: Any) -> None:
            seen["config"] = params

        def log_table(self, key: str, columns: Any = None, data: Any = None, **_: Any) -> None:
            seen[key] = [dict(zip(columns, line, strict=True)) for line in data]

        def log_image(self, key: str, images: Any, **_: Any) -> None:
            seen[key] = [Path(image).name for image in images]

    accepted = {"conditional": [0.8, 1.0], "reached": [40, 3], "prefix_survival": [0.8, 0.8], "counted": [40, 40]}
    check = {"trusted": True, "ar_over_generate": 1.0, "interval_95": None, "batches": 2, "batch_size": 1, "floor": 0.9}
    results = {
        "run": {"config": {"seed": 3}, "ar_check": check}, "calibration": None,
        "rows": [made("AR", acceptance=None), made("ours", acceptance=accepted)],
    }  # fmt: skip
    Report()(results=results, history=[], run_dir=tmp_path, logger=Recorded())
    assert seen["config"] == {"seed": 3}
    assert [row["method"] for row in seen["rows"]] == ["AR", "ours"]
    assert seen["plots"] == ["acceptance_T0.png"]
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "table.md", "table.csv", "plots"}


def test_slots_that_hardly_a_round_reached_are_not_drawn() -> None:
    shares = drawn_acceptance({"conditional": [0.7, 0.6, 1.0, None], "reached": [90, 20, 19, 0]})
    assert shares[:2] == [0.7, 0.6]
    assert all(map(math.isnan, shares[2:]))
