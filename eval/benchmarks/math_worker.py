"""Compares pairs of LaTeX answers with math-verify, one JSON line in and one out, until standard input ends.

Run as a script by eval/benchmarks/equivalence.py, in a process of its own: math-verify works in main threads only, and
SymPy can hang or eat all memory on a small expression. Imports nothing of dspec; the caller keeps the time.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from typing import TextIO

MEMORY_BYTES = 4 << 30
_PERCENT = re.compile(r"\s*\\?%\s*$")


def limit(seconds: int) -> None:
    """A floor under the caller's clock, should the caller die first: the kernel ends this process."""
    if sys.platform == "win32":
        return
    import resource
    import signal

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)


def comparison() -> Callable[[str, str], bool]:
    """`same(gold, answer)`: equal for math-verify, as given or without a per cent sign at the end."""
    from math_verify import parse, verify

    def equal(gold: str, answer: str) -> bool:
        sides = [parse(f"$\\boxed{{{text}}}$", parsing_timeout=None) for text in (gold, answer)]
        return bool(verify(*sides, timeout_seconds=None))

    def same(gold: str, answer: str) -> bool:
        bare = [_PERCENT.sub("", text) for text in (gold, answer)]
        return equal(gold, answer) or (bare != [gold, answer] and equal(*bare))

    return same


def serve(questions: TextIO, replies: TextIO, seconds: int) -> None:
    same = comparison()
    print("ready", file=replies, flush=True)
    for line in questions:
        limit(seconds)
        gold, answer = json.loads(line)
        try:
            verdict = same(gold, answer)
        except Exception:  # whatever SymPy makes of a malformed answer, it is not the right one
            verdict = False
        print(json.dumps(verdict), file=replies, flush=True)


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SymPy prints must not look like a verdict
    serve(sys.stdin, channel, int(sys.argv[1]))
