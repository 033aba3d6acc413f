"""The fields of requests that several servers read: OpenAI's, and those that vLLM adds.

A field is honored or refused by name, never silently ignored. Three kinds are accepted without effect: `IGNORED`, which OpenAI
documents as having none on the answer; null; and the `NEUTRAL` value of an unsupported field (`best_of=1`), because clients send it
with every request.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from argosy.web.errors import ApiError, validation_error

IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key")

# Unsupported fields of OpenAI's API and of vLLM's, with the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "prediction": (),
    "priority": (0,),
    "prompt_embeds": (),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

# Advice for unsupported fields.
INSTEAD = {f"guided_{name}": f'"structured_outputs": {{"{name}": ...}}' for name in ("json", "regex", "choice", "grammar")}


def as_list(value: Any) -> Any:
    """A text as a list of one, None as an empty list; other values as they are."""
    return [] if value is None else [value] if isinstance(value, str) else value



class Fields(BaseModel):
    """A body that is checked strictly: no unknown fields, and no conversions ("1" is not a number, 1 is not a boolean).

    ignored, neutral: see `IGNORED` and `NEUTRAL`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    ignored: ClassVar[Collection[str]] = IGNORED
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL

    @classmethod
    def of(cls, body: Any) -> Self:
        """Reads a body.

        Raises:
            ApiError: a field is unknown, unsupported or invalid.
        """
        if not isinstance(body, dict):
            raise ApiError("the body is not a JSON object")
        try:
            return cls.model_validate(cls._supported(body))
        except ValidationError as error:
            raise validation_error(error, cls.model_fields) from None

    @classmethod
    def _supported(cls, body: Mapping[str, Any]) -> dict[str, Any]:
        """The body without fields that change nothing."""
        fields = {}
        for name, value in body.items():
            is_field = name in cls.model_fields
            if (value is None and (is_field or name in cls.neutral)) or (name in cls.ignored and not is_field):
                continue
            if not is_field and name in cls.neutral:
                if any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in cls.neutral[name]):
                    continue
                instead = f", write {INSTEAD[name]}" if name in INSTEAD else ""
                raise ApiError(f"`{name}` is not supported{instead}", param=name, code="unsupported_parameter")
            fields[name] = value
        return fields


class VectorFields(Fields):
    """The fields that the routes of an encoder share.

    truncate_prompt_tokens: the most tokens of a text, whose end is cut; -1: as many as the model takes.
    """

    model: str | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    request_id: str | None = Field(None, min_length=1, max_length=128, pattern="^[!-~]*$")


class ScoreFields(VectorFields):
    """A body of /score."""

    text_1: Annotated[list[str], BeforeValidator(as_list)]
    text_2: Annotated[list[str], BeforeValidator(as_list)]


class RerankFields(VectorFields):
    """A body of /rerank.

    top_n: how many of the documents to return; 0: all.
    """

    query: str
    documents: list[str] = Field(min_length=1)
    top_n: int = Field(0, ge=0)


class ClassifyFields(VectorFields):
    """A body of /classify."""

    input: Annotated[list[str], BeforeValidator(as_list)] = Field(min_length=1)
