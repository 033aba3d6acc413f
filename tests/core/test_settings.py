"""Layers to one typed tree: precedence, choices, provenance, and every mistake at once."""

import json
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError, field_validator, model_validator

from argosy.core.errors import BadInput, SettingsError
from argosy.core.registry import Registry
from argosy.core.settings import (
    Also,
    Choice,
    Settings,
    SettingsLayer,
    diff,
    dump,
    flatten,
    read_settings,
    schema,
    words_layer,
    yaml_layer,
)
from argosy.core.settings.explain import annotated_yaml, explain, json_schema, settings_reference
from argosy.core.settings.schema import documented_fields, shape_of


class AdamW(Settings):
    """Decoupled weight decay."""

    learning_rate: Annotated[float, Also("lr")] = Field(1e-3, gt=0)
    """Peak learning rate."""
    b1: float = Field(0.9, ge=0, lt=1)
    b2: float = 0.95


class Muon(Settings):
    learning_rate: float = Field(0.02, gt=0)
    """Peak learning rate."""
    ns_steps: int = Field(5, ge=1)
    """Newton-Schulz iterations."""


OPTIMIZERS = Registry("optimizer", {"adamw": AdamW, "muon": Muon})


class Model(Settings):
    heads: int = Field(4, gt=0)
    kv_heads: int = Field(4, gt=0)
    layers: Annotated[int, Also("size")]
    """Number of layers."""

    @model_validator(mode="after")
    def _groups(self) -> "Model":
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} is no multiple of kv_heads = {self.kv_heads}")
        return self


class Unit(Enum):
    BITS = "bits"
    NATS = "nats"


class Data(Settings):
    source: str = "stdlib"
    mix: dict[str, float] = Field({"code": 1.0})
    """Share of each source."""
    batch: Annotated[int, Also("size")] = Field(8, ge=1)
    lang: str = "en"
    packing: Literal["split", "fit"] = "split"
    shuffle: bool = True
    stop: list[str] = Field([])

    @field_validator("source")
    @classmethod
    def _check_known(cls, source: str) -> str:
        if source == "webb":
            raise ValueError("there is no such source")
        return source


class Run(Settings):
    elsewhere = {"dropout": "dropout is not built"}  # noqa: RUF012

    steps: Annotated[int, Also("training.max_steps")] = Field(100, ge=0)
    """Optimizer steps."""
    seed: int = 0
    dir: Path | None = None
    clip: float | None = 1.0
    window: int | Literal["auto"] = "auto"
    betas: tuple[float, float] = (0.9, 0.95)
    unit: Unit = Unit.NATS
    optimizer: Annotated[Any, Choice(OPTIMIZERS)] = "adamw"
    """What turns gradients into updates."""
    adapter: Annotated[Any, Choice(OPTIMIZERS)] | None = None
    stages: list[Annotated[Any, Choice(OPTIMIZERS)]] = Field([])
    data: Data = Data()
    evals: dict[str, Data] = Field({})
    model: Model = Model(layers=3)

    @model_validator(mode="after")
    def _fits(self) -> "Run":
        if self.data.batch > self.steps * 1000:
            raise ValueError(f"data.batch = {self.data.batch} is more than steps = {self.steps} can use")
        return self


def read(*layers, words=()):
    file_layers = [SettingsLayer(f"file{i}.yml", values) for i, values in enumerate(layers)]
    return read_settings(Run, *file_layers, words_layer(words))


def mistakes(*layers, words=()) -> list[str]:
    """The text of every mistake, each held to five lines, a key and an origin."""
    with pytest.raises(SettingsError) as caught:
        read(*layers, words=words)
    assert caught.value.exit_code == 2
    texts = [str(problem) for problem in caught.value.problems]
    assert str(caught.value) == "\n\n".join(texts)
    for text in texts:
        assert len(text.splitlines()) <= 5
        assert text.startswith("error: ")
        assert "set by" in text
    return texts


