"""What an engine's step costs: a measured table of its time against the tokens that it verifies.

A step drafts for all requests in flight and verifies each one's anchor and some of its drafts: its token batch size B
is requests plus drafts. Two forms, both of them files that SGLang reads (--speculative-dspark-sps-table-path); ours add
one key, "dspec", with where they were measured, and the measured points, which our schedulers read (MeasuredSteps):

    tabulated   sample_batch_tokens, sample_steps_per_sec, max_batch_tokens: steps per second at the largest probe <= B
    additive    bias_seconds, bs_probes, alpha_seconds, m_probes, theta_seconds: T = bias + alpha(requests) + theta(B),
                linear between probes; alpha is what requests cost whatever is verified: their drafting

Outside the probes the nearest one counts, as in SGLang. Beyond the last one that makes every further token look free;
with `extend` time goes on growing as it did over the upper half of the probes.
"""

import functools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspec.errors import UserError

Floats = NDArray[np.float64]
FLOOR, LINEAR = "floor", "linear"


@dataclass(frozen=True)
class Curve:
    """Values at increasing probes. Raises UserError for anything else; `name` is what its message calls the probes."""

    name: str
    probes: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.probes or list(self.probes) != sorted(set(self.probes)) or self.probes[0] < 1:
            raise UserError(f"{self.name} must be increasing integers of at least 1, not {_short(self.probes)}")
        if len(self.probes) != len(self.values):
            raise UserError(f"{self.name} has {len(self.probes)} probes but {len(self.values)} values: one for each")
        if not all(math.isfinite(value) for value in self.values):
            raise UserError(f"the values at {self.name} must be finite, not {_short(self.values)}")

    def floor(self, x: ArrayLike) -> Floats:
        """The value at the largest probe up to x; before the first probe, at the first."""
        index = np.searchsorted(self.probes, x, side="right") - 1
        return np.asarray(self.values)[np.maximum(index, 0)]

    def linear(self, x: ArrayLike) -> Floats:
        """Between neighbouring probes; outside, at the nearest."""
        return np.interp(np.asarray(x, dtype=float), self.probes, self.values)

    def growth(self) -> float:
        """Per unit over the upper half of the probes, at least 0; of a single probe 0."""
        last = len(self.probes) - 1
        middle = int(np.searchsorted(self.probes, self.probes[last] / 2)) if last else 0
        middle = min(middle, last - 1)
        if not last:
            return 0.0
        return max(0.0, (self.values[last] - self.values[middle]) / (self.probes[last] - self.probes[middle]))

    def beyond(self, x: ArrayLike) -> Floats:
        """What growth adds for x after the last probe."""
        return self.growth() * np.maximum(np.asarray(x, dtype=float) - self.probes[-1], 0.0)


_curve = functools.lru_cache(maxsize=64)(Curve)  # checked once


@dataclass(frozen=True, kw_only=True)
class StepTable(ABC):
    """Seconds per step. `about` says where it was measured: hardware, dtype, context, ...; {} if nobody said."""

    about: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @abstractmethod
    def seconds(self, requests: int, tokens: ArrayLike, *, extend: bool = False) -> Floats:
        """Of steps that draft for `requests` and verify `tokens` [...] in all; [...]."""

    @abstractmethod
    def seconds_without_drafts(self, requests: int) -> float | None:
        """Of a step that does not draft, so verifies one token per request; None if the table cannot say."""

    @property
    @abstractmethod
    def probes(self) -> tuple[int, ...]:
        """The token batch sizes at which it was measured."""

    @property
    def for_sglang(self) -> "StepTable":
        """The table as SGLang reads it from the file."""
        return self

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """SGLang's form, JSON-ready."""

    def steps_per_second(self, requests: int, tokens: ArrayLike) -> Floats:
        """SPS(B) for token batch sizes [...]."""
        return 1 / self.seconds(requests, tokens)


