"""What an engine's steps cost on this machine, measured in the engine while it serves.

An engine under a closed loop verifies lengths that are told: the same for all requests ("even", as static lengths do),
or one more and one fewer in turn ("ragged", with confidences and a scheduler's own work, as a scheduled step has).
Steps in which requests join tell what a prefill costs. No acceptance is measured here.

Legend: R = requests in flight, n = drafts verified of each on average, k = requests that join in a step.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.proposers import DraftProposer
from dspec.decoding.speculative import Speculative
from dspec.errors import UserError
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel
from dspec.serving.policies import ScheduledVerification
from dspec.serving.schedulers import ScheduleMemory, Synchronous
from dspec.serving.scheduling import Ints
from dspec.serving.step_table import AdditiveSteps, Floats, StepTable
from eval.profile_steps.measure import fit
from eval.serving.lanes import Clock, Lane
from eval.serving.prompts import ServedPrompt
from eval.serving.settings import ServingSettings

EVEN, RAGGED, PLAIN = "even", "ragged", "AR"
Grid = Mapping[tuple[int, int], float]  # (R, n) -> seconds


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps(StepTable):
    """The measured seconds themselves: linear in n between measured lengths, and in R between measured numbers of
    requests; a fit to them would be off where the machine is not additive."""

    grid: Grid

    def __post_init__(self) -> None:
        if not self.grid:
            raise UserError("a table of steps needs at least one that was measured")

    @property
    def probes(self) -> tuple[int, ...]:
        return tuple(sorted({R * (1 + n) for R, n in self.grid}))

    def _at(self, requests: int, drafts: Floats) -> Floats:
        lengths = sorted(n for R, n in self.grid if requests == R and n > 0) or [0]
        values = [self.grid[requests, n] for n in lengths]
        return np.interp(drafts, lengths, values)

    def seconds(self, requests: int, tokens: ArrayLike, *, extend: bool = False) -> Floats:
        drafts = np.asarray(tokens, dtype=float) / requests - 1
        known = sorted({R for R, _ in self.grid})
        low = max((R for R in known if requests >= R), default=known[0])
        high = min((R for R in known if requests <= R), default=known[-1])
        part = (requests - low) / (high - low) if high > low else 0.0
        return (1 - part) * self._at(low, drafts) + part * self._at(high, drafts)

    def seconds_without_drafts(self, requests: int) -> float | None:
        known = sorted(R for R, n in self.grid if n == 0)
        return float(np.interp(requests, known, [self.grid[R, 0] for R in known])) if known else None

    def to_dict(self) -> dict[str, Any]:
        return {f"{R} x {n}": seconds for (R, n), seconds in self.grid.items()}


@dataclass(frozen=True)
class Prefill:
    """Seconds that a step takes longer when k requests join: `first` for any, `each` for every one."""

    first: float
    each: float

    def __call__(self, joining: int) -> float:
        return self.first + self.each * joining if joining else 0.0


@dataclass(frozen=True)
class EngineCosts:
    """By kind of step: PLAIN (autoregressive), EVEN, RAGGED."""

    steps: Mapping[str, MeasuredSteps]
    prefill: Mapping[str, Prefill]
    table: AdditiveSteps  # fitted to the ragged steps: what schedulers read

    def to_dict(self) -> dict[str, Any]:
        return {
            "steps": {kind: steps.to_dict() for kind, steps in self.steps.items()},
            "prefill": {kind: vars(prefill) for kind, prefill in self.prefill.items()},
        }


class ToldLengths:
    """A scheduler that verifies what it is told; ragged ones also do a scheduler's work, of which nothing comes."""

    def __init__(self, work: Synchronous | None) -> None:
        self.length, self._work = 1, work
        self.reads_confidence = work is not None

    def new_memory(self, requests: int) -> ScheduleMemory:
        return ScheduleMemory(requests, lag=0)

    def drafts(self, memory: ScheduleMemory) -> bool:
        return self.length > 0

    def __call__(self, confidence_RJ: Floats, count_R: Ints, memory: ScheduleMemory) -> Ints:
        lengths = np.full(len(count_R), self.length)
        if self._work is not None:
            self._work(confidence_RJ, count_R, memory)
            pairs = len(lengths) // 2 if self.length < confidence_RJ.shape[1] else 0
            lengths[: 2 * pairs : 2] += 1
            lengths[1 : 2 * pairs : 2] -= 1
        return lengths

    def settings(self) -> dict[str, Any]:
        return {"scheduler": "told"}


