"""`argosy doctor`: the devices, memory and packages of this machine, and what is wrong with them."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from argosy.cli.output import answer
from argosy.observe.readable import format_bytes

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
    clear: Annotated[bool, typer.Option("--clear-cache", help="removes the compiled programs that are kept, and nothing else")] = False,
) -> int:
    """Prints versions, devices, memory, disk and cache, and problems with them. Exits with 1 if nothing would run."""
    from argosy.jobs.doctor import clear_programs, examine

    if clear:
        removed = clear_programs()
        answer(f"removed {removed['programs']} compiled programs, {format_bytes(removed['bytes'])}", removed, as_json)
        return 0

    document = examine()
    answer(_text_of(document), document, as_json)
    return 0 if document["ok"] else 1


def _text_of(document: Mapping[str, Any]) -> str:
    """What was found as text: facts in columns, then the problems."""
    machine, cache, pages = document["machine"], document["cache"], document["huge_pages"]
    sections = {
        "versions": document["versions"],
        "machine": {
            "system": machine["system"],
            "processor": machine["processor"],
            "vectors": f"{machine['vector_bits']} bits" if machine["vector_bits"] else "unknown",
            "cores": f"{machine['cores']:g}, load {machine['load']}",
            "memory": of(machine["memory_free_bytes"], machine["memory_bytes"]),
            "huge pages": pages["state"] + (f" ({pages['system']})" if pages["system"] else ""),
            "kernels": document["kernels"]["library"] or f"none: {document['kernels']['why_not']}",
            "open files": document["open_files"] or "unlimited",
        },
        "devices": _devices(document["jax"]),
        "disk": {name: f"{of(d['free_bytes'], d['total_bytes'])}  {d['path']}" for name, d in document["disk"].items()},
        "compiled programs": {
            "kept": f"{cache['programs']}, {format_bytes(cache['bytes'])}",
            "at most": f"{format_bytes(cache['most_bytes'])} (ARGOSY_CACHE_GB); --clear-cache removes them",
            "in": cache["folder"],
        },
        "variables": document["variables"] or {"none": "that matter"},
    }
    width = max(len(name) for rows in sections.values() for name in rows)
    lines = []
    for title, rows in sections.items():
        lines += [title, *(f"  {name:<{width}}  {value}" for name, value in rows.items()), ""]
    for finding in document["findings"]:
        lines += [f"{finding['level']}: {finding['problem']}", f"  hint: {finding['hint']}"]
    serious = [f for f in document["findings"] if f["level"] != "note"]
    return "\n".join([*lines, *([] if serious else ["nothing is wrong"])])


def _devices(jax: Mapping[str, Any]) -> dict[str, str]:
    """One line per device; CPU devices share the machine's memory."""
    if "error" in jax:
        return {"none": jax["error"]}
    return {
        str(i): f"{d['kind']}, {format_bytes(d['memory_bytes'])}" if d["memory_bytes"] else d["kind"]
        for i, d in enumerate(jax["devices"])
    }


def of(free: int | None, total: int | None) -> str:
    """`3.10 GiB free of 23.5 GiB`."""
    if free is None or total is None:
        return "unknown"
    return f"{format_bytes(free)} free of {format_bytes(total)}"
