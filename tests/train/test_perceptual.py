"""The perceptual term of autoencoders: LPIPS by the `lpips` package (tests/reference/perceptual.py), files, mistakes and runs."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import digest, draw_weights
from helpers import Heard, relative
from pydantic import ValidationError
from safetensors.numpy import save_file

import argosy
from argosy.checkpoint.open import open_model
from argosy.core.errors import BadInput, UserError
from argosy.core.keymap import KeyMap
from argosy.core.storage import Store
from argosy.jobs.models import describe
from argosy.jobs.plan.training import PlanSettings, plan
from argosy.models.autoencoders.autoencoder_kl import AutoencoderKLConfig
from argosy.models.parts.stack import Unroll
from argosy.models.parts.weight import abstract, merge, parameter_count, put, split, variables
from argosy.models.vgg import VGGConfig
from argosy.observe.flops import contraction_flops
from argosy.observe.metrics import read
from argosy.train.objectives.images.autoencode import Autoencode
from argosy.train.objectives.images.perceptual import Perceptual, perceptual_distance
from argosy.weights.build import load_model, random_model
from argosy.weights.hub.vgg_files import open_linear, with_linear

GOLDENS = Path(__file__).parents[1] / "goldens" / "images"
TOLERANCE = 1e-6  # of the largest number, in float64; gradients are stored in float32
FLOAT32 = 1e-5


def tensors_of(name: str) -> dict[str, np.ndarray]:
    description = json.loads((GOLDENS / name / "tensors.json").read_text(encoding="utf-8"))
    weights = draw_weights(description["tensors"], description["seed"])
    assert digest(weights) == description["sha256"]
    return weights


def part(tensors: dict[str, np.ndarray], start: str) -> dict[str, np.ndarray]:
    return {name: w for name, w in tensors.items() if name.startswith(start)}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A small VGG as torchvision's files are, with a classifier; its linear layers; both as the `lpips` package has them; and its first
    two stages."""
    root, tensors = tmp_path_factory.mktemp("files"), tensors_of("lpips-small")
    features, linear = part(tensors, "features."), part(tensors, "lin")
    save_file(features | {"classifier.0.weight": np.zeros((4, 10), np.float32)}, root / "vgg16.safetensors")
    save_file(linear, root / "linear.safetensors")
    ends = (4, 9, 16, 23, 30)
    whole = {}
    for name, w in features.items():
        number = int(name.split(".")[1])
        whole[f"net.slice{1 + sum(number >= end for end in ends)}.{name.removeprefix('features.')}"] = w
    whole |= {"scaling_layer.shift": np.zeros((1, 3, 1, 1), np.float32)} | linear
    save_file(whole | {name.replace("lin", "lins."): w for name, w in linear.items()}, root / "lpips.safetensors")
    save_file({name: w for name, w in features.items() if int(name.split(".")[1]) < 7}, root / "shallow.safetensors")
    save_file({name: w for name, w in linear.items() if name[3] < "2"}, root / "shallow_linear.safetensors")
    return root


def channels_last(a: np.ndarray) -> jnp.ndarray:
    return jnp.asarray(np.moveaxis(a, 1, -1))


def check_golden(net: Any, name: str, end: str) -> None:
    """In float64: where the sign of a feature turns by rounding, gradients differ."""
    golden = np.load(GOLDENS / name / "golden.npz")
    with jax.enable_x64(True):
        put(net, {address: jnp.asarray(v.get_value(), jnp.float64) for address, v in variables(net).items()})
        net.dtype = jnp.float64
        images, others = (channels_last(golden[key].astype(np.float64)) for key in ("images", "others"))

        def total(images: Any) -> Any:
            distances = perceptual_distance(net, images, others)
            return jnp.sum(distances), distances

        gradient, distances = jax.jit(jax.grad(total, has_aux=True))(images)
        assert distances.dtype == jnp.float64
        assert relative(distances, golden[f"out_distance{end}"]) < TOLERANCE
        for i in range(len(images)):
            assert relative(gradient[i], np.moveaxis(golden[f"out_gradient{end}"], 1, -1)[i]) < TOLERANCE


