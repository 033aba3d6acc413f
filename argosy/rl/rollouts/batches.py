"""Rollouts as batches of a training run: the model completes prompts, and updates learn from the completions.

    prompts -> completions -> a training signal (`Signal`) -> packed micro-batches -> `epochs` times `minibatches` updates

The training signal is the rewards of the policy's completions (`signals.rewards`), or a teacher's distributions at the tokens of
completions (`signals.teacher`).

Completions depend on the current weights, so `advance` reads the training state before each batch. It samples nothing while updates of
the last rollout remain. The position of the batches holds the index of the next prompt and the number of the rollout. A checkpoint
stores with it, as arrays, the remaining updates and the rollouts that were sampled ahead, because the weights that sampled them are
gone. So a killed run resumes bit for bit from any batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from argosy.core.progress import Complaining, Say
from argosy.data.batch import Batches
from argosy.data.encode import NAMES_SHOWN
from argosy.data.order import whole_numbers
from argosy.data.summary import CorpusSummary
from argosy.infer.lm import LM
from argosy.rl.rollouts.completions import Interrupted, RemoteSampler, SamplersLost
from argosy.rl.rollouts.packing import PartShape, RolloutBatch, restored_batches, stored_batches
from argosy.rl.rollouts.prefetch import Prefetch
from argosy.rl.rollouts.records import PromptsExhausted, Trainer, TrajectoryRecord
from argosy.rl.rollouts.sampled import SampledRollout, restored_rollouts, stored_rollouts
from argosy.rl.rollouts.settings import PLACEMENT, Rollout

NUMBERS = ("place", "rollout", "tokens")
# Of the arrays of a position, those of rollouts that were sampled ahead.
AHEAD = "ahead."

Engine = Callable[[], LM | RemoteSampler]


class Signal(Complaining, ABC):
    """The training signal of rollouts. It samples completions and turns them into updates.

    prompts: the prompts of the run.
    held_out: the prompts of the evaluation.
    rollout: the settings of sampling.
    batch: the number of completions in a rollout.
    shape: the shape of the micro-batches that completions are packed into.
    seed: the random seed of the run.
    place: the index of the next prompt.
    number: the number of the rollout that is sampled next, from 0.
    identity: the settings that decide the updates, without those of the prompts.
    trainer: access to the run's weights and models, set by `RolloutBatches.begin`.
    keep: called with the completions of each rollout.
    interrupted: returns whether the current sampling is to be given up.
    """

    def __init__(
        self, prompts: Any, held_out: Any, rollout: Rollout, batch: int, shape: PartShape, seed: int, say: Say = lambda _: None
    ):
        super().__init__(say)
        self.prompts, self.held_out, self.rollout, self.batch, self.shape, self.seed = prompts, held_out, rollout, batch, shape, seed
        self.longest_prompt = shape.sequence - rollout.tokens
        self.place = self.number = 0
        self.identity: Mapping[str, Any] = {}
        self.trainer: Any = None
        self.keep: Callable[[Sequence[TrajectoryRecord]], None] = lambda _: None
        self.interrupted: Callable[[], bool] = lambda: False

    def records(self, number: int) -> int:
        """Returns the number of prompts in the rollout of this number."""
        return self.batch // self.rollout.completions

    @abstractmethod
    def sample(self, engine: Engine, seen: int) -> SampledRollout:
        """Samples the next rollout. If it raises, the place in the prompts is unchanged.

        Args:
            engine: builds the language model that samples.
            seen: the number of rollouts that the model's weights have learned from.

        Raises:
            Interrupted: sampling was given up.
            PromptsExhausted: too few prompts are left.
            SamplersLost: the sampling processes cannot go on.
        """

    @abstractmethod
    def updates(self, state: Any, rollout: SampledRollout) -> list[RolloutBatch]:
        """Makes the updates that learn from a rollout.

        Args:
            state: the training state.
        """

    @abstractmethod
    def evaluate(self, state: Any, engine: Engine, most: int) -> dict[str, float]:
        """Computes metrics of greedy completions of held-out prompts.

        Args:
            state: the training state.
            engine: builds the language model that samples.
            most: the largest number of prompts.

        Raises:
            Interrupted: sampling was given up.
            SamplersLost: the sampling processes cannot go on.
        """

    def close(self) -> None:
        """Ends the processes and threads that the signal started."""


class RolloutBatches(Batches):
    """The batches of a run that learns from rollouts: the updates of one rollout after another. Nothing is sampled before the first
    `advance`.

    signal: samples rollouts and makes their updates.
    place: the index of the next prompt after the last rollout.
    number: the number of rollouts so far.
    tokens: the number of tokens in all updates so far.
    failed: the error that ended sampling, if one did. The run raises it after it has saved.
    """

    bytes_per_token = None
    depends = True

    def __init__(self, signal: Signal):
        self.signal, self.prompts, self.held_out = signal, signal.prompts, signal.held_out
        self.rollout, self.shape, self.sizes = signal.rollout, signal.shape, signal.shape.sizes
        settings = {name: value for name, value in dict(self.rollout).items() if name not in PLACEMENT}
        identity = repr({**signal.identity, "rollout": settings})
        self.fingerprint = self.prompts.fingerprint | {"prompts": len(self.prompts), "batch": signal.batch, "made": identity}
        # Nominal: what is computed depends on the lengths of the completions.
        self.tokens_per_batch = self.shape.sequence * signal.batch // self.rollout.minibatches
        self.queue: list[RolloutBatch] = []
        # Of a position that was sought: what belongs to the arrays that follow.
        self.waiting: Sequence[Any] = ()
        self.sampled: Sequence[Any] = ()
        self.place = self.number = self.tokens = 0
        self.failed: SamplersLost | None = None
        self.ahead: Prefetch[tuple[Any, int], SampledRollout] = Prefetch(self.collected)
        self.stopping: Callable[[], bool] = lambda: False
        self.closing = self.evaluating = False

    def begin(
        self, trainer: Trainer, say: Say, keep: Callable[[Sequence[TrajectoryRecord]], None], interrupted: Callable[[], bool]
    ) -> None:
        """Connects the signal to the run, before the first `advance`.

        Args:
            trainer: access to the run's weights and models.
            say: called with warnings.
            keep: called with the completions of each rollout.
            interrupted: returns whether to stop. The current rollout is then given up, and sampled again after a resume. A rollout that
                is sampled ahead is finished instead, because its weights will be gone.
        """
        self.stopping = interrupted
        self.signal.trainer, self.signal.say, self.signal.keep, self.signal.interrupted = trainer, say, keep, self.gives_up

    def gives_up(self) -> bool:
        """Whether the current sampling is to be given up."""
        return self.closing or (self.stopping() and (self.evaluating or not self.rollout.ahead))

    # ---------------------------------------------------------------- as batches

    def advance(self, state: Any) -> None:
        """Samples a rollout with the weights of a training state, unless updates of the last rollout remain.

        Raises:
            ArgosyError: no completion has a reward, or no prompt fits.
        """
        if self.queue or self.failed is not None:
            return
        try:
            self.queue = self.next_updates(state)
        except (Interrupted, PromptsExhausted):
            pass
        except SamplersLost as error:
            self.failed = error

    def __next__(self) -> Any:
        if not self.queue:
            raise StopIteration
        batch = self.queue.pop(0)
        self.tokens += sum(int(np.sum(part["segments"] > 0)) for part in batch.parts)
        return RolloutBatch(batch.parts, batch.numbers | {"tokens": self.tokens})

    def position(self) -> dict[str, Any]:
        """Returns the position of the batches as JSON. Waits for the rollouts that are being sampled ahead."""
        position = {"place": self.place, "rollout": self.number, "tokens": self.tokens, "waiting": stored_batches(self.queue)[1]}
        return position | {"ahead": stored_rollouts(self.ahead.settled())[1]}

    def seek(self, position: dict[str, Any]) -> None:
        numbers = whole_numbers({name: position[name] for name in NUMBERS}, NUMBERS)
        self.place, self.number, self.tokens = numbers.values()
        self.queue, self.waiting = [], list(position.get("waiting", ()))
        # What is being sampled for another position is given up, and its thread ends.
        self.closing = True
        self.ahead.close()
        self.closing = False
        self.ahead, self.sampled = Prefetch(self.collected), list(position.get("ahead", ()))
        self.signal.place, self.signal.number = self.place, self.number

    def arrays(self) -> dict[str, np.ndarray]:
        return stored_batches(self.queue)[0] | {AHEAD + name: a for name, a in stored_rollouts(self.ahead.settled())[0].items()}

    def take(self, arrays: dict[str, np.ndarray]) -> None:
        self.queue = restored_batches({name: a for name, a in arrays.items() if not name.startswith(AHEAD)}, self.waiting)
        self.waiting = ()
        sampled = {name.removeprefix(AHEAD): a for name, a in arrays.items() if name.startswith(AHEAD)}
        done = restored_rollouts(sampled, self.sampled, self.prompts) if self.sampled else []
        self.ahead.put_back(done)
        if done:
            self.signal.place, self.signal.number = done[-1].place, done[-1].number + 1

    def close(self) -> None:
        self.closing = True
        self.ahead.close()
        self.signal.close()

    def summary(self, steps: int | None = None) -> CorpusSummary:
        most, updates = self.prompts.most, self.rollout.updates
        limit = None if steps is None else -(-steps // updates)
        place = rollouts = 0
        # Prompts after as many rollouts as there are steps for.
        prompts_seen = None if limit is None else 0
        while most is not None or (limit is not None and rollouts < limit):
            count = self.signal.records(rollouts)
            if most is not None and place + count > most:
                break
            place, rollouts = place + count, rollouts + 1
            prompts_seen = place if limit is None or rollouts <= limit else prompts_seen
        ends = None if most is None else rollouts * updates
        tail = most - place if most is not None and ends is not None and (steps is None or steps >= ends) else 0
        names = self.prompts.special_names
        return CorpusSummary(
            self.prompts.source,
            format="prompt",
            documents=len(self.prompts),
            epochs=None if prompts_seen is None else prompts_seen / len(self.prompts),
            held_out_documents=len(self.held_out) if self.held_out is not None else 0,
            ends_after=ends,
            special_documents=sum(names.values()),
            special_names=tuple(names)[:NAMES_SHOWN],
            ignored=self.prompts.ignored,
            placeholders=self.prompts.placeholders,
            tail_rows=tail,
        )

    # ---------------------------------------------------------------- rollouts

    @property
    def trainer(self) -> Trainer:
        assert self.signal.trainer is not None, "rollouts before a trainer"
        return self.signal.trainer

    def next_updates(self, state: Any) -> list[RolloutBatch]:
        """Samples the next rollout and returns its updates. If it raises, the position is unchanged."""
        if not self.rollout.ahead:
            rollout = self.collected((self.trainer.weights(state), self.number))
        else:
            if not len(self.ahead):
                self.ahead.submit((self.trainer.weights(state), self.number))
            rollout = self.ahead.take()
            # While the update runs, the next ones are sampled with the weights from before it.
            while len(self.ahead) < self.rollout.ahead:
                self.ahead.submit((self.trainer.weights(state), self.number))
        self.number, self.place = rollout.number + 1, rollout.place
        return self.signal.updates(state, rollout)

    def collected(self, position: tuple[Any, int]) -> SampledRollout:
        """Samples a rollout. With `rollout.ahead`, another thread calls this.

        Args:
            position: the weights, and the number of rollouts that they have learned from.
        """
        weights, seen = position
        return self.signal.sample(lambda: self.trainer.engine(weights), seen)

    def evaluated(self, state: Any, most: int) -> dict[str, float] | None:
        """Computes metrics of greedy completions of held-out prompts. Returns None if it was interrupted.

        Args:
            most: the largest number of prompts.
        """
        if self.held_out is None:
            return {}
        # The engine does one thing at a time.
        self.ahead.settled()
        self.evaluating = True
        try:
            return self.signal.evaluate(state, lambda: self.trainer.engine(self.trainer.weights(state)), most)
        except Interrupted:
            return None
        except SamplersLost as error:
            self.failed = error
            return None
        finally:
            self.evaluating = False
