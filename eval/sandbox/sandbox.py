"""Runs model-written Python contained by namespaces or bubblewrap, Landlock, a system-call filter and limits.

    Sandbox(wall_seconds=5, cpu_seconds=5, memory_mb=1024, output_bytes=1 << 20, processes=1,
            allow_unsafe_code=False).run("print(6 * 7)").stdout

The program sees the standard library, read-only, and an empty private folder that is deleted afterwards; no network, no
environment, no other processes or files. The available layers are detected once per process by trying; `level` names
them for the results. Knows nothing of tests and verdicts (``judge.py``). What runs inside is in ``contain/``.
"""

import contextlib
import functools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dspec.errors import UserError
from eval.sandbox.contain import launcher

_ROOT = str(Path(__file__).resolve().parents[2])
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from eval.sandbox.contain.launcher import main; "
    "del sys.path[0]; main()"
)
_GRACE_S = 15.0  # the launcher keeps the time; after this many extra seconds the host kills it
_REFUSAL = (
    "model-written code cannot be contained on this machine (neither user namespaces nor bubblewrap nor Landlock with "
    "seccomp works): run on Linux 5.13 or newer, install bubblewrap, or set allow_unsafe_code=true where nothing can "
    "be lost"
)


class SandboxError(RuntimeError):
    """The sandbox itself failed; this says nothing about the program."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    ended: str  # "exit", or why it was killed: "wall time", "output", "disk", "stopped", "launcher killed"
    code: int  # exit code, or minus the signal that ended it
    stdout: bytes  # each cut at output_bytes
    stderr: bytes

    @property
    def ok(self) -> bool:
        return self.ended == "exit" and self.code == 0


class Sandbox:
    """Limits for one program at a time; may be shared between threads."""

    def __init__(
        self,
        *,
        wall_seconds: float,
        cpu_seconds: int,
        memory_mb: int,
        output_bytes: int,
        processes: int,
        allow_unsafe_code: bool,
    ) -> None:
        """`memory_mb` is address space in MiB, at least 64; `output_bytes` bounds stdout, stderr and the folder, each;
        `processes` counts the program and its threads (it can start no other process).

        Raises UserError for a limit out of range, and if no layer is available and `allow_unsafe_code` is off.
        """
        self._limits = {
            "wall_seconds": wall_seconds,
            "cpu_seconds": cpu_seconds,
            "memory_mb": memory_mb,
            "output_bytes": output_bytes,
            "processes": processes,
        }
        lowest = {**dict.fromkeys(self._limits, 1), "wall_seconds": 0.1, "memory_mb": 64}
        for name, value in self._limits.items():
            number = isinstance(value, int) or (name == "wall_seconds" and isinstance(value, float))
            if not number or value < lowest[name]:
                raise UserError(f"sandbox: {name} is {value}, must be a number, at least {lowest[name]}")
        if not isinstance(allow_unsafe_code, bool):
            raise UserError(f"allow_unsafe_code={allow_unsafe_code} must be true or false")
        if os.name != "posix":
            raise UserError("model-written code runs under POSIX limits only: use Linux, macOS or WSL")
        self._layers = available_layers()
        if not self._layers and not allow_unsafe_code:
            raise UserError(_REFUSAL)

    @property
    def level(self) -> str:
        """What contains the code here, such as "namespaces+landlock+seccomp"; recorded in the results."""
        return "+".join(self._layers) or "limits alone (allow_unsafe_code)"

    @property
    def wall_seconds(self) -> float:
        return self._limits["wall_seconds"]

    def run(self, program: str) -> Outcome:
        """Runs a program's source code to its end. Raises SandboxError if the sandbox could not be set up."""
        with self.start("program", {"program": program}, fds=(), capture=True) as running:
            return running.wait()

    def start(self, role: str, payload: dict[str, Any], *, fds: Sequence[int], capture: bool) -> "Running":
        """Starts a role of ``contain/`` that inherits `fds` under their numbers; its output is captured or dropped."""
        return Running(self._layers, self._limits, role, payload, fds, capture)


@functools.cache
def available_layers() -> tuple[str, ...]:
    """The layers that work here, detected by trying; empty if nothing can contain a program."""
    if sys.platform != "linux":
        return ()
    found = _probe(())
    if "namespaces" in found:
        return found
    if shutil.which("bwrap") and (inner := _probe(("bubblewrap",))):
        return ("bubblewrap", *(layer for layer in inner if layer != "namespaces"))
    return found if {"landlock", "seccomp"} <= {*found} else ()


def _probe(layers: tuple[str, ...]) -> tuple[str, ...]:
    limits = {"wall_seconds": 20, "cpu_seconds": 5, "memory_mb": 512, "output_bytes": 1 << 16, "processes": 8}
    payload = {"limits": limits, "home": launcher.HOME}
    try:
        with Running(layers, limits, "probe", payload, (), True) as running:
            outcome = running.wait()
    except SandboxError:
        return ()
    return tuple(json.loads(outcome.stdout)) if outcome.ok else ()


