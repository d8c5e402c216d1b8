"""The judge, and data folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.sandbox.judge import Judge, Verdict
from eval.sandbox.sandbox import Sandbox, available_layers


class RecordingJudge(Judge):
    """Remembers the programs that it was asked about."""

    def __init__(self) -> None:
        limits = {"wall_seconds": 60.0, "cpu_seconds": 60, "memory_mb": 4096, "output_bytes": 1 << 20, "processes": 1}
        super().__init__(Sandbox(**limits, allow_unsafe_code=False))  # type: ignore[arg-type]
        self.programs: list[str] = []

    def passes(self, *, program: str, **job: Any) -> Verdict:
        self.programs.append(program)
        return super().passes(program=program, **job)

    def agrees(self, *, program: str, **job: Any) -> Verdict:
        self.programs.append(program)
        return super().agrees(program=program, **job)


@pytest.fixture
def judge() -> Judge:
    if "landlock" not in available_layers():
        pytest.skip("no Landlock")
    return RecordingJudge()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty $DSPEC_DATA."""
    monkeypatch.setenv("DSPEC_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def write() -> Callable[..., None]:
    def call(path: Path, *rows: dict[str, Any]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    return call
