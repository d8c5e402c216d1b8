"""The simulator: recorded rounds come out as they went in, loads and costs add up by hand, schedulers are compared."""

import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dspec.decoding.generation import Generation, Pass, make_requests
from dspec.decoding.loop import decode
from dspec.decoding.proposers import DraftProposer
from dspec.decoding.speculative import Speculative
from dspec.decoding.verification import VerifyAll
from dspec.errors import UserError
from dspec.serving.schedulers import (
    Lagged,
    ScheduleMemory,
    Scheduler,
    Static,
    StepCosts,
    Synchronous,
    Threshold,
    asynchronous,
    sglang,
    vllm,
)
from dspec.serving.scheduling import Ints
from dspec.serving.simulator import Load, Outcome, simulate
from dspec.serving.step_table import AdditiveSteps, Floats, StepTable, TabulatedSteps
from dspec.serving.traces import AnswerSource, FittedSource, Replay, Round, Trace, record

RULES: dict[str, Any] = {"min_yield": 0.05, "horizon": 16, "probe_every": 32}
CLOSED = Load(max_in_flight=1, arrivals_per_second=None)


def machine(*, draft: float = 0.15, knee: int = 12, slope: float = 0.09, bump: float = 0.0) -> AdditiveSteps:
    """Flat up to a knee, as a memory-bound device; in units of a pass over one token."""
    tokens = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
    theta = tuple(0.01 * m + slope * max(0, m - knee) + bump * (m > 1) for m in tokens)
    return AdditiveSteps(
        bias_seconds=1.0,
        requests=(1, 64),
        alpha_seconds=(draft, draft + 63 * draft / 10),
        tokens=tokens,
        theta_seconds=theta,
    )


def source(*, mean: float = 2.0, spread: float = 1.2, slots: int = 7, tokens: int = 60) -> FittedSource:
    """Calibrated logits with easy and hard rounds."""
    covariance = spread**2 * (0.7 * np.ones((slots, slots)) + 0.3 * np.eye(slots))
    return FittedSource(
        mean_J=np.full(slots, mean), covariance_JJ=covariance, temperatures_J=np.ones(slots), tokens=[tokens]
    )


def run(scheduler: Scheduler, table: StepTable, concurrency: int, **options: Any) -> Outcome:
    drafts: AnswerSource = options.pop("source", None) or source()
    load = Load(max_in_flight=concurrency, arrivals_per_second=None)
    given = {"requests": 12 + 2 * concurrency, "prefill_seconds": 0.0, "seed": 0} | options
    return simulate(drafts, scheduler, table, load, **given)


# ---- traces


def logit(c: float) -> float:
    return float(np.log(c / (1 - c)))


def test_an_answer_by_position() -> None:
    """Two rounds of three drafts: one accepted, then all three, then the answer's last token."""
    rounds = (
        Round((logit(0.9), logit(0.4), logit(0.3)), 1, 2, 3),
        Round((logit(0.8), logit(0.7), logit(0.6)), 3, 4, 3),
        Round((logit(0.5), logit(0.2), logit(0.1)), 0, 1, 2),
    )
    answer = Replay([Trace(rounds)], slots=3, temperatures=None).answer(np.random.default_rng(0))
    assert answer.tokens == 8
    drafted = [answer.draft(at) for at in range(1, 9)]
    assert [n for _, n in drafted] == [1, 0, 3, 2, 1, 0, 0, 0]
    assert drafted[0][0] == pytest.approx([0.9, 0.4, 0.3])
    assert drafted[1][0] == pytest.approx([0.4, 0.3, 0.3])
    assert drafted[2][0] == pytest.approx([0.8, 0.7, 0.6])
    assert drafted[4][0] == pytest.approx([0.6, 0.5, 0.5])  # the target's token is as likely as the one after it
    assert drafted[6][0] == pytest.approx([0.5, 0.2, 0.1])


def test_temperatures_calibrate_the_replay() -> None:
    trace = Trace((Round((2.0, -2.0), 1, 2, 2),))
    answer = Replay([trace], slots=2, temperatures=[4.0, 0.5]).answer(np.random.default_rng(0))
    assert answer.draft(1)[0] == pytest.approx([1 / (1 + np.exp(-0.5)), 1 / (1 + np.exp(4.0))])


