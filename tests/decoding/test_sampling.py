"""Warped laws, inverse-CDF draws, streams and greedy verification, each against brute force."""

import itertools

import pytest
import torch

from dspec.decoding.sampling import _REFILL, Sampling, Streams, draw, verify_greedy
from dspec.errors import UserError

CPU = torch.device("cpu")
LAST = 1 - 2**-53  # the largest uniform that torch.rand gives in float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 0.9), (1.7, 0.5), (1.0, 1e-6)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(dtype: torch.dtype, temperature: float, top_p: float) -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    probs = Sampling(temperature=temperature, top_p=top_p).probs(logits)
    assert probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for row, got in zip(logits, probs.double(), strict=True):
        plain = torch.softmax(row.double() / temperature, -1)
        order = sorted(range(7), key=lambda v: (-float(plain[v]), v))
        kept = next(order[:n] for n in range(1, 8) if n == 7 or float(plain[order[:n]].sum()) >= top_p)
        expected = torch.zeros(7, dtype=torch.float64)
        expected[kept] = plain[kept] / plain[kept].sum()
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
        assert set(got.nonzero()[:, 0].tolist()) == set(kept)


def test_tied_tokens_are_kept_in_order_of_id() -> None:
    probs = Sampling(temperature=1.0, top_p=0.5).probs(torch.zeros(1, 4))
    assert probs.tolist() == [[0.5, 0.5, 0.0, 0.0]]


@pytest.mark.parametrize(("temperature", "top_p"), [(-0.1, 1.0), (1.0, 0.0), (1.0, 1.1)])
def test_sampling_refuses_nonsense(temperature: float, top_p: float) -> None:
    with pytest.raises(UserError, match="temperature >= 0 and 0 < top_p <= 1"):
        Sampling(temperature=temperature, top_p=top_p)


def test_draw_is_the_inverse_cdf() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(300, 6, generator=generator, dtype=torch.float64) * 3  # unnormalised
    uniform = torch.rand(300, generator=generator, dtype=torch.float64)
    for w, u, token in zip(weights.tolist(), uniform.tolist(), draw(weights, uniform).tolist(), strict=True):
        cumulated = list(itertools.accumulate(w))
        assert token == next(v for v, c in enumerate(cumulated) if c > u * cumulated[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draw_never_gives_a_token_of_probability_zero(dtype: torch.dtype) -> None:
    patterns = [p for p in itertools.product((0.0, 0.3, 1e-7, 1.0, 2.0 / 3), repeat=4) if any(p)]
    weights = torch.tensor(patterns, dtype=dtype)
    edges = (0.0, 5e-324, 2**-53, 0.3, 0.5, 1 - 2**-24, 1 - 2**-52, LAST)
    for u in edges:
        tokens = draw(weights, torch.full((len(patterns),), u, dtype=torch.float64))
        assert (weights.gather(1, tokens[:, None]) > 0).all(), u
    first = torch.tensor([next(v for v, w in enumerate(p) if w) for p in patterns])
    last = torch.tensor([max(v for v, w in enumerate(p) if w) for p in patterns])
    assert torch.equal(draw(weights, torch.zeros(len(patterns), dtype=torch.float64)), first)
    big = weights.gather(1, last[:, None])[:, 0] > 0.2
    assert torch.equal(draw(weights, torch.full((len(patterns),), LAST, dtype=torch.float64))[big], last[big])


def test_streams_depend_on_their_seed_alone() -> None:
    seeds = [5, 7, 5, 9]
    n = 2 * _REFILL + 30
    whole = Streams(seeds, CPU).take(n)
    assert torch.equal(whole[0], whole[2])
    assert not torch.equal(whole[0], whole[1])
    assert torch.equal(whole[1], torch.rand(n, generator=torch.Generator().manual_seed(7), dtype=torch.float64))
    pieces = Streams(seeds, CPU)
    first = pieces.take(_REFILL - 3)
    pieces.select(torch.tensor([3, 1]))
    rest = torch.cat([pieces.take(k) for k in (7, _REFILL + 1, 20)], 1)
    again = torch.cat([first[[3, 1]], rest], 1)
    # a refill starts a new call of rand: compare with the same calls
    assert torch.equal(again[:, : 2 * _REFILL], torch.stack([_calls(s, 2) for s in (9, 7)]))


def _calls(seed: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.rand(_REFILL, generator=generator, dtype=torch.float64) for _ in range(count)])


def test_verify_greedy_against_brute_force() -> None:
    V, J = 3, 3
    rows = list(itertools.product(itertools.product(range(V), repeat=J), range(J + 1)))
    best = torch.randint(V, (len(rows), J + 1), generator=torch.Generator().manual_seed(0))
    logits = torch.nn.functional.one_hot(best, V).double()
    drafts = torch.tensor([d for d, _ in rows])
    accepted, following = verify_greedy(drafts, torch.tensor([c for _, c in rows]), logits)
    for i, (draft, count) in enumerate(rows):
        n = 0
        while n < count and draft[n] == best[i, n]:
            n += 1
        assert (accepted[i], following[i]) == (n, best[i, n])
    accepted, following = verify_greedy(drafts[:, :0], torch.zeros(len(rows), dtype=torch.long), logits[:, :1])
    assert accepted.tolist() == [0] * len(rows)
    assert torch.equal(following, best[:, 0])
