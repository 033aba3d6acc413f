"""Workers that are killed at random moments, in calls and in moves: what comes back is right, and nothing stays behind.

    ./run python tests/campaign_workers.py [n=20] [seed=0]

In each round a group of two processes makes an array, which goes to a group of one and back, and both add to it. Again and again one
of the three processes, drawn at random, gets SIGKILL at a random moment. The round that was under way must raise WorkerLost with the
group and rank of the killed one, or end well and the next one must; the group is restarted, and rounds go on. What a round brings must
be what numpy gives. In the end no process may be left. Prints a line for each kill, with the seconds until the error and until the next
good round; exit code 1 where anything differs.
"""

import os
import random
import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from jax.sharding import PartitionSpec as P
from launch import worker_functions as functions
from launch.test_workers import is_alive

from argosy.launch.workers import Group, WorkerLost, Workers, open_workers

SHAPE = (1024, 1024)


def a_round(workers: Workers) -> np.ndarray:
    """Adds 1 in both groups, with moves in between."""
    begun = workers["pair"].run(functions.spread, SHAPE, ("x",), "float32", 0)
    there = workers.move(begun, to="one", sharding=P(None, "z"))
    added = workers["one"].run(functions.add, there, np.float32(1))
    back = workers.move(added, to="pair", sharding=P("y", "x"))
    return workers["pair"].run(functions.add, back, np.float32(1)).value()


def main(n: int, seed: int) -> int:
    draw, base, wrong = random.Random(seed), functions.numbers(SHAPE), 0
    groups = {"pair": Group(processes=2, devices=2, mesh={"x": 2, "y": 2}), "one": Group(devices=2, mesh={"z": 2})}
    pids: set[int] = set()
    waits, again = [], []
    with open_workers(groups) as workers:
        begun = time.monotonic()
        for _ in range(5):
            a_round(workers)
        usual = (time.monotonic() - begun) / 5
        for number in range(n):
            name = draw.choice(("pair", "pair", "one"))
            rank = draw.randrange(groups[name].processes)
            pids |= {*workers["pair"].pids, *workers["one"].pids}
            killed: list[float] = []

            def kill(pid: int = workers[name].pids[rank], killed: list[float] = killed) -> None:
                killed.append(time.monotonic())
                os.kill(pid, signal.SIGKILL)

            timer = threading.Timer(draw.uniform(0, 2 * usual), kill)
            timer.start()
            error: Any = None
            rounds = 0
            while error is None:
                try:
                    result = a_round(workers)
                    wrong += not np.array_equal(result, base + 2)
                    rounds += 1
                except WorkerLost as lost:
                    error = lost
            timer.join()
            after = time.monotonic() - killed[0]
            right = (error.group, error.rank, error.code) == (name, rank, -signal.SIGKILL)
            wrong += not right
            workers[name].restart()
            wrong += not np.array_equal(a_round(workers), base + 2)
            good = time.monotonic() - killed[0]
            waits.append(after)
            again.append(good)
            print(
                f"{number + 1:3} killed {name} {rank} in round {rounds + 1}: told after {after:.2f} s, going on after {good:.2f} s"
                f"{'' if right else f'  WRONG: {error}'}",
                flush=True,
            )
        pids |= {*workers["pair"].pids, *workers["one"].pids}
    survivors = [pid for pid in pids if is_alive(pid)]
    print(f"{n} kills, {wrong} wrong, {len(survivors)} of {len(pids)} processes left; told after a median of "
          f"{statistics.median(waits):.2f} s, at most {max(waits):.2f} s; going on after {statistics.median(again):.2f} s")  # fmt: skip
    return 1 if wrong or survivors else 0


if __name__ == "__main__":
    words = dict(word.split("=") for word in sys.argv[1:])
    sys.exit(main(int(words.get("n", 20)), int(words.get("seed", 0))))
