"""Damaged and hostile files of every kind: each is read, or refused with an error of ours; nothing else may happen.

    ./run python tests/fuzz.py [n=100000] [seed=0] [kind=NAME] [first=0]

n files are made from good ones and read in processes of their own. A process that dies, takes 20 s of CPU or 4 minutes for one
file, wants more memory than a small multiple of it, opens what it should not or ends in any error that is not an ArgosyError is a
finding. Prints a line for each kind; exit code 1 where something was found. An input is made again by its kind, seed and number:
`kind=NAME first=NUMBER n=1` reads just that one.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CPU_S = 20  # for one input; seconds of wall time say more of the machine's other work
WALL_S = 240  # and for one that waits: two chat templates, each in a process that gets 60 s to start and 60 to render
SLACK_BYTES = 24 << 20  # beside what the file may cost
TIMES = 64  # a file may cost so many times its own size: parsed JSON takes up to 40
LINES = 5  # of an error


@dataclass
class Found:
    """outcomes: how many of each. findings: number and what happened."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[int, str]] = field(default_factory=list)


# ---- in the process that reads


def input_of(kind: str, seed: int, number: int) -> dict[str, bytes]:
    """The files of one input."""
    from fuzz_inputs import KINDS

    draw = random.Random(f"{seed}:{kind}:{number}")
    good = KINDS[kind].good()
    return KINDS[kind].mutate(draw, draw.choice(good), draw.choice(good))


def outcome(kind: str, folder: Path, files: dict[str, bytes], limited: bool = True) -> str:
    """`read`, the name of our error, or what should not have been."""
    from fuzz_inputs import KINDS

    from argosy.core.errors import ArgosyError

    for name, data in files.items():
        (folder / name).write_bytes(data)
    if limited:
        allow(SLACK_BYTES + TIMES * sum(map(len, files.values())))
    try:
        KINDS[kind].read(folder)
        return "read"
    except ArgosyError as error:
        lines = len(str(error).splitlines())
        return type(error).__name__ if lines <= LINES else f"! an error of {lines} lines: {str(error)[:200]}"
    except BaseException as error:
        import traceback

        last = traceback.extract_tb(error.__traceback__)[-3:]
        return f"! {type(error).__name__}: {str(error)[:150]} at {' < '.join(f'{f.name}:{f.lineno}' for f in reversed(last))}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for name in files:
            (folder / name).unlink()


