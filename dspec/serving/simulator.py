"""Simulates an engine that serves many requests: what a scheduler would give under a load, without a model.

Step by step: requests that arrived are admitted while there is room, each drafts (traces.py), the scheduler says what
is verified, time advances by what the step table says. A result of it is a simulation, of whichever machine the table
was measured on, and is to be labelled so.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from dspec.errors import UserError
from dspec.serving.estimators import Estimator
from dspec.serving.schedulers import Scheduler
from dspec.serving.scheduling import Ints
from dspec.serving.step_table import Floats, StepTable
from dspec.serving.traces import Answer, AnswerSource


@dataclass(frozen=True, kw_only=True)
class Load:
    """At most `max_in_flight` requests at a time. Closed loop (`arrivals_per_second` None): always so many. Else they
    arrive at random (Poisson) and wait for room, first come first served."""

    max_in_flight: int
    arrivals_per_second: float | None

    def __post_init__(self) -> None:
        rate = self.arrivals_per_second
        if self.max_in_flight < 1 or (rate is not None and not 0 < rate < np.inf):
            raise UserError(f"a load needs max_in_flight >= 1 and arrivals_per_second > 0 (null: closed loop): {self}")

    def arrivals(self, rng: np.random.Generator) -> Iterator[float]:
        """Seconds at which requests arrive, without end."""
        at = 0.0
        while True:
            if self.arrivals_per_second is not None:
                at += rng.exponential(1 / self.arrivals_per_second)
            yield at


@dataclass
class Served:
    """One request of a simulation; times in seconds from its start."""

    answer: Answer
    arrived: float
    admitted: float
    tokens: int  # emitted so far
    finished: float = 0.0


@dataclass
class Outcome:
    """What a simulation counted, from its start (or the end of its warm-up) until the last of the requests asked for
    was finished; the tokens of those in flight at that time count too."""

    seconds: float = 0.0
    steps: int = 0
    drafted_steps: int = 0
    request_steps: int = 0  # summed over steps: requests in flight
    tokens: int = 0
    verified: int = 0  # drafts
    accepted: int = 0
    served: list[Served] = field(default_factory=list)  # the finished ones
    # of each step that drafted, with an estimator: features [R, J, F], estimates [R, J] and how many would be accepted
    estimates: list[tuple[Floats, Floats, Ints]] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """Tokens per second of all requests together."""
        return self.tokens / self.seconds

    @property
    def tokens_per_second_per_user(self) -> float:
        """Mean over finished requests, from admission to the end."""
        return float(np.mean([one.tokens / (one.finished - one.admitted) for one in self.served]))

    @property
    def budget(self) -> float:
        """Drafts verified per request and step."""
        return self.verified / self.request_steps if self.request_steps else 0.0

    @property
    def waste(self) -> float:
        """The fraction of verified drafts that were rejected."""
        return 1 - self.accepted / self.verified if self.verified else 0.0

    @property
    def mean_wait(self) -> float:
        """Seconds from arrival to admission; in a closed loop 0."""
        return float(np.mean([one.admitted - one.arrived for one in self.served]))

    def since(self, before: "Outcome") -> "Outcome":
        """What was counted after an earlier copy of this outcome."""
        counts: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            now, then = getattr(self, name), getattr(before, name)
            counts[name] = now[len(then) :] if isinstance(now, list) else now - then
        return Outcome(**counts)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        rates = ("throughput", "tokens_per_second_per_user", "budget", "waste", "mean_wait")
        return {name: getattr(self, name) for name in (*rates, "seconds", "steps", "tokens")} | {
            "requests": len(self.served),
            "mean_in_flight": self.request_steps / self.steps if self.steps else 0.0,
            "drafted_steps": self.drafted_steps / self.steps if self.steps else 0.0,
        }


def simulate(
    source: AnswerSource,
    scheduler: Scheduler,
    table: StepTable,
    load: Load,
    *,
    requests: int,
    prefill_seconds: float | Callable[[int], float],
    seed: int,
    oracle: bool = False,
    warmup: int = 0,
    estimator: Estimator | None = None,
) -> Outcome:
    """Serves `requests` answers of `source`, after `warmup` ones that do not count. Prefill, which emits each one's
    first token, stops the others for `prefill_seconds` per request, or for what it says of the number that join in a
    step. An `estimator` makes confidences of drafts that are features, and sees what came of those that were sent. With
    `oracle` the scheduler is told which drafts will be accepted, in place of their
    confidences: an upper bound. Deterministic by seed; answers and arrivals are the same for all schedulers as far as
    their order allows. Raises UserError for requests < 1."""
    prefill = prefill_seconds if callable(prefill_seconds) else lambda joining: prefill_seconds * joining
    if requests < 1 or warmup < 0 or prefill(1) < 0:
        raise UserError(f"a simulation needs requests >= 1, warmup and prefill_seconds >= 0: {requests}, {warmup}")
    order, times = (np.random.default_rng([seed, k]) for k in range(2))
    arrivals = load.arrivals(times)
    arrival = next(arrivals)
    flight: list[Served] = []
    memory, out, before = scheduler.new_memory(0), Outcome(), Outcome()
    while len(out.served) < warmup + requests:
        # 1. admit
        new: list[Served] = []
        while arrival <= out.seconds and len(flight) + len(new) < load.max_in_flight:
            arrived = out.seconds if load.arrivals_per_second is None else arrival
            new.append(Served(source.answer(order), arrived=arrived, admitted=out.seconds, tokens=1))
            arrival = next(arrivals)
        out.seconds, out.tokens = out.seconds + (prefill(len(new)) if new else 0.0), out.tokens + len(new)
        flight += new
        memory.join(scheduler.new_memory(len(new)))
        if not flight:
            out.seconds = arrival
            continue
        # 2. draft and verify
        emitted = _step(flight, source.slots, scheduler, memory, table, out, oracle=oracle, estimator=estimator)
        # 3. commit, and drop what is finished
        for one, count in zip(flight, emitted, strict=True):
            count = min(count, one.answer.tokens - one.tokens)
            one.tokens, out.tokens = one.tokens + count, out.tokens + count
            one.finished = out.seconds
        left = [i for i, one in enumerate(flight) if one.tokens < one.answer.tokens]
        if len(left) < len(flight):
            out.served += [one for one in flight if one.tokens >= one.answer.tokens]
            flight = [flight[i] for i in left]
            memory.select(left)
            if len(before.served) < warmup <= len(out.served):
                before = replace(out, served=list(out.served), estimates=list(out.estimates))
    return out.since(before)


def _step(
    flight: list[Served],
    slots: int,
    scheduler: Scheduler,
    memory: Any,
    table: StepTable,
    out: Outcome,
    *,
    oracle: bool,
    estimator: Estimator | None,
) -> list[int]:
    """Tokens that each request emits."""
    R, lengths = len(flight), np.zeros(len(flight), dtype=np.int64)
    accepted: Ints = lengths
    out.steps, out.request_steps = out.steps + 1, out.request_steps + R
    without = None
    if scheduler.drafts(memory):
        drafts = [one.answer.draft(one.tokens) for one in flight]
        accepted = np.array([n for _, n in drafts])
        confidence_RJ = drafted = np.stack([c for c, _ in drafts])
        if estimator is not None:
            confidence_RJ = estimator(drafted)
            out.estimates.append((drafted, confidence_RJ, accepted))
        if oracle:
            confidence_RJ = (np.arange(slots) < accepted[:, None]).astype(float)
        lengths = scheduler(confidence_RJ, np.full(R, slots), memory)
        if estimator is not None:
            estimator.observe(drafted, lengths, np.minimum(lengths, accepted))
        out.drafted_steps += 1
    else:
        without = table.seconds_without_drafts(R)
    spent = table.seconds(R, R + lengths.sum(), extend=True) if without is None else without
    out.seconds += float(spent)
    kept = np.minimum(lengths, accepted)
    out.verified, out.accepted = out.verified + int(lengths.sum()), out.accepted + int(kept.sum())
    return (kept + 1).tolist()