def test_it_is_lpips(files):
    """From two files, from the package's whole net, and without linear layers."""
    net = open_model(files / "vgg16.safetensors")
    assert (net.config.widths, net.config.depths, net.config.linear) == ((6, 7, 8, 9, 10), (2, 2, 3, 3, 3), False)
    check_golden(load_model(net).module, "lpips-small", "_baseline")
    two = with_linear(net, open_linear(files / "linear.safetensors", net.config))
    check_golden(load_model(two).module, "lpips-small", "")
    whole = open_model(files / "lpips.safetensors")
    assert whole.config.linear
    for name in two.weights.names:
        np.testing.assert_array_equal(whole.weights.read(name), two.weights.read(name))


def test_distances_in_float32_are_near(files):
    golden = np.load(GOLDENS / "lpips-small" / "golden.npz")
    net = load_model(open_model(files / "lpips.safetensors")).module
    images, others = (channels_last(golden[key]) for key in ("images", "others"))
    distances = perceptual_distance(net, images, others)
    assert distances.dtype == jnp.float32
    assert relative(distances, golden["out_distance"]) < FLOAT32


@pytest.mark.slow
def test_it_is_lpips_at_the_size_of_vgg16(tmp_path):
    save_file(tensors_of("lpips-vgg16"), tmp_path / "lpips.safetensors")
    net = open_model(tmp_path / "lpips.safetensors")
    assert net.config == VGGConfig(linear=True)
    assert net.config.parameters() == 14_714_688 + 1_472
    check_golden(load_model(net).module, "lpips-vgg16", "")


def test_features_that_are_all_zero_have_a_gradient_of_zero():
    config = VGGConfig.examples()["plain"]
    net = random_model(config, 0).module
    put(net, {address: jnp.full(v.shape, -9.0) for address, v in variables(net).items() if address.endswith(".b")})
    images = jnp.linspace(-1, 1, 4 * 4 * 3).reshape(1, 4, 4, 3)
    gradient = jax.grad(lambda images: jnp.sum(perceptual_distance(net, images, jnp.zeros_like(images))))(images)
    np.testing.assert_array_equal(gradient, 0)


def test_features_of_an_autoencoder_that_are_all_zero_have_a_gradient_of_zero():
    """No ReLU stands before its maps, so nothing else stops the gradient."""
    net = random_model(AutoencoderKLConfig.examples()["full"], 0).module
    others = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (1, 8, 8, 3)), jnp.float32)
    images = jnp.zeros_like(others)
    assert not any(np.any(x) for x in net.maps(images))
    distance, gradient = jax.value_and_grad(lambda images: jnp.sum(perceptual_distance(net, images, others)))(images)
    assert distance > 0.1
    np.testing.assert_array_equal(gradient, 0)


def test_an_autoencoder_s_features_and_gray_images_are_compared():
    config = AutoencoderKLConfig.examples()["full"]
    net, draw = random_model(config, 0).module, np.random.default_rng(0)
    gray = jnp.asarray(draw.uniform(-1, 1, (2, 8, 8, 1)), jnp.float32)
    others = jnp.asarray(draw.uniform(-1, 1, (2, 8, 8, 1)), jnp.float32)
    expected = np.zeros(2)
    maps = [[np.asarray(x, np.float64) for x in net.maps(jnp.repeat(images, 3, -1))] for images in (gray, others)]
    assert [x.shape for x in maps[0]] == [(2, 4, 4, 6), (2, 4, 4, 10)]
    for x, y in zip(*maps, strict=True):
        units = [z / np.linalg.norm(z, axis=-1, keepdims=True) for z in (x, y)]
        expected += ((units[0] - units[1]) ** 2).sum(-1).mean((1, 2))
    np.testing.assert_allclose(perceptual_distance(net, gray, others), expected, rtol=1e-5)


@pytest.mark.parametrize("config", VGGConfig.examples().values(), ids=VGGConfig.examples())
def test_counts_and_names_are_those_of_what_is_built(config):
    model = random_model(config, 0).module
    assert parameter_count(abstract(model)) == config.parameters()
    assert set(KeyMap(*config.hub_rows()).paths) == set(variables(model))
    images = jnp.zeros((1, 8, 12, 3))

    def sums(images: Any) -> list[Any]:
        return [model.weighted_sum(level, x) for level, x in enumerate(model.maps(images))]

    assert contraction_flops(jax.make_jaxpr(sums)(images).jaxpr) == config.flops(8 * 12)


