"""Step tables: SGLang's two forms, look-up and interpolation, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspec.errors import UserError
from dspec.serving.step_table import (
    AdditiveSteps,
    MeasuredSteps,
    StepTable,
    TabulatedSteps,
    parse_step_table,
    read_step_table,
)

FLOOR: dict[str, Any] = {
    "sample_batch_tokens": [8, 16, 32, 64],
    "sample_steps_per_sec": [1000.0, 950.0, 500.0, 480.0],
    "max_batch_tokens": 128,
}
ADDITIVE: dict[str, Any] = {
    "bias_seconds": 0.1,
    "bs_probes": [128, 192, 256],
    "alpha_seconds": [0.0, 0.008, 0.016],
    "m_probes": [384, 512, 1024],
    "theta_seconds": [0.0, 0.02, 0.1],
}


@pytest.mark.parametrize("raw", [FLOOR, ADDITIVE], ids=["floor", "additive"])
def test_sglangs_files_round_trip(raw: dict[str, Any], tmp_path: Path) -> None:
    """Key by key, with and without the key of ours; other keys are ignored."""
    assert parse_step_table(raw).to_dict() == raw
    ours = raw | {"dspec": {"hardware": {"cpu": "x"}, "dtype": "float32"}}
    (tmp_path / "sps.json").write_text(json.dumps(ours | {"comment": "by hand"}))
    table = read_step_table(tmp_path / "sps.json")
    assert table.to_dict() == ours
    assert table.about["dtype"] == "float32"
    assert hash(table) == hash(parse_step_table(raw))  # schedulers cache by table


def test_the_floor_form_takes_the_largest_probe_up_to_the_batch() -> None:
    table = parse_step_table(FLOOR)
    rates = table.steps_per_second(4, [1, 8, 15, 16, 31, 63, 64, 65, 10_000])
    assert rates.tolist() == [1000, 1000, 1000, 950, 950, 500, 480, 480, 480]
    assert table.seconds(4, [16, 64]).tolist() == [1 / 950, 1 / 480]
    assert table.seconds_without_drafts(4) is None


def test_linear_between_probes_is_linear_in_seconds() -> None:
    table = parse_step_table(FLOOR | {"dspec": {"interpolation": "linear"}})
    assert table.seconds(1, 24) == pytest.approx((1 / 950 + 1 / 500) / 2)
    assert table.steps_per_second(1, 24) == pytest.approx(2 / (1 / 950 + 1 / 500))
    assert table.to_dict()["dspec"] == {"interpolation": "linear"}


def test_the_additive_form_adds_requests_and_tokens() -> None:
    table = parse_step_table(ADDITIVE)
    assert table.seconds(160, 448) == pytest.approx(0.1 + 0.004 + 0.01)
    assert table.seconds(1, [1, 384, 5000]) == pytest.approx([0.1, 0.1, 0.2])
    assert table.seconds(10_000, 512) == pytest.approx(0.1 + 0.016 + 0.02)
    assert table.seconds_without_drafts(448) == pytest.approx(0.1 + 0.01)  # no alpha: nothing is drafted


@pytest.mark.parametrize("raw", [FLOOR, ADDITIVE], ids=["floor", "additive"])
def test_beyond_the_probes_time_goes_on_growing(raw: dict[str, Any]) -> None:
    """Else each further token is free."""
    table = parse_step_table(raw)
    last = table.probes[-1]
    inside = np.arange(1, last + 1)
    assert (table.seconds(1, inside, extend=True) == table.seconds(1, inside)).all()
    assert table.seconds(1, [last + 100]) == table.seconds(1, [last])
    grown = table.seconds(1, [last, last + 50, last + 100], extend=True)
    half = {64: (1 / 480 - 1 / 500) / 32, 1024: 0.08 / 512}[last]
    assert np.diff(grown) == pytest.approx([50 * half] * 2)
    single = TabulatedSteps(batch_tokens=(1,), steps=(1.0,), max_batch_tokens=64)  # SGLang's placeholder
    assert single.seconds(1, [1, 500], extend=True).tolist() == [1.0, 1.0]
    falling = TabulatedSteps(batch_tokens=(1, 8), steps=(1.0, 2.0), max_batch_tokens=8)
    assert falling.seconds(1, [8, 500], extend=True).tolist() == [0.5, 0.5]


def test_alpha_grows_beyond_its_probes_too() -> None:
    table = parse_step_table(ADDITIVE)
    more = table.seconds(384, 384, extend=True) - table.seconds(256, 384, extend=True)
    assert more == pytest.approx(128 * 0.008 / 64)


BAD: list[tuple[dict[str, Any], str]] = [
    (FLOOR | {"sample_batch_tokens": [8, 8, 16, 32]}, "increasing"),
    (FLOOR | {"sample_batch_tokens": [16, 8, 32, 64]}, "increasing"),
    (FLOOR | {"sample_batch_tokens": [0, 8, 32, 64]}, "at least 1"),
    (FLOOR | {"sample_batch_tokens": []}, "increasing"),
    (FLOOR | {"sample_batch_tokens": [8, 16]}, "2 probes but 4 values"),
    (FLOOR | {"sample_batch_tokens": [8.5, 16, 32, 64]}, "whole numbers"),
    (FLOOR | {"sample_steps_per_sec": [1.0, 1.0, 0.0, 1.0]}, "above 0"),
    (FLOOR | {"sample_steps_per_sec": [1.0, 1.0, float("nan"), 1.0]}, "finite"),
    (FLOOR | {"sample_steps_per_sec": "fast"}, "must hold numbers"),
    (FLOOR | {"max_batch_tokens": 63}, "below the probe 64"),
    (FLOOR | {"max_batch_tokens": True}, "whole numbers"),
    (FLOOR | {"sample_batch_tokens": [8, 16, 32, 10**30]}, "whole numbers"),
    (ADDITIVE | {"bias_seconds": 10**400}, "must hold numbers"),
    ({"sample_batch_tokens": [1], "sample_steps_per_sec": [9.0], "max_batch_tokens": 1}, "has one probe"),
    (ADDITIVE | {"m_probes": [1], "theta_seconds": [0.0]}, "has one probe"),
    (FLOOR | {"dspec": {"interpolation": "cubic"}}, "floor or linear"),
    ({"sample_batch_tokens": [1]}, "sample_steps_per_sec is missing"),
    ({}, "sample_batch_tokens is missing"),
    (ADDITIVE | {"bias_seconds": 0.0}, "above 0"),
    (ADDITIVE | {"bias_seconds": float("inf")}, "above 0"),
    (ADDITIVE | {"theta_seconds": [-0.2, 0.0, 0.1]}, "every step's time"),
    (ADDITIVE | {"alpha_seconds": [0.0]}, "bs_probes has 3 probes but 1 values"),
    (ADDITIVE | {"m_probes": [1, 1, 2]}, "m_probes must be increasing"),
]


@pytest.mark.parametrize(("raw", "words"), BAD)
def test_bad_tables_are_refused_in_one_line(raw: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "sps.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError, match=words) as caught:
        read_step_table(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"python -m eval\.profile_steps"):
        read_step_table(tmp_path / "none.json")
    for content in ("{", "[1]", "3"):
        (tmp_path / "sps.json").write_text(content)
        with pytest.raises(UserError, match="table"):
            read_step_table(tmp_path / "sps.json")


def test_tables_are_frozen() -> None:
    table: StepTable = parse_step_table(ADDITIVE)
    assert isinstance(table, AdditiveSteps)
    with pytest.raises(AttributeError):
        table.bias_seconds = 1.0  # type: ignore[misc]


# ---- measured points

GRID = {(2, 0): 1.0, (2, 1): 2.0, (2, 3): 4.0, (4, 0): 3.0, (4, 1): 4.0, (4, 3): 8.0}
FITTED = AdditiveSteps(
    bias_seconds=1.0, requests=(2, 4), alpha_seconds=(0.5, 0.7), tokens=(2, 16, 32), theta_seconds=(0.0, 1.4, 3.0)
)


def test_measured_steps_between_points() -> None:
    steps = MeasuredSteps(grid=GRID, fitted=None)
    assert steps.seconds(2, [4, 6, 8]) == pytest.approx([2.0, 3.0, 4.0])
    assert steps.seconds(2, [2, 20]) == pytest.approx([2.0, 4.0])  # drafting is in all of these
    assert steps.seconds(2, [8, 12], extend=True) == pytest.approx([4.0, 6.0])  # time goes on growing
    assert steps.seconds(3, 6) == pytest.approx(3.0)
    assert [steps.seconds_without_drafts(R) for R in (1, 2, 3, 9)] == [1.0, 1.0, 2.0, 3.0]
    assert steps.probes == (2, 4, 8, 16)
    with pytest.raises(UserError, match="at least one"):
        MeasuredSteps(grid={}, fitted=None)


def test_the_fit_goes_on_where_nothing_was_measured() -> None:
    """Fewer or more drafts than measured: from the nearest length on as the fit does; more requests: the fit."""
    steps = MeasuredSteps(grid=GRID, fitted=FITTED)
    assert steps.seconds(2, [4, 6, 8]) == pytest.approx([2.0, 3.0, 4.0])
    assert steps.seconds(2, [2, 20]) == pytest.approx([2.0 - 0.2, 4.0 + 0.8 + 0.4])
    assert steps.seconds(4, 48) == pytest.approx(8.0 + 1.6)
    assert steps.seconds(4, 48, extend=True) == pytest.approx(8.0 + 1.6 + 1.6)
    assert steps.seconds(8, 16) == FITTED.seconds(8, 16)
    assert steps.seconds_without_drafts(8) == FITTED.seconds_without_drafts(8)
    assert steps.seconds_without_drafts(3) == 2.0


def test_measured_points_are_in_the_file_and_sglang_reads_the_fit(tmp_path: Path) -> None:
    fitted = replace(FITTED, about={"dtype": "float32"})
    steps = MeasuredSteps(about=fitted.about, grid=GRID, fitted=fitted)
    (tmp_path / "sps.json").write_text(json.dumps(steps.to_dict()))
    read = read_step_table(tmp_path / "sps.json")
    assert read == steps
    assert read.for_sglang == fitted
    assert hash(read) == hash(steps)
    raw = json.loads((tmp_path / "sps.json").read_text())
    del raw["dspec"]
    assert parse_step_table(raw) == FITTED


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ("x", "must hold"),
        ([[1, 0]], "must hold"),
        ([[1, 0, "x"]], "numbers"),
        ([[1.5, 0, 1.0]], "whole numbers"),
        ([[0, 0, 1.0]], "at least 1"),
        ([[1, -1, 1.0]], "at least 0"),
        ([[1, 0, 0.0]], "above 0"),
        ([[1, 0, float("inf")]], "above 0"),
        ([], "at least one"),
    ],
)
def test_bad_points_are_refused_in_one_line(points: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        parse_step_table(FITTED.to_dict() | {"dspec": {"points": points}})
    assert "\n" not in str(refused.value)
