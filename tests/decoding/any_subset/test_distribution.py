"""Theorem 2: the output distribution of ASSD is exactly that of sequential decoding, for every prompt of a short text.

It is enumerated: the decoder runs once for each sequence of random outcomes. In place of uniforms it gets numbers that
only identify them; where it would draw a token or verify a draft with one, a script of outcomes decides, and the run's
probability is multiplied by the outcome's. (test_output_distribution.py tests that `draw` and `verify_sampled` turn
real uniforms into these probabilities.) The reference is the product of conditionals, each from a pass of its own.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspec.decoding.any_subset import bigrams
from dspec.decoding.any_subset import decoder as any_subset
from dspec.decoding.generation import Request
from dspec.decoding.loop import decode
from dspec.decoding.sampling import Sampling

Distribution = dict[tuple[int, ...], float]
query_logits = any_subset.query_logits
WARM, WARPED = Sampling(temperature=0.7, top_p=1.0), Sampling(temperature=1.3, top_p=0.8)


class ScriptedOutcomes:
    """The random outcomes of each row of a batch: those of its script, then the first possible one each time."""

    def __init__(self, scripts: Sequence[Sequence[int]]) -> None:
        self.scripts, self.used = scripts, set[float]()
        self.taken: list[list[tuple[int, int]]] = [[] for _ in scripts]  # (choice, of how many)
        self.weight = [1.0] * len(scripts)
        self.query_counts: list[int] = []  # in this pass, by row

    def choose(self, cell: float, probs: Sequence[float]) -> int:
        assert cell not in self.used  # no uniform decides twice
        self.used.add(cell)
        row = int(cell) // 10**6
        # less is rounding: where all known tokens are the same, XLNet's drafts have the oracle's distribution
        possible = [i for i, p in enumerate(probs) if p > 1e-14]
        taken = self.taken[row]
        which = self.scripts[row][len(taken)] if len(taken) < len(self.scripts[row]) else 0
        taken.append((which, len(possible)))
        self.weight[row] *= probs[possible[which]] / sum(probs)
        return possible[which]

    def siblings(self) -> Iterator[tuple[int, list[int]]]:
        """(row, script) of each sequence of outcomes that first differs from a row's after the row's script."""
        for row, (script, taken) in enumerate(zip(self.scripts, self.taken, strict=True)):
            for i in range(len(script), len(taken)):
                yield from ((row, [c for c, _ in taken[:i]] + [other]) for other in range(1, taken[i][1]))

    def query_logits(self, model: Any, rows: Any, **cache: Any) -> Tensor:
        self.query_counts = [len(row.queried) for row in rows]
        return query_logits(model, rows, **cache)

    def draw(self, weights: Tensor, cells: Tensor) -> Tensor:
        rows = zip(weights.reshape(-1, weights.shape[-1]).tolist(), cells.flatten().tolist(), strict=True)
        return torch.tensor([self.choose(cell, probs) for probs, cell in rows]).view(cells.shape)

    def verify(
        self, draft: Tensor, count: Tensor, q: Tensor | None, p: Tensor, cells: Tensor, last: Tensor
    ) -> tuple[Tensor, Tensor]:
        accepted, next_tokens = [], []
        for b, tokens in enumerate(draft.tolist()):
            a, probs = 0, p[b, 0]
            while a < count[b]:
                x = tokens[a]
                accept = min(1.0, float(p[b, a, x] / q[b, a, x]))  # type: ignore[index]
                if self.choose(float(cells[b, a]), [accept, 1 - accept]):
                    probs = (p[b, a] - q[b, a]).clamp(min=0)  # type: ignore[index]
                    break
                a, probs = a + 1, p[b, a + 1]
            accepted.append(a)
            # after a row's last query the logits are undefined, and no token is committed
            next_tokens.append(self.choose(float(last[b]), probs.tolist()) if a < self.query_counts[b] else 0)
        return torch.tensor(accepted), torch.tensor(next_tokens)


class Cells:
    """In place of Streams: numbers that identify a row's uniforms, r * 10^6 and following for row r."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.rows, self.count = list(seeds), 0

    def take(self, count: int) -> Tensor:
        first, self.count = self.count, self.count + count
        return 1e6 * torch.tensor(self.rows, dtype=torch.float64)[:, None] + torch.arange(first, self.count)

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[i] for i in rows]


def output_distributions(decoder: Any, requests: Sequence[Request], patch: pytest.MonkeyPatch) -> list[Distribution]:
    """The distribution of the answers to each request."""
    patch.setattr(any_subset, "Streams", Cells)
    out: list[Distribution] = [{} for _ in requests]
    todo: list[tuple[int, list[int]]] = [(i, []) for i in range(len(requests))]
    while todo:
        outcomes = ScriptedOutcomes([script for _, script in todo])
        patch.setattr(any_subset, "query_logits", outcomes.query_logits)
        patch.setattr(any_subset, "draw", outcomes.draw)
        patch.setattr(bigrams, "draw", outcomes.draw)
        patch.setattr(any_subset, "verify_sampled", outcomes.verify)
        rows = [Request(**vars(requests[i]) | {"seed": row}) for row, (i, _) in enumerate(todo)]
        for (i, _), made, weight in zip(todo, decode(decoder, rows), outcomes.weight, strict=True):
            text = tuple(made.tokens)
            assert made.nfe <= len(text)  # Theorem 1, for every sequence of outcomes
            out[i][text] = out[i].get(text, 0.0) + weight
        todo = [(todo[row][0], script) for row, script in outcomes.siblings()]
    return out