class Running:
    """A started job; `wait` or leaving the context ends it and cleans up."""

    def __init__(
        self,
        layers: tuple[str, ...],
        limits: dict[str, Any],
        role: str,
        payload: dict[str, Any],
        fds: Sequence[int],
        capture: bool,
    ) -> None:
        self._deadline = time.monotonic() + limits["wall_seconds"] + _GRACE_S
        self._most, self._contained = limits["output_bytes"], bool(layers)
        inside = "namespaces" in layers or "bubblewrap" in layers or role == "probe"
        self._folder = None if inside else tempfile.mkdtemp(prefix="dspec_sandbox_")
        status, theirs = os.pipe()
        self._status = os.fdopen(status, "rb", buffering=0)
        try:
            output = subprocess.PIPE if capture else subprocess.DEVNULL
            self._process = subprocess.Popen(
                _command(layers, limits),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(*fds, theirs),
                cwd="/",
                env={},
                start_new_session=True,
            )
        except BaseException:
            self._discard()
            raise
        finally:
            os.close(theirs)
        home = self._folder or launcher.HOME
        watched = bool(self._folder) or "bubblewrap" in layers  # which does not limit the number of files
        job = {"role": role, "payload": payload, "layers": layers, "limits": limits, "fds": list(fds)}
        self._tell(json.dumps({**job, "home": home, "watched": watched, "status": theirs}).encode() + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()
        self._end()

    def stop(self) -> None:
        """Asks the launcher to kill the program; returns immediately."""
        self._tell(b"\n")

    def wait(self) -> Outcome:
        """Blocks until the program has ended or hit a limit. Raises SandboxError if it could not be contained."""
        reached, streams = self._pump()
        report = json.loads(streams[self._status].splitlines()[0]) if streams[self._status] else {}
        self._end()
        if "ended" not in report and not self._contained and "error" not in report:
            report = {"ended": "launcher killed", "code": -signal.SIGKILL}  # an uncontained program can do that
        if "ended" not in report:
            raise SandboxError(f"the sandbox failed: {report.get('error', 'its launcher ended without a report')}")
        texts = [bytes(streams[pipe][: self._most]) if pipe else b"" for pipe in self._pipes()]
        return Outcome(reached or report["ended"], report["code"], *texts)

    def _pump(self) -> tuple[str | None, dict[Any, bytearray]]:
        """Reads until all pipes are closed; returns the limit that was hit, if any, and the data."""
        reached, streams = None, {pipe: bytearray() for pipe in (*self._pipes(), self._status) if pipe}
        with selectors.DefaultSelector() as selector:
            for pipe in streams:
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map() and (left := self._deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    part = os.read(key.fd, 1 << 16)
                    if not part:
                        selector.unregister(key.fileobj)
                    elif len(streams[key.fileobj]) <= self._most or key.fileobj is self._status:
                        streams[key.fileobj] += part
                    if len(streams[key.fileobj]) > self._most and not reached and key.fileobj is not self._status:
                        reached = "output"
                        self.stop()
        return reached, streams

    def _pipes(self) -> tuple[Any, Any]:
        return self._process.stdout, self._process.stderr

    def _tell(self, message: bytes) -> None:
        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):  # it has ended; its report says why
            stdin.write(message)
            stdin.flush()

    def _end(self) -> None:
        """Reaps the launcher, killing it once its time is over, and removes the folder."""
        try:
            self._process.wait(max(1.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, *self._pipes()):
            if pipe:
                _close(pipe)
        self._discard()

    def _discard(self) -> None:
        self._status.close()
        if self._folder:
            _remove(self._folder)
            self._folder = None


def _close(pipe: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # an unread order to stop
        pipe.close()


def _command(layers: tuple[str, ...], limits: dict[str, Any]) -> list[str]:
    python = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _START, _ROOT]
    return [*_bubblewrap(limits), *python] if "bubblewrap" in layers else python


def _bubblewrap(limits: dict[str, Any]) -> list[str]:
    wrap = shutil.which("bwrap") or "bwrap"
    binaries = {sys.executable, os.path.realpath(sys.executable)}
    shown = [*launcher.libraries(), *sorted(binaries), f"{_ROOT}/eval"]
    command = [wrap, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--size", str(limits["output_bytes"] + (1 << 16)), "--tmpfs", launcher.HOME]
    command += [word for path in shown for word in ("--ro-bind-try", path, path)]
    command += [word for path in launcher.without_packages() if os.path.isdir(path) for word in ("--tmpfs", path)]
    command += [word for path in launcher.DEVICES for word in ("--dev-bind", path, path)]
    return [*command, "--chdir", launcher.HOME, "--"]


def _remove(folder: str) -> None:
    """Removes the folder, even if the program left folders without permissions or thousands of levels deep."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        subprocess.run(["chmod", "-R", "u+rwX", folder], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", folder], check=False)
