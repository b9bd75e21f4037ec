"""Assemble the seccomp filter of a program; `jail.py` receives it with the job and installs it.

The filter compares the number of a call and the low 32 bits of its arguments, since the kernel
reads each argument that is compared here as 32 bits.
"""

from __future__ import annotations

import errno
import struct

SYSTEM_CALLS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41, "socketpair": 53, "io_uring_setup": 425,
            "fork": 57, "vfork": 58, "clone": 56, "clone3": 435,
            "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129,
            "rt_tgsigqueueinfo": 297, "pidfd_open": 434, "pidfd_send_signal": 424,
            "pidfd_getfd": 438, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
            "fcntl": 72, "ioctl": 16, "prctl": 157, "kcmp": 312,
            "process_madvise": 440, "process_mrelease": 448,
            "setsid": 112, "setpgid": 109, "prlimit64": 302, "setpriority": 141,
            "sched_setaffinity": 203, "sched_setscheduler": 144, "sched_setparam": 142,
            "sched_setattr": 314, "ioprio_set": 251, "migrate_pages": 256, "move_pages": 279,
            "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "chroot": 161,
            "pivot_root": 155, "open_tree": 428, "move_mount": 429, "fsopen": 430,
            "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
            "open_tree_attr": 467, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
            "add_key": 248, "request_key": 249, "keyctl": 250,
            "shmget": 29, "semget": 64, "msgget": 68, "memfd_create": 319, "memfd_secret": 447,
            "chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452,
            "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260,
            "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "setxattrat": 463,
            "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "removexattrat": 466,
            "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280, "file_setattr": 469,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "socket": 198, "socketpair": 199, "io_uring_setup": 425,
            "clone": 220, "clone3": 435,
            "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138,
            "rt_tgsigqueueinfo": 240, "pidfd_open": 434, "pidfd_send_signal": 424,
            "pidfd_getfd": 438, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271,
            "fcntl": 25, "ioctl": 29, "prctl": 167, "kcmp": 272,
            "process_madvise": 440, "process_mrelease": 448,
            "setsid": 157, "setpgid": 154, "prlimit64": 261, "setpriority": 140,
            "sched_setaffinity": 122, "sched_setscheduler": 119, "sched_setparam": 118,
            "sched_setattr": 274, "ioprio_set": 30, "migrate_pages": 238, "move_pages": 239,
            "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "chroot": 51,
            "pivot_root": 41, "open_tree": 428, "move_mount": 429, "fsopen": 430,
            "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
            "open_tree_attr": 467, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
            "add_key": 217, "request_key": 218, "keyctl": 219,
            "shmget": 194, "semget": 190, "msgget": 186, "memfd_create": 279, "memfd_secret": 447,
            "fchmod": 52, "fchmodat": 53, "fchmodat2": 452, "fchown": 55, "fchownat": 54,
            "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "setxattrat": 463,
            "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16, "removexattrat": 466,
            "utimensat": 88, "file_setattr": 469,
        },
    ),
}  # fmt: skip
"""Restricted calls by machine: refused, or refused with some arguments. `socket` opens the network;
signals, tracing and scheduling reach other processes of the user; `setsid` leaves the process
group; no limit counts shared memory and memfds."""
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
