"""Recorded traces on disk: JSON Lines, a first line with what they were recorded on, then one answer per line.

{"recording": {"target": ..., "drafter": ..., "temperature": 1.0, "top_p": 1.0, "seed": 0, "slots": 7, ...}}
{"id": ..., "domain": ..., "prompt_tokens": 40, "rounds": {"logits": [[...], ...], "accepted": [...], ...}}
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dspec.atomic import atomic_file
from dspec.errors import UserError
from dspec.serving.traces import Round, Trace

_OF_SLOTS = ("logits", "top", "entropy")
_COUNTS = ("accepted", "committed", "valid")


@dataclass(frozen=True, kw_only=True)
class RecordedOn:
    """Where, on what and how answers were recorded."""

    target: str
    drafter: str
    temperature: float
    top_p: float
    seed: int
    concurrency: int  # requests in flight
    slots: int  # drafts of each round
    every_position: bool  # a round after each token, of which one token was kept; else as decoding goes
    dtype: str
    threads: int
    hardware: Mapping[str, Any]
    git: Mapping[str, Any]
    versions: Mapping[str, Any]


@dataclass(frozen=True)
class Recording:
    about: RecordedOn
    traces: tuple[Trace, ...]

    @property
    def domains(self) -> list[str]:
        """In the order of their first answers."""
        return list(dict.fromkeys(trace.domain for trace in self.traces))

    def only(self, *domains: str) -> "Recording":
        """The answers of these domains. Raises UserError where there is none."""
        kept = tuple(trace for trace in self.traces if trace.domain in domains)
        if not kept:
            raise UserError(f"no recorded answers of {', '.join(domains)}: the recording has {', '.join(self.domains)}")
        return Recording(self.about, kept)

    def write(self, path: Path) -> None:
        """Atomically."""
        lines = [{"recording": vars(self.about)}, *map(_row, self.traces)]
        with atomic_file(path) as scratch:
            scratch.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def read_recording(path: Path) -> Recording:
    """The content of a file. Raises UserError for a missing, incomplete or malformed one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read recorded traces from {path} ({error}): record them with eval.serving") from error
    traces: list[Trace] = []
    about: RecordedOn | None = None
    try:
        about = _about(json.loads(lines[0])["recording"])
        for line in lines[1:]:
            traces.append(_trace(json.loads(line), slots=about.slots, sampled=about.temperature > 0))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        number = 1 if about is None else len(traces) + 2
        raise UserError(f"{path}, line {number} is no recorded answer ({error!r}): record them again") from error
    if not traces:
        raise UserError(f"{path} has no recorded answers: record them again")
    return Recording(about, tuple(traces))


def _about(raw: Mapping[str, Any]) -> RecordedOn:
    about = RecordedOn(**{field.name: raw[field.name] for field in fields(RecordedOn)})
    if type(about.slots) is not int or about.slots < 1:
        raise ValueError(f"slots={about.slots}")
    if not (math.isfinite(about.temperature) and about.temperature >= 0 and 0 < about.top_p <= 1):
        raise ValueError(f"temperature={about.temperature}, top_p={about.top_p}")
    return about


def _row(trace: Trace) -> dict[str, Any]:
    rounds = {name: [getattr(one, name) for one in trace.rounds] for name in (*_COUNTS, *_OF_SLOTS)}
    return {"id": trace.id, "domain": trace.domain, "prompt_tokens": trace.prompt_tokens, "rounds": rounds}


def _trace(row: Mapping[str, Any], *, slots: int, sampled: bool) -> Trace:
    columns = row["rounds"]
    widths = {"logits": (0, slots), "top": (slots if sampled else 0,), "entropy": (slots if sampled else 0,)}
    counts = [tuple(_count(value) for value in columns[name]) for name in _COUNTS]
    values = [tuple(_floats(value, widths[name]) for value in columns[name]) for name in _OF_SLOTS]
    rounds = [
        Round(logits, accepted, committed, valid, top, entropy)
        for accepted, committed, valid, logits, top, entropy in zip(*counts, *values, strict=True)
    ]
    for one in rounds:
        if not (one.accepted <= one.valid <= slots and 1 <= one.committed <= one.accepted + 1):
            raise ValueError(f"accepted={one.accepted}, committed={one.committed}, valid={one.valid}")
    id_, domain, prompt_tokens = row["id"], row["domain"], _count(row["prompt_tokens"])
    if not (isinstance(id_, str) and isinstance(domain, str)):
        raise TypeError(f"id={id_!r}, domain={domain!r}")
    return Trace(tuple(rounds), id_, domain, prompt_tokens)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _floats(values: Sequence[Any], widths: Sequence[int]) -> tuple[float, ...]:
    numbers = tuple(float(value) for value in values)
    if len(numbers) not in widths or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{len(numbers)} values of a round's slots, or one that is not finite")
    return numbers
