"""Ctrl-C at random moments of every verb that takes long: exit code 130, no traceback, out within three seconds.

    ./run python tests/campaign_interrupt.py [n=20] [seed=0] [verbs=train,generate] [within=SECONDS]

Each verb runs twice undisturbed, without and with a cache of compiled programs, which gives the seconds among which the moments
of its blows are drawn, unless `within` gives them. Then it is started n times in a session of its own, in turn without and with
the cache, and its process group gets SIGINT, as from a terminal. A command that ended before its blow is not counted, nor one
whose answer was complete: only the interpreter's teardown was left, and its exit code is 0.

Prints a line for each verb; exit code 1 where one was left with another code, a traceback or a segmentation fault, left a process
behind, or was out later than `OUT_S`. A run that trains saves its state first, and while XLA compiles it can only do so when the
compiler returns; then it must have said so within `SAID_S`. From `OUT_S` on its stack is printed every second, and one that is not
in the compiler counts as late. cpu_s: CPU seconds from the signal to the end, which tell a slow ending from a loaded machine.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from campaign_kill import SMALL

OUT_S = 3.0
SAID_S = 0.5
PATIENCE_S = 300
# `python -m argosy`, which prints its stack into the file of the first word at SIGUSR1.
WATCHED = (
    "import faulthandler, runpy, signal, sys; "
    "faulthandler.register(signal.SIGUSR1, file=open(sys.argv.pop(1), 'w'), all_threads=False); "
    "runpy.run_module('argosy', run_name='__main__', alter_sys=True)"
)
COMPILER = "in backend_compile"
# Verbs that end only when they are stopped; their blows come within this time.
ENDLESS_S = {"train": 12.0, "train with samples": 25.0, "sweep": 25.0}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Blow:
    """One Ctrl-C. after_s: after the start. out_s, cpu_s: from the signal to the end. code: None where the command had ended
    before. said: what was on stderr `SAID_S` after the signal, "" if the command was out by then. stack: where it was when it was
    late, if not in the compiler."""

    verb: str
    after_s: float
    out_s: float = 0.0
    cpu_s: float = 0.0
    code: int | None = None
    err: str = ""
    said: str = ""
    answer: str = ""
    is_orphaned: bool = False
    stack: str = ""

    @property
    def waits(self) -> bool:
        """Whether it said at once that it saves first."""
        return "stopping after this step" in self.said

    @property
    def was_over(self) -> bool:
        return self.code is None or (self.code == 0 and self.answer.endswith("\n"))

    @property
    def good(self) -> bool:
        quiet = not any(word in self.err for word in ("Traceback", "Segmentation", "ImportError", "Error:"))
        in_time = self.out_s <= OUT_S or (self.waits and not self.stack)
        return self.was_over or (self.code == 130 and quiet and in_time and not self.is_orphaned)


def commands(folder: Path) -> dict[str, list[str]]:
    """The verbs, each with words that make it take seconds. `{i}` is the number of the blow."""
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400_000)
    run, other = folder / "trained", folder / "other"
    words = ["train", "tiny", "steps=4", "data.max_bytes=100k", "eval.batches=0"]
    for where in (run, other):
        subprocess.run(command([*words, f"dir={where}"]), check=True, capture_output=True)
    return {
        "train": ["train", "tiny", *SMALL, "steps=100k", f"dir={folder}/run{{i}}"],
        "train with samples": ["train", "tiny", "steps=100k", "eval.every=5", "sample.every=7", f"dir={folder}/whole{{i}}"],
        "sweep": ["sweep", "tiny", "seed=0,1,2", "eval.batches=1", "sample.every=none", f"dir={folder}/sweep{{i}}"],
        "generate": ["generate", str(run), "hello", "max_tokens=20", "ignore_eos=true"],
        "convert": ["convert", str(run), f"{folder}/hub{{i}}"],
        "convert --check": ["convert", str(run), "--check", str(other)],
        "data prepare": ["data", "prepare", str(text), f"{folder}/prepared{{i}}"],
        "data tokenizer": ["data", "tokenizer", "stdlib", f"{folder}/vocabulary{{i}}", "vocab=4096"],
        "data inspect": ["data", "inspect", "tiny"],
        "models show": ["models", "show", "qwen3-next-80b-a3b"],
        "report": ["report", str(run)],
        "doctor": ["doctor"],
        "quickstart": ["quickstart", f"dir={folder}/quick{{i}}"],
    }


def command(words: list[str]) -> list[str]:
    return [sys.executable, "-P", "-m", "argosy", *words]


def start(words: list[str], folder: Path, cache: Path, errors: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    # Signals wait until the command takes them, as `./run` has it; a background job of a shell would ignore them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with errors.open("wb") as file, errors.with_name("stdout").open("wb") as answer:
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", WATCHED, str(errors.with_name("stacks")), *words],
                stdin=subprocess.DEVNULL, stdout=answer, stderr=file, env=environment,
                cwd=folder, start_new_session=True,
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def undisturbed_s(words: list[str], folder: Path, cache: Path) -> float:
    """Seconds that a command takes when nobody stops it."""
    begin = time.monotonic()
    errors = folder / "stderr"
    if code := start(words, folder, cache, errors).wait(PATIENCE_S):
        raise SystemExit(f"{' '.join(words)}: exit code {code}\n{errors.read_text()[-2000:]}")
    return time.monotonic() - begin


def blow(verb: str, words: list[str], after_s: float, folder: Path, cache: Path) -> Blow:
    """Starts the command, waits, sends SIGINT to its process group, and sees how it ends."""
    errors = folder / "stderr"
    process = start(words, folder, cache, errors)
    try:
        process.wait(after_s)
        return Blow(verb, after_s)
    except subprocess.TimeoutExpired:
        pass
    spent, before = cpu_s(process.pid), os.times()
    begin = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    stderr = ""
    try:
        try:
            code = process.wait(SAID_S)
        except subprocess.TimeoutExpired:
            stderr = errors.read_text(errors="replace")
            code = late(process)
        out_s, after = time.monotonic() - begin, os.times()
    finally:
        is_orphaned = end_group(process.pid)
    used = after.children_user + after.children_system - before.children_user - before.children_system
    files = errors.with_name("stdout"), errors, errors.with_name("stacks")
    answer, err, stacks = (path.read_text(errors="replace") for path in files)
    outside = [stack for stack in stacks.split("Stack (most recent")[1:] if COMPILER not in stack]
    return Blow(verb, after_s, out_s, used - spent, code, err, stderr, answer, is_orphaned, "\n".join(outside[:1]))


def late(process: subprocess.Popen[bytes]) -> int:
    """Waits for a process that is being stopped; once it is late, it prints its stack every second."""
    start, patience = time.monotonic(), OUT_S - SAID_S
    while True:
        try:
            return process.wait(patience)
        except subprocess.TimeoutExpired:
            if time.monotonic() - start > PATIENCE_S:
                raise
            process.send_signal(signal.SIGUSR1)
            patience = 1.0


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, without those of its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def end_group(group: int) -> bool:
    """Ends what is left of a process group; whether anything was."""
    # A child that got the same signal may need a moment.
    for _ in range(20):
        if not (alive := in_group(group)):
            return False
        time.sleep(0.05)
    for process in alive:
        os.kill(process, signal.SIGKILL)
    return True


def in_group(group: int) -> list[int]:
    """The processes of a group that are running: an orphan that ended may wait for init for ever."""
    alive = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:
            # It ended meanwhile.
            continue
        if int(its_group) == group and state != "Z":
            alive.append(int(path.parent.name))
    return alive


def campaign(folder: Path, n: int, seed: int = 0, verbs: tuple[str, ...] = (), within_s: float = 0.0) -> list[Blow]:
    """n blows at each verb."""
    chance, blows = random.Random(seed), []
    for verb, words in commands(folder).items():
        if verbs and verb not in verbs:
            continue
        warm = folder / f"cache of {verb}"
        if verb in ENDLESS_S or within_s:
            longest = [within_s or ENDLESS_S[verb]] * 2
        else:
            longest = [undisturbed_s([w.format(i=i) for w in words], folder, warm) for i in ("cold", "warm")]
        for i in range(n):
            cold = folder / f"cache {i}"
            # Python itself takes 30 ms to come to our code; nobody types faster than that.
            after_s = chance.uniform(0.05, longest[i % 2])
            its = [word.format(i=i) for word in words]
            blows.append(blow(verb, its, after_s, folder, warm if i % 2 else cold))
            shutil.rmtree(cold, ignore_errors=True)
            last = blows[-1]
            print(f"  {verb} after {last.after_s:.1f} s: {last.code}, {last.out_s:.2f} s", file=sys.stderr, flush=True)
        report([blow for blow in blows if blow.verb == verb], longest)
    return blows


def report(blows: list[Blow], longest: list[float]) -> None:
    landed = [blow for blow in blows if not blow.was_over]
    at_once = [blow for blow in landed if not blow.waits]
    saved = [blow for blow in landed if blow.waits]
    worst = max(at_once, key=lambda blow: blow.out_s, default=Blow("", 0.0))
    latest = max(saved, key=lambda blow: blow.out_s, default=None)
    then = f"; {len(saved)} saved first, slowest {latest.out_s:.2f} s (CPU {latest.cpu_s:.2f} s)" if latest else ""
    print(
        f"{blows[0].verb:15} {longest[0]:5.1f} s cold, {longest[1]:5.1f} s warm: {len(blows)} blows, {len(landed)} landed, "
        f"{sum(blow.good for blow in landed)} well, slowest out in {worst.out_s:.2f} s (CPU {worst.cpu_s:.2f} s){then}",
        flush=True,
    )
    for blow in blows:
        if not blow.good:
            print(
                f"  after {blow.after_s:.2f} s: exit code {blow.code}, out in {blow.out_s:.2f} s, CPU {blow.cpu_s:.2f} s"
                f"{', left a process' if blow.is_orphaned else ''}\n{blow.err[-2000:]}\n{blow.stack}",
                flush=True,
            )


def main() -> int:
    words = dict(word.split("=") for word in sys.argv[1:])
    verbs = tuple(filter(None, words.get("verbs", "").split(",")))
    with tempfile.TemporaryDirectory() as name:
        blows = campaign(Path(name), int(words.get("n", 20)), int(words.get("seed", 0)), verbs, float(words.get("within", 0)))
    return any(not blow.good for blow in blows)


if __name__ == "__main__":
    sys.exit(main())
