"""Sampled speculative decoding has the target's distribution: exactly on enumerated toys, statistically end to end.

The enumeration integrates `verify_sampled` over its uniforms as a black box: acceptance is a step in each slot's
uniform and the drawn token a staircase in the last one, so bisection finds every step to 1e-15. It knows nothing of
min(1, p/q) or of the residual. Beside it stand decoders that are biased on purpose; the same test must reject them.

Legend: R = rows (one a draft tuple), J = draft slots, V = vocabulary.
"""

import itertools
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dspec.decoding import speculative
from dspec.decoding.proposers import DraftProposer, PromptLookupProposer
from dspec.decoding.sampling import Sampling, Streams, draw
from dspec.decoding.verification import ConfidenceThreshold, verify_sampled

Distribution = dict[tuple[int, ...], float]
Text = tuple[int, ...]
Model = Callable[[Text], Tensor]
Verify = Callable[..., tuple[Tensor, Tensor]]
Count = Callable[[Text], int]
LAST, NEW = 1 - 2**-53, 3


def table(seed: int, vocab: int, *, sampling: Sampling) -> Model:
    """A random distribution for every text."""

    @cache
    def distribution(text: Text) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *text)) % 2**31)
        return sampling.probs(1.2 * torch.randn(vocab, generator=generator, dtype=torch.float64))

    return distribution


def total_variation(p: Tensor, q: Tensor) -> float:
    return float((p - q).abs().sum() / 2)


def _steps(holds: Callable[[Tensor], Tensor], rows: int) -> Tensor:
    """sup {u : holds(u)} for each row, where `holds` is true below some point and false above it."""
    low, high = torch.zeros(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.float64)
    possible = holds(low)
    for _ in range(50):
        middle = (low + high) / 2
        on = holds(middle)
        low, high = torch.where(on, middle, low), torch.where(on, high, middle)
    return torch.where(possible, (low + high) / 2, 0.0)


def round_distributions(
    verify: Verify, p: Model, q: Model | Text, texts: list[Text], *, J: int, count: Count
) -> list[Distribution]:
    """Distributions of the tokens that one round emits after each text. `q` a tuple: deterministic drafts."""
    V = len(p(texts[0]))
    given = isinstance(q, tuple)
    tuples = [q] if given else list(itertools.product(range(V), repeat=J))
    rows = list(itertools.product(texts, tuples))
    R = len(rows)
    drafts, counts = torch.tensor([x for _, x in rows]), torch.tensor([count(x) for _, x in rows])
    target = torch.stack([torch.stack([p((*t, *x[:k])) for k in range(J + 1)]) for t, x in rows])
    distributions = None if given else torch.stack([torch.stack([q((*t, *x[:k])) for k in range(J)]) for t, x in rows])
    weight = torch.ones(R) if distributions is None else distributions.gather(-1, drafts[..., None])[..., 0].prod(1)

    # one task a slot (where does its acceptance end?), and one a pair of (accepted, token) (where does the token end?)
    ends = list(itertools.product(range(J + 1), range(V - 1)))
    slots = torch.zeros(J + len(ends), R, J, dtype=torch.float64)
    for i, (a, _) in enumerate(ends):
        slots[J + i, :, a:] = LAST
    slot = torch.arange(J)[:, None]
    token = torch.tensor([v for _, v in ends])[:, None]

    def repeat(x: Tensor) -> Tensor:
        return x.repeat(len(slots), *[1] * (x.ndim - 1))

    constant = (
        repeat(drafts),
        repeat(counts),
        None if distributions is None else repeat(distributions),
        repeat(target),
    )

    def holds(u: Tensor) -> Tensor:
        u_TR, tried = u.view(-1, R), slots.clone()
        for k in range(J):
            tried[k, :, k] = u_TR[k]
        last = torch.cat([torch.zeros(J, R, dtype=torch.float64), u_TR[J:]])
        accepted, following = (x.view(-1, R) for x in verify(*constant, tried.flatten(0, 1), last.flatten()))
        return torch.cat([accepted[:J] > slot, following[J:] <= token]).flatten()

    steps = _steps(holds, len(slots) * R).view(-1, R)
    accept = torch.cat([steps[:J], torch.zeros(1, R)])
    staircase = torch.cat([torch.zeros(J + 1, 1, R), steps[J:].view(J + 1, V - 1, R), torch.ones(J + 1, 1, R)], 1)
    reach = torch.cat([torch.ones(1, R), accept[:J].cumprod(0)])
    share = (weight * reach * (1 - accept))[:, None] * staircase.diff(dim=1)  # [J + 1, V, R]
    out: dict[Text, Distribution] = {t: {} for t in texts}
    for a, v, r in (share > 0).nonzero().tolist():
        (text, x), w = rows[r], float(share[a, v, r])
        emitted = (*x[:a], v)
        out[text][emitted] = out[text].get(emitted, 0.0) + w
    return [out[t] for t in texts]


