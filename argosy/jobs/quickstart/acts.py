"""`argosy quickstart`: from raw text to a model that generates, on this machine and without a download.

Each act says what it will do, does it, and prints the result; `Story` collects the results.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from argosy.checkpoint.run_directory import STORY
from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.process.signals import before_leaving
from argosy.core.storage import Store
from argosy.jobs.quickstart.prediction import PredictingView
from argosy.jobs.train import View
from argosy.jobs.train import run as train_run
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run

RECIPE = "quickstart"
VOCABULARY = 1024
# The part of the corpus that the vocabulary is trained on, which takes a second.
TOKENIZER_BYTES = 1_000_000
PROMPT = "def "


@dataclass
class Story:
    """What happened, act by act, and the seconds each act took."""

    dir: str
    seconds: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    exit_code: int = 0


class Stage:
    """The output of the acts: `speak` prints text for the user, `view` shows training, `stream` prints the model's own text."""

    def __init__(self, speak: Callable[[str], None], view: View, stream: Callable[[str], None]):
        self.speak, self.view, self.stream = speak, view, stream
        self.act_number = 0

    @contextmanager
    def act(self, story: Story, name: str, title: str) -> Iterator[None]:
        self.act_number += 1
        self.speak(f"\n{self.act_number}. {title}")
        start = time.perf_counter()
        yield
        story.seconds[name] = round(time.perf_counter() - start, 2)
        self.speak(f"   done in {story.seconds[name]:.1f} s")


def quickstart(directory: str | None, stage: Stage) -> Story:
    """Runs all acts in a new directory. Ctrl-C at any moment keeps what is done, and prints how to continue.

    Raises:
        BadInput: the directory exists.
    """
    path = fresh(directory)
    story = Story(str(path))
    with before_leaving(lambda: stop_story(story, 130, stage)):
        return acts(path, story, stage)


def acts(path: Path, story: Story, stage: Stage) -> Story:
    """All acts, one after the other."""
    with stage.act(
        story, "vocabulary", f"A tokenizer of {VOCABULARY:,} tokens, trained on the source of Python's standard library"
    ):
        story.facts |= make_vocabulary(path, stage.speak)
    words = [f"data.tokenizer={path / 'tokenizer'}"]
    reading = compose(Run, RECIPE, [*words, f"dir={path}"])
    with stage.act(story, "training", f"Pre-training for {plural(reading.value.steps, 'step')}"):
        say_size(reading.value, stage.speak)
        view: Any = PredictingView(stage.view, reading.value)
        outcome = train_run(reading, str(path), view, f"argosy quickstart dir={path}")
        if outcome.exit_code:
            return stop_story(story, outcome.exit_code, stage)
        duration = outcome.seconds.get("step", 0.0) + outcome.seconds.get("data", 0.0)
        story.facts |= {"steps": outcome.step, "loss": outcome.last["loss"], "step_s": round(duration, 1)}
        if view.seconds is not None:
            story.facts["predicted_s"] = round(view.seconds, 1)
            stage.speak(f"   predicted {view.seconds:.0f} s of steps, took {duration:.0f} s")
    with stage.act(story, "proof", "A run killed with SIGKILL half-way, and resumed"):
        story.facts["proof"] = proof_of_resume(path, words, stage.speak)
    with stage.act(story, "talk", "The model continues a prompt"):
        story.facts["text"] = talk(path, stage)
    with stage.act(story, "export", "The model exported as a Hugging Face folder, and loaded back"):
        story.facts["export"] = export(path, stage.speak)
    with stage.act(story, "report", "The report"):
        from argosy.jobs.history.report import report as write_report

        Store(path).write_text(STORY, json.dumps(story.facts))
        report = write_report(path)
        story.facts["report"] = str(report)
        stage.speak(f"   {report}")
    stage.speak(
        f"\nAll of it is in {path}. What to do next:\n" + "\n".join(f"   {line}" for line in next_commands(path))
    )
    return story


def fresh(directory: str | None) -> Path:
    """The requested directory, which must not exist; by default the next `runs/quickstart-N`."""
    if directory is not None:
        path = Path(directory)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise BadInput(
                f"{path} exists already", hint="dir=NEW names a new directory; without it one is numbered for you"
            )
        return path
    number = 1
    while Path(f"runs/{RECIPE}-{number}").exists():
        number += 1
    return Path(f"runs/{RECIPE}-{number}")


