"""The engines of `argosy launch`, by name, with the class of settings of each."""

from collections.abc import Iterable

from argosy.core.registry import Registry
from argosy.launch.servers.settings import KServe, Kubernetes, RayServe
from argosy.launch.settings import JobSet, LocalLaunch, Ray, SkyPilot, Slurm

ENGINES = Registry("engine")
# The engines that write a file for a scheduler.
WRITTEN = ("slurm", "jobset", "skypilot")
# The engines that run servers.
SERVING = ("kubernetes", "kserve", "rayserve")

ENGINES.add("local", LocalLaunch)
ENGINES.add("slurm", Slurm)
ENGINES.add("jobset", JobSet)
ENGINES.add("skypilot", SkyPilot)
ENGINES.add("ray", Ray)
ENGINES.add("kubernetes", Kubernetes)
ENGINES.add("kserve", KServe)
ENGINES.add("rayserve", RayServe)


def _tell_of_each_other() -> None:
    """Prepares error messages: a setting that only another engine has is answered with the name of that engine."""
    for name, schema in ENGINES.items():
        others = {other: set(its.model_fields) - set(schema.model_fields) for other, its in ENGINES.items() if other != name}
        schema.elsewhere = {
            key: f"it is a setting of {' and '.join(f'engine={other}' for other, has in others.items() if key in has)}"
            for key in set().union(*others.values())
        }


_tell_of_each_other()


def named_engine(words: Iterable[str]) -> str:
    """Returns the engine that the words name by `engine=NAME`. The default is `local`."""
    names = [word.partition("=")[2] for word in words if word.startswith("engine=")]
    return names[-1] if names else "local"
