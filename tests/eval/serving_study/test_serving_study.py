"""python -m eval.serving_study: its settings, what is fitted and served, how cells are compared, the command."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dspec.config.compose import composed, instantiate
from dspec.errors import UserError
from dspec.serving.estimators import Logistic, Online, Recorded, Scaled, sigmoid
from dspec.serving.recording import RecordedOn, Recording
from dspec.serving.schedulers import Synchronous
from dspec.serving.simulator import Outcome
from dspec.serving.step_table import AdditiveSteps, TabulatedSteps
from dspec.serving.traces import Round, Trace
from eval.serving_study import run as running
from eval.serving_study import simulate as simulating
from eval.serving_study import tables
from eval.serving_study.__main__ import main
from eval.serving_study.scenarios import HINDSIGHT, LOGISTIC, ONLINE, ORACLE, RAW, SLOTS, STS, dearer, scenarios
from eval.serving_study.settings import StudySettings
from eval.serving_study.simulate import Study, calibration, compared, gain, oracles

PAGE = ["recipe=sweeps/serving_calibration"]
SMALL: dict[str, Any] = {"batches": 2, "concurrencies": [1, 3], "focus": 3, "schedulers": ["synchronous"]}
SLOTS_NUMBER = 3
TABLE = AdditiveSteps(
    bias_seconds=1.0, requests=(1, 64), alpha_seconds=(0.1, 0.4), tokens=(1, 256), theta_seconds=(0.0, 0.15 * 255)
)
ABOUT = RecordedOn(
    target="toy",
    drafter="toy",
    temperature=1.0,
    top_p=1.0,
    seed=0,
    concurrency=1,
    slots=SLOTS_NUMBER,
    every_position=True,
    dtype="float64",
    threads=1,
    hardware={},
    git={},
    versions={},
)


def settings(**change: Any) -> StudySettings:
    study: StudySettings = instantiate(composed("serving_study", PAGE).study)
    return replace(study, **change)


def recording(
    *, temperature: float = 1.0, answers: int = 12, domains: tuple[str, ...] = ("problems", "functions")
) -> Recording:
    """A calibrated head; functions are easier."""
    rng, traces = np.random.default_rng(0), []
    for k in range(answers):
        for easier, domain in enumerate(domains):
            z = rng.normal(easier, 1.5, (20, SLOTS_NUMBER))
            accepted = (rng.random(z.shape) < sigmoid(z)).cumprod(1).sum(1)
            known = tuple(rng.normal(size=SLOTS_NUMBER)) if temperature else ()
            rounds = [Round(tuple(a), int(n), 1, SLOTS_NUMBER, known, known) for a, n in zip(z, accepted, strict=True)]
            traces.append(Trace(tuple(rounds), f"{domain}/{k}", domain, 4))
    return Recording(replace(ABOUT, temperature=temperature), tuple(traces))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schedulers": ["best"]}, "best must be one of synchronous, asynchronous"),
        ({"schedulers": []}, r"study\.schedulers=\[\]"),
        ({"concurrencies": [4, 4]}, "different values of at least 1"),
        ({"concurrencies": [0]}, "different values of at least 1"),
        ({"temperatures": [-1.0]}, "study.temperatures"),
        ({"temperatures": [math.nan]}, "study.temperatures"),
        ({"focus": 0}, "study.focus=0"),
        ({"batches": 1}, "study.batches=1 must be at least 2"),
        ({"prefill_seconds": -1.0}, "prefill_seconds"),
        ({"half_life": 0.0}, "study.half_life=0.0 must be above 0"),
        ({"ridge": math.inf}, "study.ridge"),
        ({"fit_share": 1.0}, "study.fit_share=1.0"),
        ({"dearer": 1.0}, "study.dearer=1.0"),
        ({"grid_low": 1.5}, "grid_low"),
        ({"drift": [["problems"]]}, "pairs of domains"),
        ({"drift": [["a", "a"]]}, "pairs of domains"),
        ({"distortions": [[0.0, 1.0]]}, "scale above 0"),
        ({"distortions": [[1.0, math.nan]]}, "scale above 0"),
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        settings(**change)


# ---- scenarios


def test_answers_are_fitted_or_served() -> None:
    """In no scenario both; the same ones in all."""
    made = {one.name: one for one in scenarios(recording(), settings(), seed=0)}
    assert list(made) == ["all", "problems", "functions", "problems -> functions",
                          "head x 3", "head x 0.333", "head x 1 +2", "head x 1 -2"]  # fmt: skip
    fitted = {trace.id for one in made.values() for trace in one.fit}
    served = {trace.id for one in made.values() for trace in one.served}
    assert not fitted & served
    assert (len(fitted), len(served)) == (12, 12)
    drift = made["problems -> functions"]
    assert {t.domain for t in drift.fit} == {"problems"}
    assert {t.domain for t in drift.served} == {"functions"}
    assert made["problems"].fit == made["all"].fit
    assert {t.domain for t in made["problems"].served} == {"problems"}
    bent, plain = made["head x 1 -2"].served[0].rounds[0], made["all"].served[0].rounds[0]
    assert bent.logits == pytest.approx([z - 2 for z in plain.logits])
    assert (bent.accepted, bent.top) == (plain.accepted, plain.top)
    assert made["head x 3"].fit[0].rounds[0].logits == pytest.approx(
        [3 * z for z in made["all"].fit[0].rounds[0].logits]
    )


def test_what_each_estimator_is_fitted_to() -> None:
    made = {one.name: one for one in scenarios(recording(answers=60), settings(), seed=0)}
    built = {name: make() for name, make in made["head x 3"].makers(settings()).items()}
    assert list(built) == [RAW, STS, ONLINE, HINDSIGHT]
    sts, online = built[STS], built[ONLINE]
    assert isinstance(sts, Scaled)
    assert isinstance(online, Online)
    assert sts.temperatures_J == pytest.approx([3.0] * SLOTS_NUMBER, rel=0.5)
    assert (online.temperatures == 1.0).all()
    hindsight = built[HINDSIGHT]
    assert isinstance(hindsight, Scaled)
    assert hindsight.temperatures_J.tolist() != sts.temperatures_J.tolist()  # of other answers
    drift = made["problems -> functions"].makers(settings())
    assert list(drift) == [RAW, STS, ONLINE, LOGISTIC, SLOTS, HINDSIGHT]
    means = drift[SLOTS]()
    assert isinstance(means, Logistic)
    assert sigmoid(means.intercept_J) == pytest.approx([0.5] * SLOTS_NUMBER, abs=0.12)  # of problems, not of functions
    assert drift[ONLINE]() is not drift[ONLINE]()
    greedy = scenarios(recording(temperature=0.0), settings(), seed=0)[0].makers(settings())
    assert list(greedy) == [RAW, STS, ONLINE, SLOTS, HINDSIGHT]


def test_traces_that_are_refused() -> None:
    with pytest.raises(UserError, match="no recorded answers of functions"):
        scenarios(recording(domains=("problems",)), settings(), seed=0)
    with pytest.raises(UserError, match="one recorded answer of problems"):
        scenarios(recording(answers=1), settings(), seed=0)
    plain = recording()
    with pytest.raises(UserError, match="round at every position"):
        scenarios(Recording(replace(plain.about, every_position=False), plain.traces), settings(), seed=0)


def test_a_dearer_machine() -> None:
    dear = dearer(TABLE, 4.0)
    assert dear.seconds(1, [1, 11]) == pytest.approx([1.1, 1.1 + 4 * 1.5])
    assert "hypothetical" in dear.about
    flat = TabulatedSteps(batch_tokens=(1, 2), steps=(1.0, 0.5), max_batch_tokens=2)
    assert dearer(flat, 3.0).seconds(1, [1, 2]) == pytest.approx([1.0, 4.0])


# ---- cells


def test_cells_of_a_study() -> None:
    """The oracle is the bound, STS mends a bent head, the raw head is what all are compared with."""
    study = settings(**SMALL, distortions=[[1.0, -4.0]], drift=[])
    cells = Study(study, {"measured": TABLE}, seed=0).cells(scenarios(recording(answers=24), study, seed=0))
    assert [(c["scenario"], c["concurrency"]) for c in cells] == [
        ("all", 1), ("all", 3), ("problems", 3), ("functions", 3), ("head x 1 -4", 3),
    ]  # fmt: skip
    for cell in cells:
        measured = cell["estimators"]
        assert "gain" not in measured[RAW]
        assert measured[ORACLE]["waste"] == 0.0
        assert measured[ORACLE]["throughput"] >= max(m["throughput"] for m in measured.values())
        assert measured[ORACLE]["share_of_oracle"] == 1.0
        assert 0 < measured[RAW]["ece"] < 1
    bent, plain = cells[-1]["estimators"], cells[1]["estimators"]
    assert bent[RAW]["ece"] > 2 * plain[RAW]["ece"]
    assert bent[RAW]["budget"] < plain[RAW]["budget"]
    texts = [tables.gains(cells), tables.waste(cells), tables.calibration(cells), tables.verdict(cells), tables.LEGEND]
    assert max(len(line) for text in texts for line in text.splitlines()) <= 85
    assert tables.gains(cells).count("T = 1, ") == 4


def test_what_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch with a new scheduler; an estimator keeps what it has learnt. Without one the truth is told."""
    calls: list[Any] = []

    def simulate(source: Any, scheduler: Any, table: Any, load: Any, **options: Any) -> Outcome:
        calls.append((len(source.answers), scheduler, load.max_in_flight, options))
        return Outcome()

    monkeypatch.setattr(simulating, "simulate", simulate)
    study, batches = Study(settings(), {}, seed=0), Recorded(recording().traces, slots=SLOTS_NUMBER).deal(3, seed=0)
    study._runs(batches, {ONLINE: lambda: Online(SLOTS_NUMBER, grid=[1.0], half_life=9.0, prior=1.0)},
                "synchronous", TABLE, 2)  # fmt: skip
    study._serve(batches, lambda: Synchronous(TABLE, min_yield=0.05, horizon=4, probe_every=4), TABLE, 11, None)
    learning, told = calls[:3], calls[3:]
    assert len({id(scheduler) for _, scheduler, _, _ in calls}) == 6
    assert len({id(options["estimator"]) for *_, options in learning}) == 1
    assert [options["oracle"] for *_, options in calls] == [False] * 3 + [True] * 3
    assert [options["requests"] for *_, options in calls] == [8] * 3 + [11] * 3
    assert [load for _, _, load, _ in calls] == [2] * 3 + [11] * 3
    assert all(isinstance(options["estimator"], Scaled) for *_, options in told)


