"""AR against transformers' generate: the same tokens at any batch size, the median's interval, and when it ends."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from eval import gate
from eval.gate import against_generate, generated, median_interval


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_generate_gives_our_tokens_for_a_ragged_batch(toys: SimpleNamespace, family: str) -> None:
    target = toys.target(family, seed=1)
    texts = toys.prompts(random.Random(0), 4, vocab=11)
    assert len({len(text) for text in texts}) > 1
    whole = toys.ar(target, texts, 10)
    assert generated(target, texts, 10, ()) == whole
    stop = whole[0][4]
    assert generated(target, texts, 10, (stop,)) == [toys.cut(row, (stop,), 10) for row in whole]


def test_interval_of_a_median() -> None:
    """Order statistics: the binomial's tails say which (6 values: 1 and 6; 9: 2 and 8; 17: 5 and 13)."""
    assert median_interval([1.0] * 5) is None
    for n, low, high in ((6, 1, 6), (8, 1, 8), (9, 2, 8), (17, 5, 13)):
        assert median_interval([float(i) for i in range(n, 0, -1)]) == [low, high]


@pytest.mark.parametrize(
    ("ratios", "batches", "trusted"),
    [
        ([1.0, 1.1, 1.2, 1.0, 1.1, 1.2, 9.0], 6, True),  # clear after six
        ([0.8] * 10, 6, False),
        (
            [0.8, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
            9,
            True,
        ),  # one slow moment
        ([0.8, 1.0] * 6, 12, True),  # never clear: ends at the cap, 0.9 is the median
    ],
)
def test_it_goes_on_until_the_interval_is_clear(
    toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, ratios: list[float], batches: int, trusted: bool
) -> None:
    seen: list[int] = []
    first: list[bool] = []
    ticks: list[None] = []
    left = iter([1.0, *ratios])  # the first one warms up

    def ratio(target: object, batch: list[list[int]], *args: Any, **how: Any) -> float:
        seen.append(len(batch))
        first.append(how["ours_first"])
        return next(left)

    monkeypatch.setattr(gate, "_ratio", ratio)
    options: dict[str, Any] = {"max_new_tokens": 4, "stop_ids": (), "floor": 0.9}
    texts = [[1], [2], [3], [4], [5]]
    check = against_generate(toys.target(), texts, batch_size=2, most=12, tick=lambda: ticks.append(None), **options)
    assert first[1:5] == [True, False, True, False]  # each goes first in turn
    assert len(ticks) == batches
    assert (check["batches"], check["trusted"], check["batch_size"]) == (batches, trusted, 2)
    assert seen[:5] == [2, 2, 2, 1, 2]  # at the batch size in use, round and round
    check = against_generate(toys.target(), [[1]], batch_size=2, most=0, **options)
    assert (check["trusted"], check["ar_over_generate"], check["batches"]) == (None, None, 0)


def test_it_measures(toys: SimpleNamespace) -> None:
    check = against_generate(
        toys.target(), [[1, 2], [3]], batch_size=2, max_new_tokens=6, stop_ids=(), most=2, floor=0.0
    )
    assert check["ar_over_generate"] > 0
    assert (check["batches"], check["interval_95"], check["trusted"]) == (2, None, True)
