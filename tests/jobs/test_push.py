"""Models to the Hub and back, through the real client and a stand-in of its HTTP API."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import stories_model
from hub_server import HubServer, asked_by_the_client, hub_server

import argosy
from argosy.cli import main
from argosy.core.errors import ArgosyError, BadInput
from argosy.core.hub.download import local_model
from argosy.core.hub.names import HubName
from argosy.core.hub.upload import CARD, MARK, push_files
from argosy.jobs.model_card import Lineage, card_front, hub_base, model_card
from argosy.jobs.push import push

# The client gives its HTTP library a file in an old way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with asked_by_the_client(tmp_path, monkeypatch) as server:
        monkeypatch.setenv("HF_TOKEN", server.token)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in the Hub's layout, in two shards."""
    from argosy.jobs.convert import convert

    target = tmp_path_factory.mktemp("models") / "stories"
    convert(str(stories_model()), target, "hub", None, shard_gb=0.0006)
    assert len(list(target.glob("model-*.safetensors"))) == 2
    return target


# ---------------------------------------------------------------- the card


def test_front_matter_is_what_the_hub_reads():
    from huggingface_hub import ModelCard

    commit = "ab" * 20
    settings = {
        "data": {"source": [{"path": "hf:me/texts:train"}, {"path": "/srv/private/chats.jsonl"}], "batch": 8, "sequence": 64},
        "objective": {"name": "dpo"},
        "optimizer": {"name": "adamw", "learning_rate": 1e-4},
        "steps": 100,
        "adapter": {"name": "lora", "rank": 8},
    }
    lineage = Lineage("peft", HubName("their/base", commit), settings, {"eval_loss": 1.25}, 100)
    text = model_card(HubName("me/mine"), lineage, base_card="---\nlicense: apache-2.0\nlanguage: [en]\ntags: [x]\n---\n# Base\n")
    data = ModelCard(text).data
    assert (data.library_name, data.base_model, data.license, data.language) == ("peft", "their/base", "apache-2.0", ["en"])
    assert data.datasets == ["me/texts"]
    assert data.to_dict()["base_model_relation"] == "adapter"
    assert {"argosy", "dpo"} <= set(data.tags)
    assert MARK in text
    assert 'argosy.load("hf:me/mine")' in text
    assert "| `eval_loss` | 1.25 |" in text
    assert "| data | `hf:me/texts:train`, `chats.jsonl` |" in text
    assert "/srv" not in text


def test_a_card_says_nothing_that_is_not_known():
    front = card_front(model_card(HubName("me/mine"), Lineage("hub"), base_card="no front matter"))
    assert set(front) == {"library_name", "pipeline_tag", "tags"}


@pytest.mark.parametrize(
    "name, base", [("me/base", "me/base"), ("hf:me/base@v1", "me/base"), ("runs/first/x", None), (None, None)]
)
def test_the_base_is_a_name_of_the_hub_or_nothing(name: str | None, base: str | None):
    place = hub_base(name)
    assert (place and place.repository) == base


# ---------------------------------------------------------------- transfers


def test_a_folder_goes_up_and_comes_back(hub: HubServer, folder: Path):
    result = push(str(folder), "hf:me/stories", private=True, message="first", license="mit")
    repository = hub.repositories["me/stories"]
    assert repository.private
    assert repository.messages[-1] == "first"
    files = hub.files("me/stories")
    assert {path.name for path in folder.iterdir()} | {CARD, ".gitattributes"} == set(files)
    assert all(files[path.name] == path.read_bytes() for path in folder.iterdir())
    assert card_front(files[CARD].decode())["license"] == "mit"
    assert result["commit"] == repository.sha_of("main")
    tokens = np.arange(1, 9)
    assert np.array_equal(argosy.load("hf:me/stories").logits(tokens), argosy.load(folder).logits(tokens))


def test_a_dry_run_sends_nothing(hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["push", str(folder), "hf:me/stories", "dry=true"]) == 0
    out = capsys.readouterr().out
    assert "model-00002-of-00002.safetensors" in out
    assert "library_name: transformers" in out
    assert not hub.repositories
    assert not [request for request in hub.requests if request[0] in ("POST", "PUT")]


