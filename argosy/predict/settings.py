"""The settings of `argosy predict` and of each model in a repository. This module does not import jax, so mistakes are reported at
once."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from argosy.core.settings import Also, Settings
from argosy.web.settings import WebLimits, WebSettings


class PredictLimits(WebLimits):
    """Limits of a bundle server."""

    body: int = Field(33_554_432, gt=0)
    """Bytes of a request body. Multiplied by `connections`, it bounds the memory of all bodies."""
    seconds: float = Field(60, gt=0)
    """Seconds a request may take, from its arrival to its last byte."""


class BatchingSettings(Settings):
    """How requests are batched."""

    max_batch_size: int = Field(32, gt=0)
    """Largest number of rows in a batch. A request with more rows is split."""
    max_batch_tokens: Annotated[int, Also("max_num_batched_tokens")] = Field(8192, gt=0)
    """Limit of a batch's rows times its padded length. A request with one longer row is computed alone."""
    allowed_batch_sizes: tuple[int, ...] = ()
    """Numbers of rows that programs are compiled for; a batch is padded to the next one. Empty: the bundle's sizes, or powers of two.
    """
    max_queue_delay_ms: Annotated[float, Also("batch_timeout_ms", "max_latency")] = Field(0.0, ge=0)
    """Milliseconds that the first request of a batch waits for others. 0: a batch is formed from the requests that wait when the device
    becomes free.
    """
    max_queue_size: Annotated[int, Also("max_enqueued_batches")] = Field(1024, gt=0)
    """Largest number of waiting rows; further requests are refused with 503."""
    batch_padding_policy: Literal["pad_up", "batch_down", "minimize_cost"] = "minimize_cost"
    """How a batch between two sizes is run. pad_up: it is padded to the next size. batch_down: it is cut to the size below, and the
    other requests wait. minimize_cost: the choice that took less time per row so far; pad_up until both are measured.
    """
    instances: Annotated[int, Also("num_batch_threads", "instance_count")] = Field(1, gt=0, le=64)
    """Number of batches that are computed at once. Values above 1 pay off if one batch leaves the device partly idle."""
    priority_levels: int = Field(0, ge=0, le=64)
    """Number of priority levels that requests may ask for; 1 is the highest. A full queue drops requests of a lower level. 0: all are
    equal.
    """
    default_priority_level: int = Field(0, ge=0)
    """Level of requests without one. 0: the lowest."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        sizes = self.allowed_batch_sizes
        if sizes and (sizes[0] < 1 or list(sizes) != sorted(set(sizes)) or sizes[-1] > self.max_batch_size):
            most = self.max_batch_size
            raise ValueError(f"allowed_batch_sizes = {list(sizes)} are not ascending sizes from 1 to max_batch_size = {most}")
        if self.default_priority_level > self.priority_levels:
            raise ValueError(f"default_priority_level = {self.default_priority_level} is above {self.priority_levels} levels")
        return self


class EnsembleStep(Settings):
    """A step of an ensemble: a call of another model of the repository."""

    model: Annotated[str, Also("model_name")]
    """The model that is called."""
    version: Annotated[int | None, Also("model_version")] = Field(None, gt=0)
    """Its version. None: the newest that is ready."""
    signature: str | None = None
    """Its signature. None: the default."""
    input_map: dict[str, str] = Field(default_factory=dict)
    """The ensemble's tensor for each input of the model. Required inputs that are not listed take the tensor of their own name."""
    output_map: dict[str, str] = Field(default_factory=dict)
    """The ensemble's tensor for each output of the model; outputs that are not listed are dropped. Empty: all outputs, under their own
    names.
    """


class EnsembleSettings(Settings):
    """Several models that serve a request together. A tensor that no step writes is an input of the ensemble."""

    steps: tuple[EnsembleStep, ...] = Field(min_length=1)
    """Calls of other models, in any order: a step runs once its inputs exist."""
    outputs: tuple[str, ...] = ()
    """The tensors that are returned. Empty: those that no step reads."""


class ModelSettings(Settings):
    """The settings of a model: `config.yml` in its folder."""

    versions: Literal["latest", "all"] | tuple[int, ...] = "latest"
    """The versions that are served: latest, all, or their numbers."""
    latest: Annotated[int, Also("num_versions")] = Field(1, gt=0)
    """Number of versions that `versions: latest` serves."""
    labels: dict[str, int] = Field(default_factory=dict)
    """Names of versions, such as `stable: 3`."""
    batching: BatchingSettings | None = None
    """How its requests are batched. None: the server's settings."""
    ensemble: EnsembleSettings | None = None
    """Steps of other models, for a folder without a bundle."""

    @model_validator(mode="after")
    def _check_ensemble(self) -> Self:
        if self.ensemble is not None and self.batching is not None:
            raise ValueError("an ensemble has no batches of its own: `batching` is for its members")
        if self.ensemble is not None and (self.versions != "latest" or self.latest != 1):
            raise ValueError("an ensemble is one version: `versions` and `latest` are for its members")
        return self


class PredictSettings(WebSettings):
    """Settings of the server."""

    elsewhere: ClassVar = {
        "http_port": "did you mean `port`?",
        "grpc_port": "did you mean `grpc`?",
        "rest_api_port": "did you mean `port`?",
        "model_repository": "it is the first argument: argosy predict REPOSITORY",
        "model_base_path": "it is the first argument: argosy predict REPOSITORY",
        "model_control_mode": "poll=SECONDS looks for changes; the API can always load and unload",
        "file_system_poll_wait_seconds": "did you mean `poll`?",
        "repository_poll_secs": "did you mean `poll`?",
    }

    grpc: int | None = Field(None, ge=0, lt=2**16)
    """Port of the Open Inference Protocol over gRPC, on the same address; 0 takes a free one. None: no gRPC. Triton uses 8001. Needs
    the package `grpcio`.
    """
    poll: float | None = Field(None, gt=0)
    """Seconds between two scans of the repository for new, changed and removed versions. None: only the API loads and unloads."""
    name: str | None = None
    """Name of the model if REPOSITORY is one bundle, or the versions of one model; the models of a repository keep their names. None:
    the folder's name.
    """
    page: bool = True
    """Serves a page at `/` with models, batches and latencies, and a form that calls a signature. The page needs no key; its requests
    do.
    """
    warm_up: bool = True
    """Compiles every program of a version before it is ready, so that no request waits for the compiler."""
    key_file: str | None = None
    """A file with an ed25519 public key. Every bundle must be signed by its owner."""
    batching: BatchingSettings = BatchingSettings()
    limits: PredictLimits = PredictLimits()
