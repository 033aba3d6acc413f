"""Llama on the Hub: config.json and tensor names (`models.llama` has the equations)."""

from dataclasses import replace
from typing import Any, ClassVar

from argosy.core.keymap import KeyRow
from argosy.models.hub import rows as hub
from argosy.models.hub.config import SIZES, ConfigTable, read_pattern, read_rope, text_config, write_pattern, write_rope
from argosy.models.settings import Rope


class LlamaHub:
    """A base class of the family's config that reads and writes Hub folders."""

    hub_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "ministral", "mistral3")
    # Sentence encoders are saved without a head, and without the prefix `model.`.
    hub_prefixes: ClassVar[tuple[str, ...]] = ("model.", "language_model.")
    hub_left_out: ClassVar[tuple[str, ...]] = ("vision_tower.*", "multi_modal_projector.*")

    def hub_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        layers = range(self.layers)
        rows = hub.attention_key_rows(layers, bias=self.attention_bias, out_bias=self.attention_bias)
        rows += hub.glu(layers, bias=self.mlp_bias) + hub.norms(layers, hub.PRE_NORMS) + hub.ends(self.tied, scores=self.scores)
        return rows, self.dims

    @classmethod
    def hub_text(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Returns `text_config` of models with a vision tower, such as Mistral Small 3.1."""
        # `tie_word_embeddings` is outside of `text_config`.
        tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
        return text_config(config, "mistral3", {"model_type": "mistral", "architectures": ["MistralForCausalLM"]} | tied)

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        table = TABLES[config["model_type"]]
        read = table.read(config)
        return cls(**read, **read_pattern(config, read), rope=Rope(**read_rope(config)))

    def to_hub(self: Any) -> dict[str, Any]:
        """Returns the config.json of Mistral if all layers have a window, of Ministral if some have, otherwise of Llama."""
        mixed = len(set(self.spans)) > 1
        kind = ("ministral", "MinistralForCausalLM") if mixed else ("mistral", "MistralForCausalLM")
        kind = kind if self.window else ("llama", "LlamaForCausalLM")
        config = {"model_type": kind[0], "architectures": [kind[1]]} | TABLES[kind[0]].write(self)
        config |= {"head_dim": self.H, "num_key_value_heads": self.K} | write_rope(self.rope)
        return self.agreed(config | (write_pattern(self.spans) if mixed else {}))


# By `model_type`: the keys, transformers' defaults, and the keys that transformers never reads.
TABLES = {
    "llama": ConfigTable(
        [*SIZES, ("attention_bias", "attention_bias"), ("mlp_bias", "mlp_bias")],
        defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
        fixed={"rope_interleaved": (False, None)},
        harmless=frozenset(["sliding_window"]),
    ),
    "mistral": ConfigTable(
        [*SIZES, ("sliding_window", "window")],
        defaults={
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        harmless=frozenset(["attention_bias", "mlp_bias"]),
    ),
}
TABLES["ministral"] = replace(TABLES["mistral"], harmless=TABLES["mistral"].harmless | {"layer_types"})
