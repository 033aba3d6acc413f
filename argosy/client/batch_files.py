"""The files of a batch, in OpenAI's format: a JSON object per line for each request, and for each response.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
    {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}

The number in `id` is the request's line in the input, by which a resumed run knows which requests are done. Responses are appended as
whole lines, in the order in which they arrive. If the run was killed, the last line may lack its line break, and is removed. The model
and the settings of a run are written to OUT.run.json, so that no output mixes the responses of two models.

This module does not know servers.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from argosy.core.errors import ArgosyError, BadInput, Busy, Damaged
from argosy.core.formats.recognize import HEAD_BYTES, refuse_binary

FIELDS = {"custom_id", "method", "url", "body"}
# Seconds between syncs to disk. Responses written before a sync survive a power failure.
SYNC_S = 5.0


@dataclass(frozen=True)
class BatchRow:
    """A line of the input.

    line: its line number, from 1.
    custom_id: the client's id of the request.
    url: the route, such as /v1/completions.
    body: the body of the request.
    fault: the reason why the line is no valid request; None: it is one.
    """

    line: int
    custom_id: str | None
    url: str = ""
    body: Any = None
    fault: str | None = None


def read_batch_rows(path: Path) -> Iterator[BatchRow]:
    """Yields the rows of a file. Blank lines are skipped.

    Raises:
        BadInput: the file is binary, such as a table or an archive.
    """
    seen: dict[str, int] = {}
    with path.open("rb") as file:
        refuse_binary(file.read(HEAD_BYTES), str(path))
        file.seek(0)
        for number, line in enumerate(file, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            row = _row(number, line)
            if row.fault is None and row.custom_id is not None:
                first = seen.setdefault(row.custom_id, number)
                if first != number:
                    fault = f"line {number}: `custom_id` {row.custom_id!r} is that of line {first}"
                    row = BatchRow(number, row.custom_id, fault=fault)
            yield row


def _row(number: int, line: bytes) -> BatchRow:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        return BatchRow(number, None, fault=f"line {number} is no JSON")
    if not isinstance(request, dict):
        return BatchRow(number, None, fault=f"line {number} is no JSON object")
    name, url, body = request.get("custom_id"), request.get("url"), request.get("body")
    custom_id = name if isinstance(name, str) else None

    def wrong(reason: str) -> BatchRow:
        return BatchRow(number, custom_id, fault=f"line {number}: {reason}")

    if unknown := sorted(set(request) - FIELDS):
        return wrong(f"unknown field `{unknown[0][:64]}`")
    if custom_id is None:
        return wrong("`custom_id` is missing or no text")
    if request.get("method") != "POST":
        return wrong('`method` is not "POST"')
    if not isinstance(url, str) or not re.fullmatch(r"/[!-~]*", url):
        return wrong("`url` is no route, such as /v1/completions")
    if not isinstance(body, dict):
        return wrong("`body` is no JSON object")
    if body.get("stream"):
        return wrong("`stream` is not for batches")
    return BatchRow(number, custom_id, url, body)


def file_fingerprint(path: Path) -> dict[str, Any]:
    """Identifies the version of a file by its size and SHA-256 hash.

    Raises:
        BadInput: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return {"bytes": file.tell(), "sha256": digest}
    except OSError as error:
        raise BadInput(f"cannot read {path}: {(error.strerror or '').lower()}") from None


def file_stamp(model: str) -> dict[str, Any]:
    """Identifies the version of a model without reading its weights, by the sizes and modification times of its files. A run directory
    is identified by its newest checkpoint."""
    path = Path(model)
    if not path.exists():
        return {"address": model}
    stamp: dict[str, Any] = {"address": str(path.resolve())}
    if (path / "checkpoints").is_dir():
        steps = [int(folder.name) for folder in (path / "checkpoints").iterdir() if folder.name.isdecimal()]
        return stamp | {"step": max(steps, default=None)}
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    return stamp | {"files": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}}


def invalid_row_result(row: BatchRow) -> dict[str, Any]:
    """The output line for an input line that is no valid request."""
    error = {"code": "invalid_line", "message": row.fault, "line": row.line}
    return {"id": f"batch_req_{row.line}", "custom_id": row.custom_id, "response": None, "error": error}


# ---------------------------------------------------------------- the output


