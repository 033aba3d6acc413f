"""Which files make a run, in which order, with a package of configs made for the test."""

import os
import subprocess
import sys
from typing import Annotated, Any

import pytest
import yaml
from schema_check import check

from argosy.core.errors import BadInput, SettingsError, UnknownName
from argosy.core.registry import Registry
from argosy.core.settings import Choice, Settings
from argosy.run.settings.compose import compose, editor_schema
from argosy.run.settings.recipe_files import CONFIGS, preset_config, presets, presets_of_family, recipes
from argosy.run.settings.run import Run as TrainingRun
from argosy.train.objectives import OBJECTIVES
from argosy.train.objectives.preferences.dpo import LOSSES as DPO_LOSSES


class Llama(Settings):
    preset: str | None = None
    width: int = 64
    layers: int = 2
    heads: int = 4


class Gemma(Settings):
    preset: str | None = None
    width: int = 32
    softcap: float = 30.0


FAMILIES = Registry("model family", {"llama": Llama, "gemma": Gemma})


class Run(Settings):
    steps: int = 10
    dir: str = "runs/x"
    batch: int = 8
    model: Annotated[Any, Choice(FAMILIES, tag="family")] = "llama"


FILES = {
    "base.yml": "steps: 100\nmodel:\n  heads: 2\n",
    "models/small.yml": "family: llama\nwidth: 128\nlayers: 6\n",
    "models/large.yml": "extends: small\nwidth: 512\n",
    "models/soft.yml": "family: gemma\nsoftcap: 50\n",
    "recipes/tiny.yml": "model:\n  preset: small\n  layers: 3\nbatch: 4\n",
    "recipes/longer.yml": "extends: tiny\nsteps: 1k\n",
    "recipes/other.yml": "extends: tiny\nmodel: large\n",
    "recipes/sft/chat.yml": "model: soft\n",
    "recipes/plain.yml": "batch: 2\n",
    "recipes/lost.yml": "model: smal\n",
    "recipes/circle.yml": "extends: circle2\n",
    "recipes/circle2.yml": "extends: circle\n",
}


@pytest.fixture
def configs(tmp_path, monkeypatch):
    monkeypatch.delenv("ARGOSY_PRESETS", raising=False)
    for name, text in FILES.items():
        path = tmp_path / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "configs"


def test_layers_in_order(configs):
    reading = compose(Run, "longer", ["batch=16"], configs)
    assert reading.value == Run(steps=1000, batch=16, model=Llama(preset="small", width=128, layers=3))
    assert {key: who for key, who in reading.origin.items() if who != "default"} == {
        "steps": "recipes/longer.yml",
        "batch": "command line",
        "model.family": "models/small.yml",
        "model.preset": "recipes/tiny.yml",
        "model.width": "models/small.yml",
        "model.layers": "recipes/tiny.yml",
    }


def test_without_a_recipe_base_and_words_count(configs):
    assert compose(Run, None, ["model.layers=5"], configs).value == Run(steps=100, model=Llama(heads=2, layers=5))


@pytest.mark.parametrize("words", [["model=large"], ["model.preset=large"], ["model={preset: large}"]])
def test_a_preset_among_the_words_drops_the_recipes_model(configs, words):
    reading = compose(Run, "tiny", words, configs)
    assert reading.value.model == Llama(preset="large", width=512, layers=6)
    assert reading.origin["model.preset"] == "command line"
    assert reading.origin["model.width"] == "models/large.yml"
    assert reading.value.batch == 4


@pytest.mark.parametrize("words", [["model=large", "model.layers=9"], ["model.layers=9", "model=large"]])
def test_words_on_the_model_stay_with_the_preset_they_name(configs, words):
    assert compose(Run, "tiny", words, configs).value.model == Llama(preset="large", width=512, layers=9)


def test_a_recipe_may_name_another_preset_than_the_one_it_extends(configs):
    assert compose(Run, "other", [], configs).value.model == Llama(preset="large", width=512, layers=6)


def test_another_family_brings_its_own_keys(configs):
    assert compose(Run, "tiny", ["model=soft"], configs).value.model == Gemma(preset="soft", softcap=50)
    assert compose(Run, "sft/chat", [], configs).value.model == Gemma(preset="soft", softcap=50)


