"""GGUF files in, against the reference's logits: `gguf_files` writes the goldens' weights as llama.cpp's converter would."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import ARCHS, Packed, write_gguf
from gguf_files import llama3 as factor_of
from golden_weights import write_model
from helpers import LOGIT_ROUNDING, relative
from safetensors.numpy import load_file

import argosy
from argosy.checkpoint.open import open_model
from argosy.core.errors import BadInput, Damaged
from argosy.core.formats import Arrays
from argosy.core.keymap import KeyMap
from argosy.models.base.language import LanguageConfig
from argosy.models.gemma import GemmaConfig
from argosy.models.gpt_oss import GptOssConfig
from argosy.models.qwen import QwenConfig
from argosy.models.settings import Experts, Llama3Scaling
from argosy.weights.gguf.metadata import llama3, rotary_share
from argosy.weights.gguf.reader import READERS
from argosy.weights.hub.writer import save_folder

GOLDENS = Path(__file__).parents[1] / "goldens" / "models"
LOGITS = """llama-llama3-old mixtral-plain qwen2-tied qwen2-moe qwen3-tied-biased gemma-plain gemma2-plain
    gemma3-plain phi3-long phi3-short deepseek_v2-groups deepseek_v3-groups""".split()  # noqa: SIM905
BY_DEFAULT = ("llama-llama3-old", "mixtral-plain", "qwen2-tied", "gemma3-plain")
SAME = """llama-llama3-mlp-bias-tied llama-multi-query-tied llama-linear-attention-bias llama-yarn mistral-window
    mistral-window-tied mixtral-window qwen2-plain qwen2-yarn qwen3-plain qwen3-moe gemma-multi-query gemma2-uncapped phi3-window
    deepseek_v2-lite gpt-oss-yarn""".split()  # noqa: SIM905
WIDE: dict[str, Any] = {"vocab": 97, "width": 256, "layers": 2, "ffn": 256, "heads": 2, "head_size": 128, "context": 64}
WIDE_MODELS: dict[str, LanguageConfig] = {
    "qwen3moe": QwenConfig(**WIDE, kv_heads=1, qk_norm=True, moe=Experts(count=3, active=2, ffn=256)),
    "gpt-oss": GptOssConfig(
        **WIDE, kv_heads=1, window=5, pattern="LG", moe=Experts(count=3, active=2, ffn=256, score="softmax_chosen")
    ),
}
TOKENS = np.arange(22).reshape(2, 11) * 7 % 97


def model_of(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A golden's config and weights."""
    hub = write_model(GOLDENS / name, folder)
    return json.loads((hub / "config.json").read_text(encoding="utf-8")), load_file(hub / "model.safetensors")


def gguf_of(name: str, folder: Path, **options: Any) -> Path:
    return write_gguf(folder / "model.gguf", *model_of(name, folder / "hub"), **options)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in BY_DEFAULT else pytest.mark.slow) for n in LOGITS])
def test_logits_equal_the_reference(name: str, tmp_path: Path):
    golden = dict(np.load(GOLDENS / name / "golden.npz"))
    # The reference takes LongRoPE's short table for a sequence within the original context, 50 tokens here.
    lm = argosy.load(gguf_of(name, tmp_path), context=50 if name == "phi3-short" else None)
    assert relative(lm.logits(golden["tokens"]), golden["logits"]) < LOGIT_ROUNDING


@pytest.mark.parametrize("name", ["mixtral-plain", "deepseek_v2-groups", "deepseek_v2-lite"])
def test_files_of_older_converters_are_the_same_model(name: str, tmp_path: Path):
    config, weights = model_of(name, tmp_path / "hub")
    new = open_model(write_gguf(tmp_path / "new.gguf", config, weights))
    old = open_model(write_gguf(tmp_path / "old.gguf", config, weights, old=True))
    assert set(gguf_names(tmp_path / "new.gguf")) != set(gguf_names(tmp_path / "old.gguf"))
    assert old.config == new.config
    assert old.weights.names == new.weights.names
    for path in new.weights.names:
        assert np.array_equal(old.weights.read(path), new.weights.read(path)), path


def gguf_names(path: Path) -> list[str]:
    return [tensor.name for tensor in gguf.GGUFReader(path).tensors]


@pytest.mark.parametrize("name", SAME)
def test_the_same_model_as_the_hub_folder(name: str, tmp_path: Path):
    """Settings and weights are those of the folder, whose logits tests/models/test_parity.py holds to the reference's. No key
    tells gpt-oss's limit: it is 7 in every file."""
    file, folder = open_model(gguf_of(name, tmp_path)), open_model(tmp_path / "hub")
    limit = {"limit": 7.0} if "limit" in type(folder.config).model_fields else {}
    assert settings(file.config) == settings(folder.config) | limit
    assert file.weights.names == folder.weights.names
    for path in folder.weights.names:
        np.testing.assert_allclose(file.weights.read(path), folder.weights.read(path), rtol=0, atol=3e-7, err_msg=path)


