"""Theorem 2: ASSD has exactly the law of sequential any-subset decoding, for every prompt of a short text.

The decoder itself is run, once for each course that its choices can take: a stream of uniforms gives numbered cells,
and where a token is drawn or a draft tested with a cell, a script says what happens and the probability is noted.
(That `draw` and `verify_sampled` do with uniforms what is assumed here is test_output_law.py's.) The reference is the
product of conditionals, each from an uncached pass of its own.
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

from dspec.decoding import any_subset, ngram
from dspec.decoding.generation import Request
from dspec.decoding.loop import decode
from dspec.decoding.sampling import Sampling
from dspec.decoding.state import State

Law = dict[tuple[int, ...], float]
ask = any_subset.ask
WARM, WARPED = Sampling(temperature=0.7, top_p=1.0), Sampling(temperature=1.3, top_p=0.8)


class Courses:
    """What happens in each row of a batch: the script's choices, then the first one each time."""

    def __init__(self, scripts: Sequence[Sequence[int]]) -> None:
        self.scripts, self.used = scripts, set[float]()
        self.taken: list[list[tuple[int, int]]] = [[] for _ in scripts]  # (choice, of how many)
        self.weight = [1.0] * len(scripts)
        self.asked: list[int] = []  # in this pass, by row

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
        """(row, script) of each course that leaves a row's own behind its script."""
        for row, (script, taken) in enumerate(zip(self.scripts, self.taken, strict=True)):
            for i in range(len(script), len(taken)):
                yield from ((row, [c for c, _ in taken[:i]] + [other]) for other in range(1, taken[i][1]))

    def ask(self, model: Any, rows: Any, **cache: Any) -> Tensor:
        self.asked = [len(row.asked) for row in rows]
        return ask(model, rows, **cache)

    def draw(self, weights: Tensor, cells: Tensor) -> Tensor:
        rows = zip(weights.reshape(-1, weights.shape[-1]).tolist(), cells.flatten().tolist(), strict=True)
        return torch.tensor([self.choose(cell, law) for law, cell in rows]).view(cells.shape)

    def verify(
        self, draft: Tensor, count: Tensor, q: Tensor | None, p: Tensor, cells: Tensor, last: Tensor
    ) -> tuple[Tensor, Tensor]:
        accepted, following = [], []
        for b, tokens in enumerate(draft.tolist()):
            a, law = 0, p[b, 0]
            while a < count[b]:
                x = tokens[a]
                accept = min(1.0, float(p[b, a, x] / q[b, a, x]))  # type: ignore[index]
                if self.choose(float(cells[b, a]), [accept, 1 - accept]):
                    law = (p[b, a] - q[b, a]).clamp(min=0)  # type: ignore[index]
                    break
                a, law = a + 1, p[b, a + 1]
            accepted.append(a)
            # behind all that was asked for there is garbage, and nothing is committed
            following.append(self.choose(float(last[b]), law.tolist()) if a < self.asked[b] else 0)
        return torch.tensor(accepted), torch.tensor(following)


