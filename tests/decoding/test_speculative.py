"""Speculative decoding: equal to autoregressive decoding token for token, and its bookkeeping."""

import itertools
import math
import random
import warnings
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspec.decoding import loop
from dspec.decoding import speculative as decoding
from dspec.decoding.generation import Generation
from dspec.decoding.proposers import DraftProposer, PromptLookupProposer, Proposal
from dspec.decoding.sampling import Sampling
from dspec.decoding.speculative import Speculative
from dspec.decoding.state import PerRow
from dspec.decoding.verification import ConfidenceThreshold
from dspec.errors import UserError
from dspec.models.temperatures import Calibration

CPU = torch.device("cpu")
GROUPS, CASES = 24, 10
WARM = Sampling(temperature=0.8, top_p=0.9)


def _greedy(toys: SimpleNamespace, target, proposer, texts, *, new: int, stops=(), **options) -> list[Generation]:
    decoder = toys.speculative(target=target, proposer=proposer, sampling=toys.GREEDY, **options)
    return decoder.decode(texts, max_new_tokens=new, stop_ids=stops, seeds=[0] * len(texts))


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_drafters_give_the_autoregressive_text(toys: SimpleNamespace, group: int) -> None:
    """GROUPS x CASES random combinations of target, drafter, batch, lengths, stops."""
    rng = random.Random(group)
    vocab = rng.randint(8, 12)
    target = toys.target(toys.FAMILIES[group % 3], seed=group, vocab=vocab, scale=rng.choice([0.3, 0.6, 1.0]))
    pool = toys.prompts(rng, 5, vocab=vocab)
    whole, accepted = toys.ar(target, pool, 10), 0
    for case in range(CASES):
        layout = rng.choice(["anchor_first", "anchor_first", "fill_in"])
        head = rng.choice(toys.HEADS) if layout == "anchor_first" else None
        confidence = layout == "anchor_first" and rng.random() < 0.3
        draft = toys.draft(
            target,
            seed=case,
            block=rng.randint(1 + (layout == "fill_in"), 8),
            layout=layout,
            head=head,
            confidence=confidence,
            taps=rng.sample(range(3), rng.randint(1, 3)),
            layers=rng.randint(1, 2),
        )
        rows = rng.sample(range(5), rng.randint(1, 5))
        new = rng.randint(1, 10)
        stops = [rng.choice(whole[rng.choice(rows)])] if rng.random() < 0.7 else []
        threshold = rng.random() * confidence
        result = _greedy(
            toys,
            target,
            DraftProposer(draft, sequential_head=rng.random() < 0.9, refinement_passes=max(0, case - CASES + 3)),
            [pool[i] for i in rows],
            new=new,
            stops=stops,
            confidence_threshold=threshold,
        )
        for i, got in zip(rows, result, strict=True):
            expected = toys.cut(whole[i], stops, new)
            assert got.tokens == expected, (group, case)
            assert got.stopped == (expected[-1] in stops)
            accepted += sum(r.accepted for r in got.rounds)
    assert accepted  # the drafts were not all rejected


def test_markov_drafters_accept_every_length(toys: SimpleNamespace) -> None:
    """Real drafters that nearly know their target: every acceptance length occurs, with and without stops."""
    seen: dict[int, set[int]] = {J: set() for J in (1, 2, 3, 5)}
    for J, lengths in seen.items():
        for seed, noise in enumerate([0.003, 0.006, 0.012, 0.03]):
            target, draft = toys.markov_pair(noise=noise, seed=seed, block=J)
            texts = toys.prompts(random.Random(seed), 5, vocab=24)
            whole = toys.ar(target, texts, 16)
            for stops in ([], [whole[0][5]], [whole[1][3]]):
                result = _greedy(toys, target, DraftProposer(draft), texts, new=16, stops=stops)
                assert [g.tokens for g in result] == [toys.cut(w, stops, 16) for w in whole]
                lengths |= {r.accepted for g in result for r in g.rounds}
    assert {J: sorted(lengths) for J, lengths in seen.items()} == {J: list(range(J + 1)) for J in seen}


