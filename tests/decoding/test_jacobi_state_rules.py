"""Rules of the state machine that leave the text alone and only cost passes: ties, activation, what is recycled."""

import pytest

from dspec.decoding.jacobi_state import JacobiConfig, JacobiState


def _state(*, prompt: list[int], first: int, **change: float) -> JacobiState:
    settings = {"block_size": 4, "blocks": 2, "activation": 1.0, "pool_size": 4, "candidates": 2} | change
    return JacobiState(prompt, first, config=JacobiConfig(**settings), limit=16, seed=0)


def test_of_equal_rows_the_first_one_wins() -> None:
    """The draft comes before its candidates: what a tie leaves in flight is the model's own continuation of it."""
    state = _state(prompt=[1], first=2)
    rows, predictions = [[5, 6, 7], [5, 8, 7]], [[5, 9, 3, 3], [5, 9, 4, 4]]
    assert state.advance(rows, predictions) == (0, 1)
    assert state.text == [1, 2, 5, 9]
    assert state.draft == [3]


@pytest.mark.parametrize(("accepted", "opened"), [(0, 1), (1, 2)])
def test_a_block_opens_at_the_share_and_not_below(accepted: int, opened: int) -> None:
    """0.6 of four tokens are three: two are half a block, too few."""
    state = _state(prompt=[1], first=2, activation=0.6)
    predicted = [5 if accepted else 9, 9, 9, 9]
    state.advance([[5, 6, 7]], [predicted])  # the prefill's token, the accepted drafts and the model's own
    assert len(state.text) - state.start == accepted + 2
    assert state.opened == opened


def test_only_what_was_left_unverified_is_recycled() -> None:
    """Verified text is no rejected n-gram: after it the draft is all there is to try."""
    state = _state(prompt=[5], first=5, blocks=1)
    state.advance([[5, 6, 6]], [[5, 5, 8, 9]])
    assert state.text == [5, 5, 5, 5]
    assert state.drafts() == [[8]]


def test_a_new_block_begins_with_what_was_predicted_for_it() -> None:
    """The prediction behind the newest block's last token is the next block's first guess."""
    state = _state(prompt=[1], first=2, activation=0.5)
    state.advance([[5, 6, 7]], [[5, 9, 3, 4]])
    assert state.text == [1, 2, 5, 9]
    assert state.draft[:2] == [3, 4]
    assert state.block(1)[0] == 4
    assert len(state.block(1)) == 4
