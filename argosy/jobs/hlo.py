"""`argosy hlo`: reads the program of a run, of a capture or of a dump of XLA, for CPUs, GPUs and TPUs."""

import gzip
from pathlib import Path

from argosy.core.errors import BadInput
from argosy.observe.hlo.module import HloModule
from argosy.observe.profile.capture import FOLDER
from argosy.run.hooks.profiling import PROGRAM

# The names that XLA gives the text of an optimized program in a folder of `--xla_dump_to`, on each platform.
DUMPS = ("*after_optimizations.txt", "*after_optimizations.txt.gz", "*.hlo.txt")


def program_file(place: str) -> Path:
    """Returns the file with the text of a program: the file itself, the largest program of a dump, or the program of a run.

    Raises:
        BadInput: there is no program.
    """
    path = Path(place)
    if path.is_file():
        return path
    if not path.is_dir():
        raise BadInput(f"no run and no dump at {place}", hint="a run, a folder of XLA_FLAGS=--xla_dump_to=FOLDER, or a file")
    if (path / PROGRAM).is_file():
        return path / PROGRAM
    captured = sorted((path / FOLDER).glob("*/process-0.hlo.txt"), key=lambda file: file.stat().st_mtime)
    if captured:
        return captured[-1]
    for pattern in DUMPS:
        if files := sorted(path.glob(pattern), key=lambda file: file.stat().st_size):
            return files[-1]
    raise BadInput(f"{place} has no program", hint="profile.program=true writes that of a run when it starts; so does each capture")


def read_program(path: Path) -> HloModule:
    """Reads the program in a file.

    Raises:
        BadInput: the file is not the text of an optimized program.
    """
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8", "replace")
    if not text.lstrip().startswith("HloModule"):
        raise BadInput(f"{path} is no text of an HLO module", hint="XLA_FLAGS='--xla_dump_to=FOLDER --xla_dump_hlo_as_text'")
    program = HloModule.read(text)
    if not program.entry:
        raise BadInput(f"{path} has no entry computation", hint="it may be cut short; write it again")
    return program
