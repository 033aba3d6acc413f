"""Settings of `argosy serve`. No jax here: mistakes are answered before it is imported."""

from typing import ClassVar, Literal, NamedTuple

from pydantic import Field

from argosy.adapt.methods.settings import AT_LOAD
from argosy.core.settings import Settings
from argosy.infer.settings import EngineSettings
from argosy.serve.vllm_flags import NAMES
from argosy.web.settings import WebLimits, WebSettings

# vLLM's names.
Parser = Literal["auto", "none", "qwen3", "deepseek_r1", "openai_gptoss"]


class ReasoningParser(NamedTuple):
    """How reasoning is split off a completion.

    tags: whether reasoning is between `<think>` and `</think>`; "template": only if the chat template has `</think>`.
    inside: whether a completion starts inside its reasoning even if neither it nor its prompt has `<think>`.
    channels: whether reasoning may be a channel of gpt-oss, which special tokens mark.
    needed: whether it is an error if the tokenizer does not support the marks.
    """

    tags: bool | Literal["template"] = False
    inside: bool = False
    channels: bool = False
    needed: bool = True


REASONING: dict[Parser, ReasoningParser] = {
    "auto": ReasoningParser(tags="template", channels=True, needed=False),
    "none": ReasoningParser(),
    "qwen3": ReasoningParser(tags=True),
    "deepseek_r1": ReasoningParser(tags=True, inside=True),
    "openai_gptoss": ReasoningParser(channels=True),
}


class ServerLimits(WebLimits):
    """Limits on one client and on all of them together, over all copies of the model. A request beyond one gets 400, 408, 413, 431,
    503 or 504, with the reason."""

    queue: int = Field(1024, gt=0)
    """Limit of waiting completions; further requests are refused with 503 and Retry-After."""
    queue_tokens: int = Field(1_048_576, gt=0)
    """Limit of the prompt tokens of waiting completions. An idle server accepts any prompt that fits the model."""
    answers: int = Field(128, gt=0)
    """Limit of completions per request: prompts times n."""
    texts: int = Field(2048, gt=0)
    """Limit of texts in one request to an encoder; OpenAI's."""
    logprobs: int = Field(20, ge=0, le=20)
    """Largest `logprobs` and `top_logprobs`; the engine computes at most 20."""
    prompt_logprobs_tokens: int = Field(8192, ge=0)
    """Length in tokens of the longest prompt whose log-probabilities a request may ask for; 0: none. Prompts are scored in passes of
    256 tokens with a separate cache, and running completions continue between the passes.
    """
    stops: int = Field(16, ge=0)
    """Limit of stop strings per request. OpenAI allows 4, vLLM any number."""
    stop_length: int = Field(256, gt=0)
    """Limit of characters in a stop string."""
    schema_bytes: int = Field(65_536, gt=0)
    """Limit in bytes of a JSON schema, a regular expression, a list of choices, a grammar, or all tools of a request."""
    schema_depth: int = Field(64, gt=0)
    """Limit of the nesting depth of objects and lists in a JSON schema. OpenAI allows 10 levels of objects, which are up to 30 of
    these.
    """
    compile_seconds: float = Field(10, gt=0)
    """Limit in seconds for compiling a schema or a grammar; 3,000 properties take 1 second."""


class AdminSettings(Settings):
    """The routes that change the served model: adapters, weights, pauses. Without `port` and `shared` they do not exist."""

    port: int | None = Field(None, ge=0, lt=2**16)
    """Port of these routes, on 127.0.0.1 only; 0 takes a free one. It also serves /metrics and /health."""
    key: str | None = None
    """Key that clients of these routes must send as `Authorization: Bearer KEY`; it must differ from the API's. Default:
    $ARGOSY_ADMIN_KEY, which other users of the machine cannot read in the list of processes.
    """
    shared: bool = False
    """Serves these routes on the main port too, with their own key."""
    root: str | None = None
    """Folder from which these routes may load adapters and weights. None: they may not load any."""


class ServeSettings(WebSettings):
    """Settings of the server."""

    elsewhere: ClassVar = NAMES | AT_LOAD

    name: str | None = None
    """Name of the model in the API; by default the last part of its path."""
    dtype: str | None = None
    """Type of weights and activations, float32 or bfloat16. None: float32 on CPUs, bfloat16 elsewhere."""
    quantization: str | None = None
    """A preset of `argosy quantize`, such as w8 or w4, or a YAML file of rules, by which weights are quantized as they are read. None:
    they stay as they are stored."""
    adapter: str | None = None
    """A folder of low-rank adapters in the PEFT library's format, to apply to the model."""
    tensor: int = Field(1, gt=0)
    """Number of devices that share heads, feed-forward features, vocabulary and cache, for models that one device cannot hold."""
    copies: int = Field(1, gt=0)
    """Copies of the model, each with its own engine, cache and thread, on its own device or on `tensor` of them. Each request is served
    by one copy. Use it for more requests than one device can serve.
    """
    lora_modules: dict[str, str] = Field(default_factory=dict)
    """Adapters to load at the start, beside the model: folders in the PEFT library's format by the name that requests give as `model`.
    They need `engine.lora.enabled=true`."""
    seed: int | None = None
    """Random seed for requests without one. None: a new one at every start of the server."""
    warm_up: bool = True
    """Compiles all programs before the server is ready, so that no request waits for the compiler."""
    web: bool = True
    """Serves a playground and a live dashboard at `/`, for models that generate text. The page needs no key; its requests do."""
    reasoning_parser: Parser = "auto"
    """How thoughts are separated from the content of chat completions: auto, none, qwen3, deepseek_r1 or openai_gptoss. qwen3: they are
    between `<think>` and `</think>`, which the prompt or the completion opens. deepseek_r1: the same, but a completion starts with its
    thoughts even if nothing opens them. openai_gptoss: the channels of gpt-oss, which are marked by special tokens. auto: openai_gptoss
    for chat templates with channels; qwen3 for templates that contain `</think>`, as those of reasoning models do because they drop old
    thoughts; none for others.
    """
    chat_template: str | None = None
    """The chat template of the model: a published one by name (chatml, gemma, llama3, mistral or zephyr), one of the tokenizer's, or a
    Jinja file. None: the tokenizer's own."""
    stored_responses: int = Field(0, ge=0)
    """Number of responses of /v1/responses to keep in memory for `previous_response_id`, `background` and GET; the oldest are dropped
    first. The size of each is bounded by the model's context. 0, the default: nothing is kept, and requests that need a stored response
    are refused. OpenAI's clients ask for storage by default, so it must be chosen here.
    """
    request_chat_template: bool = False
    """Lets requests bring their own `chat_template`. Templates are rendered one at a time, in a process with limits on time and
    memory."""
    warm_up_prompt_logprobs: bool = False
    """Also compiles the programs for prompt log-probabilities before the server is ready: about two for each power of two up to
    `limits.prompt_logprobs_tokens`. Otherwise each is compiled when a request first needs it; only that request waits."""
    limits: ServerLimits = ServerLimits()
    engine: EngineSettings = EngineSettings()
    admin: AdminSettings = AdminSettings()
