"""Rows for Jacobi Forcing: [prompt][noisy 0][clean 0][noisy 1][clean 1] ..., several samples a row.

Both copies of a block stand at the same positions; which state the noisy copy shows is chosen when the row is used
(dspec/jacobi_forcing/noise.py), from the states that travel with the batch. It knows no model.

Legend: B = rows, L = places in a row, N = blocks of the batch, K = states (padded), n = tokens of a block (padded);
of one sample P = prompt tokens, R = response tokens, J = blocks, S = states of all its blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dspec.method import Batch


@dataclass(frozen=True, eq=False)
class Sample:
    """A prompt, the model's response to it, and each block's states from the first draft to the fixed point.

    Integer tensors, so that a sample can be a view of a file. The last block may be shorter: its states are zero
    behind the response's end.
    """

    prompt_P: Tensor
    response_R: Tensor
    states_Sn: Tensor
    count_J: Tensor  # states of each block

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        response: Sequence[int],
        blocks: Sequence[Sequence[Sequence[int]]],
        *,
        block_size: int,
    ) -> "Sample":
        """From lists; `blocks` are [blocks][states][tokens]."""
        padded = [[*state, *[0] * (block_size - len(state))] for states in blocks for state in states]
        flat = (prompt, response, padded, [len(states) for states in blocks])
        return cls(*(torch.tensor(values, dtype=torch.int32) for values in flat))

    @property
    def blocks(self) -> list[list[list[int]]]:
        """The states as lists [blocks][states][tokens]."""
        parts = self.states_Sn.split(self.count_J.tolist())
        return [states[:, :length].tolist() for states, length in zip(parts, self.lengths.tolist(), strict=True)]

    @property
    def block_size(self) -> int:
        return self.states_Sn.shape[1]

    @property
    def lengths(self) -> Tensor:
        """Tokens [J] of each block."""
        begin_J = torch.arange(len(self.count_J)) * self.block_size
        return (len(self.response_R) - begin_J).clamp(max=self.block_size)

    @property
    def packed_length(self) -> int:
        return len(self.prompt_P) + 2 * len(self.response_R)

    def beginning(self, blocks: int) -> "Sample":
        """The same with its first blocks only."""
        count_J = self.count_J[:blocks]
        tokens = blocks * self.block_size
        return Sample(self.prompt_P, self.response_R[:tokens], self.states_Sn[: int(count_J.sum())], count_J)


@dataclass(frozen=True, kw_only=True)
class TrajectoryBatch(Batch):
    """Packed rows with clean tokens in both copies, and what the noisy copies may show instead.

    `loss_BL` marks the clean copies (the response), `document_BL` is -1 on padding.
    """

    block_BL: Tensor  # number of the block in its response, -1 in prompts
    noisy_BL: Tensor  # bool: the noisy copies
    clean_index_BL: Tensor  # place of the clean copy of a noisy token (else its own)
    previous_index_BL: Tensor  # place before it in the clean text, -1 at its start
    last_BL: Tensor  # bool: both copies of a response's last token
    states_NKn: Tensor
    count_N: Tensor  # states
    length_N: Tensor  # tokens
    index_N: Tensor  # number of the block in its response
    row_N: Tensor
    start_N: Tensor  # of the noisy copy's first token in the row

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

    def scatter_to_noisy(self, value_Nn: Tensor, onto_BL: Tensor) -> Tensor:
        """A copy of `onto_BL` with a value a block's token at the places of the noisy copies."""
        slot_n = torch.arange(value_Nn.shape[1], device=value_Nn.device)
        inside = slot_n < self.length_N[:, None]
        spread_BL = onto_BL.clone()
        row, place = self.row_N[:, None].expand_as(inside)[inside], (self.start_N[:, None] + slot_n)[inside]
        spread_BL[row, place] = value_Nn[inside]
        return spread_BL

    def with_states(self, chosen_N: Tensor) -> Tensor:
        """ids_BL with state chosen_N[i] in the noisy copy of block i."""
        return self.scatter_to_noisy(self.states(chosen_N), self.ids_BL)


def pack(samples: Sequence[Sample], *, row_length: int) -> list[list[Sample]]:
    """Rows of whole samples, first fit in their order, filled up to `row_length`; a longer sample has its own row."""
    rows: list[list[Sample]] = []
    room = _Room(len(samples), row_length)
    for sample in samples:
        need = sample.packed_length
        at = room.first(need) if need <= row_length else len(rows)
        if at == len(rows):
            rows.append([])
        rows[at].append(sample)
        room.take(at, need)
    return rows