@pytest.mark.parametrize("J", range(1, 9))
def test_oracle_accepts_every_length(toys: SimpleNamespace, J: int) -> None:
    """Chosen accuracy, ragged draft lengths; the oracle also checks history and features round by round."""
    rng, lengths = random.Random(J), set()
    target = toys.target(toys.FAMILIES[J % 3], seed=J, vocab=9, layers=3)
    texts = toys.prompts(rng, 5, vocab=9)
    whole = toys.ar(target, texts, 14 + J)
    known = [t + w for t, w in zip(texts, whole, strict=True)]
    for accuracy, ragged in itertools.product((0.0, 0.6, 0.85, 1.0), (False, True)):
        oracle = toys.OracleProposer(target, known, drafts=J, accuracy=accuracy, seed=J, ragged=ragged)
        stops = [whole[rng.randrange(5)][rng.randrange(13)]] if ragged else []
        result = _greedy(toys, target, oracle, texts, new=13, stops=stops)
        assert [g.tokens for g in result] == [toys.cut(w, stops, 13) for w in whole]
        lengths |= {r.accepted for g in result for r in g.rounds}
        assert all(r.accepted <= r.valid <= r.drafted <= J for g in result for r in g.rounds)
    assert lengths == set(range(J + 1))


@pytest.mark.parametrize(("never", "tau"), [(False, 5), (True, 1)])
def test_drafters_that_always_and_never_agree(toys: SimpleNamespace, never: bool, tau: int) -> None:
    target, draft = toys.markov_pair(noise=0.0, never=never, block=4)
    texts = toys.prompts(random.Random(0), 3, vocab=24)
    for got in _greedy(toys, target, DraftProposer(draft), texts, new=21):
        assert len(got.tokens) - got.prefill_tokens == tau * len(got.rounds)
        assert {r.accepted for r in got.rounds} == {tau - 1}


def test_prompt_lookup(toys: SimpleNamespace) -> None:
    accepted = set()
    for seed, (J, ngram) in enumerate(itertools.product((1, 3, 5), (1, 2, 4))):
        target = toys.target(toys.FAMILIES[seed % 3], seed=seed, vocab=8, scale=0.4)
        texts = toys.prompts(random.Random(seed), 4, vocab=8, longest=20)
        whole = toys.ar(target, texts, 12)
        proposer = PromptLookupProposer(num_drafts=J, max_ngram=ngram, device=CPU)
        for stops in ([], [whole[0][4]]):
            result = _greedy(toys, target, proposer, texts, new=12, stops=stops)
            assert [g.tokens for g in result] == [toys.cut(w, stops, 12) for w in whole]
            accepted |= {r.accepted for g in result for r in g.rounds}
    assert {0, 1, 2, 3} <= accepted


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0, top_p=1.0), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("head", "threshold"), [(None, 0.0), ("rnn", 0.5)])
def test_batch_equals_singles_with_compaction(
    toys: SimpleNamespace, sampling: Sampling, head: str | None, threshold: float
) -> None:
    target = toys.target("llama", seed=3, vocab=8, scale=0.4)
    draft = toys.draft(target, head=head, confidence=threshold > 0, scale=0.4)
    options = {"sampling": sampling, "confidence_threshold": threshold}
    decoder = toys.speculative(target=target, proposer=DraftProposer(draft), **options)
    texts = toys.prompts(random.Random(4), 7, vocab=8)
    free = decoder.decode(texts, max_new_tokens=14, stop_ids=(), seeds=range(7))
    for stop in sorted({g.tokens[2] for g in free}):
        batch = decoder.decode(texts, max_new_tokens=14, stop_ids=[stop], seeds=range(7))
        for seed, (text, got, whole) in enumerate(zip(texts, batch, free, strict=True)):
            (alone,) = decoder.decode([text], max_new_tokens=14, stop_ids=[stop], seeds=[seed])
            assert got.tokens == alone.tokens == toys.cut(whole.tokens, [stop], 14)
            assert shown(got) == shown(alone)
            assert got.nfe == alone.nfe
        assert len({len(g.tokens) for g in batch}) > 1


def shown(generation: Generation) -> list[tuple[int, int, int]]:
    """What each round's slots showed; how wide its pass was depends on the batch."""
    return [(r.drafted, r.accepted, r.valid) for r in generation.rounds]


