"""python -m eval.profile_steps: the fit, what is measured, what it leaves, and how it refuses."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspec.errors import UserError
from dspec.models.language_model import LanguageModel
from dspec.serving.step_table import AdditiveSteps, MeasuredSteps, read_step_table
from eval.profile_steps import measure as measuring
from eval.profile_steps.__main__ import main
from eval.profile_steps.measure import fit, measure
from eval.profile_steps.settings import ProfileSettings

SMALL: dict[str, Any] = {
    "requests": [1, 2, 4], "lengths": [0, 1, 3], "context": 5, "temperature": 1.0, "warmup": 2, "repeats": 2,
}  # fmt: skip


def test_the_fit_gives_back_an_additive_machine() -> None:
    alpha, theta = {1: 0.2, 2: 0.25, 4: 0.4}, {1: 1.0, 2: 1.1, 4: 1.15, 8: 1.5, 16: 2.9}
    points = {(R, n): (alpha[R] if n else 0.0) + theta[R * (1 + n)] for R in alpha for n in (0, 1, 3)}
    table = fit(points, about={"dtype": "float32"})
    for (R, n), seconds in points.items():
        if n:
            assert table.seconds(R, R * (1 + n)) == pytest.approx(seconds)
        else:
            assert table.seconds_without_drafts(R) == pytest.approx(seconds)
    assert table.bias_seconds == pytest.approx(1.0)
    assert table.alpha_seconds == pytest.approx(tuple(alpha.values()))
    assert table.about["dtype"] == "float32"
    assert table.about["relative_error"]["max"] < 1e-9


def test_a_machine_that_is_not_additive_says_so() -> None:
    points = {(R, n): 1.0 + 0.1 * R * (1 + n) + 0.3 * (R == 2 and n == 1) for R in (1, 2, 4, 8) for n in (0, 1, 3, 7)}
    error = fit(points, about={}).about["relative_error"]
    assert 0.02 < error["max"] < 0.3
    assert error["median"] < error["max"]
    faster = fit({p: 1.0 - 0.2 * (p[1] > 0) for p in points}, about={})  # drafting is never a gain
    assert set(faster.alpha_seconds) == {0.0}
    assert faster.seconds(1, 64) == pytest.approx(0.8)


def test_points_that_do_not_determine_it() -> None:
    with pytest.raises(UserError, match="tell drafting from verifying"):
        fit({(3, 0): 1.0, (3, 1): 2.0}, about={})


def test_every_point_is_timed_on_real_steps(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Static lengths, nothing drafted at 0, the warm-up left out: a clock that counts what was computed."""
    target = toys.target(vocab=11)
    draft = toys.draft(target, block=4, head="vanilla", confidence=True)
    work = {"now": 0.0, "steps": 0}
    forward, propose, extend = LanguageModel.__call__, measuring.DraftProposer.propose, measuring.DraftProposer.extend

    def counted(self: LanguageModel, ids: Any, *args: Any, **options: Any) -> Any:
        slow = 100.0 if work["steps"] < 24 else 1.0  # the warm-up: two steps at each point, and untimed ones
        work["steps"] += options.get("start_B") is not None
        work["now"] += slow * ids.numel()
        return forward(self, ids, *args, **options)

    def drafted(self: Any, *args: Any, **options: Any) -> Any:
        assert options["confidence"]
        work["now"] += 0.5
        return propose(self, *args, **options)

    def extended(self: Any, *args: Any, **options: Any) -> None:
        work["now"] += 0.25  # once in a step that drafts, not for the steps before it too
        extend(self, *args, **options)

    monkeypatch.setattr(LanguageModel, "__call__", counted)
    monkeypatch.setattr(measuring.DraftProposer, "extend", extended)
    monkeypatch.setattr(measuring.DraftProposer, "propose", drafted)
    monkeypatch.setattr(measuring.Profile, "now", lambda self: work["now"])
    points = measure(target, draft, ProfileSettings(**SMALL), seed=0)
    assert points == {(R, n): R * (1 + n) + 0.75 * (n > 0) for R in (1, 2, 4) for n in (0, 1, 3)}
    with pytest.raises(UserError, match="this drafter drafts 4 tokens"):
        measure(target, draft, ProfileSettings(**SMALL | {"lengths": [0, 5]}), seed=0)
    with pytest.raises(UserError, match="positions"):
        measure(target, draft, ProfileSettings(**SMALL | {"context": 120}), seed=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"requests": []}, "profile.requests"),
        ({"requests": [4, 2]}, "increasing"),
        ({"requests": [0, 1]}, "at least 1"),
        ({"lengths": [1, 3]}, "needs 0"),
        ({"lengths": [0]}, "and one above"),
        ({"lengths": [0, 0]}, "increasing"),
        ({"context": 0}, "profile.context=0"),
        ({"warmup": -1}, "profile.warmup=-1"),
        ({"repeats": 0}, "profile.repeats=0"),
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ProfileSettings(**SMALL | change)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A table that the scheduled decoder can read, with where it was measured; the points; a plot."""
    drafter = Path(__file__).parents[3] / "dspec/assets/tiny_dspark"
    settings = ["profile.requests=[1,2,4]", "profile.lengths=[0,1,3]", "profile.context=8", "profile.repeats=1"]
    monkeypatch.setattr(
        sys,
        "argv",
        ["eval.profile_steps", "target=tiny", f"checkpoint={drafter}", *settings, f"hydra.run.dir={tmp_path}"],
    )
    main()
    table = read_step_table(tmp_path / "sps.json")
    assert isinstance(table, MeasuredSteps)
    assert isinstance(table.for_sglang, AdditiveSteps)
    assert table.for_sglang.requests == (1, 2, 4)
    assert table.probes == table.for_sglang.probes == (1, 2, 4, 8, 16)
    assert table.about["context"] == 8
    assert {"cpu", "cores"} <= table.about["hardware"].keys()
    points = json.loads((tmp_path / "profile.json").read_text())["points"]
    assert [(p["requests"], p["length"]) for p in points] == [(R, n) for R in (1, 2, 4) for n in (0, 1, 3)]
    assert (tmp_path / "plots" / "steps.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path / "sps.json") in capsys.readouterr().out


def test_it_needs_a_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.profile_steps", "target=tiny", f"hydra.run.dir={tmp_path}"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "a profile needs a drafter" in capsys.readouterr().err
