"""Runs that train adapters: the base stays what it is, a resume is bit for bit, and what was trained loads everywhere."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from campaign_kill import SMALL
from helpers import LOGIT_ROUNDING, default, relative
from laws.families import CASES

import argosy
from argosy.adapt.base import FACTORS, base_addresses
from argosy.adapt.lora import LoRA, without_adapters
from argosy.adapt.settings import Dora, Lora, Qlora
from argosy.adapt.surgery import find
from argosy.checkpoint.open import open_model
from argosy.checkpoint.resume import differences
from argosy.checkpoint.step.layout import STATE
from argosy.checkpoint.step.load import load_item, stored_shapes
from argosy.core.errors import ArgosyError, BadInput, UserError
from argosy.core.settings import dump
from argosy.core.storage import Store
from argosy.jobs.convert import convert
from argosy.jobs.quickstart.proof import digest
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import fill, merge, split, variables
from argosy.observe.metrics import by_step, read
from argosy.run.assembly.assemble import assemble
from argosy.run.assembly.decided import Decided
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from argosy.run.start.initial import weights_for
from argosy.weights.fill import model_weights
from argosy.weights.hub.writer import save_folder
from argosy.weights.peft.reader import read_adapter

WORDS = [word for word in SMALL if not word.startswith("model.")]
WORDS += ["checkpoint.every=2", "optimizer.learning_rate=1e-2"]
KINDS = {
    "lora": ["adapter=lora", "adapter.rank=2"],
    "dropout": ["adapter=lora", "adapter.rank=2", "adapter.dropout=0.2"],
    "rslora": ["adapter=lora", "adapter.rank=2", "adapter.rslora=true"],
    "pissa": ["adapter=lora", "adapter.rank=2", "adapter.init=pissa"],
    "dora": ["adapter=dora", "adapter.rank=2"],
    "nf4": ["adapter=qlora", "adapter.rank=2", "adapter.block=8"],
    "int8": ["adapter=qlora", "adapter.rank=2", "adapter.format=int8"],
}


def save_model(config: Any, folder: Path) -> Path:
    """A Hub folder of a model with random weights."""
    model = config.build(Unroll())
    fill(model, jax.random.key(1), addresses=layer_addresses(model))
    save_folder(folder, config, model_weights(model))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model of two layers."""
    config = compose(Run, "tiny", [*SMALL, "model.layers=2"]).value.model
    return save_model(config, tmp_path_factory.mktemp("adapters") / "base")


def fit(base: Path, run: Path, *words: str) -> dict[int, float]:
    argosy.fit("tiny", *WORDS, f"model={base}", f"dir={run}", *words)
    return by_step(read(Store(run)), "loss")


@pytest.fixture(scope="module", params=default("lora", of=KINDS))
def adapter_run(request, base: Path, tmp_path_factory) -> tuple[Path, dict[int, float], list[str]]:
    """Four steps of a run, its losses, and what it was told beside the common words."""
    run = tmp_path_factory.mktemp("adapters") / request.param
    return run, fit(base, run, "steps=4", *KINDS[request.param]), KINDS[request.param]


@pytest.fixture(scope="module")
def lora(base: Path, tmp_path_factory) -> tuple[Path, dict[int, float]]:
    """Two steps of a run with LoRA."""
    run = tmp_path_factory.mktemp("adapters") / "two"
    return run, fit(base, run, "steps=2", *KINDS["lora"])


@pytest.fixture(scope="module")
def plain(base: Path, tmp_path_factory) -> float:
    """The loss of the first batch without an adapter."""
    return fit(base, tmp_path_factory.mktemp("adapters") / "plain", "steps=1")[1]


@pytest.mark.slow
def test_a_resume_is_bit_for_bit(adapter_run, base: Path, tmp_path: Path):
    run, losses, words = adapter_run
    half = tmp_path / "run"
    Path(shutil.copytree(run, half))
    shutil.rmtree(half / "checkpoints" / "4")
    shutil.rmtree(half / "adapter")
    assert argosy.fit("tiny", *WORDS, f"model={base}", f"dir={half}", "steps=4", *words).step == 4
    assert by_step(read(Store(half)), "loss") == losses
    assert digest(half, 4) == digest(run, 4)
    adapters = [read_adapter(each / "adapter", open_model(run).config) for each in (half, run)]
    assert all(np.array_equal(adapters[0][name].b, adapter.b) for name, adapter in adapters[1].items())


