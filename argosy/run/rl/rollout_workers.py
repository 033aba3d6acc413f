"""The trainer's side of the processes that sample for a run (`rollout.processes`). Each process is a group of `launch.workers` that
runs `run.rl.rollout_worker`.

For a rollout, each process fetches the weights that changed since its last rollout. Frozen weights, such as those under adapters, are
sent once. The process returns the checksum of every weight, which is compared with the trainer's. Each process gets a contiguous share
of the prompts, which depends only on the number of prompts. Every prompt keeps its index among all prompts, which decides its random
stream. So completions do not depend on which processes are alive or on how long they take.

A process that ends is started again, fetches the weights, and samples its share again. With `rollout.ahead` the trainer has new weights
by then, so the weights of a rollout are copied into host memory. Without it they are the trainer's own arrays.
"""

import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import ArgosyError
from argosy.core.progress import Say
from argosy.launch.workers import Group, WorkerLost, Workers, open_workers
from argosy.launch.workers.group import WorkerGroup
from argosy.models.parts.weight import Leaves
from argosy.observe.readable import format_bytes
from argosy.rl.policy.critic import PREFIX
from argosy.rl.rollouts.completions import Interrupted, SampledCompletion, SamplersLost, SamplingRequest
from argosy.rl.rollouts.settings import Rollout
from argosy.run.rl.rollout_engine import RolloutEngine, checksums, policy_weights
from argosy.run.rl.rollout_worker import RolloutWorker, split_completions
from argosy.train.state import TrainState

# A process that ended so often without an answer in between ends the run.
MOST_LOST = 3
# How often a signal is looked for while processes sample.
LOOK_S = 0.05
CONFIG = (
    *("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes"),
    *("jax_default_matmul_precision", "jax_numpy_dtype_promotion"),
)
Ask = Callable[[WorkerGroup], Mapping[str, np.ndarray]]
SAVED = "what was learned is saved: the same command goes on from there"


class WeightVersion(NamedTuple):
    """One version of a weight.

    leaf: the trainer's array.
    number: the number of times that the weight has changed.
    sent: the array that is sent to processes.
    """

    leaf: Any
    number: int
    sent: Any


class WeightVersions(NamedTuple):
    """The weights of one rollout.

    versions: the version of each weight, by parameter name.
    sums: the checksums of the weights, in the order of the names.
    """

    versions: Mapping[str, WeightVersion]
    sums: np.ndarray


class RolloutWorkers:
    """The sampling processes of a run, which stay until `close`.

    Raises:
        ArgosyError: a process does not start.
    """

    def __init__(self, engine: RolloutEngine, say: Say):
        self.engine, self.say, self.how = engine, say, engine.settings
        count = self.how.processes
        assert count is not None
        shapes = {a: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for a, leaf in engine.shapes.items()}
        config = {name: getattr(jax.config, name) for name in CONFIG}
        start = (RolloutWorker, pickle.dumps(replace(engine, shapes=shapes)), config)
        self.names = [f"rollout-{i}" for i in range(count)]
        self._latest: dict[str, WeightVersion] = {}
        # By process: the numbers of the weights that it has, and how often it ended since it last answered.
        self._has: dict[str, dict[str, int]] = {name: {} for name in self.names}
        self._lost = dict.fromkeys(self.names, 0)
        # What an interrupted call left may still be under way when the next one begins.
        self._turns = {name: threading.Lock() for name in self.names}
        self._counting = threading.Lock()
        self._closed = threading.Event()
        self._stack = ExitStack()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="rollouts")
        groups = {name: Group(start=start, stuck=self.how.stuck) for name in self.names}
        self.workers: Workers = self._stack.enter_context(open_workers(groups, say=say))

    def close(self) -> None:
        """Ends the processes."""
        self._closed.set()
        self._stack.close()
        self._threads.shutdown()

    # ---------------------------------------------------------------- what a trainer lends (`rl.rollouts.records.Trainer`)

    def weights(self, state: TrainState) -> WeightVersions:
        """Returns the weights of a state, as processes fetch them. Without `rollout.ahead` they are the arrays of the state, which must
        not be donated before the rollout is sampled.
        """
        leaves = policy_weights(state)
        for address, leaf in leaves.items():
            before = self._latest.get(address)
            if before is None or before.leaf is not leaf:
                number = 0 if before is None else before.number + 1
                self._latest[address] = WeightVersion(leaf, number, np.array(leaf) if self.how.ahead else leaf)
        sums = np.asarray(checksums([leaves[a] for a in sorted(leaves)]))
        return WeightVersions({address: self._latest[address] for address in sorted(leaves)}, sums)

    def __call__(self, weights: WeightVersions) -> "Samplers":
        """Returns a language model with these weights, which samples in the processes."""
        return Samplers(self, weights)

    # ---------------------------------------------------------------- one process

    def share(self, name: str, weights: WeightVersions, ask: Ask, samplers: "Samplers") -> list[SampledCompletion]:
        """Samples one process's share of the prompts. If the process ends, it is started again and samples again.

        Args:
            name: the group of the process.
            weights: the weights of the rollout.
            ask: sends the request to the process.
            samplers: counts lost processes and the time of transfers.

        Raises:
            ArgosyError: the process cannot sample.
        """
        with self._turns[name]:
            while True:
                try:
                    self.give(name, weights, samplers)
                    completions = split_completions(ask(self.workers[name]))
                except WorkerLost as error:
                    self.lost(name, error, samplers)
                else:
                    self._lost[name] = 0
                    return completions

    def give(self, name: str, weights: WeightVersions, samplers: "Samplers") -> None:
        """Sends a process the weights that it lacks.

        Raises:
            WorkerLost: the process ended.
            ArgosyError: weights arrived changed.
        """
        start, has = time.monotonic(), self._has[name]
        missing = {a: version.sent for a, version in weights.versions.items() if has.get(a) != version.number}
        if not missing:
            return
        group = self.workers[name]
        # Of weights that are on their way nobody knows which have arrived.
        has.clear()
        there = self.workers.send(missing, to=name)
        sums = group.run(RolloutWorker.take, group.started, there).value()
        if not np.array_equal(sums, weights.sums):
            wrong = [a for a, same in zip(weights.versions, (sums == weights.sums).tolist(), strict=True) if not same]
            raise ArgosyError(f"{plural(len(wrong), 'weight')} arrived changed in the process `{name}`, such as {wrong[0]}")
        has |= {a: version.number for a, version in weights.versions.items()}
        with self._counting:
            samplers.weights_s = max(samplers.weights_s, time.monotonic() - start)

    def lost(self, name: str, error: WorkerLost, samplers: "Samplers") -> None:
        """Restarts a process that has ended.

        Raises:
            ArgosyError: the process ends again and again.
            WorkerLost: the run is ending.
        """
        while not self._closed.is_set():
            self._has[name].clear()
            self._lost[name] += 1
            with self._counting:
                samplers.lost += 1
            if self._lost[name] >= MOST_LOST:
                raise ArgosyError(f"{error.what}\nThat was {MOST_LOST} times in a row without an answer.") from error
            self.say(f"`{name}` is started again, and its prompts are sampled again")
            try:
                self.workers[name].restart()
                return
            except WorkerLost as again:
                error = again
        raise error


