"""Estimators of acceptance: what they learn from, what they must not see, and whether calibration schedules better."""

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dspec.calibration.sts import Traces, fit_sts, temperature_grid
from dspec.errors import UserError
from dspec.serving.estimators import (
    COUNTS,
    ENTROPY,
    LOGIT,
    TOP,
    Estimator,
    Logistic,
    Online,
    Recorded,
    Scaled,
    features,
    seen,
    sigmoid,
)
from dspec.serving.schedulers import Lagged, Scheduler, StepCosts, Synchronous, asynchronous
from dspec.serving.simulator import Load, Outcome, simulate
from dspec.serving.step_table import AdditiveSteps, Floats, StepTable, TabulatedSteps
from dspec.serving.traces import Replay, Round, Trace

GRID = np.geomspace(0.1, 10, 41).tolist()
RULES: dict[str, Any] = {"min_yield": 0.05, "horizon": 16, "probe_every": 32}
J = 4


def online(**change: float) -> Online:
    return Online(J, grid=GRID, **{"half_life": 400.0, "prior": 1.0} | change)


def drafts(
    rng: np.random.Generator, rows: int, *, scale: float = 1.0, mean: float = 0.7, spread: float = 1.5
) -> tuple[Floats, np.ndarray]:
    """Features of drafts whose logits say `scale` times what they know, and how many would be accepted."""
    truth = rng.normal(mean, spread, (rows, J))
    top = -np.abs(rng.normal(size=(rows, J)))
    out = np.stack([scale * truth, top, -top, np.ones((rows, J))], -1)
    return out, (rng.random((rows, J)) < sigmoid(truth)).cumprod(1).sum(1)


def traces(seed: int, *, answers: int = 30, tokens: int = 40, **kind: float) -> list[Trace]:
    """With a round at every position."""
    rng, out = np.random.default_rng(seed), []
    for k in range(answers):
        given, accepted = drafts(rng, tokens, **kind)
        rounds = [
            Round(tuple(d[:, LOGIT]), int(n), 1, J, tuple(d[:, TOP]), tuple(d[:, ENTROPY]))
            for d, n in zip(given, accepted, strict=True)
        ]
        out.append(Trace(tuple(rounds), f"{seed}/{k}", "problems", 3))
    return out


ESTIMATORS: dict[str, Callable[[], Estimator]] = {
    "raw": lambda: Scaled([1.0] * J),
    "sts": lambda: Scaled([2.0, 0.5, 1.0, 3.0]),
    "online": lambda: online(half_life=20.0, prior=0.1),
    "logistic": lambda: Logistic.fit(traces(9), slots=J, columns=(TOP, ENTROPY), ridge=1.0),
    "slots": lambda: Logistic.fit(traces(9), slots=J, columns=(), ridge=1.0),
}


# ---- nothing from the future


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimates_do_not_anticipate(name: str) -> None:
    """Those of step t stay as they are whatever later steps, its own outcome and, for slot j, later slots are."""
    rng = np.random.default_rng(0)
    history = [(*drafts(rng, 3), rng.integers(0, J + 1, 3)) for _ in range(12)]

    def estimates(steps: list[Any]) -> list[Floats]:
        estimator, out = ESTIMATORS[name](), []
        for given, accepted, sent in steps:
            out.append(estimator(given))
            estimator.observe(given, sent, np.minimum(accepted, sent))
        return out

    before = estimates(history)
    for t in (0, 5, 11):
        given, accepted, sent = history[t]
        later = [(*drafts(rng, 3), rng.integers(0, J + 1, 3)) for _ in history[t + 1 :]]
        changed = [*history[:t], (given, J - accepted, J - sent), *later]
        for a, b in zip(before[: t + 1], estimates(changed), strict=False):
            assert (a == b).all()
        for j in range(J):
            other = given.copy()
            other[:, j + 1 :] = drafts(rng, 3)[0][:, j + 1 :]
            other[:, :, COUNTS] = 0  # whether a stop was drafted is known too late
            assert (estimates([*history[:t], (other, accepted, sent)])[t][:, : j + 1] == before[t][:, : j + 1]).all()


V, SLOTS, NEW = 2, 2, 3
STEPS = TabulatedSteps(batch_tokens=(1, 2, 3), steps=(1.0, 1 / 1.25, 1 / 1.6), max_batch_tokens=3)
Text = tuple[int, ...]


def distribution(seed: int, text: Text) -> Floats:
    return np.random.default_rng([seed, len(text), *text]).dirichlet([1.0] * V)


