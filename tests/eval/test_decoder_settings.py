"""What configs build: every setting reaches the decoder, and so do the drafter's temperatures."""

import random
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspec.decoding.generation import Request
from dspec.decoding.loop import decode
from dspec.decoding.sampling import Sampling
from dspec.errors import UserError
from dspec.models.temperatures import Calibration
from dspec.models.training_record import TrainingRecord
from eval import decoders

WARM = Sampling(temperature=1.0, top_p=0.9)
PLAIN: dict[str, Any] = {"sequential_head": True, "refinement_passes": 0, "confidence_threshold": 0.0}


def _draft(toys: SimpleNamespace, target: Any, temperature: float = 2.0) -> Any:
    draft = toys.draft(target, seed=8, head="vanilla", confidence=True)
    draft.metadata.calibration = Calibration((temperature, 1.5, 0.5, 3.0), WARM.temperature, WARM.top_p)
    return draft


def test_the_drafters_temperatures_reach_the_decoder(toys: SimpleNamespace) -> None:
    target = toys.target(seed=8)
    draft = _draft(toys, target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder = toys.build_decoder("speculative", target=target, draft=draft, **PLAIN | {"confidence_threshold": 0.4})
        assert decoder.settings(WARM)["sts"] is True
        plain = toys.build_decoder("speculative", target=target, draft=draft, **PLAIN)  # nothing is cut: not needed
        assert "sts" not in plain.settings(WARM)
    other = Sampling(temperature=0.5, top_p=0.9)  # not what they were fitted at
    raw = toys.build_decoder("speculative", target=target, draft=draft, **PLAIN | {"confidence_threshold": 0.4})
    with pytest.warns(UserWarning, match=r"temperature=1\.0"):
        settings = raw.settings(other)
    assert settings["sts"] is False


def test_the_drafters_temperatures_change_what_is_sent(toys: SimpleNamespace) -> None:
    """With T near 0 a confidence is 0 or 1; a head that is a little sure of all is then cut nowhere, else at once."""
    target, sent = toys.target(seed=8), []
    for temperature in (0.01, 20.0):
        draft = _draft(toys, target, temperature)
        with torch.no_grad():
            draft.confidence_head.proj.weight.zero_()
            draft.confidence_head.proj.bias.fill_(0.5)
        made = toys.build_decoder("speculative", target=target, draft=draft, **PLAIN | {"confidence_threshold": 0.56})
        decoder = toys.Bound(made, WARM)
        texts = toys.prompts(random.Random(0), 3, vocab=11)
        result = decoder.decode(texts, max_new_tokens=6, stop_ids=(), seeds=range(3))
        sent.append({r.drafted for g in result for r in g.rounds})
    assert sent == [{3}, {0}]  # T = 3 leaves the fourth slot at sigmoid(1/6) = 0.54


def test_every_setting_reaches_the_decoder(toys: SimpleNamespace) -> None:
    target = toys.target(seed=8)
    draft = _draft(toys, target)
    common = {"target": target, "draft": draft}
    base = toys.build_decoder("speculative", **common, **PLAIN).settings(WARM)
    assert base == {
        **WARM.to_dict(),
        "drafts": 4,
        "sequential_head": "vanilla",
        "confidence_threshold": 0.0,
    }
    off = toys.build_decoder("speculative", **common, **PLAIN | {"sequential_head": False}).settings(WARM)
    assert off == base | {"sequential_head": None}
    refined = toys.build_decoder("speculative", **common, **PLAIN | {"refinement_passes": 2}).settings(WARM)
    assert refined == base | {"refinement_passes": 2}
    lookup = toys.build_decoder("prompt_lookup", **common, num_drafts=5, max_ngram=2).settings(WARM)
    assert lookup == {**WARM.to_dict(), "drafts": 5, "max_ngram": 2, "confidence_threshold": 0.0}
    assert toys.build_decoder("autoregressive", **common).settings(WARM) == WARM.to_dict()


def test_every_setting_of_lopa_reaches_the_decoder(toys: SimpleNamespace) -> None:
    """None of them at its value on the page."""
    asked: dict[str, Any] = {
        "block_size": 5, "append_ratio": 0.3, "activate_ratio": 0.8, "threshold": 0.7, "branches": 3, "segment": 2,
        "branch_score": "lowest_segment", "confidence_measure": "entropy", "cache": "none",
    }  # fmt: skip
    made = toys.build_decoder(
        "lopa", target=toys.target(seed=8), window_attention="block_causal", process_timeout_s=None, **asked
    )
    told = made.settings(WARM)
    assert {key: told[key] for key in asked} == asked
    assert told["attention"] == "block_causal"
    assert told["min_fills"] == 1


def test_a_finished_row_still_costs_positions(toys: SimpleNamespace) -> None:
    """As long as nobody drops it from the batch, as the loop does; what it computes there counts as idle."""
    rules: dict[str, Any] = {"tokens_per_step": 1, "block_size": None, "attention": "full"}
    made = toys.build_decoder("diffusion", target=toys.target(seed=8), **rules)
    asked = [
        Request(ids=[1, 2], sampling=Sampling(temperature=0.0, top_p=1.0), max_new_tokens=n, stop_ids=(), seed=0)
        for n in (1, 3, 3)
    ]
    assert [(g.nfe, g.idle_positions) for g in decode(made, asked)] == [(1, 0), (3, 0), (3, 0)]
    state = made.start(asked)
    for _ in range(2):
        made.step(state)
    assert [(r.generation.nfe, r.generation.idle_positions) for r in state.rows] == [(1, 2 * 5), (3, 0), (3, 0)]


def test_refusals(toys: SimpleNamespace) -> None:
    target = toys.target()
    with pytest.raises(UserError, match="needs a drafter"):
        toys.build_decoder("speculative", target=target, draft=None, **PLAIN)
    with pytest.raises(UserError, match="refinement_passes"):
        toys.build_decoder("speculative", target=target, draft=toys.draft(target), **PLAIN | {"refinement_passes": -1})


def test_a_decoder_that_is_refused_is_named(toys: SimpleNamespace) -> None:
    rules = {"block_size": 4, "append_ratio": 0.1, "activate_ratio": 0.9, "threshold": 1.5}
    spec = decoders.d2f(label="D2F", weights="trained", base=toys.target, **rules)
    with pytest.raises(UserError, match=r"^decoder\.mine: threshold=1\.5"):
        decoders.built("mine", spec, target=toys.target(), draft=None)


def test_a_decoder_that_is_not_as_trained_is_named_once(
    toys: SimpleNamespace, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """Where it is to decode, not where settings are checked."""
    target = toys.target()
    TrainingRecord("block_causal", 4, shift=False).write(target)
    for attention in ("full", "block_causal"):
        settings: dict[str, Any] = {"tokens_per_step": 1, "block_size": 4, "attention": attention}
        spec = decoders.diffusion(label="diffusion", weights="trained", base=lambda: target, **settings)
        spec.check(target=target, draft=None)
        decoders.built("mine", spec, target=target, draft=None)
    (said,) = caplog.messages
    assert said.startswith("decoder.mine: ")
    assert said.endswith("is not decoded as it was trained (full attention, trained under block_causal)")
    assert not recwarn.list


@pytest.mark.parametrize("recorded", [None, True, False])
@pytest.mark.parametrize("shift", [True, False])
def test_a_base_without_a_record_is_read_as_in_training(
    toys: SimpleNamespace, recorded: bool | None, shift: bool
) -> None:
    """With method.shift=true a run trains a base that says nothing; its base_* rows are the teacher's."""
    base, trained = toys.target(), toys.target()
    if recorded is not None:
        TrainingRecord("full", None, recorded).write(base)
    TrainingRecord("block_causal", 4, shift).write(trained)
    spec = decoders.diffusion(
        label="base", weights="base", base=lambda: base, tokens_per_step=1, block_size=4, attention=None
    )
    told = spec.build(target=trained, draft=None).settings(WARM)
    assert told["logit_shift"] is (shift if recorded is None else recorded)
    assert told["trained_attention"] == (None if recorded is None else "full")
