"""Any-subset decoding: tokens for chosen positions of a text, given the tokens at all others (AS-ARM), one a forward
pass or several (Any-Subset Speculative Decoding, ASSD).

A row's places are its tokens in order of generation: the prompt, then one token after the other; `positions` say where
in the text they stand. A content-less position query asks for the token of a place, given all places before some limit:
an oracle query's limit is its own place, draft queries share that of the first token which is not known. So the first
drafted token is drawn from the oracle's distribution and needs no verification (Lemma 1); the others wait for the next
pass, which tests them by rejection sampling. Every pass commits at least one token (Theorem 1), and the output has
exactly the distribution of sequential decoding, which is the case of one draft (Theorem 2). N-gram drafts come without
a pass of the model and are all tested (Algorithm 2). The mask token is banned and all distributions renormalised.

Source: arXiv 2504.20456.
Legend: B = rows, L = places that a pass computes, Q = position queries, J = drafts, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dspec.decoding.generation import Generation, Kind, Pass, Request
from dspec.decoding.loop import check_requests
from dspec.decoding.ngram import Bigrams
from dspec.decoding.sampling import Sampling, Streams, draw, verify_greedy, verify_sampled
from dspec.decoding.state import PerRow, Row, State
from dspec.errors import UserError
from dspec.models.backbone import Backbone
from dspec.models.cache import PositionCache
from dspec.spans import span

DRAFTS = "drafts"  # the part of the state that holds each row's drafts that wait for the next pass
_BIGRAMS = "bigrams"  # the part with each row's n-gram model


@dataclass(frozen=True, kw_only=True)
class AnySubsetConfig:
    """`num_drafts` k tokens are drafted at a time (1: sequential decoding), by the model itself (`draft` "self") or by
    the text's bigrams ("ngram"). `bonus`: an oracle pass also asks for the token behind its drafts. `tolerance` epsilon
    accepts a sampled draft if u < p/q + epsilon: lossy above 0."""

    num_drafts: int
    draft: str
    bonus: bool
    tolerance: float

    def __post_init__(self) -> None:
        if self.num_drafts < 1:
            raise UserError(f"any-subset decoding needs num_drafts >= 1, not {self.num_drafts}: 1 is sequential")
        if self.draft not in ("self", "ngram"):
            raise UserError(f"any-subset decoding drafts by draft=self (the model) or ngram, not {self.draft}")
        if not self.tolerance >= 0:
            raise UserError(f"tolerance={self.tolerance} must be at least 0 (0: lossless)")


@dataclass(frozen=True, kw_only=True)
class Inquiry:
    """What one row computes in a pass: the content of its places from `start` on, and position queries."""

    tokens: Sequence[int]  # by place
    start: int  # keys and values of the places before it are in the cache
    prompt: int  # length
    positions: Sequence[int]  # by place
    asked: Sequence[int]  # places whose tokens are asked for
    limits: Sequence[int]  # each, given the places before this one

    @property
    def width(self) -> int:
        return len(self.tokens) - self.start + len(self.asked)


def ask(model: Backbone, rows: Sequence[Inquiry], *, cache: PositionCache | None = None) -> Tensor:
    """Logits [B, Q, V] of the tokens asked for, that of the mask token -inf. Rows that ask for fewer than the longest
    have garbage behind."""
    B, L, Q = len(rows), max(row.width for row in rows), max(1, *(len(row.asked) for row in rows))
    contents = torch.tensor([len(row.tokens) - row.start for row in rows])
    ids, positions, limits = (torch.zeros(B, L, dtype=torch.long) for _ in range(3))
    queries, mask_token = torch.zeros(B, L, dtype=torch.bool), _mask_token(model)
    for b, row in enumerate(rows):
        known = range(row.start, len(row.tokens))
        ids[b, : len(known)] = torch.tensor(row.tokens[row.start :])
        positions[b, : row.width] = torch.tensor([row.positions[place] for place in (*known, *row.asked)])
        # prompt tokens see each other, later ones what was generated before them
        limits[b, : row.width] = torch.tensor([*(max(row.prompt, place + 1) for place in known), *row.limits])
        queries[b, len(known) : row.width] = True
    device = model.device
    with span("target"):
        hidden_BLD = model.any_subset(
            ids.to(device),
            positions_BL=positions.to(device),
            limit_BL=limits.to(device),
            query_BL=queries.to(device),
            cache=cache,
            start_B=[row.start for row in rows] if cache is not None else None,
        )
    with span("target LM head"):
        at = (contents[:, None] + torch.arange(Q)).clamp(max=L - 1)
        logits = model.logits(hidden_BLD[torch.arange(B)[:, None], at])
        logits[..., mask_token] = -torch.inf
    return logits


@torch.inference_mode()
def joint_log_density(model: Backbone, ids: Sequence[int], positions: Sequence[int], prompt_length: int) -> Tensor:
    """Log probability [tokens] of each token behind the prompt given those before it, in one pass (eq. 6). `ids` and
    `positions` are in order of generation. Raises UserError as decoding does."""
    if not 1 <= prompt_length < len(ids):
        raise UserError(
            f"a prompt of {prompt_length} among {len(ids)} tokens: at least one must be visible, one scored"
        )
    _check_positions(model, 0, ids[:prompt_length], len(ids) - prompt_length, positions)
    asked = range(prompt_length, len(ids))
    inquiry = Inquiry(
        tokens=ids[:-1], start=0, prompt=prompt_length, positions=positions, asked=asked, limits=asked
    )  # nobody asks behind the last token
    log_probs = ask(model, [inquiry])[0].to(torch.promote_types(model.dtype, torch.float32)).log_softmax(-1)
    return log_probs[torch.arange(len(asked)), torch.tensor(list(ids[prompt_length:]))]


@dataclass(frozen=True)
class Drafts:
    """Tokens for a row's next places, and the distributions [J, V] that they were drawn from; None: point masses."""

    tokens: Sequence[int] = ()
    probs: Tensor | None = None


