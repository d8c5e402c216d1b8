"""The main job of diffusion LMs on a small scale: teacher, then student from its folder; a run that was interrupted."""

import json
from pathlib import Path
from typing import Any

import pytest

from dspec.method import Method
from dspec.methods.d2f import D2F
from dspec.models.language_model import LanguageModel, load_language_model
from dspec.models.training_record import BLOCK_CAUSAL, FULL, TrainingRecord

WITHOUT = ("calibration", "data.regeneration", "data.source", "benchmark.problems.max", "benchmark.functions.max")
FEW = (
    "data.source={train: {problems: 16, functions: 8}, calibration: {problems: 0}}",
    "benchmark.problems.count=1",
    "benchmark.functions.count=1",
    "benchmark.problems.max_new_tokens=16",
    "benchmark.functions.max_new_tokens=16",
    "method.layout.block_size=8",
)


def record(run: Path) -> TrainingRecord:
    path = str(run / "target")
    written = load_language_model(path=path, name="t", dtype="float32", device="cpu", mask_token=None)
    assert isinstance(written, LanguageModel)
    return TrainingRecord.read(written)


def rows(run: Path) -> list[dict[str, Any]]:
    return list(json.loads((run / "results.json").read_text())["rows"])


@pytest.fixture(scope="module")
def teacher(small_job: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = small_job.run(tmp_path_factory.mktemp("teacher") / "run", *FEW, recipe="dllm_base", without=WITHOUT)
    return out


@pytest.mark.slow
def test_a_teacher_is_evaluated_as_it_was_trained(teacher: Path) -> None:
    assert record(teacher) == TrainingRecord(FULL, 8, shift=True)
    found = [(row["decoder"]["name"], row["decoder"]["block_size"]) for row in rows(teacher)]
    assert found == [("diffusion", 8), ("fast_dllm", 8)] * 2
    assert {row["decoder"]["trained_attention"] for row in rows(teacher)} == {FULL}


@pytest.mark.slow
def test_a_student_of_its_folder_and_an_interrupted_run_goes_on(
    teacher: Path, small_job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [*FEW, "target=hf", f"target.path={teacher / 'target'}", "decoder.lopa.branches=2"]
    whole = small_job.run(tmp_path / "whole", *own, recipe="d2f", without=WITHOUT)
    assert record(whole) == TrainingRecord(BLOCK_CAUSAL, 8, shift=True)
    names = ["base_diffusion", "base_fast_dllm", "diffusion", "fast_dllm", "d2f", "lopa"]
    trained = [FULL, FULL, *[BLOCK_CAUSAL] * 4]  # those of the base are the teacher's
    found = [(row["decoder"]["name"], row["decoder"]["trained_attention"]) for row in rows(whole)]
    assert found == list(zip(names, trained, strict=True)) * 2
    steps = 0

    def stop(method: Method) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:  # the last checkpoint is that of step 3
            raise RuntimeError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(D2F, "after_step", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            small_job.run(tmp_path / "part", *own, recipe="d2f", without=WITHOUT)
    rest = small_job.run(tmp_path / "part", *own, f"resume={tmp_path / 'part'}", recipe="d2f", without=WITHOUT)
    weights = [(run / "target" / "model.safetensors").read_bytes() for run in (whole, rest)]
    assert weights[0] == weights[1]
