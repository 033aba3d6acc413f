"""Untrusted code, and what it may try. Each attempt prints `escaped` where it succeeds, as it does outside the sandbox: the control."""

import os
import re
import shutil
import struct
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import can_confine

from argosy.core.errors import BadInput, Unsupported
from argosy.core.process import channel
from argosy.rl import sandbox
from argosy.rl.sandbox import DEFAULT, SandboxLimits, run_code
from argosy.rl.sandbox import process as sandbox_process
from argosy.rl.sandbox.system_calls import TABLES, program

linux = pytest.mark.skipif(not can_confine(), reason="needs Linux with Landlock")
QUICK = SandboxLimits(cpu_s=4, wall_s=60)


def plain(code: str, folder: Path, **environment: str) -> str:
    """What the same code prints in an ordinary interpreter: the control of each attempt."""
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, cwd=folder, env=env).stdout


def run(code: str, limits: SandboxLimits = QUICK, stdin: str = ""):
    return run_code(textwrap.dedent(code), stdin, limits)


# ---- ordinary programs


@linux
def test_it_is_available():
    assert sandbox.available() == []


@linux
def test_a_program_reads_and_writes():
    completed = run("n = int(input())\nprint(n + 1)\nimport sys\nprint('to stderr', file=sys.stderr)", stdin="41\n")
    assert (completed.stdout, completed.stderr, completed.exit_code) == ("42\n", "to stderr\n", 0)
    assert (completed.timed_out, completed.killed_by, completed.capped) == (False, None, False)
    assert 0 < completed.seconds < 60


@linux
@pytest.mark.parametrize(
    ("code", "exit_code", "last"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("x = (", 1, "SyntaxError: '(' was never closed"),
        ("import numpy", 1, "ModuleNotFoundError: No module named 'numpy'"),
        ("raise SystemExit('so')", 1, "so"),
        ("assert __name__ == '__main__'; import sys; assert sys.argv == ['main.py']", 0, ""),
    ],
)
def test_a_program_ends_as_it_would_alone(code, exit_code, last):
    completed = run(code)
    assert completed.exit_code == exit_code
    assert completed.stderr.strip().endswith(last)
    assert "sandbox" not in completed.stderr
    if exit_code == 1 and "Error" in last and "Syntax" not in last:
        assert 'File "main.py", line 1, in <module>' in completed.stderr


@linux
def test_a_program_uses_its_folder_and_the_standard_library():
    """What programs of competitions and lessons do: files, threads with a large stack, an event loop, databases, big numbers."""
    completed = run("""
        import asyncio, collections, concurrent.futures, ctypes, decimal, heapq, itertools, json, os, random, shutil, sqlite3, ssl
        import sys, tempfile, threading, time, zlib
        os.makedirs("a/b")
        with open("a/b/x", "w") as file: file.write("text")
        os.rename("a/b/x", "a/y"); shutil.copyfile("a/y", "z"); os.symlink("z", "link"); os.truncate if 0 else None
        assert open("link").read() == "text" and sorted(os.listdir()) == ["a", "link", "main.py", "z"]
        with tempfile.TemporaryFile() as file: file.write(b"x"); file.truncate(0)
        sys.setrecursionlimit(10**6); threading.stack_size(128 << 20)
        def deep(n): return 0 if n == 0 else 1 + deep(n - 1)
        found = []
        thread = threading.Thread(target=lambda: found.append(deep(20000))); thread.start(); thread.join()
        threading.stack_size(0)
        assert found == [20000]
        async def later(n): await asyncio.sleep(0.01); return n
        assert asyncio.run(asyncio.wait_for(later(3), 1)) == 3
        with concurrent.futures.ThreadPoolExecutor(4) as pool: assert sum(pool.map(int, "1234")) == 10
        db = sqlite3.connect("db"); db.execute("create table t (x)"); db.execute("insert into t values (1)"); db.commit()
        assert db.execute("select * from t").fetchall() == [(1,)]
        assert time.tzname == ("UTC", "UTC") and random.random() < 1 and os.cpu_count() >= 1
        print(2 ** 200 % 1000007, decimal.Decimal(2).sqrt(), hash("a"))
    """)
    assert (completed.stderr, completed.exit_code) == ("", 0)
    assert completed.stdout.startswith(f"{2**200 % 1000007} 1.414213562373095048801688724 ")
    assert run("print(hash('a'))").stdout == run("print(hash('a'))").stdout


