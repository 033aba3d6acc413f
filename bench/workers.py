"""Moving arrays between two workers of this machine, against copying memory and against pickling through a pipe.

    ./run python bench/workers.py [megabytes=500] [turns=5]

The floor is `numpy.copyto` in one process. The pipe is `multiprocessing.Pipe` between two processes, with one numpy array pickled at a
time, received whole. Moves come as jax arrays. Medians and the best of all turns; the ways take turns, so that a busy moment hits all.
"""

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from argosy.launch.workers import Group, open_workers


def receive(pipe: "multiprocessing.connection.Connection") -> None:
    """The other process: tells when an array is there."""
    while True:
        pipe.send(pipe.recv().nbytes)


def timed(do: Callable[[], object]) -> float:
    begun = time.perf_counter()
    do()
    return time.perf_counter() - begun


def main(megabytes: int = 500, turns: int = 5) -> None:
    size = megabytes * 1_000_000 // 4
    source, target = np.random.default_rng(0).random(size, np.float32), np.empty(size, np.float32)
    target.fill(0)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=receive, args=(theirs,), daemon=True)
    child.start()
    groups = {"a": Group(), "b": Group(), "many": Group(devices=4), "two": Group(processes=2)}
    with open_workers(groups) as workers:
        whole = workers["a"].run("jax.numpy:ones", size).wait()
        parts = workers.move(workers["a"].run("jax.numpy:ones", (100, size // 100)), to="a").wait()

        def piped() -> None:
            ours.send(source)
            assert ours.recv() == source.nbytes

        from jax.sharding import PartitionSpec

        ways: dict[str, Callable[[], object]] = {
            "numpy.copyto, one process": lambda: np.copyto(target, source),
            "pickle through a pipe": piped,
            "move, one process to one": lambda: workers.move(whole, to="b").wait(),
            "move, one process to four devices, rows": lambda: workers.move(parts, to="many", sharding=PartitionSpec("data")).wait(),
            "move, one process to four devices, columns": lambda: workers.move(
                parts, to="many", sharding=PartitionSpec(None, "data")
            ).wait(),
            "move, one process to two, rows": lambda: workers.move(parts, to="two", sharding=PartitionSpec("data")).wait(),
        }
        took: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(turns + 1):
            for name, do in ways.items():
                seconds = timed(do)
                if turn:
                    took[name].append(seconds)
    print(f"| {megabytes} MB | median s | MB/s | best MB/s |\n|---|---|---|---|")
    for name, all_of_it in took.items():
        median = statistics.median(all_of_it)
        print(f"| {name} | {median:.2f} | {megabytes / median:,.0f} | {megabytes / min(all_of_it):,.0f} |")
    child.terminate()


if __name__ == "__main__":
    main(**{key: int(value) for key, value in (word.split("=") for word in sys.argv[1:])})
