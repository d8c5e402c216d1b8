"""The stages of the main job: where models lie and in which dtype, what each leaves behind, and what a kill costs."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file

from dspec.calibration.stage import CalibrateSTS
from dspec.methods.dspark import DSpark
from dspec.models.checkpoint import from_pretrained
from dspec.models.draft import Draft
from dspec.models.language_model import embedded_target
from dspec.training.checkpoints import FinalCheckpoint


class StopHereError(Exception):
    """Ends a run from within."""


@pytest.mark.slow
def test_all_models_go_back_to_the_device_of_training(
    small_job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning leaves a module on the CPU; the device to go back to is made another one after the last step."""
    seen: dict[str, Any] = {}

    def moved(self: FinalCheckpoint, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.strategy._root_device = torch.device("meta")  # type: ignore[attr-defined]

    def export(self: DSpark, folder: Path, *, card: str) -> Path:
        tensors = [*self.draft.parameters(), *self.draft.buffers(), *self.target.parameters(), *self.target.buffers()]
        seen["devices"] = {t.device.type for t in tensors}
        seen["dtypes"] = {p.dtype for p in [*self.draft.parameters(), *self.target.parameters()]}
        seen["rotary"] = self.draft.rotary_emb.inv_freq.dtype
        raise StopHereError

    monkeypatch.setattr(FinalCheckpoint, "on_train_end", moved)
    monkeypatch.setattr(DSpark, "export", export)
    with pytest.raises(StopHereError):
        small_job.run(tmp_path / "run", "target.dtype=bfloat16", "trainer.precision=bf16-mixed")
    assert seen == {"devices": {"meta"}, "dtypes": {torch.bfloat16}, "rotary": torch.float32}


@pytest.mark.slow
def test_the_drafter_is_saved_before_calibration_and_calibrated_as_it_ships(
    small_job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def calibrate(self: CalibrateSTS, *, draft: Draft, **unused: Any) -> None:
        seen["dtypes"] = {p.dtype for p in draft.parameters()}
        raise StopHereError

    monkeypatch.setattr(CalibrateSTS, "__call__", calibrate)
    with pytest.raises(StopHereError):
        small_job.run(tmp_path / "run", "target.dtype=bfloat16", "trainer.precision=bf16-mixed")
    saved = load_file(tmp_path / "run" / "draft" / "model.safetensors")
    assert {t.dtype for t in saved.values()} == seen["dtypes"] == {torch.bfloat16}
    trained = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=False)
    assert {t.dtype for t in trained["state_dict"].values()} == {torch.float32}
    assert trained["global_step"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_says_how_to_go_on(number: int, small_job: Any, tmp_path: Path) -> None:
    """Lightning ends on both without a word, on SIGTERM with exit code 0: a scheduler would take it for done."""
    run = tmp_path / "run"
    process = small_job.start(
        "trainer.max_steps=100000",
        f"hydra.run.dir={run}",
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while process.poll() is None and not (run / "checkpoints" / "last.ckpt").exists():
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said.decode().splitlines()[-1] == f"error: interrupted; continue with resume={run}"


@pytest.mark.slow
def test_bfloat16_from_end_to_end(small_job: Any, tmp_path: Path) -> None:
    out = small_job.run(tmp_path / "run", "target.dtype=bfloat16", "trainer.precision=bf16-mixed")
    results = json.loads((out / "results.json").read_text())
    assert results["run"]["dtype"] == "bfloat16"
    assert len(results["rows"]) == 2 * 2 * 2  # decoders, benchmarks, temperatures
    assert len(results["calibration"]["temperatures"]) == 7
    target = embedded_target(dtype="bfloat16", device="cpu")
    draft = from_pretrained(out / "draft", target=target)
    assert draft.fc.weight.dtype == torch.bfloat16
    assert draft.metadata.calibration is not None


@pytest.mark.slow
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_bfloat16_base_learns_and_ships_in_bfloat16(tuning: str, small_job: Any, tmp_path: Path) -> None:
    few = ["decoder=[base_autoregressive,autoregressive,jacobi_single]", "evaluation.temperatures=[0.0]"]
    own = [f"method/tuning={tuning}", "data.row_length=130", "data.batch_size=2", "optimizer.optimizer.lr=1e-4"]
    bf16 = ["target.dtype=bfloat16", "trainer.precision=bf16-mixed"]
    without = ("calibration", "data.batch_size", "data.source.calibration")
    out = small_job.run(tmp_path / "run", *few, *own, *bf16, recipe="jacobi_forcing", without=without)
    saved = load_file(out / "target" / "model.safetensors")
    assert {t.dtype for t in saved.values()} == {torch.bfloat16}
    base = embedded_target(dtype="bfloat16", device="cpu").model.state_dict()
    layer = "model.layers.2.mlp.up_proj.weight"
    changed = (saved[layer] != base[layer]).float().mean()
    assert 0.01 < float(changed) < 1
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert {row["decoder"]["name"] for row in rows} == {"base_autoregressive", "autoregressive", "jacobi_single"}


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


@pytest.mark.slow
def test_killed_at_ten_moments_a_run_ends_as_an_unbroken_one(dspark_run: Path, small_job: Any, tmp_path: Path) -> None:
    """One run, killed ten times on its way, each time gone on with; what was done is not done again."""
    out = tmp_path / "killed"
    checkpoint, samples = out / "checkpoints" / "last.ckpt", out / "samples.jsonl"
    draft, calibration = out / "draft" / "model.safetensors", out / "calibration.json"

    def metrics() -> int:
        return sum(_size(path) for path in out.glob("csv/**/metrics.csv"))

    def grown(path: Path, since: int) -> Callable[[], bool]:
        return lambda: _size(path) > since

    moments: list[Callable[[], Callable[[], bool]]] = [
        lambda: (out / "config.json").is_file,  # before the first step
        lambda: checkpoint.is_file,  # at the first checkpoint
        lambda: draft.is_file,  # training is over
        lambda: calibration.is_file,
        lambda: samples.is_file,
        *[lambda: grown(samples, _size(samples))] * 5,  # five times in the evaluation
    ]
    begun = [f"hydra.run.dir={out}"]
    for number, moment in enumerate(moments):
        reached = moment()
        before = {path: path.read_bytes() for path in (checkpoint, calibration, samples) if path.is_file()}
        assert small_job.kill_when(reached, *begun), f"the run was over before moment {number}"
        if (out / "config.json").is_file():
            begun = [f"resume={out}"] if checkpoint.is_file() else begun
        for path, content in before.items():
            now = path.read_bytes()
            assert now.startswith(content.rpartition(b"\n")[0]) if path == samples else now == content or number < 3
    assert not (out / "results.json").is_file() or "complete" in (out / "results.json").read_text()
    small_job.run(out, f"resume={out}")
    whole, resumed = (load_file(path / "draft" / "model.safetensors") for path in (dspark_run, out))
    assert all((whole[name] == resumed[name]).all() for name in whole)
    assert small_job.stable(out)["rows"] == small_job.stable(dspark_run)["rows"]
    assert small_job.stable(out)["calibration"] == small_job.stable(dspark_run)["calibration"]
