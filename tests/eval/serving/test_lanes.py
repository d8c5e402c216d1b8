"""What is measured: a full engine's counts, rounds at every position, the cost of steps, the window that counts."""

import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.generation import Generation, Pass, Request, make_requests
from dspec.decoding.loop import decode
from dspec.decoding.proposers import DraftProposer
from dspec.decoding.sampling import Sampling
from dspec.decoding.speculative import Speculative
from dspec.decoding.verification import VerifyAll
from dspec.errors import UserError
from dspec.serving.schedulers import Static
from dspec.serving.simulator import Load, simulate
from dspec.serving.step_table import AdditiveSteps
from dspec.serving.traces import Replay, Round, Trace
from eval.benchmarks.base import Item
from eval.serving.costs import EVEN, PLAIN, RAGGED, Prefill, StepTimer, ToldLengths, costs_of
from eval.serving.lanes import Counts, Lane, requests
from eval.serving.prompts import ServedPrompt, left_to_right
from eval.serving.record import EveryPosition, record_answers


def prompts(texts: list[list[int]], **common: Any) -> list[ServedPrompt]:
    made = make_requests(texts, seeds=range(len(texts)), **common)
    return [ServedPrompt(f"p/{i}", "ab"[i % 2], request) for i, request in enumerate(made)]


class Ticks:
    """A clock that only steps of the decoder move: one second each."""

    def __init__(self, decoder: Any) -> None:
        self.now, step = 0.0, decoder.step

        def counted(state: Any) -> None:
            self.now += 1
            step(state)

        decoder.step = counted

    def __call__(self) -> float:
        return self.now


def plain_lane(toys: SimpleNamespace, *, seats: int, new: int = 6) -> tuple[Lane, list[list[int]], int]:
    target = toys.target(seed=3, vocab=9)
    texts = toys.prompts(random.Random(1), 4, vocab=9)
    whole = toys.ar(target, texts, new)
    stop = whole[0][2]
    decoder = Autoregressive(target=target)
    served = prompts(texts, sampling=toys.GREEDY, max_new_tokens=new, stop_ids=[stop])
    return Lane(decoder, served, seats, Ticks(decoder)), [toys.cut(w, [stop], new) for w in whole], stop


def test_a_lane_counts_answers_up_to_their_stops(toys: SimpleNamespace) -> None:
    """All seats are taken at every step; slices add up to the whole; a user's rate is from admission to the end."""
    lane, answers, _ = plain_lane(toys, seats=3)
    assert len({len(answer) for answer in answers}) > 1
    sizes, slices = [], []
    for _ in range(6):
        slices.append(lane.advance(9))
        sizes.append(lane.engine.in_flight + lane.engine.waiting)
    total = sum(slices, Counts())
    assert set(sizes) == {3}
    assert total == lane.counts
    assert all(s.tokens >= 9 for s in slices)
    assert total.seconds == total.steps
    running = sum(len(g.tokens) for g in lane.engine.running)
    assert total.tokens == running + sum(map(len, lane.answers.values()))
    assert total.request_steps == total.tokens - total.finished - len(lane.engine.running)  # the prefill's are no steps
    assert (total.verified, total.accepted) == (0, 0)
    assert total.finished == len(lane.answers) == len(lane.rates) > 6
    for number, tokens in lane.answers.items():
        assert tokens == answers[number % 4]
    for number, rate in lane.rates:
        length = len(answers[number % 4])
        assert rate == length / max(1, length - 1)  # one step per token, the first with the prefill's step
    before = lane.counts.finished
    lane.warm_up(before + 5)
    assert lane.counts.finished >= before + 5


def test_drafts_are_counted_from_the_rounds() -> None:
    rounds = [Pass("prefill", 1), Pass("draft"), Pass("verify", 3, drafted=4, accepted=2), Pass("decode", 1)]
    counts = Counts.of(Generation(tokens=[5] * 5, passes=rounds))
    assert (counts.tokens, counts.request_steps, counts.verified, counts.accepted) == (5, 2, 4, 2)
    assert Counts(seconds=4.0, tokens=6).throughput == 1.5