@linux
def test_nothing_stays_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run("""
        import os
        for name in ("a", "b"): open(name, "w").write("x")
        os.mkdir("closed", 0)
        for _ in range(900):
            os.mkdir("deep" * 20); os.chdir("deep" * 20)
    """)
    assert list(tmp_path.iterdir()) == []


@linux
def test_many_at_once():
    outputs = {}
    threads = [threading.Thread(target=lambda i=i: outputs.update({i: run(f"print({i})").stdout})) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {i: f"{i}\n" for i in range(6)}


# ---- attempts


ATTEMPTS = {
    "a system file": "print(len(open('/etc/passwd').read()) > 0 and 'escaped')",
    "a file of the user": "print(open(FILE).read())",
    "a folder": "import os; os.listdir('/'); print('escaped')",
    "the home folder": "import os, pwd; os.listdir(HOME); print('escaped')",
    "its parent's environment": "print('escaped' if b'PATH' in open(f'/proc/{PARENT}/environ', 'rb').read() else '')",
    "its own process's files": "print('escaped' if open('/proc/self/status').read() else '')",
    "its parent's memory": "open(f'/proc/{PARENT}/mem', 'rb'); print('escaped')",
    "through a symbolic link": "import os; os.symlink(FILE, 'link'); print(open('link').read())",
    "through a symbolic link to a folder": "import os; os.symlink(os.path.dirname(FILE), 'l'); print(open('l/secret').read())",
    "through a hard link": "import os; os.link(FILE, 'link'); print(open('link').read())",
    "by a path with dots": "import os; print(open(os.path.relpath(FILE)).read())",
    "by a change of folder": "import os; os.chdir(os.path.dirname(FILE)); print(open('secret').read())",
    "mapped into memory": "import mmap, os; print(mmap.mmap(os.open(FILE, os.O_RDONLY), 0, prot=mmap.PROT_READ)[:])",
    "by the system call": """
        import ctypes, os
        libc = ctypes.CDLL(None)
        fd = libc.open(FILE.encode(), 0)
        buffer = ctypes.create_string_buffer(64)
        libc.read(fd, buffer, 64)
        print(buffer.value.decode())
    """,
    "writing elsewhere": "open(OTHER + '/new', 'w').write('x'); print('escaped')",
    "writing to a file": "open(FILE, 'a').write('x'); print('escaped')",
    "cutting a file off": "import os; os.truncate(FILE, 100); print('escaped')",
    "cutting a file off while reading": "import os; open('f', 'w'); os.open('f', os.O_RDONLY | os.O_TRUNC); print('escaped')",
    "removing a file": "import os; os.remove(OTHER + '/victim'); print('escaped')",
    "moving a file in": "import os; os.rename(OTHER + '/victim', 'mine'); print('escaped')",
    "moving a file out": "import os; open('f', 'w'); os.rename('f', OTHER + '/f'); print('escaped')",
    "a folder elsewhere": "import os; os.mkdir(OTHER + '/d'); print('escaped')",
    "a mode": "import os; os.chmod(FILE, 0o600); print('escaped')",
    "a mode of the library": "import os; f = os.open(os.__file__, os.O_RDONLY); os.fchmod(f, os.fstat(f).st_mode); print('escaped')",
    "an owner": "import os; os.chown(FILE, -1, -1); print('escaped')",
    "times": "import os; os.utime(FILE); print('escaped')",
    "attributes": "import os; os.listxattr(FILE); print('escaped')",
    "TCP": "import socket; socket.socket(socket.AF_INET, socket.SOCK_STREAM); print('escaped')",
    "UDP": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9)); print('escaped')",
    "TCP over IPv6": "import socket; socket.socket(socket.AF_INET6); print('escaped')",
    "a Unix socket": "import socket; socket.socket(socket.AF_UNIX).bind(OTHER + '/socket'); print('escaped')",
    "an abstract Unix socket": "import socket, os; socket.socket(socket.AF_UNIX).bind(f'\\0argosy{os.getpid()}'); print('escaped')",
    "netlink": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); print('escaped')",
    "datagrams of a pair": "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); print('escaped')",
    "a socket by the system call": "import ctypes; print('escaped' if ctypes.CDLL(None).syscall(NR['socket'], 2, 1, 0) >= 0 else '')",
    "a system call of 32 bits": """
        import ctypes, mmap
        # mov eax, 20 (getpid); int 0x80; ret
        code = mmap.mmap(-1, 4096, prot=7)
        code.write(bytes.fromhex("b814000000cd80c3"))
        found = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
        print("escaped" if found > 0 else "")
    """,
    "fork": "import os; pid = os.fork(); pid or os._exit(0); os.waitpid(pid, 0); print('escaped')",
    "fork by the system call": """
        import ctypes, os
        pid = ctypes.CDLL(None).syscall(NR["clone"], 17, 0, 0, 0, 0)
        if pid == 0: os._exit(0)
        print("escaped" if pid > 0 else "")
    """,
    "fork by the library": "import ctypes, os; pid = ctypes.CDLL(None).fork(); pid or os._exit(0); print('escaped' if pid > 0 else '')",
    "a program": "import subprocess; print(subprocess.run(['/bin/echo', 'escaped'], capture_output=True, text=True).stdout)",
    "a program in its place": "import os; os.execv('/bin/echo', ['echo', 'escaped'])",
    "a process of multiprocessing": """
        import multiprocessing
        p = multiprocessing.get_context("fork").Process(target=print, args=("escaped",)); p.start(); p.join()
    """,
    "a daemon that outlives it": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                print("escaped", flush=True)
                time.sleep(0.2)
            os._exit(0)
        os.wait(); time.sleep(0.3)
    """,
    "leaving its session": "import os; os.setpgid(0, 0); print('escaped')",
    "a signal to its parent": "import os; os.kill(PARENT, 0); print('escaped')",
    "a signal by queue": "import ctypes; print('escaped' if ctypes.CDLL(None).sigqueue(PARENT, 0, None) == 0 else '')",
    "a signal by descriptor": "import os; os.pidfd_open(PARENT); print('escaped')",
    "a signal that the kernel sends": """
        import fcntl, os
        r, w = os.pipe()
        fcntl.fcntl(r, 8, PARENT)  # F_SETOWN
        print("escaped")
    """,
    "the kind of that signal": "import fcntl, os; fcntl.fcntl(os.pipe()[0], 10, 9); print('escaped')",
    "tracing its parent": "import ctypes; print('escaped' if ctypes.CDLL(None).ptrace(0x4206, PARENT, 0, 0) == 0 else '')",
    "reading its parent's memory": """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        libc.process_vm_readv(PARENT, None, 0, None, 0, 0)
        print("escaped" if ctypes.get_errno() == 0 else "")
    """,
    "a namespace": "import ctypes; print('escaped' if ctypes.CDLL(None).unshare(0x10000000) == 0 else '')",
    "memory that no limit counts": "import os; os.memfd_create('x'); print('escaped')",
    "shared memory": "import ctypes; print('escaped' if ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0 else '')",
    "a bound on its parent's death": "import ctypes; print('escaped' if ctypes.CDLL(None).prctl(1, 0) == 0 else '')",
    "a timer": """
        import ctypes
        print("escaped" if ctypes.CDLL(None).timer_create(1, None, ctypes.create_string_buffer(8)) == 0 else "")
    """,
    "io_uring": """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(425, 1, None)
        print("escaped" if ctypes.get_errno() == 14 else "")
    """,
    "keys": "import ctypes; print('escaped' if ctypes.CDLL(None).syscall(NR_KEYCTL, 0, -3, 1) > 0 else '')",
    "watching files": """
        import ctypes
        libc = ctypes.CDLL(None)
        print("escaped" if libc.inotify_add_watch(libc.inotify_init(), FILE.encode(), 4095) >= 0 else "")
    """,
    "packages beside the library": "import os; print('escaped' if open(PACKAGE).read() is not None else '')",
    "its environment": "import os; print('escaped' if 'SECRET' in os.environ else '')",
    "more memory": "import resource; s, h = resource.getrlimit(resource.RLIMIT_AS); print('escaped' if h == -1 else '')",
    "another's limits": "import resource; resource.prlimit(PARENT, resource.RLIMIT_NOFILE); print('escaped')",
    "its own priority": "import os; os.sched_setaffinity(0, os.sched_getaffinity(0)); print('escaped')",
}  # fmt: skip


@linux
@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_fails_here_and_succeeds_elsewhere(name, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("escaped")
    tmp_path.chmod(0o777)
    secret.chmod(0o666)
    (tmp_path / "victim").write_text("x")
    package = next(path for path in Path(pytest.__file__).parents[1].glob("pytest/__init__.py"))
    names = {
        "FILE": str(secret), "OTHER": str(tmp_path), "HOME": str(Path.home()), "PARENT": os.getpid(), "NR_KEYCTL": 250,
        "NR": TABLES[os.uname().machine][0], "PACKAGE": str(package),
    }  # fmt: skip
    code = textwrap.dedent(ATTEMPTS[name])

    code = "".join(f"{key} = {value!r}\n" for key, value in names.items()) + code
    before = (secret.stat().st_mode, secret.stat().st_mtime_ns)
    completed = run(code)
    assert "escaped" not in completed.stdout, completed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "victim"]
    assert (secret.stat().st_mode, secret.stat().st_mtime_ns, secret.read_text()) == (*before, "escaped")
    assert completed.killed_by == ("SIGSYS" if name == "a system call of 32 bits" else None)
    inside = tmp_path / "control"
    inside.mkdir()
    assert "escaped" in plain(code, inside, SECRET="x"), "the control does not succeed"


# ---- limits


@linux
def test_an_endless_loop_ends_after_its_seconds_of_cpu():
    completed = run("print('began', flush=True)\nwhile True: pass", SandboxLimits(cpu_s=1, wall_s=120))
    assert (completed.timed_out, completed.killed_by, completed.exit_code, completed.stdout) == (True, "cpu", -9, "began\n")


@linux
@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(60)",
        # Signals that can be ignored are, blocked or not.
        """
        import signal, time
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: time.sleep(1)
        """,
        # Output closed: nothing to be read shows that it still runs.
        "import os, time\nos.close(1); os.close(2)\ntime.sleep(60)",
    ],
)
def test_what_waits_ends_after_its_time(code):
    start = time.monotonic()
    completed = run(code, SandboxLimits(wall_s=0.5))
    assert (completed.timed_out, completed.killed_by, completed.exit_code) == (True, "wall", -9)
    assert 0.5 <= completed.seconds < 5
    assert time.monotonic() - start < 20


@linux
def test_memory():
    code = "data = bytearray(N << 20)\nprint(len(data) >> 20)"
    assert run(code.replace("N", "100")).stdout == "100\n"
    completed = run(code.replace("N", "600"))
    assert completed.exit_code == 1
    assert completed.stderr.endswith("MemoryError\n")
    assert run(code.replace("N", "600"), SandboxLimits(memory_mb=1024, wall_s=60)).stdout == "600\n"
    bomb = run("x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert bomb.stderr.endswith("MemoryError\n")


@linux
def test_threads():
    code = """
        import threading
        end, count = threading.Event(), 0
        try:
            while count < 50:
                threading.Thread(target=end.wait).start()
                count += 1
        except RuntimeError as error: print(error)
        end.set()
        print(count)
    """
    assert run(code, SandboxLimits(threads=8)).stdout == "can't start new thread\n8\n"
    assert run(code, SandboxLimits(threads=60, memory_mb=2048)).stdout == "50\n"


@linux
def test_threads_that_need_no_memory():
    """By the system call, each with the same small stack, so that only their number is limited."""
    completed = run("""
        import ctypes, mmap
        libc = ctypes.CDLL(None)
        # pause for ever: mov eax, 34; syscall; jmp -9
        code = mmap.mmap(-1, 4096, prot=7); code.write(bytes.fromhex("b8220000000f05ebf7"))
        function = ctypes.addressof(ctypes.c_char.from_buffer(code))
        stack = mmap.mmap(-1, 4096); top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + 4000
        libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        import os
        made = 0
        while made < 1000 and libc.clone(function, top, 0x10F00, None) > 0: made += 1
        print(made, flush=True)
        os._exit(0)
    """, SandboxLimits(threads=8))  # fmt: skip
    assert completed.stdout == "8\n"


@linux
def test_output_is_capped_and_says_so():
    completed = run("import sys\nprint('x' * 10)\nsys.stderr.write('e' * 5000)", SandboxLimits(output_kb=1))
    assert (completed.stdout, completed.stderr, completed.capped) == ("x" * 10 + "\n", "e" * 1024, True)
    assert not run("print('x' * 1023)", SandboxLimits(output_kb=1)).capped
    endless = run("while True: print('x' * 1000)", SandboxLimits(cpu_s=1, wall_s=120, output_kb=4))
    assert len(endless.stdout) == 4096
    assert (endless.capped, endless.killed_by) == (True, "cpu")
    assert run("import os; os.write(1, b'\\xff\\n')").stdout == "\ufffd\n"


@linux
def test_sizes_of_files():
    code = "f = open('f', 'wb')\nf.write(b'x' * (N << 20)); f.flush(); print('written')"
    assert run(code.replace("N", "1")).stdout == "written\n"
    completed = run(code.replace("N", "3"), SandboxLimits(file_mb=2))
    assert "File too large" in completed.stderr
    assert completed.stdout == ""


FILL = {
    "sizes": ("for i in range(N): open(f'{i}', 'wb').write(b'x' * (1 << 20))", SandboxLimits(folder_mb=10), 20),
    "number": ("for i in range(N): open(f'{i}', 'w')", SandboxLimits(files=200), 300),
    "depth": ("import os\nfor i in range(N): os.mkdir('d' * 200); os.chdir('d' * 200)", DEFAULT, 300),
}


@linux
@pytest.mark.parametrize("name", FILL)
def test_what_the_folder_holds(name):
    code, limits, many = FILL[name]
    completed = run(code.replace("N", str(many)) + "\nimport time; time.sleep(60)", replace(limits, wall_s=60))
    assert (completed.killed_by, completed.timed_out) == ("folder", False)
    assert completed.seconds < 30
    assert run(code.replace("N", "5"), limits).exit_code == 0


@linux
def test_room_that_is_not_written_to(tmp_path):
    code = "import os\nos.posix_fallocate(os.open('f', os.O_CREAT | os.O_RDWR), 0, 4096)"
    assert "PermissionError" in run(code).stderr
    assert not plain(code, tmp_path)
    assert (tmp_path / "f").stat().st_size == 4096


@linux
def test_open_files():
    code = "files = [open('main.py') for _ in range(N)]\nprint(len(files))"
    assert run(code.replace("N", "40")).stdout == "40\n"
    assert "Too many open files" in run(code.replace("N", "80")).stderr


@linux
def test_input_that_is_not_read_and_input_that_is_large():
    assert run("print('ok')", stdin="x" * 1_000_000).stdout == "ok\n"
    assert run("import sys\nprint(len(sys.stdin.read()))", stdin="x" * 1_000_000).stdout == "1000000\n"
    assert "EOFError" in run("input()").stderr


@linux
def test_a_crash_of_the_interpreter():
    completed = run("import ctypes; ctypes.string_at(0)")
    assert (completed.killed_by, completed.exit_code, completed.timed_out) == ("SIGSEGV", -11, False)
    assert run("import os; os.abort()").killed_by == "SIGABRT"


@linux
def test_it_ends_with_its_parent(tmp_path):
    """Code that sleeps, whose parent is killed."""
    script = """
        import os, sys
        from argosy.rl.sandbox import SandboxLimits, run_code
        run_code("import os, time\\nopen('pid', 'w').write(str(os.getpid()))\\ntime.sleep(60)", limits=SandboxLimits(wall_s=100))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)})
    until, files = time.monotonic() + 30, []
    while time.monotonic() < until and not (files and files[0].read_text()):
        files = list(tmp_path.glob("*/pid"))
        time.sleep(0.02)
    pid = int(files[0].read_text())
    os.kill(pid, 0)
    process.kill()
    process.wait()
    until = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


