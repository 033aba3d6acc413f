"""Trackers: other programs that show a run's numbers. `track=tensorboard`, `track='[{name: wandb, project: mine}]'`, several times.

The truth is metrics.jsonl. A tracker is sent its lines, from a position that the run directory remembers (`follow`), so it catches up
after a kill, an outage or a run without it, and it never stops a run. A package of one's own registers a class of settings that derives
from `TrackerSettings`, by the entry point `argosy.trackers`, or is named as FILE.py:CLASS.
"""

from argosy.core.registry import Registry

_HERE = "argosy.observe.trackers"

TRACKERS = Registry(
    "tracker",
    {
        "tensorboard": f"{_HERE}.tensorboard:TensorBoard",
        "wandb": f"{_HERE}.weights_and_biases:WeightsAndBiases",
        "mlflow": f"{_HERE}.mlflow:MLflow",
        "trackio": f"{_HERE}.trackio:Trackio",
    },
    files=True,
)
TRACKERS.add_installed("argosy.trackers")
