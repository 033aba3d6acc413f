"""Ctrl-C at random moments of every verb that takes long: exit code 130, no traceback, out within three seconds.

    ./run python tests/campaign_interrupt.py [n=20] [seed=0]

Each verb is started n times in a session of its own and sent SIGINT after a random share of the time that it takes undisturbed. A
command that ended before is not counted. Prints a line for each verb; exit code 1 where one was left with another code, a
traceback, a segmentation fault, or later than `OUT_S`. While XLA compiles, training is out as soon as it returns; what is
under way is said at once.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from campaign_kill import SMALL

OUT_S = 3.0
PATIENCE_S = 300


@dataclass(frozen=True)
class Blow:
    """One Ctrl-C. after_s: after the start. out_s: from the signal to the end. code: None where the command had ended before."""

    verb: str
    after_s: float
    out_s: float
    code: int | None
    err: str

    @property
    def good(self) -> bool:
        quiet = not any(word in self.err for word in ("Traceback", "Segmentation", "ImportError"))
        return self.code is None or (self.code == 130 and quiet and self.out_s <= OUT_S)


def commands(folder: Path) -> dict[str, list[str]]:
    """The verbs, each with words that make it take seconds. `{i}` is the number of the blow."""
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400_000)
    run = folder / "trained"
    words = ["train", "tiny", "steps=4", "data.max_bytes=100k", "eval.batches=0", f"dir={run}"]
    subprocess.run(command(words), check=True, capture_output=True)
    return {
        "train": ["train", "tiny", *SMALL, "steps=100k", f"dir={folder}/run{{i}}"],
        "generate": ["generate", str(run), "hello", "max_tokens=20", "ignore_eos=true"],
        "convert": ["convert", str(run), f"{folder}/hub{{i}}"],
        "data prepare": ["data", "prepare", str(text), f"{folder}/prepared{{i}}"],
        "quickstart": ["quickstart", f"dir={folder}/quick{{i}}"],
    }


def command(words: list[str]) -> list[str]:
    return [sys.executable, "-P", "-m", "argosy", *words]


def blow(verb: str, words: list[str], after_s: float, folder: Path) -> Blow:
    """Starts the command, waits, sends SIGINT, and sees how it ends."""
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    errors = folder / "stderr"
    with errors.open("wb") as file:
        process = subprocess.Popen(
            command(words), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file, env=environment,
            cwd=folder, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(after_s)
            return Blow(verb, after_s, 0.0, None, "")
        except subprocess.TimeoutExpired:
            pass
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        try:
            code = process.wait(PATIENCE_S)
        finally:
            process.kill()
    return Blow(verb, after_s, time.monotonic() - start, code, errors.read_text(errors="replace"))


def campaign(folder: Path, n: int, seed: int = 0, verbs: tuple[str, ...] = ()) -> list[Blow]:
    """n blows at each verb."""
    chance, blows = random.Random(seed), []
    longest = {"train": 15.0, "quickstart": 40.0, "generate": 12.0, "convert": 4.0, "data prepare": 4.0}
    for verb, words in commands(folder).items():
        if verbs and verb not in verbs:
            continue
        for i in range(n):
            # Python itself takes 30 ms to come to our code; nobody types faster than that.
            after_s = chance.uniform(0.05, longest[verb])
            blows.append(blow(verb, [word.format(i=i) for word in words], after_s, folder))
    return blows


def main() -> int:
    words = dict(word.split("=") for word in sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        blows = campaign(Path(name), int(words.get("n", 20)), int(words.get("seed", 0)))
    for verb in dict.fromkeys(one.verb for one in blows):
        met = [one for one in blows if one.verb == verb and one.code is not None]
        slowest = max((one.out_s for one in met), default=0.0)
        print(f"{verb:13} {len(met):3} interrupted, {sum(one.good for one in met):3} well, slowest out in {slowest:.2f} s")
    wrong = [one for one in blows if not one.good]
    for one in wrong:
        print(f"{one.verb} after {one.after_s:.2f} s: exit code {one.code}, out in {one.out_s:.2f} s\n{one.err[-2000:]}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
