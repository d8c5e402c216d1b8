"""Schedulers in the decoder: their output distribution, by enumeration; their memory; the settings that reach them."""

import copy
import itertools
import json
import random
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dspec.decoding.generation import make_requests
from dspec.decoding.loop import decode
from dspec.decoding.proposers import DraftProposer, Proposal
from dspec.decoding.sampling import Sampling
from dspec.decoding.speculative import Speculative
from dspec.errors import UserError
from dspec.models.temperatures import Calibration
from dspec.serving import schedulers
from dspec.serving.engine import Engine
from dspec.serving.policies import ScheduledVerification
from dspec.serving.schedulers import (
    Drafting,
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
from dspec.serving.step_table import AdditiveSteps, MeasuredSteps, StepTable, TabulatedSteps

WARM = Sampling(temperature=1.0, top_p=1.0)
RULES: dict[str, Any] = {"min_yield": 0.05, "horizon": 16, "probe_every": 4}
Text = tuple[int, ...]
Distribution = dict[Any, float]
V, J, NEW = 2, 2, 3


def tabulated(*seconds: float) -> TabulatedSteps:
    n = len(seconds)
    return TabulatedSteps(batch_tokens=tuple(range(1, n + 1)), steps=tuple(1 / s for s in seconds), max_batch_tokens=n)


JAGGED = tabulated(1.0, 1.6, 1.7, 3.2, 3.3, 3.4)
PAIRED = tabulated(1.0, 1.9, 2.1, 3.2, 3.3, 3.4)  # for two requests


def lagged(lag: int, table: StepTable) -> Lagged:
    return Lagged("lagged", StepCosts(table, lambda raw, R: raw, extend=False), lag=lag, drafting=None)


SCHEDULERS: dict[str, Callable[[StepTable], Scheduler]] = {
    "synchronous": lambda table: Synchronous(table, **RULES),
    "asynchronous": lambda table: asynchronous(table, **RULES),
    "sglang": sglang,
    "vllm": vllm,
    "static": lambda table: Static(1),
    "threshold": lambda table: Threshold(0.6),
}


# ---- the distribution of one request's first NEW tokens, over all drafts and their histories


def table(seed: int) -> Callable[[Text], np.ndarray]:
    def distribution(text: Text) -> np.ndarray:
        return np.random.default_rng([seed, len(text), *text]).dirichlet([1.0] * V)

    return distribution


p, q = table(1), table(2)


def confidence(text: Text, drafts: Text) -> np.ndarray:
    """Of each slot: a function of the tokens before it, far from constant."""
    return np.array([np.random.default_rng([1, *text, *drafts[:k]]).choice([0.05, 0.5, 0.95]) for k in range(J)])


def outcomes(text: Text, drafts: Text, verified: int) -> Distribution:
    """Rejection sampling by its formula: accepted drafts and one more token, with probabilities."""
    out: Distribution = {}
    reach = 1.0
    for k in range(verified + 1):
        here = (*text, *drafts[:k])
        if k < verified:
            accept = min(1.0, p(here)[drafts[k]] / q(here)[drafts[k]])
            rest = np.maximum(p(here) - q(here), 0)
            rest = rest / rest.sum() if rest.sum() > 0 else rest
        else:
            accept, rest = 0.0, p(here)
        for token in range(V):
            if (weight := reach * (1 - accept) * rest[token]) > 0:
                out[(*drafts[:k], token)] = out.get((*drafts[:k], token), 0.0) + weight
        reach *= accept
    return out


def output(scheduler: Scheduler, text: Text, memory: ScheduleMemory) -> Distribution:
    if len(text) >= NEW:
        return {text[:NEW]: 1.0}
    total: Distribution = {}
    memory = copy.deepcopy(memory)
    drafting = scheduler.drafts(memory)
    for drafts in itertools.product(range(V), repeat=J) if drafting else [()]:
        weight = float(np.prod([q((*text, *drafts[:k]))[x] for k, x in enumerate(drafts)]))
        after, verified = copy.deepcopy(memory), 0
        if drafting:
            c = confidence(text, drafts)[None]
            verified = int(scheduler(c, np.array([J]), after)[0])
        for emitted, share in outcomes(text, drafts, verified).items():
            for whole, rest in output(scheduler, (*text, *emitted), after).items():
                total[whole] = total.get(whole, 0.0) + weight * share * rest
    return total


def exact() -> Distribution:
    return {
        text: float(np.prod([p(text[:k])[x] for k, x in enumerate(text)]))
        for text in itertools.product(range(V), repeat=NEW)
    }


def gap(got: Distribution, expected: Distribution) -> float:
    return max(abs(got.get(key, 0.0) - expected.get(key, 0.0)) for key in {*got, *expected})


def warm(scheduler: Scheduler, requests: int) -> ScheduleMemory:
    """As after some rounds: a lag is full, K is in the middle."""
    memory = scheduler.new_memory(requests)
    rng = np.random.default_rng(3)
    for _ in range(2):
        scheduler(rng.uniform(0.2, 0.9, (requests, J)), np.full(requests, J), memory)
    return memory


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_output_has_the_targets_distribution(name: str) -> None:
    scheduler = SCHEDULERS[name](JAGGED)
    for memory in (scheduler.new_memory(1), warm(scheduler, 1)):
        assert gap(output(scheduler, (), memory), exact()) < 1e-12


def test_a_search_over_this_rounds_own_confidences_is_biased() -> None:
    scheduler = lagged(0, JAGGED)
    assert gap(output(scheduler, (), scheduler.new_memory(1)), exact()) > 0.01


# ---- two requests that compete for the same step


def joint(scheduler: Scheduler) -> Distribution:
    """Of what both emit first in one round. Texts begin apart, so that their drafts and confidences differ."""
    texts, memory = ((0, 1), (1, 0, 0)), warm(scheduler, 2)
    total: Distribution = {}
    for both in itertools.product(itertools.product(range(V), repeat=J), repeat=2):
        weight = 1.0
        for text, drafts in zip(texts, both, strict=True):
            weight *= float(np.prod([q((*text, *drafts[:k]))[x] for k, x in enumerate(drafts)]))
        c = np.stack([confidence(t, d) for t, d in zip(texts, both, strict=True)])
        lengths = scheduler(c, np.array([J, J]), copy.deepcopy(memory)).tolist()
        rounds = [outcomes(t, d, n) for t, d, n in zip(texts, both, lengths, strict=True)]
        for (a, first), (b, second) in itertools.product(*(r.items() for r in rounds)):
            total[a[0], b[0]] = total.get((a[0], b[0]), 0.0) + weight * first * second
    return total


@pytest.mark.parametrize("name", SCHEDULERS)
def test_requests_in_one_step_do_not_bias_each_other(name: str) -> None:
    expected = {(a, b): p((0, 1))[a] * p((1, 0, 0))[b] for a in range(V) for b in range(V)}
    assert gap(joint(SCHEDULERS[name](PAIRED)), expected) < 1e-12


def test_the_biased_search_is_rejected_there_too() -> None:
    expected = {(a, b): p((0, 1))[a] * p((1, 0, 0))[b] for a in range(V) for b in range(V)}
    assert gap(joint(lagged(0, PAIRED)), expected) > 0.01


# ---- appendix A of the paper: p_t = (0.7, 0.3), p_d = (0.5, 0.5), a_1 = 0.8; x_1 = A gives c_2 = 0.9, x_1 = B gives 0

APPENDIX = tabulated(1 / 1.0, 1 / 0.5, 1 / 0.45)


def first_is_a(lengths: Callable[[np.ndarray], int]) -> float:
    total = 0.0
    for x in (0, 1):
        verified = lengths(np.array([[0.8, (0.9, 0.0)[x]]]))
        accept = min(1.0, (0.7, 0.3)[x] / 0.5)
        if verified == 0:
            total += 0.5 * 0.7
        else:  # a rejection leaves the residual, which is A
            total += 0.5 * (accept * (x == 0) + (1 - accept))
    return total


def test_appendix_a() -> None:
    """Without the break A comes out with probability 0.85; with it, it is 0.7 and nothing is verified."""
    from dspec.serving.scheduling import admit, capacity, survival, synchronous

    seconds, count = APPENDIX.seconds(1, [1, 2, 3]), np.array([2])

    def paper(c: np.ndarray) -> int:
        return int(synchronous(survival(c, count), seconds)[0])

    def unbroken(c: np.ndarray) -> int:
        a = survival(c, count)
        return int(admit(a, capacity(a, seconds))[0])

    def ours(c: np.ndarray) -> int:
        scheduler = Synchronous(APPENDIX, **RULES)
        return int(scheduler(c, count, scheduler.new_memory(1))[0])

    assert [paper(np.array([[0.8, c]])) for c in (0.9, 0.0)] == [0, 0]
    assert first_is_a(paper) == pytest.approx(0.7, abs=1e-12)
    assert first_is_a(unbroken) == pytest.approx(0.85, abs=1e-12)
    assert [ours(np.array([[0.8, c]])) for c in (0.9, 0.0)] == [2, 1]  # the convex curve passes the step at two tokens
    assert first_is_a(ours) == pytest.approx(0.7, abs=1e-12)


# ---- memory


def test_the_capacity_is_that_of_earlier_steps() -> None:
    """Sure, then hopeless drafts: K follows `lag` steps after."""
    sure, hopeless, count = np.full((1, 3), 0.99), np.full((1, 3), 0.01), np.array([3])
    steep = tabulated(1.0, 1.2, 1.4, 1.6)
    for scheduler, lag in ((sglang(steep), 2), (vllm(steep), 1), (lagged(3, steep), 3)):
        memory, sent = scheduler.new_memory(1), []
        for c in [sure] * 4 + [hopeless] * 4:
            sent.append(int(scheduler(c, count, memory).sum()))
        assert sent == [3] * (4 + lag) + [0] * (4 - lag)


def test_sglang_reads_the_fit_and_the_others_what_was_measured() -> None:
    fitted = additive(draft=0.1, token=10.0)
    grid = {(1, n): 1.0 + 0.001 * n for n in (1, 4)}
    table = MeasuredSteps(grid=grid, fitted=fitted)
    for name, make in (("sglang", sglang), ("vllm", vllm), ("asynchronous", partial(asynchronous, **RULES))):
        scheduler = make(table)
        memory = scheduler.new_memory(1)
        for _ in range(4):
            sent = int(scheduler(np.full((1, 4), 0.9), np.array([4]), memory)[0])
        assert sent == (0 if name == "sglang" else 4), name


def test_requests_without_history() -> None:
    """They count as sure in the engines' budgets, with the running mean in ours."""
    steep, count = tabulated(*(1 + 0.3 * k for k in range(30))), np.full(2, 3)
    low = np.full((2, 3), 0.2)
    for scheduler, sent in ((sglang(steep), 3), (asynchronous(steep, **RULES), 0)):
        memory = scheduler.new_memory(2)
        for _ in range(60):
            scheduler(low, count, memory)
        assert scheduler(low, count, memory).sum() == 0
        memory.join(scheduler.new_memory(1))
        assert scheduler(np.full((3, 3), 0.2), np.full(3, 3), memory).sum() == sent


def test_memory_follows_its_requests() -> None:
    scheduler = lagged(1, JAGGED)
    memory, other = scheduler.new_memory(3), scheduler.new_memory(1)
    scheduler(np.array([[0.1], [0.2], [0.3]]), np.full(3, 1), memory)
    scheduler(np.array([[0.4]]), np.full(1, 1), other)
    memory.select([2, 0])
    memory.join(other)
    assert [float(past[0][0]) for past in memory.past] == [0.3, 0.1, 0.4]
    assert all(isinstance(past, deque) for past in memory.past)


# ---- whether to draft at all


def additive(draft: float, token: float) -> AdditiveSteps:
    return AdditiveSteps(
        bias_seconds=1.0,
        requests=(1, 64),
        alpha_seconds=(draft, draft),
        tokens=(1, 512),
        theta_seconds=(0.0, 511 * token),
    )


@pytest.mark.parametrize("name", ["synchronous", "asynchronous"])
def test_drafting_stops_where_it_cannot_pay_and_is_tried_again(name: str) -> None:
    """One round in `probe_every`, then ever fewer, down to a quarter; when drafts get better, one is enough."""
    make = Synchronous if name == "synchronous" else asynchronous
    scheduler = make(additive(draft=0.5, token=0.2), **RULES)
    memory = scheduler.new_memory(8)

    def rounds(c: float, n: int) -> list[bool]:
        drafted = []
        for _ in range(n):
            drafted.append(scheduler.drafts(memory))
            if drafted[-1]:
                scheduler(np.full((8, 4), c), np.full(8, 4), memory)
        return drafted

    assert rounds(0.95, 10) == [True] * 10
    bad = rounds(0.1, 140)
    last = bad.index(False) - 1
    probes = [i - last for i in range(last + 1, len(bad)) if bad[i]]
    assert probes == [4, 12, 28, 44, 60, 76, 92, 108, 124]
    better = rounds(0.95, 40)
    assert all(better[better.index(True) :])
    bad = rounds(0.1, 12)
    assert bad[bad.index(False) :].index(True) == 3  # from the beginning


def test_the_load_decides_at_once() -> None:
    scheduler = Synchronous(additive(draft=0.5, token=0.05), **RULES)
    memory = scheduler.new_memory(32)
    for _ in range(10):
        scheduler(np.full((32, 4), 0.6), np.full(32, 4), memory)
    assert not scheduler.drafts(memory)
    memory.select([0])
    assert scheduler.drafts(memory)


def test_a_table_that_does_not_know_what_drafting_costs_always_drafts() -> None:
    drafting = Drafting(StepCosts(JAGGED, lambda raw, R: raw, extend=True), horizon=1, probe_every=1)
    memory = ScheduleMemory(1, lag=0)
    for _ in range(9):
        drafting.observe(np.zeros((1, 3)), memory)
    assert drafting.wanted(memory)


def test_the_latest_drafts_are_kept_and_at_first_all_count_as_accepted() -> None:
    drafting = Drafting(StepCosts(JAGGED, lambda raw, R: raw, extend=True), horizon=4, probe_every=1)
    memory = ScheduleMemory(1, lag=0)
    drafting.observe(np.full((1, 2), 0.5), memory)
    assert memory.recent_NJ is not None
    assert memory.recent_NJ.tolist() == [[1, 1], [0.5, 0.5]]
    drafting.observe(np.zeros((3, 2)), memory)
    assert memory.recent_NJ.tolist() == [[0.5, 0.5], [0, 0], [0, 0], [0, 0]]
    drafting.observe(np.zeros((6, 2)), memory)  # a step of more requests than the horizon is kept whole
    assert memory.recent_NJ.tolist() == [[0, 0]] * 6


def test_while_drafting_pays_it_is_weighed_for_every_quarter_of_the_horizon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weighing costs time. While it does not pay, it is weighed after every probe."""
    weighed: list[bool] = []
    pays = iter([True] * 3 + [False] * 9)
    monkeypatch.setattr(schedulers, "drafting_pays", lambda *given: weighed.append(next(pays)) or weighed[-1])
    drafting = Drafting(StepCosts(additive(0.5, 0.2), lambda raw, R: raw, extend=True), horizon=16, probe_every=2)
    memory, seen = ScheduleMemory(1, lag=0), []
    for _ in range(20):
        if drafting.wanted(memory):
            drafting.observe(np.zeros((1, 3)), memory)
        seen.append(len(weighed))
    assert seen == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 5, 5, 5, 6]


# ---- in the decoder


def speculative(toys: SimpleNamespace, scheduler: Scheduler, **options: Any) -> tuple[Speculative, Any]:
    target = toys.target(seed=8, vocab=11)
    draft = toys.draft(target, seed=8, block=4, head="vanilla", confidence=True, scale=0.4)
    policy = ScheduledVerification(scheduler, calibration=options.pop("calibration", None))
    return Speculative(target=target, proposer=DraftProposer(draft), policy=policy, **options), target


@pytest.mark.parametrize("name", [*SCHEDULERS, "nothing"])
def test_greedy_text_is_that_of_plain_decoding(toys: SimpleNamespace, name: str) -> None:
    """Under joins and leaves; different schedulers verify different numbers of drafts."""
    scheduler = Static(0) if name == "nothing" else SCHEDULERS[name](additive(draft=0.1, token=0.15))
    decoder, target = speculative(toys, scheduler)
    texts = toys.prompts(random.Random(1), 7, vocab=11)
    whole = toys.ar(target, texts, 12)
    requests = make_requests(texts, seeds=range(7), sampling=toys.GREEDY, max_new_tokens=12, stop_ids=[whole[0][4]])
    for in_flight in (1, 3, 7):
        got = decode(decoder, requests, in_flight=in_flight)
        assert [g.tokens for g in got] == [toys.cut(w, [whole[0][4]], 12) for w in whole]
    drafted = {r.drafted for g in got for r in g.rounds}
    assert drafted == {"nothing": {0}, "static": {1}}.get(name, drafted)
    assert all(g.draft_forwards == (0 if name == "nothing" else len(g.rounds)) for g in got)
    assert len(drafted) > 1 or name in ("nothing", "static")


def test_sampled_rounds_may_go_without_drafts(toys: SimpleNamespace) -> None:
    """Some rounds drafted, some not: still the same request alone and in a batch of itself; the trace says which."""

    class EveryOther(Static):
        def __init__(self) -> None:
            super().__init__(4)
            self.rounds = 0

        def drafts(self, memory: ScheduleMemory) -> bool:
            self.rounds += 1
            return self.rounds % 2 == 0

    decoder, _ = speculative(toys, EveryOther())
    requests = make_requests([[1, 2], [3]], seeds=[0, 1], sampling=WARM, max_new_tokens=9, stop_ids=())
    for g in decode(decoder, requests):
        assert [r.drafted for r in g.rounds] == [0, 4] * (len(g.rounds) // 2) + [0] * (len(g.rounds) % 2)
        assert g.draft_forwards == len(g.rounds) // 2
        assert len(g.tokens) == 9


def test_calibration_reaches_the_scheduler(toys: SimpleNamespace) -> None:
    """As for a confidence threshold: where it was fitted, else raw, with a warning."""
    logits = torch.tensor([[2.0, -2.0, 4.0]], dtype=torch.float64)
    proposal = Proposal(torch.zeros(1, 3, dtype=torch.long), torch.tensor([3]), confidence_BJ=logits)
    fitted = Calibration((4.0, 0.5, 1.0), temperature=1.0, top_p=1.0)
    seen = []

    class Reads(Threshold):
        def __call__(self, c: np.ndarray, count: np.ndarray, memory: ScheduleMemory) -> np.ndarray:
            seen.append(c[0].tolist())
            return count

    policy = ScheduledVerification(Reads(0.5), calibration=fitted)
    assert policy(proposal, [WARM], policy.new_memory(1)).tolist() == [3]
    assert seen[-1] == pytest.approx(torch.sigmoid(logits[0] / torch.tensor([4.0, 0.5, 1.0])).tolist())
    assert policy.settings(WARM) == {"scheduler": "threshold", "threshold": 0.5, "sts": True}
    with pytest.warns(UserWarning, match="confidences stay raw"):
        policy(proposal, [toys.GREEDY], policy.new_memory(1))
    assert seen[-1] == pytest.approx(torch.sigmoid(logits[0]).tolist())
    with pytest.raises(UserError, match="confidence head"):
        policy(Proposal(proposal.tokens_BJ, proposal.count_B), [WARM], policy.new_memory(1))


def test_an_engine_that_was_idle_remembers_whether_drafting_pays(
    toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one seat it is idle after every request. Of the requests themselves nothing is left, caches included."""
    hopeless = Synchronous(additive(draft=9.0, token=1.0), **RULES | {"probe_every": 100})
    decoder, _ = speculative(toys, hopeless)
    states: list[Any] = []
    start = decoder.start
    monkeypatch.setattr(decoder, "start", lambda asked: states.append(start(asked)) or states[-1])
    engine, drafted = Engine(decoder, max_in_flight=1, max_cache_tokens=None), []
    for asked in make_requests([[1, 2], [3], [4]], seeds=range(3), sampling=WARM, max_new_tokens=5, stop_ids=()):
        engine.submit(asked)
        while engine.busy:
            engine.step()
        (answer,) = engine.finished()
        assert len(answer.generation.tokens) == 5
        drafted.append(answer.generation.draft_forwards)
        assert not states[0].cache.layers
        assert not states[0].rows
        assert not states[0].parts["policy"].past
    assert drafted == [1, 0, 0]
    monkeypatch.setattr(decoder, "step", lambda state: pytest.fail("a step of nothing"))
    engine.step()


def test_a_row_that_has_finished_and_stays_leaves_nothing_to_make_up_for(toys: SimpleNamespace) -> None:
    class Late(Static):
        rounds = 0

        def drafts(self, memory: ScheduleMemory) -> bool:
            self.rounds += 1
            return self.rounds > 9

    decoder, target = speculative(toys, Late(3))
    short, long = make_requests([[1], [3, 4]], seeds=[0, 1], sampling=toys.GREEDY, max_new_tokens=20, stop_ids=())
    state, starts = decoder.start([replace(short, max_new_tokens=1), long]), []
    extend = decoder.proposer.extend

    def watched(memory: Any, features: Any, start_B: Any) -> None:
        starts.extend(start_B)
        extend(memory, features, start_B)

    decoder.proposer.extend = watched  # type: ignore[method-assign]
    while not all(row.done for row in state.rows):
        decoder.step(state)
    assert min(starts) > 0
    assert state.rows[1].generation.tokens == toys.ar(target, [[3, 4]], 20)[0]


SETTINGS: dict[str, Any] = {
    "sequential_head": True,
    "refinement_passes": 0,
    "scheduler": "synchronous",
    "steps": None,
    "length": 2,
    "threshold": 0.5,
    "min_yield": 0.05,
    "horizon": 16,
    "probe_every": 16,
}


@pytest.fixture
def steps(tmp_path: Path) -> str:
    (tmp_path / "sps.json").write_text(json.dumps(additive(0.1, 0.01).to_dict()))
    return str(tmp_path / "sps.json")


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_by_name(toys: SimpleNamespace, steps: str, name: str) -> None:
    target = toys.target()
    draft = toys.draft(target, head="vanilla", confidence=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder = toys.build_decoder(
            "scheduled", target=target, draft=draft, **SETTINGS | {"scheduler": name, "steps": steps}
        )
    said = decoder.settings(toys.GREEDY)
    assert said["scheduler"] == name
    assert decoder.lossless
    expected = {"sts": False} if name != "static" else {"length": 2}
    assert expected.items() <= said.items()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, r"steps=<sps\.json>: measure one with python -m eval\.profile_steps"),
        ({"steps": "/nowhere/sps.json"}, "no step table in /nowhere/sps.json"),
        ({"scheduler": "best"}, "scheduler=best must be one of synchronous"),
        ({"scheduler": "static", "length": -1}, "length=-1"),
        ({"scheduler": "static", "length": 99}, "length=99: this drafter drafts"),
        ({"scheduler": "threshold", "threshold": 1.0}, "threshold=1.0"),
        ({"steps": "", "min_yield": 1.0}, "min_yield=1.0"),
        ({"steps": "", "horizon": 0}, "horizon=0"),
        ({"steps": "", "probe_every": 0}, "probe_every=0"),
    ],
)
def test_settings_that_are_refused(toys: SimpleNamespace, steps: str, change: dict[str, Any], words: str) -> None:
    change = change | ({"steps": steps} if change.get("steps") == "" else {})
    target = toys.target()
    draft = toys.draft(target, head="vanilla", confidence=True)
    with pytest.raises(UserError, match=words):
        toys.build_decoder("scheduled", target=target, draft=draft, **SETTINGS | change)


def test_drafters_that_do_not_fit(toys: SimpleNamespace, steps: str, tmp_path: Path) -> None:
    target = toys.target()
    plain = toys.draft(target, head="vanilla")
    with pytest.raises(UserError, match="reads a confidence head"):
        toys.build_decoder("scheduled", target=target, draft=plain, **SETTINGS | {"steps": steps})
    toys.build_decoder("scheduled", target=target, draft=plain, **SETTINGS | {"scheduler": "static"})
    with pytest.raises(UserError, match="needs a drafter"):
        toys.build_decoder("scheduled", target=target, draft=None, **SETTINGS | {"scheduler": "static"})
    flat = tmp_path / "flat.json"
    flat.write_text(json.dumps(tabulated(1.0).to_dict()))
    with pytest.raises(UserError, match="one probe"):
        toys.build_decoder("scheduled", target=target, draft=plain, **SETTINGS | {"steps": str(flat)})
