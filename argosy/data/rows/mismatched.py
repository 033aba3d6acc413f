"""Pairs each record with a completion of another prompt, for KTO (arXiv:2402.01306).

Records of one prompt are often neighbors, and sorted files hold thousands of them in a row. So the file is read in runs: consecutive
records with the same prompt. The k-th record of a run gets the k-th completion of the next run. The last run gets completions of the
first. The file is read a second time, one run ahead of the first reading. Only the first KEPT records of each run are in memory. The
pairing depends only on the file, and not on the groups in which it is read.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from argosy.core.errors import BadInput
from argosy.data.sources import SourceRecord

# Number of records that are kept of each run. Longer runs before it reuse them in turn.
KEPT = 64


class MismatchedRecords:
    """Finds a record with another prompt for each record.

    Args:
        records: returns an iterable of all records from the first on, every time it is called.
    """

    def __init__(self, records: Callable[[], Iterable[SourceRecord]]):
        self._records = records
        # Conversations and texts are paired separately, because an answer of one kind does not fit a prompt of the other.
        self._runs: dict[bool, _Runs] = {}

    def of(self, record: SourceRecord) -> SourceRecord:
        """Returns the record whose completion is paired with this record's prompt. Call it for every record, in the order of the file.

        Raises:
            BadInput: all records have the same prompt.
        """
        kind = is_chat(record)
        if kind not in self._runs:
            self._runs[kind] = _Runs(record for record in self._records() if is_chat(record) == kind)
        return self._runs[kind].of(record)


class _Runs:
    """The runs of a file, read one run ahead.

    beginning: the first two runs. The last run is paired with the first of them that has another prompt.
    """

    def __init__(self, records: Iterable[SourceRecord]):
        self.runs, self.beginning = runs_of(records), list[list[SourceRecord]]()
        self.current: list[SourceRecord] | None = None
        self.following = self._next()
        self.place = 0

    def _next(self) -> list[SourceRecord] | None:
        run = next(self.runs, None)
        if run is not None and len(self.beginning) < 2:
            self.beginning.append(run)
        return run

    def of(self, record: SourceRecord) -> SourceRecord:
        key, self.place = prompt_key(record), self.place + 1
        while self.current is None or prompt_key(self.current[0]) != key:
            if self.following is None:
                raise ValueError(f"{record.where} comes before a record that was asked for earlier")
            self.current, self.following, self.place = self.following, self._next(), 0
        others = self.following or next((run for run in self.beginning if prompt_key(run[0]) != key), None)
        if others is None:
            problem = "KTO compares with answers to other prompts, and all records have the same one"
            raise BadInput(problem, where=record.where, hint="give examples with at least two prompts")
        return others[self.place % len(others)]


def runs_of(records: Iterable[SourceRecord]) -> Iterator[list[SourceRecord]]:
    """Yields the first KEPT records of each run: consecutive records with the same prompt."""
    run: list[SourceRecord] = []
    prompt: Any = None
    for record in records:
        key = prompt_key(record)
        if run and key != prompt:
            yield run
            run = []
        prompt = key
        if len(run) < KEPT:
            run.append(record)
    if run:
        yield run


def is_chat(record: SourceRecord) -> bool:
    return record.messages is not None


def prompt_key(record: SourceRecord) -> Any:
    """A key that is equal for records with the same prompt."""
    return list(record.messages[: record.prompt_messages]) if record.messages is not None else record.prompt
