"""The command line: `argosy VERB ...`. Data goes to stdout, words to stderr.

Exit codes: 0; 1 it failed; 2 the user's mistake, found before work began; 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP;
141 when nobody reads the answer of a verb that only answers (where the result is on disk, the work decides). A verb's module is
imported only when the verb runs, so `argosy --help` imports neither jax nor numpy nor even Typer.
"""

import sys
import traceback
from importlib import import_module
from types import ModuleType

from argosy.cli.output import fail, forgive
from argosy.cli.verbs import VERBS
from argosy.core.command import command_name
from argosy.core.errors import ArgosyError, BadInput, FailedElsewhere, UnknownName
from argosy.core.process.streams import silence

# What other trainers call the recipe.
_RECIPE_OPTIONS = ("--config", "-c", "--recipe", "--config-file", "--config_file", "--config-name", "--job.config_file")

# What other programs call a verb, and what to type.
_TRAINS = "`argosy train {0} model=FOLDER data.source=FILE`"
ELSEWHERE = {
    **{name: _TRAINS.format(name) for name in ("sft", "dpo", "kto", "orpo", "reward", "grpo", "ppo", "distill", "pretrain")},
    **dict.fromkeys(("finetune", "fine_tune"), _TRAINS.format("sft")),
    **dict.fromkeys(("lora", "qlora"), "`argosy train sft model=FOLDER data.source=FILE adapter=lora`, or adapter=qlora"),
    **dict.fromkeys(("download", "pull"), "wherever a model is named, hf:OWNER/NAME is downloaded: `argosy models show hf:OWNER/NAME`"),
    **dict.fromkeys(("predict", "infer", "inference", "complete"), "`argosy generate MODEL PROMPT`"),
    **dict.fromkeys(("merge", "merge_lora", "fuse"), "`argosy convert RUN FOLDER` merges adapters into the weights"),
    **dict.fromkeys(("evaluate", "lm_eval"), "`argosy eval MODEL tasks=NAME data=FOLDER`"),
    **dict.fromkeys(("env", "collect_env", "info"), "`argosy doctor`"),
    **dict.fromkeys(("upload", "publish", "push_to_hub"), "`argosy push MODEL hf:OWNER/NAME`"),
    "tokenize": "`argosy data prepare` tokenizes a corpus, `argosy data inspect RECIPE` shows tokens",
}

TRAINING = ("quickstart", "train", "sweep")
COMPUTING = (*TRAINING, "autotune", "export", "generate", "eval", "serve", "predict", "chat", "run-batch")


def main(words: list[str] | None = None) -> int:
    """Runs one command and returns its exit code; `words` default to those of the process."""
    if words is not None:
        return _answer(words)
    from argosy.core.process import allocator, signals

    # Before the thread that waits for signals starts.
    if sys.argv[1:2] and sys.argv[1] in TRAINING:
        allocator.share_one_arena()
    signals.take_over()
    forgive(sys.stdout, sys.stderr)
    code = _answer(sys.argv[1:])
    try:
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)
    signals.end_command(code)
    return code


def _answer(words: list[str]) -> int:
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except FailedElsewhere as error:
        # The process in which it failed says it.
        return error.exit_code
    except ArgosyError as error:
        fail(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    # `| head`: nobody reads the answer.
    except BrokenPipeError:
        silence(sys.stdout)
        return 141
    except Exception:
        traceback.print_exc()
        return 1


def _run(words: list[str]) -> int:
    verb, *rest = words or ["--help"]
    if verb in ("--help", "-h", "help"):
        print(_help())
        return 0
    if verb in ("--version", "-V"):
        print(f"argosy {_version()}")
        return 0
    if verb not in VERBS:
        if verb.replace("-", "_") in ELSEWHERE:
            raise BadInput(f"unknown verb `{verb}`", hint=ELSEWHERE[verb.replace("-", "_")])
        raise UnknownName("verb", verb, VERBS, all_names=f"`{command_name()} help`")
    if verb in COMPUTING and "--help" not in rest:
        from argosy.jobs import machine

        # May replace the process: before anything that takes time is imported.
        machine.prepare()
    return _run_app(import_module(VERBS[verb][0]), verb, rest)


def _run_app(module: ModuleType, verb: str, words: list[str]) -> int:
    """Runs a verb's Typer app; what Typer says about options is reported as every other mistake is."""
    name = f"{command_name()} {verb}"
    try:
        return module.app(args=words, prog_name=name, standalone_mode=False) or 0
    except ArgosyError:
        raise
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # Typer makes an exit with 1 of it
            raise end.__context__ from None
        raise
    except Exception as error:
        # Typer's usage errors share no public class over its versions.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        problem, hint = _lower(message().rstrip(".")), f"`{name} --help` shows what it takes"
        if verb in ("train", "sweep") and problem.lower().startswith("missing argument 'recipe'"):
            from argosy.run.settings.recipe_files import recipes, recipes_named

            raise BadInput(f"{verb} needs a recipe", where=recipes_named(recipes()), hint=f"`{name} tiny`") from None
        if set(getattr(error, "possibilities", None) or ()) <= {"--help"}:  # Typer has no option of a similar name
            typed = _without_dashes(verb, str(getattr(error, "option_name", "") or ""), words)
            if typed:
                problem, hint = f"no such option: {error.option_name}", typed  # pyright: ignore[reportAttributeAccessIssue]
        raise BadInput(problem, hint=hint) from None


def _without_dashes(verb: str, option: str, words: list[str]) -> str | None:
    """The answer to `--steps 100` and `--lr=1e-3`: settings are `key=value` words."""
    at = next((i for i, word in enumerate(words) if word.partition("=")[0] == option), None)
    if at is None:
        return None
    if verb in ("train", "sweep") and option in _RECIPE_OPTIONS:
        recipe = words[at].partition("=")[2] or next(iter(words[at + 1 :]), "RECIPE")
        return f"the recipe is the first word: `{command_name()} {verb} {recipe}`"
    if not option.startswith("--"):
        return None
    if verb == "generate" and option in ("--prompt", "-p"):
        return f"the prompt is the second word: `{command_name()} generate MODEL PROMPT`"
    value = (
        words[at].partition("=")[2] or next((w for w in words[at + 1 :][:1] if not w.startswith("-")), "") or "VALUE"
    )
    key = option.removeprefix("--").replace("-", "_")
    if verb in ("train", "sweep", "config"):
        from argosy.run.settings.compose import key_meant

        key = key_meant(key)
    return f"settings have no dashes: `{key}={value}`"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:{width}}  {about}" for verb, (_, about) in VERBS.items())
    name = command_name()
    return f"""usage: {name} VERB [ARGUMENTS] [key=value ...]

Train, convert and run language models on the JAX stack.

{verbs}

`{name} VERB --help` says more. `{name} --version` prints the version."""


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # 20 ms that only this answer needs

    try:
        return version("argosy")
    except PackageNotFoundError:
        return "of a source tree that is not installed"