def test_an_override_of_a_preset_is_visible(configs):
    reading = compose(Run, "tiny", ["model.width=7"], configs)
    assert reading.value.model == Llama(preset="small", width=7, layers=3)
    assert reading.tried["model.width"] == [("default", 64), ("models/small.yml", 128), ("command line", 7)]


def test_users_presets_by_path_and_by_folder(configs, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.yml").write_text("extends: small\nwidth: 99\n")
    by_path = compose(Run, "tiny", [f"model={tmp_path}/mine/own.yml"], configs)
    assert by_path.value.model.width == 99
    with pytest.raises(UnknownName):
        compose(Run, "tiny", ["model=own"], configs)
    monkeypatch.setenv("ARGOSY_PRESETS", os.pathsep.join([str(tmp_path / "none"), str(tmp_path / "mine")]))
    assert compose(Run, "tiny", ["model=own"], configs).value.model == Llama(preset="own", width=99, layers=6)
    assert presets(configs) == ["large", "own", "small", "soft"]


def test_recipes_by_path_with_extends_beside_them_or_by_name(configs, tmp_path):
    (tmp_path / "mine.yml").write_text("extends: theirs.yml\nsteps: 1\n")
    (tmp_path / "theirs.yml").write_text("extends: plain\nsteps: 2\ndir: d\n")
    reading = compose(Run, tmp_path / "mine.yml", [], configs)
    assert reading.value == Run(steps=1, dir="d", batch=2, model=Llama(heads=2))
    assert compose(Run, str(tmp_path / "mine.yml"), [], configs).origin["dir"] == str(tmp_path / "theirs.yml")


def test_a_run_directory_is_its_settings(configs, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(BadInput, match="not a run directory"):
        compose(Run, tmp_path / "run", [], configs)
    (tmp_path / "run" / "settings.yml").write_text("steps: 3\n")
    assert compose(Run, tmp_path / "run", [], configs).value.steps == 3


@pytest.mark.parametrize(
    ("recipe", "words", "problem", "hint", "where"),
    [
        ("tinny", [], "unknown recipe `tinny`", "`tiny`", None),
        ("zzz", [], "unknown recipe `zzz`", "known names are", None),
        ("gone/tiny.yml", [], "no settings file `gone/tiny.yml`", None, None),
        ("tiny", ["model=smal"], "unknown model preset `smal`", "`small`", "set by command line"),
        ("lost", [], "unknown model preset `smal`", "`small`", "set by recipes/lost.yml:1"),
        ("mine", [], "unknown recipe `mine`", "did you mean the file `mine.yml`?", None),
        ("small", [], "`small` is a model, not a recipe", "tiny model=small", None),
        ("tiny", ["model=gemma"], "`gemma` is a model family", "model.family=gemma", "set by command line"),
        ("circle", [], "`extends: circle` goes in a circle", None, "in recipes/circle2.yml:1"),
    ],
)
def test_files_that_are_not_there(configs, tmp_path, monkeypatch, recipe, words, problem, hint, where):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yml").write_text("steps: 1\n")
    with pytest.raises((BadInput, UnknownName)) as caught:
        compose(Run, recipe, words, configs)
    assert problem in str(caught.value)
    assert hint is None or hint in (caught.value.hint or "")
    assert caught.value.where == where
    assert caught.value.exit_code == 2
    assert len(str(caught.value).splitlines()) <= 5


@pytest.mark.parametrize("name", [*OBJECTIVES, *DPO_LOSSES, "GSPO", "dr-grpo", "reinforce++"])
def test_the_name_of_an_objective_is_answered_with_its_recipe(name):
    """By words that compose: the recipe exists, and takes the objective."""
    if name in recipes():
        return
    with pytest.raises(BadInput, match="is an objective, not a recipe") as caught:
        compose(TrainingRun, name, [])
    words = str(caught.value.hint).partition("argosy train ")[2].split()
    objective = settled_objective(words)
    plain = name.lower().replace("-", "_").replace("++", "_pp")
    assert objective == plain or words[:2] == ["dpo", f"objective.losses.{name}=1"]


def settled_objective(words):
    recipe, *more = words
    needs = {"grpo": ["reward=exact"]}.get(recipe, [])
    more += ["objective.teacher=t"] if "uld" in words[-1] else []
    preset = "minilm-l6" if recipe == "embed" else "llama3.2-1b"
    # Rankers bring their model and data, and autoencoders their model.
    needs += ["data.source=x.npz"] if recipe in ("vae", "diffusion") else []
    needs += [] if recipe in ("ranker", "two-tower", "vae", "diffusion") else [f"model.preset={preset}", "data.source=x.jsonl"]
    reading = compose(TrainingRun, recipe, [*needs, *more])
    return Choice(OBJECTIVES).name_of(reading.value.objective)


@pytest.mark.parametrize(
    ("recipe", "words", "rules"),
    [
        ("tiny", ["data.sequence=99999", "data.batch=7", "accumulate=2"], ["longer than the model's context", "not a multiple of"]),
        ("tiny", ["reward=exact", "rollout.tokens=9", "data.batch=7", "accumulate=2"], ["reward is for", "rollout is for", "multiple"]),
        ("grpo", ["objective.normalize=each", "objective.advantages=batch", "objective.dual=2", "objective.loss=gspo"],
         ["normalize=each is for", "dual is for"]),
        ("grpo", ["rollout.overlong=9999", "rollout.ahead=1"], ["overlong = 9999 is above", "ahead = 1 needs devices"]),
    ],
)  # fmt: skip
def test_all_rules_that_do_not_hold_are_reported_at_once(recipe, words, rules):
    with pytest.raises(SettingsError) as caught:
        compose(TrainingRun, recipe, ["model.family=llama", "data.source=x.jsonl", *words])
    for rule in rules:
        assert len([entry for entry in caught.value.problems if rule in entry.what]) == 1, rule


def test_of_a_list_of_files_the_later_ones_win(configs):
    (configs / "recipes" / "many.yml").write_text("extends: [longer, plain]\ndir: d\n")
    reading = compose(Run, "many", [], configs)
    assert reading.value == Run(steps=1000, batch=2, dir="d", model=Llama(preset="small", width=128, layers=3))
    assert reading.origin["batch"] == "recipes/plain.yml"
    (configs / "recipes" / "many.yml").write_text("extends: [plain, 3]\n")
    with pytest.raises(BadInput, match="names files"):
        compose(Run, "many", [], configs)


def test_two_files_may_extend_the_same_one(configs):
    (configs / "recipes" / "both.yml").write_text("extends: [longer, other]\n")
    assert compose(Run, "both", [], configs).value.model.preset == "large"


def test_lines_of_a_preset_are_named(configs):
    (configs / "models" / "typo.yml").write_text("family: llama\nlayrs: 3\n")
    with pytest.raises(SettingsError) as caught:
        compose(Run, "plain", ["model=typo"], configs)
    assert caught.value.problems[0].where == "set by models/typo.yml:2"
    assert caught.value.problems[0].hint == "did you mean `model.layers`?"


def test_presets_need_a_model():
    class Plain(Settings):
        steps: int = 1

    with pytest.raises(SettingsError, match="unknown setting `model`"):
        compose(Plain, None, ["model=small"], configs=CONFIGS / "none")


def test_names(configs):
    assert recipes(configs) == ["circle", "circle2", "longer", "lost", "other", "plain", "sft/chat", "tiny"]
    assert presets(configs) == ["large", "small", "soft"]
    assert "tiny" in recipes()


def test_the_editors_schema_knows_presets_and_extends(configs):
    schema = editor_schema(Run, configs)
    assert not list(check(schema, {"extends": "tiny"}))
    assert not list(check(schema, {"extends": ["tiny", "longer"]}))
    assert list(check(schema, {"extends": 3}))
    assert schema["properties"]["model"]["oneOf"][0] == {"type": "string", "examples": ["large", "small", "soft"]}


@pytest.mark.parametrize("recipe", recipes())
def test_the_editors_schema_accepts_every_recipe(recipe):
    layer = yaml.safe_load((CONFIGS / "recipes" / f"{recipe}.yml").read_text())
    assert not list(check(editor_schema(TrainingRun), layer))


@pytest.mark.parametrize(
    "layer",
    [
        {"extends": "tiny", "optimizer": {"learning_rate": "2e-3"}},
        {"extends": "tiny", "optimizer": {"name": "muon", "ns_steps": 6}, "sample": {"every": "none"}},
        {"model": {"layers": 3}},
        {"model": {"preset": "llama3.2-1b", "layers": 3}, "steps": "25k", "data": {"shuffle": "off"}},
        {"schedule": {"final": 0}, "log": {"every": 1}},
    ],
)
def test_the_editors_schema_accepts_a_part_of_a_choice(layer):
    assert not list(check(editor_schema(TrainingRun), layer))


@pytest.mark.parametrize(
    "layer",
    [
        {"stpes": 3},
        {"optimizer": {"learning_rat": 1}},
        {"optimizer": {"name": "adamw", "ns_steps": 6}},
        {"optimizer": "adamww"},
        {"optimizer": {"name": "adamww"}},
        {"optimizer": {"learning_rate": -1}},
        {"model": {"widht": 3}},
        {"log": {"every": 0}},
        {"steps": "many"},
        {"data": 3},
    ],
)
def test_the_editors_schema_refuses_a_mistake(layer):
    assert list(check(editor_schema(TrainingRun), layer))


def test_composing_has_no_side_effects(configs, tmp_path):
    code = f"""
import os, sys
from pathlib import Path
from argosy.core.settings import Settings
from argosy.run.settings.compose import compose

class Run(Settings):
    steps: int = 1
    batch: int = 1
    extra: str = ""

before = dict(os.environ)
(Path({str(configs)!r}) / "base.yml").unlink()
assert compose(Run, "plain", ["steps=2"], Path({str(configs)!r})).value.steps == 2
assert dict(os.environ) == before
assert not {{"jax", "numpy", "flax"}} & set(sys.modules), "imported"
"""
    work = tmp_path / "work"
    work.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(CONFIGS.parents[1])}
    subprocess.run([sys.executable, "-c", code], cwd=work, check=True, env=environment)
    assert list(work.iterdir()) == []


def test_listing_presets_walks_their_folder_twice_at_most_and_makes_one_class(monkeypatch):
    """A walk and a settings class for each preset were 40 % of `argosy models`."""
    from argosy.jobs import models

    models.listing()
    walked, classes = [], []
    rglob, new = type(CONFIGS).rglob, Settings.__pydantic_init_subclass__.__func__
    monkeypatch.setattr(type(CONFIGS), "rglob", lambda self, *a: walked.append(self) or rglob(self, *a))
    monkeypatch.setattr(
        Settings, "__pydantic_init_subclass__", classmethod(lambda cls, **k: classes.append(cls) or new(cls, **k))
    )
    assert len(models.listing()["presets"]) > 50
    assert len(walked) <= 2
    assert not classes


def test_a_preset_lies_inside_its_folder():
    for name in ("../recipes/tiny", str(CONFIGS / "recipes" / "tiny")):
        with pytest.raises(UnknownName):
            preset_config(name)


@pytest.mark.parametrize(
    ("name", "problem", "hint"),
    [
        (
            "Qwen/Qwen3-0.6B",
            "no folder `Qwen/Qwen3-0.6B`",
            "of the Hub: model=hf:Qwen/Qwen3-0.6B; the preset `qwen3-0.6b` has random weights",
        ),
        (
            "some/other",
            "no folder `some/other`",
            "of the Hub: model=hf:some/other",
        ),
        ("/nope/folder", "no such folder: `/nope/folder`", "model=FOLDER takes a Hub folder"),
        ("runs/nope", "no such folder: `runs/nope`", "model=FOLDER takes a Hub folder"),
        ("nope.gguf", "no such file: `nope.gguf`", "model=FOLDER takes a Hub folder"),
    ],
)
def test_a_model_that_is_not_there_is_told_from_a_hub_id(tmp_path, monkeypatch, name, problem, hint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput) as caught:
        compose(TrainingRun, "tiny", [f"model={name}"])
    assert caught.value.what == problem
    assert (caught.value.hint or "").startswith(hint)
    assert caught.value.where == "set by command line"


def _problems(*words):
    with pytest.raises(SettingsError) as caught:
        compose(TrainingRun, "tiny", words)
    return {problem.what: problem.hint for problem in caught.value.problems}


def test_beside_an_unknown_optimizer_the_other_mistakes_are_found():
    problems = _problems("optimizer=adam", "lr=3", "optimizer.foo=1", "optimizer.clip=x", "stpes=5")
    assert problems["unknown optimizer `adam` for `optimizer`"] == "did you mean `adamw`?"
    assert problems["unknown setting `lr`"] == "did you mean `optimizer.learning_rate`?"
    assert problems["unknown setting `stpes`"] == "did you mean `steps`?"
    assert {"unknown setting `optimizer.foo`", "`optimizer.clip` should be a number or none, not `x`"} <= problems.keys()
    assert len(problems) == 5


def test_beside_an_unknown_preset_the_other_mistakes_are_found():
    problems = _problems("model=lama3.2-1b", "lr=3", "model.widht=3", "model.layers=many", "stpes=5")
    assert problems["unknown model preset `lama3.2-1b`"] == "did you mean `llama3.2-1b`?"
    assert problems["unknown setting `model.widht`"] == "did you mean `model.width`?"
    assert {"unknown setting `lr`", "unknown setting `stpes`", "`model.layers` should be a whole number, not `many`"} <= problems.keys()
    assert len(problems) == 5
    assert "`gemma` is a model family, which has no sizes" in _problems("model=gemma", "stpes=5")


def test_beside_a_preset_that_is_near_none_nothing_is_said_of_the_model():
    """The nearest preset is a guess: whether the data fits its context nobody knows."""
    problems = _problems("model=zzz", "model.foo=1", "stpes=5")
    assert list(problems) == ["unknown model preset `zzz`", "unknown setting `stpes`"]
    with pytest.raises(UnknownName):
        compose(TrainingRun, "tiny", ["model=tinyllama-1.2b", "data.sequence=100k"])


def test_at_most_one_axis_takes_what_is_left():
    problems = _problems("mesh.data=-1", "stpes=3")
    assert "`mesh`: data = -1, fsdp = -1: at most one axis of a mesh may be -1, and none 0" in problems
    assert len(problems) == 2


@pytest.mark.parametrize("name", ["my.txt", "corpus"])
def test_data_in_place_of_a_recipe_is_told_what_to_type(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("text")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "manifest.json").write_text("{}")
    with pytest.raises(BadInput) as caught:
        compose(TrainingRun, name)
    assert f"argosy train tiny data.source={name}" in (caught.value.hint or "")


def test_a_choice_that_is_near_none_is_one_mistake():
    assert list(_problems("optimizer=zzz", "optimizer.foo=1")) == ["unknown optimizer `zzz` for `optimizer`"]
    assert next(iter(_problems("model.family=lama"))).startswith("unknown model family `lama`")


def test_an_axis_of_no_devices_is_a_wrong_setting():
    problems = _problems("mesh.stage=0", "stpes=3")
    assert "`mesh`: stage = 0, fsdp = -1: at most one axis of a mesh may be -1, and none 0" in problems
    assert len(problems) == 2


def test_a_bound_says_what_was_wanted():
    problems = _problems("eval.every=0", "checkpoint.every=0")
    assert "eval.batches=0 turns evaluation off" in problems["`eval.every` should be greater than 0, not `0`"]
    assert "at least 1 (a large number saves only at the end)" in problems["`checkpoint.every` should be greater than 0, not `0`"]


@pytest.mark.parametrize(
    ("words", "negatives"),
    [((), 1), (("objective.negatives=1",), 1), (("objective.negatives=4",), 4), (("objective.negatives=4", "data.negatives=6"), 6)],
)
def test_records_have_as_many_negatives_as_are_compared(words, negatives):
    run = compose(TrainingRun, "embed", ["model=minilm-l6", "init.weights=none", "data.source=n.jsonl", *words]).value
    assert run.data.negatives == negatives


def test_presets_of_a_family_are_those_whose_names_begin_with_it():
    names = ["gemma2-2b", "gemma-7b", "phi-4", "phi4-mini", "gpt-oss-20b", "gemmaxl"]
    assert presets_of_family("gemma", names) == ["gemma2-2b", "gemma-7b"]
    assert presets_of_family("phi", names) == ["phi-4", "phi4-mini"]
    assert presets_of_family("gpt_oss", names) == ["gpt-oss-20b"]
    assert presets_of_family("ph", names) == []
