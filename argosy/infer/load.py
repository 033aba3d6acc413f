"""Loads an `LM` from a MODEL argument; `checkpoint.load` builds its pieces."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from argosy.checkpoint import load as loading
from argosy.infer.lm import LM
from argosy.infer.settings import EngineSettings
from argosy.models.family import FamilyConfig
from argosy.models.parts.stack import Execution

DEFAULT = EngineSettings()


def load(
    path: str | Path,
    *,
    dtype: Any = None,
    run: Execution | None = None,
    adapter: str | Path | None = None,
    context: int | None = None,
    tensor: int = 1,
    warn: Callable[[str], None] = lambda _: None,
    engine: EngineSettings = DEFAULT,
    draft: LM | None = None,
) -> LM:
    """Loads a language model from a Hub folder, a GGUF file, a run directory or one checkpoint. Arguments and errors are those of
    `checkpoint.load.load`.

    Args:
        engine: settings of the engine under `generate`.
        draft: the draft model, if they ask for one.
    """
    how: Any = {"dtype": dtype, "run": run, "adapter": adapter, "context": context, "tensor": tensor, "warn": warn}
    return LM(**vars(loading.load(path, **how)), engine_settings=engine, draft=draft)


def random(
    config: FamilyConfig,
    seed: int,
    *,
    dtype: Any = None,
    run: Execution | None = None,
    engine: EngineSettings = DEFAULT,
    draft: LM | None = None,
) -> LM:
    """A language model with random weights and no tokenizer. Arguments are those of `load`."""
    return LM(**vars(loading.random(config, seed, dtype=dtype, run=run)), engine_settings=engine, draft=draft)
