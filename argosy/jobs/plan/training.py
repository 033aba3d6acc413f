"""`argosy plan RECIPE`: what a run will need and do on devices that may be absent, before its first step."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.settings import Reading, Settings
from argosy.jobs.plan.compiler import answer_of_compiler, cached_answer
from argosy.run.header import UNITS
from argosy.run.plan.figures import Buffer, Figures, Traffic
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run

Say = Callable[[str], None]
# The assumptions of a plan of a run with rollouts.
SAMPLES = "completions are taken to reach rollout.tokens, and prompts to fill what these leave of a row; rewards take no time"
DAY_S, HOUR_S = 86_400, 3_600
# By how much the analytic model must exceed the memory for a refusal without the compiler.
CERTAIN = 1.15
# The relative errors of estimates of a step: against published times of whole models for TPUs, and against runs for this machine.
ERRORS = {"tpu": 0.25, "gpu": 0.3, "cpu": 0.25}
MODEL_ERROR = 0.5


class PlanSettings(Settings):
    """What is planned for."""

    device: str = "this"
    """The devices: `this` machine's, or a kind with a number: v4-8, v5e-16, v5p-128, v6e-256, v7x-128 (a name as Google Cloud counts:
    cores for v4, v5p and v7x, chips for the others), h100-8, h200-8 (up to 8, which are part of one host, or a multiple of 8)."""
    compile: bool = True
    """Whether the compiler of the devices is asked, where it is installed. false: the analytic answer alone, in seconds."""
    search: bool = False
    """Whether meshes, `execution.remat` and, unless `data.batch` is given, batches are compared. The three fastest that fit are given
    to the compiler where it is installed."""
    out: str | None = None
    """A file for the best settings of `search`, as a recipe that extends the one that was planned."""
    price: float | None = Field(None, gt=0)
    """Price of a chip for an hour. With it, the cost of all steps is shown."""


@dataclass
class Planned:
    """The parts of a plan.

    model, compiler: the figures of the analytic model and of the compiler, None if the compiler was not used.
    missing: the package that contains the compiler, if it is not installed.
    changed: the settings that were changed because those of the recipe do not fit the number of devices.
    nearest: settings with which the run fits, if it does not fit.
    rollouts: the plan of the rollouts, if the run has any (`run.plan.rollouts`).
    """

    assembly: Any
    model: Figures
    compiler: Figures | None
    missing: str | None
    changed: tuple[str, ...]
    nearest: list[Any]
    rollouts: Any = None

    @property
    def figures(self) -> Figures:
        return self.compiler or self.model


def plan(recipe: str, words: Sequence[str], settings: PlanSettings, say: Say) -> dict[str, Any]:
    """Plans a run. Returns the plan as a JSON object. If the run does not fit, `fits` is false in it.

    Raises:
        UserError: there is a mistake in the settings.
    """
    from argosy.parallel.target import Target

    target = Target.described(settings.device)
    words, changed = _with_batch(recipe, words, target)
    if changed:
        say(f"{' '.join(changed)}: the recipe's batch does not divide over {plural(target.count, 'device')}")

    if settings.search:
        return _search(recipe, words, settings, target, say, bool(changed))
    if settings.out is not None:
        raise BadInput("out names the file of a search", hint="search=true")
    assembly = _assemble(plan_reading(recipe, words).value, target)
    model = _model_figures(assembly)
    compiler, missing = None, None
    hopeless = model.limit is not None and model.total > CERTAIN * model.limit and not target.shares_memory
    samples = assembly.run.rollout is not None
    rollouts = _with_rollouts(assembly, model, target) if samples else None
    if samples and settings.compile and not hopeless and target.is_here:
        compiler = _compiler_figures(assembly, recipe, words, settings.device)
    # Elsewhere the model answers: updates from rollouts are several programs.
    if settings.compile and not hopeless and not samples:
        # For GPUs the model answers, with their compiler or without.
        missing = target.missing_compiler() if target.platform == "tpu" else None
        if missing is None and (target.is_here or target.platform == "tpu"):
            say("asking the compiler; compile=false answers without it ...")
            compiler = _compiler_figures(assembly, recipe, words, settings.device)
    result = Planned(assembly, model, compiler, missing, changed, [], rollouts)
    if not result.figures.fits and not samples:
        from argosy.run.plan.nearest import nearest_fits

        result.nearest = nearest_fits(assembly)
    return plan_document(result, recipe, settings)


def _search(recipe: str, words: list[str], settings: PlanSettings, target: Any, say: Say, changed: bool) -> dict[str, Any]:
    """Searches settings. Returns the plan of the best ones, with the ranking.

    Args:
        changed: whether the batch among the words was chosen here, and not by the user.
    """
    from argosy.run.plan.search import rank_candidates

    if target.chip is None:
        raise BadInput("search=true compares devices of accelerators", hint="device=v5p-128, h100-8, ...")
    keys = {word.partition("=")[0] for word in words}
    candidates = rank_candidates(plan_reading(recipe, words).value, target, changed or "data.batch" not in keys)
    if not candidates:
        problem = f"{recipe} fits on {target.name} with no mesh that was tried"
        raise BadInput(problem, hint="`argosy plan` without search says what it needs")
    plan_settings = settings.model_copy(update={"search": False, "out": None})
    compiles = settings.compile and target.missing_compiler() is None and target.platform == "tpu"
    answers = []
    for candidate in candidates[: 3 if compiles else 1]:
        say(f"planning {' '.join(w for w in candidate.words if not w.endswith('=1'))} ...")
        answer = plan(recipe, [*_without(words, candidate.words), *candidate.words], plan_settings, say)
        answers.append(answer | {"settings": list(candidate.words)})
    fitting = [answer for answer in answers if answer["fits"]] or answers
    best = max(fitting, key=lambda answer: answer["tokens_per_s"] or 0.0)
    if settings.out is not None:
        _write_layer(recipe, best["settings"], Path(settings.out))
    return best | {"ranking": [candidate.document() for candidate in candidates[:10]], "out": settings.out}


def _without(words: Sequence[str], others: Sequence[str]) -> list[str]:
    keys = {word.partition("=")[0] for word in others}
    return [word for word in words if word.partition("=")[0] not in keys]


def _write_layer(recipe: str, words: Sequence[str], path: Path) -> None:
    """Writes settings as a recipe that extends another.

    Raises:
        BadInput: the file exists.
    """
    if path.exists():
        raise BadInput(f"{path} exists", hint="another name")
    groups: dict[str, list[str]] = {}
    for word in words:
        key, _, value = word.partition("=")
        group, _, name = key.partition(".")
        groups.setdefault(group, []).append(f"  {name}: {value}")
    lines = [f"# The fastest settings that fit, by `argosy plan {recipe} search=true`.", f"extends: {recipe}"]
    for group, values in groups.items():
        lines += [f"{group}:", *values]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def plan_reading(recipe: str, words: Sequence[str]) -> Reading[Run]:
    """Reads the settings of a recipe. If the recipe leaves the data to the user, a placeholder is filled in, because no data is
    read."""
    from argosy.run.settings.recipe_files import presets

    values = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    more = [] if any(key.startswith("data.source") or key == "data" for key in values) else _source_of(recipe)
    if not any(key.startswith(("reward", "environment")) for key in values):
        more += _reward_of(recipe)
    if values.get("adapter", "none") != "none" and values.get("model") in presets() and "init.weights" not in values:
        # A preset stands for its trained weights, which are not read.
        more.append(f"init.weights={values['model']}")
    return compose(Run, recipe, [*more, *words])


def _needs(recipe: str) -> list[Mapping[str, Any]]:
    """Returns the settings that a recipe leaves to the user, for the recipe and each one that it extends."""
    from argosy.run.settings.compose import NEEDS
    from argosy.run.settings.recipe_files import recipe_layers

    return [layer.values.get(NEEDS) or {} for layer in recipe_layers(recipe)]


def _source_of(recipe: str) -> list[str]:
    """A word that names data, if the recipe names none."""
    return ["data.source=synthetic"] if any("source" in (need.get("data") or {}) for need in _needs(recipe)) else []


def _reward_of(recipe: str) -> list[str]:
    """A word that names a reward, which a plan does not compute, if the recipe names none."""
    return ["reward=maths"] if any(str(key).startswith("reward") for need in _needs(recipe) for key in need) else []


def _with_batch(recipe: str, words: Sequence[str], target: Any) -> tuple[list[str], tuple[str, ...]]:
    """Returns the words with a batch that is divisible by the devices, if the user names none, and the settings that were changed."""
    words = list(words)
    run = plan_reading(recipe, words).value
    if any(word.startswith("data.batch=") for word in words) or run.rollout is not None:
        return words, ()
    mesh = target.mesh(run.mesh)
    from argosy.parallel.place import row_shares

    each = row_shares(mesh) * run.accumulate * run.objective.rows_per_group
    if run.data.batch % each == 0:
        return words, ()
    changed = f"data.batch={-(-run.data.batch // each) * each}"
    return [*words, changed], (changed,)


def _assemble(run: Run, target: Any) -> Any:
    from argosy.run.assembly.assemble import assemble
    from argosy.run.assembly.decided import Decided

    if run.rollout is not None:
        from argosy.rl.rollouts.fitting import no_room
        from argosy.run.plan.rollouts import trainer_target

        if run.data.sequence <= run.rollout.tokens:
            raise no_room(run.data.sequence, run.rollout.tokens)
        target = trainer_target(target, run)
    return assemble(run, Decided.here(run, target), target=target, reads=False)


def _model_figures(assembly: Any) -> Figures:
    """Returns the figures of the analytic model. For a run with rollouts they are those of an update."""
    from argosy.run.plan.memory import memory_by_kind
    from argosy.run.plan.speed import work_of

    target = assembly.target
    if assembly.run.rollout is not None:
        from argosy.run.plan.rollouts import update_assembly

        assembly = update_assembly(assembly)
    memory = _memory_here(assembly) if target.shares_memory else memory_by_kind(assembly)
    fits = target.memory_bytes is None or sum(memory.values()) <= target.memory_bytes
    buffers, prices = [], _prices(target)
    if not fits:
        from argosy.run.plan.compiled import state_buffers

        buffers = state_buffers(assembly)
    if prices is None:
        return Figures("model", memory, target.memory_bytes, fits, buffers=buffers)
    work = work_of(assembly, prices)
    compute = sum(work.by_kind.values())
    return Figures("model", memory, target.memory_bytes, fits, compute, work.traffic, buffers, work.by_kind, MODEL_ERROR)


def _prices(target: Any) -> Any:
    """Returns the speeds of these devices; None if they are unknown."""
    from argosy.run.plan.measured import prices_here
    from argosy.run.plan.speed import prices_of

    return prices_here(target.platform) if target.chip is None else prices_of(target.chip)


def _with_rollouts(assembly: Any, update: Figures, target: Any) -> Any:
    """The plan of a run's rollouts."""
    from argosy.run.plan.rollouts import rollout_plan

    state = update.memory["parameters"] + update.memory["optimizer"] + update.memory.get("process", 0)
    return rollout_plan(assembly, state, _prices(target), target)