# ---- values


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("steps=25k", 25_000),
        ("steps=1e5", 100_000),
        ("steps=4_096", 4096),
        ("steps=1.5B", 1_500_000_000),
        ("clip=3e-4", 3e-4),
        ("clip=none", None),
        ("clip=2k", 2000.0),
        ("dir=007", Path("007")),
        ("dir=none", None),
        ("window=auto", "auto"),
        ("window=4k", 4000),
        ("betas=[0, 1e-2]", (0.0, 0.01)),
        ("unit=bits", Unit.BITS),
        ("data.lang=no", "no"),
        ("data.lang=1e5", "1e5"),
        ("data.lang='no'", "no"),
        ("data.stop=[no, 007, 1e5]", ["no", "007", "1e5"]),
        ("data.shuffle=off", False),
        ("data.shuffle=no", False),
        ("data.shuffle=TRUE", True),
        ("data.mix={web: 1k, code: 2}", {"code": 2.0, "web": 1000.0}),
    ],
)
def test_a_value_means_what_its_type_says(word, value, tmp_path):
    key, _, text = word.partition("=")
    for tree in (read(words=[word]).value, read_settings(Run, _nested_file(tmp_path, key, text)).value):
        for name in key.split("."):
            tree = getattr(tree, name)
        assert tree == value
        assert type(tree) is type(value)


def _nested_file(folder, key, text):
    *groups, leaf = key.split(".")
    lines = [f"{'  ' * i}{group}:" for i, group in enumerate(groups)]
    path = folder / "a.yml"
    path.write_text("\n".join([*lines, f"{'  ' * len(groups)}{leaf}: {text}"]))
    return yaml_layer(path)


@pytest.mark.parametrize("value", ["25k", 25e3, 25_000])
def test_numbers_are_human_where_settings_are_built_by_hand(value):
    assert Run(steps=value).steps == 25_000


@pytest.mark.parametrize("key", ["steps", "clip", "window"])
def test_a_switch_is_no_number(key):
    with pytest.raises(ValidationError):
        Run(**{key: True})


def test_a_number_is_no_switch():
    with pytest.raises(ValidationError):
        Data(shuffle=1)  # pyright: ignore[reportArgumentType]


def test_settings_are_frozen_and_documented():
    with pytest.raises(ValidationError):
        Run().steps = 3
    assert documented_fields(Run)["steps"].description == "Optimizer steps."


def test_documentation_is_read_only_where_it_is_shown(monkeypatch):
    """Reading the source of every class took a sixth of a command."""
    monkeypatch.setattr(schema, "_DOCUMENTED", [])
    read_settings(Run, words_layer(["steps=3", "model.layers=2"]))
    assert schema._DOCUMENTED == []
    with pytest.raises(SettingsError, match="hint: Optimizer steps"):
        read_settings(Run, words_layer(["steps=-1", "model.layers=2"]))
    assert [Run] == schema._DOCUMENTED


def test_documentation_is_that_of_the_class_itself_and_of_those_above_it():
    class Above(Settings):
        a: int = 1
        """Of a."""
        b: int = 2
        """Of b."""
        c: int = 3

    class Below(Above):
        b: int = 4
        """Of b,
        again."""

    def descriptions(cls: type[Settings]) -> dict[str, str | None]:
        return {name: info.description for name, info in documented_fields(cls).items()}

    assert descriptions(Below) == {"a": "Of a.", "b": "Of b,\nagain.", "c": None}
    assert descriptions(Above) == {"a": "Of a.", "b": "Of b.", "c": None}


def test_the_shape_of_a_field_is_found_once():
    """84 presets have 5,000 fields of 200 kinds: a third of `argosy models`."""
    info = Run.model_fields["optimizer"]
    assert shape_of(info) is shape_of(info)
    assert shape_of(Run.model_fields["steps"]) is not shape_of(info)


# ---- layers