def test_prompts_come_again_with_other_seeds() -> None:
    served = prompts([[1], [2]], sampling=Sampling(temperature=1.0, top_p=1.0), max_new_tokens=3, stop_ids=[])
    endless = requests(served)
    drawn = [next(endless) for _ in range(6)]
    assert [r.ids for r in drawn] == [[1], [2]] * 3
    assert len({(r.ids[0], r.seed) for r in drawn}) == 6


def test_a_request_that_cannot_be_served_ends_the_report(toys: SimpleNamespace) -> None:
    target = toys.target(vocab=9)
    served = prompts([[1, 99]], sampling=toys.GREEDY, max_new_tokens=3, stop_ids=[])
    with pytest.raises(UserError, match="cannot be served: prompt 0 has token ids"):
        Lane(Autoregressive(target=target), served, 1, lambda: 0.0).step()


def test_domains_take_turns_as_long_as_all_have_prompts() -> None:
    def bench(*names: str, holes: bool = False) -> Any:
        items = [Item(n, n, response="x" if holes else None) for n in names]
        return SimpleNamespace(items=lambda: items)

    got = left_to_right({"a": bench("1", "2", "3"), "b": bench("4", "5")}, limit=None)
    assert [(name, item.id) for name, _, item in got] == [("a", "1"), ("b", "4"), ("a", "2"), ("b", "5")]
    assert len(left_to_right({"a": bench("1", "2", "3")}, limit=2)) == 2
    with pytest.raises(UserError, match="fills no holes"):
        left_to_right({"a": bench("1", holes=True)}, limit=None)
    with pytest.raises(UserError, match="no prompts to serve"):
        left_to_right({"a": bench("1"), "b": bench()}, limit=None)
    for limit in (0, -1):
        with pytest.raises(UserError, match=f"limit={limit} must be at least 1"):
            left_to_right({"a": bench("1", "2")}, limit=limit)


# ---- traces


def test_a_round_at_every_position_is_that_of_a_fresh_draft(toys: SimpleNamespace) -> None:
    target, draft = toys.markov_pair(noise=0.02, block=4)
    texts = toys.prompts(random.Random(0), 5, vocab=24)
    stop = toys.ar(target, texts, 20)[1][9]
    asked = make_requests(texts, seeds=range(5), sampling=toys.GREEDY, max_new_tokens=14, stop_ids=[stop])

    def inner() -> Speculative:
        return Speculative(target=target, proposer=DraftProposer(draft), policy=VerifyAll())

    dense = decode(EveryPosition(inner()), asked, in_flight=3)
    assert [g.tokens for g in dense] == [g.tokens for g in decode(Autoregressive(target=target), asked)]
    for request, generation in zip(asked, dense, strict=True):
        assert len(generation.rounds) == len(generation.tokens) - 1
        for known, one in enumerate(generation.rounds, 1):
            ids = [*request.ids, *generation.tokens[:known]]
            rest = Request(ids=ids[:-1], sampling=toys.GREEDY, max_new_tokens=15 - known, stop_ids=[stop], seed=0)
            fresh = decode(inner(), [rest])[0].rounds[0]
            assert (one.accepted, one.valid, one.committed) == (fresh.accepted, fresh.valid, 1)
    assert len({r.accepted for g in dense for r in g.rounds}) > 2


def test_what_is_recorded(toys: SimpleNamespace) -> None:
    target = toys.target("qwen3", seed=2)
    draft = toys.draft(target, seed=3, block=4, head="vanilla", confidence=True, scale=0.4)
    texts = toys.prompts(random.Random(0), 3, vocab=11)
    served = prompts(texts, sampling=Sampling(temperature=1.0, top_p=1.0), max_new_tokens=9, stop_ids=[])
    got = record_answers(target, draft, served, drafter="toy", concurrency=2, every_position=True, seed=4)
    assert [(t.id, t.domain, t.prompt_tokens) for t in got.traces] == [
        (f"p/{i}", "ab"[i % 2], len(text)) for i, text in enumerate(texts)
    ]
    assert all(len(t.rounds) == 8 and t.tokens == 9 for t in got.traces)
    assert (got.about.slots, got.about.concurrency, got.about.every_position, got.about.seed) == (4, 2, True, 4)
    assert (got.about.target, got.about.drafter, got.about.temperature) == (target.name, "toy", 1.0)
    assert got.about.dtype == "float64"
    with pytest.raises(UserError, match="confidence head"):
        record_answers(
            target, toys.draft(target, head="vanilla"), served, drafter="x", concurrency=1, every_position=True, seed=0
        )
    with pytest.raises(UserError, match="no prompts"):
        record_answers(target, draft, [], drafter="x", concurrency=1, every_position=True, seed=0)


