"""One forward pass of a diffusion LM over rows with windows of their own, and the guesses that it gives.

A row is [cached slots | shared | window of branch 0 | window of branch 1 | ...]: all branches see the shared slots,
none sees another branch (`masks.branch_windows`). Cache slots are in order of computation; `positions` say where in
the text a slot is. A guess for the token at position i is read at position i, or at i - 1 in a model with shifted
logits (one that was an autoregressive model, such as Dream).

Legend: B = rows, L = slots of a pass, N = guesses, D = model width, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dspec.attention import masks
from dspec.decoding.diffusion.block_state import Guess
from dspec.decoding.sampling import SamplingBatch, draw, row_chunks
from dspec.models.cache import PositionCache
from dspec.models.language_model import LanguageModel
from dspec.models.training_record import BLOCK_CAUSAL, FULL
from dspec.precision import widest
from dspec.spans import span

ATTENTIONS: Final = (FULL, BLOCK_CAUSAL)
PROBABILITY: Final = "probability"
ENTROPY: Final = "entropy"
MAX_CONFIDENCE: Final = {PROBABILITY: 1.0, ENTROPY: 0.0}  # the highest confidence that there is


@dataclass(frozen=True, kw_only=True)
class RowInputs:
    """What one row computes: the `shared` positions of its text, then the positions of the `window` once per branch."""

    start: int = 0  # the cache slot of the first
    shared: Sequence[int] = ()
    window: Sequence[int] = ()
    branches: Sequence[int] = ()  # the number of each branch computed here
    texts: Sequence[Sequence[int]] = ()  # the text, then that of each branch: tokens by position
    prompt: int = 0
    block_size: int | None = None  # None: all slots see each other

    @property
    def width(self) -> int:
        return len(self.shared) + len(self.branches) * len(self.window)

    def slots(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Token, position, block and branch (0: shared, b + 1: of branch b) of each."""
        positions = [*self.shared, *(position for _ in self.branches for position in self.window)]
        branches = [0] * len(self.shared) + [1 + b for b in range(len(self.branches)) for _ in self.window]
        tokens = [self.texts[branch][position] for position, branch in zip(positions, branches, strict=True)]
        return tokens, positions, [self._block(position) for position in positions], branches

    def _block(self, position: int) -> int:
        """0: the prompt, or all if there are no blocks."""
        if self.block_size is None or position < self.prompt:
            return 0
        return 1 + (position - self.prompt) // self.block_size

    def index(self, position: int, branch: int) -> int | None:
        """Where the branch has this position; None: not in this pass."""
        if position in self.shared:
            return self.shared.index(position)
        if position not in self.window or branch not in self.branches:
            return None
        return len(self.shared) + self.branches.index(branch) * len(self.window) + self.window.index(position)


def compute(model: LanguageModel, rows: Sequence[RowInputs], *, cache: PositionCache | None) -> Tensor:
    """The hidden states [B, L, D] of all slots; those after a row's last are garbage. Without any slot no pass."""
    B, L, device = len(rows), max(row.width for row in rows), model.device
    if not L:
        return torch.zeros(B, 0, model.hidden_size, dtype=model.dtype, device=device)
    ids, positions, blocks, branches = (torch.zeros(B, L, dtype=torch.long) for _ in range(4))
    ids += model.required_mask_token()
    blocks += masks.PADDING
    for b, row in enumerate(rows):
        for held, values in zip((ids, positions, blocks, branches), row.slots(), strict=True):
            held[b, : row.width] = torch.tensor(values, dtype=torch.long)
    starts = [row.start for row in rows]
    with span("target"):
        return model(
            ids.to(device),
            positions_BL=positions.to(device),
            mask=masks.branch_windows(blocks.to(device), branches.to(device), torch.tensor(starts, device=device)),
            cache=cache,
            start_B=starts if cache is not None else None,
        ).hidden_BLD


def guess(
    model: LanguageModel,
    hidden: Sequence[Tensor],
    samplings: SamplingBatch,
    row_N: Sequence[int],
    uniform_N: Sequence[float],
    *,
    confidence_measure: str,
) -> list[Guess]:
    """The token of each of N hidden states [D]: the most probable, or, with a temperature, one drawn at uniform_N[n]
    from the distribution under the sampling of row_N[n]. The mask token is banned. A guess's confidence is its
    probability or the negative entropy of its distribution; both are rounded to float32."""
    made: list[Guess] = []
    for part in row_chunks(len(hidden), model.vocab_size) if hidden else ():
        rows, uniform = row_N[part], torch.tensor(uniform_N[part], dtype=widest(model.device), device=model.device)
        with span("target LM head"):
            logits = model.logits(torch.stack(list(hidden[part])))
            logits[:, model.required_mask_token()] = -torch.inf
        with span("sampling"):
            probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
            tokens = probs.argmax(-1)
            drawn = [n for n, row in enumerate(rows) if not samplings[row].greedy]
            if drawn:
                probs[drawn] = samplings.probs(logits[drawn], [rows[n] for n in drawn]).to(probs)
                tokens[drawn] = draw(probs[drawn], uniform[drawn])
            probability = probs.gather(-1, tokens[:, None])[:, 0]
            confidence = probability if confidence_measure == PROBABILITY else -torch.special.entr(probs).sum(-1)
            values = (tokens.tolist(), probability.float().tolist(), confidence.float().tolist())
        made += [Guess(*one) for one in zip(*values, strict=True)]
    return made
