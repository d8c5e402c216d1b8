"""The one LightningModule: any Method, one optimizer, a warm-up and cosine schedule, sums pooled over ranks.

It knows neither the method's inside nor where data comes from. Randomness of a step comes from a generator seeded by
(seed, rank, batch number), so a resumed run draws what an unbroken one draws.
"""

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from transformers import get_cosine_with_hard_restarts_schedule_with_warmup

from dspec.errors import UserError
from dspec.method import Batch, LossOutput, Method, Metrics

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def step_seed(*parts: int) -> int:
    """A well-mixed 64-bit seed from several numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


class LitModule(L.LightningModule):
    """Trains the parameters of `method` that require gradients; checkpoints hold those alone."""

    def __init__(self, *, method: Method, optimizer: OptimizerFactory, warmup: float, cycles: int, seed: int) -> None:
        """`warmup` is a share of all optimizer steps; then come `cycles` cosines from the peak to zero."""
        super().__init__()
        self.method = method
        self.optimizer_factory, self.warmup, self.cycles, self.seed = optimizer, warmup, cycles, seed
        self.batches_seen = 0

    def _loss(self, batch: Batch, *seed: int) -> LossOutput:
        generator = torch.Generator().manual_seed(step_seed(self.seed, self.global_rank, *seed))
        return self.method.loss(batch, generator=generator)

    def _pooled(self, value: Tensor) -> Tensor:
        if self.trainer.world_size == 1:
            return value.detach()
        gathered: Tensor = self.all_gather(value.detach())  # type: ignore[assignment]
        return gathered.sum(0)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        output = self._loss(batch, self.batches_seen)
        self.batches_seen += 1
        weight = self._pooled(output.weight).clamp(min=1e-6)
        # DDP averages gradients over ranks: times world_size makes it the gradient of the global ratio
        loss = output.loss_sum * self.trainer.world_size / weight
        self._log("train", self._pooled(output.loss_sum) / weight, output.metrics)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        output = self._loss(batch, 2**31, batch_idx)
        weight = self._pooled(output.weight).clamp(min=1e-6)
        self._log("val", self._pooled(output.loss_sum) / weight, output.metrics, batch_size=int(weight))

    def _log(self, stage: str, loss: Tensor, metrics: Metrics, batch_size: int = 1) -> None:
        values: dict[str, Tensor] = {"loss": loss}
        for name, (total, count) in metrics.items():
            ratio = self._pooled(total) / self._pooled(count).clamp(min=1e-6)
            if ratio.dim() == 0:
                values[name] = ratio
            else:
                values |= {f"{name}_{k}": r for k, r in enumerate(ratio)}
        if "accept_0" in values:  # tau if every slot were drawn from its law: 1 + sum of cumulative products
            slots = torch.stack([v for name, v in values.items() if name.startswith("accept_")])
            values["expected_tau"] = 1 + slots.cumprod(0).sum()
        shown = ("loss", "accept_0", "accuracy_0", "expected_tau")
        for name, value in values.items():
            on_bar = stage == "train" and name in shown
            self.log(f"{stage}/{name}", value, prog_bar=on_bar, batch_size=batch_size, on_epoch=stage == "val")

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.method.parameters() if p.requires_grad]  # type: ignore[attr-defined]
        optimizer = self.optimizer_factory(parameters)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = get_cosine_with_hard_restarts_schedule_with_warmup(
            optimizer, round(self.warmup * steps), steps, num_cycles=self.cycles
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _changing(self) -> set[str]:
        """Names of what training changes: parameters with a gradient, and persistent buffers (a moving average)."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        buffers = super().state_dict().keys() - parameters.keys()
        return {name for name, p in self.named_parameters() if p.requires_grad} | buffers

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Only what training changes: the frozen target is not written."""
        changing = self._changing()
        return {name: v for name, v in super().state_dict(*args, **kwargs).items() if name in changing}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Refuses a checkpoint whose trained parameters are not this method's."""
        trained = self._changing()
        if strict and trained != set(state_dict):
            odd = sorted(trained ^ set(state_dict))
            raise UserError(f"the checkpoint is of another method or draft (missing or foreign: {odd[:3]})")
        return super().load_state_dict(state_dict, strict=False, assign=assign)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["dspec"] = {"batches_seen": self.batches_seen, "torch_rng": torch.get_rng_state()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.batches_seen = checkpoint["dspec"]["batches_seen"]
        torch.set_rng_state(checkpoint["dspec"]["torch_rng"].cpu())