class AnySubset:
    """Sequential and speculative any-subset decoding of any batch; rows of one pass may draft or be verified."""

    def __init__(self, *, target: Backbone, config: AnySubsetConfig) -> None:
        """Raises UserError for a model without a mask token."""
        _mask_token(target)
        self.target, self.config = target, config
        self.lossless = config.tolerance == 0

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        return sampling.to_dict() | asdict(self.config)

    def check(self, requests: Sequence[Request]) -> None:
        check_requests(self.target, requests, any_order=True)
        for i, request in enumerate(requests):
            _check_positions(self.target, i, request.ids, request.max_new_tokens, _positions(request))

    @torch.inference_mode()
    def start(self, requests: Sequence[Request]) -> State:
        self.check(requests)
        state = State(
            rows=[Row(request, list(request.ids), Generation()) for request in requests],
            cache=self.target.new_cache(),
            streams=Streams([r.seed for r in requests], self.target.device),
            parts={DRAFTS: PerRow(Drafts() for _ in requests)},
        )
        if self.config.draft == "ngram":
            state.parts[_BIGRAMS] = PerRow(Bigrams() for _ in requests)
        with span("prefill"):
            self._advance(state, [0] * len(requests))
        return state

    @torch.inference_mode()
    def step(self, state: State) -> None:
        self._advance(state, state.starts)

    def _advance(self, state: State, starts: Sequence[int]) -> None:
        """One pass over the places from `starts` on. A row always uses the same number of uniforms, whatever it does:
        k draw or test drafts, one draws the token that ends the pass, k draw n-gram drafts."""
        k, samplings = self.config.num_drafts, state.samplings
        uniform = None if samplings.greedy else state.streams.take(2 * k + 1)
        # 1. drafts of the last pass, or of the n-grams
        if self.config.draft == "ngram":
            with span("lookup"):
                state.parts[DRAFTS][:] = self._lookup(state, None if uniform is None else uniform[:, k + 1 :].cpu())
        drafts = [Drafts() if row.done else d for row, d in zip(state.rows, state.parts[DRAFTS], strict=True)]

        # 2. one pass: verify a row's drafts, or draft where it has none
        asked = [self._inquiry(*of) for of in zip(state.rows, drafts, starts, strict=True)]
        logits = ask(self.target, asked, cache=state.cache)
        with span("sampling"):
            probs = None if uniform is None else samplings.probs(logits)
            accepted, following = self._verify(state.rows, drafts, logits, probs, uniform)
            fresh = self._drafted(asked, drafts, logits, probs, uniform)

        # 3. commit: the accepted drafts and the token behind them; what was drafted behind it waits for the next pass
        width = max(row.width for row in asked)
        with span("bookkeeping"):
            for b, row in enumerate(state.rows):
                if row.done:
                    row.generation.idle_positions += width
                    continue
                if self.config.draft == "ngram":
                    row.generation.passes.append(Pass("draft"))
                tokens = drafts[b].tokens
                token = following[b] if accepted[b] < len(asked[b].asked) else None
                kind: Kind = "prefill" if not row.generation.tokens else "verify" if tokens else "decode"
                row.commit_round(tokens, accepted[b], token, kind=kind, positions=width)
        state.parts[DRAFTS][:] = fresh

    def _lookup(self, state: State, uniform_BJ: Tensor | None) -> list[Drafts]:
        """Each row's next drafts by its bigrams."""
        found = []
        dtype = torch.promote_types(self.target.dtype, torch.float32)
        for b, (row, bigrams) in enumerate(zip(state.rows, state.parts[_BIGRAMS], strict=True)):
            if row.done:
                found.append(Drafts())
                continue
            positions, n = _positions(row.request), len(row.text)
            bigrams.read(row.text, positions)
            greedy = uniform_BJ is None or row.request.sampling.greedy
            tokens, probs = bigrams.draft(
                positions[n : n + self.config.num_drafts],
                None if greedy or uniform_BJ is None else uniform_BJ[b],
                vocab=self.target.vocab_size,
                dtype=dtype,
            )
            found.append(Drafts(tokens, None if greedy else probs))
        return found

    def _inquiry(self, row: Row, drafts: Drafts, start: int) -> Inquiry:
        """Oracle queries for the drafts (and the bonus token), or draft queries for the next k tokens."""
        known, positions = len(row.text), _positions(row.request)
        wanted = len(drafts.tokens) + self.config.bonus if drafts.tokens else self.config.num_drafts
        asked = range(known, known if row.done else min(known + wanted, len(positions)))
        return Inquiry(
            tokens=[*row.text, *drafts.tokens[: max(0, len(asked) - 1)]],  # nobody asks behind the last draft
            start=start,
            prompt=len(row.request.ids),
            positions=positions,
            asked=asked,
            limits=asked if drafts.tokens else [known] * len(asked),
        )

    def _verify(
        self,
        rows: Sequence[Row],
        drafts: Sequence[Drafts],
        logits_BQV: Tensor,
        probs_BQV: Tensor | None,
        uniform: Tensor | None,
    ) -> tuple[list[int], list[int]]:
        """How many of each row's drafts are accepted, and the token behind them; that is of no use where all are and
        no query asked for it. A row without drafts draws its first token here: none accepted, none rejected."""
        device, Q = logits_BQV.device, logits_BQV.shape[1]
        count = torch.tensor([len(d.tokens) for d in drafts])
        J = int(count.max())
        tokens = torch.tensor([[*d.tokens, *[0] * (J - len(d.tokens))] for d in drafts], dtype=torch.long)
        tokens, count = tokens.view(len(drafts), J).to(device), count.to(device)
        slots = torch.arange(J + 1, device=device).clamp(max=Q - 1)
        if probs_BQV is None or uniform is None:
            accepted, following = verify_greedy(tokens, count, logits_BQV[:, slots])
        else:
            # u < p / q + epsilon is u - epsilon < p / q
            tolerance = [0.0 if row.request.sampling.greedy else self.config.tolerance for row in rows]
            tested = uniform[:, :J] - torch.tensor(tolerance, dtype=uniform.dtype, device=device)[:, None]
            laws = _stacked(drafts, J, like=probs_BQV)
            last = uniform[:, self.config.num_drafts]
            accepted, following = verify_sampled(tokens, count, laws, probs_BQV[:, slots], tested, last)
        return accepted.tolist(), following.tolist()

    def _drafted(
        self,
        asked: Sequence[Inquiry],
        drafts: Sequence[Drafts],
        logits_BQV: Tensor,
        probs_BQV: Tensor | None,
        uniform: Tensor | None,
    ) -> list[Drafts]:
        """What rows without drafts have drafted behind their next token."""
        counts = [0 if d.tokens else max(0, len(row.asked) - 1) for d, row in zip(drafts, asked, strict=True)]
        J = max(counts)
        if not J or self.config.draft == "ngram":
            return [Drafts()] * len(counts)
        if probs_BQV is None or uniform is None:
            greedy = logits_BQV[:, 1 : 1 + J].argmax(-1).tolist()
            return [Drafts(tokens[:n]) for tokens, n in zip(greedy, counts, strict=True)]
        laws = probs_BQV[:, 1 : 1 + J]
        drawn = draw(laws, uniform[:, :J]).tolist()
        return [Drafts(tokens[:n], law[:n]) for tokens, law, n in zip(drawn, laws, counts, strict=True)]


