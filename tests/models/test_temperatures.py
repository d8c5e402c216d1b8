"""What is stored of a calibration, and how it is applied."""

import json
import math
from collections.abc import Callable

import pytest
import torch

from dspec.models.temperatures import Calibration, calibrated_confidence


def test_calibrated_confidence() -> None:
    logits = torch.tensor([[[1.0, -2.0]]])
    confidence = calibrated_confidence(logits, torch.tensor([2.0, 0.5]))
    assert confidence.tolist()[0][0] == pytest.approx([1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(4.0))])


def test_calibration_round_trip() -> None:
    calibration = Calibration((1.5, 0.5), temperature=1.0, top_p=0.95)
    assert Calibration.from_dict(json.loads(json.dumps(calibration.to_dict()))) == calibration
    settings = [(1.0, 0.95), (0.0, 0.95), (1.0, 1.0)]
    assert [calibration.applies_to(*setting) for setting in settings] == [True, False, False]


def test_sts_round_trip() -> None:
    calibration = Calibration((1.5, 0.5), temperature=0.8, top_p=0.95)
    stored = json.loads(json.dumps(calibration.to_sts()))
    assert Calibration.from_sts(stored) == calibration
    assert stored["temperatures"] == [1.5, 0.5]
    assert Calibration.from_sts({"temperatures": [2.0], "dataset": "x"}) == Calibration((2.0,), 1.0, 1.0)


ERRORS: list[tuple[str, Callable[[], object]]] = [
    ("must be positive", lambda: Calibration((), temperature=1.0, top_p=1.0)),
    ("must be positive", lambda: Calibration((1.0, math.nan), temperature=1.0, top_p=1.0)),
    ("need temperature", lambda: Calibration((1.0,), temperature=-1.0, top_p=1.0)),
    ("need temperature", lambda: Calibration((1.0,), temperature=1.0, top_p=0.0)),
    ("exactly temperatures", lambda: Calibration.from_dict({"temperatures": [1.0]})),
    ("one T per slot", lambda: calibrated_confidence(torch.zeros(2, 3), torch.ones(2))),
]


@pytest.mark.parametrize(("message", "call"), ERRORS)
def test_errors_name_the_fix(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=message):
        call()
