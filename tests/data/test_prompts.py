"""Prompt sources: disjoint splits, one's own files, and errors that name file and line."""

import gzip
import json
from pathlib import Path

import pytest

from data.prompts import EmbeddedPrompts, Gsm8kPrompts, JsonlPrompts
from data.rows import gsm8k_rows
from dspec.errors import UserError


def source(path: Path, *, train: int = 50, calibration: int = 50) -> JsonlPrompts:
    return JsonlPrompts(path=str(path), train=train, calibration=calibration)


def write(path: Path, rows: list[object]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path


def test_own_file_splits_by_id_and_obeys_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", [{"prompt": f"question {i}", "response": f"{i}"} for i in range(200)])
    train, calibration = (source(path).prompts(split) for split in ("train", "calibration"))
    assert len(train) == 50
    assert 5 < len(calibration) < 40
    assert not {p.id for p in train} & {p.id for p in calibration}
    assert train[0].response is not None
    assert len(source(path, train=7).prompts("train")) == 7
    assert len(source(path, calibration=3).prompts("calibration")) == 3
    packed = tmp_path / "own.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert source(packed).prompts("train") == train


def test_a_row_without_an_id_is_named_by_its_text(tmp_path: Path) -> None:
    """Lines added before it change neither its id (so its cached response stays) nor the split it belongs to."""
    rows = [{"prompt": f"question {i}"} for i in range(60)]
    few, many = write(tmp_path / "own.jsonl", rows), write(tmp_path / "more" / "own.jsonl", [{"prompt": "new"}, *rows])
    for split in ("train", "calibration"):
        old, new = ({p.text: p.id for p in source(path, train=99).prompts(split)} for path in (few, many))
        assert {text: name for text, name in new.items() if text != "new"} == old
    twice = write(tmp_path / "twice.jsonl", [{"prompt": "same"}] * 30)
    names = [p.id for split in ("train", "calibration") for p in source(twice).prompts(split)]
    assert len(set(names)) == len(names) == 30


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a"}, ""], "line 2 is empty"),
        ([{"prompt": "a"}, "{"], "line 2 is not JSON"),
        ([{"prompt": "a"}, "[1]"], "line 2 is not a JSON object"),
        ([{"prompt": "a"}, {"question": "b"}], 'line 2: no text under "prompt"'),
        ([{"prompt": "  "}], 'line 1: no text under "prompt"'),
        ([{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}], '"id" occurs twice'),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path: Path, rows: list[object], message: str) -> None:
    path = write(tmp_path / "bad.jsonl", rows)
    with pytest.raises(UserError, match=message) as error:
        source(path).prompts("train")
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_files_name_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPEC_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"gsm8k_train\.jsonl"):
        Gsm8kPrompts(train=1, calibration=1).prompts("train")


def test_embedded_prompts_obey_counts_and_seed() -> None:
    def prompts(seed: int, split: str) -> list[str]:
        own = EmbeddedPrompts(train={"problems": 6, "functions": 3}, calibration={"problems": 4}, seed=seed)
        return [p.text for p in own.prompts(split)]

    assert (len(prompts(0, "train")), len(prompts(0, "calibration"))) == (9, 4)
    assert prompts(0, "train") == prompts(0, "train") != prompts(1, "train")
    assert not set(prompts(0, "train")) & set(prompts(0, "calibration"))


@pytest.mark.usefixtures("real_data")
def test_gsm8k_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Gsm8kPrompts(train=300, calibration=30)
    train, calibration = own.prompts("train"), own.prompts("calibration")
    assert (len(train), len(calibration)) == (300, 30)
    test = {row["question"] for row in gsm8k_rows("test").rows}
    assert not test & {p.text for p in [*train, *calibration]}
    assert not {p.text for p in train} & {p.text for p in calibration}
