"""The Hub's quantized layouts: packed here, from their documentation, in NumPy; read back bit for bit, and kept in few bits."""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import relative, shared
from laws.families import CASES, noisy_model
from safetensors.numpy import save_file

from argosy.adapt.quant import QuantizedEinsum
from argosy.adapt.rules import Rule, preset_rules
from argosy.adapt.surgery import find, put_at
from argosy.checkpoint.open import open_model
from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.core.formats.safetensors import SafeTensors
from argosy.core.keymap import KeyMap
from argosy.data.settings import DataSettings
from argosy.infer.lm import LM
from argosy.infer.load import load_lm
from argosy.jobs.convert import convert
from argosy.jobs.quantize import quantize
from argosy.models.parts.einsum import Contraction
from argosy.models.parts.stack import Scan, Unroll
from argosy.weights.hub.reader import open_folder
from argosy.weights.quantized import DequantizedTensors

TOKENS = [[5, 9, 100, 23, 7, 60]]
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Every matrix of the layers: inputs of 64, 64 and 128.
LLAMA = CASES["llama-plain"].model_copy(update={"width": 64, "heads": 4, "kv_heads": 2, "head_size": 16, "ffn": 128})


def shapes_of(config) -> dict[str, tuple[int, ...]]:
    table = KeyMap(*config.hub_rows())
    return {name: shape for group in table._groups for name, shape in group.their_shapes(table.sizes).items()}


def is_matrix(name: str) -> bool:
    return name.endswith("proj.weight") or ".experts." in name


# ---------------------------------------------------------------- packers: a weight [outputs, inputs] to tensors, and what they mean


def words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Along the last axis, bit by bit: the first number lowest."""
    rows = [[sum(int(n) << (bits * i) for i, n in enumerate(row[at : at + 32 // bits])) for at in range(0, len(row), 32 // bits)]
            for row in numbers]  # fmt: skip
    return np.asarray(rows, np.uint32).view(np.int32)


def rounded(w: np.ndarray, group: int, bits: int, symmetric: bool, kind=BF16) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unsigned numbers, scales and zero points [outputs, groups]."""
    tiles, top = w.reshape(len(w), -1, group), 2**bits - 1
    if symmetric:
        scale = (np.abs(tiles).max(-1) / (top / 2)).astype(kind)
        zero = np.full(scale.shape, 1 << (bits - 1))
    else:
        low, high = np.minimum(tiles.min(-1), 0), np.maximum(tiles.max(-1), 0)
        scale = ((high - low) / top).astype(kind)
        zero = np.clip(np.rint(-low / scale.astype(np.float32)), 0, top).astype(int)
    q = np.clip(np.rint(tiles / scale.astype(np.float32)[..., None]) + zero[..., None], 0, top).astype(int)
    return q.reshape(w.shape), scale, zero


