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
from argosy.observe.readable import columns, format_bytes, format_duration

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

    setting_words = [word for word in words or [] if word.partition("=")[0] in PlanSettings.model_fields]
    settings = read_settings(PlanSettings, words_layer(setting_words)).value
    machine.start_jax()
    from argosy.jobs.plan.training import plan as job

    document = job(recipe, [word for word in words or [] if word not in setting_words], settings, say)
    answer(plan_text(document), document, as_json)
    if document["fits"]:
        return 0
    memory = document["memory_bytes"]
    if (rollouts := document.get("rollouts")) is not None and not rollouts["fits"]:
        memory = rollouts["memory_bytes"]
    where = ", ".join(f"{buffer['name']} {format_bytes(buffer['bytes'])}" for buffer in document["buffers"][:3])
    ways = " or ".join(" ".join(candidate["settings"]) for candidate in document["nearest"])
    needs = f"a device needs {format_bytes(memory['total'])} and has {format_bytes(document['memory_limit_bytes'])}"
    raise BadInput(
        f"{recipe} does not fit on {document['device']}: {needs}",
        where=f"largest: {where}" if where else None,
        hint=f"{ways} fits" if ways else "more devices, or a smaller model",
    )


def _serving(words: list[str], as_json: bool) -> int:
    """`argosy plan serve MODEL`."""
    from argosy.cli.flags import PLAN_SERVE, translate_flags
    from argosy.jobs.plan.serving import ServePlanSettings, plan_serving

    words = translate_flags(words, PLAN_SERVE)
    names = [word for word in words if "=" not in word]
    if len(names) != 1:
        raise BadInput("plan serve takes one model", hint="argosy plan serve llama3.1-8b device=v5e-8")
    settings = read_settings(ServePlanSettings, words_layer([word for word in words if "=" in word])).value
    machine.start_jax()
    document = plan_serving(names[0], settings, say)
    answer(serving_text(document), document, as_json)
    if document["fits"]:
        return 0
    ways = " or ".join(" ".join(candidate["settings"]) for candidate in document["nearest"])
    needs = f"a device needs {format_bytes(document['memory_bytes']['total'])} and has {format_bytes(document['memory_limit_bytes'])}"
    raise BadInput(
        f"a server of {document['model']} does not fit on {document['device']}: {needs}",
        where="largest: " + ", ".join(f"{buffer['name']} {format_bytes(buffer['bytes'])}" for buffer in document["buffers"][:3]),
        hint=f"{ways} fits" if ways else "more devices, or a smaller model",
    )


