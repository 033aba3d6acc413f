"""Hub folders: what is read, what is refused, what is carried along. Tensors are checked with the safetensors library."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from golden_weights import write_model
from safetensors.numpy import load_file, save_file

from argosy.checkpoint.open import open_model
from argosy.core.errors import BadInput, Damaged
from argosy.jobs.convert import convert
from argosy.weights.hub.config import config_from, read_json_object
from argosy.weights.hub.reader import open_folder
from argosy.weights.hub.writer import save_folder

GOLDENS = Path(__file__).parents[1] / "goldens" / "models"
PLAIN, TIED = "llama-grouped", "llama-multi-query-tied"  # the newer generation of config.json; the older one


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(GOLDENS / PLAIN, tmp_path / "folder")


def change_config(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return {n: (x.dtype, x.shape, x.tobytes()) for n, x in a.items()} == {
        n: (x.dtype, x.shape, x.tobytes()) for n, x in b.items()
    }


def test_both_generations_of_the_config_say_the_same(folder: Path):
    newer = open_folder(folder).config
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": config.pop("dtype")}
    (folder / "config.json").write_text(json.dumps(config))
    assert open_folder(folder).config == newer


def test_sharded_and_single_are_the_same_model(folder: Path, tmp_path: Path):
    single = open_folder(folder)
    save_folder(tmp_path / "sharded", single.config, single.weights, hub=single.hub, shard_bytes=20_000)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors_of(folder))
    assert same(tensors_of(tmp_path / "sharded"), tensors_of(folder))
    again = open_folder(tmp_path / "sharded")
    assert again.config == single.config
    assert all(np.array_equal(again.weights.read(n), single.weights.read(n)) for n in single.weights.names)


def test_a_shard_that_is_gone_is_named(folder: Path, tmp_path: Path):
    single = open_folder(folder)
    save_folder(tmp_path / "sharded", single.config, single.weights, shard_bytes=20_000)
    shard = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises((BadInput, Damaged), match=shard.name):
        open_folder(tmp_path / "sharded")


@pytest.mark.parametrize("name", [PLAIN, TIED])
def test_through_a_checkpoint_and_back_is_exact(name: str, tmp_path: Path):
    source = write_model(GOLDENS / name, tmp_path / "source")
    companions = {"generation_config.json": '{"eos_token_id": [2, 7]}', "chat_template.jinja": "{{ messages }}\n"}
    for file, text in companions.items():
        (source / file).write_text(text)
    change_config(source, bos_token_id=5, eos_token_id=[2, 7], initializer_range=0.017, use_cache=False)
    convert(str(source), tmp_path / "argosy", "argosy", None)
    convert(str(tmp_path / "argosy"), tmp_path / "hub", "hub", None)
    assert same(tensors_of(tmp_path / "hub"), tensors_of(source))
    assert {f: (tmp_path / "hub" / f).read_text() for f in companions} == companions
    before, after = (json.loads((p / "config.json").read_text()) for p in (source, tmp_path / "hub"))
    assert {k: after[k] for k in before} == before, "what the folder said, it still says"


def test_a_key_that_is_not_understood_is_refused_and_named(folder: Path):
    with pytest.raises(BadInput, match="`attention_sink_size` = 4 is not understood") as caught:
        open_model(change_config(folder, attention_sink_size=4, logit_softcapping=30.0))
    assert "logit_softcapping" in caught.value.what, "every such key at once"


def test_an_architecture_that_is_not_built_is_named(folder: Path):
    with pytest.raises(BadInput, match="`mistrall` is not built") as caught:
        open_model(change_config(folder, model_type="mistrall"))
    assert "did you mean `mistral`? A new family is one file and one line" in (caught.value.hint or "")


def test_quantised_weights_are_refused(folder: Path):
    with pytest.raises(BadInput, match="quantized by `hqq`"):
        open_model(change_config(folder, quantization_config={"quant_method": "hqq", "bits": 4}))


def test_auto_map_imports_nothing(folder: Path):
    (folder / "modeling_evil.py").write_text("raise SystemExit('imported')")
    open_model(folder)
    before, path = set(sys.modules), list(sys.path)
    stored = open_model(change_config(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}))
    stored.weights.read(next(iter(stored.weights.names)))
    assert set(sys.modules) == before
    assert sys.path == path


def test_everything_wrong_with_the_tensors_is_reported_at_once(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.extra.weight"] = np.zeros(3, np.float32)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((58, 41), np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BadInput) as caught:
        open_model(folder)
    for name in ("model.norm.weight", "model.layers.0.extra.weight", "model.layers.1.mlp.up_proj.weight"):
        assert name in str(caught.value), name


def test_a_vocabulary_that_is_miscounted_says_both_numbers_and_what_to_write(folder: Path):
    """transformers 5 refuses it too: a size mismatch of embed_tokens and lm_head."""
    with pytest.raises(BadInput, match=r"`vocab_size` is 90, and .* has 97 rows") as caught:
        open_model(change_config(folder, vocab_size=90))
    assert '"vocab_size": 97' in (caught.value.hint or "")
    assert open_model(change_config(folder, vocab_size=97)).config.vocab == 97


def test_buffers_that_follow_from_the_config_are_ignored_by_rule(folder: Path, monkeypatch):
    tensors = load_file(folder / "model.safetensors")
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(5, np.float32)}
    save_file(tensors | buffers, folder / "model.safetensors")
    names = set(open_model(folder).weights.names)
    buffers["h.0.attn.masked_bias"] = np.ones(1, np.float32)
    save_file(tensors | buffers, folder / "model.safetensors")
    with pytest.raises(BadInput, match=r"1 unexpected"):
        open_model(folder)
    monkeypatch.setattr(type(config_of(folder)), "hub_ignore", ("*.attn.masked_bias",), raising=False)
    assert set(open_model(folder).weights.names) == names


def config_of(folder: Path):
    return config_from(read_json_object(folder / "config.json"), "")


def test_types_are_looked_up_once(folder: Path):
    """A mixture of experts has tens of thousands of names: what asks for each type must not go through all of them."""
    weights = open_model(folder).weights
    calls = []
    weights.table.ours_of = lambda names: calls.append(1)
    assert {weights.dtype(name) for name in weights.names} == {np.dtype(np.float32)}
    assert not calls


def test_a_tied_model_may_bring_its_head_along(tmp_path: Path):
    tied = write_model(GOLDENS / TIED, tmp_path / "tied")
    alone = set(open_model(tied).weights.names)
    tensors = load_file(tied / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, tied / "model.safetensors")
    stored = open_model(tied)
    assert stored.config.tied
    assert set(stored.weights.names) == alone


@pytest.mark.parametrize("text", ["{", "[1]", "\x00", "[" * 100_000])
def test_a_config_that_is_none_is_damaged(folder: Path, text: str):
    (folder / "config.json").write_text(text)
    with pytest.raises(Damaged, match=r"config\.json"):
        open_model(folder)


def test_a_size_that_makes_no_model_is_reported(folder: Path):
    with pytest.raises(BadInput, match="kv_heads = 5"):
        open_model(change_config(folder, num_key_value_heads=5))


def test_a_folder_whose_config_and_tensors_agree_is_read_without_a_word(folder: Path):
    messages: list[str] = []
    open_folder(folder, warn=messages.append)
    assert messages == []
