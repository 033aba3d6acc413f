"""Models whose weights stay in a GGUF file's blocks: the answers and logits of the same weights packed in float32."""

import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gguf_blocks import gguf_in_blocks
from helpers import DATA
from test_adapters import ON, adapter_of
from test_engine import TIGHT, answers, prompts

import argosy
from argosy.adapt.quant import int8
from argosy.adapt.surgery import swap
from argosy.cli.verbs import serve as cli
from argosy.core.errors import BadInput
from argosy.core.formats.gguf import GGUF
from argosy.infer import load as loading
from argosy.infer.cpu import panels
from argosy.infer.cpu.panels import count_in_blocks
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.request import Request
from argosy.infer.engine.updates import WeightUpdate
from argosy.infer.lm import LM
from argosy.infer.load import load_lm
from argosy.jobs import api as public
from argosy.models.llama import LlamaConfig
from argosy.models.parts import einsum
from argosy.models.parts.weight import put, split
from argosy.models.qwen import QwenConfig
from argosy.models.settings import Experts
from argosy.observe import environment
from argosy.observe.readable import format_bytes
from argosy.ops.native import library
from argosy.ops.native.products import Panels
from argosy.serve.run import build_service
from argosy.serve.settings import ServeSettings
from argosy.web import process

SIZES: dict[str, Any] = {"vocab": 97, "width": 64, "layers": 2, "ffn": 96, "heads": 4, "head_size": 16, "kv_heads": 2, "context": 96}
KINDS = ("Q8_0", "Q4_1", "Q5_0", "Q4_0", "Q5_1")


@pytest.fixture(autouse=True)
def pack_small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    if why := library.load():
        pytest.skip(f"no kernels here: {why}")
    monkeypatch.setattr(panels, "SMALLEST", 0)


