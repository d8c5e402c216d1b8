"""Speculative decoding: draft a block, verify it in one target pass, keep the accepted prefix and one more token.

Greedy output equals greedy autoregressive decoding token for token; sampled output has exactly the target's
distribution (rejection sampling; Leviathan et al. 2023, arXiv 2211.17192). A policy decides how much of each draft is
verified (both: verification.py).

Legend: B = rows, J = draft slots, U = uniforms that a row takes per round, V = vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dspec.decoding.generation import Pass, Request
from dspec.decoding.loop import check_requests, next_pass, prefill
from dspec.decoding.proposers import Proposal, Proposer
from dspec.decoding.sampling import Sampling, SamplingBatch, row_chunks
from dspec.decoding.state import PerRow, State
from dspec.decoding.verification import VerificationPolicy, verify_greedy, verify_sampled
from dspec.errors import UserError
from dspec.models.language_model import LanguageModel
from dspec.models.ragged import RaggedRows
from dspec.spans import span

# parts of the state: the proposer's, the policy's, and each row's features that the proposer has not taken yet
_DRAFTER, _POLICY, _PENDING = "drafter", "policy", "pending"


class Speculative:
    """Lossless speculative decoding of any batch with any proposer."""

    lossless = True

    def __init__(
        self,
        *,
        target: LanguageModel,
        proposer: Proposer,
        policy: VerificationPolicy,
        record_confidence: bool = False,
        record_distributions: bool = False,
    ) -> None:
        """Rounds keep the confidence logits of their drafts, and of the distributions that these were drawn from (there
        are none if they are greedy) what Pass says, on request."""
        self.target, self.proposer, self.policy = target, proposer, policy
        self.record_confidence, self.record_distributions = record_confidence, record_distributions

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        return sampling.to_dict() | self.proposer.settings() | self.policy.settings(sampling)

    @torch.inference_mode()
    def start(self, requests: Sequence[Request]) -> State:
        self.check(requests)
        state, features_BLF = prefill(self.target, requests, taps=self.proposer.tap_ids)
        with span("prefill"):
            state.parts[_DRAFTER] = self.proposer.start(features_BLF)
        state.parts[_POLICY] = self.policy.new_memory(len(requests))
        state.lasting = (_POLICY,)
        state.parts[_PENDING] = PerRow[list[Tensor]]([] for _ in requests)
        return state

    def check(self, requests: Sequence[Request]) -> None:
        check_requests(self.target, requests)
        room = self.proposer.max_positions
        for request in requests:
            if room is not None and len(request.ids) + request.max_new_tokens > room:
                raise UserError(
                    f"a prompt of {len(request.ids)} tokens and max_new_tokens={request.max_new_tokens} exceed the "
                    f"drafter's {room} positions; shorten the prompt, lower max_new_tokens, or use a drafter trained "
                    "for longer texts"
                )

    @torch.inference_mode()
    def step(self, state: State) -> None:
        if not self.policy.drafts(state.parts[_POLICY]):
            self._plain_step(state)
            return
        self._catch_up(state)
        # 1. draft: J tokens after each row's anchor, of which the policy sends count_B[b] to verification
        J, samplings, memory = self.proposer.num_drafts, state.samplings, state.parts[_DRAFTER]
        uniform_BU = None if samplings.greedy else state.streams.take(2 * J + 1)
        proposal, count_B = self._draft(state, None if uniform_BU is None else uniform_BU[:, :J])
        counts = count_B.tolist()
        sent = max(counts)
        draft = proposal.tokens_BJ[:, :sent]

        # 2. verify: anchor and drafts in one pass of the target, which computes counts[b] + 1 positions of row b
        anchor, starts = torch.tensor([row.text[-1] for row in state.rows], device=draft.device)[:, None], state.starts
        verified = RaggedRows([count + 1 for count in counts], draft.device)
        with span("target"):
            ids_1N = verified.pack(torch.cat([anchor, draft], 1))
            output = self.target.packed(ids_1N, verified, start_B=starts, cache=state.cache, taps=self.proposer.tap_ids)
        with span("target LM head"):
            logits_1NV = self.target.logits(output.hidden_BLD)
        with span("sampling"):
            if uniform_BU is None:
                accepted, bonus_token = verify_greedy(draft, count_B, verified.unpack(logits_1NV))
            else:
                probs = None if proposal.probs_BJV is None else proposal.probs_BJV[:, :sent]
                uniforms = uniform_BU[:, J : J + sent], uniform_BU[:, 2 * J]
                accepted, bonus_token = _verify_sampled(draft, counts, probs, logits_1NV, samplings, *uniforms)

        # 3. commit: the accepted drafts and the bonus token
        with span("bookkeeping"):
            lengths, tokens = accepted.tolist(), draft.tolist()
            recorded = self._recorded(proposal, counts)
            for i, (row, token) in enumerate(zip(state.rows, bonus_token.tolist(), strict=True)):
                if row.done:
                    row.generation.idle_positions += counts[i] + 1
                    continue
                row.generation.passes += [Pass("draft")] * proposal.passes
                drafts = tokens[i][: counts[i]]
                row.commit_round(drafts, lengths[i], token, slots=recorded[i], positions=counts[i] + 1)

        # 4. the proposer takes the target's features of the verified positions; those past a row's accepted drafts are
        # overwritten in the next round
        self.proposer.extend(memory, verified.unpack(output.features_BLF)[:, : max(lengths) + 1], starts)

    def _plain_step(self, state: State) -> None:
        """A round that drafts nothing: one token per row. The proposer takes the features of such rounds all at once,
        when it drafts again."""
        tokens, features_BF = next_pass(self.target, state, self.proposer.tap_ids)
        with span("bookkeeping"):
            pending = state.parts[_PENDING]
            for row, token, late, feature_F in zip(state.rows, tokens, pending, features_BF, strict=True):
                if row.done:
                    row.generation.idle_positions += 1
                    continue
                late.append(feature_F)
                row.commit_round([], 0, token, positions=1)

    def _catch_up(self, state: State) -> None:
        """Gives the proposer what rounds without drafts have left. Rows that have less of it are padded: from the
        anchor on, positions are written again after they are verified."""
        pending = state.parts[_PENDING]
        if not any(pending):
            return
        starts = [start - len(late) for start, late in zip(state.starts, pending, strict=True)]
        width = len(next(late for late in pending if late)[0])
        none = torch.zeros(0, width, dtype=self.target.dtype, device=self.target.device)
        features_BLF = pad_sequence([torch.stack(late) if late else none for late in pending], batch_first=True)
        self.proposer.extend(state.parts[_DRAFTER], features_BLF, starts)
        for late in pending:
            late.clear()

    def _draft(self, state: State, uniform_BJ: Tensor | None) -> tuple[Proposal, Tensor]:
        """A proposal, and how much of it is verified [B]."""
        proposal = self.proposer.propose(
            state.parts[_DRAFTER],
            [row.text for row in state.rows],
            samplings=state.samplings,
            uniform_BJ=uniform_BJ,
            confidence=self.record_confidence or self.policy.reads_confidence,
        )
        samplings = [row.request.sampling for row in state.rows]
        return proposal, self.policy(proposal, samplings, state.parts[_POLICY])

    def _recorded(self, proposal: Proposal, counts: Sequence[int]) -> list[dict[str, tuple[float, ...]]]:
        """What is kept of each row's drafted slots, by its name in Pass."""
        values: dict[str, Tensor] = {}
        if self.record_confidence and proposal.confidence_BJ is not None:
            values["confidence"] = proposal.confidence_BJ
        if self.record_distributions and proposal.probs_BJV is not None:
            values["top"] = proposal.probs_BJV.amax(-1).log()
            values["entropy"] = torch.special.entr(proposal.probs_BJV).sum(-1)
        lists = {name: value_BJ.tolist() for name, value_BJ in values.items()}
        return [{name: tuple(rows[b][:count]) for name, rows in lists.items()} for b, count in enumerate(counts)]


