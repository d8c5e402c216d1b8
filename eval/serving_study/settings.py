"""The settings of the study. Imports nothing heavy: mistakes are reported before torch loads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dspec.errors import UserError

SCHEDULERS = ("synchronous", "asynchronous")
ALL = "all"  # the domains together


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """Raises UserError for values that cannot be studied."""

    traces: Sequence[str]  # files of recorded traces, one per temperature; []: record
    steps: str | None  # a step table; null: measure one
    temperatures: Sequence[float]  # of the answers recorded
    concurrency: int  # requests in flight while recording
    dearer: float  # a second, hypothetical table: what verifying a token adds to a step, times this
    schedulers: Sequence[str]
    concurrencies: Sequence[int]  # requests in flight in the simulated closed loop
    focus: int  # the one at which domains, drift and distorted heads are studied
    drift: Sequence[Sequence[str]]  # domains: fitted on the first of a pair, served the second
    distortions: Sequence[Sequence[float]]  # heads miscalibrated on purpose: logits * scale + shift
    fit_share: float  # of each domain's answers; the others are served
    batches: int  # of answers, served one after the other; intervals are over them
    prefill_seconds: float  # per request
    bins: int  # of the calibration error
    grid_low: float
    grid_high: float
    grid_points: int
    half_life: float  # rounds after which the online estimate gives a round half its weight
    prior: float  # for each squared factor e of an online temperature from 1, in log-likelihood
    ridge: float
    min_yield: float  # as in conf/decoder/scheduled.yaml
    horizon: int
    probe_every: int

    def __post_init__(self) -> None:
        if unknown := [name for name in self.schedulers if name not in SCHEDULERS]:
            raise UserError(f"study.schedulers: {unknown[0]} must be one of {', '.join(SCHEDULERS)}")
        for name, least in (("concurrencies", 1), ("schedulers", None), ("temperatures", 0)):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values) or (least is not None and not min(values) >= least):
                above = "" if least is None else f" of at least {least}"
                raise UserError(f"study.{name}={list(values)} must be one or more different values{above}")
        for name, least in (("concurrency", 1), ("focus", 1), ("batches", 2), ("bins", 1), ("prefill_seconds", 0)):
            if not (value := getattr(self, name)) >= least:
                raise UserError(f"study.{name}={value} must be at least {least}")
        for name in ("half_life", "prior", "ridge"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise UserError(f"study.{name}={value} must be above 0")
        if not 0 < self.fit_share < 1:
            raise UserError(f"study.fit_share={self.fit_share} must lie in (0, 1): the other answers are served")
        if not 1 < self.dearer < math.inf:
            raise UserError(f"study.dearer={self.dearer} must be above 1")
        if not (0 < self.grid_low < 1 < self.grid_high < math.inf and self.grid_points >= 3):
            raise UserError("study.grid_low < 1 < study.grid_high, both above 0, and study.grid_points >= 3")
        if any(len(pair) != 2 or pair[0] == pair[1] for pair in self.drift):
            raise UserError(f"study.drift={list(self.drift)} must be pairs of domains, such as [[problems,functions]]")
        if any(len(pair) != 2 or not 0 < pair[0] < math.inf or not math.isfinite(pair[1]) for pair in self.distortions):
            raise UserError(
                f"study.distortions={list(self.distortions)} must be pairs of a scale above 0 and a shift, as [[3,0]]"
            )