def test_verifying_all_replays_the_recorded_rounds(toys: SimpleNamespace) -> None:
    """Round by round, from a real decoder, with stops and limits."""
    target, draft = toys.markov_pair(noise=0.006, block=4)
    from dspec.models.draft import Draft

    assert isinstance(draft, Draft)
    texts = toys.prompts(random.Random(0), 6, vocab=24)
    stop = toys.ar(target, texts, 20)[0][8]
    requests = make_requests(texts, seeds=[0] * 6, sampling=toys.GREEDY, max_new_tokens=20, stop_ids=[stop])

    class Confident(DraftProposer):
        def propose(self, *args: Any, **options: Any) -> Any:
            proposal = super().propose(*args, **options | {"confidence": False})
            proposal.confidence_BJ = proposal.tokens_BJ.double() / 24
            return proposal

    decoder = Speculative(target=target, proposer=Confident(draft), policy=VerifyAll(), record_confidence=True)
    generations = decode(decoder, requests)
    traces = record(generations)
    assert [t.tokens for t in traces] == [len(g.tokens) for g in generations]
    assert len({r.accepted for t in traces for r in t.rounds}) > 3
    for trace in traces:
        if not trace.rounds:
            continue
        answer, at = Replay([trace], slots=4, temperatures=None).answer(np.random.default_rng(0)), 1
        for one in trace.rounds:
            sure, accepted = answer.draft(at)
            assert min(accepted, trace.tokens - at) == one.accepted
            assert sure[: len(one.logits)] == pytest.approx(1 / (1 + np.exp(-np.array(one.logits))))
            at += min(accepted + 1, trace.tokens - at)
        assert at == trace.tokens
    steps = sum(len(t.rounds) for t in traces)
    replay = Replay([t for t in traces if t.rounds], slots=4, temperatures=None)
    left = iter(replay.answers * 2)
    replay.answer = lambda rng: next(left)  # type: ignore[method-assign]
    done = simulate(replay, Static(4), machine(), CLOSED, requests=len(replay.answers), prefill_seconds=0.0, seed=0)
    assert (done.steps, done.tokens) == (steps, sum(t.tokens for t in traces if t.rounds))


def test_what_cannot_be_replayed() -> None:
    generation = Generation(tokens=[1, 2], passes=[Pass("prefill", 1), Pass("verify", 1, drafted=2, valid=2)])
    with pytest.raises(UserError, match="record_confidence=True"):
        record([generation])
    with pytest.raises(UserError, match="no rounds to replay"):
        Replay([Trace(())], slots=3, temperatures=None)
    with pytest.raises(UserError, match="too few to fit"):
        FittedSource.fit([Trace((Round((1.0, 1.0), 0, 1, 2),))], slots=2, temperatures=[1, 1])


def test_a_fit_has_the_moments_of_its_traces() -> None:
    """And its drafts are accepted as often as their confidence says."""
    rng = np.random.default_rng(0)
    wide = source(spread=1.0, slots=3)
    answers = [wide.answer(rng) for _ in range(4)]
    rounds = []
    for answer in answers * 300:
        c, n = answer.draft(1)
        rounds.append(Round(tuple(np.log(c / (1 - c)).tolist()), n, n + 1, len(c)))
    fit = FittedSource.fit([Trace(tuple(rounds))], slots=3, temperatures=[1.0] * 3)
    assert fit.mean_J == pytest.approx([2.0] * 3, abs=0.1)
    assert fit.factor_JJ @ fit.factor_JJ.T == pytest.approx(0.7 + 0.3 * np.eye(3), abs=0.12)
    drawn = [fit.answer(rng).draft(1) for _ in range(2000)]
    first = np.mean([n > 0 for _, n in drawn])
    assert first == pytest.approx(np.mean([c[0] for c, _ in drawn]), abs=0.03)
    expected = np.mean([c.cumprod().sum() for c, _ in drawn])
    assert np.mean([n for _, n in drawn]) == pytest.approx(expected, abs=0.1)


# ---- time


