"""`ModelConfig`: the settings that describe a model of any kind, and what can be computed from the settings alone.

A model family is one file. Its config counts parameters and FLOPs, builds the module, and maps tensor names on the Hub. Tests compare
the counts with the built model. Everything architectural is in the config. Nothing branches on a model's name.
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
    # The values of `model_type` in config.json that this config reads.
    hub_ignore: ClassVar[tuple[str, ...]] = ()
    # Patterns of tensors in Hub folders that are ignored because they follow from the config: causal masks, position numbers.
    hub_unsaid: ClassVar[frozenset[str]] = frozenset()
    # Settings without a key in config.json. Which tensors are in the folder decides them (`fitted`).
    hub_left_out: ClassVar[tuple[str, ...]] = ()
    # Patterns of tensors in Hub folders that the model does not use. They are ignored, with a warning.
    hub_prefixes: ClassVar[tuple[str, ...]] = ()
    # Prefixes that tensor names have or lack, depending on the class that wrote the folder.
    hub_old_ends: ClassVar[Mapping[str, str]] = {}
    # Old endings of tensor names, mapped to the current ones.
    hub_blocks: ClassVar[Mapping[str, str]] = {}
    # For folders with MXFP4 blocks: maps the reading of a plain weight to the reading of a weight in blocks (`KeyRow.reading`).

    causal: ClassVar[bool] = False
    # Whether the model predicts tokens.
    inputs: ClassVar[InputKind] = "tokens"
    # What the model reads: tokens; clicks, which are rows of numbers and categories; images and latents; or images and texts.
    adapted: ClassVar[str | None] = None
    # A pattern of the paths of the contractions that get adapters by default. None: every matrix of `layers` except routers.

    preset: str | None = None
    """Name of the preset these settings came from."""

    @property
    def scored(self) -> int:
        """The number of scores that the head outputs instead of logits; 0 without such a head."""
        return 0

    @property
    def id_spaces(self) -> Any:
        """The number of ids that the model looks up, of each kind."""
        raise NotImplementedError

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module. Its weights are descriptions, without arrays (`parts.weight`).

        Args:
            run: the strategy that runs the layers. Default: `Unroll`.
        """
        raise NotImplementedError

    @property
    def dims(self) -> dict[str, int]:
        """The size of each letter in the model's equations (`core.dims`)."""
        raise NotImplementedError

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        """Returns the rows that map tensor names on the Hub to weights, and the size of each axis in the rows."""
        raise NotImplementedError

    def parameters(self, active: bool = False) -> int:
        """Counts parameters, from `hub_rows`, without building the model.

        Args:
            active: whether to count only the parameters that are used for one position. This matters for mixtures of experts.
        """
        share = self._share if active else lambda axes: 1
        return int(sum(t.size * t.layers * share(t.axes) for t in filled_tensors(*self.hub_rows())))

    def flops(self, tokens: int) -> int:
        """Counts the FLOPs of one forward pass over a row of `tokens` positions: 2 for each multiply-add of every contraction.

        Attention counts in full, without subtracting for causality or windows. A backward pass costs twice as much.
        """
        # Embeddings are only looked up, and a pooler reads one vector per sequence: neither counts.
        apart = LOOKED_UP | {"pooled"}
        tensors = (t for t in filled_tensors(*self.hub_rows()) if t.path.endswith(".w") and not apart & set(named_axes(t.axes)))
        return int(2 * tokens * sum(t.size * t.layers * self._share(t.axes) for t in tensors)) + self.mixing_flops(tokens)

    def training_flops(self, tokens: int) -> int:
        """Counts the FLOPs of a forward and a backward pass over a row of `tokens` positions."""
        return 3 * self.flops(tokens) - 2 * self.choosing_flops(tokens)

    def mixing_flops(self, tokens: int) -> int:
        """Counts the part of `flops` that mixes positions without weights: attention scores and weighted sums."""
        raise NotImplementedError

    def choosing_flops(self, tokens: int) -> int:
        """Counts the part of `flops` that only selects experts or tokens. It has no backward pass."""
        return 0

    def _share(self, axes: tuple[str, ...]) -> Any:
        """Returns the share, 0..1, of a weight with these axes that is used for one position."""
        return 1

    def resolved(self) -> Any:
        """Returns the same config with explicit values for all sizes that are derived from others by default."""
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        """Returns small configs with odd sizes, by name, for tests. Together they use every option in both ways."""
        raise NotImplementedError

    def hub_scaled(self, rows: Sequence[KeyRow], names: Collection[str]) -> list[KeyRow]:
        """Returns the rows of `hub_rows` for a Hub folder with the tensors `names`. Rows of quantized weights then read values and
        scales."""
        return scaled_rows(rows, names, self.hub_blocks)

    def fitted(self, names: Collection[str]) -> Any:
        """Returns the config without parts that config.json declares but whose tensors are not among `names`."""
        return self

    @classmethod
    def hub_text(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Returns the part of config.json that describes this model, if it also describes others, such as a vision tower."""
        return config

    @classmethod
    def from_hub(cls, config: dict[str, Any]) -> Any:
        """Reads the settings from a Hub folder's config.json.

        Raises:
            BadInput: a key that could change results is not supported.
        """
        raise NotImplementedError

    def to_hub(self) -> dict[str, Any]:
        """Returns the config.json of this model, checked by `agreed`.

        Raises:
            Unsupported: no architecture on the Hub has this combination of options.
        """
        problem = f"the Hub has no architecture for models of this kind ({type(self).__name__})"
        raise Unsupported(problem, hint='Argosy\'s own format keeps it: to=argosy, lm.save(..., format="argosy")')

    def agreed(self, hub_config: dict[str, Any]) -> dict[str, Any]:
        """Checks that reading this config.json gives this config again, and returns it.

        Raises:
            Unsupported: settings would be lost. The error names them.
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
        """Returns the keys of config.json that describe a head of scores. Empty without such a head."""
        return {}


# The suffix of the names of transformers' classes with a head of scores.
SCORING = "ForSequenceClassification"
# The meanings of scores that transformers knows.
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


def with_scores(config: Any, hub: Mapping[str, Any]) -> Any:
    """Adds the settings of a head of scores to a config, if the config.json `hub` names a class with one.

    Raises:
        BadInput: the family has no such head, or its labels are not numbered from 0.
    """
    if not any(str(name).endswith(SCORING) for name in hub.get("architectures") or ()):
        return config
    if not getattr(type(config), "can_score", False):
        problem = f"a `{hub.get('model_type')}` with a head of scores ({SCORING}) is not built"
        raise BadInput(problem)
    # transformers writes labels only if there are more or fewer than two.
    names = hub.get("id2label")
    names = names if isinstance(names, dict) and names else {"0": "LABEL_0", "1": "LABEL_1"}
    if set(map(str, names)) != {str(i) for i in range(len(names))}:
        raise BadInput(f"config.json: `id2label` does not number its {len(names)} classes from 0")
    labels = tuple(str({str(k): v for k, v in names.items()}[str(i)]) for i in range(len(names)))
    head = {"scores": len(labels), "labels": () if labels == numbered_labels(len(labels)) else labels}
    return config.model_copy(update=head | {"problem_type": _problem_type(hub, len(labels))})


def numbered_labels(count: int) -> tuple[str, ...]:
    """Returns the labels that transformers gives to classes without names: LABEL_0, LABEL_1, ..."""
    return tuple(f"LABEL_{i}" for i in range(count))


def _problem_type(hub: Mapping[str, Any], scores: int) -> str | None:
    """Reads the meaning of scores. A cross-encoder of sentence-transformers with the activation Identity is a regression."""
    problem_type = hub.get("problem_type")
    if problem_type is not None and problem_type not in PROBLEM_TYPES:
        raise BadInput(f"config.json: unknown `problem_type` {problem_type!r}", hint=f"one of {', '.join(PROBLEM_TYPES)}")
    cross_encoder = hub.get("sentence_transformers")
    activation = str(cross_encoder.get("activation_fn") if isinstance(cross_encoder, dict) else "").rpartition(".")[2]
    return "regression" if problem_type is None and scores == 1 and activation == "Identity" else problem_type


def _differing(mine: Any, theirs: Any, at: str = "") -> Iterator[str]:
    """Lists the settings in which `mine` and `theirs` differ, each with the value in `mine`."""
    if not (isinstance(mine, dict) and isinstance(theirs, dict)):
        yield from [f"{at} = {mine}"] if mine != theirs else []
        return
    for key in mine:
        yield from _differing(mine[key], theirs.get(key), f"{at}.{key}" if at else key)


def _without_training(settings: dict[str, Any]) -> dict[str, Any]:
    """Removes the settings that config.json has no keys for: settings of training, and choices made when loading."""
    settings = dict(settings)
    if (scaling := (settings.get("rope") or {}).get("scaling")) and "table" in scaling:
        settings["rope"] = settings["rope"] | {"scaling": scaling | {"table": None}}
    moe = settings.get("moe")
    moe_keys = {k: v for k, v in moe.items() if k not in ("z_loss", "bias_rate", "capacity", "balance", "balance_over")} if moe else moe
    # diffusers writes what a denoiser predicts in the scheduler's settings instead.
    elsewhere = {name: None for name in ("preset", "prediction") if name in settings}
    return settings | elsewhere | ({"moe": moe_keys} if moe else {})
