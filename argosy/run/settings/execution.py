"""The settings of how the layers of a run are executed: compilation, recomputation, offloading, and implementations of ops."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from argosy.core.settings import Also, MayChange, Settings
from argosy.models.settings import Kept


class ExecutionSettings(Settings):
    """How layers are executed (`models.parts.stack`)."""

    run: Annotated[Literal["auto", "unroll", "scan"], Also("scan_layers")] = "auto"
    """How layers are compiled. unroll: the program contains every layer, which is fastest on CPUs and GPUs. scan: it contains one group
    of layers and loops over it, so compile time does not grow with depth. auto: unroll on CPUs and on a single GPU up to 32 layers,
    otherwise scan. Stored with the run. Layers that are split over devices (`mesh.stage`) are stored as scanned ones."""
    microbatches: Annotated[int | None, MayChange(), Also("num_pipeline_microbatches", "n_microbatches")] = Field(None, gt=0)
    """Number of parts into which the rows of a pass are split for pipeline stages (`mesh.stage`): a multiple of the number of stages S.
    With M microbatches, stages are idle for (S - 1) / (M R + S - 1) of the time, where R is `execution.rounds`. None: 4 S, or the next
    smaller multiple that divides the rows.
    """
    rounds: Annotated[int, Also("num_pipeline_repeats", "virtual_pipeline_model_parallel_size")] = Field(1, gt=0)
    """Number of times that a microbatch passes through all stages of `mesh.stage` (a circular, or interleaved, schedule). Each stage
    then holds this many shorter runs of neighboring layers. More rounds reduce the idle time of stages, and send more data between
    them. Layers are stored in one array per round, so a run keeps its rounds.
    """
    remat: Annotated[
        Literal["none", "dots", "full"],
        Also(
            "gradient_checkpointing", "remat_policy", "activation_checkpoint.mode", "activation_checkpointing", "remat",
            "enable_gradient_checkpointing",
        ),
    ] = "none"
    """Activations to recompute in the backward pass to save memory. none: no activations; dots: all but the results of matrix products;
    full: whole layers, for a third more FLOPs. Residuals of attention kernels on TPUs and GPUs are kept in all three cases.
    """
    offload: Annotated[
        Literal["none", "optimizer", "weights"],
        MayChange(),
        Also("optimizer_memory_host_offload", "optimizer_offload", "offload_optimizer", note="true is `optimizer`"),
    ] = "none"
    """Parts of the state that are kept in host memory. optimizer: the optimizer's state, which is moved to the device and back during
    the update, layer by layer. weights: also the weights of layers, which are moved to the device as each layer runs, forward and
    backward; embeddings, the head and all gradients stay on the device. Layers must be scanned. On CPUs, whose memory is the host's, it
    saves nothing.
    """
    keep: Annotated[list[Kept], Also("save_names", "remat_save_names")] = Field([])
    """Activations that are kept although `remat` would recompute them. qkv: queries, keys and values as attention reads them;
    attention: its output before the projection; attention_out: its output after the projection; ffn: the wide products of feed-forward
    layers (gate and up); experts: the same of experts. It is an error if no layer of the model has one of them.
    """
    gather: Annotated[Literal["each", "once"], MayChange()] = "each"
    """When weights that FSDP shards are gathered in a step with `accumulate`. each: by each layer in each part; once: before the first
    part, and they stay gathered over `mesh.fsdp` through all parts. That saves all gathers but the first, and takes the memory of the
    gathered weights.
    """
    compiler_options: Annotated[Literal["auto", "none"], MayChange()] = "auto"
    """Options for the compiler. auto: those of `parallel/compiler_options.py` for the platform, which let collectives run beside
    products on TPUs; none: the compiler's own defaults."""
    attention: Annotated[str | None, Also("attn_implementation", "attn_impl", "attention_kernel")] = None
    """Implementation of attention: `reference`, `blocked` (CPUs), `splash` (TPUs) or `cudnn` (NVIDIA GPUs, bfloat16). None: the fastest
    known for the device, docs/reference/kernels.md. It is an error if the implementation does not support the model.
    """
    products: str | None = None
    """Implementation of matrix products with weights: `xla`; `amx` (float32 on the matrix units of Intel's processors, one CPU device),
    whose rounding errors are of the size of XLA's; or `amx3`, 1.6 times as fast as `amx`, with a relative error of 4e-6 instead of
    3e-7. None: `amx` if it is available and the model has at least a million parameters, otherwise `xla`. Stored with the run.
    """
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
        """The value for `models.parts.stack.remat`: the setting `remat`, with the names of `keep` if there are any."""
        return (self.remat, *self.keep) if self.keep else self.remat
