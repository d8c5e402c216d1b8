"""What an engine's steps cost on this machine, measured in the engine while it serves.

An engine under a closed loop verifies lengths that are told: the same for all requests ("even", as static lengths do),
or one more and one fewer in turn ("ragged", with confidences and a scheduler's own work, as a scheduled step has).
Steps in which requests join tell what a prefill costs. No acceptance is measured here.

Legend: R = requests in flight, n = drafts verified of each on average, k = requests that join in a step.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.loop import Decoder
from dspec.decoding.proposers import DraftProposer
from dspec.decoding.speculative import Speculative
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel
from dspec.models.temperatures import Calibration
from dspec.serving.policies import ScheduledVerification
from dspec.serving.schedulers import ScheduleMemory, Synchronous
from dspec.serving.scheduling import Ints
from dspec.serving.step_table import Floats, MeasuredSteps
from eval.profile_steps.measure import fit
from eval.serving.lanes import Clock, Lane
from eval.serving.prompts import ServedPrompt
from eval.serving.settings import ANY_TABLE, ServingSettings

EVEN, RAGGED, PLAIN = "even", "ragged", "AR"
Samples = dict[tuple[str, int, int], list[tuple[int, float]]]  # (kind, R, n) -> k and seconds of each step


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

    def table(self) -> MeasuredSteps:
        """What schedulers read: the ragged steps, with a fit to them for SGLang."""
        ragged = self.steps[RAGGED]
        return replace(ragged, fitted=fit(ragged.grid, about=ragged.about))

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
        if self._work is not None:
            self._work.drafts(memory)
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


class StepTimer:
    """Times steps of all kinds with R requests in flight, among whatever else takes turns with it."""

    def __init__(
        self,
        target: LanguageModel,
        draft: Draft,
        prompts: Sequence[ServedPrompt],
        settings: ServingSettings,
        *,
        requests: int,
        calibration: Calibration | None,
        now: Clock,
    ) -> None:
        self.requests, self.lengths = requests, list(settings.profile_lengths)
        self._told = {EVEN: ToldLengths(None), RAGGED: ToldLengths(Synchronous(ANY_TABLE, **settings.rules))}
        decoders: dict[str, Decoder] = {PLAIN: Autoregressive(target=target)}
        for kind, scheduler in self._told.items():
            policy = ScheduledVerification(scheduler, calibration=calibration)
            decoders[kind] = Speculative(target=target, proposer=DraftProposer(draft), policy=policy)
        self._lanes = {kind: Lane(decoder, prompts, requests, now) for kind, decoder in decoders.items()}
        for lane in self._lanes.values():
            lane.warm_up(requests)

    def time(self, samples: Samples) -> None:
        """One step of each kind and length, in turn."""
        for n in self.lengths:
            for kind, lane in self._lanes.items():
                if kind in self._told:
                    self._told[kind].length = n
                joining = lane.engine.waiting
                samples[kind, self.requests, 0 if kind == PLAIN else n].append((joining, lane.step()))
                if kind in self._told and n == 0:  # the next timed step is not to make up for this one's features
                    self._told[kind].length = self.lengths[1]
                    lane.step()


def measure_costs(timers: Sequence[StepTimer], *, repeats: int, about: Mapping[str, Any]) -> EngineCosts:
    """Lengths vary fastest, then R, then repeats, so that a slow moment of the machine affects all."""
    samples: Samples = defaultdict(list)
    for _ in range(repeats):
        for timer in timers:
            timer.time(samples)
    return costs_of(samples, about=about)


def costs_of(samples: Samples, *, about: Mapping[str, Any]) -> EngineCosts:
    """Least squares over all steps, in relative errors: seconds = of the kind, R and n + prefill(k)."""
    steps, prefill = {}, {}
    for kinds in ((PLAIN,), (EVEN, RAGGED)):
        points = {point: timed for point, timed in samples.items() if point[0] in kinds}
        base, joining = _fit_prefill(points)
        for kind in kinds:
            grid = {(R, n): seconds for (one, R, n), seconds in base.items() if one == kind}
            steps[kind], prefill[kind] = MeasuredSteps(about=about, grid=grid, fitted=None), joining
    return EngineCosts(steps, prefill)


def _fit_prefill(points: Samples) -> tuple[dict[tuple[str, int, int], float], Prefill]:
    """Seconds without joining requests by point, and the prefill's. Where requests joined in every step, the first
    one's part cannot be told from the step's own, and is in it; no part is below 0, however noisy the machine."""
    rows = [(i, k, seconds) for i, timed in enumerate(points.values()) for k, seconds in timed]
    index_N, k_N, seconds_N = (np.array(column) for column in zip(*rows, strict=True))
    own_NP = (index_N[:, None] == np.arange(len(points))).astype(float)
    weight_N = 1 / np.array([fmean(seconds for _, seconds in timed) for timed in points.values()])[index_N]
    for parts in ([k_N > 0, k_N], [k_N], []):
        design = np.column_stack([own_NP, *parts]) * weight_N[:, None]
        solution, _, rank, _ = np.linalg.lstsq(design, seconds_N * weight_N, rcond=None)
        costs = solution[len(points) :]
        if not parts or (rank == design.shape[1] and costs.min() >= 0 and solution[: len(points)].min() > 0):
            break
    first, each = np.concatenate([np.zeros(2 - len(costs)), costs]).tolist()
    return dict(zip(points, solution[: len(points)].tolist(), strict=True)), Prefill(first, each)
