"""The table of names: its grammar against index arithmetic, named layouts against plain numpy, both directions byte for byte."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from helpers import shared
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.core.errors import BadInput, Damaged, Unsupported
from argosy.core.formats import Arrays
from argosy.core.formats.gguf import GGUF
from argosy.core.formats.safetensors import SafeTensors, SafetensorsFolder, write_folder
from argosy.core.keymap import KeyMap, KeyRow

SIZES = {"D": 6, "N": 4, "K": 2, "H": 4, "F": 10, "V": 11, "E": 3, "M": 5, "R": 7, "U": 2, "P": 2, "two": 2, "k": 2, "r": 2}


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def both_ways(rows: list[KeyRow], theirs: dict[str, np.ndarray], sizes: dict[str, int] | None = None) -> dict[str, np.ndarray]:
    """Ours; asserts that the plan fits and that the way back gives theirs, byte for byte."""
    table = KeyMap(rows, sizes or SIZES)
    plan = table.plan({name: x.shape for name, x in theirs.items()})
    ours = {path: table.read(Arrays(theirs), path) for path in plan}
    assert {path: x.shape for path, x in ours.items()} == plan
    assert all(table.shape(path) == shape for path, shape in plan.items())
    back = {entry.name: (entry, entry.make()) for entry in table.inverse(Arrays(ours))}
    assert back.keys() == theirs.keys()
    for name, (entry, x) in back.items():
        assert entry.shape == x.shape == theirs[name].shape
        assert entry.dtype == x.dtype == theirs[name].dtype
        assert x.tobytes() == theirs[name].tobytes()
    return ours


def map_both_ways(pattern: str, x: np.ndarray) -> np.ndarray:
    return both_ways([KeyRow("x", "y", pattern)], {"x": x})["y"]


# ---- layouts that families need, against numpy written out


def test_plain_and_permuted():
    x = random(16, 6)
    assert np.array_equal(map_both_ways("(N H) D -> D N H", x), x.reshape(4, 4, 6).transpose(2, 0, 1))
    assert np.array_equal(map_both_ways("D (N H) -> N H D", x.T.copy()), x.reshape(4, 4, 6))
    assert np.array_equal(map_both_ways("V D -> V D", random(11, 6)), random(11, 6))


def test_axes_of_one_entry_come_and_go():
    x = random(6, 1, 4)
    assert np.array_equal(map_both_ways("D 1 H -> D H", x), x[:, 0])
    assert np.array_equal(map_both_ways("D H -> 1 H (D 1)", x[:, 0]), x[:, 0].T[None])
    assert map_both_ways("1 -> 1 1", np.ones(1)).shape == (1, 1)


def test_fused_rows_of_different_head_counts():
    """Phi-3's qkv_proj: N*H rows, then K*H, then K*H. Both spellings."""
    x = random(32, 6)
    for pattern in ("(N H|K H|K H) D -> D N H, D K H, D K H", "((N|K|K) H) D -> D N H, D K H, D K H"):
        ours = both_ways([KeyRow("x", ("q", "k", "v"), pattern)], {"x": x})
        assert np.array_equal(ours["q"], x[:16].reshape(4, 4, 6).transpose(2, 0, 1))
        assert np.array_equal(ours["k"], x[16:24].reshape(2, 4, 6).transpose(2, 0, 1))
        assert np.array_equal(ours["v"], x[24:].reshape(2, 4, 6).transpose(2, 0, 1))


def test_a_cut_inside_each_head():
    """DeepSeek's kv_b_proj, as transformers splits it: view(N, H + U, R), then [:H] and [H:]."""
    x = random(4 * 6, 7)
    ours = both_ways([KeyRow("x", ("k", "v"), "(N (H|U)) R -> R N H, R N U")], {"x": x})
    assert np.array_equal(ours["k"], x.reshape(4, 6, 7)[:, :4].transpose(2, 0, 1))
    assert np.array_equal(ours["v"], x.reshape(4, 6, 7)[:, 4:].transpose(2, 0, 1))


