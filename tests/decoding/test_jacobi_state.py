"""The blocks in flight as a state machine, against models that are plain functions of the text before a token."""

import random
from collections.abc import Callable, Sequence

import pytest

from dspec.decoding import jacobi_state as blocks
from dspec.decoding.jacobi_state import JacobiConfig, JacobiState, Pool
from dspec.errors import UserError

Model = Callable[[Sequence[int]], int]


def config(**changes: float) -> JacobiConfig:
    settings = {"block_size": 4, "blocks": 1, "activation": 0.85, "pool_size": 0, "candidates": 0}
    return JacobiConfig(**(settings | changes))  # type: ignore[arg-type]


def passes(state: JacobiState, model: Model, *, new: int, spy: Callable[[JacobiState], None] = lambda f: None) -> int:
    """Runs to `new` tokens; the number of passes."""
    count = 0
    while len(state.text) - state.start < new:
        spy(state)
        rows = state.drafts()
        text = state.text
        state.advance(rows, [[model([*text, *row[:k]]) for k in range(len(row) + 1)] for row in rows])
        count += 1
    return count


def serial(prompt: list[int], model: Model, new: int) -> list[int]:
    text = list(prompt)
    for _ in range(new):
        text.append(model(text))
    return text


def by_position(text: Sequence[int]) -> int:
    """Whatever stands before: 100 + the position."""
    return 100 + len(text)


def by_last(text: Sequence[int]) -> int:
    return (text[-1] * 7 + 3) % 101


def hashed(seed: int, vocab: int, reach: int) -> Model:
    """A random function of the last `reach` tokens, where some n-grams recur."""

    def model(text: Sequence[int]) -> int:
        return random.Random(hash((seed, *text[-reach:]))).randrange(vocab)

    return model


@pytest.mark.parametrize("seed", range(60))
def test_text_is_the_models_own(seed: int) -> None:
    rng = random.Random(seed)
    model = hashed(seed, rng.randint(2, 30), rng.randint(1, 3))
    prompt = [rng.randrange(9) for _ in range(rng.randint(1, 5))]
    settings = config(
        block_size=rng.randint(2, 12),
        blocks=rng.randint(1, 4),
        activation=rng.choice([0.0, 0.3, 0.85, 1.0]),
        pool_size=rng.choice([1, 4, 8]),
        candidates=rng.choice([0, 1, 4]),
    )
    new = rng.randint(1, 40)
    state = JacobiState(prompt, model(prompt), config=settings, limit=new, seed=seed)

    def check(f: JacobiState) -> None:
        n, rows = settings.block_size, f.drafts()
        assert 1 <= f.in_flight <= settings.blocks
        assert len({len(row) for row in rows}) == 1
        assert len(rows) <= 1 + settings.candidates
        assert rows[0] == f.draft
        assert len({tuple(row) for row in rows}) == len(rows)
        end = len(f.text) + len(f.draft) - f.start
        assert end == min(f.opened * n, new)  # drafts reach to the end of the newest block, never past the limit
        assert len(f.draft) >= 1

    count = passes(state, model, new=new, spy=check)
    assert state.text[: len(prompt) + new] == serial(prompt, model, new)
    assert count <= new - 1  # never slower than one token per pass


def test_converges_in_two_passes_where_only_the_position_counts() -> None:
    """The first pass predicts the block, the second verifies it and one token more."""
    state = JacobiState([1], by_position([1]), config=config(block_size=8), limit=33, seed=0)
    ends = []
    assert passes(state, by_position, new=33, spy=lambda f: ends.append(len(f.text) - 1)) == 8
    assert ends == [1, 2, 9, 10, 17, 18, 25, 26]  # output tokens verified before each pass


def three_back(text: Sequence[int]) -> int:
    """Right (100 + position) where the token three places back is right: each pass moves the frontier by three."""
    return 100 + len(text) if len(text) < 4 or text[-3] == 100 + len(text) - 3 else text[-1] % 50


def test_promoted_drafts_are_reused() -> None:
    """With a second block in flight the frontier runs on over the blocks' borders, as in one block of endless length.

    Drafts thrown away at promotion would start it anew at every border, as with one block.
    """

    def count(**changes: float) -> int:
        state = JacobiState([101, 102, 103], 103, config=config(**changes), limit=97, seed=0)
        return passes(state, three_back, new=97)

    endless, alone, pair = count(block_size=97), count(block_size=8), count(block_size=8, blocks=2, activation=0.25)
    assert endless == 34
    assert alone > 40
    assert pair <= endless + 1


