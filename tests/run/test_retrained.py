"""Runs that train modules in full beside adapters: they are saved with the adapters, and load everywhere as the same model."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from campaign_kill import SMALL
from helpers import LOGIT_ROUNDING, relative

import argosy
from argosy.checkpoint.open import open_model
from argosy.checkpoint.step.layout import STATE
from argosy.checkpoint.step.load import load_item, stored_shapes
from argosy.core.errors import BadInput, Unsupported, UserError
from argosy.core.formats.safetensors import SafeTensors
from argosy.core.storage import Store
from argosy.jobs.convert import convert
from argosy.jobs.quickstart.proof import digest
from argosy.models.parts.stack import Unroll
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import fill
from argosy.observe.metrics import by_step, read
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from argosy.weights.fill import model_weights
from argosy.weights.hub.writer import save_folder
from argosy.weights.peft.reader import read_adapter, read_contents

WORDS = [word for word in SMALL if not word.startswith(("model.", "optimizer"))]
WORDS += ["checkpoint.every=2", "optimizer=adamw", "optimizer.learning_rate=1e-2", "schedule=constant"]
LORA = ["adapter=lora", "adapter.rank=2"]
TOKENS = np.arange(3, 20)


def save_model(config: Any, folder: Path) -> Path:
    """A Hub folder of a model with random weights."""
    model = config.build(Unroll())
    fill(model, jax.random.key(1), addresses=layer_addresses(model))
    save_folder(folder, config, model_weights(model))
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """Models of two layers, with a head that is tied to the embedding and with one of its own."""
    folders = {}
    for name in ("tied", "apart"):
        words = [*SMALL, "model.layers=2", f"model.tied={str(name == 'tied').lower()}"]
        config = compose(Run, "tiny", words).value.model
        folders[name] = save_model(config, tmp_path_factory.mktemp("bases") / name)
    return folders


def fit(base: Path, run: Path, *words: str) -> dict[int, float]:
    argosy.fit("tiny", *WORDS, f"model={base}", f"dir={run}", *words)
    return by_step(read(Store(run)), "loss")


@pytest.fixture(scope="module")
def tied_run(bases: dict[str, Path], tmp_path_factory) -> tuple[Path, dict[int, float]]:
    """Four steps of LoRA with the embedding and the norms."""
    run = tmp_path_factory.mktemp("retrained") / "run"
    return run, fit(bases["tied"], run, "steps=4", *LORA, "adapter.train=embed", "adapter.train=.*norm")


@pytest.mark.slow
def test_a_resume_is_bit_for_bit(tied_run, bases: dict[str, Path], tmp_path: Path):
    run, losses = tied_run
    half = tmp_path / "run"
    Path(shutil.copytree(run, half))
    shutil.rmtree(half / "checkpoints" / "4")
    again = fit(bases["tied"], half, "steps=4", *LORA, "adapter.train=[embed, .*norm]")
    assert again == losses
    assert digest(half, 4) == digest(run, 4)


def test_a_checkpoint_holds_what_is_trained_alone(tied_run):
    step = tied_run[0] / "checkpoints" / "4"
    whole = {name for name in stored_shapes(step) if not name.endswith((".a", ".b"))}
    norms = {f"layers.{i}.{kind}_norm.scale" for i in range(2) for kind in ("attn", "mlp")}
    assert whole == {"embed.w", "norm.scale", *norms}
    assert all(any(name.endswith(f"mu.{address}") for name in load_item(step, STATE)) for address in whole)
    header = next(line["header"] for line in read(Store(tied_run[0])) if "header" in line)
    assert "beside 6 weights in full" in header["adapter"]
    factors = sum(int(np.prod(a.shape)) for name, a in stored_shapes(step).items() if name not in whole)
    assert header["parameters"] == open_model(tied_run[0]).config.parameters() + factors


@pytest.mark.parametrize("kind", ["tied", pytest.param("apart", marks=pytest.mark.slow)])
def test_what_was_trained_is_the_same_model_everywhere(tied_run, bases: dict[str, Path], tmp_path: Path, kind: str):
    """The run, its PEFT folder on the base, that folder written again, its conversion, and its merge on the way."""
    base, run = bases[kind], tied_run[0]
    if kind == "apart":
        run = tmp_path / "run"
        fit(base, run, "steps=2", *LORA, "adapter.train=[embed, head, norm]")
    expected = argosy.load(run).logits(TOKENS)
    assert relative(expected, argosy.load(base).logits(TOKENS)) > 1e-2
    for name, array in read_contents(run / "adapter", open_model(base).config).whole.items():
        assert np.abs(np.asarray(array, np.float32) - open_model(base).weights.read(name)).max() > 1e-3, name
    lm = argosy.load(base, adapter=run / "adapter")
    assert relative(lm.logits(TOKENS), expected) < LOGIT_ROUNDING
    lm.save(tmp_path / "again", format="peft")
    files = [SafeTensors.open(folder / "adapter_model.safetensors") for folder in (run / "adapter", tmp_path / "again")]
    assert set(files[0].names) == set(files[1].names)
    assert all(np.array_equal(files[0].read(name), files[1].read(name)) for name in files[0].names)
    convert(str(run), tmp_path / "merged", "hub", None)
    convert(str(base), tmp_path / "merged too", "hub", None, adapter=str(run / "adapter"))
    for folder in ("merged", "merged too"):
        assert relative(argosy.load(tmp_path / folder).logits(TOKENS), expected) < LOGIT_ROUNDING
    with pytest.raises(Unsupported, match="trained in full beside other adapters"):
        read_adapter(run / "adapter", lm.config)


def test_a_tied_head_is_written_beside_the_embedding(tied_run, bases: dict[str, Path], tmp_path: Path):
    """PEFT copies the embedding it trains, and the head stays what it was."""
    folder, config = tmp_path / "adapter", open_model(bases["tied"]).config
    shutil.copytree(tied_run[0] / "adapter", folder)
    adapter_config = json.loads((folder / "adapter_config.json").read_text())
    assert {"lm_head", "model.embed_tokens", "model.norm", "model.layers.1.input_layernorm"} <= set(adapter_config["modules_to_save"])
    file = SafeTensors.open(folder / "adapter_model.safetensors")
    head, embedding = (f"base_model.model.{name}.weight" for name in ("lm_head", "model.embed_tokens"))
    np.testing.assert_array_equal(file.read(head), file.read(embedding))
    arrays = {name: np.array(file.read(name)) for name in file.names}
    rewrite(folder, {name: array for name, array in arrays.items() if name != head})
    with pytest.raises(Unsupported, match="PEFT unties them"):
        read_contents(folder, config)
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config | {"ensure_weight_tying": True}))
    np.testing.assert_array_equal(read_contents(folder, config).whole["embed.w"], arrays[embedding])
    rewrite(folder, arrays | {head: arrays[head] + 1})
    with pytest.raises(BadInput, match="but their values differ"):
        read_contents(folder, config)
    rewrite(folder, {name: array for name, array in arrays.items() if name != embedding})
    with pytest.raises(Unsupported, match=r"`lm_head\.weight` was trained in full"):
        read_contents(folder, config)


def rewrite(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    save_file(arrays, folder / "adapter_model.safetensors")


@pytest.mark.slow
def test_one_step_moves_them_as_it_does_where_all_weights_are_trained(bases: dict[str, Path], tmp_path: Path):
    """Adapters begin at nothing, so the first gradient is that of the base."""
    plain = ["steps=1", "optimizer=sgd", "optimizer.learning_rate=0.5", "optimizer.clip=null", "optimizer.weight_decay=0"]
    fit(bases["apart"], tmp_path / "all", *plain)
    fit(bases["apart"], tmp_path / "some", *plain, *LORA, "adapter.train=[embed, head, .*norm]")
    fit(bases["apart"], tmp_path / "scan", *plain, *LORA, "adapter.train=[embed, head, .*norm]", "execution.run=scan")
    base, full = open_model(bases["apart"]).weights, open_model(tmp_path / "all").weights
    for run in ("some", "scan"):
        whole = open_model(tmp_path / run).adapted.whole
        assert len(whole) == 7
        for name, array in whole.items():
            change = full.read(name) - base.read(name)
            assert np.abs(change).max() > 1e-4
            np.testing.assert_allclose(array - base.read(name), change, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "words", "problem"),
    [
        ("apart", ["adapter.train=[norm, layers.block.attention_norm]"], "nothing in the model matches `layers.block.att"),
        ("apart", ["adapter.train=norm("], "is not a regular expression"),
        ("tied", ["adapter.train=head"], "adapter.train=embed trains both"),
        ("apart", ["adapter.where=layers\\..*\\.attn\\.q", "adapter.train=layers\\..*\\.attn"], "adapter.where and adapter.train both"),
        ("apart", ["adapter.train=layers"], "leaves nothing to put an adapter on"),
        ("apart", ["adapter=qlora", "adapter.block=8", "adapter.quantize_where=.*", "adapter.train=head"], "quantize_where and"),
    ],
)
def test_a_rule_that_cannot_bind_is_refused(bases: dict[str, Path], tmp_path: Path, kind: str, words: list[str], problem: str):
    with pytest.raises(UserError) as error:
        fit(bases[kind], tmp_path / "run", "steps=1", *LORA, *words)
    assert problem in str(error.value)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dora", "nf4", "scan", "devices"])
def test_other_adapters_layouts_and_meshes(bases: dict[str, Path], tmp_path: Path, kind: str):
    words = {
        "dora": ["adapter=dora", "adapter.rank=2"],
        "nf4": ["adapter=qlora", "adapter.rank=2", "adapter.block=8"],
        "scan": [*LORA, "execution.run=scan"],
        "devices": [*LORA, "mesh.fsdp=4", "mesh.tensor=2", "accumulate=2"],
    }[kind]
    losses = fit(bases["apart"], tmp_path / "run", "steps=4", *words, "adapter.train=[embed, head, layers\\..*\\.attn]")
    assert losses[4] < losses[1]
    if kind in ("scan", "devices"):
        there = fit(bases["apart"], tmp_path / "there", "steps=4", *LORA, "adapter.train=[embed, head, layers\\..*\\.attn]")
        assert relative(list(losses.values()), list(there.values())) < 1e-4
    adapted = open_model(tmp_path / "run").adapted
    assert {name.rpartition(".")[0] for name in adapted.whole} >= {"embed", "head", "layers.0.attn.q", "layers.1.attn.o"}
    assert not any(".attn." in name for name in adapted.adapters)
    expected = argosy.load(tmp_path / "run").logits(TOKENS)
    convert(str(tmp_path / "run"), tmp_path / "merged", "hub", None)
    assert relative(argosy.load(tmp_path / "merged").logits(TOKENS), expected) < LOGIT_ROUNDING
