"""The table as text, Markdown and CSV: its width, its marks, its numbers."""

import csv
import io
import math
from pathlib import Path
from typing import Any

import pytest

from eval.reports.report import Report, drawn_acceptance, drawn_passes
from eval.reports.table import as_csv, gate_note, legend, line, markdown, table

PLAIN = {"name": "autoregressive", "temperature": 0.0}


def made(method: str, **change: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "method": method, "target": "t", "decoder": {"name": method, "temperature": 0.0},
        "baseline": "autoregressive", "reference": "autoregressive", "lossless": True,
        "benchmark": "problems", "n": 30, "quality": 0.9, "quality_name": "exact match",
        "tau": 3.434, "tpf": 3.434, "tpf_with_prefill": 3.3, "nfe": 123456, "tokens": 4000,
        "slots_filled": 4000, "tpf_paper": 3.3, "branch_forwards": 123456, "positions_computed": 999999,
        "filled_per_pass": None, "prompts_per_pass": None,
        "tokens_per_second": 12345.6, "speedup": 1.74, "speedup_vs_base_ar": 1.74, "mismatches": 0,
        "interval_95": {"quality": [0.786, 0.957], "tau": [3.0, 4.0], "tpf": None, "speedup": [1.5, 2.0]},
    }  # fmt: skip
    return row | change