class Cells:
    """A stream of uniforms: the cells of row r are r * 10^6 and on."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.rows, self.count = list(seeds), 0

    def take(self, count: int) -> Tensor:
        first, self.count = self.count, self.count + count
        return 1e6 * torch.tensor(self.rows, dtype=torch.float64)[:, None] + torch.arange(first, self.count)

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[i] for i in rows]


def laws(decoder: Any, asked: Sequence[Request], patch: pytest.MonkeyPatch) -> list[Law]:
    """The law of the answers to each request."""
    at_once = State.drop_finished
    patch.setattr(State, "drop_finished", lambda self, **_: at_once(self, at_once=True))  # what is done chooses nothing
    patch.setattr(any_subset, "Streams", Cells)
    out: list[Law] = [{} for _ in asked]
    todo: list[tuple[int, list[int]]] = [(i, []) for i in range(len(asked))]
    while todo:
        courses = Courses([script for _, script in todo])
        patch.setattr(any_subset, "ask", courses.ask)
        patch.setattr(any_subset, "draw", courses.draw)
        patch.setattr(ngram, "draw", courses.draw)
        patch.setattr(any_subset, "verify_sampled", courses.verify)
        rows = [Request(**vars(asked[i]) | {"seed": row}) for row, (i, _) in enumerate(todo)]
        for (i, _), made, weight in zip(todo, decode(decoder, rows), courses.weight, strict=True):
            text = tuple(made.tokens)
            assert made.nfe <= len(text)  # Theorem 1, in every course
            out[i][text] = out[i].get(text, 0.0) + weight
        todo = [(todo[row][0], script) for row, script in courses.siblings()]
    return out


def sequential_law(toys: SimpleNamespace, target: Any, request: Request) -> Law:
    """The product of conditionals."""
    law: Law = {(): 1.0}
    for place in range(len(request.ids), len(request.positions)):
        longer: Law = {}
        for text, weight in law.items():
            known = {"prompt": len(request.ids), "place": place}
            logits = toys.conditional(target, [*request.ids, *text], request.positions, **known)
            probs = request.sampling.probs(logits)
            longer |= {(*text, x): weight * p for x, p in enumerate(probs.tolist()) if p > 0}
        law = longer
    return law


def every_prompt(length: int, vocab: int, sampling: Sampling) -> list[Request]:
    """All 2^N - 2 ways to show a part of a text, with random tokens."""
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


def gap(got: Law, expected: Law) -> float:
    return max(abs(got.get(text, 0.0) - expected.get(text, 0.0)) for text in {*got, *expected})


def chi_square(counts: Law, expected: Law) -> float:
    """Deviations of the statistic above its mean; cells below 5 expected are pooled, impossible texts fatal."""
    if any(text not in expected for text in counts):
        return math.inf
    samples = sum(counts.values())
    cells = [(counts.get(t, 0.0), w * samples) for t, w in expected.items() if w * samples >= 5]
    cells.append((samples - sum(c for c, _ in cells), max(samples - sum(e for _, e in cells), 1e-9)))
    statistic = sum((c - e) ** 2 / e for c, e in cells if e > 1)
    return (statistic - (len(cells) - 1)) / (2 * (len(cells) - 1)) ** 0.5


LENGTHS = [(2, 4, 5, WARPED), (3, 4, 2, WARM), (4, 4, 3, WARPED), (5, 3, 2, WARPED), (5, 3, 3, WARM), (5, 3, 5, WARM)]


@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("draft", ["self", "ngram"])
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
    draft: str,
    bonus: bool,
) -> None:
    target = getattr(toys, backbone)(seed=length, vocab=vocab, layers=2, hidden=8, scale=0.6)
    asked = every_prompt(length, vocab, sampling)
    decoder = toys.any_subset(target=target, num_drafts=k, draft=draft, bonus=bonus)
    for request, law in zip(asked, laws(decoder, asked, monkeypatch), strict=True):
        assert math.isclose(sum(law.values()), 1, abs_tol=1e-12)
        assert gap(law, sequential_law(toys, target, request)) < 1e-12


@pytest.mark.slow
def test_the_law_without_scripts(toys: SimpleNamespace) -> None:
    """By the uniforms themselves, as users have it: chi-square does not see a difference, and does with a tolerance."""
    target = toys.target(seed=4, vocab=4, layers=2, hidden=8, scale=0.6)
    request = Request(ids=[1, 0], positions=[1, 3, 0, 2, 4], sampling=WARPED, max_new_tokens=3, stop_ids=(), seed=0)
    expected = sequential_law(toys, target, request)

    def distance(**settings: Any) -> float:
        asked = [Request(**vars(request) | {"seed": seed}) for seed in range(2500)]
        counts: Law = {}
        for made in decode(toys.any_subset(target=target, num_drafts=3, **settings), asked):
            counts[tuple(made.tokens)] = counts.get(tuple(made.tokens), 0.0) + 1
        return chi_square(counts, expected)

    assert distance(draft="self", bonus=True) < 4
    assert distance(draft="ngram") < 4
    assert distance(draft="ngram", tolerance=0.3) > 20