def meaning(q: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    tiles = q.reshape(*scale.shape, -1) - zero[..., None]
    return (tiles.astype(np.float32) * scale.astype(np.float32)[..., None]).reshape(q.shape)


def pack_quantized(bits: int, group: int | None, symmetric: bool, kind=BF16):
    def pack(name: str, w: np.ndarray):
        q, scale, zero = rounded(w, group or w.shape[1], bits, symmetric, kind)
        tensors = {"weight_packed": words(q, bits), "weight_scale": scale, "weight_shape": np.asarray(w.shape, np.int64)}
        if not symmetric:
            tensors["weight_zero_point"] = np.ascontiguousarray(words(zero.T, bits).T)
        return tensors, meaning(q, scale, zero)

    args = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel", "group_size": group}
    return pack, compressed_config("pack-quantized", args)


def int_quantized(symmetric: bool, data=None):
    def pack(name: str, w: np.ndarray):
        q, scale, zero = rounded(w, w.shape[1], 8, symmetric)
        tensors = {"weight": (q - 128).astype(np.int8), "weight_scale": scale}
        if not symmetric:
            tensors["weight_zero_point"] = (zero - 128).astype(np.int8)
        return tensors, meaning(q, scale, zero)

    args = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    return pack, compressed_config("int-quantized", args, data)


def float_quantized(strategy: str):
    def pack(name: str, w: np.ndarray):
        rows, columns = {"tensor": w.shape, "channel": (1, w.shape[1]), "block": (32, 32)}[strategy]
        counts = -(-w.shape[0] // rows), -(-w.shape[1] // columns)
        values, scale, floats = np.empty(w.shape, E4M3), np.empty(counts, BF16), np.empty(w.shape, np.float32)
        for i, j in np.ndindex(counts):
            at = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scale[i, j] = np.abs(w[at]).max() / 440
            values[at] = (w[at] / np.float32(scale[i, j])).astype(E4M3)
            floats[at] = values[at].astype(np.float32) * np.float32(scale[i, j])
        return {"weight": values, "weight_scale": scale.reshape(-1) if strategy == "tensor" else scale}, floats

    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    return pack, compressed_config("float-quantized", args | ({"block_structure": [32, 32]} if strategy == "block" else {}))


def fp4(kind: str):
    group = 16 if kind == "nvfp4" else 32

    def pack(name: str, w: np.ndarray):
        tiles = w.reshape(len(w), -1, group)
        high = np.abs(tiles).max(-1) / 6
        if kind == "nvfp4":
            # A power of two, by which division is exact.
            whole = np.float32(2 ** np.floor(np.log2(448 / high.max())))
            scale = (high * whole).astype(E4M3)
            step, extra = scale.astype(np.float32) / whole, {"weight_global_scale": np.asarray([whole], np.float32)}
        else:
            exponent = np.ceil(np.log2(high)).astype(int)
            scale, step, extra = (exponent + 127).astype(np.uint8), np.float32(2.0) ** exponent, {}
        codes = np.abs((tiles / step[..., None])[..., None] - E2M1).argmin(-1).astype(np.uint8).reshape(w.shape)
        floats = (E2M1[codes].reshape(tiles.shape) * step[..., None].astype(np.float32)).reshape(w.shape)
        return {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scale, **extra}, floats

    strategy = "tensor_group" if kind == "nvfp4" else "group"
    args = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": group}
    return pack, compressed_config(f"{kind}-pack-quantized", args)


def compressed_config(format: str, args: dict, data: dict | None = None) -> dict:
    group = {"targets": ["Linear"], "weights": {"dynamic": False} | args, "input_activations": data, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"], "config_groups": {"group_0": group}}


def awq(group: int = 16):
    def pack(name: str, w: np.ndarray):
        q, scale, zero = rounded(w, group, 4, False, np.float16)
        order = [0, 2, 4, 6, 1, 3, 5, 7]

        def interleaved(a: np.ndarray) -> np.ndarray:
            return words(a.reshape(len(a), -1, 8)[..., order].reshape(a.shape), 4)

        return {"qweight": interleaved(q.T), "qzeros": interleaved(zero.T), "scales": scale.T.copy()}, meaning(q, scale, zero)

    return pack, {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}


def gptq(bits: int, group: int, *, symmetric: bool = False, order: str = "", version: str = "gptq"):
    def pack(name: str, w: np.ndarray):
        index = np.arange(w.shape[1]) // group
        if order == "shuffled":
            index = np.random.default_rng(3).permutation(index)
        at = np.argsort(index, kind="stable")
        q, scale, zero = rounded(w[:, at], group, bits, symmetric, np.float16)
        floats = np.empty_like(w)
        floats[:, at], q[:, at] = meaning(q, scale, zero), q.copy()
        stored = (zero - (1 if version == "gptq" else 0)) % 2**bits
        tensors = {"qweight": np.ascontiguousarray(words(q, bits).T)}
        tensors |= {"qzeros": words(stored.T, bits), "scales": scale.T.copy(), "g_idx": index.astype(np.int32)}
        return tensors, floats

    settings_of = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": bool(order)}
    return pack, settings_of | {"sym": symmetric, "checkpoint_format": version}


INT8_DATA = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
LAYOUTS = {
    "int4 in groups": (pack_quantized(4, 16, True), "int4", 16),
    "int4 in groups, asymmetric": (pack_quantized(4, 32, False), "int4", 32),
    "int4 in channels, asymmetric": (pack_quantized(4, None, False), "int4", "channel"),
    "int8 packed, asymmetric": (pack_quantized(8, 16, False), "int8", 16),
    "int8 packed": (pack_quantized(8, None, True, np.float32), "int8", "channel"),
    "int2 packed, asymmetric": (pack_quantized(2, 16, False), "int2", 16),
    "int8": (int_quantized(True), "int8", "channel"),
    "int8, asymmetric": (int_quantized(False), "int8", "channel"),
    "fp8 in tensors": (float_quantized("tensor"), "fp8_e4m3", "tensor"),
    "fp8 in channels": (float_quantized("channel"), "fp8_e4m3", "channel"),
    "fp8 in tiles": (float_quantized("block"), "fp8_e4m3", "32x32"),
    "nvfp4": (fp4("nvfp4"), "nvfp4", 16),
    "mxfp4": (fp4("mxfp4"), "mxfp4", 32),
    "awq": (awq(), "int4", 16),
    "gptq": (gptq(4, 16), "int4", 16),
    "gptq, symmetric, 8 bits": (gptq(8, 32, symmetric=True), "int8", 32),
    "gptq, 2 bits, in order": (gptq(2, 16, order="sorted"), "int2", 16),
    "gptq_v2": (gptq(4, 16, version="gptq_v2"), "int4", 16),
}


def write_packed(folder: Path, config, pack, settings: dict, which=is_matrix) -> tuple[Path, Path]:
    """A packed folder, and the folder of floats that it stands for."""
    rng = np.random.default_rng(0)
    packed, plain = {}, {}
    for name, shape in shapes_of(config).items():
        w = rng.standard_normal(shape).astype(np.float32) / (8 if len(shape) > 1 else 1)
        if which(name):
            tensors, plain[name] = pack(name, w)
            packed |= {f"{name.removesuffix('.weight')}.{end}": np.ascontiguousarray(a) for end, a in tensors.items()}
        else:
            packed[name] = plain[name] = w
    for path, tensors, extra_fields in ((folder / "packed", packed, {"quantization_config": settings}), (folder / "plain", plain, {})):
        path.mkdir(parents=True)
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config.to_hub() | extra_fields))
    return folder / "packed", folder / "plain"


def check_equal(packed: Path, plain: Path) -> None:
    """Every weight, as floats and from its codes, bit for bit."""
    stored, exact = open_folder(packed), open_folder(plain).weights
    assert set(stored.weights.names) == set(exact.names)
    again = exact if stored.quantized is None else DequantizedTensors(stored.config, stored.quantized)
    for name in exact.names:
        np.testing.assert_array_equal(stored.weights.read(name), exact.read(name), err_msg=name)
        np.testing.assert_array_equal(again.read(name), exact.read(name), err_msg=name)
        assert stored.weights.read(name).dtype == stored.weights.dtype(name)
    for name in () if stored.quantized is None else stored.quantized.reader.names:
        array = stored.quantized.reader.read(name)
        assert (array.shape, array.dtype) == (stored.quantized.reader.shape(name), stored.quantized.reader.dtype(name)), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_packed_folder_is_its_floats_and_keeps_its_codes(layout, tmp_path):
    (pack, settings), format, granularity = LAYOUTS[layout]
    packed, plain = write_packed(tmp_path, LLAMA, pack, settings)
    messages: list[str] = []
    stored = open_folder(packed, messages.append)
    assert not messages
    assert {(s.weights, s.granularity) for s in stored.quantized.schemes.values()} == {(format, granularity)}
    assert len(stored.quantized.schemes) == 7 * LLAMA.layers
    check_equal(packed, plain)


@pytest.mark.parametrize("layout", ["int4 in groups, asymmetric", "int8", "fp8 in tiles", "nvfp4", "awq"])
def test_a_packed_folder_answers_as_its_floats(layout, tmp_path):
    packed, plain = write_packed(tmp_path, LLAMA, *LAYOUTS[layout][0])
    exact = load_lm(plain).logits(TOKENS)
    for run in (None, Scan()):
        lm = load_lm(packed, run=run)
        assert sum(isinstance(of, QuantizedEinsum) for of in find(lm.module, ".*").values()) >= 7
        assert relative(lm.logits(TOKENS), exact) < 1e-5


def test_columns_in_the_order_of_activations_are_read_as_floats(tmp_path):
    packed, plain = write_packed(tmp_path, LLAMA, *gptq(4, 16, order="shuffled"))
    messages: list[str] = []
    assert open_folder(packed, messages.append).quantized is None
    assert len(messages) == 1
    assert "21 packed weights" in messages[0]
    check_equal(packed, plain)
    assert relative(load_lm(packed).logits(TOKENS), load_lm(plain).logits(TOKENS)) == 0


# ---------------------------------------------------------------- out


def quantized(config, folder: Path, rules, to: str) -> Path:
    """A tiny model, quantized into a folder."""
    if not (folder / "plain").exists():
        LM(config, noisy_model(config, Unroll()), None).save(folder / "plain")
    quantize(str(folder / "plain"), folder / to, rules, to=to)
    return folder / to


OUT = {
    "w8": ("pack-quantized", 0),
    "w8a8": ("int-quantized", 0),
    "w4": ("pack-quantized", 0),
    "w4a8": ("pack-quantized", 0),
    "fp8": ("float-quantized", 0),
    "nvfp4": ("nvfp4-pack-quantized", 1e-6),
    "mxfp4": ("mxfp4-pack-quantized", 0),
}


@pytest.mark.parametrize("preset", OUT)
def test_a_written_folder_has_the_codes_that_were_rounded(preset, tmp_path):
    """On stories260K, whose feed-forward part has 172 features."""
    format, most = OUT[preset]
    source = str(shared("models/stories260k"))
    rules = preset_rules(preset)
    if "fp4" in preset:
        rules = [Rule(where=r"layers\..*\.mlp\.down"), *rules]
    quantize(source, tmp_path / "argosy", rules)
    quantize(source, tmp_path / "hub", rules, to="compressed-tensors")
    hub_settings = json.loads((tmp_path / "hub" / "config.json").read_text())["quantization_config"]
    assert hub_settings["format"] == format
    assert "lm_head" in hub_settings["ignore"]
    ours, theirs = open_model(tmp_path / "argosy"), open_model(tmp_path / "hub")
    assert set(theirs.quantized.schemes) == set(ours.quantized.schemes)
    assert {s.activations for s in theirs.quantized.schemes.values()} == {s.activations for s in ours.quantized.schemes.values()}
    for name in ours.weights.names:
        assert relative(theirs.weights.read(name), ours.weights.read(name)) <= most, name
    if preset == "w4":
        prompt = [[1, 403, 407, 261, 378]]
        assert relative(load_lm(tmp_path / "hub").logits(prompt), load_lm(tmp_path / "argosy").logits(prompt)) < 1e-5


FAMILIES_OUT = ("llama-plain", "phi-window", "mixtral-plain", "gemma-3", "deepseek-3.2", "qwen3_next-mixed", "qwen-3-experts")


@pytest.mark.parametrize("name", FAMILIES_OUT)
def test_families_go_out_and_come_back(name, tmp_path):
    """Fused projections, experts of their own tensors, latent attention."""
    config = CASES[name]
    rules = [Rule(where=r"layers\..*\.(q|k|v|z|o|gate|up|down)", weights="int8", calibration="minmax")]
    ours = open_model(quantized(config, tmp_path, rules, "argosy"))
    theirs = open_model(quantized(config, tmp_path, rules, "compressed-tensors"))
    assert set(theirs.quantized.schemes) == set(ours.quantized.schemes)
    for weight in ours.weights.names:
        assert relative(theirs.weights.read(weight), ours.weights.read(weight)) < 1e-6, weight


def test_rules_that_differ_become_groups_of_named_modules(tmp_path):
    rules = [Rule(where=r"layers\..*\.mlp\.down", weights="int8"), Rule(where=r"layers\.0\..*"), Rule(weights="int4", granularity=4)]
    ours, theirs = (open_model(quantized(CASES["llama-plain"], tmp_path, rules, to)) for to in ("argosy", "compressed-tensors"))
    hub_settings = theirs.hub["quantization_config"]
    assert [len(group["targets"]) for group in hub_settings["config_groups"].values()] == [10, 2, 3]  # heads of 14 are groups of 2
    assert "model.layers.0.self_attn.q_proj" in hub_settings["ignore"]
    formats = [{name: s.weights for name, s in stored.quantized.schemes.items()} for stored in (ours, theirs)]
    assert formats[0] == formats[1]
    for weight in ours.weights.names:
        np.testing.assert_array_equal(theirs.weights.read(weight), ours.weights.read(weight))


@pytest.mark.parametrize(
    ("name", "rules", "complaint"),
    [
        ("llama-plain", [Rule(weights="nf4")], "no such format"),
        ("llama-plain", [Rule(weights="int2", calibration="minmax")], "no such format"),
        ("llama-plain", [Rule(weights="mxfp6_e2m3")], "no such format"),
        ("llama-plain", [Rule(weights="nvfp4")], "blocks of 16 do not divide its 44 inputs"),
        ("llama-plain", [Rule(weights="fp8_e4m3", granularity=4)], "not for groups"),
        ("llama-plain", [Rule(weights="fp8_e4m3", granularity="8x8")], "blocks of 8 x 8"),
        ("llama-plain", [Rule(weights="int4", activations="int4", activation_block=4)], "do not multiply"),
        ("llama-plain", [Rule(where="embed", weights="int8")], "not embeddings"),
        ("gpt_oss-plain", [Rule(where=r"layers\..*\.mlp\.(gate_up|gate|up|down)", weights="int8")], "fused into one tensor"),
        ("gpt2-tied", [Rule(weights="int8")], "scales are not those of blocks"),
        ("phi-window", [Rule(where=r"layers\..*\.attn\.q", weights="int8")], "quantized in different ways"),
    ],
)
def test_what_the_layout_cannot_say_is_refused_before_anything_is_written(name, rules, complaint, tmp_path):
    with pytest.raises(ArgosyError, match=complaint):
        quantized(CASES[name], tmp_path, rules, "compressed-tensors")
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


# ---------------------------------------------------------------- what differs, and garbage


def test_modules_that_are_not_packed_stay_as_they_are(tmp_path):
    packed, plain = write_packed(tmp_path, LLAMA, *awq(), which=lambda name: is_matrix(name) and ".0." not in name)
    assert {name.split(".")[1] for name in open_folder(packed).quantized.schemes} == {"1", "2"}
    check_equal(packed, plain)
    # Layers that differ cannot be stacked.
    assert relative(load_lm(packed, run=Scan()).logits(TOKENS), load_lm(plain).logits(TOKENS)) < 1e-5


def test_experts_and_fused_projections_are_read(tmp_path):
    for name in ("mixtral-plain", "phi-window"):
        packed, plain = write_packed(tmp_path / name, CASES[name], *pack_quantized(4, None, False))
        assert open_folder(packed).quantized is not None
        check_equal(packed, plain)


def test_data_with_scales_of_its_own_is_rounded(tmp_path):
    pack, settings = int_quantized(True, INT8_DATA)
    schemes = open_folder(write_packed(tmp_path, LLAMA, pack, settings)[0]).quantized.schemes.values()
    assert {scheme.activations for scheme in schemes} == {"int8"}


STATIC_DATA = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}


