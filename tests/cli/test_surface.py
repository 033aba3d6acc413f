"""The command line as a user meets it: exit codes, streams, errors, and what starting costs."""

import functools
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import yaml
from pydantic import Field

import argosy.cli
import argosy.cli.config
from argosy.cli import main
from argosy.cli.output import answer, can_color, fail
from argosy.core.errors import BadInput, Damaged
from argosy.core.registry import Registry
from argosy.core.settings import Choice, Settings

ROOT = Path(argosy.cli.__file__).parents[2]


class AdamW(Settings):
    learning_rate: float = Field(1e-3, gt=0)
    """Peak learning rate."""


class Muon(Settings):
    learning_rate: float = Field(0.02, gt=0)
    ns_steps: int = 5


class Run(Settings):
    steps: int = Field(10, ge=0)
    """Optimizer steps."""
    warmup: float = float("inf")
    optimizer: Annotated[Any, Choice(Registry("optimizer", {"adamw": AdamW, "muon": Muon}))] = "adamw"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with two recipes, and a small root schema without base settings."""
    (tmp_path / "a.yml").write_text("steps: 1\n")
    (tmp_path / "b.yml").write_text("steps: 2\noptimizer: muon\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(argosy.cli.config, "root", lambda: Run)
    compose = functools.partial(argosy.cli.config.compose, configs=tmp_path / "configs")
    monkeypatch.setattr(argosy.cli.config, "compose", compose)
    return tmp_path


# ---- starting


def test_help_is_cheap_and_imports_neither_jax_nor_numpy():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "importtime", "-m", "argosy", "--help"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "argosy" in imported
    assert not {"jax", "jaxlib", "numpy", "flax", "pydantic", "typer"} & imported
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3
    assert done.returncode == 0
    assert "config" in done.stdout


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_verb(words, capsys):
    assert main(words) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {verb}" in text for verb in argosy.cli.VERBS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("argosy ")


@pytest.mark.parametrize("verb", list(argosy.cli.VERBS))
def test_every_verb_helps(verb, capsys):
    assert main([verb, "--help"]) == 0
    assert "Usage: argosy " + verb in capsys.readouterr().out


# ---- exit codes and streams


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (["confg"], "unknown verb `confg`", "did you mean `config`?"),
        (["config", "shw"], "no such command 'shw'", "show"),
        (["config", "show", "--jsn"], "no such option: --jsn", "--json"),
        (["config", "explain"], "missing argument", "--help"),
        (["config", "show", "stps=3"], "unknown setting `stps`", "`steps`"),
        (["config", "show", "optimizer.learning_rat=3"], "unknown setting `optimizer.learning_rat`", "learning_rate`?"),
        (["config", "show", "steps=abc"], "`steps` should be a whole number", "4_096"),
        (["config", "show", "steps=-1"], "`steps` should be at least 0", "Optimizer steps"),
        (["config", "show", "optimizer=muonn"], "unknown optimizer `muonn`", "`muon`"),
        (["config", "show", "optimizer=muon", "optimizer.b1=3"], "unknown setting `optimizer.b1`", None),
        (["config", "show", "zzz"], "unknown recipe `zzz`", None),
        (["config", "show", "c.yml"], "no settings file `c.yml`", "did you mean"),
        (["config", "show", "a.yml", "steps"], "`steps` is not a setting", "`key=value`"),
        (["config", "explain", "stepz"], "unknown setting `stepz`", "`steps`"),
    ],
)
def test_a_mistake_is_told_in_five_lines_on_stderr(here, capsys, words, what, hint):
    before = sorted(here.rglob("*"))
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert what in err
    assert (hint or "") in err
    assert len(err.splitlines()) <= 5
    assert "\033" not in err
    assert sorted(here.rglob("*")) == before


def test_three_mistakes_at_once(here, capsys):
    (here / "bad.yml").write_text("stpes: 3\noptimizer:\n  learning_rate: -1\n")
    before = sorted(here.rglob("*"))
    assert main(["config", "show", "bad.yml", "warmup=soon"]) == 2
    errors = capsys.readouterr().err.split("\n\nerror: ")
    assert len(errors) == 3
    assert all(len(text.splitlines()) <= 5 for text in errors)
    assert "set by bad.yml:1" in errors[0]
    assert sorted(here.rglob("*")) == before


def _raising(monkeypatch, error):
    def app(**_):
        raise error

    monkeypatch.setitem(argosy.cli.VERBS, "try", ("try_module", ""))
    monkeypatch.setitem(sys.modules, "try_module", SimpleNamespace(app=app))  # pyright: ignore[reportArgumentType]
    return main(["try"])


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (BadInput("no", where="there", hint="so"), 2, "error: no\n  there\n\nhint: so\n"),
        (Damaged("torn"), 1, "error: torn\n"),
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError("a bug"), 1, "ZeroDivisionError: a bug"),
    ],
)
def test_exit_codes(monkeypatch, capsys, error, code, says):
    assert _raising(monkeypatch, error) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert ("Traceback" in err) == isinstance(error, ZeroDivisionError)


def test_a_broken_pipe_is_quiet():
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "argosy", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""


def test_color_only_where_it_is_wanted(monkeypatch, capsys):
    terminal: Any = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert can_color(terminal)
    assert not can_color(SimpleNamespace(isatty=lambda: False))  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr("argosy.cli.output.can_color", lambda stream: True)
    fail(BadInput("no", hint="so"))
    assert capsys.readouterr().err == "\033[1;31merror:\033[0m no\n\n\033[36mhint:\033[0m so\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert not can_color(terminal)


def test_json_is_json_whatever_the_numbers(capsys):
    answer("words", {"a": [float("nan"), 1.5, {"b": float("-inf")}], "c": "é"}, as_json=True)
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document == {"a": ["nan", 1.5, {"b": "-inf"}], "c": "é"}


# ---- argosy config


def test_show(here, capsys):
    assert main(["config", "show", "b.yml", "optimizer.ns_steps=6"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    optimizer = {"name": "muon", "learning_rate": 0.02, "ns_steps": 6}
    settings = {"steps": 2, "warmup": float("inf"), "optimizer": optimizer}
    assert yaml.safe_load(out) == settings
    assert "  ns_steps: 6          # command line" in out.splitlines()
    assert main(["config", "show", "b.yml", "optimizer.ns_steps=6", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["settings"] == {**settings, "warmup": "inf"}
    assert document["set_by"]["steps"] == "b.yml"


def test_show_without_a_recipe(here, capsys):
    assert main(["config", "show", "steps=4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["steps"] == 4


def test_explain(here, capsys):
    assert main(["config", "explain", "steps", "a.yml", "steps=3"]) == 0
    assert "Optimizer steps." in capsys.readouterr().out
    assert main(["config", "explain", "optimizer", "a.yml", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["key"] for entry in document] == ["optimizer.name", "optimizer.learning_rate"]


def test_difference(here, capsys):
    assert main(["config", "diff", "a.yml", "b.yml"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["steps", "1", "->", "2"]
    assert main(["config", "diff", "a.yml", "b.yml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0] == {"key": "steps", "a": 1, "b": 2}
    assert main(["config", "diff", "a.yml", "a.yml"]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_reference_and_schema(here, capsys):
    assert main(["config", "reference"]) == 0
    assert capsys.readouterr().out.startswith("# Settings\n")
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["steps"]["description"] == "Optimizer steps."
