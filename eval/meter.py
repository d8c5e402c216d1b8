"""Progress of a long job from its first second: a bar in a terminal, an occasional plain line elsewhere."""

import time
from collections.abc import Callable

from rich.console import Console

from dspec.progress import progress_bar

_SECONDS = 20.0  # between two plain lines of the same phase


class Meter:
    """A context manager. `phase` sets the current activity, `expect` the total, `advance` counts finished units, `say`
    prints a permanent line."""

    def __init__(
        self, title: str, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._title, self._clock = title, clock
        self._console = console if console is not None else Console()
        self._bar = progress_bar(f"{title}: {{task.description}}", console=self._console)
        self._task = self._bar.add_task("", total=None)
        self._phase, self._total, self._before, self._done = "", 0, 0, 0
        self._start = self._told = clock()

    def __enter__(self) -> "Meter":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *unused: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def expect(self, total: int, *, done: int) -> None:
        """`total` units, of which `done` are from an earlier run."""
        self._total, self._before, self._done, self._start = total, done, done, self._clock()
        self._bar.update(self._task, total=total, completed=done)

    def phase(self, text: str) -> None:
        self._bar.update(self._task, description=text)
        self._phase = text
        self._tell()

    def advance(self, count: int) -> None:
        self._done += count
        self._bar.update(self._task, advance=count)
        if self._clock() - self._told >= _SECONDS:
            self._tell()

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _tell(self) -> None:
        """Prints the plain line: phase, progress, time elapsed and remaining."""
        if self._console.is_terminal:
            return
        self._told = self._clock()
        line = f"{self._title}: {self._phase}"
        if self._total:
            passed, fresh = self._told - self._start, self._done - self._before
            line += f", {self._done}/{self._total}, {_clock_time(passed)} passed"
            if fresh:
                line += f", about {_clock_time(passed / fresh * (self._total - self._done))} left"
        self.say(line)


def _clock_time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"
