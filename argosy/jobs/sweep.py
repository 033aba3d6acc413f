"""`argosy sweep`: a run for every combination of some settings.

    optimizer.learning_rate=1e-3,3e-3 model.layers=2,4      four runs, each in a directory named after its own values

The runs follow each other in one process. Finished runs are skipped and unfinished ones resumed, so the same command continues a
sweep that was stopped. A run that fails, because its loss is not finite, does not stop the others.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from argosy.core.errors import ArgosyError, BadInput, UserError
from argosy.run.settings.recipe_files import run_folder
from argosy.run.start.preflight import checked_settings

OPEN, CLOSE, QUOTES = "[{", "]}", "\"'"


@dataclass(frozen=True)
class Combination:
    """One run of a sweep.

    changes: the words that distinguish the run from the others.
    words: all words of the run.
    dir: the directory of the run.
    """

    changes: tuple[str, ...]
    words: tuple[str, ...]
    dir: str


def combinations(recipe: str, words: Sequence[str]) -> list[Combination]:
    """Returns the runs that the words describe, without training.

    Raises:
        BadInput: no word lists several values, or two runs would be the same.
        UserError: the settings of a combination are wrong.
    """
    folder = next((w.partition("=")[2] for w in words if w.startswith("dir=")), f"{run_folder(recipe)}-sweep")
    words = [word for word in words if not word.startswith("dir=")]
    values = {word: [f"{key}={v}" for v in combinations_text(text)] for word in words for key, _, text in [word.partition("=")]}
    swept = [word for word in words if len(values[word]) > 1]
    if not swept:
        raise BadInput("no setting has several values", hint="list them: optimizer.learning_rate=1e-3,3e-3")
    grid = []
    for changes in itertools.product(*(values[word] for word in swept)):
        name = ",".join(word.rpartition(".")[2] if _is_unique(word, swept) else word for word in changes).replace("/", "_")
        place = str(Path(folder) / name)
        fixed = [word for word in words if word not in swept]
        grid.append(Combination(changes, (*fixed, *changes, f"dir={place}"), place))
    if len({c.dir for c in grid}) < len(grid):
        raise BadInput("two runs of the sweep have the same settings", hint="name each value once")
    for combination in grid:
        checked_settings(recipe, combination.words)
    return grid


def sweep(runs: Sequence[Combination], train: Callable[[Combination], int], say: Callable[[str], None]) -> int:
    """Runs each combination.

    Args:
        train: trains one combination. Returns 0, or the exit code of the signal that stopped the run.

    Returns:
        0, or 1 if a run failed. If a signal stopped the sweep, its exit code; the remaining runs are then left out.
    """
    worst = 0
    for number, combination in enumerate(runs, 1):
        say(f"\nrun {number} of {len(runs)}: {' '.join(combination.changes)}")
        try:
            code = train(combination)
        except UserError:
            raise
        except ArgosyError as error:
            say(str(error))
            worst = 1
            continue
        if code:
            return code
    return worst


def combinations_text(text: str) -> list[str]:
    """Splits a text at its commas, except those inside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        quote = "" if letter == quote else quote or (letter if letter in QUOTES else "")
        depth += (letter in OPEN) - (letter in CLOSE) if not quote else 0
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _is_unique(word: str, swept: Sequence[str]) -> bool:
    """Whether the last part of a swept key identifies it among the others."""
    leaves = [w.partition("=")[0].rpartition(".")[2] for w in swept]
    return leaves.count(word.partition("=")[0].rpartition(".")[2]) == 1
