"""What is fuzzed: for each kind of file some good ones, and the code that must read or refuse a bad one.

Notable: a reader does what a user's program would do with the file: open it, look at every tensor, encode and decode with
the tokenizer, build the model that the config describes. Seeds are small, so that thousands of inputs a minute are read.
"""

import base64
import copy
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from fuzz_mutations import EXTREMES, TEXTS, mutate_bytes, mutate_json, write_json
from helpers import DATA

from argosy.core.errors import ArgosyError
from argosy.core.formats.quants import TYPES
from argosy.data.encoding import Encoding

Files = dict[str, bytes]
TEXT = "héllo wörld <s>[INST] 日本 🎉 <|im_end|>\n\n 1234 don't"
MOST_LAYERS = 64  # models that are built; deeper ones take seconds, and differ in nothing


@dataclass(frozen=True)
class Kind:
    """good: sets of files. mutate: one of them, changed. read: what a program does with the folder they were put in."""

    good: Callable[[], list[Files]]
    mutate: Callable[[random.Random, Files, Files], Files]
    read: Callable[[Path], None]


# ---- mutations of sets of files


def any_byte(*names: str) -> Callable[[random.Random, Files, Files], Files]:
    """Bytes of one of these files."""

    def mutate(draw: random.Random, files: Files, other: Files) -> Files:
        name = draw.choice([name for name in names if name in files])
        return files | {name: mutate_bytes(draw, files[name], other.get(name, b"x" * 100))}

    return mutate


def any_value(name: str) -> Callable[[random.Random, Files, Files], Files]:
    """Values of a JSON file; every eighth time its bytes."""

    def mutate(draw: random.Random, files: Files, other: Files) -> Files:
        if draw.random() < 0.125:
            return any_byte(name)(draw, files, other)
        return files | {name: write_json(draw, mutate_json(draw, json.loads(files[name])))}

    return mutate


def header(name: str) -> Callable[[random.Random, Files, Files], Files]:
    """Values in the header of a safetensors file, whose length is corrected; every third time its bytes."""

    def mutate(draw: random.Random, files: Files, other: Files) -> Files:
        if draw.random() < 0.33:
            return any_byte(name)(draw, files, other)
        data = files[name]
        size = int.from_bytes(data[:8], "little")
        text = write_json(draw, mutate_json(draw, json.loads(data[8 : 8 + size])))
        return files | {name: len(text).to_bytes(8, "little") + text + data[8 + size :]}

    return mutate


def either(*ways: Callable[[random.Random, Files, Files], Files]) -> Callable[[random.Random, Files, Files], Files]:
    return lambda draw, files, other: draw.choice(ways)(draw, files, other)


def rewrite_gguf(draw: random.Random, files: Files, other: Files) -> Files:
    """Keys, values and tensors of a GGUF file, written anew by a writer that checks nothing."""
    tree = json.loads(files["model.json"])
    data = files["model.gguf"][tree.pop("start") :]
    return {"model.gguf": gguf_from(draw, mutate_json(draw, tree), data)}


def gguf_from(draw: random.Random, tree: Any, data: bytes) -> bytes:
    meta, tensors = ((tree.get(name) if isinstance(tree, dict) else None) for name in ("meta", "tensors"))
    meta, tensors = (part if isinstance(part, dict) else {} for part in (meta, tensors))
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(meta))
    for key, value in meta.items():
        code, body = gguf_value(draw, value)
        out += gguf_text(key) + struct.pack("<I", code) + body
    for name, described_tensor in tensors.items():
        described_tensor = described_tensor if isinstance(described_tensor, list) else [described_tensor]
        shape, kind, offset = [*described_tensor, *[[], 0, 0][len(described_tensor) :]][:3]
        axes = [count_of(n) for n in shape] if isinstance(shape, list) else [count_of(shape)]
        out += gguf_text(name) + struct.pack("<I", len(axes)) + struct.pack(f"<{len(axes)}Q", *axes)
        out += struct.pack("<IQ", count_of(kind) % 2**32, count_of(offset))
    return out + b"\0" * (-len(out) % 32) + data


