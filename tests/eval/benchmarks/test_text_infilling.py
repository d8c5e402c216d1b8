"""Texts and stories with holes, on files made here: which tokens are hidden, what an answer is and how it is scored."""

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.chat import PromptPolicy
from data.story_rows import fables, roc_stories
from dspec.config.compose import composed, instantiate
from dspec.errors import UserError
from dspec.models.language_model import LanguageModel, embedded_target
from eval.benchmarks.base import Item
from eval.benchmarks.story_infilling import Fables, RocStories
from eval.benchmarks.text_infilling import FilledStories, WikiText
from eval.prompts import encode

POLICY = PromptPolicy(system=None, thinking=False)
JUDGE: Any = SimpleNamespace(source=lambda: {"name": "a judge"})
LINES = [" = A <unk> title = \n", "", *(f" The quick fox {i} , who was 7 % red , ran . \n" for i in range(60))]
STORY = ["Ann saw a cat.", "It was red.", "She called it home.", "It came at once.", "They ate fish."]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    model: LanguageModel = embedded_target(dtype="float32", device="cpu")
    return model.tokenizer


def wikitext(**settings: Any) -> WikiText:
    common = {"length": 40, "hidden": 0.95, "left_to_right": False, "judge_model": JUDGE, "limit": None, "seed": None}
    return WikiText(**common | settings)


def test_rows_of_tokens_with_random_holes(folder: Path, write: Callable[..., None], tokenizer: Any) -> None:
    write(folder / "wikitext2_test.jsonl", *({"text": line} for line in LINES))
    benchmark = wikitext()
    items = benchmark.items()
    whole = "".join(line if line else "\n" for line in LINES)
    assert len(items) == len(whole.split()) // 40
    assert "".join(item.response or "" for item in items) == whole.lstrip()[: sum(len(i.response or "") for i in items)]
    hidden = []
    for item in items:
        ids = tokenizer(item.response, add_special_tokens=False)["input_ids"][:40]
        prompt = encode(tokenizer, benchmark, item, POLICY)
        assert prompt.positions is not None
        seen, holes = prompt.positions[: len(prompt.ids)], prompt.positions[len(prompt.ids) :]
        assert (len(seen), len(holes)) == (2, 38)
        assert sorted(prompt.positions) == list(range(40))
        assert [ids[p] for p in seen] == prompt.ids
        assert prompt.response([ids[p] for p in holes]) == ids  # the answer is the whole row
        assert prompt == encode(tokenizer, benchmark, item, POLICY)
        hidden.append(holes)
    assert len({tuple(h) for h in hidden}) > len(hidden) // 2  # each row has its own
    source = benchmark.source()
    assert source["gold_length"]
    assert source["judge_model"] == {"name": "a judge"}
    assert (source["rows"], len(wikitext(limit=3).items())) == (len(items), 3)


def test_a_suffix_is_hidden_from_left_to_right(folder: Path, write: Callable[..., None], tokenizer: Any) -> None:
    write(folder / "wikitext2_test.jsonl", *({"text": line} for line in LINES))
    benchmark = wikitext(hidden=0.75, left_to_right=True)
    prompt = encode(tokenizer, benchmark, benchmark.items()[0], POLICY)
    assert prompt.positions == list(range(40))
    assert (len(prompt.ids), prompt.max_new_tokens) == (10, 30)


def test_a_token_is_visible_even_if_all_are_to_be_hidden(folder: Path, write: Any, tokenizer: Any) -> None:
    write(folder / "wikitext2_test.jsonl", *({"text": line} for line in LINES))
    benchmark = wikitext(hidden=1.0)
    assert len(encode(tokenizer, benchmark, benchmark.items()[0], POLICY).ids) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"length": 1}, "length=1"), ({"hidden": 0}, "hidden=0"), ({"length": 10**5}, "words: set length"),
     ({"left_to_right": "no"}, "must be true or false")],
)  # fmt: skip
def test_settings_that_make_no_sense(
    folder: Path, write: Callable[..., None], settings: dict[str, Any], message: str
) -> None:
    write(folder / "wikitext2_test.jsonl", *({"text": line} for line in LINES))
    with pytest.raises(UserError, match=message):
        wikitext(**settings)


