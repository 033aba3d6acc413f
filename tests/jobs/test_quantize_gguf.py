"""`argosy quantize MODEL OUT.gguf` and `argosy convert MODEL OUT.gguf`: what is written answers, and nothing half-written remains."""

import json
import signal
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from helpers import stories_model
from laws.families import CASES, noisy_model
from safetensors.numpy import load_file, save_file

import argosy
from argosy.checkpoint.open import open_model
from argosy.cli import main
from argosy.core.errors import BadInput, UserError
from argosy.core.formats.encoders import ENCODERS, encode
from argosy.core.formats.gguf import GGUF
from argosy.core.formats.quants import dequantize
from argosy.infer.lm import LM
from argosy.jobs.convert import convert
from argosy.jobs.quantize import quantize
from argosy.jobs.quantize_gguf import quantize_gguf
from argosy.models.parts.stack import Unroll
from argosy.weights.gguf.mixtures import MIXTURES
from argosy.weights.staging import JOURNAL


@pytest.mark.parametrize("preset", MIXTURES)
def test_a_file_answers_with_the_numbers_that_its_blocks_hold(preset, tmp_path):
    result = quantize_gguf(str(stories_model()), tmp_path / "out.gguf", preset)
    convert(str(stories_model()), tmp_path / "plain.gguf", "gguf", None)
    file, plain = GGUF.open(tmp_path / "out.gguf"), GGUF.open(tmp_path / "plain.gguf")
    assert file.meta["general.file_type"] == MIXTURES[preset].number
    rows = {row["name"]: row for row in result["weights"]}
    for name in file.names:
        kind, exact = file.type(name), np.asarray(plain.read(name), np.float32)
        stored = dequantize(kind, encode(kind, exact)) if kind in ENCODERS else exact.astype(file.dtype(name)).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(file.read(name), np.float32), stored.reshape(exact.shape), err_msg=name)
        assert (name in rows) == (kind != "F32")
        if name in rows:
            change = np.linalg.norm(stored.ravel() - exact.ravel()) / np.linalg.norm(exact)
            assert rows[name]["error"] == pytest.approx(change, rel=1e-4)
    lm, source = argosy.load(tmp_path / "out.gguf"), argosy.load(stories_model())
    prompt = source.tokenizer.encode("Once upon a time, Lily and  Tom\n", special=True)
    assert lm.tokenizer.encode("Once upon a time, Lily and  Tom\n", special=True) == prompt
    roles = [(model.tokenizer.bos, model.tokenizer.eos, model.tokenizer.adds_bos) for model in (lm, source)]
    assert roles[0] == roles[1]
    assert lm.generate(["Once upon a time"], max_tokens=8)[0].text.startswith(", there was a little")
    assert result["bytes"] == (tmp_path / "out.gguf").stat().st_size
    # The Hub folder of it is the same model.
    convert(str(tmp_path / "out.gguf"), tmp_path / "hub", "hub", None)
    np.testing.assert_allclose(argosy.load(tmp_path / "hub").logits([prompt]), lm.logits([prompt]), rtol=0, atol=1e-5)


def test_a_run_of_bytes_has_no_tokenizer_in_the_file_and_is_told(tmp_path):
    from argosy.data.tokenizers.load import load_tokenizer

    config = CASES["llama-plain"].model_copy(update={"vocab": 300})
    LM(config, noisy_model(config, Unroll()), load_tokenizer("byte")).save(tmp_path / "run", format="argosy")
    messages: list[str] = []
    result = convert(str(tmp_path / "run"), tmp_path / "x.gguf", "hub", "bfloat16", say=messages.append)
    assert result["format"] == "gguf"
    read = open_model(tmp_path / "x.gguf")
    assert {read.weights.dtype(name) for name in ("embed.w", "layers.0.attn.q.w")} == {np.dtype(ml_dtypes.bfloat16)}
    assert argosy.load(tmp_path / "x.gguf").tokenizer is None
    assert messages[-1] == "a tokenizer of the kind ByteTokenizer has no place in a GGUF file: the file has no tokenizer"


# ---------------------------------------------------------------- nothing half-written


