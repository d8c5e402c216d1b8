"""Log-likelihoods of continuations: causal and any-subset, in batches and one by one."""

import random
from types import SimpleNamespace

import pytest
import torch

from dspec.decoding.generation import Request
from dspec.decoding.loop import decode
from dspec.decoding.sampling import GREEDY
from dspec.errors import UserError
from dspec.likelihood import Continuation, log_likelihoods
from dspec.models.language_model import LanguageModel


@pytest.fixture(scope="module")
def model(toys: SimpleNamespace) -> LanguageModel:
    return toys.target("qwen3", vocab=13)  # type: ignore[no-any-return]


def continuations(count: int, *, vocab: int = 13, seed: int = 0) -> list[Continuation]:
    rng = random.Random(seed)

    def some(least: int, most: int) -> list[int]:
        return [rng.randrange(vocab - 1) for _ in range(rng.randint(least, most))]

    return [Continuation(some(1, 9), some(1, 6)) for _ in range(count)]


@pytest.mark.parametrize("any_subset", [False, True])
def test_a_batch_gives_what_single_texts_give(model: LanguageModel, any_subset: bool) -> None:
    texts = continuations(17)
    together = log_likelihoods(model, texts, any_subset=any_subset)
    for text, found in zip(texts, together, strict=True):
        [alone] = log_likelihoods(model, [text], any_subset=any_subset)
        assert found.log_probs.shape == (len(text.tokens),)
        torch.testing.assert_close(found.log_probs, alone.log_probs, rtol=0, atol=1e-10)
        assert found.greedy == alone.greedy
        assert found.total == pytest.approx(float(alone.log_probs.sum()), abs=1e-10)


def test_a_causal_text_is_scored_token_by_token(model: LanguageModel) -> None:
    for text, found in zip(continuations(8), log_likelihoods(model, continuations(8), any_subset=False), strict=True):
        ids = [*text.context, *text.tokens]
        for i, token in enumerate(text.tokens):
            known = torch.tensor([ids[: len(text.context) + i]])
            law = model.logits(model(known).hidden_BLD[0, -1]).log_softmax(-1)
            assert float(found.log_probs[i]) == pytest.approx(float(law[token]), abs=1e-10)


def test_an_any_subset_text_has_its_joint_density(model: LanguageModel, toys: SimpleNamespace) -> None:
    texts = continuations(8)
    for text, found in zip(texts, log_likelihoods(model, texts, any_subset=True), strict=True):
        ids, first = [*text.context, *text.tokens], len(text.context)
        joint = toys.joint_log_density(model, ids, range(len(ids)), first)
        torch.testing.assert_close(found.log_probs, joint, rtol=0, atol=1e-10)
        for i, token in enumerate(text.tokens):
            law = toys.conditional(model, ids[: first + i], range(len(ids)), prompt=first, place=first + i)
            assert float(found.log_probs[i]) == pytest.approx(float(law.log_softmax(-1)[token]), abs=1e-10)


def test_the_two_are_not_the_same(model: LanguageModel) -> None:
    texts = continuations(4)
    causal, joint = (log_likelihoods(model, texts, any_subset=how) for how in (False, True))
    assert all(abs(a.total - b.total) > 1e-3 for a, b in zip(causal, joint, strict=True))


@pytest.mark.parametrize("any_subset", [False, True])
def test_greedy_is_what_decoding_writes(model: LanguageModel, toys: SimpleNamespace, any_subset: bool) -> None:
    decoder = (
        toys.any_subset(target=model, num_drafts=1)
        if any_subset
        else toys.autoregressive(target=model, sampling=GREEDY).decoder
    )
    texts = continuations(12, seed=1)
    asked = [Request(ids=t.context, sampling=GREEDY, max_new_tokens=len(t.tokens), stop_ids=(), seed=0) for t in texts]
    written = [Continuation(t.context, g.tokens) for t, g in zip(texts, decode(decoder, asked), strict=True)]
    assert all(found.greedy for found in log_likelihoods(model, written, any_subset=any_subset))
    changed = [Continuation(t.context, [*t.tokens[:-1], (t.tokens[-1] + 1) % 12]) for t in written]
    assert not any(found.greedy for found in log_likelihoods(model, changed, any_subset=any_subset))


def test_the_density_of_all_words_sums_to_one(model: LanguageModel) -> None:
    """Over all continuations of two tokens; the any-subset model never writes the mask token."""
    pairs = [Continuation([3, 1], [a, b]) for a in range(13) for b in range(13)]
    causal = [found.log_probs.sum() for found in log_likelihoods(model, pairs, any_subset=False)]
    joint = [found.log_probs.sum() for found in log_likelihoods(model, pairs, any_subset=True)]
    assert float(torch.stack(causal).exp().sum()) == pytest.approx(1, abs=1e-10)
    assert float(torch.stack(joint).exp().sum()) == pytest.approx(1, abs=1e-10)
    assert float(joint[12]) == -torch.inf


@pytest.mark.parametrize("any_subset", [False, True])
@pytest.mark.parametrize(
    ("context", "tokens", "words"),
    [
        ([], [1], "text 1 has no visible token"),
        ([1], [], "text 1 has no token to score"),
        ([1] * 100, [1] * 30, "text 1 has 130 tokens, the context of 'tiny-qwen3' 128"),
    ],
)
def test_what_cannot_be_scored(
    model: LanguageModel, any_subset: bool, context: list[int], tokens: list[int], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        log_likelihoods(model, [Continuation([1], [2]), Continuation(context, tokens)], any_subset=any_subset)


@pytest.mark.parametrize(("any_subset", "length"), [(True, 128), (False, 129)])
def test_the_longest_text_fits(model: LanguageModel, any_subset: bool, length: int) -> None:
    """A causal model does not read the last token."""
    text = Continuation([1] * 100, [2] * (length - 100))
    [found] = log_likelihoods(model, [text], any_subset=any_subset)
    assert torch.isfinite(found.log_probs).all()
    with pytest.raises(UserError, match=f"text 0 has {length + 1} tokens"):
        log_likelihoods(model, [Continuation([1, *text.context], text.tokens)], any_subset=any_subset)


def test_an_target_model_needs_a_mask_token(toys: SimpleNamespace) -> None:
    bare = toys.target("qwen3", vocab=13)
    bare.mask_token_id = None
    with pytest.raises(UserError, match="has no mask token"):
        log_likelihoods(bare, continuations(1), any_subset=True)
    assert log_likelihoods(bare, continuations(1), any_subset=False)
