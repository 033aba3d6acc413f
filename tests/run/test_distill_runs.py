"""Runs of distillation: a student of another family and size learns from a run, a Hub folder and a GGUF; a resume is bit for bit."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from campaign_kill import SMALL
from helpers import Heard, shared

import argosy
from argosy.core.errors import BadInput, UserError
from argosy.core.storage import Store
from argosy.jobs.quickstart.proof import digest
from argosy.observe.metrics import by_step, read

STEPS, EVERY = 6, 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts and answers; only answers count."""
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    rows = [{"prompt": f"{i} {i % 7}:", "completion": f" {i % 10}" * (1 + i % 3)} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SIZES = ["model.context=64", "model.vocab=258", "model.layers=1"]


def fit(data: Path, run: Path, *more: str, steps: int = STEPS, recipe: str = "distill") -> str:
    words = [word for word in SMALL if not word.startswith(("data.", "eval.", "objective", "steps"))]
    words += [f"data.source={data}", "data.sequence=32", "data.batch=8", "data.epochs=99", "data.held_out=0.2"]
    words += [f"data.cache={run.parent / 'cache'}", "eval.every=3", "eval.batches=1", f"checkpoint.every={EVERY}", "log.every=1"]
    words += [] if "mesh.data=-1" in more else ["mesh.data=1"]
    words += SIZES
    heard = Heard()
    settings = ["model.family=llama", "optimizer=adamw", "optimizer.learning_rate=1e-2", "schedule=constant", f"dir={run}"]
    argosy.fit(recipe, *words, *settings, *more, view=heard, steps=steps)
    return heard.words


def losses(run: Path, name: str = "loss") -> dict[int, float]:
    return by_step(read(Store(run)), name)


@pytest.fixture(scope="module")
def teacher(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of another family and of more layers, which has learned the answers. Its vocabulary is padded."""
    run = tmp_path_factory.mktemp("teacher") / "run"
    fit(data, run, "model.family=qwen", "model.layers=2", "model.vocab=264", steps=30, recipe="sft")
    return run


@pytest.fixture(scope="module")
def whole(data: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    fit(data, run, f"objective.teacher={teacher}")
    return run


def test_a_student_comes_near_its_teacher(whole: Path):
    kl, agreement = losses(whole, "kl"), losses(whole, "agreement")
    assert kl[STEPS] < 0.8 * kl[1]
    assert agreement[STEPS] > agreement[1]
    evaluated = [line for line in read(Store(whole)) if "eval_loss" in line]
    assert evaluated[-1]["eval_kl"] < evaluated[0]["eval_kl"]
    # Of runs of distillation and of labels alone the same number is compared.
    assert evaluated[-1]["eval_perplexity"] == pytest.approx(np.exp(evaluated[-1]["eval_loss"]))
    for step, loss in losses(whole).items():
        assert loss == pytest.approx((kl[step] + losses(whole, "cross_entropy")[step]) / 2, rel=1e-5)
    header = next(line["header"] for line in read(Store(whole)) if "header" in line)
    assert header["memory"]["parameters"] > 2 * 4 * header["parameters"]


@pytest.mark.slow
def test_a_resume_is_bit_for_bit_from_the_same_teacher_although_its_run_went_on(
    whole: Path, data: Path, teacher: Path, tmp_path: Path
):
    run, teacher_run = tmp_path / "run", Path(shutil.copytree(teacher, tmp_path / "teacher"))
    fit(data, run, f"objective.teacher={teacher_run}", steps=EVERY)
    words = ["model.family=qwen", "model.layers=2", "model.vocab=264", "checkpoint.keep=9"]
    fit(data, teacher_run, *words, steps=33, recipe="sft")
    fit(data, run, f"objective.teacher={teacher_run}")
    assert losses(run) == losses(whole)
    assert digest(run, STEPS) == digest(whole, STEPS)
    shutil.rmtree(teacher_run / "checkpoints" / "30")
    with pytest.raises(BadInput, match="the teacher that this run learns from is not at"):
        fit(data, run, f"objective.teacher={teacher_run}", steps=STEPS + 1)


CACHED = ["objective.logits=cached", "objective.top=40"]


@pytest.fixture(scope="module")
def cached_run(data: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("cached") / "run"
    output = fit(data, run, f"objective.teacher={teacher}", *CACHED)
    assert "40 likeliest tokens, 164 bytes a target" in output
    return run


@pytest.mark.slow
def test_a_cached_teacher_gives_nearly_the_numbers_of_an_online_one(whole: Path, cached_run: Path):
    """40 of 258 tokens, in 16 bits, and no teacher in memory."""
    for name in ("cross_entropy", "kl", "agreement"):
        assert losses(cached_run, name)[1] == pytest.approx(losses(whole, name)[1], rel=0.02), name
    # Joined outcomes differ by less.
    assert losses(cached_run, "kl")[1] < losses(whole, "kl")[1]
    assert losses(cached_run, "kl")[STEPS] < losses(cached_run, "kl")[1]
    headers = [next(line["header"] for line in read(Store(run)) if "header" in line) for run in (cached_run, whole)]
    assert headers[0]["memory"]["parameters"] == 4 * headers[0]["parameters"] < headers[1]["memory"]["parameters"] / 2


@pytest.mark.parametrize("is_gone", [pytest.param(False, marks=pytest.mark.slow, id="kept"), pytest.param(True, id="gone")])
def test_a_resume_from_the_cache_is_bit_for_bit_also_where_it_is_made_again(
    cached_run: Path, data: Path, teacher: Path, tmp_path: Path, is_gone: bool
):
    run, settings = tmp_path / "run", [f"objective.teacher={teacher}", *CACHED]
    shutil.copytree(cached_run.parent / "cache", tmp_path / "cache")
    assert "likeliest tokens" not in fit(data, run, *settings, steps=EVERY)
    if is_gone:
        shutil.rmtree(tmp_path / "cache" / "teacher")
    assert ("likeliest tokens" in fit(data, run, *settings)) == is_gone
    assert losses(run) == losses(cached_run)
    assert digest(run, STEPS) == digest(cached_run, STEPS)


@pytest.mark.slow
def test_another_temperature_or_teacher_or_row_is_computed_again_and_another_student_not(
    cached_run: Path, data: Path, teacher: Path, tmp_path: Path
):
    shutil.copytree(cached_run.parent / "cache", tmp_path / "cache")
    settings = [f"objective.teacher={teacher}", *CACHED, "eval.batches=0"]
    for name, words, again in [
        ("a", ["model.layers=2", "seed=5", "data.batch=16", "objective.divergence=reverse"], False),
        ("b", ["objective.temperature=2"], True),
        ("c", ["data.sequence=24"], True),
        ("d", [f"objective.teacher={cached_run}"], True),
    ]:
        assert ("likeliest tokens" in fit(data, tmp_path / name, *settings, *words, steps=1)) == again, name


@pytest.mark.slow
def test_only_what_a_run_visits_is_computed_and_longer_runs_add_the_rest(data: Path, teacher: Path, tmp_path: Path):
    settings = [
        f"objective.teacher={teacher}",
        *CACHED,
        "eval.batches=0",
        "data.packing=fit",
        "data.sequence=16",
        "objective.head=chunks",
    ]
    assert "of 8 rows" in fit(data, tmp_path / "run", *settings, steps=1)
    assert "of 8 rows" in fit(data, tmp_path / "run", *settings, steps=2)


def test_eight_devices_give_the_same_run(whole: Path, data: Path, teacher: Path, tmp_path: Path):
    """Each device has its share of the student, of the teacher and of the rows."""
    fit(data, tmp_path / "run", f"objective.teacher={teacher}", "mesh.data=-1", "mesh.fsdp=4", "objective.head=chunks", steps=2)
    for step in (1, 2):
        assert losses(tmp_path / "run")[step] == pytest.approx(losses(whole)[step], rel=1e-5)


@pytest.mark.slow
def test_layers_are_brought_together(data: Path, teacher: Path, tmp_path: Path):
    """The student's only layer and the teacher's first; a resume is bit for bit."""
    run, settings = tmp_path / "run", [f"objective.teacher={teacher}", "objective.hidden=mse", "objective.layers.0=0", "eval.batches=0"]
    fit(data, run, *settings)
    assert losses(run, "hidden")[STEPS] < losses(run, "hidden")[1]
    fit(data, tmp_path / "halves", *settings, steps=EVERY)
    fit(data, tmp_path / "halves", *settings)
    assert digest(run, STEPS) == digest(tmp_path / "halves", STEPS)


WIDER = ["model.width=24", "objective.hidden=mse", "objective.layers.0=1"]


@pytest.mark.slow
def test_hidden_states_of_another_width_are_projected(data: Path, teacher: Path, tmp_path: Path):
    """The projection is trained and resumed bit for bit, and is no part of the model that is loaded, saved or started from."""
    run, settings = tmp_path / "run", [f"objective.teacher={teacher}", *WIDER]
    assert "of 24 features are projected to its 16: 384 weights" in fit(data, run, *settings)
    assert losses(run, "hidden")[STEPS] < 0.9 * losses(run, "hidden")[1]
    fit(data, tmp_path / "halves", *settings, steps=EVERY)
    fit(data, tmp_path / "halves", *settings)
    assert digest(run, STEPS) == digest(tmp_path / "halves", STEPS)
    lm = argosy.load(str(run))
    assert not hasattr(lm.module, "projection")
    lm.save(str(tmp_path / "hub"), format="hub")
    # Another run draws its own.
    for name, words in (("from-run", [f"init.weights={run}"]), ("from-hub", [f"init.weights={tmp_path / 'hub'}"])):
        fit(data, tmp_path / name, *settings, *words, "objective.relations.qq=1", "objective.relation_heads=2", steps=1)
        assert losses(tmp_path / name, "kl")[1] < losses(run, "kl")[1]
    fit(data, tmp_path / "state", *settings, f"init.state={tmp_path / 'halves'}", steps=STEPS + 1)
    assert losses(tmp_path / "state", "hidden")[STEPS + 1] < 0.9 * losses(run, "hidden")[1]
    # The teacher's own width needs none.
    assert "projected" not in fit(data, tmp_path / "equal", f"objective.teacher={teacher}", "objective.hidden=mse", steps=1)


@pytest.mark.slow
def test_projections_of_scanned_layers_over_devices_and_of_adapters(data: Path, teacher: Path, tmp_path: Path):
    settings = [f"objective.teacher={teacher}", *WIDER]
    fit(data, tmp_path / "one", *settings, steps=2)
    fit(data, tmp_path / "many", *settings, "mesh.data=4", "mesh.fsdp=2", "execution.run=scan", "execution.remat=full", steps=2)
    for name in ("loss", "hidden"):
        for step in (1, 2):
            assert losses(tmp_path / "many", name)[step] == pytest.approx(losses(tmp_path / "one", name)[step], rel=1e-4)
    run, adapted = tmp_path / "adapters", [*settings, f"init.weights={tmp_path / 'one'}", "adapter=lora", "adapter.rank=2"]
    fit(data, run, *adapted, steps=EVERY)
    fit(data, run, *adapted)
    assert losses(run, "hidden")[STEPS] < losses(run, "hidden")[1]
    assert (run / "adapter" / "adapter_config.json").exists()
    assert not hasattr(argosy.load(str(run)).module, "projection")


@pytest.mark.slow
def test_relations_are_brought_together_between_widths(data: Path, teacher: Path, tmp_path: Path):
    """Of another width and other heads; a resume is bit for bit, over devices too."""
    run, settings = tmp_path / "run", [f"objective.teacher={teacher}", "model.width=24", "model.heads=4", "model.kv_heads=2"]
    settings += ["model.head_size=6", "objective.relation_heads=4", "objective.cross_entropy=0"]
    settings += [f"objective.relations.{name}=1" for name in ("qq", "kk", "vv", "qk")]
    fit(data, run, *settings)
    for name in ("qq", "kk", "vv", "qk"):
        assert losses(run, f"relations/{name}")[STEPS] < losses(run, f"relations/{name}")[1], name
    fit(data, tmp_path / "halves", *settings, steps=EVERY)
    fit(data, tmp_path / "halves", *settings)
    assert digest(run, STEPS) == digest(tmp_path / "halves", STEPS)
    fit(
        data, tmp_path / "many", *settings, "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "execution.run=scan", "accumulate=2", steps=2
    )
    for step in (1, 2):
        assert losses(tmp_path / "many")[step] == pytest.approx(losses(run)[step], rel=1e-4)


@pytest.mark.slow
def test_adapters_learn_from_a_teacher(data: Path, whole: Path, teacher: Path, tmp_path: Path):
    run, settings = tmp_path / "run", [f"init.weights={whole}", "adapter=lora", "adapter.rank=2", f"objective.teacher={teacher}"]
    fit(data, run, *settings, steps=EVERY)
    fit(data, run, *settings)
    kl = losses(run, "kl")
    assert kl[STEPS] < kl[1]
    # What the base had learned is there.
    assert kl[1] < losses(whole, "kl")[EVERY]
    assert (run / "adapter" / "adapter_config.json").exists()


@pytest.mark.slow
def test_teachers_are_hub_folders_and_gguf_files(tmp_path: Path):
    """stories260K as both: the first loss is that of the same distributions."""
    folder, text = shared("models/stories260k"), tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little girl. She had a red ball.\n\n" * 30)
    sizes = ["model.vocab=512", "model.width=16", "model.heads=2", "data.epochs=1", "data.held_out=0", "eval.batches=0"]
    first = []
    for name in (folder, shared("gguf/stories260K-f32.gguf")):
        run = tmp_path / name.name
        fit(text, run, f"data.tokenizer={folder}", f"objective.teacher={name}", *sizes, steps=1)
        first.append(losses(run, "kl")[1])
    assert first[0] == pytest.approx(first[1], rel=1e-5)
    assert first[0] > 1


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        ([], "`distill` needs `objective.teacher`", "objective.teacher=TEACHER_FOLDER"),
        (["objective.teacher=smollm2-135m"], "is a preset: its name alone means random weights", ""),
        (["objective.teacher=gone/model"], "no folder `gone/model`", "model=hf:gone/model"),
        (["objective.teacher=http://localhost:8000/v1"], "teacher_model is missing", ""),
        (["objective.teacher={stories}"], "another tokenizer than the data: it has 512 tokens, not 258", "data.tokenizer="),
        (["objective.teacher={teacher}", "data.sequence=128", "model.context=128"], "longer than the teacher's context of 64", "=64"),
        (["objective.teacher={teacher}", "model.vocab=300", "objective.divergence=reverse"], "infinite for the others", "vocab=264"),
        (
            ["objective.teacher={teacher}", "objective.relations.qq=1", "model.heads=3", "model.head_size=8"],
            "3 relation heads of equal size cannot be cut from the 16 features of qq in layer 1 of the teacher",
            "=2",
        ),
        (["objective.teacher={teacher}", "objective.relations.vv=1", "objective.layers.0=2"], "the teacher has 2 layers, 0 to 1", ""),
        (["objective.teacher={teacher}", "objective.hidden=mse", "objective.layers.1=0"], "the student has 1 layer, 0 to 0", ""),
        (["objective.teacher={teacher}", "objective.hidden=mse", "objective.layers.0=2"], "the teacher has 2 layers, 0 to 1", ""),
        (["objective.teacher={teacher}", "objective.logits=cached", "objective.top=258"], "have 258 and 264 tokens", "online"),
        (["objective.teacher={teacher}", "objective.logits=cached", "data.online=true"], "data.online reads no row twice", "online"),
        (["objective.teacher={teacher}", "objective.logits=online", "objective.top=3"], "logits=cached reads it", ""),
    ],
)
def test_teachers_that_cannot_teach_are_refused_before_work(
    data: Path, teacher: Path, tmp_path: Path, words: list[str], problem: str, hint: str
):
    arguments = [word.format(teacher=teacher, stories=shared("models/stories260k")) for word in words]
    with pytest.raises(UserError) as caught:
        fit(data, tmp_path / "run", *arguments)
    assert problem in str(caught.value)
    assert hint in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_tokens_are_compared_one_by_one(data: Path, teacher: Path, tmp_path: Path):
    """A tokenizer of the same size, in which two ids are exchanged."""
    other = Path(shutil.copytree(teacher, tmp_path / "teacher"))
    path = next((other / "tokenizer").glob("tokenizer.json"))
    document = json.loads(path.read_text())
    vocab = document["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match="2 of 258 ids stand for another text, such as id 97: `b`, not `a`"):
        fit(data, tmp_path / "run", f"objective.teacher={other}")


def test_a_teacher_with_other_weights_is_refused_on_resume(data: Path, whole: Path, teacher: Path, tmp_path: Path):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    record = json.loads((run / "teacher.json").read_text())
    for file in record["files"].values():
        file["sha256"] = "0" * 64
    (run / "teacher.json").write_text(json.dumps(record))
    shutil.copytree(whole.parent / "cache", tmp_path / "cache")
    with pytest.raises(BadInput, match="has other weights than the teacher that this run learns from"):
        fit(data, run, f"objective.teacher={teacher}", steps=STEPS + 1)
    assert np.isfinite(losses(run)[STEPS])
