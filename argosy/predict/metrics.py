"""Metrics of a server of bundles, with Triton's names."""

import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LABELS = ("model", "version")
ROWS = tuple(1 << i for i in range(11))
SECONDS = tuple(1e-3 * (1 << i) / 2 for i in range(18))


class PredictMetrics:
    """Counters of the server, by model and version.

    latest: the time of the last response of each (model, version), in seconds since 1970.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.latest: dict[tuple[str, int], float] = {}
        self._of_answers: dict[tuple[str, int], Any] = {}
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
        self.seconds = Histogram(
            "argosy_request_duration_seconds", "Seconds from arrival to the answer.", LABELS, buckets=SECONDS, registry=self.registry
        )
        self.batch_rows = Histogram("argosy_batch_rows", "Rows of a batch.", LABELS, buckets=ROWS, registry=self.registry)

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(name, about, LABELS, registry=self.registry)

    def batches(self, model: str, version: int) -> Callable[[str, int, int, float], None]:
        """Returns the function that a batcher calls after each batch."""
        labels = model, str(version)
        # Looked up once, because a look-up takes as long as three counts.
        batches, all_rows = self.batches_run.labels(*labels), self.rows.labels(*labels)
        infer_us, batch_rows = self.infer_us.labels(*labels), self.batch_rows.labels(*labels)

        def seen(signature: str, calls: int, rows: int, seconds: float) -> None:
            batches.inc()
            all_rows.inc(rows)
            infer_us.inc(1e6 * seconds)
            batch_rows.observe(rows)

        return seen

    def answered(self, model: str, version: int, seconds: float, queued: float) -> None:
        """Counts a successful request."""
        success, request_us, all_seconds, queue_us = self._answers(model, version)
        self.latest[model, version] = time.time()
        success.inc()
        request_us.inc(1e6 * seconds)
        all_seconds.observe(seconds)
        queue_us.inc(1e6 * max(0.0, queued))

    def _answers(self, model: str, version: int) -> tuple[Counter, Counter, Histogram, Counter]:
        if (model, version) not in self._of_answers:
            every = self.success, self.request_us, self.seconds, self.queue_us
            self._of_answers[model, version] = tuple(metric.labels(model, str(version)) for metric in every)
        return self._of_answers[model, version]

    def failed(self, model: str, version: int | str, reason: str) -> None:
        """Counts a failed request.

        Args:
            reason: the reason, OTHER, REJECTED or CANCELED as in Triton.
        """
        self.failure.labels(model, str(version), reason).inc()

    def forget(self, model: str, version: int) -> None:
        """Removes the series of an unloaded version, so that a server that replaces its models for months does not accumulate them."""
        self._of_answers.pop((model, version), None)
        self.latest.pop((model, version), None)
        every = self.success, self.rows, self.batches_run, self.request_us, self.queue_us, self.infer_us, self.seconds
        for metric in (*every, self.batch_rows, self.failure):
            metric.remove_by_labels({"model": model, "version": str(version)})

    def statistics(self, model: str, version: int) -> dict[str, int]:
        """Returns the counts of a version for the statistics extension."""
        labels = {"model": model, "version": str(version)}
        names = {
            "success": "request_success", "rows": "count", "batches": "exec_count",
            "request_us": "request_duration_us", "queue_us": "queue_duration_us", "infer_us": "compute_infer_duration_us",
        }  # fmt: skip
        figures = {
            short: int(self.registry.get_sample_value(f"nv_inference_{name}_total", labels) or 0) for short, name in names.items()
        }
        reasons = [sample for metric in self.failure.collect() for sample in metric.samples if sample.name.endswith("_total")]
        failures = [sample.value for sample in reasons if labels.items() <= sample.labels.items()]
        return figures | {"failure": int(sum(failures)), "latest_ms": int(1e3 * self.latest.get((model, version), 0))}

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