def test_later_layers_win_and_are_reported():
    layers = {"steps": 1, "seed": 1, "data": {"batch": 2}}, {"steps": 2, "data": {"lang": "de"}}
    reading = read(*layers, words=["seed=3"])
    assert reading.value == Run(steps=2, seed=3, data=Data(batch=2, lang="de"))
    assert reading.origin["steps"] == "file1.yml"
    assert reading.origin["seed"] == "command line"
    assert reading.origin["data.batch"] == "file0.yml"
    assert reading.origin["clip"] == "default"
    assert list(reading.origin) == list(flatten(reading.value))


def test_only_what_a_layer_gave_counts_as_set():
    assert read_settings(Run).value.model_fields_set == set()
    run = read_settings(Run, words_layer(["data.lang=de", "optimizer=muon"])).value
    assert run.model_fields_set == {"data", "optimizer"}
    assert run.data.model_fields_set == {"lang"}
    assert read_settings(Run, words_layer(["adapter=none"])).value.model_fields_set == {"adapter"}


def test_mappings_merge_key_by_key_and_lists_do_not():
    reading = read({"data": {"mix": {"web": 2}, "stop": ["a"]}}, {"data": {"mix": {"math": 3}, "stop": ["b"]}})
    assert reading.value.data.mix == {"code": 1.0, "web": 2.0, "math": 3.0}
    assert reading.value.data.stop == ["b"]
    assert reading.origin["data.mix.code"] == "default"
    assert reading.origin["data.mix.web"] == "file0.yml"
    assert reading.origin["data.mix.math"] == "file1.yml"


def test_none_takes_a_name_out_of_a_mapping():
    assert read({"data": {"mix": {"web": 2}}}, words=["data.mix.code=none"]).value.data.mix == {"web": 2.0}


def test_a_group_given_as_default_keeps_its_own_values():
    assert read(words=["model.heads=8"]).value.model == Model(heads=8, layers=3)


def test_an_empty_heading_in_a_file_says_nothing(tmp_path):
    (tmp_path / "a.yml").write_text("data:\n  # batch: 3\noptimizer:\nsteps: 5\n")
    assert read_settings(Run, yaml_layer(tmp_path / "a.yml")).value == Run(steps=5)


# ---- choices


@pytest.mark.parametrize("turned", [1, -1])
def test_a_choice_and_its_keys_in_either_order(turned):
    words = ["optimizer=muon", "optimizer.ns_steps=6"][::turned]
    reading = read({"optimizer": {"name": "adamw", "b1": 0.8, "learning_rate": 9}}, words=words)
    assert reading.value.optimizer == Muon(ns_steps=6)
    assert reading.origin["optimizer.name"] == "command line"
    assert reading.origin["optimizer.learning_rate"] == "default"


@pytest.mark.parametrize("turned", [1, -1])
def test_a_choice_that_is_made_twice_is_a_mistake(turned):
    """Whichever came last was ignored without a word."""
    with pytest.raises(SettingsError, match=r"`optimizer` is adamw, and `optimizer\.name` is muon"):
        read(words=["optimizer=adamw", "optimizer.name=muon"][::turned])
    assert read(words=["optimizer=muon", "optimizer.name=muon"]).value.optimizer == Muon()


def test_keeping_the_tag_keeps_the_keys():
    layers = {"optimizer": {"name": "adamw", "b1": 0.8}}, {"optimizer": {"b2": 0.7}}, {"optimizer": "adamw"}
    assert read(*layers).value.optimizer == AdamW(b1=0.8, b2=0.7)


def test_changing_the_tag_and_back_drops_everything_before():
    before, after = {"name": "adamw", "b1": 0.8}, {"name": "adamw", "b2": 0.7}
    layers = {"optimizer": before}, {"optimizer": "muon"}, {"optimizer": after}
    assert read(*layers).value.optimizer == AdamW(b2=0.7)


def test_none_ends_an_optional_choice_and_a_name_starts_it_anew():
    assert read({"adapter": {"name": "adamw", "b1": 0.8}}, words=["adapter=none"]).value.adapter is None
    anew = read({"adapter": {"name": "adamw", "b1": 0.8}}, {"adapter": None}, {"adapter": "adamw"})
    assert anew.value.adapter == AdamW()


