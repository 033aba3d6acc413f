"""Folders as DeepSeek-V3 and gpt-oss are published: FP8 in blocks of 128 x 128, MXFP4. Quantised here, from the formats' papers."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from laws.families import CASES
from safetensors.numpy import load_file, save_file

from argosy import load
from argosy.adapt.rules import Rule
from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.core.formats.safetensors import SafeTensors
from argosy.core.keymap import KeyMap
from argosy.jobs.convert import convert
from argosy.jobs.quantize import quantize
from argosy.models.parts.weight import split
from argosy.weights.hub.reader import open_folder

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
BLOCK = 128
PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "eh_proj", "shared_head.head", "bias")  # as in DeepSeek-V3


def shapes_of(config) -> dict[str, tuple[int, ...]]:
    """Of every tensor on the Hub."""
    table = KeyMap(*config.hub_rows())
    groups = (group.their_shapes(table.sizes) for group in table._groups)
    return {name: shape for group in groups for name, shape in group.items()}


def random_weights(config) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes_of(config).items()}


def fp8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, scales, and what they stand for: each tile by its largest value, partial tiles at the edges."""
    rows, columns = (-(-n // BLOCK) for n in weight.shape)
    values, scales = np.empty(weight.shape, ml_dtypes.float8_e4m3fn), np.empty((rows, columns), np.float32)
    floats = np.empty_like(weight)
    for i in range(rows):
        for j in range(columns):
            tile = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            scales[i, j] = np.abs(weight[tile]).max() / 448
            values[tile] = (weight[tile] / scales[i, j]).astype(ml_dtypes.float8_e4m3fn)
            floats[tile] = values[tile].astype(np.float32) * scales[i, j]
    return values, scales, floats


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Copies: of what the safetensors package refuses to read into NumPy, FP8, too."""
    file = SafeTensors.open(folder / "model.safetensors")
    return {name: np.array(file.read(name)) for name in file.names}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder with matrices of up to 140 x 200 in FP8, and what its tensors stand for."""
    config = CASES["deepseek-3"].model_copy(update={"width": 200, "ffn": 140, "latent_rank": 130})
    folder = tmp_path_factory.mktemp("fp8") / "model"
    folder.mkdir()
    tensors, floats = {}, {}
    for name, weight in random_weights(config).items():
        if any(part in name for part in PLAIN):
            tensors[name] = floats[name] = weight.astype(ml_dtypes.bfloat16)
        else:
            tensors[name], tensors[f"{name}_scale_inv"], floats[name] = fp8(weight)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_hub() | {"quantization_config": FP8, "bos_token_id": 7}))
    return folder, floats


def test_fp8_becomes_plain(deepseek, tmp_path: Path):
    """Every tensor, the module ahead's among them, bit for bit; then the folder says nothing of FP8."""
    folder, floats = deepseek
    convert(str(folder), tmp_path / "plain", "hub", None)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    copies = {"model.layers.5.embed_tokens.weight", "model.layers.5.shared_head.head.weight"}
    assert set(plain) == set(floats) | copies
    for name, weight in floats.items():
        assert plain[name].dtype == weight.dtype, name
        np.testing.assert_array_equal(plain[name], weight, err_msg=name)
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["bos_token_id"] == 7
    assert open_folder(tmp_path / "plain").config == open_folder(folder).config


def test_scaled_weights_are_float32_before_they_are_read(deepseek):
    weights = open_folder(deepseek[0]).weights
    kinds = {name: weights.dtype(name) for name in weights.names}
    assert kinds["layers.0.attn.o.w"] == kinds["mtp.0.block.mlp.gate.w"] == np.float32
    assert kinds["layers.3.mlp.router.w"] == kinds["mtp.0.proj.w"] == ml_dtypes.bfloat16
    assert {name for name in weights.names if weights.read(name).dtype != kinds[name]} == set()


O_PROJ = "model.layers.1.self_attn.o_proj.weight"