def serving_text(document: Mapping[str, Any]) -> str:
    """The answer for a server as text."""
    memory, limit = document["memory_bytes"], document["memory_limit_bytes"]
    several = document["copies"] > 1
    copies = f"{document['copies']} {'copies' if several else 'copy'} on {plural(document['tensor'], 'device')}{' each' * several}"
    by = "the compiler" if document["verdict_by"] == "compiler" else "the analytic model"
    form = f", {document['quantization']}" if document["quantization"] else ""
    form += f", some in {document['published_in']} as they are published" if document["published_in"] else ""
    rows = [(kind, format_bytes(size)) for kind, size in memory.items() if size and kind != "total"]
    rows.append(("in all", format_bytes(memory["total"]) + (f" of {format_bytes(limit)}" if limit else "")))
    whose = "each device" if document["device_kind"] != "cpu" else "this machine"
    lines = [
        f"{document['model']} on {document['device']}: {copies}",
        f"{document['parameters']:,} parameters in {document['dtype']}{form}, sequences of at most {document['context']:,} tokens",
        f"{'fits' if document['fits'] else 'does not fit'}, says {by}",
        "",
        *columns((f"memory of {whose}", ""), rows).splitlines(),
        "",
        f"the cache of a copy holds {document['cache_tokens']:,} tokens ({format_bytes(document['cache_bytes_per_token'])} each): "
        f"{plural(document['cache_sequences'], 'sequence')} of {document['input_len']:,} + {document['output_len']:,} tokens at a time",
        "",
    ]
    if document["devices"] < document["devices_available"]:
        lines.insert(1, f"{document['devices']} of {plural(document['devices_available'], 'device')}: `copies` and `tensor` use more")
    if document["replicated"]:
        lines += [f"whole: {document['replicated']}", ""]
    if not document["rates"]:
        return "\n".join([*lines, "no speed is known for this device"] if document["fits"] else lines[:-1])
    rows = [
        (
            str(rate["sequences"]), _brief(rate["time_to_first_token_s"]), _brief(rate["step_seconds"]),
            f"{rate['output_tokens_per_s']:,.0f}", rate["bound_by"],
        )
        for rate in document["rates"]
    ]  # fmt: skip
    lines += columns(("sequences", "first token", "a step", "tokens/s", "a step is bound by"), rows, (0, 1, 2, 3)).splitlines()
    basis = "by bytes and FLOPs: a lower bound"
    if document["verdict_by"] == "compiler":
        basis = "by the compiler's cycles; no device was measured"
    elif document["device_kind"] == "cpu":
        basis = "by bytes and FLOPs, at the speeds of a read and a product here; more than 25% off while others compute here"
    lines += [basis]
    if (drafts := document["speculative"]) is not None:
        lines += [
            f"steps verify {plural(drafts['tokens'], 'draft')}, and give {document['tokens_per_step']:.2f} tokens where "
            f"{document['acceptance']:.0%} of them are accepted, which is assumed: acceptance=N says another share"
        ]
    if document["cost_per_million_tokens"]:
        lines += [f"{document['cost_per_million_tokens']:,.2f} for a million tokens of completions, at the highest rate"]
    if document["unknown_loops"]:
        loops = plural(document["unknown_loops"], "loop")
        lines += ["", f"note: {loops} of a length that depends on the data count once, so a step takes longer"]
    if document["missing_compiler"]:
        lines += ["", f"`{install_package(document['missing_compiler'])}` brings the compiler, whose answer is nearer"]
    return "\n".join(lines)


def plan_text(answered: Mapping[str, Any]) -> str:
    """The answer as text."""
    parts = [*_head(answered), "", *_memory(answered), "", *_time(answered), *_rollouts(answered), *_collectives(answered)]
    return "\n".join([*parts, *_rest(answered)])


def _rollouts(document: Mapping[str, Any]) -> list[str]:
    """What the rollouts of a run take."""
    if (need := document.get("rollouts")) is None:
        return []
    memory, limit = need["memory_bytes"], need["memory_limit_bytes"]
    rows = [(kind, format_bytes(size)) for kind, size in memory.items() if size and kind != "total"]
    rows.append(("in all", format_bytes(memory["total"]) + (f" of {format_bytes(limit)}" if limit else "")))
    lines = [
        "",
        f"a rollout: {plural(need['completions'], 'completion')} of {need['output_len']:,} tokens to "
        f"{plural(need['prompts'], 'prompt')} of {need['input_len']:,}, {need['sequences']} at a time, weights {need['weights']}",
        *columns(("memory while it is sampled", ""), rows).splitlines(),
    ]
    if need["decode_step_seconds"] is None:
        return lines
    each = f" for {plural(need['updates'], 'update')}" if need["updates"] > 1 else ""
    return [
        *lines,
        f"{_brief(need['seconds'])}{each}: prompts {_brief(need['prefill_seconds'])}, {need['decode_steps']:,} decode steps of "
        f"{_brief(need['decode_step_seconds'])}, bound by {need['bound_by']}",
        f"in a step: rollouts {_brief(document['rollout_seconds'])}, the update {_brief(document['update_seconds'])}"
        + (f", log-probabilities {_brief(document['scoring_seconds'])}" if document["scoring_seconds"] else ""),
    ]