def with_input_scales(pack):
    """A packer that also writes a scale of data, another for each module."""

    def packed(name: str, w: np.ndarray):
        tensors, floats = pack(name, w)
        return tensors | {"input_scale": np.asarray([len(name) / 1024], BF16)}, floats

    return packed


def test_a_calibrated_scale_of_data_is_used(tmp_path):
    """The answer is that of products whose data is rounded by hand."""
    pack, settings = int_quantized(True, STATIC_DATA)
    packed, plain = write_packed(tmp_path, LLAMA, with_input_scales(pack), settings)
    for run in (Unroll(), Scan()):
        lm = load_lm(packed, run=run)
        exact = load_lm(plain, run=Unroll())
        for name, of in find(exact.module, ".*").items():
            if name.startswith("layers."):
                theirs = f"model.{name.replace('.attn.', '.self_attn.')}_proj.weight"
                put_at(exact.module, name, RoundsByHand(of, float(BF16(len(theirs) / 1024))))
        assert relative(lm.logits(TOKENS), exact.logits(TOKENS)) < 1e-5


class RoundsByHand(Contraction):
    def __init__(self, of, scale):
        self.eq, self.legend, self.of, self.by = of.eq, of.legend, of, scale

    @property
    def weight(self):
        return self.of.weight

    def product(self, x, route=None, *, dtype=None):
        x = jnp.clip(jnp.round(x / jnp.float32(self.by)), -128, 127) * jnp.float32(self.by)
        return self.of.product(x, route, dtype=dtype)


