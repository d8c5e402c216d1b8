"""Warped distributions, inverse-CDF draws, streams and greedy verification, each against brute force."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dspec.decoding import sampling
from dspec.decoding.jacobi_state import JacobiConfig
from dspec.decoding.proposers import DraftProposer, PromptLookupProposer
from dspec.decoding.sampling import _REFILL, Sampling, Streams, draw
from dspec.decoding.verification import verify_greedy, verify_sampled
from dspec.errors import UserError
from dspec.precision import widest

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
    pieces.select([3, 1])
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


# ---- memory


class _Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation made (views have none of their own)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.dtypes = 0, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in () if func.is_view else out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor):
                self.bytes = max(self.bytes, t.numel() * t.element_size())
                self.dtypes.add(t.dtype)
        return out


def _case(rows: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    return logits.to(dtype), torch.rand(rows, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9)])
def test_chunks_draw_what_the_whole_draws(
    dtype: torch.dtype, temperature: float, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, any leading shape, and in a fraction of the memory."""
    rows, vocab = 24, 500
    logits, uniform = _case(rows, vocab, dtype)
    recipe = Sampling(temperature=temperature, top_p=top_p)
    results = []
    for per_chunk in (rows, 5, 1):
        monkeypatch.setattr(sampling, "_CHUNK_BYTES", per_chunk * vocab * 8 + 7)
        distribution = recipe.probs(logits.view(4, 6, vocab))
        with _Largest() as seen:
            tokens = draw(distribution, uniform.view(4, 6))
        results.append((distribution, tokens))
        assert distribution.shape == (4, 6, vocab)
        assert seen.bytes <= max(per_chunk * vocab * 8, distribution.numel() * distribution.element_size())
        with _Largest() as seen:
            recipe.probs(logits[:per_chunk])
        whole = seen.bytes
        with _Largest() as seen:
            recipe.probs(logits)
        assert seen.bytes <= max(whole, distribution.numel() * distribution.element_size())
    for distribution, tokens in results[1:]:
        assert torch.equal(distribution, results[0][0])
        assert torch.equal(tokens, results[0][1])
    wide = results[0][0].view(rows, vocab).double().cumsum(-1)
    one = torch.searchsorted(wide, (uniform * wide[:, -1])[:, None], right=True)[:, 0]
    assert torch.equal(results[0][1].flatten(), one)
    assert draw(distribution[:0], uniform.view(4, 6)[:0]).shape == (0, 6)


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_deterministic_drafts_need_no_distribution_of_their_own(dtype: torch.dtype, count: int) -> None:
    """The result of a one-hot draft distribution, without making one."""
    B, J, V = 300, 4, 6
    logits, _ = _case(B * (J + 1), V, dtype)
    distribution = Sampling(temperature=0.8, top_p=0.9).probs(logits).view(B, J + 1, V)
    generator = torch.Generator().manual_seed(1)
    draft = torch.randint(V, (B, J), generator=generator)
    slots, last = (torch.rand(*shape, generator=generator, dtype=torch.float64) for shape in ((B, J), (B,)))
    counts = torch.full((B,), count)
    onehot = torch.nn.functional.one_hot(draft, V).to(dtype)
    expected = verify_sampled(draft, counts, onehot, distribution, slots, last)
    with _Largest() as seen:
        got = verify_sampled(draft, counts, None, distribution, slots, last)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert count == 0 or 0 < expected[0].float().mean() < count
    assert seen.bytes < onehot.numel() * 8 // 2


WARM = Sampling(temperature=0.9, top_p=0.9)


