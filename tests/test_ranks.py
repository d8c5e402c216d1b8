"""Two processes under DDP (gloo) against one, at the same batch of all ranks together.

With SGD: Adam divides by the gradient's size, and makes steps of what is rounding alone.
"""

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
RANKS = ("trainer.devices=2", "trainer.strategy=ddp", "data.batch_size=2")
SGD = ("optimizer.optimizer._target_=torch.optim.SGD", "~optimizer.optimizer.betas", "optimizer.optimizer.lr=0.5")
FEW = ("evaluation.temperatures=[0.0]", "decoder=[autoregressive,speculative]")


@pytest.fixture(scope="module")
def one(small_job: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_job.run(tmp_path_factory.mktemp("one") / "run", *SGD, *FEW)


def _metrics(run: Path) -> list[dict[str, float]]:
    (path,) = run.glob("csv/**/metrics.csv")
    with path.open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def _same(ranks: Path, one: Path) -> None:
    both, alone = (load_file(path / "draft" / "model.safetensors") for path in (ranks, one))
    torch.testing.assert_close(both, alone, rtol=1e-5, atol=1e-6)
    metrics, expected = _metrics(ranks), _metrics(one)
    assert len(metrics) == len(expected) == 8  # six steps, two validations
    for a, b in zip(metrics, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-2, abs=1e-5)
    of_ranks, of_one = (json.loads((path / "results.json").read_text()) for path in (ranks, one))
    assert [row["tokens"] for row in of_ranks["rows"]] == [row["tokens"] for row in of_one["rows"]]  # lossless
    assert of_ranks["calibration"]["temperatures"] == pytest.approx(of_one["calibration"]["temperatures"], rel=0.1)


@pytest.mark.slow
def test_two_ranks_train_as_one(one: Path, small_job: Any, tmp_path: Path) -> None:
    out = tmp_path / "ranks"
    assert small_job.start(*RANKS, *SGD, *FEW, f"hydra.run.dir={out}").wait(600) == 0
    _same(out, one)


@pytest.mark.slow
def test_ranks_of_torchrun_share_one_run_folder(one: Path, small_job: Any, tmp_path: Path) -> None:
    """Without hydra.run.dir each rank asks the clock, at another moment."""
    root = str(Path(__file__).parents[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
        assert small_job.start(*RANKS, *SGD, *FEW, launcher=TORCHRUN, cwd=tmp_path).wait(600) == 0
    (run,) = (tmp_path / "runs" / "dspark").iterdir()
    _same(run, one)
