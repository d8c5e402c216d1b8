"""Checkpoints of a run: written atomically, also after the last step, and found again on resume."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from dspec.atomic import atomic_file
from dspec.errors import UserError

CHECKPOINT = Path("checkpoints") / "last.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints atomically; if the disk is full the last good one stays."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        with atomic_file(Path(path)) as scratch:
            try:
                with scratch.open("wb") as file:
                    torch.save(checkpoint, file)
            except RuntimeError as error:  # what torch's zip writer raises on a full disk
                raise OSError(str(error).splitlines()[0]) from error


class FinalCheckpoint(L.Callback):
    """Also saves the last step: a run killed after training resumes after it."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / CHECKPOINT

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.interrupted:
            trainer.save_checkpoint(self.path)


def resume_checkpoint(run_dir: Path) -> str:
    """The checkpoint to resume from; raises UserError if there is none or it cannot be read."""
    path = run_dir / CHECKPOINT
    if not path.is_file():
        raise UserError(f"nothing to resume: {path} is missing; set resume= to the folder of a run that saved one")
    try:
        torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    except Exception as error:  # torch raises many kinds of errors for a corrupt file
        raise UserError(f"{path} cannot be read ({type(error).__name__}); it is damaged, start a new run") from error
    return str(path)
