"""The settings of a load report. Imports nothing heavy: mistakes are reported before torch loads."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspec.errors import UserError
from dspec.serving.schedulers import Scheduler, Static, Synchronous, Threshold, asynchronous
from dspec.serving.step_table import AdditiveSteps, StepTable, read_step_table

AR = "AR"
SCHEDULED = ("synchronous", "asynchronous")
CLOCKS = ("wall", "cpu")
ANY_TABLE = AdditiveSteps(
    bias_seconds=1.0, requests=(1,), alpha_seconds=(0.1,), tokens=(1, 2), theta_seconds=(0.0, 0.1)
)


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """What is served, by which variants, and how it is measured. Raises UserError for what cannot be."""

    concurrency: Sequence[int]  # requests in flight
    static: Sequence[int]  # lengths
    threshold: float
    min_yield: float  # of the scheduled variants, as in conf/decoder/scheduled.yaml
    horizon: int
    probe_every: int
    steps: str | None  # an sps.json for the schedulers; null: measured here
    temperature: float
    top_p: float
    clock: str
    # traces
    trace_concurrency: int
    trace_requests: int
    # profile
    profile_requests: Sequence[int]  # in flight
    profile_lengths: Sequence[int]  # drafts verified of each request; 0: a step that does not draft
    profile_repeats: int
    # the engine: each repeat, all variants take turns
    requests: int  # answers per variant and concurrency, at least
    turnovers: float  # and at least so many times the concurrency
    repeats: int
    # the simulator
    simulated_requests: int
    # the schedulers alone
    overhead_requests: int
    overhead_slots: int
    overhead_repeats: int

    def __post_init__(self) -> None:
        rising = {"concurrency": 1, "static": 1, "profile_requests": 1, "profile_lengths": 0}
        for name, least in rising.items():
            values = getattr(self, name)
            if not values or sorted(set(values)) != list(values) or values[0] < least:
                raise UserError(f"serving.{name}={list(values)} must be increasing from at least {least}")
        if self.profile_lengths[0] != 0 or len(self.profile_lengths) < 2:
            raise UserError(f"serving.profile_lengths={list(self.profile_lengths)} needs 0 and one above")
        if not self.profile_requests[0] <= self.concurrency[0] <= self.concurrency[-1] <= self.profile_requests[-1]:
            raise UserError(
                f"serving.profile_requests={list(self.profile_requests)} must reach over all of serving.concurrency="
                f"{list(self.concurrency)}: the simulator has no times of other steps"
            )
        whole = ("trace_concurrency", "trace_requests", "profile_repeats", "requests", "repeats", "simulated_requests")
        for name in (*whole, "overhead_requests", "overhead_slots", "overhead_repeats"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"serving.{name}={value} must be at least 1")
        if not 0 <= self.turnovers < math.inf:
            raise UserError(f"serving.turnovers={self.turnovers} must be a number of at least 0")
        if self.clock not in CLOCKS:
            raise UserError(f"serving.clock={self.clock} must be one of {', '.join(CLOCKS)}")
        if not (0 <= self.temperature < math.inf and 0 < self.top_p <= 1):
            raise UserError(
                f"serving.temperature={self.temperature} and serving.top_p={self.top_p}: need temperature >= 0 and "
                "0 < top_p <= 1"
            )
        if self.steps is not None:
            read_step_table(Path(self.steps).expanduser())
        self.schedulers(ANY_TABLE)  # they check their own settings

    @property
    def rules(self) -> dict[str, Any]:
        return {"min_yield": self.min_yield, "horizon": self.horizon, "probe_every": self.probe_every}

    def statics(self) -> dict[str, int]:
        """Their lengths by name."""
        return {f"static {length}": length for length in self.static}

    def schedulers(self, table: StepTable) -> Mapping[str, Scheduler]:
        """All variants but AR, by name; each is new and has seen nothing."""
        statics: dict[str, Scheduler] = {name: Static(length) for name, length in self.statics().items()}
        return statics | {
            "threshold": Threshold(self.threshold),
            "synchronous": Synchronous(table, **self.rules),
            "asynchronous": asynchronous(table, **self.rules),
        }

    def answers(self, concurrency: int) -> int:
        """Per variant."""
        return max(self.requests, round(self.turnovers * concurrency))
