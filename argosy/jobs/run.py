"""The settings of a run: one tree, each room's part owned by the room."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from argosy.checkpoint.settings import CheckpointSettings
from argosy.core.schema import MayChange
from argosy.core.settings import Choice, Settings
from argosy.data.settings import DataSettings
from argosy.models import FAMILIES
from argosy.parallel.mesh import MeshSettings
from argosy.train.objectives import OBJECTIVES
from argosy.train.optim import OPTIMIZERS
from argosy.train.schedule import SCHEDULES


class Init(Settings):
    """Weights at the start, where the run directory holds no checkpoint. Random unless one of these is set."""

    weights: str | None = None
    """A model whose weights to start from: Hub folder, GGUF file, run directory or checkpoint."""
    state: str | None = None
    """A run directory or checkpoint whose weights, optimizer and step to start from."""

    @model_validator(mode="after")
    def _one(self) -> "Init":
        if self.weights and self.state:
            raise ValueError("weights and state are both set: state brings its weights")
        return self


class Execution(Settings):
    """How the layers run (`models.parts.stack`)."""

    run: Literal["auto", "unroll", "scan"] = "auto"
    """unroll: one after the other in the program, fastest on CPUs; scan: compile time constant in depth. auto: unroll on
    CPUs up to 32 layers. Kept with the run."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass recomputes: nothing, all but matrix products, or whole layers."""


class Evaluate(Settings):
    """Evaluation on held-out text."""

    every: Annotated[int, MayChange()] = Field(100, gt=0)
    """Steps between evaluations; the last step is always evaluated."""
    batches: Annotated[int, MayChange()] = Field(20, ge=0)
    """Batches at most each time; 0: never evaluate."""


class Log(Settings):
    """Numbers written to metrics.jsonl."""

    every: Annotated[int, MayChange()] = Field(10, gt=0)
    """Steps between lines; the last step always has one."""


class Sample(Settings):
    """Text generated while training, to watch it learn."""

    every: Annotated[int | None, MayChange()] = Field(None, gt=0)
    """Steps between samples; none where not set."""
    prompt: Annotated[str, MayChange()] = ""
    """What the samples continue."""
    tokens: Annotated[int, MayChange()] = Field(64, gt=0)
    """Length of a sample."""
    temperature: Annotated[float, MayChange()] = Field(0.8, ge=0)
    """0: the likeliest token each time."""


class Run(Settings):
    """A training run."""

    dir: Annotated[str | None, MayChange()] = None
    """The run directory; `runs/<recipe>` unless told."""
    seed: int = 0
    """Of the weights, the order of the data, and everything random."""
    steps: Annotated[int, MayChange()] = Field(1000, gt=0)
    """Updates in all."""
    model: Annotated[Any, Choice(FAMILIES, tag="family")]
    """What is trained: a preset by name, or sizes."""
    data: DataSettings = DataSettings()
    """What it is trained on."""
    objective: Annotated[Any, Choice(OBJECTIVES)] = "next_token"
    """What is minimised."""
    optimizer: Annotated[Any, Choice(OPTIMIZERS)] = "adamw"
    """How weights move."""
    schedule: Annotated[Any, Choice(SCHEDULES)] = "cosine"
    """How the learning rate moves."""
    accumulate: int = Field(1, gt=0)
    """Parts that each batch is taken in, one after the other; changes memory, not numbers."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """What activations are computed in; weights and optimizer are float32. auto: float32 on CPUs, else bfloat16. Kept with the run."""
    execution: Execution = Execution()
    """How the layers run."""
    mesh: Annotated[MeshSettings, MayChange()] = MeshSettings()
    """The devices."""
    init: Init = Init()
    """Weights at the start."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """When to save."""
    eval: Evaluate = Evaluate()
    """When to evaluate."""
    log: Log = Log()
    """When to write numbers."""
    sample: Sample = Sample()
    """When to generate text."""

    @model_validator(mode="after")
    def _consistent(self) -> "Run":
        if not self.model.causal:
            raise ValueError("model is an encoder: it predicts no tokens, and no objective is built that trains one")
        if self.data.sequence > self.model.context:
            raise ValueError(
                f"data.sequence = {self.data.sequence} is longer than the model's context, "
                f"model.context = {self.model.context} tokens"
            )
        if self.data.batch % self.accumulate:
            raise ValueError(f"data.batch = {self.data.batch} is not a multiple of accumulate = {self.accumulate}")
        return self
