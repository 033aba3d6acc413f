"""Training of ControlNets: a UNet's copy that begins without effect, a loss as diffusers' script, a frozen UNet, and exact resumes."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import write_model, write_pipeline
from helpers import Heard, relative
from PIL import Image

import argosy
from argosy.checkpoint.open import open_model
from argosy.core.errors import UserError
from argosy.core.storage import Store
from argosy.jobs.convert import convert
from argosy.models.diffusion.base import Conditions
from argosy.models.diffusion.controlnets.unet import ControlNetConfig
from argosy.models.diffusion.unet import UNetConfig
from argosy.models.parts.stack.addresses import layer_addresses, to_layers
from argosy.models.parts.weight import fill, merge, split
from argosy.observe.metrics import read
from argosy.train.objectives.images.controlnet import ControlNetDiffusion
from argosy.train.objectives.images.diffusion import Diffusion
from argosy.weights.build import load_model

GOLDENS = Path(__file__).parents[1] / "goldens" / "images"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_pipeline(GOLDENS / "pipeline-sd", tmp_path_factory.mktemp("model") / "sd")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Squares whose control image is their outline, beside a `metadata.jsonl`; one control image is of another size."""
    root, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (root / "edges").mkdir()
    lines = []
    for i in range(10):
        image = np.zeros((16, 20, 3), np.uint8)
        top, left_edge = draw.integers(0, 8, 2)
        image[top : top + 8, left_edge : left_edge + 8] = draw.integers(60, 256, 3)
        edge = np.abs(np.diff(image.max(-1).astype(int), axis=0, prepend=0)).astype(np.uint8)
        Image.fromarray(image).save(root / f"{i}.png")
        Image.fromarray(np.repeat(edge[..., None], 3, -1)).resize((40, 32) if i == 3 else (20, 16)).save(root / "edges" / f"{i}.png")
        text = ("a red fox", "snow")[i % 2]
        lines.append({"file_name": f"{i}.png", "text": text, "conditioning_image": f"edges/{i}.png"})
    (root / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return root


def words(model: Path, data: Path, folder: Path, *more: str) -> list[str]:
    common = [f"model={model}", f"data.source={data}", f"dir={folder}", f"data.cache={folder.parent / 'cache'}", "data.image.size=16"]
    return ["controlnet", *common, "data.batch=8", "optimizer.learning_rate=1e-3", "schedule.warmup=0", "log.every=1", *more]


def batch_of(rows: int, unet: UNetConfig) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    shapes = {"images": (rows, 4, 4, unet.channels), "text": (rows, 5, unet.text_width), "pooled": (rows, 1)}
    batch: dict[str, Any] = {name: jnp.asarray(draw.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    batch["control"] = jnp.asarray(draw.random((rows, 8, 8, 3)), jnp.float32)
    return batch | {"text_mask": jnp.ones((rows, 5), jnp.int32), "row": jnp.arange(rows, dtype=jnp.int32)}


def test_the_loss_is_that_of_the_steered_unet():
    """At the start that of the UNet alone, and gradients reach the ControlNet by what begins at zero."""
    config = UNetConfig.examples()["sd"].model_copy(update={"pixels": 2})
    unet, controlnet = config.build(), ControlNetConfig.examples()["sd"].build()
    for i, module in enumerate((unet, controlnet)):
        fill(module, jax.random.key(i), addresses=layer_addresses(module))
    batch, key, (graph, leaves) = batch_of(4, config), jax.random.key(3), split(controlnet)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def losses(leaves: Any) -> Any:
        steered = ControlNetDiffusion(timesteps="uniform")({"model": merge(graph, leaves), "denoiser": unet}, batch, key)
        plain = Diffusion(condition="text", timesteps="uniform")({"model": unet}, batch, key)
        return steered.loss.value(), plain.loss.value()

    (steered, plain), gradients = losses(leaves)
    assert float(steered) == pytest.approx(float(plain), rel=1e-6)
    moving = {address for address, gradient in gradients.items() if np.abs(gradient).max() > 0}
    assert moving == {a for a in leaves if a.startswith(("controlnet_down_blocks", "controlnet_mid_block"))}
    (steered, plain), _ = losses({a: w - 0.1 * gradients[a] for a, w in leaves.items()})
    assert steered < plain


def test_mistakes_are_named_before_anything_is_read(model, data, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(data, bare)
    lines = [json.loads(line) for line in (bare / "metadata.jsonl").read_text(encoding="utf-8").splitlines()]
    shutil.rmtree(bare / "edges")

    def write(changed: list[dict[str, Any]]) -> None:
        (bare / "metadata.jsonl").write_text("\n".join(map(json.dumps, changed)), encoding="utf-8")

    with pytest.raises(UserError, match=r"10 control images of metadata.jsonl without a file"):
        argosy.fit(*words(model, bare, tmp_path / "run"), view=Heard(), steps=1)
    plain = [{name: value for name, value in line.items() if name != "conditioning_image"} for line in lines]
    write([lines[0], *plain[1:]])
    with pytest.raises(UserError, match=r"is in some lines of metadata.jsonl and not in others: 1.png"):
        argosy.fit(*words(model, bare, tmp_path / "run"), view=Heard(), steps=1)
    write(plain)
    folder = write_model(GOLDENS / "controlnet-sd", tmp_path / "controlnet")
    with pytest.raises(UserError, match="a ControlNet reads control images, and this data has none"):
        argosy.fit(*words(model, bare, tmp_path / "run"), view=Heard(), steps=1)
    for word, problem in (
        ("adapter=lora", "adapters on a ControlNet are not built"),
        ("encoders.pipeline=null", "encoders.pipeline is missing"),
        (f"model={model / 'unet'}", "objective=controlnet trains a ControlNet for the denoiser of a diffusers folder"),
        (f"model={folder} objective=diffusion", "the model is a ControlNet, which objective=controlnet trains"),
    ):
        with pytest.raises(UserError, match=problem):
            argosy.fit(*words(model, data, tmp_path / "run", *word.split()), view=Heard(), steps=1)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_it_begins_as_a_copy_trains_alone_and_resumes_bit_for_bit(model, data, tmp_path):
    settings = ["checkpoint.every=2", "objective.label_dropout=0.5", "data.image.flip=true", "sample.every=2", "sample.images=2"]
    settings.append("sample.steps=1")
    for steps in (2, 4):
        argosy.fit(*words(model, data, tmp_path / "halves", *settings), view=Heard(), steps=steps)
    argosy.fit(*words(model, data, tmp_path / "whole", *settings), view=Heard(), steps=4)
    losses = [[line["loss"] for line in read(Store(tmp_path / name)) if "loss" in line] for name in ("halves", "whole")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    assert sorted(path.name for path in (tmp_path / "whole" / "samples").iterdir()) == ["00000002.png", "00000004.png"]
    unet, trained = (load_model(open_model(path)).module for path in (model / "unet", tmp_path / "whole"))
    first = trained.conv_in.w[...]
    assert 0 < relative(first, unet.conv_in.w[...]) < 0.2
    assert all(np.abs(trained.controlnet_down_blocks[i].w[...]).max() > 0 for i in range(4))
    # What was trained is a folder of diffusers, which steers as the run does.
    convert(str(tmp_path / "whole"), tmp_path / "folder", "hub", None)
    config = json.loads((tmp_path / "folder" / "config.json").read_text(encoding="utf-8"))
    assert (config["_class_name"], config["conditioning_embedding_out_channels"]) == ("ControlNetModel", [16, 32, 256])
    assert "sample_size" not in config
    assert (tmp_path / "folder" / "diffusion_pytorch_model.safetensors").is_file()
    control = np.random.default_rng(1).random((16, 16, 3)).astype(np.float32)
    images = []
    for controlnet in (tmp_path / "whole", tmp_path / "folder", None):
        more: dict[str, Any] = {} if controlnet is None else {"control_image": control}
        images.append(argosy.load(model, controlnet=controlnet).images(["a red fox"], steps=2, size=16, output="float", **more))
    np.testing.assert_array_equal(images[0], images[1])
    assert np.abs(images[0] - images[2]).max() > 1e-4
    with pytest.raises(UserError, match="is a ControlNet, which steers another model"):
        argosy.load(tmp_path / "whole")
    # Training goes on from the folder.
    argosy.fit(*words(model, data, tmp_path / "on", f"init.weights={tmp_path / 'folder'}"), view=Heard(), steps=1)


TRANSFORMERS = {
    "pipeline-flux-controlnet": ("FluxPipeline", "FluxControlNetModel", ["model.layers=2", "model.single_layers=1"]),
    "pipeline-sd3-controlnet": ("StableDiffusion3Pipeline", "SD3ControlNetModel", ["model.layers=2"]),
}


@pytest.fixture(scope="module", params=TRANSFORMERS)
def transformer(request, tmp_path_factory) -> tuple[Path, str, list[str]]:
    """A pipeline without its ControlNet, the class of one, and how many layers it has."""
    folder = write_pipeline(GOLDENS / request.param, tmp_path_factory.mktemp("transformer") / "model")
    pipeline, kind, layers = TRANSFORMERS[request.param]
    shutil.rmtree(folder / "controlnet")
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    del index["controlnet"]
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": pipeline}), encoding="utf-8")
    return folder, kind, layers


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["unroll", "scan"])
def test_that_of_a_transformer_learns_in_latents_and_resumes_bit_for_bit(execution: str, transformer, data, tmp_path):
    """It begins as a copy of the first layers, whose control images are encoded once and mirrored with their images."""
    model, kind, layers = transformer
    settings = [
        *layers,
        f"execution.run={execution}",
        "checkpoint.every=2",
        "data.image.flip=true",
        "sample.every=2",
        "sample.images=2",
    ]
    settings += ["sample.steps=1", "objective.label_dropout=0.3"]
    heard = Heard()
    for steps in (2, 4):
        argosy.fit(*words(model, data, tmp_path / "halves", *settings), view=heard, steps=steps)
    argosy.fit(*words(model, data, tmp_path / "whole", *settings), view=Heard(), steps=4)
    losses = [[line["loss"] for line in read(Store(tmp_path / name)) if "loss" in line] for name in ("halves", "whole")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    assert "begins as a copy of its first layers" in heard.words
    (encoded,) = (tmp_path / "cache").rglob("controls.npy")
    latents = np.load(encoded.with_name("latents.npy"))
    assert np.load(encoded).shape == latents.shape
    modules = [load_model(open_model(path)).module for path in (model / "transformer", tmp_path / "whole")]
    base, trained = (to_layers(module, split(module)[1]) for module in modules)
    assert 0 < relative(trained["layers.1.image.attn.q.w"], base["layers.1.image.attn.q.w"]) < 0.2
    assert all(np.abs(w).max() > 0 for name, w in trained.items() if name.endswith("control.w"))
    convert(str(tmp_path / "whole"), tmp_path / "folder", "hub", None)
    assert json.loads((tmp_path / "folder" / "config.json").read_text(encoding="utf-8"))["_class_name"] == kind
    control = np.random.default_rng(1).random((16, 16, 3)).astype(np.float32)
    images = []
    for controlnet in (tmp_path / "whole", tmp_path / "folder", None):
        more: dict[str, Any] = {} if controlnet is None else {"control_image": control}
        images.append(argosy.load(model, controlnet=controlnet).images(["a red fox"], steps=2, size=16, output="float", **more))
    np.testing.assert_array_equal(images[0], images[1])
    assert np.abs(images[0] - images[2]).max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("transformer", ["pipeline-sd3-controlnet"], indirect=True)
def test_that_of_stable_diffusion_3_learns_without_pooled_texts_and_the_shift(transformer, data, tmp_path):
    """`model.zero_pooled`, as diffusers' script trains: control images are encoded without the shift of latents, in drawing too."""
    model, _, layers = transformer
    encoded = {}
    for zero in ("false", "true"):
        settings = [*layers, f"model.zero_pooled={zero}", f"data.cache={tmp_path / zero}", "sample.every=null"]
        argosy.fit(*words(model, data, tmp_path / f"run-{zero}", *settings), view=Heard(), steps=2)
        (file,) = (tmp_path / zero).rglob("controls.npy")
        encoded[zero] = np.load(file).astype(np.float32)
    vae = json.loads((model / "vae" / "config.json").read_text(encoding="utf-8"))
    shift = vae["shift_factor"] * vae["scaling_factor"]
    assert shift > 0.01
    np.testing.assert_allclose(encoded["true"] - encoded["false"], shift, rtol=0.02)
    losses = [[line["loss"] for line in read(Store(tmp_path / f"run-{zero}")) if "loss" in line] for zero in ("false", "true")]
    # Before the first update neither adds anything.
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)
    assert losses[0][1] != losses[1][1]
    convert(str(tmp_path / "run-true"), tmp_path / "folder", "hub", None)
    assert json.loads((tmp_path / "folder" / "config.json").read_text(encoding="utf-8"))["force_zeros_for_pooled_projection"]
    # What it adds does not depend on the vector of the text.
    net = load_model(open_model(tmp_path / "run-true")).module
    assert net.config.zero_pooled
    draw, conditions = np.random.default_rng(0), []
    text = jnp.asarray(draw.normal(size=(1, 5, net.config.text_width)), jnp.float32)
    for size in (0.0, 1.0):
        conditions.append(Conditions(text=text, pooled=jnp.full((1, net.config.pooled_width), size)))
    latents = jnp.asarray(draw.normal(size=(1, 4, 4, net.config.channels)), jnp.float32)
    first, second = (net(latents, jnp.array([500.0]), each, latents, None, None) for each in conditions)
    assert all(np.abs(first[name]).max() > 0 for name in first)
    assert all((first[name] == second[name]).all() for name in first)


def test_what_is_not_trained_of_transformers_is_named(transformer, data, tmp_path):
    model, kind, layers = transformer
    other = ("model.modes=3", "training of unions") if kind == "FluxControlNetModel" else ("model.positions=false", "without text")
    for word, problem in (("model.layers=9", "a copy of at most 3"), other):
        with pytest.raises(UserError, match=problem):
            argosy.fit(*words(model, data, tmp_path / "run", *layers, word), view=Heard(), steps=1)


@pytest.mark.slow
def test_that_of_a_transformer_is_sharded(transformer, data, tmp_path):
    """The frozen model and the ControlNet over devices, its layers scanned: the losses are those of one device."""
    model, _, layers = transformer
    settings = [*layers, "execution.run=scan", "sample.every=null"]
    for name, mesh in (("alone", ["mesh.data=8"]), ("sharded", ["mesh.fsdp=4", "mesh.tensor=2"])):
        argosy.fit(*words(model, data, tmp_path / name, *settings, *mesh), view=Heard(), steps=3)
    losses = [[line["loss"] for line in read(Store(tmp_path / name)) if "loss" in line] for name in ("alone", "sharded")]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    with pytest.raises(UserError, match=r"mesh\.stage"):
        argosy.fit(*words(model, data, tmp_path / "staged", *settings, "mesh.stage=2", "mesh.fsdp=4"), view=Heard(), steps=1)
