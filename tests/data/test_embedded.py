"""The embedded corpus: split hygiene, tests that see a wrong body, and a tokenizer with a clean boundary."""

import hashlib
import re
from collections import Counter

import pytest
from transformers import PreTrainedTokenizerFast

from data.embedded.corpus import SPLITS, Example, corpus, generate
from data.embedded.problem_templates import TEMPLATES as PROBLEMS
from data.embedded.problem_templates import UNSEEN
from data.embedded.tokenizer import SPECIAL, build_tokenizer

TASKS = ("problems", "functions", "stories")


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Example]]:
    return {
        split: [example for task in TASKS for example in generate(task=task, split=split, count=500, seed=seed)]
        for seed, split in enumerate(SPLITS)
    }


@pytest.fixture(scope="module")
def tokenizer(splits: dict[str, list[Example]]) -> PreTrainedTokenizerFast:
    texts = (text for example in splits["train"] for text in (example.prompt, example.response))
    return build_tokenizer(texts, vocab_size=768)


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_examples_and_a_prefix(task: str) -> None:
    many = generate(task=task, split="train", count=60, seed=3)
    assert generate(task=task, split="train", count=20, seed=3) == many[:20]
    assert generate(task=task, split="train", count=20, seed=4) != many[:20]
    assert len({example.prompt for example in many}) == len({example.id for example in many}) == 60


def test_corpus_mixes_the_counts_in_a_seeded_order() -> None:
    counts = {"problems": 20, "functions": 10, "stories": 5}
    mixed = corpus(counts=counts, split="draft", seed=1)
    assert Counter(example.task for example in mixed) == counts
    assert mixed == corpus(counts=counts, split="draft", seed=1)
    assert mixed != corpus(counts=counts, split="draft", seed=2)


@pytest.mark.parametrize("key", ["signature", "prompt"])
def test_splits_share_no_signature_and_no_prompt(splits: dict[str, list[Example]], key: str) -> None:
    owner: dict[str, str] = {}
    for split, examples in splits.items():
        for example in examples:
            digest = hashlib.sha256(getattr(example, key).encode()).hexdigest()
            assert owner.setdefault(digest, split) == split, getattr(example, key)


def test_a_fifth_of_the_problem_templates_is_only_in_the_test_split(splits: dict[str, list[Example]]) -> None:
    assert len(UNSEEN) * 5 == len(PROBLEMS)
    assert {template.name for template in PROBLEMS} >= UNSEEN
    assert not any(example.template in UNSEEN or example.unseen for examples in splits.values() for example in examples)
    held_out = generate(task="problems", split="test", count=200, seed=0, unseen=True)
    assert {example.template for example in held_out} == UNSEEN
    assert all(example.unseen for example in held_out)
    seen = {example.template for example in splits["train"] if example.task == "problems"}
    assert seen == {template.name for template in PROBLEMS} - UNSEEN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "problems", "split": "train", "unseen": True}, "'test' only"),
        ({"task": "stories", "split": "test", "unseen": True}, "no unseen templates"),
        ({"task": "poems", "split": "test"}, "task must be"),
        ({"task": "stories", "split": "calibration", "count": 5000}, "ask for fewer"),
    ],
)
def test_impossible_requests_say_what_to_do(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(**({"count": 1, "seed": 0} | arguments))  # type: ignore[arg-type]


def test_all_bodies_of_a_template_agree_and_tests_see_a_changed_constant() -> None:
    examples = generate(task="functions", split="test", count=600, seed=1)
    assert all(_passes(example, example.response) for example in examples)
    survivors = sum(_passes(example, _changed(example.response)) for example in examples)
    assert survivors <= 12  # some changes mean the same: "even and greater than 8" starts at 10 as from 9


@pytest.mark.parametrize("text", ["é ü\t\tx  \n\n  12 a .", "    if x:\n        y", "\U0001f98a 1,234\r\n", "", " "])
def test_any_string_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_stand_alone_and_special_tokens_are_single(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("12 305") == ["1", "2", "Ġ", "3", "0", "5"]
    assert [tokenizer.tokenize(token) for token in SPECIAL] == [[token] for token in SPECIAL]
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.mask_token) == (
        "<|end|>",
        "<|pad|>",
        "<|mask|>",
    )
    assert len(tokenizer) == 768


def test_a_prompt_ends_as_it_did_in_training(
    tokenizer: PreTrainedTokenizerFast, splits: dict[str, list[Example]]
) -> None:
    for example in splits["test"]:
        turns = [
            {"role": "user", "content": example.prompt},
            {"role": "assistant", "content": example.response},
        ]
        prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
        both = tokenizer.apply_chat_template(turns, return_dict=False)
        response = tokenizer(example.response).input_ids
        assert both == [*prompt, *response, tokenizer.eos_token_id]
        assert tokenizer.decode(both[len(prompt) : -1]) == example.response
        assert len(both) < 320


def test_the_system_message_comes_first_and_the_mask_covers_answers(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    roles = {"system": "Be brief.", "user": "Hi", "assistant": "Yes"}
    turns = [{"role": role, "content": content} for role, content in roles.items()]
    told = tokenizer.apply_chat_template(turns, return_assistant_tokens_mask=True, return_dict=True)
    assert tokenizer.decode(told["input_ids"]) == "<|user|>Be brief.\nHi<|end|><|assistant|>Yes<|end|>"
    marked = [token for token, on in zip(told["input_ids"], told["assistant_masks"], strict=True) if on]
    assert tokenizer.decode(marked) == "Yes<|end|>"


def _changed(body: str) -> str:
    """Raise the last whole number by one, or lengthen the last string where there is none."""
    *_, last = re.finditer(r'\d+|"[^"]*"', body)
    new = str(int(last[0]) + 1) if last[0].isdigit() else last[0][:-1] + 'q"'
    return body[: last.start()] + new + body[last.end() :]


def _passes(example: Example, body: str) -> bool:
    """Run one of our own bodies here: a process each would take minutes."""
    space: dict[str, object] = {}
    exec(f"{example.prompt}\n{body}", space)
    try:
        for test in example.tests:
            exec(test, space)
    except AssertionError:
        return False
    return True
