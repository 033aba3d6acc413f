"""`argosy.fit` in Python: keywords are settings, progress is printed, a signal raises once the state is saved."""

from pathlib import Path
from typing import Any

import jax
import pytest

import argosy
from argosy.core.errors import BadInput, SettingsError, UserError
from argosy.run.outcome import Outcome
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from argosy.train.optimizers.muon import Muon


@pytest.fixture
def train_call(monkeypatch):
    """What `train` is asked for, and the exit code that it answers with."""
    calls: dict[str, Any] = {"code": 0}

    def train(recipe, words, view, origin):
        view.say("step 1")
        reading = compose(Run, recipe, words, origin=origin)
        calls.update(settings=reading.value, origin=reading.origin, words=words)
        return Outcome(Path("runs/x"), 3, 10, calls["code"], {}, {})

    monkeypatch.setattr("argosy.jobs.train.train", train)
    return calls


def test_keywords_are_settings(train_call):
    outcome = argosy.fit("tiny", steps=10, dir=Path("runs/x"), optimizer="muon", **{"data.batch": 4, "sample.every": None})
    run = train_call["settings"]
    assert (run.steps, run.dir, run.data.batch, run.sample.every) == (10, "runs/x", 4, None)
    assert isinstance(run.optimizer, Muon)
    assert outcome.step == 3


def test_keywords_take_groups_and_win_over_words(train_call):
    argosy.fit("tiny", "steps=5", "data.batch=2", steps=6, optimizer={"name": "muon", "ns_steps": 7}, log={"every": 1})
    run = train_call["settings"]
    assert (run.steps, run.data.batch, run.optimizer.ns_steps, run.log.every) == (6, 2, 7, 1)


def test_text_stays_text(train_call):
    argosy.fit("tiny", dir="1e5", sample={"prompt": "a: [b], no"})
    assert train_call["settings"].dir == "1e5"
    assert train_call["settings"].sample.prompt == "a: [b], no"


def test_a_wrong_keyword_is_answered(train_call):
    with pytest.raises(SettingsError, match=r"unknown setting `max_steps`") as caught:
        argosy.fit("tiny", max_steps=10)
    assert caught.value.problems[0].hint == "did you mean `steps`?"


def test_errors_name_the_call_and_not_the_command_line(train_call):
    with pytest.raises(SettingsError) as caught:
        argosy.fit("tiny", max_steps=10, **{"data.batch": "many"})
    assert [problem.where for problem in caught.value.problems] == ["set by fit(...)"] * 2
    with pytest.raises(SettingsError) as caught:
        argosy.fit("tiny", "--steps=10")
    assert caught.value.problems[0].where == "in fit(...)"


def test_provenance_names_the_call(train_call):
    argosy.fit("tiny", "seed=1", steps=10)
    assert (train_call["origin"]["steps"], train_call["origin"]["seed"]) == ("fit(...)", "fit(...)")
    assert train_call["origin"]["dir"] == "default"


def test_a_recipe_is_no_preset_and_a_name_of_the_hub_has_a_prefix():
    with pytest.raises(UserError, match="`tiny` is a recipe, not a preset") as caught:
        argosy.load("tiny", random=0)
    assert "presets are argosy-1m" in (caught.value.hint or "")
    with pytest.raises(UserError, match=r"no folder `Qwen/Qwen3-0\.6B`") as caught:
        argosy.load("Qwen/Qwen3-0.6B")
    assert (caught.value.hint or "").startswith("of the Hub: hf:Qwen/Qwen3-0.6B; the preset")


def test_progress_is_printed_on_stderr(train_call, capsys):
    argosy.fit("tiny")
    assert capsys.readouterr() == ("", "step 1\n")


@pytest.mark.parametrize(("code", "error"), [(130, KeyboardInterrupt), (143, SystemExit), (129, SystemExit)])
def test_a_signal_raises_when_the_state_is_saved(train_call, code, error):
    train_call["code"] = code
    with pytest.raises(error) as caught:
        argosy.fit("tiny")
    assert error is KeyboardInterrupt or caught.value.code == code


@pytest.fixture
def compilation_cache():
    """The settings of JAX's compilation cache, put back afterwards."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield names
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize("call", [lambda: argosy.load("nowhere"), lambda: argosy.fit("nowhere")])
def test_python_turns_on_the_compilation_cache_that_commands_use(compilation_cache, monkeypatch, tmp_path, call):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    with pytest.raises((UserError, SystemExit)):
        call()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "argosy" / "xla")


def test_a_compilation_cache_that_is_set_stays(compilation_cache, monkeypatch, tmp_path):
    """By JAX_COMPILATION_CACHE_DIR too, which is the same setting."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in zip(compilation_cache, (str(tmp_path / "own"), 7.0, 77)):
        jax.config.update(name, value)
    with pytest.raises(UserError):
        argosy.load("nowhere")
    assert [getattr(jax.config, name) for name in compilation_cache] == [str(tmp_path / "own"), 7.0, 77]


def test_an_object_is_no_setting():
    with pytest.raises(BadInput, match="`model` cannot be an object of type object"):
        argosy.fit("tiny", model=object())