def test_interleaved_pairs():
    """gpt-oss: gate at even places of the last axis, up at odd ones; biases likewise."""
    x, b = random(3, 6, 10), random(3, 10)
    rows = [KeyRow("w", ("gate", "up"), "E D (M (1|1)) -> E D M, E D M"), KeyRow("b", ("gb", "ub"), "E (M (1|1)) -> E M, E M")]
    ours = both_ways(rows, {"w": x, "b": b})
    assert np.array_equal(ours["gate"], x[..., ::2])
    assert np.array_equal(ours["up"], x[..., 1::2])
    assert np.array_equal(ours["ub"], b[:, 1::2])


def test_four_pieces_for_each_key_head():
    """Qwen3-Next's in_proj_qkvz: for each of k key heads H of q, H of k, r*U of v, r*U of z."""
    x = random(2 * (4 + 4 + 4 + 4), 6)
    pattern = "(k (H|H|r U|r U)) D -> D k H, D k H, D k r U, D (k r) U"
    ours = both_ways([KeyRow("x", ("q", "k", "v", "z"), pattern)], {"x": x})
    heads = x.reshape(2, 16, 6)
    assert np.array_equal(ours["k"], heads[:, 4:8].transpose(2, 0, 1))
    assert np.array_equal(ours["v"], heads[:, 8:12].reshape(2, 2, 2, 6).transpose(3, 0, 1, 2))
    assert np.array_equal(ours["z"], heads[:, 12:].reshape(4, 2, 6).transpose(2, 0, 1))


def test_several_of_theirs_in_one_of_ours():
    gate, up = random(10, 6), random(10, 6, seed=1)
    ours = both_ways([KeyRow(("gate", "up"), "y", "F D, F D -> D (F|F)")], {"gate": gate, "up": up})
    assert np.array_equal(ours["y"], np.concatenate([gate, up]).T)
    ours = both_ways([KeyRow(("gate", "up"), "y", "F D, F D -> (F (1|1)) D")], {"gate": gate, "up": up})
    assert np.array_equal(ours["y"][::2], gate)
    assert np.array_equal(ours["y"][1::2], up)


def test_rotary_pairs_of_llama_cpp():
    """llama.cpp's conversion permutes as reshape(N, 2, H/2, D).swapaxes(1, 2); the row undoes that."""
    hub = random(16, 6)
    ggml = hub.reshape(4, 2, 2, 6).swapaxes(1, 2).reshape(16, 6)
    ours = map_both_ways("(N P two) D -> D N (two P)", ggml)
    assert np.array_equal(ours, map_both_ways("(N H) D -> D N H", hub))


def test_one_tensor_an_expert():
    theirs = {f"m.{layer}.e.{e}.w": random(5, 6, seed=10 * layer + e) for layer in (3, 5) for e in range(3)}
    ours = both_ways([KeyRow("m.{l}.e.{e}.w", "l.{l}.w", "M D -> E D M", layers=(3, 5))], theirs)
    assert list(ours) == ["l.3.w", "l.5.w"]
    assert np.array_equal(ours["l.5.w"], np.stack([theirs[f"m.5.e.{e}.w"].T for e in range(3)]))
    ours = both_ways([KeyRow("m.3.e.{e}.w", "w", "M D -> D E M")], {k: v for k, v in theirs.items() if ".3." in k})
    assert np.array_equal(ours["w"][:, 2], theirs["m.3.e.2.w"].T)


def test_fused_and_one_an_expert_at_once():
    theirs = {f"e.{e}": random(10, 6, seed=e) for e in range(3)}
    ours = both_ways([KeyRow("e.{e}", ("gate", "up"), "(M|M) D -> E D M, M E D")], theirs)
    assert np.array_equal(ours["gate"][1], theirs["e.1"][:5].T)
    assert np.array_equal(ours["up"][:, 2], theirs["e.2"][5:])


def test_permuting_alone_copies_nothing():
    x = random(16, 6)
    table = KeyMap([KeyRow("x", ("q", "k"), "(K H|K H) D -> D K H, D K H")], SIZES)
    for path in ("q", "k"):
        assert np.shares_memory(table.read(Arrays({"x": x}), path), x)