def sequential_distribution(toys: SimpleNamespace, target: Any, request: Request) -> Distribution:
    """The product of conditionals."""
    distribution: Distribution = {(): 1.0}
    for place in range(len(request.ids), len(request.positions)):
        longer: Distribution = {}
        for text, weight in distribution.items():
            known = {"prompt": len(request.ids), "place": place}
            logits = toys.conditional(target, [*request.ids, *text], request.positions, **known)
            probs = request.sampling.probs(logits)
            longer |= {(*text, x): weight * p for x, p in enumerate(probs.tolist()) if p > 0}
        distribution = longer
    return distribution


def every_prompt(length: int, vocab: int, sampling: Sampling) -> list[Request]:
    """All 2^N - 2 ways to show some, not all, tokens of a text; the tokens are random."""
    rng, made = random.Random(length), []
    for shown in (s for m in range(1, length) for s in itertools.combinations(range(length), m)):
        holes = [p for p in range(length) if p not in shown]
        made.append(
            Request(
                ids=[rng.randrange(vocab - 1) for _ in shown], positions=[*shown, *holes], sampling=sampling,
                max_new_tokens=len(holes), stop_ids=(), seed=0,
            )
        )  # fmt: skip
    assert len(made) == 2**length - 2
    return made


def gap(got: Distribution, expected: Distribution) -> float:
    return max(abs(got.get(text, 0.0) - expected.get(text, 0.0)) for text in {*got, *expected})


def chi_square(counts: Distribution, expected: Distribution) -> float:
    """How many standard deviations the chi-square statistic is above its mean. Texts expected fewer than 5 times are
    pooled; infinite if a text occurs that cannot."""
    if any(text not in expected for text in counts):
        return math.inf
    samples = sum(counts.values())
    cells = [(counts.get(t, 0.0), w * samples) for t, w in expected.items() if w * samples >= 5]
    cells.append((samples - sum(c for c, _ in cells), max(samples - sum(e for _, e in cells), 1e-9)))
    statistic = sum((c - e) ** 2 / e for c, e in cells if e > 1)
    return (statistic - (len(cells) - 1)) / (2 * (len(cells) - 1)) ** 0.5


LENGTHS = [(2, 4, 5, WARPED), (3, 4, 2, WARM), (4, 4, 3, WARPED), (5, 3, 2, WARPED), (5, 3, 3, WARM), (5, 3, 5, WARM)]


@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("drafted_by", ["model", "bigrams"])
@pytest.mark.parametrize(
    ("backbone", "length", "vocab", "k", "sampling"),
    [("target", *case) for case in LENGTHS] + [("xlnet", 3, 4, 2, WARM), ("xlnet", 4, 3, 3, WARPED)],
)
def test_theorem_2(
    toys: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    backbone: str,
    length: int,
    vocab: int,
    k: int,
    sampling: Sampling,
    drafted_by: str,
    bonus: bool,
) -> None:
    target = getattr(toys, backbone)(seed=length, vocab=vocab, layers=2, hidden=8, scale=0.6)
    requests = every_prompt(length, vocab, sampling)
    decoder = toys.any_subset(target=target, num_drafts=k, drafted_by=drafted_by, bonus=bonus)
    for request, got in zip(requests, output_distributions(decoder, requests, monkeypatch), strict=True):
        assert math.isclose(sum(got.values()), 1, abs_tol=1e-12)
        assert gap(got, sequential_distribution(toys, target, request)) < 1e-12


@pytest.mark.slow
def test_theorem_2_by_sampling(toys: SimpleNamespace) -> None:
    """With real uniforms a chi-square test finds no difference without a tolerance, and finds one with it."""
    target = toys.target(seed=4, vocab=4, layers=2, hidden=8, scale=0.6)
    request = Request(ids=[1, 0], positions=[1, 3, 0, 2, 4], sampling=WARPED, max_new_tokens=3, stop_ids=(), seed=0)
    expected = sequential_distribution(toys, target, request)

    def distance(**settings: Any) -> float:
        requests = [Request(**vars(request) | {"seed": seed}) for seed in range(2500)]
        counts: Distribution = {}
        for made in decode(toys.any_subset(target=target, num_drafts=3, **settings), requests):
            counts[tuple(made.tokens)] = counts.get(tuple(made.tokens), 0.0) + 1
        return chi_square(counts, expected)

    assert distance(drafted_by="model", bonus=True) < 4
    assert distance(drafted_by="bigrams") < 4
    assert distance(drafted_by="bigrams", tolerance=0.3) > 20
