"""Settings of `argosy serve`. No jax here: mistakes are answered before it is imported."""

from typing import ClassVar, Literal, NamedTuple

from pydantic import Field

from argosy.core.settings import Settings
from argosy.infer.settings import EngineSettings
from argosy.serve.vllm_flags import NAMES
from argosy.web.settings import WebLimits, WebSettings

# vLLM's names.
Parser = Literal["auto", "none", "qwen3", "deepseek_r1", "openai_gptoss"]


class ReasoningParser(NamedTuple):
    """How thoughts are split off a completion.

    tags: whether they stand between `<think>` and `</think>`; "template": where the chat template has the closing one.
    inside: a completion starts inside its thoughts even where neither it nor its prompt has `<think>`.
    channels: whether they may be a channel of gpt-oss, which special tokens mark.
    needed: what is missing in the tokenizer is an error.
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
    """Answers waiting for the engine; more are refused with 503 and Retry-After."""
    queue_tokens: int = Field(1_048_576, gt=0)
    """Prompt tokens of waiting answers. An idle server accepts any prompt that fits the model."""
    answers: int = Field(128, gt=0)
    """Answers of one request: prompts times n."""
    texts: int = Field(2048, gt=0)
    """Texts of one request to an encoder. OpenAI's limit."""
    logprobs: int = Field(20, ge=0, le=20)
    """Largest `logprobs` and `top_logprobs`; the engine computes at most 20."""
    prompt_logprobs_tokens: int = Field(8192, ge=0)
    """Longest prompt, in tokens, whose log-probabilities a request may ask for; 0: none. Prompts are scored in passes of 256 tokens
    with a cache of their own, and running answers go on between the passes."""
    stops: int = Field(16, ge=0)
    """Stop strings of a request. OpenAI allows 4, vLLM any number."""
    stop_length: int = Field(256, gt=0)
    """Characters of a stop string."""
    schema_bytes: int = Field(65_536, gt=0)
    """Bytes of a JSON schema, a regular expression, a list of choices, a grammar, or all tools of a request."""
    schema_depth: int = Field(64, gt=0)
    """Nesting depth of objects and lists in a JSON schema. OpenAI allows 10 levels of objects, which are up to 30 of these."""
    compile_seconds: float = Field(10, gt=0)
    """Seconds to compile a schema or a grammar: 3,000 properties take 1."""


class AdminSettings(Settings):
    """The routes that change what is served: adapters, weights, pauses. Without `port` and `shared` there are none."""

    port: int | None = Field(None, ge=0, lt=2**16)
    """Port of these routes, on 127.0.0.1 only; 0 takes a free one. /metrics and /health are there too."""
    key: str | None = None
    """Key that their clients must send as `Authorization: Bearer KEY`, other than that of the API. Without it, that of
    $ARGOSY_ADMIN_KEY, which other users of the machine cannot read in the list of processes."""
    shared: bool = False
    """Has these routes on the main port too, with their own key."""
    root: str | None = None
    """Folder below which adapters and weights may be loaded by these routes. Without it none may."""


class ServeSettings(WebSettings):
    """Settings of the server."""

    elsewhere: ClassVar = NAMES

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
    """Copies of the model, each with an engine, a cache and a thread of its own, on its own device or on `tensor` of them. Each request
    is answered by one copy. For more requests than one device can answer in time."""
    lora_modules: dict[str, str] = Field(default_factory=dict)
    """Adapters to load at the start, beside the model: folders in the PEFT library's format by the name that requests give as `model`.
    They need `engine.lora.enabled=true`."""
    seed: int | None = None
    """Random seed for requests without one. None: a new one for every run of the server."""
    warm_up: bool = True
    """Compiles all programs before the server is ready, so that no request waits for the compiler."""
    web: bool = True
    """Serves a playground and a live dashboard at `/`, for models that generate text. The page needs no key; its requests do."""
    reasoning_parser: Parser = "auto"
    """How thoughts are split off the answers of chats: auto, none, qwen3, deepseek_r1 or openai_gptoss. qwen3: they stand between
    `<think>` and `</think>`, and the prompt or the answer opens them. deepseek_r1: the same, but an answer starts with its thoughts
    even where nothing opens them. openai_gptoss: the channels of gpt-oss, which special tokens mark. auto: openai_gptoss for chat
    templates with channels; qwen3 for those that contain `</think>`, as reasoning models' do because they drop old thoughts; none for
    others."""
    chat_template: str | None = None
    """The chat template of the model: a published one by name (chatml, gemma, llama3, mistral or zephyr), one of the tokenizer's, or a
    Jinja file. None: the tokenizer's own."""
    stored_responses: int = Field(0, ge=0)
    """Number of responses of /v1/responses to keep in memory for `previous_response_id`, `background` and GET; the oldest are dropped
    first. Each holds its conversation, which the context of the model bounds. 0, the default, because OpenAI's clients ask for storage
    unasked: nothing is kept, and requests that need a stored response are refused."""
    request_chat_template: bool = False
    """Lets requests bring their own `chat_template`. Templates are rendered one at a time, in a process with limits on time and
    memory."""
    warm_up_prompt_logprobs: bool = False
    """Also compiles the programs for prompt log-probabilities before the server is ready: about two for each power of two up to
    `limits.prompt_logprobs_tokens`. Otherwise each is compiled when a request first needs it; only that request waits."""
    limits: ServerLimits = ServerLimits()
    engine: EngineSettings = EngineSettings()
    admin: AdminSettings = AdminSettings()