def test_plain_decoding_by_hand() -> None:
    """Two at a time, 60 tokens each: the prefill's, then one per step."""
    out = run(Static(0), machine(), 2, requests=2, prefill_seconds=0.5)
    assert (out.steps, out.tokens, out.verified, out.drafted_steps) == (59, 120, 0, 0)
    assert out.seconds == pytest.approx(1.0 + 59 * machine().seconds_without_drafts(2))  # type: ignore[operator]
    assert out.throughput == pytest.approx(120 / out.seconds)
    assert out.tokens_per_second_per_user == pytest.approx(60 / out.seconds)
    assert out.budget == out.waste == 0.0
    whole = TabulatedSteps(batch_tokens=(1, 2), steps=(2.0, 1.0), max_batch_tokens=2)  # drafting is in every step
    assert run(Static(0), whole, 2, requests=2).seconds == pytest.approx(59.0)


def test_verified_tokens_cost_time() -> None:
    sure = Replay([Trace((Round((9.0,) * 3, 3, 4, 3),) * 5)], slots=3, temperatures=None)
    out = run(Static(3), machine(), 2, source=sure, requests=2)
    assert (out.steps, out.tokens, out.verified, out.accepted) == (5, 42, 30, 30)
    assert out.seconds == pytest.approx(5 * float(machine().seconds(2, 8)))
    assert out.budget == 3
    never = Replay([Trace((Round((9.0,) * 3, 0, 1, 3),) * 5)], slots=3, temperatures=None)
    assert run(Static(2), machine(), 1, source=never, requests=1).waste == 1.0
    assert run(Static(2), machine(), 1, source=never, requests=1).budget == 2


def test_it_is_deterministic_by_seed() -> None:
    def outcome(seed: int) -> dict[str, Any]:
        scheduler = asynchronous(machine(), **RULES)
        load = Load(max_in_flight=4, arrivals_per_second=0.2)
        return simulate(source(), scheduler, machine(), load, requests=9, prefill_seconds=0.1, seed=seed).to_dict()

    assert outcome(1) == outcome(1) != outcome(2)
    assert json.loads(json.dumps(outcome(1))) == outcome(1)


def test_random_arrivals_wait_for_room() -> None:
    """At a low rate nobody waits; above what can be served, all do, and throughput is that of the closed loop."""
    table, out = machine(), {}
    for rate in (0.001, 1.0):
        load = Load(max_in_flight=4, arrivals_per_second=rate)
        out[rate] = simulate(source(), Static(3), table, load, requests=80, prefill_seconds=0.0, seed=0)
    assert out[0.001].mean_wait < 1.0
    first = out[0.001].served[0]
    assert first.admitted == first.arrived > 0  # an idle engine waits for the next one, no longer
    assert 80 / out[0.001].seconds == pytest.approx(0.001, rel=0.25)
    assert out[1.0].mean_wait > 50
    closed = run(Static(3), table, 4, requests=80)
    assert closed.mean_wait == 0
    assert out[1.0].throughput == pytest.approx(closed.throughput, rel=0.03)
    alone = run(Static(3), table, 1, requests=40).tokens_per_second_per_user
    assert out[0.001].tokens_per_second_per_user == pytest.approx(alone, rel=0.1)
    assert all(a.arrived <= a.admitted < a.finished for o in out.values() for a in o.served)


def test_memory_follows_the_requests_in_flight() -> None:
    """Answers of different lengths and confidences leave and join: what is remembered of a request is its own."""
    seen = []

    class Watching(Lagged):
        def __call__(self, confidence_RJ: Floats, count_R: Ints, memory: ScheduleMemory) -> Ints:
            for past, row in zip(memory.past, confidence_RJ, strict=True):
                seen.append(not past or past[0][0] == row[0])
            return super().__call__(confidence_RJ, count_R, memory)

    class Kinds(Replay):
        def answer(self, rng: np.random.Generator) -> Any:
            self.answers.append(self.answers.pop(0))
            return self.answers[-1]

    traces = [Trace((Round((0.1 * n,), 0, 1, 1),) * n) for n in (2, 5, 9, 14)]
    costs = StepCosts(machine(), lambda raw, R: raw, extend=False)
    watching = Watching("watching", costs, lag=1, drafting=None)
    run(watching, machine(), 5, source=Kinds(traces, slots=1, temperatures=None), requests=20)
    assert len(seen) > 60
    assert all(seen)


