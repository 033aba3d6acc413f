"""Any function and any nnx.Module as a bundle; and what is answered to inputs that do not fit."""

import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bundle_files import run_alone, small_bundle
from flax import nnx
from jax import export
from jax._src.core import ShapedArray
from jax._src.internal_test_util.export_back_compat_test_util import CompatTestBase

import argosy
from argosy.core.errors import BadInput, Unsupported
from argosy.export.bundle import Bundle
from argosy.export.manifest import BundleSignature, TensorSignature
from argosy.export.verify import read_bundle_manifest
from argosy.export.write import BundleContents, write_bundle


class Digits(nnx.Module):
    """A convolution, batch norm and dropout: nothing of this house."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.out = nnx.Linear(4 * 8 * 8, 10, rngs=rngs)

    def __call__(self, image: Any) -> Any:
        x = self.dropout(nnx.relu(self.norm(self.conv(image))))
        return {"scores": nnx.softmax(self.out(x.reshape(x.shape[0], -1)))}

    def features(self, image: Any, gain: Any) -> Any:
        return self.conv(image) * gain


@pytest.fixture(scope="module")
def digits():
    model = Digits(nnx.Rngs(0))
    model.norm.mean[...] = jnp.arange(4.0) * 0.1
    return model


def images(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).normal(size=(rows, 8, 8, 1)).astype(np.float32)


def test_a_foreign_module_equals_itself_to_the_last_bit(digits, tmp_path):
    argosy.export(digits, (jnp.zeros((1, 8, 8, 1)),), tmp_path / "b", batch="symbolic")
    (outputs,) = run_alone([{"bundle": tmp_path / "b", "inputs": {"image": images(3)}}], tmp_path)
    np.testing.assert_array_equal(outputs["scores"], nnx.jit(lambda m, x: m(x))(digits, images(3))["scores"])
    stored = Bundle.open(tmp_path / "b")
    np.testing.assert_array_equal(stored.weight("norm.mean"), np.arange(4, dtype=np.float32) * np.float32(0.1))
    assert stored.manifest.lineage["function"].endswith("Digits")


def test_a_method_of_a_module_is_a_function_of_it(digits, tmp_path):
    argosy.export(Digits.features, (digits, images(2), jnp.float32(2)), tmp_path / "b", platforms=["cpu"], outputs=["map"])
    got = Bundle.open(tmp_path / "b").run({"image": images(2), "gain": 3.0})
    np.testing.assert_array_equal(got["map"], nnx.jit(Digits.features)(digits, images(2), jnp.float32(3)))


def test_random_streams_of_a_module_are_its_weights(tmp_path):
    class Noise(nnx.Module):
        def __init__(self):
            self.key = nnx.Param(jax.random.key(3))

        def __call__(self, x: Any) -> Any:
            return x + jax.random.normal(self.key[...], x.shape)

    argosy.export(Noise(), (jnp.zeros(5),), tmp_path / "b", platforms=["cpu"])
    got = Bundle.open(tmp_path / "b").run({"x": np.zeros(5, np.float32)})["output"]
    np.testing.assert_array_equal(got, jax.jit(lambda x: x + jax.random.normal(jax.random.key(3), x.shape))(jnp.zeros(5)))


TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32))


@pytest.mark.parametrize(
    "function",
    [lambda x: x @ TABLE, lambda x: jax.jit(lambda y: jnp.sin(y @ TABLE))(x), lambda x: jax.jit(lambda y: y @ np.asarray(TABLE))(x)],
    ids=["directly", "in-jit", "numpy"],
)
def test_arrays_that_a_function_closes_over_are_weights(function, tmp_path):
    argosy.export(function, (jnp.zeros((2, 40)),), tmp_path / "b", platforms=["cpu"], batch=[2, 4])
    bundle = Bundle.open(tmp_path / "b")
    (name,) = bundle.manifest.signatures["call"].weights
    np.testing.assert_array_equal(bundle.weight(name), TABLE)
    for program in bundle.manifest.signatures["call"].programs:
        assert bundle.manifest.files[program.file].bytes < TABLE.nbytes
    x = np.random.default_rng(1).normal(size=(4, 40)).astype(np.float32)
    np.testing.assert_array_equal(bundle.run({"x": x})["output"], jax.jit(function)(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.lax.scan(lambda c, _: (c @ TABLE[:, :40], None), x, None, 3)[0],
        lambda x: jax.lax.cond(x.sum() > 0, lambda: x @ TABLE, lambda: x @ TABLE * 2),
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c @ TABLE[:, :40] + 1, x),
    ],
    ids=["scan", "cond", "while"],
)
def test_arrays_closed_over_in_loops_are_weights(function, tmp_path):
    x = np.random.default_rng(1).normal(size=(2, 40)).astype(np.float32)
    argosy.export(function, (x,), tmp_path / "b", platforms=["cpu"])
    bundle = Bundle.open(tmp_path / "b")
    (program,) = bundle.manifest.signatures["call"].programs
    assert bundle.manifest.files[program.file].bytes < TABLE.nbytes
    np.testing.assert_array_equal(bundle.run({"x": x})["output"], jax.jit(function)(x))


def test_an_array_that_cannot_be_a_weight_is_refused(tmp_path):
    """Closed over by a function under jit inside a loop."""
    step = jax.jit(lambda c: c @ TABLE[:, :40])
    with pytest.raises(Unsupported, match=r"closes over arrays of shape \[40, 50\] inside `scan`"):
        argosy.export(lambda x: jax.lax.scan(lambda c, _: (step(c), None), x, None, 3)[0], (jnp.ones((2, 40)),), tmp_path / "b")


def test_outputs_have_names(tmp_path):
    def several(a: Any, b: Any) -> Any:
        return a + b, (a - b, {"x": a * b})

    def mapped(a: Any) -> Any:
        return {"sum": a.sum(), "parts": [a, a * 2]}

    argosy.export(several, (jnp.ones(2), jnp.ones(2)), tmp_path / "a", platforms=["cpu"])
    argosy.export(mapped, (jnp.ones(2),), tmp_path / "b", platforms=["cpu"], signature="twice")
    argosy.export(several, (jnp.ones(2), jnp.ones(2)), tmp_path / "c", platforms=["cpu"], outputs=["s", "d", "p"])
    two = {"a": np.float32([3, 4]), "b": np.float32([1, 2])}
    got = Bundle.open(tmp_path / "a").run(two)
    assert {name: value.tolist() for name, value in got.items()} == {"output": [4, 6], "output_1": [2, 2], "output_2": [3, 8]}
    got = Bundle.open(tmp_path / "b").run({"a": two["a"]}, "twice")
    assert {name: value.tolist() for name, value in got.items()} == {"sum": 7, "parts.0": [3, 4], "parts.1": [6, 8]}
    assert list(Bundle.open(tmp_path / "c").run(two)) == ["s", "d", "p"]


def test_inputs_without_names_may_have_them(tmp_path):
    """`nnx.Sequential` takes *args."""
    model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.relu)
    for name, inputs in (("plain", None), ("named", ["pixels"])):
        argosy.export(model, (jnp.ones((1, 3)),), tmp_path / name, platforms=["cpu"], inputs=inputs)
    assert [read_bundle_manifest(tmp_path / n).signature().inputs[0].name for n in ("plain", "named")] == ["input_0", "pixels"]


def test_types_without_a_name_and_names_without_a_file_are_refused(tmp_path):
    class Nibbles(nnx.Module):
        def __init__(self):
            self.codes = nnx.Param(jnp.ones(4, jnp.int4))

        def __call__(self, x: Any) -> Any:
            return x * self.codes[...].astype(jnp.float32)

    with pytest.raises(Unsupported, match="no type for int4, of tensor `codes`"):
        argosy.export(Nibbles(), (jnp.ones(4),), tmp_path / "b", platforms=["cpu"])
    for name in ("../up", "a/b", "", "x" * 65):
        with pytest.raises(BadInput, match="signature `"):
            argosy.export(jnp.sin, (jnp.ones(4),), tmp_path / "b", platforms=["cpu"], signature=name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8", "bool", "float16", "uint32"])
def test_every_type_goes_in_and_out(dtype, tmp_path):
    argosy.export(lambda x: x, (jnp.ones(3, dtype),), tmp_path / "b", platforms=["cpu"])
    values = np.asarray([1, 0, 1]).astype(jnp.dtype(dtype))
    got = Bundle.open(tmp_path / "b").run({"x": values})["output"]
    assert got.dtype == values.dtype
    assert got.tolist() == values.tolist()


def test_what_a_manifest_says_reads_back_as_it_was_said(tmp_path):
    """Nothing is taken for a number or a switch."""
    lineage = {"data": "none", "x": "1e5", "y": ["true", 1e5, None, "010"], "n": {"a": "25k"}}
    words = {"description": "null", "signature": "1e5", "outputs": ["yes"]}
    argosy.export(jnp.sin, (jnp.ones(2),), tmp_path / "b", platforms=["cpu"], lineage=lineage, **words)
    manifest = Bundle.open(tmp_path / "b").manifest
    assert manifest.lineage.items() >= lineage.items()
    assert (manifest.default, manifest.signature().description, manifest.signature().outputs[0].name) == ("1e5", "null", "yes")


def test_sizes_may_be_left_open_by_name(tmp_path):
    a, b = export.symbolic_shape("rows, columns")
    like = jax.ShapeDtypeStruct((a, b), jnp.float32)
    argosy.export(lambda x: {"sums": x.sum(0), "flat": x.reshape(-1)}, (like,), tmp_path / "b", platforms=["cpu"])
    (of,) = read_bundle_manifest(tmp_path / "b").signatures.values()
    assert of.inputs[0].shape == ["rows", "columns"]
    assert {output.name: output.shape for output in of.outputs} == {"sums": ["columns"], "flat": ["columns*rows"]}
    got = Bundle.open(tmp_path / "b").run({"x": np.ones((3, 5), np.float32)})
    assert (got["sums"].shape, got["flat"].shape) == ((5,), (15,))


def test_a_function_that_branches_on_an_open_size_is_refused(tmp_path):
    with pytest.raises(Unsupported, match="as len\\(x\\) does") as caught:
        argosy.export(lambda x: x.reshape(len(x), -1), (jnp.zeros((2, 3, 4)),), tmp_path / "len", batch="symbolic")
    assert "x.shape[0]" in str(caught.value)
    assert not (tmp_path / "len").exists()
    with pytest.raises(Unsupported, match="cannot be exported with open sizes"):
        argosy.export(lambda x: x if x.shape[0] > 3 else -x, (jnp.ones((2, 2)),), tmp_path / "b", batch="symbolic")
    argosy.export(lambda x: x if x.shape[0] > 3 else -x, (jnp.ones((2, 2)),), tmp_path / "b", batch=[2, 4], platforms=["cpu"])
    bundle = Bundle.open(tmp_path / "b")
    assert bundle.run({"x": np.ones((2, 2), np.float32)})["output"][0, 0] == -1
    assert bundle.run({"x": np.ones((4, 2), np.float32)})["output"][0, 0] == 1


def test_calls_without_a_promise_are_refused_by_name(tmp_path):
    def call(x: Any) -> Any:
        return jax.ffi.ffi_call("argosy_unknown_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    with pytest.raises(Unsupported, match="the program calls argosy_unknown_kernel"):
        argosy.export(call, (jnp.ones(3),), tmp_path / "b", platforms=["cpu"])
    assert not list(tmp_path.iterdir())


def test_arguments_that_do_not_fit_are_refused(tmp_path):
    vector = jnp.ones(2)
    with pytest.raises(BadInput, match="the arguments are a tuple or list"):
        argosy.export(jnp.sin, vector, tmp_path / "b")
    with pytest.raises(BadInput, match="argument `x` is no array, but dict"):
        argosy.export(lambda x: x["a"], ({"a": vector},), tmp_path / "b")
    with pytest.raises(BadInput, match="takes a function or a module"):
        argosy.export(3, (vector,), tmp_path / "b")
    with pytest.raises(BadInput, match="the function returns 1 arrays"):
        argosy.export(jnp.sin, (vector,), tmp_path / "b", outputs=["a", "b"])
    with pytest.raises(BadInput, match="the function takes 1 arrays"):
        argosy.export(jnp.sin, (vector,), tmp_path / "b", inputs=["a", "b"])
    with pytest.raises(BadInput, match="argument `x` has no axes"):
        argosy.export(lambda x: x, (jnp.float32(1),), tmp_path / "b", batch=[1])
    assert not list(tmp_path.iterdir())


def test_argosy_export_is_the_room_and_the_function():
    import argosy.export.manifest

    assert argosy.export.manifest.FORMAT == 1
    assert callable(argosy.export)
    assert "export" in dir(argosy)


# ---------------------------------------------------------------- calls


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return Bundle.open(small_bundle(tmp_path_factory.mktemp("small") / "b"))


X, GAIN = np.ones((2, 3), np.float32), np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        ({"x": X}, "input `gain` is missing"),
        ({"x": X, "gian": GAIN}, "no input `gian`"),
        ({"x": X.astype(np.float64), "gain": GAIN}, "input `x` is float64, and this signature takes float32"),
        ({"x": X.astype(np.int32), "gain": GAIN}, "input `x` is int32, and this signature takes float32"),
        ({"x": X[0], "gain": GAIN}, r"input `x` has shape \[3\], and this signature takes \[batch, 3\]"),
        ({"x": X[:, :2], "gain": GAIN}, r"input `x` has shape \[2, 2\], and this signature takes \[batch, 3\]"),
        ({"x": X, "gain": GAIN[:1]}, "`batch` is 2 in input `x` and 1 in input `gain`"),
        ({"x": X[:0], "gain": GAIN[:0]}, "`batch` is 0"),
        ({"x": [[1, 2, 3], [1, 2]], "gain": [1, 1]}, "input `x` has rows of different lengths"),
        ({"x": [["a", "b", "c"]], "gain": [1]}, "input `x` is <U1, and this signature takes float32"),
        ({"x": None, "gain": [1]}, "input `x` is object"),
        ({"x": [[True, False, True]], "gain": [1]}, "input `x` is bool"),
        ({"x": [[1e39, 1, 1]], "gain": [1]}, "input `x` has numbers outside float32"),
    ],
)
def test_inputs_that_do_not_fit_are_named(inputs, match, small):
    with pytest.raises(BadInput, match=match):
        small.run(inputs)


def test_a_signature_that_there_is_none_of(small):
    with pytest.raises(BadInput, match="has no signature `calls`") as error:
        small.run({}, "calls")
    assert "call" in str(error.value)


def test_lists_of_json_are_arrays(small):
    got = small.run({"x": [[1, 1, 1.0], [1, 1, 1]], "gain": [1, 1]})["scores"]
    np.testing.assert_array_equal(got, small.run({"x": X, "gain": GAIN})["scores"])


def test_whole_numbers_are_neither_rounded_nor_cut(tmp_path):
    argosy.export(lambda i: i + 1, (jnp.zeros((1, 2), jnp.int8),), tmp_path / "b", platforms=["cpu"])
    bundle = Bundle.open(tmp_path / "b")
    assert bundle.run({"i": [[1, -128]]})["output"].tolist() == [[2, -127]]
    for wrong, match in (([[1.5, 1]], "is float64"), ([[1, 200]], "outside int8"), ([[1, 2**70]], "is object")):
        with pytest.raises(BadInput, match=match):
            bundle.run({"i": wrong})


def test_warming_up_compiles_what_calls_use(tmp_path, monkeypatch):
    bundle = Bundle.open(small_bundle(tmp_path / "b", batch=[1, 4]))
    assert bundle.warm_up() == 2
    compiled: list[str] = []
    monkeypatch.setattr(jax, "jit", lambda f: compiled.append("a program") or f)
    for rows in (1, 3, 4):
        assert bundle.run({"x": np.ones((rows, 3), np.float32), "gain": np.ones(rows, np.float32)})["scores"].shape == (rows, 400)
    assert not compiled


# ---------------------------------------------------------------- programs of earlier versions


def stored_programs() -> list[tuple[str, Any]]:
    """What jax keeps to test that it reads old programs, of one device on CPUs: (name, data)."""
    package = "jax._src.internal_test_util.export_back_compat_test_data"
    folder = Path(importlib.import_module(package).__file__ or "").parent
    loader = CompatTestBase()
    programs = []
    for file in sorted(folder.glob("*.py")):
        # Those of open sizes (`stablehlo_`) are stored without the names of their sizes.
        if not file.stem.startswith("cpu_"):
            continue
        module = importlib.import_module(f"{package}.{file.stem}")
        for name, nest in vars(module).items():
            if isinstance(nest, dict) and "data" in name.lower():
                programs += [(f"{file.stem}.{name}.{i}", data) for i, data in enumerate(loader.load_testdata_nested(nest))]
    return [(name, data) for name, data in programs if data.platform == "cpu" and data.nr_devices == 1]


def trees_of(data: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Inputs and outputs by name."""
    outputs = jax.tree.leaves(data.expected_outputs)
    inputs = {f"i{i:03}": np.asarray(value) for i, value in enumerate(data.inputs)}
    return inputs, {f"o{i:03}": np.asarray(value) for i, value in enumerate(outputs)}