def test_a_checkpoint_holds_the_factors_and_their_optimizer_alone(adapter_run):
    step = adapter_run[0] / "checkpoints" / "4"
    names = set(stored_shapes(step))
    assert names
    assert {name.rpartition(".")[2] for name in names} <= set(FACTORS)
    mirrored = {name for name in load_item(step, STATE) if name.startswith("optimizer.") and ".layers." in name}
    moments = {"mu." + name for name in names} | {"nu." + name for name in names}
    assert mirrored
    assert all(any(name.endswith(f".{moment}") for moment in moments) for name in mirrored)


def test_the_header_counts_the_parameters_of_the_model_and_the_adapter(adapter_run, base: Path):
    header = next(line["header"] for line in read(Store(adapter_run[0])) if "header" in line)
    factors = sum(int(np.prod(a.shape)) for name, a in stored_shapes(adapter_run[0] / "checkpoints" / "4").items() if name[-1] != "0")
    assert header["parameters"] == open_model(base).config.parameters() + factors
    assert f"{factors:,} trained" in header["adapter"]


def test_what_was_trained_is_the_same_model_everywhere(adapter_run, base: Path, tmp_path: Path):
    """The run, its PEFT folder on the base (whose weights are not rounded, where those of the run are), and its conversion."""
    run, _, words = adapter_run
    tokens = np.arange(3, 20)
    expected = argosy.load(run).logits(tokens)
    plain = argosy.load(base).logits(tokens)
    assert relative(expected, plain) > 1e-2
    convert(str(run), tmp_path / "merged", "hub", None)
    assert relative(argosy.load(tmp_path / "merged").logits(tokens), expected) < LOGIT_ROUNDING
    convert(str(run), tmp_path / "peft", "peft", None)
    folders = [{f.name: f.read_bytes() for f in folder.iterdir()} for folder in (tmp_path / "peft", run / "adapter")]
    assert folders[0] == folders[1]
    again = argosy.load(base, adapter=run / "adapter").logits(tokens)
    if "adapter=qlora" in words:
        assert relative(again, expected) < relative(again, plain)
    else:
        assert relative(again, expected) < LOGIT_ROUNDING
    assert json.loads((run / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base.resolve())


def test_every_kind_starts_at_the_base(adapter_run, plain: float):
    _, losses, words = adapter_run
    if "adapter=qlora" in words:
        assert 0 < abs(losses[1] - plain) < 0.05
    else:
        assert relative([losses[1]], [plain]) < 1e-6


def assemble_run(base: Path, *words: str) -> Any:
    run = compose(Run, "tiny", [*WORDS, "steps=4", f"model={base}", *KINDS["lora"], *words]).value
    return assemble(run, Decided.here(run))


def test_the_base_is_not_copied_donated_or_changed(base: Path):
    files = {file.name: file.read_bytes() for file in base.iterdir()}
    assembly = assemble_run(base)
    state, stored = weights_for(assembly, str(base), lambda _: None)
    before = {address: leaf for address, leaf in state.rest.items() if address in assembly.adapters.base}
    base_weights = {address: np.array(leaf) for address, leaf in before.items()}
    first = {address: np.array(leaf) for address, leaf in state.params.items()}
    update = assembly.compile()
    batch = assembly.place(next(assembly.batches))
    old = state.params
    for _ in range(2):
        state, _ = update(state, batch)
    assembly.close()
    assert all(leaf.is_deleted() for leaf in old.values()), "the adapters are not donated"
    assert all(state.rest[address] is leaf for address, leaf in before.items()), "the base was copied"
    for name in stored.weights.names:
        address = name if name in base_weights else name.removesuffix(".w") + ".of.w"
        np.testing.assert_array_equal(base_weights[address], stored.weights.read(name))
        np.testing.assert_array_equal(np.asarray(state.rest[address]), base_weights[address])
    assert all((np.asarray(state.params[a]) != first[a]).any() for a in first), "an adapter never moved"
    assert set(state.params).isdisjoint(assembly.adapters.base)
    assert {file.name: file.read_bytes() for file in base.iterdir()} == files


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["execution.run=scan"], id="scan", marks=pytest.mark.slow),
        pytest.param(["mesh.data=8", "mesh.fsdp=1"], id="without fsdp", marks=pytest.mark.slow),
        pytest.param(["mesh.fsdp=4", "mesh.tensor=2"], id="tensor", marks=pytest.mark.slow),
        pytest.param(["accumulate=2", "mesh.fsdp=4", "mesh.tensor=2"], id="accumulated", marks=pytest.mark.slow),
    ],
)
def test_other_layouts_and_meshes_train_the_same(base: Path, lora, tmp_path: Path, words: list[str]):
    run, here = lora
    there = fit(base, tmp_path / "there", "steps=2", *KINDS["lora"], *words)
    assert here.keys() == there.keys()
    assert relative(list(there.values()), list(here.values())) < 1e-5
    adapters = [open_model(each).adapted.adapters for each in (run, tmp_path / "there")]
    assert set(adapters[0]) == set(adapters[1])
    for name, adapter in adapters[0].items():
        assert relative(adapters[1][name].a, adapter.a) < 1e-2


