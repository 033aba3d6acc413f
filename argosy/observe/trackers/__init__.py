"""Trackers: other programs that display the metrics of a run. They are set by `track=tensorboard` or
`track='[{name: wandb, project: mine}]'`, which may be repeated.

Trackers are sent the lines of metrics.jsonl, from a position that the run directory remembers (`follow`). So they catch up after a
kill, an outage or a run without them, and they never stop a run. A package can add a tracker by a settings class that derives from
`TrackerSettings` and is registered under the entry point `argosy.trackers`, or named as FILE.py:CLASS.
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
