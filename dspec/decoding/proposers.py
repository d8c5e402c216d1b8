"""Where draft tokens come from: a trained drafter, or n-grams of the text so far (prompt lookup).

Legend: B = rows, J = draft slots, K = block size, D = width, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dspec.attention import masks
from dspec.decoding.sampling import SamplingBatch, draw
from dspec.decoding.state import PerRow
from dspec.errors import UserError
from dspec.models.cache import PositionCache
from dspec.models.draft import Draft
from dspec.models.target_model import lm_logits
from dspec.spans import span


@dataclass
class Proposal:
    """Draft tokens [B, J], of which row b uses the first count_B[b]; the distributions they were drawn from, and
    confidence logits if any."""

    tokens_BJ: Tensor
    count_B: Tensor
    probs_BJV: Tensor | None = None  # None: drafts are deterministic
    confidence_BJ: Tensor | None = None
    passes: int = 0  # forward passes of the drafter


class Proposer(Protocol):
    """Proposes drafts after each row's anchor, and receives the target's features of verified positions.

    Its `memory` of the rows in flight is a StatePart (state.py) that the caller holds.
    """

    num_drafts: int
    tap_ids: tuple[int, ...]
    max_positions: int | None  # of prompt and answer together; None: any number

    def start(self, features_BLF: Tensor) -> Any:
        """The memory of new rows, given the features of their right-padded prompts."""
        ...

    def propose(
        self,
        memory: Any,
        text_B: Sequence[Sequence[int]],
        *,
        samplings: SamplingBatch,
        uniform_BJ: Tensor | None,
        confidence: bool,
    ) -> Proposal:
        """Drafts after each row's text so far (its last token is the anchor); `uniform_BJ` None means greedy."""
        ...

    def extend(self, memory: Any, features_BLF: Tensor, start_B: Sequence[int]) -> None:
        """Takes the features of the positions that this round verified, start_B[b] onwards."""
        ...

    def settings(self) -> dict[str, Any]: ...


