"""Converts the fields of a request to sampling settings. Fields that are not given take the model's defaults."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from argosy.core.errors import ArgosyError, BadInput
from argosy.infer.detokenize import token_spellings
from argosy.infer.sampling.sample import Sampling
from argosy.serve.openai.fields import GenerationFields
from argosy.web.errors import ApiError, input_error

# The fields of requests that set sampling settings. `OURS` has the setting's name where it differs.
FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "logit_bias", "allowed_token_ids", "bad_words"),
)
OURS = {"allowed_token_ids": "allowed_tokens"}

# The settings that a model's generation_config.json may set.
OF_THE_MODEL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def default_sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The default sampling settings of a model, by its generation config. As in OpenAI's API and in vLLM, the default temperature is 1.

    Args:
        generation: the contents of generation_config.json.

    Raises:
        BadInput: the generation config has an invalid value.
    """
    model_defaults = {name: generation[name] for name in OF_THE_MODEL if generation.get(name) is not None}
    try:
        Sampling(**model_defaults)
    except (ValidationError, ArgosyError) as error:
        raise BadInput(f"the model's generation config: {str(error).splitlines()[0]}") from None
    return {"temperature": 1.0} | model_defaults


def read_sampling(fields: GenerationFields, defaults: Mapping[str, Any], tokenizer: Any) -> Sampling:
    """The sampling settings of a request.

    Args:
        defaults: the settings for fields that are not given.

    Raises:
        ApiError: a field has an invalid value.
    """
    settings = dict(defaults)
    for name in FIELDS:
        if (value := getattr(fields, name)) is not None:
            settings[OURS.get(name, name)] = _converted(name, value, tokenizer)
    try:
        return Sampling(**settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        wrong = str(first["loc"][0]) if first["loc"] else None
        name = next((name for name in FIELDS if OURS.get(name, name) == wrong), wrong)
        raise ApiError(f"`{name}`: {first['msg'].removeprefix('Value error, ')}", param=name) from None
    except ArgosyError as error:
        raise input_error(error) from None


def _converted(name: str, value: Any, tokenizer: Any) -> Any:
    """Converts the value of a request's field to that of the sampling setting."""
    if name == "top_k":
        # vLLM writes -1 for all.
        return max(value, 0)
    if name == "logit_bias":
        try:
            return {int(token): bias for token, bias in value.items()}
        except ValueError:
            raise ApiError("`logit_bias`: keys are token ids", param="logit_bias") from None
    if name == "allowed_token_ids":
        return tuple(value)
    if name == "bad_words":
        try:
            return tuple(ids for word in value for ids in token_spellings(tokenizer, word))
        except BadInput as error:
            raise input_error(error, "bad_words") from None
    return value