KILL = """
import os, signal, sys
from argosy.cli import main
from argosy.core.formats.gguf_writer import EncodedTensor
real, left = EncodedTensor.slabs, [9]
def slabs(self, order):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    yield from real(self, order)
EncodedTensor.slabs = slabs
sys.exit(main())
"""


def test_killed_the_same_command_starts_anew(tmp_path, capsys):
    words = ["quantize", str(stories_model()), str(tmp_path / "x.gguf"), "preset=q8_0"]
    killed = subprocess.run([sys.executable, "-c", KILL, *words], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf.part"]
    assert main([*words[:3], "preset=q4_0"]) == 2
    assert "is an unfinished folder of another conversion" in capsys.readouterr().err
    assert main(words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]
    quantize_gguf(str(stories_model()), tmp_path / "y.gguf", "q8_0")
    assert GGUF.open(tmp_path / "x.gguf").places == GGUF.open(tmp_path / "y.gguf").places


def test_killed_after_the_rename_only_a_journal_was_left(tmp_path):
    quantize_gguf(str(stories_model()), tmp_path / "x.gguf", "q8_0")
    (tmp_path / "x.gguf.part").mkdir()
    (tmp_path / "x.gguf.part" / JOURNAL).write_text("{}\n")
    with pytest.raises(BadInput, match="exists"):
        quantize_gguf(str(stories_model()), tmp_path / "x.gguf", "q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_a_weight_that_is_not_finite_leaves_nothing(tmp_path):
    convert(str(stories_model()), tmp_path / "hub", "hub", None)
    (file,) = (tmp_path / "hub").glob("*.safetensors")
    tensors = {name: array.copy() for name, array in load_file(file).items()}
    tensors["model.layers.2.mlp.up_proj.weight"][3, 4] = np.inf
    save_file(tensors, file)
    for preset in ("q4_k_m", "f16"):
        with pytest.raises(BadInput, match=r"`blk.2.ffn_up.weight` has numbers that are not finite"):
            quantize_gguf(str(tmp_path / "hub"), tmp_path / "x.gguf", preset)
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]


@pytest.mark.parametrize(
    ("target", "words", "problem"),
    [
        ("x.gguf", ["preset=w4"], "no preset `w4` of GGUF files"),
        ("x.gguf", [], "a GGUF file has a preset"),
        ("x.gguf", ["preset=q8_0", "dtype=bfloat16"], "neither rules nor a dtype"),
        ("x.gguf", ["preset=q8_0", "to=argosy"], "x.gguf and to=argosy"),
        ("x", ["preset=q8_0", "to=gguf"], "x and to=gguf"),
        ("x", ["preset=Q4_K_M"], "preset=Q4_K_M is for GGUF files"),
    ],
)
def test_words_that_make_no_sense(target, words, problem, tmp_path, capsys):
    assert main(["quantize", str(stories_model()), str(tmp_path / target), *words]) == 2
    assert problem in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_is_rounded_already(tmp_path):
    from argosy.adapt.rules import preset_rules

    quantize(str(stories_model()), tmp_path / "w8", preset_rules("w8"))
    with pytest.raises(UserError, match="is quantized already"):
        quantize_gguf(str(tmp_path / "w8"), tmp_path / "x.gguf", "q8_0")
    # Its floats can be written.
    convert(str(tmp_path / "w8"), tmp_path / "x.gguf", "hub", None)
    messages: list[str] = []
    quantize_gguf(str(tmp_path / "x.gguf"), tmp_path / "y.gguf", "q8_0", say=messages.append)
    assert not messages
    quantize_gguf(str(tmp_path / "y.gguf"), tmp_path / "z.gguf", "q4_0", say=messages.append)
    assert "is rounded already" in messages[0]


def test_the_table_says_which_rows_are_too_narrow(tmp_path, capsys):
    assert main(["quantize", str(stories_model()), str(tmp_path / "x.gguf"), "preset=q4_k_m", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {row["weights"] for row in result["weights"]} == {"Q8_0", "Q5_0", "F16"}
    assert len(result["narrow"]) == 35
    assert main(["quantize", str(stories_model()), str(tmp_path / "y.gguf"), "preset=q8_0"]) == 0
    out = capsys.readouterr().out
    assert "rows of 5 tensors are no whole number of blocks" in out
    assert "ffn_down" in out
