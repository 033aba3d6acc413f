"""What Python users call: `argosy.load` and `argosy.fit`."""

import sys
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput
from argosy.jobs.compose import preset_layers, presets
from argosy.jobs.train import Outcome, View, train


def load(
    model: str | Path,
    *,
    random: int | None = None,
    dtype: Any = None,
    adapter: str | Path | None = None,
    context: int | None = None,
) -> Any:
    """A language model in hand: `.config`, `.module`, `.tokenizer`, `.logits`, `.generate`, `.save`; an encoder has `.embed`
    in place of the two in the middle.

    Args:
        model: a Hub folder, a .gguf file, a run directory (its last good checkpoint), one checkpoint step; or, with `random`,
            the name of a preset.
        random: the seed of random weights for a preset.
        dtype: what weights are kept and activations computed in; float32 on CPUs, bfloat16 elsewhere, unless told.
        context: the longest sequence it will see, in tokens, where that is less than the model's own context; decides between the
            tables of rotary positions of a model that has two (LongRoPE).
        adapter: a folder of low-rank adapters as the PEFT library writes it; `lm.merge()` makes them part of the weights.

    Raises:
        UnknownName, BadInput, Damaged: there is no such model, or it is none.
    """
    from argosy.infer import load as loading

    if random is not None and adapter is not None:
        raise BadInput("an adapter on random weights", hint="give the folder of the model that it was trained on")
    if random is not None:
        _say(f"{model}: random weights from seed {random}")
        return loading.random(preset_config(str(model)), random, dtype=dtype)
    if not Path(model).exists():
        from argosy.checkpoint.load import no_weights

        raise no_weights(str(model), presets())
    return loading.load(model, dtype=dtype, adapter=adapter, context=context, warn=_say)


def preset_config(name: str) -> Any:
    """The settings of a preset, by name or YAML file."""
    from typing import Annotated

    from argosy.core.settings import Choice, Settings, read_settings
    from argosy.models import FAMILIES

    class Model(Settings):
        model: Annotated[Any, Choice(FAMILIES, tag="family")]

    layers = [layer.under("model") for layer in preset_layers(name)]
    return read_settings(Model, *layers).value.model


def fit(recipe: str, *words: str, view: View | None = None) -> Outcome:
    """Trains by a recipe, as `argosy train` does: goes on from what the directory holds, or starts.

    run = argosy.fit("tiny", "steps=100", "dir=runs/first")
    lm = argosy.load(run.dir)
    """
    return train(recipe, list(words), view)


def _say(text: str) -> None:
    print(text, file=sys.stderr)