class _Scripted:
    """Drafts for the cycle target: row r's i-th round gets script[r][i] tokens right, then wrong ones."""

    tap_ids: tuple[int, ...] = ()
    max_positions: int | None = None

    def __init__(self, script: list[tuple[int, ...]], *, drafts: int, vocab: int) -> None:
        self.script, self.num_drafts, self.vocab = script, drafts, vocab

    def start(self, features_BLF: torch.Tensor) -> PerRow[int]:
        self.round = 0
        return PerRow(range(len(self.script)))

    def extend(self, memory: PerRow[int], features_BLF: torch.Tensor, start_B: list[int]) -> None: ...

    def settings(self) -> dict:
        return {}

    def drafts(self, row: int, turn: int, anchor: int) -> list[int]:
        right = self.script[row][turn % len(self.script[row])]
        return [(anchor + 1 + k + (k >= right)) % self.vocab for k in range(self.num_drafts)]

    def propose(self, memory, text_B, *, samplings, uniform_BJ, confidence) -> Proposal:
        tokens = [self.drafts(row, self.round, text[-1]) for row, text in zip(memory, text_B, strict=True)]
        self.round += 1
        return Proposal(torch.tensor(tokens), torch.full((len(tokens),), self.num_drafts))


def _account(
    proposer: _Scripted, row: int, start: int, stop: int, limit: int
) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Tokens and rounds straight from the definitions, on the text start+1, start+2, ..."""
    tokens, rounds = [start + 1], []
    while tokens[-1] != stop and len(tokens) < limit:
        drafts = proposer.drafts(row, len(rounds), tokens[-1])
        counts = [len(tokens) + k < limit and stop not in drafts[:k] for k in range(len(drafts))]
        right = [drafts[: k + 1] == [tokens[-1] + 1 + i for i in range(k + 1)] for k in range(len(drafts))]
        rounds.append((len(drafts), sum(c and r for c, r in zip(counts, right, strict=True)), sum(counts)))
        for _ in range(sum(right) + 1):
            if tokens[-1] != stop and len(tokens) < limit:
                tokens.append(tokens[-1] + 1)
    return tokens, rounds


def test_accounting_with_a_stop_at_every_place(toys: SimpleNamespace) -> None:
    """All pairs of acceptance lengths, a stop at each slot, at the bonus, in a rejected draft, and every limit."""
    J, start, target = 3, 2, toys.cycle_target()
    script = list(itertools.product(range(J + 1), repeat=2))
    texts = [[9] * (i % 3) + [start] for i in range(len(script))]
    proposer = _Scripted(script, drafts=J, vocab=32)
    at_stop = set()
    for stop, limit in itertools.product([99, *range(start + 1, start + 11)], (1, 2, 4, 7, 9)):
        result = _greedy(toys, target, proposer, texts, new=limit, stops=[stop])
        for row, got in enumerate(result):
            tokens, rounds = _account(proposer, row, start, stop, limit)
            assert (got.tokens, shown(got)) == (tokens, rounds), (script[row], stop, limit)
            assert got.stopped == (tokens[-1] == stop)
            assert (got.prefill_forwards, got.prefill_tokens) == (1, 1)
            assert (got.forwards, got.nfe) == (len(rounds), len(rounds) + 1)
            assert got.positions_computed % (J + 1) == 0
            assert got.positions_computed >= (J + 1) * len(rounds)  # more while it rides along, done
            if got.stopped and rounds:
                at_stop.add(rounds[-1][1:])
    # the stop was each of the drafts, the bonus behind a mistake (a < v = J) and behind a full block (J, J)
    assert {(1, 1), (2, 2), (3, 3), (0, 3), (1, 3), (2, 3)} <= at_stop
    # a mistaken draft that happens to be the stop ends what counts, though it was rejected
    assert {(0, 1), (1, 2)} <= at_stop


def test_limit_and_tau(toys: SimpleNamespace) -> None:
    target, draft = toys.markov_pair(noise=0.0, block=3)
    for new in range(1, 12):
        (got,) = _greedy(toys, target, DraftProposer(draft), [[1, 2]], new=new)
        assert len(got.tokens) == new
        assert len(got.rounds) == -(-(new - 1) // 4)
        if new > 1:
            left = (new - 1) % 4 or 4
            assert (got.rounds[-1].accepted, got.rounds[-1].valid) == (min(left, 3),) * 2


def test_confidence_record_and_threshold(toys: SimpleNamespace) -> None:
    """Recorded logits are the head's on the drafted slots; a threshold sends just the leading sure ones."""
    target = toys.target(seed=8)
    draft = toys.draft(target, seed=8, block=4, head="vanilla", confidence=True, scale=0.4)
    texts = toys.prompts(random.Random(8), 4, vocab=11)
    full = _greedy(toys, target, DraftProposer(draft), texts, new=10, record_confidence=True)
    logits = [c for g in full for r in g.rounds for c in r.confidence]
    assert all(len(r.confidence) == r.drafted == 4 for g in full for r in g.rounds)
    threshold = torch.tensor(logits).median().sigmoid().item()
    cut = _greedy(
        toys, target, DraftProposer(draft), texts, new=10, record_confidence=True, confidence_threshold=threshold
    )
    for g, whole in zip(cut, full, strict=True):
        assert g.tokens == whole.tokens
        first = torch.tensor(whole.rounds[0].confidence).sigmoid()
        assert g.rounds[0].drafted == int((first >= threshold).long().cumprod(0).sum())
        assert g.rounds[0].confidence == whole.rounds[0].confidence[: g.rounds[0].drafted]
    assert len({r.drafted for g in cut for r in g.rounds}) > 2
    plain = _greedy(toys, target, DraftProposer(draft), texts, new=10)
    assert all(r.confidence == () for g in plain for r in g.rounds)


