"""Reads YAML files and `key=value` words into layers, which `core.settings` merges into a typed tree.

Beside the value of a plain scalar, a layer keeps its text and its line, because only the type of the setting decides what the text
means: `lang: no` is text for a setting of text, and false for a bool. `007` stays `007`. Errors name the line.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from argosy.core.errors import BadInput, SettingsError, UserError
from argosy.core.settings.scalars import scalar

COMMAND_LINE = "command line"
# The origin of settings that are passed to `argosy.fit` in Python.
CALL = "fit(...)"
# The key under which a group stores a value that was given to the group itself, as in `optimizer=muon optimizer.ns_steps=6`. YAML 1.1
# uses the same key for this.
SELF = "="
MOST_LEVELS = 50
# A limit, because aliases of aliases let nine lines of YAML stand for a billion values.
MOST_NODES = 100_000

_KEY = re.compile(r"[^\s.=-][^\s.=]*(\.[^\s.=]+)*")


@dataclass(frozen=True)
class Mark:
    """The text and the line with which a value was written.

    text: the text of a plain scalar; None for other values.
    line: the line in a file, counted from 1; None: it is from no file.
    """

    text: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class SettingsLayer:
    """The settings of one source, to be merged with others.

    origin: the name of the source, for errors.
    values: the settings.
    marks: dotted key -> how its value was written.
    words: for a layer of `key=value` words, dotted key -> all its values with their marks, in order, because keys may be repeated
        (`core.settings.repeats`).
    """

    origin: str
    values: Mapping[str, Any]
    marks: Mapping[str, Mark] = field(default_factory=dict)
    words: Mapping[str, Sequence[tuple[Any, Mapping[str, Mark]]]] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """The place where a key is set: `tiny.yml:12`, or only the origin if there are no lines."""
        mark = self.marks.get(key)
        return f"{self.origin}:{mark.line}" if mark and mark.line else self.origin

    def text(self, key: str) -> str | None:
        """The text of a plain scalar as it was written; None: the value of the key is no plain scalar."""
        mark = self.marks.get(key)
        return mark.text if mark else None

    def under(self, group: str) -> "SettingsLayer":
        """The same layer with all keys moved under `group`, so that a model preset becomes a layer of a run."""
        return SettingsLayer(self.origin, {group: self.values}, {f"{group}.{key}": mark for key, mark in self.marks.items()})


# ---- YAML files


# The C loader is ten times as fast, but PyYAML may have been built without it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Text(_Loader):
    """A loader that keeps plain scalars as text."""


_Text.yaml_implicit_resolvers = {}


def yaml_layer(path: str | Path, origin: str | None = None) -> SettingsLayer:
    """Reads a YAML file of settings.

    Args:
        path: the file.
        origin: the name of the layer in errors; None: the name of the file.

    Raises:
        BadInput: there is no such file, or it is not UTF-8, not YAML, or not a mapping.
        SettingsError: there are duplicate keys or YAML tags. Each is reported with its line.
    """
    path = Path(path)
    return yaml_text_layer(_read(path), origin or path.name)


def yaml_text_layer(text: str, origin: str) -> SettingsLayer:
    """Reads the text of a YAML file of settings, as `yaml_layer` does."""
    node = _parse(text, f"in {origin}", lines=True)
    if node is None:
        return SettingsLayer(origin, {})
    if not isinstance(node, yaml.MappingNode):
        raise BadInput("a settings file holds `key: value` lines", where=f"in {origin}:{node.start_mark.line + 1}")
    reader = _NodeReader(origin, lines=True)
    values = reader.read(node, "")
    if reader.problems:
        raise SettingsError(reader.problems)
    return SettingsLayer(origin, values, reader.marks)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput("a settings file is UTF-8 text", where=f"in {path}, byte {error.start}") from None
    except FileNotFoundError:
        raise BadInput(f"no settings file `{path}`", hint=_close_file(path)) from None
    except OSError as error:
        raise BadInput(f"cannot read `{path}`: {(error.strerror or str(error)).lower()}") from None


def _close_file(path: Path) -> str | None:
    """A hint with a file of a similar name in the same directory. Files of other users are ignored, since a temporary directory holds
    the files of all users."""
    try:
        files = [p.name for p in path.parent.glob("*.y*ml") if os.name == "nt" or p.stat().st_uid == os.getuid()]
    except OSError:
        return None
    close = get_close_matches(path.name, files, n=1, cutoff=0.75)
    return f"did you mean `{path.parent / close[0]}`?" if close else None


def _parse(text: str, where: str, lines: bool) -> yaml.Node | None:
    try:
        depth = 0
        # The depth is checked first, because composing recurses in C: 90,000 brackets would crash the process.
        for event in yaml.parse(text, _Text):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_LEVELS:
                raise BadInput("settings nested too deeply", where=where)
        return yaml.compose(text, _Text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark and lines else ""
        raise BadInput(f"not YAML: {error.problem or error.context}", where=where + line) from None
    except yaml.YAMLError as error:
        raise BadInput(f"not YAML: {str(error).splitlines()[0]}", where=where) from None


class _NodeReader:
    """Converts YAML nodes to plain values, and collects their marks and problems."""

    def __init__(self, origin: str, lines: bool):
        self.origin, self.lines = origin, lines
        self.marks: dict[str, Mark] = {}
        self.problems: list[UserError] = []
        self.nodes = 0

    def read(self, node: yaml.Node, key: str, ancestors: tuple[int, ...] = ()) -> Any:
        """The value of the node at the dotted `key`. `ancestors` are the ids of the nodes around it."""
        self.nodes += 1
        if id(node) in ancestors or self.nodes > MOST_NODES:
            raise BadInput("YAML aliases that expand without end", where=self._location(node))
        ancestors = (*ancestors, id(node))
        line = node.start_mark.line + 1 if self.lines else None
        plain = isinstance(node, yaml.ScalarNode) and not node.style
        if key:
            self.marks[key] = Mark(node.value if plain else None, line)
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.rpartition(":")[2] not in ("str", "seq", "map"):
            self._problem(f"a YAML tag, `{node.tag}`", node, "write the plain value; quotes make text of it")
        if isinstance(node, yaml.ScalarNode):
            return scalar(node.value) if plain else node.value
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, f"{key}.{i}", ancestors) for i, item in enumerate(node.value)]
        return self._mapping(node, key, ancestors)

    def _mapping(self, node: yaml.Node, key: str, ancestors: tuple[int, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode):
                self._problem("a key that is not a name", name, "a key is a word followed by a colon")
                continue
            if name.value in values:
                self._problem(f"`{_dotted(key, name.value)}` is set twice", name, "keep one of the two")
            values[name.value] = self.read(value, _dotted(key, name.value), ancestors)
        return values

    def _location(self, node: yaml.Node) -> str:
        return f"in {self.origin}:{node.start_mark.line + 1}" if self.lines else f"in {self.origin}"

    def _problem(self, problem: str, node: yaml.Node, hint: str) -> None:
        self.problems.append(BadInput(problem, where=self._location(node), hint=hint))


def _dotted(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


# ---- words


def words_layer(words: Iterable[str], origin: str = COMMAND_LINE) -> SettingsLayer:
    """Reads `a.b=value` words as one layer. A value is a scalar or a flow collection, `[1, 2]`. A later word replaces an earlier word
    with the same key, unless the key `Repeats`.

    Raises:
        SettingsError: some words are not `key=value`. It reports all of them.
    """
    values: dict[str, Any] = {}
    marks: dict[str, Mark] = {}
    words_by_key: dict[str, list[tuple[Any, Mapping[str, Mark]]]] = {}
    problems: list[UserError] = []
    words, apart = _join_spaced_words(list(words))
    for key, text in apart:
        hint = f"write `{key}={text}` without blanks"
        problems.append(BadInput(f"blanks around the `=` of `{key}`", where=_location(origin), hint=hint))
    for word in words:
        key, equals, text = word.partition("=")
        if problem := _misspelt(word, key, equals, text, origin):
            problems.append(problem)
            continue
        try:
            value, its_marks = _value(key, text, origin)
        except SettingsError as error:
            problems += error.problems
        except UserError as error:
            problems.append(error)
        else:
            marks |= its_marks
            words_by_key.setdefault(key, []).append((value, its_marks))
            # The value is copied, because a later word may change the tree, and a key that `Repeats` needs each word unchanged.
            _put(values, key.split("."), deepcopy(value))
    if problems:
        raise SettingsError(problems)
    return SettingsLayer(origin, values, marks, words_by_key)


def _location(origin: str) -> str:
    return f"on the {origin}" if origin == COMMAND_LINE else f"in {origin}"


def _join_spaced_words(words: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Finds settings with blanks around `=`: `steps = 5`, `steps= 5` and `steps =5`. Returns the other words, and the (key, value) of
    each such setting."""
    good: list[str] = []
    apart: list[tuple[str, str]] = []
    at = 0
    while at < len(words):
        for count in (3, 2):
            part = words[at : at + count]
            key, _, text = "".join(part).partition("=")
            is_split = part[1:2] == ["="] if count == 3 else part[0].endswith("=") or part[-1].startswith("=")
            if is_split and _KEY.fullmatch(key) and text and "=" not in text:
                apart.append((key, text))
                at += count
                break
        else:
            good.append(words[at])
            at += 1
    return good, apart


