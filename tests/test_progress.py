"""The bar counts what batches hold, is up to date when the next one begins, and ends with an error."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from dspec import progress


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    plain = progress.progress_bar

    def watched(title: str, **unused: Any) -> Any:
        made.append(plain(title, console=Console(file=StringIO())))
        return made[-1]

    monkeypatch.setattr(progress, "progress_bar", watched)
    return made


def test_a_batch_counts_for_what_it_holds(bars: list[Any]) -> None:
    seen = []
    for batch in progress.with_progress("reading", [[1, 2, 3], [4], [5, 6]]):
        (task,) = bars[0].tasks
        seen.append((batch, int(task.completed), task.total))
    assert seen == [([1, 2, 3], 0, 6), ([4], 3, 6), ([5, 6], 4, 6)]
    assert (bars[0].tasks[0].completed, bars[0].live.is_started) == (6, False)


def test_nothing_to_do_shows_nothing(bars: list[Any]) -> None:
    assert list(progress.with_progress("reading", list[list[int]]())) == []
    assert bars == []


def test_an_error_ends_the_bar(bars: list[Any]) -> None:
    def read() -> None:
        for _ in progress.with_progress("reading", [[1], [2]]):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()
    assert not bars[0].live.is_started