@dataclass(frozen=True, kw_only=True)
class TabulatedSteps(StepTable):
    """Whole steps, drafting included, against the tokens verified. `interpolation` between probes: "floor" is SGLang's
    rule; "linear" is linear in seconds."""

    batch_tokens: tuple[int, ...]
    steps: tuple[float, ...]  # per second
    max_batch_tokens: int
    interpolation: str = FLOOR

    def __post_init__(self) -> None:
        Curve("sample_batch_tokens", self.batch_tokens, self.steps)
        if min(self.steps) <= 0:
            raise UserError(f"sample_steps_per_sec must be above 0, not {_short(self.steps)}")
        if self.max_batch_tokens < self.batch_tokens[-1]:
            raise UserError(f"max_batch_tokens={self.max_batch_tokens} is below the probe {self.batch_tokens[-1]}")
        if self.interpolation not in (FLOOR, LINEAR):
            raise UserError(f"interpolation={self.interpolation} must be {FLOOR} or {LINEAR}")

    @property
    def probes(self) -> tuple[int, ...]:
        return self.batch_tokens

    def steps_per_second(self, requests: int, tokens: ArrayLike) -> Floats:
        if self.interpolation == LINEAR:
            return 1 / self.seconds(requests, tokens)
        return Curve("sample_batch_tokens", self.batch_tokens, self.steps).floor(tokens)

    def seconds(self, requests: int, tokens: ArrayLike, *, extend: bool = False) -> Floats:
        curve = _curve("sample_batch_tokens", self.batch_tokens, tuple(1 / rate for rate in self.steps))
        inside = curve.linear(tokens) if self.interpolation == LINEAR else curve.floor(tokens)
        return inside + curve.beyond(tokens) if extend else inside

    def seconds_without_drafts(self, requests: int) -> float | None:
        return None  # drafting is in every step that was timed

    def to_dict(self) -> dict[str, Any]:
        interpolation = {} if self.interpolation == FLOOR else {"interpolation": self.interpolation}
        return {
            "sample_batch_tokens": list(self.batch_tokens),
            "sample_steps_per_sec": list(self.steps),
            "max_batch_tokens": self.max_batch_tokens,
        } | _dspec(dict(self.about) | interpolation)


@dataclass(frozen=True, kw_only=True)
class AdditiveSteps(StepTable):
    """T = bias + alpha(requests) + theta(tokens); a step that does not draft saves alpha."""

    bias_seconds: float
    requests: tuple[int, ...]
    alpha_seconds: tuple[float, ...]
    tokens: tuple[int, ...]
    theta_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        Curve("bs_probes", self.requests, self.alpha_seconds)
        Curve("m_probes", self.tokens, self.theta_seconds)
        least = self.bias_seconds + min(0.0, *self.alpha_seconds) + min(self.theta_seconds)
        if not (0 < self.bias_seconds < math.inf and least > 0):
            raise UserError(f"bias_seconds={self.bias_seconds} must be above 0, and so must every step's time")

    @property
    def probes(self) -> tuple[int, ...]:
        return self.tokens

    def seconds(self, requests: int, tokens: ArrayLike, *, extend: bool = False) -> Floats:
        alpha = _curve("bs_probes", self.requests, self.alpha_seconds)
        drafting = alpha.linear(requests) + (alpha.beyond(requests) if extend else 0.0)
        return self.bias_seconds + drafting + self._theta(tokens, extend=extend)

    def seconds_without_drafts(self, requests: int) -> float | None:
        return self.bias_seconds + float(self._theta(requests, extend=True))

    def _theta(self, tokens: ArrayLike, *, extend: bool) -> Floats:
        theta = _curve("m_probes", self.tokens, self.theta_seconds)
        return theta.linear(tokens) + (theta.beyond(tokens) if extend else 0.0)

    def to_dict(self) -> dict[str, Any]:
        return {
            "bias_seconds": self.bias_seconds,
            "bs_probes": list(self.requests),
            "alpha_seconds": list(self.alpha_seconds),
            "m_probes": list(self.tokens),
            "theta_seconds": list(self.theta_seconds),
        } | _dspec(self.about)


Grid = Mapping[tuple[int, int], float]  # (requests, drafts verified of each; 0: none drafted) -> seconds


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps(StepTable):
    """The measured seconds themselves: linear in the drafts of a request between measured lengths, and in requests
    between measured numbers. A fit to them is off where the machine is not additive; `fitted`, if there is one, tells
    how time goes on outside the lengths and requests that were measured, and is what SGLang reads."""

    grid: Grid = field(hash=False)
    fitted: AdditiveSteps | None

    def __post_init__(self) -> None:
        if not self.grid or min(self.grid.values()) <= 0:
            raise UserError("a table of steps needs at least one that was measured, of more than 0 seconds")

    @property
    def probes(self) -> tuple[int, ...]:
        return tuple(sorted({R * (1 + n) for R, n in self.grid}))

    @property
    def for_sglang(self) -> StepTable:
        return self.fitted or self

    def seconds(self, requests: int, tokens: ArrayLike, *, extend: bool = False) -> Floats:
        drafts = np.asarray(tokens, dtype=float) / requests - 1
        known = sorted({R for R, _ in self.grid})
        if requests > known[-1] and self.fitted is not None:
            return self.fitted.seconds(requests, tokens, extend=extend)
        low = max((R for R in known if requests >= R), default=known[0])
        high = min((R for R in known if requests <= R), default=known[-1])
        part = (requests - low) / (high - low) if high > low else 0.0
        return (1 - part) * self._at(low, drafts, extend) + part * self._at(high, drafts, extend)

    def _at(self, requests: int, drafts: Floats, extend: bool) -> Floats:
        lengths = sorted(n for R, n in self.grid if requests == R and n > 0)
        if not lengths:
            return np.full(drafts.shape, self.grid[requests, 0])
        curve = Curve("lengths", tuple(lengths), tuple(self.grid[requests, n] for n in lengths))
        seconds = curve.linear(drafts)
        if self.fitted is None:
            return seconds + curve.beyond(drafts) if extend else seconds
        within = np.clip(drafts, lengths[0], lengths[-1])
        there, here = (self.fitted.seconds(requests, requests * (1 + n), extend=extend) for n in (drafts, within))
        return seconds + there - here

    def seconds_without_drafts(self, requests: int) -> float | None:
        known = sorted(R for R, n in self.grid if n == 0)
        if self.fitted is not None and (not known or requests > known[-1]):
            return self.fitted.seconds_without_drafts(requests)
        return float(np.interp(requests, known, [self.grid[R, 0] for R in known])) if known else None

    def to_dict(self) -> dict[str, Any]:
        points = [[R, n, seconds] for (R, n), seconds in self.grid.items()]
        return (self.fitted.to_dict() if self.fitted else {}) | _dspec(dict(self.about) | {_POINTS: points})


