"""The cache of a teacher's most likely tokens at every target that a run will visit, computed once before the first step.

Rows are not augmented, so a target always has the same context and the same teacher distribution. The cache is stored in the folder of
prepared data (`data.distillation.likeliest`), under a hash of the teacher's weights, the rows and the settings that decide the numbers.
Other runs reuse it, and a killed run continues to fill it. The teacher is in memory only while numbers are missing. If the cache is
gone when a run resumes, the same program computes the same numbers again.
"""

import hashlib
import json
from typing import Any

import jax
import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import ArgosyError
from argosy.core.progress import Say
from argosy.core.settings import dump
from argosy.data.batch import Batch, BatchWrapper, Field, Fields
from argosy.data.distillation.likeliest import Likeliest, TopTokens, bytes_per_target
from argosy.data.pipeline import ROW, RowBatches
from argosy.data.tables import corpus_cache
from argosy.models.parts.attention.attend import Packed
from argosy.models.parts.weight import Leaves
from argosy.observe.readable import format_bytes
from argosy.ops.cross_entropy import by_chunks
from argosy.ops.divergence import Top, resize_vocab, top
from argosy.parallel.place import batch_sharding
from argosy.run.distillation.served import ServedTeacher
from argosy.run.frozen.visits import passes, visited_groups
from argosy.run.memory import shapes_of
from argosy.train.objectives.distillation.distributions import CACHED, in_chunks
from argosy.train.objectives.tokens import FIELDS
from argosy.train.step import model_for

# What the teacher's program reads.
INPUTS = ("tokens", "segments")


def asked_of_data(objective: Any) -> Fields:
    """Returns the fields that the data must provide: those that the objective reads, with the index of each row instead of the cached
    fields.
    """
    return {**{name: field for name, field in objective.reads().items() if name not in CACHED}, ROW: Field("B", np.int64, "row")}


class WithTeacher(BatchWrapper):
    """Batches with the teacher's most likely tokens added.

    kept: the most likely tokens of all rows, from when they are computed.
    """

    def __init__(self, inner: RowBatches, k: int):
        super().__init__(inner)
        self.kept: Likeliest | None = None
        self.sizes = {**inner.sizes, "k": k}

    def __next__(self) -> Batch:
        assert self.kept is not None
        batch = dict(next(self.inner))
        rows = batch.pop(ROW)
        return batch | self.kept.with_top_tokens(batch["mask"], rows)


def fill_teacher_cache(assembly: Any, described: dict[str, Any], stored: Any, say: Say) -> None:
    """Fills the cache for the rows that a run visits, and connects it to the run's batches.

    Args:
        described: the description of the teacher by `checkpoint.base.describe_base`; None for a served teacher.
        stored: the opened teacher; None for a served teacher.

    Raises:
        ArgosyError: the teacher's probabilities are not finite.
    """
    run, leaves = assembly.run, None
    each = bytes_per_target(run.objective.top, run.model.vocab)
    for split, batches in {"train": assembly.batches, "held_out": assembly.evals}.items():
        if batches is None:
            continue
        inner = batches.inner
        rows = inner.blocks.rows
        served = isinstance(assembly.teacher, ServedTeacher)
        key = assembly.teacher.key(inner) if served else _key_of(assembly, inner, described)
        path = corpus_cache(run.data) / "teacher" / f"{key}.{split}.npy"
        cache = batches.kept = Likeliest(path, len(rows), run.objective.top, run.model.vocab)
        visits = visited_groups(inner, run.steps if split == "train" else None)
        if not len(cache.missing(visits)):
            continue
        with cache.writing(say) as writer:
            todo = cache.missing(visits)
            kind = f"its {run.objective.top} likeliest tokens, {each} bytes a target"
            say(f"teacher: {kind}, of {plural(len(todo), 'row')}, kept in {path.parent}")
            if served:
                assembly.teacher.compute(rows, todo, writer, say)
            else:
                leaves = leaves or assembly.teacher.read(stored)
                _compute(assembly, rows, todo, leaves, writer, say)
            say(f"teacher: {writer.targets:,} targets, {format_bytes(each * writer.targets)}")


