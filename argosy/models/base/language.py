"""Configs of models that read tokens, and of families with ordinary multi-head attention."""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from argosy.core.dims import named_axes
from argosy.core.errors import BadInput
from argosy.core.settings import Also, Repeats
from argosy.models import parts
from argosy.models.base.config import SCORING, ModelConfig, numbered_labels
from argosy.models.settings import Activation, Experts, Reach, Rope, Rotation


class LanguageConfig(ModelConfig):
    """Settings of a model that reads tokens: vocabulary, context, layers, head."""

    moe_parts: ClassVar[frozenset[str]] = frozenset()
    """The optional parts its experts may have, of `shared`, `shared_gate` and `bias`."""
    can_score: ClassVar[bool] = True
    """Whether it may have a head of scores."""
    make: ClassVar[Any] = None
    # A method that builds a block: make(config, kind).
    causal: ClassVar[bool] = True
    # Whether a token attends to earlier tokens only. False: it attends to its whole sequence, and no token is predicted (encoders).

    pooling: ClassVar[str] = "mean"
    # How an encoder's token vectors are pooled into one vector for a text, if the model's folder does not say.
    framing: ClassVar[tuple[str | None, str | None]] = ("cls_token", "sep_token")
    # The special tokens before and after a text that an encoder reads, by the tokenizer's names for them.

    vocab: Annotated[int, Also("vocab_size")] = Field(gt=0)
    """Vocabulary size V: rows of the embedding."""
    width: Annotated[
        int, Also("hidden_size", "d_model", "n_embd", "dim", "base_emb_dim", "model_dim", "emb_dim", "embed_dim")
    ] = Field(gt=0)
    """Width of the residual stream D."""
    layers: Annotated[
        int, Also("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "base_num_decoder_layers")
    ] = Field(gt=0)
    """Number of layers L."""
    context: Annotated[int, Also("max_position_embeddings", "max_context")] = Field(gt=0)
    """Longest sequence the model was made for, in tokens."""
    tied: Annotated[bool, Also("tie_word_embeddings", "tie_embeddings", "logits_via_embedding")] = False
    """Uses the embedding as the output head (tied embeddings)."""
    scores: Annotated[int, Also("num_labels")] = Field(0, ge=0)
    """Number of scores that the head outputs in place of logits: 1 for a reward model or a reranker, one per class for a classifier.
    Objectives that train scores set it. 0: a language model, or an encoder without a head.
    """
    labels: Annotated[tuple[str, ...], Also("id2label")] = ()
    """Names of the classes, one for each score. Empty: LABEL_0, LABEL_1 and so on."""
    problem_type: Literal["regression", "single_label_classification", "multi_label_classification"] | None = None
    """The meaning of scores. regression: the number itself; single_label_classification: logits of a softmax;
    multi_label_classification: logits of one sigmoid per class. None: a sigmoid for one score and a softmax for several.
    """
    rotations: Annotated[tuple[Rotation, ...], Repeats()] = ()
    """Data that is multiplied by a Hadamard matrix while the model runs, so that few bits lose less (QuaRot, arXiv:2404.00456). ffn:
    what down projections read, as R4 of SpinQuant (arXiv:2405.16406); heads: what output projections of attention read, across heads;
    keys: queries and keys after their positions, R3. `argosy quantize rotate=quarot` sets all three and turns the weights to match;
    FLOPs are counted without it.
    """

    @property
    def recurrent(self) -> bool:
        """Whether any layer is recurrent, that is, carries a state from token to token."""
        return False

    @property
    def embedding_width(self) -> int:
        """The width of an encoder's vector for a text."""
        return self.width

    @property
    def scored(self) -> int:
        """The number of scores that the head outputs for a token, instead of logits; 0 for a language model."""
        return self.scores

    @property
    def id_spaces(self) -> int:
        return self.vocab

    @property
    def label_names(self) -> tuple[str, ...]:
        """The name of each score."""
        return self.labels or numbered_labels(self.scores)

    @property
    def activation_of_scores(self) -> Literal["none", "sigmoid", "softmax"]:
        """The function that maps scores to probabilities, the same as in transformers' pipeline for text classification."""
        if self.problem_type == "regression":
            return "none"
        return "sigmoid" if self.problem_type == "multi_label_classification" or self.scores == 1 else "softmax"

    @model_validator(mode="after")
    def _labels_name_scores(self) -> "LanguageConfig":
        if self.labels and len(self.labels) != self.scores:
            raise ValueError(f"labels names {len(self.labels)} classes, and the head gives {self.scores} scores")
        if len(set(self.labels)) < len(self.labels):
            twice = next(name for name in self.labels if self.labels.count(name) > 1)
            raise ValueError(f"labels: two classes are called `{twice}`")
        return self

    @model_validator(mode="after")
    def _rotations_are_built(self) -> "LanguageConfig":
        if self.rotations and not self.causal:
            raise ValueError("rotations are built for models that predict tokens, not for encoders")
        if len(set(self.rotations)) < len(self.rotations):
            raise ValueError(f"rotations names one twice: {', '.join(self.rotations)}")
        return self

    @model_validator(mode="after")
    def _experts_have_names(self) -> "LanguageConfig":
        """Refuses parts of experts that the family has no Hub rows for. They would be built, but not counted, read or written."""
        experts = self.experts
        strange = [
            part
            for part in ("shared", "shared_gate", "bias")
            if experts and getattr(experts, part) and part not in self.moe_parts
        ]
        if strange:
            raise ValueError(f"{', '.join(f'moe.{part}' for part in strange)}: experts of this family do not have this")
        return self

    @property
    def experts(self) -> Experts | None:
        """The settings of the mixture of experts. None if the model has none."""
        return getattr(self, "moe", None)

    def attend(self, segments: Any) -> "parts.Attend":
        """Returns the attention strategy for whole sequences.

        Args:
            segments: the segment of each token, [B T] integers. 0 is padding.
        """
        return parts.Packed(segments) if self.causal else parts.Bidirectional(segments)

    def flops(self, tokens: int) -> int:
        """Counts FLOPs as in `ModelConfig`, and adds the head, which is applied to each token."""
        # `ModelConfig.flops` already counts a head of scores.
        head = self.width * self.vocab if self.causal and not self.scored else 0
        return super().flops(tokens) + 2 * tokens * head

    def _share(self, axes: tuple[str, ...]) -> Fraction:
        """Returns the share of a weight with these axes that is used for one token. The first axis of experts' weights is that of
        experts. A router, which is used for all tokens, has it last."""
        routed = self.experts is not None and len(axes) > 1 and named_axes(axes)[0] == "experts"
        return Fraction(self.experts.active, self.experts.count) if self.experts and routed else Fraction(1)

    def for_context(self, tokens: int) -> Any:
        """Returns the config with RoPE decided for sequences of at most `tokens` tokens.

        Raises:
            BadInput: `tokens` exceeds the model's context.
        """
        if tokens > self.context:
            raise BadInput(f"context = {tokens}: the model was made for at most {self.context} tokens")
        rope = getattr(self, "rope", None)
        return self if rope is None else self.model_copy(update={"rope": rope.decided(tokens)})

    def hub_head(self, hub_config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keys of config.json for a head of scores: the class, the labels and the problem type. Empty without one."""
        if not self.scored:
            return {}
        (kind,) = hub_config["architectures"]
        return {
            "architectures": [re.sub("(ForCausalLM|LMHeadModel|Model)$", SCORING, kind)],
            "id2label": {str(i): label for i, label in enumerate(self.label_names)},
            "label2id": {label: i for i, label in enumerate(self.label_names)},
        } | ({} if self.problem_type is None else {"problem_type": self.problem_type})


class DecoderConfig(LanguageConfig):
    """The common settings of families with ordinary multi-head attention."""

    ffn: Annotated[int, Also("intermediate_size", "d_ff", "mlp_dim", "base_mlp_dim", "hidden_dim", "ffn_dim")] = Field(
        gt=0
    )
    """Width of the feed-forward layer F."""
    heads: Annotated[
        int, Also("num_attention_heads", "n_head", "n_heads", "num_heads", "base_num_query_heads", "num_query_heads")
    ] = Field(gt=0)
    """Query heads N."""
    kv_heads: Annotated[
        int | None, Also("num_key_value_heads", "n_kv_head", "n_kv_heads", "base_num_kv_heads", "num_kv_heads")
    ] = Field(None, gt=0)
    """Key and value heads K, which must divide `heads`. None: as many as `heads`."""
    head_size: Annotated[int | None, Also("head_dim", "d_head")] = Field(None, gt=0)
    """Head size H, even. None: width / heads."""
    rope: Rope = Rope()
    """Rotary positions."""
    window: Annotated[int | None, Also("sliding_window", "sliding_window_size")] = Field(None, gt=0)
    """A token of a local layer attends to itself and the window-1 tokens before it."""
    pattern: Annotated[str | None, Also("window_pattern")] = None
    """Which layers are local (L) and which attend to all earlier tokens (G), repeated up to the last layer: LLLLLG. None: all
    local if there is a window, otherwise none."""
    norm_eps: Annotated[float, Also("rms_norm_eps", "layer_norm_eps", "normalization_layer_epsilon")] = Field(
        1e-5, gt=0
    )
    """Added to the mean square in RMSNorm."""
    activation: Annotated[Activation, Also("hidden_act", "mlp_activations", "hidden_activation")] = "silu"
    """Activation of the feed-forward gate."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> "DecoderConfig":
        if self.heads % self.K:
            raise ValueError(f"heads = {self.heads} is not a multiple of kv_heads = {self.K}")
        if self.head_size is None and self.width % self.heads:
            raise ValueError(f"width = {self.width} is not a multiple of heads = {self.heads}: set head_size")
        if self.rope.rotated_size(self.H) % 2:
            raise ValueError(f"rotary positions apply to {self.rope.rotated_size(self.H)} features of a head, which must be even")
        if self.pattern is not None and (not self.pattern or set(self.pattern) - {"L", "G"}):
            raise ValueError(f"pattern = {self.pattern}: L for a local layer, G for one that attends to everything")
        if self.window is None and "L" in (self.pattern or ""):
            raise ValueError(f"pattern = {self.pattern} has local layers: set window")
        return self

    @property
    def K(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def H(self) -> int:
        return self.width // self.heads if self.head_size is None else self.head_size

    @property
    def dims(self) -> dict[str, int]:
        sizes = {"D": self.width, "F": self.ffn, "N": self.heads, "K": self.K, "H": self.H, "V": self.vocab}
        moe = self.experts
        sizes |= {"Z": self.scores} if self.scores else {}
        return sizes if moe is None else sizes | {"E": moe.count, "M": moe.ffn, "shared": moe.shared}

    def resolved(self) -> Any:
        mixed = len(set(self.spans)) > 1
        return self.model_copy(
            update={
                "kv_heads": self.K,
                "head_size": self.H,
                "window": self.window if "L" in self.spans else None,
                "pattern": shortest_pattern(self.spans) if mixed else None,
            }
        )

    @property
    def spans(self) -> str:
        """The letter of `pattern` for each layer, such as L (with a window) and G (attends to all earlier tokens)."""
        pattern = self.pattern or ("L" if self.window else "G")
        return (pattern * self.layers)[: self.layers]

    @property
    def rope_of_local_layers(self) -> Rope:
        """The rotary positions of layers with a window."""
        return self.rope

    def reaches(self) -> list[Reach]:
        """Returns the attention settings of each layer: window and rotary positions."""
        local, full = Reach(self.window, self.rotary(self.rope_of_local_layers)), Reach(None, self.rotary(self.rope))
        return [local if span == "L" else full for span in self.spans]

    @property
    def kinds(self) -> list[str]:
        """The kind of each layer: the structure of its weights (`parts.stack`)."""
        return ["block"] * self.layers

    def plan(self) -> "list[parts.Layer]":
        """Returns the layers in order, each with its kind and its attention settings."""
        return [parts.Layer(kind, reach) for kind, reach in zip(self.kinds, self.reaches(), strict=True)]

    def build(self, run: "parts.Execution | None" = None) -> "parts.Decoder":
        """Builds a decoder with the layers of `plan`, and RMSNorm before the head."""
        return parts.Decoder(self, self.plan(), self.make, parts.RMSNorm(self.width, self.norm_eps), run)

    def rotary(self, rope: Rope) -> Rope:
        """Returns rotary positions with the scaling decided for the model's own context."""
        return rope.decided(self.context)

    def mixing_flops(self, tokens: int) -> int:
        return 4 * tokens * tokens * self.heads * self.H * self.layers


class AbsoluteConfig(LanguageConfig):
    """The common settings of families with learned positions, LayerNorm, a plain feed-forward layer and biases everywhere."""

    ffn: int = Field(gt=0)
    """Width of the feed-forward layer F."""
    heads: int = Field(gt=0)
    """Heads N, which must divide the width."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance in LayerNorm."""
    activation: Activation = "gelu"
    """Activation of the feed-forward layer."""

    @model_validator(mode="after")
    def _heads_fit(self) -> "AbsoluteConfig":
        if self.width % self.heads:
            raise ValueError(f"width = {self.width} is not a multiple of heads = {self.heads}")
        return self

    @property
    def H(self) -> int:
        return self.width // self.heads

    @property
    def dims(self) -> dict[str, int]:
        heads = {"N": self.heads, "K": self.heads, "H": self.H}
        sizes = {"D": self.width, "F": self.ffn, **heads, "V": self.vocab, "A": self.context}
        return sizes | ({"Z": self.scores} if self.scores else {})

    def mixing_flops(self, tokens: int) -> int:
        return 4 * tokens * tokens * self.width * self.layers


def shortest_pattern(spans: str) -> str:
    """Returns the shortest pattern whose repetition gives this one. For LGLGL this is LG."""
    return next(spans[:n] for n in range(1, len(spans) + 1) if (spans[:n] * len(spans))[: len(spans)] == spans)