# ---- blocks with scales


def test_fp8_blocks():
    values = random(16, 200).astype(ml_dtypes.float8_e4m3fn)
    scales = np.array([[2.0, 0.5]], np.float32)
    table = KeyMap([KeyRow(("w", "w_scale_inv"), "y", "(N H) W -> W N H", scales="fp8_blocks")], SIZES | {"W": 200})
    theirs = Arrays({"w": values, "w_scale_inv": scales})
    assert table.plan({"w": (16, 200), "w_scale_inv": (1, 2)}) == {"y": (200, 4, 4)}
    weights = values.astype(np.float32) * np.repeat([2.0, 0.5], 128)[:200].astype(np.float32)
    assert np.array_equal(table.read(theirs, "y"), weights.reshape(4, 4, 200).transpose(2, 0, 1))
    with pytest.raises(BadInput, match="1 misshapen"):
        table.plan({"w": (16, 200), "w_scale_inv": (2, 2)})
    with pytest.raises(Unsupported, match="can be read but not written"):
        list(table.inverse(Arrays({"y": np.zeros((200, 4, 4), np.float32)})))


def test_mxfp4_interleaved():
    """gpt-oss: blocks [E 2M D/32 16] and scales [E 2M D/32] of the transposed gate and up."""
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (3, 10, 2, 16), np.uint8), rng.integers(120, 130, (3, 10, 2), np.uint8)
    pattern = "E (M (1|1)) D -> E D M, E D M"
    table = KeyMap([KeyRow(("blocks", "scales"), ("gate", "up"), pattern, scales="mxfp4")], SIZES | {"D": 64})
    theirs = Arrays({"blocks": blocks, "scales": scales})
    assert table.plan({"blocks": blocks.shape, "scales": scales.shape}) == {"gate": (3, 64, 5), "up": (3, 64, 5)}
    up = table.read(theirs, "up")
    nibble = blocks[2, 2 * 4 + 1, 1, 3] >> 4  # value 32 + 2 * 3 + 1 of row 9
    value = nibble.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * 2.0 ** (int(scales[2, 9, 1]) - 127)
    assert up[2, 39, 4] == value
    with pytest.raises(Damaged, match="bytes"):
        table.read(Arrays({"blocks": blocks.astype(np.int32), "scales": scales}), "up")


def test_fp8_experts():
    theirs = {f"e.{e}.w": random(5, 6, seed=e).astype(ml_dtypes.float8_e4m3fn) for e in range(3)}
    theirs |= {f"e.{e}.s": np.full((1, 1), e + 1, np.float32) for e in range(3)}
    table = KeyMap([KeyRow(("e.{e}.w", "e.{e}.s"), "y", "M D -> E D M", scales="fp8_blocks")], SIZES)
    table.plan({name: x.shape for name, x in theirs.items()})
    assert np.array_equal(table.read(Arrays(theirs), "y")[2], 3 * theirs["e.2.w"].T.astype(np.float32))


# ---- the grammar, against index arithmetic


@st.composite
def readings(draw):
    """A whole tensor as nested lists of names, its pieces each in another order, and sizes."""
    shared_names = draw(st.lists(st.sampled_from("ABC"), unique=True, max_size=3))
    pieces = [draw(st.lists(st.sampled_from("XYZ"), unique=True, max_size=2)) for _ in range(draw(st.integers(1, 3)))]
    sizes = {name: draw(st.integers(1, 3)) for name in "ABCXYZ"}
    leaves = draw(st.permutations([*shared_names, pieces] if len(pieces) > 1 else [*shared_names, *pieces[0]]))
    parts = [draw(st.permutations([*shared_names, *piece])) for piece in pieces]
    grouped = st.integers(1, 3)

    def groups(items):
        items, out = list(items), []
        while items:
            n = draw(grouped)
            out.append(items[:n])
            items = items[n:]
        return out

    return groups(leaves), [groups(part) for part in parts], sizes


