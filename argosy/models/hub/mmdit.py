"""Rows (`KeyRow`) for tensor names in diffusers' format that several denoisers with joint attention share.

In all functions, `theirs` is a prefix of names in diffusers' format, `ours` is a prefix of our paths, and `layers` are the layers that
`{l}` in them stands for.
"""

from collections.abc import Sequence

from argosy.core.keymap import KeyRow

# In diffusers' norm_out, the scale comes before the shift.
FINAL = [
    KeyRow("norm_out.linear.weight", ("final.scale.w", "final.shift.w"), "((1|1) modulated) D -> D modulated, D modulated"),
    KeyRow("norm_out.linear.bias", ("final.scale.b", "final.shift.b"), "((1|1) modulated) -> modulated, modulated"),
]


def linear_rows(
    theirs: str, ours: str, out: str, summed: str, layers: Sequence[int] | None = None, *, bias: bool = True
) -> list[KeyRow]:
    """Returns the rows of a linear layer, whose weight is [out, in] in torch.

    Args:
        out: the axes of the output.
        summed: the axes of the input.
    """
    grouped = [f"({axes})" if " " in axes else axes for axes in (out, summed)]
    rows = [KeyRow(f"{theirs}.weight", f"{ours}.w", f"{grouped[0]} {grouped[1]} -> {summed} {out}", layers)]
    return rows + ([KeyRow(f"{theirs}.bias", f"{ours}.b", f"{grouped[0]} -> {out}", layers)] if bias else [])


def qk_norm_rows(theirs: str, ours: str, layers: Sequence[int] | None = None) -> list[KeyRow]:
    """Returns the row of a norm over the features of a head."""
    return [KeyRow(f"{theirs}.weight", f"{ours}.scale", "H -> H", layers)]


def stream_rows(
    theirs: str, ours: str, layers: Sequence[int], *, added: bool = False, norms: bool = True, out: bool = True, bias: bool = True
) -> list[KeyRow]:
    """Returns the rows of a stream's projections to queries, keys and values, and of the output projection.

    Args:
        added: whether the stream is the text, whose projections diffusers names `add_q_proj` and so on.
        norms: whether queries and keys have norms.
        out: whether there is an output projection.
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
    """Returns the rows of a feed-forward layer."""
    up = linear_rows(f"{theirs}.net.0.proj", f"{ours}.up", "F", "D", layers)
    return up + linear_rows(f"{theirs}.net.2", f"{ours}.down", "D", "F", layers)


def embedder_rows(theirs: str, ours: str, inputs: str) -> list[KeyRow]:
    """Returns the rows of an embedder of the time step, the guidance scale or the pooled text. `inputs` is the input axis."""
    up = linear_rows(f"{theirs}.linear_1", f"{ours}.up", "embedder", inputs)
    return up + linear_rows(f"{theirs}.linear_2", f"{ours}.down", "D", "embedder")


def mmdit_sizes(dims: dict[str, int], patch: int, channels: int) -> dict[str, int]:
    """Returns the size of each axis in these rows."""
    named_sizes = {"waves": dims["W"], "embedder": dims["E"], "modulated": dims["M"], "text": dims.get("S", 0), "pooled": dims["O"]}
    return dims | named_sizes | {"p": patch, "q": patch, "C": channels}
