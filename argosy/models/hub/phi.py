"""Phi on the Hub: config.json and tensor names (`models.phi` has the equations)."""

import math
from typing import Any, ClassVar

from argosy.core.keymap import KeyRow
from argosy.models.hub import rows as hub
from argosy.models.hub.config import SIZES, ConfigTable, read_rope, write_rope
from argosy.models.settings import Rope


class PhiHub:
    """A base class of the family's config that reads and writes Hub folders."""

    hub_types: ClassVar[tuple[str, ...]] = ("phi3",)

    def hub_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        layers = range(self.layers)

        def fused(theirs: str, ours: tuple[str, ...], reading: str) -> KeyRow:
            return KeyRow(hub.LAYER + theirs, tuple(f"layers.{{l}}.{name}" for name in ours), reading, layers)

        rows = [
            fused(
                "self_attn.qkv_proj.weight",
                ("attn.q.w", "attn.k.w", "attn.v.w"),
                "((N|K|K) H) D -> D N H, D K H, D K H",
            ),
            fused("mlp.gate_up_proj.weight", ("mlp.gate.w", "mlp.up.w"), "(F|F) D -> D F, D F"),
        ]
        rows += hub.of_layers(
            layers,
            ("self_attn.o_proj.weight", "attn.o.w", "D (N H) -> N H D"),
            ("mlp.down_proj.weight", "mlp.down.w", "D F -> F D"),
        )
        return rows + hub.norms(layers, hub.PRE_NORMS) + hub.ends(self.tied, scores=self.scores), self.dims

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        rope = read_rope(_current_form(config), partial=1.0)
        read = TABLE.read(config)
        scaling = rope.get("scaling", {})
        if scaling.get("kind") == "longrope" and "attention" not in scaling:
            scaling["attention"] = _attention_factor(config, scaling["original"])
        if read.get("window", 0) >= read["context"]:
            read["window"] = None
        return cls(**read, rope=Rope(**rope))

    def to_hub(self: Any) -> dict[str, Any]:
        """Returns config.json as transformers writes it."""
        config = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]} | TABLE.write(self) | write_rope(self.rope)
        original = getattr(self.rope.scaling, "original", self.context)
        return self.agreed(config | {"num_key_value_heads": self.K, "original_max_position_embeddings": original})


def _current_form(config: dict[str, Any]) -> dict[str, Any]:
    """Converts config.json to the form that `read_rope` knows. In Phi's files, the scaling `su` or `yarn` means longrope."""
    config = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        if scaling := dict(config.get(key) or {}):
            for name in ("type", "rope_type"):
                if scaling.get(name) in ("su", "yarn"):
                    scaling[name] = "longrope"
            scaling.pop("factor", None)
            config[key] = scaling
    return config


def _attention_factor(config: dict[str, Any], original: int) -> float:
    """Computes LongRoPE's attention factor (arXiv:2402.13753) from the ratio of the long context to the original one."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    factor = scaling.get("factor") or config["max_position_embeddings"] / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


TABLE = ConfigTable(
    [*(row for row in SIZES if row[0] != "head_dim"), ("sliding_window", "window")],
    {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    # Further keys of Phi-4-mini's config.json, with the values that have no effect.
    {
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "lm_head_bias": (False, None),
        "full_attn_mod": (1, None),
        "interpolate_factor": (1, None),
    },
    frozenset(["head_dim", "original_max_position_embeddings", "resid_pdrop", "embd_pdrop"]),
)
