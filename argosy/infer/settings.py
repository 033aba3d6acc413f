"""Settings of the engine. No jax here."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from argosy.core.registry import Registry
from argosy.core.settings import Also, Choice, Settings

# Tokens per row of a prompt, if several rows may belong to one sequence.
ROW = 32


class NGram(Settings):
    """Drafts what followed the last tokens of a sequence where they occurred before, in its prompt or completion (prompt lookup): for
    answers that repeat their prompt, such as edits of code and summaries. Where nothing is found, a step is a plain one."""

    tokens: Annotated[int, Also("num_speculative_tokens")] = Field(4, gt=0, le=32)
    """Largest number of drafted tokens per step and sequence."""
    lookup_min: Annotated[int, Also("prompt_lookup_min")] = Field(2, gt=0)
    """Smallest number of last tokens that must have occurred before. Lower values draft more often, and drafts are accepted less often.
    """
    lookup_max: Annotated[int, Also("prompt_lookup_max")] = Field(5, gt=0)
    """Largest number of last tokens that are compared. Of several earlier occurrences, the longest match is taken, and the latest of
    those.
    """

    @model_validator(mode="after")
    def _in_order(self) -> "NGram":
        if self.lookup_min > self.lookup_max:
            raise ValueError(f"lookup_min = {self.lookup_min} is above lookup_max = {self.lookup_max}")
        return self


class DraftModel(Settings):
    """Drafts with a second, smaller model of the same vocabulary."""

    model: str
    """The draft model: a Hub folder, a .gguf file, a run directory, a checkpoint or hf:OWNER/NAME."""
    tokens: Annotated[int, Also("num_speculative_tokens")] = Field(4, gt=0, le=32)
    """Number of drafted tokens per step and sequence. The draft model makes a forward pass for each."""


class MTP(Settings):
    """Drafts with the model's own module for multi-token prediction (DeepSeek V3 and models like it)."""

    tokens: Annotated[int, Also("num_speculative_tokens")] = Field(1, gt=0, le=32)
    """Number of drafted tokens per step and sequence. The module is trained to draft one token; it drafts further ones from its own
    output, and they are accepted less often.
    """


SPECULATIVE = Registry("method of speculation", {"ngram": NGram, "draft_model": DraftModel, "mtp": MTP})


Speculative = Annotated[Annotated[Any, Choice(SPECULATIVE, tag="method")] | None, Also("speculative_config")]


class LoraSettings(Settings):
    """Several low-rank adapters at a time, at most one for each request (multi-LoRA)."""

    enabled: bool = False
    """Whether requests may name adapters. Off, programs contain no adapters."""
    adapters: int = Field(1, gt=0, le=256)
    """Number of adapters loaded at a time. Memory and the time of a step grow with `adapters` times `rank`, whether adapters are loaded
    or not."""
    rank: int = Field(16, gt=0)
    """Highest rank of an adapter; lower ones are padded."""
    where: str = r"layers\..*"
    """The contractions that may carry adapters: a regular expression over their names, which `argosy models show` prints.
    `layers\\..*|head` adds the head, `layers\\..*attn.*` leaves out all but attention."""

    @model_validator(mode="after")
    def _ask_for_something(self) -> "LoraSettings":
        if not self.enabled and (idle := sorted(self.model_fields_set - {"enabled"})):
            raise ValueError(f"{', '.join(idle)}: no effect without `enabled`")
        return self


# As in vLLM, `fp8` stands for the type with more bits of mantissa.
CacheType = Annotated[
    Literal["int8", "fp8", "fp8_e4m3", "fp8_e5m2"], AfterValidator(lambda name: "fp8_e4m3" if name == "fp8" else name)
]


