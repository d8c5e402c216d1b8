"""Whether two LaTeX answers are the same, by math-verify in a worker process with a time limit.

Math-verify sees the boxed contents. Two departures from it: `70` and `70\\%` are the same (MATH's references have both
forms), and texts that are equal up to white space are the same without asking. What does not end in time is False.
"""

import importlib.util
import json
import math
import queue
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import IO

from dspec.errors import UserError

_WORKER = Path(__file__).with_name("math_worker.py")
_START_S = 300.0  # importing SymPy on a busy machine


class Worker:
    """One process; `ask` gives None when it does not answer in time or has died."""

    def __init__(self, timeout_s: float) -> None:
        command = [sys.executable, "-P", str(_WORKER), str(math.ceil(timeout_s) + 10)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._replies: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_pump, args=(self._process.stdout, self._replies), daemon=True).start()
        weakref.finalize(self, _end, self._process)
        if self._reply(_START_S) != "ready\n":
            raise UserError("math-verify does not start; run `pip install 'dspec[math]'`")

    def ask(self, gold: str, answer: str, timeout_s: float) -> bool | None:
        question = json.dumps([gold, answer]) + "\n"
        try:
            self._process.stdin.write(question)  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
        except OSError:
            return None
        reply = self._reply(timeout_s)
        return None if reply is None else reply == "true\n"

    def _reply(self, timeout_s: float) -> str | None:
        try:
            return self._replies.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def end(self) -> None:
        _end(self._process)


def _pump(stream: IO[str], replies: "queue.Queue[str | None]") -> None:
    for line in stream:
        replies.put(line)
    replies.put(None)


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()


class Equivalence:
    """Callable from any thread, one comparison at a time; a worker that hangs is killed and the next one started."""

    def __init__(self, *, timeout_s: float) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("MATH answers are compared by math-verify: run `pip install 'dspec[math]'`")
        self._timeout_s = timeout_s
        self._worker: Worker | None = None
        self._lock = threading.Lock()

    def __call__(self, gold: str, answer: str) -> bool:
        if "".join(gold.split()) == "".join(answer.split()):
            return True
        with self._lock:
            if self._worker is None:
                self._worker = Worker(self._timeout_s)
            verdict = self._worker.ask(gold, answer, self._timeout_s)
            if verdict is None:
                self._worker.end()
                self._worker = None
        return bool(verdict)