def test_threshold_cuts_at_the_first_slot_that_is_not_sure(toys: SimpleNamespace) -> None:
    """A sure slot behind an unsure one is not sent: its confidence has seen the token before it."""
    logits = torch.randn(200, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts = torch.arange(200) % 5
    for scale in (None, (0.1, 1.0, 2.0, 5.0)):
        fitted = None if scale is None else Calibration(scale, WARM.temperature, WARM.top_p)
        policy = ConfidenceThreshold(0.6, calibration=fitted)
        proposal = Proposal(torch.zeros(200, 4, dtype=torch.long), counts.clone(), confidence_BJ=logits)
        sent = policy(proposal, [WARM] * 200, policy.new_memory(200)).tolist()
        for row, count, got in zip(logits.tolist(), counts.tolist(), sent, strict=True):
            sure = [1 / (1 + math.exp(-z / t)) >= 0.6 for z, t in zip(row, scale or (1,) * 4, strict=True)]
            assert got == next((k for k in range(count) if not sure[k]), count)


def test_calibration_is_used_where_it_applies(toys: SimpleNamespace) -> None:
    target = toys.target(seed=8)
    proposer = DraftProposer(toys.draft(target, seed=8, head="vanilla", confidence=True))
    sure = Calibration(temperatures=(1e-9,) * 4, temperature=0.0, top_p=1.0)  # every logit becomes 0 or 1
    options = {"target": target, "proposer": proposer, "sampling": toys.GREEDY, "confidence_threshold": 0.5}
    assert toys.speculative(**options, calibration=sure).settings()["sts"] is True
    other = Calibration(temperatures=(1.0,) * 4, temperature=1.0, top_p=1.0)
    with pytest.warns(UserWarning, match=r"temperature=1\.0.*temperature=0\.0"):
        assert toys.speculative(**options, calibration=other).settings()["sts"] is False
    with pytest.warns(UserWarning, match="not used"):  # and where it decodes
        _greedy(toys, target, proposer, [[1]], new=8, confidence_threshold=0.5, calibration=other)
    texts, counts = toys.prompts(random.Random(2), 5, vocab=11), []
    for t in (0.05, 20.0):  # at threshold 0.6 flat temperatures leave nothing, sharp ones do
        scaled = Calibration(temperatures=(t,) * 4, temperature=0.0, top_p=1.0)
        result = _greedy(toys, target, proposer, texts, new=8, confidence_threshold=0.6, calibration=scaled)
        counts.append(sum(r.drafted for g in result for r in g.rounds))
    assert counts[0] > counts[1]


def test_refusals(toys: SimpleNamespace) -> None:
    target = toys.target()
    lookup = PromptLookupProposer(num_drafts=2, max_ngram=2, device=CPU)
    for threshold in (-0.1, 1.0):
        with pytest.raises(UserError, match="confidence_threshold"):
            _greedy(toys, target, lookup, [[1]], new=4, confidence_threshold=threshold)
    for proposer in (lookup, DraftProposer(toys.draft(target))):
        with pytest.raises(UserError, match="confidence head"):
            _greedy(toys, target, proposer, [[1]], new=4, confidence_threshold=0.5)


@pytest.mark.parametrize(
    ("options", "fitted"),
    [({}, True), ({"sequential_head": False}, False), ({"refinement_passes": 1}, False)],
    ids=["plain", "head off", "refined"],
)
def test_calibration_is_used_for_the_drafts_it_was_fitted_on(
    toys: SimpleNamespace, options: dict[str, Any], fitted: bool
) -> None:
    """From the drafter to the decoder: the configs' way."""
    target = toys.target(seed=8)
    draft = toys.draft(target, seed=8, head="vanilla", confidence=True)
    draft.metadata.calibration = Calibration(temperatures=(1.5,) * 4, temperature=0.0, top_p=1.0)
    build = {"sequential_head": True, "refinement_passes": 0, "confidence_threshold": 0.5} | options
    warns = nullcontext() if fitted else pytest.warns(UserWarning, match=r"not used, confidences stay raw")
    with warns:
        decoder = toys.build_decoder("speculative", target=target, draft=draft, **build)
    assert isinstance(decoder, Speculative)
    assert decoder.policy.confidence.calibration == (draft.metadata.calibration if fitted else None)
    assert decoder.settings(toys.GREEDY)["sts"] is fitted
    with warnings.catch_warnings():  # nothing is used, nothing is said
        warnings.simplefilter("error")
        assert "sts" not in toys.build_decoder(
            "speculative", target=target, draft=draft, **build | {"confidence_threshold": 0.0}
        ).settings(toys.GREEDY)
        draft.metadata.calibration = None
        assert not toys.build_decoder("speculative", target=target, draft=draft, **build).settings(toys.GREEDY)["sts"]


def test_a_drafter_without_a_head_is_calibrated_as_it_is(toys: SimpleNamespace) -> None:
    target = toys.target(seed=8)
    assert DraftProposer(toys.draft(target), sequential_head=False).plain


def test_a_drafter_with_fewer_positions_than_the_target(toys: SimpleNamespace) -> None:
    target = toys.target(positions=40)
    draft = toys.draft(target, block=4)
    draft.config.transformer.max_position_embeddings = 20
    decode = partial(_greedy, toys, target, DraftProposer(draft))
    assert len(decode([[1] * 8, [2]], new=12)[0].tokens) == 12
    with pytest.raises(UserError, match=r"8 tokens and max_new_tokens=13 exceed the drafter's 20 positions"):
        decode([[1] * 8, [2]], new=13)


@pytest.mark.parametrize("seeds", [[0], [0, 1, 2, 3], []])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0, top_p=1.0), WARM], ids=["greedy", "sampled"])
def test_every_prompt_needs_its_seed(toys: SimpleNamespace, sampling: Sampling, seeds: list[int]) -> None:
    """One seed for three prompts would be drawn from three times: three times the same text."""
    target = toys.target()
    lookup = PromptLookupProposer(num_drafts=2, max_ngram=2, device=CPU)
    decoders = [
        toys.speculative(target=target, proposer=lookup, sampling=sampling),
        toys.autoregressive(target=target, sampling=sampling),
    ]
    for decoder in decoders:
        with pytest.raises(UserError, match=f"{len(seeds)} seeds for 3 prompts"):
            decoder.decode([[1], [1], [1]], max_new_tokens=4, stop_ids=(), seeds=seeds)


