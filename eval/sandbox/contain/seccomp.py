"""A system-call filter: no sockets, no new processes, no access to other processes, no change of file owners or modes.

A deny list (EPERM), since Python and its C library make many different calls. Each number is given for x86_64 and for
aarch64; other machines get no filter. It applies to the process that calls `install` and its children; what Landlock
and namespaces already prevent is denied here as well.
"""

import ctypes
import errno
import os
import struct

from eval.sandbox.contain import kernel

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name: (x86_64, aarch64); None where the machine has no such call
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # communication
    **{"socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242), "bind": (49, 200)},
    **{"listen": (50, 201), "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190)},
    **{"mq_open": (240, 180)},
    # new programs and processes (threads: see `_rules`)
    **{"execve": (59, 221), "execveat": (322, 281), "fork": (57, None), "vfork": (58, None)},
    # other processes
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "tkill": (200, 130)},
    **{"rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "process_madvise": (440, 440)},
    **{"setpriority": (141, 140), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119)},
    **{"sched_setparam": (142, 118), "sched_setattr": (314, 274), "ioprio_set": (251, 30)},
    **{"migrate_pages": (256, 238), "move_pages": (279, 239)},
    # owners, modes, times and attributes of files, which Landlock does not cover
    **{"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None)},
    **{"fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None)},
    **{"futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6)},
    **{"fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16)},
    **{"setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469), "truncate": (76, 45)},
    # memory that counts towards no limit
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447)},
    # mounts and namespaces
    **{"unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41)},
    **{"chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430)},
    **{"fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442)},
    **{"open_tree_attr": (467, 467)},
    # parts of the kernel with a history of vulnerabilities, and the machine itself
    **{"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425)},
    **{"io_uring_enter": (426, 426), "io_uring_register": (427, 427), "keyctl": (250, 219), "add_key": (248, 217)},
    **{"request_key": (249, 218), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265)},
    **{"init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104)},
    **{"kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225)},
    **{"personality": (135, 92), "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170)},
    **{"clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171), "acct": (163, 89)},
    **{"quotactl": (179, 60), "syslog": (103, 116), "vhangup": (153, 58), "fanotify_init": (300, 262)},
}
_CLONE, _CLONE3, _KILL, _TGKILL = (56, 220), (435, 435), (62, 129), (234, 131)
_PRCTL, _PRLIMIT, _SOCKETPAIR = (157, 167), (302, 261), (53, 199)
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSE = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
_PASS = (_RETURN, 0, 0, _ALLOW)
_CLONE_THREAD, _PR_SET_PDEATHSIG, _SOCK_STREAM = 0x10000, 1, 1
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def machine_is_known() -> bool:
    return os.uname().machine in _AUDIT_ARCH


def install(*, threads: bool) -> None:
    """Filters this process permanently. Raises OSError on an unknown machine or if the kernel refuses."""
    if not machine_is_known():
        raise OSError(errno.ENOSYS, f"no system-call table for {os.uname().machine}")
    code = b"".join(struct.pack("HBBI", *step) for step in _program(os.uname().machine, threads=threads))
    steps = ctypes.create_string_buffer(code, len(code))  # must stay alive until the call has copied it
    kernel.prctl(38, 1)
    kernel.prctl(_PR_SET_SECCOMP, _MODE_FILTER, struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(steps)))


def _program(machine: str, *, threads: bool) -> list[Instruction]:
    column = list(_AUDIT_ARCH).index(machine)
    head = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _AUDIT_ARCH[machine]), (_RETURN, 0, 0, _KILL_PROCESS), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":  # x32 call numbers would bypass the table
        head += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL_PROCESS)]
    body = [step for calls, then in _rules(threads=threads) for step in _rule(calls[column], then)]
    return [*head, *body, _PASS]


def _rule(number: int | None, then: list[Instruction]) -> list[Instruction]:
    return [] if number is None else [(_EQUAL, 0, len(then), number), *then]


def _rules(*, threads: bool) -> list[tuple[tuple[int | None, int | None], list[Instruction]]]:
    me = os.getpid()
    is_thread = [_argument(0), (_ANY_BIT, 0, 1, _CLONE_THREAD), _PASS, _REFUSE]
    return [
        *((numbers, [_REFUSE]) for numbers in _REFUSED.values()),
        (_CLONE, is_thread if threads else [_REFUSE]),
        (
            _CLONE3,
            [(_RETURN, 0, 0, _ERRNO | errno.ENOSYS)],
        ),  # its flags are in memory: libc falls back to clone
        (_KILL, _first_is(me)),  # raise and abort
        (_TGKILL, _first_is(me)),
        (_PRLIMIT, _first_is(0)),
        (_PRCTL, [_argument(0), (_EQUAL, 0, 1, _PR_SET_PDEATHSIG), _REFUSE, _PASS]),
        # asyncio needs a stream pair; a datagram pair could still send to other sockets
        (_SOCKETPAIR, [_argument(1), (_AND, 0, 0, 0xF), (_EQUAL, 0, 1, _SOCK_STREAM), _PASS, _REFUSE]),
    ]


def _argument(index: int) -> Instruction:
    """Loads the low half of an argument (little-endian)."""
    return (_LOAD, 0, 0, 16 + 8 * index)


def _first_is(value: int) -> list[Instruction]:
    return [_argument(0), (_EQUAL, 0, 1, value), _PASS, _REFUSE]
