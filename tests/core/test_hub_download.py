"""Models of the Hub, through the real client and a stand-in of its HTTP API."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import stories_model
from hub_server import HubServer, asked_by_the_client

import argosy
from argosy.core.errors import ArgosyError, BadInput
from argosy.core.hub import download
from argosy.core.hub.download import local_model, pin_revision
from argosy.core.hub.names import HubName, model_name, name_of_path
from argosy.core.hub.selection import model_files


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with asked_by_the_client(tmp_path, monkeypatch) as server:
        yield server


def stories() -> dict[str, bytes]:
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json")
    return {name: (stories_model() / name).read_bytes() for name in names}


# ---------------------------------------------------------------- names and files


@pytest.mark.parametrize(
    "text, repository, revision, file",
    [
        ("hf:gpt2", "gpt2", None, None),
        ("hf:meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B", None, None),
        ("hf:a/b@refs/pr/1", "a/b", "refs/pr/1", None),
        ("hf:a/b@v1.0:sub/x.gguf", "a/b", "v1.0", "sub/x.gguf"),
        ("hf:a/b:x.gguf", "a/b", None, "x.gguf"),
        ("hf://a/b", "a/b", None, None),
    ],
)
def test_a_name_is_read_and_written(text: str, repository: str, revision: str | None, file: str | None):
    name = HubName.parse(text)
    assert (name.repository, name.revision, name.file) == (repository, revision, file)
    assert HubName.parse(str(name)) == name


@pytest.mark.parametrize("text", ["hf:", "hf:a/b/c", "hf:a b", "hf:a/b@", "hf:a/b:../x", "hf:a/b:/x", "hf:-a/b"])
def test_what_is_no_name_is_refused(text: str):
    with pytest.raises(BadInput):
        HubName.parse(text)


def test_a_path_in_the_cache_tells_name_and_commit():
    commit = "0" * 38 + "af"
    path = f"x/models--meta-llama--Llama-3.2-1B/snapshots/{commit}"
    assert name_of_path(path) == HubName("meta-llama/Llama-3.2-1B", commit)
    assert name_of_path(f"{path}/q4.gguf") == HubName("meta-llama/Llama-3.2-1B", commit, "q4.gguf")
    assert name_of_path("runs/tiny") is None
    assert model_name(path) == model_name("hf:meta-llama/Llama-3.2-1B@v1") == "Llama-3.2-1B"


SMALL = ["config.json", "generation_config.json", "tokenizer.json", "README.md", "LICENSE"]


@pytest.mark.parametrize(
    "files, expected",
    [
        (["model.safetensors", "pytorch_model.bin", "model.fp16.safetensors", "consolidated.safetensors"],
         ["model.safetensors"]),
        (
            ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
             "pytorch_model.bin.index.json", "original/consolidated.00.pth", "onnx/model.onnx", "onnx/config.json"],
            ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ),
        (["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "optimizer.pt"],
         ["adapter_config.json", "adapter_model.safetensors"]),
        (["additional_chat_templates/tools.jinja", "chat_template.jinja", "vocab.txt", "model.safetensors", "tf.h5"],
         ["additional_chat_templates/tools.jinja", "chat_template.jinja", "vocab.txt", "model.safetensors"]),
    ],
)  # fmt: skip
def test_the_files_of_one_set_of_weights_are_chosen(files: list[str], expected: list[str]):
    assert sorted(model_files([*SMALL, *files], "hf:a/b")) == sorted([*SMALL, *expected])


def test_files_of_a_pipeline_are_chosen_per_folder():
    files = ["model_index.json", "README.md", "flux1-dev.safetensors", "scheduler/scheduler_config.json", "vae/config.json",
             "vae/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.fp16.safetensors", "vae/model.bin",
             "text_encoder/model.safetensors", "text_encoder/pytorch_model.bin", "tokenizer/vocab.json", "tokenizer/merges.txt",
             "safety_checker/model.safetensors"]  # fmt: skip
    chosen_files = set(model_files(files, "hf:a/b"))
    assert set(files) - chosen_files == {f for f in files if "fp16" in f or ".bin" in f or "safety" in f or f.startswith("flux1")}


def test_a_repository_of_gguf_files_asks_for_one():
    files = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "config.json"]
    with pytest.raises(BadInput) as error:
        model_files(files, "hf:a/b")
    assert "hf:a/b:m-Q8_0.gguf" in str(error.value)
    assert model_files(files, "hf:a/b", "m-Q8_0.gguf") == ["m-Q8_0.gguf"]
    with pytest.raises(BadInput, match="no file or folder"):
        model_files(files, "hf:a/b", "m-Q5.gguf")


@pytest.mark.parametrize("files", [["pytorch_model.bin"], ["model_index.json", "vae/config.json", "vae/diffusion_pytorch_model.bin"]])
def test_pickles_are_never_taken(files: list[str]):
    with pytest.raises(BadInput, match="pickles"):
        model_files(["config.json", *files], "hf:a/b")
    with pytest.raises(BadInput):
        model_files(files, "hf:a/b", files[-1])


# ---------------------------------------------------------------- transfers


def test_a_model_is_loaded_and_then_used_without_a_network(hub: HubServer, monkeypatch: pytest.MonkeyPatch):
    commit = hub.add("me/stories", stories() | {"pytorch_model.bin": b"\x80\x04pickle", "README.md": b"# Stories\n"})
    ours = argosy.load("hf:me/stories")
    tokens = np.arange(1, 9)
    assert np.array_equal(ours.logits(tokens), argosy.load(stories_model()).logits(tokens))
    assert ours.tokenizer is not None
    assert not hub.asked("GET", "pytorch_model.bin")
    assert pin_revision("hf:me/stories") == f"hf:me/stories@{commit}"
    transfers = hub.asked("GET", "/resolve/")
    assert Path(local_model(f"hf:me/stories@{commit}")).name == commit
    assert hub.asked("GET", "/resolve/") == transfers
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(download, "_SNAPSHOTS", {})
    request_count = len(hub.requests)
    assert Path(local_model("hf:me/stories")).name == commit
    with pytest.raises(BadInput, match="not in the cache"):
        local_model("hf:me/other")
    assert len(hub.requests) == request_count


def test_a_hub_that_does_not_answer_leaves_the_cache(hub: HubServer, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    commit = hub.add("me/stories", stories())
    local_model("hf:me/stories")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert Path(local_model("hf:me/stories")).name == commit
    with pytest.raises(BadInput, match="cannot be asked") as error:
        local_model("hf:me/other")
    assert "http://127.0.0.1:9 cannot be reached" in str(error.value)


def test_an_incomplete_snapshot_is_not_a_model(hub: HubServer, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    hub.add("me/stories", stories())
    folder = Path(local_model("hf:me/stories"))
    (folder / "tokenizer.model").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(download, "_SNAPSHOTS", {})
    with pytest.raises(BadInput, match="only in part"):
        local_model("hf:me/stories")


def test_a_tokenizer_is_read_without_the_weights(hub: HubServer):
    from argosy.data.tokenizers.load import load_tokenizer

    hub.add("me/stories", stories())
    assert load_tokenizer("hf:me/stories").vocab == load_tokenizer(stories_model()).vocab
    assert not hub.asked("GET", "model.safetensors")


def test_a_connection_that_breaks_resumes_inside_the_file(hub: HubServer, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    # The client keeps whole chunks of 10 MB.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    weights = np.random.default_rng(0).bytes(1_000_000)
    hub.add("me/big", {"config.json": b"{}", "model.safetensors": weights})
    hub.cut_after = 600_000
    folder = Path(local_model("hf:me/big"))
    assert (folder / "model.safetensors").read_bytes() == weights
    assert hub.ranges == ["bytes=600000-"]


@pytest.mark.parametrize(
    "place, problem, hint",
    [
        ("hf:me/gone", "no model `me/gone` on the Hub, or it is private", "HF_TOKEN"),
        ("hf:me/secret", "no model `me/secret` on the Hub, or it is private", "HF_TOKEN"),
        ("hf:me/gated", "hf:me/gated is gated", "accept its terms"),
        ("hf:me/stories@mian", "me/stories has no revision `mian`", "did you mean `main`?"),
        ("hf:me/pickles", "only as pickles", "save_pretrained"),
        ("hf:me/empty", "has no model.safetensors", ""),
    ],
)
def test_what_cannot_be_had_says_why(hub: HubServer, place: str, problem: str, hint: str):
    small = {"config.json": b"{}", "model.safetensors": b"x"}
    hub.add("me/stories", small)
    hub.add("me/secret", small, private=True)
    hub.add("me/gated", small, gated=True)
    hub.add("me/pickles", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    hub.add("me/empty", {"README.md": b"soon"})
    with pytest.raises(BadInput) as error:
        local_model(place)
    assert problem in error.value.what
    assert hint in str(error.value.hint)
    assert error.value.exit_code == 2


def test_a_token_opens_what_is_private(hub: HubServer, monkeypatch: pytest.MonkeyPatch):
    hub.add("me/secret", {"config.json": b"{}", "model.safetensors": b"x"}, private=True)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert (Path(local_model("hf:me/secret")) / "model.safetensors").read_bytes() == b"x"


def test_a_server_error_is_no_mistake_of_the_user(hub: HubServer, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import HfApi

    def refuse(*_: object, **__: object):
        raise OSError("a strange answer")

    monkeypatch.setattr(download, "is_unreachable", lambda _: False)
    monkeypatch.setattr(HfApi, "model_info", refuse)
    with pytest.raises(ArgosyError, match="could not be downloaded") as error:
        local_model("hf:me/stories")
    assert error.value.exit_code == 1


# ---------------------------------------------------------------- where models are named


@pytest.mark.slow
def test_a_run_keeps_the_name_and_the_commit_of_its_base(hub: HubServer, tmp_path: Path):
    from argosy.core.settings import yaml_layer

    commit = hub.add("me/stories", stories())
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a fox. " * 200)
    words = ["pretrain", "model=hf:me/stories", f"data.source={text}", "data.sequence=32", "data.batch=8", f"dir={tmp_path}/run"]
    from argosy.jobs.train import Quiet

    argosy.fit(*words, steps=1, view=Quiet())
    values = yaml_layer(tmp_path / "run" / "settings.yml").values
    assert values["init"]["weights"] == f"hf:me/stories@{commit}"
    assert values["data"]["tokenizer"] == f"hf:me/stories@{commit}"
    # A later commit is another model: the run stays with its own.
    hub.add("me/stories", stories() | {"generation_config.json": b"{}"})
    argosy.fit(str(tmp_path / "run"), steps=2, view=Quiet())
    assert yaml_layer(tmp_path / "run" / "settings.yml").values["init"]["weights"] == f"hf:me/stories@{commit}"


def test_adapters_from_the_hub_bring_their_base(hub: HubServer, tmp_path: Path):
    from argosy.checkpoint.open import open_model

    hub.add("me/stories", stories())
    config = {"peft_type": "LORA", "base_model_name_or_path": "me/stories", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    from safetensors.numpy import save

    width = json.loads(stories()["config.json"])["hidden_size"]
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {f"{prefix}.lora_A.weight": np.ones((2, width), np.float32), f"{prefix}.lora_B.weight": np.ones((width, 2), np.float32)}
    hub.add("me/adapter", {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save(factors)})
    opened = open_model("hf:me/adapter")
    assert opened.kind == "peft"
    assert name_of_path(opened.adapted.base.path).repository == "me/stories"
    assert opened.companions is not None
