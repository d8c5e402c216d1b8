"""samples.jsonl: what is no file of an evaluation is left as it is."""

from pathlib import Path

import pytest

from dspec.errors import UserError
from eval.samples import SampleLog


@pytest.mark.parametrize("text", ["my own notes", "my own notes\n", '{"id": 1}\n'])
def test_a_file_of_another_kind_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(text)
    with (
        pytest.raises(UserError, match="was not written by an evaluation; move"),
        SampleLog(path, {}),
    ):
        pass
    assert path.read_text() == text


@pytest.mark.parametrize("text", ["", '{"sett', '{"settings": {}}'])
def test_a_first_row_that_a_kill_cut_off_is_written_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(text)
    with SampleLog(path, {}) as log:
        assert log.samples == []
    assert path.read_text() == ""
