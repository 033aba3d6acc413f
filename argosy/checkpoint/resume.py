"""Compares the settings of a run that resumes with those in its checkpoint. Only fields marked `MayChange` may differ.

The settings in a checkpoint are compared, because nobody edits them, and not those in settings.yml.
"""

from collections.abc import Mapping
from typing import Any

from argosy.core.settings import dump, flatten
from argosy.core.settings.schema import MayChange, Settings, marks, shape_of

# (key, value in the checkpoint, new value).
Difference = tuple[str, Any, Any]


def differences(stored: Mapping[str, Any], settings: Settings) -> list[Difference]:
    """Returns the settings that differ from those of a checkpoint although they must not. A setting that did not exist when the
    checkpoint was written counts as having its default.

    Args:
        stored: the settings in the checkpoint.
        settings: the settings of the run that resumes.
    """
    old, now = flatten(stored), flatten(settings)
    out = []
    for key in dict.fromkeys([*now, *old]):
        before = old[key] if key in old else default_of(settings, key)
        after = now.get(key)
        if before != after and not may_change(settings, key):
            out.append((key, before, after))
    return out


def may_change(settings: Settings, key: str) -> bool:
    """Whether a resumed run may have another value of a setting, because its field or a group around it is marked `MayChange`."""
    return any(marks(info, MayChange) for _, info in _path(settings, key))


def default_of(settings: Settings, key: str) -> Any:
    """Returns the default of a setting; None if it has none."""
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
    """Returns (dotted key, field) for each field on the path from the root to a key."""
    out: list[tuple[str, Any]] = []
    names = key.split(".")
    for i, name in enumerate(names):
        if not isinstance(tree, Settings) or name not in type(tree).model_fields:
            break
        out.append((".".join(names[: i + 1]), type(tree).model_fields[name]))
        tree = getattr(tree, name)
    return out
