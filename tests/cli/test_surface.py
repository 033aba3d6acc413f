"""The command line as a user meets it: exit codes, streams, errors, and what starting costs."""

import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import yaml
from helpers import stories_model
from pydantic import Field
from schema_check import check

import argosy.cli
import argosy.cli.verbs.config
from argosy.cli import main
from argosy.cli.output import Doing, answer, as_typed, can_color, conclude, fail, forgive
from argosy.cli.verbs.convert import ConversionProgress
from argosy.core.errors import ATTEMPT, SUPERVISED, BadInput, Busy, Damaged, Final
from argosy.core.process.streams import silence
from argosy.core.registry import Registry
from argosy.core.settings import Choice, Settings, read_settings, words_layer
from argosy.jobs.complete import SCRIPTS
from argosy.run.settings.recipe_files import recipes

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
    warmup: float = Field(float("inf"), allow_inf_nan=True)
    optimizer: Annotated[Any, Choice(Registry("optimizer", {"adamw": AdamW, "muon": Muon}))] = "adamw"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with two recipes, and a small root schema without base settings."""
    (tmp_path / "a.yml").write_text("steps: 1\n")
    (tmp_path / "b.yml").write_text("steps: 2\noptimizer: muon\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(argosy.cli.verbs.config, "root", lambda: Run)
    compose = functools.partial(argosy.cli.verbs.config.compose, configs=tmp_path / "configs")
    monkeypatch.setattr(argosy.cli.verbs.config, "compose", compose)
    return tmp_path


# ---- starting


def test_help_imports_neither_jax_nor_numpy_nor_typer():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "importtime", "-m", "argosy", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "argosy" in imported
    assert not {"jax", "jaxlib", "numpy", "flax", "pydantic", "typer"} & imported
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
    ("words", "problem", "hint"),
    [
        (["confg"], "unknown verb `confg`", "did you mean `config`?"),
        (["zzzzz"], "unknown verb `zzzzz`", "help` lists all"),
        (["fine-tune", "x"], "unknown verb `fine-tune`", "argosy train sft model=FOLDER"),
        (["grpo"], "unknown verb `grpo`", "`argosy train grpo model=FOLDER"),
        (["merge"], "unknown verb `merge`", "`argosy convert RUN FOLDER`"),
        (["generate", "x", "--prompt", "hi"], "no such option: --prompt", "the prompt is the second word"),
        (["train", "tiny", "--steps", "100"], "no such option: --steps", "`steps=100`"),
        (["train"], f"train needs a recipe\n  recipes are {', '.join(recipes())}", "`argosy train tiny`"),
        (["train", "steps=5"], "`steps=5` is a setting, not a recipe\n  recipes are", "argosy train tiny steps=5"),
        (["train", "--config", "tiny"], "no such option: --config", "the recipe is the first word: `argosy train tiny`"),
        (["train", "-c", "tiny"], "no such option: -c", "the recipe is the first word: `argosy train tiny`"),
        (["train", "tiny", "steps", "=", "5"], "blanks around the `=` of `steps`", "`steps=5` without blanks"),
        (["train", "tiny", "steps=", "5"], "blanks around the `=` of `steps`", "`steps=5` without blanks"),
        (["train", "tiny", "steps", "=5"], "blanks around the `=` of `steps`", "`steps=5` without blanks"),
        (["train", "tiny", "steps=", "seed=5"], "`steps=` has no value", None),
        (["train", "tiny", "--lr=1e-3"], "no such option: --lr", "`optimizer.learning_rate=1e-3`"),
        (["config", "show", "tiny", "--max-steps=9"], "no such option: --max-steps", "`steps=9`"),
        (["generate", "x", "--max-tokens", "9"], "no such option: --max-tokens", "`max_tokens=9`"),
        (["generate", "x", "hello", "max_tokns=3"], "unknown setting `max_tokns`", "`max_tokens`"),
        (["generate", "x", "seed=123456789012345678901"], "`seed` should be a whole number", None),
        (["sweep", "tiny", "steps=1"], "no setting has several values", "1e-3,3e-3"),
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
def test_a_mistake_is_reported_in_five_lines_on_stderr(here, capsys, words, problem, hint):
    before = sorted(here.rglob("*"))
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert problem in err
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
        (Final("again"), 1, "error: again\n"),
        (Busy("held"), 1, "error: held\n"),
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


def test_what_starts_failed_processes_again_is_told_when_not_to(monkeypatch):
    """65 is EX_DATAERR. A process that was started again waits for what holds its files, which may be the one before it."""
    monkeypatch.setenv(SUPERVISED, "1")
    assert [error("no").exit_code for error in (BadInput, Damaged, Final, Busy)] == [2, 1, 65, 65]
    monkeypatch.setenv(ATTEMPT, "1")
    assert [error("no").exit_code for error in (Final, Busy)] == [65, 1]


@pytest.mark.parametrize("words", [["--help"], ["completion", "bash"]], ids=["ours", "typer's"])
def test_a_broken_pipe_is_quiet(words):
    """Typer makes an exit with 1 of the error; whatever comes after the pipe broke must not be written."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-u", "-m", "argosy", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""