def decoder_distribution(verify: Verify, p: Model, q: Model | Text, *, J: int, count: Count) -> Distribution:
    """Distribution of the first NEW tokens after an empty text."""
    V = len(p(()))
    texts = [t for n in range(NEW) for t in itertools.product(range(V), repeat=n)]
    rounds = dict(zip(texts, round_distributions(verify, p, q, texts, J=J, count=count), strict=True))

    def extend(text: Text) -> Distribution:
        if len(text) >= NEW:
            return {text[:NEW]: 1.0}
        out: Distribution = {}
        for emitted, weight in rounds[text].items():
            for whole, share in extend((*text, *emitted)).items():
                out[whole] = out.get(whole, 0.0) + weight * share
        return out

    return extend(())


def target_distribution(p: Model, vocab: int) -> Distribution:
    def probability(text: Text) -> float:
        return float(torch.stack([p(text[:k])[token] for k, token in enumerate(text)]).prod())

    return {text: probability(text) for text in itertools.product(range(vocab), repeat=NEW)}


def gap(got: Distribution, expected: Distribution) -> float:
    return max(abs(got.get(text, 0.0) - expected.get(text, 0.0)) for text in {*got, *expected})


def imitation(rule: str) -> Verify:
    """An independent verifier: honest, or biased in one of the ways that code has been seen to be."""

    def verify(x: Tensor, count: Tensor, q: Tensor, p: Tensor, slots: Tensor, last: Tensor):  # type: ignore[no-untyped-def]
        J = x.shape[1]
        p_x, q_x = (distribution[:, :J].gather(-1, x[..., None])[..., 0] for distribution in (p, q))
        bar = {"accepts below p": p_x, "accepts if p beats u": (p_x / q_x).clamp(max=1) ** 2}.get(rule, p_x / q_x)
        ok = (slots < bar) & (torch.arange(J) < count[:, None])
        n = (ok.cumsum(1) == torch.arange(1, J + 1)).sum(1)
        following = []
        for end in range(J + 1):
            distribution = p[:, end]
            excess = (distribution - q[:, end]).clamp(min=0) if end < J else distribution
            excess = torch.where(excess.sum(-1, keepdim=True) > 0, excess, distribution)
            residual = (count != end) | (rule == "residual at the end of a short draft")
            residual &= rule != "residual is p"
            following.append(draw(torch.where(residual[:, None], excess, distribution), last))
        return n, torch.stack(following, 1).gather(1, n[:, None])[:, 0]

    return verify


def whole(J: int) -> Count:
    return lambda x: J


def by_prefix(x: Text) -> int:
    """A lawful threshold: slot k is sent if the tokens before it say so."""
    return next((k for k in range(len(x)) if sum(x[:k]) % 3 == 1), len(x))


def by_own_token(x: Text) -> int:
    """An unlawful one: slot k looks at the token it would send."""
    return next((k for k in range(len(x)) if sum(x[: k + 1]) % 3 == 1), len(x))


SETTINGS = [Sampling(temperature=1.0, top_p=1.0), Sampling(temperature=0.7, top_p=0.85)]