@pytest.mark.slow
def test_the_peft_folder_tells_the_dropout(base: Path, tmp_path: Path):
    """Of the run, of its conversion, and of what is loaded from either and saved again."""
    run = tmp_path / "run"
    fit(base, run, "steps=2", *KINDS["dropout"])
    convert(str(run), tmp_path / "converted", "peft", None)
    argosy.load(run).save(tmp_path / "saved", format="peft")
    argosy.load(str(base), adapter=str(run / "adapter")).save(tmp_path / "again", format="peft")
    for folder in (run / "adapter", *(tmp_path / name for name in ("converted", "saved", "again"))):
        assert json.loads((folder / "adapter_config.json").read_text())["lora_dropout"] == 0.2, folder


@pytest.mark.slow
def test_other_layouts_and_meshes_drop_the_same(base: Path, tmp_path: Path):
    words = ["steps=3", *KINDS["dropout"]]
    here = fit(base, tmp_path / "here", *words)
    for name, more in {"scan": ["execution.run=scan"], "mesh": ["mesh.fsdp=4", "mesh.tensor=2"]}.items():
        assert relative(list(fit(base, tmp_path / name, *words, *more).values()), list(here.values())) < 1e-5
    assert abs(fit(base, tmp_path / "none", "steps=3", *KINDS["lora"])[3] - here[3]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral-plain", "deepseek-3"])
def test_experts_get_adapters_and_routers_do_not(name: str, tmp_path: Path):
    config = CASES[name]
    base = save_model(config, tmp_path / "base")
    words = [f"model={base}", *KINDS["lora"], "steps=2", f"dir={tmp_path / 'run'}", "data.batch=8"]
    argosy.fit("tiny", *WORDS, *words, f"data.sequence={min(16, config.context)}")
    adapters = open_model(tmp_path / "run").adapted.adapters
    assert any(".mlp.down" in name for name in adapters)
    assert not any("router" in name for name in adapters)
    assert all(np.abs(adapter.b).max() > 0 for adapter in adapters.values())
    lm = argosy.load(tmp_path / "run")
    theirs = open_model(base).weights
    for address, v in variables(lm.module).items():
        if address in base_addresses(lm.module):
            np.testing.assert_array_equal(np.asarray(v.get_value()), theirs.read(address.replace(".of.", ".")))


@pytest.fixture
def away_base(base: Path) -> Any:
    """Where the base is for the time of a test; another one may take its place."""
    away = base.with_name("away")
    base.rename(away)
    yield away
    shutil.rmtree(base, ignore_errors=True)
    away.rename(base)


@pytest.mark.slow
def test_a_resume_wants_the_same_base(base: Path, away_base: Path, lora):
    run, _ = lora
    lines = (run / "metrics.jsonl").read_text()
    with pytest.raises(BadInput, match="the base model under these adapters is not at") as error:
        argosy.fit(str(run), "steps=4")
    assert "put the base model back" in str(error.value)
    with pytest.raises(BadInput, match="the base model under these adapters is not at"):
        argosy.load(run)
    copy_changed(away_base, base, same_time=True)
    with pytest.raises(BadInput, match="other weights than the base"):
        argosy.fit(str(run), "steps=4")
    assert (run / "metrics.jsonl").read_text() == lines, "work began"


def test_another_base_is_refused_when_loaded(base: Path, away_base: Path, lora):
    copy_changed(away_base, base, same_time=False)
    with pytest.raises(BadInput, match="other weights than the base"):
        argosy.load(lora[0])


def copy_changed(original: Path, folder: Path, *, same_time: bool) -> None:
    """A copy with one other byte, of the same size."""
    shutil.copytree(original, folder)
    file = folder / "model.safetensors"
    data, about = bytearray(file.read_bytes()), file.stat()
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns if same_time else about.st_mtime_ns + 1))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["adapter.where=layers\\.block\\.attention\\.q"], "adapter.where: nothing in the model matches"),
        (["adapter.where=layers.("], "is not a regular expression"),
        (["adapter=dora", "adapter.rank=2", "adapter.where=.*"], "DoRA on an embedding"),
        (["adapter.init=pissa", "adapter.rank=64"], "singular values"),
    ],
)
def test_a_rule_that_cannot_bind_is_refused(base: Path, tmp_path: Path, words: list[str], problem: str):
    with pytest.raises(ArgosyError, match=problem):
        fit(base, tmp_path / "run", "steps=1", *KINDS["lora"], *words)


