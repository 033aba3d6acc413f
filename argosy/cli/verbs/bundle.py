"""`argosy bundle show | verify | run | diff | refresh`."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from argosy.cli.output import Doing, answer, conclude, say
from argosy.core.counts import plural
from argosy.core.settings import Settings, read_settings, words_layer
from argosy.export.mesh import device_count, mesh_text
from argosy.observe.readable import columns, format_bytes, format_duration

app = typer.Typer(
    rich_markup_mode=None, add_completion=False, no_args_is_help=True, help="Shows, verifies, runs, compares and renews bundles."
)

JSON = typer.Option("--json", help="one JSON document on stdout")
BUNDLE = typer.Argument(metavar="BUNDLE", help="a folder that `argosy export` wrote", show_default=False)
MOST_LISTED = 12
# Numbers of an output that are printed as text.
MOST_NUMBERS = 8


class Verify(Settings):
    """Whom to trust."""

    key: str | None = None
    """A file with the ed25519 public key in PEM whose owner must have signed the bundle."""


class RunBundle(Verify):
    """The call to run."""

    signature: str | None = None
    """Name of a signature. None: the bundle's default."""
    input: str | None = None
    """A file of inputs by name (.json, .npz), or of texts, one a line (.txt); JSON itself; a text; or - for JSON on stdin. None: the
    example of the signature."""
    output: str | None = None
    """A .json or .npz file for the outputs."""


class Refresh(Verify):
    """How to write the bundle again."""

    sign: str | None = None
    """A file with an ed25519 private key in PEM, which signs the new manifest."""


@app.command("show")
def show(bundle: Annotated[str, BUNDLE], as_json: Annotated[bool, JSON] = False) -> None:
    """Shows signatures, sizes, versions and lineage; reads the manifest alone."""
    from argosy.jobs.bundle import show_bundle

    document = show_bundle(bundle)
    answer(bundle_report(document), document, as_json)