def change_folder(folder: Path, target: Path, tensors: dict, **config) -> Path:
    target.mkdir()
    whole = tensors_of(folder) | tensors
    save_file({name: tensor for name, tensor in whole.items() if tensor is not None}, target / "model.safetensors")
    config_fields = json.loads((folder / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(config_fields))
    return target


@pytest.mark.parametrize(
    ("scales", "error", "complaint"),
    [
        (np.ones((2, 2), np.float32), BadInput, "misshapen"),
        (np.ones((2, 1), np.int32), Damaged, "stored as int32"),
        (np.asarray([[1], [np.nan]], np.float32), Damaged, "is not finite"),
        (np.asarray([[np.inf], [1]], np.float32), Damaged, "is not finite"),
    ],
)
def test_bad_scales_are_found(deepseek, tmp_path: Path, scales, error, complaint):
    folder = change_folder(deepseek[0], tmp_path / "bad", {f"{O_PROJ}_scale_inv": scales})
    with pytest.raises(error, match=complaint):
        open_folder(folder).weights.read("layers.1.attn.o.w")


def test_values_that_are_not_fp8_are_found(deepseek, tmp_path: Path):
    shape = tensors_of(deepseek[0])[O_PROJ].shape
    folder = change_folder(deepseek[0], tmp_path / "bad", {O_PROJ: np.ones(shape, np.float32)})
    with pytest.raises(Damaged, match="stored as float32"):
        open_folder(folder).weights.read("layers.1.attn.o.w")


def test_a_layer_may_be_plain_where_others_are_not(deepseek, tmp_path: Path):
    plain = np.ones(tensors_of(deepseek[0])[O_PROJ].shape, np.float32)
    folder = change_folder(deepseek[0], tmp_path / "mixed", {O_PROJ: plain, f"{O_PROJ}_scale_inv": None})
    assert (open_folder(folder).weights.read("layers.1.attn.o.w") == 1).all()


def test_scales_without_a_word_of_them_have_no_place(deepseek, tmp_path: Path):
    folder = change_folder(deepseek[0], tmp_path / "silent", {}, quantization_config=None)
    with pytest.raises(BadInput, match="unexpected"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("quantization", "complaint"),
    [
        ({"quant_method": "hqq", "bits": 4}, "`hqq`"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "`bitsandbytes`"),
        ({"quant_method": "compressed-tensors"}, "no object of groups"),
        ({"quant_method": "fp8"}, "`fp8` in blocks of None"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"`fp8` in blocks of \[64, 64\]"),
    ],
)
def test_other_ways_of_packing_are_refused_by_name(deepseek, tmp_path: Path, quantization, complaint):
    folder = change_folder(deepseek[0], tmp_path / "other", {}, quantization_config=quantization)
    with pytest.raises(ArgosyError, match=complaint):
        open_folder(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Path, Path]:
    """A folder in FP8 with whole tiles, and one with the floats that it stands for."""
    config = CASES["llama-plain"].model_copy(update={"width": 256, "ffn": 384, "heads": 4, "kv_heads": 2, "head_dim": 64})
    folder, floats = (tmp_path_factory.mktemp("llama") / name for name in ("fp8", "floats"))
    tensors, plain = {}, {}
    for name, weight in random_weights(config).items():
        if any(part in name for part in PLAIN):
            tensors[name] = plain[name] = weight * np.float32(0.1)
        else:
            tensors[name], tensors[f"{name}_scale_inv"], plain[name] = fp8(weight * np.float32(0.05))
    for path, stored, extra_fields in ((folder, tensors, {"quantization_config": FP8}), (floats, plain, {})):
        path.mkdir()
        save_file(stored, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config.to_hub() | extra_fields))
    return folder, floats