class TellsTheFuture(Online):
    """Slot 0 is surer where slot 1 is sure."""

    def __call__(self, drafts_RJF: Floats) -> Floats:
        told = super().__call__(drafts_RJF)
        return np.stack([told[:, 1], told[:, 1]], 1)


def law(scheduler: Scheduler, estimator: Estimator, text: Text, memory: Any, lengths: set[int]) -> dict[Text, float]:
    """Of the first NEW tokens, over all drafts and outcomes; what has been observed goes on to later rounds."""
    if len(text) >= NEW:
        return {text[:NEW]: 1.0}
    total: dict[Text, float] = {}
    for drafted in itertools.product(range(V), repeat=SLOTS):
        weight, after = 1.0, copy.deepcopy(memory)
        given = np.zeros((1, SLOTS, 4))
        given[..., COUNTS] = 1
        for k in range(SLOTS):
            here = (*text, *drafted[:k])
            weight *= distribution(2, here)[drafted[k]]
            given[0, k, LOGIT] = np.random.default_rng([1, *here]).choice([-2.0, 0.3, 2.0])
        sent = int(scheduler(estimator(given), np.array([SLOTS]), after)[0])
        lengths.add(sent)
        reach = 1.0
        for k in range(sent + 1):
            here = (*text, *drafted[:k])
            p, q = distribution(1, here), distribution(2, here)
            accept = min(1.0, p[drafted[k]] / q[drafted[k]]) if k < sent else 0.0
            rest = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum() if k < sent else p
            learnt = copy.deepcopy(estimator)
            learnt.observe(given, np.array([sent]), np.array([k]))
            for token in range(V):
                share = weight * reach * (1 - accept) * rest[token]
                if share > 0:
                    for whole, part in law(scheduler, learnt, (*here, token), after, lengths).items():
                        total[whole] = total.get(whole, 0.0) + share * part
            reach *= accept
    return total


def gap(estimator: Estimator, scheduler: Scheduler) -> tuple[float, set[int]]:
    lengths: set[int] = set()
    got = law(scheduler, estimator, (), scheduler.new_memory(1), lengths)
    texts = itertools.product(range(V), repeat=NEW)
    exact = {t: float(np.prod([distribution(1, t[:k])[x] for k, x in enumerate(t)])) for t in texts}
    return max(abs(got.get(t, 0.0) - share) for t, share in exact.items()), lengths


@pytest.mark.parametrize("make", [Synchronous, asynchronous])
def test_scheduling_by_an_online_estimate_keeps_the_distribution(make: Callable[..., Scheduler]) -> None:
    """Enumerated, with an estimate that jumps after every round; one that looks ahead is found out."""
    settings: dict[str, Any] = {"grid": GRID, "half_life": 2.0, "prior": 0.01}
    wrong, lengths = gap(Online(SLOTS, **settings), make(STEPS, **RULES))
    assert wrong < 1e-12
    assert len(lengths) > 1
    if make is Synchronous:
        assert gap(TellsTheFuture(SLOTS, **settings), make(STEPS, **RULES))[0] > 0.01


# ---- censoring


def test_what_was_seen() -> None:
    """Accepted slots and the first rejection, if it was sent."""
    assert seen(np.array([3, 3, 2, 0]), np.array([1, 3, 2, 0]), J).sum(1).tolist() == [2, 3, 2, 0]


def test_slots_that_were_not_seen_say_nothing() -> None:
    """After the first rejection, not sent, or past a drafted stop: whatever they were, even NaN."""
    rng = np.random.default_rng(1)
    given, accepted = drafts(rng, 64)
    sent = rng.integers(0, J + 1, 64)
    given[:, :, COUNTS] = np.arange(J) < rng.integers(1, J + 1, 64)[:, None]
    accepted = np.minimum.reduce([accepted, sent, given[:, :, COUNTS].sum(1).astype(int)])
    hidden = ~(seen(sent, accepted, J) & (given[:, :, COUNTS] > 0))
    other = given.copy()
    other[hidden, LOGIT] = np.nan
    a, b = online(), online()
    a.observe(given, sent, accepted)
    b.observe(other, sent, accepted)
    assert hidden.any()
    assert (a._likelihood_JG == b._likelihood_JG).all()
    assert not (a._likelihood_JG == 0).all()


