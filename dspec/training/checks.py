"""Rejects incompatible settings before anything runs."""

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from dspec.devices import check_bfloat16
from dspec.errors import UserError
from dspec.method import Method
from dspec.training.lit_module import OptimizerFactory


def check_accelerator(name: str) -> None:
    """Raises UserError if a GPU is requested and there is none, before any model is loaded."""
    if name in ("cuda", "gpu") and not torch.cuda.is_available():
        raise UserError(
            f"trainer.accelerator={name}: torch sees no CUDA GPU here; leave hardware=gpu out, or set "
            "trainer.accelerator=cpu"
        )


def check_optimizer(factory: OptimizerFactory) -> None:
    """Raises UserError for settings that the optimizer rejects, before any data are made."""
    try:
        factory([torch.nn.Parameter(torch.zeros(1))])
    except (ValueError, TypeError) as error:
        raise UserError(f"optimizer.optimizer: {error}") from error


def check_trainer(trainer: L.Trainer, method: Method) -> None:
    """Raises UserError for a strategy or precision with which this method could not be trained or saved."""
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        raise UserError(
            f"trainer.strategy={type(trainer.strategy).__name__} is not supported: it shards frozen and trained "
            "weights of two dtypes together, and checkpoints and exports need whole ones; use strategy=ddp (or auto)"
        )
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        raise UserError("ranks are started by command, not spawned or forked: use trainer.strategy=ddp")
    sweep = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    environment = trainer.strategy.cluster_environment if isinstance(trainer.strategy, DDPStrategy) else None
    if sweep and environment is not None and not environment.creates_processes_externally:
        raise UserError(
            "a sweep (-m) cannot start several ranks itself, their settings would get mixed up: run its trials one by "
            "one, or start each under torchrun with a Hydra launcher"
        )
    precision = str(trainer.precision)
    if precision in ("bf16-true", "16-true"):
        raise UserError(f"trainer.precision={precision} has no float32 master weights; use bf16-mixed or 32-true")
    if precision == "16-mixed":  # the losses compute their gradient before a scaler could bring it into float16's range
        raise UserError("trainer.precision=16-mixed loses small gradients; use bf16-mixed or 32-true")
    # trained weights will be float32 (training/models.py)
    dtypes = {torch.promote_types(p.dtype, torch.float32) if p.requires_grad else p.dtype for p in method.parameters()}
    if len(dtypes) > 1 and not precision.endswith("mixed"):
        names = " and ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise UserError(
            f"trainer.precision={precision} cannot multiply {names} weights: use trainer.precision=bf16-mixed, or "
            "target.dtype=float32"
        )
    if "bf16" in precision and trainer.strategy.root_device.type == "cpu":
        check_bfloat16()
