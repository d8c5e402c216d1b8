"""Paired seeds: pooling and the interval."""

import json
import math
from pathlib import Path

import pytest

from dspec.errors import UserError
from eval.compare import compare, interval, pooled_taus


def result(method: str, seed: int, taus: list[tuple[float, int]]) -> dict[str, object]:
    rows = [
        {"method": method, "decoder": {"temperature": 0.0}, "tau": tau, "nfe": n + 2, "nfe_prefill": 2}
        for tau, n in taus
    ]
    return {"run": {"seed": seed}, "rows": [*rows, {**rows[0], "method": "AR", "tau": None}]}


def test_tau_is_pooled_over_rounds() -> None:
    assert pooled_taus([result("a", 0, [(2.0, 30), (4.0, 10)])]) == {("a", 0.0): {0: 2.5}}


def test_interval_is_students() -> None:
    mean, low, high = interval([1.0, 2.0, 3.0])
    assert mean == 2
    assert math.isclose(high - mean, 4.303 / 3**0.5)
    assert math.isclose(mean - low, high - mean)
    with pytest.raises(UserError, match="1 paired"):
        interval([1.0])


def test_compare_reads_run_folders(tmp_path: Path) -> None:
    folders = []
    for method, shift in (("a", 0.5), ("b", 0.0)):
        for seed in range(3):
            folders.append(tmp_path / f"{method}{seed}")
            folders[-1].mkdir()
            text = json.dumps(result(method, seed, [(2.0 + shift + seed / 100, 10)]))
            (folders[-1] / "results.json").write_text(text)
    cells = [str(cell) for column in compare(folders).columns for cell in column.cells]
    assert any("+0.500, 95 % interval +0.500 to +0.500" in cell for cell in cells)
    with pytest.raises(UserError, match=r"results\.json is missing"):
        compare([tmp_path / "none"])
    with pytest.raises(UserError, match="give each once"):
        compare([folders[0], folders[0]])
