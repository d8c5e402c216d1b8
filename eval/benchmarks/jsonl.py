"""Custom prompts: JSON Lines with `prompt` and, on every line or none, `answer`.

Verdicts, if there are answers: "exact match" compares the texts without surrounding white space, "last number" the last
number of each, like GSM8K's flexible match. Without answers: speed and acceptance only.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from data.rows import DataRow, Rows, read_jsonl
from dspec.errors import UserError
from eval.benchmarks.base import Extent, FileBenchmark, Item
from eval.benchmarks.gsm8k import flexible_number

_QUALITIES = ("exact match", "last number")


class Jsonl(FileBenchmark):
    def __init__(
        self, *, path: str | None, quality: str, chat: bool, stop: Sequence[str], **extent: Unpack[Extent]
    ) -> None:
        if path is None:
            raise UserError("benchmark=jsonl reads your own prompts: add benchmark.jsonl.path=<file>")
        if quality not in _QUALITIES:
            raise UserError(f"quality={quality} must be one of: {', '.join(_QUALITIES)}")
        if isinstance(stop, str):
            raise UserError(f"stop={stop} must be a list: benchmark.jsonl.stop=['{stop}']")
        data = _read(Path(path).expanduser())
        self.quality = quality if "answer" in data.rows[0] else ""
        self.chat, self.stop = chat, tuple(stop)
        super().__init__(data, key=lambda i, _: f"jsonl/{i:05d}", describes="the prompt of each line", **extent)

    def prompt(self, row: DataRow) -> str:
        return str(row["prompt"])

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        if not self.quality:
            return {}
        wanted = str(self._rows[item.id]["answer"])
        number = flexible_number(wanted)
        found = (answer.strip() == wanted.strip(), number is not None and flexible_number(answer) == number)
        return dict(zip(_QUALITIES, found, strict=True))


def _read(path: Path) -> Rows:
    rows: list[DataRow] = []
    for number, row in read_jsonl(path):
        if not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
            raise UserError(f'{path}, line {number}: "prompt" must be a non-empty string')
        if rows and ("answer" in row) != ("answer" in rows[0]):
            raise UserError(f'{path}, line {number}: give an "answer" on every line or on none')
        if not isinstance(row.get("answer", ""), str | int | float):
            raise UserError(f'{path}, line {number}: "answer" must be a string or a number')
        rows.append(row)
    if not rows:
        raise UserError(f"{path} has no rows; put one prompt on each line")
    return Rows(rows, str(path), hashlib.sha256(path.read_bytes()).hexdigest())