def test_a_card_written_by_hand_stays(hub: HubServer, folder: Path):
    messages: list[str] = []
    push(str(folder), "hf:me/stories")
    push(str(folder), "hf:me/stories", license="mit")
    assert card_front(hub.files("me/stories")[CARD].decode())["license"] == "mit"
    hub.add("me/stories", hub.files("me/stories") | {CARD: b"# Mine\n"})
    result = push(str(folder), "hf:me/stories", license="apache-2.0", say=messages.append)
    assert hub.files("me/stories")[CARD] == b"# Mine\n"
    assert result["card"] == "kept"
    assert any("written by hand, which stays" in message for message in messages)
    push(str(folder), "hf:me/stories", card="replace")
    assert MARK in hub.files("me/stories")[CARD].decode()


def test_weights_of_an_earlier_model_go(hub: HubServer, folder: Path):
    hub.add("me/stories", {"model.safetensors": b"old", "pytorch_model.bin": b"old", "notes.txt": b"mine"})
    result = push(str(folder), "hf:me/stories")
    assert result["removed"] == ["model.safetensors", "pytorch_model.bin"]
    assert "notes.txt" in hub.files("me/stories")
    assert "model.safetensors" not in hub.files("me/stories")


def test_a_branch_is_made(hub: HubServer, folder: Path):
    push(str(folder), "hf:me/stories")
    push(str(folder), "hf:me/stories", revision="v2", license="mit")
    assert "license: mit" not in hub.files("me/stories")[CARD].decode()
    assert "license: mit" in hub.files("me/stories", "v2")[CARD].decode()
    assert "hf:me/stories@v2" in hub.files("me/stories", "v2")[CARD].decode()


def test_pickles_stay_here(hub: HubServer, tmp_path: Path):
    (tmp_path / "m").mkdir()
    for name in ("config.json", "model.safetensors", "optimizer.pt", "pytorch_model.bin", ".secret", "model.safetensors.part"):
        (tmp_path / "m" / name).write_bytes(b"{}")
    messages: list[str] = []
    push(str(tmp_path / "m"), "hf:me/m", say=messages.append)
    assert set(hub.files("me/m")) == {"config.json", "model.safetensors", CARD, ".gitattributes"}
    assert any("optimizer.pt" in message for message in messages)


