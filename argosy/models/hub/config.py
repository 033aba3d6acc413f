"""Maps a Hub folder's config.json to settings and back, with one table per family.

Both generations of the format are read: the older one with `torch_dtype`, `rope_theta` and `rope_scaling`, and the newer one with
`dtype` and `rope_parameters`. A key that is neither in the table nor known to be harmless is an error, because ignoring it could
silently give a wrong model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from argosy.core.errors import BadInput
from argosy.core.formats import problem_list
from argosy.models.base.language import shortest_pattern
from argosy.models.settings import LinearScaling, Llama3Scaling, LongRope, Rope, Yarn

# Keys without effect on the forward pass: bookkeeping, training, text generation.
HARMLESS = frozenset(
    """architectures attention_dropout attn_implementation auto_map bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id dtype eos_token_id finetuning_task forced_bos_token_id
    forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder label2id model_type output_attentions
    output_hidden_states output_past pad_token_id prefix pretraining_tp problem_type return_dict return_dict_in_generate sep_token_id
    task_specific_params tf_legacy_loss tie_encoder_decoder tokenizer_class torch_dtype torchscript transformers_version
    transformers.js_config unsloth_version unsloth_fixed use_bfloat16 use_cache add_cross_attention bad_words_ids do_sample
    early_stopping length_penalty max_length min_length num_beams temperature top_k top_p repetition_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size num_beam_groups num_return_sequences diversity_penalty typical_p
    sentence_transformers remove_invalid_values output_scores suppress_tokens begin_suppress_tokens exponential_decay_length_penalty
    gradient_checkpointing is_llama_config is_matryoshka matryoshka_dimensions""".split()  # noqa: SIM905
)

# Names of activations on the Hub that differ from ours.
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "swish": "silu"}

WRITTEN = {"gelu_tanh": "gelu_pytorch_tanh"}

BALANCE, ROUTED = "moe.balance", "output_router_logits"

ROPE_KEYS = frozenset(["rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"])


# The keys that nearly every architecture uses for its sizes: (key of config.json, our setting).
SIZES = [
    ("vocab_size", "vocab"),
    ("hidden_size", "width"),
    ("intermediate_size", "ffn"),
    ("num_hidden_layers", "layers"),
    ("num_attention_heads", "heads"),
    ("num_key_value_heads", "kv_heads"),
    ("head_dim", "head_size"),
    ("max_position_embeddings", "context"),
    ("rms_norm_eps", "norm_eps"),
    ("hidden_act", "activation"),
    ("tie_word_embeddings", "tied"),
]


@dataclass(frozen=True)
class ConfigTable:
    """The mapping between config.json and a family's settings.

    rows: pairs of a key of config.json and our setting. Settings in a group have a dotted name.
    defaults: the values of keys that config.json lacks.
    fixed: the supported values of keys that have no setting. Other values are refused.
    harmless: keys that do not change results, and are ignored.
    """

    rows: Sequence[tuple[str, str]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads our settings from a config.json. All problems are reported in one error.

        Raises:
            BadInput: config.json has unknown keys, or values that are not supported.
        """
        config = dict(self.defaults) | dict(config)
        understood = {theirs for theirs, _ in self.rows} | set(self.fixed) | HARMLESS | ROPE_KEYS | self.harmless
        # transformers writes keys with a leading underscore for its own use: they are ignored.
        unknown = sorted(k for k in set(config) - understood if not k.startswith("_"))
        problems = [f"`{k}` = {config[k]!r} is not understood and may change the results" for k in unknown]
        for key, allowed in self.fixed.items():
            if key in config and config[key] not in allowed:
                problems.append(f"`{key}` = {config[key]!r}: only {' or '.join(map(repr, allowed))} is built")
        if problems:
            takes = "remove keys that have no effect on the results; the others describe something that is not built here"
            raise BadInput(f"config.json: {problem_list(problems, 8)}", hint=takes if unknown else None)
        read: dict[str, Any] = {}
        for theirs, ours in self.rows:
            if ours == BALANCE and not config.get(ROUTED):
                # transformers adds the aux loss only if this key is set, whatever the weight of the loss.
                continue
            if config.get(theirs) is not None:
                _put(read, ours.split("."), config[theirs])
        if "activation" in read:
            read["activation"] = ACTIVATIONS.get(read["activation"], read["activation"])
        return read

    def write(self, settings: Any) -> dict[str, Any]:
        config = {theirs: attrgetter(ours)(settings) for theirs, ours in self.rows}
        for theirs in [theirs for theirs, ours in self.rows if ours == BALANCE]:
            config[ROUTED] = bool(config[theirs])
            if not config[ROUTED]:
                # Without this key, the value in the original folder's config.json is kept.
                del config[theirs]
        acts = {theirs: config[theirs] for theirs, ours in self.rows if ours == "activation"}
        return config | {theirs: WRITTEN.get(act, act) for theirs, act in acts.items()}


