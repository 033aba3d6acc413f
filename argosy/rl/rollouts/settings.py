"""The settings of rollouts, without jax."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from argosy.core.settings import Also, BrokenRules, MayChange, Settings

# Settings that decide where completions are sampled and how they are computed, not what they are.
PLACEMENT = ("workers", "devices", "processes", "stuck", "share_prompts")
# Rows of a part, unless there are more devices.
LEAST_ROWS = 4


class Rollout(Settings):
    """How completions are sampled, and how they become updates."""

    completions: Annotated[int, Also("num_generations", "group_size", "rollout.n", "n_samples_per_prompt")] = Field(8, gt=0)
    """Completions of each prompt in a rollout: a group. TRL and verl's examples use 8 and 5 to 16. With `objective: gkd` 1 by default.
    """
    tokens: Annotated[int, Also("max_completion_length", "max_new_tokens", "max_response_length", "max_tokens")] = Field(256, gt=0)
    """Limit of a completion in tokens, its end-of-sequence token included."""
    top_k: int = Field(0, ge=0)
    """Samples from the k most likely tokens only; 0 means all. With a limit the sampled distribution differs from the trained one,
    which `objective.correction` then weighs.
    """
    top_p: float = Field(1.0, gt=0, le=1)
    """Samples from the most likely tokens whose probabilities first sum to p; 1 means all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Samples from tokens whose probability is at least this share of the most likely token's; 0 means all."""
    ignore_eos: bool = False
    """Whether completions go on after an end-of-sequence token, up to the limit: for benchmarks."""
    epochs: Annotated[int, Also("num_iterations", "ppo_epochs", "num_ppo_epochs")] = Field(1, gt=0)
    """Passes over the completions of a rollout before the next one is sampled."""
    minibatches: Annotated[
        int,
        Also("num_mini_batches", "steps_per_generation"),
        Also("ppo_mini_batch_size", note="it is how many parts, not the size of one"),
    ] = Field(1, gt=0)
    """Updates per pass, each with a share of the groups. With one pass and one update, training is exactly on-policy."""
    rows: Annotated[
        int | None,
        Also(
            "per_device_train_batch_size", "ppo_micro_batch_size_per_gpu", "micro_batch_size", "log_prob_micro_batch_size_per_gpu"
        ),
    ] = Field(None, gt=0)
    """Rows of `data.sequence` tokens that are computed at once. Completions are packed into rows, and rows into parts of this many;
    gradients of all parts of an update are summed, so this decides memory and speed, not the result. None: at least 4, and one for each
    device that rows are split over.
    """
    share_prompts: Annotated[bool | None, Also("use_prefix_grouper")] = None
    """Computes a prompt once for all of its completions in a row, instead of once for each (arXiv:2506.05433): the same gradients, up
    to rounding, for fewer tokens; routers of experts count its tokens once. For the largest gain, `data.sequence` has room for a prompt
    with all of its completions. None: on for CPUs and GPUs, unless the model has recurrent layers or windows shorter than a row. On
    TPUs, and with such windows, no kernel supports these masks, and all scores of a row are in memory.
    """
    resample: Annotated[int, Also("max_num_gen_batches", "dynamic_sampling")] = Field(0, ge=0)
    """Dynamic sampling (DAPO): groups whose rewards are all equal teach nothing, and are replaced by groups of other prompts, in at
    most this many further rounds of generation. 0: off.
    """
    overlong: Annotated[int, Also("overlong_buffer", "overlong_buffer_len", "soft_punish_cache")] = Field(0, ge=0)
    """Punishes completions within this many tokens of the limit by up to 1 (DAPO's soft punishment). 0: off."""
    keep_cut: Annotated[bool, Also("mask_truncated_completions", note="rollout.keep_cut=false is that")] = True
    """Whether completions that reach the limit without an end are learned from. They are counted either way."""
    slots: int = Field(64, gt=0)
    """Completions that are generated at a time; others wait."""
    devices: Annotated[
        int | None, MayChange(), Also("vllm_tensor_parallel_size", "rollout.tensor_model_parallel_size", "rollout_mesh")
    ] = Field(None, gt=0)
    """Devices that sample and do not train: the last ones of the process, over which the model's heads, features and vocabulary are
    sharded. The weights are copied to them for each rollout, and the copies are compared with a checksum. None: all devices do both in
    turns, and nothing is copied.
    """
    processes: Annotated[
        int | None,
        MayChange(),
        Also("vllm_mode", note="rollout.processes=N is server mode, with processes of its own"),
        Also("vllm_num_engines", "num_rollout_workers"),
    ] = Field(None, gt=0)
    """Processes of this machine that sample and do not train, each on its own CPU device, with a copy of the weights; prompts are
    distributed over them. Changed weights are sent for each rollout and compared with a checksum. A process that ends is started again,
    and its prompts are sampled again. None: this process samples.
    """
    stuck: Annotated[float | None, MayChange()] = Field(None, gt=0)
    """Seconds after which one of `processes` that has not returned its share of a rollout counts as stuck, and is started again. The
    time includes compiling. None: no limit.
    """
    ahead: Annotated[int, Also("max_staleness", "async_steps", "off_policy_steps", "max_head_offpolicyness")] = Field(0, ge=0, le=4)
    """Rollouts that are sampled ahead, so that `devices` or `processes` sample while the others train. Their weights are then this many
    rollouts old, which `objective.correction` weighs. 0: every rollout is sampled with the latest weights.
    """
    weights: Annotated[Literal["same", "int8"], Also("rollout_quantization", note="rollout.weights=int8")] = "same"
    """The engine's weights. same: the trainer's; int8: rounded to 8 bits for each rollout, which halves the memory traffic of a
    decoding step compared with bfloat16. `objective.correction` weighs the difference, which is logged.
    """
    workers: Annotated[int | None, MayChange()] = Field(None, gt=0)
    """Processes for reward functions. None: one per core, at most 8."""

    def rows_over(self, shares: int) -> int:
        """Returns the number of rows in a micro-batch whose rows are split into `shares`, such as devices."""
        return self.rows or shares * max(1, -(-LEAST_ROWS // shares))

    @property
    def updates(self) -> int:
        """Number of updates per rollout."""
        return self.epochs * self.minibatches

    @model_validator(mode="after")
    def _in_order(self) -> "Rollout":
        if broken := [*self._broken()]:
            raise BrokenRules(broken)
        return self

    def _broken(self) -> Iterator[str]:
        """Yields a sentence for each rule between these settings that does not hold."""
        if self.overlong > self.tokens:
            yield f"overlong = {self.overlong} is above tokens = {self.tokens}"
        if self.processes is not None and self.devices is not None:
            yield "devices are those of this process that sample, and processes sample instead of it: leave one out"
        if self.stuck is not None and self.processes is None:
            yield f"stuck = {self.stuck:g} is for processes that sample: rollout.processes=N"
        if self.ahead and self.devices is None and self.processes is None:
            problem = "needs devices that sample while others train: rollout.devices=N, or rollout.processes=N"
            yield f"ahead = {self.ahead} {problem}"