def make_vocabulary(path: Path, speak: Callable[[str], None]) -> dict[str, Any]:
    """Trains a byte-pair tokenizer into the run's `tokenizer/`."""
    from argosy.data.settings import DataSettings
    from argosy.data.sources import Source
    from argosy.data.sources.find import find_source
    from argosy.data.tokenizers.train import train as train_bpe

    source = find_source(DataSettings(source="stdlib", max_bytes=TOKENIZER_BYTES))
    assert isinstance(source, Source)
    train_bpe((document.text or "" for document in source.documents()), VOCABULARY).save(path / "tokenizer")
    version = ".".join(map(str, sys.version_info[:3]))
    speak(f"   from {TOKENIZER_BYTES / 1e6:.0f} MB of Python {version}'s own source: read as text, never imported")
    return {"python": version, "vocabulary": VOCABULARY}


def say_size(run: Run, speak: Callable[[str], None]) -> None:
    """Reports the FLOPs and the memory of a step."""
    flops, weights = run.data.batch * run.model.training_flops(run.data.sequence), run.model.parameters() * 4
    speak(
        f"   {run.model.parameters():,} parameters, {flops / 1e9:.1f} GFLOP a step, "
        f"{4 * weights / 1e6:.0f} MB of weights, gradients and optimizer"
    )


def proof_of_resume(path: Path, words: list[str], speak: Callable[[str], None]) -> dict[str, Any]:
    from argosy.jobs.quickstart.proof import prove

    folder = path / "proof"
    proof = prove(folder, RECIPE, words, lambda text: speak(f"   {text}"))
    shutil.rmtree(folder)
    verdict = "equal, bit for bit" if proof.holds else "DIFFERENT"
    speak(f"   {proof.steps} losses and all weights: {verdict}")
    return asdict(proof) | {"holds": proof.holds}


def talk(path: Path, stage: Stage) -> str:
    """Streams a completion of the trained model."""
    from argosy.infer.load import load_lm

    stage.speak("   loading the model, compiling the decoder ...")
    lm = load_lm(path)
    pieces = []
    stage.stream("   " + PROMPT)
    for piece in lm.stream(PROMPT, 60, temperature=0.7, top_k=40, seed=1, ignore_eos=True):
        pieces.append(piece)
        stage.stream(piece.replace("\n", "\n   "))
    stage.stream("\n")
    return PROMPT + "".join(pieces)


def export(path: Path, speak: Callable[[str], None]) -> dict[str, Any]:
    """Writes the Hub folder, loads it back, and compares logits."""
    import numpy as np

    from argosy.infer.load import load_lm
    from argosy.jobs.convert import convert

    result = convert(str(path), path / "hub", "hub", None)
    speak("   loading it back, comparing its logits with the run's ...")
    ids = [list(range(3, 67))]
    difference = float(np.abs(load_lm(path).logits(ids) - load_lm(path / "hub").logits(ids)).max())
    size = sum(f.stat().st_size for f in (path / "hub").iterdir())
    speak(
        f"   {path / 'hub'}: {plural(result['tensors'], 'tensor')}, {size / 1e6:.1f} MB; largest difference of a logit: {difference:g}"
    )
    return {"folder": str(path / "hub"), "bytes": size, "largest_difference": difference}


def stop_story(story: Story, exit_code: int, stage: Stage) -> Story:
    """Prints what to type to continue after a signal."""
    stage.view.close()
    story.exit_code = exit_code
    path = Path(story.dir)
    if (path / "tokenizer").exists():
        stage.speak("\nStopped. To continue training:")
        stage.speak(f"   argosy train {RECIPE} data.tokenizer={path / 'tokenizer'} dir={path}")
    else:
        stage.speak("\nStopped before training began. To start again:\n   argosy quickstart")
    return story


def next_commands(path: Path) -> list[str]:
    return [
        f'argosy generate {path} "class " temperature=0.7',
        "argosy train tiny data.source=YOUR.txt dir=runs/mine",
        f"argosy config show {path}",
    ]
