"""Shared by the programming benchmarks: finding the program in an answer."""

import re
from collections.abc import Sequence

_FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def code_block(text: str) -> str | None:
    """The first fenced block of an answer, closed or cut off by the token budget; None without one."""
    found = _FENCED.search(text)
    return found[1].removesuffix("\n") if found else None


def code_prompt(task: str, *, ask: str) -> str:
    """A user turn: the instruction, and the code that it is about."""
    return f"{ask}\n\n```python\n{task.strip()}\n```"


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string; repeated here so that scores do not depend on the caller."""
    return text[: min((text.find(s) for s in stop if s in text), default=len(text))]
