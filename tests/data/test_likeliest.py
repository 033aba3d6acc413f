"""The cache of likeliest tokens: what is written is read, also after a kill at any byte."""

from pathlib import Path

import numpy as np
import pytest

from argosy.data.distillation.likeliest import Likeliest, TopTokens, bytes_per_target

ROWS, K = 5, 3


def quiet(_: str) -> None:
    pass


def row(number: int, targets: int, vocab: int = 1000) -> TopTokens:
    rng = np.random.default_rng(number)
    logps = -rng.gamma(1.0, 2.0, (targets, K)).astype(np.float32)
    return TopTokens(rng.integers(0, vocab, (targets, K)), logps, -rng.random(targets).astype(np.float32))


def fill_table(path: Path, vocab: int = 1000, which: tuple[int, ...] = (3, 0, 4)) -> Likeliest:
    table = Likeliest(path, ROWS, K, vocab)
    with table.writing(quiet) as writer:
        for number in which:
            writer.add(number, row(number, number, vocab))
    return table


@pytest.mark.parametrize("vocab", [1 << 16, 150_000])
def test_what_is_written_is_read_by_others(tmp_path: Path, vocab: int):
    """Ids of large vocabularies have 32 bits; log-probabilities 16, the rest of the mass 32."""
    fill_table(tmp_path / "a.npy", vocab)
    other = Likeliest(tmp_path / "a.npy", ROWS, K, vocab)
    assert other.missing(np.arange(ROWS)).tolist() == [1, 2]
    for number in (3, 0, 4):
        read_row, expected = other.read(number), row(number, number, vocab)
        np.testing.assert_array_equal(read_row.ids, expected.ids)
        np.testing.assert_allclose(read_row.logps, expected.logps, rtol=2**-11)
        np.testing.assert_array_equal(read_row.rest, expected.rest)
    size = (tmp_path / "a.bin").stat().st_size
    assert size == 3 * 8 + (3 + 0 + 4) * bytes_per_target(K, vocab)
    with pytest.raises(KeyError):
        other.read(1)


def test_a_batch_has_them_where_its_mask_says(tmp_path: Path):
    """Rows of padding have the number -1."""
    table = fill_table(tmp_path / "a.npy")
    mask = np.zeros((3, 6), np.float32)
    mask[0, [0, 2, 5]], mask[2, [1, 2, 3, 4]] = 1, 0.5
    batch = table.with_top_tokens(mask, np.array([3, -1, 4]))
    np.testing.assert_array_equal(batch["teacher_ids"][0, [0, 2, 5]], row(3, 3).ids)
    np.testing.assert_array_equal(batch["teacher_rest"][2, 1:5], row(4, 4).rest)
    assert not batch["teacher_ids"][mask == 0].any()
    assert batch["teacher_logps"].dtype == np.float32


@pytest.mark.parametrize("lost", [1, 50, 10_000])
def test_a_file_that_lost_its_end_lost_its_last_rows_and_goes_on(tmp_path: Path, lost: int):
    fill_table(tmp_path / "a.npy")
    data = tmp_path / "a.bin"
    data.write_bytes(data.read_bytes()[: max(0, data.stat().st_size - lost)])
    again = Likeliest(tmp_path / "a.npy", ROWS, K, 1000)
    missing = again.missing(np.arange(ROWS)).tolist()
    assert missing == ([1, 2, 4] if lost < 100 else [0, 1, 2, 3, 4])
    with again.writing(quiet) as writer:
        for number in missing:
            writer.add(number, row(number, number))
    whole = Likeliest(tmp_path / "a.npy", ROWS, K, 1000)
    for number in range(ROWS):
        np.testing.assert_array_equal(whole.read(number).ids, row(number, number).ids)


def test_what_was_not_flushed_is_not_known(tmp_path: Path):
    table = Likeliest(tmp_path / "a.npy", ROWS, K, 1000)
    with table.writing(quiet) as writer:
        writer.add(1, row(1, 4))
        writer.flush()
        writer.add(2, row(2, 4))
        assert Likeliest(tmp_path / "a.npy", ROWS, K, 1000).missing(np.arange(ROWS)).tolist() == [0, 2, 3, 4]
    assert table.missing(np.arange(ROWS)).tolist() == [0, 3, 4]
