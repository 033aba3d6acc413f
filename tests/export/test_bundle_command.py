"""`argosy export` and `argosy bundle`, as they are typed."""

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import jax
import numpy as np
import pytest
from bundle_files import record_of, rewrite_manifest, run_alone, small_bundle
from helpers import default, described_tpus, stories_model
from jax.sharding import SingleDeviceSharding
from laws.families import CASES, noisy_model

from argosy.cli import main
from argosy.cli.verbs.export import next_line
from argosy.core.errors import BadInput, Damaged
from argosy.export.bundle import Bundle
from argosy.export.manifest import MANIFEST, bundle_digest
from argosy.export.model import export_model
from argosy.export.refresh import refresh_bundle
from argosy.export.verify import days_left, read_bundle_manifest, verify_bundle
from argosy.infer.lm import LM
from argosy.models.parts.stack import Unroll
from argosy.observe.readable import format_bytes

INPUTS = '{"x": [[1, 1, 1], [2, 2, 2]], "gain": [1, 2]}'


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return small_bundle(tmp_path_factory.mktemp("whole") / "b")


@pytest.fixture
def bundle(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "b"))


@pytest.fixture
def argosy(capsys):
    """Runs a command, checks its exit code, and returns (stdout, stderr), or the document of --json."""

    def run(*words, code=0):
        assert main([str(word) for word in words]) == code
        out, err = capsys.readouterr()
        return json.loads(out) if "--json" in words and not code else (out, err)

    return run


def test_a_model_is_exported_shown_and_run(argosy, tmp_path):
    """The example of the guide, with a real model."""
    path = tmp_path / "stories"
    done = argosy("export", stories_model(), path, "platforms=cpu", "signature=logits,generate", "length=16", "max_tokens=4", "--json")
    assert (done["default"], sorted(done["signatures"])) == ("logits", ["generate", "logits"])
    assert done["tensors"] == 47
    assert done["lineage"]["source"] == {"name": "stories260k", "kind": "hub"}
    assert done["lineage"]["model"]["family"] == "llama"
    output, _ = argosy("bundle", "show", path)
    assert "signature logits, the default" in output
    assert "at most 4" in output
    (tmp_path / "lines.txt").write_text("Once upon a time\n\nThe cat\n")
    argosy("bundle", "run", path, "signature=generate", f"input={tmp_path / 'lines.txt'}", f"output={tmp_path / 'out.json'}")
    document = json.loads((tmp_path / "out.json").read_text())
    assert [len(row) for row in document["tokens"]] == [4, 4]
    assert len(document["text"]) == 2
    (row,) = argosy("bundle", "run", path, "input=Once upon a time", "--json")["logits"]
    assert len(row[0]) == 512


def test_inputs_come_from_files_and_words(argosy, bundle, tmp_path, monkeypatch):
    expected = argosy("bundle", "run", bundle, f"input={INPUTS}", "--json")["scores"]
    (tmp_path / "in.json").write_text(INPUTS)
    np.savez(tmp_path / "in.npz", **{name: np.asarray(value, np.float32) for name, value in json.loads(INPUTS).items()})
    for name in ("in.json", "in.npz"):
        assert argosy("bundle", "run", bundle, f"input={tmp_path / name}", "--json")["scores"] == expected
    with open(tmp_path / "in.json") as file:
        monkeypatch.setattr("sys.stdin", file)
        assert argosy("bundle", "run", bundle, "input=-", "--json")["scores"] == expected
    argosy("bundle", "run", bundle, f"input={INPUTS}", f"output={tmp_path / 'out.npz'}")
    with np.load(tmp_path / "out.npz") as file:
        np.testing.assert_array_equal(file["scores"], np.asarray(expected, np.float32))
    output, _ = argosy("bundle", "run", bundle, f"input={INPUTS}")
    assert output.startswith("scores: [2, 400] ")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["input=gone.json"], "no file `gone.json`"),
        (["input={"], "is no JSON"),
        (['input={"x": 1}'], "input `x` has shape []"),
        ([], "no input"),
        (["output=out.csv", f"input={INPUTS}"], "output=out.csv"),
        (["signature=other", f"input={INPUTS}"], "has no signature `other`"),
        (["inptu=x"], "did you mean `input`?"),
    ],
)
def test_mistakes_are_answered_before_work(words, problem, argosy, bundle):
    assert problem in argosy("bundle", "run", bundle, *words, code=2)[1]