def test_choices_in_lists_and_groups_in_mappings():
    reading = read(words=["stages=[adamw, {name: muon, ns_steps: 2}]", "evals.web.batch=3", "evals.code={lang: no}"])
    assert reading.value.stages == [AdamW(), Muon(ns_steps=2)]
    assert reading.value.evals == {"web": Data(batch=3), "code": Data(lang="no")}
    assert reading.origin["stages.1.ns_steps"] == "command line"
    assert reading.origin["evals.web.lang"] == "default"


def test_a_class_is_imported_only_when_it_is_chosen():
    registry = Registry("thing", {"here": "tests_no_such_module:Thing", "adamw": AdamW})

    class Lazy(Settings):
        thing: Annotated[Any, Choice(registry)] = "adamw"

    tree = read_settings(Lazy).value
    assert dump(tree) == {"thing": {"name": "adamw", "learning_rate": 1e-3, "b1": 0.9, "b2": 0.95}}
    with pytest.raises(ModuleNotFoundError):
        read_settings(Lazy, words_layer(["thing=here"]))


def test_the_tag_may_have_another_name():
    class Tagged(Settings):
        model: Annotated[Any, Choice(OPTIMIZERS, tag="family")]

    reading = read_settings(Tagged, words_layer(["model.ns_steps=2", "model.family=muon"]))
    assert dump(reading.value) == {"model": {"family": "muon", "learning_rate": 0.02, "ns_steps": 2}}


def test_built_groups_are_taken_where_their_class_is_registered():
    assert Run(optimizer=Muon(ns_steps=2)).optimizer.ns_steps == 2
    with pytest.raises(ValidationError, match="no registered optimizer"):
        Run(optimizer=Data())


# ---- mistakes


