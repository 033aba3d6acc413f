"""Rows that denoisers with joint attention share in diffusers' format."""

from collections.abc import Sequence

from argosy.core.keymap import KeyRow

# diffusers' norm_out has its scale first.
FINAL = [
    KeyRow("norm_out.linear.weight", ("final.scale.w", "final.shift.w"), "((1|1) modulated) D -> D modulated, D modulated"),
    KeyRow("norm_out.linear.bias", ("final.scale.b", "final.shift.b"), "((1|1) modulated) -> modulated, modulated"),
]


def linear_rows(
    theirs: str, ours: str, out: str, summed: str, layers: Sequence[int] | None = None, *, bias: bool = True
) -> list[KeyRow]:
    """The rows of a linear layer, torch's weight [out, in]."""
    grouped = [f"({axes})" if " " in axes else axes for axes in (out, summed)]
    rows = [KeyRow(f"{theirs}.weight", f"{ours}.w", f"{grouped[0]} {grouped[1]} -> {summed} {out}", layers)]
    return rows + ([KeyRow(f"{theirs}.bias", f"{ours}.b", f"{grouped[0]} -> {out}", layers)] if bias else [])


def qk_norm_rows(theirs: str, ours: str, layers: Sequence[int] | None = None) -> list[KeyRow]:
    """The row of a norm over a head."""
    return [KeyRow(f"{theirs}.weight", f"{ours}.scale", "H -> H", layers)]


def stream_rows(
    theirs: str, ours: str, layers: Sequence[int], *, added: bool = False, norms: bool = True, out: bool = True, bias: bool = True
) -> list[KeyRow]:
    """The rows of a stream's projections.

    Args:
        added: the names that diffusers gives to those of the text.
    """
    q, k, v, o = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out") if added else ("to_q", "to_k", "to_v", "to_out.0")
    rows = linear_rows(f"{theirs}.{q}", f"{ours}.q", "N H", "D", layers, bias=bias)
    rows += linear_rows(f"{theirs}.{k}", f"{ours}.k", "K H", "D", layers, bias=bias)
    rows += linear_rows(f"{theirs}.{v}", f"{ours}.v", "K H", "D", layers, bias=bias)
    rows += linear_rows(f"{theirs}.{o}", f"{ours}.o", "D", "N H", layers, bias=bias) if out else []
    if norms:
        for x in "qk":
            rows += qk_norm_rows(f"{theirs}.norm_{'added_' if added else ''}{x}", f"{ours}.{x}_norm", layers)
    return rows


def mlp_rows(theirs: str, ours: str, layers: Sequence[int]) -> list[KeyRow]:
    """The rows of a feed-forward layer."""
    up = linear_rows(f"{theirs}.net.0.proj", f"{ours}.up", "F", "D", layers)
    return up + linear_rows(f"{theirs}.net.2", f"{ours}.down", "D", "F", layers)


def embedder_rows(theirs: str, ours: str, inputs: str) -> list[KeyRow]:
    """The rows of an embedder of the time step, of guidance or of the pooled text."""
    up = linear_rows(f"{theirs}.linear_1", f"{ours}.up", "embedder", inputs)
    return up + linear_rows(f"{theirs}.linear_2", f"{ours}.down", "D", "embedder")


def mmdit_sizes(dims: dict[str, int], patch: int, channels: int) -> dict[str, int]:
    """The sizes of the names that these rows use."""
    named_sizes = {"waves": dims["W"], "embedder": dims["E"], "modulated": dims["M"], "text": dims.get("S", 0), "pooled": dims["O"]}
    return dims | named_sizes | {"p": patch, "q": patch, "C": channels}
