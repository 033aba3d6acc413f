"""Finds, swaps, freezes and grafts modules and weights of a model, which are selected by a pattern.

A pattern is a regular expression that must match the complete dotted name. Modules of layers have two names: their own, such as
"layers.3.attn.q" (if layers are unrolled), and the name of their kind, such as "layers.block.attn.q" (unrolled or scanned). So a
pattern for the kind works in any layout. Every function returns the names that it matched, and raises an error if there are none,
because patterns that silently match nothing are the most common mistake here.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from argosy.core.counts import plural
from argosy.core.errors import BadInput, nearest
from argosy.models.parts.einsum import Contraction
from argosy.models.parts.stack import Stack
from argosy.models.parts.weight import Codes, Frozen, Leaves, put, variable, variables


def find(model: nnx.Module, where: str, of: type | tuple[type, ...] = Contraction) -> dict[str, Any]:
    """Returns `{name: module}` for the modules of a type whose names match. Only the outermost modules are returned (a LoRA, not the
    contraction inside), and none whose output only selects something (`Contraction.chooses`).

    Raises:
        BadInput: nothing matches, or the pattern is not a regular expression.
    """
    rule = _compiled(where)
    modules: dict[str, Any] = {}
    names: list[str] = []
    choosing = False
    for path, node in sorted(nnx.iter_modules(model), key=lambda item: len(item[0])):
        name = ".".join(map(str, path))
        if not isinstance(node, of) or any(name.startswith(outer + ".") for outer in modules):
            continue
        kind = _kind_name(model, name)
        matches = bool(rule.fullmatch(name) or rule.fullmatch(kind))
        if getattr(node, "chooses", False):
            choosing |= matches
            continue
        names.append(kind)
        if matches:
            modules[name] = node
    if choosing and not modules:
        raise BadInput(f"`{where}`: everything that matches only selects", hint="it is neither trained nor adapted")
    if not modules:
        raise BadInput(f"nothing in the model matches `{where}`", hint=nearest(where, set(names)))
    return modules


def find_parts(model: nnx.Module, where: str) -> list[str]:
    """Returns the names of the modules that match the pattern `where`, such as "embed", "norm" or "layers.3.attn_norm". Modules of
    any type count, if they contain weights.
    Only the outermost modules are returned.

    Raises:
        BadInput: nothing matches, or the pattern is not a regular expression.
    """
    rule, holding = _compiled(where), [f"{address}." for address in variables(model)]
    parts, names = list[str](), set[str]()
    for path, _ in sorted(nnx.iter_modules(model), key=lambda item: len(item[0])):
        name = ".".join(map(str, path))
        if not name or any(inside(name, outer) for outer in parts) or not any(a.startswith(name + ".") for a in holding):
            continue
        names.add(_kind_name(model, name))
        if _matches(model, rule, name):
            parts.append(name)
    if not parts:
        raise BadInput(f"nothing in the model matches `{where}`", hint=nearest(where, names))
    return parts


def inside(name: str, outer: str) -> bool:
    """Whether a dotted name is `outer`, or the name of a module or weight inside `outer`."""
    return name == outer or name.startswith(outer + ".")


def swap(
    model: nnx.Module, where: str, make: Callable[[Any], Any], of: type | tuple[type, ...] = Contraction
) -> list[str]:
    """Replaces every matching contraction of a model by `make(contraction)`, in place. Returns the names, at least one."""
    modules = find(model, where, of)
    for name, node in modules.items():
        put_at(model, name, make(node))
    return list(modules)


def at(model: nnx.Module, name: str) -> Any:
    """Returns the module of this dotted name."""
    node: Any = model
    for step in name.split("."):
        node = getattr(node, step)
    return node


def put_at(model: nnx.Module, name: str, module: Any) -> None:
    way, _, last = name.rpartition(".")
    setattr(at(model, way) if way else model, last, module)


def freeze(model: nnx.Module, where: str) -> list[str]:
    """Freezes the parameters whose names match, in place. Returns the names, at least one."""
    return _retype(model, where, nnx.Param, Frozen)


def thaw(model: nnx.Module, where: str) -> list[str]:
    """Unfreezes the frozen parameters whose names match, in place. Returns the names, at least one. Quantized weights and their scales
    stay frozen."""
    return _retype(model, where, Frozen, nnx.Param)


def graft(model: nnx.Module, leaves: Mapping[str, Any], where: str = ".*") -> list[str]:
    """Copies the parameters of another model whose names match into this one. Other parameters are unchanged, and `fill` initializes
    those that are still descriptions. Returns the copied names, at least one.

    Args:
        leaves: the parameters of the other model, by name.

    Raises:
        BadInput: nothing matches, or a shape differs.
    """
    rule, by_address = _compiled(where), variables(model)
    copied: Leaves = {a: v for a, v in leaves.items() if a in by_address and _matches(model, rule, a)}
    if not copied:
        raise BadInput(f"no weight of both models matches `{where}`", hint=nearest(where, by_address))
    wrong = [f"{a}: {tuple(v.shape)} into {tuple(by_address[a].shape)}" for a, v in copied.items() if v.shape != by_address[a].shape]
    if wrong:
        raise BadInput(f"{plural(len(wrong), 'weight', 'differs', 'differ')} in shape: {'; '.join(wrong[:4])}")
    put(model, copied)
    return list(copied)


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
        put_at(model, address, new(v.get_value(), **_weight_metadata(v.get_metadata())))
        done.append(address)
    if quantized and not done:
        raise BadInput(f"`{where}` matches quantized weights", hint="quantized weights are never trained: put adapters on them")
    if not done:
        raise BadInput(
            f"no weight matches `{where}`", hint=nearest(where, {_kind_name(model, a) for a in variables(model)})
        )
    return done


def _weight_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {k: metadata[k] for k in ("draw", "meaning") if k in metadata}


def _matches(model: nnx.Module, rule: re.Pattern[str], name: str) -> bool:
    return bool(rule.fullmatch(name) or rule.fullmatch(_kind_name(model, name)))


def _kind_name(model: nnx.Module, name: str) -> str:
    """Returns the name of the kind: "layers.block.attn.q" for "layers.3.attn.q", and for "layers.block_2.attn.q", which belongs to a
    later group of scanned layers."""
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
        raise BadInput(f"`{where}` is not a regular expression: {e}") from None
