"""The compiled kernels against NumPy in float64 and the reference, and what their library needs."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from argosy.core.errors import Unsupported
from argosy.ops.attention import UNSEEN, Score
from argosy.ops.native import library
from argosy.ops.native.codes import PANEL
from argosy.ops.native.paged import NATIVE
from argosy.ops.native.products import Panels, fits_bfloat16, pack_panels, product
from argosy.ops.paged.attention import paged_reference


@pytest.fixture
def kernels() -> None:
    if why := library.load():
        pytest.skip(f"no kernels here: {why}")


TYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weight(kind: str, *shape: int) -> np.ndarray:
    return numbers(1, *shape).astype(TYPES[kind])


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("summed", "columns"), [(1, 1), (70, 33), (100, 96), (2500, 31)])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.usefixtures("kernels")
def test_a_product_is_that_of_the_weight(kind: str, summed: int, columns: int, first: bool):
    w = weight(kind, summed, columns)
    p = pack_panels(jnp.asarray(w if first else w.T), 1, first)
    assert p.values.dtype == w.dtype
    assert (np.asarray(p.dense()) == (w if first else w.T)).all()
    for rows in (1, 2, 7, 12, 13, 40):
        x = numbers(rows, rows, summed)
        y = np.asarray(jax.jit(product)(jnp.asarray(x), p), np.float64)
        exact, size = x.astype(np.float64) @ w.astype(np.float64), np.abs(x) @ np.abs(w.astype(np.float64))
        assert (np.abs(y - exact) <= 1e-6 * size).all()


@pytest.mark.usefixtures("kernels")
def test_a_gradient_is_refused():
    p = pack_panels(jnp.asarray(numbers(0, 40, 64)), 1, True)
    with pytest.raises(Unsupported, match="no gradient"):
        jax.grad(lambda x: product(x, p).sum())(jnp.ones((2, 40)))


@pytest.mark.usefixtures("kernels")
def test_a_row_does_not_depend_on_the_others():
    """Bit for bit, and what is NaN or infinite in one row stays there."""
    w, x = pack_panels(jnp.asarray(numbers(0, 300, 70)), 1, True), numbers(1, 50, 300)
    alone = np.concatenate([product(jnp.asarray(row[None]), w) for row in x])
    assert (np.asarray(product(jnp.asarray(x), w)) == alone).all()
    x[3, 5], x[9, 0] = np.nan, np.inf
    spoiled = np.asarray(product(jnp.asarray(x), w))
    others = [i for i in range(50) if i not in (3, 9)]
    assert (spoiled[others] == alone[others]).all()
    assert np.isnan(spoiled[3]).all()
    assert not np.isfinite(spoiled[9]).any()


@pytest.mark.usefixtures("kernels")
def test_weights_that_bfloat16_holds_are_kept_in_it_with_the_same_result():
    w, x = numbers(0, 200, 64).astype(ml_dtypes.bfloat16).astype(np.float32), jnp.asarray(numbers(1, 5, 200))
    p = pack_panels(jnp.asarray(w), 1, True)
    assert p.values.dtype == jnp.bfloat16
    assert p.dtype == p.dense().dtype == jnp.float32
    wide = Panels(p.values.astype(jnp.float32), p.shape, p.inner, p.first, p.dtype)
    assert (np.asarray(product(x, p)) == np.asarray(product(x, wide))).all()
    w[199, 63] += np.float32(2**-12)
    assert not fits_bfloat16(w)
    assert pack_panels(jnp.asarray(w), 1, True).values.dtype == jnp.float32


def test_rows_of_a_packed_embedding():
    w = numbers(0, 3 * PANEL + 5, 20)
    p, ids = pack_panels(jnp.asarray(w), 1, False), np.array([[0, 31, 32], [100, 7, 64]])
    assert (np.asarray(p.rows(jnp.asarray(ids))) == w[ids]).all()


# ---------------------------------------------------------------- attention


class Case:
    """Rows of several lengths with shuffled pages; what belongs to no row is NaN."""

    def __init__(self, T: int, N: int, K: int, H: int, U: int, page: int = 8, dtype: type = np.float32, **options: object):
        rng = np.random.default_rng(0)
        lengths = np.asarray([T, 0, T + 3, 150, 90, T + 64], np.int32)
        P, pages = -(-max(lengths) // page), sum(-(-n // page) for n in lengths) + 3
        self.table, free = np.full((len(lengths), P), -1, np.int32), iter(rng.permutation(pages))
        self.pools = [np.full((pages, page, K, n), np.nan, dtype) for n in (H, U)]
        for row, length in zip(self.table, lengths):
            for at in range(length):
                if at % page == 0:
                    row[at // page] = next(free)
                for pool in self.pools:
                    pool[row[at // page], at % page] = rng.normal(size=(K, pool.shape[-1]))
        self.q = rng.normal(size=(len(lengths), T, N, H)).astype(np.float32)
        self.lengths, self.at = lengths, (lengths[:, None] - T + np.arange(T)).astype(np.int32)
        sinks = jnp.asarray(rng.normal(size=N).astype(np.float32)) if options.pop("sinks", False) else None
        self.score = Score(H**-0.5, sinks=sinks, **options)  # pyright: ignore[reportArgumentType]

    def given(self, first: int = 0, last: int | None = None) -> tuple:
        some = slice(first, last)
        pools = tuple(map(jnp.asarray, self.pools))
        arrays = [jnp.asarray(a) for a in (self.table, self.lengths, self.at[:, some])]
        return jnp.asarray(self.q[:, some]), pools, *arrays, self.score


CASES = {
    "decoding": {"T": 1, "N": 6, "K": 2, "H": 24, "U": 40},
    "one head": {"T": 1, "N": 1, "K": 1, "H": 1, "U": 1, "page": 1},
    "prompts": {"T": 37, "N": 6, "K": 3, "H": 16, "U": 16},
    "long prompts": {"T": 130, "N": 4, "K": 1, "H": 64, "U": 64},
    "window": {"T": 37, "N": 2, "K": 1, "H": 16, "U": 16, "window": 9},
    "cap and sinks": {"T": 5, "N": 4, "K": 4, "H": 64, "U": 64, "cap": 3.0, "sinks": True},
    "everything": {"T": 70, "N": 4, "K": 2, "H": 33, "U": 17, "window": 20, "cap": 5.0, "sinks": True},
    "bfloat16": {"T": 3, "N": 4, "K": 2, "H": 64, "U": 64, "dtype": ml_dtypes.bfloat16},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("kernels")
def test_attention_is_that_of_the_reference(name: str):
    case = Case(**CASES[name])  # pyright: ignore[reportArgumentType]
    y, lse = map(np.asarray, jax.jit(lambda: NATIVE.run(*case.given(), lse=True))())
    expected, expected_lse = map(np.asarray, paged_reference(*case.given(), lse=True))
    some = case.at >= 0
    np.testing.assert_allclose(y[some], expected[some], rtol=2e-6, atol=3e-6)
    np.testing.assert_allclose(lse[some], expected_lse[some], rtol=2e-6, atol=3e-6)
    assert np.isfinite(y).all()
    assert np.isfinite(lse).all()
    if case.score.sinks is None:
        assert (lse[~some] == np.float32(UNSEEN)).all()
        assert (y[~some] == 0).all()


@pytest.mark.usefixtures("kernels")
def test_a_query_does_not_depend_on_the_others_of_its_call():
    """Bit for bit, so an answer is the same whether its prompt was computed at once, in chunks, or beside others."""
    case = Case(T=110, N=6, K=2, H=24, U=40, window=50)
    whole = np.asarray(NATIVE.run(*case.given()))
    parts = [NATIVE.run(*case.given(first, last)) for first, last in ((0, 1), (1, 64), (64, 110))]
    assert (np.concatenate(parts, 1) == whole).all()
    q, pools, *rows, score = case.given()
    alone = [NATIVE.run(q[i : i + 1], pools, *(a[i : i + 1] for a in rows), score) for i in range(len(q))]
    assert (np.concatenate(alone) == whole).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"dtype": np.float16}, "pools of float16"), ({"window": 4, "chunked": True}, "chunks")],
)
@pytest.mark.usefixtures("kernels")
def test_what_attention_cannot_do_is_refused(change: dict, reason: str):
    q, pools, table, lengths, _, score = Case(**{"T": 1, "N": 2, "K": 1, "H": 8, "U": 8, **change}).given()
    assert reason in str(NATIVE.refuses(q, pools, table, lengths, score, False))  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------- the library


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library._key.cache_clear()
    return tmp_path


def compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_it_can_be_turned_off(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(library.SWITCH, "0")
    with pytest.raises(library.Unavailable, match="ARGOSY_NATIVE=0"):
        library.built_library()


def test_without_a_compiler_it_says_so(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", str(elsewhere / "nothing"))
    with pytest.raises(library.Unavailable, match="no C\\+\\+ compiler"):
        library.built_library()


def test_a_failed_build_tells_the_compilers_error_and_leaves_no_file(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", compiler(elsewhere, 'echo "kernels.cc:1: error: too old" >&2; [ "$1" = --version ]'))
    with pytest.raises(library.Unavailable, match="too old"):
        library.built_library()
    assert not list((elsewhere / "argosy" / "native").iterdir())


def test_it_is_built_once_and_is_the_users_own(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    """Another compiler, or another version of it, makes another library; one that others may write is not loaded."""
    script = 'echo 1 >> "$0.calls"; while [ $# -gt 1 ]; do shift; done; [ "$1" = --version ] || echo library > "$1"'
    monkeypatch.setenv("CXX", compiler(elsewhere, script))
    target = library.built_library()
    assert stat.S_IMODE(target.stat().st_mode) == 0o700
    assert library.built_library() == target
    assert len((elsewhere / "compiler.calls").read_text().split()) == 2 + len(library.SOURCES), "its version, the sources, the library"
    target.chmod(0o722)
    with pytest.raises(library.Unavailable, match="others may write it"):
        library.built_library()


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="flags of x86-64")
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3"])
def test_kernels_for_narrower_vectors(tmp_path: Path, level: str):
    """This file and those of blocks and codes again, with a library for processors without 512-bit vectors, and without 256-bit
    ones."""
    script = f'exec {library._compiler()} "$@" -march={level}'
    variables = {"CXX": compiler(tmp_path, script), "XDG_CACHE_HOME": str(tmp_path)}
    files = [__file__, *(str(Path(__file__).with_name(f"test_native_{name}.py")) for name in ("blocks", "codes"))]
    tests = "product or row or query or reference or multiplied or float"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", tests]
    done = subprocess.run(words, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert set(done.stdout.split("[")[0].strip()) == {"."}, "nothing was skipped"
