"""The product of two matrices, of which either may have its summed axis first or last.

    xla     XLA's own, everywhere
    amx     float32 on the matrix units of Intel's processors, which multiply bfloat16 alone: each number is the exact sum of three, and
            six products are summed (`ops/native/matrix.cc`). As exact as XLA's float32, and 1.4 times as fast (docs/log)
    amx3    two parts a number and three products: a relative error of 4e-6 where float32 has 3e-7, and 1.6 times as fast

`xla` is the default. A training step on one CPU device asks for `amx` where it can be had (`execution.products`).
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

# Multiply-adds below which XLA is as fast: laying out the tiles of a small product takes as long as the product.
SMALLEST = 1 << 24


def matmul(
    a: Float[Array, "_ _"], b: Float[Array, "_ _"], a_summed: int = 1, b_summed: int = 0, *, dtype: Any = None
) -> Float[Array, "M N"]:
    """a times b. Differentiable in both (reverse mode only for `amx`); sums are float32 at least.

    Args:
        a: [M K], or [K M] with a_summed = 0. b: [K N], or [N K] with b_summed = 1. Both have one type.
        a_summed, b_summed: which axis of each is summed.
        dtype: of the output; that of `a` unless given.

    Raises:
        Unsupported: the named implementation cannot run here.
        UnknownName: there is no implementation of this name.
    """
    return MATMUL.choose().run(a, b, a_summed, b_summed, dtype or a.dtype)


def with_wide_output(product: Callable[[Array, Array, Any], Array], a: Array, b: Array, dtype: Any) -> Array:
    """product(a, b, dtype). On GPUs, where the output has more bits than `a` and `b`, its gradient is rounded to their type: products
    of float32 with bfloat16 would run in float32, at a third of the speed (docs/guides/gpus.md)."""
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
    """Products of other types, and small ones, are XLA's."""
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
    """Each gradient is a product with g, in the order of axes of what it is the gradient of."""
    a, b = residuals
    da = (g, b, 1, 1 - b_summed) if a_summed else (b, g, 1 - b_summed, 1)
    db = (g, a, 0, 1 - a_summed) if b_summed else (a, g, 1 - a_summed, 0)
    return _product(*da, parts), _product(*db, parts)


_product.defvjp(_forward, _backward)


def amx_refuses() -> str | None:
    """Why products on matrix units cannot be traced here, or None."""
    if platform() != "cpu":
        return "it runs on CPUs"
    if on_several_devices():
        return "it is for one device"
    return library.unavailable() or (None if library.has_amx() else "this processor has no matrix units (AMX)")


MATMUL = Op("products", "products", default="xla")
MATMUL.add("xla", Implementation(_by_xla))
MATMUL.add("amx", Implementation(partial(_by_amx, parts=3), amx_refuses))
MATMUL.add("amx3", Implementation(partial(_by_amx, parts=2), amx_refuses))
