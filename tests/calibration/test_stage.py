"""The calibration stage: the gate, the held-out report, what it decodes with, and what counts in its rounds.

Most tests put rounds of their own in the place of decoding, so that the right temperatures are known.
"""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspec.calibration.stage import CalibrateSTS, gather
from dspec.calibration.sts import fit_sts, temperature_grid
from dspec.decoding.generation import Generation, Pass, Request
from dspec.decoding.sampling import Sampling
from dspec.decoding.speculative import Speculative
from dspec.decoding.verification import VerifyAll
from dspec.errors import UserError

SLOTS, PROMPTS, STOP = 3, 60, 7
WARM = Sampling(temperature=0.7, top_p=0.9)
SETTINGS: dict[str, Any] = {
    "sampling": WARM,
    "max_new_tokens": 64,
    "batch_size": 16,
    "fit_share": 0.6,
    "bins": 10,
    "grid_low": 0.2,
    "grid_high": 5.0,
    "grid_points": 33,
    "folds": 3,
    "min_gain": 0.005,  # 100 rounds a prompt are noisier than a run's
    "seed": 5,
}
Made = Callable[[int], list[Pass]]  # prompt -> its rounds


def Round(drafted: int, accepted: int, valid: int, confidence: tuple[float, ...]) -> Pass:  # noqa: N802  shorthand
    return Pass("verify", drafted=drafted, accepted=accepted, valid=valid, confidence=confidence)


def simulated(temperature: float, *, rounds: int = 100, slots: int = SLOTS) -> Made:
    """Rounds with P(token k accepted | all before it were) = sigmoid(z_k / temperature)."""

    def make(prompt: int) -> list[Pass]:
        rng = torch.Generator().manual_seed(prompt)
        true = 1 + torch.randn(rounds, slots, generator=rng, dtype=torch.float64)
        accepted = (torch.rand(rounds, slots, generator=rng) < true.sigmoid()).long().cumprod(1).sum(1).tolist()
        logits = (true * temperature).tolist()
        return [Round(slots, a, slots, tuple(z)) for a, z in zip(accepted, logits, strict=True)]

    return make


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch, toys: SimpleNamespace) -> Callable[..., SimpleNamespace]:
    """Runs the stage on given rounds a prompt; returns the report, the drafter and the calls of the decoder."""

    def run(make: Made, *, prompts: int = PROMPTS, **change: Any) -> SimpleNamespace:
        calls: list[SimpleNamespace] = []

        def decode(decoder: Speculative, asked: Sequence[Request]) -> list[Generation]:
            calls.append(SimpleNamespace(decoder=decoder, texts=[r.ids for r in asked], requests=asked))
            return [Generation(passes=make(r.ids[0])) for r in asked]

        monkeypatch.setattr("dspec.calibration.stage.decode", decode)
        target = toys.target()
        draft = toys.draft(target, block=SLOTS, head="vanilla", confidence=True)
        stage = CalibrateSTS(**SETTINGS | change)
        report = stage(target=target, draft=draft, prompts=[[i, 1, 2] for i in range(prompts)], stop_ids=[STOP])
        return SimpleNamespace(report=report, draft=draft, calls=calls)

    return run


# ---- the gate


@pytest.mark.parametrize("temperature", [0.4, 2.5])
def test_gate_opens_for_a_miscalibrated_head_and_the_held_out_error_falls(
    calibrated: Callable[..., SimpleNamespace], temperature: float
) -> None:
    run = calibrated(simulated(temperature))
    assert run.report["cross_validated_gain"] > 0.01
    assert all(0.75 < t / temperature < 1.33 for t in run.report["temperatures"])
    assert run.report["mean_ece_after"] < 0.6 * run.report["mean_ece_before"]
    assert all(slot["ece_after"] < slot["ece_before"] for slot in run.report["slots"])
    assert list(run.draft.metadata.calibration.temperatures) == run.report["temperatures"]
    assert (run.report["fitting_rounds"], run.report["rounds"]) == (36 * 100, 24 * 100)