def count_of(value: Any) -> int:
    number = value if isinstance(value, int | float) and value == value and abs(value) < 1e300 else 7
    return int(number) % 2**64


def gguf_text(value: Any) -> bytes:
    data = str(value).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def gguf_value(draw: random.Random, value: Any, depth: int = 0) -> tuple[int, bytes]:
    """Type and bytes of a value; a list has the type of its first."""
    if isinstance(value, bool):
        return 7, bytes([value])
    if isinstance(value, int):
        code, form, bits = draw.choice([(4, "<I", 32), (4, "<I", 32), (10, "<Q", 64)]) if value >= 0 else (5, "<I", 32)
        return code, struct.pack(form, value % 2**bits)
    if isinstance(value, float):
        return 12, struct.pack("<d", value)
    if isinstance(value, list) and depth < 6:
        pairs = [gguf_value(random.Random(0), entry, depth + 1) for entry in value]
        code = pairs[0][0] if pairs else 4
        bodies = [body for kind, body in pairs if kind == code]
        return 9, struct.pack("<IQ", code, len(bodies)) + b"".join(bodies)
    return 8, gguf_text(value)


def pieces_of(draw: random.Random, files: Files, other: Files) -> Files:
    """Fields of a SentencePiece model: left out, swapped, put twice, given other numbers and texts."""
    from argosy.data.tokenizers.proto import fields

    parts = [[number, value] for number, value in fields(files["tokenizer.model"], Path("x"))]
    for _ in range(draw.choice([1, 1, 3, 30])):
        at = draw.randrange(len(parts)) if draw.random() < 0.6 else -draw.randrange(1, 4)
        parts[at : at + 1 or None] = piece_changed(draw, parts[at], draw.choice(parts))
        if not parts:
            break
    return {"tokenizer.model": b"".join(field_of(number, value) for number, value in parts)}


def piece_changed(draw: random.Random, part: list[Any], other: list[Any]) -> list[list[Any]]:
    from argosy.data.tokenizers.proto import fields

    number, value = part
    chance = draw.random()
    if chance < 0.1:
        return []
    if chance < 0.2:
        return [part, other]
    if chance < 0.3:
        return [[draw.choice([1, 2, 3, 4, 5, 6, 100]), value]]
    inner = dict(fields(value, Path("x")))
    key = draw.choice([*inner, 1, 2, 3, 4, 5, 24, 26, 35, 40, 41, 42, 43, 44, 45, 46])
    choices = [
        draw.choice(EXTREMES) % 2**64, draw.randrange(8), draw.choice(TEXTS).encode("utf-8", "replace"), b"<0x41>", b"a", b"\xff",
        b"</s>", b"\xe2\x96\x81", struct.pack("<f", draw.choice([1e38, float("nan"), -0.0])),
    ]  # fmt: skip
    inner[key] = draw.choice(choices)
    return [[number, b"".join(field_of(n, v) for n, v in inner.items())]]


def field_of(number: int, value: int | bytes) -> bytes:
    from argosy.data.tokenizers import proto

    if isinstance(value, int):
        return proto.number(number, value)
    fixed = number == 2 and len(value) == 4  # a score
    return bytes([number << 3 | 5]) + value if fixed else proto.message(number, value)


# ---- weights


def safetensors_of(tensors: dict[str, np.ndarray]) -> bytes:
    from safetensors.numpy import save

    return save(tensors, {"format": "pt"})


@cache
def tensors_good() -> list[Files]:
    draw = np.random.default_rng(0)
    some = {
        "a": draw.normal(size=(3, 5)).astype(np.float32), "b": np.zeros((0, 4), np.float16), "c": np.array(2.5),
        "d": draw.normal(size=7).astype(ml_dtypes.bfloat16), "é": np.arange(6, dtype=np.int8).reshape(1, 2, 3),
    }  # fmt: skip
    return [{"model.safetensors": safetensors_of(some)}, {"model.safetensors": safetensors_of({"w": some["a"]})}]