def test_a_model_without_adapters_has_no_peft_folder(base: Path, tmp_path: Path):
    with pytest.raises(BadInput, match="has no adapters"):
        convert(str(base), tmp_path / "peft", "peft", None)


def test_random_weights_get_no_adapter(tmp_path: Path):
    with pytest.raises(UserError, match="the weights under an adapter are random"):
        argosy.fit("tiny", *SMALL, "adapter=lora", f"dir={tmp_path / 'run'}")


def test_the_recipe_says_what_it_needs():
    with pytest.raises(UserError, match=r"`sft` needs `model` and `data\.source`"):
        compose(Run, "sft")
    with pytest.raises(UserError, match="`sft` needs `model`") as error:
        compose(Run, "sft", ["data.source=chats.jsonl", "adapter=lora", "adapter.rnk=8"])
    assert "did you mean `adapter.rank`?" in str(error.value)


def test_a_learning_rate_follows_from_the_adapter(base: Path):
    words = [f"model={base}", "data.source=chats.jsonl", "data.sequence=16"]
    rates = {
        kind: compose(Run, "sft", [*words, *more])
        for kind, more in {"full": [], "lora": ["adapter=lora"], "own": ["optimizer.learning_rate=1e-3"]}.items()
    }
    assert {kind: reading.value.optimizer.learning_rate for kind, reading in rates.items()} == {
        "full": 2e-5,
        "lora": 2e-4,
        "own": 1e-3,
    }
    assert rates["full"].origin["optimizer.learning_rate"] == "recipes/sft.yml"


@pytest.mark.parametrize("words", [["adapter=none"], ["adapter=lora", "adapter=none"], ["adapter.name=none"]])
def test_none_names_the_choice_and_not_the_lack_of_one(base: Path, words: list[str]):
    reading = compose(Run, "sft", [f"model={base}", "data.source=x.jsonl", "data.sequence=16", *words])
    assert reading.value.adapter.trains_base
    assert reading.value.optimizer.learning_rate == 2e-5


def test_a_run_from_before_there_were_adapters_resumes():
    settings = compose(Run, "tiny", SMALL).value
    stored = dump(settings)
    del stored["adapter"]
    assert differences(stored, settings) == []
    assert differences(stored, settings.model_copy(update={"adapter": Lora()}))


def test_a_finished_run_writes_its_peft_folder_again(base: Path, lora):
    run, _ = lora
    shutil.rmtree(run / "adapter")
    fit(base, run, "steps=2", *KINDS["lora"])
    assert (run / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("settings", [Lora(rank=2), Lora(rank=2, init="pissa"), Dora(rank=2), Qlora(rank=2, block=8)], ids=repr)
@pytest.mark.parametrize("run", [Unroll(), Scan()], ids=["unroll", "scan"])
def test_without_adapters_the_weights_are_shared(settings: Any, run: Any):
    """In a jitted function too, and the model keeps its adapters."""
    config = CASES["llama-plain"]
    model = config.build(run)
    settings.put_on(model)
    base = without_adapters(model)
    weights, shared = split(model)[1], split(base)[1]
    assert {address.replace(".of.", ".") for address in base_addresses(model)} == set(shared)
    assert all(weights[address] is shared[address.replace(".of.", ".")] for address in base_addresses(model))
    assert find(model, ".*", LoRA)
    graph = split(model)[0]
    traced = jax.eval_shape(lambda leaves: split(without_adapters(merge(graph, leaves)))[1], weights)
    assert {address: (a.shape, a.dtype) for address, a in traced.items()} == {a: (x.shape, x.dtype) for a, x in shared.items()}
    with pytest.raises(BadInput, match="no adapters"):
        without_adapters(base)
