"""The reference of a run: its initial model, for objectives that compare the trained model with it.

    online   A frozen copy of the initial weights, sharded as the model is. Every step computes its outputs.
    cached   The log-probability of every sequence under the initial weights, computed once before the first step.

The reference never changes and rows are not augmented, so both ways give the same numbers. The cache saves a forward pass per step and
a copy of the weights. It is computed for the rows that the run will visit, in the precision of the run. It is stored in the folder of
prepared data, under a hash of the weights, the data and the settings that decide the numbers. Other runs reuse it, and a killed run
continues to fill it. A copy in the run directory makes a resume independent of that folder.

An adapter that starts from zero does not change the model's initial output, so the reference is right both with and without it.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from argosy.checkpoint.run_directory import RunDirectory
from argosy.core.caches import file_lock
from argosy.core.counts import plural
from argosy.core.errors import ArgosyError, BadInput
from argosy.core.progress import Say
from argosy.core.settings import dump
from argosy.data.batch import Batch, BatchWrapper, Field, Fields
from argosy.data.pipeline import RowBatches
from argosy.data.tables import corpus_cache
from argosy.models.parts.weight import Leaves
from argosy.run.frozen.visits import passes, visited_groups
from argosy.train.objectives.preferences.sequences import FIELDS, sequences
from argosy.train.step import model_for

ROLE = "reference"
# Numbers of a file of results that are nothing yet.
NOTHING = np.float32(np.nan)


def asked_of_data(objective: Any) -> Fields:
    """Returns the fields that the data must provide: those that the objective reads, with the index of each sequence instead of its
    cached log-probability.
    """
    fields = dict(objective.reads())
    if objective.roles.get(ROLE) == "cached":
        del fields[ROLE]
        fields["document"] = Field("B s", np.int32, "row")
    return fields


class WithReference(BatchWrapper):
    """Batches with the reference's log-probability of each sequence added.

    table: the log-probabilities of all sequences, from when they are computed.
    """

    def __init__(self, inner: RowBatches):
        super().__init__(inner)
        self.table = np.zeros(0, np.float32)

    def __next__(self) -> Batch:
        batch = dict(next(self.inner))
        document, live = batch.pop("document"), batch["live"] > 0
        logps = np.zeros(live.shape, np.float32)
        logps[live] = self.table[document[live]]
        return batch | {ROLE: logps}


class ReferenceWeights:
    """The initial weights of a run. Before the first step they are those of its state; in a resumed run they are read or initialized
    again, when `read` is called.

    Args:
        state: the state that the run begins or resumes with.
        fresh: whether this state is the initial one.
    """

    def __init__(self, assembly: Any, state: Any, fresh: bool, say: Say):
        self.assembly, self.state, self.fresh, self.say = assembly, state, fresh, say
        self.leaves: Leaves | None = state.params | state.rest if fresh else None

    def read(self) -> Leaves:
        """Returns the initial weights by parameter name, on the run's devices."""
        if self.leaves is None:
            from argosy.run.start.initial import first_weights

            self.leaves = first_weights(self.assembly, self.say)
        return self.leaves


def settle_reference(assembly: Any, directory: RunDirectory, weights: ReferenceWeights, say: Say) -> None:
    """Prepares the reference of a run before its first step: copies the initial weights, or fills the cache.

    Raises:
        BadInput: the reference must be computed, but the initial model no longer exists or has changed.
        ArgosyError: the reference's log-probability of a sequence is not finite.
    """
    kind = assembly.run.objective.roles.get(ROLE)
    if kind is None:
        return
    weights_hash = None if weights.fresh else directory.reference_weights()
    if kind in ("online", "rollout") or weights_hash is None:
        current_hash = hash_of(weights.read())
        if weights_hash is None:
            directory.write_reference_weights(current_hash)
        elif current_hash != weights_hash:
            raise changed_weights_error(assembly)
        weights_hash = current_hash
    if kind == "online":
        # A copy, because the state's own buffers are given to the first step.
        shared = assembly.roles[ROLE].shared
        assembly.frozen[ROLE] = {a: array if a in shared else jnp.copy(array) for a, array in weights.read().items()}
        return
    if kind == "rollout":
        unshared = {a: array for a, array in weights.read().items() if a not in assembly.roles[ROLE].shared}
        assembly.frozen[ROLE] = {address: jnp.copy(array) for address, array in unshared.items()}
        return
    splits = {"train": assembly.batches, "held_out": assembly.evals}
    for split, batches in splits.items():
        if batches is not None:
            batches.table = _table_of(assembly, directory, split, batches.inner, weights, weights_hash, say)


def _table_of(
    assembly: Any, directory: RunDirectory, split: str, batches: RowBatches, weights: ReferenceWeights, weights_hash: str, say: Say
) -> np.ndarray:
    """Returns the log-probability of every sequence that the run visits, and NaN for others. Missing ones are computed.

    Args:
        split: `train` or `held_out`.
        weights_hash: the hash of the initial weights.
    """
    rows, groups = batches.blocks.rows, visited_groups(batches, assembly.run.steps if split == "train" else None)
    documents = rows.corpus.documents  # type: ignore[attr-defined]
    table = directory.read_reference(split, documents)
    if table is not None and not len(_missing(rows, groups, table)):
        return table
    folder = corpus_cache(assembly.run.data) / "reference"
    with exclusive_writer(folder / f"{_key_of(assembly, batches, weights_hash)}.{split}.npy", documents, say) as shared:
        if table is not None:
            shared[:] = np.where(np.isnan(shared), table, shared)
        if len(todo := _missing(rows, groups, shared)):
            leaves = weights.read()
            if not weights.fresh and hash_of(leaves) != weights_hash:
                raise changed_weights_error(assembly)
            _compute(assembly, rows, todo, leaves, shared, say)
        table = np.array(shared)
    directory.write_reference(split, table)
    return table