@cache
def shards_good() -> list[Files]:
    parts = {"one.safetensors": {"a": np.ones(3)}, "two.safetensors": {"b": np.ones((2, 2)), "c": np.array(1)}}
    names = {tensor: file for file, tensors in parts.items() for tensor in tensors}
    index = {"metadata": {"total_size": 64}, "weight_map": names}
    files = {name: safetensors_of(tensors) for name, tensors in parts.items()}
    return [files | {"model.safetensors.index.json": json.dumps(index).encode()}]


def read_tensors(folder: Path) -> None:
    from argosy.core.formats.safetensors import SafetensorsFolder

    file = SafetensorsFolder.open(folder)
    for name in file.names:
        array = file.read(name)
        assert array.shape == file.shape(name)
        array.tobytes()


# ---- GGUF


def gguf_of(path: Path, arch: str, fill: Callable[[gguf.GGUFWriter], None]) -> bytes:
    writer = gguf.GGUFWriter(path, arch)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def put_pieces(writer: gguf.GGUFWriter) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "ab"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([float(-place) for place in range(len(pieces))])
    writer.add_token_types([2, 3, 3, *([6] * 256), *([1] * 5)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")


def put_bytes(writer: gguf.GGUFWriter) -> None:
    from argosy.data.tokenizers.byte import byte_names

    tokens = [*byte_names().values(), "ab", "Ġa", "<|end|>", "<|user|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([*([1] * 258), 3, 4])
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_eos_token_id(258)


def put_words(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("bert")
    writer.add_token_list(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\u2581hello", "\u2581w", "orld", "\u2581a", "\u25811"])
    writer.add_unk_token_id(1)


def put_model(writer: gguf.GGUFWriter) -> None:
    draw, width = np.random.default_rng(0), 32
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    put_pieces(writer)
    shapes = {"token_embd": (264, width), "output_norm": (width,)} | {
        f"blk.0.{name}": shape
        for name, shape in {
            "attn_norm": (width,), "ffn_norm": (width,), "attn_q": (width, width), "attn_k": (16, width),
            "attn_v": (16, width), "attn_output": (width, width), "ffn_gate": (32, width), "ffn_up": (32, width),
            "ffn_down": (width, 32),
        }.items()
    }  # fmt: skip
    for name, shape in shapes.items():
        values = draw.normal(size=shape).astype(np.float32)
        if name.endswith(("ffn_up", "ffn_down")):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)


def gguf_files_of(*ways: tuple[str, Callable[[gguf.GGUFWriter], None]]) -> list[Files]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        files = [gguf_of(Path(folder) / "x.gguf", arch, fill) for arch, fill in ways]
        return [{"model.gguf": data, "model.json": tree_of(Path(folder) / "y.gguf", data)} for data in files]


GOLDENS = Path(__file__).parent / "goldens" / "models"


def families_gguf() -> list[Files]:
    """A small model of each architecture, as llama.cpp's converter writes it."""
    import tempfile

    from gguf_files import ARCHS, write_gguf
    from golden_weights import write_model
    from safetensors.numpy import load_file

    files: dict[str, Files] = {}
    for golden in sorted(GOLDENS.iterdir()):
        config = json.loads((golden / "config.json").read_text(encoding="utf-8"))
        if (kind := config["model_type"]) in files or kind not in ARCHS:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            weights = load_file(write_model(golden, Path(scratch) / "hub") / "model.safetensors")
            data = write_gguf(Path(scratch) / "x.gguf", config, weights).read_bytes()
            files[kind] = {"model.gguf": data, "model.json": tree_of(Path(scratch) / "y.gguf", data)}
    return list(files.values())


def tree_of(path: Path, data: bytes) -> bytes:
    """What a GGUF file says, as JSON, for mutations by value."""
    from argosy.core.formats.gguf import GGUF

    path.write_bytes(data)
    file = GGUF.open(path)
    first = min((place.begin for place in file.places.values()), default=0)
    numbers = {kind.name: number for number, kind in TYPES.items()}
    tensors = {
        name: [list(place.shape)[::-1], numbers[place.kind.name], place.begin - first]
        for name, place in file.places.items()
    }
    meta = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in file.meta.items()}
    return json.dumps({"meta": meta, "tensors": tensors, "start": first or len(data)}).encode()


def read_gguf(folder: Path) -> None:
    from argosy.core.formats.gguf import GGUF
    from argosy.weights.gguf.reader import open_gguf

    file = GGUF.open(folder / "model.gguf")
    for name in file.names:
        assert file.read(name).shape == file.shape(name)
    stored = open_gguf(folder / "model.gguf")
    build(stored.config)
    for name in stored.weights.names:
        stored.weights.read(name)


# ---- configs


@cache
def configs_good() -> list[Files]:
    """Two generations of config.json of every example of every family that the Hub can express (the laws ask for more), and
    those that transformers wrote."""
    from argosy.models import FAMILIES
    from argosy.weights.hub.config import config_from

    files = []
    for name in FAMILIES:
        for config in FAMILIES[name].examples().values():
            try:
                hub = config.to_hub() | {"torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": [2, 3]}
                config_from(hub, "config.json")
            except ArgosyError:
                continue
            old = {key: value for key, value in hub.items() if key != "rope_parameters"}
            files += [{"config.json": json.dumps(config_json).encode()} for config_json in (hub, old)]
    theirs = [golden / "config.json" for golden in sorted(GOLDENS.iterdir())]
    inner = json.loads((GOLDENS / "gemma3-plain" / "config.json").read_text(encoding="utf-8"))
    outer = {"model_type": "gemma3", "text_config": inner, "vision_config": {"hidden_size": 16}, "mm_tokens_per_image": 256}
    return [*files, *({"config.json": path.read_bytes()} for path in theirs), {"config.json": json.dumps(outer).encode()}]


def mutate_config(draw: random.Random, files: Files, other: Files) -> Files:
    """Values, and keys of other families."""
    config = json.loads(files["config.json"])
    if draw.random() < 0.2:
        key = draw.choice(list(strange := json.loads(other["config.json"])))
        config[key] = strange[key]
    if draw.random() < 0.1:
        config["quantization_config"] = draw.choice([1, [], {"quant_method": 3}, {"quant_method": "fp8"}, "x"])
    return any_value("config.json")(draw, {"config.json": json.dumps(config).encode()}, other)


def read_config(folder: Path) -> None:
    from argosy.weights.hub.config import config_from, read_json_object

    config = config_from(read_json_object(folder / "config.json"), str(folder / "config.json"))
    build(config)
    config.hub_rows()
    json.dumps(config.to_hub())


def build(config: Any) -> None:
    """The model of a config, every weight a description; what is counted from the config alone."""
    layers = getattr(config, "layers", 0)  # models of convolutions, and those of two towers, count theirs otherwise
    assert layers <= 10_000, f"a model of {layers} layers"
    if layers > MOST_LAYERS:
        config = config.model_copy(update={"layers": MOST_LAYERS})
    config.build()
    config.parameters()
    config.flops(8)


# ---- tokenizers


def fast_good() -> list[Files]:
    """Each model and decoder of the `tokenizers` library, small."""
    from argosy.data.tokenizers.byte import tokenizer_json
    from argosy.data.tokenizers.convert import from_word_pieces

    plain = json.loads(tokenizer_json())
    merged = copy.deepcopy(plain)
    merged["model"] |= {"vocab": plain["model"]["vocab"] | {"ab": 258, "Ġa": 259}, "merges": [["a", "b"], ["Ġ", "a"]]}
    cut = {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}| ?\p{L}+"}, "behavior": "Isolated", "invert": False}
    merged["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [cut, plain["pre_tokenizer"]]}
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}
    merged["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}, replace]}
    start, text = {"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    merged["post_processor"] = {
        "type": "TemplateProcessing", "single": [start, text], "pair": [text, text],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [256], "tokens": ["<bos>"]}},
    }  # fmt: skip
    fallback = copy.deepcopy(plain)
    pieces = {
        "<unk>": 0,
        "<s>": 1,
        **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)},
        "▁": 258,
        "a": 259,
        "▁a": 260,
    }
    fallback["model"] |= {"vocab": pieces, "merges": [["▁", "a"]], "byte_fallback": True, "unk_token": "<unk>"}
    fallback |= {"added_tokens": [], "pre_tokenizer": None}
    fallback["normalizer"] = {"type": "Prepend", "prepend": "▁"}
    fallback["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]}  # fmt: skip
    unigram = copy.deepcopy(fallback)
    unigram["model"] = {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["<unk>", 0.0], ["▁", -1.0], ["a", -2.0]],
        "byte_fallback": False,
    }
    unigram["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    words = json.loads(from_word_pieces(["[UNK]", "[CLS]", "[SEP]", "hello", "a", "##b", "1"], {}))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": {"content": "<eos>"},
        "added_tokens_decoder": {"260": {"content": "<new>", "special": True}}, "add_bos_token": True,
        "chat_template": [{"name": "default", "template": "{{ messages }}"}], "additional_special_tokens": ["<eos>"],
    }  # fmt: skip
    small_files = {"tokenizer_config.json": json.dumps(config).encode(), "special_tokens_map.json": b'{"pad_token": "a"}'}
    several = [{"tokenizer.json": json.dumps(tokenizer_json).encode()} for tokenizer_json in (plain, merged, fallback, unigram, words)]
    return [*several, several[1] | small_files]


