"""A tiny phrase grammar: `[a|b|c]` is a random choice (it nests), `{slot}` a named value."""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_INNERMOST = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True)
class RawExample:
    """What a task's generator returns: an Example without its id, task and split."""

    template: str
    signature: str
    prompt: str
    response: str
    answer: str = ""
    tests: tuple[str, ...] = ()


Accept = Callable[[str], bool]


def expand(text: str, slots: Mapping[str, object], rng: random.Random) -> str:
    """Fills the slots of `text`, then resolves every choice; slots may hold choices themselves."""
    filled = text.format_map(slots)
    while "[" in filled:
        filled = _INNERMOST.sub(lambda found: rng.choice(found[1].split("|")), filled)
    return filled


def capitalise(text: str) -> str:
    """Upper-cases the first letter and leaves the rest (`str.capitalize` lowers names)."""
    return text[:1].upper() + text[1:]


def tidy(text: str) -> str:
    """Remove the spaces that empty choices leave, including those before punctuation."""
    return re.sub(r" +(?=[.,:?])", "", re.sub(r" {2,}", " ", text)).strip()
