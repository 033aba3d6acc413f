"""`argosy plan RECIPE [key=value ...] [device=v5p-128]`, `argosy plan serve MODEL [key=value ...]`."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from argosy.cli.output import answer, say
from argosy.core.command import install_package
from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.settings import read_settings, words_layer
from argosy.jobs import machine
from argosy.observe.readable import columns, lasted, sized

app = typer.Typer(rich_markup_mode=None, add_completion=False)

WORDS = {"gathered_weights": "gathered weights"}


@app.command(context_settings={"ignore_unknown_options": True})
def plan(
    recipe: Annotated[str, typer.Argument(help="a recipe's name, a YAML file, or `serve`", show_default=False)],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [device=v5p-128] [compile=false] [search=true out=FILE] [price=N] [key=value ...]",
            help="settings; after `serve` the model, a preset or one on this machine; flags of `vllm serve` work too",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> int:
    """What a run will need and do on devices that need not be here: whether it fits, what it keeps in memory, what it communicates,
    how long a step takes and what bounds it. Nothing runs, and no data is read. A run that does not fit ends with code 2. `serve`: the
    same of a server, with the sequences that its cache holds and the tokens a second.

    \b
    Examples:
      argosy plan tiny
      argosy plan pretrain model=llama2-70b device=v5p-128
      argosy plan pretrain model=llama3.1-8b device=h100-8 data.sequence=8192 execution.remat=full price=2.5
      argosy plan serve llama3.1-8b device=v5e-8 tensor=4 engine.context=8192"""
    if recipe == "serve":
        return _serving(words or [], as_json)
    if option := next((word for word in words or [] if word.startswith("-")), None):
        raise BadInput(f"no such option: {option}", hint="settings have no dashes: NAME=VALUE")
    from argosy.jobs.plan.training import PlanSettings

    own = [word for word in words or [] if word.partition("=")[0] in PlanSettings.model_fields]
    settings = read_settings(PlanSettings, words_layer(own)).value
    machine.start_jax()
    from argosy.jobs.plan.training import plan as job

    found = job(recipe, [word for word in words or [] if word not in own], settings, say)
    answer(plan_text(found), found, as_json)
    if found["fits"]:
        return 0
    memory = found["memory_bytes"]
    if (rollouts := found.get("rollouts")) is not None and not rollouts["fits"]:
        memory = rollouts["memory_bytes"]
    where = ", ".join(f"{one['name']} {sized(one['bytes'])}" for one in found["buffers"][:3])
    ways = " or ".join(" ".join(one["settings"]) for one in found["nearest"])
    needs = f"a device needs {sized(memory['total'])} and has {sized(found['memory_limit_bytes'])}"
    raise BadInput(
        f"{recipe} does not fit on {found['device']}: {needs}",
        where=f"largest: {where}" if where else None,
        hint=f"{ways} fits" if ways else "more devices, or a smaller model",
    )


def _serving(words: list[str], as_json: bool) -> int:
    """`argosy plan serve MODEL`."""
    from argosy.cli.flags import PLAN_SERVE, translated
    from argosy.jobs.plan.serving import ServePlanSettings, plan_serving

    words = translated(words, PLAN_SERVE)
    names = [word for word in words if "=" not in word]
    if len(names) != 1:
        raise BadInput("plan serve takes one model", hint="argosy plan serve llama3.1-8b device=v5e-8")
    settings = read_settings(ServePlanSettings, words_layer([word for word in words if "=" in word])).value
    machine.start_jax()
    found = plan_serving(names[0], settings, say)
    answer(serving_text(found), found, as_json)
    if found["fits"]:
        return 0
    ways = " or ".join(" ".join(one["settings"]) for one in found["nearest"])
    needs = f"a device needs {sized(found['memory_bytes']['total'])} and has {sized(found['memory_limit_bytes'])}"
    raise BadInput(
        f"a server of {found['model']} does not fit on {found['device']}: {needs}",
        where="largest: " + ", ".join(f"{one['name']} {sized(one['bytes'])}" for one in found["buffers"][:3]),
        hint=f"{ways} fits" if ways else "more devices, or a smaller model",
    )


def serving_text(answered: Mapping[str, Any]) -> str:
    """The answer for a server as text."""
    memory, limit = answered["memory_bytes"], answered["memory_limit_bytes"]
    several = answered["copies"] > 1
    copies = f"{answered['copies']} {'copies' if several else 'copy'} on {plural(answered['tensor'], 'device')}{' each' * several}"
    by = "the compiler" if answered["verdict_by"] == "compiler" else "the analytic model"
    form = f", {answered['quantization']}" if answered["quantization"] else ""
    form += f", some in {answered['published_in']} as they are published" if answered["published_in"] else ""
    rows = [(kind, sized(size)) for kind, size in memory.items() if size and kind != "total"]
    rows.append(("in all", sized(memory["total"]) + (f" of {sized(limit)}" if limit else "")))
    whose = "each device" if answered["device_kind"] != "cpu" else "this machine"
    lines = [
        f"{answered['model']} on {answered['device']}: {copies}",
        f"{answered['parameters']:,} parameters in {answered['dtype']}{form}, sequences of at most {answered['context']:,} tokens",
        f"{'fits' if answered['fits'] else 'does not fit'}, says {by}",
        "",
        *columns((f"memory of {whose}", ""), rows).splitlines(),
        "",
        f"the cache of a copy holds {answered['cache_tokens']:,} tokens ({sized(answered['cache_bytes_per_token'])} each): "
        f"{plural(answered['cache_sequences'], 'sequence')} of {answered['input_len']:,} + {answered['output_len']:,} tokens at a time",
        "",
    ]
    if answered["devices"] < answered["devices_available"]:
        lines.insert(1, f"{answered['devices']} of {plural(answered['devices_available'], 'device')}: `copies` and `tensor` use more")
    if answered["replicated"]:
        lines += [f"whole: {answered['replicated']}", ""]
    if not answered["rates"]:
        return "\n".join([*lines, "no speed is known for this device"] if answered["fits"] else lines[:-1])
    rows = [
        (
            str(one["sequences"]), _brief(one["time_to_first_token_s"]), _brief(one["step_seconds"]),
            f"{one['output_tokens_per_s']:,.0f}", one["bound_by"],
        )
        for one in answered["rates"]
    ]  # fmt: skip
    lines += columns(("sequences", "first token", "a step", "tokens/s", "a step is bound by"), rows, (0, 1, 2, 3)).splitlines()
    how = "by bytes and FLOPs: a lower bound"
    if answered["verdict_by"] == "compiler":
        how = "by the compiler's cycles; no device was measured"
    elif answered["device_kind"] == "cpu":
        how = "by bytes and FLOPs, at the speeds of a read and a product here; more than 25% off while others compute here"
    lines += [how]
    if (drafts := answered["speculative"]) is not None:
        lines += [
            f"steps verify {plural(drafts['tokens'], 'draft')}, and give {answered['tokens_per_step']:.2f} tokens where "
            f"{answered['acceptance']:.0%} of them are accepted, which is assumed: acceptance=N says another share"
        ]
    if answered["cost_per_million_tokens"]:
        lines += [f"{answered['cost_per_million_tokens']:,.2f} for a million tokens of completions, at the highest rate"]
    if answered["unknown_loops"]:
        loops = plural(answered["unknown_loops"], "loop")
        lines += ["", f"note: {loops} of a length that depends on the data count once, so a step takes longer"]
    if answered["missing_compiler"]:
        lines += ["", f"`{install_package(answered['missing_compiler'])}` brings the compiler, whose answer is nearer"]
    return "\n".join(lines)


def plan_text(answered: Mapping[str, Any]) -> str:
    """The answer as text."""
    parts = [*_head(answered), "", *_memory(answered), "", *_time(answered), *_rollouts(answered), *_collectives(answered)]
    return "\n".join([*parts, *_rest(answered)])


def _rollouts(found: Mapping[str, Any]) -> list[str]:
    """What the rollouts of a run take."""
    if (one := found.get("rollouts")) is None:
        return []
    memory, limit = one["memory_bytes"], one["memory_limit_bytes"]
    rows = [(kind, sized(size)) for kind, size in memory.items() if size and kind != "total"]
    rows.append(("in all", sized(memory["total"]) + (f" of {sized(limit)}" if limit else "")))
    lines = [
        "",
        f"a rollout: {plural(one['completions'], 'completion')} of {one['output_len']:,} tokens to "
        f"{plural(one['prompts'], 'prompt')} of {one['input_len']:,}, {one['sequences']} at a time, weights {one['weights']}",
        *columns(("memory while it is sampled", ""), rows).splitlines(),
    ]
    if one["decode_step_seconds"] is None:
        return lines
    each = f" for {plural(one['updates'], 'update')}" if one["updates"] > 1 else ""
    return [
        *lines,
        f"{_brief(one['seconds'])}{each}: prompts {_brief(one['prefill_seconds'])}, {one['decode_steps']:,} decode steps of "
        f"{_brief(one['decode_step_seconds'])}, bound by {one['bound_by']}",
        f"in a step: rollouts {_brief(found['rollout_seconds'])}, the update {_brief(found['update_seconds'])}"
        + (f", log-probabilities {_brief(found['scoring_seconds'])}" if found["scoring_seconds"] else ""),
    ]


def _head(found: Mapping[str, Any]) -> list[str]:
    mesh = " x ".join(f"{axis} {size}" for axis, size in found["mesh"].items()) or "one device"
    by = "the compiler" if found["verdict_by"] == "compiler" else "the analytic model"
    count = f"{found['tokens_per_step']:,} {found['unit']}"
    return [
        f"{found['recipe']} on {found['device']}: {plural(found['devices'], 'device')}, {mesh}",
        f"{found['parameters']:,} parameters, {found['flops_per_step']:.3g} FLOPs and {count} a step, "
        f"{found['precision']}, remat {found['remat']}",
        f"{'fits' if found['fits'] else 'does not fit'}, says {by}",
    ]


def _memory(found: Mapping[str, Any]) -> list[str]:
    memory, limit = found["memory_bytes"], found["memory_limit_bytes"]
    rows = [(str(WORDS.get(kind, kind)), sized(size)) for kind, size in memory.items() if size and kind != "total"]
    of = f" of {sized(limit)}" if limit else ""
    rows.append(("in all", sized(memory["total"]) + of))
    whose = "each device" if found["device"] != "this" or found["device_kind"] != "cpu" else "this machine"
    return columns((f"memory of {whose}", ""), rows).splitlines()


def _time(found: Mapping[str, Any]) -> list[str]:
    if found["step_seconds"] is None:
        return ["a step: no speed is known for this device"]
    step, error = found["step_seconds"], found["step_seconds_error"]
    mfu = f", {found['mfu']:.1%} MFU" if found["mfu"] else ""
    speed = f"{found['tokens_per_s']:,.0f} {found['unit']} a second"
    cost = f", {found['cost']:,.0f} in all" if found["cost"] else ""
    return [
        f"a step: {_brief(step)} by a static estimate that may be {error:.0%} off{mfu}, {speed}",
        f"bound by {found['bound_by']}",
        f"{plural(found['steps'], 'step')}: {lasted(found['steps'] * step)}{cost}",
    ]


def _collectives(found: Mapping[str, Any]) -> list[str]:
    if not found["collectives"]:
        return []
    rows = [
        (one["kind"], one["axis"], sized(one["bytes"]), _brief(one["seconds"]), _brief(one["exposed_seconds"]))
        for one in found["collectives"]
    ]
    return ["", *columns(("collectives", "along", "moved", "time", "exposed"), rows, (2, 3, 4)).splitlines()]


def _brief(seconds: float) -> str:
    """A duration, in milliseconds below a second."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s" if seconds < 100 else lasted(seconds)


def _rest(found: Mapping[str, Any]) -> list[str]:
    lines = []
    if found["buffers"]:
        rows = [(sized(one["bytes"]), one["type"], one["name"][:60]) for one in found["buffers"]]
        lines += ["", *columns(("largest arrays", "", ""), rows).splitlines()]
    if found["replicated"]:
        lines += ["", f"whole: {found['replicated']}"]
    if found["unknown_loops"]:
        loops = plural(found["unknown_loops"], "loop")
        lines += ["", f"note: {loops} of a length that depends on the data count once, so a step takes longer"]
    if found["note"]:
        lines += ["", f"note: {found['note']}"]
    if found.get("ranking"):
        rows = [
            (f"{one['tokens_per_s']:,.0f}", sized(one["memory_bytes"]), " ".join(w for w in one["settings"] if not w.endswith("=1")))
            for one in found["ranking"]
        ]
        lines += ["", *columns((f"{found['unit']}/s", "memory", "by the analytic model"), rows, (0, 1)).splitlines()]
        lines += [f"written to {found['out']}"] if found["out"] else []
    if found["missing_compiler"]:
        lines += ["", f"`{install_package(found['missing_compiler'])}` brings the compiler, whose answer is nearer"]
    return lines
