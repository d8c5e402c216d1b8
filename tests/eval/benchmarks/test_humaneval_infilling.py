"""HumanEval infilling: nothing around the gap changes, what is judged, and what is left out."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data.chat import PromptPolicy
from dspec.config.compose import ROOT, composed
from dspec.decoding.generation import Generation, Pass
from dspec.errors import UserError
from dspec.models.language_model import LanguageModel, embedded_target
from eval.benchmarks.base import Item
from eval.benchmarks.humaneval_infilling import HumanEvalInfilling
from eval.decoders import ANY_SUBSET, DecoderSpec, any_subset, build_ar
from eval.evaluate import Evaluation
from eval.prompts import EncodedPrompt, UnfitError, encode, text_of
from eval.reports.table import table
from eval.results import AR

Write = Callable[..., None]
POLICY = PromptPolicy(system=None, thinking=False)
EXTENT: dict[str, Any] = {"limit": None, "seed": None, "max_new_tokens": 8}
HEAD = 'def add(xs):\n    """Sum."""\n    total = 0\n    for x in xs:\n'
ROW = {
    "task_id": "SingleLineInfilling/HumanEval/0/L0",
    "entry_point": "add",
    "prompt": HEAD,
    "canonical_solution": "        total += x\n",
    "suffix": "    return total\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}
LAST = ROW | {
    "task_id": "SingleLineInfilling/HumanEval/0/L1",
    "prompt": HEAD + ROW["canonical_solution"],
    "canonical_solution": "    return total\n",
    "suffix": "",
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(ROOT / "dspec" / "assets" / "tiny")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return embedded_target(dtype="float32", device="cpu")


@pytest.fixture
def benchmark_of(folder: Path, write: Write, judge: Any) -> Callable[..., HumanEvalInfilling]:
    def call(*rows: dict[str, Any], split: str = "single_line", left_to_right: bool = False) -> HumanEvalInfilling:
        write(folder / f"humaneval_infilling_{split}.jsonl", *rows)
        return HumanEvalInfilling(judge=judge, split=split, left_to_right=left_to_right, **EXTENT)

    return call


def texts(tokenizer: PreTrainedTokenizerBase, prompt: EncodedPrompt, tokens: list[int]) -> tuple[str, str, str]:
    """The text before the hole, in it and after it, with these tokens in the hole."""
    assert prompt.positions is not None
    seen, holes = prompt.positions[: len(prompt.ids)], prompt.positions[len(prompt.ids) :]
    assert sorted(prompt.positions) == list(range(len(prompt.positions)))
    assert holes == list(range(holes[0], holes[0] + len(tokens)))
    before = [t for t, p in zip(prompt.ids, seen, strict=True) if p < holes[0]]
    after = [t for t, p in zip(prompt.ids, seen, strict=True) if p > holes[-1]]
    return text_of(tokenizer, before), text_of(tokenizer, tokens), text_of(tokenizer, after)


WHITE = st.text(st.sampled_from(" \t\n\r:x=_é中\u00a0"), max_size=12)
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
PIECE = st.one_of(WHITE, ANY)


@settings(max_examples=300, deadline=None)
@given(before=PIECE, gap=PIECE.filter(bool), after=PIECE)
def test_the_text_around_a_gap_is_kept_to_the_character(
    tokenizer: PreTrainedTokenizerBase, before: str, gap: str, after: str
) -> None:
    """Tabs, leading and trailing spaces, empty suffixes: all tokens together are exactly the text, whatever part."""
    parts = (before, False), (gap, True), (after, False)
    benchmark: Any = HumanEvalInfilling
    if not before + after:
        with pytest.raises(UnfitError, match="no visible token"):
            encode(tokenizer, benchmark, Item("a", before, parts=parts, exact=True), POLICY)
        return
    prompt = encode(tokenizer, benchmark, Item("a", before, parts=parts, exact=True), POLICY)
    gold = tokenizer(gap, add_special_tokens=False)["input_ids"]
    assert prompt.max_new_tokens == len(gold)
    assert prompt.positions is not None
    whole = dict(zip(prompt.positions, [*prompt.ids, *gold], strict=True))
    assert text_of(tokenizer, [whole[p] for p in range(len(whole))]) == before + gap + after
    assert texts(tokenizer, prompt, gold) == (before, gap, after)
    rng = random.Random(gap)
    other = [rng.randrange(5, len(tokenizer)) for _ in gold]  # any tokens, torn characters included
    assert texts(tokenizer, prompt, other)[::2] == (before, after)
    assert prompt.response(other) == other


def test_a_gap_at_the_end_is_filled_too(tokenizer: PreTrainedTokenizerBase, benchmark_of: Any) -> None:
    item = benchmark_of(LAST).items()[0]
    prompt = encode(tokenizer, benchmark_of(LAST), item, POLICY)
    gold = tokenizer(LAST["canonical_solution"])["input_ids"]
    assert texts(tokenizer, prompt, gold) == (LAST["prompt"], LAST["canonical_solution"], "")
    assert prompt.max_new_tokens == len(gold) > 1


@pytest.mark.parametrize(
    ("row", "answer", "passed", "exact"),
    [
        (ROW, "        total += x\n", True, True),
        (ROW, "        total = total + x\n", True, False),
        (ROW, "        total += x", False, False),  # nothing is added to it: the suffix goes on in the same line
        (ROW, " " * 7 + "total += x\n", True, False),  # python takes any deeper indentation
        (ROW, "    total += x\n", False, False),
        (ROW, "        pass\n", False, False),
        (ROW, "\ttotal += x\n", False, False),  # tabs stay tabs: TabError
        (LAST, "    return total\n", True, True),
        (LAST, "    return total", True, False),
        (LAST, "", False, False),
    ],
)
def test_the_whole_text_is_judged(
    benchmark_of: Any, judge: Any, row: dict[str, Any], answer: str, passed: bool, exact: bool
) -> None:
    benchmark = benchmark_of(row)
    (item,) = benchmark.items()
    assert benchmark.score(item, answer) == {"pass@1": passed, "exact match": exact}
    assert judge.programs == [row["prompt"] + answer + row["suffix"]]
    assert benchmark.source()["gold_length"] is True


@pytest.mark.parametrize(
    ("answer", "passed", "exact"),
    [
        ("        total += x\n    return 0", True, True),  # the first line is taken
        ("        total = total + x  ", True, False),
        ("", False, False),
    ],
)
def test_left_to_right_takes_the_first_line(
    tokenizer: PreTrainedTokenizerBase, benchmark_of: Any, answer: str, passed: bool, exact: bool
) -> None:
    benchmark = benchmark_of(ROW, left_to_right=True)
    (item,) = benchmark.items()
    assert benchmark.score(item, answer) == {"pass@1": passed, "exact match": exact}
    assert benchmark.stop == ("\n",)
    assert benchmark.source()["gold_length"] is False
    prompt = encode(tokenizer, benchmark, item, POLICY)
    assert prompt.positions is None
    assert text_of(tokenizer, prompt.ids) == ROW["prompt"]


def test_what_makes_no_sense_is_one_line(benchmark_of: Any) -> None:
    with pytest.raises(
        UserError, match="split=lines is unknown; use one of single_line, multi_line, random_span_light"
    ):
        benchmark_of(ROW, split="lines")
    with pytest.raises(UserError, match=r"left_to_right .* needs split=single_line, not multi_line"):
        benchmark_of(ROW, split="multi_line", left_to_right=True)
    with pytest.raises(UserError, match="left_to_right=1 must be true or false"):
        benchmark_of(ROW, left_to_right=1)


def normalising() -> PreTrainedTokenizerBase:
    """A tokenizer that does not give every text back: it composes characters."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bpe = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, clean_up_tokenization_spaces=False)


