"""Simulates each scenario with each estimator: throughput, waste and calibration, paired by batches of answers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from dspec.calibration.sts import expected_calibration_error
from dspec.serving.estimators import COUNTS, Estimator, Recorded, Scaled
from dspec.serving.schedulers import Drafting, Lagged, Scheduler, StepCosts, Synchronous, asynchronous
from dspec.serving.scheduling import Ints
from dspec.serving.simulator import Load, Outcome, simulate
from dspec.serving.step_table import Floats, StepTable
from eval.intervals import student
from eval.meter import Meter
from eval.serving_study.scenarios import ORACLE, RAW, Makers, Scenario
from eval.serving_study.settings import StudySettings

MEASURED, DEARER = "measured", "dearer"
LEAST_GAIN = 0.005  # of the oracle: below it, shares of it are noise
Cell = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """Runs the cells of scenarios on step tables by name."""

    settings: StudySettings
    tables: Mapping[str, StepTable]
    seed: int

    def cells(self, given: Sequence[Scenario]) -> list[Cell]:
        """One for each scenario, table, number of requests and scheduler."""
        out: list[Cell] = []
        with Meter("study") as meter:
            meter.expect(len(given), done=0)
            for scenario in given:
                meter.phase(f"{scenario.name}, T = {scenario.temperature:g}")
                out += self._scenario(scenario)
                meter.advance(1)
        return out

    def _scenario(self, scenario: Scenario) -> list[Cell]:
        s, makers = self.settings, scenario.makers(self.settings)
        batches = Recorded(scenario.served, slots=scenario.slots).deal(s.batches, seed=self.seed)
        loads = s.concurrencies if scenario.kind == "all" else [s.focus]
        out = []
        for name, table in self.tables.items():
            for concurrency in loads:
                bounds = [self._serve(batches, make, table, concurrency, None) for make in oracles(table, s)]
                bound = max(bounds, key=lambda outcomes: measures(outcomes)["throughput"])
                for scheduler in s.schedulers:
                    runs = self._runs(batches, makers, scheduler, table, concurrency)
                    where = {"scenario": scenario.name, "kind": scenario.kind, "temperature": scenario.temperature}
                    where |= {"steps": name, "concurrency": concurrency, "scheduler": scheduler}
                    out.append(where | {"estimators": compared(runs | {ORACLE: bound}, s.bins)})
        return out

    def _runs(
        self, batches: Sequence[Recorded], makers: Makers, scheduler: str, table: StepTable, concurrency: int
    ) -> dict[str, list[Outcome]]:
        make = SCHEDULERS_BY_NAME[scheduler]
        return {
            name: self._serve(batches, lambda: make(table, **rules(self.settings)), table, concurrency, maker())
            for name, maker in makers.items()
        }

    def _serve(
        self,
        batches: Sequence[Recorded],
        scheduler: Callable[[], Scheduler],
        table: StepTable,
        concurrency: int,
        estimator: Estimator | None,
    ) -> list[Outcome]:
        """The batches one after the other; what an estimator has learnt it keeps. None: told the truth."""
        load = Load(max_in_flight=concurrency, arrivals_per_second=None)
        return [
            simulate(
                batch,
                scheduler(),
                table,
                load,
                requests=max(len(batch.answers), concurrency),
                prefill_seconds=self.settings.prefill_seconds,
                seed=self.seed,
                oracle=estimator is None,
                estimator=estimator if estimator is not None else Scaled([1.0] * batch.slots),
            )
            for batch in batches
        ]


def rules(settings: StudySettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in ("min_yield", "horizon", "probe_every")}


SCHEDULERS_BY_NAME: dict[str, Callable[..., Scheduler]] = {"synchronous": Synchronous, "asynchronous": asynchronous}


def oracles(table: StepTable, settings: StudySettings) -> list[Callable[[], Scheduler]]:
    """The best number of drafts by search over what will be accepted, which is biased: for simulation only. One drafts
    always, one only where the mean acceptance says that it pays: the better is the bound."""
    costs = StepCosts(table, lambda raw, R: raw, extend=True)
    rule = Drafting(costs, horizon=settings.horizon, probe_every=settings.probe_every)
    return [partial(Lagged, ORACLE, costs, lag=0, drafting=drafting) for drafting in (None, rule)]


def compared(runs: Mapping[str, Sequence[Outcome]], bins: int) -> dict[str, dict[str, Any]]:
    """Each estimator's measures, its gain over the raw head with the interval over batches, and the share of the
    oracle's gain that it reaches."""
    out = {name: measures(outcomes) for name, outcomes in runs.items()}
    base = out[RAW]["throughput"]
    bound = out[ORACLE]["throughput"] / base - 1
    for name, outcomes in runs.items():
        if name != ORACLE:
            out[name] |= calibration(outcomes, bins)
        if name != RAW:
            share = (out[name]["throughput"] / base - 1) / bound if bound > LEAST_GAIN else None
            out[name] |= {"gain": gain(outcomes, runs[RAW]), "share_of_oracle": share}
    return out


