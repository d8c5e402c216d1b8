"""The one LightningModule: any Method, one optimizer, a warm-up and cosine schedule, sums pooled over ranks.

Each row's randomness comes from a generator seeded by (seed, batch number, the row's index in the global batch), so a
resumed run draws what an uninterrupted one does, and several ranks draw what one would. It knows no method's metrics:
the method defines what is derived from them and what the progress bar shows.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from transformers import get_cosine_with_hard_restarts_schedule_with_warmup

from dspec.errors import UserError
from dspec.method import Batch, LossOutput, Method, Metrics
from dspec.seeding import training_row_seed, validation_row_seed

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def logged_values(metrics: Metrics, method: Method) -> dict[str, Tensor]:
    """Each metric's sum divided by its count, and what the method derives from these; per-slot metrics become name_0,
    name_1, ..."""
    ratios = {name: total / count.clamp(min=1e-6) for name, (total, count) in metrics.items()}
    values: dict[str, Tensor] = {}
    for name, ratio in (ratios | method.derived(ratios)).items():
        values |= {name: ratio} if ratio.dim() == 0 else {f"{name}_{k}": r for k, r in enumerate(ratio)}
    return values


class LitModule(L.LightningModule):
    """Trains the parameters of `method` that require gradients; checkpoints hold only those."""

    def __init__(self, *, method: Method, optimizer: OptimizerFactory, warmup: float, cycles: int, seed: int) -> None:
        """`warmup` is a fraction of all optimizer steps; then follow `cycles` cosine cycles from the peak to zero."""
        super().__init__()
        self.method = method
        self.optimizer_factory, self.warmup, self.cycles, self.seed = optimizer, warmup, cycles, seed
        self.batches_seen = 0
        self._validation: dict[str, tuple[Tensor, Tensor]] = {}
        self._validated_rows = 0  # of this validation, over all ranks
        # DDP would broadcast them in every step; they are the same on all ranks (a teacher's weight copies)
        self._ddp_params_and_buffers_to_ignore = [name for name, _ in self.named_buffers()]

    def _global_batch(self, batch: Batch) -> int:
        """How many rows this batch has over all ranks."""
        return int(self._pooled(torch.tensor(len(batch.ids_BL), device=batch.ids_BL.device)))

    def _loss(
        self, batch: Batch, number: int, *, rows_before: int, row_seed: Callable[[int, int, int], int]
    ) -> LossOutput:
        """The method's loss of batch `number`, which follows `rows_before` rows, each row with its own generator."""
        ranks = self.trainer.world_size  # row r of this rank is row r * ranks + rank globally (data/loaders.py)
        rows = [r * ranks + self.global_rank for r in range(len(batch.ids_BL))]
        batch = replace(batch, row_numbers=[rows_before + row for row in rows])
        seeds = [row_seed(self.seed, number, row) for row in rows]
        return self.method.loss(batch, generators=[torch.Generator().manual_seed(s) for s in seeds])

    def on_fit_start(self) -> None:
        if (data := self.trainer.datamodule) is not None:  # type: ignore[attr-defined]
            self.method.begin(data)

    def _pooled(self, value: Tensor) -> Tensor:
        if self.trainer.world_size == 1:
            return value.detach()
        gathered: Tensor = self.all_gather(value.detach())  # type: ignore[assignment]
        return gathered.sum(0)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        rows_before = self.batches_seen * self._global_batch(batch)  # an incomplete batch is dropped (data/loaders.py)
        output = self._loss(batch, self.batches_seen, rows_before=rows_before, row_seed=training_row_seed)
        self.batches_seen += 1
        weight = self._pooled(output.weight).clamp(min=1e-6)
        # DDP averages gradients over ranks: multiplying by world_size gives the gradient of the global ratio
        loss = output.loss_sum * self.trainer.world_size / weight
        metrics = {"loss": (output.loss_sum, output.weight)} | output.metrics
        pooled = {name: self._pooled_pair(pair) for name, pair in metrics.items()}
        for name, value in logged_values(pooled, self.method).items():
            self.log(f"train/{name}", value, prog_bar=name in ("loss", *self.method.shown), batch_size=1)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        output = self._loss(batch, batch_idx, rows_before=self._validated_rows, row_seed=validation_row_seed)
        self._validated_rows += self._global_batch(batch)  # the last batch may have fewer rows, or more
        for name, pair in ({"loss": (output.loss_sum, output.weight)} | output.metrics).items():
            total, count = self._pooled_pair(pair)
            before = self._validation.get(name, (torch.zeros_like(total), torch.zeros_like(count)))
            self._validation[name] = before[0] + total, before[1] + count

    def on_validation_epoch_end(self) -> None:
        for name, value in logged_values(self._validation, self.method).items():
            self.log(f"val/{name}", value)
        self._validation, self._validated_rows = {}, 0

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
        """Names of what training changes: parameters with a gradient, and persistent buffers (EMA weights)."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        buffers = super().state_dict().keys() - parameters.keys()
        return {name for name, p in self.named_parameters() if p.requires_grad} | buffers

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Only what training changes: the frozen target is not written."""
        changing = self._changing()
        return {name: v for name, v in super().state_dict(*args, **kwargs).items() if name in changing}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Rejects a checkpoint whose trained parameters are not this method's."""
        trained = self._changing()
        if strict and trained != set(state_dict):
            odd = sorted(trained ^ set(state_dict))
            raise UserError(f"the checkpoint belongs to another method or draft (missing or foreign: {odd[:3]})")
        return super().load_state_dict(state_dict, strict=False, assign=assign)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["dspec"] = {"batches_seen": self.batches_seen, "torch_rng": torch.get_rng_state()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.batches_seen = checkpoint["dspec"]["batches_seen"]
        torch.set_rng_state(checkpoint["dspec"]["torch_rng"].cpu())
