"""What every language family answers: the base of its config, and the small protocol of its module.

A family is data and one file. Its config counts what it builds (the laws hold it to that), builds it, and knows its names
on the Hub; its module is `hidden` and `unembed`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from argosy.core.dims import LOOKED_UP
from argosy.core.errors import ArgosyError, BadInput, Unsupported, complaint
from argosy.core.keymap import Row, kept
from argosy.core.settings import Also, Settings
from argosy.models import parts
from argosy.models.hub_rows import scaled
from argosy.models.settings import Activation, Experts, Reach, Rope


class FamilyConfig(Settings):
    """Settings that every family has. Everything architectural is in the config: nothing branches on a model's name."""

    hub_types: ClassVar[tuple[str, ...]] = ()
    # The `model_type`s of config.json that this family reads.
    hub_ignore: ClassVar[tuple[str, ...]] = ()
    # Tensors that Hub folders of this family may hold and that follow from the config: causal masks, position numbers.
    hub_unsaid: ClassVar[frozenset[str]] = frozenset()
    # Settings that config.json has no word for: the tensors decide them (`fitted`).
    hub_left_out: ClassVar[tuple[str, ...]] = ()
    # Tensors that its folders may hold and this model has no part for: left out, and said so each time.
    moe_parts: ClassVar[frozenset[str]] = frozenset()
    """Of `shared`, `shared_gate` and `bias`, those that its experts may have."""
    hub_prefixes: ClassVar[tuple[str, ...]] = ()
    # What the names of tensors may begin with, or not, as the class that wrote them was.
    hub_old_ends: ClassVar[Mapping[str, str]] = {}
    # How names of tensors ended in old folders, and end now.
    causal: ClassVar[bool] = True
    # A token sees what is before it. False: it sees all of its sequence, and no token is predicted (encoders).

    hub_blocks: ClassVar[Mapping[str, str]] = {}
    # Where its folders may hold MXFP4 blocks: how a weight reads from them, by how it reads plain.

    preset: str | None = None
    """The preset these numbers came from."""
    vocab: Annotated[int, Also("vocab_size")] = Field(gt=0)
    """Rows of the embedding V."""
    width: Annotated[
        int, Also("hidden_size", "d_model", "n_embd", "dim", "base_emb_dim", "model_dim", "emb_dim", "embed_dim")
    ] = Field(gt=0)
    """Width of the residual stream D."""
    layers: Annotated[
        int, Also("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "base_num_decoder_layers")
    ] = Field(gt=0)
    """Number of layers L."""
    context: Annotated[int, Also("max_position_embeddings", "max_context")] = Field(gt=0)
    """Longest sequence it was made for, in tokens."""
    tied: Annotated[bool, Also("tie_word_embeddings", "tie_embeddings", "logits_via_embedding")] = False
    """The head is the embedding."""

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """The module, every weight a description (`parts.weight`)."""
        raise NotImplementedError

    @property
    def dims(self) -> dict[str, int]:
        """The size of each letter of its equations (`core.dims`)."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _experts_have_names(self) -> "FamilyConfig":
        """What the Hub's table has no row for would be built, and neither counted, read nor written."""
        how = self.experts
        strange = [
            part
            for part in ("shared", "shared_gate", "bias")
            if how and getattr(how, part) and part not in self.moe_parts
        ]
        if strange:
            raise ValueError(f"{', '.join(f'moe.{part}' for part in strange)}: experts of this family have none")
        return self

    @property
    def experts(self) -> Experts | None:
        """The mixture of experts that its layers have."""
        return getattr(self, "moe", None)

    def attend(self, segments: Any) -> "parts.Attend":
        """How the tokens of whole sequences meet. segments: [B T] ints; segment 0 is padding."""
        return parts.Packed(segments) if self.causal else parts.Bidirectional(segments)

    def parameters(self, active: bool = False) -> int:
        """How many numbers it has, or how many of them a token meets; from the table of names, nothing is built."""
        share = self._share if active else lambda axes: Fraction(1)
        return int(sum(t.size * t.layers * share(t.axes) for t in kept(*self.hub_rows())))

    def flops(self, tokens: int) -> int:
        """Of one forward pass over a row of so many tokens: 2 for each multiply-add of every contraction, attention's
        in full (causal halving and windows are for the caller to state). A backward pass costs twice as much."""
        apart = LOOKED_UP | {"O"}  # rows that are picked, and what meets a sequence's summary alone
        met = (t for t in kept(*self.hub_rows()) if t.path.endswith(".w") and not apart & set(t.axes))
        weights = sum(t.size * t.layers * self._share(t.axes) for t in met)
        head = self.width * self.vocab if self.causal else 0
        return int(2 * tokens * (weights + head)) + self.mixing_flops(tokens)

    def training_flops(self, tokens: int) -> int:
        """Of a forward and a backward pass over such a row."""
        return 3 * self.flops(tokens) - 2 * self.choosing_flops(tokens)

    def mixing_flops(self, tokens: int) -> int:
        """The part of `flops` in which tokens meet each other and no weight."""
        raise NotImplementedError

    def choosing_flops(self, tokens: int) -> int:
        """The part of `flops` that only a choice follows from: no gradient goes back through it."""
        return 0

    def _share(self, axes: tuple[str, ...]) -> Fraction:
        """Of a weight with these axes: what one token meets. Experts lead with E; a router, which all tokens meet, ends in it."""
        routed = self.experts is not None and len(axes) > 1 and axes[0] == "E"
        return Fraction(self.experts.active, self.experts.count) if self.experts and routed else Fraction(1)

    def for_context(self, tokens: int) -> "FamilyConfig":
        """The same model, for sequences of at most so many tokens.

        Raises:
            BadInput: that is longer than its context.
        """
        if tokens > self.context:
            raise BadInput(f"context = {tokens}: the model was made for {self.context} tokens at most")
        rope = getattr(self, "rope", None)
        return self if rope is None else self.model_copy(update={"rope": rope.decided(tokens)})

    def resolved(self) -> "FamilyConfig":
        """The same model with every size told that would otherwise follow from others."""
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        """Small configs in odd sizes, every option both ways: the laws of families run over them."""
        raise NotImplementedError

    def hub_rows(self) -> tuple[list[Row], dict[str, int]]:
        """Names on the Hub, and the sizes its readings use."""
        raise NotImplementedError

    def hub_scaled(self, rows: Sequence[Row], names: Collection[str]) -> list[Row]:
        """The rows for a folder with tensors of these names, of which some are values and some their scales."""
        return scaled(rows, names, self.hub_blocks)

    def fitted(self, names: Collection[str]) -> "FamilyConfig":
        """The same model without parts that config.json tells of and a folder with tensors of these names leaves out."""
        return self

    @classmethod
    def hub_text(cls, config: dict[str, Any]) -> dict[str, Any]:
        """The part of a config.json that is about this model, where it tells of more than text."""
        return config

    @classmethod
    def from_hub(cls, config: dict[str, Any]) -> "FamilyConfig":
        """From a Hub folder's config.json. A key that would change the numbers and is not understood is an error."""
        raise NotImplementedError

    def to_hub(self) -> dict[str, Any]:
        """What config.json says of this model. Written by way of `agreed`.

        Raises:
            Unsupported: no architecture of the Hub has these options together.
        """
        raise NotImplementedError

    def agreed(self, said: dict[str, Any]) -> dict[str, Any]:
        """The same config.json, if reading it gives this model again.

        Raises:
            Unsupported: it does not; names the settings that would be lost.
        """
        hint = 'Argosy\'s own format keeps every setting: to=argosy, lm.save(..., format="argosy")'
        try:
            again = type(self).from_hub(said).resolved()
        except (ArgosyError, ValueError) as error:
            raise Unsupported(
                f"the Hub's `{said['model_type']}` has no such model: {complaint(error)}", hint=hint
            ) from None
        mine, theirs = (_without_training(config.model_dump()) for config in (self.resolved(), again))
        if lost := list(_differing(mine, theirs)):
            raise Unsupported(f"the Hub's `{said['model_type']}` cannot say {', '.join(lost)} of this model", hint=hint)
        return said


def _differing(mine: Any, theirs: Any, at: str = "") -> Iterator[str]:
    """The settings that differ, each with its value here."""
    if not (isinstance(mine, dict) and isinstance(theirs, dict)):
        yield from [f"{at} = {mine}"] if mine != theirs else []
        return
    for key in mine:
        yield from _differing(mine[key], theirs.get(key), f"{at}.{key}" if at else key)


def _without_training(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without those that config.json has no words for: what only training reads, and a choice made when loading."""
    settings = dict(settings)
    if (scaling := (settings.get("rope") or {}).get("scaling")) and "table" in scaling:
        settings["rope"] = settings["rope"] | {"scaling": scaling | {"table": None}}
    moe = settings.get("moe")
    kept = {k: v for k, v in moe.items() if k not in ("z_loss", "bias_rate", "capacity", "balance", "balance_over")} if moe else moe
    return settings | {"preset": None} | ({"moe": kept} if moe else {})


class DecoderConfig(FamilyConfig):
    """What families with attention over heads of keys and values have in common."""

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
    """Key and value heads K, which must divide `heads`; as many as `heads` unless told."""
    head_size: Annotated[int | None, Also("head_dim", "d_head")] = Field(None, gt=0)
    """Head size H, even; width / heads unless told."""
    rope: Rope = Rope()
    """Rotary positions."""
    window: Annotated[int | None, Also("sliding_window", "sliding_window_size")] = Field(None, gt=0)
    """A token of a local layer sees itself and the window-1 before it."""
    pattern: Annotated[str | None, Also("window_pattern")] = None
    """Which layers are local (L) and which see everything (G), repeated to the last layer: LLLLLG. All local if there is a
    window, unless told."""
    norm_eps: Annotated[float, Also("rms_norm_eps", "layer_norm_eps", "normalization_layer_epsilon")] = Field(
        1e-5, gt=0
    )
    """Added to the mean square in RMSNorm."""
    activation: Annotated[Activation, Also("hidden_act", "mlp_activations", "hidden_activation")] = "silu"
    """Of the feed-forward gate."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> "DecoderConfig":
        if self.heads % self.K:
            raise ValueError(f"heads = {self.heads} is not a multiple of kv_heads = {self.K}")
        if self.head_size is None and self.width % self.heads:
            raise ValueError(f"width = {self.width} is not a multiple of heads = {self.heads}: set head_size")
        if self.rope.turned(self.H) % 2:
            raise ValueError(f"{self.rope.turned(self.H)} features of a head turn: rotary positions turn pairs")
        if self.pattern is not None and (not self.pattern or set(self.pattern) - {"L", "G"}):
            raise ValueError(f"pattern = {self.pattern}: L for a local layer, G for one that sees everything")
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

    def reaches(self, local_rope: Rope | None = None) -> list[Reach]:
        """What is fixed about the attention of each layer.

        Args:
            local_rope: of local layers, where they turn differently.
        """
        local, whole = Reach(self.window, self.rotary(local_rope or self.rope)), Reach(None, self.rotary(self.rope))
        return [local if span == "L" else whole for span in self.spans]

    def rotary(self, rope: Rope) -> Rope:
        """Rotary positions as this model applies them, whatever the length of a sequence."""
        return rope.decided(self.context)

    def mixing_flops(self, tokens: int) -> int:
        return 4 * tokens * tokens * self.heads * self.H * self.layers


class AbsoluteConfig(FamilyConfig):
    """What families have in common that learn a vector for each position, have LayerNorm, a plain feed-forward layer and
    biases everywhere."""

    ffn: int = Field(gt=0)
    """Width of the feed-forward layer F."""
    heads: int = Field(gt=0)
    """Heads N, which must divide the width."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance in LayerNorm."""
    activation: Activation = "gelu"
    """Of the feed-forward layer."""

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
    """The shortest pattern that repeats to this: LGLGL is LG."""
    return next(spans[:n] for n in range(1, len(spans) + 1) if (spans[:n] * len(spans))[: len(spans)] == spans)
