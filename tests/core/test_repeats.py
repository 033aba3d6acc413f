"""Keys that may be repeated: on the command line, in YAML, in Python and in editors. A root like that of a run."""

import json
from typing import Annotated, Any

import jsonschema
import pytest
import yaml
from pydantic import Field, ValidationError

from argosy.core.errors import SettingsError
from argosy.core.settings import Repeats, Settings, dump, read_settings, words_layer, yaml_text_layer
from argosy.core.settings.explain import annotated_yaml, explain, json_schema, settings_reference


class Reward(Settings):
    of: str
    """Where it comes from."""
    weight: float = Field(1.0, gt=0)


class Root(Settings):
    reward: Annotated[list[Reward], Repeats("of")] = Field(default_factory=list)
    """Rewards, which are added."""
    tags: Annotated[list[str], Repeats()] = Field(default_factory=list)
    steps: int = 1
    names: list[str] = Field(default_factory=list)


def read(*words: str, text: str = "") -> Root:
    return read_settings(Root, yaml_text_layer(text, "recipe.yml"), words_layer(words)).value


def rewards(*words: str, text: str = "") -> list[tuple[str, float]]:
    return [(reward.of, reward.weight) for reward in read(*words, text=text).reward]


def problems(*words: str, text: str = "") -> str:
    with pytest.raises(SettingsError) as caught:
        read(*words, text=text)
    return str(caught.value)


def test_repeated_words_add_up_in_their_order():
    assert rewards("reward=a.py:f", "steps=2", "reward=b.py:g") == [("a.py:f", 1), ("b.py:g", 1)]
    assert rewards("reward=a.py:f") == [("a.py:f", 1)]
    assert rewards() == []
    whole, plain = "reward={of: a.py:f, weight: .5}", "reward=b.py:g"
    assert rewards(whole, plain) == [("a.py:f", 0.5), ("b.py:g", 1)]
    assert rewards(plain, whole) == [("b.py:g", 1), ("a.py:f", 0.5)]
    assert rewards(plain, whole, "reward=c", whole) == [("b.py:g", 1), ("a.py:f", 0.5), ("c", 1), ("a.py:f", 0.5)]


@pytest.mark.parametrize("word", ["reward={of: b, weight: 0.5}", "reward=[{of: b, weight: 0.5}]"])
def test_an_item_with_settings_of_its_own(word):
    assert rewards("reward=a", word, "reward=[c, d]") == [("a", 1), ("b", 0.5), ("c", 1), ("d", 1)]
    assert rewards(word, word) == [("b", 0.5)] * 2


@pytest.mark.parametrize("text", ["reward: a.py:f", "reward: [a.py:f]", "reward:\n  - of: a.py:f", "reward: {of: a.py:f}"])
def test_the_same_in_yaml(text):
    assert rewards(text=text) == [("a.py:f", 1)]


def test_yaml_mixes_texts_and_mappings():
    assert rewards(text="reward: [a, {of: b, weight: 2}, c]") == [("a", 1), ("b", 2), ("c", 1)]


def test_words_replace_the_list_of_a_recipe():
    assert rewards("reward=c", text="reward: [a, b]") == [("c", 1)]
    assert rewards("reward=[]", text="reward: [a, b]") == []
    assert rewards("steps=3", text="reward: [a, b]") == [("a", 1), ("b", 1)]


def test_text_stays_as_it_was_written():
    """As for any text: `no` is not false, 007 not 7."""
    assert rewards("reward=no", "reward=007", "reward=[010, {of: 1e3}]") == [("no", 1), ("007", 1), ("010", 1), ("1e3", 1)]
    assert rewards(text="reward: [off, {of: 0x1}]") == [("off", 1), ("0x1", 1)]


def test_lists_of_texts_repeat_too_and_other_keys_do_not():
    settings = read("tags=a", "tags=[no, c]", "names=[a]", "names=[b]", "steps=3", "steps=4")
    assert (settings.tags, settings.names, settings.steps) == (["a", "no", "c"], ["b"], 4)
    assert "`names` should be a list" in problems("names=a")


def test_mistakes_name_the_item():
    assert "unknown setting `reward.1.wieght`" in (text := problems("reward=a", "reward={of: b, wieght: 1}"))
    assert "did you mean `reward.1.weight`?" in text
    assert "recipe.yml:3" in problems(text="reward:\n  - a\n  - weight: -1")
    assert "`reward.0.weight` should be greater than 0" in problems("reward={of: a, weight: -1}")
    assert "`reward.1.of`" in problems("reward=a", "reward={weight: 1}")


@pytest.mark.parametrize("words", [["reward=a", "reward.0.weight=0.5"], ["reward.0.weight=0.5"], ["reward.weight=0.5", "reward=a"]])
def test_a_part_of_an_item_is_refused_and_nothing_is_dropped(words):
    text = problems(*words)
    assert "an item of a list has no key of its own on the command line" in text
    assert 'reward="{of: ..., weight: ...}"' in text
    assert text.count("error:") == 1


def test_none_is_no_list():
    assert "`reward` is a list" in problems("reward=none")


def test_reading_again_gives_the_same():
    reading = read_settings(Root, words_layer(["reward=no", "reward={of: b, weight: 2}"]))
    assert read_settings(Root, yaml_text_layer(annotated_yaml(reading), "settings.yml")).value == reading.value
    assert yaml.safe_load(annotated_yaml(reading))["reward"] == dump(reading.value)["reward"]
    assert reading.origin["reward.0.of"] == reading.origin["reward.1.weight"] == "command line"
    assert explain(reading, "reward.1.weight").startswith("reward.1.weight = 2")


def test_in_python():
    assert Root(reward="a").reward == Root(reward=["a"]).reward == Root(reward=[Reward(of="a")]).reward == [Reward(of="a")]
    with pytest.raises(ValidationError, match="weight"):
        Root(reward={"of": "a", "weight": -1})


def test_editors_accept_every_way():
    schema = json_schema(Root)

    def accepts(value: Any) -> bool:
        return jsonschema.Draft202012Validator(schema).is_valid({"reward": value})

    assert all(map(accepts, ["a", ["a"], {"of": "a"}, [{"of": "a", "weight": "25k"}, "b"], []]))
    assert not any(map(accepts, [[["a"]], {"fo": "a"}, [{"of": "a", "weight": -1}]]))
    json.dumps(schema)


def test_the_reference_lists_the_item():
    assert "`reward.*.weight`" in settings_reference(Root)