class Sometimes(VerifyAll):
    """Drafts in some rounds only."""

    def __init__(self) -> None:
        self._rng = random.Random(0)

    def drafts(self, memory: Any) -> bool:
        return self._rng.random() < 0.4


def test_rounds_without_drafts_are_made_up_for(toys: SimpleNamespace) -> None:
    """The proposer has all features when it drafts again (the oracle checks them), also of rows that joined later."""
    target = toys.target(seed=1, vocab=11)
    texts = toys.prompts(random.Random(2), 6, vocab=11)
    whole = [text + answer for text, answer in zip(texts, toys.ar(target, texts, 16), strict=True)]
    oracle = toys.OracleProposer(target, whole, drafts=3, accuracy=0.5, seed=0)
    decoder = Speculative(target=target, proposer=oracle, policy=Sometimes())
    asked = make_requests(texts, seeds=[0] * 6, sampling=toys.GREEDY, max_new_tokens=16, stop_ids=[])
    got = decode(decoder, asked, in_flight=3)
    assert [text + g.tokens for text, g in zip(texts, got, strict=True)] == whole
    drafted = [r.drafted > 0 for g in got for r in g.rounds]
    assert 0.2 < np.mean(drafted) < 0.7


# ---- costs


def samples(*, first: float, each: float, joined: Any) -> Any:
    made: Any = defaultdict(list)
    for kind in (PLAIN, EVEN, RAGGED):
        for R in (1, 2, 4):
            for n in (0,) if kind == PLAIN else (0, 1, 3):
                base = {PLAIN: 1.0, EVEN: 1.1, RAGGED: 1.3}[kind] + 0.1 * R * (1 + n) + 0.2 * (n > 0)
                for i in range(4):
                    k = joined(i)
                    made[kind, R, n].append((k, base + (first * (k > 0) + each * k) * (2 if kind == PLAIN else 1)))
    return made


def test_costs_are_told_from_prefills() -> None:
    costs = costs_of(samples(first=0.5, each=0.25, joined=lambda i: i % 3), about={"dtype": "float64"})
    assert costs.prefill[PLAIN](3) == pytest.approx(2 * (0.5 + 0.75))
    assert costs.prefill[RAGGED] == costs.prefill[EVEN]
    assert [costs.prefill[EVEN](k) for k in range(3)] == pytest.approx([0.0, 0.75, 1.0])
    assert costs.steps[PLAIN].seconds_without_drafts(4) == pytest.approx(1.4)
    assert costs.steps[EVEN].seconds_without_drafts(4) == pytest.approx(1.5)
    assert costs.steps[RAGGED].seconds(4, 8) == pytest.approx(2.3)
    table = costs.table()  # the ragged steps: what a scheduled step costs
    assert table.seconds(2, 8) == pytest.approx(2.3)
    assert table.seconds_without_drafts(2) == pytest.approx(1.5)
    assert table.about["dtype"] == "float64"
    assert table.grid == costs.steps[RAGGED].grid  # measured, with a fit for SGLang
    assert table.for_sglang.seconds(2, 8) == pytest.approx(2.3)


def test_where_every_step_has_a_prefill() -> None:
    """The first one's part cannot be told from the step; no part is negative; without any there is none."""
    always = costs_of(samples(first=0.5, each=0.25, joined=lambda i: 1 + i % 2), about={})
    assert vars(always.prefill[EVEN]) == pytest.approx({"first": 0.0, "each": 0.25})
    assert always.steps[EVEN].seconds(4, 8) == pytest.approx(2.1 + 0.5)
    less = costs_of(samples(first=-0.1, each=-0.05, joined=lambda i: i % 3), about={})
    assert vars(less.prefill[EVEN]) == {"first": 0.0, "each": 0.0}
    noisy: Any = samples(first=0.0, each=5.0, joined=lambda i: 1 + i % 2)
    noisy[EVEN, 1, 0] = [(3, 0.1), (3, 0.1)]  # less than what three joining ones cost elsewhere
    assert min(costs_of(noisy, about={}).steps[EVEN].grid.values()) > 0
    none = costs_of(samples(first=0.5, each=0.5, joined=lambda i: 0), about={})
    assert none.prefill[PLAIN](5) == 0.0
    assert none.steps[PLAIN].seconds_without_drafts(1) == pytest.approx(1.1)
    assert Prefill(1.0, 2.0)(0) == 0.0


