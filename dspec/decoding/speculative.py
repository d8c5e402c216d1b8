"""Speculative decoding: draft a block, verify it in one target pass, keep the accepted prefix and one more token.

Greedy output equals greedy autoregressive decoding token for token; sampled output has the target's law exactly
(rejection sampling, sampling.py). With a confidence threshold a round sends only the leading slots whose confidence
reaches it: slot k's confidence reads draft tokens before k only, so the output law is unchanged.

Legend: B = rows, J = draft slots, V = vocabulary.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspec.calibration.sts import Calibration, calibrated_confidence
from dspec.decoding.base import Ends, Generation, Limits, Prefill, prefill, record, rows_to_keep
from dspec.decoding.proposers import Proposal, Proposer
from dspec.decoding.sampling import Sampling, row_chunks, verify_greedy, verify_sampled
from dspec.errors import UserError
from dspec.models.language_model import LanguageModel
from dspec.spans import span


class Speculative:
    """Lossless speculative decoding of any batch with any proposer."""

    lossless = True

    def __init__(
        self,
        *,
        target: LanguageModel,
        proposer: Proposer,
        sampling: Sampling,
        confidence_threshold: float = 0.0,
        calibration: Calibration | None = None,
        record_confidence: bool = False,
    ) -> None:
        """`confidence_threshold` 0 verifies every draft. `calibration` is used when it was fitted at this sampling,
        else refused with a warning that names both settings; confidences then stay raw."""
        if not 0 <= confidence_threshold < 1:
            raise UserError(f"decoder.confidence_threshold={confidence_threshold} must lie in [0, 1)")
        self.target, self.proposer, self.sampling = target, proposer, sampling
        self.confidence_threshold, self.record_confidence = confidence_threshold, record_confidence
        self.temperatures: tuple[float, ...] | None = None
        if calibration is not None and confidence_threshold > 0:
            if calibration.applies_to(sampling.temperature, sampling.top_p):
                self.temperatures = calibration.temperatures
            else:
                warnings.warn(
                    f"STS temperatures were fitted at temperature={calibration.temperature}, "
                    f"top_p={calibration.top_p}; this decoder samples at temperature={sampling.temperature}, "
                    f"top_p={sampling.top_p}: they are not used, confidences stay raw",
                    stacklevel=2,
                )

    def settings(self) -> dict[str, Any]:
        own: dict[str, Any] = {"confidence_threshold": self.confidence_threshold}
        if self.confidence_threshold:
            own["sts"] = self.temperatures is not None
        return self.sampling.to_dict() | self.proposer.settings() | own

    @torch.inference_mode()
    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        seeds: Sequence[int],
        ends: Ends | None = None,
    ) -> list[Generation]:
        limits = Limits(max_new_tokens=max_new_tokens, stop_ids=stop_ids, ends=ends)
        self._check_length(max(map(len, prompts), default=0), max_new_tokens)
        self.target.tap(self.proposer.tap_ids)
        state = prefill(self.target, prompts, sampling=self.sampling, limits=limits, seeds=seeds)
        live = list(state.generations)
        history = [[*prompt, anchor] for prompt, anchor in zip(prompts, state.anchors_B, strict=True)]
        with span("prefill"):
            self.proposer.begin(state.features_BLF)
        while any(not g.done(limits) for g in live):
            if (keep := rows_to_keep([not g.done(limits) for g in live])) is not None:
                rows = torch.tensor(keep, device=self.target.device)
                for part in (state.cache, state.streams, self.proposer):
                    part.select(rows)
                live, history = [live[i] for i in keep], [history[i] for i in keep]
            self._round(state, live, history, limits)
        return state.generations

    def _check_length(self, prompt: int, new: int) -> None:
        room = self.proposer.max_positions
        if room is not None and prompt + new > room:
            raise UserError(
                f"a prompt of {prompt} tokens and max_new_tokens={new} exceed the drafter's {room} positions; shorten "
                "the prompt, lower max_new_tokens, or take a drafter trained for longer texts"
            )

    def _round(
        self,
        state: Prefill,
        live: list[Generation],
        history: list[list[int]],
        limits: Limits,
    ) -> None:
        J, greedy = self.proposer.num_drafts, self.sampling.greedy
        uniform = None if greedy else state.streams.take(2 * J + 1)
        proposal = self.proposer.propose(
            history,
            sampling=self.sampling,
            uniform_BJ=None if uniform is None else uniform[:, :J],
            confidence=self.record_confidence or self.confidence_threshold > 0,
        )
        if self.confidence_threshold > 0:
            self._truncate(proposal)
        counts = proposal.count_B.tolist()
        sent = max(counts)  # the pass is as wide as the longest row's draft
        draft = proposal.tokens_BJ[:, :sent]
        anchor = torch.tensor([row[-1] for row in history], device=draft.device)[:, None]
        starts = [len(row) - 1 for row in history]
        with span("target"):
            output = self.target(torch.cat([anchor, draft], 1), start_B=starts, cache=state.cache)
        with span("target LM head"):
            logits = self.target.logits(output.hidden_BLD)
        with span("sampling"):
            if uniform is None:
                accepted, following = verify_greedy(draft, proposal.count_B, logits)
            else:
                laws = None if proposal.probs_BJV is None else proposal.probs_BJV[:, :sent]
                uniforms = uniform[:, J : J + sent], uniform[:, 2 * J]
                accepted, following = self._verify_sampled(draft, proposal.count_B, laws, logits, *uniforms)
        with span("bookkeeping"):
            lengths, drafts = accepted.tolist(), draft.tolist()
            confidence = None
            if proposal.confidence_BJ is not None and self.record_confidence:
                confidence = proposal.confidence_BJ.tolist()
            active = [not g.done(limits) for g in live]
            for i, token in enumerate(following.tolist()):
                live[i].positions_computed += sent + 1
                if active[i]:
                    trace = tuple(confidence[i][: counts[i]]) if confidence is not None else ()
                    record(live[i], drafts[i][: counts[i]], lengths[i], token, trace, limits)
                    history[i].extend([*drafts[i][: lengths[i]], token])
        # only positions of rows that moved on may be overwritten: finished rows stay where they are
        self.proposer.extend(output.features_BLF[:, : max(lengths) + 1], starts)

    def _verify_sampled(
        self,
        draft_BJ: Tensor,
        count_B: Tensor,
        draft_probs_BJV: Tensor | None,
        logits_BJV: Tensor,
        uniform_BJ: Tensor,
        uniform_B: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Some rows at a time: the target's laws of a whole batch would take many times the logits' memory."""
        B, positions, V = logits_BJV.shape
        parts = []
        for at in row_chunks(B, positions * V):
            laws = None if draft_probs_BJV is None else draft_probs_BJV[at]
            target_laws = self.sampling.probs(logits_BJV[at])
            parts.append(verify_sampled(draft_BJ[at], count_B[at], laws, target_laws, uniform_BJ[at], uniform_B[at]))
        accepted, following = zip(*parts, strict=True)
        return torch.cat(accepted), torch.cat(following)

    def _truncate(self, proposal: Proposal) -> None:
        """Shortens each row's draft to the leading slots whose confidence reaches the threshold."""
        logits = proposal.confidence_BJ
        if logits is None:
            raise UserError("decoder.confidence_threshold needs a drafter with a confidence head")
        if self.temperatures is not None:
            confidence = calibrated_confidence(logits, torch.tensor(self.temperatures, dtype=logits.dtype))
        else:
            confidence = torch.sigmoid(logits)
        sure: Tensor = confidence >= self.confidence_threshold
        proposal.count_B = torch.minimum(proposal.count_B, sure.long().cumprod(1).sum(1))
