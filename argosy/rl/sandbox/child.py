"""The process in which untrusted code runs. It is started by path in a new interpreter, and no module imports it. Standard library
only.

The process gives up its rights one by one, tests that they are gone, and reports `ready`. Only then does it run the code, in this same
interpreter, because it may no longer start a program. After `ready` there is no way back: the kernel enforces every limit. The process
imports as little as possible, because imports take most of the time of a run.
"""

import ctypes
import marshal
import os
import resource
import struct
import sys
import types

sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..", "core", "process")))
import channel  # pyright: ignore[reportMissingImports]

sys.path.pop()
del sys.modules["channel"]

SIGKILL, SIGCHLD = 9, 17
LIBC = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 8, 22, 38
CLONE_NEWUSER = 0x10000000
# Linux's numbers of calls that libc does not wrap; those of Landlock are the same on every machine.
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
TIMER_CREATE, TIMER_SETTIME = {"x86_64": (222, 223), "aarch64": (107, 110)}.get(os.uname().machine, (0, 0))

# Rights of files in Landlock (linux/landlock.h): by the version that first knew them.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
TRUNCATE = 1 << 14
# Removing, and making folders, files and symbolic links; moving between folders.
CHANGE = 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 13
NET_TCP, SCOPES = 0b11, 0b11  # binding and connecting; abstract sockets and signals
# The first user id of those that nobody has. Each run has its own, so that the kernel counts its threads apart.
FIRST_UID = 0x70000000


class MissingProtection(Exception):
    """A protection that this machine lacks."""


def _require(result, problem):
    if result < 0:
        raise MissingProtection(f"{problem}: {os.strerror(ctypes.get_errno())}")
    return result


def prctl(option, *values):
    return LIBC.prctl(option, *(ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]))


# ---- threads


def count_apart(ways, keep_fsuid, folder):
    """Makes the limit on threads (RLIMIT_NPROC) count only the threads of this process. Where that is impossible, counts the threads
    that the user runs already.

    Args:
        ways: the ways to try, in order: a new user (`uid`), a user namespace (`namespace`), counting (`count`).
        keep_fsuid: whether files are still accessed as the old user (`own_uid`).
        folder: the folder of the code.

    Returns:
        The way that worked, and the number of threads and processes that the limit counts already.
    """
    for way in ways:
        if way == "uid" and os.geteuid() == 0 and own_uid(keep_fsuid, folder):
            return way, 1
        if way == "namespace" and LIBC.unshare(CLONE_NEWUSER) == 0:
            return way, 1
        if way == "count":
            return way, tasks_of(os.getuid())
    raise MissingProtection("threads cannot be limited: this process may neither change its user nor make a user namespace")


def own_uid(keep_fsuid, folder):
    """Changes this process to a new user, who owns the folder. With `keep_fsuid` files are still accessed with root's user id, because
    only root can read the standard library. Root's power over all other files is given up with the capabilities.
    """
    uid = FIRST_UID + os.getpid()
    try:
        prctl(PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        if not keep_fsuid:
            os.chown("main.py", uid, uid)
            os.chown(folder, uid, uid)
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError:
        return False
    if keep_fsuid:
        capabilities(1 << 7)  # CAP_SETUID
        LIBC.setfsuid(0)
        if LIBC.setfsuid(0) != 0:
            raise MissingProtection("the standard library is only for root, whose files a process of another user cannot read")
    return True


def capabilities(allowed):
    """Gives up all capabilities but these."""
    header = struct.pack("=Ii", 0x20080522, 0)
    _require(LIBC.capset(header, struct.pack("=6I", allowed, allowed, 0, 0, 0, 0)), "capabilities cannot be given up")


def tasks_of(uid):
    """Counts the threads of a user."""
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            pass
    if not count:
        raise MissingProtection("threads cannot be limited: /proc does not show those of this user")
    return count


def thread_starts():
    import _thread

    try:
        _thread.start_new_thread(int, ())
    except RuntimeError:
        return False
    return True


# ---- limits


def limit_resources(limits, counted):
    """Sets the resource limits of this process.

    Args:
        limits: the fields of `SandboxLimits`.
        counted: the number of threads that the limit on threads counts already.
    """
    mega = 1 << 20
    for which, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, limits["memory_mb"] * mega),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_FSIZE, int(limits["file_mb"] * mega)),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        most = resource.getrlimit(which)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(which, (value, value))
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (1, most))
    # The kernel lets some users have as many as they like.
    if thread_starts():
        raise MissingProtection("threads cannot be limited: the kernel does not count those of this user")
    allowed = counted + limits["threads"]
    if most != resource.RLIM_INFINITY and allowed > most:
        raise MissingProtection(f"this user may have {most} threads and processes, and {counted} are there")
    resource.setrlimit(resource.RLIMIT_NPROC, (allowed, allowed))


