"""Every verb that takes a model, with every kind of model, as a process of its own: it works, or says in words why it cannot.

The default suite serves an encoder; the rest of the table is slow, because each cell starts Python and compiles programs.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers import shared

from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.data.tokenizers.config import TokenizerConfig
from argosy.data.tokenizers.load import find_tokenizer
from argosy.infer.lm import LM
from argosy.models import FAMILIES
from argosy.weights.build import random_model

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
# Kinds of decoders, by the family of a small random one.
FAMILY = {"hub": "llama", "experts": "mixtral", "latent": "deepseek", "recurrent": "qwen3_next", "sinks": "gpt_oss"}
DECODERS = (*FAMILY, "checkpoint", "run", "gguf")
KINDS = (*DECODERS, "encoder", "preset")
SERVE = ("port=0", "warm_up=false", "name=tiny")
SMALL = ("engine.slots=2", "engine.context=64", "engine.pages=16", "engine.page=8")


class Models:
    """A small model of each kind, made when it is first asked for."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, kind: str) -> str:
        if kind == "preset":
            return "argosy-1m"
        if kind == "gguf":
            return str(shared("gguf/stories260K-q8_0.gguf"))
        path = self.folder / kind
        if not path.exists():
            self._make(kind, path)
        return str(path)

    def _make(self, kind: str, path: Path) -> None:
        if kind == "run":
            words = ["train", "tiny", f"dir={path}", "steps=2", "data.batch=2", "data.sequence=32", "model.layers=1", "eval.batches=0"]
            argosy(*words, "model.width=16", "model.heads=2", "model.kv_heads=1")
        elif kind == "encoder":
            _encoder(path)
        else:
            config = next(iter(FAMILIES[FAMILY.get(kind, "llama")].examples().values())).model_copy(update={"vocab": 258})
            tokenizer = ByteTokenizer(TokenizerConfig(templates={"default": TEMPLATE}))
            LM(config, random_model(config, 0).module, tokenizer).save(path, format="argosy" if kind == "checkpoint" else "hub")


def _encoder(path: Path) -> None:
    tokenizer = find_tokenizer(str(shared("tokenizers/bert_uncased_vocab.txt")))
    config = FAMILIES["bert"].examples()["plain"].model_copy(update={"vocab": 30522, "layers": 1})
    LM(config, random_model(config, 0).module, tokenizer).save(path)
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    steps = [{"path": "1_Pooling" if kind == "Pooling" else "", "type": kind} for kind in ("Transformer", "Pooling", "Normalize")]
    (path / "modules.json").write_text(json.dumps(steps))
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 24}')


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "argosy", *words]