@pytest.mark.parametrize(
    ("data", "change", "complaint"),
    [
        (STATIC_DATA, None, "q_proj.input_scale` is missing"),
        (STATIC_DATA, lambda a: np.ones(3, np.float32), "q_proj.input_scale` is"),
        (STATIC_DATA, lambda a: a.astype(np.int32), "stored as int32"),
        (STATIC_DATA, lambda a: a * 0, "the scale of its inputs is 0"),
        (STATIC_DATA, lambda a: -a, "the scale of its inputs is -"),
        (STATIC_DATA, lambda a: a * np.asarray(np.nan, BF16), "a scale is not finite"),
    ],
)
def test_scales_of_data_that_do_not_fit_are_named(data, change, complaint, tmp_path):
    pack, settings = int_quantized(True, data)
    packed, _ = write_packed(tmp_path, LLAMA, with_input_scales(pack), settings)
    file = SafeTensors.open(packed / "model.safetensors")
    whole = {name: np.array(file.read(name)) for name in file.names}
    input_scale = whole.pop(f"{Q}.input_scale")
    whole |= {} if change is None else {f"{Q}.input_scale": change(input_scale)}
    save_file(whole, packed / "model.safetensors")
    with pytest.raises(ArgosyError, match=complaint):
        load_lm(packed)