def test_pickles_are_not_read(argosy, bundle, tmp_path):
    np.savez(tmp_path / "in.npz", x=np.asarray([{"a": 1}], object))
    assert "cannot be read" in argosy("bundle", "run", bundle, f"input={tmp_path / 'in.npz'}", code=1)[1]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["signature=logit"], "did you mean `logits`?"),
        (["platforms=gpu"], "unknown platform `gpu`"),
        (["batch=1,,4"], "batch=symbolic for any"),
        (["batch=0"], "batch=0"),
        (["max_tokens=4"], "max_tokens is for signature=generate"),
        (["signature=embed"], "is not an encoder"),
        (["length=4096"], "more than this signature's 512 tokens"),
        (["signature=classify"], "this model has no head of scores"),
    ],
)
def test_mistakes_of_export_are_answered(words, problem, argosy, tmp_path):
    assert problem in argosy("export", stories_model(), tmp_path / "b", *words, code=2)[1]
    assert not (tmp_path / "b").exists()


def test_a_target_is_needed_and_never_overwritten(argosy, bundle, tmp_path):
    assert "no target" in argosy("export", stories_model(), code=2)[1]
    assert "is not empty" in argosy("export", stories_model(), bundle, code=2)[1]
    assert "no such folder" in argosy("export", tmp_path / "gone", tmp_path / "new", code=2)[1]


def test_verify_names_what_is_wrong(argosy, bundle):
    report = argosy("bundle", "verify", bundle, "--json")
    assert (report["files"], report["signed"]) == (2, False)
    assert report["sha256"] == json.loads((bundle / MANIFEST).read_text())["sha256"]
    assert "all as written" in argosy("bundle", "verify", bundle)[0]
    (bundle / "programs" / "call.bin").write_bytes(b"x")
    assert "programs/call.bin has 1 byte" in argosy("bundle", "verify", bundle, code=1)[1]


def test_show_says_when_the_window_closes(argosy, bundle):
    until = json.loads((bundle / MANIFEST).read_text())["readable_until"]
    assert f"until {until} at least, 1" in argosy("bundle", "show", bundle)[0]
    rewrite_manifest(bundle, lambda content: content.update(readable_until="2020-01-01"))
    assert "which is past" in argosy("bundle", "show", bundle)[0]


def test_differences_are_named(argosy, bundle, tmp_path):
    same = Path(shutil.copytree(bundle, tmp_path / "same"))
    rewrite_manifest(same, lambda content: content.update(written="2020-01-01T00:00:00+00:00"))
    assert argosy("bundle", "diff", bundle, same, "--json")["equal"]
    other = small_bundle(tmp_path / "other", signature="again", lineage={"data": "new"})
    output = argosy("bundle", "diff", bundle, other, code=1)[0]
    assert f"signatures: call: only in {bundle}" in output
    assert f"lineage: data: only in {other}" in output
    assert f"{format_bytes(next((other / 'weights').iterdir()).stat().st_size)} of weights are the same" in output


# ---------------------------------------------------------------- refresh


def test_a_renewed_bundle_computes_the_same_with_the_same_weights(bundle, tmp_path):
    """As if the old one was past its window; its date, programs and parent are new, and nothing else."""
    rewrite_manifest(bundle, lambda c: (c.update(readable_until="2020-01-01"), c["versions"].update(jax="0.9.0")))
    before = read_bundle_manifest(bundle)
    manifest = refresh_bundle(bundle, tmp_path / "new")
    assert manifest.lineage["parent"] == bundle_digest(before)
    assert manifest.versions["jax"] == jax.__version__
    assert days_left(manifest) > 170
    assert manifest.weights == before.weights
    weights = before.weights[0].file
    assert (tmp_path / "new" / weights).samefile(bundle / weights)
    x = {"x": np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32), "gain": np.ones(5, np.float32)}
    (new,) = run_alone([{"bundle": tmp_path / "new", "inputs": x}], tmp_path)
    np.testing.assert_array_equal(new["scores"], Bundle.open(bundle, expired=True).run(x)["scores"])


