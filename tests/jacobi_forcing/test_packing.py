"""Packing against its plain forms: first fit row by row, and a batch written block by block."""

import random
from collections.abc import Sequence
from dataclasses import fields

import pytest
import torch

from dspec.jacobi_forcing.packing import Trajectory, TrajectoryBatch, pack_trajectories, trajectory_batch


def sample(rng: random.Random, *, n: int, longest: int) -> Trajectory:
    response = [rng.randrange(99) for _ in range(rng.randint(1, longest))]
    blocks = []
    for begin in range(0, len(response), n):
        clean = response[begin : begin + n]
        drafts = [[rng.randrange(99) for _ in clean] for _ in range(rng.randint(0, 4))]
        blocks.append([*drafts, clean])
    prompt = [rng.randrange(99) for _ in range(rng.randint(1, 6))]
    return Trajectory.from_lists(prompt, response, blocks, block_size=n)


def first_fit(samples: Sequence[Trajectory], row_length: int) -> list[list[Trajectory]]:
    rows: list[list[Trajectory]] = []
    room: list[int] = []
    for own in samples:
        need = own.packed_length
        at = next((i for i, free in enumerate(room) if free >= need), None)
        if at is None:
            at = len(rows)
            rows.append([])
            room.append(row_length)
        rows[at].append(own)
        room[at] -= need
    return rows


@pytest.mark.parametrize("row_length", [1, 9, 14, 30, 200])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 64, 65, 300])
def test_pack_is_first_fit(row_length: int, count: int) -> None:
    """Samples longer than a row among them."""
    rng = random.Random(count)
    own = [sample(rng, n=3, longest=8) for _ in range(count)]
    got, expected = pack_trajectories(own, row_length=row_length), first_fit(own, row_length)
    assert [list(map(id, row)) for row in got] == [list(map(id, row)) for row in expected]


def block_by_block(rows: Sequence[Sequence[Trajectory]]) -> TrajectoryBatch:
    B, L = len(rows), max(sum(sample.packed_length for sample in row) for row in rows)
    ids, positions = torch.zeros(B, L, dtype=torch.long), torch.zeros(B, L, dtype=torch.long)
    document, block, previous = (torch.full((B, L), -1) for _ in range(3))
    clean_index = torch.arange(L).repeat(B, 1)
    noisy, loss, last = (torch.zeros(B, L, dtype=torch.bool) for _ in range(3))
    blocks: list[tuple[list[list[int]], int, int, int]] = []  # states, number, row, place
    for b, row in enumerate(rows):
        at = 0
        for number, sample in enumerate(row):
            P, begin = len(sample.prompt_P), at
            ids[b, at : at + P] = sample.prompt_P
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
                clean_index[b, at:clean] = torch.arange(clean, clean + n)
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
        clean_index_BL=clean_index,
        previous_index_BL=previous,
        last_BL=last,
        states_NKn=states_NKn,
        count_N=torch.tensor([len(s) for s, *_ in blocks]),
        length_N=torch.tensor([len(s[-1]) for s, *_ in blocks]),
        index_N=index,
        row_N=row_of,
        start_N=place,
    )


@pytest.mark.parametrize("seed", range(40))
def test_batch_equals_the_one_written_block_by_block(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(2, 5)
    own = [sample(rng, n=n, longest=rng.choice([1, n, 4 * n])) for _ in range(rng.randint(1, 12))]
    rows = pack_trajectories(own, row_length=rng.choice([1, 25, 60]))
    got, expected = trajectory_batch(rows), block_by_block(rows)
    for field in fields(TrajectoryBatch):
        if field.name == "row_numbers":  # set by the trainer
            continue
        one, two = getattr(got, field.name), getattr(expected, field.name)
        assert one.dtype == two.dtype, field.name
        assert torch.equal(one, two), field.name


@pytest.mark.parametrize("seed", range(10))
def test_a_beginning_keeps_whole_blocks(seed: int) -> None:
    own = sample(random.Random(seed), n=3, longest=11)
    for blocks in range(len(own.blocks) + 2):
        cut = own.beginning(blocks)
        assert cut.blocks == own.blocks[:blocks]
        assert cut.response_R.tolist() == own.response_R.tolist()[: 3 * blocks]
        assert torch.equal(cut.prompt_P, own.prompt_P)
