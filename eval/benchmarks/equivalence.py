"""Whether two LaTeX answers are the same, by math-verify in a separate process with a time limit.

Math-verify sees the boxed contents. Two departures from it: `70` and `70\\%` are the same (MATH's references have both
forms), and texts that are equal up to white space are the same without asking. A comparison that times out is
undecided.
"""

import importlib.util
from pathlib import Path

from dspec.errors import UserError
from eval.sandbox.function_process import FunctionProcess

_SCRIPT = Path(__file__).with_name("math_process.py")


class Equivalence:
    """Callable from any thread, one comparison at a time."""

    def __init__(self, *, timeout_s: float) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("MATH answers are compared by math-verify: run `pip install 'dspec[math]'`")
        refusal = "math-verify does not start; run `pip install 'dspec[math]'`"
        self._process = FunctionProcess(_SCRIPT, timeout_s=timeout_s, refusal=refusal)

    def __call__(self, gold: str, answer: str) -> bool | None:
        """None if the comparison timed out, or crashed its process twice."""
        if "".join(gold.split()) == "".join(answer.split()):
            return True
        reply = self._process.ask(gold, answer)
        if reply.how in ("timed out", "died"):
            return None
        return reply.value is True  # whatever SymPy raises about a malformed answer, the answer is not correct
