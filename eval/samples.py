"""The samples of an evaluation, written as they are done: what a run resumes from and all its rows are made of.

samples.jsonl is append-only JSON Lines: a first row with the settings, then one row a sample. The rows of one batch of
prompts (every decoder's) are one write, so that a resumed run times decoders side by side, too. After kill -9 a batch
that is not there whole is cut off and run again; seconds aside, the file then equals an unbroken run's.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspec.decoding.base import Generation, Round
from dspec.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt, one decoder. `seconds` is the whole batch's; `batch` numbers it within benchmark and temperature."""

    benchmark: str
    temperature: float
    decoder: str
    batch: int
    id: str
    text: str
    verdicts: dict[str, bool]
    generation: Generation
    seconds: float

    def to_row(self) -> dict[str, Any]:
        """JSON-ready and flat, without the confidences of rounds."""
        row = asdict(self)
        counts = row.pop("generation") | {"rounds": [[r.drafted, r.accepted, r.valid] for r in self.generation.rounds]}
        seconds = row.pop("seconds")
        return row | counts | {"seconds": seconds}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Sample":
        own = {name: row[name] for name in cls.__dataclass_fields__ if name != "generation"}
        counts = {name: row[name] for name in Generation.__dataclass_fields__}
        counts["rounds"] = [Round(*r) for r in counts["rounds"]]
        return cls(**own, generation=Generation(**counts))


class SampleLog:
    """samples.jsonl of one evaluation."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Takes up what `path` holds. Raises UserError when it was written with other settings or is malformed."""
        self.path = path
        self.samples: list[Sample] = []
        self._settings = json.loads(json.dumps(settings))
        if path.is_file():
            self._take_up(path.read_bytes())

    def _take_up(self, raw: bytes) -> None:
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
        if kept < len(raw):
            os.truncate(self.path, kept)

    def _check(self, settings: Mapping[str, Any]) -> None:
        known = self._settings.keys() | settings.keys()
        if other := sorted(key for key in known if self._settings.get(key) != settings.get(key)):
            raise UserError(f"{self.path} was written with another {', '.join(other)}; resume with the same command")

    def of(self, benchmark: str, temperature: float) -> list[Sample]:
        return [s for s in self.samples if (s.benchmark, s.temperature) == (benchmark, temperature)]

    def add(self, batch: Sequence[Sample]) -> None:
        """Appends one batch. Raises UserError when the disk is full: what was written stays."""
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


def read_samples(path: Path) -> list[Sample]:
    """The samples of a finished evaluation."""
    with path.open(encoding="utf-8") as file:
        return [Sample.from_row(json.loads(line)) for number, line in enumerate(file) if number > 0]
