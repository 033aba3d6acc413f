"""The base of every family's config, and the protocol of its module.

A family is one file: its config counts parameters and FLOPs (the laws compare them with the built model), builds the module, and
maps names on the Hub. The module has `hidden` and `unembed`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from argosy.core.dims import LOOKED_UP, axes_of
from argosy.core.errors import ArgosyError, BadInput, Unsupported, complaint
from argosy.core.keymap import Row, kept
from argosy.core.settings import Also, Settings
from argosy.models import parts
from argosy.models.hub_rows import scaled
from argosy.models.settings import Activation, Experts, Reach, Rope


class FamilyConfig(Settings):
    """Settings that every family has. Everything architectural is in the config; nothing branches on a model's name."""

    hub_types: ClassVar[tuple[str, ...]] = ()
    # The `model_type`s of config.json that this family reads.
    hub_ignore: ClassVar[tuple[str, ...]] = ()
    # Tensors that may be in the family's Hub folders and follow from the config: causal masks, position numbers.
    hub_unsaid: ClassVar[frozenset[str]] = frozenset()
    # Settings without a key in config.json: the tensors decide them (`fitted`).
    hub_left_out: ClassVar[tuple[str, ...]] = ()
    # Tensors that may be in its folders and that the model does not use: ignored, with a warning.
    moe_parts: ClassVar[frozenset[str]] = frozenset()
    """The optional parts its experts may have, of `shared`, `shared_gate` and `bias`."""
    hub_prefixes: ClassVar[tuple[str, ...]] = ()
    # Prefixes that tensor names may have or lack, depending on the class that wrote the folder.
    hub_old_ends: ClassVar[Mapping[str, str]] = {}
    # Old endings of tensor names, and the current ones.
    make: ClassVar[Any] = None
    # Builds a block, as `make(kind)`; a function of the config and the kind.
    causal: ClassVar[bool] = True
    # A token attends to earlier tokens only. False: to its full sequence, and no token is predicted (encoders).

    hub_blocks: ClassVar[Mapping[str, str]] = {}
    # For folders with MXFP4 blocks: how a weight is read from them, by how it is read plain.

    preset: str | None = None
    """Name of the preset these settings came from."""
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

    @property
    def recurrent(self) -> bool:
        """Whether a layer carries a state from token to token."""
        return False

    @property
    def scored(self) -> int:
        """How many scores the head gives for a token, in place of logits; 0 for a language model."""
        return getattr(self, "scores", 0)

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module; every weight is a description (`parts.weight`)."""
        raise NotImplementedError

    @property
    def dims(self) -> dict[str, int]:
        """The size of each letter of its equations (`core.dims`)."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _experts_have_names(self) -> "FamilyConfig":
        """Refuses parts of experts for which the family has no Hub rows: they would be built but not counted, read or written."""
        how = self.experts
        strange = [
            part
            for part in ("shared", "shared_gate", "bias")
            if how and getattr(how, part) and part not in self.moe_parts
        ]
        if strange:
            raise ValueError(f"{', '.join(f'moe.{part}' for part in strange)}: experts of this family do not have this")
        return self

    @property
    def experts(self) -> Experts | None:
        """The settings of its mixture of experts, None if it has none."""
        return getattr(self, "moe", None)

    def attend(self, segments: Any) -> "parts.Attend":
        """The attention strategy for full sequences. segments: [B T] ints; segment 0 is padding."""
        return parts.Packed(segments) if self.causal else parts.Bidirectional(segments)

    def parameters(self, active: bool = False) -> int:
        """The number of parameters, or with `active` those used for one token. Counted from the table of names; nothing is
        built."""
        share = self._share if active else lambda axes: Fraction(1)
        return int(sum(t.size * t.layers * share(t.axes) for t in kept(*self.hub_rows())))

    def flops(self, tokens: int) -> int:
        """FLOPs of one forward pass over a row of `tokens` tokens: 2 for each multiply-add of every contraction. Attention counts
        in full, without subtracting for causality or windows. A backward pass costs twice as much."""
        # Embeddings are looked up, and a pooler sees one vector per sequence.
        apart = LOOKED_UP | {"pooled"}
        met = (t for t in kept(*self.hub_rows()) if t.path.endswith(".w") and not apart & set(axes_of(t.axes)))
        weights = sum(t.size * t.layers * self._share(t.axes) for t in met)
        # A head of scores is among the weights that are met.
        head = self.width * self.vocab if self.causal and not self.scored else 0
        return int(2 * tokens * (weights + head)) + self.mixing_flops(tokens)

    def training_flops(self, tokens: int) -> int:
        """FLOPs of a forward and a backward pass over a row of `tokens` tokens."""
        return 3 * self.flops(tokens) - 2 * self.choosing_flops(tokens)

    def mixing_flops(self, tokens: int) -> int:
        """The part of `flops` that mixes tokens without weights (attention scores and sums)."""
        raise NotImplementedError

    def choosing_flops(self, tokens: int) -> int:
        """The part of `flops` that only selects experts or tokens: no gradient flows through it."""
        return 0

    def _share(self, axes: tuple[str, ...]) -> Fraction:
        """The share of a weight with these axes used for one token. The weights of experts begin with the axis of experts; a router,
        used for all tokens, ends in it."""
        routed = self.experts is not None and len(axes) > 1 and axes_of(axes)[0] == "experts"
        return Fraction(self.experts.active, self.experts.count) if self.experts and routed else Fraction(1)

    def for_context(self, tokens: int) -> "FamilyConfig":
        """The same model, for sequences of at most `tokens` tokens.

        Raises:
            BadInput: that is longer than its context.
        """
        if tokens > self.context:
            raise BadInput(f"context = {tokens}: the model was made for at most {self.context} tokens")
        rope = getattr(self, "rope", None)
        return self if rope is None else self.model_copy(update={"rope": rope.decided(tokens)})

    def resolved(self) -> "FamilyConfig":
        """The same model with all sizes set that would otherwise be derived from others."""
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        """Small configs with odd sizes in which every option is used both ways; the laws run over them."""
        raise NotImplementedError

    def hub_rows(self) -> tuple[list[Row], dict[str, int]]:
        """The table of names on the Hub, and the sizes its rows use."""
        raise NotImplementedError

    def hub_scaled(self, rows: Sequence[Row], names: Collection[str]) -> list[Row]:
        """The rows for a folder with these tensors, some of which may be values and their scales."""
        return scaled(rows, names, self.hub_blocks)

    def fitted(self, names: Collection[str]) -> "FamilyConfig":
        """The same model without parts that config.json declares but whose tensors are missing."""
        return self

    @classmethod
    def hub_text(cls, config: dict[str, Any]) -> dict[str, Any]:
        """The part of a config.json about this model, if it also describes other models (a vision tower)."""
        return config

    @classmethod
    def from_hub(cls, config: dict[str, Any]) -> "FamilyConfig":
        """The settings from a Hub folder's config.json. Raises BadInput for keys that would change the results and are not
        understood."""
        raise NotImplementedError

    def to_hub(self) -> dict[str, Any]:
        """The config.json of this model, checked by `agreed`.

        Raises:
            Unsupported: no architecture on the Hub has this combination of options.
        """
        raise NotImplementedError

    def agreed(self, written: dict[str, Any]) -> dict[str, Any]:
        """Returns the config.json if reading it gives this model again.

        Raises:
            Unsupported: it does not; names the settings that would be lost.
        """
        hint = 'Argosy\'s own format keeps every setting: to=argosy, lm.save(..., format="argosy")'
        if self.scored:
            (kind,) = written["architectures"]
            written |= {"architectures": [kind.replace("ForCausalLM", SCORING)]}
            written |= {"id2label": {str(i): f"LABEL_{i}" for i in range(self.scored)}}
            written |= {"label2id": {f"LABEL_{i}": i for i in range(self.scored)}}
        try:
            again = with_scores(type(self).from_hub(written), written).resolved()
        except (ArgosyError, ValueError) as error:
            raise Unsupported(
                f"the Hub's `{written['model_type']}` has no such model: {complaint(error)}", hint=hint
            ) from None
        mine, theirs = (_without_training(config.model_dump()) for config in (self.resolved(), again))
        if lost := list(_differing(mine, theirs)):
            raise Unsupported(f"the Hub's `{written['model_type']}` cannot express {', '.join(lost)} of this model", hint=hint)
        return written


