"""The generated pages of docs/reference, and the check that they are not stale: `./run docs`, `./run docs --check`."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from argosy.core.errors import BadInput

FOLDER = Path("docs/reference")


def settings_page() -> str:
    from argosy.core.explain import reference
    from argosy.jobs.run import Run

    return reference(Run)


def verbs_page() -> str:
    """What each verb says of itself."""
    import subprocess

    from argosy.cli import VERBS

    plain = os.environ | {"NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb"}

    def told(*verb: str) -> str:
        words = [sys.executable, "-m", "argosy", *verb, "--help"]
        return subprocess.run(words, capture_output=True, text=True, env=plain, check=True).stdout.strip()

    parts = ["# Verbs\n"]
    for verb in VERBS:
        about = told(verb)
        inner = re.findall(r"^  (\w+)", about.partition("Commands:\n")[2], re.MULTILINE)
        pages = [about, *(told(verb, name) for name in inner)]
        names = [verb, *(f"{verb} {name}" for name in inner)]
        parts += [f"## argosy {name}\n\n```\n{page}\n```\n" for name, page in zip(names, pages, strict=True)]
    return "\n".join(parts)


def seams_page() -> str:
    from argosy.jobs.seams import table

    return (
        "# The two seams\n\nThe fullest example of each family, the two ways layers run, and every use of the same weights. A cell is "
        "the largest difference of a logit from the whole sequence under unrolled layers, as a share of the largest logit, "
        "float32. Weights carry noise; sizes are odd. `LoRA at its start` must equal the base; int8 is compared with "
        "itself, decoded page by page against whole.\n\n" + table() + "\n"
    )


def families_page() -> str:
    """The suite's small reference models, measured now: the table lies with their goldens."""
    import subprocess

    plain = os.environ | {"JAX_PLATFORMS": "cpu"}
    table = subprocess.run(
        [sys.executable, "tests/parity_table.py"], stdout=subprocess.PIPE, text=True, env=plain, check=True
    )
    return (
        "# The families, beside the reference implementation\n\nA row is a small random model of transformers in odd sizes, "
        "with noise on every parameter and weights large enough that attention is far from uniform; each family has its options "
        "both ways. `difference` is the largest of a logit (of a vector, for encoders), as a share of the largest, float32: at most "
        "2e-5. Greedy text: 20 tokens. The last column is the difference when transformers loads the folder that we wrote "
        "(`./run reference check`).\n\nWhere layers recur, float32's own rounding grows with depth: those models are also compared "
        "in float64, in which both sides agree to 1e-12 (`./run test tests/models/test_float64.py`).\n\n" + table.stdout
    )


# What is cheap and exact is checked for staleness; the table of the seams holds figures of rounding, which differ by machine.
CHECKED: dict[str, Callable[[], str]] = {"settings.md": settings_page, "verbs.md": verbs_page}
MEASURED: dict[str, Callable[[], str]] = {"families.md": families_page, "seams.md": seams_page}


def write() -> list[Path]:
    """Writes every page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in (CHECKED | MEASURED).items():
        (FOLDER / name).write_text(page())
    return [FOLDER / name for name in CHECKED | MEASURED]


def check() -> None:
    """Raises BadInput where a page is not what the code says."""
    stale = [n for n, page in CHECKED.items() if not (FOLDER / n).exists() or (FOLDER / n).read_text() != page()]
    if stale:
        raise BadInput(f"stale pages in {FOLDER}: {', '.join(stale)}", hint="./run docs writes them")


def main() -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    try:
        if "--check" in sys.argv[1:]:
            check()
        else:
            print("\n".join(map(str, write())))
    except BadInput as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
