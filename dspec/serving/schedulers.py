"""Schedulers: what each step verifies, and what they remember from step to step.

They know nothing of models: confidences in, lengths out. policies.py puts them into the decoder, simulator.py into a
simulation. All but the ones marked so are lossless (scheduling.py says why).

    Static, Threshold   the same length for all; the leading slots that are sure enough
    Synchronous         Algorithm 1 on the confidences of this step
    Lagged              the number of drafts from confidences of earlier steps, this step's divided by current ones:
                        DSpark's asynchronous variant, SGLang's and vLLM's budgets; biased with lag=0

Legend: R = requests, J = draft slots, K = drafts verified in all.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from dspec.errors import UserError
from dspec.serving.scheduling import (
    Ints,
    admit,
    capacity,
    convex,
    drafting_pays,
    increasing,
    not_free,
    static,
    survival,
    synchronous,
    threshold,
)
from dspec.serving.step_table import Floats, StepTable


class ScheduleMemory:
    """What is remembered of the requests in flight (a StatePart): the survival of each one's latest drafts, the newest
    last, and those of all of them together."""

    def __init__(self, requests: int, *, lag: int) -> None:
        self.past: list[deque[Floats]] = [deque(maxlen=lag) for _ in range(requests)]
        self.recent_NJ: Floats | None = None  # of requests that have left too
        self.pays: tuple[int, bool] | None = None  # whether drafting paid for so many requests, when last weighed
        self.unweighed = 0  # of the recent rows, those since
        self.idle_rounds = 0  # since a round was drafted
        self.probes = 0  # rounds drafted all the same, since drafting paid

    def select(self, rows: Sequence[int]) -> None:
        self.past = [self.past[i] for i in rows]

    def join(self, other: "ScheduleMemory") -> None:
        """What is recent stays: the others have just begun."""
        self.past += other.past


class Scheduler(Protocol):
    """A drafting step calls `drafts`, and if that says so drafts and calls the scheduler."""

    reads_confidence: bool

    def new_memory(self, requests: int) -> ScheduleMemory: ...

    def drafts(self, memory: ScheduleMemory) -> bool:
        """Whether this step drafts at all."""
        ...

    def __call__(self, confidence_RJ: Floats, count_R: Ints, memory: ScheduleMemory) -> Ints:
        """Lengths [R], given calibrated confidences of `count_R` drafts."""
        ...

    def settings(self) -> dict[str, Any]: ...


class Static:
    """The same number of drafts for each request; 0 is plain autoregressive decoding, which drafts nothing."""

    reads_confidence = False

    def __init__(self, length: int) -> None:
        if length < 0:
            raise UserError(f"decoder.<name>.length={length} must be at least 0")
        self.length = length

    def new_memory(self, requests: int) -> ScheduleMemory:
        return ScheduleMemory(requests, lag=0)

    def drafts(self, memory: ScheduleMemory) -> bool:
        return self.length > 0

    def __call__(self, confidence_RJ: Floats, count_R: Ints, memory: ScheduleMemory) -> Ints:
        return static(count_R, self.length)

    def settings(self) -> dict[str, Any]:
        return {"scheduler": "static", "length": self.length}


class Threshold:
    """The leading drafts whose confidence reaches a threshold, whatever the load."""

    reads_confidence = True

    def __init__(self, least: float) -> None:
        if not 0 < least < 1:
            raise UserError(f"decoder.<name>.threshold={least} must lie in (0, 1); length verifies a fixed number")
        self.least = least

    def new_memory(self, requests: int) -> ScheduleMemory:
        return ScheduleMemory(requests, lag=0)

    def drafts(self, memory: ScheduleMemory) -> bool:
        return True

    def __call__(self, confidence_RJ: Floats, count_R: Ints, memory: ScheduleMemory) -> Ints:
        return threshold(confidence_RJ, count_R, self.least)

    def settings(self) -> dict[str, Any]:
        return {"scheduler": "threshold", "threshold": self.least}


class StepCosts:
    """Seconds of a step by the number of drafts verified, as `shape` reads the table; computed once for each R, J.

    `shape(seconds_K, R)` mends what was measured; `extend` lets time grow beyond the table's last probe."""

    def __init__(self, table: StepTable, shape: Callable[[Floats, int], Floats], *, extend: bool) -> None:
        self.table, self._shape, self._extend = table, shape, extend
        self._known: dict[tuple[int, int], Floats] = {}
        self._without: dict[int, float | None] = {}

    def without_drafts(self, requests: int) -> float | None:
        """Seconds of a step that does not draft."""
        if requests not in self._without:
            self._without[requests] = self.table.seconds_without_drafts(requests)
        return self._without[requests]

    def __call__(self, requests: int, slots: int) -> Floats:
        """[R * J + 1], for K = 0, 1, ..."""
        if (requests, slots) not in self._known:
            tokens = requests + np.arange(requests * slots + 1)
            raw = self.table.seconds(requests, tokens, extend=self._extend)
            self._known[requests, slots] = self._shape(raw, requests)
        return self._known[requests, slots]


_MOST_DOUBLINGS = 2


