"""The generated pages of docs/reference: `./run docs` writes all, `./run docs seams.md` one; `./run docs --check` finds stale ones.

They are written to the checkout, from whatever directory the command is run.
"""

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from argosy.core.errors import BadInput
from argosy.core.settings.schema import Also, Choice, Settings, marks, shape_of

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"


def settings_page() -> str:
    """The settings of a run, then those of `argosy launch`."""
    from argosy.core.settings.explain import settings_reference, tables
    from argosy.launch.engines import ENGINES
    from argosy.run.settings.run import Run

    return settings_reference(Run) + "\n" + tables(ENGINES, "`argosy launch engine=NAME`")


def verbs_page() -> str:
    """The help of each verb."""
    from argosy.cli import VERBS, main

    def help_of(*words: str) -> str:
        with redirect_stdout(io.StringIO()) as out:
            main([*words, "--help"])
        return out.getvalue().strip()

    plain = {"NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb"}
    before = {name: os.environ.get(name) for name in (*plain, "ARGOSY_COMMAND")}
    os.environ.update(plain)
    os.environ.pop("ARGOSY_COMMAND", None)
    parts = ["# Verbs\n"]
    try:
        for verb in VERBS:
            about = help_of(verb)
            inner = re.findall(r"^  (\w+)", about.partition("Commands:\n")[2], re.MULTILINE)
            pages = [about, *(help_of(verb, name) for name in inner)]
            names = [verb, *(f"{verb} {name}" for name in inner)]
            parts += [f"## argosy {name}\n\n```\n{page}\n```\n" for name, page in zip(names, pages, strict=True)]
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
    return "\n".join(parts)


def names_page() -> str:
    """Names that other trainers use for our settings."""
    from argosy.run.settings.other_trainers import ELSEWHERE
    from argosy.run.settings.run import Run

    ours = {(name, f"`{key}`" + (f": {note}" if note else "")) for name, key, note in names_of(Run)}
    rows = sorted(ours | set(ELSEWHERE.items()))
    table = "\n".join(f"| `{name}` | {answer} |" for name, answer in rows)
    return (
        "# Names from other trainers\n\nWhat Hugging Face Trainer, torchtitan, axolotl, nanochat, nanoGPT and MaxText call things, and "
        "what the name here is. None of these names is accepted; the error message suggests the one given here.\n\n"
        f"| name | here |\n| --- | --- |\n{table}\n"
    )


