"""Calls into libc and the kernel that the standard library does not wrap; errors become OSError.

Knows nothing of their use. Linux only, but importable elsewhere.
"""

import ctypes
import os
import struct

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPABILITY_VERSION_3 = 0x20080522


def call(name: str, *args: int | bytes | None) -> int:
    """The libc function `name`; integers are passed as long, bytes as pointers."""
    wide = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    result = getattr(_LIBC, name)(*wide)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return int(result)


def syscall(number: int, *args: int | bytes | None) -> int:
    return call("syscall", number, *args)


def prctl(option: int, value: int, pointer: bytes | None = None) -> None:
    call("prctl", option, value, pointer, 0, 0)


def die_with_parent() -> None:
    prctl(_PR_SET_PDEATHSIG, 9)


def keep_own_proc() -> None:
    """Makes /proc/self, which belongs to root after a change of user, the process's own again."""
    prctl(_PR_SET_DUMPABLE, 1)


def drop_privileges() -> None:
    """Drops all capabilities, now and for any later exec."""
    header, nothing = struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    call("capset", header, nothing)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
