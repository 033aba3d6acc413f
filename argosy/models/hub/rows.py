"""Rows (`KeyRow`) for tensor names that most architectures on the Hub share. Families combine these with rows of their own.

A row maps tensors of a Hub folder ("theirs") to weights of the model ("ours"). In all functions, `layers` are the indexes of the layers
that have the weights.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from argosy.core.keymap import KeyRow, Rearrangement

LAYER = "model.layers.{l}."


def of_layers(layers: Sequence[int], *names: tuple[str, str, str], prefix: str = LAYER) -> list[KeyRow]:
    """Returns a row for each (their name, our path, reading) of a layer. Both names are relative to the layer."""
    return [KeyRow(prefix + theirs, "layers.{l}." + ours, reading, layers) for theirs, ours, reading in names]


def ends(tied: bool, *, bias: bool = False, scores: int = 0) -> list[KeyRow]:
    """Returns the rows of the embedding, the final norm and the head.

    Args:
        tied: whether the embedding is also the head.
        bias: whether the final norm has a bias (LayerNorm).
        scores: the number of scores of the head. 0: a head of logits.
    """
    tied_to = "lm_head.weight" if tied and not scores else None
    rows = [
        KeyRow("model.embed_tokens.weight", "embed.w", "V D -> V D", tied_to=tied_to),
        KeyRow("model.norm.weight", "norm.scale", "D -> D"),
    ]
    rows += [KeyRow("model.norm.bias", "norm.b", "D -> D")] if bias else []
    if scores:
        return [*rows, KeyRow("score.weight", "head.w", "Z D -> D Z")]
    return rows if tied else [*rows, KeyRow("lm_head.weight", "head.w", "V D -> D V")]


def norms(layers: Sequence[int], names: Mapping[str, str], *, bias: bool = False) -> list[KeyRow]:
    """Returns the rows of norms over the model's width.

    Args:
        names: {our path: their name}, relative to the layer.
        bias: whether the norms have biases (LayerNorm).
    """
    rows = of_layers(layers, *((f"{theirs}.weight", f"{ours}.scale", "D -> D") for ours, theirs in names.items()))
    more = of_layers(layers, *((f"{theirs}.bias", f"{ours}.b", "D -> D") for ours, theirs in names.items()))
    return rows + more if bias else rows


PRE_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def attention_key_rows(layers: Sequence[int], *, bias: bool = False, out_bias: bool = False) -> list[KeyRow]:
    """Returns the rows of the four projections of attention.

    Args:
        bias: whether queries, keys and values have biases.
        out_bias: whether the output projection has a bias.
    """
    rows = of_layers(
        layers,
        ("self_attn.q_proj.weight", "attn.q.w", "(N H) D -> D N H"),
        ("self_attn.k_proj.weight", "attn.k.w", "(K H) D -> D K H"),
        ("self_attn.v_proj.weight", "attn.v.w", "(K H) D -> D K H"),
        ("self_attn.o_proj.weight", "attn.o.w", "D (N H) -> N H D"),
    )
    if bias:
        rows += of_layers(
            layers,
            ("self_attn.q_proj.bias", "attn.q.b", "(N H) -> N H"),
            ("self_attn.k_proj.bias", "attn.k.b", "(K H) -> K H"),
            ("self_attn.v_proj.bias", "attn.v.b", "(K H) -> K H"),
        )
    if out_bias:
        rows += of_layers(layers, ("self_attn.o_proj.bias", "attn.o.b", "D -> D"))
    return rows


def head_norms(layers: Sequence[int]) -> list[KeyRow]:
    """Returns the rows of norms over each head of queries and keys."""
    return of_layers(
        layers,
        ("self_attn.q_norm.weight", "attn.q_norm.scale", "H -> H"),
        ("self_attn.k_norm.weight", "attn.k_norm.scale", "H -> H"),
    )


def glu(
    layers: Sequence[int], theirs: str = "mlp", ours: str = "mlp", width: str = "F", *, bias: bool = False
) -> list[KeyRow]:
    """Returns the rows of a gated feed-forward layer. `width` is the letter of its inner axis."""
    rows = of_layers(
        layers,
        (f"{theirs}.gate_proj.weight", f"{ours}.gate.w", f"{width} D -> D {width}"),
        (f"{theirs}.up_proj.weight", f"{ours}.up.w", f"{width} D -> D {width}"),
        (f"{theirs}.down_proj.weight", f"{ours}.down.w", f"D {width} -> {width} D"),
    )
    if bias:
        rows += of_layers(
            layers,
            (f"{theirs}.gate_proj.bias", f"{ours}.gate.b", f"{width} -> {width}"),
            (f"{theirs}.up_proj.bias", f"{ours}.up.b", f"{width} -> {width}"),
            (f"{theirs}.down_proj.bias", f"{ours}.down.b", "D -> D"),
        )
    return rows


def experts(layers: Sequence[int], theirs: str = "mlp.experts.{e}") -> list[KeyRow]:
    """Returns the rows of routed experts, which are one tensor per expert on the Hub and one array per layer here."""
    return of_layers(
        layers,
        (f"{theirs}.gate_proj.weight", "mlp.gate.w", "M D -> E D M"),
        (f"{theirs}.up_proj.weight", "mlp.up.w", "M D -> E D M"),
        (f"{theirs}.down_proj.weight", "mlp.down.w", "D M -> E M D"),
    )


def dense_layers(path: str, widths: Sequence[int]) -> tuple[list[KeyRow], dict[str, int]]:
    """Returns the rows of `DenseLayers`, whose weights are [out, in] in torch, and the size of each axis in the rows."""
    rows: list[KeyRow] = []
    for i in range(len(widths) - 1):
        a, b = f"{path}{i}", f"{path}{i + 1}"
        rows.append(KeyRow(f"{path}.{i}.weight", f"{path}.{i}.w", f"{b} {a} -> {a} {b}"))
        rows.append(KeyRow(f"{path}.{i}.bias", f"{path}.{i}.b", f"{b} -> {b}"))
    return rows, {f"{path}{i}": width for i, width in enumerate(widths)}


def table_rows(dims: Mapping[str, int], widths: Mapping[str, Sequence[int]]) -> tuple[list[KeyRow], dict[str, int]]:
    """Returns the rows of a recommender, with an embedding table and stacks of dense layers, and the size of each axis in the rows.

    Args:
        dims: the sizes of the embedding table, by letter.
        widths: the widths of each stack's layers, by the stack's path.
    """
    rows, sizes = [KeyRow("embeddings.weight", "embed.w", "V D -> V D")], dict(dims)
    for path, some in widths.items():
        more, stack_sizes = dense_layers(path, some)
        rows, sizes = rows + more, sizes | stack_sizes
    return rows, sizes


def scaled_rows(rows: Sequence[KeyRow], names: Collection[str], blocks: Mapping[str, str]) -> list[KeyRow]:
    """Adapts rows to a folder in which some weights are quantized, that is, stored as values and scales.

    Args:
        names: the names of the tensors in the folder.
        blocks: maps the reading of a plain weight to that of a weight in MXFP4 blocks. Blocks lie along the summed axis, which is last.
    """
    out: list[KeyRow] = []
    for row in rows:
        kinds = {layer: _scales(row, layer, names) for layer in row.layers or (None,)}
        for kind in dict.fromkeys(kinds.values()):
            layers = None if row.layers is None else tuple(layer for layer in row.layers if kinds[layer] == kind)
            out.append(_with_scales(replace(row, layers=layers), kind, blocks))
    return out


def _scales(row: KeyRow, layer: int | None, names: Collection[str]) -> str | None:
    """Returns how this row's tensor is quantized at a layer. The first of several experts decides. None: it is not quantized."""
    if not isinstance(row.names, str) or row.scales:
        return None
    name = row.names.replace("{l}", str(layer)).replace("{e}", "0")
    if f"{name}_scale_inv" in names and len(Rearrangement.parse(row.reading).left[0].axes) == 2:
        return "fp8_blocks"
    return "mxfp4" if f"{name}_blocks" in names else None


def _with_scales(row: KeyRow, kind: str | None, blocks: Mapping[str, str]) -> KeyRow:
    if kind == "fp8_blocks":
        return replace(row, names=(row.names, f"{row.names}_scale_inv"), scales=kind)
    if kind == "mxfp4" and row.reading in blocks:
        return replace(row, names=(f"{row.names}_blocks", f"{row.names}_scales"), reading=blocks[row.reading], scales=kind)
    return row
