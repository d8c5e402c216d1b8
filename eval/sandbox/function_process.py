"""A function that may hang, crash or use up all memory, in a separate process: one JSON line in, one out.

Both ends are here: the host's `FunctionProcess` starts a script such as math_process.py, which calls `serve`.
"""

import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from dspec.errors import UserError

_ROOT = Path(__file__).resolve().parents[2]
_START_S = 300.0  # imports on a busy machine
_SLACK_S = 10  # the host's timeout ends a question; the process's own alarm, this much later, one without a host


class Reply(NamedTuple):
    how: Literal["answered", "raised", "died", "timed out"]
    value: Any = None


class FunctionProcess:
    """Asks one process, from any thread, one question at a time; a process that hangs is killed and replaced.

    A process that died is restarted and asked once more: it may have been killed between two questions.
    """

    def __init__(self, script: Path, *, timeout_s: float, refusal: str) -> None:
        """`timeout_s` is for one question, without the start; `refusal` is the user's error if the script fails."""
        if not (isinstance(timeout_s, int | float) and timeout_s > 0):
            raise UserError(f"timeout_s={timeout_s} must be a number of seconds above 0")
        self._script, self._timeout_s, self._refusal = script, timeout_s, refusal
        self._process: _Process | None = None
        self._lock = threading.Lock()

    def ask(self, *question: Any) -> Reply:
        """The script's function of these arguments, all JSON. Raises UserError if the script cannot be started."""
        with self._lock:
            reply = self._once(question)
            return self._once(question) if reply.how == "died" else reply

    def _once(self, question: tuple[Any, ...]) -> Reply:
        if self._process is None:
            self._process = _Process(self._script, alarm_s=math.ceil(self._timeout_s) + _SLACK_S)
            if self._process.reply(_START_S).value != "ready":
                raise UserError(self._refusal)
        reply = self._process.ask(question, self._timeout_s)
        if reply.how in ("died", "timed out"):
            self._process.end()
            self._process = None
        return reply


class _Process:
    def __init__(self, script: Path, *, alarm_s: int) -> None:
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(alarm_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_pump, args=(self._process.stdout, self._lines), daemon=True).start()
        self.end = weakref.finalize(self, _end, self._process)

    def ask(self, question: tuple[Any, ...], timeout_s: float) -> Reply:
        try:
            self._process.stdin.write(json.dumps(question) + "\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
        except OSError:
            return Reply("died")
        return self.reply(timeout_s)

    def reply(self, timeout_s: float) -> Reply:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return Reply("timed out")
        return Reply("died") if line is None else Reply(*json.loads(line))


def _pump(stream: IO[str], lines: "queue.Queue[str | None]") -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()


def serve(load: Callable[[], Callable[..., Any]], *, memory_bytes: int) -> None:
    """Answers with the function that `load` returns until standard input ends: the script's side, in its main thread.

    The script's first argument is the alarm in seconds, a fallback for the host's timeout should the host die first.
    """
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not look like a reply
    function = load()
    _limit(memory_bytes)
    print(json.dumps(["answered", "ready"]), file=channel, flush=True)
    for line in sys.stdin:
        _alarm(int(sys.argv[1]))
        try:
            reply = Reply("answered", function(*json.loads(line)))
        except Exception:  # raised by a library about model-written text
            reply = Reply("raised")
        _alarm(0)  # waiting for the next question may take any time
        print(json.dumps(reply), file=channel, flush=True)


def _limit(memory_bytes: int) -> None:
    if sys.platform != "win32":
        import resource

        with contextlib.suppress(ValueError, OSError):  # a lower limit is already set; macOS's kernel refuses it
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _alarm(seconds: int) -> None:
    if sys.platform != "win32":
        import signal

        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