def _verify_sampled(
    draft_BJ: Tensor,
    counts: Sequence[int],
    draft_probs_BJV: Tensor | None,
    logits_1NV: Tensor,
    samplings: SamplingBatch,
    uniform_BJ: Tensor,
    uniform_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """`verify_sampled` on packed logits, in chunks of rows: the target's distributions of a whole batch would take many
    times the logits' memory."""
    (B, J), V, parts, end = draft_BJ.shape, logits_1NV.shape[-1], [], 0
    for chunk in row_chunks(B, (J + 1) * V):
        rows, count_B = range(B)[chunk], torch.tensor(counts[chunk], device=draft_BJ.device)
        verified = RaggedRows([counts[b] + 1 for b in rows], draft_BJ.device)
        first, end, sent = end, end + sum(verified.lengths), slice(verified.longest - 1)
        target_probs = samplings.probs(logits_1NV[0, first:end], [b for b in rows for _ in range(counts[b] + 1)])
        draft_probs = None if draft_probs_BJV is None else draft_probs_BJV[chunk, sent]
        drafts, uniforms = draft_BJ[chunk, sent], uniform_BJ[chunk, sent]
        target_probs_BJV = verified.unpack(target_probs[None])
        parts.append(verify_sampled(drafts, count_B, draft_probs, target_probs_BJV, uniforms, uniform_B[chunk]))
    accepted, bonus_token = zip(*parts, strict=True)
    return torch.cat(accepted), torch.cat(bonus_token)
