"""Settings of the commands that talk to a server or do a server's work: `bench serve`, `run-batch` and `chat`. No jax here."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from argosy.core.errors import BadInput, nearest
from argosy.core.settings import Settings
from argosy.infer.settings import EngineSettings, Speculative

# The metrics of a request: time to first token, per output token, between tokens, and end to end.
METRICS = ("ttft", "tpot", "itl", "e2el")
GOODS = ("ttft", "tpot", "e2el")


class BenchSettings(Settings):
    """The load on a server, and what is reported of it."""

    elsewhere: ClassVar = {
        "dataset_name": "did you mean `data`?",
        "dataset_path": "did you mean `data`?",
        "random_input_len": "did you mean `input_len`?",
        "random_output_len": "did you mean `output_len`?",
        "result_filename": "did you mean `save`?",
        "backend": "did you mean `api`?",
    }

    data: str = "random"
    """Prompts: `random` (token ids drawn with `seed`), or a file. In a text file each line is a prompt; in JSONL each line has a
    `prompt` (text or token ids) or `messages`, and optionally `max_tokens`; a JSON list is read as ShareGPT."""
    input_len: int = Field(1024, gt=0)
    """Tokens of a random prompt."""
    output_len: int | None = Field(None, gt=0)
    """Length of a completion in tokens. None: 128, or the length in the file (in ShareGPT, of its own reply)."""
    range_ratio: float = Field(0.0, ge=0, lt=1)
    """Draws the lengths of random prompts and their answers evenly from length * (1 - ratio) to length * (1 + ratio)."""
    prefix_len: int = Field(0, ge=0)
    """Length in tokens of a common prefix of all random prompts, before `input_len` tokens of their own. It measures a prefix cache."""
    vocab: int | None = Field(None, gt=1)
    """Random token ids are below this. None: the vocabulary size that the server reports, otherwise 256, the fewest of any
    tokenizer."""
    num_prompts: int = Field(1000, gt=0)
    """Number of requests."""
    request_rate: float = Field(float("inf"), gt=0, allow_inf_nan=True)
    """Requests per second, on average. Infinite: all at once, up to `max_concurrency`."""
    burstiness: float = Field(1.0, gt=0)
    """Shape of the gamma distribution of the time between requests: 1 is a Poisson process, less is burstier, more is more even."""
    max_concurrency: int | None = Field(None, gt=0)
    """Requests open at a time; others wait at the client, and their latency counts from when they are sent."""
    num_warmups: int = Field(0, ge=0)
    """Requests before the clock starts, in addition to the one that checks the server."""
    api: Literal["completions", "chat"] = "completions"
    """The route: /v1/completions or /v1/chat/completions."""
    model: str | None = None
    """Name of the model at the server. None: the first of its /v1/models."""
    ignore_eos: bool | None = None
    """Continues answers after the end-of-sequence token, to their full length. None: for random prompts only."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 takes the likeliest token."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus of sampling; sent only if set."""
    top_k: int | None = Field(None, ge=-1)
    """Sampling from the k likeliest tokens; sent only if set."""
    seed: int = Field(0, ge=0)
    """Random seed of prompts, lengths, order and arrival times."""
    goodput: str | None = None
    """Limits in milliseconds, such as `ttft:200 tpot:50`: `request_goodput` counts the requests per second within all of them."""
    percentile_metrics: str = "ttft,tpot,itl,e2el"
    """Names of the metrics to report, separated by commas."""
    metric_percentiles: str = "99"
    """Percentiles to report, separated by commas."""
    against: str | None = None
    """Address of a second server, to compare: rounds alternate in the order A B B A, so that drift of the machine falls on both."""
    rounds: int = Field(2, gt=0)
    """Rounds for each server of a comparison."""
    save: str | None = None
    """JSON file for the results, including those of every request."""
    api_key: str | None = None
    """Key for the server, sent as `Authorization: Bearer KEY`. Default: $ARGOSY_API_KEY or $OPENAI_API_KEY."""
    timeout: float = Field(21_600, gt=0)
    """Seconds after which a request counts as failed."""

    @model_validator(mode="after")
    def _readable(self) -> Self:
        _ = self.goods, self.metrics, self.percentiles
        if self.data == "random" and self.api == "chat" and self.prefix_len:
            raise BadInput("`prefix_len` needs token ids, which chats do not take", hint="api=completions")
        return self

    @property
    def goods(self) -> dict[str, float]:
        """The limits of `goodput` by metric, in milliseconds."""
        limits = {}
        for word in (self.goodput or "").replace(",", " ").split():
            name, _, limit = word.partition(":")
            if name not in GOODS:
                raise BadInput(f"`goodput`: unknown metric `{name}`", hint=nearest(name, GOODS))
            limits[name] = _number(limit, f"`goodput`: the limit of {name} is `{limit}`", "milliseconds, such as `ttft:200`")
        return limits

    @property
    def metrics(self) -> list[str]:
        """The metrics that are reported."""
        names = [name.strip() for name in self.percentile_metrics.split(",") if name.strip()]
        for name in names:
            if name not in METRICS:
                raise BadInput(f"`percentile_metrics`: unknown metric `{name}`", hint=nearest(name, METRICS))
        return names

    @property
    def percentiles(self) -> list[float]:
        """The percentiles that are reported."""
        words = [word.strip() for word in self.metric_percentiles.split(",") if word.strip()]
        percentiles = [_number(word, f"`metric_percentiles`: `{word}`", "such as `50,99`") for word in words]
        if wrong := [p for p in percentiles if p > 100]:
            raise BadInput(f"`metric_percentiles`: {wrong[0]:g}", hint="0 to 100")
        return percentiles


class BatchSettings(Settings):
    """Settings of `run-batch`."""

    elsewhere: ClassVar = {"input_file": "the input is the second word", "output_file": "the output is the third word"}

    name: str | None = None
    """Name that rows may give as `model`; by default the last part of the model's path."""
    concurrent: int = Field(2048, gt=0)
    """Rows queued at a time, in the engine or at a server. The engine runs `engine.slots` of them together."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Random seed for rows without one. It is combined with the line number of the row, so a completion does not depend on when it is
    computed.
    """
    dtype: str | None = None
    """Type of weights and activations, float32 or bfloat16. None: float32 on CPUs, bfloat16 elsewhere."""
    quantization: str | None = None
    """A preset of `argosy quantize`, such as w8 or w4, or a YAML file of rules, by which weights are quantized as they are read. None:
    they stay as they are stored."""
    adapter: str | None = None
    """A folder of low-rank adapters in the PEFT library's format, to apply to the model."""
    lora_modules: dict[str, str] = Field(default_factory=dict)
    """Adapters beside the model: folders in the PEFT library's format by the name that rows give as `model`. They need
    `engine.lora.enabled=true`."""
    api_key: str | None = None
    """Key for a server. Default: $ARGOSY_API_KEY or $OPENAI_API_KEY."""
    timeout: float = Field(21_600, gt=0)
    """Seconds that a server may take for one request."""
    engine: EngineSettings = EngineSettings()