@pytest.mark.parametrize("config", [VGGConfig.examples()["linear"], AutoencoderKLConfig.examples()["full"]], ids=["vgg", "autoencoder"])
def test_flops_of_a_step_have_the_passes_of_the_net(config):
    """Two forward and one backward to the images, against the products of the compiled program."""
    net, images = random_model(config, 0).module, jnp.zeros((1, 8, 8, 3))
    assert contraction_flops(jax.make_jaxpr(net.maps)(images).jaxpr) == config.maps_flops(64) - linear_flops(config, 64)
    step = jax.make_jaxpr(jax.grad(lambda images: jnp.sum(perceptual_distance(net, images, images + 1))))(images)
    assert contraction_flops(step.jaxpr) == pytest.approx(3 * config.maps_flops(64), rel=0.05)


def linear_flops(config: Any, pixels: int) -> int:
    widths = config.widths if getattr(config, "linear", False) else ()
    return sum(2 * width * (pixels // 4**level) for level, width in enumerate(widths))


@pytest.mark.parametrize(
    "config", [VGGConfig(widths=(16, 16), depths=(4, 4)), AutoencoderKLConfig(widths=(16, 16), groups=2, latent_channels=3, layers=3)],
    ids=["vgg", "autoencoder"],
)  # fmt: skip
def test_a_net_whose_stages_are_computed_again_has_fewer_temporaries(config):
    """And the same gradients, of its weights too."""
    draw = np.random.default_rng(0)
    images, others = (jnp.asarray(draw.uniform(-1, 1, (2, 32, 32, 3)), jnp.float32) for _ in range(2))
    sizes, gradients = [], []
    for remat in ("none", "full"):
        graph, weights = split(config.build(Unroll(remat)))[0], split(random_model(config, 0).module)[1]

        def distance(images: Any, weights: Any, graph: Any = graph) -> Any:
            return jnp.sum(perceptual_distance(merge(graph, weights), images, others))

        program = jax.jit(jax.grad(distance)).lower(images, weights).compile()
        sizes.append(program.memory_analysis().temp_size_in_bytes)
        gradients.append([program(images, weights), jax.jit(jax.grad(distance, 1))(images, weights)])
    assert sizes[1] < 0.75 * sizes[0]
    for plain, again in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(again, plain, atol=1e-5 * np.abs(plain).max())


def planned(recipe: str, *words: str) -> Any:
    return plan(recipe, words, PlanSettings(device="this"), lambda _: None)


def test_plans_have_the_flops_of_the_net(files, data):
    net = files / "shallow.safetensors"
    size = "data.image.size=16"
    plain, whole = (planned(*words(data, Path("none"), size, *more)) for more in ((), (f"objective.perceptual.net={net}",)))
    config: Any = open_model(net).config
    assert whole["flops_per_step"] - plain["flops_per_step"] == 8 * 3 * config.maps_flops(16 * 16)


def test_the_loss_has_the_term_with_its_weight():
    model, net = random_model(AutoencoderKLConfig.examples()["bare"], 0).module, random_model(VGGConfig.examples()["plain"], 1).module
    images = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (3, 8, 8, 3)), jnp.float32)
    batch: dict[str, Any] = {"images": images, "row": jnp.array([0, 1, -1])}
    losses = []
    for weight in (None, 1.0, 3.0):
        perceptual = Perceptual() if weight is None else Perceptual(net="net", weight=weight)
        objective = Autoencode(perceptual=perceptual)
        models = {"model": model} | dict.fromkeys(objective.roles, net)
        losses.append(objective(models, batch, jax.random.key(0)))
    distance = losses[1].metrics["perceptual"].value()
    assert distance > 0.1
    np.testing.assert_allclose(losses[1].loss.value() - losses[0].loss.value(), distance, rtol=1e-5)
    np.testing.assert_allclose(losses[2].loss.value() - losses[0].loss.value(), 3 * distance, rtol=1e-5)


def test_a_net_that_is_missing_is_an_error():
    model = random_model(AutoencoderKLConfig.examples()["bare"], 0).module
    batch: dict[str, Any] = {"images": jnp.zeros((1, 8, 8, 3)), "row": jnp.array([0])}
    with pytest.raises(KeyError, match="perceptual"):
        Autoencode(perceptual=Perceptual(net="net"))({"model": model}, batch, jax.random.key(0))