class Drafting:
    """Whether to draft at all: it pays where verifying some number of drafts beats a step without, if drafts are as the
    `horizon` latest (at first: all accepted). While it does not pay, one round in `probe_every` is drafted, and its
    drafts alone decide; the longer it has not paid, the fewer, down to a quarter of that."""

    def __init__(self, costs: StepCosts, *, horizon: int, probe_every: int) -> None:
        if horizon < 1 or probe_every < 1:
            raise UserError(
                f"decoder.<name>.horizon={horizon} and decoder.<name>.probe_every={probe_every} must be at least 1"
            )
        self.costs, self.horizon, self.probe_every = costs, horizon, probe_every
        self._patience = -(-horizon // 4)

    def wanted(self, memory: ScheduleMemory) -> bool:
        requests = len(memory.past)
        without = self.costs.without_drafts(requests)
        if memory.recent_NJ is None or without is None:
            return True
        patience = self._patience if memory.pays == (requests, True) else 1  # weighing costs time
        if memory.pays is None or memory.pays[0] != requests or memory.unweighed >= patience:
            seconds_K = self.costs(requests, memory.recent_NJ.shape[1])
            memory.pays = requests, drafting_pays(memory.recent_NJ, requests, seconds_K, without)
            memory.unweighed = 0
        if memory.pays[1]:
            memory.idle_rounds = memory.probes = 0
            return True
        memory.idle_rounds += 1
        if memory.idle_rounds < self.probe_every * 2 ** min(memory.probes, _MOST_DOUBLINGS):
            return False
        memory.idle_rounds = 0
        memory.probes += 1
        return True

    def observe(self, survival_RJ: Floats, memory: ScheduleMemory) -> None:
        before_NJ = memory.recent_NJ
        if before_NJ is None:
            before_NJ = np.ones((self._patience, survival_RJ.shape[1]))
        elif memory.pays is not None and not memory.pays[1]:  # a probe
            before_NJ = before_NJ[:0]
        memory.recent_NJ = np.concatenate([before_NJ, survival_RJ])[-max(self.horizon, len(survival_RJ)) :]
        memory.unweighed += len(survival_RJ)


class Synchronous:
    """DSpark's Algorithm 1 on the measured curve and its convex envelope."""

    reads_confidence = True

    def __init__(self, table: StepTable, *, min_yield: float, horizon: int, probe_every: int) -> None:
        self._costs = StepCosts(table, _never_free(min_yield), extend=True)
        self._convex = StepCosts(table, lambda raw, R: convex(_never_free(min_yield)(raw, R)), extend=True)
        self._drafting = Drafting(self._costs, horizon=horizon, probe_every=probe_every)

    def new_memory(self, requests: int) -> ScheduleMemory:
        return ScheduleMemory(requests, lag=0)

    def drafts(self, memory: ScheduleMemory) -> bool:
        return self._drafting.wanted(memory)

    def __call__(self, confidence_RJ: Floats, count_R: Ints, memory: ScheduleMemory) -> Ints:
        current_RJ = survival(confidence_RJ, count_R)
        self._drafting.observe(current_RJ, memory)
        return synchronous(current_RJ, self._costs(*current_RJ.shape), self._convex(*current_RJ.shape))

    def settings(self) -> dict[str, Any]:
        return {"scheduler": "synchronous"}


class Lagged:
    """K by a search over the survival of the drafts `lag` steps before, which current drafts cannot influence; the K
    likeliest of the current ones are verified. Requests without such drafts count as the mean of recent ones or, where
    those are not kept (`drafting` None), as sure."""

    reads_confidence = True

    def __init__(self, name: str, costs: StepCosts, *, lag: int, drafting: Drafting | None) -> None:
        self.name, self._costs, self.lag, self._drafting = name, costs, lag, drafting

    def new_memory(self, requests: int) -> ScheduleMemory:
        return ScheduleMemory(requests, lag=self.lag)

    def drafts(self, memory: ScheduleMemory) -> bool:
        return self._drafting is None or self._drafting.wanted(memory)

    def __call__(self, confidence_RJ: Floats, count_R: Ints, memory: ScheduleMemory) -> Ints:
        current_RJ = survival(confidence_RJ, count_R)
        K = capacity(self._earlier(current_RJ, memory), self._costs(*current_RJ.shape))
        for past, row in zip(memory.past, current_RJ, strict=True):
            past.append(row)
        if self._drafting is not None:
            self._drafting.observe(current_RJ, memory)
        return admit(current_RJ, K)

    def _earlier(self, current_RJ: Floats, memory: ScheduleMemory) -> Floats:
        """What K is taken from, [R, J]."""
        if not self.lag:
            return current_RJ
        unknown_J = np.ones(current_RJ.shape[1]) if memory.recent_NJ is None else memory.recent_NJ.mean(0)
        return np.stack([past[0] if len(past) == self.lag else unknown_J for past in memory.past])

    def settings(self) -> dict[str, Any]:
        return {"scheduler": self.name}


def asynchronous(table: StepTable, *, min_yield: float, horizon: int, probe_every: int) -> Lagged:
    """DSpark's section 5.2: the capacity of two steps before."""
    costs = StepCosts(table, _never_free(min_yield), extend=True)
    drafting = Drafting(costs, horizon=horizon, probe_every=probe_every)
    return Lagged("asynchronous", costs, lag=2, drafting=drafting)


def sglang(table: StepTable) -> Lagged:
    """SGLang's budget: the table as SGLang reads it, two steps' lag, and it always drafts."""
    return Lagged("sglang", StepCosts(table.for_sglang, lambda raw, R: raw, extend=False), lag=2, drafting=None)


def vllm(table: StepTable) -> Lagged:
    """vLLM's budget: costs made monotone, one step's lag, and it always drafts."""
    return Lagged(
        "vllm", StepCosts(table, lambda raw, R: np.maximum.accumulate(raw), extend=False), lag=1, drafting=None
    )


def _never_free(min_yield: float) -> Callable[[Floats, int], Floats]:
    if not 0 <= min_yield < 1:
        raise UserError(f"decoder.<name>.min_yield={min_yield} must lie in [0, 1)")
    return lambda raw, requests: not_free(increasing(raw), requests, min_yield)
