"""Typed settings that catch typos. They are merged from layers, such as YAML files and `key=value` words, into one frozen tree that
records which layer set each key.

    reading = read_settings(Run, yaml_layer("base.yml"), yaml_layer("tiny.yml"), words_layer(["optimizer=muon"]))
    reading.value.optimizer.ns_steps       reading.origin["optimizer.name"] == "command line"

Later layers override earlier ones. Groups and mappings are merged key by key, and other values are replaced. A layer that changes the
tag of a `Choice` discards what earlier layers set for this choice, because a learning rate for AdamW is wrong for Muon. The mistakes of
all layers are reported together. Other packages import from here what the modules schema, words and plain define.
"""

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from argosy.core.errors import SettingsError
from argosy.core.settings import mistakes
from argosy.core.settings.plain import diff, dump, flatten
from argosy.core.settings.reader import DEFAULT, LayerValue, SettingsReader
from argosy.core.settings.repeats import Repeats
from argosy.core.settings.schema import Also, BrokenRules, Choice, MayChange, Settings
from argosy.core.settings.words import COMMAND_LINE, Mark, SettingsLayer, words_layer, yaml_layer, yaml_text_layer

__all__ = [
    "COMMAND_LINE",
    "DEFAULT",
    "Also",
    "BrokenRules",
    "Choice",
    "Mark",
    "MayChange",
    "Reading",
    "Repeats",
    "Settings",
    "SettingsLayer",
    "diff",
    "dump",
    "flatten",
    "read_settings",
    "words_layer",
    "yaml_layer",
    "yaml_text_layer",
]

T = TypeVar("T", bound=Settings)


@dataclass(frozen=True)
class Reading(Generic[T]):
    """A typed tree of settings, and the origin of each value.

    value: the tree.
    origin: dotted leaf key -> the origin of the layer that set it, or `default`.
    tried: dotted key -> (origin, value) for each layer that set it, oldest first.
    choices: dotted key -> the choice at that key, and the chosen name.
    names: the names from which hints for unknown keys are made.
    """

    value: T
    origin: dict[str, str]
    tried: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    choices: dict[str, tuple[Choice, str]] = field(default_factory=dict)
    names: mistakes.KnownNames = field(default_factory=mistakes.KnownNames)


def read_settings(schema: type[T], *layers: SettingsLayer) -> Reading[T]:
    """Merges layers into a typed tree. Later layers override earlier ones.

    Args:
        schema: the class of the tree.
        layers: the settings to merge.

    Raises:
        SettingsError: there are mistakes. It reports those of all layers together.
    """
    reader = SettingsReader()
    value = reader.group(schema, "", [LayerValue(layer, layer.values) for layer in layers])
    names = mistakes.KnownNames(reader.known, reader.choices, reader.also, reader.notes, schema.elsewhere, schema.all_keys)
    unknown = [mistakes.unknown_key(key, where, names) for key, where in reader.unknown]
    if problems := unknown + reader.problems:
        raise SettingsError(problems, reader.good)
    origin = {key: _origin(reader, key) for key in flatten(value)}
    return Reading(value, origin, reader.tried, reader.choices, names)


def _origin(reader: SettingsReader, key: str) -> str:
    """The origin of the layer that set a key. For a key inside a value that is read as a whole, the origin of this value."""
    whole = key
    while whole not in reader.setter and "." in whole:
        whole = whole.rpartition(".")[0]
    if whole not in reader.setter or (whole != key and any(name.startswith(f"{whole}.") for name in reader.setter)):
        return DEFAULT
    return reader.setter[whole].origin
