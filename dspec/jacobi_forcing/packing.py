"""Rows for Jacobi Forcing: [prompt][noisy 0][clean 0][noisy 1][clean 1] ..., several trajectories per row.

Both copies of a block have the same positions; the noisy copy's state is chosen when the row is used
(dspec/jacobi_forcing/noise.py), from the states that come with the batch. It knows no model.

Legend: B = rows, L = indices in a row, N = blocks of the batch, K = states (padded), n = tokens of a block (padded);
of one trajectory P = prompt tokens, R = response tokens, J = blocks, S = states of all its blocks, G = segments
of a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dspec.method import Batch


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A prompt, the model's response, and each block's states from the first draft to the fixed point.

    Integer tensors, so that a trajectory can be a view of a file. The last block may be shorter: its states are zero
    past the response's end.
    """

    prompt_P: Tensor
    response_R: Tensor
    states_Sn: Tensor
    count_J: Tensor  # states of each block

    @classmethod
    def from_lists(
        cls,
        prompt: Sequence[int],
        response: Sequence[int],
        blocks: Sequence[Sequence[Sequence[int]]],
        *,
        block_size: int,
    ) -> "Trajectory":
        """`blocks` is [blocks][states][tokens]."""
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

    def beginning(self, blocks: int) -> "Trajectory":
        """The same trajectory cut to its first `blocks` blocks."""
        count_J = self.count_J[:blocks]
        tokens = blocks * self.block_size
        return Trajectory(self.prompt_P, self.response_R[:tokens], self.states_Sn[: int(count_J.sum())], count_J)


@dataclass(frozen=True, kw_only=True)
class TrajectoryBatch(Batch):
    """Packed rows with clean tokens in both copies, and the states that can replace them in the noisy ones.

    `supervised_BL` marks the clean copies (the response), `document_BL` is -1 on padding.
    """

    block_BL: Tensor  # index of the block in its response, -1 in prompts
    noisy_BL: Tensor  # bool: the noisy copies
    clean_index_BL: Tensor  # index in the row of a noisy token's clean copy (else its own index)
    previous_index_BL: Tensor  # index in the row of the previous token of the clean text, -1 at its start
    last_BL: Tensor  # bool: both copies of a response's last token
    states_NKn: Tensor
    count_N: Tensor  # states per block
    length_N: Tensor  # tokens per block
    index_N: Tensor  # index of the block in its response
    row_N: Tensor
    start_N: Tensor  # index in the row of the noisy copy's first token

    def states(self, chosen_N: Tensor) -> Tensor:
        """Tokens [N, n]: state chosen_N[i] of block i."""
        return self.states_NKn[torch.arange(len(chosen_N), device=chosen_N.device), chosen_N]

    @property
    def fixed_points(self) -> Tensor:
        """Each block's fixed point: its last state."""
        return self.states(self.count_N - 1)

    def scatter_to_noisy(self, value_Nn: Tensor, onto_BL: Tensor) -> Tensor:
        """A copy of `onto_BL` with the blocks' values, one per token, written to the noisy copies."""
        slot_n = torch.arange(value_Nn.shape[1], device=value_Nn.device)
        inside = slot_n < self.length_N[:, None]
        scattered_BL = onto_BL.clone()
        row, index = self.row_N[:, None].expand_as(inside)[inside], (self.start_N[:, None] + slot_n)[inside]
        scattered_BL[row, index] = value_Nn[inside]
        return scattered_BL

    def with_states(self, chosen_N: Tensor) -> Tensor:
        """ids_BL with state chosen_N[i] in the noisy copy of block i."""
        return self.scatter_to_noisy(self.states(chosen_N), self.ids_BL)


def pack_trajectories(trajectories: Sequence[Trajectory], *, row_length: int) -> list[list[Trajectory]]:
    """Rows of whole trajectories, first-fit in order, up to `row_length` tokens; a longer one gets its own row."""
    rows: list[list[Trajectory]] = []
    room = _Room(len(trajectories), row_length)
    for trajectory in trajectories:
        need = trajectory.packed_length
        at = room.first(need) if need <= row_length else len(rows)
        if at == len(rows):
            rows.append([])
        rows[at].append(trajectory)
        room.take(at, need)
    return rows


class _Room:
    """The free tokens of each row, in a segment tree of maxima: `first` and `take` cost O(log rows)."""

    def __init__(self, rows: int, length: int) -> None:
        self._leaves = 1 << max(rows - 1, 0).bit_length()
        self._most = [length] * (2 * self._leaves)  # node i is the maximum of 2i and 2i + 1; row r is node leaves + r

    def first(self, need: int) -> int:
        """The first row with at least `need` free tokens."""
        node = 1
        while node < self._leaves:
            node = 2 * node + (self._most[2 * node] < need)
        return node - self._leaves

    def take(self, row: int, tokens: int) -> None:
        """Uses up free tokens of a row."""
        node = self._leaves + row
        self._most[node] -= tokens
        while node > 1:
            node //= 2
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])