def test_the_oracle_may_leave_drafting_out() -> None:
    """The better of drafting always and where it pays."""
    assert [make()._drafting is None for make in oracles(TABLE, settings())] == [True, False]  # type: ignore[attr-defined]


def test_gains_as_text() -> None:
    one = {"throughput": 9.0, "gain": {"mean": 0.1, "low": -0.02, "high": 0.06}, "share_of_oracle": 0.5}
    better = one | {"gain": {"mean": 0.2, "low": 0.01, "high": 0.05}, "share_of_oracle": None}
    worse = one | {"gain": {"mean": -0.2, "low": -0.3, "high": -0.1}, "share_of_oracle": 0.1}
    assert tables._gain(one) == "+10.0±4.0"  # half of the interval
    assert tables._gain({"throughput": 9.4}) == "9"
    assert tables._summary([one, better, worse]) == ["1", "1", "3", "-20.0 to +20.0", "30"]


def outcome(tokens: int, seconds: float, **counts: Any) -> Outcome:
    known: dict[str, Any] = {"steps": 10, "request_steps": 10, "verified": 8, "accepted": 6, "drafted_steps": 10}
    return Outcome(tokens=tokens, seconds=seconds, **known | counts)


def test_gains_are_paired_by_batch() -> None:
    raw = [outcome(100, 10.0), outcome(100, 1.0)]
    better = [outcome(110, 10.0), outcome(110, 1.0)]
    assert gain(better, raw) == pytest.approx({"mean": 0.1, "low": 0.1, "high": 0.1})
    runs = {RAW: raw, STS: better, ORACLE: [outcome(140, 10.0), outcome(140, 1.0)]}
    made = compared(runs, bins=4)
    assert made[STS]["share_of_oracle"] == pytest.approx(0.25)
    assert made[STS]["waste"] == pytest.approx(0.25)
    assert made[STS]["wasted_per_token"] == pytest.approx(4 / 220)
    assert made[STS]["ece"] is None
    even = compared({RAW: raw, ORACLE: raw}, bins=4)
    assert even[ORACLE]["share_of_oracle"] is None