@pytest.mark.parametrize("sampling", SETTINGS, ids=["plain", "warped"])
@pytest.mark.parametrize(("vocab", "J", "seed"), [(3, 1, 0), (3, 2, 1), (4, 2, 2), (3, 3, 3)])
def test_distribution_is_the_targets(sampling: Sampling, vocab: int, J: int, seed: int) -> None:
    p, q = table(seed, vocab, sampling=sampling), table(100 + seed, vocab, sampling=sampling)
    texts = [t for n in range(NEW) for t in itertools.product(range(vocab), repeat=n)]
    distance = sum(total_variation(p(t), q(t)) for t in texts) / len(texts)
    assert 0.1 < distance < 0.8  # acceptance is 1 - TV
    if sampling.top_p < 1:
        assert any((p(t) == 0).any() for t in texts)
    expected = target_distribution(p, vocab)
    for count in (whole(J), by_prefix):
        assert gap(decoder_distribution(verify_sampled, p, q, J=J, count=count), expected) < 1e-9


@pytest.mark.parametrize("sampling", SETTINGS, ids=["plain", "warped"])
def test_distribution_with_deterministic_drafts(sampling: Sampling) -> None:
    p = table(4, 3, sampling=sampling)
    for drafts in itertools.product(range(3), repeat=2):
        for n in range(3):
            distribution = decoder_distribution(verify_sampled, p, drafts, J=2, count=lambda x, n=n: n)
            assert gap(distribution, target_distribution(p, 3)) < 1e-9


@pytest.mark.parametrize(
    ("rule", "count"),
    [
        ("residual is p", whole(2)),
        ("accepts below p", whole(2)),
        ("accepts if p beats u", whole(2)),
        ("residual at the end of a short draft", by_prefix),
        ("honest", by_own_token),
    ],
)
def test_biased_decoders_are_rejected(rule: str, count: Count) -> None:
    p, q = (table(s, 3, sampling=SETTINGS[0]) for s in (1, 101))
    expected = target_distribution(p, 3)
    assert gap(decoder_distribution(imitation(rule), p, q, J=2, count=count), expected) > 0.01
    for lawful in (whole(2), by_prefix):
        assert gap(decoder_distribution(imitation("honest"), p, q, J=2, count=lawful), expected) < 1e-9


def test_appendix_a_of_dspark() -> None:
    """A schedule that reads the token it decides on outputs A with probability 0.85 instead of 0.7."""
    p, q = (
        lambda text, distribution=distribution: torch.tensor(distribution, dtype=torch.float64)
        for distribution in ((0.7, 0.3), (0.5, 0.5))
    )

    def first_is_a(count: Count) -> float:
        (distribution,) = round_distributions(verify_sampled, p, q, [()], J=2, count=count)
        return sum(weight for emitted, weight in distribution.items() if emitted[0] == 0)

    assert first_is_a(lambda x: 0 if x[0] else 2) == pytest.approx(0.85, abs=1e-9)
    assert first_is_a(lambda x: 0) == pytest.approx(0.7, abs=1e-9)


# ---- end to end

VOCAB, PROMPT, ROWS, SAMPLES, FEW = 4, [1, 0, 2], 2000, 20000, 6000
WARPED = Sampling(temperature=0.8, top_p=0.9)


def _model(target, sampling: Sampling) -> Model:
    @torch.no_grad()
    def distribution(text: Text) -> Tensor:
        return sampling.probs(target.logits(target(torch.tensor([[*PROMPT, *text]])).hidden_BLD[0, -1]))

    return cache(distribution)


def _chi_square(counts: Distribution, expected: Distribution) -> float:
    """Deviations of the statistic above its mean; cells below 5 expected are pooled, impossible texts fatal."""
    if any(expected[text] == 0 for text in counts):
        return float("inf")
    samples = sum(counts.values())
    large = [t for t, w in expected.items() if w * samples >= 5]
    cells = [(counts.get(t, 0.0), expected[t] * samples) for t in large]
    rest = samples - sum(e for _, e in cells)
    if rest >= 5:
        cells.append((samples - sum(c for c, _ in cells), rest))
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    return (statistic - (len(cells) - 1)) / (2 * (len(cells) - 1)) ** 0.5


