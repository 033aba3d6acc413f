"""DiT in diffusers' format: config.json and tensor names (`models.diffusion.dit` has the equations).

diffusers stores the embedder of time step and class once for each layer. These copies may differ, so each layer reads its own. A model
with one shared embedder writes equal copies, and the key `shared_embedder` in config.json, which diffusers ignores with a warning.
"""

from typing import Any, ClassVar

from argosy.core.keymap import KeyRow
from argosy.models.hub import rows as hub
from argosy.models.hub.config import ConfigTable

LAYER = "transformer_blocks.{l}."
EMBEDDER = (
    ("timestep_embedder.linear_1.weight", "up.w", "embedder waves -> waves embedder"),
    ("timestep_embedder.linear_1.bias", "up.b", "embedder -> embedder"),
    ("timestep_embedder.linear_2.weight", "down.w", "D embedder -> embedder D"),
    ("timestep_embedder.linear_2.bias", "down.b", "D -> D"),
    ("class_embedder.embedding_table.weight", "classes.w", "classes D -> classes D"),
)
# The tensors of models that read intervals. diffusers has no such models.
INTERVAL = tuple(
    (theirs.replace("timestep", "interval"), f"interval_{ours}", reading) for theirs, ours, reading in EMBEDDER if "timestep" in theirs
)


class DiTHub:
    """A base class of the family's config that reads and writes folders in diffusers' format."""

    hub_types: ClassVar[tuple[str, ...]] = ("DiTTransformer2DModel",)

    def tensor_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        """Returns the rows that map tensor names to weights, and the size of each axis in the rows."""
        per_layer = self.layer_embedders
        others = () if per_layer else tuple(range(1, self.layers))
        embedder = "transformer_blocks.0.norm1.emb."
        rows = [
            KeyRow("pos_embed.proj.weight", "patch.w", "D C p q -> (p q C) D"),
            KeyRow("pos_embed.proj.bias", "patch.b", "D -> D"),
            KeyRow("proj_out_1.weight", "final_modulation.w", "(final_modulation modulated) D -> D final_modulation modulated"),
            KeyRow("proj_out_1.bias", "final_modulation.b", "(final_modulation modulated) -> final_modulation modulated"),
            KeyRow("proj_out_2.weight", "head.w", "(p q out) D -> D (p q out)"),
            KeyRow("proj_out_2.bias", "head.b", "(p q out) -> (p q out)"),
        ]
        for theirs, ours, reading in (*EMBEDDER, *(INTERVAL if self.intervals else ())):
            copies = tuple(f"transformer_blocks.{layer}.norm1.emb.{theirs}" for layer in others)
            rows.append(KeyRow(embedder + theirs, f"embedder.{ours}", reading, copies=copies))
        indexes = range(self.layers)
        layers = [
            *_linear("norm1.linear", "modulation", "modulation modulated", "D"),
            *_linear("attn1.to_q", "attn.q", "N H", "D"),
            *_linear("attn1.to_k", "attn.k", "K H", "D"),
            *_linear("attn1.to_v", "attn.v", "K H", "D"),
            *_linear("attn1.to_out.0", "attn.o", "D", "N H"),
            *_linear("ff.net.0.proj", "mlp.up", "F", "D"),
            *_linear("ff.net.2", "mlp.down", "D", "F"),
        ]
        if self.qk_norm:
            layers += [(f"attn1.norm_{x}.weight", f"attn.{x}_norm.scale", "H -> H") for x in "qk"]
        rows += hub.of_layers(indexes, *layers, prefix=LAYER)
        if per_layer:
            apart = [(f"norm1.emb.{theirs}", f"embedder.{ours}", reading) for theirs, ours, reading in EMBEDDER]
            rows += hub.of_layers(indexes[1:], *apart, prefix=LAYER)
        d = self.dims
        sizes = {"p": self.patch, "q": self.patch, "C": self.channels, "out": d["O"] // self.patch**2}
        names = {"waves": d["W"], "embedder": d["E"], "classes": d["Y"], "modulation": 6, "final_modulation": 2, "modulated": d["M"]}
        return rows, d | sizes | names

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        read = TABLE.read(config)
        read["width"] = read["heads"] * read.pop("head_size")
        out = read.pop("channels_out", read["channels"])
        read["learned_sigma"] = out == 2 * read["channels"]
        read["intervals"] = bool(config.get("intervals", False))
        read["layer_embedders"] = not config.get("shared_embedder", False)
        return cls(**{"prediction": "epsilon"} | read)

    def to_hub(self: Any) -> dict[str, Any]:
        config = TABLE.write(_Written(self))
        config |= {"_class_name": "DiTTransformer2DModel", "model_type": "DiTTransformer2DModel"}
        config |= {} if self.layer_embedders else {"shared_embedder": True}
        config |= {"intervals": True} if self.intervals else {}
        return self.agreed(config)


class _Written:
    """Gives the settings of a config the names that `ConfigTable.write` looks for."""

    def __init__(self, config: Any):
        self.config = config
        self.head_size = config.dims["H"]
        self.channels_out = config.channels * (2 if config.learned_sigma else 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


def _linear(theirs: str, ours: str, out: str, summed: str) -> list[tuple[str, str, str]]:
    """Returns (name on the Hub, our path, reading) of a linear layer's weight, which is [out, in] in torch, and of its bias."""
    joined = [f"({axes})" if " " in axes else axes for axes in (out, summed)]
    return [
        (f"{theirs}.weight", f"{ours}.w", f"{joined[0]} {joined[1]} -> {summed} {out}"),
        (f"{theirs}.bias", f"{ours}.b", f"{joined[0]} -> {out}"),
    ]


TABLE = ConfigTable(
    [
        ("num_attention_heads", "heads"),
        ("attention_head_dim", "head_size"),
        ("in_channels", "channels"),
        ("out_channels", "channels_out"),
        ("num_layers", "layers"),
        ("sample_size", "size"),
        ("patch_size", "patch"),
        ("num_embeds_ada_norm", "classes"),
        ("norm_eps", "norm_eps"),
    ],
    defaults={
        "num_attention_heads": 16,
        "attention_head_dim": 72,
        "in_channels": 4,
        "num_layers": 28,
        "sample_size": 32,
        "patch_size": 2,
        "num_embeds_ada_norm": 1000,
        "norm_eps": 1e-5,
    },
    fixed={
        "attention_bias": (True,),
        "activation_fn": ("gelu-approximate",),
        "norm_type": ("ada_norm_zero",),
        "norm_elementwise_affine": (False,),
    },
    harmless=frozenset(["dropout", "norm_num_groups", "upcast_attention", "shared_embedder"]),
)