def measures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Of all batches together."""
    total = {name: sum(getattr(one, name) for one in outcomes) for name in _COUNTED}
    wasted = total["verified"] - total["accepted"]
    return {
        "throughput": total["tokens"] / total["seconds"],
        "budget": total["verified"] / total["request_steps"],
        "verified_per_token": total["verified"] / total["tokens"],
        "wasted_per_token": wasted / total["tokens"],
        "waste": wasted / total["verified"] if total["verified"] else None,
        "drafted_steps": total["drafted_steps"] / total["steps"],
        "batch_throughput": [one.throughput for one in outcomes],
    }


_COUNTED = ("tokens", "seconds", "verified", "accepted", "request_steps", "drafted_steps", "steps")


def gain(outcomes: Sequence[Outcome], raw: Sequence[Outcome]) -> dict[str, float]:
    """Of throughput, as a fraction, with a 95 % interval: t over batches of answers, of logarithms."""
    logs = [math.log(a.throughput / b.throughput) for a, b in zip(outcomes, raw, strict=True)]
    return dict(zip(("mean", "low", "high"), map(math.expm1, student(logs)), strict=True))


def calibration(outcomes: Sequence[Outcome], bins: int) -> dict[str, Any]:
    """Of the probability that drafts up to a slot are all accepted, as estimated in the simulation: the mean of the
    slots' calibration errors, the Brier score, and the reliability curve of all slots together. None without drafts."""
    estimated = [one for outcome in outcomes for one in outcome.estimates]
    if not estimated:
        return {"ece": None, "brier": None, "curve": None}
    a_NJ, survived_NJ, counts_NJ = (
        np.concatenate(x) for x in zip(*(_survivals(*one) for one in estimated), strict=True)
    )
    errors = [
        expected_calibration_error(torch.from_numpy(a[known]), torch.from_numpy(survived[known]), bins=bins)
        for a, survived, known in zip(a_NJ.T, survived_NJ.T, counts_NJ.T, strict=True)
        if known.any()
    ]
    a, survived = a_NJ[counts_NJ], survived_NJ[counts_NJ].astype(float)
    return {
        "ece": float(np.mean(errors)),
        "brier": float(np.mean((a - survived) ** 2)),
        "curve": curve(a, survived, bins),
    }


def _survivals(drafts_RJF: Floats, estimates_RJ: Floats, accepted_R: Ints) -> tuple[Any, Any, Any]:
    """[R, J]: estimated survival, what happened, and whether it counts."""
    slots = np.arange(estimates_RJ.shape[1])
    return estimates_RJ.cumprod(1), slots < accepted_R[:, None], drafts_RJF[..., COUNTS] > 0


def curve(probability_M: Floats, outcome_M: Floats, bins: int) -> dict[str, list[Any]]:
    """Mean probability, share that happened and number of drafts of each bin that has any."""
    index = np.minimum((probability_M * bins).astype(int), bins - 1)
    count, predicted, observed = (
        np.bincount(index, x, minlength=bins) for x in (np.ones_like(probability_M), probability_M, outcome_M)
    )
    full = count > 0
    return {
        "predicted": (predicted[full] / count[full]).tolist(),
        "observed": (observed[full] / count[full]).tolist(),
        "count": count[full].astype(int).tolist(),
    }