def test_a_tokenizer_that_changes_a_text_is_told(benchmark_of: Any) -> None:
    tokenizer = normalising()
    fits, changes = ROW, ROW | {"task_id": "b", "prompt": "# e\u0301\n" + HEAD}
    benchmark = benchmark_of(fits, changes)
    one, other = benchmark.items()
    assert encode(tokenizer, benchmark, one, POLICY).max_new_tokens == len(ROW["canonical_solution"])
    with pytest.raises(UnfitError, match="do not give back its text exactly"):
        encode(tokenizer, benchmark, other, POLICY)
    assert encode(tokenizer, benchmark, replace(other, exact=False), POLICY).max_new_tokens == 19  # no code: it may


SPECS = {
    ANY_SUBSET: any_subset(label="any-subset", weights="trained", base=lambda: None),  # type: ignore[arg-type, return-value]
    AR: DecoderSpec(label="AR", build=build_ar),
}


def evaluate(target: LanguageModel, folder: Path, benchmark: Any) -> dict[str, Any]:
    evaluation = Evaluation(
        temperatures=[0.0], top_p=1.0, batch_size=2, limit=None, warmup=0, generate_prompts=0, generate_floor=0.9,
        seed=0,
    )  # fmt: skip
    return evaluation(
        target=target, draft=None, specs=SPECS, benchmarks={"gaps": benchmark}, policy=POLICY,
        stop_ids=target.stop_ids, folder=folder, run={"seed": 0, "config": {}}, calibration=None, settings={},
    )  # fmt: skip


