"""Sends metrics to MLflow, on its server or in a database file of the run directory."""

import os
from collections.abc import Mapping
from typing import Any

from argosy.observe.trackers.base import TrackedRun, TrackerSettings
from argosy.observe.trackers.packages import check_package, tracker_package

# The most characters of a parameter's text.
PARAMETER = 500


class MLflow(TrackerSettings):
    """MLflow (mlflow.org)."""

    uri: str | None = None
    """Address of the tracking server. None: $MLFLOW_TRACKING_URI, or the file `trackers/mlflow.db` of the run directory."""
    experiment: str = "argosy"
    """The experiment of the run."""

    def check(self) -> None:
        check_package("mlflow", "mlflow")

    def open(self, run: TrackedRun, id: str) -> "MlflowRun":
        return MlflowRun(self, run, id)


class MlflowRun:
    """A connection to a run of MLflow. It uses MLflow's client, which has no global state in this process."""

    whole_steps = False

    def __init__(self, settings: MLflow, run: TrackedRun, id: str):
        tracking = tracker_package("mlflow", "mlflow").tracking
        run.folder.mkdir(parents=True, exist_ok=True)
        place = f"sqlite:///{(run.folder / 'mlflow.db').resolve()}"
        self.client: Any = tracking.MlflowClient(settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or place)
        self.id = id or self._created(settings, run)
        self.client.update_run(self.id, "RUNNING")

    def _created(self, settings: MLflow, run: TrackedRun) -> str:
        existing = self.client.get_experiment_by_name(settings.experiment)
        experiment = existing.experiment_id if existing is not None else self.client.create_experiment(settings.experiment)
        created = self.client.create_run(experiment, run_name=run.name).info.run_id
        for name, value in run.config.items():
            self.client.log_param(created, name, str(value)[:PARAMETER])
        return created

    def log(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        metric = tracker_package("mlflow", "mlflow").entities.Metric
        metrics = [metric(name, value, int(time * 1000), step) for name, value in numbers.items()]
        self.client.log_batch(self.id, metrics, synchronous=True)

    def flush(self) -> None:
        # Each line is sent when it is logged.
        return

    def close(self) -> None:
        self.client.set_terminated(self.id)
