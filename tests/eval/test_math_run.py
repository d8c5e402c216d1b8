"""eval.run on MATH-500: a model that is slow between two verdicts gets those of a fast one."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from data.rows import math500_rows
from eval.benchmarks.competition import Math500
from eval.sandbox import function_process

PAUSES = (1, 2, 20)  # before these verdicts


@pytest.mark.slow
@pytest.mark.usefixtures("real_data")
def test_a_pause_between_verdicts_changes_none(
    eval_run: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The process's alarm is shortened to a second, the pauses are a little longer."""
    pytest.importorskip("math_verify")
    rows = math500_rows().rows[:40]
    answers = [other["answer"] if i % 4 == 3 else f"{row['answer']}+0" for i, (row, other) in enumerate(pairs(rows))]
    scripted({r["problem"]: f"\\boxed{{{a}}}" for r, a in zip(rows, answers, strict=True)})

    def verdicts() -> list[dict[str, bool]]:
        found = eval_run("benchmark=math500", "limit=40")
        assert len(found.samples) == 40
        return [sample["verdicts"] for sample in found.samples]

    fast = verdicts()
    shutil.rmtree(tmp_path / "run")
    monkeypatch.setattr(function_process, "_SLACK_S", -9)  # of ten seconds
    judged, counted = Math500.verdicts, iter(range(40))

    def paused(self: Math500, *args: Any) -> dict[str, bool]:
        if next(counted) in PAUSES:
            time.sleep(1.2)
        return judged(self, *args)

    monkeypatch.setattr(Math500, "verdicts", paused)
    assert verdicts() == fast
    assert next(counted, None) is None
    assert [fast[i]["equivalent"] for i in PAUSES] == [True, True, True]  # a lost question would show
    assert 0 < sum(v["equivalent"] for v in fast) < 40
    assert not any(v["exact match"] or v["undecided"] for v in fast)  # all were asked, and answered


def pairs(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each row with the next one."""
    return list(zip(rows, [*rows[1:], rows[0]], strict=True))
