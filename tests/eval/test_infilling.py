"""Texts with holes through the evaluation: prompts, which decoders answer them, and what a filled response is worth."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.chat import PromptPolicy, prompt_ids, response_ids
from dspec.config.compose import composed, instantiate, instantiate_decoders
from dspec.decoding.any_subset.decoder import AnySubset, AnySubsetConfig
from dspec.decoding.generation import Generation
from dspec.decoding.loop import Decoder
from dspec.decoding.sampling import GREEDY
from dspec.errors import UserError
from dspec.models.language_model import LanguageModel, embedded_target
from eval.benchmarks.base import Item
from eval.benchmarks.embedded_infilling import FilledFunctions, FilledProblems, equations_hold
from eval.decoders import DecoderSpec, build_ar
from eval.evaluate import Evaluation
from eval.prompts import encode
from eval.results import ANY_SUBSET, AR

POLICY = PromptPolicy(system=None, thinking=False)


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return embedded_target(dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def problems() -> FilledProblems:
    return FilledProblems(count=4, holes="random", hidden=0.5, seed=0)


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
    for item in FilledProblems(count=600, holes="random", hidden=0.5, seed=3).items():  # some add three numbers
        assert item.response is not None
        assert equations_hold(item.response), item.response
    one = problems.items()[0]
    assert problems.score(one, one.response or "") == {"consistent": True}
    assert problems.score(one, (one.response or "").replace("27 + 4 = 31", "27 + 4 = 32")) == {"consistent": False}
    assert problems.score(one, "#### 124") == {"consistent": False}
    assert not equations_hold("7 / 0 = 7")
    assert equations_hold("12 / 4 = 3, 3 - 5 = -2")


@pytest.mark.parametrize(
    "text",
    [
        "3 +4 = 9. 1 + 1 = 2", "1 + 1 = 2. So 2 = 9", "1 + 1 = 2 = 3", "1 + 1 = 2 + 3 = 5", "3 + 4 == 7",
        "1 + 1 = 2. 3 + = 9", "3 + 4 = 7.5", "3 + 4 = 7,500", "3 + 4 = 7 + 1", "3 + 4 = 7+1", "3 + 4 = 7 - -1",
        "3 + 4 = 7x", "5 + 3 + 4 = 7", "5+3 + 4 = 7", "5 - 3 + 4 = 7", "x + 3 + 4 = 7", "1.3 + 4 = 7", "1,3 + 4 = 7",
        "x3 + 4 = 7", "1 / 0 = 0", "1 / 3 = 0", "2 + 3 * 4 = 20", "no equation", "",
    ],
)  # fmt: skip
def test_what_cannot_be_read_as_an_equation_is_not_right(text: str) -> None:
    assert not equations_hold(text)


@pytest.mark.parametrize(
    "text",
    [
        "3 + 4 = 7.",
        "(3 + 4 = 7)",
        "-3 + 4 = 1",
        "so 3 + 4 = 7, which",
        "1 + 1 = 2 - so",
        "1 + 2 + 3 = 6",
        "2 + 3 * 4 - 6 / 3 = 12",
        "1 / 2 + 1 / 2 = 1",
        "1 - 2 - 3 = -4",
    ],
)
def test_equations_stand_in_sentences(text: str) -> None:
    assert equations_hold(text)


def test_a_filled_function_passes_its_tests() -> None:
    judge: Any = instantiate(
        composed("eval", ["target=tiny", "benchmark=tiny_infilling"]).benchmark.filled_functions.judge
    )
    functions = FilledFunctions(judge=judge, count=2, holes="random", hidden=0.5, seed=0)
    item = functions.items()[0]
    assert functions.score(item, item.response or "") == {"pass@1": True}
    assert functions.score(item, "    return 7") == {"pass@1": False}
    assert functions.source()["gold_length"]


@pytest.mark.parametrize("hidden", [0.2, 0.4, 1.0])
def test_a_span_is_a_run_of_tokens(target: LanguageModel, hidden: float) -> None:
    benchmark, first = FilledProblems(count=12, holes="span", hidden=hidden, seed=0), set()
    for item in benchmark.items():
        assert item.response is not None
        response = response_ids(target.tokenizer, item.response)
        prompt = encode(target.tokenizer, benchmark, item, POLICY)
        assert prompt.positions is not None
        assert prompt.start is not None
        holes = prompt.positions[len(prompt.ids) :]
        assert len(holes) == max(1, round(hidden * (len(response) - 1)))
        assert holes == list(range(holes[0], holes[0] + len(holes)))
        assert prompt.start <= holes[0]
        assert holes[-1] < len(prompt.positions) - 1  # the end of the turn is given
        assert prompt.response([response[h - prompt.start] for h in holes]) == response
        first.add(holes[0] - prompt.start)
    assert (len(first) > 4) == (hidden < 1)  # drawn item by item


def test_lines_are_hidden_whole(target: LanguageModel) -> None:
    """And their tokens, line breaks and indentation included, are those of the whole response."""
    judge: Any = instantiate(
        composed("eval", ["target=tiny", "benchmark=tiny_infilling"]).benchmark.filled_functions.judge
    )
    functions, places = FilledFunctions(judge=judge, count=12, holes="line", hidden=0.3, seed=0), set()
    whole = FilledFunctions(judge=judge, count=12, holes="random", hidden=0.3, seed=0).items()
    for item, other in zip(functions.items(), whole, strict=True):
        assert other.response is not None
        assert "".join(part for part, _ in item.parts) == other.response
        [hidden] = [part for part, is_hidden in item.parts if is_hidden]
        lines = other.response.count("\n") + 1
        assert len(hidden.strip("\n").split("\n")) == max(1, round(0.3 * lines))
        prompt = encode(target.tokenizer, functions, item, POLICY)
        task, response = (
            prompt_ids(target.tokenizer, item.prompt, POLICY),
            response_ids(target.tokenizer, other.response),
        )
        assert prompt.positions is not None
        holes = prompt.positions[len(prompt.ids) :]
        text = dict(zip(prompt.positions, [*prompt.ids, *[-1] * len(holes)], strict=True))
        assert [text[i] for i in range(len(text))] == [
            -1 if i in holes else token for i, token in enumerate([*task, *response])
        ]
        assert functions.score(item, hidden) == {"pass@1": True}
        assert functions.score(item, "\n    return None\n  x") == {"pass@1": False}
        places.add(item.parts[0][1])
    assert places == {True, False}  # the first lines of some, later ones of others


def test_a_problem_with_a_hidden_line_is_judged_whole(target: LanguageModel) -> None:
    problems = FilledProblems(count=20, holes="line", hidden=0.01, seed=0)
    item = next(item for item in problems.items() if len(item.parts) == 3)
    [hidden] = [part for part, is_hidden in item.parts if is_hidden]
    assert hidden.startswith("\n")
    assert problems.score(item, hidden) == {"consistent": True}
    assert problems.score(item, f"{hidden} And 1 + 1 = 3.") == {"consistent": False}
    assert "1 + 1 = 3" not in "".join(part for part, _ in item.parts)


@pytest.mark.parametrize("holes", ["random", "span", "line"])
def test_what_is_hidden_is_said(holes: str) -> None:
    source = FilledProblems(count=1, holes=holes, hidden=0.25, seed=0).source()
    kind = {"random": "0.25 of the tokens hidden", "span": "tokens hidden, in one span", "line": "0.25 of the lines"}
    assert kind[holes] in source["prompt"]
    assert source["gold_length"]


def test_unknown_holes() -> None:
    with pytest.raises(UserError, match="holes=lines is unknown; use one of random, span, line"):
        FilledProblems(count=1, holes="lines", hidden=0.5, seed=0)


@pytest.mark.parametrize("hidden", [0.0, 1.5, float("nan")])
def test_shares_that_make_no_sense(hidden: float) -> None:
    with pytest.raises(UserError, match="hidden"):
        FilledProblems(count=1, holes="random", hidden=hidden, seed=0)


def _any_subset(num_drafts: int) -> Any:
    config = AnySubsetConfig(num_drafts=num_drafts, drafted_by="model", bonus=False, tolerance=0.0)

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
    specs = {AR: DecoderSpec(label="AR", build=build_ar), **SPECS}
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
    plain = {AR: DecoderSpec(label="AR", build=build_ar)}
    with pytest.raises(UserError, match="must contain any_subset"):
        _evaluate(target, tmp_path, plain, filled=problems)


def test_raw_text_goes_on_where_it_ends(toys: SimpleNamespace) -> None:
    """XLNet's tokenizer puts <sep><cls>, the end of a document, after every text."""
    tokenizer, raw = toys.xlnet_tokenizer(), SimpleNamespace(chat=False, max_new_tokens=3)
    prompt = encode(tokenizer, raw, Item("a", "Tom has more"), POLICY)
    assert tokenizer.convert_ids_to_tokens(prompt.ids) == ["▁Tom", "▁has", "▁more"]


def test_an_answer_is_the_whole_response(target: LanguageModel, problems: FilledProblems) -> None:
    prompt = encode(target.tokenizer, problems, problems.items()[0], POLICY)
    generation = Generation(tokens=list(range(prompt.max_new_tokens)))
    assert len(prompt.response(generation.tokens)) > len(generation.tokens)
    plain = encode(target.tokenizer, problems, Item("a", "b"), POLICY)
    assert plain.positions is None
    assert plain.response([1, 2]) == [1, 2]
