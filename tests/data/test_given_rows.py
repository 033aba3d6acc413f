"""Rows that a Python program holds."""

import datasets
import numpy as np
import pandas
import pytest

from argosy.core.errors import BadInput
from argosy.data.settings import DataSettings
from argosy.data.sources.find import find_source
from argosy.data.sources.given_rows import rows_file
from argosy.jobs.api import is_settings_group

ROWS = [{"text": f"text {number}", "score": number / 2, "names": ["a", "b"]} for number in range(9)]


def read(path) -> list[str]:
    return [document.text for document in find_source(DataSettings(source=str(path))).documents()]


def test_every_holder_of_rows_gives_the_same_file(tmp_path):
    texts = [row["text"] for row in ROWS]
    mapped = datasets.Dataset.from_list(ROWS)
    holders = [ROWS, (row for row in ROWS), tuple(ROWS), mapped, mapped.to_iterable_dataset(), pandas.DataFrame(ROWS)]
    paths = {rows_file(rows, tmp_path) for rows in holders}
    (path,) = paths
    assert read(path) == texts
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert read(rows_file(texts, tmp_path)) == texts
    numbers = rows_file([{"text": "a", "n": np.float32(0.5), "v": np.arange(2)}], tmp_path)
    assert numbers.read_text() == '{"text": "a", "n": 0.5, "v": [0, 1]}\n'


@pytest.mark.parametrize(("rows", "says"), [
    ([], "no rows"), (["a", 3], "a row that is int"), (5, "not int"), ("text", "not str"),
    (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), "several splits"),
])  # fmt: skip
def test_what_is_no_rows_is_refused_and_leaves_no_file(tmp_path, rows, says):
    with pytest.raises(BadInput, match=says):
        rows_file(rows, tmp_path)
    assert not list(tmp_path.iterdir())


def test_settings_are_told_from_rows():
    assert is_settings_group({"batch": 4})
    assert is_settings_group({"bacth": 4})
    assert not is_settings_group(ROWS)
    assert not is_settings_group(datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)))
    assert not is_settings_group(iter(ROWS))
