"""Products on matrix units against float64, XLA's own, and what they refuse."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from argosy.core.errors import Unsupported
from argosy.ops import matmul as products
from argosy.ops.matmul import matmul
from argosy.ops.native import library
from argosy.ops.op import implementations
from argosy.parallel.scope import scope

ORDERS = [(1, 0), (1, 1), (0, 0), (0, 1)]
# Of all errors, against the size of the results: measured 3e-7 and 4.6e-6. float32 in the order of the summed axis: 4e-7.
BOUND = {"amx": 5e-7, "amx3": 7e-6}


@pytest.fixture
def units() -> None:
    if why := library.load():
        pytest.skip(f"no kernels here: {why}")
    if not library.has_amx():
        pytest.skip("this processor has no matrix units")


@pytest.fixture
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SMALLEST", 0)


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def operands(M: int, N: int, K: int, order: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a and b in this order of axes, and their product in float64."""
    a, b = numbers(1, M, K), numbers(2, K, N)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    return np.ascontiguousarray(a if order[0] else a.T), np.ascontiguousarray(b.T if order[1] else b), exact


def compile_matmul(*order: int) -> Any:
    """A function of its own, because programs of one function are shared, whatever implementation they were traced with."""
    return jax.jit(lambda a, b: matmul(a, b, *order))


