"""What may differ when a run resumes: the fields marked `MayChange`, and nothing else.

A run is compared with the settings in its checkpoint, which nobody edits, and never with settings.yml.
"""

from collections.abc import Mapping
from typing import Any

from argosy.core.settings import dump, flatten
from argosy.core.settings.schema import MayChange, Settings, marks, shape_of

# Key, the checkpoint's value, the value asked for.
Difference = tuple[str, Any, Any]


def differences(stored: Mapping[str, Any], settings: Settings) -> list[Difference]:
    """The settings that differ from a checkpoint's and must not. A setting that did not exist when the checkpoint was written
    counts as its default."""
    old, now = flatten(stored), flatten(settings)
    out = []
    for key in dict.fromkeys([*now, *old]):
        before = old[key] if key in old else default_of(settings, key)
        after = now.get(key)
        if before != after and not may_change(settings, key):
            out.append((key, before, after))
    return out


def may_change(settings: Settings, key: str) -> bool:
    """Whether a resumed run may have another value here: the field or a group around it is marked `MayChange`."""
    return any(marks(info, MayChange) for _, info in _path(settings, key))


def default_of(settings: Settings, key: str) -> Any:
    """The default of a setting; None if it has none."""
    *_, (name, info) = _path(settings, key) or [("", None)]
    if info is None or info.is_required():
        return None
    default = info.get_default(call_default_factory=True)
    kind = shape_of(info)
    if kind.kind == "choice":
        return default if key == f"{name}.{kind.of.tag}" and isinstance(default, str) else None
    if name != key:
        return None
    return dump(default) if isinstance(default, Settings) else default


def _path(tree: Any, key: str) -> list[tuple[str, Any]]:
    """(dotted key, field) of each field on the path to a key, from the root."""
    out: list[tuple[str, Any]] = []
    names = key.split(".")
    for i, name in enumerate(names):
        if not isinstance(tree, Settings) or name not in type(tree).model_fields:
            break
        out.append((".".join(names[: i + 1]), type(tree).model_fields[name]))
        tree = getattr(tree, name)
    return out