def _memory_here(assembly: Any) -> dict[str, int]:
    from argosy.run.memory import estimated_need

    a = assembly
    return dict(estimated_need(a.run, a.decided, a.shapes, a.places, a.mesh, a.target, a.roles, a.batches.sizes).sizes)


def _compiler_figures(assembly: Any, recipe: str, words: Sequence[str], device: str) -> Figures:
    """Returns the figures of the compiler, which runs in this process for this machine, else in a separate process."""
    if assembly.target.is_here:
        from argosy.run.plan.compiled import compiled_figures
        from argosy.run.plan.measured import prices_here

        platform = assembly.target.platform
        return compiled_figures(assembly, prices_here(platform), ERRORS[platform])
    inputs = {"recipe": recipe, "words": list(words), "device": device}
    return figures_from(answer_of_compiler("argosy.jobs.plan.training:compiled_answer", inputs, device))


def compiled_answer(inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of a run by the compiler of its devices, in the process that runs the compiler."""
    from argosy.parallel.target import Target
    from argosy.run.plan.compiled import compiled_figures
    from argosy.run.plan.speed import prices_of

    target = Target.described(inputs["device"]).compiled()
    assembly = _assemble(plan_reading(inputs["recipe"], inputs["words"]).value, target)
    chip = target.chip
    assert chip is not None
    content = [assembly.lower().as_text(), json.dumps(assembly.compiler_options), inputs["device"]]
    prices = prices_of(chip)
    return cached_answer(content, chip.library, lambda: asdict(compiled_figures(assembly, prices, ERRORS[target.platform])))


def figures_from(document: dict[str, Any]) -> Figures:
    """Figures from their JSON."""
    traffic, buffers = [Traffic(**fields) for fields in document["traffic"]], [Buffer(**fields) for fields in document["buffers"]]
    return Figures(**document | {"traffic": traffic, "buffers": buffers})


def plan_document(result: Planned, recipe: str, settings: PlanSettings) -> dict[str, Any]:
    """Returns the plan as a JSON object."""
    from argosy.run.plan.speed import model_flops

    a, figures = result.assembly, result.figures
    target, run = a.target, a.run
    step, flops = figures.step_seconds, model_flops(a)
    more = _rollout_fields(result)
    step = more.get("step_seconds", step)
    chip = target.chip
    peak = chip.flops_per_s * target.count if chip is not None else None
    seconds = step * a.steps if step else None
    chips = target.hardware.chips if target.hardware is not None else target.count
    tokens = a.batches.tokens_per_batch
    return {
        "recipe": recipe,
        "device": target.name,
        "devices": target.count,
        "hosts": target.processes,
        "device_kind": target.kind,
        "fits": figures.fits,
        "verdict_by": figures.verdict_by,
        "memory_bytes": {**figures.memory, "total": figures.total},
        "memory_limit_bytes": figures.limit,
        "memory_bytes_by_model": {**result.model.memory, "total": result.model.total},
        "step_seconds": step,
        "step_seconds_error": figures.error,
        "step_seconds_by_model": result.model.step_seconds,
        "mfu": flops / step / peak if step and peak else None,
        "tokens_per_s": tokens / step if step else None,
        "bound_by": figures.bound_by,
        "collectives": [transfer.document() for transfer in figures.traffic],
        "seconds_by_kind": dict(figures.by_kind),
        "parameters": a.parameters,
        "tokens_per_step": tokens,
        # What counts as a token: a row of other data is one.
        "unit": f"{UNITS.get(run.model.inputs, 'token')}s",
        "flops_per_step": int(flops),
        "mesh": {axis: size for axis, size in dict(a.mesh.shape).items() if size > 1},
        "precision": a.decided.precision,
        "remat": run.execution.remat,
        "replicated": _unsplit_text(a),
        "buffers": [asdict(buffer) for buffer in figures.buffers],
        "uncounted_kernels": list(figures.uncounted),
        "unknown_loops": figures.unknown_loops,
        "steps": a.steps,
        "days": seconds / DAY_S if seconds else None,
        "cost": seconds / HOUR_S * chips * settings.price if seconds and settings.price else None,
        "changed": list(result.changed),
        "note": SAMPLES if run.rollout is not None else "",
        "missing_compiler": result.missing,
        "nearest": [candidate.document() for candidate in result.nearest],
        **more,
    }


def _rollout_fields(result: Planned) -> dict[str, Any]:
    """What rollouts change in the answer: a step is an update with its share of the rollouts that it learns from."""
    rollouts, figures = result.rollouts, result.figures
    if rollouts is None:
        return {}
    from argosy.run.plan.rollouts import scoring_seconds

    run = result.assembly.run
    more = {"turns of environments": run.environment.played, "rollout.resample": run.rollout.resample}
    left_out = [name for name, there in more.items() if there]
    note = SAMPLES + (f"; not counted: {', '.join(left_out)}" if left_out else "")
    fields: dict[str, Any] = {"rollouts": rollouts.document(), "fits": figures.fits and rollouts.fits, "note": note}
    update = figures.step_seconds
    if not fields["fits"]:
        fields["bound_by"] = "memory: it does not fit"
    if update is None or rollouts.decode is None:
        return fields
    scoring = scoring_seconds(result.assembly, figures.by_kind.get("products", 0.0))
    waits = rollouts.exposed_seconds
    step = max(update + scoring, waits) if rollouts.overlaps else update + scoring + waits
    fields |= {
        "step_seconds": step,
        "update_seconds": update,
        "scoring_seconds": scoring,
        "rollout_seconds": waits,
        "seconds_by_kind": {**figures.by_kind, "scoring": scoring, "rollouts": waits},
    }
    if fields["fits"]:
        parts = {"rollouts": waits, "update": update + scoring}
        most = max(parts, key=lambda name: parts[name])
        why = f"{rollouts.decode.bound_by}, decoding" if most == "rollouts" else figures.bound_by
        fields["bound_by"] = f"{'rollouts' if most == 'rollouts' else 'the update'} ({parts[most] / step:.0%} of a step): {why}"
    return fields


def _unsplit_text(assembly: Any) -> str:
    """The weights that every device has whole, although the mesh splits weights; "" where they are few."""
    from argosy.run.assembly.grid import mesh_header

    return mesh_header(assembly.mesh, assembly.shapes.params | assembly.shapes.rest).get("whole", "")
