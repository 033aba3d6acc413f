"""GGUF files in: a model's settings from the metadata, its weights through a table of names like the Hub's.

llama.cpp stores the rows of query and key projections with rotary pairs side by side, and the factors of Llama 3.1's rope
scaling as a tensor; both are undone here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from argosy.checkpoint.hub import Mapped, _first
from argosy.checkpoint.stored import Stored
from argosy.core.errors import BadInput, Damaged, nearest
from argosy.core.formats.gguf import GGUF
from argosy.core.keymap import KeyMap, Row
from argosy.models.family import FamilyConfig
from argosy.models.llama import LlamaConfig
from argosy.models.parts.rope import Llama3, Rope


def open_gguf(path: Path) -> Stored:
    """A GGUF file.

    Raises:
        BadInput: an architecture that is not built; tensors missing, unexpected or misshapen, all listed.
        Damaged: a file that contradicts itself.
    """
    file = GGUF.open(path)
    kind = str(file.meta.get("general.architecture"))
    if kind not in READERS:
        raise BadInput(f"GGUF architecture `{kind}` is not built", where=str(path), hint=nearest(kind, READERS))
    try:
        config, rows, sizes = READERS[kind](file)
    except KeyError as missing:
        raise BadInput(f"the GGUF file does not say {missing}", where=str(path)) from None
    except (ValueError, TypeError, ArithmeticError, IndexError) as error:
        raise BadInput(f"its metadata makes no model: {_first(error)}", where=str(path)) from None
    if config.layers > len(file.names):
        raise Damaged(f"{config.layers} layers in {len(file.names)} tensors", where=f"in {path}")
    hub: dict[str, Any] = config.to_hub()
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if isinstance(token := file.meta.get(f"tokenizer.ggml.{theirs}_token_id"), int):
            hub[f"{ours}_token_id"] = token
    table = KeyMap(rows, sizes, ignore=("rope_freqs.weight",))
    return Stored(path, "gguf", config, Mapped(table, file, str(path)), path, hub)


def read_llama(file: GGUF) -> tuple[FamilyConfig, list[Row], dict[str, int]]:
    """`llama` in llama.cpp: Llama, Mistral and whatever has their shape."""
    meta = file.meta
    heads = int(meta["llama.attention.head_count"])
    width = int(meta["llama.embedding_length"])
    tied = "output.weight" not in file.names
    config = LlamaConfig(
        vocab=file.shape("token_embd.weight")[0],
        width=width,
        layers=int(meta["llama.block_count"]),
        ffn=int(meta["llama.feed_forward_length"]),
        heads=heads,
        kv_heads=int(meta.get("llama.attention.head_count_kv", heads)),
        head_size=int(meta.get("llama.attention.key_length", width // heads)),
        context=int(meta["llama.context_length"]),
        norm_eps=_decimal(meta["llama.attention.layer_norm_rms_epsilon"]),
        window=int(meta["llama.attention.sliding_window"]) if meta.get("llama.attention.sliding_window") else None,
        attention_bias="blk.0.attn_q.bias" in file.names,
        rope=_rope(file),
        tied=tied,
    )
    if int(meta.get("llama.rope.dimension_count", config.H)) != config.H:
        raise BadInput("partial rotary positions are not built for this family", where="llama.rope.dimension_count")
    if meta.get("llama.expert_count"):
        raise BadInput("a mixture of experts under the architecture `llama` is not built")
    over = range(config.layers)

    def layer(theirs: str, ours: str, how: str) -> Row:
        return Row(f"blk.{{l}}.{theirs}", f"layers.{{l}}.{ours}", how, over)

    rows = [
        Row("token_embd.weight", "embed.w", "V D -> V D"),
        layer("attn_norm.weight", "attn_norm.scale", "D -> D"),
        layer("attn_q.weight", "attn.q.w", "(N P two) D -> D N (two P)"),
        layer("attn_k.weight", "attn.k.w", "(K P two) D -> D K (two P)"),
        layer("attn_v.weight", "attn.v.w", "(K H) D -> D K H"),
        layer("attn_output.weight", "attn.o.w", "D (N H) -> N H D"),
        layer("ffn_norm.weight", "mlp_norm.scale", "D -> D"),
        layer("ffn_gate.weight", "mlp.gate.w", "F D -> D F"),
        layer("ffn_up.weight", "mlp.up.w", "F D -> D F"),
        layer("ffn_down.weight", "mlp.down.w", "D F -> F D"),
        Row("output_norm.weight", "norm.scale", "D -> D"),
    ]
    if config.attention_bias:
        rows += [
            layer("attn_q.bias", "attn.q.b", "(N P two) -> N (two P)"),
            layer("attn_k.bias", "attn.k.b", "(K P two) -> K (two P)"),
            layer("attn_v.bias", "attn.v.b", "(K H) -> K H"),
            layer("attn_output.bias", "attn.o.b", "D -> D"),
        ]
    if not tied:
        rows.append(Row("output.weight", "head.w", "V D -> D V"))
    return config, rows, config.dims | {"P": config.H // 2, "two": 2}


def _rope(file: GGUF) -> Rope:
    base = float(file.meta.get("llama.rope.freq_base", 10_000.0))
    kind = file.meta.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        return Rope(base=base, scaling={"kind": "linear", "factor": _decimal(file.meta["llama.rope.scaling.factor"])})
    if kind == "yarn":
        original = int(file.meta["llama.rope.scaling.original_context_length"])
        factor = _decimal(file.meta["llama.rope.scaling.factor"])
        return Rope(base=base, scaling={"kind": "yarn", "factor": factor, "original": original})
    if kind != "none":
        raise BadInput(f"rope scaling `{kind}` is not built")
    if "rope_freqs.weight" not in file.names:
        return Rope(base=base)
    return _llama3(file.read("rope_freqs.weight"), base)


def _llama3(divisors: np.ndarray, base: float) -> Rope:
    """The settings that give these divisors of the frequencies; the released models use factors 8 and 32.

    Raises:
        BadInput: none does.
    """
    plain = Rope(base=base).frequencies(2 * len(divisors))[0]
    for factor in (8.0, 32.0):
        scaling = Llama3(factor=factor)
        if np.allclose(plain / scaling.apply(plain, base, None)[0], divisors, rtol=1e-4):
            return Rope(base=base, scaling=scaling)
    raise BadInput(
        "the rope factors in rope_freqs.weight are none that is known", hint="take the Hub folder of the model"
    )


def _decimal(value: Any) -> float:
    """The short decimal that a float32 was written from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


READERS: dict[str, Callable[[GGUF], tuple[FamilyConfig, list[Row], dict[str, int]]]] = {"llama": read_llama}