def measure_costs(
    target: LanguageModel,
    draft: Draft,
    prompts: Sequence[ServedPrompt],
    settings: ServingSettings,
    *,
    now: Clock,
    about: Mapping[str, Any],
) -> EngineCosts:
    """Lengths vary fastest, then kinds, then R, then repeats, so that a slow moment of the machine affects all. Raises
    UserError for lengths above the drafter's."""
    J, lengths = draft.config.num_drafts, list(settings.profile_lengths)
    if lengths[-1] > J:
        raise UserError(f"serving.profile_lengths up to {lengths[-1]}: this drafter drafts {J} tokens")
    flat = AdditiveSteps(
        about={}, bias_seconds=1.0, requests=(1,), alpha_seconds=(0.1,), tokens=(1, 2), theta_seconds=(0.0, 0.1)
    )
    told = {EVEN: ToldLengths(None), RAGGED: ToldLengths(Synchronous(flat, **settings.rules))}
    lanes: dict[tuple[str, int], Lane] = {}
    for R in settings.profile_requests:
        for kind, scheduler in told.items():
            policy = ScheduledVerification(scheduler, calibration=None)
            decoder = Speculative(target=target, proposer=DraftProposer(draft), policy=policy)
            lanes[kind, R] = Lane(decoder, prompts, R, now).warm_up(R)
        lanes[PLAIN, R] = Lane(Autoregressive(target=target), prompts, R, now).warm_up(R)
    samples: dict[tuple[str, int, int], list[tuple[int, float]]] = defaultdict(list)
    for _ in range(settings.profile_repeats):
        for (kind, R), lane in lanes.items():
            for n in [0] if kind == PLAIN else lengths:
                if kind != PLAIN:
                    told[kind].length = n
                joining = lane.engine.waiting
                samples[kind, R, n].append((joining, lane.step()))
    return _costs(samples, about=about)


def _costs(
    samples: Mapping[tuple[str, int, int], Sequence[tuple[int, float]]], *, about: Mapping[str, Any]
) -> EngineCosts:
    """From (k, seconds) of steps, by kind, R and n. A point at which requests joined in every step takes its least."""
    grids: dict[str, dict[tuple[int, int], float]] = {EVEN: {}, RAGGED: {}, PLAIN: {}}
    late: dict[str, list[tuple[int, float]]] = {EVEN: [], RAGGED: [], PLAIN: []}
    for (kind, R, n), steps in samples.items():
        alone = [seconds for k, seconds in steps if not k]
        grids[kind][R, n] = fmean(alone) if alone else min(seconds for _, seconds in steps)
        late[kind] += [(k, seconds - grids[kind][R, n]) for k, seconds in steps if k]
    prefill = {PLAIN: _prefill(late[PLAIN])}
    prefill |= dict.fromkeys((EVEN, RAGGED), _prefill(late[EVEN] + late[RAGGED]))
    return EngineCosts(
        {kind: MeasuredSteps(about=about, grid=grid) for kind, grid in grids.items()},
        prefill,
        fit(grids[RAGGED], about=about),
    )


def _prefill(late: Sequence[tuple[int, float]]) -> Prefill:
    """The nearest line, neither part below 0; with a single k all of it is per request."""
    if not late:
        return Prefill(0.0, 0.0)
    k, seconds = np.array(late, dtype=float).T
    each = max(0.0, float(seconds.mean() / k.mean()))
    if len(set(k)) < 2:
        return Prefill(0.0, each)
    slope, start = np.polyfit(k, seconds, 1)
    if start < 0 or slope < 0:
        return Prefill(0.0, each)
    return Prefill(float(start), float(slope))
