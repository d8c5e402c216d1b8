"""sigma-GPT's Algorithm 3 against a plain version of itself, and that it is biased where ASSD is not."""

import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspec.decoding.any_subset.sigma_gpt import SigmaGPT
from dspec.decoding.generation import Request
from dspec.decoding.loop import decode
from dspec.decoding.sampling import GREEDY, Sampling, Streams, draw
from dspec.errors import UserError

WARM = Sampling(temperature=0.8, top_p=1.0)


def plainly(toys: SimpleNamespace, target: Any, request: Request, orders: int) -> list[int]:
    """Algorithm 3, one uncached conditional at a time, with the decoder's uniforms."""
    text, positions = list(request.ids), list(request.positions or ())
    prompt, uniforms = len(text), Streams([request.seed], torch.device("cpu"))

    def conditional(tokens: Sequence[int], order: Sequence[int], place: int) -> torch.Tensor:
        return request.sampling.probs(toys.conditional(target, tokens, order, prompt=prompt, place=place))

    while missing := len(positions) - len(text):
        n = len(text)
        drafted_from = [conditional(text, positions, n + i) for i in range(missing)]
        uniform = uniforms.take(missing)[0]
        drafts = [int(draw(p, u)) for p, u in zip(drafted_from, uniform, strict=True)]
        drawn = uniforms.take(orders * missing).view(orders, missing).argsort(-1).tolist()
        tests, best = uniforms.take(missing)[0].tolist(), list[int]()
        for order in drawn:
            accepted, there = [order[0]], [*positions[:n], *(positions[n + i] for i in order)]
            for at in range(1, missing):
                i, before = order[at], [*text, *(drafts[j] for j in order[:at])]
                if tests[i] >= float(conditional(before, there, n + at)[drafts[i]] / drafted_from[i][drafts[i]]):
                    break
                accepted.append(i)
            best = accepted if len(accepted) > len(best) else best
        rest = [i for i in range(missing) if i not in best]
        text += [drafts[i] for i in best]
        # the order of what is still missing is the kept order's
        kept = next(order for order in drawn if order[: len(best)] == best)
        rest.sort(key=kept.index)
        positions[n:] = [positions[n + i] for i in [*best, *rest]]
    at = dict(zip(positions, text, strict=True))
    return [at[p] for p in (request.positions or ())[prompt:]]


@pytest.mark.parametrize("orders", [1, 3])
def test_it_does_what_is_printed(toys: SimpleNamespace, orders: int) -> None:
    """Alone and in a batch, cached; some rows are greedy."""
    target = toys.target(vocab=7, layers=2, seed=5)
    asked = toys.infilling(random.Random(1), 24, vocab=7, longest=9, samplings=[WARM, WARM, GREEDY])
    decoder = SigmaGPT(target=target, num_orders=orders)
    together = decode(decoder, asked)
    for request, made in zip(asked, together, strict=True):
        assert made.tokens == plainly(toys, target, request, orders)
        assert decode(decoder, [request])[0].tokens == made.tokens
        rounds = made.rounds
        assert made.nfe == 2 * len(rounds)
        assert [p.kind for p in made.passes] == ["prefill", "verify", *["decode", "verify"] * (len(rounds) - 1)]
        assert all(p.branches == orders and p.accepted == p.committed >= 1 for p in rounds)
    assert max(made.nfe / len(made.tokens) for made in together) > 1  # Theorem 1 fails
    assert any(p.accepted > 1 for made in together for p in made.rounds)
    assert [m.tokens for m in decode(decoder, asked, in_flight=3)] == [m.tokens for m in together]


@pytest.mark.parametrize("orders", [1, 3])
def test_the_positions_of_passes_add_up_to_what_was_computed(toys: SimpleNamespace, orders: int) -> None:
    """All orders of a row and the padding of its batch included; rows that are done leave at once."""
    target, shapes = toys.target(vocab=7, layers=2, seed=5), list[int]()
    target.model.get_decoder().layers[0].register_forward_hook(
        lambda _, args, out: shapes.append(args[0][..., 0].numel())
    )
    asked = toys.infilling(random.Random(1), 40, vocab=7, longest=12, samplings=[WARM])
    short, *long = next(r for r in asked if r.max_new_tokens == 1), *(r for r in asked if r.max_new_tokens > 5)
    for batch in ([short, *long], [short]):
        shapes.clear()
        made = decode(SigmaGPT(target=target, num_orders=orders), batch)
        assert sum(one.positions_computed for one in made) == sum(shapes[1:])  # the first pass is prefill
        assert sum(one.passes[0].positions for one in made) == shapes[0]
        assert not any(one.idle_positions for one in made)


def test_it_is_biased_and_assd_is_not(toys: SimpleNamespace) -> None:
    """Total variation from the enumerated distribution of sequential decoding: chance alone for ASSD."""
    target = toys.target(seed=6, vocab=4, layers=2, hidden=8, scale=0.6)
    shown = {"ids": [1, 0], "positions": [1, 3, 0, 2, 4], "sampling": WARM, "max_new_tokens": 3, "stop_ids": ()}
    exact = sequential(toys, target, Request(seed=0, **shown))
    assert sum(exact.values()) == pytest.approx(1, abs=1e-12)
    asked = [Request(seed=seed, **shown) for seed in range(1500)]

    def distance(decoder: Any) -> float:
        counts = Counter(tuple(made.tokens) for made in decode(decoder, asked))
        return sum(abs(counts[text] / len(asked) - exact.get(text, 0.0)) for text in {*counts, *exact}) / 2

    chance = sum((2 * p * (1 - p) / len(asked) / torch.pi) ** 0.5 for p in exact.values()) / 2  # its mean
    assert distance(toys.any_subset(target=target, num_drafts=3)) < 1.5 * chance
    assert distance(SigmaGPT(target=target, num_orders=1)) > 5 * chance
    assert distance(SigmaGPT(target=target, num_orders=4)) > 5 * chance


def sequential(toys: SimpleNamespace, target: Any, request: Request) -> dict[tuple[int, ...], float]:
    """The product of conditionals, over all texts."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    prompt, positions = len(request.ids), list(request.positions or ())
    for place in range(prompt, len(positions)):
        conditionals = {
            text: request.sampling.probs(
                toys.conditional(target, [*request.ids, *text], positions, prompt=prompt, place=place)
            ).tolist()
            for text in law
        }
        law = {(*text, x): law[text] * p for text, ps in conditionals.items() for x, p in enumerate(ps) if p > 0}
    return law


def test_bad_input_gets_one_line(toys: SimpleNamespace) -> None:
    target = toys.target()
    with pytest.raises(UserError, match="num_orders >= 1"):
        SigmaGPT(target=target, num_orders=0)
    decoder = SigmaGPT(target=target, num_orders=2)
    assert not decoder.lossless
    common = {"ids": [1], "sampling": GREEDY, "max_new_tokens": 2, "seed": 0}
    for request in (
        Request(**common, stop_ids=()),
        Request(**common, stop_ids=(3,), positions=[0, 1, 2]),
        Request(**common, stop_ids=(), positions=[0, 1, 2], should_stop=lambda tokens, known: None),
    ):
        with pytest.raises(UserError, match="infilling benchmarks"):
            decode(decoder, [request])
    target.mask_token_id = None
    with pytest.raises(UserError, match="has no mask token"):
        SigmaGPT(target=target, num_orders=2)
