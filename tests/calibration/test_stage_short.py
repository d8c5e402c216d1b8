"""The calibration stage where answers end too early for all slots to count: one line says so."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspec.calibration import stage as calibrate
from dspec.calibration.stage import CalibrateSTS
from dspec.decoding.generation import Generation, Pass, Request
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
                passes=[
                    Pass("verify", drafted=len(true), accepted=min(a, v), valid=v, confidence=tuple(c))
                    for a, v, c in zip(accepted, valid, logits, strict=True)
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
                assert options["record_confidence"] is True

        def decode(decoder: Decoder, asked: Sequence[Request]) -> list[Generation]:
            assert {r.sampling for r in asked} == {own.sampling}
            return generations([r.ids for r in asked], true=true, **traces)

        monkeypatch.setattr(calibrate, "Speculative", Decoder)
        monkeypatch.setattr(calibrate, "decode", decode)
        return draft, own(target=target, draft=draft, prompts=prompts, stop_ids=())

    return run


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


def test_too_few_prompts_or_no_room_are_seen_before_training(toys: SimpleNamespace) -> None:
    target = toys.target(positions=128)
    draft = toys.draft(target, block=3, confidence=True)
    stage().check_prompts(target, draft, [[1] * 29] * 5)
    with pytest.raises(UserError, match="4 calibration prompts are too few"):
        stage().check_prompts(target, draft, [[1]] * 4)
    with pytest.raises(UserError, match=r"prompt of 30 tokens and calibration\.max_new_tokens=99 exceed 128 positions"):
        stage().check_prompts(target, draft, [[1]] * 9 + [[1] * 30])


def test_an_outcome_is_kept_for_the_same_weights_prompts_and_settings_alone(
    toys: SimpleNamespace, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, asked = toys.target(), []
    draft = toys.draft(target, block=3, head="vanilla", confidence=True)
    other, changed = toys.target(seed=1), toys.draft(target, seed=1, block=3, head="vanilla", confidence=True)

    class Decoder:
        def __init__(self, **options: Any) -> None:
            asked.append(options)

    def decode(decoder: Decoder, asked: Sequence[Request]) -> list[Generation]:
        return generations([r.ids for r in asked], true=TRUE)

    monkeypatch.setattr(calibrate, "Speculative", Decoder)
    monkeypatch.setattr(calibrate, "decode", decode)
    how: dict[str, Any] = {"target": target, "draft": draft, "prompts": PROMPTS, "stop_ids": (1,)}
    artefact = tmp_path / "calibration.json"
    first = stage()(**how, artefact=artefact)
    fitted, draft.metadata.calibration = draft.metadata.calibration, None
    assert stage()(**how, artefact=artefact) == first
    assert (draft.metadata.calibration, len(asked)) == (fitted, 1)
    for number, change in enumerate(
        ({"target": other}, {"draft": changed}, {"prompts": PROMPTS[1:]}, {"stop_ids": (2,)}), start=2
    ):
        stage()(**(how | change), artefact=artefact)
        assert len(asked) == number
    stage(seed=1)(**how, artefact=artefact)
    assert len(asked) == 6
    for damage in ("{", "[]", "{}", json.dumps(json.loads(artefact.read_text()) | {"calibration": {}})):
        artefact.write_text(damage)
        with pytest.raises(UserError, match=r"calibration\.json is damaged .* delete it"):
            stage(seed=1)(**how, artefact=artefact)
