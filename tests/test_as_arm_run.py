"""AS-ARM's main job on the other backbone and on texts, on a small scale."""

import json
from pathlib import Path
from typing import Any

import pytest

from dspec.methods.as_arm import ASARM
from dspec.models.language_model import load_language_model
from dspec.models.xlnet import XLNet

FEW = (
    "benchmark.filled_problems.count=2",
    "benchmark.filled_functions.count=2",
    "target.hidden_size=32",
    "target.num_layers=2",
    "target.num_heads=2",
    "target.intermediate_size=48",
)
WITHOUT = ("calibration", "benchmark", "data.regeneration", "data.source")


def texts(path: Path) -> Path:
    path.write_text("".join(json.dumps({"text": f"Tom has {i} pens. " * 9}) + "\n" for i in range(60)))
    return path


def the_same_greedy_answers(run: Path) -> None:
    results = json.loads((run / "results.json").read_text())
    assert {row["decoder"]["name"] for row in results["rows"]} == {"any_subset", "assd", "assd_ngram"}
    assert all(row["mismatches"] == 0 for row in results["rows"])


@pytest.mark.slow
def test_xlnet_trains_and_is_evaluated(small_job: Any, tmp_path: Path) -> None:
    source = "data.source={train: {problems: 16, functions: 8}, calibration: {problems: 0}}"
    run = small_job.run(
        tmp_path / "run", *FEW, source, "target=xlnet_tiny", "trainer.precision=bf16-mixed", recipe="as_arm",
        without=WITHOUT,
    )  # fmt: skip
    the_same_greedy_answers(run)
    written = load_language_model(path=str(run / "target"), name="t", dtype="float32", device="cpu", mask_token=None)
    assert isinstance(written, XLNet)


@pytest.mark.slow
def test_texts_train_and_an_interrupted_run_goes_on(
    small_job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = texts(tmp_path / "texts.jsonl")
    own = [*FEW, f"data.source.path={file}", "data.row_length=48", "data.validation_share=0.2"]
    whole = small_job.run(tmp_path / "whole", *own, recipe="as_arm_text", without=WITHOUT)
    the_same_greedy_answers(whole)

    after_step = ASARM.after_step

    def stop(method: ASARM) -> None:
        after_step(method)
        if method.steps_done == 5:  # the last checkpoint is that of step 3
            raise RuntimeError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(ASARM, "after_step", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            small_job.run(tmp_path / "part", *own, recipe="as_arm_text", without=WITHOUT)
    rest = small_job.run(tmp_path / "part", *own, f"resume={tmp_path / 'part'}", recipe="as_arm_text", without=WITHOUT)
    weights = [(run / "target" / "model.safetensors").read_bytes() for run in (whole, rest)]
    assert weights[0] == weights[1]