def test_calibration_is_that_of_survival() -> None:
    """Two rounds of two drafts: of the second round, only the first draft counts."""
    drafts = np.zeros((2, 2, 4))
    drafts[0, :, 3] = 1
    drafts[1, 0, 3] = 1
    one = outcome(1, 1.0)
    one.estimates.append((drafts, np.array([[0.8, 0.5], [0.6, 0.9]]), np.array([1, 0])))
    made = calibration([one], bins=10)
    assert made["brier"] == pytest.approx((0.2**2 + 0.4**2 + 0.6**2) / 3)
    assert made["ece"] == pytest.approx(((0.2 + 0.6) / 2 + 0.4) / 2)
    assert made["curve"]["predicted"] == pytest.approx([0.4, 0.6, 0.8])
    assert made["curve"]["observed"] == [0.0, 0.0, 1.0]
    assert made["curve"]["count"] == [1, 1, 1]


def test_where_steps_were_measured() -> None:
    """Whatever a table of others says."""
    assert running._machine(TABLE) == "an unnamed machine"
    assert running._machine(replace(TABLE, about={"hardware": {"cpu": "EPYC", "cores": 2}})) == "cpu EPYC, cores 2"
    assert running._machine(replace(TABLE, about={"hardware": "one H100"})) == "one H100"