def model_good() -> list[Files]:
    return [{"tokenizer.model": (DATA / "models/stories260k/tokenizer.model").read_bytes()}]


def ranks_good() -> list[Files]:
    tokens = [*(bytes([byte]) for byte in range(256)), b" a", b"ab", " é".encode()]
    text = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)).encode()
    config = b'{"added_tokens_decoder": {"260": {"content": "[BOS]"}}, "bos_token": "[BOS]"}'
    return [{"qwen.tiktoken": text}, {"tiktoken.model": text, "tokenizer_config.json": config}]


def lists_good() -> list[Files]:
    from argosy.data.tokenizers.byte import byte_names

    vocab = {name: byte for byte, name in byte_names().items()} | {"ab": 256, "Ġa": 257, "<|endoftext|>": 258}
    pairs = {"vocab.json": json.dumps(vocab).encode(), "merges.txt": "#version: 0.2\na b\nĠ a\n".encode()}
    words = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\nhello\nw\n##orld\n1\n"
    clip = {"tokenizer_config.json": b'{"tokenizer_class": "CLIPTokenizer"}'}
    return [pairs, pairs | clip, {"vocab.txt": words}]


def read_tokenizer(folder: Path) -> None:
    """A stream joins to the whole, whatever the file says."""
    from argosy.data.tokenizers.load import find_tokenizer

    tokenizer = find_tokenizer(next(folder.glob("*.gguf"), folder))
    if tokenizer is None:
        return
    for special in (False, True):
        ids, spans = tokenizer.encode_with_offsets(TEXT, special)
        assert ids == tokenizer.encode(TEXT, special)
        assert len(ids) == len(spans)
        for all_ids in (ids, [*range(0, min(tokenizer.vocab, 400), 7), tokenizer.vocab, -1]):
            stream = tokenizer.stream(special)
            assert "".join([stream.push(token) for token in all_ids]) + stream.end() == tokenizer.decode(
                all_ids, special
            )
    tokenizer.encode_many([TEXT, ""])
    assert len(tokenizer.fingerprint) == 64
    assert tokenizer.missing_bytes is not None


