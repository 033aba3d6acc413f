"""A teacher on a server. The run requests the teacher's most likely tokens at every target that it will visit, once, before its first
step (`run.distillation.teacher_cache`).

A served model has no hash of its weights. Cached numbers belong to the address of the server and the name of the model, and a run
trusts that these stay the same model. Returned tokens are compared with the run's tokens at every position.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from argosy.checkpoint.run_directory import RunDirectory
from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.data.distillation.likeliest import TopTokens
from argosy.data.pipeline import RowBatches
from argosy.data.tokenizers.load import Tokenizer
from argosy.run.distillation.address import check_address
from argosy.run.distillation.endpoint import Endpoint
from argosy.run.frozen.visits import passes

# Requests under way at a time, and rows between two times that results are put on disk.
TOGETHER, ROWS = 8, 32
PROBE = "Once upon a time"


class ServedTeacher:
    """A teacher that runs on a server."""

    note: str | None = None

    def __init__(self, run: Any, tokenizer: Tokenizer | None):
        """Raises:
        BadInput: a served teacher does not support these settings.
        """
        objective = run.objective
        check_address(objective.teacher)
        if tokenizer is None:
            problem = "a served teacher's tokens are compared with the data's, which has no tokenizer"
            raise BadInput(problem, hint="data.tokenizer=FOLDER")
        if objective.top >= run.model.vocab:
            raise BadInput(f"objective.top = {objective.top}, and the student has {run.model.vocab:,} tokens", hint="objective.top=20")
        self.run, self.given = run, objective.teacher
        self.endpoint = Endpoint(objective.teacher, objective.teacher_model, tokenizer)

    def check(self) -> None:
        """Sends a short request to the server.

        Raises:
            BadInput, ArgosyError: as `Endpoint.top`.
        """
        run, tokenizer = self.run, self.endpoint.tokenizer
        first = [tokenizer.bos] if tokenizer.adds_bos and tokenizer.bos is not None else []
        self.endpoint.top([*first, *tokenizer.encode(PROBE)], run.objective.top, run.model.vocab)

    @property
    def described(self) -> dict[str, Any]:
        return {"endpoint": self.given.rstrip("/"), "model": self.endpoint.model}

    def key(self, batches: RowBatches) -> str:
        """Returns the key of the cached numbers: a hash of the server, the model and the rows."""
        order = ("batch", "shuffle", *(("seed",) if hasattr(batches.blocks.rows, "corpus") else ()))
        data = {name: value for name, value in batches.fingerprint.items() if name not in order}
        decided = self.described | {"data": data, "vocab": self.run.model.vocab, "top": self.run.objective.top}
        return hashlib.sha256(json.dumps(decided, sort_keys=True, default=str).encode()).hexdigest()[:24]

    def compute(self, rows: Any, todo: np.ndarray, writer: Any, say: Say) -> None:
        """Requests the most likely tokens of rows and writes them to the cache.

        Args:
            rows: the rows of the data.
            todo: the indices of the groups of rows to compute.
            writer: writes to the cache.
            say: called with progress.
        """
        with ThreadPoolExecutor(TOGETHER) as threads:
            for new, some in passes(todo, ROWS, "teacher", say, writer.flush):
                batch = rows.gather(some[:new])
                requests = [(place, *text) for place in range(new) for text in texts(batch, place)]
                answers = threads.map(
                    lambda request: self.endpoint.top(request[2], self.run.objective.top, self.run.model.vocab), requests
                )
                shape, k = batch["mask"].shape, self.run.objective.top
                ids, logps, rest = np.zeros((*shape, k), np.int64), np.zeros((*shape, k), np.float32), np.zeros(shape, np.float32)
                for (place, at, _), top in zip(requests, answers, strict=True):
                    ids[place, at], logps[place, at], rest[place, at] = top
                for place, row in enumerate(some[:new].tolist()):
                    here = batch["mask"][place] > 0
                    writer.add(row, TopTokens(ids[place, here], logps[place, here], rest[place, here]))


def texts(batch: Any, row: int) -> list[tuple[np.ndarray, list[int]]]:
    """Returns the documents of a row that have targets in the loss, each as the indices of its targets and its tokens."""
    documents, segments, mask = [], batch["segments"][row], batch["mask"][row]
    for segment in range(1, int(segments.max(initial=0)) + 1):
        places = np.flatnonzero(segments == segment)
        counted = np.flatnonzero(mask[places] > 0)
        if len(counted):
            # What is after the last target that counts is not asked.
            places = places[: counted[-1] + 1]
            documents.append((places, [*batch["tokens"][row, places].tolist(), int(batch["targets"][row, places[-1]])]))
    return documents


def check_same_server(teacher: ServedTeacher, directory: RunDirectory) -> None:
    """Checks that a resumed run has the teacher that it began with. A new run records its teacher.

    Raises:
        BadInput: the teacher is another one.
    """
    recorded = directory.teacher()
    if recorded is None:
        directory.write_teacher(teacher.described)
    elif recorded != teacher.described:
        problem = f"this run learns from {recorded.get('model')} at {recorded.get('endpoint')}"
        raise BadInput(problem, where=f"objective.teacher={teacher.given}", hint="name the same, or start again with dir=NEW")


def check_served(assembly: Any) -> None:
    """Sends a short request to the teacher's server, if there is one, before a new run writes a file.

    Raises:
        BadInput, ArgosyError: as `Endpoint.top`.
    """
    if isinstance(assembly.teacher, ServedTeacher):
        assembly.teacher.check()