def test_asymmetric_scales_of_data_are_not_used(tmp_path):
    pack, settings = int_quantized(True, STATIC_DATA | {"symmetric": False})
    schemes = open_folder(write_packed(tmp_path, LLAMA, with_input_scales(pack), settings)[0]).quantized.schemes.values()
    assert {scheme.activations for scheme in schemes} == {None}


STATIC_OUT = [("llama-plain", "w8a8-static"), ("mixtral-plain", "fp8-static"), ("phi-window", "w8a8-static")]


@pytest.mark.parametrize(("name", "preset"), STATIC_OUT)
def test_static_scales_go_out_and_come_back(name, preset, tmp_path):
    """As a dynamic=false group and one number for a module; experts have the same for all of them."""
    config, data = CASES[name], DataSettings(source="synthetic", sequence=24)
    LM(config, noisy_model(config, Unroll()), None).save(tmp_path / "plain")
    for to in ("argosy", "compressed-tensors"):
        quantize(str(tmp_path / "plain"), tmp_path / to, preset_rules(preset), data=data, samples=2, to=to)
    ours, theirs = (load_lm(tmp_path / to) for to in ("argosy", "compressed-tensors"))
    hub_settings = json.loads((tmp_path / "compressed-tensors" / "config.json").read_text())["quantization_config"]
    args = hub_settings["config_groups"]["group_0"]["input_activations"]
    kind = "int" if preset == "w8a8-static" else "float"
    assert {key: args[key] for key in STATIC_DATA} == STATIC_DATA | {"type": kind}
    file = SafeTensors.open(tmp_path / "compressed-tensors" / "model.safetensors")
    scales = {n: np.array(file.read(n)) for n in file.names if n.endswith(".input_scale")}
    assert len(scales) == sum(n.endswith(".weight_scale") for n in file.names)
    assert {(a.shape, a.dtype) for a in scales.values()} == {((1,), np.dtype(np.float32))}
    stored = open_model(tmp_path / "argosy").quantized.reader
    assert {float(a[0]) for a in scales.values()} == {float(stored.read(n)) for n in stored.names if n.endswith(".x_scale")}
    np.testing.assert_array_equal(ours.logits(TOKENS), theirs.logits(TOKENS))


