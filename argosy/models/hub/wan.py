"""Wan in diffusers' format (`models.diffusion.wan` has the equations)."""

from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.core.keymap import KeyRow
from argosy.models.hub.config import ConfigTable
from argosy.models.hub.mmdit import linear_rows, mlp_rows

WAN = "WanTransformer3DModel"


class WanHub:
    """A base class of the family's config that reads and writes folders in diffusers' format."""

    hub_types: ClassVar[tuple[str, ...]] = (WAN,)

    def tensor_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        """Returns the rows that map tensor names to weights, and the size of each axis in the rows."""
        layers, block, at = range(self.layers), "blocks.{l}", "layers.{l}"
        rows = [KeyRow("patch_embedding.weight", "patch.w", "D C 1 p q -> (p q C) D")]
        rows.append(KeyRow("patch_embedding.bias", "patch.b", "D -> D"))
        condition = "condition_embedder"
        rows += linear_rows(f"{condition}.time_embedder.linear_1", "time.up", "embedder", "waves")
        rows += linear_rows(f"{condition}.time_embedder.linear_2", "time.down", "D", "embedder")
        rows += linear_rows(f"{condition}.time_proj", "modulation", "modulation6 modulated", "D")
        rows += linear_rows(f"{condition}.text_embedder.linear_1", "text_up", "embedder", "text")
        rows += linear_rows(f"{condition}.text_embedder.linear_2", "text_down", "D", "embedder")
        rows.append(KeyRow(f"{block}.scale_shift_table", f"{at}.table", "1 modulation6 D -> modulation6 D", layers))
        for theirs, ours in (("attn1", "attn"), ("attn2", "cross")):
            for name, out, summed in (("q", "N H", "D"), ("k", "K H", "D"), ("v", "K H", "D")):
                rows += linear_rows(f"{block}.{theirs}.to_{name}", f"{at}.{ours}.{name}", out, summed, layers)
            rows += linear_rows(f"{block}.{theirs}.to_out.0", f"{at}.{ours}.o", "D", "N H", layers)
            rows.append(KeyRow(f"{block}.{theirs}.norm_q.weight", f"{at}.{ours}.q_norm.scale", "(N H) -> N H", layers))
            rows.append(KeyRow(f"{block}.{theirs}.norm_k.weight", f"{at}.{ours}.k_norm.scale", "(K H) -> K H", layers))
        if self.cross_attn_norm:
            rows.append(KeyRow(f"{block}.norm2.weight", f"{at}.cross_norm.scale", "D -> D", layers))
            rows.append(KeyRow(f"{block}.norm2.bias", f"{at}.cross_norm.b", "D -> D", layers))
        rows += mlp_rows(f"{block}.ffn", f"{at}.mlp", layers)
        rows.append(KeyRow("scale_shift_table", "table", "1 modulation2 D -> modulation2 D"))
        rows += linear_rows("proj_out", "out", "I", "D")
        d = self.dims
        named_sizes = {"waves": d["W"], "embedder": d["E"], "modulated": d["M"], "text": d["S"], "modulation2": 2, "modulation6": 6}
        return rows, d | named_sizes | {"p": self.patch, "q": self.patch, "C": self.channels}

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        read = TABLE.read(config)
        frames, *sides = read.pop("patch")
        if frames != 1 or len(set(sides)) != 1:
            raise BadInput(f"config.json: `patch_size` = {[frames, *sides]}: only squares of one frame are built")
        if config.get("out_channels", read["channels"]) not in (None, read["channels"]):
            problem = f"config.json: `out_channels` = {config['out_channels']} differs from `in_channels`, which is not built"
            raise BadInput(problem, hint="models that begin from an image read more channels; text to video is built")
        return cls(**read | {"patch": sides[0]})

    def to_hub(self: Any) -> dict[str, Any]:
        config = {"_class_name": WAN, "model_type": WAN, "out_channels": self.channels, "qk_norm": QK_NORM} | TABLE.write(self)
        config |= {"image_dim": None, "added_kv_proj_dim": None, "pos_embed_seq_len": None}
        return self.agreed(config | {"patch_size": [1, self.patch, self.patch]})


QK_NORM = "rms_norm_across_heads"
TABLE = ConfigTable(
    [
        ("patch_size", "patch"),
        ("num_attention_heads", "heads"),
        ("attention_head_dim", "head_size"),
        ("in_channels", "channels"),
        ("text_dim", "text_width"),
        ("freq_dim", "waves"),
        ("ffn_dim", "ffn"),
        ("num_layers", "layers"),
        ("cross_attn_norm", "cross_attn_norm"),
        ("eps", "norm_eps"),
    ],
    defaults={
        "patch_size": (1, 2, 2),
        "num_attention_heads": 40,
        "attention_head_dim": 128,
        "in_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": 13824,
        "num_layers": 40,
        "cross_attn_norm": True,
        "eps": 1e-6,
    },
    fixed={"qk_norm": (QK_NORM,), "image_dim": (None,), "added_kv_proj_dim": (None,), "pos_embed_seq_len": (None,)},
    # Positions are computed, not looked up, so there is no longest one.
    harmless=frozenset(["out_channels", "rope_max_seq_len"]),
)