def test_gate_stays_shut_for_a_calibrated_head(calibrated: Callable[..., SimpleNamespace]) -> None:
    """The fit alone would follow the noise."""
    make = simulated(1.0)
    run = calibrated(make)
    grid = temperature_grid(low=SETTINGS["grid_low"], high=SETTINGS["grid_high"], points=SETTINGS["grid_points"])
    traces, _ = gather([Generation(passes=make(i)) for i in range(PROMPTS)])
    assert fit_sts(traces, grid=grid, bins=SETTINGS["bins"]).tolist() != [1.0] * SLOTS
    assert run.report["temperatures"] == [1.0] * SLOTS
    assert run.draft.metadata.calibration.temperatures == (1.0,) * SLOTS
    assert run.report["mean_ece_after"] == run.report["mean_ece_before"]


def test_min_gain_is_the_gates_height(calibrated: Callable[..., SimpleNamespace]) -> None:
    gain = calibrated(simulated(2.5)).report["cross_validated_gain"]
    for height, opens in ((gain - 1e-9, True), (gain + 1e-9, False)):
        report = calibrated(simulated(2.5), min_gain=height).report
        assert (report["temperatures"] != [1.0] * SLOTS) == opens


# ---- fitting and reporting on different prompts


def test_report_is_made_on_prompts_that_did_not_fit(calibrated: Callable[..., SimpleNamespace]) -> None:
    """One bin of the reliability curve a prompt says which prompts are reported; their outcomes fit nothing."""
    wrong = simulated(2.5, slots=1)
    edge = [torch.tensor((i + 0.5) / PROMPTS, dtype=torch.float64).logit().item() for i in range(PROMPTS)]

    def marked(prompt: int) -> list[Pass]:
        return [Round(1, r.accepted, 1, (edge[prompt],)) for r in wrong(prompt)]

    # as many bins as prompts: every prompt's rounds have a bin of their own under T = 1
    counts = calibrated(marked, bins=PROMPTS).report["slots"][0]["curve_before"]["count"]
    reported = {i for i, n in enumerate(counts) if n}
    assert len(reported) == PROMPTS - round(PROMPTS * SETTINGS["fit_share"])
    assert {counts[i] for i in reported} == {100}  # whole prompts

    def outcomes_turned(chosen: set[int]) -> SimpleNamespace:
        def make(prompt: int) -> list[Pass]:
            rounds = wrong(prompt)
            return [Round(1, 1 - r.accepted, 1, r.confidence) for r in rounds] if prompt in chosen else rounds

        return calibrated(make)

    plain = calibrated(wrong)
    for chosen, fits in ((reported, False), (set(range(PROMPTS)) - reported, True)):
        other = outcomes_turned(chosen)
        same_fit = [other.report[k] == plain.report[k] for k in ("temperatures", "cross_validated_gain")]
        assert same_fit == [not fits] * 2
        assert (other.report["mean_ece_before"] == plain.report["mean_ece_before"]) == fits


# ---- what counts in a round


def test_gather_keeps_what_counts() -> None:
    """`valid` is what the decoder says, not what was drafted; every round knows its prompt."""
    first = [Round(3, 3, 3, (0.1, 0.2, 0.3)), Round(3, 1, 2, (0.4, 0.5, 0.6))]
    second = [Round(3, 0, 1, (0.7, 0.8, 0.9))]
    traces, prompt_N = gather([Generation(passes=first), Generation(), Generation(passes=second)])
    assert traces.logits_NK.tolist() == [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]]
    assert traces.logits_NK.dtype == torch.float64
    assert traces.accepted_N.tolist() == [3, 1, 0]
    assert traces.valid_N.tolist() == [3, 2, 1]
    assert prompt_N.tolist() == [0, 0, 2]


