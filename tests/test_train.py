"""The main job on a small scale: what it leaves behind, that it repeats itself, and that it resumes bit-exactly."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dspec.models.checkpoint import from_pretrained
from dspec.models.target import embedded_target
from dspec.train import main

SMALL = [
    "data.source.train={problems: 16, functions: 8, stories: 0}",
    "data.source.calibration={problems: 6, functions: 2}",
    "data.regeneration.max_new_tokens=64",
    "data.validation=4",
    "data.batch_size=4",
    "trainer.max_steps=6",
    "trainer.val_check_interval=3",
    "trainer.log_every_n_steps=1",
    "callbacks.checkpoint.every_n_train_steps=3",
    "calibration.max_new_tokens=48",
    "benchmark.problems.count=2",
    "benchmark.problems_unseen.count=2",
    "benchmark.functions.count=2",
    "benchmark.problems.max_new_tokens=64",
    "benchmark.problems_unseen.max_new_tokens=64",
    "benchmark.functions.max_new_tokens=64",
    "evaluation.generate_prompts=2",
    "evaluation.generate_floor=0",
    "evaluation.warmup=1",
    "callbacks/progress=none",
]
TIMINGS = ("tokens_per_second", "speedup", "speedup_vs_base_ar")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run(args: list[str], cache: Path, out: Path) -> Path:
    """Runs the job in this process; returns its run folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSPEC_CACHE", str(cache))
        patch.setattr(sys, "argv", ["dspec.train", *SMALL, *args, f"hydra.run.dir={out}"])
        main()
    return out


def stable(path: Path) -> dict[str, Any]:
    """results.json without what a clock decides and where it lies."""
    results = json.loads((path / "results.json").read_text())
    for row in results["rows"]:
        for name in TIMINGS:
            del row[name]
        del row["interval_95"]["speedup"]
    del results["run"]["ar_check"], results["run"]["config"]["logger"], results["run"]["config"]["callbacks"]
    return results


@pytest.fixture(scope="session")
def dspark_run(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(["recipe=dspark"], cache, tmp_path_factory.mktemp("runs") / "dspark")


@pytest.mark.slow
def test_leaves_results_plots_and_a_drafter(dspark_run: Path) -> None:
    results = json.loads((dspark_run / "results.json").read_text())
    assert set(results) == {"run", "rows", "calibration"}
    assert {"git", "versions", "hardware", "threads", "dtype", "seed", "prompt_policy", "config"} <= set(results["run"])
    rows = results["rows"]
    assert len(rows) == 3 * 3 * 2  # decoders, benchmarks, temperatures
    wanted = (
        "method target decoder benchmark n quality quality_name tau tpf tpf_with_prefill nfe positions_computed tokens "
        "tokens_per_second speedup speedup_vs_base_ar mismatches acceptance"
    ).split()
    for row in rows:
        assert set(wanted) <= set(row)
        assert row["n"] == 2
        if row["decoder"]["name"] == "autoregressive":
            assert (row["tpf"], row["tau"], row["acceptance"]) == (1, None, None)
            assert row["nfe"] == row["tokens"]
        else:
            assert 1 <= row["tau"] <= 8
            assert len(row["acceptance"]["conditional"]) == 7
        assert (row["mismatches"] is None) == (row["decoder"]["temperature"] > 0)
    off = [row["method"] for row in rows if row["decoder"]["name"] == "speculative_head_off"]
    assert set(off) == {"dspark, head off"}
    assert len(results["calibration"]["temperatures"]) == 7
    names = {path.name for path in (dspark_run / "plots").iterdir()}
    assert {"loss.png", "acceptance_T0.png", "acceptance_T1.png", "reliability.png"} == names
    draft = from_pretrained(dspark_run / "draft", target=embedded_target(dtype="float32", device="cpu"))
    assert draft.calibration is not None
    assert list(draft.calibration.temperatures) == results["calibration"]["temperatures"]
    assert draft.prompt_policy == results["run"]["prompt_policy"]
    assert (dspark_run / "draft" / "README.md").read_text().startswith("---")
    assert json.loads((dspark_run / "draft" / "config.json").read_text())["num_anchors"] == 16


@pytest.mark.slow
def test_same_seed_same_results_other_seed_others(dspark_run: Path, cache: Path, tmp_path: Path) -> None:
    again = run(["recipe=dspark"], cache, tmp_path / "again")
    assert stable(again) == stable(dspark_run)
    other = run(["recipe=dspark", "seed=1"], cache, tmp_path / "other")
    assert stable(other)["rows"] != stable(dspark_run)["rows"]


@pytest.mark.slow
def test_kill_and_resume_is_bit_exact(dspark_run: Path, cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    environment = os.environ | {"DSPEC_CACHE": str(cache), "OMP_NUM_THREADS": "1"}  # as in this process
    command = [sys.executable, "-m", "dspec.train", *SMALL, "recipe=dspark"]
    process = subprocess.Popen([*command, f"hydra.run.dir={out}"], env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (out / "checkpoints" / "last.ckpt").is_file() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "results.json").exists()
    run(["recipe=dspark", f"resume={out}"], cache, out)
    whole, resumed = (load_file(path / "draft" / "model.safetensors") for path in (dspark_run, out))
    assert all((whole[name] == resumed[name]).all() for name in whole)
    assert stable(out)["rows"] == stable(dspark_run)["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dflash", "ar_base"])
def test_other_recipes_run(recipe: str, cache: Path, tmp_path: Path) -> None:
    skipped = ("data.source", "data.regeneration", "data.batch_size", "calibration")
    args = [f"recipe={recipe}"]
    with pytest.MonkeyPatch.context() as patch:
        kept = (
            [a for a in SMALL if not a.startswith(skipped)]
            if recipe == "ar_base"
            else [a for a in SMALL if not a.startswith("calibration")]
        )
        patch.setattr(sys.modules[__name__], "SMALL", kept)
        extra = (
            ["data.counts={problems: 200, functions: 100}", "data.batch_size=2"]
            if recipe == "ar_base"
            else ["logger=wandb"]
        )
        out = run([*args, *extra], cache, tmp_path / recipe)
    results = json.loads((out / "results.json").read_text())
    assert results["calibration"] is None
    assert {row["benchmark"] for row in results["rows"]} == {"problems", "problems_unseen", "functions"}
    assert (out / ("target" if recipe == "ar_base" else "draft") / "model.safetensors").is_file()
    assert bool(list(out.glob("wandb/offline-run-*/*.wandb"))) == (recipe == "dflash")  # nothing leaves the machine