# ---- refusals


@linux
@pytest.mark.parametrize(
    ("removed", "expected"),
    [
        ('landlock(limits["reads"], limits["lists"], limits["folder"])', "/ can still be opened"),
        ("seccomp(filter)", "sockets can still be made"),
        ("resource.setrlimit(resource.RLIMIT_NPROC, (1, most))", "threads cannot be limited"),
    ],
)
def test_a_missing_protection_is_found_and_nothing_runs(removed, expected, tmp_path, monkeypatch):
    # What is known of this machine is known before.
    assert not sandbox.available()
    source = sandbox_process.CHILD.read_text()
    assert source.count(f"    {removed}\n") == 1
    folder, room = tmp_path / "rl" / "sandbox", tmp_path / "core" / "process"
    for copied, file in ((folder, sandbox_process.CHILD.with_name("system_calls.py")), (room, Path(channel.__file__))):
        copied.mkdir(parents=True)
        shutil.copy(file, copied)
    (folder / "child.py").write_text(source.replace(f"    {removed}\n", "    pass\n"))
    monkeypatch.setattr(sandbox_process, "CHILD", folder / "child.py")
    with pytest.raises(Unsupported) as caught:
        run("print('ran')")
    assert expected in caught.value.what


@linux
def test_a_way_that_the_kernel_does_not_count_is_refused(monkeypatch):
    """The count of the user's threads does not bind root, who may have as many as it likes."""
    if os.geteuid():
        pytest.skip("for root")
    monkeypatch.setattr(sandbox, "WAYS", ("count",))
    with pytest.raises(Unsupported, match="the kernel does not count those of this user"):
        run("print('ran')")


