"""Training rows as blocks of slots: the grid, the EOS after a response, and what is refused."""

from collections.abc import Sequence

import pytest
import torch

from data.conversations import pad
from data.packed_corpus import document_batch
from dspec.attention.masks import PADDING
from dspec.errors import UserError
from dspec.masked_diffusion.answers import OUTSIDE, SILVER_RATIO, AnswerLayout, Answers
from dspec.method import Batch
from dspec.seeding import low_discrepancy

EOS = 9


def batch(rows: Sequence[tuple[int, int]], *, ends: bool = True, first: int = 0) -> Batch:
    """Rows of (tokens of the prompt, of the response with its EOS)."""
    made = pad([([1] * prompt + [2] * (response - 1) + [EOS if ends else 2], prompt) for prompt, response in rows])
    return Batch(made.ids_BL, made.supervised_BL, row_numbers=range(first, first + len(rows)))


def answers(made: Batch, *, tail: int | None, block: int = 4, rows: int = 1, places: int = 100) -> Answers:
    layout = AnswerLayout(block_size=block, tail_blocks=tail, tail_rows=rows)
    return layout.answers(made, stop_ids=(EOS, 8), max_places=places)


def test_the_grid_begins_at_the_prompts_end() -> None:
    made = answers(batch([(3, 6), (1, 2)]), tail=0)
    _ = OUTSIDE
    assert made.slot_BL.tolist() == [[_, _, _, 0, 1, 2, 3, 4, 5, 6, 7], [_, 0, 1, 2, 3, *[_] * 6]]
    assert made.blocks.tolist() == [[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, *[PADDING] * 6]]
    assert made.ids_BL.tolist()[0] == [1, 1, 1, 2, 2, 2, 2, 2, EOS, EOS, EOS]
    assert made.ids_BL.tolist()[1][:5] == [1, 2, EOS, EOS, EOS]
    assert made.tail_BL.int().tolist() == [[0] * 9 + [1] * 2, [0, 0, 0, 1, 1] + [0] * 6]
    assert (made.end_B.tolist(), made.slots) == ([11, 5], [8, 4])


def test_without_a_tail_a_row_ends_with_its_response() -> None:
    made = answers(batch([(3, 6), (1, 2)]), tail=None)
    assert (made.end_B.tolist(), made.slots) == ([9, 3], [6, 2])
    assert not made.tail_BL.any()
    assert made.blocks[0].tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_a_response_that_was_cut_off_has_no_eos() -> None:
    made = answers(batch([(3, 6), (1, 8)], ends=False), tail=3)
    assert made.end_B.tolist() == [9, 9]
    assert not (made.ids_BL == EOS).any()
    other_stop = batch([(3, 6)], ends=False)
    other_stop.ids_BL[0, 8] = 8
    assert answers(other_stop, tail=0).ids_BL[0].tolist() == [1, 1, 1, 2, 2, 2, 2, 2, 8, EOS, EOS]


def test_further_blocks_are_evenly_many_and_shared_by_successive_rows() -> None:
    layout = AnswerLayout(block_size=4, tail_blocks=3, tail_rows=5)
    tails = [layout.tail(6, number) for number in range(2000)]
    assert {tail % 4 for tail in tails} == {2}
    further = [(tail - 2) // 4 for tail in tails]
    assert all(abs(further.count(n) - 500) <= 10 for n in range(4))
    assert all(len(set(further[i : i + 5])) == 1 for i in range(0, 2000, 5))
    assert [further[5 * i] for i in range(9)] == [int(4 * low_discrepancy(i, ratio=SILVER_RATIO)) for i in range(9)]
    assert [layout.tail(response, 0) for response in (1, 3, 4, 5, 8)] == [3, 1, 0, 3, 0]


def test_rows_of_a_batch_have_the_tails_of_their_numbers() -> None:
    """Whatever batch, or rank, they are in."""
    rows = [(2, 3), (4, 6), (1, 9), (5, 2)]
    whole = answers(batch(rows, first=7), tail=5)
    assert len(set(whole.slots)) > 1
    for i, row in enumerate(rows):
        assert answers(batch([row], first=7 + i), tail=5).slots == [whole.slots[i]]


def test_no_row_exceeds_the_models_context() -> None:
    made = answers(batch([(3, 6)]), tail=4, places=10, rows=1)
    assert made.end_B.tolist() == [10]
    assert answers(batch([(3, 6)]), tail=4, places=9).end_B.tolist() == [9]


def test_a_row_without_a_response() -> None:
    ids = torch.tensor([[EOS, 1, 2], [1, 2, EOS]])
    made = answers(Batch(ids, torch.tensor([[False] * 3, [False, True, True]]), row_numbers=(0, 1)), tail=0)
    assert (made.slots, made.end_B.tolist()) == ([0, 4], [1, 5])


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"tail_blocks": -1}, "tail_blocks=-1"),
        ({"tail_rows": 0}, "tail_rows=0"),
    ],
)
def test_settings_out_of_range(changed: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        AnswerLayout(**({"block_size": 4, "tail_blocks": 0, "tail_rows": 1} | changed))


def test_packed_rows_and_rows_without_number_or_prompt_are_refused() -> None:
    with pytest.raises(UserError, match="one conversation per row"):
        answers(document_batch([[([1, 2, EOS], 1)]], 6), tail=0)
    with pytest.raises(UserError, match="row_numbers"):
        answers(pad([([1, 2, EOS], 1)]), tail=0)
    with pytest.raises(UserError, match="needs a prompt"):
        answers(batch([(0, 3)]), tail=0)
