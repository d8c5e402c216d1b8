"""Rows for Jacobi Forcing: [prompt][noisy 0][clean 0][noisy 1][clean 1] ..., several samples a row.

Both copies of a block stand at the same positions; which state the noisy copy shows is chosen when the row is used
(dspec/noise.py), from the states that travel with the batch. It knows no model.

Legend: B = rows, L = places in a row, N = blocks of the batch, K = states (padded), n = tokens of a block (padded).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dspec.method import Batch


@dataclass(frozen=True)
class Sample:
    """A prompt, the model's response to it, and each block's states from the first draft to the fixed point."""

    prompt: list[int]
    response: list[int]
    blocks: list[list[list[int]]]  # [blocks][states][tokens]; the last block may be shorter

    @property
    def packed_length(self) -> int:
        return len(self.prompt) + 2 * len(self.response)


@dataclass(frozen=True, kw_only=True)
class TrajectoryBatch(Batch):
    """Packed rows with clean tokens in both copies, and what the noisy copies may show instead.

    `loss_BL` marks the clean copies (the response), `document_BL` is -1 on padding.
    """

    block_BL: Tensor  # number of the block in its response, -1 in prompts
    noisy_BL: Tensor  # bool: the noisy copies
    twin_BL: Tensor  # place of the clean copy of a noisy token (else its own)
    previous_BL: Tensor  # place before it in the clean text, -1 at its start
    last_BL: Tensor  # bool: both copies of a response's last token
    states_NKn: Tensor
    count_N: Tensor  # states
    length_N: Tensor  # tokens
    index_N: Tensor  # number of the block in its response
    row_N: Tensor
    place_N: Tensor  # of the noisy copy's first token in the row

    def to(self, device: object) -> "TrajectoryBatch":
        moved: dict[str, Any] = {f.name: getattr(self, f.name).to(device) for f in fields(self)}
        return TrajectoryBatch(**moved)

    def states(self, chosen_N: Tensor) -> Tensor:
        """Tokens [N, n] of state chosen_N[i] of each block i."""
        return self.states_NKn[torch.arange(len(chosen_N), device=chosen_N.device), chosen_N]

    @property
    def fixed_points(self) -> Tensor:
        """Each block's fixed point: its last state."""
        return self.states(self.count_N - 1)

    def spread(self, value_Nn: Tensor, onto_BL: Tensor) -> Tensor:
        """A copy of `onto_BL` with a value a block's token at the places of the noisy copies."""
        slot_n = torch.arange(value_Nn.shape[1], device=value_Nn.device)
        inside = slot_n < self.length_N[:, None]
        spread_BL = onto_BL.clone()
        row, place = self.row_N[:, None].expand_as(inside)[inside], (self.place_N[:, None] + slot_n)[inside]
        spread_BL[row, place] = value_Nn[inside]
        return spread_BL

    def noised(self, chosen_N: Tensor) -> Tensor:
        """ids_BL with state chosen_N[i] in the noisy copy of block i."""
        return self.spread(self.states(chosen_N), self.ids_BL)


def pack(samples: Sequence[Sample], *, row_length: int) -> list[list[Sample]]:
    """Rows of whole samples, first fit in their order, filled up to `row_length`; a longer sample has its own row."""
    rows: list[list[Sample]] = []
    room: list[int] = []
    for sample in samples:
        need = sample.packed_length
        at = next((i for i, free in enumerate(room) if free >= need), None)
        if at is None:
            at = len(rows)
            rows.append([])
            room.append(row_length)
        rows[at].append(sample)
        room[at] -= need
    return rows


def packed_batch(rows: Sequence[Sequence[Sample]]) -> TrajectoryBatch:
    """The rows as tensors, padded to the longest."""
    B, L = len(rows), max(sum(sample.packed_length for sample in row) for row in rows)
    ids, positions = torch.zeros(B, L, dtype=torch.long), torch.zeros(B, L, dtype=torch.long)
    document, block, previous = (torch.full((B, L), -1) for _ in range(3))
    twin = torch.arange(L).repeat(B, 1)
    noisy, loss, last = (torch.zeros(B, L, dtype=torch.bool) for _ in range(3))
    blocks: list[tuple[list[list[int]], int, int, int]] = []  # states, number, row, place
    for b, row in enumerate(rows):
        at = 0
        for number, sample in enumerate(row):
            P, begin = len(sample.prompt), at
            ids[b, at : at + P] = torch.tensor(sample.prompt)
            positions[b, at : at + P] = torch.arange(P)
            previous[b, at + 1 : at + P] = torch.arange(at, at + P - 1)
            at, position, before = at + P, P, at + P - 1
            for j, states in enumerate(sample.blocks):
                n = len(states[-1])
                blocks.append((states, j, b, at))
                for copy, first in (("noisy", at), ("clean", at + n)):
                    own = slice(first, first + n)
                    ids[b, own] = torch.tensor(states[-1])
                    positions[b, own] = torch.arange(position, position + n)
                    block[b, own] = j
                    noisy[b, own] = copy == "noisy"
                    loss[b, own] = copy == "clean"
                clean = at + n
                twin[b, at:clean] = torch.arange(clean, clean + n)
                previous[b, clean : clean + n] = torch.tensor([before, *range(clean, clean + n - 1)])
                at, position, before = clean + n, position + n, clean + n - 1
            last[b, at - 1] = last[b, at - 1 - len(sample.blocks[-1][-1])] = True
            document[b, begin:at] = number
    K, n = max(len(s) for s, *_ in blocks), max(len(s[-1]) for s, *_ in blocks)
    states_NKn = torch.zeros(len(blocks), K, n, dtype=torch.long)
    for i, (states, *_) in enumerate(blocks):
        states_NKn[i, : len(states), : len(states[-1])] = torch.tensor(states)
    index, row_of, place = (torch.tensor(column) for column in zip(*(b[1:] for b in blocks), strict=True))
    return TrajectoryBatch(
        ids,
        loss,
        document,
        positions,
        block_BL=block,
        noisy_BL=noisy,
        twin_BL=twin,
        previous_BL=previous,
        last_BL=last,
        states_NKn=states_NKn,
        count_N=torch.tensor([len(s) for s, *_ in blocks]),
        length_N=torch.tensor([len(s[-1]) for s, *_ in blocks]),
        index_N=index,
        row_N=row_of,
        place_N=place,
    )