def test_static_scales_that_are_not_multiplied_are_refused(tmp_path):
    rules = [Rule(weights="int4", granularity=4, activations="int8", activations_scale="static")]
    LM(CASES["llama-plain"], noisy_model(CASES["llama-plain"], Unroll()), None).save(tmp_path / "plain")
    data = DataSettings(source="synthetic", sequence=24)
    with pytest.raises(ArgosyError, match="by a static scale: vLLM does not multiply"):
        quantize(str(tmp_path / "plain"), tmp_path / "out", rules, data=data, samples=1, to="compressed-tensors")
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_floats_of_a_packed_folder_are_a_plain_one(tmp_path):
    packed, plain = write_packed(tmp_path, LLAMA, *gptq(4, 16))
    convert(str(packed), tmp_path / "floats", "hub", None)
    assert "quantization_config" not in json.loads((tmp_path / "floats" / "config.json").read_text())
    check_equal(tmp_path / "floats", plain)
    with pytest.raises(BadInput, match="quantized already"):
        quantize(str(packed), tmp_path / "again", preset_rules("w4"), to="compressed-tensors")


Q = "model.layers.1.self_attn.q_proj"
COMPRESSED = ("int4 in groups, asymmetric", "int8", "fp8 in tiles", "nvfp4", "mxfp4")


