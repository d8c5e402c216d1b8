"""Stop strings: where a look at every single token would end the text, with few looks."""

import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerBase

from dspec.decoding.generation import Generation, Request
from dspec.decoding.sampling import GREEDY
from dspec.decoding.state import Row
from dspec.decoding.stopping import StopStrings
from dspec.models.language_model import embedded_target

TEXTS = [
    "def f(x):\n    return x\n\nprint(f(1))\n",
    "The answer is 4.\n\nQuestion: what is 2 + 2? Answer: 4\n####",
    "caf\u00e9 na\u00efve \u4f60\u597d \U0001f642\U0001f680 fin\u00e9",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return embedded_target(dtype="float32", device="cpu").tokenizer


def one_by_one(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], tokens: list[int], known: int) -> int | None:
    """Looks at the text's tail behind each token."""
    window = max((len(s.encode()) for s in strings), default=0) + 8
    for end in range(known + 1, len(tokens) + 1):
        tail = tokenizer.decode(tokens[max(0, end - window) : end], skip_special_tokens=True)
        if any(s in tail for s in strings):
            return end
    return None


def texts(tokenizer: PreTrainedTokenizerBase, rng: random.Random, count: int) -> list[list[int]]:
    """Real text, single bytes, arbitrary tokens and special ones, in any mixture."""
    special, found = tokenizer.all_special_ids, []
    for _ in range(count):
        ids: list[int] = []
        while len(ids) < 40:
            text = rng.choice(TEXTS)
            kinds = [
                tokenizer(text[rng.randrange(len(text)) :])["input_ids"][: rng.randint(1, 20)],
                [token for char in text[:4] for token in tokenizer(char)["input_ids"]],
                [rng.randrange(len(tokenizer)) for _ in range(3)],
                [rng.choice(special)],
            ]
            ids += rng.choice(kinds)
        found.append(ids)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_ends_where_a_look_at_every_token_ends(tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    rng, seen = random.Random(seed), set()
    for ids in texts(tokenizer, rng, 25):
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        at = rng.randrange(len(whole))
        strings = rng.sample(["\n", "\n\n", "####", "Question:", whole[at : at + rng.randint(1, 9)], "\u00e9", "zz"], 3)
        ends = StopStrings(tokenizer, strings)
        for known in (0, 1, 5, rng.randrange(len(ids)), len(ids)):
            got = ends(ids, known)
            assert got == one_by_one(tokenizer, strings, ids, known), (strings, known)
            seen.add(got is None)
    assert seen == {True, False}
    assert StopStrings(tokenizer, [])(ids, 0) is None


@pytest.mark.parametrize("seed", range(6))
def test_rounds_are_recorded_as_token_by_token(tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    """Tokens, stops and valid slots of rounds with stop tokens, stop strings and the length limit."""
    rng = random.Random(seed)
    for ids in texts(tokenizer, rng, 20):
        strings = rng.sample(["\n", "Question:", "return", "4", "\u00e9"], 2)
        request = Request(
            ids=[0],
            sampling=GREEDY,
            seed=0,
            max_new_tokens=rng.randint(1, 40),
            stop_ids=(rng.choice(ids),),
            should_stop=StopStrings(tokenizer, strings),
        )

        def stops(text: list[int], request: Request = request, strings: list[str] = strings) -> bool:
            return text[-1] in request.stop_ids or one_by_one(tokenizer, strings, text, len(text) - 1) is not None

        row, expected, at = Row(request, [0], Generation()), Row(request, [0], Generation()), 0
        got, wanted = row.generation, expected.generation
        while at < len(ids) and not row.done:
            drafts = ids[at : at + rng.randint(0, 7)]
            accepted = rng.randint(0, len(drafts))
            following = rng.choice(ids)
            valid = min(len(drafts), request.max_new_tokens - len(wanted.tokens))
            valid = next((k + 1 for k in range(valid) if stops([*wanted.tokens, *drafts[: k + 1]])), valid)
            for token in [*drafts[:accepted], following]:
                if not expected.done:
                    wanted.tokens.append(token)
                    wanted.stopped = stops(wanted.tokens)
            row.commit_round(drafts, accepted, following, positions=len(drafts) + 1)
            assert (got.tokens, got.stopped, row.text) == (wanted.tokens, wanted.stopped, [0, *wanted.tokens])
            assert (got.rounds[-1].valid, got.rounds[-1].accepted) == (valid, min(accepted, valid))
            at += accepted + 1


def test_few_looks_a_round(tokenizer: PreTrainedTokenizerBase) -> None:
    looks = []

    def decode(*args: object, **kwargs: object) -> str:
        looks.append(args)
        return tokenizer.decode(*args, **kwargs)

    ends = StopStrings(SimpleNamespace(decode=decode), ["never"])  # type: ignore[arg-type]
    request = Request(ids=[0], sampling=GREEDY, seed=0, max_new_tokens=99, stop_ids=(), should_stop=ends)
    row = Row(request, [0], Generation())
    row.commit_round(list(range(40, 56)), 16, 60, positions=17)
    assert len(row.generation.tokens) == 17
    assert len(looks) <= 2
