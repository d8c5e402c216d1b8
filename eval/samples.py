"""The samples of an evaluation, written as soon as they are done: runs resume from them, and all rows derive from them.

samples.jsonl is append-only JSON Lines: a first row with the settings, then one row per sample. The rows of one batch
of prompts (from every decoder) are a single write, so that a resumed run also times decoders together. After kill -9 an
incomplete batch is cut off and run again; timings aside, the file then equals an uninterrupted run's. Only one run at a
time writes it, and it resumes only from answers to its own prompts.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dspec.config.leaves import flat
from dspec.decoding.generation import Generation, Pass
from dspec.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One decoder's answer to one prompt. `seconds` is the whole batch's, `batch` its index within benchmark and
    temperature."""

    benchmark: str
    temperature: float
    decoder: str
    batch: int
    id: str
    prompt_sha256: str  # `digest` of the prompt's token ids
    text: str
    verdicts: dict[str, bool]
    generation: Generation
    seconds: float
    scores: dict[str, float] = field(default_factory=dict)  # continuous ones, by name

    def to_row(self) -> dict[str, Any]:
        """JSON-ready and flat, without the confidences of rounds."""
        row = {name: getattr(self, name) for name in self.__dataclass_fields__}
        trace, seconds = vars(row.pop("generation")), row.pop("seconds")
        return row | trace | {"passes": [p.to_row() for p in trace["passes"]], "seconds": seconds}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Sample":
        fields = {name: row[name] for name in cls.__dataclass_fields__ if name not in ("generation", "scores")}
        trace = {name: row[name] for name in Generation.__dataclass_fields__}
        trace["passes"] = [Pass(*p) for p in trace["passes"]]
        return cls(**fields, scores=row.get("scores", {}), generation=Generation(**trace))  # older files have none


def digest(ids: Sequence[int]) -> str:
    """Short sha256 of token ids."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:16]


class SampleLog:
    """samples.jsonl of one evaluation. A context manager: inside, no other run can write the file."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """`settings` is everything that samples depend on, except the prompts and their number (`limit`)."""
        self.path = path
        self.samples: list[Sample] = []
        self._settings = json.loads(json.dumps(settings))
        self._lock = FileLock(f"{path}.lock")

    def __enter__(self) -> "SampleLog":
        """Reads the existing file. Raises UserError if another run is writing it, if it was written with other
        settings, or is malformed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(
                f"another run is writing {self.path}: wait for it, or give this run its own folder"
            ) from error
        try:
            if self.path.is_file():
                self._take_up(self.path.read_bytes())
        except UserError:
            self._lock.release()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        self._lock.release()

    def _take_up(self, raw: bytes) -> None:
        if raw and not raw.startswith(b'{"settings"'[: len(raw)]):
            raise UserError(f"{self.path} was not written by an evaluation; move the file away")
        lines = raw[: raw.rfind(b"\n") + 1].splitlines(keepends=True)
        kept, pending = 0, 0  # bytes of whole batches, bytes of the batch being read
        batch: list[Sample] = []
        for number, line in enumerate(lines, 1):
            pending += len(line)
            try:
                row = json.loads(line)
                if number > 1:
                    batch.append(Sample.from_row(row))
                    if len(batch) < row["batch_rows"]:
                        continue
                else:
                    self._check(row["settings"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{self.path}, line {number} is malformed ({error!r}); move the file away") from error
            self.samples += batch
            kept, pending, batch = kept + pending, 0, []
        check_unique(self.samples, self.path)
        if kept < len(raw):
            os.truncate(self.path, kept)

    def _check(self, settings: Mapping[str, Any]) -> None:
        old, new = _without_limits(settings), _without_limits(self._settings)
        if other := sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key)):
            raise UserError(
                f"{self.path} was written with another {', '.join(other[:5])}; resume with the same command, or "
                "evaluate in a new folder"
            )

    def check_prompts(self, benchmark: str, prompts: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Raises UserError unless the existing answers are to the first of these (id, token ids), in order."""
        answered = list(dict.fromkeys((s.id, s.prompt_sha256) for s in self.samples if s.benchmark == benchmark))
        asked = [(name, digest(ids)) for name, ids in prompts]
        if len(answered) > len(asked):
            raise UserError(
                f"{self.path} has answers to {len(answered)} prompts of {benchmark}, now there are {len(asked)}: the "
                f"limit can grow, not shrink; set limit={len(answered)} or more"
            )
        if other := [old[0] for old, new in zip(answered, asked, strict=False) if old != new]:
            raise UserError(
                f"{self.path} has answers to other prompts of {benchmark} than this run's (first: {other[0]}): "
                "restore the data, or evaluate in a new folder"
            )

    def select(self, benchmark: str, temperature: float) -> list[Sample]:
        return [s for s in self.samples if (s.benchmark, s.temperature) == (benchmark, temperature)]

    def add(self, batch: Sequence[Sample]) -> None:
        """Appends one batch. Raises UserError if the disk is full: what was written stays."""
        rows = [s.to_row() for s in batch]
        rows = [row | {"batch_rows": len(rows), "seconds": row.pop("seconds")} for row in rows]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                first = [{"settings": self._settings}] if file.tell() == 0 else []
                file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in [*first, *rows]))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path} ({error.strerror}); free space and resume") from error
        self.samples += batch


def _without_limits(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by dotted path, without the number of prompts, which may grow."""
    return {path: leaf for path, leaf in flat(settings).items() if path.rpartition(".")[2] != "limit"}


def check_unique(samples: Sequence[Sample], path: Path) -> None:
    """Raises UserError if a decoder answers a prompt twice: two runs have written into one folder."""
    seen: set[tuple[str, float, str, str]] = set()
    for s in samples:
        key = (s.benchmark, s.temperature, s.decoder, s.id)
        if key in seen:
            raise UserError(
                f"{path} has two answers of {s.decoder} to {s.id} (T={s.temperature:g}): two runs wrote into it; "
                "evaluate again in a new folder"
            )
        seen.add(key)


def read_samples(path: Path) -> list[Sample]:
    """The samples of a finished evaluation. Raises UserError for a malformed or duplicate row."""
    samples = []
    for number, line in enumerate(path.read_bytes().splitlines()[1:], 2):
        try:
            samples.append(Sample.from_row(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}, line {number} is malformed ({error!r}); evaluate again") from error
    check_unique(samples, path)
    return samples
