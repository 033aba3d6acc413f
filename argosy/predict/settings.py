"""Settings of `argosy predict` and of each model in a repository. No jax here: mistakes are answered before it is imported."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from argosy.core.settings import Also, Settings
from argosy.web.settings import WebLimits, WebSettings


class PredictLimits(WebLimits):
    """Limits of a server of bundles."""

    body: int = Field(33_554_432, gt=0)
    """Bytes of a request body. Multiplied by `connections`, it bounds the memory of all bodies."""
    seconds: float = Field(60, gt=0)
    """Seconds a request may take, from its arrival to its last byte."""


class BatchingSettings(Settings):
    """How requests are computed together."""

    max_batch_size: int = Field(32, gt=0)
    """Rows of a batch, at most. A request with more rows is split."""
    allowed_batch_sizes: tuple[int, ...] = ()
    """Rows that programs are compiled for; a batch is filled up to the next one. None given: those of the bundle, or powers of two."""
    max_queue_delay_ms: Annotated[float, Also("batch_timeout_ms", "max_latency")] = Field(0.0, ge=0)
    """Milliseconds that the first request of a batch waits for others. 0: a batch is what waits when the device becomes free."""
    max_queue_size: Annotated[int, Also("max_enqueued_batches")] = Field(1024, gt=0)
    """Rows that may wait; requests beyond them are refused with 503."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        sizes = self.allowed_batch_sizes
        if sizes and (sizes[0] < 1 or list(sizes) != sorted(set(sizes)) or sizes[-1] > self.max_batch_size):
            most = self.max_batch_size
            raise ValueError(f"allowed_batch_sizes = {list(sizes)} are not ascending sizes from 1 to max_batch_size = {most}")
        return self


class ModelSettings(Settings):
    """`config.yml` in the folder of a model."""

    versions: Literal["latest", "all"] | tuple[int, ...] = "latest"
    """The versions that are served: latest, all, or their numbers."""
    latest: Annotated[int, Also("num_versions")] = Field(1, gt=0)
    """How many versions `versions: latest` serves."""
    labels: dict[str, int] = Field(default_factory=dict)
    """Names of versions, such as `stable: 3`."""
    batching: BatchingSettings | None = None
    """How its requests are computed together. None: as the server does."""


class PredictSettings(WebSettings):
    """Settings of the server."""

    elsewhere: ClassVar = {
        "http_port": "did you mean `port`?",
        "grpc": "leave it out: clients use HTTP, gRPC is not built",
        "grpc_port": "leave it out: clients use HTTP, gRPC is not built",
        "rest_api_port": "did you mean `port`?",
        "model_repository": "it is the first argument: argosy predict REPOSITORY",
        "model_base_path": "it is the first argument: argosy predict REPOSITORY",
        "model_control_mode": "poll=SECONDS looks for changes; the API can always load and unload",
        "file_system_poll_wait_seconds": "did you mean `poll`?",
        "repository_poll_secs": "did you mean `poll`?",
    }

    poll: float | None = Field(None, gt=0)
    """Seconds between two looks at the repository for new, changed and removed versions. None: only the API loads and unloads."""
    warm_up: bool = True
    """Compiles every program of a version before it is ready, so that no request waits for the compiler."""
    key_file: str | None = None
    """A file with the ed25519 public key whose owner must have signed every bundle."""
    batching: BatchingSettings = BatchingSettings()
    limits: PredictLimits = PredictLimits()