def text_config(config: dict[str, Any], model_type: str, text: dict[str, Any]) -> dict[str, Any]:
    """Returns the text model's part of the config.json of a multimodal model. Other config.json are returned unchanged.

    Args:
        model_type: the `model_type` of the multimodal model.
        text: the keys `model_type` and `architectures` of the text model.

    Raises:
        BadInput: config.json describes no text model.
    """
    if config.get("model_type") != model_type:
        return config
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        raise BadInput(f"config.json: a `{model_type}` without a `text_config` that describes its text model")
    shared = {k: v for k, v in config.items() if k.endswith("token_id") or k in ("torch_dtype", "dtype")}
    return shared | inner | text


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


KINDS_OF_LAYERS = {"full_attention": "G", "sliding_attention": "L"}


def read_pattern(config: Mapping[str, Any], read: Mapping[str, Any], otherwise: str | None = None) -> dict[str, Any]:
    """Reads the settings `window` and `pattern` from the list `layer_types`.

    Args:
        read: the settings that the family's table has read.
        otherwise: L (local) or G (global) for each layer, which is used if config.json has no `layer_types`.

    Raises:
        BadInput: a kind of layer is not supported, or the list does not have one kind per layer.
    """
    kinds = config.get("layer_types")
    if kinds is not None and (unknown := sorted(set(kinds) - set(KINDS_OF_LAYERS))):
        raise BadInput(f"config.json: layers of kind {', '.join(map(str, unknown))} are not built for this family")
    spans = otherwise if kinds is None else "".join(KINDS_OF_LAYERS[kind] for kind in kinds)
    if spans is None:
        return {}
    if kinds is not None and len(spans) != read["layers"]:
        raise BadInput(f"config.json: {len(spans)} layer_types for {read['layers']} layers")
    return {"pattern": shortest_pattern(spans)} if "L" in spans else {"window": None}


def write_pattern(spans: str) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in KINDS_OF_LAYERS.items()}
    return {"layer_types": [names[span] for span in spans]}


