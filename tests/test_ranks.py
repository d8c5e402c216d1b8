"""Two processes under DDP (gloo) against one, at the same batch of all ranks together."""

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


def _same(ranks: Path, one: Path) -> None:
    both, alone = (load_file(path / "draft" / "model.safetensors") for path in (ranks, one))
    assert both.keys() == alone.keys()
    for name, weight in alone.items():
        torch.testing.assert_close(both[name], weight, rtol=2e-3, atol=2e-5, msg=name)
    of_ranks, of_one = (json.loads((path / "results.json").read_text()) for path in (ranks, one))
    assert [row["n"] for row in of_ranks["rows"]] == [row["n"] for row in of_one["rows"]]
    greedy = [
        [row["tokens"] for row in results["rows"] if row["decoder"]["temperature"] == 0]
        for results in (of_ranks, of_one)
    ]
    assert greedy[0] == greedy[1]  # lossless, so whatever the drafter
    assert len(of_ranks["calibration"]["temperatures"]) == 7


@pytest.mark.slow
def test_two_ranks_train_as_one(dspark_run: Path, small_job: Any, tmp_path: Path) -> None:
    out = tmp_path / "ranks"
    assert small_job.start(*RANKS, f"hydra.run.dir={out}").wait(600) == 0
    _same(out, dspark_run)


@pytest.mark.slow
def test_ranks_of_torchrun_share_one_run_folder(dspark_run: Path, small_job: Any, tmp_path: Path) -> None:
    """Without hydra.run.dir each rank asks the clock, at another moment."""
    env = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
    os.environ.update(env)
    assert small_job.start(*RANKS, launcher=TORCHRUN, cwd=tmp_path).wait(600) == 0
    (run,) = (tmp_path / "runs" / "dspark").iterdir()
    _same(run, dspark_run)
