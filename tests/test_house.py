"""The map of the house, held: rooms import upwards only, each library enters by one door, nothing tells where it was written.

Standard library only, and it reads the sources without running them. An import counts however it is spelt: absolute,
relative, inside a function, by `import_module`, by a public name of `argosy`, or as the string that a registry imports
later. Imports under TYPE_CHECKING are free: they name types, and never run.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "argosy"
ROOMS = [
    *("core", "observe", "data", "parallel", "ops", "models", "adapt", "weights", "checkpoint"),
    *("train", "infer", "evals", "rl", "export", "web", "predict", "serve", "client", "launch", "run", "jobs", "cli"),
]
MODELS_ON = frozenset(ROOMS[ROOMS.index("models") :])
DOORS = {
    "grain": {"data"},
    "flax": MODELS_ON,
    "optax": {"train"},
    "orbax": {"checkpoint"},
    "tensorstore": {"checkpoint"},
    "safetensors": {"core"},
    "jax.experimental.pallas": {"ops"},
    "tokamax": {"ops"},
    "qwix": {"adapt"},
    "yaml": {"core"},
    "fsspec": {"core"},
    "huggingface_hub": {"core"},
    "starlette": {"web", "predict", "serve"},
    "uvicorn": {"web"},
    "grpc": {"predict"},
    "google.protobuf": {"predict"},
    "rich": {"observe", "cli"},
    "typer": {"cli"},
    "tokenizers": {"data"},
    "sentencepiece": {"data"},
    "jinja2": {"data"},
    "llguidance": {"infer"},
    "cryptography": {"export"},
    "ray": {"launch"},
    "pathwaysutils": {"launch"},
}
WITHOUT_JAX = {"core", "web"}                      # not even inside a function
WITHOUT_JAX_AT_TOP = {"core", "data", "cli"}
JAXLIKE = {"jax", "jaxlib", "flax", "optax", "orbax", "qwix", "tokamax"}
DOTTED = re.compile(r"argosy(\.\w+)+(:\w+)?")


class Import(NamedTuple):
    """A module that a file imports; `late` where only a call does."""

    module: str
    line: int
    late: bool


class Reader(ast.NodeVisitor):
    """Collects the imports of one file."""

    def __init__(self, package: str, public: dict[str, str]):
        self.package, self.public = package.split("."), public
        self.found: list[Import] = []
        self.depth = 0

    def add(self, module: str, node: ast.AST, late: bool = False) -> None:
        head, _, name = module.partition(".")
        module = self.public.get(name, module) if head == "argosy" else module
        self.found.append(Import(module, getattr(node, "lineno", 0), late or self.depth > 0))

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            return self.generic_visit(node)
        for child in node.orelse:
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        above = self.package[: len(self.package) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            self.add(f"{base}.{alias.name}", node)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.JoinedStr | ast.BinOp):
                self.add("argosy.cli.computed", node)  # as if from the last room: what cannot be read is not allowed
            elif isinstance(name, ast.Constant) and not DOTTED.fullmatch(str(name.value)):
                self.add(str(name.value), node)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and DOTTED.fullmatch(node.value):
            self.add(node.value.partition(":")[0], node, late=True)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef


def imports(source: str, package: str, public: dict[str, str]) -> list[Import]:
    reader = Reader(package, public)
    reader.visit(ast.parse(source))
    return reader.found


def is_within(module: str, library: str) -> bool:
    return module == library or module.startswith(f"{library}.")


def faults(room: str, imports: list[Import]) -> Iterator[str]:
    """What a file of this room may not import."""
    for module, line, late in imports:
        names = module.split(".")
        if names[0] == "argosy" and len(names) > 1 and names[1] in ROOMS and ROOMS.index(names[1]) > ROOMS.index(room):
            yield f"{line}: {room} imports {module}, a later room"
        for library, rooms in DOORS.items():
            if is_within(module, library) and room not in rooms:
                yield f"{line}: {room} imports {module}: {library} enters by {', '.join(sorted(rooms))}"
        if names[0] in JAXLIKE and (room in WITHOUT_JAX or (room in WITHOUT_JAX_AT_TOP and not late)):
            yield f"{line}: {room} imports {module}: no jax {'here' if room in WITHOUT_JAX else 'at the top of a module'}"


def public_names() -> dict[str, str]:
    """argosy's lazy names, and where each comes from: read, not imported."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    return next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NAMES"
    )


# ---------------------------------------------------------------- the sources