def test_settings_without_a_net_are_refused():
    for fields in ({"weight": 0.5}, {"linear": "x.safetensors"}):
        with pytest.raises(ValidationError, match="is set without net"):
            Perceptual(**fields)


# ---- runs


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Bright rectangles on dark grounds."""
    draw, images = np.random.default_rng(0), np.zeros((40, 16, 16, 3), np.uint8)
    for image in images:
        top, left_edge = draw.integers(0, 9, 2)
        image[:] = draw.integers(0, 60, 3)
        image[top : top + 7, left_edge : left_edge + 7] = draw.integers(120, 256, 3)
    path = tmp_path_factory.mktemp("data") / "images.npz"
    np.savez(path, images=images)
    return path


SMALL = ["model.widths=[4,8]", "model.groups=2", "model.latent_channels=2", "data.batch=8"]
HOW = ["schedule=constant", "log.every=1", "eval.batches=0", "sample.every=null", "mesh.data=8"]


def words(data: Path, folder: Path, *more: str) -> list[str]:
    return ["vae", f"data.source={data}", f"dir={folder}", *SMALL, *HOW, *more]


def test_a_net_that_is_not_finite_is_named(files, data, tmp_path):
    tensors = part(tensors_of("lpips-small"), "features.")
    save_file(tensors | {"features.2.bias": np.full_like(tensors["features.2.bias"], np.nan)}, tmp_path / "nan.safetensors")
    with pytest.raises(BadInput, match=r"nan.safetensors has numbers that are not finite, in features\.2\.b"):
        argosy.fit(*words(data, tmp_path / "run", f"objective.perceptual.net={tmp_path / 'nan.safetensors'}"), view=Heard(), steps=1)


def test_the_memory_of_a_checkpoint_has_no_frozen_net(files, data):
    net = f"objective.perceptual.net={files / 'shallow.safetensors'}"
    plain, beside = (planned(*words(data, Path("none"), "data.image.size=16", *more))["memory_bytes_by_model"] for more in ((), (net,)))
    assert beside["checkpoint"] == plain["checkpoint"]
    assert beside["parameters"] > plain["parameters"]


@pytest.mark.slow
def test_the_term_falls_and_what_is_compared_is_recorded(files, data, tmp_path):
    net, linear = files / "shallow.safetensors", files / "shallow_linear.safetensors"
    terms = [f"objective.perceptual.net={net}", f"objective.perceptual.linear={linear}", "optimizer.learning_rate=1e-2"]
    argosy.fit(*words(data, tmp_path / "run", *terms), view=Heard(), steps=12)
    falls = [line["perceptual"] for line in read(Store(tmp_path / "run")) if "perceptual" in line]
    assert len(falls) == 12
    assert np.mean(falls[-3:]) < 0.8 * np.mean(falls[:3])
    for name, file in (("perceptual.json", net), ("perceptual_linear.json", linear)):
        record = json.loads((tmp_path / "run" / name).read_text(encoding="utf-8"))
        assert record["path"] == str(file)
        assert len(record["files"][file.name]["sha256"]) == 64


def test_mistakes_are_named_before_anything_is_trained(files, data, tmp_path):
    tensors = tensors_of("lpips-small")
    for name in ("vgg.pth", "lin.pth"):
        (tmp_path / name).write_bytes(b"PK")
    np.savez(tmp_path / "clear.npz", images=np.load(data)["images"][..., [0, 1, 2, 0]])
    save_file(part(tensors, "features.") | {"features.1.running_mean": np.zeros(6, np.float32)}, tmp_path / "bn.safetensors")
    save_file({"layer1.0.conv1.weight": np.zeros((4, 3, 1, 1), np.float32)}, tmp_path / "resnet.safetensors")
    save_file(part(tensors, "features.") | {"features.0.bias": np.zeros(5, np.float32)}, tmp_path / "cut.safetensors")
    first = np.zeros((6, 3, 3, 3), np.float32)
    for name, tensors_of_file in {
        "axis": {"features.0.weight": np.zeros(4, np.float32)},
        "norm": {"features.0.weight": first, "features.norm.weight": np.zeros(4, np.float32)},
        "alexnet": {"features.0.weight": np.zeros((6, 3, 11, 11), np.float32), "features.3.weight": np.zeros((8, 6, 5, 5), np.float32)},
        "squeezenet": {"features.0.weight": first, "features.3.squeeze.weight": np.zeros((4, 6, 1, 1), np.float32)},
        "gap": {"features.0.weight": first, "features.4.weight": np.zeros((8, 6, 3, 3), np.float32)},
    }.items():
        save_file(tensors_of_file, tmp_path / f"{name}.safetensors")
    wide = {name: np.concatenate([w, w], 1) for name, w in part(tensors, "lin").items()}
    save_file(wide, tmp_path / "wide.safetensors")
    save_file(dict(list(part(tensors, "lin").items())[:4]), tmp_path / "four.safetensors")
    net, linear = "objective.perceptual.net", "objective.perceptual.linear"
    vgg = f"{net}={files / 'vgg16.safetensors'}"
    for word, problem in (
        (f"{net}={tmp_path / 'vgg.pth'}", r"is a file of torch, which may run code when it is read"),
        (f"{vgg} {linear}={tmp_path / 'lin.pth'}", r"is a file of torch"),
        (f"{net}={tmp_path / 'none.safetensors'}", "no model at"),
        (f"{net}={tmp_path / 'bn.safetensors'}", "a VGG with batch norms is not built"),
        (f"{net}={tmp_path / 'resnet.safetensors'}", "is of no kind that is read"),
        (f"{net}={tmp_path / 'cut.safetensors'}", "features.0.bias"),
        (f"{net}={tmp_path / 'axis.safetensors'}", "kernels of no axes, where those of a VGG are convolutions of 3x3"),
        (f"{net}={tmp_path / 'norm.safetensors'}", "layers features.norm.weight, where"),
        (f"{net}={tmp_path / 'alexnet.safetensors'}", "kernels of 5x5, 11x11, where"),
        (f"{net}={tmp_path / 'squeezenet.safetensors'}", "layers features.3.squeeze.weight, where"),
        (f"{net}={tmp_path / 'gap.safetensors'}", "convolutions have the numbers 0, 4, which are not those of a VGG"),
        (f"{net}={files / 'linear.safetensors'}", "has linear layers of LPIPS, and no net"),
        (f"{vgg} {linear}={tmp_path / 'none.pth'}", "no file .*none.pth"),
        (f"{vgg} {linear}={files / 'vgg16.safetensors'}", "has no linear layers of LPIPS"),
        (f"{vgg} {linear}={tmp_path / 'wide.safetensors'}", "12, 14, 16, 18, 20 channels, and the net's maps have 6, 7, 8, 9, 10"),
        (f"{vgg} {linear}={tmp_path / 'four.safetensors'}", "weighs 6, 7, 8, 9 channels"),
        (f"{vgg} model.channels=4 data.source={tmp_path / 'clear.npz'}", "reads images of 3 channels, and model.channels = 4"),
        (f"{linear}={files / 'linear.safetensors'}", "is set without net"),
    ):
        with pytest.raises(UserError, match=problem):
            argosy.fit(*words(data, tmp_path / "run", *word.split()), view=Heard(), steps=1)
    trained = [f"data.source={data}", f"dir={tmp_path / 'run'}", f"model={files / 'vgg16.safetensors'}"]
    with pytest.raises(UserError, match="the model is a net of features, which is not trained"):
        argosy.fit("vae", *trained, view=Heard(), steps=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("recipe", "model"), [("diffusion", "model.family=vgg"), ("diffusion", "model=FILE"), ("vae", "model=FILE")])
def test_a_net_of_features_is_not_trained(recipe, model, files, data):
    with pytest.raises(UserError, match="the model is a net of features, which is not trained") as caught:
        planned(recipe, f"data.source={data}", model.replace("FILE", str(files / "vgg16.safetensors")))
    assert "objective.perceptual.net=FILE" in str(caught.value)
    assert "denoiser" not in str(caught.value)


def test_a_net_of_features_is_no_language_model(files):
    file = str(files / "vgg16.safetensors")
    for use in (argosy.load, describe):
        with pytest.raises(BadInput, match="reads images") as caught:
            use(file)
        assert "objective.perceptual.net=FILE" in str(caught.value.hint)


def test_images_that_a_net_halves_to_nothing_are_refused(files, data, tmp_path):
    small = tmp_path / "small.npz"
    np.savez(small, images=np.load(data)["images"][:, :8, :12])
    with pytest.raises(BadInput, match=r"images of 12x8 pixels, which .* halves until nothing is left"):
        argosy.fit(*words(small, tmp_path / "run", f"objective.perceptual.net={files / 'vgg16.safetensors'}"), view=Heard(), steps=1)


@pytest.mark.slow
def test_it_resumes_bit_for_bit_and_beside_the_same_net_alone(files, data, tmp_path):
    net = tmp_path / "net.safetensors"
    net.write_bytes((files / "lpips.safetensors").read_bytes())
    settings = [
        "checkpoint.every=2",
        f"objective.perceptual.net={net}",
        "objective.perceptual.weight=0.5",
        "mesh.data=2",
        "mesh.fsdp=4",
    ]
    for steps in (2, 4):
        argosy.fit(*words(data, tmp_path / "halves", *settings), view=Heard(), steps=steps)
    argosy.fit(*words(data, tmp_path / "whole", *settings), view=Heard(), steps=4)
    losses = [[line["loss"] for line in read(Store(tmp_path / name)) if "loss" in line] for name in ("halves", "whole")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    # Over other devices, to rounding.
    argosy.fit(*words(data, tmp_path / "other", *settings, "mesh.data=8", "mesh.fsdp=1"), view=Heard(), steps=4)
    other = [line["loss"] for line in read(Store(tmp_path / "other")) if "loss" in line]
    np.testing.assert_allclose(other, losses[1], rtol=1e-4)
    tensors = tensors_of("lpips-small")
    save_file({name: w + np.float32(1e-3) for name, w in tensors.items()}, net)
    with pytest.raises(UserError, match="other weights than the net of this run's perceptual term"):
        argosy.fit(*words(data, tmp_path / "halves", *settings), view=Heard(), steps=6)


@pytest.mark.slow
def test_a_run_that_computes_activations_again_trains_alike(files, data, tmp_path):
    term = f"objective.perceptual.net={files / 'lpips.safetensors'}"
    losses = []
    for remat in ("none", "full"):
        argosy.fit(*words(data, tmp_path / remat, term, f"execution.remat={remat}"), view=Heard(), steps=3)
        losses.append([line["loss"] for line in read(Store(tmp_path / remat)) if "loss" in line])
    assert len(losses[0]) == 3
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.slow
def test_a_run_does_not_resume_beside_other_linear_layers(files, data, tmp_path):
    linear = tmp_path / "linear.safetensors"
    linear.write_bytes((files / "shallow_linear.safetensors").read_bytes())
    settings = [f"objective.perceptual.net={files / 'shallow.safetensors'}", f"objective.perceptual.linear={linear}"]
    argosy.fit(*words(data, tmp_path / "run", "checkpoint.every=2", *settings), view=Heard(), steps=2)
    tensors = part(tensors_of("lpips-small"), "lin")
    save_file({name: 2 * w for name, w in tensors.items() if name[3] < "2"}, linear)
    with pytest.raises(UserError, match="other weights than the linear layers of this run's perceptual term"):
        argosy.fit(*words(data, tmp_path / "run", "checkpoint.every=2", *settings), view=Heard(), steps=4)


@pytest.mark.slow
def test_a_net_that_was_trained_here(data, tmp_path):
    """An autoencoder of an earlier run, in bfloat16."""
    argosy.fit(*words(data, tmp_path / "first"), view=Heard(), steps=4)
    term = f"objective.perceptual.net={tmp_path / 'first'}"
    argosy.fit(*words(data, tmp_path / "second", term, "precision=bfloat16"), view=Heard(), steps=4)
    assert all(np.isfinite(line["perceptual"]) for line in read(Store(tmp_path / "second")) if "perceptual" in line)
    linear = tmp_path / "linear.safetensors"
    save_file(part(tensors_of("lpips-small"), "lin"), linear)
    with pytest.raises(UserError, match="linear layers of LPIPS are for VGG"):
        argosy.fit(*words(data, tmp_path / "third", term, f"objective.perceptual.linear={linear}"), view=Heard(), steps=1)