# The end of the name of transformers' classes with a head of scores.
SCORING = "ForSequenceClassification"


def with_scores(config: "FamilyConfig", hub: Mapping[str, Any]) -> "FamilyConfig":
    """The settings of a model whose config.json names a class with a head of scores; of any other, unchanged.

    Raises:
        BadInput: the family has no such head.
    """
    if not any(str(name).endswith(SCORING) for name in hub.get("architectures") or ()):
        return config
    if "scores" not in type(config).model_fields:
        what = f"a `{hub.get('model_type')}` with a head of scores ({SCORING}) is not built"
        raise BadInput(what)
    # transformers writes labels only if there are not two.
    labels = hub.get("id2label")
    return config.model_copy(update={"scores": len(labels) if isinstance(labels, dict) and labels else 2})


def _differing(mine: Any, theirs: Any, at: str = "") -> Iterator[str]:
    """The settings that differ, each with its value in `mine`."""
    if not (isinstance(mine, dict) and isinstance(theirs, dict)):
        yield from [f"{at} = {mine}"] if mine != theirs else []
        return
    for key in mine:
        yield from _differing(mine[key], theirs.get(key), f"{at}.{key}" if at else key)


def _without_training(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without those that config.json has no keys for: settings of training, and choices made when loading."""
    settings = dict(settings)
    if (scaling := (settings.get("rope") or {}).get("scaling")) and "table" in scaling:
        settings["rope"] = settings["rope"] | {"scaling": scaling | {"table": None}}
    moe = settings.get("moe")
    kept = {k: v for k, v in moe.items() if k not in ("z_loss", "bias_rate", "capacity", "balance", "balance_over")} if moe else moe
    return settings | {"preset": None} | ({"moe": kept} if moe else {})


class DecoderConfig(FamilyConfig):
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
    scores: Annotated[int, Also("num_labels")] = Field(0, ge=0)
    """Scores that the head gives for each token, in place of logits: 1 for a reward model. Objectives that train scores set it. 0: a
    language model."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> "DecoderConfig":
        if self.heads % self.K:
            raise ValueError(f"heads = {self.heads} is not a multiple of kv_heads = {self.K}")
        if self.head_size is None and self.width % self.heads:
            raise ValueError(f"width = {self.width} is not a multiple of heads = {self.heads}: set head_size")
        if self.rope.turned(self.H) % 2:
            raise ValueError(f"rotary positions apply to {self.rope.turned(self.H)} features of a head, which must be even")
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
        """L or G for each layer."""
        pattern = self.pattern or ("L" if self.window else "G")
        return (pattern * self.layers)[: self.layers]

    @property
    def rope_of_local_layers(self) -> Rope:
        """Rotary positions of local layers."""
        return self.rope

    def reaches(self) -> list[Reach]:
        """The attention of each layer: window and rotary positions."""
        local, full = Reach(self.window, self.rotary(self.rope_of_local_layers)), Reach(None, self.rotary(self.rope))
        return [local if span == "L" else full for span in self.spans]

    @property
    def kinds(self) -> list[str]:
        """The kind of each layer: the structure of its weights (`parts.stack`)."""
        return ["block"] * self.layers

    def plan(self) -> "list[parts.Layer]":
        """The layers in order: the kind of each, and its attention."""
        return [parts.Layer(kind, reach) for kind, reach in zip(self.kinds, self.reaches(), strict=True)]

    def build(self, run: "parts.Execution | None" = None) -> "parts.Decoder":
        """The module, with RMSNorm before the head. Layers differ by their kind, and in how far back they attend."""
        return parts.Decoder(self, self.plan(), self.make, parts.RMSNorm(self.width, self.norm_eps), run)

    def rotary(self, rope: Rope) -> Rope:
        """Rotary positions as this model applies them, for sequences of any length."""
        return rope.decided(self.context)

    def mixing_flops(self, tokens: int) -> int:
        return 4 * tokens * tokens * self.heads * self.H * self.layers


class AbsoluteConfig(FamilyConfig):
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
        return {"D": self.width, "F": self.ffn, **heads, "V": self.vocab, "A": self.context}

    def mixing_flops(self, tokens: int) -> int:
        return 4 * tokens * tokens * self.width * self.layers


def shortest_pattern(spans: str) -> str:
    """The shortest pattern whose repetition gives this one: LGLGL is LG."""
    return next(spans[:n] for n in range(1, len(spans) + 1) if (spans[:n] * len(spans))[: len(spans)] == spans)
