"""Jacobi decoding of tiny float64 models: equal to autoregressive decoding, greedy and sampled, and its counts."""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dspec.decoding.generation import Generation
from dspec.decoding.jacobi import BLOCKS
from dspec.decoding.jacobi_state import JacobiConfig
from dspec.decoding.sampling import Sampling
from dspec.decoding.state import State
from dspec.errors import UserError

WARM = Sampling(temperature=0.8, top_p=0.9)
GROUPS, CASES = 9, 40


def decoder(toys: SimpleNamespace, target, sampling: Sampling, **changes: float):
    settings = {"block_size": 4, "blocks": 1, "activation": 0.85, "pool_size": 4, "candidates": 0}
    return toys.jacobi(target=target, sampling=sampling, config=JacobiConfig(**(settings | changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize("group", range(GROUPS))
def test_greedy_text_is_the_autoregressive_one(toys: SimpleNamespace, group: int) -> None:
    """K in {1, 2, 3}, pool 1/4/8, n 4..32, batch 1 and 4, a stop at every place: GROUPS x CASES cases."""
    rng = random.Random(group)
    vocab, new = rng.randint(8, 14), 26
    target = toys.target(toys.FAMILIES[group % 3], seed=group, vocab=vocab, scale=rng.choice([0.3, 0.5, 0.8]))
    pool = toys.prompts(rng, 6, vocab=vocab)
    whole = toys.ar(target, pool, new)
    seen: list[Generation] = []
    for case in range(CASES):
        batch = 4 if case % 2 else 1
        rows = rng.sample(range(6), batch)
        stops = [whole[rows[0]][case % new]] if case % 4 else []  # the text's own token at each place in turn
        limit = rng.choice([new, rng.randint(1, new)])
        jacobi = decoder(
            toys,
            target,
            toys.GREEDY,
            block_size=rng.randint(4, 32),
            blocks=1 + (case // 2) % 3,
            activation=rng.choice([0.0, 0.2, 0.5, 0.85, 1.0]),
            pool_size=rng.choice([1, 4, 8]),
            candidates=rng.choice([0, 1, 4, 8]),
        )
        seeds = [rng.randrange(100) for _ in rows]
        result = jacobi.decode([pool[i] for i in rows], max_new_tokens=limit, stop_ids=stops, seeds=seeds)
        for i, got in zip(rows, result, strict=True):
            assert got.tokens == toys.cut(whole[i], stops, limit)
            assert got.stopped == (got.tokens[-1] in stops)
            assert got.forwards == len(got.rounds) <= len(got.tokens) - 1
        seen += result
    assert sum(r.accepted for g in seen for r in g.rounds) > 0
    assert any(g.branch_forwards > g.forwards for g in seen)
    assert any(len(g.rounds) < len(g.tokens) - 1 for g in seen)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0, top_p=1.0), WARM], ids=["greedy", "sampled"])
def test_a_row_depends_on_its_prompt_and_seed_alone(toys: SimpleNamespace, sampling: Sampling) -> None:
    """Batches of four equal four singles in every pass, though rows finish at different times."""
    target = toys.target("qwen2", seed=2, scale=0.4)
    for case in range(8):
        rng = random.Random(case)
        texts, seeds = toys.prompts(rng, 4, vocab=11), [rng.randrange(1000) for _ in range(4)]
        jacobi = decoder(
            toys, target, sampling, block_size=6, blocks=1 + case % 3, activation=0.5, candidates=3 * (case % 2)
        )
        options = {"max_new_tokens": 16, "stop_ids": [3]}
        together = jacobi.decode(texts, seeds=seeds, **options)
        for text, seed, got in zip(texts, seeds, together, strict=True):
            (alone,) = jacobi.decode([text], seeds=[seed], **options)
            for one in (alone, got):  # how wide a pass was depends on the batch
                one.passes = [replace(p, positions=0) for p in one.passes]
            assert (alone.tokens, alone.passes) == (got.tokens, got.passes)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_sampled_text_is_the_autoregressive_one(toys: SimpleNamespace, family: str) -> None:
    """Token t is drawn with the stream's t-th uniform in both, so the same seed gives the same text."""
    target = toys.target(family, seed=5, scale=0.4)
    texts = toys.prompts(random.Random(1), 4, vocab=11)
    accepted, different = 0, set()
    for seed, blocks, candidates in itertools.product(range(8), (1, 2), (0, 4)):
        jacobi = decoder(toys, target, WARM, block_size=5, blocks=blocks, activation=0.4, candidates=candidates)
        options = {"max_new_tokens": 14, "stop_ids": [2], "seeds": [seed + 50 * i for i in range(4)]}
        expected = toys.autoregressive(target=target, sampling=WARM).decode(texts, **options)
        result = jacobi.decode(texts, **options)
        assert [g.tokens for g in result] == [g.tokens for g in expected]
        accepted += sum(r.accepted for g in result for r in g.rounds)
        different.add(tuple(result[0].tokens))
    assert accepted > 0
    assert len(different) > 4  # it does sample


def test_sampled_text_beyond_one_refill_of_the_stream(toys: SimpleNamespace) -> None:
    target = toys.target(seed=3, layers=1, hidden=8, positions=700, scale=0.3)
    jacobi = decoder(toys, target, WARM, block_size=32, blocks=2)
    options = {"max_new_tokens": 600, "stop_ids": (), "seeds": [7]}
    (expected,) = toys.autoregressive(target=target, sampling=WARM).decode([[1, 2]], **options)
    (got,) = jacobi.decode([[1, 2]], **options)
    assert got.tokens == expected.tokens


def test_stop_strings_end_the_text(toys: SimpleNamespace) -> None:
    target = toys.target(seed=1, scale=0.4)
    whole = toys.ar(target, [[1, 2, 3]], 20)[0]
    jacobi = decoder(toys, target, toys.GREEDY, block_size=8, blocks=2, activation=0.3)

    def ends(tokens: list[int], known: int) -> int | None:
        return 7 if known < 7 <= len(tokens) else None

    (got,) = jacobi.decode([[1, 2, 3]], max_new_tokens=20, stop_ids=(), seeds=[0], should_stop=ends)
    assert (got.tokens, got.stopped) == (whole[:7], True)


def test_counts(toys: SimpleNamespace) -> None:
    """Every pass counts once, its rows and positions as often as they were computed, seen at the model itself."""
    target = toys.target(seed=4, scale=0.5, vocab=8)
    shapes: list[tuple[int, int]] = []
    target.embed_tokens.register_forward_hook(lambda _, args, out: shapes.append(tuple(args[0].shape)))
    branched = 0
    for seed, candidates in itertools.product(range(6), (0, 4)):
        shapes.clear()
        jacobi = decoder(toys, target, toys.GREEDY, block_size=8, blocks=2, activation=0.5, candidates=candidates)
        (got,) = jacobi.decode([[seed, 1, 2]], max_new_tokens=24, stop_ids=(), seeds=[seed])
        prefill, *passes = shapes
        assert prefill == (1, 3)
        assert (got.prefill_forwards, got.forwards, got.nfe) == (1, len(passes), 1 + len(passes))
        assert got.positions_computed == sum(width for _, width in passes)
        assert [(1, 1 + r.branches * r.drafted) for r in got.rounds] == passes  # the anchor, and all continuations
        assert got.branch_forwards == sum(r.branches for r in got.rounds)
        assert len(got.tokens) == 24
        branched += got.branch_forwards - got.forwards
    assert branched > 0


def test_promoted_drafts_reach_the_model(toys: SimpleNamespace) -> None:
    """What the model is asked to verify after a promotion is what it predicted in the pass before."""
    target = toys.target(seed=6, scale=0.3, vocab=9)
    sent: list[list[int]] = []
    got: list[list[int]] = []
    forward = target.forward

    def spy(ids_BL, **kwargs):
        output = forward(ids_BL, **kwargs)
        if kwargs["start_B"] is not None:
            sent.append(ids_BL[0].tolist())
            got.append(target.logits(output.hidden_BLD)[0].argmax(-1).tolist())
        return output

    target.forward = lambda ids_BL, **kwargs: spy(ids_BL, **({"start_B": None} | kwargs))
    jacobi = decoder(toys, target, toys.GREEDY, block_size=4, blocks=2, activation=0.25)
    opened: list[tuple[int, int]] = []

    def observe(state: State) -> None:
        (blocks,) = state.parts[BLOCKS]
        opened.append((blocks.opened - blocks.in_flight, blocks.in_flight))

    jacobi.decode([[1, 2, 3]], max_new_tokens=60, stop_ids=(), seeds=[0], observe=observe)
    reused = 0
    for k in range(1, len(sent)):
        accepted = next(i for i in range(len(got[k - 1])) if [*sent[k - 1][1:], -1][i] != got[k - 1][i])
        expected = got[k - 1][accepted : max(accepted + 1, len(got[k - 1]) - 1)]  # the anchor, and its draft
        assert sent[k][: len(expected)] == expected
        if opened[k][0] > opened[k - 1][0] and opened[k - 1][1] == 2:
            reused += len(expected) > 2
    assert reused >= 2


def test_every_setting_changes_what_is_computed(toys: SimpleNamespace) -> None:
    target = toys.target(seed=9, scale=0.4, vocab=7)
    texts = toys.prompts(random.Random(0), 4, vocab=7)

    def run(seeds: tuple[int, ...] = (0, 1, 2, 3), **changes: float) -> list[tuple]:
        base = {"block_size": 8, "blocks": 2, "activation": 0.2, "pool_size": 2, "candidates": 2}
        jacobi = decoder(toys, target, toys.GREEDY, **(base | changes))
        assert set(base) <= set(jacobi.settings())
        result = jacobi.decode(texts, max_new_tokens=40, stop_ids=(), seeds=seeds)
        return [
            (g.forwards, g.positions_computed, g.branch_forwards, tuple(r.drafted for r in g.rounds)) for g in result
        ]

    base = run()
    assert base == run()
    for changes in ({"block_size": 6}, {"blocks": 3}, {"activation": 0.9}, {"pool_size": 1}, {"candidates": 1}):
        assert run(**changes) != base, changes
    assert run(seeds=(4, 5, 6, 7)) != base


def test_refusals(toys: SimpleNamespace) -> None:
    target = toys.target()
    jacobi = decoder(toys, target, toys.GREEDY)
    for prompts, new, message in (([], 4, "no prompts"), ([[]], 4, "empty"), ([[1]], 0, "max_new_tokens")):
        with pytest.raises(UserError, match=message):
            jacobi.decode(prompts, max_new_tokens=new, stop_ids=(), seeds=[0] * len(prompts))
    with pytest.raises(UserError, match="exceed the context"):
        jacobi.decode([[1]], max_new_tokens=128, stop_ids=(), seeds=[0])


def test_the_winners_keys_are_kept(toys: SimpleNamespace) -> None:
    """Ragged prompts, candidates and finished rows: the cache's verified part equals a fresh forward pass."""
    target = toys.target("llama", seed=8, scale=0.4, vocab=9)
    texts = [[1], [2, 3, 4, 5, 6], [7, 1, 2]]
    jacobi = decoder(toys, target, toys.GREEDY, block_size=5, blocks=3, activation=0.3, candidates=4)
    caches = []
    new_cache = target.new_cache
    target.new_cache = lambda: caches.append(new_cache()) or caches[-1]
    result = jacobi.decode(texts, max_new_tokens=20, stop_ids=(), seeds=[0, 1, 2])
    last = max(range(3), key=lambda i: result[i].forwards)  # the last row to finish is still in the cache
    whole, fresh = [*texts[last], *result[last].tokens][:-1], new_cache()
    target(torch.tensor([whole]), cache=fresh)
    same = [
        [
            torch.allclose(layer.keys[row, :, : len(whole)], clean.keys[0, :, : len(whole)], rtol=0, atol=1e-10)
            for layer, clean in zip(caches[0].layers, fresh.layers, strict=True)
        ]
        for row in range(caches[0].layers[0].keys.shape[0])
    ]
    assert any(all(row) for row in same)
