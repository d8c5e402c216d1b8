"""Landlock: which files a process may still open. A wrapper of the kernel's interface, without a policy of its own.

Covers opening, creating, removing and executing files and, if the kernel is new enough, TCP, abstract unix sockets and
signals to the outside. Does not cover stat, chmod, chown or truncation by path on old kernels: ``seccomp`` does.
"""

import os
import struct
from collections.abc import Iterable

from eval.sandbox.contain import kernel

_CREATE, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_READ = _READ_FILE | _READ_DIR
_REMOVE, _MAKE_DIR, _MAKE_FILE, _MAKE_LINK, _MOVE = 1 << 4 | 1 << 5, 1 << 7, 1 << 8, 1 << 12, 1 << 13
_CHANGE_TREE = _READ | _WRITE_FILE | _REMOVE | _MAKE_DIR | _MAKE_FILE | _MAKE_LINK | _MOVE | _TRUNCATE
_ON_FILES = _READ_FILE | _WRITE_FILE | _TRUNCATE
_ALL_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # bits that each version of the interface knows
_TCP, _SCOPES = 0b11, 0b11


def version() -> int:
    """The interface's version in this kernel, 0 if there is none."""
    try:
        return kernel.syscall(_CREATE, None, 0, 1)
    except OSError:
        return 0


def restrict(*, read: Iterable[str], write: Iterable[str]) -> None:
    """From now on only these trees (or files) can be read, or read and written; nothing can be executed.

    Paths that do not exist are skipped. Raises OSError if the kernel refuses.
    """
    rights, ruleset = _ruleset()
    for paths, allowed in ((read, _READ), (write, _CHANGE_TREE)):
        for path in paths:
            _allow(ruleset, path, allowed & rights)
    kernel.prctl(38, 1)  # the kernel requires no_new_privs first
    kernel.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _ruleset() -> tuple[int, int]:
    """The rights that are handled, and the ruleset's descriptor."""
    known = version()
    rights = (1 << _ALL_FILE_RIGHTS[max(1, min(known, 5))]) - 1
    fields = [rights, *([_TCP] if known >= 4 else []), *([_SCOPES] if known >= 6 else [])]
    attribute = struct.pack(f"{len(fields)}Q", *fields)
    return rights, kernel.syscall(_CREATE, attribute, len(attribute), 0)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        where = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):
        rights &= _ON_FILES
    kernel.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, where), 0)
    os.close(where)