def spell_axes(axes) -> str:
    def leaf(x) -> str:
        return x if isinstance(x, str) else "(" + "|".join(" ".join(piece) or "1" for piece in x) + ")"

    return " ".join(f"({' '.join(map(leaf, axis))})" for axis in axes) or "1"


def within(leaves, index: dict[str, int], piece: int, sizes) -> tuple[int, int]:
    """Place of the entry with these indices along one axis, and the axis' length: mixed radix, the innermost last."""
    at, size = 0, 1
    for leaf in reversed(leaves):
        if isinstance(leaf, str):
            here, length = index[leaf], sizes[leaf]
        else:
            lengths = [math.prod(sizes[name] for name in p) for p in leaf]
            here, length = sum(lengths[:piece]) + within(leaf[piece], index, piece, sizes)[0], sum(lengths)
        at, size = at + here * size, size * length
    return at, size


def place(axes, index: dict[str, int], piece: int, sizes) -> tuple[int, ...]:
    return tuple(within(axis, index, piece, sizes)[0] for axis in axes) or (0,)


def shape_of(axes, sizes) -> tuple[int, ...]:
    return tuple(within(axis, dict.fromkeys(sizes, 0), 0, sizes)[1] for axis in axes) or (1,)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(readings())
def test_random_readings_entry_by_entry_and_back(reading):
    whole, parts, sizes = reading
    names = tuple(f"y{i}" for i in range(len(parts)))
    right = ", ".join(map(spell_axes, parts))

    def entries(i: int):
        free = [name for axis in parts[i] for name in axis]
        for at in itertools.product(*(range(sizes[name]) for name in free)):
            index = dict(zip(free, at))
            yield place(whole, index, i, sizes), place(parts[i], index, 0, sizes)

    shape = shape_of(whole, sizes)
    x = np.arange(math.prod(shape)).reshape(shape)
    ours = both_ways([KeyRow("x", names, f"{spell_axes(whole)} -> {right}")], {"x": x}, sizes)
    for i, name in enumerate(names):
        for theirs_at, ours_at in entries(i):
            assert ours[name][ours_at] == x[theirs_at]
    joined = both_ways([KeyRow(names, "x", f"{right} -> {spell_axes(whole)}")], ours, sizes)
    assert np.array_equal(joined["x"], x)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        (KeyRow("x", "y", "V D"), "D"),
        (KeyRow("x", "y", "V D -> D"), "one side"),
        (KeyRow("x", "y", "D D -> D D"), "one side"),
        (KeyRow("x", "y", "(V D -> V D"), "not closed"),
        (KeyRow("x", "y", "V) D -> V D"), "outside"),
        (KeyRow("x", "y", "V|D -> V D"), "outside"),
        (KeyRow("x", "y", "V 3 -> V 3"), "may only contain names"),
        (KeyRow("x", "y", "V 11 -> V"), "may only contain names"),
        (KeyRow("x", "y", "V-D -> V D"), "may only contain names"),
        (KeyRow("x", "y", "V W -> V W"), "no size for W"),
        (KeyRow("x", ("y", "z"), "(V|D) (N|K) -> V N, D K"), "two axes"),
        (KeyRow("x", ("y", "z"), "(V|(D|N)) -> V, D"), "cut inside a cut"),
        (KeyRow("x", ("y", "z"), "(V|D|N) -> V, D"), "pieces"),
        (KeyRow("x", "y", "(V|D) -> V"), "pieces"),
        (KeyRow(("a", "b"), ("y", "z"), "V, D -> V, D"), "pieces"),
        (KeyRow("x", ("y", "z"), "V -> V"), "as many names"),
        (KeyRow(("x", "z"), "y", "V -> V"), "as many names"),
        (KeyRow("x.{l}", "y", "V -> V", layers=(0,)), "{l} in every name"),
        (KeyRow("x.{l}", "y.{l}", "V -> V"), "{l} in every name"),
        (KeyRow("x", "y", "V -> V", layers=(0,)), "{l} in every name"),
        (KeyRow("x.{e}", "y", "V -> V"), "needs an axis E"),
        (KeyRow("x.{e}", "y", "V -> (E V)"), "needs an axis E"),
        (KeyRow(("x.{e}", "z"), "y", "V, D -> E (V|D)"), "{e} must be in every name"),
        (KeyRow(("x", "z"), "y", "V -> V", scales="int3"), "unknown kind of scales `int3`"),
        (KeyRow("x", "y", "V D -> V D", scales="fp8_blocks"), "one of scales"),
        (KeyRow("x.{e}", "y", "V -> E V", tied_to="z"), "tied"),
    ],
)
def test_rows_that_cannot_be(row, match):
    with pytest.raises(ValueError) as error:
        KeyMap([row], SIZES)
    assert match in str(error.value)
    assert row.reading in str(error.value)


