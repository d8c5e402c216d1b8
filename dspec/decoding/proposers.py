"""Where draft tokens come from: a trained drafter, or n-grams of the text so far (prompt lookup).

Legend: B = rows, J = draft slots, K = block size, D = width, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dspec.attention import masks
from dspec.decoding.sampling import Sampling, draw
from dspec.models.cache import PositionCache
from dspec.models.draft import Draft


@dataclass
class Proposal:
    """Draft tokens [B, J] of which row b's first count_B[b] are meant; their laws, and confidence logits if any."""

    tokens_BJ: Tensor
    count_B: Tensor
    probs_BJV: Tensor | None = None  # None: drafts are deterministic
    confidence_BJ: Tensor | None = None


class Proposer(Protocol):
    """Proposes drafts after each row's anchor, and is told the target's features of verified positions."""

    num_drafts: int
    tap_ids: tuple[int, ...]

    def begin(self, features_BLF: Tensor) -> None:
        """A new batch; features of its right-padded prompts."""
        ...

    def propose(
        self,
        history: Sequence[Sequence[int]],
        *,
        sampling: Sampling,
        uniform_BJ: Tensor | None,
        confidence: bool,
    ) -> Proposal:
        """Drafts after each row's tokens so far (the last one is the anchor)."""
        ...

    def extend(self, features_BLF: Tensor, start_B: Sequence[int]) -> None:
        """Features of positions start_B[b] .. that this round verified."""
        ...

    def select(self, rows: Tensor) -> None: ...

    def settings(self) -> dict[str, Any]: ...


class DraftProposer:
    """Drafts of a DFlash or DSpark drafter: one block pass, then the sequential head slot by slot."""

    def __init__(self, draft: Draft, *, sequential_head: bool = True) -> None:
        """`sequential_head` False leaves the Markov / gated / RNN bias out (the ablation "head off")."""
        self.draft = draft
        self.head = draft.markov_head if sequential_head else None
        self.num_drafts = draft.config.num_drafts
        self.tap_ids = draft.config.target_layer_ids
        self._cache: PositionCache = draft.new_cache()

    def settings(self) -> dict[str, Any]:
        head = self.draft.config.markov_head_type
        return {"drafts": self.num_drafts, "sequential_head": head if self.head is not None else None}

    def begin(self, features_BLF: Tensor) -> None:
        self._cache = self.draft.new_cache()
        self.extend(features_BLF, [0] * features_BLF.shape[0])

    def extend(self, features_BLF: Tensor, start_B: Sequence[int]) -> None:
        self.draft.extend(features_BLF, start_B=start_B, cache=self._cache)

    def select(self, rows: Tensor) -> None:
        self._cache.select(rows)

    def _block(self, anchor_B: Tensor, start_B: Sequence[int]) -> Tensor:
        """Drafter states [B, J, D] of the slots that draft."""
        config, device = self.draft.config, anchor_B.device
        K = config.block_size
        start = torch.tensor(start_B, device=device)
        self._cache.at(start_B, K)
        mask = None  # a single row sees all that its cache holds: context up to the anchor, then its block
        if len(start_B) > 1:
            predicate = masks.draft_blocks(start[:, None], start, block=K)
            mask = masks.dense(predicate, batch=len(start_B), queries=K, keys=self._cache.end, device=device)
        positions = start[:, None] + torch.arange(K, device=device)
        hidden = self.draft(self.draft.block_ids(anchor_B[:, None]), positions, mask=mask, cache=self._cache)
        return hidden[:, config.first_slot :]

    def propose(
        self,
        history: Sequence[Sequence[int]],
        *,
        sampling: Sampling,
        uniform_BJ: Tensor | None,
        confidence: bool,
    ) -> Proposal:
        device = self.draft.fc.weight.device
        anchor = torch.tensor([row[-1] for row in history], device=device)
        hidden = self._block(anchor, [len(row) - 1 for row in history])
        logits = self.draft.lm_head(hidden)
        tokens, probs = self._tokens(anchor, hidden, logits, sampling, uniform_BJ)
        logit = None
        if confidence:
            logit = self.draft.confidence(torch.cat([anchor[:, None], tokens[:, :-1]], 1), hidden)
        count = torch.full_like(anchor, self.num_drafts)
        return Proposal(tokens, count, probs, logit)

    def _tokens(
        self,
        anchor_B: Tensor,
        hidden_BJD: Tensor,
        logits_BJV: Tensor,
        sampling: Sampling,
        uniform_BJ: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        def choose(logits: Tensor, at: Any) -> tuple[Tensor, Tensor | None]:
            if uniform_BJ is None:
                return logits.argmax(-1), None
            probs = sampling.probs(logits)
            return draw(probs, uniform_BJ[:, at]), probs

        if self.head is None:
            return choose(logits_BJV, slice(None))
        tokens, laws, previous, state = [], [], anchor_B, None
        w2_RV = self.head.markov_w2.weight.T
        for k, (hidden, logits) in enumerate(zip(hidden_BJD.unbind(1), logits_BJV.unbind(1), strict=True)):
            code, state = self.head.step(previous, hidden, state)
            previous, law = choose(torch.addmm(logits, code, w2_RV), k)
            tokens.append(previous)
            laws.append(law)
        stacked = torch.stack(tokens, 1)
        return stacked, None if uniform_BJ is None else torch.stack([law for law in laws if law is not None], 1)


class PromptLookupProposer:
    """Copies what followed the latest earlier occurrence of the last n-gram; needs no training (and no drafter)."""

    def __init__(self, *, num_drafts: int, max_ngram: int, device: torch.device) -> None:
        self.num_drafts, self.max_ngram, self._device = num_drafts, max_ngram, device
        self.tap_ids: tuple[int, ...] = ()

    def settings(self) -> dict[str, Any]:
        return {"drafts": self.num_drafts, "max_ngram": self.max_ngram}

    def begin(self, features_BLF: Tensor) -> None:
        pass

    def extend(self, features_BLF: Tensor, start_B: Sequence[int]) -> None:
        pass

    def select(self, rows: Tensor) -> None:
        pass

    def _lookup(self, tokens: Sequence[int]) -> list[int]:
        for n in range(min(self.max_ngram, len(tokens) - 1), 0, -1):
            tail = list(tokens[-n:])
            for start in range(len(tokens) - n - 1, -1, -1):
                if list(tokens[start : start + n]) == tail:
                    return list(tokens[start + n : start + n + self.num_drafts])
        return []

    def propose(
        self,
        history: Sequence[Sequence[int]],
        *,
        sampling: Sampling,
        uniform_BJ: Tensor | None,
        confidence: bool,
    ) -> Proposal:
        found = [self._lookup(row) for row in history]
        padded = [f + [0] * (self.num_drafts - len(f)) for f in found]
        count = torch.tensor([len(f) for f in found], device=self._device)
        return Proposal(torch.tensor(padded, device=self._device), count)
