"""The protocol of a training method: batches in, a weighted loss sum out. It knows no trainer and no config."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Generator, Tensor, nn

Metrics = dict[str, tuple[Tensor, Tensor]]


@dataclass
class LossOutput:
    """The loss is `loss_sum / weight`; both are sums over the local batch, so that ranks can be pooled exactly.

    `metrics` maps a name to (sum, count), scalars or one entry per slot, pooled the same way.
    """

    loss_sum: Tensor
    weight: Tensor
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """Right-padded token rows. B = rows, L = positions."""

    ids_BL: Tensor
    supervised_BL: Tensor  # bool: tokens that are supervised (the response and its end token)
    document_BL: Tensor | None = None  # packed rows: the document of each position (-1 = padding)
    positions_BL: Tensor | None = None  # packed rows: position within the document
    row_numbers: Sequence[int] | None = None  # index of each row among the rows of all batches and ranks

    def to(self, device: object) -> Self:
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: t.to(device) for name, t in held.items() if isinstance(t, Tensor)})  # type: ignore[call-overload]


class Method(nn.Module, ABC):
    """Its parameters with requires_grad are trained; checkpoints hold only those. The trainer casts them to float32
    beforehand (training/models.py)."""

    shown: ClassVar[tuple[str, ...]] = ()  # metrics shown on the progress bar next to the loss
    # the dtype in which a trained target ships, rounded to it before it is evaluated; None: the config's
    export_dtype: ClassVar[torch.dtype | None] = None

    @abstractmethod
    def loss(self, batch: Batch, *, generators: Sequence[Generator]) -> LossOutput:
        """The loss of one micro-batch. All randomness of row b comes from generators[b], so that it depends neither on
        the other rows of the batch nor on the number of ranks. A quantity that follows a low-discrepancy sequence over
        rows, instead of being drawn for each, takes the index in that sequence from the batch's `row_numbers`."""

    def begin(self, data: Any) -> None:
        """Called once before the first step with the data module, whose rows are ready by then."""

    def derived(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Metrics computed from other metrics' values (sum / count over all ranks), logged next to them."""
        return {}

    def after_step(self) -> None:
        """Called after each optimizer step (EMA weights are updated here)."""

    def finish(self) -> None:
        """Called once after training: merges adapters and drops caches, so that the weights are those that are decoded;
        training/models.py then rounds them to the dtype in which they ship."""

    @abstractmethod
    def export(self, folder: Path, *, card: str) -> Path:
        """Writes the trained component under the run folder and returns its path."""
