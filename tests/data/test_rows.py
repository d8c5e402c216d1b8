"""Data files: checksums, errors that name file and line, and the MATH problem that is in both splits."""

import gzip
import hashlib
import json
import logging
from pathlib import Path

import pytest

from data.rows import (
    Hub,
    check_texts,
    gsm8k_rows,
    load_rows,
    math500_rows,
    math_rows,
    math_training_rows,
    read_jsonl,
    same_problem,
)
from dspec.errors import UserError

GOOD = {"question": "1+1?", "answer": "#### 2"}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSPEC_DATA", str(tmp_path))
    return tmp_path


def test_rows_come_with_path_and_checksum(folder: Path) -> None:
    path = write(folder / "gsm8k_test.jsonl", GOOD)
    got = gsm8k_rows("test")
    assert (got.rows, got.origin) == ([GOOD], str(path))
    assert got.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    write(folder / "gsm8k_test.jsonl", GOOD, GOOD)
    assert gsm8k_rows("test").sha256 != got.sha256


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, {"question": "q"}], 'line 2: no "answer"'),
        ([GOOD, "{"], "line 2 is not JSON"),
        ([GOOD, "", GOOD], "line 2 is empty"),
        (["[1]"], "line 1 is not a JSON object"),
        ([GOOD, "[" * 100_000], "line 2 is not JSON .*recursion"),
        ([GOOD | {"answer": "\ud800"}], "line 1 is not JSON .*surrogates"),  # half of a pair, as JSON can name one
        ([], "no rows"),
    ],
)
def test_bad_rows_name_file_and_line(folder: Path, lines: list[object], message: str) -> None:
    path = write(folder / "gsm8k_test.jsonl", *lines)
    with pytest.raises(UserError, match=message) as error:
        gsm8k_rows("test")
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_texts_are_strings(folder: Path) -> None:
    path = write(folder / "own.jsonl", {"a": "x \U0001f600", "b": ["y", ""]})  # its escape is a whole pair
    good = load_rows("own", hub=None, fields=("a", "b"))
    assert check_texts(good, fields=("a",), lists=("b",)) is good
    for bad, message in (
        ({"a": None, "b": []}, "line 2: .a. must be a string"),
        ({"a": ["x"], "b": []}, "line 2: .a. must be a string"),
        ({"a": "", "b": "y"}, "line 2: .b. must be a list of strings"),
        ({"a": "", "b": ["y", 1]}, "line 2: .b. must be a list of strings"),
    ):
        write(path, {"a": "", "b": []}, bad)
        with pytest.raises(UserError, match=message):
            check_texts(load_rows("own", hub=None, fields=("a", "b")), fields=("a",), lists=("b",))


def test_missing_and_broken_files_are_named(folder: Path) -> None:
    with pytest.raises(UserError, match="no data file at"):
        list(read_jsonl(folder / "none.jsonl"))
    with pytest.raises(UserError) as error:
        gsm8k_rows("test")
    assert str(folder / "gsm8k_test.jsonl.gz") in str(error.value)
    whole = gzip.compress(json.dumps(GOOD).encode() * 100)
    for broken in (b"no gzip", whole[: len(whole) // 2], gzip.compress(b"\xff\xfe")):
        (folder / "gsm8k_test.jsonl.gz").write_bytes(broken)
        with pytest.raises(UserError, match=r"gsm8k_test\.jsonl\.gz cannot be read"):
            gsm8k_rows("test")


def test_without_folder_or_hub_the_message_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSPEC_DATA", raising=False)
    with pytest.raises(UserError, match=r"set DSPEC_DATA to a folder with own\.jsonl\.gz"):
        load_rows("own", hub=None, fields=())
    monkeypatch.setattr("datasets.load_dataset", lambda repo, config, split: [{"a": f"{repo} {config} {split}"}])
    got = load_rows("own", hub=Hub("me/own", ["x", "y"], "test"), fields=("a",))
    assert [row["a"] for row in got.rows] == ["me/own x test", "me/own y test"]
    assert "me/own" in got.origin
    with pytest.raises(UserError, match='no "b"'):
        load_rows("own", hub=Hub("me/own", ["x"], "test"), fields=("b",))


def test_training_rows_leave_out_what_is_tested(folder: Path) -> None:
    problems = [{"problem": text, "solution": "s"} for text in ("one two", "three", "four\n")]
    write(folder / "math_train.jsonl", *problems)
    write(folder / "math_test.jsonl", {"problem": "one  two\n", "solution": "s"})
    assert [row["problem"] for row in math_training_rows().rows] == ["three", "four\n"]


@pytest.mark.usefixtures("real_data")
def test_the_one_shared_problem_of_math_is_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = math_rows("train").rows, math_rows("test").rows
    tested = {same_problem(row["problem"]) for row in test}
    assert (len(train), len(test), len(tested)) == (7500, 5000, 5000)
    assert len(math_training_rows().rows) == 7499
    assert tested >= {same_problem(row["problem"]) for row in math500_rows().rows}


def test_a_hub_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error; not the library's line for each of its retries."""

    def load_dataset(*args: object, **kwargs: object) -> object:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("no network")

    import datasets

    monkeypatch.delenv("DSPEC_DATA", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError, match="cannot load openai/gsm8k from the Hub"):
        gsm8k_rows("test")
    assert "Retrying" not in caplog.text + capfd.readouterr().err