@app.command("verify")
def verify_files(
    bundle: Annotated[str, BUNDLE],
    words: Annotated[list[str] | None, typer.Argument(metavar="[key=PUB.pem]", show_default=False)] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Reads every byte and compares it with the manifest; with a key, checks who signed it."""
    settings = read_settings(Verify, words_layer(words or [])).value
    from argosy.jobs.bundle import verified_bundle

    document = verified_bundle(bundle, settings.key)
    signed = ", signed; key=PUB.pem checks by whom" if document["signed"] else ""
    by = f", signed by the owner of {settings.key}" if settings.key else signed
    answer(f"{bundle}: {plural(document['files'], 'file')}, {format_bytes(document['bytes'])}, all as written{by}", document, as_json)


@app.command("run")
def run(
    bundle: Annotated[str, BUNDLE],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[input=FILE|JSON|TEXT|-] [signature=...] [output=FILE] [key=PUB.pem]", show_default=False),
    ] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Calls a signature: JSON, .npz or text in, JSON or .npz out."""
    # JSON is one text here, not a group of settings.
    plain = [word.removeprefix("input=") for word in words or [] if word.startswith("input={")]
    settings = read_settings(RunBundle, words_layer([word for word in words or [] if not word.startswith("input={")])).value
    source = plain[-1] if plain else settings.input
    with Doing() as doing:
        doing("loading jax")
        from argosy.jobs import machine
        from argosy.jobs.bundle import run_bundle

        machine.start_jax()
        options = settings.model_dump(include={"signature", "output", "key"})
        outputs = run_bundle(bundle, source, say=say, **options)
    # Where a file has the outputs, nobody needs to read them here.
    tell = answer if settings.output is None else conclude
    tell("\n".join(f"{name}: {output_text(value)}" for name, value in outputs.items()), outputs, as_json)


@app.command("diff")
def compare(
    a: Annotated[str, typer.Argument(metavar="A", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", show_default=False)],
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Compares two bundles by their manifests; exit code 0 if they are equal but for their dates, 1 if not."""
    from argosy.jobs.bundle import compared_bundles

    document = compared_bundles(a, b)
    answer(differences_text(document), document, as_json)
    if not document["equal"]:
        raise typer.Exit(1)


@app.command("refresh")
def refresh(
    bundle: Annotated[str, BUNDLE],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[OUT] [key=PUB.pem] [sign=KEY.pem]", show_default=False)
    ] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Exports the programs again with this version of jax, from the bundle itself; the weights stay as they are. Writes OUT, or
    replaces the bundle."""
    words = list(words or [])
    target = words.pop(0) if words and "=" not in words[0] else None
    settings = read_settings(Refresh, words_layer(words)).value
    from argosy.export.manifest import SEAL

    was_signed = (Path(bundle) / SEAL).is_file()
    # No accelerator is needed, and another program may be using it.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with Doing() as doing:
        doing("loading jax")
        from argosy.export.refresh import refresh_bundle
        from argosy.jobs.export import bundle_facts

        manifest = refresh_bundle(bundle, target, key=settings.key, sign=settings.sign, say=doing)
    if was_signed and settings.sign is None:
        say(f"{bundle} was signed, and {target or 'what replaced it'} is not: sign=KEY.pem signs it")
    document = {"path": target or bundle} | bundle_facts(manifest)
    text = f"{target or bundle}: jax {manifest.versions['jax']}; newer versions read it until {manifest.readable_until} at least"
    conclude(text, document, as_json)


def bundle_report(facts: dict[str, Any]) -> str:
    """A bundle as text."""
    lines = []
    for name, signature in facts["signatures"].items():
        default = ", the default" if name == facts["default"] else ""
        lines.append(f"signature {name}{default}: {signature['description'] or 'no description'}")
        rows = [
            ("in" if side == "inputs" else "out", spec["name"], spec["dtype"], str(spec["shape"]).replace("'", ""), spec["description"])
            for side in ("inputs", "outputs")
            for spec in signature[side]
        ]
        rows += [_step_row(step) for step in signature["preprocess"]]
        lines.append(columns(("", "name", "type", "shape", ""), rows))
        steps = [step["step"] for step in (*signature["preprocess"], *signature["postprocess"])]
        platforms = dict.fromkeys(p for program in signature["programs"] for p in program["platforms"])
        shapes = [program["shapes"] for program in signature["programs"][:MOST_LISTED]]
        sizes = "; ".join(", ".join(f"{axis} {size}" for axis, size in some.items()) or "any size" for some in shapes)
        lines.append(f"programs for {', '.join(platforms)}: {sizes}" + (f"; steps: {', '.join(steps)}" if steps else "") + "\n")
    if facts["mesh"]:
        lines.append(f"all programs run on {device_count(facts['mesh'])} devices together: {mesh_text(facts['mesh'])}")
    versions = ", ".join(f"{name} {value}" for name, value in facts["versions"].items())
    lines.append(f"{plural(facts['tensors'], 'tensor')}, {plural(len(facts['files']), 'file')}, {format_bytes(facts['bytes'])}")
    lines.append(f"written {facts['written']} by {versions}")
    until = f"newer versions of jax read it until {facts['readable_until']} at least"
    is_past = facts["days_left"] < 0
    lines.append(f"{until}, which is past" if is_past else f"{until}, {format_duration(facts['days_left'] * 86400)} from now")
    lines.append(f"sha256 {facts['sha256']}{', signed' if facts['signed'] else ''}")
    return "\n".join(lines)


def _step_row(step: dict[str, Any]) -> tuple[str, ...]:
    """The input of a step before the program: a text or an image file, and what it takes the place of."""
    if step["step"] == "decode_image":
        return "in", step["input"], "file", "[batch]", f"in place of {step['image']}"
    tokens = [encoder["tokens"] for encoder in step["encoders"]] if "encoders" in step else [step["tokens"]]
    return "in", step["input"], "text", "[batch]", f"in place of {', '.join(tokens)}"


def output_text(value: Any) -> str:
    """A few of the numbers of an output, or its texts."""
    if isinstance(value, list) and value and isinstance(value[0], str):
        return "\n".join(["", *value]) if len(value) > 1 else value[0]
    shape, flat = [], value
    while isinstance(flat, list):
        shape.append(len(flat))
        flat = flat[0] if flat else None
    first = value
    while isinstance(first, list) and first and isinstance(first[0], list):
        first = first[0]
    numbers = first[:MOST_NUMBERS] if isinstance(first, list) else [first]
    rest = ", ..." if isinstance(first, list) and len(first) > MOST_NUMBERS else ""
    return f"{shape} {', '.join(f'{n:.6g}' if isinstance(n, float) else str(n) for n in numbers)}{rest}"


def differences_text(facts: dict[str, Any]) -> str:
    """Equal, or what differs."""
    if facts["equal"]:
        return f"{facts['a']} and {facts['b']} are equal but for their dates"
    lines = []
    for part in ("signatures", "tensors", "files", "versions", "implementations", "lineage"):
        for kind, names in facts[part].items():
            where = {"only_in_a": f"only in {facts['a']}", "only_in_b": f"only in {facts['b']}", "changed": "differs"}[kind]
            rest = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
            lines += [f"{part}: {', '.join(names[:MOST_LISTED])}{rest}: {where}"] if names else []
    lines.append(f"{format_bytes(facts['shared_weight_bytes'])} of weights are the same")
    return "\n".join(lines)