def _compute(assembly: Any, rows: Any, todo: np.ndarray, leaves: Leaves, writer: Any, say: Say) -> None:
    """Computes the teacher's most likely tokens of rows, and writes them to the cache.

    Args:
        rows: the rows of the data.
        todo: the indices of the groups of rows to compute.
        leaves: the teacher's weights.
        writer: writes to the cache.
        say: called with progress.
    """
    run = assembly.run
    each = run.data.batch // run.accumulate
    program = _compile(assembly, leaves, each)
    for new, some in passes(todo, each, "teacher", say, writer.flush):
        batch = rows.gather(some)
        outputs = program(leaves, assembly.place_fields({name: batch[name] for name in INPUTS}))
        ids, logps, rest = (np.asarray(a) for a in outputs)
        for place, row in enumerate(some[:new].tolist()):
            here = batch["mask"][place] > 0
            if not np.isfinite(logps[place, here]).all():
                problem = f"the teacher gives probabilities that are not finite in row {row:,} of the data"
                raise ArgosyError(problem, hint="precision=float32 has a wider range; are its weights whole?")
            writer.add(row, TopTokens(ids[place, here], logps[place, here], rest[place, here]))


def _compile(assembly: Any, leaves: Leaves, rows: int) -> Any:
    """Compiles the program (weights, batch) -> `Top`, the most likely tokens at every position, [B T ...]."""
    run, graph = assembly.run, assembly.teacher.role.graph
    objective, precision, vocab = run.objective, assembly.decided.precision, run.model.vocab

    def likeliest(leaves: Leaves, batch: Any) -> Top:
        model = model_for(graph, precision, leaves)
        x, _, _ = model.hidden(batch["tokens"], Packed(batch["segments"]))

        def of(x: Any) -> Top:
            return top(resize_vocab(model.unembed(x), vocab), objective.top, objective.temperature)

        if not in_chunks(objective, {"teacher": model}, batch["tokens"].size):
            return of(x)
        flat = x.reshape(-1, x.shape[-1])
        outputs = by_chunks(lambda x: jax.tree.map(lambda a: a[:, 0], of(x[:, None])), min(objective.chunk, len(flat)), flat)
        return jax.tree.map(lambda a: a.reshape(*x.shape[:2], *a.shape[1:]), outputs)

    shapes = shapes_of({name: FIELDS[name] for name in INPUTS}, rows, run.data.sequence, 1, {}, batch_sharding(assembly.mesh))
    weights = {a: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding) for a, w in leaves.items()}
    with assembly.tracing():
        return jax.jit(likeliest).lower(weights, shapes).compile()


def _key_of(assembly: Any, batches: RowBatches, described: dict[str, Any]) -> str:
    """Returns the key of the cached numbers: a hash of the teacher's weights, the rows, the precision and the settings of the cache.
    How rows are batched or ordered, and the student's weights, do not change the key."""
    run, data = assembly.run, batches.fingerprint
    # Of a corpus, the seed orders rows; synthetic rows are made from it.
    order = ("batch", "shuffle", *(("seed",) if hasattr(batches.blocks.rows, "corpus") else ()))
    decided = {
        "weights": sorted(file["sha256"] for file in described["files"].values()),
        "model": dump(assembly.teacher.config),
        "data": {name: value for name, value in data.items() if name not in order},
        "vocab": run.model.vocab,
        "top": run.objective.top,
        "temperature": run.objective.temperature,
        "precision": assembly.decided.precision,
        "layers": assembly.decided.layers,
        **({"rounds": assembly.decided.rounds} if assembly.decided.rounds > 1 else {}),
    }
    return hashlib.sha256(json.dumps(decided, sort_keys=True, default=str).encode()).hexdigest()[:24]

