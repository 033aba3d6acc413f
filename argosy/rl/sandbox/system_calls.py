"""The system calls that untrusted code may make, as a program for the kernel (seccomp, `man 2 seccomp`). The program lists the allowed
calls, so a call that a later kernel adds is refused until somebody has reviewed it.

`child.py` imports this file before it runs the code, so it needs the standard library alone. Every call that is not listed is refused.
Among these are, on purpose:

- sockets
- new processes and programs; clone can only make threads
- signals to other processes, and ways to have the kernel send them (F_SETOWN)
- tracing
- changes of modes, owners and times of files, which Landlock does not check
- shared memory and memfd, which no memory limit counts
- namespaces
- timers, because a timer ends this process at its time limit
- prctl, which could undo that this process ends with its parent
"""

import os
import struct

# The numbers are those of linux/unistd.h, kernel 6.1, which never change. Calls that only one of the two has are in its table alone.
X86_64 = {
    "read": 0, "write": 1, "close": 3, "fstat": 5, "newfstatat": 262, "stat": 4, "lstat": 6, "statx": 332,
    "lseek": 8, "mmap": 9, "munmap": 11, "mprotect": 10, "mremap": 25, "madvise": 28, "brk": 12, "pread64": 17,
    "pwrite64": 18, "preadv": 295, "pwritev": 296, "readv": 19, "writev": 20, "access": 21, "faccessat": 269,
    "faccessat2": 439, "readlink": 89, "readlinkat": 267, "getcwd": 79, "chdir": 80, "fchdir": 81, "getdents": 78,
    "getdents64": 217, "mkdir": 83, "mkdirat": 258, "rmdir": 84, "rename": 82, "renameat": 264, "renameat2": 316,
    "link": 86, "linkat": 265, "unlink": 87, "unlinkat": 263, "symlink": 88, "symlinkat": 266, "umask": 95,
    "ftruncate": 77, "fadvise64": 221, "fsync": 74, "fdatasync": 75, "flock": 73, "statfs": 137, "fstatfs": 138,
    "dup": 32, "dup2": 33, "dup3": 292, "pipe": 22, "pipe2": 293, "poll": 7, "ppoll": 271, "select": 23,
    "pselect6": 270, "epoll_create": 213, "epoll_create1": 291, "epoll_ctl": 233, "epoll_wait": 232,
    "epoll_pwait": 281, "eventfd": 284, "eventfd2": 290, "futex": 202, "sched_yield": 24, "sched_getaffinity": 204,
    "getcpu": 309, "nanosleep": 35, "clock_nanosleep": 230, "clock_gettime": 228, "clock_getres": 229,
    "gettimeofday": 96, "time": 201, "times": 100, "getitimer": 36, "setitimer": 38, "alarm": 37, "pause": 34,
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "rt_sigpending": 127, "rt_sigsuspend": 130,
    "rt_sigtimedwait": 128, "sigaltstack": 131, "restart_syscall": 219, "getpid": 39, "gettid": 186, "getppid": 110,
    "getpgrp": 111, "getpgid": 121, "getsid": 124, "getuid": 102, "geteuid": 107, "getgid": 104, "getegid": 108,
    "getresuid": 118, "getresgid": 120, "getgroups": 115, "getrlimit": 97, "setrlimit": 160, "getrusage": 98,
    "sysinfo": 99, "uname": 63, "getrandom": 318, "set_tid_address": 218, "set_robust_list": 273, "rseq": 334,
    "membarrier": 324, "arch_prctl": 158, "wait4": 61, "waitid": 247, "getsockname": 51, "getpeername": 52,
    "getsockopt": 55, "shutdown": 48, "recvfrom": 45, "exit": 60, "exit_group": 231, "open": 2, "openat": 257,
    "clone": 56, "kill": 62, "tgkill": 234, "fcntl": 72, "ioctl": 16, "prctl": 157, "prlimit64": 302,
    "socketpair": 53, "sendto": 44, "clone3": 435, "openat2": 437, "socket": 41, "fork": 57,
}  # fmt: skip

AARCH64 = {
    "read": 63, "write": 64, "close": 57, "fstat": 80, "newfstatat": 79, "statx": 291, "lseek": 62, "mmap": 222,
    "munmap": 215, "mprotect": 226, "mremap": 216, "madvise": 233, "brk": 214, "pread64": 67, "pwrite64": 68,
    "preadv": 69, "pwritev": 70, "readv": 65, "writev": 66, "faccessat": 48, "faccessat2": 439, "readlinkat": 78,
    "getcwd": 17, "chdir": 49, "fchdir": 50, "getdents64": 61, "mkdirat": 34, "renameat": 38, "renameat2": 276,
    "linkat": 37, "unlinkat": 35, "symlinkat": 36, "umask": 166, "ftruncate": 46, "fadvise64": 223, "fsync": 82,
    "fdatasync": 83, "flock": 32, "statfs": 43, "fstatfs": 44, "dup": 23, "dup3": 24, "pipe2": 59, "ppoll": 73,
    "pselect6": 72, "epoll_create1": 20, "epoll_ctl": 21, "epoll_pwait": 22, "eventfd2": 19, "futex": 98,
    "sched_yield": 124, "sched_getaffinity": 123, "getcpu": 168, "nanosleep": 101, "clock_nanosleep": 115,
    "clock_gettime": 113, "clock_getres": 114, "gettimeofday": 169, "times": 153, "getitimer": 102,
    "setitimer": 103, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "rt_sigpending": 136,
    "rt_sigsuspend": 133, "rt_sigtimedwait": 137, "sigaltstack": 132, "restart_syscall": 128, "getpid": 172,
    "gettid": 178, "getppid": 173, "getpgid": 155, "getsid": 156, "getuid": 174, "geteuid": 175, "getgid": 176,
    "getegid": 177, "getresuid": 148, "getresgid": 150, "getgroups": 158, "getrlimit": 163, "setrlimit": 164,
    "getrusage": 165, "sysinfo": 179, "uname": 160, "getrandom": 278, "set_tid_address": 96, "set_robust_list": 99,
    "rseq": 293, "membarrier": 283, "wait4": 260, "waitid": 95, "getsockname": 204, "getpeername": 205,
    "getsockopt": 209, "shutdown": 210, "recvfrom": 207, "exit": 93, "exit_group": 94, "openat": 56, "clone": 220,
    "kill": 129, "tgkill": 131, "fcntl": 25, "ioctl": 29, "prctl": 167, "prlimit64": 261, "socketpair": 199,
    "sendto": 206, "clone3": 435, "openat2": 437, "socket": 198,
}  # fmt: skip

