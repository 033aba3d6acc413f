"""Shell completion: the words that may follow on a command line. Keys and values come from the settings classes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from argosy.core.errors import ArgosyError
from argosy.core.settings.schema import Choice, Settings, members, shape_of
from argosy.run.settings.compose import compose
from argosy.run.settings.recipe_files import presets, recipes

OF_A_RECIPE = ("train", "sweep")


def complete(words: Sequence[str], verbs: Mapping[str, type[Settings] | None]) -> list[str]:
    """Returns the completions of the last word, which may be empty. There are none where a file name is expected.

    Args:
        words: the words after `argosy`.
        verbs: each verb, with the settings class of its `key=value` words if it has one.
    """
    *before, last = words or [""]
    if not before:
        return _beginning(last, verbs)
    verb, *rest = before
    if verb in OF_A_RECIPE or verb == "config":
        rest = [word for word in rest if word not in ("show", "explain", "diff")]
        recipe = next((word for word in rest if "=" not in word), None)
        if recipe is None and "=" not in last:
            subcommands = (
                ["show", "explain", "diff", "new", "reference", "schema"] if verb == "config" and not before[1:] else []
            )
            files = [str(path) for path in sorted(Path.cwd().glob("*.yml"))] if last else []
            return _beginning(last, [*subcommands, *recipes(), *(Path(f).name for f in files)])
        return _settings_of_a_run(recipe or "tiny", last)
    if verb == "models":
        return _beginning(last, ["show"] if len(before) == 1 else presets())
    if verb == "bench" and len(before) == 1:
        return _beginning(last, ["serve"])
    if verb == "eval" and last.startswith("tasks="):
        return _tasks(last)
    schema = verbs.get(verb)
    return _of(schema, last) if schema else []


def _tasks(last: str) -> list[str]:
    """Returns the tasks of `argosy eval` as completions, after those that are already named."""
    from argosy.evals.tasks import TASKS

    before, _, _ = last.rpartition("," if "," in last else "=")
    start = last[: len(before) + 1]
    return _beginning(last, [f"{start}{name}" for name in TASKS if name not in start.removeprefix("tasks=").split(",")])


def _settings_of_a_run(recipe: str, last: str) -> list[str]:
    from argosy.run.settings.run import Run

    if last.startswith("model="):
        return _beginning(last, [f"model={name}" for name in presets()])
    try:
        reading = compose(Run, recipe)
    except ArgosyError:
        reading = compose(Run, "tiny")
    key, equals, _ = last.partition("=")
    if not equals:
        groups = {k.rpartition(".")[0] for k in reading.names.known}
        keys = [k for k in reading.names.known if k not in groups or k in reading.choices]
        return _beginning(last, [f"{k}=" for k in keys])
    if key in reading.choices:
        return _beginning(last, [f"{key}={name}" for name in reading.choices[key][0].registry])
    return _beginning(last, [f"{key}={v}" for v in _values(reading.value, key.split("."))])


def _of(schema: type[Settings], last: str) -> list[str]:
    key, equals, _ = last.partition("=")
    if not equals:
        return _beginning(last, [f"{name}=" for name in schema.model_fields])
    info = schema.model_fields.get(key)
    return _beginning(last, [f"{key}={v}" for v in _options(info.annotation)] if info else [])


def _values(tree: Any, path: list[str]) -> list[str]:
    for name in path[:-1]:
        tree = getattr(tree, name, None)
    info = type(tree).model_fields.get(path[-1]) if isinstance(tree, Settings) else None
    if info is None:
        return []
    kind = shape_of(info)
    return list(kind.of.registry) if isinstance(kind.of, Choice) else _options(info.annotation)


def _options(hint: Any) -> list[str]:
    options: list[str] = []
    for member in members(hint):
        if get_origin(member) is Literal:
            options += map(str, get_args(member))
        elif member is bool:
            options += ["true", "false"]
        elif member is type(None):
            options.append("none")
    return options


def _beginning(start: str, names: Any) -> list[str]:
    return [name for name in names if name.startswith(start)]


SCRIPTS = {
    "bash": r"""# argosy completion for bash: eval "$(argosy completion bash)"
_argosy() {
    local line=${COMP_LINE:0:COMP_POINT} words current IFS=$' \t\n'
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    current=${words[${#words[@]}-1]}
    IFS=$'\n'
    COMPREPLY=($("${words[0]}" completion words -- "${words[@]:1}" 2>/dev/null))
    # bash takes = for the end of a word, and replaces only what stands behind it
    if [[ $current == *=* && $COMP_WORDBREAKS == *=* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${current%"${current##*=}"}"}")
    fi
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _argosy argosy ./run
""",
    "zsh": r"""#compdef argosy
# argosy completion for zsh: eval "$(argosy completion zsh)"
_argosy() {
    local -a found
    found=("${(@f)$("$words[1]" completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -z $found[1] ]]; then _files
    elif [[ $found[1] == *= ]]; then compadd -S '' -- $found
    else compadd -- $found
    fi
}
compdef _argosy argosy
""",
    "fish": r"""# argosy completion for fish: argosy completion fish | source
function _argosy
    set -l words (commandline -opc)
    $words[1] completion words -- $words[2..-1] (commandline -ct) 2>/dev/null
end
complete -c argosy -a '(_argosy)'
""",
}