def test_every_name_once():
    with pytest.raises(ValueError, match="`x` is in two rows"):
        KeyMap([KeyRow("x", "y", "V -> V"), KeyRow("x", "z", "V -> V")], SIZES)
    with pytest.raises(ValueError, match=r"`y\.1` is in two rows"):
        KeyMap([KeyRow("x.{l}", "y.{l}", "V -> V", layers=range(2)), KeyRow("z", "y.1", "V -> V")], SIZES)
    with pytest.raises(ValueError, match="tied"):
        KeyMap([KeyRow("x", "y", "V -> V", tied_to="z"), KeyRow("z", "w", "V -> V")], SIZES)


# ---- the plan


ROWS = [
    KeyRow("embed", "embed.w", "V D -> V D", tied_to="head"),
    KeyRow("l.{l}.w", "layers.{l}.w", "(N H) D -> D N H", layers=range(30)),
    KeyRow(("l.{l}.a", "l.{l}.b"), "layers.{l}.ab", "F, F -> (F|F)", layers=range(2), optional=True),
]
SHAPES = {"embed": (11, 6)} | {f"l.{i}.w": (16, 6) for i in range(30)}


def test_everything_wrong_at_once():
    shapes = SHAPES | {"l.3.w": (6, 16), "l.1.a": (10,), "new": (1,)}
    del shapes["embed"], shapes["l.7.w"]
    with pytest.raises(BadInput) as error:
        KeyMap(ROWS, SIZES).plan(shapes)
    text = str(error.value)
    assert "3 missing, 1 unexpected, 1 misshapen" in text
    for part in ("`embed` is missing", "`l.7.w` is missing", "`l.1.b` is missing", "`new` has no place"):
        assert part in text
    assert "`l.3.w` is [6, 16], expected [16, 6]" in text
    assert len(text.splitlines()) <= 5


def test_the_first_twenty_and_a_count():
    with pytest.raises(BadInput) as error:
        KeyMap(ROWS, SIZES).plan({})
    assert "31 missing" in error.value.what
    assert "and 11 more" in str(error.value)
    assert str(error.value).count("is missing") == 20


def test_optional_rows_are_there_or_not():
    table = KeyMap(ROWS, SIZES)
    assert "layers.0.ab" not in table.plan(SHAPES)
    plan = table.plan(SHAPES | {"l.0.a": (10,), "l.0.b": (10,)})
    assert plan["layers.0.ab"] == (20,)
    assert "layers.1.ab" not in plan
    ours = {path: np.zeros(shape, np.float32) for path, shape in table.plan(SHAPES).items()}
    assert {entry.name for entry in table.inverse(Arrays(ours))} == set(SHAPES)


def test_buffers_are_ignored_by_pattern():
    extra = SHAPES | {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}
    assert KeyMap(ROWS, SIZES).plan(extra) == KeyMap(ROWS, SIZES).plan(SHAPES)
    with pytest.raises(BadInput, match="1 unexpected"):
        KeyMap(ROWS, SIZES, ignore=()).plan(extra)
    assert KeyMap(ROWS, SIZES, ignore=("l.*.mask",)).plan(SHAPES | {"l.9.mask": (3,)})