@pytest.mark.parametrize(
    ("word", "problem", "hint"),
    [
        ("stpes=3", "unknown setting `stpes`", "`steps`"),
        ("optimizer.learning_rat=3", "unknown setting `optimizer.learning_rat`", "`optimizer.learning_rate`"),
        ("optimzer.b1=3", "unknown setting `optimzer.b1`", "`optimizer.b1`"),
        ("data.mx.web=3", "unknown setting `data.mx.web`", None),
        ("evals.web.batc=3", "unknown setting `evals.web.batc`", "`evals.web.batch`"),
        ("learning_rate=3", "unknown setting `learning_rate`", "`optimizer.learning_rate`"),
        ("optimizer.lr=3", "unknown setting `optimizer.lr`", "`optimizer.learning_rate`"),
        ("optimizer.ns_steps=3", "unknown setting `optimizer.ns_steps`", "belongs to `name: muon`"),
        ("steps.x=3", "unknown setting `steps.x`", "`steps` is one value"),
        ("zzz=3", "unknown setting `zzz`", "known names are"),
        ("steps=abc", "`steps` should be a whole number, not `abc`", "4_096"),
        ("steps=yes", "`steps` should be a whole number, not `yes`", "4_096"),
        ("steps=1.5", "`steps` should be a whole number, not `1.5`", "4_096"),
        ("steps=none", "`steps` should be a whole number, not `none`", "4_096"),
        ("steps=[1]", "`steps` should be a whole number, not `[1]`", "4_096"),
        ("steps=-1", "`steps` should be at least 0, not `-1`", "Optimizer steps; the default is `steps=100`"),
        ("optimizer.b1=1", "`optimizer.b1` should be less than 1, not `1`", None),
        ("optimizer.learning_rate=nan", "`optimizer.learning_rate` should be a finite number, not `nan`", None),
        ("optimizer.learning_rate=.nan", "`optimizer.learning_rate` should be a finite number, not `.nan`", None),
        ("optimizer.learning_rate=.inf", "`optimizer.learning_rate` should be a finite number, not `.inf`", None),
        ("clip=.inf", "`clip` should be a finite number, not `.inf`", None),
        ("optimizer.learning_rate=1e999", "`optimizer.learning_rate` should be a finite number, not `1e999`", None),
        ("data.mix.web=.inf", "`data.mix.web` should be a finite number, not `.inf`", None),
        ("steps=123456789012345678901", "`steps` should be a whole number, not `123456789012345678901`", "4_096"),
        ("LR=1", "unknown setting `LR`", "`optimizer.learning_rate`"),
        ("training.lr=1", "unknown setting `training.lr`", "`optimizer.learning_rate`"),
        ("training.max-steps=1", "unknown setting `training.max-steps`", "`steps`"),
        ("data.size=1", "unknown setting `data.size`", "`data.batch`"),
        ("size=1", "unknown setting `size`", "`data.batch`"),
        ("model.size=1", "unknown setting `model.size`", "`model.layers`"),
        ("dropout=0.1", "unknown setting `dropout`", "dropout is not built"),
        ("model.dropout=0.1", "unknown setting `model.dropout`", "dropout is not built"),
        ("clip=x", "`clip` should be a number or none, not `x`", "3e-4"),
        ("clip=off", "`clip` should be a number or none, not `off`", "3e-4"),
        ("window=x", "`window` should be a whole number or one of auto, not `x`", None),
        ("data.shuffle=2", "`data.shuffle` should be true or false, not `2`", "on or off"),
        ("data.packing=splt", "`data.packing` should be one of 'split' or 'fit', not `splt`", "`split`"),
        ("data.mix.web=x", "`data.mix.web` should be a number, not `x`", "3e-4"),
        ("data.mix.web=yes", "`data.mix.web` should be a number, not `yes`", "3e-4"),
        ("data.mix=3", "`data.mix` should be a mapping, not `3`", "{name: value}"),
        ("data.stop=a", "`data.stop` should be a list, not `a`", "[1, 2, 3]"),
        ("betas=[1]", "`betas` lacks `betas.1`", None),
        ("betas=[1, x]", "`betas.1` should be a number, not `x`", "3e-4"),
        ("unit=bytes", "`unit` should be one of 'bits' or 'nats', not `bytes`", None),
        ("data.source=webb", "`data.source`: there is no such source", None),
        ("data=3", "`data` is a group of settings, not `3`", "it has `data.source`, `data."),
        ("data=fit", "`data` is a group of settings, not `fit`", "`data.packing=fit`"),
        ("data=none", "`data` is a group of settings, not `none`", None),
        ("optimizer=3", "`optimizer` should name the optimizer, not `3`", None),
        ("optimizer=muonn", "unknown optimizer `muonn` for `optimizer`", "`muon`"),
        ("adapter.b1=3", "`adapter` names no optimizer", "`adapter=NAME`"),
        ("stages=[muonn]", "unknown optimizer `muonn` for `stages.0`", "`muon`"),
        ("stages=muon", "`stages` is a list, not `muon`", None),
        ("evals=3", "`evals` is a mapping, not `3`", None),
        ("model.kv_heads=3", "`model`: heads = 4 is no multiple of kv_heads = 3", None),
        ("data.batch=1M", "data.batch = 1000000 is more than steps = 100 can use", None),
    ],
)
def test_each_mistake_names_its_key_and_the_way_out(word, problem, hint):
    (text,) = mistakes(words=[word])
    assert problem in text
    assert "set by command line" in text
    assert (hint or "") in text


def test_three_mistakes_at_three_depths_are_reported_at_once():
    texts = mistakes({"stpes": 1}, {"data": {"batch": "x"}}, words=["optimizer.b1=2"])
    assert [text.splitlines()[0] for text in texts] == [
        "error: unknown setting `stpes`",
        "error: `optimizer.b1` should be less than 1, not `2`",
        "error: `data.batch` should be a whole number, not `x`",
    ]
    setters = [text.splitlines()[1].strip() for text in texts]
    assert setters == ["set by file0.yml", "set by command line", "set by file1.yml"]


def test_a_value_with_keys_of_its_own_is_told_of_both():
    first, second = mistakes(words=["steps=abc", "steps.x=3"])
    assert "unknown setting `steps.x`" in first
    assert "`steps` should be a whole number, not `abc`" in second