def test_rooms_import_upwards_and_libraries_have_doors():
    problems, seen = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        if len(parts) == 2:
            continue  # argosy/__init__.py and __main__.py stand above all rooms
        package = ".".join(parts[:-1])
        names = imports(path.read_text(encoding="utf-8"), package, public_names())
        seen += len(names)
        problems += [f"{path.relative_to(ROOT)}:{fault}" for fault in faults(parts[1], names)]
    assert seen > 300
    assert not problems, "\n".join(problems)


def imported_files(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of the package that a file imports, also inside functions; names in text, as registries have them, are none."""
    reader = Reader(".".join(path.relative_to(ROOT).parts[:-1]), public_names())
    reader.visit_Constant = lambda node: None  # type: ignore[method-assign]
    reader.visit(ast.parse(path.read_text(encoding="utf-8")))
    out = set()
    for module, _, _ in reader.found:
        while module and module not in modules:
            module = module.rpartition(".")[0]
        out.add(module)
    return out - {""}


def test_no_files_import_each_other_in_a_circle():
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {name: imported_files(path, modules) - {name, "argosy"} for name, path in modules.items() if name != "argosy"}
    assert sum(map(len, graph.values())) > 2000
    TopologicalSorter(graph).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(graph | {"argosy.core.errors": {"argosy.cli"}}).prepare()


def test_every_folder_is_a_room():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - {"configs"} <= set(ROOMS)


@pytest.mark.parametrize(
    "room, source",
    [
        ("core", "import argosy.data"),
        ("data", "from argosy import train"),
        ("data", "from argosy import fit"),
        ("data", "from ..train import loop"),
        ("data", "from .. import infer"),
        ("ops", "def f():\n    from argosy.models import llama"),
        ("ops", "import importlib\nimportlib.import_module('argosy.models.llama')"),
        ("ops", "__import__('argosy.models')"),
        ("ops", "NAMES.add('x', 'argosy.models.llama:Llama')"),
        ("ops", "import_module(f'argosy.{room}')"),
        ("models", "import optax as o"),
        ("train", "def f():\n    import orbax.checkpoint as ocp"),
        ("models", "from jax.experimental import pallas as pl"),
        ("jobs", "import_module('yaml')"),
        ("checkpoint", "import safetensors.numpy"),
        ("serve", "def f():\n    from llguidance import LLMatcher"),
        ("core", "def f():\n    import jax"),
        ("cli", "import jax.numpy as jnp"),
        ("data", "try:\n    import jax\nexcept ImportError:\n    pass"),
        ("core", "if TYPE_CHECKING:\n    pass\nelse:\n    import jax"),
    ],
)
def test_a_wrong_import_is_found_however_it_is_spelt(room: str, source: str):
    assert list(faults(room, imports(source, f"argosy.{room}", {"fit": "argosy.jobs.api"})))


@pytest.mark.parametrize(
    "room, source",
    [
        ("train", "import optax\nfrom argosy.models import llama\nfrom . import loop"),
        ("data", "def f():\n    import jax"),
        ("core", "if TYPE_CHECKING:\n    import jax\n    from argosy.train import loop"),
        ("core", '"""argosy.train is a room."""'),
    ],
)
def test_a_right_import_passes(room: str, source: str):
    assert not list(faults(room, imports(source, f"argosy.{room}", {})))


def test_public_names_are_no_rooms_and_exist():
    names = public_names()
    assert names
    assert not set(names) & set(ROOMS)
    for name, module in names.items():
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        assert name in {getattr(node, "name", None) for node in tree.body}, f"{module} defines no {name}"


# ---------------------------------------------------------------- what runs


LIGHT = """
import contextlib, io, sys

HEAVY = "jax jaxlib flax optax orbax grain numpy ml_dtypes jaxtyping tokenizers rich pydantic typer".split()

def heavy(*allowed):
    return [name for name in HEAVY if name in sys.modules and name not in allowed]

import argosy; dir(argosy)
assert not heavy(), heavy()
from argosy.cli import main

def run(*words):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        return main(list(words)), err.getvalue()

assert run("--help")[0] == 0 and not heavy(), heavy()
for code, words in [
    (0, ["train", "--help"]),
    (0, ["sweep", "--help"]),
    (0, ["config", "show", "tiny"]),
    (0, ["config", "explain", "optimizer.learning_rate"]),
    (0, ["config", "diff", "tiny", "quickstart"]),
    (0, ["config", "schema"]),
    (0, ["completion", "words", "--", "train", "tiny", "optimizer."]),
    (0, ["models"]),
    (2, ["train", "tiny", "lr=3"]),
    (2, ["train", "tiny", "model=llama"]),
    (2, ["train", "tiny", "model=smal", "data.source=gone.txt", "data.tokenizer=gone", "init.weights=gone", "mesh.data=3"]),
    (2, ["train", "tiny", "data.source=gone.txt", "data.tokenizer=gone", "mesh.data=3"]),
    (2, ["train", "tiny", "optimizer.learning_rat=3", "model.widht=3"]),
    (2, ["train", "tiny", "--steps", "3"]),
    (2, ["generate", "x", "y", "max_tokns=3"]),
    (2, ["eval", "x", "tsks=arc_easy"]),
    (2, ["eval", ".", "tasks=arc_esy"]),
    (2, ["eval", ".", "tasks=arc_easy", "data=gone"]),
]:
    assert run(*words)[0] == code, (words, run(*words))
    assert not heavy("pydantic", "typer"), (words, heavy("pydantic", "typer"))
print("light")
"""


def test_settings_help_and_mistakes_import_nothing_heavy():
    """What they cost is what they import: 0.3 s of CPU, where jax alone takes 1."""
    done = subprocess.run([sys.executable, "-P", "-c", LIGHT], capture_output=True, text=True)
    assert done.stdout == "light\n", done.stderr


# ---------------------------------------------------------------- the files


def files() -> list[Path]:
    """Every file of the repository; every file here, where it is no repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        return [p for p in ROOT.rglob("*") if p.is_file() and not any(part.startswith(".") for part in p.parts)]
    return [path for line in listed.stdout.splitlines() if (path := ROOT / line).is_file()]


# Put together from pieces, so that this file does not find itself.
MACHINE = re.compile("|".join([r"(?<![\w.])/" + name + r"/[\w.]" for name in ("root", "home", "tmp", "work", "Users")]))


def test_no_file_tells_where_it_was_written():
    lines = []
    for path in files():
        if path.suffix in (".npz", ".safetensors", ".png", ".gguf"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if MACHINE.search(line):
                lines.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("text", ["open('/" + "tmp/x')", "cd /" + "home/me", '"/' + 'root/.cache"'])
def test_a_machine_path_is_found(text: str):
    assert MACHINE.search(text)


# Prepositions, participles and pronouns are no names of classes, functions, fields or parameters.
BANNED = frozenset(("held", "told", "found", "made", "over", "around", "beside", "one", "own", "what", "how", "once", "asked", "given"))
# A function of these names has a file for each thing that it is a part of: a family's block, an objective's loss.
INTERFACES = frozenset(["block", "loss"])
# How many are left: bounds that only fall.
MOST_SHARED_CLASSES, MOST_SHARED_FUNCTIONS, MOST_BANNED = 0, 37, 0


def public_definitions() -> tuple[dict[str, set[str]], dict[str, set[str]], list[str]]:
    """The files that define each public class and function, and the places of banned names."""
    classes: dict[str, set[str]] = {}
    functions: dict[str, set[str]] = {}
    banned: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        where = str(path.relative_to(ROOT))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
                continue
            (classes if isinstance(node, ast.ClassDef) else functions).setdefault(node.name, set()).add(where)
            names = [node.name.lower()]
            for inner in ast.walk(node):
                if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name) and isinstance(node, ast.ClassDef):
                    names += [inner.target.id] if inner in node.body else []
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and not inner.name.startswith("_"):
                    names += [inner.name] if inner is not node else []
                    names += [argument.arg for argument in (*inner.args.args, *inner.args.kwonlyargs)]
            banned += [f"{where}:{node.lineno}: {node.name}: {name}" for name in names if name in BANNED]
    return classes, functions, banned


def test_public_names_are_defined_once_and_are_nouns():
    classes, functions, banned = public_definitions()
    shared = {name: files for name, files in classes.items() if len(files) > 1}
    assert len(shared) <= MOST_SHARED_CLASSES, shared
    assert sum(len(files) > 1 for name, files in functions.items() if name not in INTERFACES) <= MOST_SHARED_FUNCTIONS
    assert len(banned) <= MOST_BANNED, "\n".join(banned)


def test_no_two_test_files_share_a_name():
    """Pytest imports them by it: of two that share one, it refuses the second where it collects both."""
    seen: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name != "conftest.py":
            seen.setdefault(path.name, []).append(str(path.relative_to(ROOT)))
    assert not [paths for paths in seen.values() if len(paths) > 1]


def test_locks_name_no_host():
    names = {path.name for path in files()}
    assert not names & {"uv.lock", "pylock.toml", "poetry.lock"}, "these lock files hold the registry's host name"
    for lock in (ROOT / "requirements").glob("*.lock"):
        text = lock.read_text(encoding="utf-8")
        assert "://" not in text, lock.name
        assert "--hash=sha256:" in text, lock.name


def test_every_known_wrong_edit_has_its_place_in_the_source():
    from known_wrong import EDITS, place_of

    sources = {edit.file: (ROOT / edit.file).read_text(encoding="utf-8") for edit in EDITS}
    lost = [edit.what for edit in EDITS if place_of(sources[edit.file], edit.old, edit.new) is None]
    assert not lost
    same = [edit.what for edit in EDITS if edit.old == edit.new]
    assert not same
    tests_named = {test.partition("[")[0].partition("::")[::2] for edit in EDITS for test in edit.tests}
    assert not [file for file, _ in tests_named if not (ROOT / file).is_file()]
    assert not [n for file, n in tests_named if n and f"def {n}(" not in (ROOT / file).read_text(encoding="utf-8")]


def test_a_renamed_edit_finds_its_place():
    from known_wrong import place_of

    source = "def f(pages, size):\n    first = pages[size:]\n    return first[0]\n\ndef g(a):\n    return a[1:]\n"
    place = place_of(source, "    start = blocks[page:]\n", "    start = blocks[page + 1 :]\n")
    assert place is not None
    start, end, new = place
    assert source[start:end] == "    first = pages[size:]\n"
    assert new == "    first = pages[size + 1 :]\n"
    assert place_of(source, "start = blocks(page)", "x") is None
    assert place_of(source, "return value", "x") is None


def test_files_that_the_docs_name_exist():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md")]
    files_named = {
        (page.name, name)
        for page in pages
        for name in re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.py)`", page.read_text(encoding="utf-8"))
    }
    assert len(files_named) > 40
    assert not [reference for reference in files_named if not any((root / reference[1]).exists() for root in (ROOT, ROOT / "argosy"))]


@pytest.mark.parametrize("folder, pattern", [("bench", "*.py"), ("tests", "campaign_*.py")])
def test_every_command_is_in_the_index_of_its_folder(folder: str, pattern: str):
    index = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\((\w+\.py)\)", index))
    there = {path.name for path in (ROOT / folder).glob(pattern)}
    assert there <= listed
    assert all((ROOT / folder / name).is_file() for name in listed)


def test_shared_data_is_read_within_tests():
    """At the top of a file a missing one would be an error of the whole run, and no test that is skipped by name."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    for path in (ROOT / "tests").rglob("*.py"):
        top: list[ast.AST] = []
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            top += node.decorator_list if isinstance(node, functions) else [] if isinstance(node, ast.ClassDef) else [node]
        calls = [inner.func for node in top for inner in ast.walk(node) if isinstance(inner, ast.Call)]
        called = {call.id for call in calls if isinstance(call, ast.Name)}
        assert not called & {"shared", "stories_model", "stories_text"}, path.name


def test_slow_cases_exist():
    names = (ROOT / "tests" / "slow_cases.txt").read_text(encoding="utf-8").splitlines()
    assert names == sorted(set(names))
    for name in {name.partition("[")[0] for name in names}:
        file, *_, function = name.split("::")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), name


def test_the_readme_lists_every_room_in_their_order():
    tree = (ROOT / "README.md").read_text(encoding="utf-8").partition("```\nargosy/\n")[2].partition("\ntools/")[0]
    assert re.findall(r"^  (\w+)/", tree, re.MULTILINE) == [*ROOMS, "configs"]


def test_the_first_sentence_of_the_readme_is_short():
    words = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")[1].split(". ")[0].split()
    assert len(words) < 25


def test_every_fault_in_the_guide_names_tests_that_exist():
    from campaign_faults import GUIDE, homes, tests_of_table

    names = tests_of_table()
    assert len(names) > 25
    assert [name for name in names if len(homes(name)) != 1] == []
    table = GUIDE.read_text(encoding="utf-8").partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert [row for row in rows if not re.search(r"`(test|campaign)_\w+", row.rpartition(" | ")[2])] == []
    assert [name for name in re.findall(r"`(campaign_\w+\.py)", table) if not (ROOT / "tests" / name).is_file()] == []
