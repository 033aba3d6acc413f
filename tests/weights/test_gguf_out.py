"""GGUF files out: every family's model comes back, llama.cpp's names and types are used, and what a file cannot hold is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_weights import write_model
from laws.families import CASES, noisy_model
from test_gguf_models import GOLDENS, gguf_of

import argosy
from argosy.checkpoint.open import open_model
from argosy.core.errors import BadInput, Unsupported
from argosy.core.formats import Arrays, TensorReader
from argosy.core.formats.files import write_file
from argosy.core.formats.gguf import GGUF
from argosy.infer.lm import LM
from argosy.models.parts.stack import Unroll
from argosy.models.settings import Experts, Rope
from argosy.weights.fill import model_weights
from argosy.weights.gguf.keys import DESCRIBERS
from argosy.weights.gguf.mixtures import MIXTURES, type_of
from argosy.weights.gguf.writer import gguf_content

CHANGES: dict[str, dict[str, Any]] = {
    "llama-window": {"activation": "silu"},
    "qwen-2": {"window": None, "pattern": None},
    "gemma-2": {"query_scalar": 14},
    "gemma-3": {"pattern": "LLLLLG"},
    "gpt_oss-plain": {"limit": 7.0},
}
"""What the examples of families with a table have that no key holds, and what is taken instead."""
WRITTEN = [
    *("llama-plain", "llama-tied-biased", "llama-window", "qwen-2", "qwen-3", "qwen-2-experts", "qwen-3-experts", "mixtral-plain"),
    *("mixtral-window", "gemma-1", "gemma-2", "gemma-3", "phi-window", "phi-long", "gpt_oss-plain"),
]
BY_DEFAULT = ("llama-tied-biased", "qwen-3-experts", "gemma-3", "phi-long")
PROMPT = [[5, 9, 100, 23, 7, 60, 3, 11, 80, 2]]


def config_of(name: str) -> Any:
    return CASES[name].model_copy(update=CHANGES.get(name, {}))


def write_file_of(path: Path, config: Any, weights: TensorReader, preset: str | None = None, **more: Any) -> Path:
    content = gguf_content(config, weights, MIXTURES[preset] if preset else None, **more)
    write_file(path, content.file(path.name))
    return path


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in BY_DEFAULT else pytest.mark.slow) for n in WRITTEN])
def test_a_model_comes_back(name, tmp_path):
    config = config_of(name)
    lm = LM(config, noisy_model(config, Unroll()), None)
    file = write_file_of(tmp_path / "x.gguf", config, model_weights(lm.module))
    exact = lm.logits(PROMPT)
    np.testing.assert_array_equal(argosy.load(file).logits(PROMPT), exact)
    # What blocks decode to is what the model computes with.
    packed = write_file_of(tmp_path / "q.gguf", config, model_weights(lm.module), "q8_0")
    rounded = argosy.load(packed).logits(PROMPT)
    assert 0 < np.abs(rounded - exact).max() < 0.1 * np.abs(exact).max()


def test_every_family_with_a_table_is_covered():
    assert {type(CASES[name]) for name in WRITTEN} == set(DESCRIBERS)


@pytest.mark.parametrize("name", ["llama-llama3-old", "mixtral-plain", "gemma-plain"])
def test_files_have_the_names_and_numbers_of_llama_cpp_converter(name, tmp_path):
    """Against a file written by the gguf library's own tables of names."""
    theirs = gguf_of(name, tmp_path)
    stored = open_model(write_model(GOLDENS / name, tmp_path / "hub2"))
    ours = write_file_of(tmp_path / "ours.gguf", stored.config, stored.weights)
    a, b = GGUF.open(theirs), GGUF.open(ours)
    assert set(a.names) == set(b.names)
    for tensor in a.names:
        np.testing.assert_allclose(b.read(tensor).astype(np.float32), a.read(tensor), rtol=0, atol=3e-7, err_msg=tensor)
    kind = b.meta["general.architecture"]
    assert kind == a.meta["general.architecture"]
    keys = {key for key in a.meta if key.startswith(f"{kind}.")}
    assert not (keys - b.meta.keys())
    assert {key: a.meta[key] for key in keys} == {key: b.meta[key] for key in keys}


# ---------------------------------------------------------------- types