@pytest.mark.parametrize(("system", "machine", "expected"), [("darwin", "arm64", "not Linux"), ("linux", "riscv64", "riscv64")])
def test_other_systems_are_refused(monkeypatch, system, machine, expected):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("x", "x", "x", "x", machine)))
    sandbox._try.cache_clear()
    try:
        assert len(sandbox.available()) == 1
        with pytest.raises(Unsupported, match=expected):
            run_code("print(1)")
    finally:
        monkeypatch.undo()
        sandbox._try.cache_clear()


@pytest.mark.parametrize("limits", [{"cpu_s": 0}, {"wall_s": -1}, {"memory_mb": 8}, {"threads": -1}, {"output_kb": 0}])
def test_limits_that_limit_nothing(limits):
    with pytest.raises(BadInput, match=next(iter(limits))):
        SandboxLimits(**limits)


# ---- the filter


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's headers")
@pytest.mark.parametrize("machine", TABLES)
def test_numbers_of_calls_are_those_of_the_kernels_headers(machine):
    header = Path("/usr/include/asm-generic/unistd.h" if machine == "aarch64" else "/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("no kernel headers")
    numbers = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text(), re.MULTILINE)
    kernel_numbers = {("newfstatat" if name == "fstatat" else name): int(number) for name, number in numbers}
    assert {name: kernel_numbers.get(name) for name in TABLES[machine][0]} == TABLES[machine][0]