@pytest.mark.parametrize(
    "wrong", [{"max_in_flight": 0}, {"arrivals_per_second": 0.0}, {"arrivals_per_second": float("nan")}]
)
def test_loads_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="a load needs"):
        Load(**{"max_in_flight": 1, "arrivals_per_second": None} | wrong)
    with pytest.raises(UserError, match="requests >= 1"):
        run(Static(1), machine(), 1, requests=0)


# ---- schedulers


def adaptive(table: StepTable) -> dict[str, Scheduler]:
    return {
        "synchronous": Synchronous(table, **RULES),
        "asynchronous": asynchronous(table, **RULES),
    }


@pytest.mark.parametrize("bump", [0.0, 0.6])
@pytest.mark.parametrize("concurrency", [1, 4, 24])
def test_the_better_one_is_never_far_below_the_best_static_length(concurrency: int, bump: float) -> None:
    """Within 3 %, on a curve with a knee and on one whose second token is expensive. The oracle is the best where
    drafting pays."""
    table = machine(bump=bump)
    static = {n: run(Static(n), table, concurrency).throughput for n in (0, 1, 3, 5, 7)}
    ours = {name: run(s, table, concurrency).throughput for name, s in adaptive(table).items()}
    bound = run(adaptive(table)["synchronous"], table, concurrency, oracle=True).throughput
    print(concurrency, bump, static, ours, bound)
    assert max(ours.values()) > 0.97 * max(static.values())
    assert bound > (0.95 if max(static, key=lambda n: static[n]) == 0 else 1.0) * max(*ours.values(), *static.values())


def test_the_budget_falls_with_the_load() -> None:
    for make in (lambda t: Synchronous(t, **RULES), lambda t: asynchronous(t, **RULES), sglang, vllm):
        outs = [run(make(machine()), machine(), n) for n in (1, 8, 32)]  # type: ignore[no-untyped-call]
        budgets = [out.budget for out in outs]
        assert budgets[0] > budgets[1] > budgets[2]
        assert outs[0].waste > outs[2].waste


@pytest.mark.parametrize("concurrency", [1, 16])
def test_drafting_that_cannot_pay_costs_little(concurrency: int) -> None:
    """No more than 5 % below plain decoding; the engines' budgets lose what drafting costs."""
    table, hopeless = machine(draft=0.4), source(mean=-4.0, tokens=200)
    plain = run(Static(0), table, concurrency, source=hopeless).throughput
    for name, scheduler in adaptive(table).items():
        out = run(scheduler, table, concurrency, source=hopeless)
        assert out.throughput > 0.95 * plain, name
        assert out.drafted_steps / out.steps < 0.2
    assert run(vllm(table), table, concurrency, source=hopeless).throughput < 0.95 * plain


def test_calibration_pays() -> None:
    """A head that is sure of everything verifies too much under load."""
    table, honest = machine(slope=0.03), source(mean=0.5)

    class Boasting(FittedSource):
        def answer(self, rng: np.random.Generator) -> Any:
            answer = super().answer(rng)
            honest_draft = answer.draft
            answer.draft = lambda at: (honest_draft(at)[0] ** 0.1, honest_draft(at)[1])  # type: ignore[method-assign]
            return answer

    boasting = Boasting(
        mean_J=honest.mean_J,
        covariance_JJ=honest.factor_JJ @ honest.factor_JJ.T,
        temperatures_J=honest.temperatures_J,
        tokens=honest.tokens,
    )
    for name in ("synchronous", "asynchronous"):
        outs = [run(adaptive(table)[name], table, 16, source=s) for s in (honest, boasting)]
        assert outs[0].throughput > 1.05 * outs[1].throughput
        assert outs[0].waste < outs[1].waste


def test_a_threshold_does_not_look_at_the_load() -> None:
    budgets = [run(Threshold(0.8), machine(), n).budget for n in (1, 32)]
    assert budgets[0] == pytest.approx(budgets[1], rel=0.15)