def test_a_bundle_is_replaced_in_its_place(bundle, tmp_path):
    before = (bundle / MANIFEST).read_bytes(), record_of(next((bundle / "weights").iterdir()))
    refresh_bundle(bundle, now=datetime(2030, 1, 2, tzinfo=UTC))
    assert verify_bundle(bundle).written == "2030-01-02T00:00:00+00:00"
    assert (bundle / MANIFEST).read_bytes() != before[0]
    assert record_of(next((bundle / "weights").iterdir())) == before[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]


def test_a_damaged_bundle_is_not_renewed(bundle, tmp_path):
    path = bundle / "programs" / "call.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Damaged, match=r"programs/call\.bin"):
        refresh_bundle(bundle, tmp_path / "new")
    with pytest.raises(BadInput, match="no bundle at"):
        refresh_bundle(tmp_path / "gone")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("signature", default("logits", of=["logits", "generate"]))
def test_renewed_models_take_every_size_too(signature, tmp_path):
    lm = LM(CASES["llama-plain"], noisy_model(CASES["llama-plain"], Unroll()))
    sizes = {"length": 8, "max_tokens": 4} if signature == "generate" else {}
    export_model(lm, tmp_path / "b", signature=signature, platforms=["cpu"], **sizes)
    refresh_bundle(tmp_path / "b", tmp_path / "new")
    for rows in (1, 3):
        tokens = np.random.default_rng(0).integers(3, lm.config.vocab, (rows, 5)).astype(np.int32)
        old, new = (Bundle.open(tmp_path / name).run({"tokens": tokens}) for name in ("b", "new"))
        for name, value in old.items():
            np.testing.assert_array_equal(new[name], value)


# ---------------------------------------------------------------- TPUs


@pytest.mark.tpu
@pytest.mark.parametrize("case", ["bert-pooler", "llama-window", "deepseek-3.2"])
@pytest.mark.parametrize("signature", ["logits", "generate"])
def test_programs_compile_for_tpus(case, signature, tmp_path, monkeypatch):
    """The program of a bundle, deserialized, by the compiler of v5e; the same file serves CPUs."""
    config = CASES[case]
    if signature == "generate" and not config.causal:
        pytest.skip("an encoder does not generate")
    lm = LM(config, noisy_model(config, Unroll()))
    options = {"batch": 2, "length": 16}
    if config.causal:
        options |= {"signature": signature} | ({"max_tokens": 4} if signature == "generate" else {})
    export_model(lm, tmp_path / "b", **options)
    bundle = Bundle.open(tmp_path / "b")
    of = bundle.manifest.signature()
    (program,) = of.programs
    assert program.platforms == ["cpu", "cuda", "tpu"]
    exported = bundle.exported(program)
    place = SingleDeviceSharding(described_tpus(monkeypatch, "v5e:2x2")[0])
    args = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=place) for aval in exported.in_avals]
    weights, inputs = jax.tree.unflatten(exported.in_tree, args)[0]
    compiled = jax.jit(exported.call).lower(weights, inputs).compile()
    stored = sum(bundle.weight(name).nbytes for name in of.weights)
    assert compiled.memory_analysis().argument_size_in_bytes >= stored, "weights are arguments"


@pytest.mark.parametrize(
    ("mesh", "platforms", "line"),
    [
        ({}, ["cpu", "tpu"], "next: argosy bundle run 'a b'"),
        ({}, ["cuda", "tpu"], "next, where there is a device of cuda or tpu: argosy bundle run 'a b'"),
        ({"tensor": 2, "fsdp": 2}, ["tpu"], "next, where there are 4 devices of tpu: argosy bundle run 'a b'"),
        (
            {"tensor": 2},
            ["cpu", "tpu"],
            "next: JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2 argosy bundle run 'a b'\n"
            "      (without the two variables where there are 2 devices)",
        ),
    ],
)
def test_the_next_line_is_a_command_that_runs(mesh, platforms, line, monkeypatch):
    monkeypatch.delenv("ARGOSY_COMMAND", raising=False)
    assert next_line({"target": "a b", "mesh": mesh, "signatures": {"logits": {"programs": [{"platforms": platforms}]}}}) == line
