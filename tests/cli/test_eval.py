"""`argosy eval` as a user meets it: table and JSON, the run it belongs to, mistakes, Ctrl-C, two models compared."""

import json
import shutil
import signal
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import jax
import pytest
from campaign_kill import SMALL
from laws.families import CASES, noisy_model

import argosy
from argosy.checkpoint.run_directory import RunDirectory
from argosy.cli import main
from argosy.cli.verbs import eval as verb
from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.evals.settings import EvalSettings
from argosy.evals.tasks import TASKS
from argosy.infer.lm import LM
from argosy.jobs.train import Quiet
from argosy.models.parts.stack import Unroll

SHORT = ["window=32", "max_tokens=3", "--json"]
WORDS = [word for word in SMALL if not word.startswith(("data.source", "model.vocab", "model.context"))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tales"
    config = CASES["llama-plain"].model_copy(update={"vocab": ByteTokenizer.vocab, "context": 96})
    LM(config, noisy_model(config, Unroll()), ByteTokenizer()).save(folder)
    return folder


# Sixteen sequences of up to 32 tokens everywhere: one program scores them all.
@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = {
        "copa": [{"query": f"{i} is", "choices": ["odd", "even"], "gold": (i + 1) % 2} for i in range(6)],
        "simple_arithmetic": [{"context": f"{i} + 1 =", "continuation": f" {i + 1}"} for i in range(3)],
        "ifeval": [{"prompt": "Go", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}],
        "lambada_openai": [{"context": f"a b {i}", "continuation": "c"} for i in range(12)],
    }
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    (folder / "a.txt").write_text("some words and some more " * 20)
    return folder


@pytest.fixture(autouse=True)
def _quiet_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    yield
    assert jax.config.jax_compilation_cache_dir == before  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
def test_json_has_every_task_with_its_metrics(model: Path, data: Path, capsys: pytest.CaptureFixture[str]):
    tasks = "copa,lambada,simple_arithmetic,ifeval,perplexity"
    assert main(["eval", str(model), f"tasks={tasks}", f"data={data}", f"text={data / 'a.txt'}", *SHORT]) == 0
    out, err = capsys.readouterr()
    results = json.loads(out)["tasks"]
    assert {name: list(numbers)[:4] for name, numbers in results.items()} == {
        "copa": ["acc", "stderr", "acc_norm", "acc_norm_stderr"],
        "lambada_openai": ["acc", "stderr", "loss", "loss_stderr"],
        "simple_arithmetic": ["exact_match", "stderr", "exact_match_flexible", "exact_match_flexible_stderr"],
        "ifeval": ["prompt_level_strict_acc", "stderr", "inst_level_strict_acc", "inst_level_strict_acc_stderr"],
        "perplexity": ["loss", "stderr", "perplexity", "perplexity_stderr"],
    }
    assert [results[name]["n"] for name in ("copa", "simple_arithmetic", "ifeval")] == [6, 3, 1]
    assert {"loss", "perplexity", "bits_per_byte", "tokens", "n", "stderr"} <= set(results["perplexity"])
    first = err.splitlines()[0]
    assert first.startswith(f"{model}: copa (6 rows), lambada_openai (12 rows), simple_arithmetic (3 rows), ifeval (1 row)")


def test_the_table_has_a_line_for_each_metric_and_limit_is_said(model: Path, data: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["eval", str(model), "tasks=copa", f"data={data}", "limit=5"]) == 0
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["task", "metric", "value", "stderr", "n"]
    assert [line[:2] for line in lines[1:]] == [["copa", "acc"], ["acc_norm", lines[2][1]]]
    assert lines[1][-1] == "5"
    assert "copa (the first 5 of 6 rows)" in err


def test_what_n_counts_is_said_where_there_is_one_row_or_few_windows(model: Path, data: Path, capsys: pytest.CaptureFixture[str]):
    """One row has no standard error (neither 0 nor NaN); one window of text has the error of its stretches, and n is theirs."""
    words = [str(model), "tasks=copa,perplexity", f"data={data}", f"text={data / 'a.txt'}", "limit=1"]
    assert main(["eval", *words, "--json"]) == 0
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    assert (tasks["copa"]["n"], tasks["copa"]["stderr"], tasks["copa"]["acc_norm_stderr"]) == (1, None, None)
    assert (tasks["perplexity"]["n"], tasks["perplexity"]["rows"]) == (1, "stretches of 128 tokens")
    assert tasks["perplexity"]["tokens"] == 96
    assert main(["eval", *words]) == 0
    out = capsys.readouterr().out
    assert "copa: a single row has no standard error" in out
    assert "perplexity: n counts stretches of 128 tokens, because there are few windows" in out
    assert "nan" not in out


@pytest.mark.slow
def test_results_are_added_to_the_run_and_shown_in_its_report(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    words = ["data.tokenizer=byte", f"data.source={data / 'a.txt'}", "steps=2", "checkpoint.every=1", "model.context=32"]
    argosy.fit("tiny", *WORDS, *words, f"dir={run}", view=Quiet())
    for model, step in ((run, 2), (run / "checkpoints" / "1", 1)):
        assert main(["eval", str(model), f"data={data / 'a.txt'}", "limit=15", "--json"]) == 0
        loss = json.loads(capsys.readouterr().out)["tasks"]["perplexity"]["loss"]
        last = RunDirectory(run).evaluations()[-1]
        assert (last["step"], last["tasks"]["perplexity"]["loss"]) == (step, loss)
        assert last["settings"] == {"data": str(data / "a.txt"), "limit": 15}
        page = unescape((run / "report.html").read_text())
        assert "Evaluations" in page
        assert f"{loss:.4f}" in page
    with (run / "evaluations.jsonl").open("a") as file:
        file.write('{"torn')
    assert len(RunDirectory(run).evaluations()) == 2
    assert main(["train", "tiny", *WORDS, *words, f"dir={run}"]) == 0, "an evaluated run is still a run"


def test_two_models_are_compared_row_by_row(model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = tmp_path / "rows.jsonl"
    words = ["eval", str(model), "tasks=copa", f"data={data}"]
    assert main([*words, f"rows={rows}"]) == 0
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(line["task"], line["row"]) for line in lines] == [("copa", i) for i in range(6)]
    wrong = 1 - lines[0]["values"]["acc"]
    lines[0]["values"]["acc"] = wrong
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    assert main([*words, f"against={rows}", "--json"]) == 0
    comparison = json.loads(capsys.readouterr().out)["tasks"]["copa"]["against"]
    assert comparison["acc"]["n"] == 6
    assert comparison["acc"]["difference"] == pytest.approx((1 - 2 * wrong) / 6)
    assert comparison["acc_norm"]["difference"] == 0
    assert main([*words, f"against={rows}"]) == 0
    assert "95 % interval" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_prints_the_tasks_that_are_finished(model: Path, data: Path, monkeypatch, capfd: pytest.CaptureFixture[str]):
    def steps(self, planned, done, of):
        if planned.task.name == "simple_arithmetic" and done:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(verb.Steps, "__call__", steps)
    assert main(["eval", str(model), "tasks=copa,simple_arithmetic,ifeval", f"data={data}", "--json"]) == 130
    out, err = capfd.readouterr()
    assert list(json.loads(out)["tasks"]) == ["copa"]
    assert "the tasks that are finished are printed" in err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["tasks=arc_esy"], "did you mean `arc_easy`?"),
        (["tasks=arc_easy"], "no file of arc_easy"),
        (["tasks=piqa,arc_easy,copa"], "error: no file of piqa in DATA\n  looked for"),
        (["tasks=arc_esy,copa,piga"], "did you mean `piqa`?"),
        (["tasks=copa", "limt=3"], "did you mean `limit`?"),
        (["tasks=copa", "shots=6"], "shots=6, and there are 5 other rows"),
        (["tasks=copa", "rows=gone/a.jsonl"], "no folder for gone/a.jsonl"),
        (["tasks=copa", "against=gone"], "cannot read gone"),
        (["tasks=copa", "against=DATA/copa.jsonl"], "holds no rows of an evaluation"),
    ],
)
def test_mistakes_are_answered_before_the_model_is_loaded(
    data: Path, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
):
    monkeypatch.setattr("argosy.jobs.machine.start_jax", lambda: pytest.fail("jax was started"))
    monkeypatch.chdir(tmp_path)
    words = [word.replace("DATA", str(data)) for word in words]
    assert main(["eval", ".", f"data={data}", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert problem.replace("DATA", str(data)) in err


def test_a_model_that_is_not_there_or_cannot_be_evaluated(model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["eval", "gone", "tasks=copa", f"data={data}"]) == 2
    assert "`gone`" in capsys.readouterr().err
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    for path in bare.glob("*token*"):
        path.unlink()
    assert main(["eval", str(bare), "tasks=copa", f"data={data}"]) == 2
    assert "without a tokenizer" in capsys.readouterr().err
    assert main(["eval", str(model), "tasks=copa", f"data={data}", "chat=true"]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_settings_and_tasks_are_documented():
    text = (Path(__file__).parents[2] / "docs" / "guides" / "evaluation.md").read_text(encoding="utf-8")
    assert not [name for name in (*EvalSettings.model_fields, *TASKS) if f"`{name}`" not in text]
