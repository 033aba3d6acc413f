"""Metrics of a server of bundles, with Triton's names."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LABELS = ("model", "version")
ROWS = tuple(1 << i for i in range(11))


class PredictMetrics:
    """What the server has done, by model and version."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.success = self._counter("nv_inference_request_success", "Requests that were answered.")
        self.failure = Counter(
            "nv_inference_request_failure", "Requests that were not.", (*LABELS, "reason"), registry=self.registry
        )
        self.rows = self._counter("nv_inference_count", "Rows that were computed.")
        self.batches_run = self._counter("nv_inference_exec_count", "Batches that were computed.")
        self.request_us = self._counter("nv_inference_request_duration_us", "Microseconds from arrival to the answer.")
        self.queue_us = self._counter("nv_inference_queue_duration_us", "Microseconds of waiting.")
        self.infer_us = self._counter("nv_inference_compute_infer_duration_us", "Microseconds of computing.")
        self.pending = Gauge("nv_inference_pending_request_count", "Requests that wait.", LABELS, registry=self.registry)
        self.batch_rows = Histogram("argosy_batch_rows", "Rows of a batch.", LABELS, buckets=ROWS, registry=self.registry)

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(name, about, LABELS, registry=self.registry)

    def batches(self, model: str, version: int) -> Callable[[str, int, int, float], None]:
        """What a batcher calls with each batch."""
        labels = model, str(version)

        def seen(signature: str, calls: int, rows: int, seconds: float) -> None:
            self.batches_run.labels(*labels).inc()
            self.rows.labels(*labels).inc(rows)
            self.infer_us.labels(*labels).inc(1e6 * seconds)
            self.batch_rows.labels(*labels).observe(rows)

        return seen

    def answered(self, model: str, version: int, seconds: float, queued: float) -> None:
        """Counts a request that was answered."""
        labels = model, str(version)
        self.success.labels(*labels).inc()
        self.request_us.labels(*labels).inc(1e6 * seconds)
        self.queue_us.labels(*labels).inc(1e6 * max(0.0, queued))

    def failed(self, model: str, version: int | str, reason: str) -> None:
        """Counts a request that was not. reason: OTHER, REJECTED, CANCELED, as Triton says."""
        self.failure.labels(model, str(version), reason).inc()

    def statistics(self, model: str, version: int) -> dict[str, int]:
        """Figures of a version, for the statistics extension."""
        labels = {"model": model, "version": str(version)}
        names = {
            "success": "request_success", "rows": "count", "batches": "exec_count",
            "request_us": "request_duration_us", "queue_us": "queue_duration_us", "infer_us": "compute_infer_duration_us",
        }  # fmt: skip
        return {short: int(self.registry.get_sample_value(f"nv_inference_{name}_total", labels) or 0) for short, name in names.items()}

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
