"""The fields of requests to a language model and to an encoder: those of OpenAI's API, and those that vLLM adds. `web.fields` describes
how they are checked."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from argosy.infer.sampling.repetition import Repetition
from argosy.serve.response.reasoning import Effort
from argosy.web.errors import ApiError
from argosy.web.fields import Fields, VectorFields, as_list

# Names that `chat_template_kwargs` cannot set, because they are fields themselves, or parameters of `LM.chat_prompt` and `chat.render`.
OF_RENDERING = {
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template",
    "tokenize", "template", "special", "now", "self",
}  # fmt: skip

Stops = Annotated[list[str], BeforeValidator(as_list)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class RepetitionDetection(BaseModel):
    """Ends a completion that ends with the same pattern `min_count` times in a row, as in vLLM. A pattern has `min_pattern_size` to
    `max_pattern_size` tokens. A `max_pattern_size` of 0 switches the detection off."""

    model_config = ConfigDict(extra="forbid", strict=True)

    # The bounds keep a check of every token below a millisecond.
    max_pattern_size: int = Field(0, ge=0, le=512)
    min_pattern_size: int = Field(0, ge=0)
    min_count: int = Field(0, ge=0, le=64)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError("min_pattern_size is above max_pattern_size")
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError("min_count is at least 2")
        return self

    @property
    def settings(self) -> Repetition | None:
        sizes = self.max_pattern_size, self.min_count, max(self.min_pattern_size, 1)
        return Repetition(*sizes) if self.max_pattern_size else None


class SamplingFields(Fields):
    """Fields of every route that generates text. None: the default of the model or of the server.

    Fields for sampling have the API's names. `sampling.OURS` maps them to those of `Sampling` where they differ.
    """

    model: str | None = None
    stream: bool = False
    stop_token_ids: list[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)

    # The bounds keep values distinct from 0 and infinity in float32.
    temperature: float | None = Field(None, ge=0, le=1000)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.001, le=1000)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    min_tokens: int | None = Field(None, ge=0)
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = Field(None, min_length=1)
    bad_words: list[str] | None = None
    repetition_detection: RepetitionDetection | None = None
    structured_outputs: dict[str, Any] | None = None

    def sampled(self) -> dict[str, Any]:
        """The fields of this class that the request has set."""
        return {name: getattr(self, name) for name in SamplingFields.model_fields if name in self.model_fields_set}


class GenerationFields(SamplingFields):
    """Fields of completions and chats."""

    top_name: ClassVar[str] = "logprobs"

    n: int = Field(1, ge=1)
    use_beam_search: bool = False
    # Beyond these bounds, only the length of completions would matter.
    length_penalty: float = Field(1.0, ge=-10, le=10)
    stream_options: StreamOptions | None = None
    stop: Stops = Field(default_factory=list)
    max_tokens: int | None = Field(None, ge=1)
    prompt_logprobs: int | None = Field(None, ge=0)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    request_id: str | None = Field(None, min_length=1, max_length=128, pattern="^[!-~]*$")
    response_format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ApiError("`stream_options` need `stream: true`", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            problem = "`prompt_logprobs` do not come in a stream, as in vLLM; completions stream them with `echo` and `logprobs`"
            raise ApiError(problem, param="prompt_logprobs")
        return self

    @property
    def top(self) -> int | None:
        """The number of most likely tokens to report per position, besides the sampled one. None: no log-probabilities."""
        raise NotImplementedError

    @property
    def scoring(self) -> str | None:
        """Name of the field that requests log-probabilities of the prompt; None if none does."""
        return None if self.prompt_logprobs is None else "prompt_logprobs"


class CompletionFields(GenerationFields):
    """A body of /v1/completions."""

    # `completions.read_prompts` checks its four forms.
    prompt: Any
    echo: bool = False
    logprobs: int | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, ge=0)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _nothing_but_the_prompt(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ApiError("`max_tokens` is 0, which needs `echo: true`", param="max_tokens")
        return self

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def scoring(self) -> str | None:
        return "echo" if self.echo and self.logprobs is not None else super().scoring


class RenderFields(Fields):
    """Fields that decide how messages are rendered, on /v1/chat/completions and /tokenize."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    reasoning_effort: Effort | None = None

    @model_validator(mode="after")
    def _exclude_each_other(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            problem = "`continue_final_message` needs `add_generation_prompt: false`"
            raise ApiError(problem, param="continue_final_message")
        if wrong := sorted(set(self.chat_template_kwargs) & OF_RENDERING):
            raise ApiError(f"`chat_template_kwargs` cannot set `{wrong[0]}`", param="chat_template_kwargs")
        return self


class ChatFields(GenerationFields, RenderFields):
    """A body of /v1/chat/completions."""

    top_name: ClassVar[str] = "top_logprobs"

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("`top_logprobs` need `logprobs: true`", param="top_logprobs")
        return self

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeFields(RenderFields):
    """A body of /tokenize, with either a text or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _of_messages(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError("give `prompt` or `messages`", param="prompt")
        of_text = {*TokenizeFields.model_fields} - {*RenderFields.model_fields} | {"add_special_tokens"}
        if self.prompt is not None and (wrong := sorted(self.model_fields_set - of_text)):
            raise ApiError(f"`{wrong[0]}` is for `messages`", param=wrong[0])
        return self


class DetokenizeFields(Fields):
    """A body of /detokenize."""

    model: str | None = None
    tokens: list[int]


class EmbeddingFields(VectorFields):
    """A body of /v1/embeddings.

    prompt_name: the name of a prompt in the model's folder, which is put before each text, as in text-embeddings-inference; None: the
        default prompt.
    """

    # `completions.read_prompts` checks its four forms.
    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    add_special_tokens: bool = True
    prompt_name: str | None = Field(None, max_length=128)
