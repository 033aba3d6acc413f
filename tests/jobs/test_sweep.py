"""A sweep: a run for each combination, each in its own directory."""

import json

import pytest

from argosy.cli.verbs.runs import comparison
from argosy.core.errors import ArgosyError, BadInput, SettingsError
from argosy.jobs.sweep import Combination, combinations, combinations_text, sweep


def test_every_combination_has_its_own_words_and_directory():
    runs = combinations("tiny", ["optimizer.learning_rate=1e-3,3e-3", "model.layers=1,2", "steps=5"])
    assert [run.changes for run in runs] == [
        ("optimizer.learning_rate=1e-3", "model.layers=1"),
        ("optimizer.learning_rate=1e-3", "model.layers=2"),
        ("optimizer.learning_rate=3e-3", "model.layers=1"),
        ("optimizer.learning_rate=3e-3", "model.layers=2"),
    ]
    assert runs[0].dir == "runs/tiny-sweep/learning_rate=1e-3,layers=1"
    assert runs[0].words == ("steps=5", *runs[0].changes, f"dir={runs[0].dir}")
    assert len({run.dir for run in runs}) == 4


def test_the_folder_is_the_users_and_equal_last_names_are_written_out():
    runs = combinations("tiny", ["eval.every=5,6", "log.every=1,2", "dir=out"])
    assert runs[0].dir == "out/eval.every=5,log.every=1"


@pytest.mark.parametrize(
    ("text", "parts"), [("1", ["1"]), ("1,2", ["1", "2"]), ("[1,2],[3]", ["[1,2]", "[3]"]), ("'a,b',c", ["'a,b'", "c"])]
)
def test_commas_inside_brackets_and_quotes_part_nothing(text, parts):
    assert combinations_text(text) == parts


def test_mistakes_are_found_before_the_first_run():
    with pytest.raises(SettingsError, match="unknown setting"):
        combinations("tiny", ["stepz=1,2"])
    with pytest.raises(SettingsError, match="should be greater than 0"):
        combinations("tiny", ["steps=5,0"])
    with pytest.raises(BadInput, match="same settings"):
        combinations("tiny", ["steps=5,5"])


def test_a_failure_does_not_end_the_others_and_a_signal_does():
    runs = [Combination((f"steps={i}",), (), str(i)) for i in range(4)]
    done, messages = [], []

    def train(run):
        done.append(run.dir)
        if run.dir == "1":
            raise ArgosyError("the loss is not finite")
        return 130 if run.dir == "2" else 0

    assert sweep(runs, train, messages.append) == 130
    assert done == ["0", "1", "2"]
    assert "the loss is not finite" in "".join(messages)
    assert sweep(runs[:2], train, messages.append) == 1
    assert sweep(runs[:1], train, messages.append) == 0


@pytest.mark.slow
def test_a_sweep_from_the_command_line_skips_what_is_done_and_ends_in_a_comparison(tmp_path, monkeypatch, capsys):
    from campaign_kill import SMALL

    from argosy.cli import main

    monkeypatch.chdir(tmp_path)
    words = ["sweep", "tiny", *SMALL, "steps=2", "optimizer.learning_rate=1e-3,2e-3", "dir=out", "--json"]
    assert main(words) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["settings"]["optimizer.learning_rate"] == [1e-3, 2e-3]
    assert compared["numbers"]["state"] == ["done", "done"]
    assert main(words) == 0
    assert capsys.readouterr().err.count("is done: 2 steps of 2") == 2


def test_many_runs_are_compared_in_a_row_each():
    """A column each would make lines of 300 characters."""
    names = [f"runs/tiny-sweep/learning_rate={i}e-3" for i in range(1, 9)]
    report = {"runs": names, "numbers": {"loss": [2.5] * 8, "step": [4] * 8}, "settings": {"optimizer.learning_rate": [1e-3] * 8}}
    lines = comparison(report).splitlines()
    assert max(map(len, lines)) <= 120
    assert [line.split()[0] for line in lines if line.startswith("runs/")] == [*names, *names]
    few = comparison({"runs": names[:2], "numbers": {"loss": [2.5] * 2}, "settings": {}})
    assert names[0] in few.splitlines()[0]
    assert names[1] in few.splitlines()[0]