class _Room:
    """Free places of rows, and the first row that has enough of them: a tree of maxima, both in O(log rows)."""

    def __init__(self, rows: int, length: int) -> None:
        self._leaves = 1 << max(rows - 1, 0).bit_length()
        self._most = [length] * (2 * self._leaves)  # node i is over nodes 2i and 2i + 1; row r is node leaves + r

    def first(self, need: int) -> int:
        node = 1
        while node < self._leaves:
            node = 2 * node + (self._most[2 * node] < need)
        return node - self._leaves

    def take(self, row: int, places: int) -> None:
        node = self._leaves + row
        self._most[node] -= places
        while node > 1:
            node //= 2
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])


_PADDING = {
    "ids": 0, "position": 0, "document": -1, "block": -1, "noisy": False, "clean": False, "last": False,
    "to_twin": 0, "to_previous": 0,
}  # fmt: skip


def _places(sample: Sample, document: int) -> dict[str, Tensor]:
    """A sample's places in a row, a value each [P + 2R]: `to_twin` and `to_previous` are distances (0: none)."""
    P, R, n = len(sample.prompt_P), len(sample.response_R), sample.block_size
    number_R = torch.arange(R) // n
    noisy_R = P + torch.arange(R) + number_R * n  # earlier blocks are whole, their clean copies lie before it
    clean_R = noisy_R + sample.lengths[number_R]
    copies_2R = torch.stack([noisy_R, clean_R])
    values = {name: torch.full((P + 2 * R,), value) for name, value in _PADDING.items()}
    values["ids"][:P], values["ids"][copies_2R] = sample.prompt_P.long(), sample.response_R.long()
    values["position"][:P], values["position"][copies_2R] = torch.arange(P), P + torch.arange(R)
    values["document"][:] = document
    values["block"][copies_2R] = number_R
    values["noisy"][noisy_R] = values["clean"][clean_R] = values["last"][copies_2R[:, -1]] = True
    values["to_twin"][noisy_R] = clean_R - noisy_R
    values["to_previous"][1:P] = 1
    values["to_previous"][clean_R] = clean_R.diff(prepend=torch.tensor([P - 1]))
    return values


def packed_batch(rows: Sequence[Sequence[Sample]]) -> TrajectoryBatch:
    """The rows as tensors, padded to the longest."""
    places = [[_places(sample, number) for number, sample in enumerate(row)] for row in rows]
    at = {
        name: pad_sequence([torch.cat([p[name] for p in row]) for row in places], batch_first=True, padding_value=value)
        for name, value in _PADDING.items()
    }
    place_L = torch.arange(at["ids"].shape[1])
    return TrajectoryBatch(
        at["ids"],
        at["clean"],
        at["document"],
        at["position"],
        block_BL=at["block"],
        noisy_BL=at["noisy"],
        clean_index_BL=place_L + at["to_twin"],
        previous_index_BL=torch.where(at["to_previous"] > 0, place_L - at["to_previous"], -1),
        last_BL=at["last"],
        **_blocks(rows),
    )


def _blocks(rows: Sequence[Sequence[Sample]]) -> dict[str, Tensor]:
    """What a batch says of its blocks."""
    samples = [sample for row in rows for sample in row]
    begins = [at for row in rows for at in accumulate((s.packed_length for s in row[:-1]), initial=0)]
    index = [torch.arange(len(s.count_J)) for s in samples]
    place = [at + len(s.prompt_P) + 2 * j * s.block_size for at, s, j in zip(begins, samples, index, strict=True)]
    blocks_B = torch.tensor([sum(len(s.count_J) for s in row) for row in rows])
    count_N = torch.cat([s.count_J for s in samples]).long()
    length_N = torch.cat([s.lengths for s in samples])
    N, n = len(count_N), int(length_N.max())
    block_S = torch.arange(N).repeat_interleave(count_N)
    state_S = torch.arange(len(block_S)) - (count_N.cumsum(0) - count_N)[block_S]
    states_NKn = torch.zeros(N, int(count_N.max()), n, dtype=torch.long)
    states_NKn[block_S, state_S] = torch.cat([s.states_Sn for s in samples])[:, :n].long()
    return {
        "states_NKn": states_NKn,
        "count_N": count_N,
        "length_N": length_N,
        "index_N": torch.cat(index),
        "row_N": torch.arange(len(rows)).repeat_interleave(blocks_B),
        "start_N": torch.cat(place),
    }
