"""A training method: batches in, a weighted loss sum out. It knows no trainer and no config."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Generator, Tensor, nn

Metrics = dict[str, tuple[Tensor, Tensor]]


@dataclass
class LossOutput:
    """`loss_sum / weight` is the loss; both are sums over the local batch, so that ranks can be pooled exactly.

    `metrics` maps a name to (sum, count), scalars or one entry per slot, pooled the same way.
    """

    loss_sum: Tensor
    weight: Tensor
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """Right-padded token rows. B = rows, L = positions."""

    ids_BL: Tensor
    loss_BL: Tensor  # bool: tokens that are supervised (the response and its end token)
    document_BL: Tensor | None = None  # packed rows: which document a position belongs to (-1 = padding)
    positions_BL: Tensor | None = None  # packed rows: position within the document
    numbers: Sequence[int] | None = None  # of the rows among all that are drawn, over batches and ranks

    def to(self, device: object) -> Self:
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: t.to(device) for name, t in held.items() if isinstance(t, Tensor)})  # type: ignore[call-overload]


class Method(nn.Module, ABC):
    """What is trained are its parameters with requires_grad; checkpoints hold those alone. The trainer casts them to
    float32 beforehand (training/models.py)."""

    shown: ClassVar[tuple[str, ...]] = ()  # logged names that stand on the progress bar, beside the loss

    @abstractmethod
    def loss(self, batch: Batch, *, generators: Sequence[Generator]) -> LossOutput:
        """The loss of one micro-batch. All randomness of row b comes from generators[b], so that what is drawn hangs
        neither on the rows beside it nor on the number of ranks that share them. So do their `numbers`, which
        low-discrepancy sequences over rows, accumulated batches and ranks count by."""

    def begin(self, data: Any) -> None:
        """Called once before the first step, with the data module, whose rows are there by now."""

    def derived(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What follows from the metrics' values (sum / count over all ranks), by name, to be logged beside them."""
        return {}

    def after_step(self) -> None:
        """Called after each optimizer step (a moving average of the weights moves here)."""

    def finish(self) -> None:
        """Called once when training is over: leaves plain weights, as they are decoded and shipped."""

    @abstractmethod
    def export(self, folder: Path, *, card: str) -> Path:
        """Writes the trained component under the run folder and returns where."""