def test_the_wording_is_the_house_style():
    (text,) = mistakes(words=["optimizer.learning_rat=1"])
    assert text == (
        "error: unknown setting `optimizer.learning_rat`\n"
        "  set by command line\n\nhint: did you mean `optimizer.learning_rate`?"
    )


def test_a_conflict_tells_who_set_each_side():
    (text,) = mistakes({"model": {"heads": 6}}, words=["model.kv_heads=4"])
    assert "`model.heads` set by file0.yml, `model.kv_heads` set by command line" in text


def test_a_rule_is_not_asked_of_keys_that_are_wrong_already():
    (text,) = mistakes(words=["model.kv_heads=3", "model.layers=x"])
    assert "model.layers" in text


def test_a_rule_may_say_its_own_hint():
    class Pair(Settings):
        a: int = 1
        b: int = 2

        @model_validator(mode="after")
        def _ordered(self) -> "Pair":
            if self.a > self.b:
                raise BadInput("a is more than b", hint="swap them")
            return self

    class Outer(Settings):
        pair: Pair = Pair()

    with pytest.raises(SettingsError) as caught:
        read_settings(Outer, words_layer(["pair.a=3"]))
    (problem,) = caught.value.problems
    assert problem.what == "`pair`: a is more than b"
    assert problem.where == "`pair.a` set by command line, `pair.b` set by default"
    assert problem.hint == "swap them"


def test_a_rule_across_groups_tells_dotted_keys():
    (text,) = mistakes({"steps": 2}, words=["data.batch=5k"])
    assert "`steps` set by file0.yml, `data.batch` set by command line" in text


def test_a_line_of_a_file_is_named(tmp_path):
    (tmp_path / "tiny.yml").write_text("steps: 3\ndata:\n  bach: 3\n  batch: x\noptimizer: muonn\n")
    with pytest.raises(SettingsError) as caught:
        read_settings(Run, yaml_layer(tmp_path / "tiny.yml"))
    assert [problem.where for problem in caught.value.problems] == [
        "set by tiny.yml:3",
        "set by tiny.yml:5",
        "set by tiny.yml:4",
    ]


def test_required_keys():
    class Needs(Settings):
        path: str
        """Where it is."""
        model: Model
        choice: Annotated[Any, Choice(OPTIMIZERS)]

    with pytest.raises(SettingsError) as caught:
        read_settings(Needs)
    assert [problem.what for problem in caught.value.problems] == [
        "`model.layers` is required",
        "`choice` names no optimizer",
        "`path` is required",
    ]
    assert caught.value.problems[2].hint == "add `path=...`: Where it is"


def test_a_dotted_key_in_a_file_is_answered(tmp_path):
    (tmp_path / "a.yml").write_text("data.batch: 3\n")
    with pytest.raises(SettingsError, match=r"unknown setting `data.batch`") as caught:
        read_settings(Run, yaml_layer(tmp_path / "a.yml"))
    assert caught.value.problems[0].hint == "in a file, write `batch` under `data`, without the dot"


@pytest.mark.slow
@settings(derandomize=True, database=None, deadline=None)
@given(st.lists(st.sampled_from(sorted(flatten(dump(Run())))), min_size=1, max_size=4), st.text(max_size=6))
def test_no_word_ends_in_anything_but_a_tree_or_reported_mistakes(keys, text):
    problems = []
    try:
        read(words=[f"{key}={text}" for key in keys])
    except SettingsError as error:
        problems = error.problems
    assert all(len(str(problem).splitlines()) <= 5 for problem in problems)


# ---- plain values and text


RICH = [
    "optimizer={name: muon, ns_steps: 2}",
    "stages=[adamw, {name: muon}]",
    "evals.web.batch=3",
    "data.lang=1e5",
    "data.mix.web=1e-5",
    "dir=out",
    "clip=none",
    "unit=bits",
]


