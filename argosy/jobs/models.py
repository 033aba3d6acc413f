"""`argosy models`: the parts of a model and their parameters, memory and FLOPs, from its config alone. No weight is drawn or read.

Listing presets imports no jax; describing one builds it, which is free because weights begin as descriptions.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.core.errors import ArgosyError, BadInput, UnknownName
from argosy.core.hub.download import local_model
from argosy.core.progress import Say
from argosy.core.settings import dump
from argosy.models import FAMILIES
from argosy.models.settings import Experts
from argosy.models.vgg import USE, VGGConfig
from argosy.run.settings.recipe_files import preset_config, presets, recipe_layers, recipes

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
# Recurrent states are float32, whatever the type of the cache.
STATE_BYTES = 4
SUBLAYERS = {"attn": "attention", "mlp": "feed-forward"}


@dataclass(frozen=True)
class Cached:
    """The cache of some layers.

    layers: the number of layers.
    token: the cached numbers per token and layer.
    row: the cached numbers per sequence and layer.
    span: the number of tokens that a layer attends to. None means all.
    """

    layers: int
    token: int
    row: int
    span: int | None


def listing() -> dict[str, Any]:
    """Returns the families, and the presets with their numbers of parameters."""
    rows = []
    for name in presets():
        config = preset_config(name)
        rows.append(
            {
                "name": name,
                "family": family_of(config),
                "parameters": config.parameters(),
                "context": getattr(config, "context", None),
            }
        )
    rows.sort(key=lambda row: (row["family"], row["parameters"], row["name"]))
    return {"families": list(FAMILIES), "presets": rows}


def describe(name: str, context: int | None = None) -> dict[str, Any]:
    """Describes a model: sizes, parameters, FLOPs and memory.

    Args:
        name: a preset, or a stored model: a Hub folder, .gguf file, run directory or checkpoint.
        context: the sequence length in tokens for memory and FLOPs. The default is the model's own context.

    Raises:
        BadInput, UnknownName, Damaged: there is no such model, or it does not read tokens.
    """
    from argosy.run.memory import training_bytes

    config = config_named(name)
    if config.inputs != "tokens":
        problem = f"{name} reads {config.inputs}, and models of tokens are described"
        plan = "`argosy plan RECIPE model=NAME` tells parameters, FLOPs and memory"
        raise BadInput(problem, hint=USE if isinstance(config, VGGConfig) else plan)
    tokens = context or config.context
    if tokens > config.context:
        raise BadInput(f"context={tokens} is longer than the {config.context} tokens it was made for")
    model = config.build()
    cached = cache_groups(model)
    parameters = config.parameters()
    work = config.flops(tokens)
    return {
        "name": name,
        "family": family_of(config),
        "config": dump(config),
        "dims": dict(config.dims),
        "parameters": parameters,
        "parameters_active": config.parameters(active=True),
        "experts": dump(config.experts) if config.experts else None,
        "parts": parts(model),
        "context": tokens,
        "flops_per_token": round(work / tokens),
        "flops_per_token_at_1": config.flops(1),
        "flops_per_token_backward": round((config.training_flops(tokens) - work) / tokens),
        "weight_bytes": {dtype: size * parameters for dtype, size in BYTES.items()},
        "cache_bytes_per_token": {d: BYTES[d] * sum(k.layers * k.token for k in cached) for d in ("float32", "bfloat16")},
        "cache_bytes": {d: cache_bytes(cached, tokens, BYTES[d]) for d in ("float32", "bfloat16")},
        "state_bytes": STATE_BYTES * sum(k.layers * k.row for k in cached),
        "window": next((k.span for k in cached if k.span), None),
        "block": _block(model),
        "modules": modules(config),
        "training_bytes": training_bytes(config, tokens) if config.causal else None,
        "recipes": used_by(name) if config.causal else None,
    }


def modules(config: Any) -> list[str]:
    """The paths by which rules name the contractions of a model (`adapter.where`, `quantize`): those of a kind of layer for all of its
    layers."""
    from argosy.adapt.surgery import find
    from argosy.models.parts.stack import Scan

    return list(find(config.build(Scan()), ".*"))


def config_named(name: str, say: Say = lambda _: None) -> Any:
    """Returns the config of a preset or a stored model.

    Raises:
        BadInput, UnknownName, Damaged: there is no such model.
    """
    if name in presets():
        return preset_config(name)
    name = local_model(name, say)
    if Path(name).exists() and not name.endswith((".yml", ".yaml")):
        from argosy.checkpoint.open import open_model

        return open_model(name).config
    if os.sep in name and not Path(name).exists():
        raise BadInput(f"no model at {name}", hint="a preset, Hub folder, .gguf file, run directory, checkpoint or hf:OWNER/NAME")
    if not Path(name).exists():
        raise UnknownName("model", name, presets(), all_names="`argosy models`")
    return preset_config(name)


def family_of(config: Any) -> str:
    """The name under which a config's family is registered."""
    return next(name for name in FAMILIES if FAMILIES[name] is type(config))