@pytest.fixture(scope="module", params=["tied", "with a head"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**SIZES, tied=request.param == "tied")
    return gguf_in_blocks(tmp_path_factory.mktemp("blocks") / "model.gguf", config, KINDS)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_in_blocks(tmp_path_factory.mktemp("one") / "model.gguf", LlamaConfig(**SIZES), KINDS)


def requests(lm: LM) -> list[Request]:
    return [Request(p, max_tokens=6) for p in prompts(lm.config.vocab, (5, 40))]


def packed_in_place(file: Path) -> LM:
    """The model with its weights packed in float32, as a server has them."""
    lm = load_lm(file)
    answers(Engine(lm.module, TIGHT, exclusive=True), requests(lm))
    return lm


def arrays(lm: LM) -> dict[str, Any]:
    return {address: a for address, a in split(lm.module)[1].items() if not isinstance(a, Panels)}


def test_answers_and_logits_are_those_of_float32_bit_for_bit(file: Path):
    wide, lm = packed_in_place(file), load_lm(file, blocks=True)
    assert answers(Engine(lm.module, TIGHT, exclusive=True), requests(lm)) == answers(Engine(wide.module, TIGHT), requests(wide))
    tokens = np.arange(60).reshape(3, 20) * 7 % 97
    logits = lm.logits(tokens)
    if wide.config.tied:
        # Otherwise its embedding is an array: the same numbers, in other programs.
        assert logits.tobytes() == wide.logits(tokens).tobytes()
    np.testing.assert_allclose(logits, load_lm(file).logits(tokens), rtol=1e-5, atol=1e-5)


def test_no_float32_weight_is_made(file: Path, monkeypatch: pytest.MonkeyPatch):
    read, before = [], GGUF.read
    monkeypatch.setattr(GGUF, "read", lambda self, name: (read.append(name), before(self, name))[1])
    lm = load_lm(file, blocks=True)
    assert read
    assert all("norm" in name for name in read)
    engine = Engine(lm.module, TIGHT, exclusive=True)
    answers(engine, requests(lm))
    assert all("norm" in address for address in arrays(lm))
    count, size = count_in_blocks(engine.weights())
    assert count == len(engine.weights()) - len(arrays(lm))
    assert size < lm.config.parameters() * 4 / 2.5, "with panels that are not full, and 6 to 9 bits a number"
    forward: Any = engine.runner.forward
    assert not forward.preparation.packer.panels, "nothing was packed beside them"


@pytest.mark.slow
def test_a_published_file():
    file = DATA / "gguf" / "stories260K-q8_0.gguf"
    wide, lm = packed_in_place(file), load_lm(file, blocks=True)
    assert count_in_blocks(split(lm.module)[1])[0] == 31
    assert {address.rpartition(".")[0][9:] for address in arrays(lm) if "norm" not in address} == {"mlp.down"}
    some = [Request(lm.encode(text), max_tokens=24) for text in ("Once upon a time", "Lily")]
    assert answers(Engine(lm.module, TIGHT, exclusive=True), some) == answers(Engine(wide.module, TIGHT, exclusive=True), some)
    tokens = [lm.encode("Once upon a time, there was a little dog")]
    assert lm.logits(tokens).tobytes() == wide.logits(tokens).tobytes()


@pytest.mark.slow
def test_experts_stay_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Their products and logits are those of the floats, and no float expert is multiplied."""
    config = QwenConfig(**SIZES, qk_norm=True, moe=Experts(count=5, active=2, ffn=32))
    path = gguf_in_blocks(tmp_path / "model.gguf", config, KINDS)
    plain, lm = load_lm(path), load_lm(path, blocks=True)
    expected, logits = answers(Engine(plain.module, TIGHT), requests(plain)), plain.logits([[5, 9, 40]])
    experts = {a.rpartition(".mlp.")[2]: w.experts for a, w in split(lm.module)[1].items() if isinstance(w, Panels) and ".mlp." in a}
    assert experts == {"router.w": 0, "gate.w": 5, "up.w": 5, "down.w": 5}
    monkeypatch.setattr(einsum, "grouped_matmul", None)
    assert answers(Engine(lm.module, TIGHT, exclusive=True), requests(lm)) == expected
    np.testing.assert_allclose(lm.logits([[5, 9, 40]]), logits, rtol=1e-5, atol=1e-5)


def test_several_steps_in_one_dispatch(gguf_file: Path):
    lm = load_lm(gguf_file, blocks=True)
    several = TIGHT.model_copy(update={"steps": 4, "pages": 48})
    assert answers(Engine(lm.module, several, exclusive=True), requests(lm)) == answers(Engine(lm.module, TIGHT), requests(lm))


def test_new_weights_take_their_place(gguf_file: Path, tmp_path: Path):
    other = gguf_in_blocks(tmp_path / "other.gguf", LlamaConfig(**SIZES), KINDS, seed=1)
    lm = load_lm(gguf_file, blocks=True)
    engine = Engine(lm.module, TIGHT, exclusive=True)
    before = answers(engine, requests(lm))
    update = WeightUpdate(lm.module, 96)
    update.add(other)
    engine.swap_weights(update.leaves())
    after = answers(engine, requests(lm))
    assert after != before
    assert after == answers(Engine(load_lm(other).module, TIGHT), requests(lm))


@pytest.mark.slow
def test_an_adapter_lies_over_them(gguf_file: Path):
    lm, wide = load_lm(gguf_file, blocks=True), packed_in_place(gguf_file)
    factors, outputs = adapter_of(load_lm(gguf_file).module, 0, 2), []
    for module in (lm.module, wide.module):
        engine = Engine(module, ON, exclusive=True)
        assert engine.adapters is not None
        engine.adapters.put("a", engine.adapters.packed(factors))
        some = [Request(p.tokens, max_tokens=6, adapter=name) for p in requests(lm) for name in (None, "a")]
        outputs.append(answers(engine, some))
    assert outputs[0] == outputs[1]
    assert outputs[0][0] != outputs[0][1]


def test_a_server_says_what_it_keeps_in_blocks(gguf_file: Path):
    for blocks, count in ((True, 16), (False, 15)):
        lm = load_lm(gguf_file, blocks=blocks)
        service = build_service(lm, "tiny", ServeSettings(engine=TIGHT, warm_up=False), None)
        service.front.close()
        block_count, size = count_in_blocks(service.front.engine.weights())
        # Without `blocks` the engine packs what it multiplies, which the embedding beside a head is not.
        about = f"weights: the codes of {count} weights are multiplied as they are: {format_bytes(size)}"
        assert (service.about[1], block_count) == (about, count)


@pytest.mark.parametrize("copies", [1, 2])
def test_a_server_keeps_blocks_unless_copies_share_the_weights(copies: int, gguf_file: Path, monkeypatch: pytest.MonkeyPatch):
    block_settings: list[Any] = []

    def loaded(model: Any, **options: Any) -> None:
        block_settings.append(options["blocks"])
        raise BadInput("enough")

    monkeypatch.setattr(public, "load", loaded)
    monkeypatch.setattr(process, "bound_socket", lambda host, port: None)
    with pytest.raises(BadInput, match="enough"):
        cli.serve(str(gguf_file), ["port=0", f"copies={copies}"])
    assert block_settings == ["auto" if copies == 1 else False]


def test_it_is_not_saved(gguf_file: Path, tmp_path: Path):
    with pytest.raises(BadInput, match="packed for this CPU"):
        load_lm(gguf_file, blocks=True).save(tmp_path / "out")
    load_lm(gguf_file).save(tmp_path / "out")


def test_it_is_not_quantized_again(gguf_file: Path):
    lm = load_lm(gguf_file, blocks=True)
    with pytest.raises(BadInput, match="packed for answers alone"):
        swap(lm.module, ".*", int8)


def test_it_says_what_is_in_blocks(gguf_file: Path, capsys: pytest.CaptureFixture[str]):
    lm = argosy.load(gguf_file, blocks=True)
    assert f", {lm.in_blocks} weights in blocks," in repr(lm)
    assert "no weight is kept in blocks" not in capsys.readouterr().err
    assert not argosy.load(gguf_file, blocks=True, dtype="bfloat16").in_blocks
    assert "no weight is kept in blocks" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{}, {"blocks": True, "dtype": "bfloat16"}, {"blocks": True, "tensor": 2}])
def test_elsewhere_weights_are_arrays(gguf_file: Path, options: dict[str, Any]):
    assert all(isinstance(a, jax.Array) for a in split(load_lm(gguf_file, **options).module)[1].values())


def test_without_kernels_weights_are_arrays(gguf_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading.library, "load", lambda: "no compiler")
    assert all(isinstance(a, jax.Array) for a in split(load_lm(gguf_file, blocks=True).module)[1].values())


def test_memory_is_what_the_blocks_take(gguf_file: Path, monkeypatch: pytest.MonkeyPatch):
    """A model is refused if its float32 weights do not fit, but not if its blocks do."""
    needed = 4 * argosy.load(gguf_file).config.parameters()
    monkeypatch.setattr(environment, "memory_bytes", lambda: (needed // 2, needed // 2))
    with pytest.raises(BadInput, match="of memory"):
        load_lm(gguf_file)
    assert count_in_blocks(split(load_lm(gguf_file, blocks=True).module)[1])[0]
    monkeypatch.setattr(environment, "memory_bytes", lambda: (needed // 8, needed // 8))
    with pytest.raises(BadInput, match="blocks of the file"):
        load_lm(gguf_file, blocks=True)


# ---------------------------------------------------------------- a model of floats


def made_by(engine: Engine) -> dict[str, Panels]:
    forward: Any = engine.runner.forward
    return forward.preparation.packer.panels


def test_what_an_engine_packs_beside_floats_are_the_blocks(file: Path):
    lm = load_lm(file)
    before = dict(split(lm.module)[1])
    tokens = [answer.tokens for answer in lm.generate([p.tokens for p in requests(lm)], 6)]
    panels = made_by(lm.engine([46]))
    assert {"layers.0.attn.q.w", "layers.1.mlp.down.w", "embed.w" if lm.config.tied else "head.w"} <= panels.keys()
    assert all(panel.scale is not None for panel in panels.values())
    assert all(a is before[address] for address, a in split(lm.module)[1].items()), "they are a copy"
    assert tokens == [answer.tokens for answer in packed_in_place(file).generate([p.tokens for p in requests(lm)], 6)]


def test_a_weight_that_was_replaced_is_packed_from_its_numbers(gguf_file: Path):
    lm = load_lm(gguf_file)
    doubled = 2 * split(lm.module)[1]["layers.0.mlp.up.w"]
    put(lm.module, {"layers.0.mlp.up.w": doubled})
    engine = Engine(lm.module, TIGHT, origin=lm.origin)
    answers(engine, requests(lm))
    panels = made_by(engine)
    assert {address for address, a in panels.items() if a.scale is None} == {"layers.0.mlp.up.w"}
    np.testing.assert_array_equal(np.asarray(panels["layers.0.mlp.up.w"].dense()), np.asarray(doubled))


def test_a_file_that_has_changed_is_not_read_again(gguf_file: Path, tmp_path: Path):
    file = shutil.copy(gguf_file, tmp_path / "model.gguf")
    lm = load_lm(file)
    with open(file, "r+b") as stream:
        stream.seek(-2000, os.SEEK_END)
        stream.write(bytes(2000))
    engine = Engine(lm.module, TIGHT, origin=lm.origin)
    assert answers(engine, requests(lm)) == answers(Engine(load_lm(gguf_file).module, TIGHT), requests(lm))
    assert all(a.scale is None for a in made_by(engine).values())


def test_an_engine_rounds_data_to_int8_if_told(gguf_file: Path):
    """As llama.cpp does with such files; the file's own answers stay near."""
    lm = load_lm(gguf_file, blocks=True)
    logprobs = {}
    for activations in (None, "int8"):
        engine = Engine(lm.module, TIGHT.model_copy(update={"activations": activations}))
        weights = engine.runner.forward.preparation(engine.weights())
        rounding = {at: w.activations for at, w in weights.items() if isinstance(w, Panels) and w.scale is not None}
        assert len(rounding) == 16
        assert {str(scheme) for scheme in rounding.values()} == {"None" if activations is None else "int8/32"}
        requests_of_run = [Request(p, max_tokens=4, top=1) for p in prompts(lm.config.vocab, (5, 40))]
        logprobs[activations] = [[event.logprob for event in events] for events in engine.generate(requests_of_run)]
    np.testing.assert_allclose(logprobs["int8"], logprobs[None], atol=0.1)
    assert logprobs["int8"] != logprobs[None]


def test_data_of_no_weight_is_not_rounded(gguf_file: Path, monkeypatch: pytest.MonkeyPatch):
    settings = TIGHT.model_copy(update={"activations": "int8"})
    lm = load_lm(gguf_file)
    with pytest.raises(BadInput, match="no weight of this model is whole numbers"):
        Engine(lm.module, settings)
    swap(lm.module, r"layers\..*", int8)
    engine = Engine(lm.module, settings)
    with monkeypatch.context() as patch:
        patch.setattr("argosy.infer.cpu.panels.has_memory_for", lambda weights: False)
        with pytest.raises(BadInput, match="no weight is packed as whole numbers"):
            engine.generate([Request(p, max_tokens=2) for p in prompts(lm.config.vocab, (5,))])
    monkeypatch.setattr(library, "_reason", "they are turned off")
    with pytest.raises(BadInput, match="compiled kernels: they are turned off"):
        Engine(lm.module, settings)
