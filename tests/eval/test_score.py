"""python -m eval.score: which answer is chosen, what rows hold, and what is refused."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from dspec.config.compose import ROOT
from dspec.errors import UserError
from dspec.likelihood import Continuation, log_likelihoods
from dspec.models.language_model import embedded_target
from eval.benchmarks.likelihood import HellaSwag, Lambada, Question
from eval.likelihood.run import encode
from eval.likelihood.table import perplexity
from eval.results import load, load_verdicts
from eval.run import main as decode_main
from eval.score import main

PASSAGES = [
    "Tom has 3 pens and buys 4 more pens. How many pens has Tom",
    "Ann had 7 apples and gave 2 of them to Ben. Then she had 5",
    "def add(a, b): return a + b",
    "Once upon a time there was a small dog and a cat",
]
SWAG = {
    "activity_label": "Washing dishes",
    "ctx_a": "A man stands at a sink.",
    "ctx_b": "he",
    "endings": ["takes a plate.", "flies [substeps] away.", "has 3 pens.", "sings  loudly."],
    "label": "0",
}


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$DSPEC_DATA with rows of our own."""
    write(tmp_path / "lambada.jsonl", *({"text": text} for text in PASSAGES))
    write(tmp_path / "hellaswag.jsonl", *(SWAG | {"label": label} for label in ("0", 1, "2")))
    monkeypatch.setenv("DSPEC_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def score(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    def call(*args: str, name: str = "run") -> SimpleNamespace:
        where = [] if any(a.startswith("resume=") for a in args) else [f"hydra.run.dir={folder / name}"]
        monkeypatch.setattr(sys, "argv", ["eval.score", *args, *where])
        main()
        return SimpleNamespace(folder=folder / name, **json.loads((folder / name / "results.json").read_text()))

    return call


BOTH = ["target=tiny", "decoder=[autoregressive,any_subset]", "benchmark=[lambada,hellaswag]"]


def test_the_last_word_is_the_answer(folder: Path) -> None:
    first = Lambada(limit=1, seed=None).questions()
    assert first == [Question("lambada/00000", PASSAGES[0].removesuffix(" Tom"), (" Tom",))]
    scores = Lambada(limit=1, seed=None).judge(first[0], [-2.5], [True])
    assert (scores.verdicts, scores.continuous) == ({"accuracy": True}, {"log_likelihood": -2.5})
    assert Lambada(limit=1, seed=None).judge(first[0], [-0.1], [False]).verdicts == {"accuracy": False}
    write(folder / "lambada.jsonl", {"text": "word"})
    with pytest.raises(UserError, match=r"lambada\.jsonl, line 1: .text. must be words"):
        Lambada(limit=None, seed=None)


@pytest.mark.parametrize(
    ("totals", "chosen", "accuracy", "normalised", "margin"),
    [
        ([-1.0, -2.0, -3.0, -4.0], 0, True, True, 1.0),
        ([-10.0, -9.5, -20.0, -20.0], 1, False, True, -0.5),
        ([-14.0, -13.5, -13.2, -30.0], 2, False, True, -0.8),  # by character: -1.0 each against -1.23, -1.2
        ([-13.0, -14.0, -10.0, -30.0], 2, False, False, -3.0),
        ([-14.0, -11.05, -20.0, -30.0], 1, False, True, -2.95),  # the space before an ending is no character of it
    ],
)
def test_the_likeliest_ending_is_chosen(
    folder: Path, totals: list[float], chosen: int, accuracy: bool, normalised: bool, margin: float
) -> None:
    """AS-ARM's released code compares the label with the number of the last ending, whatever the likelihoods."""
    benchmark = HellaSwag(limit=1, seed=None)
    [question] = benchmark.questions()
    assert [len(answer) - 1 for answer in question.answers] == [14, 11, 11, 13]
    scores = benchmark.judge(question, totals, [False] * 4)
    assert scores.chosen == chosen
    assert scores.verdicts == {"accuracy": accuracy, "normalised": normalised}
    assert scores.continuous["margin"] == pytest.approx(margin)


def test_texts_are_put_together_as_in_lm_eval(folder: Path) -> None:
    [question] = HellaSwag(limit=1, seed=None).questions()
    assert question.context == "Washing dishes: A man stands at a sink. He"
    assert question.answers == (" takes a plate.", " flies away.", " has 3 pens.", " sings loudly.")
    pytest.importorskip("lm_eval")
    from lm_eval.tasks.hellaswag.utils import preprocess

    for text in (" a [title] b", "x [header] y  z", " [step] One  two", "plain"):
        row = SWAG | {"ctx_a": text, "endings": [text] * 4}
        write(folder / "hellaswag.jsonl", row)
        [question] = HellaSwag(limit=1, seed=None).questions()
        assert question.context == preprocess(f"Washing dishes: {text} He")
        assert question.answers == (" " + preprocess(text),) * 4


def test_labels_must_name_an_ending(folder: Path) -> None:
    write(folder / "hellaswag.jsonl", SWAG, SWAG | {"label": "4"})
    with pytest.raises(UserError, match=r"line 2: .label. '4' is not the number of an ending"):
        HellaSwag(limit=None, seed=None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ctx_b": None}, ".ctx_b. must be a string"),
        ({"endings": "abcd"}, ".endings. must be a list of strings"),
        ({"endings": ["a"]}, ".endings. must be at least two"),
    ],
)
def test_rows_of_another_kind(folder: Path, change: dict[str, Any], words: str) -> None:
    write(folder / "hellaswag.jsonl", SWAG, SWAG | change)
    with pytest.raises(UserError, match=f"line 2: {words}"):
        HellaSwag(limit=None, seed=None)


