"""A benchmark of one's own prompts: verdicts, and errors that name file and line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspec.config.compose import composed, instantiate
from dspec.errors import UserError
from eval.benchmarks.base import Item
from eval.benchmarks.jsonl import Jsonl

Write = Callable[..., None]


def jsonl(path: Path | None, **change: Any) -> Jsonl:
    """As conf/benchmark/jsonl.yaml has it."""
    node = composed("eval", ["benchmark=jsonl"]).benchmark.jsonl
    made: Jsonl = instantiate(node, **{"path": None if path is None else str(path), **change})
    return made


@pytest.mark.parametrize(
    ("wanted", "answer", "exact", "number"),
    [
        ("Paris", " Paris\n", True, False),
        ("Paris", "paris", False, False),
        ("18", "so 7 + 11 = 18.", False, True),
        (18, "18", True, True),
        ("1,800", "$1800", False, True),
        ("18", "18 or 19", False, False),
        ("", "no idea", False, False),
    ],
)
def test_verdicts(tmp_path: Path, write: Write, wanted: object, answer: str, exact: bool, number: bool) -> None:
    write(tmp_path / "my.jsonl", {"prompt": "q", "answer": wanted})
    benchmark = jsonl(tmp_path / "my.jsonl")
    assert benchmark.score(benchmark.items()[0], answer) == {"exact match": exact, "last number": number}


def test_settings(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "my.jsonl"
    write(path, *({"prompt": f"q{i}", "answer": i} for i in range(9)))
    benchmark = jsonl(path, quality="last number", chat=False, stop=["\n"], limit=2, max_new_tokens=7)
    assert benchmark.items() == [Item("jsonl/00000", "q0"), Item("jsonl/00001", "q1")]
    assert (benchmark.quality, benchmark.chat, benchmark.stop) == ("last number", False, ("\n",))
    assert benchmark.max_new_tokens == 7
    before = benchmark.source()
    assert (before["origin"], before["rows"], before["rows_in_file"]) == (str(path), 2, 9)
    write(path, *({"prompt": f"q{i}", "answer": i + 1} for i in range(9)))
    assert jsonl(path).source()["sha256"] != before["sha256"]


def test_without_answers_there_is_no_quality(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "my.jsonl", {"prompt": "q"}, {"prompt": "r"})
    benchmark = jsonl(tmp_path / "my.jsonl")
    assert benchmark.quality == ""
    assert benchmark.score(benchmark.items()[1], "text") == {}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "q"}, {"question": "q"}], 'line 2: "prompt"'),
        ([{"prompt": " "}], 'line 1: "prompt"'),
        ([{"prompt": ["q"]}], 'line 1: "prompt"'),
        ([{"prompt": "q", "answer": 1}, {"prompt": "q"}], 'line 2: give an "answer" on every line or on none'),
        ([{"prompt": "q"}, {"prompt": "q", "answer": 1}], 'line 2: give an "answer" on every line or on none'),
        ([{"prompt": "q", "answer": None}], 'line 1: "answer"'),
        ([["q"]], "line 1 is not a JSON object"),
        ([], "has no rows"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path: Path, write: Write, rows: list[Any], words: str) -> None:
    write(tmp_path / "my.jsonl", *rows)
    with pytest.raises(UserError, match=words) as error:
        jsonl(tmp_path / "my.jsonl")
    assert str(tmp_path / "my.jsonl") in str(error.value)


def test_bad_settings_are_named(tmp_path: Path, write: Write) -> None:
    with pytest.raises(UserError, match=r"benchmark\.jsonl\.path=<file>"):
        jsonl(None)
    with pytest.raises(UserError, match="no data file at"):
        jsonl(tmp_path / "none.jsonl")
    write(tmp_path / "my.jsonl", {"prompt": "q", "answer": "a"})
    with pytest.raises(UserError, match="quality=nice must be one of: exact match, last number"):
        jsonl(tmp_path / "my.jsonl", quality="nice")
    with pytest.raises(UserError, match="stop=END must be a list"):
        jsonl(tmp_path / "my.jsonl", stop="END")


def test_a_run_on_ones_own_prompts(tmp_path: Path, write: Write, eval_run: Any, scripted: Any) -> None:
    write(tmp_path / "my.jsonl", {"prompt": "1+1?", "answer": 2}, {"prompt": "2+2?", "answer": 4})
    scripted({"1+1?": "It is 2", "2+2?": "It is 5"})
    found = eval_run(
        "benchmark=jsonl", f"benchmark.jsonl.path={tmp_path}/my.jsonl", "benchmark.jsonl.quality=last number"
    )
    assert (found.rows[0]["quality"], found.rows[0]["quality_name"]) == (0.5, "last number")
