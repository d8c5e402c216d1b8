"""One pass of an any-subset model: a row's tokens and its position queries.

Legend: B = rows, L = inputs of a pass (a row's tokens, then its queries), Q = position queries, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspec.decoding.generation import Request
from dspec.decoding.loop import check_requests
from dspec.errors import UserError
from dspec.models.cache import PositionCache
from dspec.models.target_model import TargetModel
from dspec.spans import span


@dataclass(frozen=True, kw_only=True)
class RowQuery:
    """One row's inputs of a pass: its tokens from place `start` on, then its position queries."""

    tokens: Sequence[int]  # by place
    start: int  # the keys and values of all places before it are in the cache
    prompt: int  # tokens of the prompt
    positions: Sequence[int]  # by place
    queried: Sequence[int]  # the places of the queries
    limits: Sequence[int]  # of the queries

    @property
    def width(self) -> int:
        """Number of inputs."""
        return len(self.tokens) - self.start + len(self.queried)


def query_logits(model: TargetModel, rows: Sequence[RowQuery], *, cache: PositionCache | None = None) -> Tensor:
    """Logits [B, Q, V] of the position queries, -inf for the mask token; undefined after a row's last query."""
    B, L, Q = len(rows), max(row.width for row in rows), max(1, *(len(row.queried) for row in rows))
    token_count_B = torch.tensor([len(row.tokens) - row.start for row in rows])
    ids, positions, limits = (torch.zeros(B, L, dtype=torch.long) for _ in range(3))
    queries, mask_token = torch.zeros(B, L, dtype=torch.bool), model.required_mask_token()
    for b, row in enumerate(rows):
        known = range(row.start, len(row.tokens))
        ids[b, : len(known)] = torch.tensor(row.tokens[row.start :])
        positions[b, : row.width] = torch.tensor([row.positions[place] for place in (*known, *row.queried)])
        # a prompt token sees the whole prompt, a generated token all places up to its own
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
        query_BQ = (token_count_B[:, None] + torch.arange(Q)).clamp(max=L - 1)
        logits = model.logits(hidden_BLD[torch.arange(B)[:, None], query_BQ])
        logits[..., mask_token] = -torch.inf
    return logits


def check_infilling(model: TargetModel, requests: Sequence[Request]) -> None:
    """Raises UserError for requests that any-subset decoding with this model cannot answer."""
    check_requests(model, requests, any_order=True)
    for i, request in enumerate(requests):
        check_positions(model, i, request.ids, request.max_new_tokens, positions_by_place(request))


def positions_by_place(request: Request) -> Sequence[int]:
    """The request's positions by place; from left to right if it names none."""
    return range(len(request.ids) + request.max_new_tokens) if request.positions is None else request.positions


def check_positions(model: TargetModel, i: int, ids: Sequence[int], holes: int, positions: Sequence[int]) -> None:
    """Raises UserError for positions that do not fit the tokens or the model; `i` is the request's index."""
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
            f"request {i} shows the mask token at position {masked[0]}: leave it out of the visible tokens, and list "
            "its position after theirs"
        )