def _misspelt(word: str, key: str, equals: str, text: str, origin: str) -> UserError | None:
    where = _location(origin)
    if key.startswith("-"):
        plain = f"{key.lstrip('-').replace('-', '_')}={text or 'value'}"
        return BadInput(f"unknown option `{key}`", where=where, hint=f"settings have no dashes: `{plain}`")
    if not equals:
        return BadInput(f"`{word}` is not a setting", where=where, hint="write `key=value`, such as `steps=100`")
    if not _KEY.fullmatch(key):
        return BadInput(f"`{word}` names no setting", where=where, hint="join names by dots: `optimizer.name=muon`")
    if not text:
        hint = f"write `{key}=none` for none, `{key}=\"''\"` for empty text"
        return BadInput(f"`{key}=` has no value", where=where, hint=hint)
    return None


def _value(key: str, text: str, origin: str) -> tuple[Any, dict[str, Mark]]:
    """The value of a word, and its marks. The text is YAML if it begins with a bracket or quote, and otherwise one plain scalar."""
    if text[0] not in "[{\"'":
        return scalar(text), {key: Mark(text)}
    reader = _NodeReader(f"`{key}` {_location(origin)}", lines=False)
    node = _parse(text, f"in {reader.origin}", lines=False)
    value = reader.read(node, key) if node else None
    if reader.problems:
        raise SettingsError(reader.problems)
    return value, reader.marks


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    """Sets one value in a tree, in place. The name of a choice and its settings may come in either order."""
    *groups, leaf = path
    for group in groups:
        inner = tree.setdefault(group, {})
        if not isinstance(inner, dict):
            inner = tree[group] = {SELF: inner}
        tree = inner
    if isinstance(value, dict) and value and leaf in tree:
        for name, item in value.items():
            _put(tree, [leaf, name], item)
    elif isinstance(tree.get(leaf), dict) and not isinstance(value, dict):
        tree[leaf][SELF] = value
    else:
        tree[leaf] = value