class BatchOutput:
    """The output file. It is created, or repaired and continued.

    done: the line numbers of the requests whose responses are written.
    failed: number of error responses.
    prompt_tokens, tokens: the sums of prompt and completion tokens that responses report.
    first_error: the first error message; None: there is none.
    was_torn: whether the last line was incomplete, and was removed.

    Args:
        begun: the input, model and settings that responses depend on.

    Raises:
        BadInput: the file was begun with another input, model or settings, or by another program.
        Busy: another process writes the file.
        Damaged: a line other than the last is no response.
    """

    def __init__(self, path: Path, begun: Mapping[str, Any]):
        self.path, self.note = path, path.with_name(f"{path.name}.run.json")
        self.done: set[int] = set()
        self.failed, self.prompt_tokens, self.tokens = 0, 0, 0
        self.first_error: str | None = None
        self.was_torn = False
        # Bytes of whole lines.
        self._whole = 0
        self._broken: ArgosyError | None = None
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise BadInput(f"cannot write {path}: {(error.strerror or '').lower()}") from None
        try:
            self._lock()
            if os.fstat(self._file).st_size:
                self._check(begun)
                self._read()
            else:
                self._begin(begun)
        except BaseException:
            os.close(self._file)
            raise
        self._synced_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(OSError):  # a pipe or a device cannot be synced
            os.fsync(self._file)
        os.close(self._file)

    def write(self, document: Mapping[str, Any]) -> None:
        """Appends a response.

        Raises:
            ArgosyError: the file cannot be written, for example because the disk is full.
        """
        if self._broken is not None:
            raise self._broken
        line = json.dumps(document, allow_nan=False).encode() + b"\n"
        try:
            remaining = memoryview(line)
            while remaining:
                remaining = remaining[os.write(self._file, remaining) :]
            if time.monotonic() - self._synced_at > SYNC_S:
                self._synced_at = time.monotonic()
                os.fsync(self._file)
        except OSError as error:
            # Part of a line may have been written. It is removed, so that no other line follows it.
            with suppress(OSError):
                os.ftruncate(self._file, self._whole)
            problem = f"cannot write {self.path}: {(error.strerror or '').lower()}"
            self._broken = ArgosyError(problem, hint="the same command resumes")
            raise self._broken from None
        self._whole += len(line)
        self._count(document)

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"another process is writing {self.path}") from None
        except OSError:
            # A file system without locks.
            pass

    def _begin(self, begun: Mapping[str, Any]) -> None:
        """Writes what responses depend on to OUT.run.json, before the first response."""
        new = self.note.with_name(f".{self.note.name}.{os.getpid()}")
        with new.open("w", encoding="utf-8") as file:
            file.write(json.dumps(begun, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.note)

    def _check(self, begun: Mapping[str, Any]) -> None:
        another = f"another OUT, or remove {self.path} to start over"
        try:
            before = json.loads(self.note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            problem = f"{self.path} exists, but there is no record of the run that began it"
            raise BadInput(problem, where=f"{self.note} is missing or damaged", hint=another) from None
        now = json.loads(json.dumps(begun))
        if different := list(_different(before, now)):
            raise BadInput(f"{self.path} was begun with {different[0]}", where="; ".join(different[1:]) or None, hint=another)

    def _read(self) -> None:
        """Reads which requests are done, and removes an incomplete last line."""
        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    self.was_torn = True
                    break
                self._whole += len(line)
                try:
                    document = json.loads(line)
                    self._count(document)
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise Damaged(f"line {number} of {self.path} is no answer of this command") from None
        if self.was_torn:
            os.ftruncate(self._file, self._whole)

    def _count(self, document: Mapping[str, Any]) -> None:
        self.done.add(int(document["id"].removeprefix("batch_req_")))
        response = document["response"] or {}
        body = response.get("body")
        if document["error"] is not None or response.get("status_code") != 200:
            self.failed += 1
            self.first_error = self.first_error or _message(document)
        usage = body.get("usage") if isinstance(body, dict) else None
        if isinstance(usage, dict):
            # /v1/responses and /v1/messages use the second names.
            self.prompt_tokens += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
            self.tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0


def _different(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yields the differences between two JSON values, as text. A file that was moved counts as the same file."""
    if isinstance(before, dict) and isinstance(now, dict):
        if "address" not in before or "address" not in now:
            for key in sorted({*before, *now}):
                yield from _different(before.get(key), now.get(key), key)
            return
        old, new = ({k: v for k, v in tree.items() if k != "address"} or tree["address"] for tree in (before, now))
        if old != new:
            was_moved = before["address"] != now["address"]
            yield f"the {name} {before['address']}, not {now['address']}" if was_moved else f"another version of its {name}"
    elif before != now:
        yield f"{name}={before}, not {now}"


def _message(document: Mapping[str, Any]) -> str:
    """The error message of a response."""
    if document["error"] is not None:
        return document["error"]["message"]
    body = document["response"]["body"]
    error = body.get("error") if isinstance(body, dict) else None
    why = error.get("message") if isinstance(error, dict) else None
    text = f"{document['custom_id']}: {why or 'status ' + str(document['response']['status_code'])}"
    # JSON may have half of a surrogate pair, which cannot be printed.
    return text.encode("utf-8", "backslashreplace").decode()