def test_a_tied_tensor_may_stand_twice_if_equal():
    table, x = KeyMap(ROWS, SIZES), random(11, 6)
    assert table.plan(SHAPES | {"head": (11, 6)}) == table.plan(SHAPES)
    with pytest.raises(BadInput, match="misshapen"):
        table.plan(SHAPES | {"head": (6, 11)})
    assert np.array_equal(table.read(Arrays({"embed": x, "head": x.copy()}), "embed.w"), x)
    other = x.copy()
    other[10, 5] += 1
    with pytest.raises(BadInput, match="ties `head` to `embed`"):
        table.read(Arrays({"embed": x, "head": other}), "embed.w")
    assert "head" not in {entry.name for entry in table.inverse(Arrays(ours_of_zeros(table)))}


def ours_of_zeros(table: KeyMap) -> dict[str, np.ndarray]:
    return {path: np.zeros(table.shape(path), np.float32) for path in table.paths}


def test_names_and_where_they_go():
    table = KeyMap(ROWS, SIZES)
    assert table.names[:2] == ("embed", "l.0.w")
    assert table.paths[-1] == "layers.1.ab"
    assert table.ours_of(["l.1.b", "embed", "other"]) == {"l.1.b": ("layers.1.ab",), "embed": ("embed.w",)}


def test_reading_without_a_plan_is_checked():
    table = KeyMap(ROWS, SIZES)
    with pytest.raises(BadInput, match="1 misshapen"):
        table.read(Arrays({"l.0.w": random(4, 24)}), "layers.0.w")
    with pytest.raises(BadInput, match="1 missing"):
        table.read(Arrays({}), "layers.0.w")
    mixed = {"l.0.a": np.zeros(10, np.float32), "l.0.b": np.zeros(10, np.float16)}
    with pytest.raises(BadInput, match="different types"):
        table.read(Arrays(mixed), "layers.0.ab")


def test_the_way_back_is_checked():
    table = KeyMap(ROWS, SIZES)
    ours = ours_of_zeros(table) | {"layers.0.w": np.zeros((6, 16), np.float32), "strange": np.zeros(1)}
    del ours["embed.w"]
    with pytest.raises(BadInput, match="1 missing, 1 unexpected, 1 misshapen"):
        list(table.inverse(Arrays(ours)))


def test_ours_are_read_once_on_the_way_back():
    """One [E D M] array is cut into three of theirs, and let go."""
    reads = []

    class Counted(Arrays):
        def read(self, name):
            reads.append(name)
            return super().read(name)

    rows = [KeyRow("e.{e}.{l}", ("gate.{l}", "up.{l}"), "(M|M) D -> E D M, E D M", layers=range(2))]
    table = KeyMap(rows, SIZES)
    for entry in list(table.inverse(Counted(ours_of_zeros(table)))):
        entry.make()
    assert reads == ["gate.0", "up.0", "gate.1", "up.1"]


class InParts(Arrays):
    """Keeps what was read: a name, or a name and the part."""

    def __init__(self, arrays):
        super().__init__(arrays)
        self.reads: list = []

    def read(self, name):
        self.reads.append(name)
        return super().read(name)

    def read_part(self, name, i):
        self.reads.append((name, i))
        return super().read(name)[i]


EXPERTS = [KeyRow("e.{e}", ("gate", "up"), "(M|M) D -> E D M, E D M")]
STACKED = [KeyRow("x", ("gate", "up"), "E D (M (1|1)) -> E D M, E D M")]


@pytest.mark.parametrize(
    ("rows", "theirs", "touched"),
    [
        (EXPERTS, {f"e.{e}": random(10, 6, seed=e) for e in range(3)}, ["e.2"]),
        (STACKED, {"x": random(3, 6, 10)}, [("x", 2)]),
    ],
    ids=["a tensor each", "stacked"],
)
def test_one_expert_is_read_without_the_others(rows, theirs, touched):
    """And written back without them, from the same part of each of ours."""
    table = KeyMap(rows, SIZES)
    whole = {path: table.read(Arrays(theirs), path) for path in table.paths}
    reader = InParts(theirs)
    assert table.is_apart("up")
    assert np.array_equal(table.read_part(reader, "up", 2), whole["up"][2])
    assert reader.reads == touched
    ours = InParts(whole)
    for entry in table.inverse(ours):
        back = entry.make() if entry.parts is None else np.stack(list(entry.parts()))
        assert back.tobytes() == theirs[entry.name].tobytes()
    assert ours.reads == [(path, e) for e in range(3) for path in ("gate", "up")]