def signatures_of(arrays: dict[str, np.ndarray]) -> list[TensorSignature]:
    return [TensorSignature(name=name, shape=list(a.shape), dtype=str(a.dtype)) for name, a in arrays.items()]


def as_exported(data: Any) -> Any:
    """An old program as jax's own test makes it callable, with our trees of weights and inputs."""
    inputs, outputs = ({n: ShapedArray(a.shape, a.dtype) for n, a in tree.items()} for tree in trees_of(data))
    in_avals, in_tree = jax.tree.flatten((({}, inputs), {}))
    out_avals, out_tree = jax.tree.flatten(outputs)
    nothing = (None,) * len(in_avals)
    return export.Exported(
        fun_name="old",
        in_tree=in_tree,
        in_avals=tuple(in_avals),
        out_tree=out_tree,
        out_avals=tuple(out_avals),
        _has_named_shardings=True,
        _in_named_shardings=nothing,
        _out_named_shardings=(None,) * len(out_avals),
        in_shardings_hlo=nothing,
        out_shardings_hlo=(None,) * len(out_avals),
        platforms=(data.platform,),
        ordered_effects=(),
        unordered_effects=(),
        disabled_safety_checks=(),
        mlir_module_serialized=data.mlir_module_serialized,
        calling_convention_version=data.xla_call_module_version,
        nr_devices=1,
        module_kept_var_idx=tuple(range(len(in_avals))),
        uses_global_constants=False,
        _get_vjp=None,
    )


