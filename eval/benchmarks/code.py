"""What the programming benchmarks share: the judge that they hand programs to, and finding the program in an answer."""

import re
from collections.abc import Sequence
from typing import Any, Protocol

_FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


class Verdict(Protocol):
    @property
    def passed(self) -> bool: ...


class Judge(Protocol):
    """Runs programs that a model wrote, contained."""

    def passes(self, *, program: str, test: str) -> Verdict:
        """Whether `test` runs through after `program`."""
        ...

    def agrees(
        self, *, program: str, entry_point: str, inputs: Sequence[Any], expected: Sequence[Any], atol: float
    ) -> Verdict:
        """Whether `entry_point`, called with each of `inputs`, gives what is `expected`."""
        ...


def code_block(text: str) -> str | None:
    """The first fenced block of an answer, closed or cut off by the token budget; None without one."""
    found = _FENCED.search(text)
    return found[1].removesuffix("\n") if found else None


def request(task: str, *, ask: str) -> str:
    """A user turn: what is asked, and the code that it is about."""
    return f"{ask}\n\n```python\n{task.strip()}\n```"


def cut(text: str, stop: Sequence[str]) -> str:
    """A text before the first of the stop strings; again here, so that scores do not hang on the caller."""
    return text[: min((text.find(s) for s in stop if s in text), default=len(text))]
