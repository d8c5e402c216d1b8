"""Generative perplexity and entropy against sums written out, under the embedded base."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import XLNetConfig, XLNetLMHeadModel

from data.chat import PromptPolicy, prompt_ids
from dspec.errors import UserError
from dspec.models.language_model import ASSETS, LanguageModel, embedded_target
from eval.perplexity import JudgeModel, entropy

TEXT = "Once a fox named Otto lived near a lamp. The lamp was gone."


@pytest.fixture(scope="module")
def base() -> LanguageModel:
    return embedded_target(dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def judge() -> JudgeModel:
    return JudgeModel(path=None, dtype="float32", device="cpu")


def by_hand(base: LanguageModel, context: list[int], ids: list[int]) -> float:
    """Mean negative log probability of `ids`, token by token, by dspec's own forward pass."""
    with torch.inference_mode():
        logits = base.logits(base(torch.tensor([[*context, *ids]])).hidden_BLD)[0].log_softmax(-1)
    first = max(1, len(context))
    every = [*context, *ids]
    scored = [-float(logits[i - 1, every[i]]) for i in range(first, len(every))]
    return sum(scored) / len(scored)


def test_perplexity_is_the_exponential_of_the_mean_loss(base: LanguageModel, judge: JudgeModel) -> None:
    ids = base.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    first = [] if base.tokenizer.bos_token_id is None else [base.tokenizer.bos_token_id]
    got = judge(TEXT)
    assert got["nll"] == pytest.approx(by_hand(base, first, ids), abs=1e-4)
    assert got["gen_ppl"] == pytest.approx(math.exp(got["nll"]))
    assert got["entropy"] == entropy(ids)


def test_the_judge_reads_the_task_first(base: LanguageModel, judge: JudgeModel) -> None:
    task = "Tell me a story about a fox and a lamp."
    ids = base.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    context = prompt_ids(base.tokenizer, task, PromptPolicy(system=None, thinking=False))
    got = judge(TEXT, task=task)
    assert got["nll"] == pytest.approx(by_hand(base, context, ids), abs=1e-4)
    assert got["nll"] != pytest.approx(judge(TEXT)["nll"], abs=0.05)
    assert got["entropy"] == judge(TEXT)["entropy"]  # of the text alone


@pytest.fixture(scope="module")
def with_bos(base: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> JudgeModel:
    """The embedded base with a first token, as GPT-2 has one."""
    folder = tmp_path_factory.mktemp("judge")
    base.model.save_pretrained(folder)
    tokenizer = copy.deepcopy(base.tokenizer)
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    return JudgeModel(path=str(folder), dtype="float32", device="cpu")


def test_the_judge_reads_its_first_token_first(base: LanguageModel, judge: JudgeModel, with_bos: JudgeModel) -> None:
    ids = base.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    got = with_bos(TEXT)
    assert base.tokenizer.bos_token_id is None
    assert got["nll"] == pytest.approx(by_hand(base, [base.tokenizer.eos_token_id], ids), abs=1e-4)
    assert got["nll"] != pytest.approx(judge(TEXT)["nll"], abs=0.01)


def test_the_only_token_of_a_text_is_judged_where_something_stands_before_it(
    base: LanguageModel, judge: JudgeModel, with_bos: JudgeModel
) -> None:
    (only,) = base.tokenizer("a", add_special_tokens=False)["input_ids"]
    assert judge("a") == {}
    assert with_bos("a")["nll"] == pytest.approx(by_hand(base, [base.tokenizer.eos_token_id], [only]), abs=1e-4)


def test_a_text_after_a_task_is_judged_as_far_as_both_fit(base: LanguageModel, judge: JudgeModel) -> None:
    task = "Tell me a story about a fox and a lamp."
    context = prompt_ids(base.tokenizer, task, PromptPolicy(system=None, thinking=False))
    ids = base.tokenizer(TEXT * 200, add_special_tokens=False)["input_ids"][: 1024 - len(context)]
    assert judge(TEXT * 200, task=task)["nll"] == pytest.approx(by_hand(base, context, ids), abs=1e-4)
    assert judge(TEXT, task=TEXT * 200) == {}  # no room for any of the text
    whole = (len(prompt_ids(base.tokenizer, TEXT * n, PromptPolicy(system=None, thinking=False))) for n in range(99))
    just_over = next(n for n, length in enumerate(whole) if length > 1024)
    assert judge(TEXT, task=TEXT * just_over) == {}


def test_a_perplexity_that_no_float_holds_is_the_largest_power(base: LanguageModel, tmp_path: Path) -> None:
    model = copy.deepcopy(base.model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)
    model.save_pretrained(tmp_path)
    base.tokenizer.save_pretrained(tmp_path)
    got = JudgeModel(path=str(tmp_path), dtype="float32", device="cpu")(TEXT)
    assert got["nll"] > 710
    assert got["gen_ppl"] == math.exp(700)


def test_special_tokens_do_not_count(base: LanguageModel, judge: JudgeModel) -> None:
    end = base.tokenizer.eos_token
    assert end
    assert judge(f"{end}{TEXT}{end}{end}") == judge(TEXT)
    assert judge(end) == judge("") == {}


def test_a_text_is_judged_as_far_as_the_context_goes(base: LanguageModel, judge: JudgeModel) -> None:
    assert judge.source() == {"name": "the embedded base", "dtype": "float32", "max_tokens": 1024}
    long = judge(TEXT * 200)
    first = [] if base.tokenizer.bos_token_id is None else [base.tokenizer.bos_token_id]
    ids = base.tokenizer(TEXT * 200, add_special_tokens=False)["input_ids"][: 1024 - len(first)]
    assert long["nll"] == pytest.approx(by_hand(base, first, ids), abs=1e-4)


def test_entropy_is_in_bits() -> None:
    assert entropy([5, 5, 5]) == 0
    assert entropy([1, 2, 3, 4]) == 2
    assert entropy([1, 1, 1, 2]) == pytest.approx(0.75 * math.log2(4 / 3) + 0.25 * 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "no/such/model"}, "cannot load judge_model.path 'no/such/model'"),
        ({"path": str(ASSETS / "tiny_dspark")}, "the weights of judge_model.path .* a drafter is given by checkpoint="),
        ({"dtype": "int8"}, "judge_model.dtype=int8 is unknown"),
    ],
)
def test_bad_judges_are_told_before_anything_is_decoded(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    judge = JudgeModel(**{"path": None, "dtype": "float32", "device": "cpu"} | settings)
    with pytest.raises(UserError, match=message):
        judge.source()


def test_a_judge_must_not_see_what_follows(base: LanguageModel, tmp_path: Path) -> None:
    """XLNet can be loaded as a causal LM, and then sees the token that it scores."""
    torch.manual_seed(0)
    small = XLNetConfig(vocab_size=len(base.tokenizer), d_model=16, n_layer=1, n_head=2, d_inner=24)
    XLNetLMHeadModel(small).save_pretrained(tmp_path)
    base.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="sees the text after a token: use a causal LM"):
        JudgeModel(path=str(tmp_path), dtype="float32", device="cpu").source()