TABLES = {"x86_64": (X86_64, 0xC000003E), "aarch64": (AARCH64, 0xC00000B7)}

# Of these the arguments are looked at; all others in the table but ABSENT and REFUSED are allowed as they are.
CHECKED = ("open", "openat", "clone", "kill", "tgkill", "fcntl", "ioctl", "prctl", "prlimit64", "socketpair", "sendto")
# glibc makes do without these if the kernel says that it has no such call; their arguments are in memory, where no filter looks.
ABSENT = ("clone3", "openat2")
# For the child, which tries whether they are refused.
REFUSED = ("socket", "fork")

LOAD, EQUAL, AT_LEAST, ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 1, 38
ERRNO = 0x00050000
# Where the kernel puts a call's number, its architecture and its arguments (struct seccomp_data).
NUMBER, ARCHITECTURE = 0, 4

O_ACCMODE, O_TRUNC = 0o3, 0o1000
CLONE_THREAD = 0x00010F00  # VM, FS, FILES, SIGHAND, THREAD: what a thread shares
CLONE_NEW = 0x7E020080  # namespaces
# Commands of fcntl: duplicates, flags of descriptors and files, locks. Not F_SETOWN, F_SETSIG, leases and seals.
FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# PR_SET_NAME, PR_SET_VMA (names of threads and of memory).
PRCTL = (15, 0x53564D41)
AF_UNIX, SOCK_STREAM = 1, 1

Instruction = tuple[int, int, int, int]


def argument(index: int, high: bool = False) -> Instruction:
    return LOAD, 0, 0, 16 + 8 * index + 4 * high


def allow_where(tests: list[Instruction]) -> list[Instruction]:
    """Makes the instructions that allow a call if every test passes. A jump of -1 in a test leads to the refusal."""
    end = len(tests) + 1
    placed = [(code, end - i - 1 if yes < 0 else yes, end - i - 1 if no < 0 else no, k) for i, (code, yes, no, k) in enumerate(tests)]
    return [*placed, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERRNO | EPERM)]


def any_of(index: int, values: tuple[int, ...]) -> list[Instruction]:
    """Makes a test that a call passes if its argument at this index has one of these values."""
    last = len(values) - 1
    return [argument(index), *((EQUAL, last - i, 0 if i < last else -1, value) for i, value in enumerate(values))]


def not_truncating(flags: int) -> list[Instruction]:
    """Makes a test that refuses to open a file for reading with truncation, which Landlock counts as reading before its third version.

    Args:
        flags: the index of the argument with the flags.
    """
    return [argument(flags), (AND, 0, 0, O_ACCMODE | O_TRUNC), (EQUAL, -1, 0, O_TRUNC)]


def call_rules(pid: int) -> dict[str, list[Instruction]]:
    """Returns the tests of each call that is allowed only with certain arguments."""
    own_process = [argument(0), (EQUAL, 0, -1, pid)]
    stream = [argument(1), (AND, 0, 0, 0xF), (EQUAL, 0, -1, SOCK_STREAM)]
    return {
        "open": not_truncating(1),
        "openat": not_truncating(2),
        "clone": [
            *(argument(0), (AND, 0, 0, CLONE_THREAD), (EQUAL, 0, -1, CLONE_THREAD)),
            *(argument(0), (ANY_BIT, -1, 0, CLONE_NEW)),
        ],
        "kill": own_process,
        "tgkill": own_process,
        "fcntl": any_of(1, FCNTL),
        "ioctl": any_of(1, IOCTL),
        "prctl": any_of(0, PRCTL),
        "prlimit64": [argument(0), (EQUAL, 0, -1, 0)],
        "socketpair": [argument(0), (EQUAL, 0, -1, AF_UNIX), *stream],
        # No address: to whom a pair is connected, and nobody else.
        "sendto": [argument(4), (EQUAL, 0, -1, 0), argument(4, high=True), (EQUAL, 0, -1, 0)],
    }


def program(pid: int, machine: str | None = None) -> bytes:
    """Makes the filter of a process in the kernel's form (struct sock_filter).

    Raises:
        KeyError: the call numbers of this machine's architecture are not known.
    """
    table, architecture = TABLES[machine or os.uname().machine]
    out: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        # The same calls under other numbers (x32).
        (AT_LEAST, 0, 1, 0x40000000),
        (RETURN, 0, 0, ERRNO | EPERM),
    ]
    for name, number in table.items():
        if name not in (*CHECKED, *ABSENT, *REFUSED):
            out += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for name in ABSENT:
        out += [(EQUAL, 0, 1, table[name]), (RETURN, 0, 0, ERRNO | ENOSYS)]
    for name, tests in call_rules(pid).items():
        if name in table:
            block = allow_where(tests)
            out += [(EQUAL, 0, len(block), table[name]), *block]
    out.append((RETURN, 0, 0, ERRNO | EPERM))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in out)