ALLOWED, EPERM, ENOSYS, KILLED = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def decision_of(machine: str, name: str, *arguments: int, number: int | None = None, architecture: int | None = None) -> int:
    """What the filter of a process 77 decides on a call, by the rules of `struct seccomp_data` and classic BPF."""
    number = TABLES[machine][0][name] if number is None else number
    six = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=iIQ6Q", number, architecture or ARCHITECTURE[machine], 0, *six)
    accumulator, at = 0, 0
    steps = list(struct.iter_unpack("=HBBI", program(77, machine)))
    while True:
        code, yes, no, k = steps[at]
        at += 1
        if code == 0x20:
            accumulator = int.from_bytes(data[k : k + 4], "little")
        elif code == 0x54:
            accumulator &= k
        elif code == 0x06:
            return k
        else:
            at += yes if {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[code] else no


THREAD = 0x3D0F00  # the flags of glibc's pthread_create
CALLS = [
    ("read", (0,), ALLOWED),
    ("exit_group", (0,), ALLOWED),
    ("socket", (1, 1, 0), EPERM),
    ("clone3", (0, 88), ENOSYS),
    ("openat2", (0,), ENOSYS),
    ("clone", (THREAD,), ALLOWED),
    ("clone", (17,), EPERM),
    ("clone", (0x4111,), EPERM),
    ("clone", (THREAD & ~0x10000,), EPERM),
    ("clone", (THREAD | 0x20000000,), EPERM),
    ("clone", (THREAD | 0x80,), EPERM),
    ("kill", (77, 9), ALLOWED),
    ("kill", (78, 9), EPERM),
    ("kill", (-1 % 2**64, 9), EPERM),
    ("kill", (0, 9), EPERM),
    ("tgkill", (77, 78, 6), ALLOWED),
    ("tgkill", (1, 1, 6), EPERM),
    ("openat", (0, 0, 0o102101), ALLOWED),
    ("openat", (0, 0, 0o1000), EPERM),
    ("openat", (0, 0, 0o2000000), ALLOWED),
    ("fcntl", (3, 3), ALLOWED),
    ("fcntl", (3, 1030), ALLOWED),
    ("fcntl", (3, 8), EPERM),
    ("fcntl", (3, 10), EPERM),
    ("fcntl", (3, 15), EPERM),
    ("ioctl", (0, 0x5401), ALLOWED),
    ("ioctl", (0, 0x5412), EPERM),
    ("ioctl", (0, 0x8901), EPERM),
    ("prctl", (15,), ALLOWED),
    ("prctl", (1, 0), EPERM),
    ("prctl", (4, 1), EPERM),
    ("prlimit64", (0, 7), ALLOWED),
    ("prlimit64", (78, 7), EPERM),
    ("socketpair", (1, 0x80801), ALLOWED),
    ("socketpair", (1, 2), EPERM),
    ("socketpair", (2, 1), EPERM),
    ("sendto", (3, 0, 1, 0, 0, 0), ALLOWED),
    ("sendto", (3, 0, 1, 0, 5, 110), EPERM),
    ("sendto", (3, 0, 1, 0, 5 << 32, 110), EPERM),
]


@pytest.mark.parametrize("machine", TABLES)
@pytest.mark.parametrize(("name", "arguments", "expected"), CALLS)
def test_the_filter_decides_by_arguments(machine, name, arguments, expected):
    """Also where something else would refuse the call on this machine, and for a machine that is not at hand."""
    assert decision_of(machine, name, *arguments) == expected


@pytest.mark.parametrize("machine", TABLES)
def test_the_filter_refuses_what_it_does_not_know(machine):
    allowed = {number for name, number in TABLES[machine][0].items() if decision_of(machine, name) == ALLOWED}
    for number in [*range(600), 2**30, 2**30 + 1]:
        if number not in allowed and number not in TABLES[machine][0].values():
            assert decision_of(machine, "", number=number) == EPERM
    other = next(value for name, value in ARCHITECTURE.items() if name != machine)
    assert decision_of(machine, "read", architecture=other) == KILLED
    # Never allowed, whatever their arguments; by their names in the headers of both machines.
    dangerous = {
        "x86_64": """57 58 59 322 41 42 49 50 101 310 311 90 91 268 92 93 132 280 235 165 272 308 319 425 426 321 298 222 223 434 424
            64 29 30 76 188 317 250 253""",
        "aarch64": """221 281 198 203 200 201 117 270 271 52 53 54 55 88 40 97 268 279 425 426 280 241 107 110 434 424 190 194 196 45
            5 277 219 26""",
    }[machine]
    assert not allowed & {int(number) for number in dangerous.split()}


def test_open_as_old_programs_do():
    assert decision_of("x86_64", "open", 0, 0o1000) == EPERM
    assert decision_of("x86_64", "open", 0, 0o1) == ALLOWED


def test_the_filter_of_either_machine_jumps_only_forward_and_inside():
    for machine in TABLES:
        steps = list(struct.iter_unpack("=HBBI", program(1234, machine)))
        assert len(steps) < 4096
        for at, (kind, yes, no, _) in enumerate(steps):
            if kind & 7 == 5:
                assert at + 1 + max(yes, no) < len(steps)
        assert steps[-1][0] == 6
