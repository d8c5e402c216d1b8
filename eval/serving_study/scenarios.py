"""What is studied: traces to fit estimators on, others to serve, and the estimators fitted.

raw             the head as trained
sts             temperatures fitted to the fitting answers
sts_online      temperatures refitted to the rounds served so far, from 1 on; no fitting answers
logistic        the drafter's probabilities, without the head; not of greedy drafts, which are drawn from nothing
slots           the mean acceptance of each slot: knows nothing of the drafts at hand
sts_hindsight   temperatures fitted to the served answers themselves: what STS could give at most (simulation only)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dspec.calibration.sts import Traces, fit_sts, temperature_grid
from dspec.errors import UserError
from dspec.serving.estimators import ENTROPY, TOP, Estimator, Logistic, Online, Scaled
from dspec.serving.recording import Recording
from dspec.serving.step_table import AdditiveSteps, StepTable, TabulatedSteps
from dspec.serving.traces import Trace
from eval.serving_study.settings import ALL, StudySettings

RAW, STS, ONLINE, LOGISTIC, SLOTS, HINDSIGHT, ORACLE = (
    "raw", "sts", "sts_online", "logistic", "slots", "sts_hindsight", "oracle",
)  # fmt: skip
Makers = Mapping[str, Callable[[], Estimator]]


@dataclass(frozen=True)
class Scenario:
    """Answers of one temperature to fit on and to serve."""

    name: str
    kind: str  # all | domain | drift | distorted
    temperature: float
    slots: int
    fit: Sequence[Trace]
    served: Sequence[Trace]

    def makers(self, settings: StudySettings) -> Makers:
        """New estimators by name, all but the raw head's and the online one fitted here."""
        slots, grid = self.slots, grid_of(settings)

        def scaled(traces: Sequence[Trace]) -> Callable[[], Estimator]:
            temperatures = sts_temperatures(traces, settings)
            return lambda: Scaled(temperatures)

        def logistic(columns: Sequence[int]) -> Callable[[], Estimator]:
            fitted = Logistic.fit(self.fit, slots=slots, columns=columns, ridge=settings.ridge)
            return lambda: fitted

        online: dict[str, Any] = {"grid": grid.tolist(), "half_life": settings.half_life, "prior": settings.prior}
        makers: dict[str, Callable[[], Estimator]] = {
            RAW: lambda: Scaled([1.0] * slots),
            STS: scaled(self.fit),
            ONLINE: lambda: Online(slots, **online),
        }
        if self.kind != "distorted":  # these do not read the head
            makers |= {LOGISTIC: logistic((TOP, ENTROPY))} if self.temperature > 0 else {}
            makers[SLOTS] = logistic(())
        return makers | {HINDSIGHT: scaled(self.served)}


def scenarios(recording: Recording, settings: StudySettings, *, seed: int) -> list[Scenario]:
    """All domains together, each alone, drift between two, and heads miscalibrated on purpose; each answer is either
    for fitting or served, in all of them. Raises UserError for domains with fewer than 2 answers, or unknown ones."""
    about = recording.about
    if not about.every_position:
        raise UserError("these traces have no round at every position: record them anew with study.traces=[]")
    parts = {domain: split(recording.only(domain).traces, settings, seed=seed) for domain in recording.domains}
    if unknown := [domain for pair in settings.drift for domain in pair if domain not in parts]:
        raise UserError(f"study.drift: no recorded answers of {unknown[0]}, only of {', '.join(parts)}")
    fit, served = ([trace for part in parts.values() for trace in part[k]] for k in range(2))

    def scenario(name: str, kind: str, fit: Sequence[Trace], served: Sequence[Trace]) -> Scenario:
        return Scenario(name, kind, about.temperature, about.slots, fit, served)

    out = [scenario(ALL, "all", fit, served)]
    if len(parts) > 1:
        out += [scenario(domain, "domain", fit, part[1]) for domain, part in parts.items()]
    out += [scenario(f"{a} -> {b}", "drift", parts[a][0], parts[b][1]) for a, b in settings.drift]
    for scale, shift in settings.distortions:
        name = f"head x {scale:g}" + (f" {shift:+g}" if shift else "")
        bent = [[distorted(trace, scale, shift) for trace in traces] for traces in (fit, served)]
        out.append(scenario(name, "distorted", *bent))
    return out


def split(traces: Sequence[Trace], settings: StudySettings, *, seed: int) -> tuple[list[Trace], list[Trace]]:
    """Answers for fitting and answers to be served. Raises UserError for fewer than two."""
    if len(traces) < 2:
        raise UserError(f"one recorded answer of {traces[0].domain}: fitting needs some, and serving others")
    order = np.random.default_rng(seed).permutation(len(traces))
    count = min(max(round(settings.fit_share * len(traces)), 1), len(traces) - 1)
    return [traces[i] for i in order[:count]], [traces[i] for i in order[count:]]


def distorted(trace: Trace, scale: float, shift: float) -> Trace:
    """As a head with other logits would have recorded it."""
    rounds = [replace(one, logits=tuple(scale * z + shift for z in one.logits)) for one in trace.rounds]
    return replace(trace, rounds=tuple(rounds))


def sts_temperatures(traces: Sequence[Trace], settings: StudySettings) -> list[float]:
    """Raises UserError where a slot has no round to fit."""
    rounds = [one for trace in traces for one in trace.rounds]
    if not rounds or not any(one.valid == len(one.logits) for one in rounds):
        raise UserError("too few rounds to fit STS to: record more or longer answers")
    observed = Traces(
        torch.tensor([one.logits for one in rounds], dtype=torch.float64),
        torch.tensor([one.accepted for one in rounds]),
        torch.tensor([one.valid for one in rounds]),
    )
    temperatures: list[float] = fit_sts(observed, grid=grid_of(settings), bins=settings.bins).tolist()
    return temperatures


def grid_of(settings: StudySettings) -> torch.Tensor:
    return temperature_grid(low=settings.grid_low, high=settings.grid_high, points=settings.grid_points)


def dearer(table: StepTable, factor: float) -> StepTable:
    """A machine on which what tokens add to a step takes `factor` times as long; hypothetical."""
    about = dict(table.about) | {"hypothetical": f"what tokens add to a step's time, times {factor:g}"}
    if isinstance(table, AdditiveSteps):
        return replace(table, about=about, theta_seconds=tuple(factor * t for t in table.theta_seconds))
    if isinstance(table, TabulatedSteps):
        first = 1 / table.steps[0]
        return replace(table, about=about, steps=tuple(1 / (first + factor * (1 / s - first)) for s in table.steps))
    raise TypeError(f"{type(table).__name__} is no step table of a file")