def test_an_error_that_nobody_reads_keeps_its_exit_code():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-m", "argosy", "none-such"], stderr=writer, timeout=60)
    finally:
        os.close(writer)
    assert done.returncode == 2


@pytest.fixture
def dead_pipe():
    """A pipe that nobody reads any more, as a text stream."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        yield stream
        silence(stream)


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("progress_class", [Doing, lambda stream: ConversionProgress("written", stream)], ids=["doing", "progress"])
def test_progress_that_nobody_reads_does_not_end_a_verb(dead_pipe, is_live, progress_class, monkeypatch):
    monkeypatch.setattr(sys, "stderr", dead_pipe)
    with progress_class(dead_pipe) as progress:
        progress.is_live = is_live
        progress.shown = -60.0
        for _ in range(3):
            progress(*(["loading"] if isinstance(progress, Doing) else [1, 10, 0]))


def test_a_result_that_is_on_disk_needs_no_reader_and_an_answer_does(dead_pipe, monkeypatch):
    monkeypatch.setattr(sys, "stdout", dead_pipe)
    with pytest.raises(BrokenPipeError):
        answer("x" * 100_000, {}, as_json=False)
    conclude("written", {}, as_json=False)
    sys.stdout.flush()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a full device")
def test_a_result_that_does_not_fit_on_the_disk_is_an_error(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(OSError, match="No space"):
            conclude("written", {}, as_json=False)
        silence(full)


def test_verbs_that_write_files_conclude_and_verbs_that_look_answer():
    """`| head` must not turn a finished training into a failure."""
    files = {"train", "sweep", "quickstart", "convert", "report", "data", "config", "batch", "quantize", "export", "bundle", "push"}
    concluding = {path.stem for path in (Path(argosy.cli.__file__).parent / "verbs").glob("*.py") if " conclude(" in path.read_text()}
    assert concluding == files


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


def test_a_narrow_code_page_prints_question_marks_and_json_loses_nothing(monkeypatch):
    raw = io.BytesIO()
    page: Any = io.TextIOWrapper(raw, encoding="cp1252", write_through=True)
    forgive(page)
    monkeypatch.setattr(sys, "stdout", page)
    answer("│ 3 → 4", {}, as_json=False)
    answer("", {"a": "│"}, as_json=True)
    text, _, document = raw.getvalue().decode("cp1252").partition("\n")
    assert text == "? 3 ? 4"
    assert json.loads(document) == {"a": "│"}


def test_what_to_type_next_is_what_the_user_typed(monkeypatch, capsys):
    text = "argosy train tiny, or `argosy config show`; argosy is fine, and so is my-argosy train"
    assert as_typed(text) == text
    monkeypatch.setenv("ARGOSY_COMMAND", "./run")
    assert as_typed(text) == "./run train tiny, or `./run config show`; argosy is fine, and so is my-argosy train"
    assert main(["train", "--help"]) == 0
    assert "Usage: ./run train" in capsys.readouterr().out


def test_a_report_says_what_the_user_types(monkeypatch):
    from argosy.jobs.history.report import command

    settings = [("steps", 5, "command line"), ("seed", 0, "recipes/tiny.yml")]
    assert command(Path("runs/a"), settings).splitlines()[0] == "argosy train runs/a dir=runs/a-again"
    monkeypatch.setenv("ARGOSY_COMMAND", "./run")
    text = "./run train runs/a dir=runs/a-again\n\n# as it was typed\n./run train tiny steps=5"
    assert command(Path("runs/a"), settings) == text


# ---- argosy generate


@pytest.mark.parametrize(
    ("arguments", "sampling"),
    [
        ({}, {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1}),
        ({"temperature": 1.5}, {"temperature": 1.5, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1}),
        ({"top_k": 5}, {"temperature": 0.6, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1}),
        ({"temperature": 0}, {"temperature": 0, "repetition_penalty": 1.1}),
        ({"temperature": 0, "repetition_penalty": 1}, {"temperature": 0, "repetition_penalty": 1}),
    ],
)
def test_what_is_given_replaces_only_itself_in_the_generation_config(arguments, sampling):
    from argosy.cli.verbs.generate import Generate, sampling_options

    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    assert sampling_options(Generate(**arguments), config) == sampling


def test_structured_output_is_read_from_files_and_words(tmp_path):
    from argosy.cli.verbs.generate import Generate, literal, structured_of

    file = tmp_path / "schema.json"
    file.write_text('{"type": "null"}')
    assert structured_of(Generate()) is None
    assert structured_of(Generate(json_schema=str(file))) == {"json": '{"type": "null"}'}
    assert structured_of(Generate(grammar=str(file))) == {"grammar": '{"type": "null"}'}
    assert structured_of(Generate(json_object=True)) == {"json_object": True}
    assert structured_of(Generate(choice=("a", "b"))) == {"choice": ("a", "b")}
    words = [literal(word) for word in ('regex=[A-Z]+: "\\d"', "stop=regex=[a]")]
    generation = read_settings(Generate, words_layer(words)).value
    assert structured_of(generation) == {"regex": '[A-Z]+: "\\d"'}
    assert generation.stop == "regex=[a]"
    with pytest.raises(BadInput, match="regex and choice exclude each other"):
        structured_of(Generate(regex="a", choice=("b",)))
    with pytest.raises(BadInput, match="cannot read"):
        structured_of(Generate(grammar=str(tmp_path / "gone")))


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


def test_a_new_recipe_is_the_one_it_extends_and_every_comment_is_a_setting(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["config", "new", "mine", "quickstart"]) == 0
    assert capsys.readouterr().out == "mine.yml\n"
    text = (tmp_path / "mine.yml").read_text()
    schema = json.loads((tmp_path / "argosy.schema.json").read_text())
    assert text.startswith("# yaml-language-server: $schema=argosy.schema.json\n")
    settings = text.partition("extends: quickstart\n")[2]
    assert "Random seed" in settings
    (tmp_path / "all.yml").write_text("extends: quickstart\n" + re.sub(r"(?m)^# ", "", settings))
    for file in ("mine.yml", "all.yml"):
        assert not list(check(schema, yaml.safe_load((tmp_path / file).read_text())))
        assert main(["config", "diff", "quickstart", file]) == 0
        assert capsys.readouterr().out == "no difference\n"
    assert main(["config", "new", "mine"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "mine.yml").read_text() == text


# ---- argosy completion


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tr"], ["train"]),
        (["train", "ti"], ["tiny"]),
        (["train", "tiny", "optimizer.w"], ["optimizer.weight_decay="]),
        (["train", "tiny", "optimizer=m"], ["optimizer=muon"]),
        (["train", "tiny", "precision=b"], ["precision=bfloat16"]),
        (["train", "tiny", "data.shuffle="], ["data.shuffle=true", "data.shuffle=false"]),
        (["train", "tiny", "model=llama3.2"], ["model=llama3.2-1b", "model=llama3.2-3b"]),
        (["config", "show", "tiny", "see"], ["seed="]),
        (["generate", "x", "max"], ["max_tokens="]),
        (["models", "show", "gpt2-x"], ["gpt2-xl"]),
        (["eval", "x", "win"], ["window="]),
        (["eval", "x", "tasks=arc"], ["tasks=arc_easy", "tasks=arc_challenge"]),
        (["eval", "x", "tasks=arc_easy,arc"], ["tasks=arc_easy,arc_challenge"]),
        (["report", ""], []),
    ],
)
def test_completion(words, expected, capsys):
    assert main(["completion", "words", "--", *words]) == 0
    assert capsys.readouterr().out.split() == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_ask_the_command(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "completion words --" in capsys.readouterr().out


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_bash_completes_a_value_after_the_equals_sign(tmp_path):
    (tmp_path / "argosy").write_text(f"#!/bin/sh\nexec '{sys.executable}' -m argosy \"$@\"\n")
    (tmp_path / "argosy").chmod(0o755)
    script = SCRIPTS["bash"] + """
COMP_LINE="argosy train tiny optimizer=mu" COMP_POINT=30
_argosy
echo "${COMPREPLY[*]}"
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment)
    assert done.stdout == "muon\n", done.stderr


@pytest.mark.parametrize("tokens, ended", [(600, True), (4, False)])
def test_text_that_fills_the_context_is_said_to_end_there(capsys: pytest.CaptureFixture[str], tokens: int, ended: bool):
    words = [f"max_tokens={tokens}", "engine.context=32", "ignore_eos=true"]
    assert main(["generate", str(stories_model()), "Once upon", *words]) == 0
    assert ("ended at the context of 32 tokens" in capsys.readouterr().err) is ended
