"""What cannot be filled in or scored is one line at the commands: exit code 2, and nothing is decoded."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dspec.models.language_model import LanguageModel, embedded_target
from eval import run, score

LINE = {
    "task_id": "a",
    "entry_point": "f",
    "prompt": "def f():\n",
    "canonical_solution": "    return 1\n",
    "suffix": "",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
}
FILL = ["benchmark=humaneval_infilling", "decoder=[any_subset,assd]", "evaluation.temperatures=[0.0]"]
SCORE = ["benchmark=lambada", "decoder=any_subset"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setenv("DSPEC_DATA", str(tmp_path))

    def call(line: dict[str, str], passage: str) -> None:
        (tmp_path / "humaneval_infilling_single_line.jsonl").write_text(json.dumps(LINE | line) + "\n")
        (tmp_path / "lambada.jsonl").write_text(json.dumps({"text": passage}) + "\n")

    return call


@pytest.mark.parametrize(
    ("program", "args", "line", "passage", "words"),
    [
        (run.main, FILL, {"prompt": ""}, "", "a has no visible token"),
        (run.main, FILL, {"canonical_solution": ""}, "", "a has no hidden token"),
        (
            run.main,
            FILL,
            {"prompt": "# x\n" * 1024},
            "",
            "1 of 1 texts of humaneval_infilling do not fit tiny (first: a has",
        ),
        (run.main, [*FILL, "decoder.assd.num_drafts=0"], {}, "", "num_drafts=0 must be an integer of at least 1"),
        (
            run.main,
            [*FILL, "benchmark.humaneval_infilling.split=two"],
            {},
            "",
            "split=two is unknown; use one of single_line",
        ),
        (score.main, SCORE, {}, " Tom", "text 0 has no visible token"),
        (
            score.main,
            SCORE,
            {},
            "a " * 1024 + "b",
            "1 of 1 questions of lambada cannot be scored (first: lambada/00000: text 0 has",
        ),
        (
            score.main,
            [*SCORE[:1], "decoder=assd", "decoder.assd.num_drafts=0"],
            {},
            "a b",
            "num_drafts=0 must be an integer of at least 1",
        ),
    ],
)
def test_one_line(
    data: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    program: Callable[[], None], args: list[str], line: dict[str, str], passage: str, words: str,
) -> None:  # fmt: skip
    data(line, passage)
    _refused(program, ["target=tiny", *args], tmp_path, monkeypatch, capsys, words)


@pytest.mark.parametrize(("program", "args"), [(run.main, FILL), (score.main, SCORE)])
def test_a_model_without_a_mask_token(
    data: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    program: Callable[[], None], args: list[str],
) -> None:  # fmt: skip
    data({}, "a b")

    def bare(**how: str) -> LanguageModel:
        model = embedded_target(**how)
        model.mask_token_id = None
        return model

    monkeypatch.setattr("dspec.models.language_model.embedded_target", bare)
    _refused(program, ["target=tiny", *args], tmp_path, monkeypatch, capsys, "'tiny' has no mask token")


def _refused(
    program: Callable[[], None], args: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["eval", *args, f"hydra.run.dir={folder / 'out'}"])
    with pytest.raises(SystemExit) as stop:
        program()
    assert stop.value.code == 2
    [error] = [line for line in capsys.readouterr().err.splitlines() if line]
    assert error.startswith("error: ")
    assert words in error
    assert not (folder / "out" / "samples.jsonl").exists()