def argosy(*words: str, code: int = 0, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """A verb as a process that ends with this code, and without a traceback."""
    done = subprocess.run(command(*words), capture_output=True, text=True, input=stdin, timeout=300, env=environment())
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert done.returncode == code, (done.stdout[-1000:], done.stderr[-3000:])
    return done


def environment() -> dict[str, str]:
    """Without what the tests' own process has set for itself."""
    return {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")} | {"JAX_PLATFORMS": "cpu"}


@contextmanager
def serve_model(model: str, *words: str, verb: str = "serve") -> Iterator[Callable[..., Any]]:
    """`serve_model(model)` asks a server of it: the answer to a path with a body."""
    serve_words = SERVE if verb == "serve" else ["port=0", "warm_up=false"]
    with subprocess.Popen(command(verb, model, *serve_words, *words), stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stderr is not None
        lines: list[str] = []
        try:
            for line in process.stderr:
                lines.append(line)
                if line.startswith("ready on "):
                    break
            assert lines[-1:], "it said nothing"
            assert lines[-1].startswith("ready on "), "".join(lines)
            url = lines[-1].split()[-1]

            def ask(path: str, **body: Any) -> Any:
                answer = httpx.post(url + path, json=body, timeout=120)
                assert answer.status_code == 200, answer.text
                return answer.json()

            yield ask
            process.terminate()
            assert process.wait(60) == 143
        finally:
            with contextlib.suppress(OSError):
                process.kill()


# ---------------------------------------------------------------- the verbs


def generate(models: Models, kind: str, folder: Path) -> None:
    words = ["generate", models(kind), "Once", "max_tokens=4", "--json"]
    if kind == "encoder":
        assert "is an encoder" in argosy(*words, code=2).stderr
    elif kind == "preset":
        assert "random weights" in argosy(*words, code=2).stderr
    else:
        (completion,) = json.loads(argosy(*words).stdout)
        assert (len(completion["tokens"]), completion["finish_reason"]) == (4, "length") or completion["finish_reason"] == "stop"


def serve(models: Models, kind: str, folder: Path) -> None:
    if kind == "preset":
        assert "random weights" in argosy("serve", models(kind), *SERVE, code=2).stderr
        return
    if kind == "encoder":
        with serve_model(models(kind), "engine.budget=32") as ask:
            first, second = (entry["embedding"] for entry in ask("/v1/embeddings", input=["a boat", "a ship"])["data"])
            assert sum(a * a for a in first) == pytest.approx(1, abs=1e-5)
            assert ask("/score", text_1="a boat", text_2="a ship")["data"][0]["score"] == pytest.approx(
                sum(a * b for a, b in zip(first, second, strict=True)), abs=1e-5
            )
        return
    with serve_model(models(kind), *SMALL) as ask:
        assert ask("/v1/completions", prompt="Once", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
        if kind not in ("gguf", "run"):
            messages = [{"role": "user", "content": "hi"}]
            assert ask("/v1/chat/completions", messages=messages, max_tokens=3)["choices"][0]["message"]["role"] == "assistant"


def evaluate(models: Models, kind: str, folder: Path) -> None:
    (folder / "text.txt").write_text("Once upon a time there was a boat. " * 4)
    words = ["eval", models(kind), "tasks=perplexity", f"data={folder / 'text.txt'}", "--json"]
    if kind == "encoder":
        assert "is an encoder" in argosy(*words, code=2).stderr
    elif kind == "preset":
        assert "random weights" in argosy(*words, code=2).stderr
    else:
        metrics = json.loads(argosy(*words).stdout)["tasks"]["perplexity"]
        assert metrics["loss"] > 0


def convert(models: Models, kind: str, folder: Path) -> None:
    """There and back; the copy in the Hub's layout answers as its source does."""
    if kind == "preset":
        assert "random weights" in argosy("convert", models(kind), str(folder / "x"), "to=hub", code=2).stderr
        return
    argosy("convert", models(kind), str(folder / "checkpoint"), "to=argosy")
    argosy("convert", str(folder / "checkpoint"), str(folder / "hub"), "to=hub")
    assert (folder / "hub" / "model.safetensors").is_file()
    if kind != "encoder":
        each = models(kind), str(folder / "hub")
        (original,), (other,) = (json.loads(argosy("generate", model, "Once", "max_tokens=4", "--json").stdout) for model in each)
        assert original["tokens"] == other["tokens"]


def run_batch(models: Models, kind: str, folder: Path) -> None:
    url, body = "/v1/completions", {"prompt": "Once", "max_tokens": 2}
    if kind == "encoder":
        url, body = "/v1/embeddings", {"input": "a boat"}
    request = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    (folder / "in.jsonl").write_text(json.dumps(request) + "\n")
    words = ["run-batch", models(kind), str(folder / "in.jsonl"), str(folder / "out.jsonl")]
    if kind == "preset":
        assert "random weights" in argosy(*words, code=2).stderr
        return
    argosy(*words, *(() if kind == "encoder" else SMALL))
    (answer,) = map(json.loads, (folder / "out.jsonl").read_text().splitlines())
    assert (answer["custom_id"], answer["response"]["status_code"]) == ("a", 200)


def chat(models: Models, kind: str, folder: Path) -> None:
    words = ["chat", models(kind), "max_tokens=3", "temperature=0"]
    if kind == "encoder":
        assert "is an encoder" in argosy(*words, code=2, stdin="hi\n").stderr
    elif kind == "preset":
        assert "random weights" in argosy(*words, code=2, stdin="hi\n").stderr
    else:
        # Without a chat template it continues plain text.
        assert " of prompt" in argosy(*words, stdin="hi\n").stderr


def sft(models: Models, kind: str, folder: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"hello {i}"}]} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = f"model={models(kind)}"
    words = ["train", "sft", model, f"data.source={folder / 'rows.jsonl'}", f"dir={folder / 'run'}", "steps=1", "data.sequence=64"]
    words += ["data.batch=2", "adapter=lora", "adapter.rank=2"]
    if kind == "encoder":
        assert "is an encoder" in argosy(*words, code=2).stderr
    elif kind in ("gguf", "run"):
        assert "chat template" in argosy(*words, code=2).stderr
    elif kind == "preset":
        assert argosy(*words, code=2).stderr
    else:
        done = argosy(*words)
        if kind == "sinks":
            # Experts that are fused into one tensor: PEFT has no name for their adapters, and that is said.
            assert "no PEFT folder" in done.stderr
        else:
            assert (folder / "run" / "adapter" / "adapter_model.safetensors").is_file()


def bundle(models: Models, kind: str, folder: Path) -> None:
    """Exported, verified, and run in a process that has the bundle alone."""
    words = ["export", models(kind), str(folder / "bundle"), "platforms=cpu"]
    if kind == "preset":
        assert "random weights" in argosy(*words, code=2).stderr
        return
    # The width of the encoder, or a row of logits for each token.
    name, size = ("embedding", 44) if kind == "encoder" else ("logits", 3)
    assert list(json.loads(argosy(*words, "--json").stdout)["signatures"]) == ["embed" if kind == "encoder" else "logits"]
    assert json.loads(argosy("bundle", "verify", str(folder / "bundle"), "--json").stdout)["files"] >= 2
    inputs = f"input={json.dumps({'tokens': [[3, 4, 5]]})}"
    (row,) = json.loads(argosy("bundle", "run", str(folder / "bundle"), inputs, "--json").stdout)[name]
    assert len(row) == size


def predict(models: Models, kind: str, folder: Path) -> None:
    """Served as a bundle."""
    target = str(folder / "models" / "small" / "1")
    if kind == "preset":
        assert "random weights" in argosy("export", models(kind), target, code=2).stderr
        return
    argosy("export", models(kind), target, "platforms=cpu", "batch=1,2", "length=8")
    with serve_model(str(folder / "models"), verb="predict") as ask:
        predictions = ask("/v1/models/small:predict", instances=[{"tokens": [3, 4, 5]}, {"tokens": [5, 4, 3]}])["predictions"]
        assert len(predictions) == 2
        if kind == "encoder":
            first = ask("/v1/embeddings", model="small", input=["a boat", "a ship"])["data"][0]["embedding"]
            assert sum(a * a for a in first) == pytest.approx(1, abs=1e-5)


VERBS = (generate, serve, evaluate, convert, run_batch, chat, sft, bundle, predict)
FAST = {(serve, "encoder"), (bundle, "encoder"), (predict, "encoder")}


@pytest.mark.parametrize(
    "verb, kind",
    [
        pytest.param(verb, kind, marks=() if (verb, kind) in FAST else pytest.mark.slow, id=f"{verb.__name__}-{kind}")
        for kind in KINDS
        for verb in VERBS
    ],
)
def test_every_verb_with_every_kind_of_model(models: Models, verb: Callable[..., None], kind: str, tmp_path: Path):
    verb(models, kind, tmp_path)