def settings(config: LanguageConfig) -> dict[str, Any]:
    """Those that a forward pass reads."""
    fields = config.resolved().model_dump()
    return fields | ({"moe": fields["moe"] | {"balance": 0}} if fields.get("moe") else {})


# ---------------------------------------------------------------- blocks


@pytest.mark.parametrize(("name", "kinds"), [("qwen3moe", ["Q8_0", "Q4_K", "Q6_K"]), ("gpt-oss", ["MXFP4", "Q8_0"])])
def test_blocks_equal_what_they_dequantise_to(name: str, kinds: list[str], tmp_path: Path):
    """Every matrix in one of these types, in turn, against a Hub folder of what the gguf library makes of its blocks."""
    config, rng, values = WIDE_MODELS[name], np.random.default_rng(3), {}
    save_folder(tmp_path / "drawn", config, random_weights(config, rng))
    weights = load_file(tmp_path / "drawn" / "model.safetensors")

    def packed(theirs: str, tensor: np.ndarray) -> Packed:
        if theirs.endswith(("norm.weight", "sinks.weight", ".bias")):
            return tensor, None
        kind = Kind[kinds[len(values) % len(kinds)]]
        blocks = blocks_of(tensor.shape, kind, rng)
        values[theirs] = gguf.quants.dequantize(blocks, kind).reshape(tensor.shape)
        return blocks, kind

    file = write_gguf(tmp_path / "packed.gguf", config.to_hub(), weights, pack=packed)
    plain = write_gguf(tmp_path / "plain.gguf", config.to_hub(), weights, pack=lambda n, t: (values.get(n, t), None))
    assert {tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors} == {*kinds, "F32"}
    save_folder(tmp_path / "hub", config, open_model(plain).weights)
    read, hub = open_model(file), open_model(tmp_path / "hub")
    assert settings(read.config) == settings(hub.config)
    for path in hub.weights.names:
        np.testing.assert_array_equal(read.weights.read(path), hub.weights.read(path), err_msg=path)
    if name == "qwen3moe":
        lm = argosy.load(file)
        assert relative(lm.logits(TOKENS), argosy.load(tmp_path / "hub").logits(TOKENS)) < LOGIT_ROUNDING


def random_weights(config: LanguageConfig, rng: np.random.Generator) -> Arrays:
    table = KeyMap(*config.hub_rows())
    return Arrays({path: rng.normal(0, 0.1, table.shape(path)).astype(np.float32) for path in table.paths})