# ---- chat templates


def templates_good() -> list[Files]:
    harm = b"{{ ''.__class__ }}{{ cycler.__init__.__globals__.os.popen('touch harm') }}{% for a in range(9**9) %}{{ 'a' * 9**9 }}"
    return [
        *({"t.jinja": path.read_bytes()} for path in sorted((DATA / "chat_templates").glob("*.jinja"))),
        {"t.jinja": harm},
    ]


def read_template(folder: Path) -> None:
    from argosy.data.chat.mask import render_with_mask

    messages = [
        {"role": "system", "content": "x"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"},
    ]  # fmt: skip
    template = (folder / "t.jinja").read_bytes().decode("utf-8", "replace")
    for turns in (messages, messages[1:]):
        text, spans = render_with_mask(template, turns, {"bos_token": "<s>", "eos_token": "</s>"}, ends=["</s>"])
        assert all(0 <= start < stop <= len(text) for start, stop in spans)


# ---- records to fine-tune on


def records_good() -> list[Files]:
    hi, ho = {"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "ho"}], "weight": 1}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    talk = [{"from": "human", "value": "hi"}, {"from": "function_call", "value": '{"name": "f"}'}, {"from": "gpt", "value": "ho"}]
    rows: list[dict[str, Any]] = [
        {"messages": [hi, call, ho], "tools": [{"name": "f"}], "chat_template_kwargs": {"a": 1}},
        {"prompt": "a", "completion": "b"}, {"prompt": [hi], "completion": [ho]}, {"conversations": talk, "system": "s", "tools": "[]"},
        {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]], "system": "f"},
    ]  # fmt: skip
    return [{"t.jsonl": json.dumps(row).encode()} for row in rows]