def end_at(seconds):
    """Makes the kernel kill this process after a time, however it handles signals. The process cannot undo that, because the filter of
    system calls refuses timers.
    """
    event = struct.pack("=QiI48x", 0, SIGKILL, 0)
    number = ctypes.c_int()
    _require(LIBC.syscall(TIMER_CREATE, 1, event, ctypes.byref(number)), "no timer")
    whole, part = int(seconds), int(seconds % 1 * 1e9)
    _require(LIBC.syscall(TIMER_SETTIME, number, 0, struct.pack("=qqqq", 0, 0, whole, max(part, not whole)), None), "no timer")


# ---- files


def landlock(reads, lists, writes):
    """Restricts access to the file system with Landlock.

    Args:
        reads: the paths that may be read.
        lists: the folders that may be listed.
        writes: the folder that may be changed.
    """
    version = LIBC.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    _require(version, "Landlock is not available")
    rights = sum(bits for since, bits in RIGHTS.items() if since <= version)
    fields = [rights, *([NET_TCP] if version >= 4 else []), *([SCOPES] if version >= 6 else [])]
    attribute = struct.pack(f"={len(fields)}Q", *fields)
    rules = _require(LIBC.syscall(LANDLOCK_CREATE_RULESET, attribute, ctypes.c_size_t(len(attribute)), 0), "no Landlock rules")
    grants = [(path, READ_FILE | READ_DIR) for path in reads]
    grants += [(path, READ_DIR) for path in lists]
    grants += [(writes, READ_FILE | READ_DIR | WRITE_FILE | TRUNCATE | CHANGE), ("/dev/null", READ_FILE | WRITE_FILE)]
    for path, access in grants:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # one that is not there needs no rule
        folder = os.path.isdir(path)
        access &= rights & (~0 if folder else READ_FILE | WRITE_FILE | EXECUTE | TRUNCATE)
        rule = struct.pack("=Qi", access, place)
        _require(LIBC.syscall(LANDLOCK_ADD_RULE, rules, 1, rule, 0), f"no Landlock rule for {path}")
        os.close(place)
    _require(LIBC.syscall(LANDLOCK_RESTRICT_SELF, rules, 0), "Landlock does not take effect")
    os.close(rules)


def seccomp(filter):
    program = filter.program(os.getpid())
    code = ctypes.create_string_buffer(program, len(program))
    attribute = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    if LIBC.prctl(PR_SET_SECCOMP, 2, attribute) < 0:
        raise MissingProtection(f"no filter of system calls: {os.strerror(ctypes.get_errno())}")


def attempt(filter):
    """Attempts forbidden operations, and fails if one succeeds. This detects a kernel that accepts every rule and enforces none, as
    emulators of Linux do."""
    for path in ("/", "/proc/self/environ", "/etc"):
        try:
            os.close(os.open(path, os.O_RDONLY))
        except OSError:
            continue
        raise MissingProtection(f"{path} can still be opened")
    table, _ = filter.TABLES[os.uname().machine]
    if LIBC.syscall(table["socket"], 1, 1, 0) >= 0:
        raise MissingProtection("sockets can still be made")
    # fork, or the same by clone: only its end signal is asked for.
    pid = LIBC.syscall(table["fork"]) if "fork" in table else LIBC.syscall(table["clone"], SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    if pid > 0:
        os.waitpid(pid, 0)
        raise MissingProtection("processes can still be made")


# ---- the code


def restrict(limits):
    """Gives up every right except access to the folder of the code."""
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import system_calls as filter

    sys.path.pop()
    # Loaded while that is possible: the end of a thread needs it.
    try:
        ctypes.CDLL("libgcc_s.so.1")
    except OSError:
        pass
    way, counted = count_apart(limits["ways"], limits["keep_fsuid"], limits["folder"])
    limit_resources(limits["limits"], counted)
    _require(prctl(PR_SET_NO_NEW_PRIVS, 1), "it could gain rights")
    capabilities(0)
    # A change of user would undo this.
    _require(prctl(PR_SET_PDEATHSIG, SIGKILL), "it would outlive its parent")
    if os.getppid() != limits["parent"]:
        os._exit(0)
    end_at(limits["last_s"])
    landlock(limits["reads"], limits["lists"], limits["folder"])
    seccomp(filter)
    attempt(filter)
    if way == "count" and not thread_starts():
        raise MissingProtection("threads cannot be limited: others of this user start and end meanwhile")


def run_code_file(folder):
    """Runs the file main.py of the folder, as Python runs a script."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    module.__dict__["__file__"] = "main.py"
    sys.argv, sys.path = ["main.py"], [folder, *sys.path]
    sys.dont_write_bytecode = True
    try:
        with open("main.py", "rb") as file:
            code = compile(file.read(), "main.py", "exec")
        exec(code, module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.__excepthook__(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def run_sandbox(descriptor):
    parent = channel.Channel(descriptor)
    setup = marshal.loads(parent.receive())
    os.chdir(setup["folder"])
    try:
        restrict(setup)
    except (MissingProtection, OSError, ValueError, KeyError) as error:
        parent.send((str(error) or type(error).__name__).encode())
        os._exit(1)
    parent.send(b"ready")
    os.close(descriptor)
    run_code_file(setup["folder"])


if __name__ == "__main__":
    run_sandbox(int(sys.argv[1]))