def test_types_are_those_of_llama_quantize():
    """As llama-quantize at b11434 chose them for SmolLM2 135M: rows of 576 and 1536."""
    config = CASES["llama-plain"].model_copy(update={"layers": 30, "tied": True, "heads": 9, "kv_heads": 3})

    def types(preset: str, name: str, width: int) -> set[str]:
        more = [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]
        types_by_layer = {
            layer: type_of(f"blk.{layer}.{name}.weight", (8, width), MIXTURES[preset], config, "llama") for layer in range(30)
        }
        assert (
            len({types_by_layer[layer] for layer in more})
            == len({types_by_layer[layer] for layer in types_by_layer.keys() - set(more)})
            == 1
        )
        return {types_by_layer[0], types_by_layer[3]}

    assert types("q4_k_m", "ffn_down", 1536) == {"Q6_K", "Q4_K"}
    assert types("q5_k_m", "ffn_down", 1536) == {"Q6_K", "Q5_K"}
    assert types("q4_k_m", "attn_v", 576) == {"Q8_0", "Q5_0"}
    assert types("q5_k_m", "attn_v", 576) == {"Q8_0", "Q5_1"}
    assert types("q6_k", "attn_v", 576) == {"Q8_0"}
    assert types("q4_0", "attn_v", 576) == {"Q4_0"}
    assert types("q4_k_m", "attn_q", 100) == {"F16"}
    for preset, embedding in {"q4_k_m": "Q8_0", "q6_k": "Q8_0", "q4_0": "Q6_K", "q8_0": "Q8_0", "f16": "F16"}.items():
        width = 512 if preset == "q4_0" else 576
        assert type_of("token_embd.weight", (9, width), MIXTURES[preset], config, "llama") == embedding
    untied = config.model_copy(update={"tied": False})
    assert type_of("token_embd.weight", (9, 512), MIXTURES["q4_k_m"], untied, "llama") == "Q4_K"
    assert type_of("output.weight", (9, 512), MIXTURES["q4_k_m"], untied, "llama") == "Q6_K"
    eight = CASES["mixtral-plain"].model_copy(update={"moe": Experts(count=8, active=2, ffn=38)})
    for name, kind in (("attn_v", "Q8_0"), ("attn_k", "Q8_0"), ("attn_output", "Q5_K")):
        assert type_of(f"blk.0.{name}.weight", (9, 512), MIXTURES["q4_k_m"], eight, "llama") == kind
    for name, shape in (("attn_norm.weight", (512,)), ("ffn_gate_inp.weight", (8, 512)), ("ffn_up_exps.bias", (8, 512))):
        assert type_of(f"blk.0.{name}", shape, MIXTURES["q4_0"], eight, "llama") == "F32"


def test_norms_biases_and_routers_are_float32_whatever_the_source(tmp_path):
    config = config_of("gpt_oss-plain")
    weights = model_weights(noisy_model(config, Unroll()))
    half = Arrays({name: weights.read(name).astype(np.float16) for name in weights.names})
    file = GGUF.open(write_file_of(tmp_path / "x.gguf", config, half))
    kinds = {name: file.type(name) for name in file.names}
    small = [name for name in kinds if name.endswith(".bias") or any(part in name for part in ("norm", "sinks", "gate_inp"))]
    assert {kinds[name] for name in small} == {"F32"}
    assert {kinds["blk.0.ffn_up_exps.weight"], kinds["token_embd.weight"], kinds["output.weight"]} == {"F16"}
    assert file.meta["general.file_type"] == 1


# ---------------------------------------------------------------- what a file cannot hold


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("llama-window", {}, "`activation` is gelu_tanh and would be silu"),
        ("qwen-2", {}, "`pattern` is GLL and would be None; `window` is 7 and would be None"),
        ("gemma-2", {}, "`query_scalar` is 11 and would be 14"),
        ("llama-plain", {"rope": Rope(pairs="interleaved")}, "`rope.pairs` is interleaved and would be halves"),
        ("olmo-2", {}, "the family `olmo` cannot be written as GGUF"),
        ("bert-plain", {}, "the family `bert` cannot be written as GGUF"),
    ],
)
def test_a_setting_without_a_key_is_refused_by_name(name, change, problem):
    config = CASES[name].model_copy(update=change)
    with pytest.raises(Unsupported) as error:
        gguf_content(config, model_weights(noisy_model(config, Unroll())), None)
    assert problem in error.value.what


def test_weights_that_are_not_the_models_are_refused():
    config = CASES["llama-plain"]
    weights = model_weights(noisy_model(config, Unroll()))
    some = Arrays({name: weights.read(name) for name in weights.names if name != "layers.1.attn.q.w"})
    with pytest.raises(BadInput, match=r"layers\.1\.attn\.q\.w"):
        gguf_content(config, some, None)