_POINTS = "points"


def read_step_table(path: Path) -> StepTable:
    """The table in `path`, of either form. Raises UserError for a missing, malformed or impossible one, or one that
    cannot say what a token costs."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"no step table in {path} ({error}): measure one with python -m eval.profile_steps, or pass SGLang's"
        ) from error
    try:
        table = parse_step_table(raw)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if len(table.probes) < 2:
        raise UserError(f"{path} has one probe, so it cannot say what a token costs: measure at several")
    return table


def parse_step_table(raw: Any) -> StepTable:
    """A table from the content of its file; keys that neither form has are ignored, as in SGLang. Raises UserError."""
    if not isinstance(raw, Mapping):
        raise UserError("a step table is a JSON object")
    extra = raw.get("dspec", {})
    about = dict(extra) if isinstance(extra, Mapping) else {}
    points = about.pop(_POINTS, None)
    if "bias_seconds" in raw:
        fitted = AdditiveSteps(
            about=about,
            bias_seconds=_numbers([_get(raw, "bias_seconds")], "bias_seconds", float)[0],
            requests=_numbers(_get(raw, "bs_probes"), "bs_probes", int),
            alpha_seconds=_numbers(_get(raw, "alpha_seconds"), "alpha_seconds", float),
            tokens=_numbers(_get(raw, "m_probes"), "m_probes", int),
            theta_seconds=_numbers(_get(raw, "theta_seconds"), "theta_seconds", float),
        )
        return fitted if points is None else MeasuredSteps(about=about, grid=_grid(points), fitted=fitted)
    interpolation = about.pop("interpolation", FLOOR)
    return TabulatedSteps(
        about=about,
        batch_tokens=_numbers(_get(raw, "sample_batch_tokens"), "sample_batch_tokens", int),
        steps=_numbers(_get(raw, "sample_steps_per_sec"), "sample_steps_per_sec", float),
        max_batch_tokens=_numbers([_get(raw, "max_batch_tokens")], "max_batch_tokens", int)[0],
        interpolation=interpolation,
    )


def _get(raw: Mapping[str, Any], key: str) -> Any:
    if key not in raw:
        raise UserError(
            f"{key} is missing: a table has sample_batch_tokens, sample_steps_per_sec, max_batch_tokens, or "
            "bias_seconds, bs_probes, alpha_seconds, m_probes, theta_seconds"
        )
    return raw[key]


def _numbers(value: Any, name: str, kind: type[Any]) -> tuple[Any, ...]:
    allowed = (int,) if kind is int else (int, float)
    if not isinstance(value, list) or not all(type(x) in allowed and _fits(x) for x in value):
        raise UserError(f"{name} must hold {'whole ' if kind is int else ''}numbers, not {_short(value)}")
    return tuple(kind(x) for x in value)


def _grid(points: Any) -> Grid:
    if not isinstance(points, list) or not all(isinstance(point, list) and len(point) == 3 for point in points):
        raise UserError(f"dspec.{_POINTS} must hold [requests, drafts, seconds], not {_short(points)}")
    requests, drafts, seconds = (
        _numbers([point[i] for point in points], f"dspec.{_POINTS}", kind) for i, kind in enumerate((int, int, float))
    )
    if min(requests, default=1) < 1 or min(drafts, default=0) < 0 or not all(0 < s < math.inf for s in seconds):
        raise UserError(f"dspec.{_POINTS}: requests must be at least 1, drafts at least 0, seconds above 0")
    return dict(zip(zip(requests, drafts, strict=True), seconds, strict=True))


def _fits(number: float) -> bool:
    """Whether numpy can hold it."""
    return isinstance(number, float) or abs(number) < 2**63


def _short(values: Any) -> str:
    text = str(list(values) if isinstance(values, Sequence) and not isinstance(values, str) else values)
    return text if len(text) < 80 else f"{text[:76]} ..."


def _dspec(about: Mapping[str, Any]) -> dict[str, Any]:
    return {"dspec": dict(about)} if about else {}
