"""The settings of a run: one tree, to which each room contributes a part."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from argosy.adapt.rules import QuantizedTraining
from argosy.adapt.settings import ADAPTERS
from argosy.checkpoint.settings import CheckpointSettings
from argosy.core.settings import Also, BrokenRules, Choice, MayChange, Repeats, Settings
from argosy.data.settings import DataSettings
from argosy.models import FAMILIES
from argosy.models.settings import Kept
from argosy.parallel.mesh import MeshSettings
from argosy.rl.algorithms import ALGORITHMS
from argosy.rl.environments.settings import ENVIRONMENTS
from argosy.rl.rewards.settings import RewardSettings
from argosy.rl.rollouts.settings import Rollout
from argosy.run.settings.other_trainers import ELSEWHERE
from argosy.train.beside import CRITIC
from argosy.train.diloco_settings import DilocoSettings
from argosy.train.guard_settings import GuardSettings
from argosy.train.objectives import OBJECTIVES
from argosy.train.optim import OPTIMIZERS
from argosy.train.schedule import SCHEDULES
from argosy.train.straggler_settings import StragglerSettings

for _name, _class in ALGORITHMS.items():
    OBJECTIVES.add(_name, _class)


OF_REWARDS = Also(
    "reward_funcs", "reward_fn", "reward_model", "custom_reward_function.path", "custom_reward_function.name", "reward_model.enable"
)


class Init(Settings):
    """Weights at the start, if the run directory has no checkpoint. Random unless one of these is set."""

    weights: Annotated[
        str | None,
        Also("load_parameters_path", "init_from", "initial_load_path"),
    ] = None
    """A model whose weights to start from: Hub folder, GGUF file, run directory or checkpoint."""
    state: Annotated[str | None, Also("load_full_state_path")] = None
    """A run directory or checkpoint whose weights, optimizer state and step to start from."""
    tokenizer_mismatch: Literal["error", "allow"] = "error"
    """What to do where `weights` belong to another tokenizer than `data.tokenizer`, so that ids mean other words. error: the run ends
    before its first step; allow: it trains, as where embeddings are to be learned anew. A model that brings no tokenizer is taken to
    belong to another one if more than a tenth of its ids are none of the tokenizer's."""

    @model_validator(mode="after")
    def _one(self) -> "Init":
        if self.weights and self.state:
            raise ValueError("weights and state are both set: state already includes weights")
        return self


