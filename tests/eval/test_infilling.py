"""Texts with holes through the evaluation: prompts, which decoders answer them, and what a filled response is worth."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.chat import PromptPolicy, prompt_ids, response_ids
from dspec.config import composed, instantiate, instantiate_decoders
from dspec.decoding import factory
from dspec.decoding.any_subset import AnySubset, AnySubsetConfig
from dspec.decoding.generation import Generation
from dspec.decoding.loop import Decoder
from dspec.decoding.sampling import GREEDY
from dspec.errors import UserError
from dspec.models.language_model import LanguageModel, embedded_target
from eval.benchmarks.base import Item
from eval.benchmarks.embedded_infilling import FilledFunctions, FilledProblems, equations_hold
from eval.decoders import DecoderSpec
from eval.evaluate import Evaluation
from eval.prompts import encode
from eval.results import ANY_SUBSET, AR

POLICY = PromptPolicy(system=None, thinking=False)


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return embedded_target(dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def problems() -> FilledProblems:
    return FilledProblems(count=4, hidden=0.5, seed=0)


def test_a_prompt_shows_all_but_the_holes(target: LanguageModel, problems: FilledProblems) -> None:
    for item in problems.items():
        prompt = encode(target.tokenizer, problems, item, POLICY)
        task, response = (
            prompt_ids(target.tokenizer, item.prompt, POLICY),
            response_ids(target.tokenizer, item.response),
        )
        whole = [*task, *response]
        assert prompt.positions is not None
        holes = prompt.positions[len(prompt.ids) :]
        assert sorted(prompt.positions) == list(range(len(whole)))
        assert [whole[p] for p in prompt.positions[: len(prompt.ids)]] == prompt.ids
        assert len(holes) == prompt.max_new_tokens == round(0.5 * (len(response) - 1))
        assert min(holes) >= len(task)
        assert max(holes) < len(whole) - 1  # the end of the turn is given
        assert holes == sorted(holes)
        assert prompt.response([whole[p] for p in holes]) == response
        assert prompt == encode(target.tokenizer, problems, item, POLICY)
        request = prompt.request(sampling=GREEDY, seed=0, stop_ids=target.stop_ids, stop=lambda tokens, known: 1)
        assert (request.stop_ids, request.should_stop) == ((), None)


def test_references_are_right_and_changed_ones_wrong(problems: FilledProblems) -> None:
    for item in FilledProblems(count=60, hidden=0.5, seed=3).items():
        assert item.response is not None
        assert equations_hold(item.response), item.response
    one = problems.items()[0]
    assert problems.score(one, one.response or "") == {"consistent": True}
    assert problems.score(one, (one.response or "").replace("27 + 4 = 31", "27 + 4 = 32")) == {"consistent": False}
    assert problems.score(one, "#### 124") == {"consistent": False}
    assert not equations_hold("7 / 0 = 7")
    assert equations_hold("12 / 4 = 3, 3 - 5 = -2")


def test_a_filled_function_passes_its_tests() -> None:
    judge: Any = instantiate(
        composed("eval", ["target=tiny", "benchmark=tiny_infilling"]).benchmark.filled_functions.judge
    )
    functions = FilledFunctions(judge=judge, count=2, hidden=0.5, seed=0)
    item = functions.items()[0]
    assert functions.score(item, item.response or "") == {"pass@1": True}
    assert functions.score(item, "    return 7") == {"pass@1": False}
    assert functions.source()["gold_length"]


@pytest.mark.parametrize("hidden", [0.0, 1.5, float("nan")])
def test_shares_that_make_no_sense(hidden: float) -> None:
    with pytest.raises(UserError, match="hidden"):
        FilledProblems(count=1, hidden=hidden, seed=0)


def _any_subset(num_drafts: int) -> Any:
    config = AnySubsetConfig(num_drafts=num_drafts, draft="self", bonus=False, tolerance=0.0)

    def build(*, target: LanguageModel, draft: object) -> Decoder:
        return AnySubset(target=target, config=config)

    return build


SPECS = {
    ANY_SUBSET: DecoderSpec(label="any-subset", build=_any_subset(1), baseline=ANY_SUBSET, infills=True),
    "assd": DecoderSpec(label="ASSD", build=_any_subset(3), baseline=ANY_SUBSET, infills=True),
}


def _evaluate(target: LanguageModel, folder: Path, specs: dict[str, DecoderSpec], **benchmarks: Any) -> dict[str, Any]:
    evaluation = Evaluation(
        temperatures=[0.0], top_p=1.0, batch_size=2, limit=3, warmup=0, generate_prompts=0, generate_floor=0.9, seed=0
    )
    return evaluation(
        target=target, draft=None, specs=specs, benchmarks=benchmarks, policy=POLICY, stop_ids=target.stop_ids,
        folder=folder, run={"seed": 0, "config": {}}, calibration=None, settings={},
    )  # fmt: skip


def test_rows_of_an_infilling_benchmark(target: LanguageModel, problems: FilledProblems, tmp_path: Path) -> None:
    """AR is not asked; speeds refer to the sequential decoder; greedy ASSD fills in the same tokens in fewer passes."""
    specs = {AR: DecoderSpec(label="AR", build=factory.autoregressive), **SPECS}
    rows = _evaluate(target, tmp_path, specs, filled=problems)["rows"]
    assert [row["decoder"]["name"] for row in rows] == [ANY_SUBSET, "assd"]
    sequential, assd = rows
    assert sequential["tokens"] == assd["tokens"] == sequential["nfe"]
    assert assd["nfe"] < sequential["nfe"]
    assert assd["mismatches"] == 0
    assert {row["baseline"] for row in rows} == {ANY_SUBSET}
    assert assd["speedup"] == assd["speedup_vs_base_ar"]


def test_the_base_fills_holes_next_to_the_trained_model(problems: FilledProblems, tmp_path: Path) -> None:
    """With weights=base, ASSD has the tokens of its baseline, the base's, not those of the trained model."""
    trained = embedded_target(dtype="float32", device="cpu")
    with torch.no_grad():
        trained.lm_head.weight.neg_()
    overrides = ["target=tiny", "decoder.assd.weights=base"]
    alone = instantiate_decoders(composed("eval", [*overrides, "decoder=[any_subset,assd]"]))
    with pytest.raises(UserError, match="decoder must contain base_any_subset"):
        _evaluate(trained, tmp_path / "alone", alone, filled=problems)
    every = instantiate_decoders(composed("eval", [*overrides, "decoder=[any_subset,base_any_subset,assd]"]))
    rows = {r["decoder"]["name"]: r for r in _evaluate(trained, tmp_path / "every", every, filled=problems)["rows"]}
    assert list(rows) == ["any_subset", "base_any_subset", "assd"]
    assert rows["assd"]["mismatches"] == 0
    assert rows["assd"]["nfe"] < rows["base_any_subset"]["nfe"] == rows["any_subset"]["nfe"]
    against = {**every, "assd": replace(every["assd"], baseline=ANY_SUBSET)}
    wrong = _evaluate(trained, tmp_path / "against", against, filled=problems)["rows"][-1]
    assert wrong["mismatches"] > 0


def test_the_decoder_that_speeds_refer_to_must_be_there(
    target: LanguageModel, problems: FilledProblems, tmp_path: Path
) -> None:
    plain = {AR: DecoderSpec(label="AR", build=factory.autoregressive)}
    with pytest.raises(UserError, match="must contain any_subset"):
        _evaluate(target, tmp_path, plain, filled=problems)


def test_an_answer_is_the_whole_response(target: LanguageModel, problems: FilledProblems) -> None:
    prompt = encode(target.tokenizer, problems, problems.items()[0], POLICY)
    generation = Generation(tokens=list(range(prompt.max_new_tokens)))
    assert len(prompt.response(generation.tokens)) > len(generation.tokens)
    plain = encode(target.tokenizer, problems, Item("a", "b"), POLICY)
    assert plain.positions is None
    assert plain.response([1, 2]) == [1, 2]
