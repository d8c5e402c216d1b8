"""The AR base: next-token cross-entropy on packed documents; it trains the target that all other methods share.

Source: none; this is plain language-model training, L = - mean over supervised tokens of log p(x_t | x_<t within the
document).

Legend: B = rows, L = positions, P = supervised positions, D = width.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Generator

from dspec.attention import masks
from dspec.losses import check_chunk, chunked_sum, token_loss
from dspec.method import Batch, LossOutput, Method
from dspec.models.export import export_language_model
from dspec.models.language_model import LanguageModel, require_causal


class ARBase(Method):
    """Trains all weights of the target."""

    export_dtype = torch.bfloat16

    def __init__(self, *, target: LanguageModel, chunk_mb: float) -> None:
        super().__init__()
        self.target, self.chunk_mb = require_causal(target), check_chunk(chunk_mb)
        target.model.requires_grad_(True)

    def loss(self, batch: Batch, *, generators: Sequence[Generator]) -> LossOutput:
        mask = None if batch.document_BL is None else masks.document_causal(batch.document_BL)
        hidden = self.target(batch.ids_BL, positions_BL=batch.positions_BL, mask=mask).hidden_BLD
        chosen = batch.supervised_BL[:, 1:]
        label_P = batch.ids_BL[:, 1:][chosen]
        total, stats = chunked_sum(
            token_loss,
            terms=[(hidden[:, :-1][chosen], self.target.lm_head.weight)],
            constants=[torch.ones_like(label_P, dtype=hidden.dtype), label_P],
            chunk_mb=self.chunk_mb,
        )
        count = chosen.sum()
        return LossOutput(total, count, {"ce": (stats[:, 0].sum(), count), "accuracy": (stats[:, 1].sum(), count)})

    def export(self, folder: Path, *, card: str) -> Path:
        return export_language_model(self.target, folder / "target", dtype=self.export_dtype, card=card)