class ExecutionSettings(Settings):
    """How the layers run (`models.parts.stack`)."""

    run: Annotated[Literal["auto", "unroll", "scan"], Also("scan_layers")] = "auto"
    """How layers are compiled. unroll: the program contains every layer, which is fastest on CPUs and GPUs. scan: it contains one group
    of layers and loops over it, so compile time does not grow with depth. auto: unroll on CPUs and on a single GPU up to 32 layers,
    otherwise scan. Stored with the run. Layers that are split over devices (`mesh.stage`) are stored as scanned ones."""
    microbatches: Annotated[int | None, MayChange(), Also("num_pipeline_microbatches", "n_microbatches")] = Field(None, gt=0)
    """Into how many parts the rows of a pass are split to go through the stages of `mesh.stage`: a multiple of the stages S. With M of
    them, stages are idle for (S - 1) / (M R + S - 1) of the time, where R is `execution.rounds`. None: 4 S, or the next smaller
    multiple that divides the rows."""
    rounds: Annotated[int, Also("num_pipeline_repeats", "virtual_pipeline_model_parallel_size")] = Field(1, gt=0)
    """How often a microbatch goes through all stages of `mesh.stage` (a circular, or interleaved, schedule): each stage has so many
    runs of neighboring layers, which are as many times shorter. More rounds leave stages idle for less of the time, and send more
    between them. Layers are stored in so many arrays, one for each round, so a run keeps its rounds."""
    remat: Annotated[
        Literal["none", "dots", "full"],
        Also(
            "gradient_checkpointing", "remat_policy", "activation_checkpoint.mode", "activation_checkpointing", "remat",
            "enable_gradient_checkpointing",
        ),
    ] = "none"
    """Activations to recompute in the backward pass to save memory. none: nothing; dots: everything but the results of matrix
    products; full: whole layers, for a third more FLOPs. What attention kernels of TPUs and GPUs leave is kept by all three."""
    offload: Annotated[
        Literal["none", "optimizer", "weights"],
        MayChange(),
        Also("optimizer_memory_host_offload", "optimizer_offload", "offload_optimizer", note="true is `optimizer`"),
    ] = "none"
    """What lies in the host's memory. optimizer: the optimizer's state, which comes to the device for the update, layer by layer, and
    goes back. weights: the weights of the layers too, which come to the device as each layer runs, forward and backward; embeddings,
    the head and all gradients stay there. Layers must be scanned. On CPUs, where both memories are one, it saves nothing."""
    keep: Annotated[list[Kept], Also("save_names", "remat_save_names")] = Field([])
    """What `remat` keeps beside: qkv: queries, keys and values as attention reads them; attention: its output before the projection;
    attention_out: after it; ffn: the wide products of feed-forward layers (gate and up); experts: those of experts. It is an error if
    no layer of the model has one of them."""
    gather: Annotated[Literal["each", "once"], MayChange()] = "each"
    """When weights that FSDP splits are gathered in a step of several parts (`accumulate`). each: by each layer in each part; once:
    before the first part, and they stay whole over `mesh.fsdp` through all parts. That saves all gathers but the first, and takes
    the memory of what is gathered."""
    attention: Annotated[str | None, Also("attn_implementation", "attn_impl", "attention_kernel")] = None
    """Implementation of attention: `reference`, `blocked` (CPUs), `splash` (TPUs) or `cudnn` (NVIDIA GPUs, bfloat16). None: the best
    known for the device, docs/reference/kernels.md. It is an error if the implementation cannot do what the model needs."""
    products: str | None = None
    """Implementation of products with weights: `xla`; `amx` (float32 on the matrix units of Intel's processors, one CPU device),
    whose errors are of the size of XLA's; or `amx3`, 1.6 times as fast as `amx`, with a relative error of 4e-6 where float32 has
    3e-7. None: `amx` where it can be had and the model has a million parameters, otherwise `xla`. Stored with the run."""
    experts: str | None = None
    """Implementation of the experts' matrix products: `ragged_dot`, `blocked`, `megablox` or `tokamax`. None: the fastest known
    for the device."""

    @model_validator(mode="after")
    def _keeps_of_some(self) -> "ExecutionSettings":
        if self.keep and self.remat == "none":
            raise ValueError("keep names what remat=full or remat=dots keeps beside, and remat=none keeps everything")
        if len(set(self.keep)) < len(self.keep):
            raise ValueError(f"keep names {', '.join(sorted({n for n in self.keep if self.keep.count(n) > 1}))} twice")
        return self

    @property
    def recompute(self) -> Any:
        """What layers recompute (`models.parts.stack.remat`)."""
        return (self.remat, *self.keep) if self.keep else self.remat


class Evaluate(Settings):
    """Evaluation on held-out text."""

    every: Annotated[
        int,
        MayChange(),
        Also("eval_steps", "eval_every", "eval_interval", "validation.freq", "eval_strategy", "evals_per_epoch", "test_freq"),
    ] = Field(100, gt=0)
    """Steps between evaluations (eval.batches=0 turns evaluation off); the last step is always evaluated."""
    batches: Annotated[
        int, MayChange(), Also("eval_iters", "eval_tokens", "validation.steps", "max_eval_samples", "eval_batches")
    ] = Field(20, ge=0)
    """Most batches of an evaluation; 0 turns evaluation off."""
    before: Annotated[bool, MayChange(), Also("eval_on_start", "val_before_train", "eval_at_start")] = False
    """Whether the first weights are evaluated too, before the first step, so that what training changed can be told."""


class LogSettings(Settings):
    """Numbers written to metrics.jsonl."""

    every: Annotated[
        int,
        Also(
            "logging_steps",
            "log_interval",
            "log_freq",
            "metrics.log_freq",
            "log_period",
            "log_every",
            "log_every_n_steps",
        ),
    ] = Field(10, gt=0)
    """Steps between lines; the last step is always written."""