def test_a_dump_reads_back_equal():
    tree = read(words=RICH).value
    assert read_settings(Run, SettingsLayer("dump", dump(tree))).value == tree
    assert json.loads(json.dumps(dump(tree))) == yaml.safe_load(yaml.safe_dump(dump(tree)))


def test_resolved_settings_read_back_equal_here_and_in_pyyaml(tmp_path):
    reading = read(words=RICH)
    (tmp_path / "settings.yml").write_text(annotated_yaml(reading))
    assert read_settings(Run, yaml_layer(tmp_path / "settings.yml")).value == reading.value
    assert yaml.safe_load(annotated_yaml(reading)) == dump(reading.value)
    assert "  ns_steps: 2" in annotated_yaml(reading)
    assert all("#" in line for line in annotated_yaml(reading).splitlines() if not line.endswith(":"))


def test_differences():
    changed = read(words=["optimizer=muon", "data.batch=9"]).value
    assert diff(Run(), changed) == [
        ("optimizer.name", "adamw", "muon"),
        ("optimizer.learning_rate", 1e-3, 0.02),
        ("optimizer.b1", 0.9, None),
        ("optimizer.b2", 0.95, None),
        ("data.batch", 8, 9),
        ("optimizer.ns_steps", None, 5),
    ]
    assert diff(changed, changed) == []


def test_an_explanation_tells_type_default_meaning_and_every_layer():
    reading = read({"steps": 5}, words=["steps=7", "data.mix.web=2"])
    text = explain(reading, "steps")
    assert text.splitlines()[:3] == ["steps = 7", "  int ≥ 0, default 100", "  Optimizer steps."]
    assert "set by command line" in text
    assert "file0.yml" in text
    assert "Peak learning rate." in explain(reading, "optimizer.learning_rate")
    assert "optimizer: adamw | muon" in explain(reading, "optimizer.name")
    assert "data.mix.web = 2.0" in explain(reading, "data.mix.web")
    assert len(explain(reading, "optimizer").splitlines()) == 4
    with pytest.raises(BadInput) as caught:
        explain(reading, "optimizer.ns_steps")
    assert "belongs to `name: muon`" in (caught.value.hint or "")


def test_the_reference_names_every_key_of_every_choice():
    text = settings_reference(Run)
    keys = [*flatten(dump(Run())), "optimizer.ns_steps", "adapter.b1", "stages.*.ns_steps", "evals.*.batch"]
    for key in keys:
        if key not in ("adapter", "optimizer.name", "data.mix.code"):
            assert f"| `{key}` |" in text, key
    assert "| `optimizer.learning_rate` | float > 0 | `0.001` | Peak learning rate. |" in text
    assert "`optimizer.name`, the optimizer: `adamw`, `muon`; default `adamw`." in text
    assert "| `window` | int \\| auto | `auto` |" in text
    assert text == settings_reference(Run)


def test_the_schema_accepts_layers_and_refuses_typos():
    schema = json_schema(Run)
    options = schema["properties"]["optimizer"]["oneOf"]
    assert options[0] == {"enum": ["adamw", "muon"]}
    assert [option["properties"]["name"]["const"] for option in options[2:]] == ["adamw", "muon"]
    assert [option["required"] for option in options[2:]] == [["name"], ["name"]]
    assert all(option["additionalProperties"] is False for option in options[2:])
    assert "layers" in schema["$defs"]["Model"]["properties"]
    assert "required" not in schema["$defs"]["Model"]  # another layer may set it
    assert schema["properties"]["steps"]["description"] == "Optimizer steps."


def test_what_is_registered_twice_the_same_is_once():
    """A package's entry point names the module that adds it."""
    things = Registry("thing")
    things.add("ordered", "collections:OrderedDict")
    things.add("ordered", "collections:OrderedDict")
    assert things["ordered"] is OrderedDict
    things.add("ordered", "collections:OrderedDict")
    things.add("ordered", OrderedDict)
    assert list(things) == ["ordered"]
    with pytest.raises(ValueError, match="already registered"):
        things.add("ordered", "collections:Counter")
