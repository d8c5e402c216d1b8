"""What the trainer needs around Lightning: atomic checkpoints, the loss history, resuming."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dspec.atomic import atomic_file
from dspec.errors import UserError
from dspec.method import Method
from dspec.models.language_model import check_bfloat16

CHECKPOINT = Path("checkpoints") / "last.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """A checkpoint appears whole or not at all; with a full disk the last good one stays."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        with atomic_file(Path(path)) as scratch:
            try:
                with scratch.open("wb") as file:
                    torch.save(checkpoint, file)
            except RuntimeError as error:  # what torch's zip writer makes of a full disk
                raise OSError(str(error).splitlines()[0]) from error


class History(L.Callback):
    """Logged metrics by step, kept in the checkpoint so that a resumed run plots its whole curve."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        step, every = trainer.global_step, int(trainer.log_every_n_steps)  # type: ignore[attr-defined]
        if step % every == 0 and (not self.rows or self.rows[-1]["step"] < step):
            metrics = {name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith("train/")}
            self.rows.append({"step": step, **metrics})

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            metrics = {name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith("val/")}
            self.rows.append({"step": trainer.global_step, **metrics})

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = list(state_dict["rows"])


class FinalCheckpoint(L.Callback):
    """Saves the last step, too: a run that is killed behind its training goes on behind it."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / CHECKPOINT

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.interrupted:
            trainer.save_checkpoint(self.path)


class StepProgress(L.Callback):
    """One bar over all optimizer steps, with loss, acceptance and time left."""

    def __init__(self) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[shown]}"), TimeElapsedColumn())
        self._bar = Progress(TextColumn("training"), *columns, TextColumn("left"), TimeRemainingColumn())
        self._task = self._bar.add_task("training", shown="")

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self._bar.update(self._task, total=trainer.estimated_stepping_batches, completed=trainer.global_step)
            self._bar.start()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        values = {k.removeprefix("train/"): float(v) for k, v in trainer.progress_bar_metrics.items()}
        shown = " ".join(f"{name} {value:.2f}" for name, value in values.items())
        self._bar.update(self._task, completed=trainer.global_step, shown=shown)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._bar.stop()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self._bar.stop()


def resume_checkpoint(run_dir: Path) -> str:
    """The checkpoint to go on from; raises UserError when there is none or it cannot be read."""
    path = run_dir / CHECKPOINT
    if not path.is_file():
        raise UserError(f"nothing to resume: {path} is missing; give resume= the folder of a run that saved one")
    try:
        torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    except Exception as error:  # torch raises many kinds for a torn file
        raise UserError(f"{path} cannot be read ({type(error).__name__}); it is damaged, start the run anew") from error
    return str(path)


def check_same_config(run_dir: Path, config: dict[str, Any]) -> None:
    """Raises UserError naming the keys in which a resumed command differs from the run it resumes."""
    path = run_dir / "config.json"
    if not path.is_file():
        raise UserError(f"nothing to resume: {path} is missing; give resume= the folder of a run")
    before, now = json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(portable(config, run_dir)))
    old, new = (_flat({k: v for k, v in c.items() if k != "resume"}) for c in (before, now))
    if odd := sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k)):
        raise UserError(f"resume= needs the same command; these keys differ from {path}: {', '.join(odd[:5])}")


def portable(config: Any, run_dir: Path) -> Any:
    """The config with paths inside the run folder written as "<run>/...": the folder may be moved, or named anew."""
    if isinstance(config, dict):
        return {k: portable(v, run_dir) for k, v in config.items()}
    if isinstance(config, list):
        return [portable(v, run_dir) for v in config]
    root = str(run_dir.absolute())
    inside = isinstance(config, str) and (config == root or config.startswith(f"{root}/"))
    return f"<run>{config.removeprefix(root)}" if inside else config


def check_trainer(trainer: L.Trainer, method: Method) -> None:
    """Raises UserError for a strategy or precision under which this method would not learn or not be saved."""
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        raise UserError(
            f"trainer.strategy={type(trainer.strategy).__name__} is not supported: it shards frozen and trained "
            "weights of two dtypes together, and checkpoints and exports need whole ones; say strategy=ddp (or auto)"
        )
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        raise UserError("ranks are started by command, not spawned or forked: say trainer.strategy=ddp")
    sweep = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    environment = trainer.strategy.cluster_environment if isinstance(trainer.strategy, DDPStrategy) else None
    if sweep and environment is not None and not environment.creates_processes_externally:
        raise UserError(
            "a sweep (-m) cannot start several ranks itself, their settings would mix: run its trials one by one, or "
            "start each under torchrun with a Hydra launcher"
        )
    precision = str(trainer.precision)
    if precision in ("bf16-true", "16-true"):
        raise UserError(f"trainer.precision={precision} has no float32 weights to learn in; say bf16-mixed or 32-true")
    if precision == "16-mixed":  # the losses take their gradient before a scaler could lift it into float16's range
        raise UserError("trainer.precision=16-mixed loses small gradients; say bf16-mixed or 32-true")
    # what is trained will be float32 (Method.begin)
    dtypes = {torch.promote_types(p.dtype, torch.float32) if p.requires_grad else p.dtype for p in method.parameters()}
    if len(dtypes) > 1 and not precision.endswith("mixed"):
        names = " and ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise UserError(
            f"trainer.precision={precision} cannot multiply {names} weights: say trainer.precision=bf16-mixed, or "
            "target.dtype=float32"
        )
    if "bf16" in precision and trainer.strategy.root_device.type == "cpu":
        check_bfloat16()


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    return {
        k: v for name, inner in value.items() for k, v in _flat(inner, f"{prefix}.{name}" if prefix else name).items()
    }