# Their vectors may differ between processors: signs, and any basis where values are equal. Values may not.
VECTORS = ("eig", "eigh", "svd")


def test_programs_of_earlier_versions_give_what_is_stored_with_them(tmp_path):
    """All that jax keeps for one CPU device, of May 2024 to October 2025, through bundles."""
    programs_run = []
    with jax.enable_x64(True):
        for name, data in stored_programs():
            exported = as_exported(data)
            inputs, outputs = trees_of(data)
            signature = BundleSignature(inputs=signatures_of(inputs), outputs=signatures_of(outputs), programs=[], weights=[])
            write_bundle(tmp_path / name, BundleContents({"old": signature}, {"old": [({}, exported)]}))
            got = Bundle.open(tmp_path / name).run(inputs)
            for key, value in outputs.items():
                scale = np.abs(value).max(initial=1)
                bound = 1e-4 if value.dtype in (np.float32, np.complex64) else 1e-9
                if "cpu_schur_" in name:
                    t, z = got["o000"], got["o001"]
                    np.testing.assert_allclose(z @ t @ z.conj().T, inputs["i000"], rtol=0, atol=100 * bound * scale, err_msg=name)
                    continue
                vectors = any(f"cpu_{kind}_" in name for kind in VECTORS) and value.ndim == max(a.ndim for a in outputs.values())
                if not vectors:
                    np.testing.assert_allclose(got[key], value, rtol=0, atol=bound * scale, err_msg=f"{name} {key}")
            programs_run.append(name)
    assert len(programs_run) > 40
