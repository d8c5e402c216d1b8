"""User, mount, process, network, IPC and UTS namespaces: a private root that holds only what may be read.

The caller becomes the parent of the new process namespace: its next child is process 1 there. A caller that is root
mounts as root and then becomes nobody, because the kernel's process limit does not apply to root.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

from eval.sandbox.contain import kernel

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_REST = _NEWUTS | _NEWIPC | _NEWUSER | _NEWPID | _NEWNET
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _SLAVE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 19
_STAT_RELATIME, _RELATIME, _DETACH = 4096, 1 << 21, 2
_BASE = "/proc"  # mount point for the new root; nothing in it is needed any more
_NOBODY = 65534


class View(NamedTuple):
    """The contents of the new root: trees and devices at their old paths, and a new private folder."""

    read: Sequence[str]
    hidden: Sequence[str]  # parts of `read` that look empty
    devices: Sequence[str]
    home: str
    home_bytes: int


def enter(view: View) -> None:
    """Moves the caller to new namespaces with `view` as its root. Raises OSError if the kernel refuses."""
    if os.geteuid() == 0:
        kernel.call("unshare", _NEWNS)
        _new_root(view)
        _become_nobody()
        kernel.call("unshare", _REST)
    else:
        user, group = os.geteuid(), os.getegid()
        kernel.call("unshare", _NEWNS | _REST)
        _map("setgroups", "deny")
        _map("uid_map", f"{user} {user} 1")
        _map("gid_map", f"{group} {group} 1")
        _new_root(view)


def _map(name: str, line: str) -> None:
    with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
        file.write(line)


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    kernel.keep_own_proc()


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    kernel.call("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode())


def _new_root(view: View) -> None:
    _mount("none", "/", "", _REC | _SLAVE)
    _mount("tmpfs", _BASE, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    os.makedirs(_BASE + view.home)
    owner = f",uid={_NOBODY},gid={_NOBODY}" if os.geteuid() == 0 else ""
    options = f"size={view.home_bytes},nr_inodes=4096,mode=700{owner}"
    _mount("tmpfs", _BASE + view.home, "tmpfs", _NOSUID | _NODEV | _NOEXEC, options)
    for path in view.read:
        _show(path)
    for path in view.devices:
        _place(path)
        _mount(path, _BASE + path, "", _BIND)
    for path in view.hidden:
        if os.path.isdir(_BASE + path):
            _mount("tmpfs", _BASE + path, "tmpfs", _NOSUID | _NODEV | _RDONLY, "size=4k,mode=755")
    _mount("none", _BASE, "", _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    _pivot()


def _show(path: str) -> None:
    """Binds `path` read-only; a symbolic link such as /lib stays a link."""
    if os.path.islink(path):
        os.makedirs(os.path.dirname(_BASE + path), exist_ok=True)
        if not os.path.lexists(_BASE + path):
            os.symlink(os.readlink(path), _BASE + path)
    elif os.path.exists(path):
        _place(path)
        _mount(path, _BASE + path, "", _BIND | _REC)
        found = os.statvfs(path).f_flag
        kept = found & ~_STAT_RELATIME & 0xFFF | (_RELATIME if found & _STAT_RELATIME else 0)
        # a mount from outside must keep its own restrictions, or the kernel refuses
        _mount("none", _BASE + path, "", _REMOUNT | _BIND | _RDONLY | _NOSUID | kept)


def _place(path: str) -> None:
    """Creates an empty directory or file to bind to."""
    if os.path.isdir(path):
        os.makedirs(_BASE + path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(_BASE + path), exist_ok=True)
        os.close(os.open(_BASE + path, os.O_CREAT | os.O_WRONLY, 0o644))


def _pivot() -> None:
    os.chdir(_BASE)
    kernel.call("pivot_root", b".", b".")  # the old root is now on top of the new one: unmount it
    kernel.call("umount2", b".", _DETACH)
    os.chdir("/")