def test_a_model_in_fp8_keeps_its_codes(llama):
    """A byte for each weight, the published codes, and the logits of the floats that they stand for."""
    folder, floats = llama
    lm, plain = load(folder), load(floats)
    codes = {name: a for name, a in split(lm.module)[1].items() if a.dtype == ml_dtypes.float8_e4m3fn}
    quantized = [name for name in split(plain.module)[1] if name.startswith("layers.") and "norm" not in name]
    assert {name.removesuffix(".values") for name in codes} == {name.removesuffix(".w") for name in quantized}
    stored = tensors_of(folder)["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(np.asarray(codes["layers.0.mlp.down.values"]).view(np.uint8), stored.T.view(np.uint8))
    ids = [list(range(1, 20))]
    ours, exact = lm.logits(ids), plain.logits(ids)
    np.testing.assert_allclose(ours, exact, atol=1e-5 * float(np.abs(exact).max()))
    assert lm.generate(ids, max_tokens=6)[0].tokens == plain.generate(ids, max_tokens=6)[0].tokens


def test_a_model_published_in_fp8_is_quantized_to_fewer_bits(llama, tmp_path: Path):
    """There is no other one to quantize in its place: the same codes as from its floats."""
    folder, floats = llama
    quantize(str(folder), tmp_path / "a", [Rule(weights="int4")])
    quantize(str(floats), tmp_path / "b", [Rule(weights="int4")])
    a, b = (split(load(tmp_path / name).module)[1] for name in "ab")
    for name, value in b.items():
        np.testing.assert_array_equal(a[name], value, err_msg=name)
    loaded = split(load(folder, quantization="w8").module)[1]
    assert {str(loaded[name].dtype) for name in loaded if name.endswith("mlp.down.values")} == {"int8"}


# ---------------------------------------------------------------- MXFP4


def mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks [... G 16], scales [... G], and what they stand for, of a weight whose last axis is summed."""
    groups = np.ascontiguousarray(weight).reshape(*weight.shape[:-1], -1, 32)
    exponent = np.ceil(np.log2(np.abs(groups).max(-1) / 6)).astype(np.int32)
    values = (groups / 2.0 ** exponent[..., None]).astype(ml_dtypes.float4_e2m1fn)
    codes = values.view(np.uint8) & 0xF
    floats = (values.astype(np.float32) * 2.0 ** exponent[..., None]).reshape(weight.shape)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).astype(np.uint8), floats


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder with experts in MXFP4, and what its tensors stand for. They lie transposed beside plain weights."""
    config = CASES["gpt_oss-plain"]
    moe = config.moe.model_copy(update={"ffn": 32})
    config = config.model_copy(update={"width": 64, "ffn": 32, "moe": moe})
    tensors, floats = {}, {}
    for name, weight in random_weights(config).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"], lying = mxfp4(weight.swapaxes(1, 2))
            floats[name] = lying.swapaxes(1, 2)
        else:
            tensors[name] = floats[name] = weight
    folder = tmp_path_factory.mktemp("mxfp4") / "model"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config_fields = config.to_hub() | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (folder / "config.json").write_text(json.dumps(config_fields))
    return folder, floats


def test_gpt_oss_blocks_become_plain(gpt_oss: tuple[Path, dict[str, np.ndarray]], tmp_path: Path):
    folder, floats = gpt_oss
    convert(str(folder), tmp_path / "plain", "hub", None)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert set(plain) == set(floats)
    for name, weight in floats.items():
        np.testing.assert_array_equal(plain[name], weight, err_msg=name)
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_gpt_oss_keeps_its_codes(gpt_oss: tuple[Path, dict[str, np.ndarray]], tmp_path: Path):
    """Half a byte and a share of a scale for each weight of an expert, and the logits of the floats that they stand for."""
    folder, _ = gpt_oss
    convert(str(folder), tmp_path / "plain", "hub", None)
    lm, plain = load(folder), load(tmp_path / "plain")
    leaves = split(lm.module)[1]
    experts = [name for name in leaves if name.endswith((".gate.values", ".up.values", ".down.values"))]
    assert len(experts) == 3 * lm.config.layers
    for name in experts:
        floats = split(plain.module)[1][name.removesuffix("values") + "w"]
        assert leaves[name].nbytes * 8 == floats.nbytes
    ids = [list(range(1, 20))]
    ours, exact = lm.logits(ids), plain.logits(ids)
    np.testing.assert_allclose(ours, exact, atol=1e-5 * float(np.abs(exact).max()))
