"""Z-Image in diffusers' format (`models.diffusion.z_image` has the equations)."""

from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.core.keymap import KeyRow
from argosy.models.hub.config import ConfigTable
from argosy.models.hub.mmdit import linear_rows, qk_norm_rows, stream_rows

Z_IMAGE = "ZImageTransformer2DModel"
# The largest width of the time step's embedding, which is otherwise as wide as the model.
TIME_WIDTH = 256
NORMS = {"attn_norm": "attention_norm1", "attn_post_norm": "attention_norm2", "mlp_norm": "ffn_norm1", "mlp_post_norm": "ffn_norm2"}


class ZImageHub:
    """A base class of the family's config that reads and writes folders in diffusers' format."""

    hub_types: ClassVar[tuple[str, ...]] = (Z_IMAGE,)

    def tensor_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        """Returns the rows that map tensor names to weights, and the size of each axis in the rows."""
        size = f"{self.patch}-1"
        rows = linear_rows(f"all_x_embedder.{size}", "patch", "D", "I")
        rows += linear_rows("t_embedder.mlp.0", "time.up", "embedder", "waves")
        rows += linear_rows("t_embedder.mlp.2", "time.down", "time_vector", "embedder")
        rows += [KeyRow("cap_embedder.0.weight", "text_norm.scale", "text -> text")]
        rows += linear_rows("cap_embedder.1", "text_embed", "D", "text")
        rows += [KeyRow("x_pad_token", "image_pad", "1 D -> D"), KeyRow("cap_pad_token", "text_pad", "1 D -> D")]
        stacks = {"image_layers": "noise_refiner", "text_layers": "context_refiner", "layers": "layers"}
        for ours, theirs in stacks.items():
            count = range(self.layers if ours == "layers" else self.refiner_layers)
            at, to = f"{theirs}.{{l}}", f"{ours}.{{l}}"
            rows += stream_rows(f"{at}.attention", f"{to}.attn", count, norms=False, bias=False)
            if self.qk_norm:
                rows += qk_norm_rows(f"{at}.attention.norm_q", f"{to}.attn.q_norm", count)
                rows += qk_norm_rows(f"{at}.attention.norm_k", f"{to}.attn.k_norm", count)
            for name, out, summed in (("w1", "F", "D"), ("w3", "F", "D"), ("w2", "D", "F")):
                part = {"w1": "gate", "w3": "up", "w2": "down"}[name]
                rows += linear_rows(f"{at}.feed_forward.{name}", f"{to}.mlp.{part}", out, summed, count, bias=False)
            rows += [KeyRow(f"{at}.{theirs}.weight", f"{to}.{norm}.scale", "D -> D", count) for norm, theirs in NORMS.items()]
            if ours != "text_layers":
                rows += linear_rows(f"{at}.adaLN_modulation.0", f"{to}.modulation", "modulation4 modulated", "time_vector", count)
        last = f"all_final_layer.{size}"
        rows += linear_rows(f"{last}.adaLN_modulation.1", "final_scale", "D", "time_vector")
        rows += linear_rows(f"{last}.linear", "final_out", "I", "D")
        d = self.dims
        axes = {"waves": d["W"], "embedder": d["E"], "time_vector": d["Q"], "modulated": d["M"], "text": d["S"], "modulation4": 4}
        return rows, d | axes

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        read = TABLE.read(config)
        patches = read.pop("patch")
        if len(patches) != 1:
            raise BadInput(f"config.json: `all_patch_size` = {list(patches)}: only one size of patches is built")
        if config.get("n_kv_heads", read["heads"]) != read["heads"]:
            problem = f"config.json: `n_kv_heads` = {config['n_kv_heads']} differs from `n_heads` = {read['heads']}, which is not built"
            raise BadInput(problem)
        derived = {"patch": patches[0], "axes": tuple(read["axes"]), "time_width": min(read["width"], TIME_WIDTH)}
        return cls(**read | derived)

    def to_hub(self: Any) -> dict[str, Any]:
        config = {"_class_name": Z_IMAGE, "model_type": Z_IMAGE} | TABLE.write(self)
        extra = {"all_patch_size": [self.patch], "all_f_patch_size": [1], "n_kv_heads": self.heads, "axes_dims": list(self.axes)}
        return self.agreed(config | extra)


TABLE = ConfigTable(
    [
        ("in_channels", "channels"),
        ("all_patch_size", "patch"),
        ("dim", "width"),
        ("n_layers", "layers"),
        ("n_refiner_layers", "refiner_layers"),
        ("n_heads", "heads"),
        ("norm_eps", "norm_eps"),
        ("qk_norm", "qk_norm"),
        ("cap_feat_dim", "text_width"),
        ("rope_theta", "rope_base"),
        ("t_scale", "time_scale"),
        ("axes_dims", "axes"),
    ],
    defaults={
        "in_channels": 16,
        "all_patch_size": (2,),
        "dim": 3840,
        "n_layers": 30,
        "n_refiner_layers": 2,
        "n_heads": 30,
        "cap_feat_dim": 2560,
        "axes_dims": (32, 48, 48),
    },
    fixed={"all_f_patch_size": ([1], (1,)), "siglip_feat_dim": (None,)},
    # Positions are computed, not looked up, so there is no longest one.
    harmless=frozenset(["n_kv_heads", "axes_lens"]),
)