def test_ragged_lengths_have_the_mean_that_they_are_told() -> None:
    flat = AdditiveSteps(bias_seconds=1.0, requests=(1,), alpha_seconds=(0.1,), tokens=(1, 2), theta_seconds=(0.0, 0.1))
    from dspec.serving.schedulers import Synchronous

    told = ToldLengths(Synchronous(flat, min_yield=0.05, horizon=16, probe_every=32))
    c, memory = np.full((5, 3), 0.5), told.new_memory(5)
    for length, lengths in ((1, [2, 0, 2, 0, 1]), (2, [3, 1, 3, 1, 2]), (3, [3] * 5)):
        told.length = length
        assert told(c, np.full(5, 3), memory).tolist() == lengths
        assert told.drafts(memory)
    told.length = 0
    assert memory.pays is not None  # a scheduler's work is whether to draft, too
    assert not told.drafts(memory)
    even = ToldLengths(None)
    even.length = 2
    assert even(c, np.full(5, 3), memory).tolist() == [2] * 5
    assert told.reads_confidence > even.reads_confidence


def test_no_timed_step_makes_up_for_one_without_drafts() -> None:
    """After a step without drafts comes an untimed one with some, but for plain decoding, which never drafts."""
    timer, told, steps = StepTimer.__new__(StepTimer), ToldLengths(None), []
    timer.requests, timer.lengths, timer._told = 2, [0, 1, 3], {EVEN: told}

    class Watched:
        engine = SimpleNamespace(waiting=0)

        def __init__(self, kind: str) -> None:
            self.kind = kind

        def step(self) -> float:
            steps.append((self.kind, told.length))
            return float(len(steps))

    timer._lanes = {kind: Watched(kind) for kind in (PLAIN, EVEN)}  # type: ignore[misc]
    samples: Any = defaultdict(list)
    timer.time(samples)
    assert [length for kind, length in steps if kind == EVEN] == [0, 1, 1, 3]
    assert {point: len(timed) for point, timed in samples.items()} == {
        (PLAIN, 2, 0): 3, (EVEN, 2, 0): 1, (EVEN, 2, 1): 1, (EVEN, 2, 3): 1,
    }  # fmt: skip
    assert samples[EVEN, 2, 1] == [(0, 5.0)]  # the later of the two


# ---- the window of a simulation


def test_the_warm_up_of_a_simulation_does_not_count() -> None:
    """Two seats, answers of three steps, all begun together: each turn is a prefill of two and three steps."""
    table = AdditiveSteps(
        bias_seconds=1.0, requests=(1, 2), alpha_seconds=(0.0, 0.0), tokens=(1, 4), theta_seconds=(0.0, 0.0)
    )
    source = Replay([Trace((Round((0.0,), 0, 1, 1),) * 3)], slots=1, temperatures=None)
    load = Load(max_in_flight=2, arrivals_per_second=None)
    given: dict[str, Any] = {"seed": 0, "prefill_seconds": Prefill(0.5, 0.25)}
    whole = simulate(source, Static(0), table, load, requests=6, **given)
    assert (whole.steps, whole.tokens, len(whole.served)) == (9, 24, 6)
    assert whole.seconds == pytest.approx(3 * (1.0 + 3))
    late = simulate(source, Static(0), table, load, requests=4, warmup=2, **given)
    assert (late.steps, late.tokens, len(late.served), late.request_steps) == (6, 16, 4, 12)
    assert late.seconds == pytest.approx(2 * 4.0)
    assert late.tokens_per_second_per_user == pytest.approx(1.0)
    with pytest.raises(UserError, match="warmup"):
        simulate(source, Static(0), table, load, requests=1, warmup=-1, **given)