@pytest.mark.parametrize("head", [None, "vanilla"])
def test_no_uniform_is_used_twice(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, head: str | None) -> None:
    """Drafting, accepting and the draw behind a rejection each take uniforms of their own, round after round."""
    target = toys.target(seed=3, vocab=8, scale=0.4)
    proposer, used = DraftProposer(toys.draft(target, head=head, scale=0.4)), []
    propose, verify, first = proposer.propose, decoding.verify_sampled, loop.draw

    def watched_propose(*args: Any, **options: Any) -> Proposal:
        used.append(("draft", options["uniform_BJ"]))
        return propose(*args, **options)

    def watched_verify(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        used.extend((("accept", args[-2]), ("behind", args[-1])))
        return verify(*args)

    def watched_first(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        used.append(("prefill", uniform))
        return first(weights, uniform)

    monkeypatch.setattr(proposer, "propose", watched_propose)
    monkeypatch.setattr(decoding, "verify_sampled", watched_verify)
    monkeypatch.setattr(loop, "draw", watched_first)
    decoder = toys.speculative(target=target, proposer=proposer, sampling=WARM)
    decoder.decode([[1, 2], [3]], max_new_tokens=12, stop_ids=(), seeds=[0, 1])
    assert {who for who, _ in used} == {"prefill", "draft", "accept", "behind"}
    values = [value for _, uniforms in used for value in uniforms.flatten().tolist()]
    assert len(set(values)) == len(values) > 40
