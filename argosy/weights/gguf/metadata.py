"""Reads the metadata of a GGUF file: sizes, rotary positions, experts.

`Metadata` records every key that is read, and every mistake. A key of the file that nothing has read could change the results without
notice, so it is a mistake too, and all mistakes are reported at once. As in llama.cpp, 0, false and the empty text count as absent.
This module knows the keys that architectures share, but no architecture. Tensor names are in `gguf.rows`.
"""

import math
from typing import Any, Literal

import numpy as np

from argosy.core.errors import BadInput, Damaged
from argosy.core.formats import quote_name
from argosy.core.formats.gguf import GGUF
from argosy.models.settings import Experts, LinearScaling, Llama3Scaling, LongRope, Rope, Yarn

# Keys that do not affect the computation here: sizes that the shapes of tensors give too, and details of training.
HARMLESS = frozenset(
    """vocab_size tensor_data_layout pooling_type expert_shared_count attention.layer_norm_epsilon
    rope.scaling.finetuned rope.scaling.original_context_length""".split()  # noqa: SIM905
)
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = ROPE_TENSORS
KIND = "general.architecture"

Score = Literal["softmax", "sigmoid", "softmax_chosen"]
Scaling = LinearScaling | Llama3Scaling | Yarn | LongRope


class Metadata:
    """Reads the keys of a file's architecture by their names without the architecture's prefix, and collects mistakes in `problems`.

    kind: the architecture, such as `llama`.
    asked: the keys that were read.
    """

    def __init__(self, file: GGUF):
        self.file, self.kind = file, str(file.meta.get(KIND))
        self.asked: set[str] = set()
        self.problems: list[str] = []

    @property
    def unasked(self) -> list[str]:
        """Messages about the keys of this architecture that nothing has read."""
        start, expected = f"{self.kind}.", self.asked | HARMLESS
        keys = {key.removeprefix(start): value for key, value in self.file.meta.items() if key.startswith(start)}
        unread = {key: value for key, value in keys.items() if key not in expected and _is_present(value)}
        return [f"{quote_name(start + key)} = {quote_name(str(value), 40)} is not understood" for key, value in unread.items()]

    def get(self, key: str) -> Any:
        """Returns the value of a key; None if it is absent. A list with the same value for every layer is returned as that value."""
        self.asked.add(key)
        value = self.file.meta.get(f"{self.kind}.{key}")
        if isinstance(value, np.ndarray) and value.size and (value == value.flat[0]).all():
            value = value.flat[0].item()
        return value if _is_present(value) else None

    def some(self, key: str) -> int | None:
        """Reads a positive integer; None if it is absent or, with a recorded mistake, something else."""
        value = self.get(key)
        if value is None or (type(value) is int and value > 0):
            return value
        self.add_problem(key, f"is {str(value)[:40]}, not a count that holds for every layer")
        return None

    def count(self, key: str, otherwise: int | None = None) -> int:
        """Reads a positive integer. If it is missing and there is no `otherwise`, records a mistake and returns 1."""
        value = self.some(key) or otherwise
        if value is None:
            self.add_problem(key, "is missing")
        return value or 1

    def number(self, key: str, otherwise: float | None = None) -> float:
        """Reads a number. If it is missing and there is no `otherwise`, records a mistake and returns 1."""
        value = self.get(key)
        value = otherwise if value is None else value
        if isinstance(value, int | float) and math.isfinite(short := decimal(value)):
            return short
        self.add_problem(key, "is missing" if value is None else f"is {str(value)[:40]}, not a number")
        return 1.0

    def must(self, key: str, *allowed: Any) -> None:
        """Records a mistake unless the key is absent or has one of the allowed values. Unlike in `get`, false counts as present."""
        value = self.get(key)
        value = False if self.file.meta.get(f"{self.kind}.{key}") is False else value
        value = decimal(value) if isinstance(value, float) else value
        if value is not None and value not in allowed:
            self.add_problem(key, f"is {str(value)[:40]}: only {' or '.join(map(str, allowed))} is built")

    def add_problem(self, key: str, problem: str) -> None:
        if (problem := f"`{self.kind}.{key}` {problem}") not in self.problems:
            self.problems.append(problem)

    def has(self, tensor: str) -> bool:
        return tensor in self.file.names

    def axis(self, tensor: str, at: int) -> int:
        """Returns the size of axis `at` of a tensor. If the tensor or the axis is missing, records a mistake and returns 1."""
        shape = self.file.shape(tensor) if self.has(tensor) else ()
        if len(shape) > at:
            return shape[at]
        self.problems.append(f"`{tensor}` is {f'{list(shape)}' if self.has(tensor) else 'missing'}")
        return 1

    @property
    def layers(self) -> int:
        """The number of layers.

        Raises:
            Damaged: there are more layers than tensors. Without this bound, a damaged file could make lists of any length.
        """
        layers = self.count("block_count")
        if layers > len(self.file.names):
            raise Damaged(f"{layers} layers in {len(self.file.names)} tensors", where=f"in {self.file.path}")
        return layers

    def without(self, tensor: str) -> tuple[int, ...]:
        """Returns the indices of the layers that lack a tensor. In the name `tensor`, `{l}` stands for the index of the layer."""
        return tuple(i for i in range(self.layers) if not self.has(tensor.replace("{l}", str(i))))