def trajectory_batch(rows: Sequence[Sequence[Trajectory]]) -> TrajectoryBatch:
    """The rows as tensors, padded to the longest.

    A prompt a b and a response 1 2 3 4 5 in blocks of three (x: true, -: -1):

                    prompt |  noisy 0 |  clean 0 | noisy 1 | clean 1
        index         0  1 |  2  3  4 |  5  6  7 |   8   9 |  10  11
        ids           a  b |  1  2  3 |  1  2  3 |   4   5 |   4   5
        positions     0  1 |  2  3  4 |  2  3  4 |   5   6 |   5   6
        block         -  - |  0  0  0 |  0  0  0 |   1   1 |   1   1
        noisy              |  x  x  x |          |   x   x |
        supervised         |          |  x  x  x |         |   x   x
        clean_index   0  1 |  5  6  7 |  5  6  7 |  10  11 |  10  11
        previous_idx  -  0 |  -  -  - |  1  5  6 |   -   - |   7  10
        last               |          |          |       x |       x
    """
    parts = [_places(row) for row in rows]
    at = {
        name: pad_sequence([part[name] for part in parts], batch_first=True, padding_value=value)
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
        clean_index_BL=place_L + at["to_clean"],
        previous_index_BL=torch.where(at["to_previous"] > 0, place_L - at["to_previous"], -1),
        last_BL=at["last"],
        **_blocks(rows),  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class _Segment:
    """Consecutive tokens of a row: a prompt, or one copy of a block."""

    tokens: Tensor
    document: int
    position: int  # of its first token in the text
    block: int  # -1: the prompt
    noisy: bool
    ends: bool  # its last token is the response's last


def _segments(row: Sequence[Trajectory]) -> Iterator[_Segment]:
    """The segments of a row, in order."""
    for document, trajectory in enumerate(row):
        position = len(trajectory.prompt_P)
        yield _Segment(trajectory.prompt_P, document, 0, -1, noisy=False, ends=False)
        blocks = trajectory.response_R.split(trajectory.block_size)
        for number, tokens in enumerate(blocks):
            for noisy in (True, False):
                yield _Segment(tokens, document, position, number, noisy=noisy, ends=number == len(blocks) - 1)
            position += len(tokens)


# padding of each per-token field: `to_clean` is a distance forwards in the row, `to_previous` backwards (0: none)
_PADDING = {
    "ids": 0, "position": 0, "document": -1, "block": -1, "noisy": False, "clean": False, "last": False,
    "to_clean": 0, "to_previous": 0,
}  # fmt: skip


def _places(row: Sequence[Trajectory]) -> dict[str, Tensor]:
    """The per-token fields [L] of a row, named as in _PADDING."""
    # 1. the segments in sequence: the segment of each token, and its offset there
    segments = list(_segments(row))
    length_G = torch.tensor([len(s.tokens) for s in segments])
    segment_L = torch.arange(len(segments)).repeat_interleave(length_G)
    within, length = torch.arange(len(segment_L)) - (length_G.cumsum(0) - length_G)[segment_L], length_G[segment_L]
    # 2. the fields shared by a whole segment
    shared = torch.tensor([(s.document, s.position, s.block, s.noisy, s.ends) for s in segments])
    document, position, block, noisy, ends = shared[segment_L].unbind(1)
    noisy = noisy.bool()
    clean = ~noisy & (block >= 0)
    # 3. links: a clean copy directly follows its noisy copy, so its previous clean token is before both
    to_previous = torch.where(within > 0, 1, torch.where(clean, length + 1, 0)).masked_fill(noisy, 0)
    return {
        "ids": torch.cat([s.tokens for s in segments]).long(),
        "position": position + within,
        "document": document,
        "block": block,
        "noisy": noisy,
        "clean": clean,
        "last": ends.bool() & (within == length - 1),
        "to_clean": torch.where(noisy, length, 0),
        "to_previous": to_previous,
    }


def _blocks(rows: Sequence[Sequence[Trajectory]]) -> dict[str, Tensor]:
    """The per-block fields of a batch, row by row."""
    # 1. each block's index in its response, its row, and where its noisy copy starts there
    flat = [trajectory for row in rows for trajectory in row]
    begins = [at for row in rows for at in accumulate((t.packed_length for t in row[:-1]), initial=0)]
    index = [torch.arange(len(t.count_J)) for t in flat]
    start = [at + len(t.prompt_P) + 2 * j * t.block_size for at, t, j in zip(begins, flat, index, strict=True)]
    blocks_B = torch.tensor([sum(len(t.count_J) for t in row) for row in rows])
    # 2. its states, from one flat list of all states to [N, K, n]
    count_N = torch.cat([t.count_J for t in flat]).long()
    length_N = torch.cat([t.lengths for t in flat])
    N, K, n = len(count_N), int(count_N.max()), int(length_N.max())
    block_S = torch.arange(N).repeat_interleave(count_N)
    state_S = torch.arange(len(block_S)) - (count_N.cumsum(0) - count_N)[block_S]
    states_NKn = torch.zeros(N, K, n, dtype=torch.long)
    states_NKn[block_S, state_S] = torch.cat([t.states_Sn for t in flat])[:, :n].long()
    return {
        "states_NKn": states_NKn,
        "count_N": count_N,
        "length_N": length_N,
        "index_N": torch.cat(index),
        "row_N": torch.arange(len(rows)).repeat_interleave(blocks_B),
        "start_N": torch.cat(start),
    }
