"""Checkpoints on a full disk, and what resuming refuses."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dspec.errors import UserError
from dspec.methods.dflash import DFlash
from dspec.training.checkpoints import CHECKPOINT, AtomicCheckpointIO, resume_checkpoint
from dspec.training.lit_module import LitModule, logged_values
from dspec.training.resuming import check_same_config, portable


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("write failed")])
def test_full_disk_leaves_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    path = tmp_path / CHECKPOINT
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)

    def full(value: object, file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise error

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"cannot write .*last\.ckpt"):
        AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    monkeypatch.undo()
    assert torch.load(resume_checkpoint(tmp_path)) == {"step": 1}
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]


def test_missing_and_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing to resume: .*last\.ckpt is missing"):
        resume_checkpoint(tmp_path)
    path = tmp_path / CHECKPOINT
    AtomicCheckpointIO().save_checkpoint({"weights": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:-700])
    with pytest.raises(UserError, match=r"cannot be read .*damaged"):
        resume_checkpoint(tmp_path)


def test_resuming_needs_the_same_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json is missing"):
        check_same_config(tmp_path, {})
    config = {"seed": 0, "trainer": {"max_steps": 5}, "resume": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_same_config(tmp_path, config | {"resume": str(tmp_path)})
    with pytest.raises(UserError, match=r"trainer\.max_steps"):
        check_same_config(tmp_path, {"seed": 0, "trainer": {"max_steps": 6}})


def test_a_setting_that_contains_the_folders_name_is_compared_all_the_same(tmp_path: Path) -> None:
    """In a sweep's folder called 1, seed 0 -> 1 and 500 -> 1500 steps once passed."""
    run = tmp_path / "1"
    run.mkdir()

    def config(seed: int, steps: int, where: Path) -> dict[str, object]:
        return {"seed": seed, "trainer": {"max_steps": steps, "dirs": [f"{where}/checkpoints"]}, "logger": f"{where}"}

    (run / "config.json").write_text(json.dumps(portable(config(0, 500, run), run)))
    check_same_config(run, config(0, 500, run))
    for changed, key in ((config(1, 500, run), "seed"), (config(0, 1500, run), r"trainer\.max_steps")):
        with pytest.raises(UserError, match=key):
            check_same_config(run, changed)
    with pytest.raises(UserError, match="logger"):  # a path that only begins alike
        check_same_config(run, config(0, 500, run) | {"logger": f"{run}0"})
    moved = run.rename(tmp_path / "2")
    check_same_config(moved, config(0, 500, moved))  # a folder may be moved


def test_a_run_stored_under_old_module_names_goes_on(tmp_path: Path) -> None:
    """Its config.json names modules that have moved since."""
    old = {
        "data": {"_target_": "data.module.Conversations"},
        "bar": {"_target_": "dspec.training.progress.StepProgress"},
    }
    new = {
        "data": {"_target_": "data.conversations.Conversations"},
        "bar": {"_target_": "dspec.training.progress_callback.StepProgress"},
    }
    (tmp_path / "config.json").write_text(json.dumps(old))
    check_same_config(tmp_path, new)
    with pytest.raises(UserError, match="these keys differ"):
        check_same_config(tmp_path, new | {"data": {"_target_": "data.packed_corpus.PackedCorpus"}})


def test_only_what_lies_in_the_run_folder_moves_with_it(tmp_path: Path) -> None:
    run = tmp_path / "1"
    inside, beside = {"a": f"{run}/x", "b": [f"{run}"], "c": 1}, {"a": f"{run}0", "b": [f"{run}0/x", f"x{run}"], "c": 1}
    assert portable(inside, run) == {"a": "<run>/x", "b": ["<run>"], "c": 1}
    assert portable(beside, run) == beside


def test_ddp_does_not_send_a_teachers_weights() -> None:
    """They are the same on all ranks; sent from rank 0 they would cost a model's size in each step."""
    method = torch.nn.Linear(2, 2)
    method.register_buffer("teacher", torch.ones(3), persistent=False)
    lit = LitModule(method=method, optimizer=torch.optim.SGD, warmup=0.0, cycles=1, seed=0)  # type: ignore[arg-type]
    assert lit._ddp_params_and_buffers_to_ignore == ["method.teacher"]


def test_checkpoints_hold_what_training_changes() -> None:
    """Trained parameters and persistent buffers (a moving average), not what is frozen or made anew."""

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trained, self.frozen = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)
            self.register_buffer("mean", torch.ones(3))
            self.register_buffer("scratch", torch.ones(3), persistent=False)

    def module() -> LitModule:
        return LitModule(method=Half(), optimizer=torch.optim.SGD, warmup=0.0, cycles=1, seed=0)  # type: ignore[arg-type]

    saved = module().state_dict()
    assert saved.keys() == {"method.trained.weight", "method.trained.bias", "method.mean"}
    saved["method.mean"] = torch.full((3,), 7.0)
    loaded = module()
    loaded.load_state_dict(saved)
    assert loaded.method.mean.tolist() == [7, 7, 7]  # type: ignore[attr-defined]
    del saved["method.mean"]
    with pytest.raises(UserError, match="another method"):
        loaded.load_state_dict(saved)


def test_a_step_without_the_targets_distribution_shows_accuracy(toys: SimpleNamespace) -> None:
    """DFlash without TV: no acceptance and no tau in training, both in validation."""
    target = toys.target()
    settings = {"num_anchors": 1, "loss_decay": 4.0, "ce_weight": 1.0, "tv_weight": 0.0, "chunk_mb": 1.0}
    settings["feature_cache_mb"] = 0
    method = DFlash(target=target, draft=toys.draft(target), **settings)
    ones, halves = torch.ones(2), torch.full((2,), 0.5)
    step = logged_values({"loss": (ones[0], ones[0]), "ce": (ones[0], ones[0]), "accuracy": (halves, ones)}, method)
    assert set(method.shown) & step.keys() == {"accuracy_0"}
    assert "expected_tau" not in step
    assert float(logged_values({"accept": (halves, ones)}, method)["expected_tau"]) == 1.75