class Samplers:
    """The language model of one rollout, which samples in all processes. It is a `rl.rollouts.completions.RemoteSampler`."""

    def __init__(self, workers: RolloutWorkers, weights: WeightVersions):
        self.workers, self.given, self.tokenizer = workers, weights, workers.engine.tokenizer
        self.lost, self.weights_s = 0, 0.0

    def drawn(
        self, prompts: Sequence[Sequence[int]], request: SamplingRequest, interrupted: Callable[[], bool]
    ) -> list[SampledCompletion]:
        """Samples one completion of each prompt, in the order of the prompts.

        Raises:
            Interrupted: the run was asked to stop.
            SamplersLost: a process cannot sample, or ends again and again.
        """
        names = self.workers.names
        places = np.array_split(np.arange(len(prompts)), len(names))
        futures = [
            self.workers._threads.submit(self.workers.share, name, self.given, sampling_task(prompts, share.tolist(), request), self)
            for name, share in zip(names, places, strict=True)
            if share.size
        ]
        pending: set[Future[list[SampledCompletion]]] = set(futures)
        while pending:
            if interrupted():
                raise Interrupted("stopped while answers were generated")
            done, pending = wait(pending, LOOK_S, FIRST_COMPLETED)
            for future in done:
                if (error := future.exception()) is not None:
                    problem = error.what if isinstance(error, ArgosyError) else f"{type(error).__name__}: {error}"
                    raise SamplersLost(problem, where="rollout.processes", hint=SAVED) from error
        return [completion for share in futures for completion in share.result()]

    def sleep(self) -> None:
        """Lets all processes free their KV caches. Returns at once."""
        for name in self.workers.names:
            group = self.workers.workers[name]
            # One that has ended has no cache.
            with suppress(WorkerLost):
                group.run(RolloutWorker.sleep, group.started)


def sampling_task(prompts: Sequence[Sequence[int]], rows: Sequence[int], request: SamplingRequest) -> Ask:
    """Makes a function that asks a process to complete some neighboring prompts.

    Args:
        prompts: the token ids of all prompts.
        rows: the indices of the prompts to complete.
        request: how prompts are completed.
    """
    some = [prompts[row] for row in rows]
    tokens = np.concatenate([np.asarray(prompt, np.int64) for prompt in some])
    lengths = np.array([len(prompt) for prompt in some], np.int64)
    sampling = request.sampling.model_dump_json()
    options = {"most": request.most, "sampling": sampling, "seed": request.seed, "ignore_eos": request.ignore_eos}
    return lambda group: group.run(RolloutWorker.answer, group.started, tokens, lengths, rows[0], options).value()


def samplers_summary(settings: Rollout, weights: Leaves) -> str:
    """Describes the sampling processes and their memory, for a run's header."""
    size = format_bytes(sum(leaf.size * leaf.dtype.itemsize for a, leaf in weights.items() if not a.startswith(PREFIX)))
    who = f"{settings.processes} processes, each" if settings.processes != 1 else "a process of its own,"
    return f"{who} with a copy of the weights ({size}) and the cache of at most {plural(settings.slots, 'answer')}"