def used_by(name: str) -> list[str]:
    """The recipes that train this preset."""
    matches = []
    for recipe in recipes():
        try:
            layers = recipe_layers(recipe)
        except ArgosyError:
            # A recipe with a mistake reports it when it is run.
            continue
        models = [layer.values.get("model") for layer in layers if layer.values.get("model") is not None]
        last = models[-1].get("preset") if models and isinstance(models[-1], Mapping) else models[-1] if models else None
        if last == name:
            matches.append(recipe)
    return matches


# ---------------------------------------------------------------- counting


def cache_groups(model: Any) -> list[Cached]:
    """Returns the caches of a model's layers, grouped by the number of tokens that layers attend to."""
    out: dict[tuple[int, int, int | None], int] = {}
    for spec, layers in model.layers.holds().values():
        token, row = (sum(math.prod(shape) for _, shape in arrays) for arrays in (spec.token, spec.row))
        out[token, row, spec.span] = out.get((token, row, spec.span), 0) + (layers or 1)
    return [Cached(layers, *about) for about, layers in out.items()]


def cache_bytes(cached: Iterable[Cached], tokens: int, size: int) -> int:
    """Size of the cache for one sequence of `tokens` tokens, in bytes; a windowed layer needs no more than its window.

    Args:
        size: bytes of a cached number.
    """
    return sum(k.layers * (size * k.token * min(tokens, k.span or tokens) + STATE_BYTES * k.row) for k in cached)


def parts(model: Any) -> dict[str, int]:
    """Returns the number of parameters by kind of module, summed over layers."""
    from argosy.models.parts.weight import variables

    out: dict[str, int] = {}
    for address, v in variables(model).items():
        part = re.sub(r"^layers\.[^.]+\.", "", address).partition(".")[0]
        name = SUBLAYERS.get(part, "norms" if part.endswith("norm") else part)
        out[name] = out.get(name, 0) + math.prod(v.shape)
    return out


# ---------------------------------------------------------------- the picture


def _block(model: Any) -> str:
    """The model as a text diagram: what a token passes through, with shapes of weights. One box per kind of layer."""
    config, stack = model.config, model.layers
    lines = ["tokens", f"  embed   {config.vocab} x {config.width}", "  │"]
    for indexes in stack.indexes().values():
        layers = [stack.plan[i] for i in indexes]
        reaches = list(dict.fromkeys(_reach(layer.each, config) for layer in layers))
        lines += _box(f" {len(indexes)} x ", _rows(stack.example(layers[0]), reaches))
    if not config.causal:
        return "\n".join([*lines, f"vectors   {config.width}"])
    head = "the embedding again" if config.tied else f"{config.width} x {config.vocab}"
    return "\n".join([*lines, "  norm", f"  head    {head}", "logits"])


def _box(title: str, rows: list[str]) -> list[str]:
    width = max(map(len, rows))
    sides = [f"  │  {row:<{width}} │" for row in rows]
    return [f"  ├─{title:─<{width + 2}}┐", *sides, f"  ├{'─' * (width + 3)}┘", "  │"]


def _rows(layer: Any, reaches: list[str]) -> list[str]:
    """The sublayers of a block in the order in which they run."""
    rows: list[str] = []
    formula = getattr(layer, "formula", "x + {}(norm(x))")
    for sub in (name for name in vars(layer) if name in SUBLAYERS):
        part = getattr(layer, sub)
        shapes = {name: getattr(getattr(part, name), "w", None) for name in vars(part)}
        described = [f"{name} {'x'.join(map(str, w.shape))}" for name, w in shapes.items() if w is not None]
        label = getattr(part, "called", SUBLAYERS[sub])
        rows += [""] * bool(rows) + [formula.format(label), f"    {'  '.join(described)}"]
        if isinstance(experts := getattr(part, "how", None), Experts):
            rows.append(f"    {_routing(experts)}")
        if (index := getattr(part, "index", None)) is not None:
            sizes = index.q.sizes
            rows.append(f"    an indexer of {sizes['I']} heads of {sizes['J']} selects {index.topk:,} tokens")
        rows += [f"    {reach}" for reach in reaches] if hasattr(part, "holds") else []
    return rows


def _routing(experts: Experts) -> str:
    """How the experts of a token are chosen."""
    groups = f" in {experts.kept_groups} of {experts.groups} groups" if experts.groups > 1 else ""
    shared = f", beside a shared expert of width {experts.shared}" if experts.shared else ""
    return f"{experts.active} of {experts.count} experts{groups}, by {experts.score.replace('_', ' of the ')}{shared}"


def _reach(each: Any, config: Any) -> str:
    """How far back a layer attends, and how its positions are rotated."""
    span, rope = getattr(each, "window", None), getattr(each, "rope", None)
    far = f"its chunk of {span:,}" if getattr(each, "chunked", False) else f"window {span:,}" if span else None
    seen = far or ("causal" if config.causal else "both ways")
    seen += f", rope {rope.base:,.0f}{_scaling(rope)}" if rope else ""
    temper = getattr(each, "temper", None)
    return seen if temper is None else f"{seen}, queries grow every {temper.floor:,} tokens"


def _scaling(rope: Any) -> str:
    if rope.scaling is None:
        return ""
    factor = getattr(rope.scaling, "factor", None)
    return f", {type(rope.scaling).__name__.lower()} scaling" + (f" x{factor:g}" if factor else "")