def test_context_and_answer_share_no_token() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "dspec" / "assets" / "tiny")
    [text] = encode(tokenizer, Question("a", "Tom has 3", (" pens",)))
    assert tokenizer.decode(text.context) == "Tom has 3"
    assert tokenizer.decode(text.tokens) == " pens"
    [torn] = encode(tokenizer, Question("a", "Tom ha", ("s 3",)))  # "has" is one token
    assert tokenizer.decode(torn.context) == "Tom ha"
    assert tokenizer.decode(torn.tokens) == "s 3"


def test_no_answer_is_scored_after_the_end_of_the_document(toys: SimpleNamespace) -> None:
    """XLNet's tokenizer puts <sep><cls> after a text; what others put before one is visible, even where that is all."""
    tokenizer = toys.xlnet_tokenizer()
    assert tokenizer.convert_ids_to_tokens(tokenizer("Tom")["input_ids"]) == ["▁Tom", "<sep>", "<cls>"]
    for answer in (" pens", ", pens"):
        [text] = encode(tokenizer, Question("a", "Tom has more", (answer,)))
        assert tokenizer.convert_ids_to_tokens(text.context) == ["▁Tom", "▁has", "▁more"]
        assert tokenizer.decode(text.tokens).strip() == answer.strip()
    [text] = encode(tokenizer, Question("a", "Tom ha", ("s more",)))  # "has" is one token
    assert tokenizer.decode(text.context) == "Tom ha"
    assert not set(text.tokens) & set(tokenizer.all_special_ids)
    gpt = AutoTokenizer.from_pretrained(ROOT / "dspec" / "assets" / "tiny")
    first = gpt.convert_tokens_to_ids("<|mask|>")
    gpt._tokenizer.post_processor = TemplateProcessing(
        single="<|mask|> $A <|mask|>", special_tokens=[("<|mask|>", first)]
    )
    assert gpt("")["input_ids"] == [first, first]
    for context in ("Tom has 3", ""):
        [text] = encode(gpt, Question("a", context, (" pens",)))
        assert text.context == [first, *gpt(context, add_special_tokens=False)["input_ids"]]
        assert gpt.decode(text.tokens) == " pens"