def test_a_broken_upload_resumes_without_what_arrived(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub.utils import _http

    monkeypatch.setattr(_http.time, "sleep", lambda _: None)
    hub.fail_puts_after = 1
    with pytest.raises(ArgosyError, match="broke while me/stories was uploaded") as error:
        push(str(folder), "hf:me/stories")
    assert error.value.exit_code == 1
    # Nobody loads half of a model.
    assert set(hub.files("me/stories")) == {".gitattributes"}
    hub.fail_puts_after = None
    push(str(folder), "hf:me/stories")
    assert hub.asked("PUT", "/objects/") == 2
    assert len([name for name in hub.files("me/stories") if name.startswith("model-")]) == 2


@pytest.mark.parametrize(
    "target, words, problem",
    [
        ("me/stories", {}, "is no name of the Hub"),
        ("hf:stories", {}, "names no repository to write"),
        ("hf:me/stories", {"merge": True}, "merge is for runs"),
        ("hf:me/stories", {"dtype": "bfloat16"}, "dtype is for runs"),
    ],
)
def test_mistakes_are_found_before_anything_is_sent(hub: HubServer, folder: Path, target: str, words: dict, problem: str):
    with pytest.raises(BadInput, match=problem):
        push(str(folder), target, **words)
    assert not hub.requests


def test_without_a_token_it_says_how_to_log_in(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(BadInput, match="does not let you write") as error:
        push_files({CARD: b"x"}, HubName("me/stories"), "m")
    assert "HF_TOKEN" in str(error.value.hint)


# ---------------------------------------------------------------- runs


@pytest.mark.slow
def test_a_run_and_its_adapters_go_up_with_their_lineage(hub: HubServer, folder: Path, tmp_path: Path):
    from argosy.jobs.train import Quiet

    push(str(folder), "hf:me/stories", license="mit")
    commit = hub.repositories["me/stories"].sha_of("main")
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a fox. " * 200)
    common = {"data.source": str(text), "data.sequence": 32, "data.batch": 8, "steps": 2, "eval.every": 2, "view": Quiet()}
    for name, more in (("full", []), ("lora", ["adapter=lora", "adapter.rank=2"])):
        argosy.fit("pretrain", "model=hf:me/stories", *more, dir=str(tmp_path / name), **common)
        push(str(tmp_path / name), f"hf:me/{name}")
        files = hub.files(f"me/{name}")
        front, card = card_front(files[CARD].decode()), files[CARD].decode()
        assert (front["base_model"], front["license"]) == ("me/stories", "mit")
        assert commit[:12] in card
        assert "| `eval_loss` |" in card
        assert "`text.txt`" in card
        assert str(tmp_path) not in card
        ours, theirs = argosy.load(tmp_path / name), argosy.load(f"hf:me/{name}")
        tokens = np.arange(1, 9)
        assert np.allclose(ours.logits(tokens), theirs.logits(tokens), atol=1e-5)
        assert not np.array_equal(ours.logits(tokens), argosy.load(folder).logits(tokens))
    assert "model.safetensors" in hub.files("me/full")
    config = json.loads(hub.files("me/lora")["adapter_config.json"])
    assert (config["base_model_name_or_path"], config["revision"]) == ("me/stories", commit)
    push(str(tmp_path / "lora"), "hf:me/merged", merge=True)
    assert "adapter_config.json" not in hub.files("me/merged")
    assert not list((tmp_path / "xdg" / "argosy" / "push").iterdir())


@pytest.mark.slow
def test_a_quantized_folder_keeps_its_codes(hub: HubServer, folder: Path, tmp_path: Path):
    from argosy.cli import main

    assert main(["quantize", str(folder), str(tmp_path / "w8"), "preset=w8"]) == 0
    push(str(tmp_path / "w8"), "hf:me/w8")
    theirs = argosy.load("hf:me/w8")
    assert np.array_equal(theirs.logits(np.arange(1, 9)), argosy.load(tmp_path / "w8").logits(np.arange(1, 9)))


@pytest.mark.slow
def test_a_killed_download_goes_on_with_what_is_missing(tmp_path: Path):
    """In a process of its own, as users do it, by variables alone."""
    rng = np.random.default_rng(0)
    # They come at the same time: the small one is complete when the process is killed.
    shards = {f"model-0000{i}-of-00003.safetensors": rng.bytes(size) for i, size in ((1, 300_000), (2, 6_000_000), (3, 7_000_000))}
    files = {"config.json": b"{}", "model.safetensors.index.json": b"{ }", **shards}
    with hub_server() as hub:
        hub.add("me/big", files)
        hub.delay_s = 0.02
        code = "from argosy.core.hub.download import local_model; print(local_model('hf:me/big'))"
        env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        child = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.DEVNULL)
        blobs = tmp_path / "hub" / "models--me--big" / "blobs"
        until = time.monotonic() + 60
        while time.monotonic() < until and not (blobs.is_dir() and any(blobs.glob("*.incomplete"))):
            time.sleep(0.01)
        time.sleep(0.8)
        child.send_signal(signal.SIGKILL)
        child.wait()
        complete = {blob.name for blob in blobs.iterdir() if not blob.name.endswith(".incomplete")}
        assert 0 < len(complete) < len(files)
        hub.requests.clear()
        hub.delay_s = 0.0
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        folder = Path(done.stdout.strip())
        assert {name: (folder / name).read_bytes() for name in files} == files
        assert hub.asked("GET", "/resolve/") == len(files) - len(complete)
        # Then without a network.
        offline = env | {"HF_HUB_OFFLINE": "1"}
        hub.requests.clear()
        again = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, check=True)
        assert again.stdout == done.stdout
        assert not hub.requests


def test_the_cache_is_that_of_the_client(hub: HubServer, folder: Path):
    from huggingface_hub import try_to_load_from_cache

    push(str(folder), "hf:me/stories")
    assert try_to_load_from_cache("me/stories", "config.json", cache_dir=str(Path(local_model("hf:me/stories")).parents[2])) is not None


def test_a_dry_run_without_a_network_says_that_nothing_was_sent(tmp_path, monkeypatch):
    from argosy.core.errors import ArgosyError
    from argosy.core.hub import upload
    from argosy.core.hub.names import HubName

    def unreachable(*_):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(upload, "_remote_files", unreachable)
    monkeypatch.setattr(upload, "client_errors", lambda: (ConnectionError,))
    monkeypatch.setattr(upload, "is_unreachable", lambda error: True)
    with pytest.raises(ArgosyError, match="the Hub cannot be reached") as caught:
        upload.push_files({"a": b"1"}, HubName("me/x", None, None), "message", dry=True)
    assert "sends nothing" in str(caught.value.hint)
