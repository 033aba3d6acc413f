"""docs/guides/from-other-trainers.md: names of others are answered with ours, and every command of ours runs as it stands there."""

import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import shared

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import data_files

from argosy.core.settings import mistakes
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from argosy.run.start.preflight import checked_settings

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "from-other-trainers.md").read_text(encoding="utf-8")
SECTIONS: dict[str, str] = dict(re.findall(r"\n## (\d+\. [^\n]+)\n(.*?)(?=\n## |\Z)", GUIDE, re.DOTALL))
# Names in blocks of theirs that are programs, files or shapes of data there, and no settings.
NOT_SETTINGS = ("vocab_size", "path", "type", "data")
COMMAND = re.compile(r"^    \./run (.+)$", re.MULTILINE)
# What makes a command short enough for a test: another value of a word that it has, or a word that it lacks.
SHORTER = {"steps": "2", "data.batch": "8", "data.sequence": "64", "accumulate": "2", "rollout.tokens": "8", "rollout.completions": "2"}
SMALL = ["model.width=32", "model.layers=1", "model.ffn=32", "model.heads=2", "model.kv_heads=1", "model.head_size=16"]


def theirs(body: str) -> list[str]:
    """The names of settings in the blocks of a section that are typed elsewhere."""
    names = []
    for language, block in re.findall(r"```(\w*)\n(.*?)```", body, re.DOTALL):
        pattern = r"^(\w+):" if language == "yaml" else r"(?:--([\w.]+)|(?<=\s)([\w.]+)=)"
        names += [
            next(filter(None, match)) if isinstance(match, tuple) else match for match in re.findall(pattern, block, re.MULTILINE)
        ]
    return [name for name in names if name not in NOT_SETTINGS]


def test_there_are_ten_with_a_command_each():
    assert len(SECTIONS) == 10
    assert all(COMMAND.search(body) and theirs(body) for body in SECTIONS.values())


@pytest.mark.parametrize("title", SECTIONS)
def test_what_is_typed_elsewhere_is_answered_with_our_name(title):
    """A hint either names the setting, or says in a sentence what to do; it never lists what happens to look alike."""
    body = SECTIONS[title]
    recipe = next(shlex.split(command)[1] for command in COMMAND.findall(body) if command.startswith("train"))
    words_of = {"sft": ["model=argosy-1m", "data.source=x"], "dpo": ["model=argosy-1m", "data.source=x"],
           "grpo": ["model=argosy-1m", "data.source=x", "reward=exact"], "pretrain": ["model=argosy-1m", "data.source=x"]}  # fmt: skip
    names = compose(Run, recipe, [*words_of.get(recipe, []), "data.sequence=32"]).names
    for name in theirs(body):
        if name in names.known:
            continue
        hint = mistakes.unknown_key(name, None, names).hint or ""
        assert "known names are" not in hint, f"{name}: {hint}"
        settings_named = re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)+|\bsteps\b|\bdir\b|`\w+`|\w+=", hint)
        assert settings_named, f"{name}: {hint}"