def _stacked(drafts: Sequence[Drafts], slots: int, *, like: Tensor) -> Tensor | None:
    """The distributions [B, J, V] of all rows' drafts; None where there are none."""
    if not slots:
        return None
    laws = like.new_zeros(len(drafts), slots, like.shape[-1])
    for b, d in enumerate(drafts):
        J = len(d.tokens)
        if d.probs is not None:
            laws[b, :J] = d.probs
        else:
            laws[b, torch.arange(J), torch.tensor(list(d.tokens), dtype=torch.long)] = 1
    return laws


def _positions(request: Request) -> Sequence[int]:
    """Of the prompt's tokens and then of those to generate."""
    return range(len(request.ids) + request.max_new_tokens) if request.positions is None else request.positions


def _mask_token(model: Backbone) -> int:
    """Raises UserError for a model without one."""
    if model.mask_token_id is None or not 0 <= model.mask_token_id < model.vocab_size:
        raise UserError(
            f"{model.name!r} has no mask token (mask_token_id={model.mask_token_id}), which any-subset decoding asks "
            "with: set target.mask_token_id to an unused token id"
        )
    return model.mask_token_id


def _check_positions(model: Backbone, i: int, ids: Sequence[int], holes: int, positions: Sequence[int]) -> None:
    """Raises UserError, with the request's number i, for positions that do not fit its tokens or the model."""
    if len(positions) != len(ids) + holes:
        raise UserError(
            f"request {i} has {len(positions)} positions for {len(ids)} visible tokens and {holes} to generate: "
            "each needs one, the visible ones first"
        )
    if len(set(positions)) < len(positions):
        twice = next(p for p in positions if list(positions).count(p) > 1)
        raise UserError(f"request {i} has two tokens at position {twice}")
    if wrong := [p for p in positions if not 0 <= p < model.max_positions]:
        raise UserError(
            f"request {i} has position {wrong[0]}, outside the context of {model.name!r} "
            f"({model.max_positions} positions)"
        )
    if masked := [p for token, p in zip(ids, positions, strict=False) if token == model.mask_token_id]:
        raise UserError(
            f"request {i} shows the mask token at position {masked[0]}: leave it out of the visible tokens, and name "
            "its position behind theirs"
        )