def test_experts_that_do_not_lead_are_read_whole():
    for pattern in ("M D -> D E M", "M D -> M D E"):
        assert not KeyMap([KeyRow("e.{e}", "y", pattern)], SIZES).is_apart("y")
    for pattern in ("D E -> E D", "E D M -> D E M", "E M -> E M", "D (E M) -> E D M"):
        assert not KeyMap([KeyRow("x", "y", pattern)], SIZES).is_apart("y"), pattern


def test_one_expert_is_checked():
    table = KeyMap(EXPERTS, SIZES)
    with pytest.raises(BadInput, match="1 misshapen"):
        table.read_part(Arrays({"e.1": random(6, 10)}), "up", 1)
    with pytest.raises(BadInput, match="1 missing"):
        table.read_part(Arrays({"e.1": random(10, 6)}), "up", 2)


# ---- real files


def llama_rows(q: str, k: str, theirs: str) -> list[KeyRow]:
    names = dict(zip(OURS, theirs.split(), strict=True))

    def layer(name: str, ours: str, pattern: str) -> KeyRow:
        return KeyRow(names["layer"] + name, "layers.{l}." + ours, pattern, layers=range(5))

    plain = [("attn_norm", "D -> D"), ("mlp_norm", "D -> D"), ("o", "D (N H) -> N H D"), ("v", "(K H) D -> D K H")]
    plain += [("gate", "F D -> D F"), ("up", "F D -> D F"), ("down", "D F -> F D"), ("q", q), ("k", k)]
    rows = [layer(names[ours] + ".weight", ours, pattern) for ours, pattern in plain]
    rows += [KeyRow(names["embed"] + ".weight", "embed", "V D -> V D"), KeyRow(names["norm"] + ".weight", "norm", "D -> D")]
    return rows


OURS = ("layer", "embed", "norm", "attn_norm", "mlp_norm", "q", "k", "v", "o", "gate", "up", "down")
HUB = """model.layers.{l}. model.embed_tokens model.norm input_layernorm post_attention_layernorm self_attn.q_proj
    self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj"""
GGML = "blk.{l}. token_embd output_norm attn_norm ffn_norm attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down"
STORIES = {"D": 64, "F": 172, "N": 8, "K": 4, "H": 8, "V": 512, "P": 4, "two": 2}


def test_a_model_from_hub_and_gguf_is_the_same_and_goes_back(tmp_path):
    hub_table = KeyMap(llama_rows("(N H) D -> D N H", "(K H) D -> D K H", HUB), STORIES)
    ggml_rows = llama_rows("(N P two) D -> D N (two P)", "(K P two) D -> D K (two P)", GGML)
    ggml_table = KeyMap(ggml_rows, STORIES)
    hub = SafetensorsFolder.open(shared("models/stories260k"))
    ggml = GGUF.open(shared("gguf/stories260K-f32.gguf"))
    plan = hub_table.plan({name: hub.shape(name) for name in hub.names})
    assert ggml_table.plan({name: ggml.shape(name) for name in ggml.names}) == plan
    ours = {path: hub_table.read(hub, path) for path in plan}
    assert len(ours) == 47
    for path, x in ours.items():
        assert np.array_equal(ggml_table.read(ggml, path), x), path
    write_folder(tmp_path, hub_table.inverse(Arrays(ours)))
    back, first = SafeTensors.open(tmp_path / "model.safetensors"), SafeTensors.open(hub.path / "model.safetensors")
    assert set(back.names) == set(first.names)
    for name in first.names:
        assert back.read(name).tobytes() == first.read(name).tobytes()