def test_texts_that_do_not_fit_are_counted_and_said(
    target: LanguageModel, benchmark_of: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = ROW | {"task_id": "long", "prompt": "# x\n" * target.max_positions + HEAD}
    [row] = evaluate(target, tmp_path / "some", benchmark_of(long, ROW, LAST))["rows"]
    assert (row["n"], row["left_out"]) == (2, 1)
    assert "1 of 3 texts of gaps do not fit tiny (first: long has " in caplog.text
    assert "(1 left out: they do not fit)" in table([row], trusted=True)
    with pytest.raises(UserError, match="1 of 1 texts of gaps do not fit tiny"):
        evaluate(target, tmp_path / "none", benchmark_of(long))
    [whole] = evaluate(target, tmp_path / "all", benchmark_of(ROW, LAST))["rows"]
    assert whole["left_out"] == 0
    assert "left out" not in table([whole], trusted=True)


def test_the_reference_passes_from_end_to_end(
    target: LanguageModel, benchmark_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt, filled tokens, text, program and verdict: a decoder that writes the reference is right everywhere."""
    gaps = {len(row["prompt"]): target.tokenizer(row["canonical_solution"])["input_ids"] for row in (ROW, LAST)}

    def written(decoder: object, requests: Any) -> list[Generation]:
        found = []
        for request in requests:
            before = request.ids[: request.positions[len(request.ids)]]
            tokens = gaps[len(text_of(target.tokenizer, before))]
            assert request.max_new_tokens == len(tokens)
            found.append(Generation(list(tokens), passes=[Pass("prefill", len(tokens))]))
        return found

    monkeypatch.setattr("eval.evaluate.decode", written)
    [row] = evaluate(target, tmp_path, benchmark_of(ROW, LAST))["rows"]
    assert row["verdicts"] == {"pass@1": 1.0, "exact match": 1.0}


def test_a_text_as_long_as_the_context_fits(
    target: LanguageModel, benchmark_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = benchmark_of(ROW)
    [item] = benchmark.items()
    length = len(encode(target.tokenizer, benchmark, item, POLICY).positions or [])
    evaluation = Evaluation(
        temperatures=[0.0], top_p=1.0, batch_size=1, limit=None, warmup=0, generate_prompts=0, generate_floor=0.9,
        seed=0,
    )  # fmt: skip

    def encoded() -> Any:
        return evaluation.encode_prompts(target=target, specs=SPECS, benchmarks={"gaps": benchmark}, policy=POLICY)

    monkeypatch.setattr(LanguageModel, "max_positions", length)
    assert len(encoded()["gaps"]) == 1
    monkeypatch.setattr(LanguageModel, "max_positions", length - 1)
    with pytest.raises(UserError, match=f"has {length} tokens, the context {length - 1}"):
        encoded()


def test_left_to_right_is_for_all_decoders(target: LanguageModel, benchmark_of: Any, tmp_path: Path) -> None:
    """And any-subset ones, which see the text before the gap alone, stop at the line's end as AR does."""
    found = evaluate(target, tmp_path, benchmark_of(ROW, LAST, left_to_right=True))
    assert [row["decoder"]["name"] for row in found["rows"]] == [ANY_SUBSET, AR]
    assert all(row["tokens"] <= 2 * EXTENT["max_new_tokens"] for row in found["rows"])
    assert found["run"]["benchmarks"]["gaps"]["gold_length"] is False


@pytest.mark.slow
def test_real_references_pass_and_are_exact(real_data: Path, judge: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    for split, count in (("single_line", 1033), ("multi_line", 5815), ("random_span_light", 164)):
        benchmark = HumanEvalInfilling(judge=judge, split=split, left_to_right=False, **EXTENT)
        items = benchmark.items()
        assert len(items) == count
        rng = random.Random(0)
        for item in rng.sample(items, 6):
            wanted = item.parts[1][0]
            assert all(benchmark.score(item, wanted).values()), item.id
            assert not benchmark.score(item, "raise ValueError\n")["exact match"]
        for item in items[::40]:
            prompt = encode(tokenizer, benchmark, item, POLICY)
            gold = tokenizer(item.parts[1][0])["input_ids"]
            assert texts(tokenizer, prompt, gold) == tuple(part for part, _ in item.parts)


def test_rows_without_a_suffix_field_are_told(folder: Path, write: Write, judge: Any) -> None:
    write(folder / "humaneval_infilling_single_line.jsonl", {k: v for k, v in ROW.items() if k != "suffix"})
    with pytest.raises(UserError, match='line 1: no "suffix"'):
        HumanEvalInfilling(judge=judge, split="single_line", left_to_right=False, **EXTENT)
    write(folder / "humaneval_infilling_single_line.jsonl", ROW, LAST | {"canonical_solution": None})
    with pytest.raises(UserError, match='line 2: "canonical_solution" must be a string'):
        HumanEvalInfilling(judge=judge, split="single_line", left_to_right=False, **EXTENT)


def test_the_config_says_where_its_data_is(monkeypatch: pytest.MonkeyPatch) -> None:
    node = composed("eval", ["target=tiny", "benchmark=humaneval_infilling"]).benchmark.humaneval_infilling
    assert (node.split, node.left_to_right) == ("single_line", False)
    monkeypatch.delenv("DSPEC_DATA", raising=False)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Dataset scripts are no longer supported")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(UserError, match=r"set DSPEC_DATA to a folder with humaneval_infilling_single_line\.jsonl"):
        HumanEvalInfilling(judge=None, split="single_line", left_to_right=False, **EXTENT)  # type: ignore[arg-type]