@pytest.mark.parametrize("kind", ["jacobi", "greedy jacobi", "speculative", "lookup"])
def test_decoders_give_the_same_in_small_chunks(
    toys: SimpleNamespace, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two distributions at a time (of speculative decoding: one prompt's) instead of all at once, token for token."""
    target = toys.target()
    proposers = {
        "speculative": lambda: DraftProposer(toys.draft(target, head="vanilla")),
        "lookup": lambda: PromptLookupProposer(num_drafts=3, max_ngram=2, device=CPU),
    }
    config = JacobiConfig(block_size=4, blocks=2, activation=0.5, pool_size=8, candidates=2)
    sizes: list[int] = []
    plain = Sampling.probs

    def spy(self: Sampling, logits: torch.Tensor) -> torch.Tensor:
        sizes.append(logits.shape[:-1].numel())
        return plain(self, logits)

    monkeypatch.setattr(Sampling, "probs", spy)
    found, largest = [], []
    for size in (2**26, 2 * 11 * 8):
        monkeypatch.setattr(sampling, "_CHUNK_BYTES", size)
        warm = toys.GREEDY if kind == "greedy jacobi" else WARM
        if "jacobi" in kind:
            decoder: Any = toys.jacobi(target=target, sampling=warm, config=config)
        else:
            decoder = toys.speculative(target=target, proposer=proposers[kind](), sampling=warm)
        prompts = [[1, 2, 1, 2, 1], [3, 4, 5], [6, 6, 6, 6]]
        result = decoder.decode(prompts, max_new_tokens=20, stop_ids=(), seeds=[0, 1, 2])
        found.append([(g.tokens, g.rounds) for g in result])
        largest.append(max(sizes, default=0))
        sizes.clear()
    assert found[0] == found[1]
    if kind == "greedy jacobi":
        return
    assert largest[0] > 3 * 3
    assert largest[1] <= (3 if kind == "jacobi" else 5)  # the prefill draws for three rows, a round's J + 1 = 5


def test_a_device_without_float64_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Apple's GPUs; uniforms stay below 1, so that a token is always found."""
    monkeypatch.setattr(sampling, "widest", lambda device: torch.float32)
    logits, _ = _case(64, 500, torch.float32)
    with _Largest() as seen:
        uniform = Streams(range(64), CPU).take(4)
        tokens = draw(Sampling(temperature=1.0, top_p=0.9).probs(logits), uniform[:, 0])
        edge = draw(torch.ones(50, 3) * torch.rand(50, 1), torch.full((50,), 1 - 2**-24))
    assert torch.float64 not in seen.dtypes
    assert (tokens < 500).all()
    assert (edge == 2).all()


def test_widest() -> None:
    assert widest(torch.device("mps")) == torch.float32
    assert widest(CPU) == widest(torch.device("cuda")) == torch.float64


@pytest.mark.parametrize("given", [False, True])
def test_a_token_that_the_target_never_says_is_never_accepted(given: bool) -> None:
    """torch.rand gives 0.0 too: u q < p must be strict, for a drafted distribution and for a drafted token."""
    target = torch.tensor([[[0.0, 0.4, 0.6]] * 2], dtype=torch.float64)
    distributions = None if given else torch.tensor([[[1.0, 0.0, 0.0]]], dtype=torch.float64)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    accepted, following = verify_sampled(
        torch.tensor([[0]]), torch.tensor([1]), distributions, target, zero, zero[:, 0]
    )
    assert (accepted.tolist(), following.tolist()) == ([0], [1])


def test_behind_a_shorter_draft_comes_the_targets_own_distribution() -> None:
    """A row with fewer drafts than the widest one rejects nothing at its end: p is drawn from, not max(p - q, 0)."""
    p, q = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64), torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    uniform = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    rows = len(uniform)
    draft, count = torch.zeros(rows, 2, dtype=torch.long), torch.ones(rows, dtype=torch.long)  # one draft of two
    accepted, following = verify_sampled(
        draft, count, q.expand(rows, 2, 3), p.expand(rows, 3, 3), torch.zeros(rows, 2, dtype=torch.float64), uniform
    )
    assert accepted.tolist() == [1] * rows
    assert (torch.bincount(following) / rows).tolist() == pytest.approx(p.tolist(), abs=2e-3)


def test_rare_tokens_can_be_drawn() -> None:
    """Beside a mass of 1 a float32 sum forgets what is below 6e-8: the tail of a large vocabulary."""
    weights = torch.tensor([[1.0, *[1e-9] * 4]], dtype=torch.float32)
    for token in range(1, 5):
        uniform = (1 + (token - 0.5) * 1e-9) / (1 + 4e-9)
        assert draw(weights, torch.tensor([uniform], dtype=torch.float64)).item() == token