def _head(document: Mapping[str, Any]) -> list[str]:
    mesh = " x ".join(f"{axis} {size}" for axis, size in document["mesh"].items()) or "one device"
    by = "the compiler" if document["verdict_by"] == "compiler" else "the analytic model"
    count = f"{document['tokens_per_step']:,} {document['unit']}"
    return [
        f"{document['recipe']} on {document['device']}: {plural(document['devices'], 'device')}, {mesh}",
        f"{document['parameters']:,} parameters, {document['flops_per_step']:.3g} FLOPs and {count} a step, "
        f"{document['precision']}, remat {document['remat']}",
        f"{'fits' if document['fits'] else 'does not fit'}, says {by}",
    ]


def _memory(document: Mapping[str, Any]) -> list[str]:
    memory, limit = document["memory_bytes"], document["memory_limit_bytes"]
    rows = [(str(WORDS.get(kind, kind)), format_bytes(size)) for kind, size in memory.items() if size and kind != "total"]
    of = f" of {format_bytes(limit)}" if limit else ""
    rows.append(("in all", format_bytes(memory["total"]) + of))
    whose = "each device" if document["device"] != "this" or document["device_kind"] != "cpu" else "this machine"
    return columns((f"memory of {whose}", ""), rows).splitlines()


def _time(document: Mapping[str, Any]) -> list[str]:
    if document["step_seconds"] is None:
        return ["a step: no speed is known for this device"]
    step, error = document["step_seconds"], document["step_seconds_error"]
    mfu = f", {document['mfu']:.1%} MFU" if document["mfu"] else ""
    speed = f"{document['tokens_per_s']:,.0f} {document['unit']} a second"
    cost = f", {document['cost']:,.0f} in all" if document["cost"] else ""
    return [
        f"a step: {_brief(step)} by a static estimate that may be {error:.0%} off{mfu}, {speed}",
        f"bound by {document['bound_by']}",
        f"{plural(document['steps'], 'step')}: {format_duration(document['steps'] * step)}{cost}",
    ]


def _collectives(document: Mapping[str, Any]) -> list[str]:
    if not document["collectives"]:
        return []
    rows = [
        (op["kind"], op["axis"], format_bytes(op["bytes"]), _brief(op["seconds"]), _brief(op["exposed_seconds"]))
        for op in document["collectives"]
    ]
    return ["", *columns(("collectives", "along", "moved", "time", "exposed"), rows, (2, 3, 4)).splitlines()]


def _brief(seconds: float) -> str:
    """A duration, in milliseconds below a second."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s" if seconds < 100 else format_duration(seconds)


def _rest(document: Mapping[str, Any]) -> list[str]:
    lines = []
    if document["buffers"]:
        rows = [(format_bytes(buffer["bytes"]), buffer["type"], buffer["name"][:60]) for buffer in document["buffers"]]
        lines += ["", *columns(("largest arrays", "", ""), rows).splitlines()]
    if document["replicated"]:
        lines += ["", f"whole: {document['replicated']}"]
    if document["unknown_loops"]:
        loops = plural(document["unknown_loops"], "loop")
        lines += ["", f"note: {loops} of a length that depends on the data count once, so a step takes longer"]
    if document["note"]:
        lines += ["", f"note: {document['note']}"]
    if document.get("ranking"):
        rows = [
            (
                f"{plan['tokens_per_s']:,.0f}",
                format_bytes(plan["memory_bytes"]),
                " ".join(w for w in plan["settings"] if not w.endswith("=1")),
            )
            for plan in document["ranking"]
        ]
        lines += ["", *columns((f"{document['unit']}/s", "memory", "by the analytic model"), rows, (0, 1)).splitlines()]
        lines += [f"written to {document['out']}"] if document["out"] else []
    if document["missing_compiler"]:
        lines += ["", f"`{install_package(document['missing_compiler'])}` brings the compiler, whose answer is nearer"]
    return lines
