"""Step caching: its decisions and images against diffusers' first-block cache (tests/reference/image_pipelines.py), and its report."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_weights import write_pipeline
from helpers import relative
from laws.families import noisy_model
from laws.test_denoisers import CASES, inputs_of
from serve.image_servers import class_pipeline

import argosy
from argosy.core.errors import BadInput
from argosy.infer.denoise.pipeline import ImagePipeline
from argosy.infer.denoise.sampling import Drawing
from argosy.infer.denoise.step_cache import CacheReport
from argosy.models.blocks.layered import LayeredDenoiser
from argosy.models.parts.attention.attend import Bidirectional
from argosy.models.parts.attention.cache import Spec
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.stack import Layer, Scan, Stack, Unroll
from argosy.models.parts.stack.addresses import from_layers, layer_addresses, to_layers
from argosy.models.parts.stack.layer_range import run_layers
from argosy.models.parts.weight import fill, merge, split

GOLDEN = Path(__file__).parents[2] / "goldens" / "images" / "pipeline-flux"
# Of the first-block cache in the golden: every step of a random model moves much.
THRESHOLD = 0.9
LAYERED = {name: CASES[name] for name in ("dit-diffusers", "flux2-klein", "sd3-sd3.5", "wan-plain", "z_image-plain")}


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> ImagePipeline:
    return argosy.load(write_pipeline(GOLDEN, tmp_path_factory.mktemp("pipelines") / "flux"))


def test_flux_reuses_what_diffusers_reuses(flux: ImagePipeline):
    golden, reports = dict(np.load(GOLDEN / "golden.npz")), list[CacheReport]()
    arguments: dict[str, Any] = {"steps": 8, "guidance": 3.5, "size": (48, 32), "latents": golden["latents"][:1], "output": "float"}
    image = flux.images("a red fox in the snow", **arguments, step_cache=THRESHOLD, compare=True, report=reports.append)
    assert np.abs(image - golden["out_cached"]).max() < 5e-5
    (report,) = reports
    assert (report.evaluations, report.reused) == (8, 3)
    arguments["output"] = "latents"
    full, cached = (flux.images("a red fox in the snow", **arguments, step_cache=threshold) for threshold in (None, THRESHOLD))
    assert report.errors == pytest.approx([np.linalg.norm(cached - full) / np.linalg.norm(full)], rel=1e-4)
    assert report.errors[0] > 0.05


def test_flux_decides_as_diffusers_step_by_step(flux: ImagePipeline):
    golden = dict(np.load(GOLDEN / "golden.npz"))
    plan, (conditions, null) = flux.plan(flux.sampler, 8, (48, 32)), flux.conditions(["a red fox in the snow"], [None], 3.5)
    noise, scale = golden["latents"][:1].transpose(0, 2, 3, 1), np.full(1, 3.5, np.float32)
    run = flux.sampling(Drawing(plan, [(0, 0)], scale, conditions, null, noise.shape[1:], noise=noise, cache_threshold=THRESHOLD))
    layer_runs = [0]
    for i in range(run.evaluations):
        run.step(i)
        layer_runs.append(run.layer_runs)
    np.testing.assert_array_equal(np.diff(layer_runs), golden["computed"])


@pytest.mark.parametrize("config", LAYERED.values(), ids=LAYERED)
def test_the_first_layer_and_the_rest_are_all_layers(config: Any):
    """Scanned, in plans of one kind of layer and of several."""
    inputs = inputs_of(config)
    graph, leaves = split(noisy_model(config, Scan()))

    @jax.jit
    def parts(leaves: Any) -> tuple[Any, Any]:
        model: LayeredDenoiser = merge(graph, leaves)
        streams, step = model.begin(*inputs)
        return model(*inputs), model.end(model.layered(model.layered(streams, step, "first"), step, "rest"), step)

    whole, cut = parts(leaves)
    assert relative(cut, whole) < 2e-5


class Doubling(nnx.Module):
    """A layer of a kind: x + w tanh(x)."""

    def __init__(self, width: int):
        self.w = Einsum("BTD,DF->BTF", {"D": width, "F": width})

    def holds(self, each: Any) -> Spec:
        return Spec()

    def __call__(self, x: Any, each: Any, cache: Any, attend: Any, condition: Any = None) -> Any:
        return x + self.w(jnp.tanh(x)) * each, cache, {}


def test_any_range_of_a_plan_that_repeats_in_groups():
    """Three repeats of three layers of two kinds, and one layer after them."""
    plan = [Layer("a", 1.0), Layer("b", 0.5), Layer("a", 2.0)] * 3 + [Layer("c", 1.0)]
    unrolled, scanned = (Stack(plan, lambda _: Doubling(4), run=run) for run in (Unroll(), Scan()))
    fill(unrolled, jax.random.key(0), addresses=layer_addresses(unrolled))
    graph, _ = split(scanned)
    scanned = merge(graph, from_layers(scanned, to_layers(unrolled, split(unrolled)[1])))
    x = jax.random.normal(jax.random.key(1), (2, 3, 4))
    attend = Bidirectional(jnp.ones((2, 3), jnp.int32))
    for start, stop in [(0, 1), (1, None), (2, 4), (4, 5), (1, 9), (3, 6), (9, 10), (5, 5)]:
        expected = x
        for i in range(10)[start:stop]:
            expected = getattr(unrolled, str(i))(expected, plan[i].each, None, attend)[0]
        for stack in (unrolled, scanned):
            np.testing.assert_allclose(run_layers(stack, x, attend, None, start, stop), expected, rtol=1e-5, atol=1e-6)


def test_an_image_is_the_same_in_any_batch():
    """Images of different prompts decide for themselves, with guidance and without."""
    pipe, arguments = class_pipeline(), {"steps": 12, "step_cache": 0.2, "output": "latents"}
    for guidance in (1.0, 3.0):
        reports = list[CacheReport]()
        both = pipe.images(["fox", "owl"], seed=[3, 4], guidance=guidance, **arguments, report=reports.append)
        alone = [pipe.images(p, seed=s, guidance=guidance, **arguments, report=reports.append)[0] for p, s in (("fox", 3), ("owl", 4))]
        np.testing.assert_allclose(both, alone, atol=1e-5)
        # The two decide differently, and in a batch the layers run where one of them needs them.
        together, *apart = (report.reused for report in reports)
        assert 0 < together <= min(apart)
        assert together < max(apart)


def test_nothing_is_reused_below_a_threshold_that_no_step_keeps():
    pipe, arguments, reports = class_pipeline(), {"steps": 5, "output": "latents"}, list[CacheReport]()
    image = pipe.images("fox", **arguments, step_cache=1e-9, compare=True, report=reports.append)
    np.testing.assert_allclose(image, pipe.images("fox", **arguments), atol=1e-6)
    assert reports == [CacheReport(5, 0, reports[0].errors)]
    assert reports[0].errors[0] < 1e-6


def test_what_cannot_be_cached_is_refused(tmp_path: Path):
    pipe = class_pipeline()
    for arguments, says in [({"step_cache": 0.0}, "above 0"), ({"compare": True}, "compare without step_cache")]:
        with pytest.raises(BadInput, match=says):
            pipe.images("fox", **arguments)
    single_layer = ImagePipeline(
        noisy_model(pipe.config.model_copy(update={"layers": 1}), Unroll()), pipe.prompts, pipe.sampler, pipe.defaults
    )
    with pytest.raises(BadInput, match="one layer"):
        single_layer.images("fox", step_cache=0.1)
    unet = argosy.load(write_pipeline(GOLDEN.with_name("pipeline-sd"), tmp_path / "sd"))
    with pytest.raises(BadInput, match="UNet has no layers that follow each other"):
        unet.images("a red fox", step_cache=0.1)
