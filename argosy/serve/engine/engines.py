"""Builds the engines of a server, one for each copy of the model, compiles their programs, and puts a front before them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from argosy.core.process.resident import trim
from argosy.core.progress import Say
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.replicas import model_copies
from argosy.infer.engine.request import Request
from argosy.infer.lm import LM
from argosy.ops.programs.store import ProgramStore
from argosy.serve.engine.front import Front
from argosy.serve.engine.replicas import ReplicaFront
from argosy.serve.metrics import EngineMetrics
from argosy.serve.settings import ServeSettings


def build_front(
    lm: LM, name: str, settings: ServeSettings, say: Say | None, draft: LM | None = None, programs: ProgramStore | None = None
) -> Front | ReplicaFront:
    """Builds the front of a model, with its programs compiled and its threads started. Arguments and errors are those of
    `serve.run.build_service`."""
    engines = build_engines(lm, settings, say, draft)
    fronts = [Front(engine, settings.limits, EngineMetrics(name, engine, i)) for i, engine in enumerate(engines)]
    _compile_all(fronts, settings, programs)
    trim()
    front = fronts[0] if len(fronts) == 1 else ReplicaFront(fronts, settings.limits)
    front.metrics.ready()
    front.start()
    return front


def build_engines(lm: LM, settings: ServeSettings, say: Say | None, draft: LM | None = None) -> list[Engine]:
    """Builds an engine for each copy of the model, and loads the adapters of the settings."""
    count, engine_settings = settings.copies, settings.engine
    modules = model_copies(lm.module, count)
    drafts = [None] * count if draft is None else model_copies(draft.module, count)
    engines: list[Engine] = []
    for module, draft_copy in zip(modules, drafts, strict=True):
        engine = Engine(module, engine_settings, say=say, exclusive=True, draft=draft_copy, copies=count, origin=lm.origin)
        if jax.default_backend() == "cpu":
            # All copies get as many pages as the first, although its cache leaves less memory free.
            engine_settings = engine_settings.model_copy(update={"pages": engine.pages.count, "memory": None})
        for adapter, folder in settings.lora_modules.items():
            engine.load_adapter(adapter, folder)
        engines.append(engine)
    return engines


def _compile_all(fronts: Sequence[Front], settings: ServeSettings, programs: ProgramStore | None) -> None:
    """Compiles the programs of all copies in parallel. On GPUs the first copy compiles alone, and the others then find its programs in
    JAX's persistent cache. On CPUs and TPUs this cache has separate entries for each device, so nothing is shared."""
    ahead = 1 if len(fronts) == 1 or jax.default_backend() == "gpu" else 0
    for front in fronts[:ahead]:
        _compile(front, settings, programs)
    if rest := fronts[ahead:]:
        with ThreadPoolExecutor(len(rest), "warm up") as threads:
            for done in [threads.submit(_compile, front, settings, programs) for front in rest]:
                done.result()


def _compile(front: Front, settings: ServeSettings, programs: ProgramStore | None) -> None:
    if settings.warm_up:
        front.engine.warm_up(programs)
    else:
        front.engine.generate([Request([0], 2)])
    if settings.warm_up_prompt_logprobs:
        front.prompts.compile(front.prompts.sizes())
