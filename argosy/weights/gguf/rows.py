"""llama.cpp's tensor names as rows of a `KeyMap`: what the architectures share.

llama.cpp keeps the row order of the Hub's weights, except for the architecture `llama`, whose queries and keys have interleaved
rotary pairs. It stacks experts, and splits what the Hub interleaves. Names: gguf-py's constants.py.
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
# Interleaved pairs on their side, halves on ours.
PAIRS = {"N": "(N P two)", "K": "(K P two)"}
PLAIN = {"N": "(N H)", "K": "(K H)"}


class Described(NamedTuple):
    """The model a file describes. `raised`: its norm scales are stored plus one."""

    config: LanguageConfig
    rows: list[KeyRow]
    sizes: dict[str, int]
    raised: bool = False


def layer_rows(layers: Sequence[int], *names: tuple[str, str, str]) -> list[KeyRow]:
    """The rows of each layer, from (their name, ours, how)."""
    return of_layers(layers, *names, prefix=BLOCK)


def fused_row(layers: Sequence[int], tensor: str, names: tuple[str, ...], equation: str) -> KeyRow:
    """A row for one of their tensors that holds several weights of ours."""
    return KeyRow(BLOCK + tensor, tuple(f"layers.{{l}}.{name}" for name in names), equation, layers)


def end_rows(tied: bool) -> list[KeyRow]:
    """The rows of embedding, final norm and head."""
    rows = [KeyRow("token_embd.weight", "embed.w", "V D -> V D"), KeyRow("output_norm.weight", "norm.scale", "D -> D")]
    return rows if tied else [*rows, KeyRow("output.weight", "head.w", "V D -> D V")]


def norm_rows(layers: Sequence[int], names: dict[str, str]) -> list[KeyRow]:
    """Rows of norms over the model's width.

    Args:
        names: our name of each norm -> theirs.
    """
    return layer_rows(layers, *((f"{theirs}.weight", f"{ours}.scale", "D -> D") for ours, theirs in names.items()))


def attention_rows(layers: Sequence[int], *, paired: bool = False, bias: bool = False, out_bias: bool = False) -> list[KeyRow]:
    """The four projections. `paired`: rotary pairs are interleaved."""
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
    """The norms layers each head of queries and keys."""
    return layer_rows(
        layers,
        ("attn_q_norm.weight", "attn.q_norm.scale", "H -> H"),
        ("attn_k_norm.weight", "attn.k_norm.scale", "H -> H"),
    )


def glu_rows(layers: Sequence[int], end: str = "", name: str = "mlp", width: str = "F", *, bias: bool = False) -> list[KeyRow]:
    """A gated feed-forward layer of this width. `end`: the ending of their names, `_shexp` for the shared expert."""
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
    """A router, and one tensor for all experts of a layer; in files from before April 2024, one tensor per expert.

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
    """The expert that every token passes through."""
    return glu_rows(layers, "_shexp", "mlp.shared", "shared")
