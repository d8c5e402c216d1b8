"""The state machine of diffusion decoding: what always holds, whatever a model guesses, and its rules one by one."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspec.decoding.diffusion.block_state import AnswerState, BlockRules, Guess, Phase, by_confidence
from dspec.decoding.diffusion.lookahead import Lookahead
from dspec.errors import UserError

PLAIN: dict[str, Any] = {"block_size": 4, "append_ratio": 0.5, "activate_ratio": 1.0, "threshold": 0.9, "min_fills": 1}
STOP = 7


def begin(limit: int, **rules: Any) -> AnswerState:
    return AnswerState.begin(rules=BlockRules(**PLAIN | rules), prompt=3, limit=limit, stop_ids=[STOP])


def guess(
    state: AnswerState, sure: Mapping[int, float] = {}, *, token: int = 1, other: float = 0.1
) -> dict[int, Guess]:
    return {slot: Guess(token, p := sure.get(slot, other), p) for slot in state.open}


def filled(state: AnswerState, *slots: int, token: int = 1) -> AnswerState:
    return state.filled(dict.fromkeys(slots, token))


shares = st.floats(0, 1)
rules = st.builds(
    dict, block_size=st.none() | st.integers(1, 5), append_ratio=shares, activate_ratio=shares, threshold=shares,
    min_fills=st.integers(1, 3),
)  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(rule=rules, limit=st.integers(5, 17), k=st.integers(0, 3), draws=st.randoms(use_true_random=False))
def test_whatever_is_guessed(rule: dict[str, Any], limit: int, k: int, draws: Any) -> None:
    """With and without lookahead branches: a block is cached after its predecessors and with its final tokens, each
    slot is filled once, blocks are appended one at a time, and the answer ends within as many rounds as it has slots.
    """
    state, rounds = begin(limit, **rule), 0
    ahead, tried = Lookahead(branches=k, branch_score="mean", segment=1), list[tuple[int, int]]()
    while not state.done:
        rounds += 1
        branch = draws.randrange(len(tried) + 1)
        fills = dict(tried[branch - 1 : branch]) if branch else {}
        winner = state.filled(fills)
        guesses = {
            s: Guess(draws.choice([1, 2, STOP, *range(8, 20)]), draws.random(), draws.random()) for s in state.open
        }
        chosen = winner.choose({slot: one for slot, one in guesses.items() if slot not in fills})
        after = winner.advance(chosen, cached=state.settled)
        changed = [i for i in range(limit) if after.tokens[i] != state.tokens[i]]
        assert sorted(changed) == sorted(fills | chosen)
        assert all(state.tokens[i] is None for i in changed)  # each slot once
        assert changed
        assert set(changed) <= set(state.open)
        assert state.cached <= after.cached <= state.prompt + limit
        leading = next((i for i in range(limit) if state.tokens[i] is None), limit)
        assert after.cached - state.prompt <= leading  # what was computed is final, and so is all before it
        assert 0 <= len(after.blocks) - len(state.blocks) <= 1
        assert [b.first for b in after.blocks] == [0, *[b.end for b in after.blocks[:-1]]]
        assert after.blocks[-1].end <= limit
        phases = [after.phase(block) for block in after.blocks]
        assert Phase.CACHED not in phases[phases.count(Phase.CACHED) :]  # cached blocks are the first ones
        assert all(new.activated >= old.activated for old, new in zip(state.blocks, after.blocks, strict=False))
        if state.stopped:
            assert len(after.blocks) == len(state.blocks)
            assert after.end <= state.end
        tried = ahead.candidates(after, {s: g for s, g in guesses.items() if s not in fills | chosen})
        assert len(tried) <= k
        assert {slot for slot, _ in tried} <= set(after.open)
        state = after
    assert rounds <= limit
    assert len(state.filled_prefix) == state.end
    assert state.end == limit or state.filled_prefix[-1] == STOP
    assert STOP not in state.filled_prefix[:-1]


def test_a_block_is_appended_at_the_share_and_not_below() -> None:
    state = begin(12)
    assert [b.end for b in filled(state, 0).advance({}).blocks] == [4]
    assert [b.end for b in state.advance({0: 1, 2: 1}).blocks] == [4, 8]
    assert [b.end for b in state.advance(dict.fromkeys(range(4), 1)).blocks] == [4, 8]  # one per round
    assert [b.end for b in begin(12, append_ratio=0.0).advance({}).advance({}).blocks] == [4, 8, 12]


def test_no_block_after_a_stop() -> None:
    state = begin(12)
    assert len(state.advance({0: 1, 1: 1}).blocks) == 2
    assert len(state.advance({0: 1, 1: STOP}).blocks) == 1


def test_the_last_block_is_shorter() -> None:
    state = begin(10, append_ratio=0.0).advance({}).advance({})
    assert [(b.first, b.end) for b in state.blocks] == [(0, 4), (4, 8), (8, 10)]
    assert [(b.first, b.end) for b in begin(10, block_size=None).blocks] == [(0, 10)]


def test_activation_is_at_the_share_and_stays() -> None:
    state = begin(12, activate_ratio=0.75, append_ratio=0.0).advance({})
    assert [b.activated for b in state.blocks] == [True, False]
    assert [b.activated for b in state.advance({0: 1, 1: 1}).blocks] == [True, False, False]
    now = state.advance({0: 1, 1: 1, 2: 1})
    assert [b.activated for b in now.blocks] == [True, True, False]
    blocks = tuple(replace(b, activated=True) for b in now.blocks)
    assert [b.activated for b in replace(now, blocks=blocks).advance({}).blocks] == [True] * 3


def test_a_block_that_is_appended_after_a_full_one_is_activated_at_once() -> None:
    state = begin(12, append_ratio=1.0).advance(dict.fromkeys(range(4), 1))
    assert [b.activated for b in state.blocks] == [True, True]


def test_a_lookahead_token_activates_the_next_block() -> None:
    state = begin(12, append_ratio=0.0).advance({}).advance({0: 1, 1: 1, 2: 1})
    assert [b.activated for b in filled(state, 3).blocks] == [True, True, False]


def test_what_is_filled() -> None:
    """Above the threshold, not at it; an activated block at least one, a semi-activated one nothing below."""
    state = begin(12, append_ratio=0.0).advance({})
    assert state.choose(guess(state, {1: 0.91, 3: 0.9})) == {1: 1}
    assert state.choose(guess(state, {2: 0.5})) == {2: 1}
    assert state.choose(guess(state, {2: 0.5, 6: 0.9})) == {2: 1}
    assert state.choose(guess(state, {2: 0.5, 6: 0.95})) == {2: 1, 6: 1}
    assert state.choose(guess(state)) == {0: 1}  # of equals the first
    several = begin(12, min_fills=3, threshold=1.0)
    assert set(several.choose(guess(several, {1: 1.0, 3: 0.4}))) == {0, 1, 3}
    mixed = begin(12, min_fills=2)
    ranked = {s: Guess(1, 0.95 if s == 3 else 0.1, -s) for s in mixed.open}  # the sure one is ranked last
    assert set(mixed.choose(ranked)) == {0, 3}
    assert by_confidence([0, 1, 2], ranked) == [0, 1, 2]


def test_what_stands_after_a_stop_is_not_waited_for() -> None:
    state = begin(12, append_ratio=0.0).advance({}).advance({2: STOP, 5: 1})
    assert (state.end, state.open, state.done) == (3, (0, 1), False)
    assert filled(state, 0).filled_prefix == [1]
    done = filled(state, 0, 1)
    assert (done.filled_prefix, done.done, done.open) == ([1, 1, STOP], True, ())
    earlier = filled(state, 1, token=STOP)
    assert (earlier.end, earlier.open) == (2, (0,))
    with pytest.raises(ValueError, match="not open"):
        state.filled({3: 1})


def test_phases_and_what_is_settled() -> None:
    state = begin(12, append_ratio=0.0)
    assert (state.cached, state.settled) == (0, 3)
    state = state.advance({}).advance(dict.fromkeys(range(4, 8), 1))
    assert (state.cached, state.settled) == (3, 3)
    assert [state.phase(b) for b in state.blocks] == [Phase.ACTIVE, Phase.DONE, Phase.ACTIVE]
    state = state.advance(dict.fromkeys(range(4), 1))
    assert (state.cached, state.settled) == (3, 11)  # both at once
    assert [state.phase(b) for b in state.blocks] == [Phase.DONE, Phase.DONE, Phase.ACTIVE]
    state = state.advance({9: 1})
    assert state.cached == 11
    assert [state.phase(b) for b in state.blocks] == [Phase.CACHED, Phase.CACHED, Phase.ACTIVE]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"threshold": 1.1}, "threshold=1.1"), ({"threshold": float("nan")}, "threshold=nan"),
        ({"append_ratio": -0.1}, "append_ratio=-0.1"), ({"activate_ratio": 2}, "activate_ratio=2"),
        ({"block_size": 0}, "block_size=0"), ({"min_fills": 0}, "at least one slot"),
        ({"block_size": 13}, "block_size=13 is larger than max_new_tokens=12"),
    ],
)  # fmt: skip
def test_bad_rules(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        begin(12, **wrong)


# ---- lookahead


def test_candidates_are_the_surest_guesses_left() -> None:
    state = begin(12)
    guesses = guess(state, {0: 0.95, 1: 0.2, 2: 0.6, 3: 0.6}, token=5)
    after = state.advance(state.choose(guesses))
    tried = [Lookahead(branches=k, branch_score="mean", segment=1).candidates(after, guesses) for k in (0, 2, 9)]
    assert tried == [[], [(2, 5), (3, 5)], [(2, 5), (3, 5), (1, 5)]]


def test_branch_confidence() -> None:
    confidences = [0.5, 1.0, 0.0, 0.25]

    def score(how: str, segment: int = 2) -> float:
        return Lookahead(branches=1, branch_score=how, segment=segment).score(confidences, max_confidence=1.0)

    assert score("mean") == 0.4375
    assert score("lowest_segment") == 0.125
    assert score("sliding_window") == pytest.approx((0.75 + 0.5 + 0.125) / 3)
    assert score("lowest_segment", 9) == 0.4375  # fewer slots than a segment
    assert Lookahead(branches=1, branch_score="mean", segment=1).score([], max_confidence=1.0) == 1.0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"branches": -1}, "branches=-1"),
        ({"branch_score": "best"}, "mean, sliding_window"),
        ({"segment": 0}, "segment=0"),
    ],
)
def test_bad_lookahead(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Lookahead(**{"branches": 1, "branch_score": "mean", "segment": 2} | wrong)
