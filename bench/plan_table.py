"""What `argosy plan` predicts, beside what was published and what compilers say. plan_here.py has what was taken on this machine.

    plan_table.py published         MFU of MaxText's published runs, and what the analytic model says of the same shapes
    plan_table.py pods [NAME ...]   models on 64 chips of a v5p by their compiler, which takes minutes for each
    plan_table.py serving [MODEL DEVICE TENSOR]    steps of servers by their compiler: with 1, 8 and 32 sequences of 1,024 tokens
    plan_table.py compiled DEVICE RECIPE [key=value ...]    the analytic model beside the compiler

MFU counts causal attention by half. Published: docs/reference/models/tiering.md of AI-Hypercomputer/maxtext, read in November 2026;
batches are ours where none is published.
"""

import json
import sys
from typing import Any

from argosy.infer.settings import EngineSettings
from argosy.jobs.plan.serving import ServePlanSettings, plan_serving
from argosy.jobs.plan.training import PlanSettings, plan

# MaxText's runs: model, chips, settings, percent.
PUBLISHED = (
    ("llama2-70b", "v5p-1024", ("data.sequence=4096", "data.batch=1024", "execution.remat=full"), 65.4),
    ("llama2-70b", "v5p-128", ("data.sequence=4096", "data.batch=128", "execution.remat=full"), 65.0),
    ("mixtral-8x7b", "v5p-512", ("data.sequence=4096", "data.batch=512", "execution.remat=full"), 52.6),
    ("llama3.1-8b", "v6e-256", ("data.sequence=8192", "data.batch=768", "execution.remat=full"), 45.5),
    ("llama3.1-70b", "v6e-256", ("data.sequence=8192", "data.batch=256", "execution.remat=full", "mesh.tensor=2"), 50.3),
    ("llama2-70b", "v6e-256", ("data.sequence=4096", "data.batch=256", "execution.remat=full"), 43.8),
)

# Models on 64 chips of a v5p.
PODS = {
    "llama2": ("model=llama2-70b",),
    "mixtral": ("model=mixtral-8x7b", "mesh.fsdp=8", "mesh.expert=8"),
    "gemma": ("model=gemma3-27b",),
    "qwen": ("model=qwen3-32b",),
    "gpt-oss": ("model=gpt-oss-120b", "mesh.fsdp=8", "mesh.expert=8"),
    "deepseek": ("model=deepseek3-671b", "model.layers=5", "mesh.fsdp=8", "mesh.expert=8"),
    "long": ("model=llama3.1-8b", "model.layers=2", "mesh.fsdp=8", "mesh.context=8", "data.sequence=131072", "data.batch=8"),
}


# Servers: model, device, devices that share it.
SERVED = (
    ("llama3.1-8b", "v5p-8", 1),
    ("llama3.2-1b", "v5e-8", 1),
    ("gemma3-4b", "v5e-8", 1),
    ("gpt-oss-20b", "v5p-8", 1),
    ("qwen3-32b", "v6e-8", 8),
)


def planned(recipe: str, *words: str, **settings: Any) -> dict[str, Any]:
    return plan(recipe, words, PlanSettings(**settings), lambda _: None)


def published() -> None:
    """A row for each published run."""
    print(f"{'model':15} {'device':10} {'published':>9} {'model':>7} {'GiB a device':>12}  bound by")
    for model, device, words, percent in PUBLISHED:
        prediction = planned("pretrain", f"model={model}", *words, device=device, compile=False)
        size = prediction["memory_bytes"]["total"] / 2**30
        print(f"{model:15} {device:10} {percent:>8.1f}% {prediction['mfu']:>6.1%} {size:>12.1f}  {prediction['bound_by']}", flush=True)


def pods(*names: str) -> None:
    """A row for each model, by the compiler."""
    print(f"{'run':10} {'GB a device':>11} {'step s':>8} {'MFU':>6} {'exposed s':>9}  largest collectives, GB")
    for name in names or PODS:
        words = ("data.sequence=4096", "data.batch=128", "execution.remat=full", *PODS[name])
        prediction = planned("pretrain", *{word.partition("=")[0]: word for word in words}.values(), device="v5p-128")
        largest = sorted(prediction["collectives"], key=lambda collective: -collective["bytes"])[:3]
        volumes = ", ".join(f"{each['kind']} over {each['axis']} {each['bytes'] / 1e9:.1f}" for each in largest)
        exposed = sum(each["exposed_seconds"] for each in prediction["collectives"])
        size = prediction["memory_bytes"]["total"] / 1e9
        step, mfu = prediction["step_seconds"], prediction["mfu"]
        print(f"{name:10} {size:>11.1f} {step:>8.2f} {mfu:>6.1%} {exposed:>9.2f}  {volumes}", flush=True)


def serving(*server: str) -> None:
    """A row for each server, by the compiler."""
    print(f"{'model':12} {'device':8} {'GB a device':>11} {'prompt ms':>9}  steps, ms, with so many sequences")
    for model, device, tensor in [(server[0], server[1], int(server[2]))] if server else SERVED:
        settings = ServePlanSettings(device=device, tensor=tensor, engine=EngineSettings(context=8192))
        prediction = plan_serving(model, settings, lambda _: None)
        steps = ", ".join(f"{rate['sequences']}: {1000 * rate['step_seconds']:.1f}" for rate in prediction["rates"])
        size, first = prediction["memory_bytes"]["total"] / 1e9, 1000 * prediction["rates"][0]["time_to_first_token_s"]
        print(f"{model:12} {device:8} {size:>11.1f} {first:>9.1f}  {steps}", flush=True)


def compiled(device: str, recipe: str, *words: str) -> None:
    """The analytic model beside the compiler."""
    prediction = planned(recipe, *words, device=device)
    print(json.dumps({key: prediction[key] for key in ("verdict_by", "memory_bytes", "memory_bytes_by_model", "step_seconds",
                                                "step_seconds_by_model", "mfu", "collectives", "bound_by")}, indent=1))  # fmt: skip


if __name__ == "__main__":
    kind, *rest = sys.argv[1:] or ["published"]
    {"published": published, "pods": pods, "serving": serving, "compiled": compiled}[kind](*rest)
