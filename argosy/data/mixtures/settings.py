"""The settings of one source of a mixture."""

from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from argosy.core.errors import nearest
from argosy.core.settings import Settings

RecordFormat = Literal[
    "auto", "text", "completion", "messages", "alpaca", "sharegpt", "preference", "kto", "stepwise", "prompt", "classification",
    "pair", "triplet", "negatives", "similarity", "rerank",
]  # fmt: skip


class MixedSource(Settings):
    """One source of a mixture. What is left out is as in `data`; a path alone may be written without braces."""

    path: str
    """What `data.source` names: a file, a folder, a glob, an address, a prepared folder, or a name."""

    weight: float | dict[int, float] | None = None
    """The share of this source, relative to the other weights: of rows, or of tokens with `data.weight_unit=tokens`. A mapping from
    steps to weights changes it at these steps: `{0: 1, 1000: 0.2}`. None: in proportion to its size times `epochs`."""

    epochs: float | None = Field(default=None, gt=0)
    """Passes over this source in one pass over a mixture without weights. None: 1."""

    format: RecordFormat | None = None
    """As `data.format`."""

    columns: dict[str, str] | None = None
    """As `data.columns`."""

    template: str | None = None
    """As `data.template`."""

    documents: Literal["whole", "paragraphs"] | None = None
    """As `data.documents`."""

    encoding: str | None = None
    """As `data.encoding`."""

    invalid: Literal["error", "replace"] | None = None
    """As `data.invalid`."""

    max_bytes: int | None = Field(default=None, gt=0)
    """As `data.max_bytes`."""

    held_out: float | None = Field(default=None, ge=0, lt=1)
    """As `data.held_out`."""

    learn: Literal["answers", "all"] | None = None
    """As `data.learn`."""

    map: str | None = None
    """As `data.map`."""

    filter: str | None = None
    """As `data.filter`."""

    deduplicate: Literal["no", "exact", "minhash"] | None = None
    """As `data.deduplicate`."""

    packing: Literal["split", "fit", "alone"] | None = None
    """As `data.packing`."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @field_validator("weight")
    @classmethod
    def _steps_of_weights(cls, value: Any) -> Any:
        if isinstance(value, dict):
            if 0 not in value or min(value) < 0:
                raise ValueError("weights by step begin at step 0, as in {0: 1, 1000: 0.2}")
            if min(value.values()) < 0 or not any(value.values()):
                raise ValueError("weights are 0 or more, and not all 0")
        elif value is not None and value <= 0:
            raise ValueError("a weight is more than 0; leave the source out instead")
        return value

    @property
    def overrides(self) -> dict[str, Any]:
        """The data settings that are set for this source, by name."""
        names = set(type(self).model_fields) - {"path", "weight", "epochs"}
        return {name: getattr(self, name) for name in names & self.model_fields_set if getattr(self, name) is not None}


def mixed_source(value: Any, number: int) -> MixedSource:
    """Makes a source of a mixture from a path, or from a mapping of its settings. `number` counts sources from 1, for errors.

    Raises:
        ValueError: a setting is wrong. The message names it.
    """
    if isinstance(value, MixedSource):
        return value
    try:
        return MixedSource.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else "path"
        if first["type"] == "extra_forbidden":
            hint = nearest(key, MixedSource.model_fields)
            raise ValueError(f"no key `{key}` in source {number}; {hint}") from None
        raise ValueError(f"wrong `{key}` in source {number}: {first['msg'].removeprefix('Value error, ')}") from None
