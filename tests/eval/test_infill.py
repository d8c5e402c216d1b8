"""The infill command: holes of a text, and one clear line for what cannot be filled in."""

import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dspec.errors import UserError
from eval.infill import main, parse

TINY = Path(__file__).resolve().parents[2] / "dspec" / "assets" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY)  # type: ignore[no-any-return]


def test_holes_stand_where_they_are_marked(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = parse(tokenizer, "Tom has [MASK:2] pens[MASK].", task=None)
    assert prompt.max_new_tokens == 3
    assert prompt.positions is not None
    assert sorted(prompt.positions) == list(range(len(prompt.positions)))
    filled = prompt.response([-1, -2, -3])
    head, middle, end = (tokenizer(part)["input_ids"] for part in ("Tom has ", " pens", "."))
    assert filled == [*head, -1, -2, *middle, -3, *end]
    turn = parse(tokenizer, "[MASK:4]", task="How many?")
    assert turn.response([1, 2, 3, 4]) == [1, 2, 3, 4]
    assert turn.start == len(turn.ids)


@pytest.mark.parametrize(
    ("text", "words"),
    [("no hole", "has no hole"), ("[MASK:3]", "no visible token"), ("a [MASK:0] b", "hole of no tokens")],
)
def test_what_cannot_be_filled(tokenizer: PreTrainedTokenizerBase, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(tokenizer, text, task=None)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["infill", "Tom has [MASK:4] pens.", "--model", str(TINY)])
    main()
    filled, count = capsys.readouterr().out.splitlines()[-2:]
    assert filled.startswith("Tom has")
    assert filled.endswith("pens.")
    assert count.startswith("4 tokens in ")
    monkeypatch.setattr(sys, "argv", ["infill", "Tom has [MASK:4] pens.", "--model", str(TINY), "--num-drafts", "0"])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
    assert "num_drafts" in capsys.readouterr().err
