"""The product of two matrices. The summed axis of each may be the first or the last.

    xla     XLA's own product, on every platform
    amx     float32 on the matrix units of Intel's processors (AMX), which only multiply bfloat16. Each number is the exact sum of three
            bfloat16 numbers, and six products are summed (`ops/native/matrix.cc`). As exact as XLA's float32, and 1.4 times as fast
            (docs/log)
    amx3    like `amx`, with two bfloat16 numbers and three products. The relative error is 4e-6, where that of float32 is 3e-7. 1.6
            times as fast as XLA

`xla` is the default. A training step on one CPU device uses `amx` if the processor has it (`execution.products`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from argosy.ops.native import library
from argosy.ops.op import Implementation, Op
from argosy.parallel.scope import on_several_devices, platform

# The number of multiply-adds below which XLA is as fast, because laying out tiles takes as long as the product.
SMALLEST = 1 << 24


def matmul(
    a: Float[Array, "_ _"], b: Float[Array, "_ _"], a_summed: int = 1, b_summed: int = 0, *, dtype: Any = None
) -> Float[Array, "M N"]:
    """Computes a times b, with sums in float32 at least. Differentiable in both (for `amx`, in reverse mode only).

    Args:
        a: [M K], or [K M] if a_summed = 0.
        b: [K N], or [N K] if b_summed = 1. It has the dtype of a.
        a_summed, b_summed: the axis of a and of b that is summed.
        dtype: the dtype of the output. Default: that of a.

    Raises:
        Unsupported: the requested implementation cannot run here.
        UnknownName: there is no implementation of the requested name.
    """
    return MATMUL.choose().run(a, b, a_summed, b_summed, dtype or a.dtype)


def with_wide_output(product: Callable[[Array, Array, Any], Array], a: Array, b: Array, dtype: Any) -> Array:
    """Returns product(a, b, dtype). On GPUs, if `dtype` has more bits than a and b, the output's gradient is rounded to the dtype of a.

    Otherwise the backward pass would multiply float32 with bfloat16, which runs in float32 at a third of the speed
    (docs/guides/gpus.md).
    """
    if platform() == "gpu" and a.dtype == b.dtype and jnp.finfo(dtype).bits > jnp.finfo(a.dtype).bits:
        return _wide(product, a, b, dtype)
    return product(a, b, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _wide(product: Callable[[Array, Array, Any], Array], a: Array, b: Array, dtype: Any) -> Array:
    return product(a, b, dtype)


def _wide_forward(product: Callable[[Array, Array, Any], Array], a: Array, b: Array, dtype: Any) -> tuple[Array, tuple[Array, Array]]:
    return product(a, b, dtype), (a, b)


def _wide_backward(
    product: Callable[[Array, Array, Any], Array], dtype: Any, residuals: tuple[Array, Array], g: Array
) -> tuple[Array, Array]:
    kind = residuals[0].dtype
    return jax.vjp(lambda a, b: product(a, b, kind), *residuals)[1](g.astype(kind))


_wide.defvjp(_wide_forward, _wide_backward)


def _by_xla(a: Array, b: Array, a_summed: int, b_summed: int, dtype: Any) -> Array:
    return with_wide_output(partial(_dot, a_summed, b_summed), a, b, dtype)


def _dot(a_summed: int, b_summed: int, a: Array, b: Array, dtype: Any) -> Array:
    return jax.lax.dot_general(a, b, (((a_summed,), (b_summed,)), ((), ())), preferred_element_type=dtype)


def _by_amx(a: Array, b: Array, a_summed: int, b_summed: int, dtype: Any, *, parts: int) -> Array:
    """Computes products on matrix units. Uses XLA for small products and for dtypes other than float32."""
    small = a.size * b.shape[1 - b_summed] < SMALLEST or min(*a.shape, *b.shape) < 32
    if small or not (a.dtype == b.dtype == dtype == jnp.float32):
        return _by_xla(a, b, a_summed, b_summed, dtype)
    return _product(a, b, a_summed, b_summed, parts)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _product(a: Array, b: Array, a_summed: int, b_summed: int, parts: int) -> Array:
    out = jax.ShapeDtypeStruct((a.shape[1 - a_summed], b.shape[1 - b_summed]), jnp.float32)
    call = jax.ffi.ffi_call("argosy_matrix_product", out, vmap_method="sequential")
    return call(a, b, a_summed=np.int64(a_summed), b_summed=np.int64(b_summed), parts=np.int64(parts))


def _forward(a: Array, b: Array, a_summed: int, b_summed: int, parts: int) -> tuple[Array, tuple[Array, Array]]:
    return _product(a, b, a_summed, b_summed, parts), (a, b)


def _backward(a_summed: int, b_summed: int, parts: int, residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    """Computes both gradients as products with g. Each has the order of axes of its own input."""
    a, b = residuals
    da = (g, b, 1, 1 - b_summed) if a_summed else (b, g, 1 - b_summed, 1)
    db = (g, a, 0, 1 - a_summed) if b_summed else (a, g, 1 - a_summed, 0)
    return _product(*da, parts), _product(*db, parts)


_product.defvjp(_forward, _backward)


def amx_refuses() -> str | None:
    """Returns why products on matrix units cannot be used in the program being traced. None: they can."""
    if platform() != "cpu":
        return "it runs on CPUs"
    if on_several_devices():
        return "it is for one device"
    return library.unavailable() or (None if library.has_amx() else "this processor has no matrix units (AMX)")


MATMUL = Op("products", "products", default="xla")
MATMUL.add("xla", Implementation(_by_xla))
MATMUL.add("amx", Implementation(partial(_by_amx, parts=3), amx_refuses))
MATMUL.add("amx3", Implementation(partial(_by_amx, parts=2), amx_refuses))
