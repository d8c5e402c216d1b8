"""Compares pairs of LaTeX answers with math-verify; run as a script by eval/benchmarks/equivalence.py.

In a separate process, since math-verify works only in main threads, and SymPy can hang or use up all memory on a small
expression.
"""

import re
from collections.abc import Callable

from eval.sandbox.function_process import serve

_PERCENT = re.compile(r"\s*\\?%\s*$")


def comparison() -> Callable[[str, str], bool]:
    """`same(gold, answer)`: equal according to math-verify, as given or without a trailing per cent sign."""
    from math_verify import parse, verify

    def equal(gold: str, answer: str) -> bool:
        sides = [parse(f"$\\boxed{{{text}}}$", parsing_timeout=None) for text in (gold, answer)]
        return bool(verify(*sides, timeout_seconds=None))

    def same(gold: str, answer: str) -> bool:
        bare = [_PERCENT.sub("", text) for text in (gold, answer)]
        return equal(gold, answer) or (bare != [gold, answer] and equal(*bare))

    return same


if __name__ == "__main__":
    serve(comparison, memory_bytes=4 << 30)
