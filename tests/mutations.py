"""Random small wrong edits: one operator, constant or condition changed in a function. The tests that import its module must turn red.

    ./run python tests/mutations.py count=20 seed=7
    ./run python tests/mutations.py count=10 room=rl        of one room
    ./run python tests/mutations.py --tree seconds=400      the seed is the hash of the tree; no edit begins after so long

Edits are made in a copy of the tree, one at a time. A module is sampled by the number of its edits; those that no test file imports
are counted and left out. Of the test files that import it, or a module that does, those run that name the function or its class, then
those of its name and room; if these pass, the next ones. Left out are edits that change little that can be seen: texts of messages,
numbers above nine, which are mostly sizes and limits, families' `examples`, whose sizes are chosen for tests, and `strict=`. Prints
each edit that survived; exit code 1 where fewer than `least` (0.8) of the edits are caught. What survives is read by a person, and
becomes a test or nothing.

Differs from mutmut and cosmic-ray: they run the whole suite, or the tests that cover a line, for each edit; one run of this suite takes
minutes and compiles programs.
"""

import ast
import copy
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from known_wrong import ROOT, copy_of_the_tree, environment

SECONDS = 180  # of the tests of one edit
FILES, MORE_FILES = 5, 15  # test files of one edit: the nearest, and those that run if they pass
LARGEST = 9  # number that is edited

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
# Of what is not counted: seconds and bytes are hardly ever equal to a bound.
NEGATIONS = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


class Mutation(NamedTuple):
    """One change of the tree of a file.

    file: the file, from the root.
    line: where the change is.
    before, after: the changed expression, as text.
    source: the whole file with the change.
    """

    file: str
    line: int
    before: str
    after: str
    source: str


def mutate(node: ast.AST) -> ast.AST | None:
    """The node with one small mistake; None where it has none to make."""
    new: ast.AST = copy.copy(node)
    if isinstance(new, ast.Compare) and len(new.ops) == 1 and type(new.ops[0]) in COMPARISONS:
        kind = type(new.ops[0])
        new.ops = [(COMPARISONS[kind] if _counts(new) else NEGATIONS.get(kind, COMPARISONS[kind]))()]
    elif isinstance(new, ast.BinOp) and type(new.op) in OPERATORS and not _is_text(new):
        new.op = OPERATORS[type(new.op)]()
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not | ast.USub) and not isinstance(new.operand, ast.Constant):
        new = new.operand
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        new.value = not new.value
    elif isinstance(new, ast.Constant) and isinstance(new.value, int) and new.value <= LARGEST:
        new.value += 1
    elif isinstance(new, ast.IfExp) and not (_is_message(new.body) or _is_message(new.orelse)):
        new.body, new.orelse = new.orelse, new.body
    else:
        return None
    return new


def _counts(node: ast.Compare) -> bool:
    """Whether it compares a number of things: with a whole number from 1 on, or a length."""
    return any(
        (isinstance(side, ast.Constant) and type(side.value) is int and side.value > 0)
        or (isinstance(side, ast.Call) and isinstance(side.func, ast.Name) and side.func.id == "len")
        for side in (node.left, *node.comparators)
    )


def _is_message(node: ast.AST) -> bool:
    """Whether it is a text of several words."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value)


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(side, ast.JoinedStr | ast.Constant) and not isinstance(getattr(side, "value", None), int | float)
               for side in (node.left, node.right))  # fmt: skip


def places(tree: ast.Module) -> list[tuple[ast.AST, tuple[str, ...]]]:
    """The nodes of functions that may be changed, no annotations, defaults, error messages or texts; and the names of the functions and
    classes around each, from the outside in."""
    nodes: list[tuple[ast.AST, tuple[str, ...]]] = []

    def inside(node: ast.AST, names: tuple[str, ...], in_function: bool) -> None:
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.AnnAssign):
            return
        if (isinstance(node, ast.FunctionDef) and node.name == "examples") or (isinstance(node, ast.keyword) and node.arg == "strict"):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            is_function = in_function or not isinstance(node, ast.ClassDef)
            for statement in node.body:
                inside(statement, (*names, node.name), is_function)
            return
        if in_function and mutate(node) is not None:
            nodes.append((node, names))
        for child in ast.iter_child_nodes(node):
            inside(child, names, in_function)

    inside(tree, (), False)
    return nodes


def imports_of(path: Path) -> set[str]:
    """The modules of the package that a file imports, and the names it imports from them as if they were modules."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("argosy"):
            modules |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def tests_of() -> dict[str, dict[str, int]]:
    """The test files of each module that one imports: 0 for those that do, 1 for those that import a module that imports it."""
    direct: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for module in imports_of(path):
            direct.setdefault(module, set()).add(str(path.relative_to(ROOT)))
    distances = {module: dict.fromkeys(files, 0) for module, files in direct.items()}
    for path in sorted((ROOT / "argosy").rglob("*.py")):
        for module in imports_of(path) & set(distances):
            for file in direct.get(module_of(path), ()):
                distances[module].setdefault(file, 1)
    return distances


