"""`ModelConfig`: the settings that describe a model of any kind, and what is known of it from them alone.

A model is one file: its config counts parameters and FLOPs (the laws compare them with the built model), builds the module, and
maps names on the Hub. Everything architectural is in the config; nothing branches on a model's name.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from argosy.core.dims import LOOKED_UP, named_axes
from argosy.core.errors import ArgosyError, BadInput, Unsupported, complaint
from argosy.core.keymap import KeyRow, filled_tensors
from argosy.core.settings import Settings
from argosy.models import parts
from argosy.models.hub.rows import scaled_rows

InputKind = Literal["tokens", "clicks", "images", "image_texts"]


class ModelConfig(Settings):
    """Settings of a model. It may predict tokens (`LanguageConfig`) or not: a tower, a denoiser, a ranker."""

    hub_types: ClassVar[tuple[str, ...]] = ()
    # The `model_type`s of config.json that this config reads.
    hub_ignore: ClassVar[tuple[str, ...]] = ()
    # Tensors that may be in Hub folders of these types and follow from the config: causal masks, position numbers.
    hub_unsaid: ClassVar[frozenset[str]] = frozenset()
    # Settings without a key in config.json: the tensors decide them (`fitted`).
    hub_left_out: ClassVar[tuple[str, ...]] = ()
    # Tensors that may be in such folders and that the model does not use: ignored, with a warning.
    hub_prefixes: ClassVar[tuple[str, ...]] = ()
    # Prefixes that tensor names may have or lack, depending on the class that wrote the folder.
    hub_old_ends: ClassVar[Mapping[str, str]] = {}
    # Old endings of tensor names, and the current ones.
    hub_blocks: ClassVar[Mapping[str, str]] = {}
    # For folders with MXFP4 blocks: how a weight is read from them, by how it is read plain.

    causal: ClassVar[bool] = False
    # Whether it predicts tokens.
    inputs: ClassVar[InputKind] = "tokens"
    # What it reads: tokens; clicks, which are rows of numbers and categories; images and latents; or images beside texts.
    adapted: ClassVar[str | None] = None
    # Which contractions get adapters unless told otherwise, as a pattern of their paths. None: every matrix of `layers` except routers.

    preset: str | None = None
    """Name of the preset these settings came from."""

    @property
    def scored(self) -> int:
        """How many scores a head gives in place of logits."""
        return 0

    @property
    def id_spaces(self) -> Any:
        """How many ids there are of each kind that it looks up."""
        raise NotImplementedError

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module; every weight is a description (`parts.weight`)."""
        raise NotImplementedError

    @property
    def dims(self) -> dict[str, int]:
        """The size of each letter of its equations (`core.dims`)."""
        raise NotImplementedError

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        """The table of names on the Hub, and the sizes its rows use."""
        raise NotImplementedError

    def parameters(self, active: bool = False) -> int:
        """The number of parameters, or with `active` those used for one position. Counted from the table of names; nothing is
        built."""
        share = self._share if active else lambda axes: 1
        return int(sum(t.size * t.layers * share(t.axes) for t in filled_tensors(*self.hub_rows())))

    def flops(self, tokens: int) -> int:
        """FLOPs of one forward pass over a row of `tokens` positions: 2 for each multiply-add of every contraction. Attention counts
        in full, without subtracting for causality or windows. A backward pass costs twice as much."""
        # Embeddings are looked up, and a pooler sees one vector per sequence.
        apart = LOOKED_UP | {"pooled"}
        tensors = (t for t in filled_tensors(*self.hub_rows()) if t.path.endswith(".w") and not apart & set(named_axes(t.axes)))
        return int(2 * tokens * sum(t.size * t.layers * self._share(t.axes) for t in tensors)) + self.mixing_flops(tokens)

    def training_flops(self, tokens: int) -> int:
        """FLOPs of a forward and a backward pass over a row of `tokens` positions."""
        return 3 * self.flops(tokens) - 2 * self.choosing_flops(tokens)

    def mixing_flops(self, tokens: int) -> int:
        """The part of `flops` that mixes positions without weights (attention scores and sums)."""
        raise NotImplementedError

    def choosing_flops(self, tokens: int) -> int:
        """The part of `flops` that only selects experts or tokens: no gradient flows through it."""
        return 0

    def _share(self, axes: tuple[str, ...]) -> Any:
        """The share of a weight with these axes that is used for one position."""
        return 1

    def resolved(self) -> Any:
        """The same model with all sizes set that would otherwise be derived from others."""
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        """Small configs with odd sizes in which every option is used both ways; the laws run over them."""
        raise NotImplementedError

    def hub_scaled(self, rows: Sequence[KeyRow], names: Collection[str]) -> list[KeyRow]:
        """The rows of the table of names for a Hub folder with these tensors. A weight that is stored quantized is read from its values
        and its scales."""
        return scaled_rows(rows, names, self.hub_blocks)

    def fitted(self, names: Collection[str]) -> Any:
        """The same model without parts that config.json declares but whose tensors are missing."""
        return self

    @classmethod
    def hub_text(cls, config: dict[str, Any]) -> dict[str, Any]:
        """The part of a config.json about this model, if it also describes other models (a vision tower)."""
        return config

    @classmethod
    def from_hub(cls, config: dict[str, Any]) -> Any:
        """The settings from a Hub folder's config.json. Raises BadInput for keys that would change the results and are not
        understood."""
        raise NotImplementedError

    def to_hub(self) -> dict[str, Any]:
        """The config.json of this model, checked by `agreed`.

        Raises:
            Unsupported: no architecture on the Hub has this combination of options.
        """
        problem = f"the Hub has no architecture for models of this kind ({type(self).__name__})"
        raise Unsupported(problem, hint='Argosy\'s own format keeps it: to=argosy, lm.save(..., format="argosy")')

    def agreed(self, hub_config: dict[str, Any]) -> dict[str, Any]:
        """Returns the config.json if reading it gives this model again.

        Raises:
            Unsupported: it does not; names the settings that would be lost.
        """
        hint = 'Argosy\'s own format keeps every setting: to=argosy, lm.save(..., format="argosy")'
        hub_config |= self.hub_head(hub_config)
        try:
            again = with_scores(type(self).from_hub(hub_config), hub_config).resolved()
        except (ArgosyError, ValueError) as error:
            raise Unsupported(
                f"the Hub's `{hub_config['model_type']}` has no such model: {complaint(error)}", hint=hint
            ) from None
        mine, theirs = (_without_training(config.model_dump()) for config in (self.resolved(), again))
        if lost := list(_differing(mine, theirs)):
            raise Unsupported(f"the Hub's `{hub_config['model_type']}` cannot express {', '.join(lost)} of this model", hint=hint)
        return hub_config

    def hub_head(self, hub_config: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of config.json that describe another head than the usual one."""
        return {}


# The end of the name of transformers' classes with a head of scores.
SCORING = "ForSequenceClassification"
# What scores mean, by the names of transformers.
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


def with_scores(config: Any, hub: Mapping[str, Any]) -> Any:
    """The settings of a model whose config.json names a class with a head of scores; of any other, unchanged.

    Raises:
        BadInput: the family has no such head, or the names of its classes are not numbered from 0.
    """
    if not any(str(name).endswith(SCORING) for name in hub.get("architectures") or ()):
        return config
    if not getattr(type(config), "can_score", False):
        problem = f"a `{hub.get('model_type')}` with a head of scores ({SCORING}) is not built"
        raise BadInput(problem)
    # transformers writes labels only if there are not two.
    names = hub.get("id2label")
    names = names if isinstance(names, dict) and names else {"0": "LABEL_0", "1": "LABEL_1"}
    if set(map(str, names)) != {str(i) for i in range(len(names))}:
        raise BadInput(f"config.json: `id2label` does not number its {len(names)} classes from 0")
    labels = tuple(str({str(k): v for k, v in names.items()}[str(i)]) for i in range(len(names)))
    head = {"scores": len(labels), "labels": () if labels == numbered_labels(len(labels)) else labels}
    return config.model_copy(update=head | {"problem_type": _problem_type(hub, len(labels))})


def numbered_labels(count: int) -> tuple[str, ...]:
    """The names that transformers gives to classes without one."""
    return tuple(f"LABEL_{i}" for i in range(count))


def _problem_type(hub: Mapping[str, Any], scores: int) -> str | None:
    """What scores mean. A cross-encoder of sentence-transformers says so by its activation: Identity leaves a score as it is."""
    problem_type = hub.get("problem_type")
    if problem_type is not None and problem_type not in PROBLEM_TYPES:
        raise BadInput(f"config.json: unknown `problem_type` {problem_type!r}", hint=f"one of {', '.join(PROBLEM_TYPES)}")
    cross_encoder = hub.get("sentence_transformers")
    activation = str(cross_encoder.get("activation_fn") if isinstance(cross_encoder, dict) else "").rpartition(".")[2]
    return "regression" if problem_type is None and scores == 1 and activation == "Identity" else problem_type


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
    moe_keys = {k: v for k, v in moe.items() if k not in ("z_loss", "bias_rate", "capacity", "balance", "balance_over")} if moe else moe
    # What a denoiser predicts is written in the settings of its scheduler.
    elsewhere = {name: None for name in ("preset", "prediction") if name in settings}
    return settings | elsewhere | ({"moe": moe_keys} if moe else {})
