"""Rows of a `KeyMap` for llama.cpp's tensor names, as far as architectures share them.

llama.cpp keeps the row order of the Hub's weights, except for the architecture `llama`, whose queries and keys have interleaved
rotary pairs. It stacks the experts of a layer, and splits weights that the Hub interleaves. Source of names: gguf-py's constants.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

from argosy.core.errors import Damaged
from argosy.core.keymap import KeyRow
from argosy.models.base.language import LanguageConfig
from argosy.models.hub.rows import of_layers
from argosy.weights.gguf.metadata import Metadata

BLOCK = "blk.{l}."
NORMS = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm"}
# The letters of the rows of queries and keys in the file. The two numbers of a rotary pair are neighbors there.
PAIRS = {"N": "(N P two)", "K": "(K P two)"}
PLAIN = {"N": "(N H)", "K": "(K H)"}


class Described(NamedTuple):
    """The model that a file describes.

    rows, sizes: the table that maps tensors to parameters, and the sizes of its letters.
    raised: whether the file stores norm scales plus one.
    """

    config: LanguageConfig
    rows: list[KeyRow]
    sizes: dict[str, int]
    raised: bool = False


def layer_rows(layers: Sequence[int], *names: tuple[str, str, str]) -> list[KeyRow]:
    """Returns the rows of each layer, from (name in the file, our name, equation)."""
    return of_layers(layers, *names, prefix=BLOCK)


def fused_row(layers: Sequence[int], tensor: str, names: tuple[str, ...], equation: str) -> KeyRow:
    """Returns a row for a tensor of the file that holds several of our weights."""
    return KeyRow(BLOCK + tensor, tuple(f"layers.{{l}}.{name}" for name in names), equation, layers)


def end_rows(tied: bool) -> list[KeyRow]:
    """Returns the rows of the embedding, the final norm and, unless it is tied, the head."""
    rows = [KeyRow("token_embd.weight", "embed.w", "V D -> V D"), KeyRow("output_norm.weight", "norm.scale", "D -> D")]
    return rows if tied else [*rows, KeyRow("output.weight", "head.w", "V D -> D V")]


def norm_rows(layers: Sequence[int], names: dict[str, str]) -> list[KeyRow]:
    """Returns the rows of norms over the model's width.

    Args:
        names: our name of each norm -> its name in the file.
    """
    return layer_rows(layers, *((f"{theirs}.weight", f"{ours}.scale", "D -> D") for ours, theirs in names.items()))


def attention_rows(layers: Sequence[int], *, paired: bool = False, bias: bool = False, out_bias: bool = False) -> list[KeyRow]:
    """Returns the rows of the four projections of attention.

    Args:
        paired: whether the two numbers of a rotary pair are neighbors in the file.
        bias: whether queries, keys and values have biases.
        out_bias: whether the output projection has a bias.
    """
    theirs, rotary = (PAIRS, "(two P)") if paired else (PLAIN, "H")
    rows = layer_rows(
        layers,
        ("attn_q.weight", "attn.q.w", f"{theirs['N']} D -> D N {rotary}"),
        ("attn_k.weight", "attn.k.w", f"{theirs['K']} D -> D K {rotary}"),
        ("attn_v.weight", "attn.v.w", "(K H) D -> D K H"),
        ("attn_output.weight", "attn.o.w", "D (N H) -> N H D"),
    )
    if bias:
        rows += layer_rows(
            layers,
            ("attn_q.bias", "attn.q.b", f"{theirs['N']} -> N {rotary}"),
            ("attn_k.bias", "attn.k.b", f"{theirs['K']} -> K {rotary}"),
            ("attn_v.bias", "attn.v.b", "(K H) -> K H"),
        )
    return rows + (layer_rows(layers, ("attn_output.bias", "attn.o.b", "D -> D")) if out_bias else [])


def head_norm_rows(layers: Sequence[int]) -> list[KeyRow]:
    """Returns the rows of the norms over each head of queries and keys."""
    return layer_rows(
        layers,
        ("attn_q_norm.weight", "attn.q_norm.scale", "H -> H"),
        ("attn_k_norm.weight", "attn.k_norm.scale", "H -> H"),
    )


def glu_rows(layers: Sequence[int], end: str = "", name: str = "mlp", width: str = "F", *, bias: bool = False) -> list[KeyRow]:
    """Returns the rows of a gated feed-forward layer.

    Args:
        end: the suffix of the names in the file, `_shexp` for the shared expert.
        name: our name of the layer.
        width: the letter of the feed-forward width.
    """
    rows = layer_rows(
        layers,
        (f"ffn_gate{end}.weight", f"{name}.gate.w", f"{width} D -> D {width}"),
        (f"ffn_up{end}.weight", f"{name}.up.w", f"{width} D -> D {width}"),
        (f"ffn_down{end}.weight", f"{name}.down.w", f"D {width} -> {width} D"),
    )
    if bias:
        rows += layer_rows(
            layers,
            (f"ffn_gate{end}.bias", f"{name}.gate.b", f"{width} -> {width}"),
            (f"ffn_up{end}.bias", f"{name}.up.b", f"{width} -> {width}"),
            (f"ffn_down{end}.bias", f"{name}.down.b", "D -> D"),
        )
    return rows


def expert_rows(meta: Metadata, layers: Sequence[int]) -> list[KeyRow]:
    """Returns the rows of the router and of the experts, which are stacked in one tensor. Files from before April 2024 have one tensor
    per expert.

    Raises:
        Damaged: there are more experts than tensors in a file with one tensor per expert.
    """
    rows = layer_rows(layers, ("ffn_gate_inp.weight", "mlp.router.w", "E D -> D E"))
    if layers and meta.has(f"blk.{layers[0]}.ffn_gate.0.weight"):
        if (count := meta.count("expert_count")) > len(meta.file.names):
            raise Damaged(f"{count} experts in {len(meta.file.names)} tensors", where=f"in {meta.file.path}")
        return rows + layer_rows(
            layers,
            ("ffn_gate.{e}.weight", "mlp.gate.w", "M D -> E D M"),
            ("ffn_up.{e}.weight", "mlp.up.w", "M D -> E D M"),
            ("ffn_down.{e}.weight", "mlp.down.w", "D M -> E M D"),
        )
    return rows + layer_rows(
        layers,
        ("ffn_gate_exps.weight", "mlp.gate.w", "E M D -> E D M"),
        ("ffn_up_exps.weight", "mlp.up.w", "E M D -> E D M"),
        ("ffn_down_exps.weight", "mlp.down.w", "E D M -> E M D"),
    )


def shared_expert_rows(layers: Sequence[int]) -> list[KeyRow]:
    """Returns the rows of the shared expert, which every token passes through."""
    return glu_rows(layers, "_shexp", "mlp.shared", "shared")