class SampleSettings(Settings):
    """Text generated while training, to watch it learn."""

    every: Annotated[int | None, Also("sample_every", "sample_interval")] = Field(None, gt=0)
    """Steps between samples. None: no samples."""
    prompt: str = ""
    """Text that the samples continue."""
    tokens: Annotated[int, Also("max_new_tokens", "max_tokens")] = Field(64, gt=0)
    """Length of a sample, in tokens."""
    temperature: float = Field(0.8, ge=0)
    """Sampling temperature; 0 takes the likeliest token each time."""


class Run(Settings):
    """A training run."""

    elsewhere: ClassVar = ELSEWHERE
    all_keys: ClassVar = "`argosy config reference`"

    dir: Annotated[
        str | None,
        MayChange(),
        Also(
            "output_dir",
            "out_dir",
            "base_output_directory",
            "job.dump_folder",
            "dump_folder",
            "run_name",
            "checkpoint.folder",
            "save_dir",
            "run",
            "experiment_name",
            "default_local_dir",
        ),
    ] = None
    """The run directory. None: `runs/<recipe>`."""
    seed: Annotated[int, Also("random_seed", "init_weights_seed")] = Field(0, ge=0, lt=2**32)
    """Random seed of initialization, data order and sampling."""
    steps: Annotated[
        int,
        MayChange(),
        Also(
            "max_steps",
            "num_iterations",
            "max_iters",
            "training.steps",
            "train_steps",
            "total_steps",
            "num_steps",
            "learning_rate_schedule_steps",
            "lr_decay_iters",
            "iterations",
        ),
    ] = Field(1000, gt=0)
    """Total number of optimizer updates, including those made before a resume."""
    model: Annotated[
        Any,
        Choice(FAMILIES, tag="family"),
        Also("model_name", "model.name", "model.flavor", "model.path", "model_type", "architecture", "model_id"),
    ]
    """The model to train: a preset by name, or a family and its sizes."""
    data: DataSettings = DataSettings()
    """The data to train on."""
    adapter: Annotated[Any, Choice(ADAPTERS), Also("peft_config", "use_peft", "finetuning_type", "use_lora", "lora")] = "none"
    """What is trained beside a frozen base model. none: nothing, every weight of the model is trained."""
    quant: QuantizedTraining = QuantizedTraining()
    """Training in few bits."""
    objective: Annotated[Any, Choice(OBJECTIVES), Also("loss", "loss_fn", "loss_type", "criterion")] = "next_token"
    """The loss to minimize."""
    rollout: Rollout | None = None
    """How answers are sampled, for objectives that learn from rewards. None: the defaults, where the objective does."""
    reward: Annotated[list[RewardSettings], Repeats("of"), OF_REWARDS] = Field(default_factory=list)
    """What answers are rewarded for, for objectives that learn from rewards. `reward=FILE.py:FUNCTION` may be given several times."""
    environment: Annotated[
        Any,
        Choice(ENVIRONMENTS, other=("custom", "of")),
        Also("env", "environment_factory", "multi_turn", "multi_turn.enable"),
    ] = "none"
    """What answers of several turns are given by, for objectives that learn from rewards: a name, or FILE.py:CLASS. none: an answer is
    one turn."""
    optimizer: Annotated[Any, Choice(OPTIMIZERS), Also("optim", "opt_type", "opt", "optimizer_type")] = "adamw"
    """The rule that updates the weights."""
    schedule: Annotated[
        Any,
        Choice(SCHEDULES),
        Also(
            "lr_scheduler_type",
            "lr_scheduler",
            "lr_scheduler.decay_type",
            "scheduler",
            "lr_schedule",
            "decay_lr",
            "learning_rate_schedule",
            "lr_schedule_type",
        ),
    ] = "cosine"
    """The learning rate by step, as a share of its peak."""
    accumulate: Annotated[
        int,
        Also(
            "gradient_accumulation_steps",
            "grad_accum_steps",
            "accumulation_steps",
            "grad_accumulation",
            "gradient_accumulation",
            note="it splits data.batch into so many parts; it does not multiply it",
        ),
    ] = Field(1, gt=0)
    """Number of parts into which each batch is split: the total batch stays `data.batch`. The parts are computed one after the
    other and their gradients summed, which saves memory and gives the same update."""
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Also("bf16", note="bf16=true is precision=bfloat16"),
        Also(
            "dtype",
            "mixed_precision",
            "training.mixed_precision_param",
            "compute_dtype",
            "torch_dtype",
            "amp",
        ),
    ] = "auto"
    """Type of the activations; weights and optimizer state are float32. auto: float32 on CPUs, bfloat16 elsewhere. Frozen weights
    under an adapter stay bfloat16 if their file has them so and the activations are. Stored with the run."""
    execution: ExecutionSettings = ExecutionSettings()
    """How the layers run."""
    mesh: Annotated[MeshSettings, MayChange()] = MeshSettings()
    """How devices share the work."""
    diloco: DilocoSettings = DilocoSettings()
    """Replicas of the weights that train alone between outer steps."""
    init: Init = Init()
    """Weights at the start."""
    checkpoint: Annotated[CheckpointSettings, MayChange()] = CheckpointSettings()
    """When to save, and what to keep."""
    eval: Annotated[Evaluate, MayChange()] = Evaluate()
    """When to evaluate."""
    guard: Annotated[GuardSettings, MayChange()] = GuardSettings()
    """What happens when numbers go wrong."""
    stragglers: Annotated[StragglerSettings, MayChange()] = StragglerSettings()
    """How the processes of a run are compared, to name the slow one."""
    log: Annotated[LogSettings, MayChange()] = LogSettings()
    """When to write numbers."""
    sample: Annotated[SampleSettings, MayChange()] = SampleSettings()
    """When to generate text."""

    @model_validator(mode="after")
    def _consistent(self) -> "Run":
        if not self.model.causal:
            raise ValueError("model is an encoder: it predicts no tokens, and no objective that trains one is built yet")
        if broken := [*self._broken_by_rewards(), *self._broken_by_sizes()]:
            raise BrokenRules(broken)
        return self

    def _broken_by_sizes(self) -> Iterator[str]:
        """The rules between model, data and batch that do not hold."""
        scores = self.objective.needs.scores
        if scores and "scores" not in type(self.model).model_fields:
            yield "models of this family have no head of scores yet: a Llama, Qwen, Gemma, OLMo or Phi has"
        elif self.model.scored != scores:
            why = "a reward model predicts no tokens" if not scores else "its head gives one score"
            yield f"model.scores = {self.model.scored}, and the objective needs {scores}: {why}"
        if self.data.sequence > self.model.context:
            yield (
                f"data.sequence = {self.data.sequence} is longer than the model's context, "
                f"model.context = {self.model.context} tokens"
            )
        if not self.adapter.trains_base and not self.init.weights and not self.init.state:
            yield (
                "the weights under an adapter are random: model=FOLDER or init.weights=FOLDER names the trained model to put it on"
            )
        if self.data.batch % self.accumulate:
            yield f"data.batch = {self.data.batch} is not a multiple of accumulate = {self.accumulate}"
        if self.execution.gather == "once" and self.accumulate == 1:
            yield "execution.gather=once gathers weights once for all parts of a batch, and accumulate=1 makes one part"

    def _broken_by_rewards(self) -> Iterator[str]:
        """Rewards and rollouts go with objectives that learn from them, and with no others."""
        rollouts = self.objective.needs.rollouts
        rewarded = rollouts == "rewards"
        if rollouts == "none":
            for name in ("reward", "rollout"):
                if getattr(self, name):
                    yield f"{name} is for objectives that learn from rewards, such as objective=grpo"
            if self.environment.played:
                yield "environment is for objectives that learn from rewards, such as objective=grpo"
            return
        if self.rollout is None:
            yield "rollout is missing: an objective that learns from completions samples them"
        if rewarded and not self.reward and not (self.environment.played and self.environment.gives):
            what = "reward is missing: reward=maths compares answers with the column `answer`, and reward=FILE.py:FUNCTION calls a "
            yield what + "function of yours, `def FUNCTION(completions, **columns)`, which gives a number for each"
        if not rewarded and self.reward:
            yield "reward is for objectives that learn from rewards: this one learns from its teacher"
        if not rewarded and self.environment.played:
            yield "environment is for objectives that learn from rewards: this one learns from its teacher"
        if CRITIC in self.objective.trained_parts and "scores" not in type(self.model).model_fields:
            yield "models of this family have no head of scores yet, which a critic needs"