def test_it_fits_80_columns_whatever_the_names() -> None:
    rows = [
        made("AR", speedup=1.0, decoder=PLAIN),
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
        assert max(map(len, gate_note(check | {"trusted": trusted, "floor": 0.8}, rows).splitlines())) <= 80
        assert max(map(len, gate_note(check | {"trusted": trusted}, rows).splitlines())) <= 80


def test_marks() -> None:
    rows = [made("AR", speedup=1.0, decoder=PLAIN), made("ours"), made("lossy", lossless=False)]
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
    rows = [made("ours")]
    assert "undecided: 0.9 lies between" in gate_note(check, rows)
    assert "1 batch of 2" in gate_note(check, rows)
    for clear in ({"interval_95": [0.91, 0.97]}, {"interval_95": None}):
        assert "undecided" not in gate_note(check | clear, rows)
    assert "undecided" in gate_note(check | {"trusted": False, "ar_over_generate": 0.89}, rows)


def test_answers_without_a_verdict_are_counted() -> None:
    rows = [made("AR", verdicts={"undecided": 0.0}), made("ours", verdicts={"undecided": 0.1})]
    assert "problems, T=0, 30 prompts, exact match, 10.0 % undecided\n" in table(rows, trusted=True)
    assert "undecided: the judge" in legend(rows)
    assert max(map(len, legend(rows).splitlines())) <= 80
    assert "undecided" not in table(rows[:1], trusted=True) + legend(rows[:1])


def test_a_decoder_whose_mask_the_model_does_not_know_is_named() -> None:
    said = ["blocks of 4, trained with blocks of 8", "full attention, trained under block_causal"]
    rows = [made("AR"), made("D2F", decoder={"name": "d2f", "temperature": 0.0, "not_as_trained": said})]
    assert f"D2F: {'; '.join(said)}." in " ".join(legend(rows).split())
    assert max(map(len, legend(rows).splitlines())) <= 80
    rows[1]["decoder"]["not_as_trained"] = []
    assert "D2F" not in legend(rows)


def test_whatever_uses_the_gold_length_says_so() -> None:
    rows = [made("AR", decoder=PLAIN), made("ASSD", benchmark="filled", gold_length=True)]
    shown = table(rows, trusted=True).splitlines()
    assert "problems, T=0, 30 prompts, exact match" in shown
    assert "filled, T=0, 30 prompts, exact match, gold length" in shown
    assert "gold length: decoders are told how many tokens of the reference are hidden." in legend(rows).splitlines()
    first = [part.split(" | ")[0] for part in markdown(rows, trusted=True).splitlines()]
    assert first[-2:] == ["| problems", "| filled (gold length)"]
    read = csv.DictReader(io.StringIO(as_csv(rows, trusted=True)))
    assert [r["gold_length"] for r in read] == ["False", "True"]
    assert "gold length" not in table(rows[:1], trusted=True) + legend(rows[:1]) + markdown(rows[:1], trusted=True)


def test_a_row_that_is_done_shows_whether_its_speedup_is_trusted() -> None:
    assert line(made("ours"), trusted=False).endswith("x AR 1.74*")
    assert line(made("ours"), trusted=True).endswith("x AR 1.74")


FILLED: dict[str, Any] = {"baseline": "any_subset", "reference": "any_subset", "benchmark": "filled_problems"}
UNTIMED = {"trusted": None, "ar_over_generate": None, "interval_95": None, "batches": 0, "batch_size": 1, "floor": 0.9}


def test_the_legend_names_diffusion_among_the_baselines() -> None:
    diffusion = {"baseline": "diffusion", "reference": "diffusion", "benchmark": "problems"}
    text = " ".join(legend([made("AR", decoder=PLAIN), made("D2F") | diffusion]).split())
    assert "baseline: diffusion for those of diffusion LMs, AR for the others." in text
    assert "any_subset" not in text


def test_a_table_of_infilling_names_the_baseline_that_was_used() -> None:
    """AR fills no holes: nothing in the table, its legend and its note may say that speeds are over AR."""
    rows = [
        made("any-subset", speedup=1.0, speedup_vs_base_ar=1.0, decoder={"name": "any_subset", "temperature": 0.0}),
        made("ASSD"),
    ]
    rows = [row | FILLED for row in rows]
    text = "\n".join([table(rows, trusted=False), legend(rows), gate_note(UNTIMED, rows), line(rows[1], trusted=False)])
    assert "AR" not in text
    assert "x any_subset: tokens per second over any_subset of the same weights" in " ".join(text.split())
    assert "differ from any_subset's" in text
    assert "* any_subset cannot be timed against transformers' generate" in text
    assert text.endswith("x any_subset 1.74*")
    assert max(map(len, text.splitlines())) <= 80
    assert "x any_subset" in markdown(rows, trusted=False)


def test_what_papers_count_stands_beside_where_it_differs() -> None:
    diffusion: dict[str, Any] = {"baseline": "diffusion", "reference": "diffusion", "tau": None, "tpf": 2.5}
    plain = made("diffusion", decoder={"name": "diffusion", "temperature": 0.0}, tpf=1.0) | diffusion
    beyond = made("LoPA, k=14, block-causal") | diffusion | {"slots_filled": 5200, "tpf_paper": 3.25, "tpf": 2.5}
    text = table([plain, beyond], trusted=False)
    header, _, first, label, second = text.splitlines()
    assert header.split()[3:6] == ["tau", "tpf", "tpf_paper"]
    assert label.strip() == "LoPA, k=14, block-causal"
    assert (first.split()[4:6], second.split()[3:5]) == (["2.50", "3.30"], ["2.50", "3.25"])
    assert max(map(len, text.splitlines())) <= 80
    assert "tpf_paper: all slots filled per pass" in legend([plain, beyond])
    assert max(map(len, legend([plain, beyond]).splitlines())) <= 80
    assert "tpf_paper" in markdown([plain, beyond], trusted=False)
    for nothing_beyond in ([plain], [made("AR", decoder=PLAIN)]):
        assert "tpf_paper" not in table(nothing_beyond, trusted=False) + legend(nothing_beyond)
    (read,) = csv.DictReader(io.StringIO(as_csv([beyond], trusted=None)))
    names = ("tpf", "tpf_paper", "tokens", "slots_filled", "nfe", "branch_forwards", "positions_computed")
    assert [read[name] for name in names] == ["2.5", "3.25", "4000", "5200", "123456", "123456", "999999"]


def test_a_table_with_both_baselines_names_both() -> None:
    """AR's check says nothing of any_subset: speedups over that stay marked."""
    rows = [made("AR", speedup=1.0, speedup_vs_base_ar=1.0, decoder=PLAIN), made("ASSD") | FILLED]
    rows.append(made("ASSD") | FILLED | {"benchmark": "problems", "reference": "autoregressive", "speedup": 1.5})
    check = UNTIMED | {"trusted": True, "ar_over_generate": 1.0}
    text = table(rows, trusted=True)
    assert "x baseline x reference" in text
    assert (text.count("1.00*"), text.count("1.74*"), text.count("1.50*"), text.count("1.74\n")) == (0, 2, 1, 0)
    assert [part.split()[-2] for part in text.splitlines() if "ASSD" in part] == ["1.74*", "1.74"]
    both = f"{legend(rows)}\n{gate_note(check, rows)}"
    unwrapped = " ".join(both.split())
    for words in (
        "baseline: any_subset for decoders that can fill holes, AR for the others.",
        "x baseline: tokens per second over the baseline of the same weights",
        "x reference: the same over AR or any_subset.",
        "AR runs at 1.00x the speed",
        "* any_subset cannot be timed",
    ):
        assert words in unwrapped
    assert max(map(len, both.splitlines())) <= 80
    flags = [r["speedup_trusted"] for r in csv.DictReader(io.StringIO(as_csv(rows, trusted=True)))]
    assert flags == ["True", "", ""]
    of_base = [row | {"reference": "base_autoregressive"} for row in (rows[0], made("ours", speedup_vs_base_ar=2.0))]
    assert "x base" in table(of_base, trusted=True)
    assert "x base: the same over AR of the base that was trained." in legend(of_base)


def test_markdown_and_csv_hold_every_row() -> None:
    rows = [made("AR", speedup=1.0), made("ours, a|b", speedup_vs_base_ar=2.0)]
    rows = [row | {"reference": "base_autoregressive"} for row in rows]
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


def test_passes_that_hardly_a_prompt_had_are_not_drawn() -> None:
    row = {"filled_per_pass": [3.0, 2.0, 4.0, 1.0], "prompts_per_pass": [30, 29, 3, 2], "n": 30}
    assert drawn_passes(row) == [3.0, 2.0, 4.0]


def test_the_trace_is_drawn_by_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One panel per benchmark and one picture per temperature; other decoders have none."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr("eval.reports.plots.save", lambda figure, path: seen.update({path.name: figure}))
    trace = {"filled_per_pass": [3.0, 1.5], "prompts_per_pass": [30, 20], "acceptance": None}
    plain = {"filled_per_pass": [1.0] * 3, "prompts_per_pass": [30] * 3, "acceptance": None}
    rows = [
        made("AR", decoder=PLAIN, acceptance=None), made("D2F") | trace, made("diffusion") | plain,
        made("D2F", benchmark="functions") | trace | {"filled_per_pass": [7.0, 0.5]},
        made("warm", decoder={"name": "warm", "temperature": 1.0}) | trace,
    ]  # fmt: skip
    results = {"run": {"ar_check": UNTIMED}, "calibration": None, "rows": rows}
    Report()(results=results, history=[], run_dir=tmp_path)
    assert set(seen) == {"filled_per_pass_T0.png", "filled_per_pass_T1.png"}
    drawn = {
        panel.get_title(): {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines}
        for panel in seen["filled_per_pass_T0.png"].axes
    }
    assert drawn == {
        "problems": {"D2F": ([1, 2], [3.0, 1.5]), "diffusion": ([1, 2, 3], [1.0, 1.0, 1.0])},
        "functions": {"D2F": ([1, 2], [7.0, 0.5])},
    }
    (axes, other) = seen["filled_per_pass_T0.png"].axes
    assert axes.get_ylim() == other.get_ylim()
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > 7  # of all panels


def test_slots_that_hardly_a_round_reached_are_not_drawn() -> None:
    shares = drawn_acceptance({"conditional": [0.7, 0.6, 1.0, None], "reached": [90, 20, 19, 0]})
    assert shares[:2] == [0.7, 0.6]
    assert all(map(math.isnan, shares[2:]))
