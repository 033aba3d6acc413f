"""Verbs that read a file of the user: one that is no text is refused by what it is, and a byte-order mark is no part of it."""

from pathlib import Path

import pytest

from argosy.cli.verbs.generate import read_prompt
from argosy.client.batch_files import read_batch_rows
from argosy.client.bench_data import read_samples
from argosy.client.settings import BenchSettings
from argosy.core.errors import BadInput
from argosy.evals.rows import read_rows, read_task_text

READERS = {
    "argosy eval data=FILE": read_task_text,
    "argosy eval data=FILE.jsonl": read_rows,
    "argosy bench serve data=FILE": lambda path: [sample.prompt for sample in read_samples(path, BenchSettings())],
    "argosy run-batch": lambda path: [row.fault for row in read_batch_rows(path)],
    "argosy generate @FILE": lambda path: read_prompt(f"@{path}"),
}


@pytest.mark.parametrize("verb", READERS)
def test_a_table_is_refused_by_what_it_is(tmp_path: Path, verb: str):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"PAR1\x15\x04\x15\x10" * 9)
    with pytest.raises(BadInput, match="this is a Parquet file, not text") as caught:
        READERS[verb](path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("verb", READERS)
def test_a_byte_order_mark_changes_nothing(tmp_path: Path, verb: str):
    text = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "b"}, "prompt": "c"}\n'
    results = []
    for mark in ("", "\ufeff"):
        path = tmp_path / "data.jsonl"
        path.write_text(mark + text, encoding="utf-8")
        results.append(READERS[verb](path))
    assert results[0] == results[1]
    assert "\ufeff" not in str(results)


def test_a_task_whose_texts_hold_half_a_character_is_refused_with_its_line(tmp_path: Path):
    (tmp_path / "data.jsonl").write_text('{"query": "a"}\n{"query": "\\ud800"}\n')
    with pytest.raises(BadInput, match="half of a surrogate pair") as caught:
        read_rows(tmp_path / "data.jsonl")
    assert "line 2" in str(caught.value.where)
