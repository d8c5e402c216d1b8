"""The calibration stage: what it fits on, what it reports on, when it leaves the head alone, and its refusals."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspec import calibrate
from dspec.calibrate import CalibrateSTS, gather
from dspec.calibration import Calibration, Traces, calibration_report
from dspec.decoding.base import Generation, Round
from dspec.decoding.sampling import Sampling
from dspec.errors import UserError

TRUE = (0.4, 2.5, 1.6)  # what the logits of each slot must be divided by
PROMPTS = [[i] for i in range(200)]


def stage(**changes: Any) -> CalibrateSTS:
    settings: dict[str, Any] = {
        "sampling": Sampling(temperature=1.0, top_p=0.9), "max_new_tokens": 99, "batch_size": 32, "fit_share": 0.6,
        "bins": 10, "grid_low": 0.2, "grid_high": 5.0, "grid_points": 33, "folds": 3, "min_gain": 0.001, "seed": 0,
    }  # fmt: skip
    return CalibrateSTS(**(settings | changes))


def generations(
    prompts: Sequence[list[int]], *, true: Sequence[float], rounds: int = 20, longest: int = 3
) -> list[Generation]:
    """Rounds of heads whose logits are `true` times too large; a drafted stop ends what counts now and then."""
    made = []
    for (number,) in prompts:
        rng = torch.Generator().manual_seed(number)
        z = 1.5 + 1.5 * torch.randn(rounds, len(true), generator=rng, dtype=torch.float64)
        hits = torch.rand(z.shape, generator=rng, dtype=torch.float64) < z.sigmoid()
        accepted = hits.long().cumprod(1).sum(1).tolist()
        logits = (z * torch.tensor(true)).tolist()
        valid = torch.randint(1, 3 * len(true), (rounds,), generator=rng).clamp(max=longest).tolist()
        made.append(
            Generation(
                rounds=[
                    Round(len(true), min(a, v), v, tuple(c)) for a, v, c in zip(accepted, valid, logits, strict=True)
                ]
            )
        )
    return made


@pytest.fixture
def run(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a stage on made-up traces; gives the drafter and the report."""
    target = toys.target()
    draft = toys.draft(target, block=3, head="vanilla", confidence=True)

    def run(own: CalibrateSTS, *, true: Sequence[float] = TRUE, prompts: Any = PROMPTS, **traces: int) -> Any:
        class Decoder:
            def __init__(self, **options: Any) -> None:
                assert (options["sampling"], options["record_confidence"]) == (own.sampling, True)

            def decode(self, batch: Any, **options: Any) -> list[Generation]:
                return generations(batch, true=true, **traces)

        monkeypatch.setattr(calibrate, "Speculative", Decoder)
        return draft, own(target=target, draft=draft, prompts=prompts, stop_ids=())

    return run


def test_temperatures_are_found_and_kept_with_their_sampling(run: Any) -> None:
    draft, report = run(stage())
    assert draft.calibration == Calibration(tuple(report["temperatures"]), 1.0, 0.9)
    assert report["temperatures"] == pytest.approx(TRUE, rel=0.3)
    assert report["cross_validated_gain"] > 0.02
    assert report["mean_ece_after"] < 0.6 * report["mean_ece_before"]


@pytest.mark.parametrize("true", [(1.0, 1.0, 1.0), TRUE])
def test_the_gate_keeps_what_helps_and_nothing_else(run: Any, true: Sequence[float]) -> None:
    gain = run(stage(), true=true)[1]["cross_validated_gain"]
    for least, kept in ((gain - 1e-9, True), (gain, False), (gain + 0.1, False)):
        draft, report = run(stage(min_gain=least), true=true)
        assert (draft.calibration.temperatures != (1.0,) * 3) is kept
        assert report["temperatures"] == list(draft.calibration.temperatures)


def test_the_report_is_made_on_rounds_that_were_not_fitted(run: Any) -> None:
    own = stage()
    _, report = run(own)
    traces, prompt_N = gather(generations(PROMPTS, true=TRUE))
    *_, held_out = traces.split(fractions=[0.2, 0.2, 0.2, 0.4], seed=own.seed, group_N=prompt_N)
    expected = calibration_report(held_out, torch.tensor(report["temperatures"], dtype=torch.float64), bins=own.bins)
    assert {name: report[name] for name in expected} == expected
    assert report["fitting_rounds"] + report["rounds"] == len(traces.valid_N)
    assert report["rounds"] == len(held_out.valid_N)


def test_gathered_rounds_keep_what_counts() -> None:
    """Slots behind a drafted stop do not count, though they were drafted."""
    rounds = [Round(3, 1, 2, (0.1, 0.2, 0.3)), Round(3, 0, 1, (0.4, 0.5, 0.6)), Round(3, 3, 3, (0.7, 0.8, 0.9))]
    traces, prompt_N = gather([Generation(rounds=rounds[:2]), Generation(), Generation(rounds=rounds[2:])])
    assert isinstance(traces, Traces)
    assert prompt_N.tolist() == [0, 0, 2]
    assert (traces.accepted_N.tolist(), traces.valid_N.tolist()) == ([1, 0, 3], [2, 1, 3])
    assert traces.logits_NK.tolist() == [list(r.confidence) for r in rounds]


def test_answers_that_end_too_early_get_one_line(toys: SimpleNamespace, run: Any) -> None:
    target = toys.target()
    draft = toys.draft(target, block=3, confidence=True)
    for new in (1, 3):
        with pytest.raises(UserError, match=f"max_new_tokens={new} ends answers before the last of 3 draft slots"):
            stage(max_new_tokens=new).check(draft)
    stage(max_new_tokens=4).check(draft)
    with pytest.raises(UserError, match="no calibration rounds"):
        run(stage(), rounds=0)
    with pytest.raises(UserError, match=r"rounds at draft slots \[3\].*Raise calibration.max_new_tokens=99"):
        run(stage(), longest=2)
    with pytest.raises(UserError, match="4 calibration prompts are too few"):
        run(stage(), prompts=PROMPTS[:4])
    with pytest.raises(UserError, match="confidence_head=true"):
        stage().check(toys.draft(target))


def test_the_shortest_answers_of_a_real_drafter(toys: SimpleNamespace) -> None:
    """With a token more than there are slots only first rounds reach the last slot: enough prompts, or one line."""
    target = toys.target(seed=2, scale=0.3)
    draft = toys.draft(target, seed=2, block=3, head="vanilla", confidence=True, scale=0.3)
    own = stage(max_new_tokens=4, batch_size=8)
    report = own(target=target, draft=draft, prompts=[[1 + i % 9] for i in range(30)], stop_ids=())
    assert report["slots"][-1]["valid"] > 0
    with pytest.raises(UserError, match="no calibration rounds"):
        own(target=target, draft=draft, prompts=[[1 + i % 9] for i in range(30)], stop_ids=range(11))
