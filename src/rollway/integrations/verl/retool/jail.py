"""Runs one Python program under limits: started as `python -I -S jail.py`, needs nothing else.

    caller --- job: one JSON line ---> keeper (this process)
                                          | fork: limits, other user, files, system calls; exec
                                          v
                                       program (its own process group, an empty directory)
    caller <-- report: one JSON line -- keeper, after every process of the program is gone

The keeper is the subreaper of all that the program starts, so nothing gets away from it, and it
ends the program when the caller closes the pipe, as the death of the caller also does. It runs
under the interpreter that runs the program, which may be older than the caller's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LOOK_SECONDS = 0.02
"""How often the keeper looks whether the program ended, or became too many processes."""
OWN_USERS, NOBODY = 1_000_000_000, 65534
"""A program of root gets the user id after its process, or where only few are mapped, the last."""
THREADS = 64
"""Of a program that has a user id of its own: more than any numerical library needs."""
SETUP_FAILED = 125

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
SECCOMP_MODE_FILTER = 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same on every machine

SYSTEM_CALLS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41, "socketpair": 53, "io_uring_setup": 425,
            "fork": 57, "vfork": 58, "clone": 56, "clone3": 435,
            "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129,
            "rt_tgsigqueueinfo": 297, "pidfd_open": 434, "pidfd_send_signal": 424,
            "pidfd_getfd": 438, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
            "setsid": 112, "setpgid": 109, "prlimit64": 302, "setpriority": 141,
            "sched_setaffinity": 203, "sched_setscheduler": 144,
            "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "chroot": 161,
            "pivot_root": 155, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
            "add_key": 248, "request_key": 249, "keyctl": 250,
            "shmget": 29, "semget": 64, "msgget": 68,
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
            "setsid": 157, "setpgid": 154, "prlimit64": 261, "setpriority": 140,
            "sched_setaffinity": 122, "sched_setscheduler": 119,
            "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "chroot": 51,
            "pivot_root": 41, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
            "add_key": 217, "request_key": 218, "keyctl": 219,
            "shmget": 194, "semget": 190, "msgget": 186,
        },
    ),
}  # fmt: skip
"""What a program must not call, by machine; `socket` is the network, signals and `ptrace` are what
it could do to other processes of the user, `setsid` would let it leave its process group."""
NETWORK = ("socket", "socketpair", "io_uring_setup")
CREATION = ("fork", "vfork", "clone", "clone3")

libc = ctypes.CDLL(None, use_errno=True)


class CannotConfine(Exception):
    """This kernel or machine does not offer what the job requires."""


# --- What the program may do ---


def system_call_filter(*, network: bool, processes: bool) -> bytes:
    """The seccomp program: refused calls fail with EPERM, all others go through."""
    machine = platform.machine()
    if machine not in SYSTEM_CALLS:
        raise CannotConfine(f"no list of system calls for {machine}")
    architecture, calls = SYSTEM_CALLS[machine]
    load, jump_equal, jump_above, jump_bits, mask, give = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    allow, kill, refuse, unknown = (
        0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    )  # fmt: skip

    def argument(index: int) -> int:
        return 16 + 8 * index

    program = [(load, 0, 0, 4), (jump_equal, 1, 0, architecture), (give, 0, 0, kill)]
    program += [(load, 0, 0, 0)]
    if machine == "x86_64":  # the x32 calls are the same ones under other numbers
        program += [(jump_above, 0, 1, 0x40000000), (give, 0, 0, refuse)]
    choice = [(give, 0, 0, refuse), (give, 0, 0, allow)]
    conditional = {
        # A stream pair is a pipe; a datagram pair could send to any local address.
        "socketpair": [(load, 0, 0, argument(1)), (mask, 0, 0, 0xF), (jump_equal, 1, 0, 1)],
        "clone": [(load, 0, 0, argument(0)), (jump_bits, 1, 0, 0x10000)],  # CLONE_THREAD
        "prlimit64": [(load, 0, 0, argument(0)), (jump_equal, 1, 0, 0)],  # itself
    }
    for name, number in calls.items():
        if (network and name in NETWORK) or (processes and name in CREATION):
            continue
        test = conditional.get(name)
        if test is not None:
            program += [(jump_equal, 0, len(test) + 2, number), *test, *choice]
        else:  # without clone3 the C library uses clone, whose flags can be looked at
            answer = unknown if name == "clone3" else refuse
            program += [(jump_equal, 0, 1, number), (give, 0, 0, answer)]
    program += [(give, 0, 0, allow)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def restrict_system_calls(*, network: bool, processes: bool) -> None:
    code = system_call_filter(network=network, processes=processes)
    held = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(
        struct.pack("@HP", len(code) // 8, ctypes.addressof(held)), 16
    )
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0) != 0:
        raise CannotConfine(f"seccomp: {os.strerror(ctypes.get_errno())}")


def restrict_files(directory: str, readable: list[str]) -> bool:
    """With Landlock: read the interpreter and the system, write only `directory`. This also shuts
    off the memory and environment of other processes. False where the kernel has no Landlock."""
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return False
    everything = 0x1FFF | (0x2000 if version >= 2 else 0) | (0x4000 if version >= 3 else 0)
    handled = ctypes.create_string_buffer(struct.pack("<Q", everything), 8)
    rules = libc.syscall(LANDLOCK_CREATE, handled, ctypes.c_size_t(8), ctypes.c_uint32(0))
    if rules < 0:
        return False
    read, read_file, write_file = 0x1 | 0x4 | 0x8, 0x1 | 0x4, 0x2 | 0x4
    allowed = [(path, read if Path(path).is_dir() else read_file) for path in readable]
    allowed += [(directory, everything), ("/dev/null", write_file)]
    for path, access in allowed:
        with contextlib.suppress(FileNotFoundError):
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = ctypes.create_string_buffer(struct.pack("<Qi", access, opened), 12)
            done = libc.syscall(LANDLOCK_ADD, rules, 1, rule, ctypes.c_uint32(0))
            os.close(opened)
            if done != 0:
                raise CannotConfine(f"landlock, {path}: {os.strerror(ctypes.get_errno())}")
    if libc.syscall(LANDLOCK_RESTRICT, rules, ctypes.c_uint32(0)) != 0:
        raise CannotConfine(f"landlock: {os.strerror(ctypes.get_errno())}")
    os.close(rules)
    return True


def readable_paths(more: list[str]) -> list[str]:
    """What an interpreter reads to start and to import its packages."""
    start = Path(sys.executable).absolute()
    paths = [sys.prefix, sys.base_prefix, sys.exec_prefix, str(start.resolve().parent)]
    if (start.parent.parent / "pyvenv.cfg").exists():
        paths.append(str(start.parent.parent))
    paths += ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime"]
    paths += ["/dev/urandom", "/dev/random", "/dev/zero", "/proc/cpuinfo", "/proc/meminfo"]
    return [*paths, "/sys/devices/system/cpu", *more]


def become_nobody(directory: str) -> bool:
    """Give up root for a user that owns nothing but `directory`."""
    if os.geteuid() != 0:
        return False
    for user in (OWN_USERS + os.getpid(), NOBODY):
        try:
            os.chown(directory, user, user)
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        except OSError:  # a user namespace that does not map it
            continue
        return True
    return False


def set_limits(job: dict[str, Any]) -> None:
    megabyte = 1 << 20
    limits = {
        resource.RLIMIT_AS: job["memory_mb"] * megabyte,
        resource.RLIMIT_FSIZE: job["file_mb"] * megabyte,
        resource.RLIMIT_NOFILE: job["open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,  # queues would outlive the program
    }
    if os.getuid() > OWN_USERS:  # else this counts what others run under the same user
        limits[resource.RLIMIT_NPROC] = job["processes"] + THREADS
    for which, most in limits.items():
        allowed = resource.getrlimit(which)[1]
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(which, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_seconds"], job["cpu_seconds"] + 1))


# --- The program, up to its start ---


def start_program(job: dict[str, Any], directory: str, told: int) -> None:
    """In the child: take everything away, then become the program. Does not return."""
    os.chdir(directory)
    own_user = become_nobody(directory)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of user would clear it
    set_limits(job)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise CannotConfine(f"no_new_privs: {os.strerror(ctypes.get_errno())}")
    files = restrict_files(directory, readable_paths(job["readable"]))
    network = job["network"] == "allow"
    try:
        restrict_system_calls(network=network, processes=job["processes"] > 1)
        calls = True
    except CannotConfine:
        if not network:
            raise
        calls = False
    os.write(told, json.dumps({"user": own_user, "files": files, "calls": calls}).encode())
    Path("main.py").write_text(job["code"], encoding="utf-8", errors="replace")
    command = [sys.executable, "-I", "-B", "-X", "utf8", *([] if job["packages"] else ["-S"])]
    one_thread = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    environment = {
        "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": directory, "TMPDIR": directory
    }  # fmt: skip
    os.execve(sys.executable, [*command, "-c", job["runner"]], {**environment, **one_thread})


def in_child(job: dict[str, Any], directory: str, streams: tuple[int, int], told: int) -> None:
    try:
        os.setpgid(0, 0)
        null = os.open("/dev/null", os.O_RDONLY)
        for source, target in zip((null, *streams), (0, 1, 2)):  # noqa: B905  (older Pythons)
            os.dup2(source, target)
        start_program(job, directory, told)
    except BaseException as error:  # noqa: BLE001  (there is no other way to say it)
        with contextlib.suppress(OSError):
            os.write(told, b"!" + f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(SETUP_FAILED)


# --- The keeper ---


class Keeper:
    """Starts the program, takes its output, and ends it when it has had enough."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.output: dict[int, bytearray] = {}
        self.reading: set[int] = set()
        self.pid = 0

    def run(self) -> dict[str, Any]:
        directory = tempfile.mkdtemp(prefix="rollway-code-", dir=self.job["scratch"])
        try:
            return self._run(directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _run(self, directory: str) -> dict[str, Any]:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        (out, out_end), (err, err_end), (heard, told) = os.pipe(), os.pipe(), os.pipe()
        began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            in_child(self.job, directory, (out_end, err_end), told)
        with contextlib.suppress(OSError):  # the child does the same; one of the two is first
            os.setpgid(self.pid, self.pid)
        for end in (out_end, err_end, told):
            os.close(end)
        self.output, self.reading = {out: bytearray(), err: bytearray()}, {out, err}
        try:
            ending = self._watch(began + self.job["timeout"])
        finally:
            status = self._end()
        seconds = time.monotonic() - began
        confined = os.read(heard, 4096)
        if b"!" in confined or not confined:
            problem = confined.partition(b"!")[2].decode(errors="replace")
            return {"problem": problem or "the program could not be started"}
        stdout, stderr = (
            bytes(kept[: self.job["output_bytes"]])
            .replace(directory.encode() + b"/", b"")
            .decode(errors="replace")
            for kept in self.output.values()
        )
        if any(len(kept) > self.job["output_bytes"] for kept in self.output.values()):
            ending = "output"
        elif ending == "exit" and os.WIFSIGNALED(status):
            ending = "cpu" if os.WTERMSIG(status) == signal.SIGXCPU else "signal"
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return {
            "stdout": stdout, "stderr": stderr, "ending": ending, "code": code,
            "seconds": seconds, "confined": json.loads(confined),
        }  # fmt: skip

    def _watch(self, deadline: float) -> str:
        """Until the program ends or must be ended; says why."""
        caller = 0
        while True:
            if self._exited():
                return "exit"
            if time.monotonic() > deadline:
                return "timeout"
            if self.job["processes"] > 1 and self._size() > self.job["processes"]:
                return "processes"
            ready, _, _ = select.select([caller, *self.reading], [], [], LOOK_SECONDS)
            if caller in ready and not os.read(caller, 4096):
                return "cancelled"
            if self._take(ready):
                return "output"

    def _take(self, ready: list[int]) -> bool:
        """Read what is there; True once there is more than may be."""
        for stream in self.reading.intersection(ready):
            piece = os.read(stream, 65536)
            self.output[stream] += piece
            if not piece:
                self.reading.remove(stream)
        return any(len(kept) > self.job["output_bytes"] for kept in self.output.values())

    def _exited(self) -> bool:
        """Without reaping it: while the leader is there, its group's number is not reused."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, flags) is not None

    def _size(self) -> int:
        """How many processes the group of the program has."""
        count = 0
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    count += os.getpgid(int(entry.name)) == self.pid
        return count

    def _end(self) -> int:
        """Kill all that is left, take the last output, and reap; returns the program's status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        while self.reading:
            ready, _, _ = select.select(list(self.reading), [], [], 0)
            if not ready or self._take(ready):
                break
        status = os.waitpid(self.pid, 0)[1]
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        with contextlib.suppress(ChildProcessError):
            while True:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:  # left its group, and came to us
                    with contextlib.suppress(OSError):
                        for child in children.read_text().split():
                            os.kill(int(child), signal.SIGKILL)
                    time.sleep(0.002)
        return status


def main() -> None:
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 65536)
        if not piece:
            return
        line += piece
    report = Keeper(json.loads(line)).run()
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(report).encode())


if __name__ == "__main__":
    main()