# ---- the command


def start(monkeypatch: pytest.MonkeyPatch, run_dir: Path, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.serving_study", *args, f"hydra.run.dir={run_dir}"])
    main()


FEW = ["study.batches=2", "study.concurrencies=[2]", "study.focus=2", "study.schedulers=[asynchronous]"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Records and measures; then reads what it wrote, without a model, and finds the same."""
    drafter = Path(__file__).parents[3] / "dspec/assets/tiny_dspark"
    profile = ["profile.requests=[1,2,4]", "profile.lengths=[0,1,3]", "profile.context=8", "profile.repeats=1"]
    brief = ["limit=4", "study.temperatures=[1.0]", "study.distortions=[[3.0,0.0]]"]
    brief += [f"benchmark.{name}.max_new_tokens=10" for name in ("problems", "functions", "stories")]
    model = ["target=tiny", f"checkpoint={drafter}"]
    start(monkeypatch, tmp_path / "a", *PAGE, *model, *profile, *brief, *FEW)
    said = capsys.readouterr().out
    results = json.loads((tmp_path / "a" / "results.json").read_text())
    assert results["simulated"] is True
    assert [c["scenario"] for c in results["cells"][::2]] == [
        "all", "problems", "functions", "stories", "problems -> functions", "head x 3",
    ]  # fmt: skip
    assert {c["steps"] for c in results["cells"]} == {"measured", "dearer"}
    assert "hypothetical" in results["steps"]["dearer"]["dspec"]
    assert "SIMULATED" in said
    assert "| steps, scheduler, n |" in (tmp_path / "a" / "results.md").read_text()
    for name in ("gains", "reliability", "waste"):
        assert (tmp_path / "a" / "plots" / f"{name}_1.png").read_bytes().startswith(b"\x89PNG")

    def no_model(**options: Any) -> SimpleNamespace:
        raise AssertionError("loaded a model")

    monkeypatch.setattr(running, "load_model", no_model)
    files = [f"study.traces=[{tmp_path / 'a' / 'traces_1.jsonl'}]", f"study.steps={tmp_path / 'a' / 'sps.json'}"]
    start(monkeypatch, tmp_path / "b", *PAGE, *files, *brief[2:3], *FEW)
    assert json.loads((tmp_path / "b" / "results.json").read_text())["cells"] == results["cells"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "nothing to study: use recipe=sweeps/serving_calibration"),
        ([*PAGE], "nothing to evaluate: set target"),
        ([*PAGE, "target=tiny", "study.batches=1"], "study.batches=1"),
        ([*PAGE, "study.steps=/nowhere/sps.json"], "no file at /nowhere/sps.json"),
        ([*PAGE, "study.traces=[/nowhere/t.jsonl]"], "no file at /nowhere/t.jsonl"),
        ([*PAGE, "study.batch=3"], "batch"),
        ([*PAGE, "study=null"], "study=null"),
    ],
)
def test_mistakes_are_one_line_before_a_model_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(running, "run", lambda *given: pytest.fail("ran"))
    with pytest.raises(SystemExit) as left:
        start(monkeypatch, tmp_path, *args)
    assert left.value.code == 2
    said = capsys.readouterr().err.strip()
    assert words in said
    assert len(said.splitlines()) == 1


def test_a_drafter_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        start(monkeypatch, tmp_path, *PAGE, "target=tiny", "limit=2")
    assert left.value.code == 2
    assert "the study is of a drafter" in capsys.readouterr().err