@pytest.fixture
def folder(tmp_path):
    """The files that the guide names, of real text, and a model."""
    draw = random.Random(1)
    sentences = [f"The {draw.choice(['cat', 'dog', 'bird'])} saw {n} {draw.choice(['trees', 'boats'])}." for n in range(160)]
    turns = [({"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": s}) for n, s in enumerate(sentences)]
    chats = [{"messages": list(turn)} for turn in turns]
    sharegpt = [{"conversations": [{"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": s}]} for n, s in enumerate(sentences)]
    alpaca = [{"instruction": f"Tell {n}.", "input": "", "output": s} for n, s in enumerate(sentences)]
    pairs = [{"prompt": f"{n}:", "chosen": f" {s}", "rejected": " No."} for n, s in enumerate(sentences)]
    rows = [{"text": f"{s} " * 8} for s in sentences]
    (tmp_path / "alpaca.json").write_text(json.dumps(alpaca))
    (tmp_path / "sharegpt.jsonl").write_bytes(data_files.jsonl(sharegpt))
    (tmp_path / "chats.parquet").write_bytes(data_files.parquet(chats))
    (tmp_path / "pairs.jsonl").write_bytes(data_files.jsonl(pairs))
    (tmp_path / "prompts.jsonl").write_bytes(data_files.jsonl([{"prompt": f"{n} + 1 ="} for n in range(40)]))
    (tmp_path / "rewards.py").write_text("def digits(completions):\n    return [sum(map(str.isdigit, text)) for text in completions]\n")
    (tmp_path / "shards").mkdir()
    data_files.array_record(tmp_path / "shards" / "a.array_record", [data_files.example(row) for row in rows])
    (tmp_path / "web.parquet").write_bytes(data_files.parquet([{"content": row["text"], "url": "x"} for row in rows]))
    (tmp_path / "corpus.parquet").write_bytes(data_files.parquet(rows))
    (tmp_path / "train.bin").write_bytes(np.array([n % 50257 for n in range(20_000)], "<u2").tobytes())
    (tmp_path / "texts").mkdir()
    for number, row in enumerate(rows[:40]):
        (tmp_path / "texts" / f"{number}.txt").write_text(row["text"] * 4)
    (tmp_path / "MODEL").symlink_to(shared("models/stories260k"))
    (tmp_path / "gpt2").symlink_to(shared("tokenizers/gpt2"))
    return tmp_path


def shorten(command: str) -> list[str]:
    """The command with smaller numbers, so that it takes seconds."""
    words = shlex.split(command)
    short_words = []
    for word in words:
        key, equals, _ = word.partition("=")
        # Stanford's text around an instruction is longer.
        shorter = SHORTER | {"data.sequence": "256"} if "alpaca" in command else SHORTER
        short_words.append(f"{key}={shorter[key]}" if equals and key in shorter else word)
    if words[0] == "train":
        short_words = [word for word in short_words if not word.startswith("data.epochs")]
        short_words += [] if any(word.startswith("steps=") for word in short_words) else ["steps=2"]
        short_words += [] if any(word.startswith("data.sequence=") for word in short_words) else ["data.sequence=64"]
        short_words += ["eval.batches=1"]
        if "llama3.2-1b" in command:
            short_words += [*SMALL, "model.vocab=512"]
        elif words[1] == "tiny":
            short_words = [word for word in short_words if word.partition("=")[0] not in ("model.width", "model.layers", "model.heads")]
            short_words += SMALL
    if words[:2] == ["chat", "exported"]:
        short_words = ["generate", "exported", "The cat", "max_tokens=4"]
    return short_words


@pytest.mark.parametrize("title", SECTIONS)
def test_settings_go_together_as_they_are_printed(folder, monkeypatch, title):
    """With the numbers of the guide, before anything is trained: the runs of the other test have smaller ones."""
    monkeypatch.chdir(folder)
    for command in COMMAND.findall(SECTIONS[title]):
        verb, *words = shlex.split(command)
        if verb == "train":
            checked_settings(words[0], [word for word in words[1:] if word not in ("data.tokenizer=words", "mesh.fsdp=4")])


@pytest.mark.slow
@pytest.mark.parametrize("title", SECTIONS)
def test_every_command_runs(folder, title):
    """In the order of the section: later ones use what earlier ones made."""
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "JAX_PLATFORMS": "cpu"}
    wrong = []
    for command in COMMAND.findall(SECTIONS[title]):
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 if 'mesh.fsdp=4' in command else 1}"
        words = [sys.executable, "-m", "argosy", *shorten(command)]
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False)
        if done.returncode:
            wrong.append(f"{command}\n{' '.join(words[3:])}\n{done.stdout[-800:]}\n{done.stderr[-1500:]}")
    assert not wrong, "\n\n".join(wrong)
    file = {"1": "runs/alpaca/adapter/adapter_config.json", "10": "exported/model.safetensors"}.get(title.partition(".")[0], "MODEL")
    assert (folder / file).exists()