@pytest.mark.parametrize("seed", range(10))
def test_the_draft_after_a_promotion_is_what_the_last_pass_predicted(seed: int) -> None:
    model = hashed(seed, 6, 2)
    state = JacobiState(
        [1, 2], model([1, 2]), config=config(block_size=4, blocks=3, activation=0.25), limit=80, seed=seed
    )
    promoted = 0
    while len(state.text) < 70:
        active, draft, text = state.opened - state.in_flight, list(state.draft), list(state.text)
        predicted = [model([*text, *draft[:k]]) for k in range(len(draft) + 1)]
        _, accepted = state.advance([draft], [predicted])
        kept = predicted[accepted + 1 : -1]
        assert state.draft[: len(kept)] == kept
        now = state.opened - state.in_flight
        promoted += now > active and len(kept) > 0  # another block is real-active, and had drafts
    assert promoted >= 3


def test_activation_opens_the_next_block_when_the_newest_agrees_enough() -> None:
    for ratio, at in ((0.0, 1), (0.5, 4), (0.75, 6), (1.0, 8)):
        state = JacobiState(
            [1], by_last([1]), config=config(block_size=8, blocks=2, activation=ratio), limit=60, seed=3
        )
        first = None
        while first is None:
            if state.in_flight == 2:
                first = len(state.text) - 1
                break
            rows = state.drafts()
            state.advance(rows, [[by_last([*state.text, *r[:k]]) for k in range(len(r) + 1)] for r in rows])
            if state.opened == 2:
                first = len(state.text) - 1
        assert first == at  # by_last verifies one token per pass
    # a block is counted by its stable tokens while it is pseudo-active, and the third one opens behind it
    state = JacobiState([1], by_position([1]), config=config(block_size=4, blocks=3, activation=1.0), limit=60, seed=3)
    opened = []
    passes(state, by_position, new=20, spy=lambda f: opened.append(f.in_flight))
    assert max(opened) == 1  # the whole block is verified when its last token agrees
    state = JacobiState([1], by_position([1]), config=config(block_size=4, blocks=3, activation=0.5), limit=60, seed=3)
    passes(state, by_position, new=20, spy=lambda f: opened.append(f.in_flight))
    assert max(opened) == 2


def test_new_block_starts_from_its_seed_and_the_text() -> None:
    states = [JacobiState([5, 6, 7], 8, config=config(block_size=16), limit=40, seed=s) for s in (0, 0, 1)]
    assert states[0].draft == states[1].draft != states[2].draft
    assert set(states[0].draft) <= {5, 6, 7, 8}
    assert len(states[0].draft) == 15


def test_pool_forgets_and_finds_the_newest_first() -> None:
    pool = Pool(2)
    for run in ([9, 1], [1, 2, 1, 3], [4, 1, 5, 1]):
        pool.add(run)
    assert list(pool.after(1)) == [[5, 1], [2, 1, 3], [3]]
    assert list(pool.after(9)) == []
    assert list(Pool(0).after(1)) == []


def test_candidates_win_where_the_draft_was_shifted() -> None:
    """The draft repeats a token: what follows it is right, one position too late. Recycling finds it."""
    truth = [*range(10, 40)]

    def model(text: Sequence[int]) -> int:
        right = text[1:] == truth[: len(text) - 1]
        if right:
            return truth[len(text) - 1]
        return text[-2] + 1 if text[-1] == text[-2] else truth[max(0, len(text) - 2) % 30]

    def count(**changes: int) -> tuple[int, list[int]]:
        state = JacobiState([1], model([1]), config=config(block_size=8, **changes), limit=24, seed=1)
        rows: list[int] = []
        return passes(state, model, new=24, spy=lambda f: rows.append(len(f.drafts()))), rows

    without, rows = count()
    assert set(rows) == {1}
    counts = [count(pool_size=pool, candidates=c) for pool, c in ((1, 1), (4, 4), (8, 4))]
    assert all(few < without for few, _ in counts)
    assert max(counts[0][1]) == 2
    assert max(counts[1][1]) > 2


def test_verified_twice_is_verified_once() -> None:
    """A candidate equal to the draft, or to another candidate, is no further row."""
    state = JacobiState([1], 2, config=config(block_size=4, pool_size=4, candidates=4), limit=20, seed=0)
    state.draft = [7, 8, 9]
    for run in ([2, 7, 8, 9], [2, 5], [2, 5, 8, 9], [3, 2, 6, 6, 6, 6]):
        state._pool.add(run)
    assert state.drafts() == [[7, 8, 9], [6, 6, 6], [5, 8, 9]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size >= 2"),
        ({"blocks": 0}, "blocks >= 1"),
        ({"activation": 1.5}, "must lie in"),
        ({"activation": -0.1}, "must lie in"),
        ({"candidates": -1}, "pool"),
        ({"candidates": 4}, "pool_size=0 must be at least 1"),
    ],
)
def test_refusals(changes: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(**changes)


def test_agreeing() -> None:
    assert blocks._agreeing([1, 2, 3], [1, 2, 4, 5]) == 2
    assert blocks._agreeing([], [1]) == 0
    assert blocks._agreeing([1, 2], [1, 2, 3]) == 2
