"""The serial decoder against transformers' own `generate`, against no cache at all, and rows against batches."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dspec.decoding.generation import Generation, Request
from dspec.decoding.sampling import Sampling, Streams, draw
from dspec.decoding.state import Row, State
from dspec.errors import UserError
from dspec.models.cache import PositionCache

WARM = Sampling(temperature=0.7, top_p=0.9)


def _generate(target, texts: list[list[int]], *, new: int, stops: list[int] | None) -> list[list[int]]:
    """transformers, with left padding."""
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(t)) + t for t in texts])
    seen = torch.tensor([[0] * (longest - len(t)) + [1] * len(t) for t in texts])
    out = target.model.generate(
        ids, attention_mask=seen, max_new_tokens=new, do_sample=False, eos_token_id=stops, pad_token_id=0
    )
    return out[:, longest:].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("seed", range(3))
def test_equals_transformers_generate(toys: SimpleNamespace, family: str, seed: int) -> None:
    target = toys.target(family, seed=seed, vocab=17)
    texts = toys.prompts(random.Random(seed), 4, vocab=17)
    decoder = toys.autoregressive(target=target, sampling=toys.GREEDY)
    free = _generate(target, texts, new=9, stops=None)
    assert len({token for row in free for token in row}) > 3  # no constant text
    assert [g.tokens for g in decoder.decode(texts, max_new_tokens=9, stop_ids=(), seeds=[0] * 4)] == free
    for stop in {row[i] for row in free for i in (0, 2, 5)}:
        result = decoder.decode(texts, max_new_tokens=9, stop_ids=[stop], seeds=[0] * 4)
        for text, got in zip(texts, result, strict=True):
            (alone,) = _generate(target, [text], new=9, stops=[stop])
            assert got.tokens == alone
            assert got.stopped == (alone[-1] == stop)


def test_equals_decoding_without_cache(toys: SimpleNamespace) -> None:
    target = toys.target(seed=5)
    decoder = toys.autoregressive(target=target, sampling=WARM)
    for seed, text in enumerate(toys.prompts(random.Random(1), 3, vocab=11)):
        (got,) = decoder.decode([text], max_new_tokens=8, stop_ids=(), seeds=[seed])
        uniforms = Streams([seed], torch.device("cpu")).take(8)[0]
        naive = list(text)
        for u in uniforms:
            logits = target.logits(target(torch.tensor([naive])).hidden_BLD[:, -1])
            naive.append(int(draw(WARM.probs(logits), u[None])))
        assert got.tokens == naive[len(text) :]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0, top_p=1.0), WARM], ids=["greedy", "sampled"])
def test_batch_equals_singles_with_compaction(toys: SimpleNamespace, sampling: Sampling) -> None:
    target = toys.target("qwen2", seed=2)
    texts = toys.prompts(random.Random(3), 7, vocab=11)
    decoder = toys.autoregressive(target=target, sampling=sampling)
    free = decoder.decode(texts, max_new_tokens=12, stop_ids=(), seeds=range(7))
    for stop in sorted({g.tokens[1] for g in free}):
        batch = decoder.decode(texts, max_new_tokens=12, stop_ids=[stop], seeds=range(7))
        singles = [
            decoder.decode([text], max_new_tokens=12, stop_ids=[stop], seeds=[seed])[0]
            for seed, text in enumerate(texts)
        ]
        for g in (*batch, *singles):  # some rode along, prompts were padded
            g.idle_positions, g.passes = 0, [replace(p, positions=0) for p in g.passes]
        assert batch == singles
        assert len({len(g.tokens) for g in batch}) > 1  # rows end at different times
        for one, whole in zip(batch, free, strict=True):
            assert one.tokens == toys.cut(whole.tokens, [stop], 12)


def test_accounting(toys: SimpleNamespace) -> None:
    target = toys.cycle_target()
    decoder = toys.autoregressive(target=target, sampling=toys.GREEDY)
    a, b = decoder.decode([[3], [3, 7]], max_new_tokens=6, stop_ids=[6], seeds=[0, 0])
    assert (a.tokens, a.stopped) == ([4, 5, 6], True)
    assert (b.tokens, b.stopped) == ([8, 9, 10, 11, 12, 13], False)
    for g in (a, b):
        assert (g.prefill_tokens, g.prefill_forwards) == (1, 1)
        assert g.forwards == g.positions_computed == len(g.tokens) - 1
        assert g.nfe == len(g.tokens)
        assert g.rounds == []
    (one,) = decoder.decode([[3]], max_new_tokens=1, stop_ids=(), seeds=[0])
    assert (one.tokens, one.forwards) == ([4], 0)


def test_refusals(toys: SimpleNamespace) -> None:
    decoder = toys.autoregressive(target=toys.target(positions=16), sampling=toys.GREEDY)
    cases = (
        ([], 3, "no prompts"),
        ([[1]], 0, "max_new_tokens=0"),
        ([[1], []], 3, "prompt 1 is empty"),
        ([[1] * 9], 8, "16 positions"),
    )
    for texts, new, words in cases:
        with pytest.raises(UserError, match=words):
            decoder.decode(texts, max_new_tokens=new, stop_ids=(), seeds=[0] * len(texts))
    assert len(decoder.decode([[1] * 9], max_new_tokens=7, stop_ids=(), seeds=[0])[0].tokens) == 7


def test_the_last_rows_take_the_places_of_finished_ones(toys: SimpleNamespace) -> None:
    """At once, and without moving any other row."""

    def left(active: list[bool]) -> list[int]:
        request = Request(ids=[1], sampling=toys.GREEDY, max_new_tokens=9, stop_ids=(), seed=0)
        rows = [Row(request, [i], Generation(stopped=not on)) for i, on in enumerate(active)]
        state = State(rows, PositionCache(1), Streams(range(len(rows)), torch.device("cpu")))
        state.drop_finished()
        return [row.text[0] for row in state.rows]

    assert left([True, False, True]) == [0, 2]
    assert left([True, False, True, False]) == [0, 2]
    assert left([False, True, True, False, True, True]) == [5, 1, 2, 4]
    assert left([False, False, False, True]) == [3]
    assert left([True, True, False]) == [0, 1]
    assert left([False, False]) == []
    assert left([True]) == [0]
