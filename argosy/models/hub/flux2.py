"""Flux.2 in diffusers' format (`models.diffusion.flux2` has the equations)."""

from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.core.keymap import KeyRow
from argosy.models.hub.config import ConfigTable
from argosy.models.hub.mmdit import FINAL, linear_rows, qk_norm_rows, stream_rows

FLUX2 = "Flux2Transformer2DModel"


class Flux2Hub:
    """A base class of the family's config that reads and writes folders in diffusers' format."""

    hub_types: ClassVar[tuple[str, ...]] = (FLUX2,)

    def tensor_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        """Returns the rows that map tensor names to weights, and the size of each axis in the rows."""
        double, single = range(self.layers), range(self.single_layers)
        rows = linear_rows("x_embedder", "patch", "D", "I", bias=False)
        rows += linear_rows("context_embedder", "text_embed", "D", "text", bias=False)
        for theirs, ours in (("timestep", "time"), ("guidance", "guidance"))[: 1 + self.guided]:
            at = f"time_guidance_embed.{theirs}_embedder"
            rows += linear_rows(f"{at}.linear_1", f"{ours}.up", "embedder", "waves", bias=False)
            rows += linear_rows(f"{at}.linear_2", f"{ours}.down", "D", "embedder", bias=False)
        for name, theirs, parts in (("image", "double_stream_modulation_img", 6), ("text", "double_stream_modulation_txt", 6),
                                    ("single", "single_stream_modulation", 3)):  # fmt: skip
            rows += linear_rows(f"{theirs}.linear", f"{name}_modulation", f"modulation{parts} modulated", "D", bias=False)
        block = "transformer_blocks.{l}"
        for ours, end in (("image", ""), ("text", "_context")):
            at = f"layers.{{l}}.{ours}"
            rows += stream_rows(f"{block}.attn", f"{at}.attn", double, added=ours == "text", bias=False)
            both = (f"{at}.mlp.gate.w", f"{at}.mlp.up.w")
            rows.append(KeyRow(f"{block}.ff{end}.linear_in.weight", both, "((1|1) F) D -> D F, D F", double))
            rows += linear_rows(f"{block}.ff{end}.linear_out", f"{at}.mlp.down", "D", "F", double, bias=False)
        block, at = "single_transformer_blocks.{l}.attn", "single_layers.{l}"
        inner = tuple(f"{at}.{path}.w" for path in ("attn.q", "attn.k", "attn.v", "gate", "up"))
        reading = "(N H|K H|K H|F|F) D -> D N H, D K H, D K H, D F, D F"
        rows.append(KeyRow(f"{block}.to_qkv_mlp_proj.weight", inner, reading, single))
        for x in "qk":
            rows += qk_norm_rows(f"{block}.norm_{x}", f"{at}.attn.{x}_norm", single)
        rows.append(KeyRow(f"{block}.to_out.weight", (f"{at}.attn.o.w", f"{at}.down.w"), "D (N H|F) -> N H D, F D", single))
        rows += [FINAL[0], *linear_rows("proj_out", "final.out", "I", "D", bias=False)]
        d = self.dims
        named_sizes = {"waves": d["W"], "embedder": d["E"], "modulated": d["M"], "text": d["S"], "modulation3": 3, "modulation6": 6}
        return rows, d | named_sizes

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        read = TABLE.read(config)
        if config.get("out_channels") not in (None, read["channels"]):
            raise BadInput(f"config.json: `out_channels` = {config['out_channels']} differs from `in_channels`, which is not built")
        return cls(**read | {"axes": tuple(read["axes"])})

    def to_hub(self: Any) -> dict[str, Any]:
        config = {"_class_name": FLUX2, "model_type": FLUX2, "patch_size": 1, "out_channels": None, "eps": 1e-6} | TABLE.write(self)
        return self.agreed(config | {"axes_dims_rope": list(self.axes)})


TABLE = ConfigTable(
    [
        ("in_channels", "channels"),
        ("num_layers", "layers"),
        ("num_single_layers", "single_layers"),
        ("attention_head_dim", "head_size"),
        ("num_attention_heads", "heads"),
        ("joint_attention_dim", "text_width"),
        ("timestep_guidance_channels", "waves"),
        ("mlp_ratio", "expansion"),
        ("axes_dims_rope", "axes"),
        ("rope_theta", "rope_base"),
        ("guidance_embeds", "guided"),
    ],
    defaults={
        "in_channels": 128,
        "num_layers": 8,
        "num_single_layers": 48,
        "attention_head_dim": 128,
        "num_attention_heads": 48,
        "joint_attention_dim": 15360,
        "axes_dims_rope": (32, 32, 32, 32),
        "guidance_embeds": True,
    },
    fixed={"patch_size": (1,), "eps": (1e-6,)},
    harmless=frozenset(["out_channels"]),
)