def change_packed(tmp_path: Path, layout: str, tensors: dict, **more) -> Path:
    """A folder with some tensors changed or, for None, left out."""
    (pack, settings), _, _ = LAYOUTS[layout]
    packed, _ = write_packed(tmp_path, LLAMA, pack, settings | more)
    file = SafeTensors.open(packed / "model.safetensors")
    whole = {name: np.array(file.read(name)) for name in file.names}
    for name, change in tensors.items():
        whole[f"{Q}.{name}"] = None if change is None else change(whole[f"{Q}.{name}"]) if callable(change) else change
    save_file({name: np.ascontiguousarray(a) for name, a in whole.items() if a is not None}, packed / "model.safetensors")
    return packed


@pytest.mark.parametrize(
    ("layout", "name", "change", "error", "complaint"),
    [
        *((layout, "weight_scale", None, BadInput, "q_proj.weight_scale` is missing") for layout in COMPRESSED),
        *((layout, "weight_scale", lambda a: a[:-1], BadInput, "q_proj.weight_scale` is") for layout in COMPRESSED),
        *((layout, "weight_scale", lambda a: np.ones(a.shape, np.int32), Damaged, "stored as int32") for layout in COMPRESSED),
        ("int4 in groups", "weight_packed", None, BadInput, "weight_packed` is missing"),
        ("int4 in groups", "weight_packed", lambda a: a[:, 1:], BadInput, "does not hold"),
        ("int4 in groups", "weight_packed", lambda a: a.astype(np.float32), Damaged, "stored as float32"),
        ("int4 in groups", "weight_shape", None, BadInput, "weight_shape` is missing"),
        ("int4 in groups, asymmetric", "weight_zero_point", None, BadInput, "weight_zero_point` is missing"),
        ("int8, asymmetric", "weight_zero_point", lambda a: a.astype(np.int32), Damaged, "stored as int32"),
        ("int8", "weight", None, BadInput, "q_proj.weight` is missing"),
        ("nvfp4", "weight_global_scale", None, BadInput, "weight_global_scale` is missing"),
        ("awq", "qzeros", None, BadInput, "qzeros` is missing"),
        ("awq", "scales", lambda a: a[:, :-1], BadInput, "scales` is"),
        ("awq", "qweight", lambda a: a.astype(np.int64), Damaged, "stored as int64"),
        ("gptq", "scales", None, BadInput, "scales` is missing"),
        ("gptq", "g_idx", lambda a: a + 1, Damaged, "groups from 1 to 4 of 4"),
        ("gptq", "g_idx", lambda a: a[1:], BadInput, "g_idx` is"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named_on_opening(layout, name, change, error, complaint, tmp_path):
    with pytest.raises(error, match=complaint):
        open_folder(change_packed(tmp_path, layout, {name: change}))


@pytest.mark.parametrize(
    ("layout", "name", "change", "complaint"),
    [
        ("int4 in groups", "weight_scale", lambda a: a * np.asarray(np.nan, a.dtype), "a scale is not finite"),
        ("awq", "scales", lambda a: a * np.float16(np.inf), "a scale is not finite"),
        ("nvfp4", "weight_scale", lambda a: np.full(a.shape, np.nan, a.dtype), "a scale is not finite"),
        ("mxfp4", "weight_scale", lambda a: np.full(a.shape, 255, np.uint8), "255 does not stand for a number"),
        ("gptq, symmetric, 8 bits", "qzeros", lambda a: a + 1, "differ from the middle"),
    ],
)
def test_numbers_that_are_none_are_found_on_reading(layout, name, change, complaint, tmp_path):
    stored = open_folder(change_packed(tmp_path, layout, {name: change}))
    with pytest.raises(Damaged, match=complaint):
        stored.weights.read("layers.1.attn.q.w")
    with pytest.raises(Damaged, match=complaint):
        load_lm(stored.path)


def test_a_second_level_of_zero_is_found_on_opening(tmp_path):
    with pytest.raises(Damaged, match="by which scales are divided"):
        open_folder(change_packed(tmp_path, "nvfp4", {"weight_global_scale": np.zeros(1, np.float32)}))


@pytest.mark.parametrize(
    ("layout", "more", "complaint"),
    [
        ("int8", {"format": "marlin-24"}, "in the format `marlin-24` is not supported"),
        ("int8", {"config_groups": None}, "no object of groups"),
        ("int8", {"config_groups": {"a": {"targets": ["re:nothing"], "weights": {"num_bits": 8}}}}, "no group of `config_groups`"),
        ("int8", {"config_groups": {"a": {"targets": ["re:("], "weights": {"num_bits": 8}}}}, "is no regular expression"),
        ("int4 in groups", {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 3}}}}, "int of 3 bits"),
        ("int8", {"config_groups": {"a": {"targets": ["Linear"], "weights": {"strategy": "attn_head"}}}}, "strategy `attn_head`"),
        ("awq", {"version": "gemv"}, "`awq` with version gemv"),
        ("awq", {"group_size": 24}, "groups of 24 do not divide"),
        ("gptq", {"bits": 3}, "`gptq` with 3 bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "packed as marlin"),
        ("gptq", {"quant_method": "hqq"}, "quantized by `hqq` are not supported"),
    ],
)
def test_ways_of_packing_that_are_not_read_are_refused_by_name(layout, more, complaint, tmp_path):
    with pytest.raises(ArgosyError, match=complaint):
        open_folder(change_packed(tmp_path, layout, {}, **more))