def test_scores_of_a_text_are_the_judges_and_asked_for_once() -> None:
    asked = []

    def judge(text: str, *, task: str | None = None) -> dict[str, float]:
        asked.append((text, task))
        return {"gen_ppl": 3.0}

    benchmark = FilledStories(count=2, hidden=0.4, judge_model=judge, seed=0)  # type: ignore[arg-type]
    item = benchmark.items()[0]
    for _ in range(2):
        assert benchmark.continuous_scores(item, "a text") == {"gen_ppl": 3.0}
    assert asked == [("a text", item.prompt)]  # the judge reads the task, as the model does
    assert benchmark.score(item, "a text") == {}


def rocstories(folder: Path) -> None:
    with (folder / "rocstories.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["storyid", "storytitle", *(f"sentence{i}" for i in range(1, 6))])
        table.writerow(["1", "Cat", *STORY])


@pytest.mark.parametrize(("hidden", "wanted"), [([3], " She called it home."), ([4, 2, 3], "".join(
    f" {s}" for s in STORY[1:4]))])  # fmt: skip
def test_hidden_sentences(folder: Path, tokenizer: Any, hidden: list[int], wanted: str) -> None:
    rocstories(folder)
    benchmark = RocStories(hidden_sentences=hidden, limit=None, seed=None)
    (item,) = benchmark.items()
    prompt = encode(tokenizer, benchmark, item, POLICY)
    assert prompt.positions is not None
    ids = tokenizer(wanted, add_special_tokens=False)["input_ids"]
    assert prompt.max_new_tokens == len(ids)  # the gold length
    assert benchmark.source()["gold_length"]
    assert prompt.response(ids) == ids  # the answer is what was hidden
    text = dict(zip(prompt.positions, [*prompt.ids, *ids], strict=True))
    assert tokenizer.decode([text[i] for i in range(len(text))]) == " ".join(STORY)
    assert benchmark.score(item, wanted) == {}
    assert benchmark.continuous_scores(item, wanted) == {"rouge1": 1, "rouge2": 1, "rougeL": 1}


def test_rouge_by_hand(folder: Path) -> None:
    """Reference: she called it home."""
    rocstories(folder)
    benchmark = RocStories(hidden_sentences=[3], limit=None, seed=None)
    got = benchmark.continuous_scores(benchmark.items()[0], "home she called!")
    # unigrams 3 of 3 and of 4; bigrams 1 of 2 and of 3; longest common subsequence 2
    assert got == pytest.approx({"rouge1": 6 / 7, "rouge2": 2 / 5, "rougeL": 4 / 7})
    assert benchmark.continuous_scores(benchmark.items()[0], "") == {"rouge1": 0, "rouge2": 0, "rougeL": 0}
    # no stemming: "calls" and "homes" are other words
    assert benchmark.continuous_scores(benchmark.items()[0], "calls homes")["rouge1"] == 0


def test_without_rouge_score_there_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rocstories(folder)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(UserError, match=r"needs rouge-score: pip install -e '.\[infill\]'"):
        RocStories(hidden_sentences=[3], limit=None, seed=None)


@pytest.mark.parametrize("hidden", [[], [0], [6], [1, 2, 3, 4, 5], [2, 2], "3", [True]])
def test_hidden_sentences_that_make_no_sense(folder: Path, hidden: Any) -> None:
    rocstories(folder)
    with pytest.raises(UserError, match="hidden_sentences"):
        RocStories(hidden_sentences=hidden, limit=None, seed=None)


def test_stories_from_each_kind_of_file(folder: Path, write: Callable[..., None]) -> None:
    with pytest.raises(UserError, match=r"no data file .*rocstories.jsonl"):
        roc_stories()
    write(folder / "rocstories.jsonl", {f"sentence{i}": s for i, s in enumerate(STORY, 1)})
    assert roc_stories().rows == [{"sentences": STORY}]
    rocstories(folder)
    assert roc_stories().rows == [{"sentences": STORY}]
    names = [f"sentence{i}" for i in range(1, 6)]
    (folder / "rocstories.csv").write_text(",".join([*names, "x"]) + "\n" + ",".join([*STORY, ""]), "utf-8-sig")
    assert roc_stories().rows == [{"sentences": STORY}]  # a spreadsheet's file begins with a byte order mark
    (folder / "rocstories.csv").write_text("sentence1,sentence2\na,b\n")
    with pytest.raises(UserError, match='row 1: no "sentence3"'):
        roc_stories()
    (folder / "rocstories.csv").write_text("sentence1,sentence2,sentence3,sentence4,sentence5\na,b,c,,e\n")
    with pytest.raises(UserError, match="story 1 has an empty sentence"):
        roc_stories()


@pytest.mark.parametrize(
    ("name", "row", "build", "field"),
    [
        ("wikitext2_test", {"text": None}, lambda: wikitext(length=2), "text"),
        ("rocstories", {f"sentence{i}": None for i in range(1, 6)}, roc_stories, "sentence1"),
        ("aesop_fables", {"sentences": "One story. In one string."}, fables, "sentences"),
        ("aesop_fables", {"sentences": [1, 2, 3, 4, 5]}, fables, "sentences"),
    ],
)
def test_rows_of_another_kind(
    folder: Path, write: Callable[..., None], name: str, row: dict[str, Any], build: Callable[[], Any], field: str
) -> None:
    write(folder / f"{name}.jsonl", row)
    with pytest.raises(UserError, match=f'{name}.*line 1: "{field}" must be a'):
        build()


def test_fables_are_cut_into_five_sentences(folder: Path, write: Callable[..., None]) -> None:
    sentences = [f"Sentence {i}." for i in range(12)]
    write(folder / "aesop_fables.jsonl", {"sentences": sentences}, {"sentences": sentences[:4]})
    assert [row["sentences"] for row in fables().rows] == [sentences[:5], sentences[5:10]]
    assert len(Fables(hidden_sentences=[3], limit=1, seed=None).items()) == 1
    write(folder / "aesop_fables.jsonl", {"sentences": sentences[:4]})
    with pytest.raises(UserError, match="no story of 5 sentences"):
        fables()


def test_parts_need_something_to_see_and_to_fill(folder: Path, tokenizer: Any) -> None:
    rocstories(folder)
    benchmark = RocStories(hidden_sentences=[3], limit=None, seed=None)
    for parts in ((("all", True),), (("all", False),), (("", True), ("all", False))):
        with pytest.raises(UserError, match="infilling needs one of each"):
            encode(tokenizer, benchmark, Item("a", "", parts=parts), POLICY)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("wikitext_infilling", ["wikitext_95"]),
        ("tiny_text_infilling", ["stories_95", "stories_40"]),
        ("stories_infilling", ["rocstories_1of5", "rocstories_3of5"]),
        ("fables_infilling", ["fables_1of5", "fables_3of5"]),
    ],
)
def test_every_choice_builds(choice: str, names: list[str], folder: Path, write: Callable[..., None]) -> None:
    write(folder / "wikitext2_test.jsonl", {"text": "word " * 300})
    write(folder / "aesop_fables.jsonl", {"sentences": STORY})
    rocstories(folder)
    found = instantiate(composed("eval", ["target=tiny", f"benchmark={choice}"]).benchmark)
    assert list(found) == names
    assert all(benchmark.items() for benchmark in found.values())
    assert all(benchmark.source()["gold_length"] for benchmark in found.values())
