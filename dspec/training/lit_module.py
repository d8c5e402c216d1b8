"""The one LightningModule: any Method, one optimizer, a warm-up and cosine schedule, sums pooled over ranks.

Randomness of a row comes from a generator seeded by (seed, batch number, the row's place in the batch of all ranks
together), so a resumed run draws what an unbroken one draws, and several ranks what one would.
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

SHOWN = ("loss", "accept_0", "accuracy_0", "expected_tau")  # on the progress bar
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def ratios(metrics: Metrics) -> dict[str, Tensor]:
    """Each metric's sum over its count; one with an entry a slot becomes name_0, name_1, ..."""
    values: dict[str, Tensor] = {}
    for name, (total, count) in metrics.items():
        ratio = total / count.clamp(min=1e-6)
        values |= {name: ratio} if ratio.dim() == 0 else {f"{name}_{k}": r for k, r in enumerate(ratio)}
    if "accept_0" in values:  # tau if every slot were drawn from its law: 1 + sum of cumulative products
        slots = torch.stack([v for name, v in values.items() if name.startswith("accept_")])
        values["expected_tau"] = 1 + slots.cumprod(0).sum()
    return values


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
        self._validation: dict[str, tuple[Tensor, Tensor]] = {}
        # DDP would send them from rank 0 in every step; they are the same on all ranks (a teacher's copies of weights)
        self._ddp_params_and_buffers_to_ignore = [name for name, _ in self.named_buffers()]

    def setup(self, stage: str) -> None:
        self.method.begin()

    def _loss(self, batch: Batch, *seed: int) -> LossOutput:
        rows = len(batch.ids_BL)
        ranks = self.trainer.world_size  # row r of this rank is row r * ranks + rank of all together (data/module.py)
        seeds = (step_seed(self.seed, *seed, row * ranks + self.global_rank) for row in range(rows))
        return self.method.loss(batch, generators=[torch.Generator().manual_seed(s) for s in seeds])

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
        metrics = {"loss": (output.loss_sum, output.weight)} | output.metrics
        for name, value in ratios({k: self._pooled_pair(v) for k, v in metrics.items()}).items():
            self.log(f"train/{name}", value, prog_bar=name in SHOWN, batch_size=1)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        output = self._loss(batch, 2**31, batch_idx)
        for name, pair in ({"loss": (output.loss_sum, output.weight)} | output.metrics).items():
            total, count = self._pooled_pair(pair)
            before = self._validation.get(name, (torch.zeros_like(total), torch.zeros_like(count)))
            self._validation[name] = before[0] + total, before[1] + count

    def on_validation_epoch_end(self) -> None:
        for name, value in ratios(self._validation).items():
            self.log(f"val/{name}", value)
        self._validation = {}

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.method.after_step()

    def _pooled_pair(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self._pooled(pair[0]), self._pooled(pair[1])

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.method.parameters() if p.requires_grad]
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
