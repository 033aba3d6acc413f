"""Low-rank adapters: y = W x + gain B A x, where gain = alpha / rank. Hu et al. 2021 (arXiv:2106.09685).

The shapes of the factors follow from the contraction's equation: A has the summed letters, B the kept ones. Weights of experts have an
A and a B for each expert, with the same routing. A is initialized uniformly with the variance of the PEFT library, 1 / (3 fan-in), and
B with zeros, so the model starts unchanged. W is frozen and may be quantized (QLoRA, arXiv:2305.14314).

    rsLoRA   gain = alpha / sqrt(rank)                                     arXiv:2312.03732
    PiSSA    y = W x + gain (B A - B0 A0) x                                 arXiv:2404.02948
    DoRA     y = m / |W + gain B A| (W x + gain B A x)                      arXiv:2402.09353

With dropout, elements of the adapter's input are dropped in training, y = W x + gain B A drop(x), as in PEFT. That happens only if
`dropping` has given the model keys, as a training step does. Evaluations, samples and frozen copies have no dropout.

Differences from the papers: PiSSA keeps W and subtracts the initial product of the factors, instead of storing W - gain B0 A0. That is
the same function, leaves the base as it is in its file, and is the form that PEFT converts to on export. The norm of DoRA, for each
output channel, is a constant for the gradient, as in section 4.3 of the paper and in PEFT. With dropout, PEFT also drops the input of
the part of W x by which DoRA changes it. Here W x has no dropout.
"""

import math
import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from argosy.adapt.surgery import at, find, put_at
from argosy.core.errors import BadInput, Unsupported, some
from argosy.models.parts.einsum import Contraction, ContractionWrapper, Einsum, Route, contract
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import Draw, Frozen, Meaning, weight
from argosy.ops.native.products import Panels
from argosy.ops.precision import sums_in
from argosy.ops.quantized import Quantized

# Folded into the random key of a step, because other code draws from that key too.
FOLDED = 0xD0


class Key(nnx.Variable):
    """The random key of an adapter's dropout in one pass. Stacked layers have one key for each layer."""


