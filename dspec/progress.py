"""The one progress bar: the current task, its progress, time elapsed and remaining."""

from collections.abc import Iterator, Sequence, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Batch = TypeVar("Batch", bound=Sized)


def progress_bar(title: str, *, details: str = "", console: Console | None = None) -> Progress:
    """A bar between two texts in which rich fills in a task's values, such as {task.description}."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn(title), *columns, TextColumn(details), console=console)


def with_progress(title: str, batches: Sequence[Batch]) -> Iterator[Batch]:
    """Yields the batches; a bar counts the items of finished ones. No batches, no bar."""
    if not batches:
        return
    with progress_bar(title) as bar:
        task = bar.add_task(title, total=sum(map(len, batches)))
        for batch in batches:
            yield batch
            bar.advance(task, len(batch))