def names_of(schema: type[Settings], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(name elsewhere, our key, how the values differ) of every key that a schema may have, whatever is chosen."""
    for name, info in schema.model_fields.items():
        yield from ((other, f"{prefix}{name}", mark.note) for mark in marks(info, Also) for other in mark.names)
        kind = shape_of(info)
        inner = [kind.of] if kind.kind == "group" else []
        if isinstance(kind.of, Choice):
            inner = [kind.of.pick(option) for option in kind.of.registry]
        for settings in inner:
            yield from names_of(settings, f"{prefix}{name}.")


def seams_page() -> str:
    """Without LLVM's optimizations and XLA's fusion emitters, with which one program here compiles for five minutes."""
    import subprocess

    flags = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    plain = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tools.seams import table; print(table())"
    words = [sys.executable, "-P", "-c", code]
    table = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=plain, check=True).stdout
    return (
        "# The two seams\n\nThe fullest example of each family, the two ways layers run, and every use of the same weights. A cell is "
        "the largest difference of a logit from the whole sequence under unrolled layers, as a share of the largest logit, "
        "float32. Weights carry noise; sizes are odd. `LoRA at its start` must equal the base; int8 is compared with "
        "itself, decoded page by page against whole.\n\n" + table
    )


def devices_page() -> str:
    from tools.devices import LENGTH, MICROBATCHES, ROWS, STAGED_LAYERS, staged_table, table

    return (
        "# What each device does\n\nA training step of small models (two layers, width 64, vocabulary 512, "
        f"{ROWS} rows of {LENGTH} tokens), compiled for one to eight devices, and what XLA says of it for each device. Nothing is "
        "run. FLOPs count the body of a loop once, and products of experts run in loops on CPUs. Collectives are the bytes of what "
        "they give: FLOPs, temporaries and state shrink with the devices, collectives hardly do, because weights are gathered whole "
        "and XLA on CPUs all-reduces the gradients of dense weights whole. Over `expert`, what is sent to experts and back shrinks "
        "with the rows of a device; of that without a capacity, two fifths are the first round, and the others only happen where the "
        "load is uneven. `tests/laws/test_devices.py` holds the trend, and that losses and weights do not depend on the mesh.\n\n"
        + table()
        + "\n\n## Stages\n\n"
        f"The same models with {STAGED_LAYERS} layers, which are scanned, and split over stages in {MICROBATCHES} microbatches. FLOPs "
        "are those of matrix products, and here they and collectives count the body of a loop as often as it runs, where XLA knows "
        "how often: of products of experts it does not. With stages alone, collectives do not depend on the depth. With `fsdp`, "
        "weights are gathered for every microbatch.\n\n" + staged_table() + "\n"
    )


def families_page() -> str:
    """The small reference models of the tests, measured now; the table is stored with their goldens."""
    import subprocess

    plain = os.environ | {"JAX_PLATFORMS": "cpu"}
    table = subprocess.run(
        [sys.executable, "tests/parity_table.py"], stdout=subprocess.PIPE, text=True, env=plain, check=True, cwd=ROOT
    )
    return (
        "# The families, beside the reference implementation\n\nA row is a small random model of transformers in odd sizes, "
        "with noise on every parameter and weights large enough that attention is far from uniform; each family has its options "
        "both ways. `difference` is the largest of a logit (of a vector, for encoders), as a share of the largest, float32: at most "
        "4.4e-5 (`tests/helpers.py`). Greedy text: 20 tokens. The last column is the difference when transformers loads the folder "
        "that we wrote (`./run reference check`).\n\nWhere layers recur, float32's own rounding grows with depth: those models "
        "are also compared in float64, in which both sides agree to 1e-12 (`./run test tests/models/test_float64.py`).\n\n"
        + table.stdout
    )


def files_page() -> str:
    """The same rows in a file of every kind, measured now."""
    import subprocess

    plain = os.environ | {"JAX_PLATFORMS": "cpu"}
    table = subprocess.run(
        [sys.executable, "tests/file_table.py"], stdout=subprocess.PIPE, text=True, env=plain, check=True, cwd=ROOT
    )
    return (
        "# Files of every kind\n\nThe same 500 rows in a file of every kind that `data.source` reads, written by the library that "
        "others write it with (`tests/file_table.py`). `same tokens`: as JSON lines give. The next two columns are what an empty "
        "file and its first half are answered with, beside the file's name. The last one changes a bit of a byte that is not zero, "
        "past the first tenth: it is named, changes nothing (a column that is not read), or becomes another text, where the format "
        "has no checksums.\n\n" + table.stdout
    )


def kernels_page() -> str:
    from tools.kernels import page

    return page()


def not_built_page() -> str:
    """Areas, written by hand in tools/not_built.md, and the features that do not combine."""
    from argosy.run.settings.combinations import combinations_table

    return Path(__file__).with_name("not_built.md").read_text(encoding="utf-8").replace("{table}", combinations_table())


# Pages that are cheap and exact are checked; the table of the seams has rounding errors, which differ by machine.
CHECKED: dict[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "verbs.md": verbs_page,
    "names.md": names_page,
    "kernels.md": kernels_page,
    "../guides/not-built-yet.md": not_built_page,
}
MEASURED: dict[str, Callable[[], str]] = {
    "families.md": families_page,
    "files.md": files_page,
    "seams.md": seams_page,
    "devices.md": devices_page,
}


def write(pages: dict[str, Callable[[], str]]) -> list[Path]:
    """Writes these pages."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in pages.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
    return [FOLDER / name for name in pages]


def check() -> None:
    """Raises BadInput if a page differs from what the code generates."""
    there = {name: (FOLDER / name).read_text(encoding="utf-8") if (FOLDER / name).exists() else "" for name in CHECKED}
    if stale := [name for name, page in CHECKED.items() if there[name] != page()]:
        raise BadInput(f"stale pages in {FOLDER}: {', '.join(stale)}", hint="./run docs --fast writes them")


def main() -> int:
    if wrong := [word for word in sys.argv[1:] if word.startswith("-") and word not in ("--check", "--fast")]:
        print(__doc__ if wrong[0] in ("--help", "-h") else f"error: no option `{wrong[0]}`\n\nhint: --check, --fast, or pages")
        return 0 if wrong[0] in ("--help", "-h") else 2
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    try:
        if "--check" in sys.argv[1:]:
            check()
        else:
            # Without the measured pages, which take minutes.
            fast = "--fast" in sys.argv[1:]
            pages = CHECKED if fast else CHECKED | MEASURED
            if names := [word for word in sys.argv[1:] if not word.startswith("-")]:
                if unknown := set(names) - set(pages):
                    raise BadInput(f"no page `{min(unknown)}`", hint=f"there are {', '.join(pages)}")
                pages = {name: pages[name] for name in names}
            print("\n".join(map(str, write(pages))))
    except BadInput as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