class ChatSampling(Settings):
    """How completions of a chat are sampled. Settings that are not given have the model's, or the server's, own default."""

    max_tokens: int | None = Field(None, gt=0)
    """Most tokens of an answer. None: up to the end of the context; 64 where plain text is continued."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature; 0 takes the likeliest token."""
    top_k: int | None = Field(None, ge=0)
    """Samples from the k likeliest tokens; 0: from all."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Samples from the likeliest tokens whose probabilities first sum to p."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Excludes tokens less likely than this share of the likeliest token's probability."""
    repetition_penalty: float | None = Field(None, gt=0)
    """Above 1, makes tokens of prompt and answer less likely (arXiv:1909.05858)."""
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    """Subtracted from the logit of each token that is in the answer."""
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    """Subtracted from the logit of a token for each time it is in the answer."""
    seed: int | None = Field(None, ge=0)
    """Random seed of sampling. None: another one for each answer."""
    stop: str | None = None
    """Text that ends an answer and is not part of it."""


class ChatEngineSettings(Settings):
    """Settings of the engine that `chat` runs for a model; servers have their own. Its longest sequence is `context`."""

    speculative: Speculative = None
    """Speculative decoding: ngram, draft_model or mtp. Answers are the same as without it, to rounding, and come sooner where drafts
    are often right. None: off."""


class ChatSettings(ChatSampling):
    """Settings of `chat`."""

    elsewhere: ClassVar = {"system_prompt": "did you mean `system`?", "model_name": "did you mean `model`?"}

    system: str | None = None
    """The system message."""
    plain: bool = False
    """Continues the conversation as plain text, without a chat template. A model without a template is always used so."""
    model: str | None = None
    """Name of the model at a server. None: the first of its /v1/models."""
    context: int | None = Field(None, gt=0)
    """Longest conversation in tokens; the cache has room for one of it. None: the model's context, but at most 8,192. Servers have
    their own."""
    history: bool = True
    """Stores typed lines in $XDG_STATE_HOME/argosy/chat_history, for the arrow keys of the next session."""
    dtype: str | None = None
    """Type of weights and activations, float32 or bfloat16. None: float32 on CPUs, bfloat16 elsewhere."""
    quantization: str | None = None
    """A preset of `argosy quantize`, such as w8 or w4, or a YAML file of rules, by which weights are quantized as they are read. None:
    they stay as they are stored."""
    adapter: str | None = None
    """A folder of low-rank adapters in the PEFT library's format, to apply to the model."""
    api_key: str | None = None
    """Key for a server. Default: $ARGOSY_API_KEY or $OPENAI_API_KEY."""
    timeout: float = Field(600, gt=0)
    """Seconds that a server may take for one answer."""
    engine: ChatEngineSettings = ChatEngineSettings()


def _number(text: str, problem: str, hint: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise BadInput(problem, hint=hint)
    return value
