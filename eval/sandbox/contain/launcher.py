"""Runs one job contained: reads it from stdin, confines itself, and lets a child do the work.

The job is one line of JSON (see `Sandbox.start`). Any further input on stdin, or its end, means stop. The child runs
the job's role (`program`, `worker`, `checker` or `probe`), a module of this package with a `main(payload)`. This
process, which never runs a line of the job's code, keeps the time, kills the child and reports on the status pipe:
{"ended": "exit" | "wall time" | "disk" | "stopped", "code": exit code or -signal}, or {"error": text} if a layer could
not be applied.
"""

import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from eval.sandbox.contain import kernel, landlock, namespaces, seccomp

DEVICES = ("/dev/null", "/dev/urandom")
HOME = "/tmp"


def libraries() -> list[str]:
    """What Python needs to import the standard library."""
    roots = (sys.base_prefix, sys.base_exec_prefix, "", "/usr", "/usr/local")
    paths = [f"{root}/{name}" for root in roots for name in ("lib", "lib64")]
    return list(dict.fromkeys([*paths, os.path.dirname(os.__file__), "/etc/ld.so.cache"]))


def without_packages() -> list[str]:
    """Folders of installed packages: a contained program does not need them, and they may hold anything."""
    folders = [os.path.dirname(os.__file__), "/usr/lib/python3", "/usr/local/lib/python3"]
    return [f"{folder}/{name}" for folder in folders for name in ("site-packages", "dist-packages")]


def main() -> None:
    job = _read_job()
    status = job["status"]
    try:
        work = importlib.import_module(f"eval.sandbox.contain.{job['role']}").main
        enter_namespaces(job)
        parent_end, child_end = os.pipe()
        pid = os.fork()
    except Exception as error:  # whatever it is, the job must not run
        _report(status, {"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    if pid == 0:
        _child(job, work, keep=child_end)
    else:
        _keep_only(0, status, parent_end)
        _report(status, _watch(pid, parent_end, job))
        os._exit(0)


def _child(job: dict[str, Any], work: Callable[[dict[str, Any]], None], *, keep: int) -> None:
    status = job["status"]
    try:
        if sys.platform == "linux":
            kernel.die_with_parent()
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        _keep_only(0, 1, 2, status, keep, *job["fds"])
        os.chdir(job["home"])
        confine(job)
    except Exception as error:
        _report(status, {"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    os.close(status)
    _forget()
    work(job["payload"])


def enter_namespaces(job: dict[str, Any]) -> None:
    if "namespaces" in job["layers"]:
        limits = job["limits"]
        namespaces.enter(
            namespaces.View(libraries(), without_packages(), DEVICES, job["home"], limits["output_bytes"] + (1 << 16))
        )


def confine(job: dict[str, Any]) -> None:
    """Everything that needs no new process, in an order that leaves each step the rights it needs."""
    limits, layers = job["limits"], job["layers"]
    _set_limits(limits, count_processes="namespaces" in layers or "bubblewrap" in layers)
    if "landlock" in layers:
        landlock.restrict(read=[*libraries(), "/dev/urandom"], write=[job["home"], "/dev/null"])
    if layers:
        kernel.drop_privileges()
    if "seccomp" in layers:
        seccomp.install(threads=limits["processes"] > 1)


def _set_limits(limits: dict[str, int], *, count_processes: bool) -> None:
    wanted = {
        "CPU": limits["cpu_seconds"],
        "AS": limits["memory_mb"] << 20,
        "FSIZE": limits["output_bytes"],
        "CORE": 0,
        "NOFILE": 64,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
    }
    if count_processes:  # elsewhere the user's other processes count too
        wanted["NPROC"] = limits["processes"] + 3  # ours and bubblewrap's two
    for name, value in wanted.items():
        if sys.platform == "darwin" and name in ("AS", "MSGQUEUE"):
            continue  # its kernel refuses these
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (lowest, lowest))


def _watch(pid: int, alive: int, job: dict[str, Any]) -> dict[str, Any]:
    """Waits until the child has ended or must be killed; `alive` closes with the child."""
    ended = _why_over(alive, job)
    os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"ended": ended, "code": code}


def _why_over(alive: int, job: dict[str, Any]) -> str:
    deadline = time.monotonic() + job["limits"]["wall_seconds"]
    watched = job["watched"]  # a folder without a size limit of its own
    while (left := deadline - time.monotonic()) > 0:
        ready = select.select([alive, 0], [], [], min(left, 0.1) if watched else left)[0]
        if alive in ready:
            return "exit"
        if ready:
            return "stopped"
        if watched and _exceeds(job["home"], job["limits"]["output_bytes"]):
            return "disk"
    return "wall time"


def _exceeds(folder: str, most: int) -> bool:
    """Whether the files below take more bytes, each at least one block; files that vanish meanwhile do not count."""
    total, folders = 0, [folder]
    while folders and total <= most:
        try:
            for entry in os.scandir(folders.pop()):
                total += max(4096, entry.stat(follow_symlinks=False).st_blocks * 512)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
        except OSError:
            continue
    return total > most


def _read_job() -> dict[str, Any]:
    """The line on stdin. An order to stop may directly follow it."""
    text, parts = b"", []
    while b"\n" not in text:
        if not (text := os.read(0, 1 << 20)):
            os._exit(1)  # whoever started this is gone
        parts.append(text)
    line, _, rest = b"".join(parts).partition(b"\n")
    job: dict[str, Any] = json.loads(line)
    if rest:
        _report(job["status"], {"ended": "stopped", "code": -signal.SIGKILL})
        os._exit(0)
    return job


def _keep_only(*fds: int) -> None:
    low = 0
    for fd in sorted({*fds}):
        if fd > low:  # an empty range would close everything
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 1 << 16)


def _forget() -> None:
    """Forgets our modules: the job's code can import only the standard library."""
    for name in [name for name in sys.modules if name == "eval" or name.startswith("eval.")]:
        del sys.modules[name]


def _report(status: int, what: dict[str, Any]) -> None:
    os.write(status, json.dumps(what).encode() + b"\n")