class PlainEngineSettings(Settings):
    """Settings of an engine without adapters: memory, how prefill and decoding share a step, speculation."""

    slots: int = Field(32, gt=0)
    """Number of sequences that run at a time; others wait."""
    page: int = Field(16, gt=0)
    """Tokens per page of the cache."""
    pages: int | None = Field(None, gt=0)
    """Number of pages of the cache. By default enough for `slots` sequences of `context` tokens, but on a CPU at most 4 GB and a
    quarter of the free memory, in steps of 500 MB (a cache of another size needs other programs), elsewhere at most 0.8 of what the
    weights leave; or what one sequence needs if that is more. On a CPU pages take memory when they are first written."""
    memory: Annotated[int | None, Also("kv_cache_memory_bytes", "kv_cache_memory")] = Field(None, gt=0)
    """Bytes of the cache on each device, at most, instead of `pages`: the cache has as many pages as fit. Refused if they hold no
    sequence of `context` tokens."""
    cache_dtype: Annotated[CacheType | None, Also("kv_cache_dtype", "cache_type", "kv_dtype")] = None
    """Type of the cached keys and values: int8, fp8_e4m3 (fp8 for short) or fp8_e5m2, in eight bits with a float32 scale for each token
    and head, so that the same memory holds 3.8 times the tokens of float32 or 1.9 times those of bfloat16 (heads of 64). None, the
    default: the model's type, with which completions equal those without a cache; with eight bits they are close. int8 is the most
    exact of the three. Recurrent states and the keys of a sparse-attention indexer keep their type. Refused if it saves no memory. On
    TPUs the kernel that reads pages in place does not support such scales; the portable loop over blocks of pages is used instead.
    """
    activations: Literal["int8"] | None = None
    """Rounds activations to int8 before they are multiplied with integer weights: those that a GGUF file keeps in blocks, and quantized
    ones (`w8`, `w4`) whose rule does not round activations. An activation scale covers as many numbers as a weight scale, at least 32,
    as in llama.cpp. Only on CPUs with compiled kernels. 32 rows of SmolLM2 135M in Q4_0 take 0.6 of the time, and completions differ
    from those without rounding. None: activations are rounded if the weights' own rule says so.
    """
    context: int | None = Field(None, gt=0)
    """Longest sequence in tokens, prompt and completion; by default the model's context."""
    budget: int = Field(512, ge=ROW)
    """Prompt tokens per step, if no sequence decodes."""
    budget_decoding: int = Field(128, ge=ROW)
    """Prompt tokens per step, if sequences decode too. A lower value shortens the time between tokens, a higher one the time to
    the first token."""
    reuse: bool = True
    """Prefix caching: the common beginning of prompts is computed once. Off for models with recurrent layers, whose states are not
    kept."""
    speculative: Speculative = None
    """Speculative decoding: several tokens of a completion are drafted and then verified in one forward pass. Completions are the same
    as without it, to rounding. It shortens the time between tokens where a step is bound by reading the weights, with few sequences
    at a time, and costs throughput where it is bound by arithmetic. None: off."""
    steps: Annotated[int, Also("num_scheduler_steps")] = Field(1, gt=0, le=64)
    """Decode steps per dispatch, while no prompt is computed. With more than one the device does not wait for the host between them,
    which helps small models on fast devices. Tokens then arrive in groups of this size, and a new request waits for the group.
    Completions whose grammar or bans depend on each token take single steps. The model is compiled as one program, on CPUs too, where
    that takes several times as long and gains nothing. It cannot be combined with `speculative`, which needs each step's tokens.
    """

    @model_validator(mode="after")
    def _one_size(self) -> "PlainEngineSettings":
        if self.memory is not None and self.pages is not None:
            raise ValueError(f"memory = {self.memory} and pages = {self.pages} both set the size of the cache")
        return self

    @model_validator(mode="after")
    def _one_way_to_several_tokens(self) -> "PlainEngineSettings":
        if self.steps > 1 and self.speculative is not None:
            raise ValueError(f"steps = {self.steps} does not go with `speculative`, which needs the tokens of each step")
        if self.steps > 1 and self.activations is not None:
            raise ValueError(f"steps = {self.steps} computes without the kernels that `activations` needs")
        return self


class EngineSettings(PlainEngineSettings):
    """Settings of the engine: memory, how prefill and decoding share a step, speculation, and adapters that requests name."""

    lora: LoraSettings = LoraSettings()


def with_adapters(plain: PlainEngineSettings, **more: Any) -> EngineSettings:
    """Converts the settings of an engine without adapters to `EngineSettings`.

    Args:
        more: settings that replace those of `plain`.
    """
    return EngineSettings(**{name: getattr(plain, name) for name in plain.model_fields_set} | more)
