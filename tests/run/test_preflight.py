"""All mistakes of a run at once, before jax is imported."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from campaign_kill import SMALL

from argosy.checkpoint.run_directory import RunDirectory
from argosy.core.errors import BadInput, SettingsError, UserError
from argosy.core.storage import Store
from argosy.jobs.quickstart import proof
from argosy.run.assembly.assemble import assemble
from argosy.run.assembly.decided import Decided
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from argosy.run.start.preflight import checked_settings, directory_of


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("words")
    return tmp_path


WRONG_INPUTS = {
    "data.source=gone.txt": "no such data source: `gone.txt`",
    "data.tokenizer=gone": "no tokenizer at `gone`",
    "init.weights=gone": "no such folder: `gone`",
    "mesh.data=3": "data.batch = 8 does not divide over mesh.data = 3",
    "dir=file": "file is a file",
}


def mistakes(*words: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        checked_settings("tiny", words)
    problems = caught.value.problems if isinstance(caught.value, SettingsError) else [caught.value]
    return sorted(problem.what for problem in problems)


@pytest.mark.parametrize("number", range(len(WRONG_INPUTS) + 1))
def test_missing_files_a_mesh_and_a_directory_are_reported_at_once(here: Path, number: int):
    """All of them, and each without one of the others."""
    words = [word for i, word in enumerate(WRONG_INPUTS) if i != number]
    assert mistakes(*words) == sorted(WRONG_INPUTS[word] for word in words)


@pytest.mark.parametrize(("word", "problem"), [("stpes=3", "unknown setting `stpes`"), ("model=smal", "unknown model preset `smal`")])
def test_they_are_reported_beside_mistakes_in_the_settings(here: Path, word: str, problem: str):
    assert mistakes(word, *WRONG_INPUTS) == sorted([problem, *WRONG_INPUTS.values()])


def test_a_group_with_a_mistake_is_not_checked_further(here: Path):
    assert mistakes("data.batch=many", "data.source=gone.txt", "dir=file") == sorted(
        ["`data.batch` should be a whole number, not `many`", "file is a file"]
    )


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [("rows.jsonl", b'{"txt": "a"}\n', "a record of no known format"), ("latin.txt", b"caf\xe9", "not UTF-8: byte 0xe9")],
)
def test_the_beginning_of_a_text_is_read(here: Path, name: str, text: bytes, problem: str):
    (here / name).write_bytes(text)
    mesh, data = sorted(mistakes(f"data.source={name}", "mesh.data=3"), key=lambda message: problem in message)
    assert "mesh.data = 3" in mesh
    assert problem in data


def test_a_finished_run_needs_no_data(here: Path):
    text = here / "text.txt"
    text.write_text("words " * 100)
    words = ["steps=4", "data.source=text.txt", "dir=run"]
    RunDirectory("run").write_settings(compose(Run, "tiny", words))
    text.unlink()
    assert mistakes(*words) == ["no such data source: `text.txt`"]
    (here / "run" / "checkpoints" / "4").mkdir(parents=True)
    (here / "run" / "checkpoints" / "4" / "manifest.json").write_text("{}")
    assert checked_settings("tiny", words).value.steps == 4


def test_a_resumed_run_needs_no_weights_to_start_from(here: Path):
    base = ["steps=4", "dir=run"]
    RunDirectory("run").write_settings(compose(Run, "tiny", base))
    text = (here / "run" / "settings.yml").read_text().replace("weights: null", "weights: gone")
    (here / "run" / "settings.yml").write_text(text)
    assert mistakes(*base, "init.weights=gone") == ["no such folder: `gone`"]
    (here / "run" / "checkpoints" / "2").mkdir(parents=True)
    (here / "run" / "checkpoints" / "2" / "manifest.json").write_text("{}")
    assert checked_settings("tiny", [*base, "init.weights=gone"]).value.init.weights == "gone"


def test_a_state_that_is_not_there(here: Path):
    with pytest.raises(BadInput, match="no such run: `gone`"):
        checked_settings("tiny", ["init.state=gone"])


def test_what_only_jax_knows_is_reported_at_once_too():
    words = ["execution.attention=blokked", "execution.experts=none-such", "mesh.data=3", "mesh.fsdp=1", "data.batch=9"]
    run = compose(Run, "tiny", [*SMALL, *words, "data.source=stdlib"]).value
    with pytest.raises(SettingsError) as caught:
        assemble(run, Decided.here(run))
    problems = [problem.what for problem in caught.value.problems]
    assert len(problems) == 4
    for problem, part in zip(problems, ["blokked", "none-such", "does not make 8 devices", "the tokenizer has 258 tokens"]):
        assert part in problem


def test_the_proof_says_what_it_does_before_it_does_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    happened: list[str] = []
    monkeypatch.setattr(proof, "_trained", lambda recipe, words: happened.append("trained"))
    monkeypatch.setattr(proof, "kill_at", lambda *_: happened.append("killed") or 27)
    monkeypatch.setattr(proof, "RunDirectory", lambda folder: SimpleNamespace(steps=lambda: [10, 20]))
    monkeypatch.setattr(proof, "digest", lambda *_: "")
    proof.prove(tmp_path, "tiny", [], happened.append)
    assert happened == [
        "training 40 steps, undisturbed ...", "trained",
        "training the same 40 steps in another process, to be killed after step 25 ...", "killed",
        "killed at step 27; resuming from step 20 ...", "trained",
    ]  # fmt: skip


def test_a_run_in_a_store_is_a_recipe_as_its_folder_is(here: Path):
    """It goes on where it is, by its own settings; what may not change is refused there too."""
    address = f"memory://{here.name}/run"
    words = ["data.batch=4", "steps=7"]
    for place in ("run", address):
        RunDirectory(place).write_settings(compose(Run, "tiny", [*words, f"dir={place}"]))
    (here / "run").rename(here / "moved")
    folder = checked_settings("moved", ["steps=9"])
    for recipe, where in ((address, address), (f"{address}/", address), (f"file://{here}/moved", f"{here}/moved")):
        reading = checked_settings(recipe, ["steps=9"])
        assert directory_of(reading, recipe) == where
        assert reading.value.model_copy(update={"dir": None}) == folder.value.model_copy(update={"dir": None})
        assert reading.origin["data.batch"] == f"{where}/settings.yml"
        assert directory_of(checked_settings(recipe, ["dir=new"]), recipe) == "new"
    with pytest.raises(BadInput, match="with other settings") as caught:
        checked_settings(address, ["data.batch=8"])
    assert caught.value.where == "data.batch: 4 there, 8 now"
    Store(address).write_text("settings.yml", "steps: [")
    with pytest.raises(UserError, match="not YAML"):
        checked_settings(address)
