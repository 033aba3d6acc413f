"""From the fields of a request to the sampler's settings, and the defaults where a field is not given."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from argosy.core.errors import ArgosyError, BadInput
from argosy.infer.sample import Sampling
from argosy.serve.errors import ApiError, of_input
from argosy.serve.fields import Generation

# The API's name of a field -> the sampler's, and the value that asks for nothing.
NAMES = {
    "temperature": ("temperature", 0),
    "top_p": ("top_p", 1),
    "top_k": ("top_k", 0),
    "min_p": ("min_p", 0),
    "typical_p": ("typical_p", 1),
    "repetition_penalty": ("repetition_penalty", 1),
    "presence_penalty": ("presence_penalty", 0),
    "frequency_penalty": ("frequency_penalty", 0),
    "min_tokens": ("min_tokens", 0),
    "logit_bias": ("logit_bias", {}),
    "allowed_token_ids": ("allowed_tokens", None),
    "bad_words": ("bad_words", []),
}

# The settings that a model's generation_config.json may set.
OF_THE_MODEL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def defaults_of(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The model's own sampling settings. As in OpenAI's API and vLLM's, the temperature is 1 where it says nothing.

    Raises:
        BadInput: its generation config holds a value that no sampler can have.
    """
    own = {name: generation[name] for name in OF_THE_MODEL if generation.get(name) is not None}
    try:
        Sampling(**own)
    except (ValidationError, ArgosyError) as error:
        raise BadInput(f"the model's generation config: {str(error).splitlines()[0]}") from None
    return {"temperature": 1.0} | own


def sampling_of(fields: Generation, defaults: Mapping[str, Any], tokenizer: Any) -> Sampling:
    """The sampler's settings for a request.

    Raises:
        ApiError: a field that the sampler does not have, or a value it refuses.
    """
    given = dict(defaults)
    for name, (ours, nothing) in NAMES.items():
        value = getattr(fields, name)
        if value is None:
            continue
        if ours in Sampling.model_fields:
            given[ours] = _converted(name, value, tokenizer)
        elif value != nothing:
            raise ApiError(f"`{name}` is not supported", param=name, code="unsupported_parameter")
    try:
        return Sampling(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        wrong = str(first["loc"][0]) if first["loc"] else None
        name = next((api for api, (ours, _) in NAMES.items() if ours == wrong), wrong)
        raise ApiError(f"`{name}`: {first['msg'].removeprefix('Value error, ')}", param=name) from None
    except ArgosyError as error:
        raise of_input(error) from None


def _converted(name: str, value: Any, tokenizer: Any) -> Any:
    """A field's value as the sampler has it."""
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
        return tuple(ids for word in value for ids in _spellings(word, tokenizer))
    return value


def _spellings(word: str, tokenizer: Any) -> list[tuple[int, ...]]:
    """The token ids of a word at the beginning of a text, and after a space."""
    if tokenizer is None:
        raise ApiError("`bad_words`: the model has no tokenizer", param="bad_words")
    if not word.strip():
        raise ApiError("`bad_words`: a word without letters", param="bad_words")
    plain = word.lstrip()
    return list(dict.fromkeys(tuple(tokenizer.encode(text)) for text in (plain, f" {plain}")))