def test_rows_hold_what_the_likelihoods_are(score: Callable[..., SimpleNamespace]) -> None:
    found = score(*BOTH, "batch_size=3")
    named = [(r["benchmark"], r["decoder"]["name"], r["decoder"]["density"], r["n"]) for r in found.rows]
    assert named == [
        ("lambada", "autoregressive", "causal", 4),
        ("lambada", "any_subset", "joint", 4),
        ("hellaswag", "autoregressive", "causal", 3),
        ("hellaswag", "any_subset", "joint", 3),
    ]
    model = embedded_target(dtype="float32", device="cpu")
    for r in found.rows[:2]:
        totals, greedy = [], []
        for text in PASSAGES:
            context, _, word = text.rpartition(" ")
            ids = [model.tokenizer(part)["input_ids"] for part in (context, f" {word}")]
            [one] = log_likelihoods(model, [Continuation(*ids)], any_subset=r["decoder"]["density"] == "joint")
            totals.append(one.total)
            greedy.append(one.greedy)
        mean = sum(totals) / 4
        assert r["scores"]["log_likelihood"]["mean"] == pytest.approx(mean, abs=1e-4)
        assert r["perplexity"] == pytest.approx(math.exp(-mean), rel=1e-4)
        assert r["quality"] == r["verdicts"]["accuracy"] == sum(greedy) / 4
        assert r["nfe"] == 4
    for r in found.rows[2:]:
        assert set(r["verdicts"]) == {"accuracy", "normalised"}
        assert (r["perplexity"], r["nfe"]) == (None, 12)  # one pass for each ending
    assert found.run["complete"]
    text = (found.folder / "table.md").read_text()
    assert "lambada, 4 questions" in text
    assert "any-subset" in text
    assert load(found.folder)["rows"] == found.rows  # eval.compare reads it
    verdicts = load_verdicts(found.folder)["any_subset", "hellaswag", 0.0]
    assert list(verdicts) == ["hellaswag/00000", "hellaswag/00001", "hellaswag/00002"]
    [chosen] = {
        s["text"] for s in _samples(found.folder) if s["benchmark"] == "hellaswag" and s["decoder"] == "any_subset"
    }
    assert [v["accuracy"] for v in verdicts.values()] == [
        SWAG["endings"][int(label)].split()[0] in chosen for label in ("0", 1, "2")
    ]


def _samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()[1:]]


def test_a_killed_run_goes_on(score: Callable[..., SimpleNamespace], capsys: pytest.CaptureFixture[str]) -> None:
    whole = score("target=tiny", "benchmark=lambada", "batch_size=1")
    path = whole.folder / "samples.jsonl"
    before = path.read_bytes()
    path.write_bytes(before[:-300])
    score(f"resume={whole.folder}")
    after = _samples(whole.folder)
    assert [s["id"] for s in after] == [f"lambada/{i:05d}" for i in range(4)]
    assert [s["scores"] for s in after] == [json.loads(line)["scores"] for line in before.splitlines()[1:]]
    with pytest.raises(SystemExit):
        score(f"resume={whole.folder}", "batch_size=2")
    assert "another batch_size" in capsys.readouterr().err


def test_too_long_questions_are_counted_and_said(
    folder: Path, score: Callable[..., SimpleNamespace], caplog: pytest.LogCaptureFixture
) -> None:
    write(folder / "lambada.jsonl", {"text": "a" + " b" * 1024}, {"text": PASSAGES[0]})
    found = score("target=tiny", "decoder=[autoregressive,any_subset]", "benchmark=lambada")
    # 1,025 tokens: a causal model could score them, an any-subset one could not; both get the same questions
    assert [(row["n"], row["left_out"]) for row in found.rows] == [(1, 1), (1, 1)]
    assert "(1 left out: they do not fit)" in (found.folder / "table.md").read_text()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["target=tiny"], "benchmark"),
        (
            ["target=tiny", "benchmark=tiny"],
            "problems is decoded, not scored by log-likelihood: use python -m eval.run",
        ),
        (["target=tiny", "benchmark=lambada", "batch_size=0"], "batch_size=0 must be an integer"),
        (
            ["target=tiny", "benchmark=lambada", "decoder=prompt_lookup"],
            "prompt_lookup writes from the distribution of autoregressive: use decoder=autoregressive",
        ),
        (
            ["target=tiny", "benchmark=lambada", "decoder=[any_subset,assd]"],
            "assd writes from the distribution of any_subset",
        ),
        (["target=tiny", "benchmark=lambada", "lambada=long"], "unknown key lambada"),
    ],
)
def test_mistakes_are_one_line(
    score: Callable[..., SimpleNamespace], capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        score(*args)
    assert stop.value.code == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line]
    assert words in line


def test_eval_run_says_where_they_are_scored(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["eval.run", "target=tiny", "benchmark=lambada", f"hydra.run.dir={folder / 'decoded'}"]
    )
    with pytest.raises(SystemExit):
        decode_main()
    assert "use python -m eval.score benchmark=lambada" in capsys.readouterr().err


def test_perplexity_is_that_of_the_mean() -> None:
    assert perplexity({"scores": {"log_likelihood": {"mean": -2.0}}}) == pytest.approx(math.exp(2))
    assert perplexity({"scores": {"margin": {"mean": 1.0}}}) is None