def _missing(rows: Any, groups: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Selects the groups of rows with a sequence that the table lacks."""
    lacking = np.any(np.isnan(table).reshape(-1, rows.per_group), axis=1).reshape(-1)
    return np.array([g for g in groups.tolist() if lacking[rows.order[rows.offsets[g] : rows.offsets[g + 1]]].any()], np.int64)


def _compute(assembly: Any, rows: Any, groups: np.ndarray, leaves: Leaves, table: np.ndarray, say: Say) -> None:
    """Computes the log-probabilities of these groups of rows, and writes them into the table in place."""
    run, per_group = assembly.run, rows.per_group
    each = run.data.batch // run.accumulate // per_group
    fields = {**FIELDS, "document": Field("B s", np.int32, "row")}
    program = _compiled(assembly, leaves, each * per_group, rows.own_sizes)
    say(f"reference: log-probabilities of {plural(len(groups) * per_group, 'row')} by the model before its first step")
    keep = table.flush if isinstance(table, np.memmap) else lambda: None
    for _, some in passes(groups, each, "reference", say, keep):
        batch = rows.gather((some[:, None] * per_group + np.arange(per_group)).ravel())
        document = batch["document"]
        logps = np.asarray(program(leaves, assembly.place_fields({name: batch[name] for name in fields if name != "document"})))
        there = document >= 0
        if not np.isfinite(logps[there]).all():
            wrong = int(document[there][~np.isfinite(logps[there])][0])
            problem = f"the model before its first step gives answer {wrong:,} of the data a log-probability that is not finite"
            raise ArgosyError(problem, hint="precision=float32 has a wider range; are the weights whole?")
        table[document[there]] = logps[there]


def _compiled(assembly: Any, leaves: Leaves, rows: int, sizes: Mapping[str, int]) -> Any:
    """Compiles the program (weights, batch) -> log-probabilities [B s]."""
    from argosy.parallel.place import batch_sharding
    from argosy.run.memory import shapes_of

    objective, precision = assembly.run.objective, assembly.decided.precision

    def logps(leaves: Leaves, batch: Any) -> Any:
        return sequences(objective, model_for(assembly.graph, precision, leaves), batch)[0].logps

    shapes = shapes_of(FIELDS, rows, assembly.run.data.sequence, 1, sizes, batch_sharding(assembly.mesh))
    weights = {a: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding) for a, w in leaves.items()}
    with assembly.tracing():
        return jax.jit(logps).lower(weights, shapes).compile()


def hash_of(leaves: Leaves) -> str:
    """Returns the SHA-256 of weights over names, types, shapes and contents."""
    digest = hashlib.sha256()
    for address in sorted(leaves):
        array = np.ascontiguousarray(leaves[address])
        digest.update(f"{address} {array.dtype} {array.shape}".encode())
        digest.update(array.view(np.uint8).data if array.ndim else array.tobytes())
    return digest.hexdigest()


def _key_of(assembly: Any, batches: RowBatches, weights: str) -> str:
    """Returns the key of the cached numbers: a hash of the weights, the model, the documents, the length to which they are cut, and the
    precision. How rows are packed, batched or ordered does not change the key."""
    run, data = assembly.run, batches.fingerprint
    decided = {
        "weights": weights,
        "model": dump(run.model),
        "data": {name: value for name, value in data.items() if name not in ("batch", "packing", "shuffle", "seed", "rows_per_group")},
        "precision": assembly.decided.precision,
        "layers": assembly.decided.layers,
        **({"rounds": assembly.decided.rounds} if assembly.decided.rounds > 1 else {}),
    }
    return hashlib.sha256(json.dumps(decided, sort_keys=True, default=str).encode()).hexdigest()[:24]


def changed_weights_error(assembly: Any) -> BadInput:
    """Makes the error that a run's initial weights have changed."""
    init = assembly.run.init
    problem = "the weights that this run started from have changed, and its reference must be computed from them"
    return BadInput(problem, where=init.weights or init.state, hint="put them back, or start again with dir=NEW")


@contextmanager
def exclusive_writer(path: Path, documents: int, say: Say) -> Iterator[np.ndarray]:
    """Opens a memory-mapped file with one float32 per document, which is NaN where unknown. A lock admits one process at a time."""
    with file_lock(path.with_suffix(".lock"), say):
        if not path.exists() or path.stat().st_size != 128 + 4 * documents:
            temporary = path.with_name(f"{path.name}.{os.getpid()}")
            with temporary.open("wb") as file:
                np.save(file, np.full(documents, NOTHING))
            temporary.replace(path)
        table = np.load(path, mmap_mode="r+")
        yield table
        table.flush()