def _sample(decoder, samples: int) -> tuple[Distribution, list]:
    counts: Distribution = {}
    rounds = []
    for start in range(0, samples, ROWS):
        seeds = range(start, start + ROWS)
        for g in decoder.decode([PROMPT] * ROWS, max_new_tokens=NEW, stop_ids=(), seeds=seeds):
            counts[tuple(g.tokens)] = counts.get(tuple(g.tokens), 0.0) + 1
            rounds += g.rounds
    return counts, rounds


def _pair(toys: SimpleNamespace):
    target = toys.target("qwen3", seed=3, vocab=VOCAB, scale=0.35)
    draft = toys.draft(target, seed=5, block=2, head="vanilla", confidence=True, scale=0.35)
    return target, draft


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_end_to_end_distribution(toys: SimpleNamespace, threshold: float) -> None:
    target, draft = _pair(toys)
    expected = target_distribution(_model(target, WARPED), VOCAB)
    assert min(expected.values()) == 0  # top_p cuts something
    decoder = toys.speculative(
        target=target, proposer=DraftProposer(draft), sampling=WARPED, confidence_threshold=threshold
    )
    counts, rounds = _sample(decoder, SAMPLES)
    drafted = [r for r in rounds if r.valid]
    assert 0.2 < sum(r.accepted > 0 for r in drafted) / len(drafted) < 0.9
    assert (len({r.drafted for r in rounds}) > 1) == (threshold > 0)
    assert _distance(toys, target, draft) > 0.1
    assert _chi_square(counts, expected) < 4


@torch.no_grad()
def _distance(toys, target, draft) -> float:
    """Mean TV between the drafter's and the target's distribution over the texts that follow the prompt."""
    proposer, distribution, gaps = toys.Remembering(DraftProposer(draft)), _model(target, WARPED), []
    for token in range(VOCAB):
        proposer.begin(target(torch.tensor([PROMPT]), taps=proposer.tap_ids).features_BLF)
        uniform = Streams([0], torch.device("cpu")).take(2)
        proposal = proposer.propose([[*PROMPT, token]], sampling=WARPED, uniform_BJ=uniform, confidence=False)
        gaps.append(total_variation(proposal.probs_BJV[0, 0], distribution((token,))))
    return sum(gaps) / len(gaps)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["residual is p", "accepts below p", "confidence of the own token"])
def test_biased_decoders_are_rejected_end_to_end(
    toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    target, draft = _pair(toys)
    decoder = toys.speculative(target=target, proposer=DraftProposer(draft), sampling=WARPED)
    if rule == "confidence of the own token":
        decoder.decoder.policy = ConfidenceThreshold(0.5, calibration=None)
        monkeypatch.setattr(draft, "confidence", lambda previous, hidden: 9.0 - 6.0 * previous.roll(-1, 1))
    else:

        def biased(x, count, q, p, slots, last):  # type: ignore[no-untyped-def]
            if rule == "accepts below p":
                slots = slots / q.gather(-1, x[..., None])[..., 0]
            accepted, following = verify_sampled(x, count, q, p, slots, last)
            again = draw(p[torch.arange(len(x)), accepted], last)
            return accepted, torch.where(accepted < count, again, following) if rule == "residual is p" else following

        monkeypatch.setattr(speculative, "verify_sampled", biased)
    expected = target_distribution(_model(target, WARPED), VOCAB)
    assert _chi_square(_sample(decoder, FEW)[0], expected) > 20


@pytest.mark.slow
def test_end_to_end_distribution_of_prompt_lookup(toys: SimpleNamespace) -> None:
    target, _ = _pair(toys)
    proposer = PromptLookupProposer(num_drafts=2, max_ngram=2, device=torch.device("cpu"))
    counts, rounds = _sample(toys.speculative(target=target, proposer=proposer, sampling=WARPED), SAMPLES)
    assert {r.drafted for r in rounds} >= {1, 2}
    assert _chi_square(counts, target_distribution(_model(target, WARPED), VOCAB)) < 4