def read_sizes(meta: Metadata) -> dict[str, Any]:
    """Reads the sizes that every decoder has, as arguments of its config."""
    width, heads = meta.count("embedding_length"), meta.count("attention.head_count")
    size = meta.count("attention.key_length", width // heads or None)
    meta.must("attention.value_length", size)
    meta.must("attention.causal", True)
    return {
        "vocab": meta.axis("token_embd.weight", 0),
        "width": width,
        "layers": meta.layers,
        "ffn": meta.count("feed_forward_length"),
        "heads": heads,
        "kv_heads": meta.count("attention.head_count_kv", heads),
        "head_size": size,
        "context": meta.count("context_length"),
        "norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "tied": not meta.has("output.weight"),
    }


def read_experts(meta: Metadata, width: int, *, score: Score, normalized: bool, **more: Any) -> Experts:
    """Reads the settings of a mixture of experts.

    Args:
        width: the feed-forward width of an expert.
        score, normalized: the values that the architecture fixes. Keys of the file may repeat them, but not differ.
        more: further settings of `Experts`.
    """
    meta.must("expert_gating_func", {"softmax": 1, "sigmoid": 2, "softmax_chosen": 3}[score])
    meta.must("expert_weights_norm", normalized)
    count, active = meta.count("expert_count"), meta.count("expert_used_count")
    scale = meta.number("expert_weights_scale", 1.0)
    return Experts(count=count, active=active, ffn=width, score=score, normalized=normalized, scale=scale, **more)


def read_gguf_rope(meta: Metadata, size: int, *, partial: bool = False, truncate: bool = True) -> Rope:
    """Reads the settings of rotary positions from the keys and from the tensors of frequency factors.

    Args:
        size: the head size.
        partial: whether the architecture permits that only a part of each head is rotated.
        truncate: whether YaRN's ramp ends at whole dimensions. No key stores this.
    """
    rotary_size = meta.count("rope.dimension_count", size)
    if rotary_size > size or not (partial or rotary_size == size):
        meta.add_problem("rope.dimension_count", f"is {rotary_size} of {size}, which is not built for this architecture")
        rotary_size = size
    base = meta.number("rope.freq_base", 10_000.0)
    return Rope(base=base, scaling=_scaling(meta, base, rotary_size, truncate), part=rotary_share(rotary_size, size))


def _scaling(meta: Metadata, base: float, rotary_size: int, truncate: bool) -> Scaling | None:
    """Reads the rotary scaling from the tensors of frequency factors, otherwise from keys. A factor without a type means linear
    scaling."""
    factor = meta.get("rope.scaling.factor")
    kind = meta.get("rope.scaling.type") or ("linear" if factor else "none")
    built: tuple[str, ...] = ("none", "linear", "yarn")
    if long := meta.has(ROPE_LONG) or meta.has(ROPE_SHORT):
        built = ("none", "longrope")
    elif meta.has(ROPE_FREQS):
        built = ("none",)
    if kind not in built:
        meta.add_problem(
            "rope.scaling.type", f"is {quote_name(str(kind), 40)}: only {' or '.join(built)} is built for these tensors"
        )
        return None
    if long:
        return _longrope(meta, rotary_size)
    if meta.has(ROPE_FREQS):
        divisors = _factors(meta, ROPE_FREQS, rotary_size)
        return None if divisors is None else llama3(divisors, base)
    for key in ("rope.scale_linear", "rope.scaling.attn_factor"):
        meta.must(key, 1.0)
    if kind == "linear":
        return LinearScaling(factor=meta.number("rope.scaling.factor"))
    return _yarn(meta, truncate) if kind == "yarn" else None


def _yarn(meta: Metadata, truncate: bool) -> Yarn:
    meta.must("rope.scaling.yarn_ext_factor", 1.0)
    attention = "rope.scaling.yarn_attn_factor"
    return Yarn(
        factor=meta.number("rope.scaling.factor"),
        original=meta.count("rope.scaling.original_context_length"),
        fast=meta.number("rope.scaling.yarn_beta_fast", 32.0),
        slow=meta.number("rope.scaling.yarn_beta_slow", 1.0),
        truncate=truncate,
        attention=meta.number(attention) if meta.get(attention) else None,
    )


def _longrope(meta: Metadata, rotary_size: int) -> LongRope | None:
    meta.must("rope.scaling.factor", 1.0)
    short, long = _factors(meta, ROPE_SHORT, rotary_size), _factors(meta, ROPE_LONG, rotary_size)
    if short is None or long is None:
        return None
    return LongRope(
        short=tuple(map(decimal, short)),
        long=tuple(map(decimal, long)),
        original=meta.count("rope.scaling.original_context_length"),
        attention=meta.number("rope.scaling.attn_factor", 1.0),
    )


def _factors(meta: Metadata, name: str, rotary_size: int) -> np.ndarray | None:
    """Reads the divisors of the rotary frequencies, one for each rotary pair. If their number is wrong, records a mistake and returns
    None."""
    if (count := meta.axis(name, 0)) == rotary_size // 2:
        return meta.file.read(name)
    meta.problems.append(f"`{name}` has {count} factors for {rotary_size // 2} rotary pairs")
    return None


def llama3(divisors: np.ndarray, base: float) -> Llama3Scaling:
    """Recovers the settings of Llama 3.1's rotary scaling from the divisors of the frequencies. The largest divisor is the factor. A
    divisor on the ramp determines the original context. Without one, the original context is that of the released models.

    Raises:
        BadInput: no settings result in these divisors.
    """
    unknown = BadInput(f"the factors in {ROPE_FREQS} match no known scaling", hint="use the model's Hub folder")
    if not (np.isfinite(divisors).all() and divisors.min() > 0.999):
        raise unknown
    plain = np.asarray(Rope(base=base).frequencies(2 * len(divisors))[0])
    factor = decimal(divisors.max())
    ramp = np.flatnonzero((divisors > 1.001) & (divisors < 0.999 * factor))
    scaling = Llama3Scaling(factor=max(factor, 1.0))
    if len(ramp):
        smooth = (1 / divisors[ramp[0]] - 1 / factor) / (1 - 1 / factor)
        turns = scaling.low + float(smooth) * (scaling.high - scaling.low)
        scaling = Llama3Scaling(factor=factor, original=round(turns * 2 * math.pi / float(plain[ramp[0]])))
    if np.allclose(plain / scaling.apply(plain, base)[0], divisors, rtol=1e-4):
        return scaling
    raise unknown


def decimal(value: Any) -> float:
    """Returns the shortest decimal that rounds to this float32: 1e-05, not 9.999999747378752e-06."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))


def rotary_share(part: int, total: int) -> float:
    """Returns part / total, rounded up where int(total * share) would otherwise not be `part`: 49 * (1 / 49) is less than 1."""
    exact = part / total
    return exact if int(total * exact) == part else math.nextafter(exact, 1.0)


def _is_present(value: Any) -> bool:
    return value is not None and not (isinstance(value, bool | int | float | str) and not value)
