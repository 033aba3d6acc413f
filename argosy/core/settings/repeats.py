"""Keys that may be given several times on the command line. Their words are joined to a list.

    reward: Annotated[list[Reward], Repeats("of")] = Field(default_factory=list)

    reward=a.py:f reward=b.py:g                       two items
    reward=a.py:f reward="{of: b.py:g, weight: 0.5}"  two items, of which the second has another setting
    reward=[a.py:f, b.py:g]                           two items in one word, or in YAML

For any other key, a later word replaces an earlier one. A later layer replaces the list of an earlier layer: a list on the command line
replaces that of the recipe.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import core_schema

from argosy.core.errors import BadInput, UserError
from argosy.core.settings.schema import Settings
from argosy.core.settings.words import Mark, SettingsLayer


class Repeats:
    """Marks a key whose value is a list, and that may be repeated. A value that is no list becomes a list of one item.

    item: the key of an item for which a plain value stands; None: items are plain values.
    """

    def __init__(self, item: str | None = None):
        self.item = item

    def merged(self, key: str, layer: SettingsLayer, value: Any) -> tuple[SettingsLayer, Any]:
        """Joins the values of the key in one layer to one list. Returns the layer with the marks of the items, and the list. A last
        value of None gives None."""
        words = layer.words.get(key) or [(value, layer.marks)]
        if value is None or words[-1][0] is None:
            return layer, None
        items: list[Any] = []
        marks = {name: mark for name, mark in layer.marks.items() if not name.startswith(f"{key}.")}
        for word, word_marks in words:
            parts = list(word) if isinstance(word, list | tuple) else [word]
            for number, part in enumerate(parts):
                before = f"{key}.{number}" if isinstance(word, list | tuple) else key
                at = f"{key}.{len(items)}"
                items.append(self._item(part))
                marks |= dict(_moved(word_marks, before, at))
                if items[-1] is not part and before in word_marks:
                    marks[f"{at}.{self.item}"] = word_marks[before]
        return SettingsLayer(layer.origin, layer.values, marks, layer.words), items

    def misplaced(self, key: str, layer: SettingsLayer) -> Iterator[UserError]:
        """Yields errors for words that set a part of an item, such as `reward.0.weight`. Items have no numbers until all words are
        read."""
        for word in layer.words:
            if word.startswith(f"{key}."):
                leaf = word.rpartition(".")[2]
                example = f'{key}="{{{self.item}: ..., {leaf}: ...}}"' if self.item else f"{key}=[...]"
                problem = f"`{word}`: an item of a list has no key of its own on the {layer.origin}"
                yield BadInput(problem, where=f"set by {layer.origin}", hint=f"write the whole item: `{example}`")

    def _item(self, value: Any) -> Any:
        plain = self.item is not None and not isinstance(value, Mapping | Settings | list | tuple)
        return {self.item: value} if plain else value

    def _listed(self, value: Any) -> Any:
        if value is None:
            return value
        return [self._item(item) for item in (value if isinstance(value, list | tuple) else [value])]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self._listed, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        array_schema = dict(handler(schema["schema"]))
        item_schema = array_schema.get("items", {})
        item = {"anyOf": [item_schema, {"type": ["string", "number", "boolean"]}]} if self.item else item_schema
        return {"anyOf": [{**array_schema, "items": item}, item]}


def _moved(marks: Mapping[str, Mark], before: str, after: str) -> Iterator[tuple[str, Mark]]:
    """Yields the marks of one key, and of all keys below it, with this key replaced by another."""
    for name, mark in marks.items():
        if name == before or name.startswith(f"{before}."):
            yield after + name[len(before) :], mark
