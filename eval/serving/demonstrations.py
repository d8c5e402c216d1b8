"""What a load report says of the schedulers alone: the selection bias of the paper's appendix A, and their own time."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import numpy as np

from dspec.serving.schedulers import Lagged, Scheduler, StepCosts, Synchronous, asynchronous
from dspec.serving.scheduling import admit, capacity, survival, synchronous
from dspec.serving.step_table import Floats, StepTable, TabulatedSteps

# appendix A: one request, two drafts; the target's law of the next token is (0.7, 0.3), the drafter's (0.5, 0.5); the
# first draft is accepted with confidence 0.8, and if it is A, then the second with 0.9, else not at all
_TARGET, _DRAFTER, _FIRST, _SECOND = (0.7, 0.3), (0.5, 0.5), 0.8, (0.9, 0.0)
_APPENDIX = TabulatedSteps(batch_tokens=(1, 2, 3), steps=(1.0, 0.5, 0.45), max_batch_tokens=3)


def selection_bias(rules: Mapping[str, Any]) -> dict[str, float]:
    """The probability of token A in appendix A's example (the target's: 0.7) by how the length is chosen."""
    seconds, count = _APPENDIX.seconds(1, [1, 2, 3]), np.array([2])

    def searched(c: Floats) -> int:
        a = survival(c, count)
        return int(admit(a, capacity(a, seconds))[0])

    def scheduled(scheduler: Scheduler) -> Callable[[Floats], int]:
        return lambda c: int(scheduler(c, count, scheduler.new_memory(1))[0])

    biased = Lagged("biased", StepCosts(_APPENDIX, lambda raw, R: raw, extend=False), lag=0, drafting=None)
    return {
        "search over this round's own drafts": _probability_of_a(searched),
        "the same as a scheduler (lag=0)": _probability_of_a(scheduled(biased)),
        "Algorithm 1 as published": _probability_of_a(lambda c: int(synchronous(survival(c, count), seconds)[0])),
        "synchronous": _probability_of_a(scheduled(Synchronous(_APPENDIX, **rules))),
        "asynchronous": _probability_of_a(scheduled(asynchronous(_APPENDIX, **rules))),
    }


def _probability_of_a(verified: Callable[[Floats], int]) -> float:
    """`verified` is the number of drafts to verify, given confidences [1, 2]."""
    total = 0.0
    for x, drawn in enumerate(_DRAFTER):
        if verified(np.array([[_FIRST, _SECOND[x]]])) == 0:
            total += drawn * _TARGET[0]  # the token is the target's own
            continue
        accept = min(1.0, _TARGET[x] / _DRAFTER[x])
        total += drawn * (accept * (x == 0) + (1 - accept))  # what is left after a rejection is A
    return total


def overhead(
    table: StepTable, rules: Mapping[str, Any], *, requests: int, slots: int, repeats: int, seed: int
) -> dict[str, dict[str, float]]:
    """Microseconds of a scheduler's decision for random confidences: the first one, which reads the table, and the
    median of later ones."""
    rng, count = np.random.default_rng(seed), np.full(requests, slots)
    confidence = rng.beta(4, 1, (repeats + 1, requests, slots))
    times = {}
    schedulers: dict[str, Scheduler] = {
        "synchronous": Synchronous(table, **rules),
        "asynchronous": asynchronous(table, **rules),
    }
    for name, scheduler in schedulers.items():
        memory, spent = scheduler.new_memory(requests), []
        for one in confidence:
            start = time.perf_counter()
            scheduler.drafts(memory)
            scheduler(one, count, memory)
            spent.append(1e6 * (time.perf_counter() - start))
        times[name] = {"first": spent[0], "median": median(spent[1:])}
    return times