def read_records(folder: Path) -> None:
    """Whatever is accepted becomes tokens of the vocabulary, with a mask of equal length."""
    from argosy.data.rows.encoders import encoder_for
    from argosy.data.sources.jsonl import JsonLines
    from argosy.data.tokenizers.byte import ByteTokenizer

    tokenizer = ByteTokenizer()
    calls = "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    tokenizer.chat_templates = {"default": "{% for m in messages %}{{ m.role }}: {{ m.content }}" + calls + "\n{% endfor %}"}
    source = JsonLines(folder / "t.jsonl")
    for encoded in encoder_for(source, Encoding(tokenizer)).encode(list(source.documents())):
        assert encoded.weights is None or len(encoded.weights) == len(encoded.tokens)


GGUF = either(any_byte("model.gguf"), rewrite_gguf)
KINDS: dict[str, Kind] = {
    "safetensors": Kind(tensors_good, header("model.safetensors"), read_tensors),
    "shards": Kind(
        shards_good, either(any_value("model.safetensors.index.json"), header("one.safetensors")), read_tensors
    ),
    "gguf": Kind(cache(lambda: [*gguf_files_of(("llama", put_model)) * 4, *families_gguf()]), GGUF, read_gguf),
    "gguf vocabulary": Kind(
        cache(lambda: gguf_files_of(("llama", put_pieces), ("llama", put_bytes), ("bert", put_words))), GGUF, read_tokenizer
    ),
    "config.json": Kind(configs_good, mutate_config, read_config),
    "tokenizer.json": Kind(
        cache(fast_good),
        lambda draw, files, other: any_value(draw.choice(list(files)))(draw, files, other),
        read_tokenizer,
    ),
    "tokenizer.model": Kind(
        cache(model_good), either(any_byte("tokenizer.model"), pieces_of, pieces_of), read_tokenizer
    ),
    "tiktoken": Kind(
        cache(ranks_good), any_byte("qwen.tiktoken", "tiktoken.model", "tokenizer_config.json"), read_tokenizer
    ),
    "vocab and merges": Kind(
        cache(lists_good), any_byte("vocab.json", "merges.txt", "vocab.txt"), read_tokenizer
    ),
    "chat template": Kind(cache(templates_good), any_byte("t.jinja"), read_template),
    "records": Kind(cache(records_good), either(any_value("t.jsonl"), any_byte("t.jsonl")), read_records),
}  # fmt: skip
SHARES = {
    "safetensors": 16, "shards": 8, "gguf": 20, "gguf vocabulary": 8, "config.json": 20, "tokenizer.json": 8, "tokenizer.model": 6,
    "tiktoken": 3, "vocab and merges": 3, "chat template": 4, "records": 4,
}  # fmt: skip
"""Of a hundred inputs, how many are of each kind."""
