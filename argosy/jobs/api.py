"""The functions for Python users: `argosy.load` and `argosy.fit`."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from argosy.adapt.qwix import as_rules
from argosy.core.addresses import is_missing
from argosy.core.errors import BadInput
from argosy.core.hub.download import local_model
from argosy.core.settings import Settings, SettingsLayer, dump, read_settings
from argosy.core.settings.scalars import yaml_line
from argosy.core.settings.words import CALL
from argosy.infer.settings import DraftModel, EngineSettings
from argosy.jobs import machine
from argosy.jobs.image_models import draws_images, embeds_images

# A server loads a model without the settings of runs, which import every objective and environment and would take 0.1 s of its start.
if TYPE_CHECKING:
    from argosy.infer.lm import LM
    from argosy.jobs.train import View
    from argosy.run.outcome import Outcome


def load(
    model: str | Path,
    *,
    random: int | None = None,
    dtype: Any = None,
    adapter: str | Path | None = None,
    single_file: str | Path | None = None,
    controlnet: str | Path | Sequence[str | Path] | None = None,
    embeddings: str | Path | Sequence[str | Path] | None = None,
    context: int | None = None,
    tensor: int = 1,
    engine: EngineSettings | Mapping[str, Any] | None = None,
    blocks: bool | Literal["auto"] = False,
    quantization: str | Sequence[Any] | None = None,
) -> Any:
    """Loads a model. A language model has `.config`, `.module`, `.tokenizer`, `.logits`, `.generate` and `.save`. An encoder has
    `.embed` instead of `.logits` and `.generate`. A diffusers folder, or a run that trained a denoiser, becomes an `ImagePipeline`
    with `.images`. CLIP with both towers becomes an `ImageTextEncoder` with `.embed` and `.embed_images`.

    Turns on JAX's persistent compilation cache, as commands do, unless JAX_COMPILATION_CACHE_DIR or jax.config names a folder.

    Args:
        model: the model, in one of these forms. A Hub folder, a .gguf file, a run directory (whose last good checkpoint is loaded), or
            one checkpoint step. The address of one of these (`gs://bucket/runs/tiny`), which is copied to a temporary folder.
            `hf:OWNER/NAME[@REVISION][:FILE]`, a model of the Hub, which is downloaded to its cache. With `random`, the name of a
            preset.
        random: the seed of the random weights of a preset.
        dtype: the type of weights and activations. The default is float32 on CPUs and bfloat16 elsewhere.
        adapter: a folder of low-rank adapters in the PEFT library's format. `lm.merge()` merges them into the weights.
        single_file: for a diffusers folder, a .safetensors file in its authors' names (Flux.1; Stable Diffusion 1, 2 and XL), whose
            models replace those of the folder.
        controlnet: for a diffusers folder of Stable Diffusion or Flux.1, one or several ControlNets that steer it by
            `images(control_image=...)`. Each is a diffusers folder, a run of `argosy train controlnet`, a checkpoint of one, or
            hf:OWNER/NAME. With several, `images` takes a control image for each, in their order.
        embeddings: for a diffusers folder of Stable Diffusion 1, 2 or XL, one or several learned embeddings (textual inversion). Each
            is a file, a folder with `learned_embeds.safetensors`, a run of `argosy train textual_inversion`, or hf:OWNER/NAME. Prompts
            name their tokens: "a <cat-toy> on the moon".
        context: the length of the longest sequence that the model will get, in tokens, if that is less than its own context. It selects
            one of the two tables of rotary positions of LongRoPE.
        tensor: the number of devices that share heads, feed-forward features, vocabulary and KV cache (arXiv:1909.08053).
        engine: the settings of the engine under `generate`, by the names of `argosy serve` (`infer.settings.EngineSettings`), such as
            {"speculative": "ngram"}, or {"lora": {"enabled": True, "adapters": 2}} for `lm.load_adapter`. Its `context` is the default
            of the argument `context`.
        blocks: whether the weights of a .gguf file stay in their blocks of 4 to 8 bits on a CPU. That takes a third of the memory or
            less and gives the same results. Such a model cannot be trained, changed or saved. If no weight can stay in blocks, a
            message says so, except with "auto".
        quantization: a preset of `argosy quantize`, such as "w8" or "w4", a YAML file of rules, or a list of rules, of mappings with
            the keys of a rule, or of `qwix.QuantizationRule`s. Weights are quantized while they are read.

    Raises:
        UnknownName, BadInput, SettingsError, Damaged: there is no such model, it is damaged, `tensor` devices cannot share it, or the
            settings are wrong or do not fit the model.
    """
    if random is not None and adapter is not None:
        raise BadInput(
            "an adapter needs the weights it was trained on", hint="give the folder of that model instead of `random`"
        )
    if random is not None and quantization is not None:
        raise BadInput("random weights are not quantized as they are drawn", hint="lm.quantize(...) does it afterwards")
    if random is not None and tensor != 1:
        raise BadInput("random weights are on one device", hint="leave out `tensor`")
    engine_settings = (
        engine
        if isinstance(engine, EngineSettings)
        else read_settings(EngineSettings, SettingsLayer("engine", engine or {})).value
    )
    context = engine_settings.context if context is None else context
    machine.start_jax()
    from argosy.infer import load as loading

    if random is not None:
        from argosy.run.settings.recipe_files import preset_config, presets, recipes

        if str(model) in recipes():
            raise BadInput(f"`{model}` is a recipe, not a preset", hint=f"presets are {', '.join(presets()[:8])}, ...")
        config = preset_config(str(model))
        if config.inputs == "images":
            problem = f"{model} draws images or videos with a text encoder and an autoencoder, and random weights have neither"
            raise BadInput(problem, hint="a diffusers folder; `argosy train diffusion model=PRESET` trains such a model")
        _say(f"{model}: random weights from seed {random}")
        lm = loading.random_lm(config, random, dtype=dtype, engine=engine_settings, draft=draft_of(engine_settings, dtype))
        lm.exporter = _export
        return _check_engine(lm)
    model = local_model(model, _say)
    adapter = None if adapter is None else local_model(adapter, _say)
    if is_missing(model):
        from argosy.run.settings.recipe_files import no_model

        raise no_model(str(model))
    if draws_images(model):
        if quantization is not None or tensor != 1:
            unsupported = "quantization" if quantization is not None else "tensor"
            raise BadInput(f"{unsupported}: not built for models that draw images", hint="leave it out")
        return _pipeline(model, dtype, adapter, single_file, controlnet, embeddings)
    if embeddings is not None:
        raise BadInput(f"embeddings are read by the text encoder of a diffusers folder, and {model} is none", hint="leave it out")
    if controlnet is not None:
        raise BadInput(f"controlnet steers models of a diffusers folder, and {model} is none", hint="leave it out")
    if single_file is not None:
        raise BadInput(f"single_file takes the place of models of a diffusers folder, and {model} is none", hint="leave it out")
    if embeds_images(model):
        options = {"quantization": quantization, "adapter": adapter, "tensor": tensor if tensor != 1 else None}
        if unsupported := [name for name, value in options.items() if value is not None]:
            raise BadInput(f"{unsupported[0]}: not built for CLIP with both towers", hint="leave it out")
        return _image_text_encoder(model, dtype)
    rules = None if quantization is None else as_rules(quantization)
    if rules is not None and blocks is True:
        raise BadInput("`quantization` and `blocks` each say how weights are kept", hint="leave one out")
    more: Any = {"engine": engine_settings, "draft": draft_of(engine_settings, dtype, tensor), "warn": _say, "rules": rules}
    more["blocks"] = bool(blocks) and rules is None
    lm = loading.load_lm(model, dtype=dtype, adapter=adapter, context=context, tensor=tensor, **more)
    lm.exporter = _export
    if blocks is True and not lm.in_blocks:
        _say(f"{model}: no weight is kept in blocks: that is for .gguf files with blocks, in float32, on one CPU device with kernels")
    return _check_engine(lm)


def _pipeline(model: str | Path, dtype: Any, adapter: Any, single_file: Any, controlnet: Any, embeddings: Any) -> Any:
    """Loads a diffusers folder, or a run that trained a denoiser, as an `ImagePipeline`, and an autoencoder as an
    `ImageAutoencoder`."""
    from argosy.infer.denoise.pipeline import ImagePipeline

    if (Path(model) / "model_index.json").is_file():
        from argosy.infer.denoise.folder import load_diffusers

        nets = [controlnet] if isinstance(controlnet, str | Path) else controlnet or ()
        controlnet = [local_model(net, _say) for net in nets]
        files = [embeddings] if isinstance(embeddings, str | Path) else embeddings or ()
        files = [local_model(file, _say) for file in files]
        more: Any = {"single_file": single_file, "controlnet": controlnet, "embeddings": files, "say": _say}
        pipeline = load_diffusers(model, dtype=dtype, adapter=adapter, **more)
    else:
        if single_file is not None:
            raise BadInput("single_file: takes the place of models of a diffusers folder", hint="give a folder with a model_index.json")
        if controlnet is not None:
            raise BadInput("controlnet: steers the denoiser of a diffusers folder", hint="give a folder with a model_index.json")
        if embeddings is not None:
            problem = "embeddings: read by the text encoders of a diffusers folder"
            raise BadInput(problem, hint="give a folder with a model_index.json")
        if adapter is not None:
            raise BadInput("adapter: a run's own adapters are merged as it is loaded", hint="give a diffusers folder, or leave it out")
        from argosy.infer.denoise.runs import load_images

        pipeline = load_images(model, dtype, _say)
        if not isinstance(pipeline, ImagePipeline):
            return pipeline
    pipeline.exporter = _export_images
    return pipeline


def _image_text_encoder(model: str | Path, dtype: Any) -> Any:
    from argosy.checkpoint.open import open_model
    from argosy.infer.clip import ImageTextEncoder
    from argosy.weights.build import load_model

    return ImageTextEncoder(load_model(open_model(model, _say), dtype=dtype))


def _export_images(pipeline: Any, folder: str | Path, **options: Any) -> Any:
    """Implements `pipeline.export`. The code that writes bundles is imported at the first call."""
    from argosy.export.images import export_images

    return export_images(pipeline, folder, **options)


def _export(lm: "LM", folder: str | Path, **options: Any) -> Any:
    """Implements `lm.export`. The code that writes bundles is imported at the first call."""
    from argosy.export.model import export_model

    return export_model(lm, folder, **options)


def _check_engine(lm: "LM") -> "LM":
    """Checks that an encoder was not given engine settings, because it has no engine."""
    if not lm.config.causal and lm.engine_settings != EngineSettings():
        raise BadInput("`engine` is for models that generate, and this one is an encoder", hint="leave it out")
    return lm


def draft_of(settings: EngineSettings, dtype: Any = None, tensor: int = 1) -> "LM | None":
    """Loads the draft model that the engine's settings name; None if they name none. Other arguments and errors are those of `load`."""
    if not isinstance(settings.speculative, DraftModel):
        return None
    return load(settings.speculative.model, dtype=dtype, context=settings.context, tensor=tensor)


