"""GSM8K prompts, and verdicts that are those of lm-eval's own filters and metric."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from dspec.errors import UserError
from eval.benchmarks.base import Item
from eval.benchmarks.gsm8k import Gsm8k

REFERENCES = ["It is 6.\n#### 18", "#### 1,234", "7*2=<<7*2=14>>14\n#### -14", "#### 0", "#### 3.5", "#### 2,000,000"]
NUMBERS = "18 1,234 1234 -14 -14.0 0 3.5 3.50 2000000 2,000,000 18. 17 +18 1/2 ½ 18/1 １８ ٣ 1e3 .5 -.5 - 18%".split()
FRAMES = [
    "{}", "#### {}", "####{}", "####  {}", "#### {}.", "#### ${}", "#### {} dollars", "The answer is {}.",
    "The answer is ${}.00.", "so \\boxed{{{}}}", "#### {}\n\nQuestion: next 5", "#### 5\n#### {}", "**{}**", "€{} each",
    "{} apples… and no more", "{} ... well", "= {}°", "It costs $ {} .", "#### -{}", "x{}y",
]  # fmt: skip
ODD = [
    "",
    " ",
    "no number",
    "####",
    "#### ",
    "#### .",
    "#### ,",
    "$",
    "$$",
    "...",
    "-",
    "--5",
    "#### \n18",
    "1 8",
    "\0",
]
ANSWERS = [frame.format(number) for frame, number in itertools.product(FRAMES, NUMBERS)] + ODD


def rows(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSPEC_DATA", str(tmp_path))
    rows(tmp_path / "gsm8k_test.jsonl", *({"question": f"q{i}", "answer": text} for i, text in enumerate(REFERENCES)))
    rows(tmp_path / "gsm8k_train.jsonl", *({"question": f"t{i}", "answer": f"w{i}\n#### {i}"} for i in range(9)))
    return tmp_path


def gsm8k(*, shots: int = 0, chat: bool = True, limit: int | None = None, seed: int | None = None) -> Gsm8k:
    return Gsm8k(shots=shots, chat=chat, limit=limit, seed=seed, max_new_tokens=8)


def test_prompts(folder: Path) -> None:
    plain, few, raw = gsm8k(), gsm8k(shots=2), gsm8k(chat=False)
    assert plain.items()[0] == Item("gsm8k/test/00000", "q0")
    assert plain.stop == ()
    want = "Question: t0\nAnswer: w0\n#### 0\n\nQuestion: t1\nAnswer: w1\n#### 1\n\nQuestion: q0\nAnswer:"
    assert few.items()[0].prompt == want
    assert few.stop == ("Question:",)
    assert raw.items()[0].prompt == "Question: q0\nAnswer:"
    assert (plain.chat, raw.chat) == (True, False)


def test_source_says_what_was_read(folder: Path) -> None:
    got = gsm8k(limit=2).source()
    assert (got["rows"], got["rows_in_file"]) == (2, len(REFERENCES))
    assert got["origin"] == str(folder / "gsm8k_test.jsonl")
    assert len(got["sha256"]) == 64
    json.dumps(got)


def test_subsets(folder: Path) -> None:
    ids = [item.id for item in gsm8k().items()]
    assert [item.id for item in gsm8k(limit=3).items()] == ids[:3]
    drawn = [[item.id for item in gsm8k(limit=3, seed=seed).items()] for seed in range(6)]
    assert all(one == sorted(one) and len(set(one)) == 3 for one in drawn)
    assert len({tuple(one) for one in drawn}) > 1
    assert [item.id for item in gsm8k(limit=3, seed=4).items()] == drawn[4]
    assert len(gsm8k(limit=99, seed=1).items()) == len(ids)
    with pytest.raises(UserError, match="limit=0"):
        gsm8k(limit=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"limit": "abc"}, "limit=abc"),
        ({"limit": 1.5}, "limit=1.5"),
        ({"seed": "x"}, "seed=x"),
        ({"shots": -1}, "shots=-1"),
        ({"shots": 20}, "shots=20"),
        ({"chat": "no"}, "chat=no"),
    ],
)
def test_bad_settings_are_named(folder: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        gsm8k(**change)
    with pytest.raises(TypeError, match="foo"):
        Gsm8k(shots=0, chat=True, limit=None, seed=None, max_new_tokens=8, foo=1)  # type: ignore[call-arg]


def test_source_changes_with_all_that_is_read(folder: Path) -> None:
    few = [gsm8k(shots=2).source()]
    rows(folder / "gsm8k_train.jsonl", *({"question": f"other {i}", "answer": f"#### {i}"} for i in range(9)))
    few.append(gsm8k(shots=2).source())
    rows(
        folder / "gsm8k_test.jsonl", *({"question": f"q{i}", "answer": f"{text}."} for i, text in enumerate(REFERENCES))
    )
    few.append(gsm8k(shots=2).source())
    assert len({(s["sha256"], s["prompts_sha256"]) for s in few}) == 3
    assert gsm8k(shots=2, limit=2).source() == few[2] | {"rows": 2}  # of the data, not of how much of it is asked


def test_an_answer_is_judged_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders without loss give the same texts."""
    benchmark, judged = gsm8k(), []
    monkeypatch.setattr(
        Gsm8k, "verdicts", lambda self, item, answer: judged.append((item.id, answer)) or {"right": True}
    )
    one, two = benchmark.items()[:2]
    for item, answer in ((one, "a"), (one, "a"), (two, "a"), (one, "b"), (one, "a")):
        assert benchmark.score(item, answer) == {"right": True}
    assert judged == [(one.id, "a"), (two.id, "a"), (one.id, "b")]


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 18", True, True),
        ("It is $18.", False, True),
        ("#### 18 apples, 3 left", True, False),
        ("#### 17\n#### 18", False, True),
        ("18.0", False, False),  # lm-eval compares text
        ("", False, False),
    ],
)
def test_verdicts(folder: Path, text: str, strict: bool, flexible: bool) -> None:
    benchmark = gsm8k()
    got = benchmark.score(benchmark.items()[0], text)
    assert got == {"strict exact match": strict, "flexible exact match": flexible}
    assert benchmark.quality in got


def test_agrees_with_lm_eval(folder: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    import yaml
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters import build_filter_ensemble

    task = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml").read_text())
    ignored = task["metric_list"][0]["regexes_to_ignore"]
    filters = {}
    for one in task["filter_list"]:
        steps = [[s["function"], {k: v for k, v in s.items() if k != "function"} or None] for s in one["filter"]]
        filters[one["name"]] = build_filter_ensemble(one["name"], steps).filters
    names = {"strict-match": "strict exact match", "flexible-extract": "flexible exact match"}

    def theirs(name: str, answer: str, reference: str) -> bool:
        value: Any = [[answer]]
        for step in filters[name]:
            value = step().apply(value, [{}])
        score = exact_match_hf_evaluate(
            predictions=list(value), references=[reference], regexes_to_ignore=ignored, ignore_case=True
        )
        return bool(score["exact_match"])

    benchmark, seen = gsm8k(), {True: 0, False: 0}
    for item, reference in zip(benchmark.items(), REFERENCES, strict=True):
        for answer in ANSWERS:
            ours = benchmark.score(item, answer)
            for name, own in names.items():
                assert ours[own] == theirs(name, answer, reference), (answer, reference, name)
                seen[ours[own]] += 1
    print(f"gsm8k: {sum(seen.values())} verdicts agree with lm-eval's, {seen[True]} of them right")
    assert len(set(ANSWERS)) >= 200
    assert seen[True] > 200
