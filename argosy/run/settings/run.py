"""The settings of a run. They are one tree, to which each top-level folder of the package contributes a part."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from argosy.adapt.rules import QuantizedTraining
from argosy.adapt.settings import ADAPTERS
from argosy.checkpoint.settings import CheckpointSettings
from argosy.core.settings import Also, BrokenRules, Choice, MayChange, Repeats, Settings
from argosy.data.settings import DataSettings
from argosy.infer.denoise.encoder_settings import EncoderSettings
from argosy.models import FAMILIES
from argosy.observe.trackers import TRACKERS
from argosy.parallel.mesh import MeshSettings
from argosy.rl.algorithms import ALGORITHMS
from argosy.rl.environments.settings import ENVIRONMENTS
from argosy.rl.rewards.settings import RewardSettings
from argosy.rl.rollouts.settings import Rollout
from argosy.run.settings.execution import ExecutionSettings
from argosy.run.settings.image_rules import broken_by_conditions, broken_by_encoders
from argosy.run.settings.other_trainers import ELSEWHERE
from argosy.run.settings.profile import ProfileSettings
from argosy.train.beside import CRITIC
from argosy.train.diloco_settings import DilocoSettings
from argosy.train.ema import EmaSettings
from argosy.train.guard_settings import GuardSettings
from argosy.train.objectives import OBJECTIVES
from argosy.train.optimizers import OPTIMIZERS
from argosy.train.schedule import SCHEDULES, Constant
from argosy.train.straggler_settings import StragglerSettings

for _name, _class in ALGORITHMS.items():
    OBJECTIVES.add(_name, _class)


OF_REWARDS = Also(
    "reward_funcs", "reward_fn", "reward_model", "custom_reward_function.path", "custom_reward_function.name", "reward_model.enable"
)

# What models read, in words, and the objectives that train them.
INPUTS = {"tokens": "tokens", "clicks": "numbers and categories", "images": "images", "image_texts": "images beside texts"}
OBJECTIVES_OF = {
    "tokens": "objective=next_token trains language models",
    "clicks": "objective=rank and objective=retrieve train rankers",
    "images": "objective=diffusion and dreambooth train denoisers, controlnet ControlNets, textual_inversion tokens, autoencode VAEs",
    "image_texts": "training CLIP is not built: it evaluates images",
}


class Init(Settings):
    """Initial weights, for a run directory without a checkpoint. They are random unless one of these settings is given."""

    weights: Annotated[
        str | None,
        Also("load_parameters_path", "init_from", "initial_load_path"),
    ] = None
    """The model whose weights to start from: Hub folder, GGUF file, run directory or checkpoint."""
    state: Annotated[str | None, Also("load_full_state_path")] = None
    """The run directory or checkpoint whose weights, optimizer state and step to start from."""
    tokenizer_mismatch: Literal["error", "allow"] = "error"
    """What to do if `weights` were trained with another tokenizer than `data.tokenizer`, so that ids stand for other tokens. error: the
    run ends before its first step; allow: it trains, as for embeddings that are learned anew. A model without a tokenizer counts as a
    mismatch if more than a tenth of its ids are unknown to the tokenizer.
    """

    @model_validator(mode="after")
    def _check_exclusive(self) -> "Init":
        if self.weights and self.state:
            raise ValueError("weights and state are both set: state already includes weights")
        return self


class Evaluate(Settings):
    """Evaluation on held-out data."""

    every: Annotated[
        int,
        MayChange(),
        Also("eval_steps", "eval_every", "eval_interval", "validation.freq", "eval_strategy", "evals_per_epoch", "test_freq"),
    ] = Field(100, gt=0)
    """Steps between evaluations (eval.batches=0 turns evaluation off); the last step is always evaluated."""
    batches: Annotated[
        int, MayChange(), Also("eval_iters", "eval_tokens", "validation.steps", "max_eval_samples", "eval_batches")
    ] = Field(20, ge=0)
    """Largest number of batches in an evaluation; 0 turns evaluation off."""
    before: Annotated[bool, MayChange(), Also("eval_on_start", "val_before_train", "eval_at_start")] = False
    """Whether the initial weights are evaluated too, before the first step, to show the effect of training."""


class LogSettings(Settings):
    """Metrics written to metrics.jsonl."""

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
    """Steps between logged lines; the last step is always logged."""


class SampleSettings(Settings):
    """Text or images generated during training, to watch the model learn."""

    every: Annotated[int | None, Also("sample_every", "sample_interval")] = Field(None, gt=0)
    """Steps between samples. None: no samples."""
    prompt: str = ""
    """Text that the samples continue."""
    tokens: Annotated[int, Also("max_new_tokens", "max_tokens")] = Field(64, gt=0)
    """Length of a sample, in tokens."""
    temperature: float = Field(0.8, ge=0)
    """Sampling temperature; 0 takes the most likely token each time."""
    images: int = Field(40, gt=0)
    """For models of images: number of images of a grid, of all classes or prompts in turn."""
    steps: int = Field(20, gt=0)
    """For models of images: steps from noise to image."""
    guidance: Annotated[float, Also("guidance_scale", "cfg_scale")] = Field(1.0, ge=0)
    """For models of images: scale of classifier-free guidance; 1: none."""
    prompts: Annotated[list[str], Also("validation_prompt", "validation_prompts", "sample_prompts")] = Field([])
    """For models of images that read captions: what is drawn, in turn. []: the first captions of the data, of held-out images if there
    are any."""


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
    encoders: EncoderSettings = EncoderSettings()
    """For models of images: the frozen models that make latents of images and states of captions."""
    adapter: Annotated[Any, Choice(ADAPTERS), Also("peft_config", "use_peft", "finetuning_type", "use_lora", "lora")] = "none"
    """The adapter to train on a frozen base model. none: no adapter; every weight of the model is trained."""
    quant: QuantizedTraining = QuantizedTraining()
    """Training in low precision."""
    objective: Annotated[Any, Choice(OBJECTIVES), Also("loss", "loss_fn", "loss_type", "criterion")] = "next_token"
    """The loss to minimize."""
    rollout: Rollout | None = None
    """How completions are sampled, for objectives that learn from rollouts. None: the defaults, if the objective needs rollouts."""
    reward: Annotated[list[RewardSettings], Repeats("of"), OF_REWARDS] = Field(default_factory=list)
    """The reward functions and models, for objectives that learn from rewards. `reward=FILE.py:FUNCTION` may be given several times."""
    environment: Annotated[
        Any,
        Choice(ENVIRONMENTS, other=("custom", "of")),
        Also("env", "environment_factory", "multi_turn", "multi_turn.enable"),
    ] = "none"
    """The environment of completions with several turns, for objectives that learn from rewards: a name, or FILE.py:CLASS. none: a
    completion is one turn.
    """
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
    """The schedule of the learning rate, as a share of its peak."""
    ema: EmaSettings = EmaSettings()
    """An average of the weights, which is evaluated, sampled from and saved in their place."""
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
    """Type of the activations; weights and optimizer state are float32. auto: float32 on CPUs, bfloat16 elsewhere. Frozen weights under
    an adapter stay bfloat16 if both their file and the activations are bfloat16. Stored with the run.
    """
    execution: ExecutionSettings = ExecutionSettings()
    """How layers are executed."""
    mesh: Annotated[MeshSettings, MayChange()] = MeshSettings()
    """How devices share the work."""
    diloco: DilocoSettings = DilocoSettings()
    """Replicas of the weights that train independently between outer steps."""
    init: Init = Init()
    """Initial weights."""
    checkpoint: Annotated[CheckpointSettings, MayChange()] = CheckpointSettings()
    """When to save, and which checkpoints to keep."""
    eval: Annotated[Evaluate, MayChange()] = Evaluate()
    """When to evaluate."""
    guard: Annotated[GuardSettings, MayChange()] = GuardSettings()
    """How the run reacts to non-finite numbers and loss spikes."""
    stragglers: Annotated[StragglerSettings, MayChange()] = StragglerSettings()
    """How the processes of a run are compared, to name a slow one."""
    log: Annotated[LogSettings, MayChange()] = LogSettings()
    """When to log metrics."""
    profile: Annotated[ProfileSettings, MayChange()] = ProfileSettings()
    """Which steps the profiler captures."""
    track: Annotated[list[Annotated[Any, Choice(TRACKERS)]], MayChange(), Repeats("name")] = Field(default_factory=list)
    """Trackers that show the run's metrics: tensorboard, wandb, mlflow, trackio. `track=tensorboard track=wandb`, or
    `track='[{name: wandb, project: mine}]'`. They are sent what metrics.jsonl holds, and catch up when they were away."""
    sample: Annotated[SampleSettings, MayChange()] = SampleSettings()
    """When to generate text or images."""

    @model_validator(mode="after")
    def _consistent(self) -> "Run":
        reads, trained = self.model.inputs, self.objective.needs.inputs
        if reads != trained:
            problem = f"the model reads {INPUTS[reads]}, and the objective trains models that read {INPUTS[trained]}"
            raise ValueError(f"{problem}; {OBJECTIVES_OF[reads]}")
        if reads != "tokens":
            if broken := [*broken_by_conditions(self), *broken_by_encoders(self), *self._broken_by_parts()]:
                raise BrokenRules(broken)
            return self
        if not self.model.causal and not self.objective.needs.encoders:
            problem = "model is an encoder: it predicts no tokens, and this objective trains what predicts them"
            raise ValueError(f"{problem}; objective=classify trains encoders, and so do contrastive, similarity and rerank")
        if broken := [*self._broken_by_rewards(), *self._broken_by_sizes()]:
            raise BrokenRules(broken)
        return self

    @property
    def averages(self) -> bool:
        """Whether the weights that are evaluated and saved are an average of the trained weights."""
        return self.ema.on or self.optimizer.averages

    def _broken_by_sizes(self) -> Iterator[str]:
        """Yields a sentence for each rule between model, data and batch that does not hold."""
        scores = self.objective.needs.scores
        if self.objective.needs.labels:
            if not self.model.scored:
                yield "model.scores = 0, and the objective learns labels: model.scores=N for N classes, 1 for a number"
            elif self.data.labels and self.model.scored != len(self.data.labels):
                yield f"model.scores = {self.model.scored}, and data.labels names {len(self.data.labels)} classes"
        elif self.model.scored != scores:
            why = "a reward model predicts no tokens" if not scores else "its head gives one score"
            yield f"model.scores = {self.model.scored}, and the objective needs {scores}: {why}"
        if not getattr(self.objective, "include_prompt", True) and not self.data.prompts:
            yield "objective.include_prompt = false leaves prompts out of vectors, and data.prompts names none"
        wide = [width for width in getattr(self.objective, "dimensions", ()) if width > self.model.embedding_width]
        if wide:
            yield f"objective.dimensions has {wide[0]}, and the model's vectors have {self.model.embedding_width} numbers"
        if self.data.sequence > self.model.context:
            yield (
                f"data.sequence = {self.data.sequence} is longer than the model's context, "
                f"model.context = {self.model.context} tokens"
            )
        yield from self._broken_by_parts()

    def _broken_by_parts(self) -> Iterator[str]:
        """Yields a sentence for each rule about adapters and micro-batches that does not hold."""
        if not self.adapter.trains_base and not self.init.weights and not self.init.state:
            yield (
                "the weights under an adapter are random: model=FOLDER or init.weights=FOLDER names the trained model to put it on"
            )
        if self.optimizer.averages and type(self.schedule) is not Constant:
            yield "the average of the optimizer takes the place of a decay of the learning rate: schedule=constant"
        if self.data.batch % self.accumulate:
            yield f"data.batch = {self.data.batch} is not a multiple of accumulate = {self.accumulate}"
        if self.execution.gather == "once" and self.accumulate == 1:
            yield "execution.gather=once gathers weights once for all parts of a batch, and accumulate=1 makes one part"

    def _broken_by_rewards(self) -> Iterator[str]:
        """Yields a sentence for each rule about rewards and rollouts that does not hold. Only objectives that learn from them may have
        them."""
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
            problem = "reward is missing: reward=maths compares answers with the column `answer`, and reward=FILE.py:FUNCTION calls a "
            yield problem + "function of yours, `def FUNCTION(completions, **columns)`, which gives a number for each"
        if not rewarded and self.reward:
            yield "reward is for objectives that learn from rewards: this one learns from its teacher"
        if not rewarded and self.environment.played:
            yield "environment is for objectives that learn from rewards: this one learns from its teacher"
        if CRITIC in self.objective.trained_parts and "scores" not in type(self.model).model_fields:
            yield "models of this family have no head of scores yet, which a critic needs"