class LoRA(ContractionWrapper):
    """A contraction with an adapter. Its factors are descriptions until `fill` draws them.

    Args:
        of: the contraction. Its weight and bias are frozen.
        rank: the number of columns of A.
        alpha: determines the gain, alpha / rank.
        gain: replaces alpha / rank.
        start: whether the adapter has the frozen initial factors of A and B, whose product is subtracted (PiSSA).
        dropout: the share of the adapter's input that a training step drops. Lookups of an embedding drop nothing, as in PEFT.

    Raises:
        Unsupported: dropout is set for a weight that other equations contract too (latent attention).
    """

    # Set only while a training step runs.
    key: Key

    def __init__(
        self,
        of: Contraction,
        rank: int,
        alpha: float,
        *,
        gain: float | None = None,
        start: bool = False,
        dropout: float = 0.0,
    ):
        if rank < 1:
            raise ValueError(f"rank {rank}")
        if dropout and of.several and not of.is_lookup:
            problem = f"dropout on {of.eq}, whose weight other equations contract too, is not built"
            raise Unsupported(problem, hint="leave it out of adapter.where, or adapter.dropout=0")
        self.dropout = dropout
        self.eq, self.legend, self.gain = of.eq, of.legend, alpha / rank if gain is None else gain
        lead, sizes = of.shape[: of.stacked], of.sizes | {"r": rank}
        a, b = of.group + of.inner + "r", of.group + "r" + _outer(of)
        between = "".join(letter for letter in of.x if letter not in of.inner) + "r"
        self.down, self.up = f"{of.x},{a}->{between}", f"{between},{b}->{of.out}"
        fan_in = math.prod(sizes[letter] for letter in of.inner)
        self.of = _frozen(of)
        shape_a, shape_b = ((*lead, *(sizes[letter] for letter in letters)) for letters in (a, b))
        draws = Meaning(a, of.inner, of.group, of.legend), Draw("normal", (3 * fan_in) ** -0.5)
        zeros = Meaning(b, "r", of.group, of.legend), Draw("constant", 0.0)
        self.a, self.b = weight(shape_a, *draws, nnx.LoRAParam), weight(shape_b, *zeros, nnx.LoRAParam)
        self.a0 = weight(shape_a, *draws, Frozen) if start else None
        self.b0 = weight(shape_b, *zeros, Frozen) if start else None

    @property
    def rank(self) -> int:
        return int(self.a.shape[-1])

    def product(self, x: Float[Array, "..."], route: Route | None = None, *, dtype: Any = None) -> Float[Array, "..."]:
        return self.of.product(x, route, dtype=dtype) + self.gain * self._low_rank(x, route, dtype)

    def _low_rank(self, x: Float[Array, "..."], route: Route | None, dtype: Any) -> Float[Array, "..."]:
        """Returns B A x, minus the product of the initial factors (PiSSA)."""
        x = self._dropped(x)

        def through(a: nnx.Variable, b: nnx.Variable) -> Array:
            return contract(self.up, contract(self.down, x, a[...], route), b[...], route, dtype=dtype)

        low = through(self.a, self.b)
        return low if self.a0 is None or self.b0 is None else low - through(self.a0, self.b0)

    def _dropped(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Applies dropout to the input, and divides kept elements by 1 - dropout. Without a key, returns the input unchanged."""
        key: nnx.Variable | None = getattr(self, "key", None)
        if key is None:
            return x
        mask = jax.random.bernoulli(key[...], 1 - self.dropout, x.shape)
        return jnp.where(mask, x / jnp.asarray(1 - self.dropout, x.dtype), jnp.zeros((), x.dtype))

    def via(self, eq: str, x: Float[Array, "..."], *, dtype: Any = None) -> Float[Array, "..."]:
        before, out = eq.split("->")
        letters = before.split(",")[0]
        whole = self.of.via(eq, x, dtype=dtype)

        def through(a: nnx.Variable, b: nnx.Variable) -> Array:
            eq = f"{letters},{self.letters_a},{self.letters_b}->{out}"
            factors = a[...].astype(x.dtype), b[...].astype(x.dtype)
            return jnp.einsum(eq, x, *factors, optimize="optimal", preferred_element_type=whole.dtype)

        low = through(self.a, self.b)
        if self.a0 is not None and self.b0 is not None:
            low = low - through(self.a0, self.b0)
        return whole + self.gain * low

    def take(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        low = self.a[...][ids] @ self.b[...]
        if self.a0 is not None and self.b0 is not None:
            low = low - self.a0[...][ids] @ self.b0[...]
        return self.of.take(ids) + self.gain * low

    @property
    def letters_a(self) -> str:
        return self.down.split(",")[1].split("->")[0]

    @property
    def letters_b(self) -> str:
        return self.up.split(",")[1].split("->")[0]

    def effective(self) -> Array:
        """Returns the weight with the adapter, W + gain (B A - B0 A0), in float32 and with the axes of W."""
        return self._with_adapter(_floats(self.of))

    def _with_adapter(self, w: Array) -> Array:
        lead = "L" * self.stacked
        eq = f"{lead}{self.letters_a},{lead}{self.letters_b}->{lead}{self.spec}"
        delta = jnp.einsum(eq, self.a[...], self.b[...])
        if self.a0 is not None and self.b0 is not None:
            delta = delta - jnp.einsum(eq, self.a0[...], self.b0[...])
        return w + self.gain * delta.astype(w.dtype)

    def merged(self) -> Einsum:
        """Returns a contraction whose weight includes the adapter, added in float32 and rounded to the type of W. This module is
        unchanged.

        Raises:
            ValueError: W is quantized, so that merging would lose the adapter by rounding.
        """
        if not isinstance(self.of, Einsum):
            raise ValueError(f"{self.eq}: the weight under the adapter is {type(self.of).__name__}, not float")
        of = nnx.merge(*nnx.split(self.of))
        w = self.effective().astype(of.w.dtype)
        of.w = nnx.Param(w, **{k: of.w.get_metadata()[k] for k in ("meaning", "draw")})
        if of.b is not None:
            of.b = nnx.Param(of.b.get_value(), **{k: of.b.get_metadata()[k] for k in ("meaning", "draw")})
        return of

    def start_from(self, w: np.ndarray, iterations: int | None = None) -> dict[str, np.ndarray]:
        """Returns the initial values that depend on the weight, {name of a variable: array}. Empty if the factors start at random.

        Args:
            w: the weight, float32, with its stored axes.
            iterations: the number of iterations of a randomized SVD. None computes the exact SVD.
        """
        if self.a0 is None:
            return {}
        a, b = _principal(self, w, iterations)
        return {"a": a, "b": b, "a0": a, "b0": b}


class Fixed(LoRA):
    """A contraction with a frozen adapter, on which another adapter may be trained. Its gain is multiplied into B."""

    def __init__(self, of: Contraction, rank: int):
        super().__init__(of, rank, float(rank), gain=1.0)
        for name in ("a", "b"):
            v = getattr(self, name)
            setattr(self, name, Frozen(v.get_value(), **{key: v.get_metadata()[key] for key in ("meaning", "draw")}))


class DoRA(LoRA):
    """A contraction with a weight-decomposed adapter.

    m: the trained magnitude of each output channel, initialized to that of W.
    ratio: m / |W + gain B A|, set by `settle`. Before, every call computes the norms.
    """

    def __init__(self, of: Contraction, rank: int, alpha: float, *, gain: float | None = None, dropout: float = 0.0):
        super().__init__(of, rank, alpha, gain=gain, dropout=dropout)
        if of.is_lookup:
            raise Unsupported(f"DoRA on an embedding ({of.eq}) is not built", hint="leave embeddings out of `where`")
        shape = (*of.shape[: of.stacked], *(of.sizes[letter] for letter in of.kept))
        self.m = weight(shape, Meaning(of.kept, "", of.group, of.legend), Draw("constant", 1.0), nnx.LoRAParam)

    def product(self, x: Float[Array, "..."], route: Route | None = None, *, dtype: Any = None) -> Float[Array, "..."]:
        settled: nnx.Variable | None = getattr(self, "ratio", None)
        ratio = self._ratio() if settled is None else settled[...]
        y = super().product(x, route, dtype=dtype)
        return y * (ratio if route is None else ratio[route.expert]).astype(y.dtype)

    def via(self, eq: str, x: Float[Array, "..."], *, dtype: Any = None) -> Float[Array, "..."]:
        self.check_via(eq)
        return contract(eq, x, self.effective(), dtype=dtype)

    def take(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        raise ValueError(f"{self.eq}: DoRA on an embedding")

    def effective(self) -> Array:
        """Returns the weight with the adapter, m (W + gain B A) / |W + gain B A|, in float32 and with the axes of W."""
        whole = super().effective()
        return whole * jnp.expand_dims(self._ratio(), self._inner_axes())

    def settle(self) -> None:
        """Computes the ratio once, for a model that is not trained further. It would cost 2 rank + 3 FLOPs per weight in every call."""
        self.ratio = Frozen(self._ratio(), meaning=self.m.get_metadata()["meaning"], draw=Draw())

    def before_split(self) -> "DoRA":
        """Returns a copy whose ratio is computed from all features, because a shard could only compute the norms of its own
        features."""
        if getattr(self, "ratio", None) is not None:
            return self
        clone = nnx.merge(*nnx.split(self))
        clone.settle()
        return clone

    def start_from(self, w: np.ndarray, iterations: int | None = None) -> dict[str, np.ndarray]:
        return {"m": np.sqrt(np.sum(np.square(w, dtype=np.float32), self._inner_axes()))}

    def _ratio(self) -> Array:
        whole = self._with_adapter(_floats(self.of))
        norm = jax.lax.stop_gradient(jnp.sqrt(jnp.sum(whole * whole, self._inner_axes())))
        return self.m[...].astype(norm.dtype) / norm

    def _inner_axes(self) -> tuple[int, ...]:
        return tuple(self.stacked + i for i, letter in enumerate(self.spec) if letter in self.inner)


def dropping(model: nnx.Module, key: Array) -> None:
    """Gives every adapter with dropout a key for one pass: the given key, folded with the per-layer name of the contraction. So dropout
    differs between layers, and is the same for scanned and unrolled layers. Changes the model in place; without dropout, neither the
    model nor its traces change.
    """
    names = layer_addresses(model)
    for path, module in [*nnx.iter_modules(model)]:
        if not isinstance(module, LoRA) or not module.dropout:
            continue
        layer_names = names(".".join([*map(str, path), "a"]))
        hashes = np.asarray([zlib.crc32(name.encode()) for name in layer_names], np.uint32)
        keys = jax.vmap(partial(jax.random.fold_in, jax.random.fold_in(key, FOLDED)))(hashes)
        module.key = Key(keys if module.stacked else keys[0], meaning=Meaning(""), draw=Draw("constant"))


def without_adapters(model: nnx.Module) -> Any:
    """Returns the frozen base of a model, without its adapters. It is a new model that shares every weight with this one, which does
    not change. This may be called inside a jitted step, for the reference model of a preference loss, and copies nothing.

    Raises:
        BadInput: the model has no adapters.
    """
    base = nnx.merge(*nnx.split(model))
    for name, adapted in _adapted(base).items():
        put_at(base, name, adapted.of)
    return base


def _adapted(model: nnx.Module) -> dict[str, LoRA]:
    if not any(isinstance(module, LoRA) for _, module in nnx.iter_modules(model)):
        raise BadInput(
            "the model has no adapters", hint="argosy.load(MODEL, adapter=FOLDER), or put some on it: docs/adapters.md"
        )
    return find(model, ".*", LoRA)


def merge(model: nnx.Module, merged: dict[str, LoRA] | None = None) -> list[str]:
    """Merges every adapter of a model into its weight, in place. Returns the names of the contractions.

    Args:
        merged: a dict that is filled with the merged adapters, for `unmerge`. With None, the unmerged weights are freed.

    Raises:
        BadInput: there is no adapter, or an adapter is on a quantized weight, where rounding would lose it.
    """
    adapters = _adapted(model)
    if quantised := [name for name, adapted in adapters.items() if not isinstance(adapted.of, Einsum)]:
        raise BadInput(f"adapters on quantized weights cannot be merged: {some(quantised)}")
    names = list(adapters)
    if merged is not None:
        merged |= adapters
    # Each adapter is freed once it is merged.
    adapters.clear()
    for name in names:
        put_at(model, name, at(model, name).merged())
    return names


def unmerge(model: nnx.Module, merged: Mapping[str, LoRA]) -> list[str]:
    """Restores the weights and adapters of a model as they were before `merge`, bit for bit. Returns the names of the contractions.

    Args:
        merged: the adapters that `merge` stored.

    Raises:
        BadInput: the model lacks a contraction, or one has another shape. Nothing is changed then.
    """
    contractions = {name: module for name, module in find(model, ".*").items() if name in merged}
    wrong = [name for name, adapted in merged.items() if name not in contractions or contractions[name].shape != adapted.shape]
    if wrong:
        hint = "give the model that they were merged into, in the same layout"
        raise BadInput(f"no such contraction, or one of another shape: {some(wrong)}", hint=hint)
    for name, adapted in merged.items():
        put_at(model, name, adapted)
    return list(merged)


def _frozen(of: Contraction) -> Contraction:
    for name in ("w", "b"):
        v = getattr(of, name, None)
        if isinstance(v, nnx.Param):
            setattr(of, name, Frozen(v.get_value(), meaning=v.get_metadata()["meaning"], draw=v.get_metadata()["draw"]))
    return of


def _floats(of: Contraction) -> Array:
    """Returns the weight of a contraction in float32 or wider. It is frozen, so no gradient is taken through it."""
    w = of.weight
    if isinstance(w, Quantized):
        return w.dequantized()
    w = w.dense() if isinstance(w, Panels) else w
    return w.astype(sums_in(w.dtype))


def _outer(of: Contraction) -> str:
    """Returns the letters of B apart from the rank: the letters of the weight that are in the output."""
    return "".join(letter for letter in of.spec if letter in of.out)


def _principal(lora: LoRA, w: np.ndarray, iterations: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns A and B such that gain B A is the best approximation of each matrix by one of this rank. Both have the factor sqrt(S /
    gain)."""
    lead = lora.stacked
    order = lora.group + lora.inner + _outer(lora)
    axes = [*range(lead), *(lead + lora.spec.index(letter) for letter in order)]
    inner = math.prod(lora.sizes[letter] for letter in lora.inner)
    matrices = np.asarray(w, np.float32).transpose(axes).reshape(-1, inner, w.size // (_matrix_count(lora, w) * inner))
    rank = lora.rank
    if rank > min(matrices.shape[1:]):
        raise BadInput(f"adapter.rank = {rank}: {lora.eq} has {min(matrices.shape[1:])} singular values", hint="a lower rank")
    parts = [_svd(matrix, rank, iterations) for matrix in matrices]
    root = [np.sqrt(s / lora.gain) for _, s, _ in parts]
    a = np.stack([u * r for (u, _, _), r in zip(parts, root)]).reshape(lora.a.shape)
    b = np.stack([r[:, None] * v for (_, _, v), r in zip(parts, root)]).reshape(lora.b.shape)
    return a.astype(np.float32), b.astype(np.float32)


def _matrix_count(lora: LoRA, w: np.ndarray) -> int:
    """Returns the number of matrices in a weight: layers times experts."""
    return math.prod(w.shape[: lora.stacked]) * math.prod(lora.sizes[letter] for letter in lora.group)


def _svd(matrix: np.ndarray, rank: int, iterations: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes the largest singular values of a matrix and their vectors. If a number of iterations is given, it uses randomized
    subspace iteration (arXiv:0909.4061, algorithm 4.4)."""
    if iterations is None:
        u, s, v = np.linalg.svd(matrix, full_matrices=False)
        return u[:, :rank], s[:rank], v[:rank]
    noise = np.random.default_rng(0).standard_normal((matrix.shape[1], min(2 * rank, *matrix.shape)), np.float32)
    q = np.linalg.qr(matrix @ noise)[0]
    for _ in range(iterations):
        q = np.linalg.qr(matrix @ np.linalg.qr(matrix.T @ q)[0])[0]
    u, s, v = np.linalg.svd(q.T @ matrix, full_matrices=False)
    return (q @ u)[:, :rank], s[:rank], v[:rank]