def read_dense(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Reads the indexes of the layers without experts, in Qwen's format: those in `mlp_only_layers`, and all layers other than every
    n-th, with n `decoder_sparse_step`."""
    every, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return tuple(i for i in range(layers) if i in dense or (i + 1) % every)


def read_rope(
    config: Mapping[str, Any],
    default_base: float = 10_000.0,
    *,
    layer_type: str | None = None,
    partial: float | None = None,
) -> dict[str, Any]:
    """Reads the settings of `Rope` from either generation of config.json.

    Args:
        default_base: the rope base if config.json has none.
        layer_type: the type of layer to read, if `rope_parameters` has an entry for each type.
        partial: the default share of a head that rotary positions apply to. None: this architecture always rotates whole heads.

    Raises:
        BadInput: a kind of scaling is not supported.
    """
    scaling = _rope_keys(config, layer_type, {"rope_theta": default_base, "partial_rotary_factor": 1.0 if partial is None else partial})
    base = scaling.pop("rope_theta", None) or config.get("rope_theta") or default_base
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    shares = [w.get("partial_rotary_factor") for w in (scaling, config)]
    part = next((p for p in shares if p is not None), 1.0 if partial is None else partial)
    if partial is None and part != 1:
        raise BadInput("config.json: a partial rotary factor is not built for this family")
    scaling.pop("partial_rotary_factor", None)
    out: dict[str, Any] = {"base": base} | ({} if part == 1 else {"part": part})
    if kind not in READERS:
        raise BadInput(f"config.json: rope scaling `{kind}` is not built", hint=f"built are {', '.join(READERS)}")
    names = READERS[kind]
    if kind in ("yarn", "longrope") and "original_max_position_embeddings" not in scaling:
        original = config.get("original_max_position_embeddings") or config["max_position_embeddings"]
        scaling["original_max_position_embeddings"] = original
    # Newer versions of transformers write the original context here even without scaling.
    if kind == "default":
        scaling.pop("original_max_position_embeddings", None)
    if unknown := {k for k, v in scaling.items() if v is not None} - set(names):
        raise BadInput(f"config.json: rope scaling `{kind}` with {', '.join(sorted(unknown))}: not understood")
    return (
        out
        if kind == "default"
        else out | {"scaling": {"kind": kind} | {names[k]: v for k, v in scaling.items() if v is not None}}
    )


def _rope_keys(config: Mapping[str, Any], layer_type: str | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON object with the rope parameters, merged as in transformers 5 (`convert_rope_params_to_dict`).

    Model cards ask users to add `rope_scaling` by hand. It replaces `rope_parameters`. If `rope_parameters` has an entry for each type
    of layer, `rope_scaling` is instead merged into that of full attention.

    Args:
        layer_type: as in `read_rope`.
        defaults: the default values of keys.

    Raises:
        BadInput: `rope_scaling` would replace `rope_parameters` and so silently drop a value, as transformers does.
    """
    parameters, added = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if layer_type in parameters:
        layer_parameters = parameters[layer_type] or {}
        return {**layer_parameters, **added} if layer_type == "full_attention" else dict(layer_parameters)
    if not added:
        return dict(parameters)
    for key, default in defaults.items():
        value = parameters.get(key)
        if value is not None and added.get(key) is None and config.get(key) is None and value != default:
            problem = f"config.json: `rope_scaling` replaces `rope_parameters`, and with it {key} = {value}"
            raise BadInput(problem, hint=f"write the scaling into `rope_parameters`, or `{key}` into `rope_scaling` too")
    return dict(added)


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
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    },
    "longrope": {
        "short_factor": "short",
        "long_factor": "long",
        "original_max_position_embeddings": "original",
        "attention_factor": "attention",
    },
}
KINDS = {LinearScaling: "linear", Llama3Scaling: "llama3", Yarn: "yarn", LongRope: "longrope"}


def write_rope(rope: Rope) -> dict[str, Any]:
    """Returns the rope keys of config.json in both generations of the format, so that old and new readers agree."""
    part = {} if rope.part == 1 else {"partial_rotary_factor": rope.part}
    if rope.scaling is None:
        new = {"rope_type": "default", "rope_theta": rope.base} | part
        return {"rope_theta": rope.base, "rope_scaling": None, "rope_parameters": new} | part
    kind = KINDS[type(rope.scaling)]
    scaling = {t: getattr(rope.scaling, o) for t, o in READERS[kind].items() if getattr(rope.scaling, o) is not None}
    scaling = {"rope_type": kind} | {t: list(v) if isinstance(v, tuple) else v for t, v in scaling.items()}
    new = scaling | {"rope_theta": rope.base} | part
    return {"rope_theta": rope.base, "rope_scaling": scaling, "rope_parameters": new} | part