@pytest.mark.parametrize("scale", [0.4, 2.5])
def test_online_temperatures_under_a_scheduler_that_selects(scale: float) -> None:
    """Only drafts that look likely are sent, by the estimate itself: each slot's temperature comes out all the same."""
    rng, estimator = np.random.default_rng(2), online(half_life=20000.0)
    counts = np.zeros(J)
    for _ in range(400):
        given, accepted = drafts(rng, 32, scale=scale)
        sent = (estimator(given).cumprod(1) > 0.3).cumprod(1).sum(1)
        counts += seen(sent, np.minimum(accepted, sent), J).sum(0)
        estimator.observe(given, sent, np.minimum(accepted, sent))
    assert counts[-1] < 0.5 * counts[0]
    assert np.abs(np.log(estimator.temperatures / scale)).max() < 0.2


def test_evidence_fades_and_the_prior_comes_back() -> None:
    """After drift the new temperature; of a slot that is no longer sent, 1."""
    rng, estimator = np.random.default_rng(3), online(half_life=200.0)
    assert (estimator.temperatures == 1.0).all()

    def serve(steps: int, scale: float, slots: int) -> None:
        for _ in range(steps):
            given, accepted = drafts(rng, 16, scale=scale)
            estimator.observe(given, np.full(16, slots), np.minimum(accepted, slots))

    serve(200, 4.0, J)
    assert (estimator.temperatures > 2.0).all()
    serve(200, 0.5, 1)
    assert estimator.temperatures[0] == pytest.approx(0.5, rel=0.3)
    assert estimator.temperatures[1:].tolist() == [1.0] * (J - 1)


@pytest.mark.parametrize("change", [{"half_life": 0.0}, {"prior": 0.0}])
def test_online_settings_that_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(UserError, match="above 0"):
        online(**change)


# ---- the logistic estimate


def test_logistic_finds_the_weights() -> None:
    """Of acceptance that follows the features, past the slots that were reached."""
    rng, rounds = np.random.default_rng(4), []
    for _ in range(6000):
        top, entropy = rng.normal(size=J), rng.normal(size=J)
        chance = sigmoid(np.array([0.5, 1.0, 1.5, 0.0]) + 2.0 * top - 1.0 * entropy)
        accepted = int((rng.random(J) < chance).cumprod().sum())
        rounds.append(Round((0.0,) * J, accepted, 1, J, tuple(top), tuple(entropy)))
    fitted = Logistic.fit([Trace(tuple(rounds))], slots=J, columns=(TOP, ENTROPY), ridge=1e-6)
    assert fitted.intercept_J == pytest.approx([0.5, 1.0, 1.5, 0.0], abs=0.25)
    assert fitted.weights == pytest.approx([2.0, -1.0], abs=0.15)
    strong = Logistic.fit([Trace(tuple(rounds))], slots=J, columns=(TOP, ENTROPY), ridge=1e6)
    assert np.abs(strong.weights).max() < 0.1


def test_without_features_it_is_the_mean_acceptance_of_each_slot() -> None:
    """Of the slots that were reached, and not past a drafted stop."""
    rounds = (
        Round((0.0,) * J, 2, 1, J),
        Round((0.0,) * J, 0, 1, J),
        Round((0.0,) * J, 1, 1, 1),  # the second draft is past a stop
        Round((0.0,) * J, 4, 1, J),
    )
    fitted = Logistic.fit([Trace(rounds)], slots=J, columns=(), ridge=1e-9)
    got = fitted(np.full((1, J, 4), np.nan))[0]
    assert got == pytest.approx([3 / 4, 1.0, 1 / 2, 1.0], abs=1e-3)
    with pytest.raises(UserError, match="needs sampled drafts"):
        Logistic.fit([Trace(rounds)], slots=J, columns=(TOP,), ridge=1.0)
    with pytest.raises(UserError, match="no rounds to fit"):
        Logistic.fit([Trace(())], slots=J, columns=(), ridge=1.0)


# ---- in the simulator

MACHINE = AdditiveSteps(
    bias_seconds=1.0,
    requests=(1, 64),
    alpha_seconds=(0.1, 0.4),
    tokens=(1, 256),
    theta_seconds=(0.0, 0.12 * 255),
)


def served(estimator: Estimator | None, source: Any, *, oracle: bool = False, table: StepTable = MACHINE) -> Outcome:
    costs = StepCosts(table, lambda raw, R: raw, extend=True)
    scheduler = Lagged("oracle", costs, lag=0, drafting=None) if oracle else Synchronous(table, **RULES)
    load = Load(max_in_flight=4, arrivals_per_second=None)
    given: dict[str, Any] = {"requests": 30, "prefill_seconds": 0.0, "seed": 0}
    return simulate(source, scheduler, table, load, estimator=estimator, oracle=oracle, **given)


