"""Find, swap, freeze, graft: operations on the parts of a model, named by pattern.

A pattern is a regular expression over the whole dotted name. Layers answer to two names: their own, "layers.3.attn.q" (where
layers are unrolled), and that of their kind, "layers.block.attn.q" (in either layout), so a rule written for the kind works
however the model lies in memory. Every function returns what it matched and raises where that is nothing: a rule that
matches nothing is the silent mistake of this trade.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from argosy.core.errors import BadInput, nearest
from argosy.models.parts.einsum import Contraction
from argosy.models.parts.stack import Stack
from argosy.models.parts.weight import Codes, Frozen, Leaves, put, variable, variables


def find(model: nnx.Module, where: str, of: type | tuple[type, ...] = Contraction) -> dict[str, Any]:
    """`{name: module}` of the modules of a type whose name matches; outermost ones only (a LoRA, not what it wraps), and
    none that only a choice follows from (`Contraction.chooses`).

    Raises:
        BadInput: nothing matches, or the pattern is no regular expression.
    """
    rule = _compiled(where)
    found: dict[str, Any] = {}
    names: list[str] = []
    choosing = False
    for path, node in sorted(nnx.iter_modules(model), key=lambda item: len(item[0])):
        name = ".".join(map(str, path))
        if not isinstance(node, of) or any(name.startswith(outer + ".") for outer in found):
            continue
        kind = _kind_name(model, name)
        matches = bool(rule.fullmatch(name) or rule.fullmatch(kind))
        if getattr(node, "chooses", False):
            choosing |= matches
            continue
        names.append(kind)
        if matches:
            found[name] = node
    if choosing and not found:
        raise BadInput(f"`{where}`: only a choice follows from what matches", hint="it is neither trained nor adapted")
    if not found:
        raise BadInput(f"nothing in the model matches `{where}`", hint=nearest(where, set(names)))
    return found


def swap(
    model: nnx.Module, where: str, make: Callable[[Any], Any], of: type | tuple[type, ...] = Contraction
) -> list[str]:
    """Replaces every contraction that matches by `make(contraction)`; returns their names, never none."""
    found = find(model, where, of)
    for name, node in found.items():
        put_at(model, name, make(node))
    return list(found)


def at(model: nnx.Module, name: str) -> Any:
    """The module of this dotted name."""
    node: Any = model
    for step in name.split("."):
        node = getattr(node, step)
    return node


def put_at(model: nnx.Module, name: str, module: Any) -> None:
    way, _, last = name.rpartition(".")
    setattr(at(model, way) if way else model, last, module)


def freeze(model: nnx.Module, where: str) -> list[str]:
    """Weights whose address matches are no longer trained; returns their addresses, never none."""
    return _retype(model, where, nnx.Param, Frozen)


def thaw(model: nnx.Module, where: str) -> list[str]:
    """Frozen weights whose address matches are trained again; returns their addresses, never none. Quantized weights, their
    scales included, stay as they are."""
    return _retype(model, where, Frozen, nnx.Param)


def graft(model: nnx.Module, leaves: Mapping[str, Any], where: str = ".*") -> list[str]:
    """Puts the weights of another model whose address matches into this one; the rest stay as they are, and what is still
    a description is drawn by `fill`. Returns the addresses, never none.

    Raises:
        BadInput: nothing matches, or a shape differs.
    """
    rule, own = _compiled(where), variables(model)
    chosen: Leaves = {a: v for a, v in leaves.items() if a in own and _matches(model, rule, a)}
    if not chosen:
        raise BadInput(f"no weight of both models matches `{where}`", hint=nearest(where, own))
    wrong = [f"{a}: {tuple(v.shape)} into {tuple(own[a].shape)}" for a, v in chosen.items() if v.shape != own[a].shape]
    if wrong:
        raise BadInput(f"{len(wrong)} weights differ in shape: {'; '.join(wrong[:4])}")
    put(model, chosen)
    return list(chosen)


def _retype(model: nnx.Module, where: str, old: type[nnx.Variable], new: type[nnx.Variable]) -> list[str]:
    rule = _compiled(where)
    done, quantized = [], False
    for address in variables(model):
        v = variable(model, address)
        if not (isinstance(v, old) and _matches(model, rule, address)):
            continue
        if isinstance(v, Codes):
            quantized = True
            continue
        put_at(model, address, new(v.get_value(), **_own(v.get_metadata())))
        done.append(address)
    if quantized and not done:
        raise BadInput(f"`{where}`: what matches is quantized", hint="quantized weights are never trained: put adapters on them")
    if not done:
        raise BadInput(
            f"no weight matches `{where}`", hint=nearest(where, {_kind_name(model, a) for a in variables(model)})
        )
    return done


def _own(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {k: metadata[k] for k in ("draw", "meaning") if k in metadata}


def _matches(model: nnx.Module, rule: re.Pattern[str], name: str) -> bool:
    return bool(rule.fullmatch(name) or rule.fullmatch(_kind_name(model, name)))


def _kind_name(model: nnx.Module, name: str) -> str:
    """ "layers.3.attn.q" as "layers.block.attn.q", and so "layers.block_2.attn.q", of a later group of scanned layers."""
    node: Any = model
    parts = name.split(".")
    for i, part in enumerate(parts):
        if isinstance(node, Stack) and part.isdigit():
            return ".".join([*parts[:i], node.plan[int(part)].kind, *parts[i + 1 :]])
        if isinstance(node, Stack) and node.run.stacked and part in (stored := node.stored()):
            return ".".join([*parts[:i], stored[part][0], *parts[i + 1 :]])
        node = getattr(node, part, None)
    return name


def _compiled(where: str) -> re.Pattern[str]:
    try:
        return re.compile(where)
    except re.error as e:
        raise BadInput(f"`{where}` is no regular expression: {e}") from None
