"""Runs evalplus's sanitize; run as a script by eval/benchmarks/plus.py.

In a separate process, since it recurses as deep as a text nests and parses every range of its lines.
"""

from collections.abc import Callable

from eval.sandbox.function_process import serve


def sanitizer() -> Callable[[str, str], str]:
    """`sanitize(text, entry_point)`."""
    from evalplus.sanitize import sanitize

    return sanitize


if __name__ == "__main__":
    serve(sanitizer, memory_bytes=4 << 30)