def allow(more: int) -> None:
    """Address space for so many bytes more than now."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.RLIM_INFINITY))


def watch(folder: Path) -> None:
    """Ends the process where it runs a program, opens a connection, unpickles, or writes outside of its folder."""
    ours = (str(folder), "/dev/null", "/proc/")

    def hook(event: str, words: tuple[Any, ...]) -> None:
        wrong = event in ("os.system", "os.exec", "os.posix_spawn", "socket.connect", "pickle.find_class", "os.fork")
        if event == "subprocess.Popen":
            wrong = not str(words[1][-1:] and words[1]).count("chat/child.py")
        if event == "open" and isinstance(words[0], str) and isinstance(words[1], str) and set(words[1]) & set("wax+"):
            wrong = not words[0].startswith(ours) and "__pycache__" not in words[0]
        if wrong:
            os.write(2, f"forbidden: {event} {words!r}"[:300].encode())
            os._exit(99)

    sys.addaudithook(hook)


def worker(jobs: list[tuple[str, int, int, int]]) -> None:
    """Reads inputs, and says before each which it is, after each what came of it."""
    from fuzz_inputs import KINDS

    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        warm(KINDS, jobs, folder)
        watch(folder)
        for kind, seed, first, stop in jobs:
            for number in range(first, stop):
                print(json.dumps([kind, number]), flush=True)
                signal.setitimer(signal.ITIMER_PROF, CPU_S)  # these signals end the process, wherever it is
                signal.setitimer(signal.ITIMER_REAL, WALL_S)
                result = outcome(kind, folder, input_of(kind, seed, number))
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.setitimer(signal.ITIMER_REAL, 0)
                print(json.dumps([kind, number, result]), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def warm(kinds: dict[str, Any], jobs: list[tuple[str, int, int, int]], folder: Path) -> None:
    """Good files are read first: they must be good, and what is imported or started on the way is so before it counts."""
    for kind in dict.fromkeys(job[0] for job in jobs):
        for place, files in enumerate(kinds[kind].good()):
            result = outcome(kind, folder, files, limited=False)
            if result != "read" and kind != "chat template":
                print(json.dumps([kind, -1 - place, f"! a good file is refused: {result}"]), flush=True)


# ---- in the process that asks


def campaign(jobs: list[tuple[str, int, int, int]], tell: Any = None) -> dict[str, Found]:
    """Every input of (kind, seed, first, stop), by as many processes as it takes."""
    results = {kind: Found() for kind, *_ in jobs}
    remaining = list(jobs)
    while remaining:
        remaining = run(remaining, results, tell)
    return results


def run(jobs: list[tuple[str, int, int, int]], results: dict[str, Found], tell: Any) -> list[tuple[str, int, int, int]]:
    """One process until it is done or dead; the jobs that are left."""
    environment = {
        **os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1",
        "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parent}", "RUST_BACKTRACE": "0",
    }  # fmt: skip
    words = [sys.executable, __file__, "worker", json.dumps(jobs)]
    at: tuple[str, int] | None = None
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        for line in process.stdout or ():
            kind, number, *entries = json.loads(line)
            at = None if entries else (kind, number)
            for text in entries:
                results[kind].outcomes[text if text[0] != "!" else "found"] += 1
                if text[0] == "!":
                    results[kind].findings.append((number, text[2:]))
            if entries and tell and (number + 1) % 1000 == 0:
                tell(f"{kind} {number + 1}")
        code = process.wait()
        errors.seek(0)
        last = errors.read()[-400:]
    if code == 0:
        return []
    if at is None:
        raise RuntimeError(f"the process that reads ended with {code}: {last}")
    kind, number = at
    fault = "hung" if code in (-signal.SIGALRM, -signal.SIGPROF) else f"died ({code})"
    results[kind].outcomes["found"] += 1
    results[kind].findings.append((number, f"{fault}: {' '.join(last.split())[-300:]}"))
    place = next(i for i, job in enumerate(jobs) if job[0] == kind and job[2] <= number < job[3])
    kind, seed, _, stop = jobs[place]
    return [(kind, seed, number + 1, stop), *jobs[place + 1 :]]


def table(results: dict[str, Found]) -> str:
    columns = ["read", "BadInput", "Damaged", "Unsupported", "found"]
    columns += sorted({name for result in results.values() for name in result.outcomes} - set(columns))
    lines = [f"{'kind':18}{'inputs':>9}" + "".join(f"{name:>13}" for name in columns)]
    for kind, result in results.items():
        cells = "".join(f"{result.outcomes[name]:>13,}" for name in columns)
        lines.append(f"{kind:18}{sum(result.outcomes.values()):>9,}{cells}")
    return "\n".join(lines)


def main(words: list[str]) -> int:
    from fuzz_inputs import SHARES

    options = dict(word.split("=", 1) for word in words)
    n, seed, first = int(options.get("n", 100_000)), int(options.get("seed", 0)), int(options.get("first", 0))
    shares = {options["kind"]: 100} if "kind" in options else SHARES
    begin = time.monotonic()
    jobs = [(kind, seed, first, first + max(1, n * share // 100)) for kind, share in shares.items()]
    results = campaign(
        jobs, lambda text: print(f"  {text}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    )
    print(table(results))
    count = sum(len(result.findings) for result in results.values())
    print(
        f"{sum(sum(result.outcomes.values()) for result in results.values()):,} inputs in {time.monotonic() - begin:.0f} s: "
        f"{count} findings"
    )
    for kind, result in results.items():
        alike: dict[str, list[int]] = {}
        for number, finding in result.findings:
            alike.setdefault(finding, []).append(number)
        for finding, numbers in alike.items():
            print(f"  {kind} seed={seed} first={numbers[0]}, {len(numbers)} in all: {finding}")
    return 1 if count else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker([tuple(job) for job in json.loads(sys.argv[2])])
    else:
        sys.exit(main(sys.argv[1:]))