def nearest(files: dict[str, int], module: str, names: tuple[str, ...]) -> list[str]:
    """The files most likely to test a function: those with the most of its names, of its module's name, that import it, of its room."""
    stem = module.rpartition(".")[2]
    room = module.split(".")[1] if "." in module else ""

    def order(file: str) -> tuple[int, bool, int, bool, int]:
        text = (ROOT / file).read_text(encoding="utf-8")
        mentions = sum(re.search(rf"\b{name}\b", text) is not None for name in names)
        return -mentions, stem not in Path(file).stem, files[file], Path(file).parts[1] != room, len(text)

    return sorted(files, key=order)[: FILES + MORE_FILES]


def sample(count: int, seed: int, room: str = "") -> tuple[list[tuple[Mutation, list[str]]], float]:
    """Some mutations with the test files that must catch them, and the share of all edits in modules that no test imports."""
    tests, random_ = tests_of(), random.Random(seed)
    spots: list[tuple[Path, int]] = []
    without = 0
    for path in sorted((ROOT / "argosy" / room).rglob("*.py")):
        module = module_of(path)
        number = len(places(ast.parse(path.read_text(encoding="utf-8"))))
        if module in tests:
            spots += [(path, i) for i in range(number)]
        else:
            without += number
    out = []
    for path, i in random_.sample(spots, min(count, len(spots))):
        module = module_of(path)
        change, names = mutation(path, i)
        out.append((change, nearest(tests[module], module, names)))
    return out, without / max(1, without + len(spots))


def mutation(path: Path, number: int) -> tuple[Mutation, tuple[str, ...]]:
    """The file with its change of this number, and the names of the functions and classes around it."""
    text = path.read_text(encoding="utf-8")
    node, names = places(ast.parse(text))[number]
    new = mutate(node)
    assert new is not None
    lines = text.splitlines(keepends=True)
    first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
    head = lines[first].encode()[: node.col_offset].decode()  # type: ignore[attr-defined]
    tail = lines[last].encode()[node.end_col_offset :].decode()  # type: ignore[attr-defined]
    after = f"({ast.unparse(new)})"
    source = "".join(lines[:first]) + head + after + tail + "".join(lines[last + 1 :])
    return Mutation(str(path.relative_to(ROOT)), first + 1, ast.unparse(node), after, source), names


def is_caught_by(tree: Path, change: Mutation, files: list[str]) -> bool:
    """Whether a test fails with the change, or a test of the nearest files hangs."""
    before = (tree / change.file).read_text(encoding="utf-8")
    (tree / change.file).write_text(change.source, encoding="utf-8")
    try:
        parts = ((files[:FILES], True), (files[FILES:], False))
        return any(_fails(tree, part, hangs) for part, hangs in parts if part)
    finally:
        (tree / change.file).write_text(before, encoding="utf-8")


def _fails(tree: Path, files: list[str], hangs: bool) -> bool:
    """Whether a test of these files fails; `hangs` if they take too long."""
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not tpu and not slow", "-p", "no:cacheprovider", *files]
    try:
        seconds = SECONDS if hangs else SECONDS // 2
        done = subprocess.run(words, cwd=tree, env=environment(tree), capture_output=True, timeout=seconds)
        return done.returncode not in (0, 5)
    except subprocess.TimeoutExpired:
        return hangs


def main(words: list[str]) -> int:
    options = dict(word.split("=", 1) for word in words if "=" in word)
    seed = int(options.get("seed", 0))
    if "--tree" in words and "seed" not in options:
        tree_hash = subprocess.run(["git", "rev-parse", "HEAD^{tree}"], cwd=ROOT, capture_output=True, text=True).stdout
        seed = int(tree_hash.strip() or "0", 16)
    mutations, without = sample(int(options.get("count", 20)), seed, options.get("room", ""))
    least, caught_count, tried, begun = float(options.get("least", 0.8)), 0, 0, time.monotonic()
    print(f"{without:.0%} of all edits are in modules that no test file imports", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_the_tree(Path(folder))
        if "--tree" not in words:
            files = sorted({file for _, test_files in mutations for file in test_files})
            whole = [sys.executable, "-m", "pytest", "-q", "-m", "not tpu and not slow", "-p", "no:cacheprovider", *files]
            done = subprocess.run(whole, cwd=tree, env=environment(tree), capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"error: the tests fail without any edit:\n{done.stdout[-2000:]}")
        for change, test_files in mutations:
            begin = time.monotonic()
            if begin - begun > float(options.get("seconds", "inf")):
                break
            is_caught = is_caught_by(tree, change, test_files)
            caught_count, tried = caught_count + is_caught, tried + 1
            status = "caught" if is_caught else "SURVIVED"
            description = f"{change.file}:{change.line}: {change.before[:60]} -> {change.after[:60]}"
            print(f"{status:9}{time.monotonic() - begin:5.0f} s  {description}", flush=True)
    print(f"{caught_count} of {tried} caught, {caught_count / max(1, tried):.0%}; at least {least:.0%}")
    return 0 if caught_count >= least * tried else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
