"""Exports pipelines that draw images as bundles: `argosy export MODEL OUT signature=denoise`.

    denoise    prompt, negative_prompt, seed, index, guidance [batch] -> images [batch, H, W, 3] uint8, finite [batch]
               and for each ControlNet its image, scale and kind (`control`)

A program computes pixels from the ids of prompts. It contains the text encoders, the sampler's table for a number of steps, the
denoiser with and without its conditions, and the decoder. The size and the number of steps are fixed by the export. For a seed and an
index the program draws the same image as `ImagePipeline.images`. Class-conditional models take labels in place of prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from argosy.core.errors import BadInput
from argosy.export.control import bundled_control
from argosy.export.lower import PLATFORMS, export_program, portable_implementations
from argosy.export.manifest import BundleManifest, BundleSignature, TensorSignature
from argosy.export.model import abstract_inputs, listed_sizes, size_combinations
from argosy.export.prompts import BundledPrompts, bundled_prompts
from argosy.export.signatures import BATCH, split_program
from argosy.export.write import BundleContents, tensor_entry, write_bundle
from argosy.infer.denoise.pipeline import ImagePipeline
from argosy.infer.denoise.plan import initial_state, sample
from argosy.infer.denoise.sampling import first_noise, step_conditions
from argosy.models.diffusion.base import Conditions

ABOUT = {
    "labels": "the class of each image",
    "text": "states of the text encoder",
    "text_mask": "1 for tokens, 0 for padding",
    "pooled": "a vector for each prompt",
}


PROMPTED = {"prompt": ["a red boat"], "seed": [0]}


class PipelineModule(nnx.Module):
    """The modules of a pipeline in one module, with one row of the unconditional inputs of guidance."""

    def __init__(self, pipeline: ImagePipeline, prompts: BundledPrompts | None, null: Conditions | None):
        self.denoiser, self.dtype = pipeline.steered_denoiser, pipeline.denoiser.dtype
        if prompts is not None:
            self.encoders = prompts.modules
        if pipeline.autoencoder is not None:
            self.autoencoder = pipeline.autoencoder
        if null is not None:
            self.null = nnx.Dict({k: nnx.Variable(v) for k, v in null._asdict().items() if v is not None})


def export_images(
    pipeline: ImagePipeline,
    target: str | Path,
    *,
    steps: int | None = None,
    size: int | tuple[int, int] | None = None,
    platforms: Sequence[str] = PLATFORMS,
    batch: int | Sequence[int] | None = None,
    lineage: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> BundleManifest:
    """Writes a pipeline as a bundle.

    Args:
        target: the path of the bundle, a new folder.
        steps: the number of sampling steps. The default is that of the pipeline.
        size: the height and width of images in pixels. The default is that of the pipeline.
        platforms: the platforms that the programs run on: cpu, cuda, rocm, tpu.
        batch: the batch sizes. Each gets a program, and smaller batches are padded. None permits any size, compiled on first use.
        lineage: the origin of the model, for the manifest.
        say: called with progress messages.
        options: further arguments of `write_bundle`, such as `store` and `sign`.

    Raises:
        BadInput: the model cannot draw this size in this number of steps, or the target exists. Nothing is written.
    """
    guided = "guidance" not in pipeline.config.conditions and pipeline.defaults.guidance != 1
    prompts = bundled_prompts(pipeline.prompts, guided)
    signature, function, module = denoise_signature(pipeline, prompts, guided, steps, size)
    program, weights = split_program(module, function)
    contents = BundleContents({}, {}, lineage=dict(lineage or {}))
    if prompts is not None:
        contents.files = prompts.files
    contents.implementations = portable_implementations(platforms)
    say(f"lowering `denoise` for {', '.join(platforms)}")
    contents.programs["denoise"] = [
        (fixed, export_program(program, weights, abstract_inputs(signature, fixed), platforms=platforms))
        for fixed in size_combinations({BATCH: listed_sizes("batch", batch)})
    ]
    contents.signatures["denoise"] = signature.model_copy(update={"weights": sorted(weights)})
    contents.weights = [tensor_entry(address, value) for address, value in weights.items()]
    return write_bundle(target, contents, **options)


def denoise_signature(
    pipeline: ImagePipeline, prompts: BundledPrompts | None, guided: bool, steps: int | None, size: int | tuple[int, int] | None
) -> tuple[BundleSignature, Callable[..., dict[str, Any]], nnx.Module]:
    """Returns the signature, its computation (module, inputs) -> outputs, and the module.

    Args:
        prompts: the text encoders. With None, the program takes conditions as inputs.
        guided: whether classifier-free guidance is used.
        steps, size: the number of steps and the size of images, as in `export_images`.

    Raises:
        BadInput: the model cannot draw this size in this number of steps.
    """
    height, width = pipeline.checked_size(size)
    control = bundled_control(pipeline, (height, width))
    count = pipeline.defaults.steps if steps is None else steps
    plan = pipeline.plan(pipeline.sampler, count, (height, width))
    config, null = pipeline.config, pipeline.prompts.null(1)
    shape = (height // pipeline.factor, width // pipeline.factor, config.channels)
    learned, scale = "guidance" in config.conditions, pipeline.defaults.guidance
    if not any(value is not None for value in null):
        raise BadInput("this pipeline reads no conditions that a bundle could take as inputs")
    if prompts is None:
        specs = [_input(name, value, config) for name, value in null._asdict().items() if value is not None]
    else:
        specs = list(prompts.inputs())
    specs.append(TensorSignature(name="seed", shape=[BATCH], dtype="uint32", description="of the noise", minimum=0))
    about = "number of the image among those of its prompt and seed"
    specs.append(TensorSignature(name="index", shape=[BATCH], dtype="int32", description=about, default=0, minimum=0))
    if learned or guided:
        about = "how strongly an image follows its conditions"
        specs.append(TensorSignature(name="guidance", shape=[BATCH], dtype="float32", description=about, default=scale, minimum=0))
    specs += [] if control is None else control.inputs()
    outputs = [
        TensorSignature(name="images", shape=[BATCH, height, width, 3], dtype="uint8", description="RGB"),
        TensorSignature(name="finite", shape=[BATCH], dtype="bool", description="whether every number was finite"),
    ]

    def function(module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        rows = inputs["seed"].shape[0]
        if prompts is None:
            conditions = Conditions(**{name: inputs[name] for name in Conditions._fields if name in inputs and name != "guidance"})
        else:
            conditions = prompts.conditions(module.encoders, inputs)
        if learned:
            conditions = conditions._replace(guidance=inputs["guidance"])
        away = Conditions()
        if guided:
            none = {k: jnp.broadcast_to(v[...], (rows, *v.shape[1:])) for k, v in module.null.items()}
            away = Conditions(**none) if prompts is None else prompts.base(module.encoders, inputs, none)
        if control is not None:
            conditions, away = control.put_on(module, inputs, conditions, away)
        keys = jax.vmap(lambda seed, i: jax.random.fold_in(jax.random.key(seed), i))(inputs["seed"], inputs["index"])

        def predict(x: Float[Array, "B H W C"], timestep: Float[Array, ""], level: Float[Array, "2"]) -> Float[Array, "B H W C"]:
            times = jnp.broadcast_to(timestep, (rows,))
            current_conditions = step_conditions(config, conditions, timestep, level, rows)
            prediction = module.denoiser(x, times, current_conditions).astype(jnp.float32)
            if not guided:
                return prediction
            base_conditions = step_conditions(config, away, timestep, level, rows)
            base = module.denoiser(x, times, base_conditions).astype(jnp.float32)
            return pipeline.guidance.apply(prediction, base, inputs["guidance"], timestep)

        state = initial_state(plan, first_noise(keys, shape))
        fresh = keys if plan.spread.any() else None
        latents = sample(predict, plan, state, fresh)
        if pipeline.autoencoder is None:
            images = latents
        else:
            images = module.autoencoder.decode(module.autoencoder.from_latents(latents)).astype(jnp.float32)
        images = jnp.repeat(images, 3, -1) if images.shape[-1] == 1 else images
        finite = jnp.isfinite(latents).all((1, 2, 3)) & jnp.isfinite(images).all((1, 2, 3))
        return {"finite": finite, "images": jnp.rint(jnp.clip(images / 2 + 0.5, 0, 1) * 255).astype(jnp.uint8)}

    example = {"labels": [0], "seed": [0]} if null.labels is not None else {} if prompts is None else PROMPTED
    decoding = [] if control is None else control.steps
    signature = BundleSignature(
        description=f"an image of {width}x{height} pixels for each row, drawn in {count} steps of {pipeline.sampler.name}",
        inputs=specs,
        outputs=outputs,
        programs=[],
        weights=[],
        padding=[BATCH],
        preprocess=[*([] if prompts is None else prompts.steps), *decoding],
        example=example | (control.example if control is not None and example else {}),
    )
    return signature, function, PipelineModule(pipeline, prompts, null if guided else None)


def _input(name: str, value: Any, config: Any) -> TensorSignature:
    """Returns the input for a condition, of the shape of the pipeline's prompts."""
    bounds = {"minimum": 0, "maximum": config.classes_known} if name == "labels" else {}
    return TensorSignature(name=name, shape=[BATCH, *value.shape[1:]], dtype=str(value.dtype), description=ABOUT[name], **bounds)
