"""The protocol of a training method: batches in, a weighted loss sum out. It knows no trainer and no config."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Generator, Tensor

Metrics = dict[str, tuple[Tensor, Tensor]]


@dataclass
class LossOutput:
    """`loss_sum / weight` is the loss; both are sums over the local batch, so that ranks can be pooled exactly.

    `metrics` maps a name to (sum, count), scalars or one entry a slot, pooled the same way.
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

    def to(self, device: object) -> "Batch":
        def move(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.to(device)  # type: ignore[call-overload]

        return Batch(self.ids_BL.to(device), self.loss_BL.to(device), move(self.document_BL), move(self.positions_BL))  # type: ignore[call-overload]


class Method(Protocol):
    """An nn.Module whose parameters with requires_grad are what is trained and checkpointed."""

    def loss(self, batch: Batch, *, generator: Generator) -> LossOutput:
        """The loss of one micro-batch; all randomness comes from `generator`."""
        ...

    def export(self, folder: Path, *, card: str) -> Path:
        """Writes the trained component under the run folder and returns where."""
        ...
