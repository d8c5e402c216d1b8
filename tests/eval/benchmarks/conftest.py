"""A judge for trusted programs, and data folders."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


class PlainJudge:
    """Runs programs right here: only for programs that tests wrote. Remembers what it was asked."""

    def __init__(self) -> None:
        self.programs: list[str] = []

    def passes(self, *, program: str, test: str) -> Any:
        self.programs.append(program)
        try:
            exec(f"{program}\n{test}", {"__name__": "judged"})
        except Exception:
            return SimpleNamespace(passed=False)
        return SimpleNamespace(passed=True)

    def agrees(
        self, *, program: str, entry_point: str, inputs: Sequence[Any], expected: Sequence[Any], atol: float
    ) -> Any:
        self.programs.append(program)
        scope: dict[str, Any] = {"__name__": "judged"}
        try:
            exec(program, scope)
            outputs = [scope[entry_point](*deepcopy(x)) for x in inputs]
            passed = all(_equal(o, e, atol) for o, e in zip(outputs, expected, strict=True))
        except Exception:
            passed = False
        return SimpleNamespace(passed=passed)


def _equal(output: Any, expected: Any, atol: float) -> bool:
    import numpy as np

    if output == expected:
        return True
    return bool(atol) and type(output) is type(expected) and bool(np.allclose(output, expected, rtol=1e-7, atol=atol))


@pytest.fixture
def judge() -> PlainJudge:
    return PlainJudge()


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


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Path:
    """$DSPEC_DATA with the real files."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared")
    monkeypatch.setenv("DSPEC_DATA", str(SHARED))
    return SHARED