def test_slots_behind_the_valid_ones_change_nothing(calibrated: Callable[..., SimpleNamespace]) -> None:
    """A third of the rounds ends at its second slot; what the third one's confidence says must not matter."""
    whole = simulated(2.5)

    def ending(behind: float) -> Made:
        def make(prompt: int) -> list[Pass]:
            return [
                Round(SLOTS, min(r.accepted, 2), 2, (*r.confidence[:2], behind)) if i % 3 == 0 else r
                for i, r in enumerate(whole(prompt))
            ]

        return make

    sure, unsure = (calibrated(ending(z)).report for z in (9.0, -9.0))
    assert sure == unsure
    valid = [slot["valid"] for slot in sure["slots"]]
    assert valid[0] == valid[1] == 24 * 100
    assert valid[2] == 24 * 66  # rounds 0, 3, ... 99 of each prompt end before


# ---- what it decodes


def seeds_of(call: SimpleNamespace) -> list[int]:
    return [request.seed for request in call.requests]


def test_decodes_every_prompt_once_as_configured(calibrated: Callable[..., SimpleNamespace]) -> None:
    run = calibrated(simulated(1.0, rounds=5), prompts=37)
    assert [text[0] for call in run.calls for text in call.texts] == list(range(37))
    assert max(len(call.texts) for call in run.calls) <= SETTINGS["batch_size"]
    seeds = [seed for call in run.calls for seed in seeds_of(call)]
    assert len(set(seeds)) == 37
    other = calibrated(simulated(1.0, rounds=5), prompts=37, seed=6)
    assert not {seed for call in other.calls for seed in seeds_of(call)} & set(seeds)
    for call in run.calls:
        assert {(r.max_new_tokens, tuple(r.stop_ids), r.sampling) for r in call.requests} == {(64, (STOP,), WARM)}
        assert call.decoder.record_confidence
        assert isinstance(call.decoder.policy, VerifyAll)  # a cut draft would hang validity on confidence
        assert call.decoder.proposer.draft is run.draft
    assert (run.draft.metadata.calibration.temperature, run.draft.metadata.calibration.top_p) == (
        WARM.temperature,
        WARM.top_p,
    )
    assert run.report["sampling"] == WARM.to_dict()


@pytest.mark.parametrize(("noise", "top_p", "opens"), [(0.0, 0.01, False), (0.02, 1.0, True)])
def test_true_decoding(toys: SimpleNamespace, noise: float, top_p: float, opens: bool) -> None:
    """A head that is sure of every token: right where both distributions are one and the same token, else wrong."""
    sampling = Sampling(temperature=1.0, top_p=top_p)
    target, of = toys.markov_pair(noise=noise, block=SLOTS)
    draft = toys.draft(target, block=SLOTS, head="vanilla", rank=24, confidence=True)
    draft.load_state_dict(of.state_dict(), strict=False)
    with torch.no_grad():
        draft.confidence_head.proj.weight.zero_()
        draft.confidence_head.proj.bias.fill_(20.0 if noise == 0 else 4.0)
    prompts = toys.prompts(random.Random(0), 40, vocab=24)
    stage = CalibrateSTS(**SETTINGS | {"sampling": sampling, "max_new_tokens": 23})
    report = stage(target=target, draft=draft, prompts=prompts, stop_ids=[3])
    assert (report["temperatures"] != [1.0] * SLOTS) == opens
    if opens:
        assert report["mean_ece_after"] < 0.5 * report["mean_ece_before"]
    else:
        assert report["mean_ece_after"] == report["mean_ece_before"] < 1e-6
    first, *_, last = [slot["valid"] for slot in report["slots"]]
    assert first > last > 0  # some rounds ended at a drafted stop or at the limit


# ---- refusals


def test_refusals(toys: SimpleNamespace) -> None:
    target = toys.target()
    with pytest.raises(UserError, match="temperature"):
        CalibrateSTS(**SETTINGS | {"sampling": toys.GREEDY})
    stage = CalibrateSTS(**SETTINGS)
    for draft in (None, toys.draft(target)):
        with pytest.raises(UserError, match="confidence_head"):
            stage.check(draft)
    draft = toys.draft(target, confidence=True)
    with pytest.raises(UserError, match="too few"):
        stage(target=target, draft=draft, prompts=[[1]] * 4, stop_ids=[])
    assert draft.metadata.calibration is None