def test_the_raw_head_is_served_as_its_replay() -> None:
    recorded = traces(5)
    ours = served(Scaled([1.0] * J), Recorded(recorded, slots=J))
    assert ours.to_dict() == served(None, Replay(recorded, slots=J, temperatures=None)).to_dict()
    calibrated = served(Scaled([2.0] * J), Recorded(recorded, slots=J))
    assert calibrated.to_dict() == served(None, Replay(recorded, slots=J, temperatures=[2.0] * J)).to_dict()
    assert calibrated.to_dict() != ours.to_dict()


def test_an_estimator_sees_what_was_sent_and_no_more() -> None:
    observed = []

    class Watching(Scaled):
        def observe(self, drafts_RJF: Floats, sent_R: np.ndarray, accepted_R: np.ndarray) -> None:
            observed.append((drafts_RJF, sent_R, accepted_R))

    out = served(Watching([1.0] * J), Recorded(traces(5), slots=J))
    assert sum(int(sent.sum()) for _, sent, _ in observed) == out.verified
    assert sum(int(accepted.sum()) for _, _, accepted in observed) == out.accepted
    assert len(out.estimates) == len(observed) == out.drafted_steps
    for (given, sent, accepted), (logged, estimate, true) in zip(observed, out.estimates, strict=True):
        assert given is logged
        assert (accepted == np.minimum(sent, true)).all()
        assert (estimate == sigmoid(given[..., LOGIT])).all()
    assert any((true > sent).any() for (_, sent, _), (_, _, true) in zip(observed, out.estimates, strict=True))


SIMILAR = {
    "mean": 1.2,
    "spread": 0.5,
}  # drafts that are about equally likely: how likely then decides how many are sent


@pytest.mark.parametrize("scale", [3.0, 1 / 3])
def test_sts_schedules_better_than_a_head_miscalibrated_on_purpose(scale: float) -> None:
    """Deterministic: temperatures fitted to some answers, others served; refitted online it is nearly as good."""
    rounds = [one for trace in traces(6, scale=scale, **SIMILAR) for one in trace.rounds]
    observed = Traces(
        torch.tensor([one.logits for one in rounds], dtype=torch.float64),
        torch.tensor([one.accepted for one in rounds]),
        torch.tensor([one.valid for one in rounds]),
    )
    fitted = fit_sts(observed, grid=temperature_grid(low=0.1, high=10.0, points=41), bins=20).tolist()
    source = Recorded(traces(7, answers=60, scale=scale, **SIMILAR), slots=J)
    table = replace(MACHINE, theta_seconds=(0.0, 0.25 * 255))
    raw, sts = (served(Scaled(t), source, table=table).throughput for t in ([1.0] * J, fitted))
    learning = served(online(), source, table=table).throughput
    bound = served(Scaled([1.0] * J), source, oracle=True, table=table).throughput
    assert sts > 1.03 * raw
    assert learning > 1.03 * raw
    assert bound > 1.1 * sts


def test_recorded_answers() -> None:
    recorded = traces(8, answers=5, tokens=6)
    source = Recorded(recorded, slots=J)
    given, accepted = source.answers[2].draft(3)
    assert accepted == recorded[2].rounds[2].accepted
    third = recorded[2].rounds[2]
    assert given[:, :COUNTS].T.tolist() == [list(v) for v in (third.logits, third.top, third.entropy)]
    assert source.answers[2].tokens == 7
    cut = features(Round((1.0,) * J, 1, 1, 2), J)
    assert cut[:, COUNTS].tolist() == [1, 1, 0, 0]
    assert np.isnan(cut[:, [TOP, ENTROPY]]).all()
    parts = source.deal(2, seed=0)
    assert sorted(len(part.answers) for part in parts) == [2, 3]
    assert {id(t) for part in parts for t in part.traces} == {id(t) for t in recorded}
    with pytest.raises(UserError, match="too few for 6 batches"):
        source.deal(6, seed=0)
    with pytest.raises(UserError, match="round at every position"):
        Recorded([Trace((Round((0.0,) * J, 1, 2, J),))], slots=J)
    with pytest.raises(UserError, match="no rounds to replay"):
        Recorded([Trace(())], slots=J)