class DraftProposer:
    """Drafts from a DFlash or DSpark drafter: one block pass, then the sequential head slot by slot."""

    def __init__(self, draft: Draft, *, sequential_head: bool = True, refinement_passes: int = 0) -> None:
        """`sequential_head=False` leaves out the Markov / gated / RNN bias (the "head off" ablation).

        Each refinement pass replaces the block's mask tokens with its greedy tokens and runs the block again. Drafters
        are trained on mask tokens only, so it costs acceptance (from tau 6.2 to 2.5 in the TPU report on DFlash); the
        output stays lossless, since the inputs of the last pass are a function of the context alone.
        """
        if refinement_passes < 0:
            raise UserError(f"decoder.speculative.refinement_passes={refinement_passes} must be at least 0")
        self.draft, self.refinement_passes = draft, refinement_passes
        self.head = draft.markov_head if sequential_head else None
        self.num_drafts = draft.config.num_drafts
        self.tap_ids = draft.config.target_layer_ids
        self.max_positions = draft.config.transformer.max_position_embeddings

    @property
    def plain(self) -> bool:
        """Whether it drafts as in training and calibration: with the drafter's sequential head if it has one, and
        without refinement."""
        return self.head is self.draft.markov_head and not self.refinement_passes

    def settings(self) -> dict[str, Any]:
        head = self.draft.config.markov_head_type
        settings = {"drafts": self.num_drafts, "sequential_head": head if self.head is not None else None}
        return settings | ({"refinement_passes": self.refinement_passes} if self.refinement_passes else {})

    def start(self, features_BLF: Tensor) -> PositionCache:
        cache = self.draft.new_cache()
        self.extend(cache, features_BLF, [0] * features_BLF.shape[0])
        return cache

    def extend(self, memory: PositionCache, features_BLF: Tensor, start_B: Sequence[int]) -> None:
        with span("draft context"):
            self.draft.extend(features_BLF, start_B=start_B, cache=memory)

    def _block(self, cache: PositionCache, ids_BK: Tensor, start_B: Sequence[int]) -> Tensor:
        """Drafter states [B, J, D] of the slots that draft."""
        config, device = self.draft.config, ids_BK.device
        K = config.block_size
        start, window = torch.tensor(start_B, device=device), cache.window(start_B, K)
        mask = None  # a single row sees its whole cache: context up to the anchor, then its block
        if len(start_B) > 1:
            predicate = masks.draft_blocks(start[:, None], start, block=K)
            mask = masks.dense(predicate, batch=len(start_B), queries=K, keys=window.end, device=device)
        positions = start[:, None] + torch.arange(K, device=device)
        hidden = self.draft(ids_BK, positions, mask=mask, window=window)
        return hidden[:, config.first_slot :]

    def _pass(self, cache: PositionCache, ids_BK: Tensor, start_B: Sequence[int]) -> tuple[Tensor, Tensor]:
        with span("draft"):
            hidden = self._block(cache, ids_BK, start_B)
        with span("draft LM head"):
            return hidden, lm_logits(self.draft.lm_head, hidden)

    def propose(
        self,
        memory: PositionCache,
        text_B: Sequence[Sequence[int]],
        *,
        samplings: SamplingBatch,
        uniform_BJ: Tensor | None,
        confidence: bool,
    ) -> Proposal:
        device = self.draft.fc.weight.device
        anchor = torch.tensor([text[-1] for text in text_B], device=device)
        starts = [len(text) - 1 for text in text_B]
        ids = self.draft.block_ids(anchor[:, None])
        hidden, logits = self._pass(memory, ids, starts)
        for _ in range(self.refinement_passes):
            guess, _ = self._tokens(anchor, hidden, logits, samplings, None)
            ids = torch.cat([anchor[:, None], guess[:, : ids.shape[1] - 1]], 1)  # each position holds its greedy token
            hidden, logits = self._pass(memory, ids, starts)
        with span("sampling" if self.head is None else "sequential head"):
            tokens, probs = self._tokens(anchor, hidden, logits, samplings, uniform_BJ)
        logit = None
        if confidence:
            with span("confidence head"):
                logit = self.draft.confidence(torch.cat([anchor[:, None], tokens[:, :-1]], 1), hidden)
        count = torch.full_like(anchor, self.num_drafts)
        return Proposal(tokens, count, probs, logit, passes=1 + self.refinement_passes)

    def _tokens(
        self,
        anchor_B: Tensor,
        hidden_BJD: Tensor,
        logits_BJV: Tensor,
        samplings: SamplingBatch,
        uniform_BJ: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        def choose(logits: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor | None]:
            if uniform is None:
                return logits.argmax(-1), None
            probs = samplings.probs(logits)
            return draw(probs, uniform), probs

        if self.head is None:
            return choose(logits_BJV, uniform_BJ)
        tokens, drawn_from, previous, state = [], [], anchor_B, None
        w2_RV = self.head.markov_w2.weight.T
        for k, (hidden, logits) in enumerate(zip(hidden_BJD.unbind(1), logits_BJV.unbind(1), strict=True)):
            code, state = self.head.step(previous, hidden, state)
            uniform_B = None if uniform_BJ is None else uniform_BJ[:, k]
            previous, probs = choose(torch.addmm(logits, code, w2_RV), uniform_B)
            tokens.append(previous)
            drawn_from += [] if probs is None else [probs]
        return torch.stack(tokens, 1), torch.stack(drawn_from, 1) if drawn_from else None


class NGrams:
    """The index after the latest occurrence of each n-gram of a growing text, except for the n-grams at its end."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._end: dict[tuple[int, ...], int] = {}
        self._read = 0  # n-grams with an end index up to this one are in `_end`

    def following(self, text: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens after the latest earlier occurrence of the text's last n-gram, longest n first."""
        sizes = range(min(self._longest, len(text) - 1), 0, -1)
        for n in sizes:
            first = max(0, self._read + 1 - n)
            grams = zip(*(text[first + i : len(text) - n + i] for i in range(n)), strict=True)
            self._end.update(zip(grams, range(first + n, len(text)), strict=True))
        self._read = len(text) - 1
        for n in sizes:
            if (end := self._end.get(tuple(text[-n:]), 0)) > 0:
                return list(text[end : end + count])
        return []


class PromptLookupProposer:
    """Copies the tokens after the latest earlier occurrence of the text's last n-gram; needs no drafter."""

    def __init__(self, *, num_drafts: int, max_ngram: int, device: torch.device) -> None:
        if num_drafts < 1 or max_ngram < 1:
            raise UserError(f"prompt lookup needs num_drafts and max_ngram >= 1, not {num_drafts} and {max_ngram}")
        self.num_drafts, self.max_ngram, self._device = num_drafts, max_ngram, device
        self.tap_ids: tuple[int, ...] = ()
        self.max_positions: int | None = None

    def settings(self) -> dict[str, Any]:
        return {"drafts": self.num_drafts, "max_ngram": self.max_ngram}

    def start(self, features_BLF: Tensor) -> PerRow[NGrams]:
        return PerRow(NGrams(self.max_ngram) for _ in range(len(features_BLF)))

    def extend(self, memory: PerRow[NGrams], features_BLF: Tensor, start_B: Sequence[int]) -> None:
        pass

    def propose(
        self,
        memory: PerRow[NGrams],
        text_B: Sequence[Sequence[int]],
        *,
        samplings: SamplingBatch,
        uniform_BJ: Tensor | None,
        confidence: bool,
    ) -> Proposal:
        with span("lookup"):
            found = [ngrams.following(text, self.num_drafts) for ngrams, text in zip(memory, text_B, strict=True)]
        padded = [f + [0] * (self.num_drafts - len(f)) for f in found]
        count = torch.tensor([len(f) for f in found], device=self._device)
        return Proposal(torch.tensor(padded, device=self._device), count)
