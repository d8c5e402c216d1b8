"""The main job on a small scale: what it leaves behind, and that it repeats itself. Kills: test_stages.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from dspec.models.checkpoint import from_pretrained
from dspec.models.language_model import embedded_target


@pytest.mark.slow
def test_leaves_results_plots_and_a_drafter(dspark_run: Path) -> None:
    results = json.loads((dspark_run / "results.json").read_text())
    assert set(results) == {"schema", "run", "rows", "calibration"}
    assert {"git", "versions", "hardware", "threads", "dtype", "seed", "prompt_policy", "config"} <= set(results["run"])
    rows = results["rows"]
    assert len(rows) == 2 * 2 * 2  # decoders, benchmarks, temperatures
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
    assert {row["method"] for row in rows} == {"AR", "DSpark"}
    assert len(results["calibration"]["temperatures"]) == 7
    names = {path.name for path in (dspark_run / "plots").iterdir()}
    assert {"loss.png", "acceptance_T0.png", "acceptance_T1.png", "reliability.png"} == names
    draft = from_pretrained(dspark_run / "draft", target=embedded_target(dtype="float32", device="cpu"))
    assert draft.metadata.calibration is not None
    assert list(draft.metadata.calibration.temperatures) == results["calibration"]["temperatures"]
    assert draft.metadata.prompt_policy == results["run"]["prompt_policy"]
    assert (dspark_run / "draft" / "README.md").read_text().startswith("---")
    assert json.loads((dspark_run / "draft" / "config.json").read_text())["num_anchors"] == 16


@pytest.mark.slow
def test_same_seed_same_results_other_seed_others(dspark_run: Path, small_job: Any, tmp_path: Path) -> None:
    again = small_job.run(tmp_path / "again")
    assert small_job.stable(again) == small_job.stable(dspark_run)
    other = small_job.run(tmp_path / "other", "seed=1")
    assert small_job.stable(other)["rows"] != small_job.stable(dspark_run)["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dflash", "ar_base"])
def test_other_recipes_run(recipe: str, small_job: Any, tmp_path: Path) -> None:
    skipped = ("calibration", "data.source", "data.regeneration", "data.batch_size")[: 1 if recipe == "dflash" else 4]
    own = {
        "dflash": ["logger=wandb"],
        "ar_base": ["data.counts={problems: 200, functions: 100}", "data.batch_size=2"],
    }
    out = small_job.run(tmp_path / recipe, *own[recipe], recipe=recipe, without=skipped)
    results = json.loads((out / "results.json").read_text())
    assert results["calibration"] is None
    assert {row["benchmark"] for row in results["rows"]} == {"problems", "functions"}
    assert (out / ("target" if recipe == "ar_base" else "draft") / "model.safetensors").is_file()
    assert bool(list(out.glob("wandb/offline-run-*/*.wandb"))) == (recipe == "dflash")  # nothing leaves the machine
