"""A Hub folder's config.json as settings of ours and back, by one table a family.

Both generations of the format are read: `torch_dtype`, `rope_theta`, `rope_scaling`; `dtype`, `rope_parameters`. A key that is
neither in the table nor known to leave the numbers alone is an error: a silent guess is a wrong model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from argosy.core.errors import BadInput
from argosy.models.parts.rope import Linear, Llama3, Rope, Yarn

# They leave the forward pass alone: bookkeeping, training-time settings, how text is generated.
HARMLESS = frozenset(
    """architectures attention_dropout attn_implementation auto_map bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id dtype eos_token_id finetuning_task forced_bos_token_id
    forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder label2id model_type output_attentions
    output_hidden_states pad_token_id prefix pretraining_tp problem_type return_dict return_dict_in_generate sep_token_id
    task_specific_params tf_legacy_loss tie_encoder_decoder tokenizer_class torch_dtype torchscript transformers_version
    transformers.js_config unsloth_version unsloth_fixed use_bfloat16 use_cache add_cross_attention bad_words_ids do_sample
    early_stopping length_penalty max_length min_length num_beams temperature top_k top_p repetition_penalty
    no_repeat_ngram_size is_llama_config""".split()  # noqa: SIM905
)

# Their names of activations, where ours differ.
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "swish": "silu"}

WRITTEN = {"gelu_tanh": "gelu_pytorch_tanh"}

ROPE_KEYS = frozenset(["rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"])


@dataclass(frozen=True)
class ConfigTable:
    """(their key, our key) rows; what a missing key stands for; keys that must have one value because nothing else is built;
    keys of no effect here."""

    rows: Sequence[tuple[str, str]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Our settings, every problem at once.

        Raises:
            BadInput: keys that are not understood, values that are not built.
        """
        config = dict(self.defaults) | dict(config)
        known = {theirs for theirs, _ in self.rows} | set(self.fixed) | HARMLESS | ROPE_KEYS | self.harmless
        # A leading underscore marks what transformers notes for itself.
        unknown = sorted(k for k in set(config) - known if not k.startswith("_"))
        problems = [f"`{k}` = {config[k]!r} is not understood and may change the numbers" for k in unknown]
        for key, allowed in self.fixed.items():
            if key in config and config[key] not in allowed:
                problems.append(f"`{key}` = {config[key]!r}: only {' or '.join(map(repr, allowed))} is built")
        if problems:
            raise BadInput(
                "config.json: " + "; ".join(problems[:8]), hint="`argosy models` lists the architectures that are built"
            )
        said = {ours: config[theirs] for theirs, ours in self.rows if config.get(theirs) is not None}
        if "activation" in said:
            said["activation"] = ACTIVATIONS.get(said["activation"], said["activation"])
        return said

    def write(self, settings: Any) -> dict[str, Any]:
        said = {theirs: getattr(settings, ours) for theirs, ours in self.rows}
        if "hidden_act" in said:
            said["hidden_act"] = WRITTEN.get(said["hidden_act"], said["hidden_act"])
        return said


def read_rope(config: Mapping[str, Any], default_base: float = 10_000.0) -> dict[str, Any]:
    """Settings of `Rope` from either generation of config.json.

    Raises:
        BadInput: a kind of scaling that is not built.
    """
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = scaling.pop("rope_theta", None) or config.get("rope_theta") or default_base
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    for where in (scaling, config):
        if where.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            raise BadInput("config.json: a partial rotary factor is not built for this family")
    scaling.pop("partial_rotary_factor", None)
    out: dict[str, Any] = {"base": base}
    if kind not in READERS:
        raise BadInput(f"config.json: rope scaling `{kind}` is not built", hint=f"built are {', '.join(READERS)}")
    names = READERS[kind]
    if kind == "yarn" and "original_max_position_embeddings" not in scaling:
        scaling["original_max_position_embeddings"] = config["max_position_embeddings"]
    if kind == "default":  # newer writers name the old context here as well
        scaling.pop("original_max_position_embeddings", None)
    if left := {k for k, v in scaling.items() if v is not None} - set(names):
        raise BadInput(f"config.json: rope scaling `{kind}` with {', '.join(sorted(left))}: not understood")
    return (
        out
        if kind == "default"
        else out | {"scaling": {"kind": kind} | {names[k]: v for k, v in scaling.items() if v is not None}}
    )


READERS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
        "original_max_position_embeddings": "original",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original",
        "beta_fast": "fast",
        "beta_slow": "slow",
        "truncate": "truncate",
        "attention_factor": "attention",
    },
}
KINDS = {Linear: "linear", Llama3: "llama3", Yarn: "yarn"}


def write_rope(rope: Rope) -> dict[str, Any]:
    """Both generations at once, so that old and new readers agree."""
    if rope.scaling is None:
        return {
            "rope_theta": rope.base,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": rope.base},
        }
    kind = KINDS[type(rope.scaling)]
    scaling = {t: getattr(rope.scaling, o) for t, o in READERS[kind].items() if getattr(rope.scaling, o) is not None}
    scaling = {"rope_type": kind} | scaling
    return {"rope_theta": rope.base, "rope_scaling": scaling, "rope_parameters": scaling | {"rope_theta": rope.base}}