def blocks_of(shape: tuple[int, ...], kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """Random values as blocks. The gguf library packs no K-quants: there the bytes are random, with scales that give values
    around 0.1; 144 bytes of Q4_K begin with a scale and one for minima, 210 bytes of Q6_K end in a scale."""
    if kind not in (Kind.Q4_K, Kind.Q6_K):
        return gguf.quants.quantize(rng.normal(0, 0.1, shape).astype(np.float32), kind)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // values, size), np.uint8)
    scales = np.array([4e-4, 3e-3] if kind == Kind.Q4_K else [1e-4], np.float16).view(np.uint8)
    at = slice(0, 4) if kind == Kind.Q4_K else slice(208, 210)
    blocks[..., at] = scales
    return blocks.reshape(*shape[:-1], -1)


# ---------------------------------------------------------------- what keys say


@pytest.mark.parametrize(("name", "layers"), [("gemma2-plain", 46), ("gemma3-plain", 62)])
def test_the_27b_gemmas_divide_scores_by_width_over_heads(name: str, layers: int, tmp_path: Path):
    config, weights = model_of(name, tmp_path / "hub")
    deep = {n: t for n, t in weights.items() if not n.startswith("model.layers.")}
    for n in weights.keys() - deep.keys():
        parts = n.split(".")
        for layer in range(layers) if parts[2] == "0" else ():
            deep[".".join([*parts[:2], str(layer), *parts[3:]])] = weights[n]
    file = write_gguf(tmp_path / "model.gguf", config | {"num_hidden_layers": layers}, deep)
    read = open_model(file).config
    assert isinstance(read, GemmaConfig)
    assert read.query_scalar == config["hidden_size"] // config["num_attention_heads"] == 7


@pytest.mark.parametrize(("factor", "original", "base"), [(8.0, 8192, 5e5), (32.0, 8192, 5e5), (16.0, 4096, 1e4)])
def test_llama3_is_recognized_by_its_factors(factor: float, original: int, base: float):
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    divisors = np.array([factor_of(scaling, base ** (i / 128), original) for i in range(0, 128, 2)], np.float32)
    assert llama3(divisors, base) == Llama3Scaling(factor=factor, original=original)
    with pytest.raises(BadInput, match="match no known scaling"):
        llama3(divisors[::-1], base)


def test_tokens_that_end_an_answer_are_all_kept(tmp_path: Path):
    stored = open_model(gguf_of("qwen2-tied", tmp_path, more=lambda w: w.add_eot_token_id(7)))
    assert (stored.hub["bos_token_id"], stored.hub["eos_token_id"]) == (1, [2, 7])
    assert stored.hub["model_type"] == "qwen2"


# ---------------------------------------------------------------- what is refused


def refusal_of(name: str, folder: Path, more: Callable[[gguf.GGUFWriter], Any]) -> str:
    file = gguf_of(name, folder, more=more)
    with pytest.raises(BadInput) as error:
        open_model(file)
    return str(error.value)


def test_every_problem_of_the_metadata_is_reported_at_once(tmp_path: Path):
    def more(w: gguf.GGUFWriter) -> None:
        w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        w.add_uint32("qwen2.rope.dimension_count", 4)
        w.add_float32("qwen2.logit_scale", 0.5)
        w.add_attn_logit_softcapping(50.0)
        w.add_expert_group_count(4)
        w.add_causal_attention(False)

    refusal = refusal_of("qwen2-tied", tmp_path, more)
    for problem in (
        "`qwen2.rope.scaling.type` is `longrope`: only none or linear or yarn is built",
        "`qwen2.rope.dimension_count` is 4 of 8",
        "`qwen2.logit_scale` = `0.5` is not understood",
        "`qwen2.attn_logit_softcapping` = `50.0` is not understood",
        "`qwen2.expert_group_count` = `4` is not understood",
        "`qwen2.attention.causal` is False: only True is built",
    ):
        assert problem in refusal
    assert len(refusal.splitlines()) <= 5


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("mixtral-plain", "llama.expert_gating_func", 2),
        ("qwen3-moe", "qwen3moe.attention.value_length", 12),
        ("deepseek_v2-lite", "deepseek2.nextn_predict_layers", 1),
        ("gemma3-plain", "gemma3.attention.sliding_window_pattern", 4),
        ("phi3-long", "phi3.rope.scaling.factor", 4.0),
    ],
)
def test_what_would_change_the_numbers_is_refused(name: str, key: str, value: float, tmp_path: Path):
    def more(w: gguf.GGUFWriter) -> None:
        w.kv_data[0].pop(key, None)
        w.add_key_value(
            key, value, gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32
        )

    assert key in refusal_of(name, tmp_path, more)


@pytest.mark.parametrize("missing", ["block_count", "attention.head_count", "attention.layer_norm_rms_epsilon"])
def test_a_key_that_is_missing_is_named(missing: str, tmp_path: Path):
    problem = refusal_of("llama-yarn", tmp_path, lambda w: w.kv_data[0].pop(f"llama.{missing}"))
    assert f"`llama.{missing}` is missing" in problem


def test_an_architecture_that_is_not_built_is_answered_with_the_nearest(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3mo")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(BadInput, match="`qwen3mo` is not built") as error:
        open_model(tmp_path / "model.gguf")
    assert error.value.hint == "did you mean `qwen3moe`?"


def test_more_layers_than_tensors_is_damage(tmp_path: Path):
    def more(w: gguf.GGUFWriter) -> None:
        w.kv_data[0]["qwen3moe.block_count"].value = 2**31

    with pytest.raises(Damaged, match="2147483648 layers"):
        open_model(gguf_of("qwen3-moe", tmp_path, more=more))


def test_tensors_that_are_missing_are_listed(tmp_path: Path):
    config, weights = model_of("gpt-oss-yarn", tmp_path / "hub")
    remaining = {n: t for n, t in weights.items() if not n.endswith("sinks")}
    with pytest.raises(BadInput, match="4 missing, 0 unexpected") as error:
        open_model(write_gguf(tmp_path / "model.gguf", config, remaining))
    assert "`blk.3.attn_sinks.weight` is missing" in str(error.value)


def test_every_architecture_is_tested():
    kinds = {
        ARCHS[json.loads((GOLDENS / n / "config.json").read_text(encoding="utf-8"))["model_type"]]
        for n in [*LOGITS, *SAME]
    }
    assert {gguf.MODEL_ARCH_NAMES[kind] for kind in kinds} == set(READERS)


def test_a_rotary_share_gives_the_number_of_its_features_again():
    """As readers of GGUF files compute it: the share of the head, cut to a whole number."""
    for total in range(1, 257):
        for part in range(1, total + 1):
            share = rotary_share(part, total)
            assert int(total * share) == part
            assert share == pytest.approx(part / total, rel=1e-15)
    assert rotary_share(32, 128) == 0.25
