"""python -m eval.serving: the report's arithmetic, what it refuses, and a whole small run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspec.config.compose import composed
from dspec.errors import UserError
from dspec.serving.recording import read_recording
from dspec.serving.schedulers import Drafting
from dspec.serving.simulator import Outcome, Served
from dspec.serving.step_table import AdditiveSteps, MeasuredSteps, read_step_table
from eval.reports.serving_plots import plot_predicted, plot_serving
from eval.serving import tables
from eval.serving.__main__ import main
from eval.serving.demonstrations import overhead, selection_bias
from eval.serving.lanes import Counts
from eval.serving.settings import ServingSettings
from eval.serving.variants import Measured, Timed, ratio, row, verdicts

RULES: dict[str, Any] = {"min_yield": 0.05, "horizon": 16, "probe_every": 32}
DRAFTER = Path(__file__).parents[3] / "dspec/assets/tiny_dspark"
DEFAULTS: dict[str, Any] = {
    key: value for key, value in composed("serving", ["recipe=sweeps/serving_load"]).serving.items() if key[0] != "_"
}


def measured(*rates: float, verified: int = 0, accepted: int = 0, answers: Any = None) -> Measured:
    """Slices of two seconds and ten steps of two requests."""
    one: dict[str, Any] = {"seconds": 2.0, "steps": 10, "request_steps": 20, "verified": verified, "accepted": accepted}
    slices = [Counts(tokens=int(2 * rate), finished=1, **one) for rate in rates]
    return Measured(slices, users=[3.0, 5.0], answers=answers or {}, scheduler_microseconds=7.0)


def outcome(rate: float) -> Outcome:
    served: Any = Served(answer=None, arrived=0.0, admitted=0.0, tokens=8, finished=4.0)  # type: ignore[arg-type]
    return Outcome(seconds=2.0, steps=4, tokens=int(2 * rate), request_steps=8, served=[served])


# ---- numbers


def test_a_row_by_hand() -> None:
    ar = measured(100, 100, 200, answers={0: [1, 2], 1: [3], 2: [4]})
    fast = measured(150, 200, 400, verified=60, accepted=45, answers={0: [1, 2], 1: [9], 5: [4]})
    got = row("static 3", 2, fast, outcome(300), baseline=ar, greedy=True, seed=0)
    assert got["throughput"] == 250
    assert got["over_ar"]["median"] == 2.0
    low, high = got["over_ar"]["interval_95"]
    assert 1.5 <= low <= 2.0 <= high <= 2.0
    assert got["error"] == pytest.approx(0.2)
    assert (got["budget"], got["waste"]) == (3.0, 0.25)
    assert got["tokens_per_step"] == 50
    assert got["milliseconds_per_step"] == 200
    assert got["tokens_per_second_per_user"] == 4
    assert (got["answers_that_differ"], got["answers_compared"]) == (1, 2)
    assert got["predicted"]["tokens_per_second_per_user"] == 2
    assert row("x", 2, fast, outcome(3), baseline=ar, greedy=False, seed=0)["answers_that_differ"] is None
    assert row("AR", 2, ar, outcome(3), baseline=ar, greedy=True, seed=0)["waste"] == 0.0


def test_ratios_are_paired() -> None:
    a, b = measured(100, 10, 1000), measured(50, 5, 500)
    assert ratio(a.slices, b.slices, seed=0) == {"median": 2.0, "interval_95": [2.0, 2.0]}
    one = ratio(a.slices[:1], b.slices[:1], seed=0)
    assert one == {"median": 2.0, "interval_95": None}  # one repeat says nothing of the spread


def test_the_better_scheduled_against_the_best_static() -> None:
    cells = {4: {"AR": measured(80, 80), "static 1": measured(90, 90), "static 3": measured(100, 100),
                 "synchronous": measured(99, 99), "asynchronous": measured(98, 98)}}  # fmt: skip
    rates = {"AR": 80, "static 1": 120, "static 3": 100, "synchronous": 90, "asynchronous": 126}
    lines = verdicts(
        cells,
        {4: {name: outcome(rate) for name, rate in rates.items()}},
        statics=["static 1", "static 3"],
        scheduled=["synchronous", "asynchronous"],
        seed=0,
    )
    (line,) = lines
    assert (line["static"], line["scheduled"]) == ("static 3", "synchronous")
    assert line["over_static"]["median"] == pytest.approx(0.99)
    assert line["over_ar"]["median"] == pytest.approx(99 / 80)
    assert line["simulated_over_static"] == pytest.approx(126 / 120)
    assert line["simulated_over_ar"] == pytest.approx(126 / 80)
    assert "static 3" in tables.verdict_text(lines)


def test_text_and_plots(tmp_path: Path) -> None:
    ar = measured(100, 100)
    rows = [
        row(name, R, measured(rate * R, rate * R, verified=20 * (name != "AR")), outcome(1.2 * rate * R),
            baseline=ar, greedy=False, seed=0)
        for R in (1, 4) for name, rate in (("AR", 100), ("static 3", 150))
    ]  # fmt: skip
    text = tables.text(rows, clock="cpu")
    assert "seconds of the cpu clock" in text
    assert "4 in flight" in text
    assert "+20.0" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "off by 20.0 % at the median cell" in tables.errors(rows)
    two = [{"variant": "AR", "concurrency": 1, "error": -0.5}, {"variant": "static 1", "concurrency": 8, "error": 0.1}]
    assert tables.errors(two) == (
        "predicted throughput is off by 30.0 % at the median cell, by 50.0 % at most (AR, 1 in flight)"
    )
    page = tables.markdown(rows, [], clock="wall")
    assert page.count("| static 3 |") == 2
    assert tables.interval({"median": 1.0, "interval_95": None}) == "1.00"
    curves = {name: [r for r in rows if r["variant"] == name] for name in ("AR", "static 3")}
    for x, y in (
        ("concurrency", "throughput"),
        ("tokens_per_second_per_user", "throughput"),
        ("concurrency", "budget"),
    ):
        plot_serving(curves, x=x, y=y, note="", path=tmp_path / f"{x}-{y}.png")
    plot_predicted(curves, note="", path=tmp_path / "predicted.png")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 4


# ---- the schedulers alone


def test_appendix_a_through_the_schedulers() -> None:
    got = selection_bias(RULES)
    assert got == pytest.approx(
        {
            "search over this round's own drafts": 0.85,
            "the same as a scheduler (lag=0)": 0.85,
            "Algorithm 1 as published": 0.7,
            "synchronous": 0.7,
            "asynchronous": 0.7,
        }
    )


def test_time_is_counted_around_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    table = AdditiveSteps(
        bias_seconds=1.0, requests=(1, 4), alpha_seconds=(0.1, 0.2), tokens=(1, 32), theta_seconds=(0.0, 0.5)
    )
    weighed, wanted = [], Drafting.wanted
    monkeypatch.setattr(Drafting, "wanted", lambda *given: weighed.append(given) or wanted(*given))
    times = overhead(table, RULES, requests=4, slots=7, repeats=3, seed=0)
    assert len(weighed) == 2 * 4  # whether to draft is part of a decision
    assert times.keys() == {"synchronous", "asynchronous"}
    assert all(t["first"] > 0 < t["median"] for t in times.values())
    settings = ServingSettings(**DEFAULTS)
    ticks = iter(range(100))
    timed = Timed(settings.schedulers(table)["static 3"], lambda: float(next(ticks)))
    memory = timed.new_memory(2)
    for _ in range(3):
        assert timed.drafts(memory)
        assert timed(np.ones((2, 7)), np.array([7, 7]), memory).tolist() == [3, 3]
    assert (timed.seconds, timed.rounds) == (6.0, 3)
    assert timed.settings() == {"scheduler": "static", "length": 3}
    assert not timed.reads_confidence


# ---- settings


def test_how_many_answers() -> None:
    settings = ServingSettings(**DEFAULTS | {"requests": 10, "turnovers": 1.5})
    assert [settings.answers(R) for R in (1, 6, 64)] == [10, 10, 96]
    assert list(settings.statics()) == [f"static {n}" for n in settings.static]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"concurrency": []}, "serving.concurrency"),
        ({"concurrency": [4, 1]}, "increasing"),
        ({"concurrency": [0, 1]}, "at least 1"),
        ({"static": [0]}, "serving.static"),
        ({"profile_lengths": [1, 3]}, "needs 0"),
        ({"profile_requests": [1, 2], "concurrency": [1, 4]}, "must reach over"),
        ({"threshold": 1.0}, "threshold=1.0"),
        ({"clock": "sun"}, "serving.clock=sun"),
        ({"temperature": -1.0}, "serving.temperature=-1.0"),
        ({"top_p": 0.0}, "top_p"),
        ({"turnovers": -1.0}, "serving.turnovers"),
        ({"turnovers": float("inf")}, "serving.turnovers=inf"),
        ({"repeats": 0}, "serving.repeats=0"),
        ({"requests": 0}, "serving.requests=0"),
        ({"trace_concurrency": 0}, "serving.trace_concurrency=0"),
        ({"min_yield": 1.0}, "min_yield=1.0"),
        ({"horizon": 0}, "horizon=0"),
        ({"steps": "nowhere.json"}, "no step table in nowhere.json"),
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ServingSettings(**DEFAULTS | change)


def test_mistakes_end_before_torch_is_loaded() -> None:
    code = (
        "import sys\nfrom eval.serving.__main__ import main\n"
        "sys.argv = ['eval.serving', 'recipe=sweeps/serving_load', 'target=tiny', 'serving.concurrency=[0]']\n"
        "try:\n    main()\nexcept SystemExit as left:\n    print(left.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr.strip().count("\n") == 0
    assert "serving.concurrency=[0]" in done.stderr


SMALL = ["serving.concurrency=[1,2]", "serving.static=[3]", "serving.requests=2", "serving.turnovers=0",
         "serving.repeats=2", "serving.profile_requests=[1,2]", "serving.profile_lengths=[0,1,3]",
         "serving.profile_repeats=2", "serving.trace_requests=4", "serving.simulated_requests=10",
         "serving.overhead_repeats=2", "serving.temperature=0", "serving.clock=cpu", "limit=2",
         "benchmark=[tiny_stories]"]  # fmt: skip


def command(monkeypatch: pytest.MonkeyPatch, out: Path, *args: str) -> None:
    given = ["eval.serving", "recipe=sweeps/serving_load", "target=tiny", *args, f"hydra.run.dir={out}"]
    monkeypatch.setattr(sys, "argv", given)
    main()


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command(monkeypatch, tmp_path, f"checkpoint={DRAFTER}", *SMALL)
    results = json.loads((tmp_path / "results.json").read_text())
    names = ["AR", "static 3", "threshold", "synchronous", "asynchronous"]
    assert [(c["concurrency"], c["variant"]) for c in results["cells"]] == [(R, n) for R in (1, 2) for n in names]
    for cell in results["cells"]:
        assert cell["throughput"] > 0 < cell["predicted"]["throughput"]
        assert cell["answers_that_differ"] == 0 < cell["answers_compared"]
        assert (cell["budget"] > 0) == (cell["variant"] != "AR") or "synchronous" in cell["variant"]
    static = [c for c in results["cells"] if c["variant"] == "static 3"]
    assert all(c["budget"] == c["predicted"]["budget"] == 3 for c in static)
    assert [line["concurrency"] for line in results["scheduled"]] == [1, 2]
    assert results["clock"] == "cpu"
    recording = read_recording(tmp_path / "traces.jsonl")
    assert recording.about.concurrency == 4
    assert recording.about.every_position
    assert [t.domain for t in recording.traces] == ["stories"] * 4
    assert isinstance(read_step_table(tmp_path / "sps.json"), MeasuredSteps)
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        "throughput.png", "pareto.png", "budget.png", "predicted.png"
    }  # fmt: skip
    assert "| static 3 |" in (tmp_path / "report.md").read_text()
    printed = capsys.readouterr().out
    assert "predicted throughput is off by" in printed
    assert "0.85" in printed


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "needs a drafter with a confidence head"),
        ([f"checkpoint={DRAFTER}", "serving.static=[9]", "limit=1"], "this drafter drafts 7 tokens"),
        (
            [f"checkpoint={DRAFTER}", "serving.profile_lengths=[0,9]", "limit=1"],
            "profile_lengths up to 9: this",
        ),
        ([f"checkpoint={DRAFTER}", "limit=-1"], "limit=-1 must be an integer of at least 1"),
        ([f"checkpoint={DRAFTER}", "benchmark=tiny_infilling"], "fills no holes"),
        ([f"checkpoint={DRAFTER}", "serving=null"], "serving=null"),
        ([f"checkpoint={DRAFTER}", "serving.concurrencies=[1]"], "concurrenc"),
    ],
)
def test_runs_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as left:
        command(monkeypatch, tmp_path, *args)
    assert left.value.code == 2
    assert words in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if path.name != ".hydra"]  # refused before anything is recorded
