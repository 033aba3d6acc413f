"""CLIP with both towers on the Hub: config.json and tensor names (`models.clip_towers` has the equations)."""

from dataclasses import replace
from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.core.keymap import KeyRow
from argosy.models.hub.clip import TABLE, layer_names
from argosy.models.hub.config import ConfigTable

# The names of the vision tower's axes. They differ from those of the text tower, because an axis name has one size in all rows.
# `positions` is a name of `core.dims`.
VISION_AXES = {"D": "image_width", "F": "image_ffn", "N": "image_heads", "K": "image_kv_heads", "H": "image_head", "A": "positions"}
WIDTH = VISION_AXES["D"]


class ClipTowersHub:
    """A base class of the family's config that reads and writes Hub folders."""

    hub_types: ClassVar[tuple[str, ...]] = ("clip",)
    hub_ignore: ClassVar[tuple[str, ...]] = ("*embeddings.position_ids",)

    def tower_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        """Returns the rows of both towers, the projections and the scale, and the size of each axis in the rows."""
        text, sizes = self.text.hub_rows()
        rows = [replace(row, paths=f"text.{row.paths}") for row in text]
        d, a = WIDTH, VISION_AXES["A"]
        rows += [
            KeyRow("vision_model.embeddings.class_embedding", "vision.first", f"{d} -> {d}"),
            KeyRow("vision_model.embeddings.patch_embedding.weight", "vision.patch.w", f"{d} c p q -> (p q c) {d}"),
            KeyRow("vision_model.embeddings.position_embedding.weight", "vision.positions.w", f"{a} {d} -> {a} {d}"),
            *(
                KeyRow(f"vision_model.{theirs}.{end}", f"vision.{ours}.{leaf}", f"{d} -> {d}")
                # `layrnorm` is transformers' spelling.
                for theirs, ours in (("pre_layrnorm", "pre_norm"), ("post_layernorm", "norm"))
                for end, leaf in (("weight", "scale"), ("bias", "b"))
            ),
            KeyRow("visual_projection.weight", "vision.pooler.w", f"O {d} -> {d} O"),
            KeyRow("logit_scale", "scale", " -> "),
        ]
        layers, at = range(self.vision.layers), ("vision_model.encoder.layers.{l}.", "vision.layers.{l}.")
        rows += [KeyRow(at[0] + theirs, at[1] + ours, _renamed(reading), layers) for theirs, ours, reading in layer_names()]
        vision_sizes = {VISION_AXES.get(letter, letter): size for letter, size in self.vision.dims.items() if letter != "I"}
        return rows, sizes | vision_sizes | {"c": self.vision.channels, "p": self.vision.patch, "q": self.vision.patch}

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        parts = {}
        for name in ("text", "vision"):
            # Folders written before 2023 have a second mapping with the values that differ from the defaults. It takes precedence.
            tower = {**(config.get(f"{name}_config") or {}), **(config.get(f"{name}_config_dict") or {})}
            parts[name] = {key: value for key, value in tower.items() if value is not None}
        if not (parts["vision"] or parts["text"]):
            raise BadInput("config.json of CLIP has neither `text_config` nor `vision_config`")
        text = TABLE.read(parts["text"]) | {"projection": config.get("projection_dim", 512)}
        return cls(text=text, vision=VISION_TABLE.read(parts["vision"]))

    def to_hub(self: Any) -> dict[str, Any]:
        text = {"model_type": "clip_text_model", "projection_dim": self.text.projection} | TABLE.write(self.text)
        vision = {"model_type": "clip_vision_model", "projection_dim": self.text.projection} | VISION_TABLE.write(self.vision)
        config = {"model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": self.text.projection}
        return self.agreed(config | {"text_config": text, "vision_config": vision})


def _renamed(reading: str) -> str:
    return "".join(VISION_AXES.get(letter, letter) for letter in reading)


VISION_TABLE = ConfigTable(
    [
        ("num_channels", "channels"),
        ("image_size", "size"),
        ("patch_size", "patch"),
        ("hidden_size", "width"),
        ("num_hidden_layers", "layers"),
        ("intermediate_size", "ffn"),
        ("num_attention_heads", "heads"),
        ("hidden_act", "activation"),
        ("layer_norm_eps", "norm_eps"),
    ],
    defaults={"hidden_act": "quick_gelu"},
    harmless=frozenset(["projection_dim", "initializer_factor", "dropout", "tie_word_embeddings", "pruned_heads"]),
)