def off(y: object, exact: np.ndarray) -> float:
    return float(np.sqrt(np.mean((np.asarray(y, np.float64) - exact) ** 2) / np.mean(exact**2)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", BOUND)
@pytest.mark.usefixtures("units", "of_any_size")
def test_a_product_is_that_of_its_matrices(name: str, order: tuple[int, int]):
    """Whole tiles, edges in each direction, several parts of the summed axis, several blocks of rows and columns."""
    for M, N, K in [(32, 32, 32), (64, 96, 128), (33, 70, 65), (300, 47, 1700), (35, 4200, 40), (4130, 33, 50)]:
        a, b, exact = operands(M, N, K, order)
        with implementations(products=name):
            y = compile_matmul(*order)(a, b)
        assert y.shape == (M, N)
        assert off(y, exact) < BOUND[name], (M, N, K)
        if name == "amx3":
            assert off(y, exact) > 5e-7, "two parts a number, not three"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.usefixtures("units", "of_any_size")
def test_gradients_are_those_of_xla(order: tuple[int, int]):
    a, b, _ = operands(50, 40, 70, order)
    g = numbers(3, 50, 40)

    def gradients(name: str) -> tuple[jax.Array, jax.Array]:
        def loss(a: jax.Array, b: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(matmul(a, b, *order)) * g)

        with implementations(products=name):
            return jax.jit(jax.grad(loss, (0, 1)))(a, b)

    for ours, theirs in zip(gradients("amx"), gradients("xla"), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


@pytest.mark.usefixtures("units", "of_any_size")
def test_a_row_depends_on_no_other_and_on_no_thread():
    """Bit for bit. NaN in one row stays there, and an infinity becomes one."""
    a, b, _ = operands(300, 200, 900, (1, 0))
    with implementations(products="amx"):
        product = compile_matmul()
        whole = np.asarray(product(a, b))
        for _ in range(3):
            assert (np.asarray(product(a, b)) == whole).all()
        assert (np.asarray(product(a[64:128], b)) == whole[64:128]).all()
        a[5, 3], a[70, 8] = np.nan, np.inf
        spoilt = np.asarray(product(a, b))
    assert np.isnan(spoilt[[5, 70]]).all()
    rest = np.delete(np.arange(300), [5, 70])
    assert (spoilt[rest] == whole[rest]).all()


@pytest.mark.parametrize("shift", [0.0, 3.0], ids=["normal", "positive"])
@pytest.mark.usefixtures("units")
def test_errors_do_not_grow_with_the_summed_axis(shift: float):
    """Gradients of weights are summed over all tokens. In one chain of additions the error would be 1e-6."""
    a, b = numbers(1, 20_000, 64) + np.float32(shift), numbers(2, 20_000, 64) + np.float32(shift)
    exact, errors = a.T.astype(np.float64) @ b.astype(np.float64), {}
    for name in ("xla", "amx"):
        with implementations(products=name):
            errors[name] = off(compile_matmul(0, 0)(a, b), exact)
    assert errors["amx"] < 3e-7
    assert errors["amx"] != errors["xla"], "the units multiply"


@pytest.mark.parametrize("name", BOUND)
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFF8000, 0x7FFFFFFF, 0xFFFF8000, 0xFFFFFFFF])
@pytest.mark.usefixtures("units", "of_any_size")
def test_no_kind_of_nan_becomes_a_number(name: str, bits: int):
    a, b = np.ones((64, 64), np.float32), np.ones((64, 64), np.float32)
    a[5, 7] = np.array([bits], np.uint32).view(np.float32)[0]
    with implementations(products=name):
        y = np.asarray(compile_matmul()(a, b))
    assert np.isnan(y[5]).all()
    assert np.isfinite(np.delete(y, 5, 0)).all()


@pytest.mark.usefixtures("units", "of_any_size")
def test_products_at_the_same_time_do_not_share_memory():
    cases = [operands(200 + 30 * i, 150, 700, (1, 0)) for i in range(4)]
    worst: list[float] = []

    def work(a: np.ndarray, b: np.ndarray, exact: np.ndarray) -> None:
        with implementations(products="amx"):
            product = compile_matmul()
            worst.extend(off(product(a, b), exact) for _ in range(10))

    threads = [threading.Thread(target=work, args=case) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(worst) == 40
    assert max(worst) < BOUND["amx"]


@pytest.mark.usefixtures("units", "of_any_size")
def test_rows_of_a_batch_one_after_the_other():
    a, b = numbers(1, 3, 40, 50), numbers(2, 50, 60)
    with implementations(products="amx"):
        y = jax.jit(jax.vmap(lambda a, b: matmul(a, b), (0, None)))(a, b)
    np.testing.assert_allclose(y, a @ b, atol=1e-4)


@pytest.mark.usefixtures("units")
def test_small_products_and_other_types_are_those_of_xla():
    def program(*arrays: jax.Array) -> str:
        with implementations(products="amx"):
            return compile_matmul().lower(*arrays).as_text()

    large = jnp.zeros((512, 512))
    assert "argosy_matrix_product" in program(large, large)
    assert "argosy_matrix_product" not in program(large[:64, :64], large[:64, :64])
    assert "argosy_matrix_product" not in program(large.astype(jnp.bfloat16), large.astype(jnp.bfloat16))


@pytest.mark.usefixtures("units")
def test_it_is_refused_on_several_devices():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    with scope(mesh), implementations(products="amx"), pytest.raises(Unsupported, match="one device"):
        jax.eval_shape(matmul, jnp.zeros((4, 4)), jnp.zeros((4, 4)))


def test_without_the_kernels_it_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "_reason", "turned off")
    with implementations(products="amx"), pytest.raises(Unsupported, match="turned off"):
        matmul(jnp.zeros((4, 4)), jnp.zeros((4, 4)))


@pytest.mark.parametrize("b_summed", [0, 1])
def test_on_gpus_gradients_of_a_wide_output_have_the_type_of_the_arguments(b_summed: int, monkeypatch: pytest.MonkeyPatch):
    """A product of float32 with bfloat16 runs in float32 there."""
    a, b = (jnp.asarray(numbers(seed, *shape), jnp.bfloat16) for seed, shape in enumerate([(6, 8), (5, 8) if b_summed else (8, 5)]))
    weights = numbers(7, 6, 5)

    def loss(a: Any, b: Any) -> Any:
        return jnp.sum(jnp.sin(matmul(a, b, 1, b_summed, dtype=jnp.float32)) * weights)

    def of(name: str) -> tuple[Any, Any, str]:
        monkeypatch.setattr(products, "platform", lambda: name)
        program = jax.jit(jax.value_and_grad(loss, (0, 1)))
        text = program.lower(a, b).as_text()
        return *program(a, b), "\n".join(line.split(" : ")[1] for line in text.splitlines() if "dot_general" in line)

    value, gradients, gpu = of("gpu")
    expected, exact, cpu = of("cpu")
    assert value == expected
    assert "f32>, tensor" not in gpu
    assert "f32>, tensor" in cpu
    for gradient_row, other in zip(gradients, exact, strict=True):
        np.testing.assert_allclose(gradient_row.astype(jnp.float32), other.astype(jnp.float32), atol=0.02 * float(jnp.abs(other).max()))
        assert gradient_row.dtype == jnp.bfloat16
