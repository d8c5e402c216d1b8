"""The verdict on a program: its code and the test run in two sandboxes that exchange plain values only.

    Judge(sandbox).passes(program="def f(x): return x + 1", test="assert f(3) == 4").passed

The worker runs the program and answers calls; the checker runs the test with proxies for the program's functions. So
the program sees arguments, never a test or an expected value, and cannot reach the comparison: answers arrive as plain
data of exact builtin types. Passed means that the checker wrote a nonce to a pipe that only it has. Knows no benchmark;
evalplus's comparison rules are in ``eval/sandbox/contain/oracles.py``.
"""

import ast
import json
import os
import secrets
import select
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from dspec.errors import UserError
from eval.sandbox.contain.codec import pack, unpack
from eval.sandbox.sandbox import Outcome, Sandbox

_GRACE_S = 15.0


class Verdict(NamedTuple):
    passed: bool
    reason: str  # "passed", or what failed


class Judge:
    """Judges programs inside `sandbox`; may be shared between threads.

    All methods raise eval.sandbox.sandbox.SandboxError if the sandbox, not the program, fails.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    @property
    def level(self) -> str:
        """What contains the programs; recorded in the results."""
        return self._sandbox.level

    def passes(self, *, program: str, test: str, entry_point: str | None = None, trusted: str = "") -> Verdict:
        """Whether `test` runs to its end without an exception.

        The test may use all global names of the program but two kinds, which come from Python and from `trusted`:
        builtins and standard modules, and the names that the source text `trusted` (such as HumanEval's prompt with its
        helper functions) defines. `entry_point` comes from the program even if it is one of these.
        """
        job = {"mode": "test", "test": test, "entry_point": entry_point, "trusted": trusted}
        return self._judge(program, job)[0]

    def agrees(
        self,
        *,
        program: str,
        entry_point: str,
        inputs: Sequence[Sequence[Any]],
        expected: Sequence[Any],
        atol: float,
        dataset: str | None = None,
    ) -> Verdict:
        """Whether the program's `entry_point` returns `expected` on each of `inputs` (argument lists).

        `dataset` ("humaneval" or "mbpp") enables evalplus's rules for its tasks with several correct answers. Raises
        TypeError if an input or expected value is not a plain value.
        """
        if len(inputs) != len(expected):
            raise ValueError(f"{len(inputs)} inputs but {len(expected)} expected values")
        job = {"mode": "agree", "entry_point": entry_point, "atol": atol, "dataset": dataset}
        values = {"inputs": pack(list(map(list, inputs)), _refuse), "expected": pack(list(expected), _refuse)}
        return self._judge(program, job | values)[0]

    def answers(
        self, *, program: str, entry_point: str, inputs: Sequence[Sequence[Any]], dataset: str | None = None
    ) -> list[Any]:
        """The outputs of a reference solution on `inputs`: the `expected` of `agrees`. Raises UserError if it fails."""
        job = {"mode": "answer", "entry_point": entry_point, "dataset": dataset}
        verdict, answer = self._judge(program, job | {"inputs": pack(list(map(list, inputs)), _refuse)})
        if not verdict.passed:
            raise UserError(f"the reference solution {entry_point} gives no answers: {verdict.reason}")
        return list(unpack(answer["answers"], _refuse))

    def _judge(self, program: str, job: dict[str, Any]) -> tuple[Verdict, dict[str, Any]]:
        nonce = secrets.token_hex(16)
        answer, *ends = self._both(program, {**job, "nonce": nonce})
        if answer.get("passed") == nonce:
            return Verdict(True, "passed"), answer
        reason = _why(*ends) if answer.get("gone", not answer) else str(answer.get("failed"))
        return Verdict(False, reason), answer

    def _both(self, program: str, job: dict[str, Any]) -> tuple[dict[str, Any], Outcome, Outcome]:
        """The checker's verdict (empty if none), and how worker and checker ended."""
        pipes = _Pipes()
        try:
            worker_job = {"program": program, "ask": pipes.ask[0], "answer": pipes.answer[1]}
            checker_job = {**job, "ask": pipes.ask[1], "answer": pipes.answer[0], "verdict": pipes.verdict[1]}
            start = self._sandbox.start
            with (
                start("worker", worker_job, fds=(pipes.ask[0], pipes.answer[1]), capture=False) as worker,
                start("checker", checker_job, fds=(*pipes.checkers(), pipes.verdict[1]), capture=False) as checker,
            ):
                pipes.close_all_but_verdict()
                answer = _read_verdict(pipes.verdict[0], time.monotonic() + self._sandbox.wall_seconds + _GRACE_S)
                checker.stop()
                decided = checker.wait()
                worker.stop()
                return answer, worker.wait(), decided
        finally:
            pipes.close()


class _Pipes:
    """The pipes for questions, answers and the verdict; each is (read end, write end)."""

    def __init__(self) -> None:
        self.ask, self.answer, self.verdict = os.pipe(), os.pipe(), os.pipe()
        self._open = {*self.ask, *self.answer, *self.verdict}

    def checkers(self) -> tuple[int, int]:
        return self.ask[1], self.answer[0]

    def close_all_but_verdict(self) -> None:
        self._close(self._open - {self.verdict[0]})

    def close(self) -> None:
        self._close(self._open)

    def _close(self, fds: set[int]) -> None:
        self._open = self._open - fds
        for fd in fds:
            os.close(fd)


def function_under_test(reference: str, test: str) -> str | None:
    """The function that `reference` defines and `test` calls first: MBPP names no entry point."""
    defined = {node.name for node in ast.parse(reference).body if isinstance(node, ast.FunctionDef)}
    calls = (node.func for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call))
    return next((call.id for call in calls if isinstance(call, ast.Name) and call.id in defined), None)


def _read_verdict(fd: int, deadline: float) -> dict[str, Any]:
    received = bytearray()
    while not received.endswith(b"\n") and (left := deadline - time.monotonic()) > 0:
        if select.select([fd], [], [], left)[0]:
            part = os.read(fd, 1 << 20)
            if not part:
                break
            received += part
    return dict(json.loads(received)) if received.endswith(b"\n") else {}


def _why(worker: Outcome, checker: Outcome) -> str:
    """Why there is no verdict."""
    if "wall time" in (worker.ended, checker.ended):  # both limits are reached at nearly the same time
        return "out of time"
    if worker.ended == "exit":
        return f"the program ended early (exit code {worker.code})"
    return f"no verdict (program: {worker.ended}, test: {checker.ended} with exit code {checker.code})"


def _refuse(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} is no plain value")
