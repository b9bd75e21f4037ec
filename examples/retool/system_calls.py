"""Assemble the seccomp filter of a program; `jail.py` receives it with the job and installs it.

The filter compares the number of a call and the low 32 bits of its arguments, since the kernel
reads each argument that is compared here as 32 bits.
"""

from __future__ import annotations

import errno
import struct

_NUMBERS: dict[str, tuple[int, int | None]] = {
    "socket": (41, 198), "socketpair": (53, 199), "io_uring_setup": (425, 425), "fork": (57, None),
    "vfork": (58, None), "clone": (56, 220), "clone3": (435, 435), "kill": (62, 129),
    "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "fcntl": (72, 25), "ioctl": (16, 29), "prctl": (157, 167),
    "kcmp": (312, 272), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "setsid": (112, 157), "setpgid": (109, 154), "prlimit64": (302, 261), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "umount2": (166, 39), "chroot": (161, 51), "pivot_root": (155, 41), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "open_tree_attr": (467, 467),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "shmget": (29, 194),
    "semget": (64, 190), "msgget": (68, 186), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None),
    "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "file_setattr": (469, 469),
}  # fmt: skip
"""Restricted calls, with their numbers on x86-64 and aarch64: refused, or refused with some
arguments. `socket` opens the network; signals, tracing and scheduling reach other processes of the
user; `setsid` leaves the process group; no limit counts shared memory and memfds."""
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SYSTEM_CALLS: dict[str, tuple[int, dict[str, int]]] = {
    machine: (
        architecture,
        {name: number for name, pair in _NUMBERS.items() if (number := pair[column]) is not None},
    )
    for column, (machine, architecture) in enumerate(_ARCHITECTURES.items())
}
"""By machine: its architecture, and the numbers of the restricted calls."""
NETWORK = ("socket", "socketpair")
CREATION = ("fork", "vfork")
METADATA = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat",
    "setxattr", "lsetxattr", "fsetxattr", "setxattrat",
    "removexattr", "lremovexattr", "fremovexattr", "removexattrat",
    "utime", "utimes", "futimesat", "utimensat", "file_setattr",
)  # fmt: skip
"""Calls that change metadata, by path or descriptor; Landlock does not restrict them."""

DESCRIPTOR_OWNER = (8, 10, 15, 1024)
"""F_SETOWN, F_SETSIG and F_SETOWN_EX make the kernel send any signal to any process of the user;
F_SETLEASE stalls processes that open the file."""
SOCKET_OWNER = (0x8901, 0x8902)
"""FIOSETOWN and SIOCSPGRP do the same as F_SETOWN."""
FILE_FLAGS = (0x40086602, 0x40087602, 0x40086604, 0x401C5820)
"""FS_IOC_SETFLAGS, FS_IOC_SETVERSION, ext4's own, and FS_IOC_FSSETXATTR."""
PROCESS_OPTIONS = (1, 62)
"""With PR_SET_PDEATHSIG a program outlives its keeper; PR_SCHED_CORE reschedules others."""
CLONE_THREAD, CLONE_NEW_ANY = 0x10000, 0x7E020000

Instruction = tuple[int, int, int, int]
LOAD, MASK, RETURN = 0x20, 0x54, 0x06
JUMP_EQUAL, JUMP_ABOVE, JUMP_BITS = 0x15, 0x35, 0x45
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS


def assemble(machine: str, *, network: bool, processes: bool, metadata: bool) -> bytes | None:
    """Return the filter: refused calls fail with EPERM, all others are allowed.

    Each keyword allows something: sockets, further processes, and changes to the modes, owners,
    attributes and times of files. Return None for a machine whose call numbers are unknown.
    """
    if machine not in SYSTEM_CALLS:
        return None
    architecture, calls = SYSTEM_CALLS[machine]
    allowed = (*(NETWORK * network), *(CREATION * processes), *(METADATA * metadata))
    conditions = argument_conditions(processes=processes, metadata=metadata)
    program: list[Instruction] = [
        (LOAD, 0, 0, 4), (JUMP_EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)
    ]  # fmt: skip
    if machine == "x86_64":  # x32 has the same calls under other numbers
        program += [(JUMP_ABOVE, 0, 1, 0x40000000), (RETURN, 0, 0, REFUSE)]
    for name, number in calls.items():
        if name in allowed:
            continue
        if name in conditions:
            block = [*conditions[name], (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
        else:  # ENOSYS makes the C library use clone, whose flags a filter can read
            block = [(RETURN, 0, 0, UNKNOWN if name == "clone3" else REFUSE)]
        program += [(JUMP_EQUAL, 0, len(block), number), *block]
    program.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def argument_conditions(*, processes: bool, metadata: bool) -> dict[str, list[Instruction]]:
    """Return tests of arguments; each falls through to the refusal, or skips it."""
    no_namespace = (JUMP_BITS, 0, 1, CLONE_NEW_ANY)
    only_thread = [(JUMP_BITS, 1, 0, CLONE_NEW_ANY), (JUMP_BITS, 1, 0, CLONE_THREAD)]
    return {
        # A stream pair is only a pipe; a datagram pair can send to any local address.
        "socketpair": [load_argument(1), (MASK, 0, 0, 0xF), (JUMP_EQUAL, 1, 0, 1)],
        "clone": [load_argument(0), *([no_namespace] if processes else only_thread)],
        "prlimit64": [load_argument(0), (JUMP_EQUAL, 1, 0, 0)],  # itself
        "fcntl": refuse_values(1, DESCRIPTOR_OWNER),
        "ioctl": refuse_values(1, SOCKET_OWNER if metadata else SOCKET_OWNER + FILE_FLAGS),
        "prctl": refuse_values(0, PROCESS_OPTIONS),
    }


def load_argument(index: int) -> Instruction:
    return (LOAD, 0, 0, 16 + 8 * index)


def refuse_values(index: int, values: tuple[int, ...]) -> list[Instruction]:
    last = len(values) - 1
    tests = [
        (JUMP_EQUAL, last - place, int(place == last), value) for place, value in enumerate(values)
    ]
    return [load_argument(index), *tests]