def fit(recipe: str, *words: str, view: "View | None" = None, **settings: Any) -> "Outcome":
    """Trains by a recipe, or resumes a run, as `argosy train` does. Returns how the run ended.

    Progress is printed on stderr; a notebook displays a table that is updated. Ctrl-C stops after the current step, saves the state,
    and raises KeyboardInterrupt. The same call then resumes.

        run = argosy.fit("tiny", steps=100, dir="runs/first", optimizer="muon")
        run = argosy.fit("tiny", "optimizer.learning_rate=1e-3", **{"data.batch": 4})
        run = argosy.fit("sft", model="FOLDER", data=[{"prompt": "2 + 2 =", "completion": " 4"}, ...])
        lm = argosy.load(run.dir)

    Args:
        recipe: the name of a recipe, a YAML file, or a run directory.
        words: settings as on the command line, `key=value`.
        view: an object that displays progress instead of the terminal. `argosy.jobs.train.Quiet()` displays nothing.
        settings: settings by key, which override `words`. A mapping sets the keys of a group, and None means none. `data` may also be
            the rows to train on (texts or mappings of columns) as a list, a generator, a data frame or a `datasets.Dataset`. They are
            written to a file in the cache, which becomes `data.source`.

    Raises:
        UserError: there is a mistake in the settings. It is found before work begins.
        KeyboardInterrupt, SystemExit: a signal asked to stop. The state is saved.
    """
    from argosy.jobs.train import train

    machine.start_jax()
    if "data" in settings and not (settings["data"] is None or is_settings_group(settings["data"])):
        from argosy.data.sources.given_rows import rows_file

        settings["data.source"] = rows_file(settings.pop("data"))
    setting_words = [*words, *(_word(key, value) for key, value in settings.items())]
    if view is not None:
        outcome = train(recipe, setting_words, view, CALL)
    else:
        from argosy.observe.terminal.live import Terminal
        from argosy.observe.terminal.notebook import Notebook, in_notebook

        with Notebook() if in_notebook() else Terminal() as live:
            outcome = train(recipe, setting_words, live, CALL)
    if outcome.exit_code == 130:
        raise KeyboardInterrupt
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)
    return outcome


def is_settings_group(value: Any) -> bool:
    """Whether the argument `data` sets keys of the group `data`, and is not the rows themselves."""
    if isinstance(value, Mapping):
        from argosy.data.settings import DataSettings

        # The splits of a data set are not settings, but could not be distinguished from misspelt keys.
        return bool(set(value) & set(DataSettings.model_fields)) or not any(hasattr(part, "column_names") for part in value.values())
    return isinstance(value, Settings | str | os.PathLike)


def _word(key: str, value: Any) -> str:
    """Converts a keyword argument to a `key=value` word."""
    if isinstance(value, Settings):
        value = dump(value)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, Mapping):
        value = dict(value)
    try:
        return f"{key}={yaml_line(value)}"
    except TypeError:
        problem = f"`{key}` cannot be an object of type {type(value).__name__}"
        raise BadInput(problem, hint="settings are text, numbers, paths and mappings of these") from None


def _say(text: str) -> None:
    print(text, file=sys.stderr)
