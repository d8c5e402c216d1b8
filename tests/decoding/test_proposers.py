"""Proposers: the cached, batched drafter against the drafter run from scratch; prompt lookup against brute force."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspec.decoding.proposers import DraftProposer, PromptLookupProposer
from dspec.decoding.sampling import Sampling, Streams, draw
from dspec.errors import UserError

CPU = torch.device("cpu")
KINDS = [("fill_in", None), *(("anchor_first", head) for head in (None, "vanilla", "gated", "rnn"))]


@torch.no_grad()
def _from_scratch(
    target, draft, text: list[int], drafts: Tensor, *, with_head: bool, passes: int
) -> tuple[Tensor, Tensor | None]:
    """Logits and confidence of one block after `text`, in the training form, teacher-forced on `drafts`."""
    features = target(torch.tensor([text]), taps=draft.config.target_layer_ids).features_BLF[:, :-1]
    K, first = draft.config.block_size, draft.config.first_slot
    positions = len(text) - 1 + torch.arange(K)[None]
    block = torch.tensor([[text[-1], *[draft.config.mask_token_id] * (K - 1)]])
    w2 = draft.markov_head.markov_w2.weight.T if draft.markov_head is not None and with_head else None
    hidden = draft(block, positions, mask=None, features_BSF=features)[:, first:]
    for _ in range(passes):  # each guess is greedy given the guesses before it, and stands at its own position
        guesses: list[int] = [text[-1]]
        for k in range(hidden.shape[1]):
            logits = draft.lm_head(hidden[:, k])
            if w2 is not None:
                logits = logits + draft.markov_head.transition(torch.tensor([guesses]), hidden[:, : k + 1])[:, k] @ w2
            guesses.append(int(logits.argmax()))
        block = torch.tensor([guesses[:K]])
        hidden = draft(block, positions, mask=None, features_BSF=features)[:, first:]
    previous = torch.cat([torch.tensor([[text[-1]]]), drafts[None, :-1]], 1)
    logits = draft.lm_head(hidden)
    if w2 is not None:
        logits = logits + draft.markov_head.transition(previous, hidden) @ w2
    confidence = draft.confidence(previous, hidden)
    return logits[0], None if confidence is None else confidence[0]


@pytest.mark.parametrize(("layout", "head"), KINDS)
@pytest.mark.parametrize("batch", [1, 4])
def test_cached_block_equals_the_training_form(
    toys: SimpleNamespace, layout: str, head: str | None, batch: int
) -> None:
    """Ragged rows over several rounds, rejected positions left behind in the cache, rows dropped on the way."""
    rng = random.Random(batch)
    target = toys.target("llama", seed=batch)
    confidence = layout == "anchor_first"
    draft = toys.draft(target, block=4, layout=layout, head=head, confidence=confidence, taps=(1, 0))
    texts = toys.prompts(rng, batch, vocab=11)
    warm = Sampling(temperature=0.7, top_p=0.8)
    for with_head, sampling, passes in itertools.product((True, False), (toys.GREEDY, warm), (0, 2)):
        proposer = toys.Remembering(DraftProposer(draft, sequential_head=with_head, refinement_passes=passes))
        J = proposer.num_drafts
        rows, cache, streams = [[*t, 3] for t in texts], target.new_cache(), Streams(range(batch), CPU)
        padded = torch.tensor([t + [0] * (9 - len(t)) for t in texts])
        with torch.inference_mode():
            proposer.begin(target(padded, cache=cache, taps=proposer.tap_ids).features_BLF)
        for turn in range(4):
            uniform = None if sampling.greedy else streams.take(J)
            with torch.inference_mode():
                got = proposer.propose(rows, sampling=sampling, uniform_BJ=uniform, confidence=confidence)
            assert got.count_B.tolist() == [J] * len(rows)
            for b, row in enumerate(rows):
                logits, sure = _from_scratch(target, draft, row, got.tokens_BJ[b], with_head=with_head, passes=passes)
                if uniform is None:
                    assert got.probs_BJV is None
                    assert torch.equal(got.tokens_BJ[b], logits.argmax(-1))
                else:
                    law = sampling.probs(logits)
                    torch.testing.assert_close(got.probs_BJV[b], law, rtol=0, atol=1e-10)
                    assert torch.equal(got.tokens_BJ[b], draw(law, uniform[b]))
                if sure is not None:
                    torch.testing.assert_close(got.confidence_BJ[b], sure, rtol=0, atol=1e-10)
            starts, width = [len(row) - 1 for row in rows], rng.randint(1, J + 1)
            kept = [rng.randint(0, width - 1) for _ in rows]  # as many drafts are "accepted"
            drafts = torch.randint(10, (len(rows), width - 1))
            anchors = torch.tensor([row[-1] for row in rows])[:, None]
            with torch.inference_mode():
                seen = target(torch.cat([anchors, drafts], 1), start_B=starts, cache=cache, taps=proposer.tap_ids)
                proposer.extend(seen.features_BLF, starts)
            rows = [[*row, *d[:n], rng.randrange(10)] for row, d, n in zip(rows, drafts.tolist(), kept, strict=True)]
            if turn == 1 and batch > 1:
                keep = [2, 0]
                rows = [rows[i] for i in keep]
                for part in (proposer, cache, streams):
                    part.select(keep)


def test_head_off_is_another_drafter(toys: SimpleNamespace) -> None:
    target = toys.target()
    draft = toys.draft(target, head="vanilla", rank=8, scale=1.0)
    on, off = DraftProposer(draft), DraftProposer(draft, sequential_head=False)
    assert (on.settings()["sequential_head"], off.settings()["sequential_head"]) == ("vanilla", None)
    features = target(torch.tensor([[1, 2, 3]]), taps=on.tap_ids).features_BLF
    tokens = []
    for proposer in map(toys.Remembering, (on, off)):
        proposer.begin(features)
        found = proposer.propose([[1, 2, 3, 4]], sampling=toys.GREEDY, uniform_BJ=None, confidence=False)
        assert found.confidence_BJ is None
        tokens.append(found.tokens_BJ.tolist())
    assert tokens[0] != tokens[1]


def test_refinement_is_another_drafter_and_says_so(toys: SimpleNamespace) -> None:
    target = toys.target()
    draft = toys.draft(target, head="vanilla", rank=8, scale=1.0)
    features, tokens = target(torch.tensor([[1, 2, 3]]), taps=draft.config.target_layer_ids).features_BLF, []
    for passes in (0, 1):
        proposer = DraftProposer(draft, refinement_passes=passes)
        assert proposer.settings().get("refinement_passes", 0) == passes
        held = toys.Remembering(proposer)
        held.begin(features)
        found = held.propose([[1, 2, 3, 4]], sampling=toys.GREEDY, uniform_BJ=None, confidence=False)
        tokens.append(found.tokens_BJ.tolist())
    assert tokens[0] != tokens[1]
    with pytest.raises(UserError, match="refinement_passes=-1"):
        DraftProposer(draft, refinement_passes=-1)


def _lookup(text: list[int], *, drafts: int, ngram: int) -> list[int]:
    """Longest n-gram first, its latest earlier occurrence, what followed it."""
    for n in range(ngram, 0, -1):
        starts = [s for s in range(len(text) - n) if text[s : s + n] == text[len(text) - n :]]
        if n < len(text) and starts:
            return text[starts[-1] + n :][:drafts]
    return []


def test_prompt_lookup_against_brute_force(toys: SimpleNamespace) -> None:
    """Texts that grow by several tokens or none, rows dropped on the way."""
    rng, counts = random.Random(0), set()
    for _ in range(150):
        drafts, ngram, vocab = rng.randint(1, 4), rng.randint(1, 4), rng.randint(2, 6)
        texts = [[rng.randrange(vocab) for _ in range(rng.randint(1, 12))] for _ in range(3)]
        proposer = toys.Remembering(PromptLookupProposer(num_drafts=drafts, max_ngram=ngram, device=CPU))
        proposer.begin(torch.zeros(3, 12, 0))
        for turn in range(6):
            got = proposer.propose(texts, sampling=toys.GREEDY, uniform_BJ=None, confidence=False)
            assert got.probs_BJV is None
            for text, tokens, count in zip(texts, got.tokens_BJ.tolist(), got.count_B.tolist(), strict=True):
                assert tokens[:count] == _lookup(text, drafts=drafts, ngram=ngram)
                counts.add(count)
            for text in texts:
                text += [rng.randrange(vocab) for _ in range(rng.randint(0, 5))]
            if turn == 2:
                proposer.select([2, 0])
                texts = [texts[2], texts[0]]
    assert counts == {0, 1, 2, 3, 4}


class Counting(list[int]):
    """A text that counts how many of its tokens are read."""

    read = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.read += len(found) if isinstance(at, slice) else 1
        return found


def test_prompt_lookup_reads_new_tokens_alone(toys: SimpleNamespace) -> None:
    """A round costs the same after 100 tokens and after 10,000."""
    rng, read = random.Random(0), []
    proposer = toys.Remembering(PromptLookupProposer(num_drafts=4, max_ngram=3, device=CPU))
    for length in (100, 10_000):
        text = Counting(rng.randrange(50) for _ in range(length))
        proposer.begin(torch.zeros(1, length, 0))
        proposer.propose([text], sampling=toys.GREEDY, uniform_BJ=None, confidence=False)
        text.read = 0
        for token in range(20):
            text.append(token)
            proposer.propose([text], sampling=toys.GREEDY, uniform_BJ=None, confidence=False)
        read.append(text.read)
    assert max(read) <= 20 * (6 + 6 + 4)  # three n-grams read, three looked up, four tokens copied
