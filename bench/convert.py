"""`argosy convert` on a sharded folder of 7B-shaped layers: seconds and memory beside copying the same bytes; killed and resumed.

    ./run python bench/convert.py FOLDER [--gb 8] [--shard-gb 5]

FOLDER is new and is deleted afterwards; it takes three times the size. The model: random bfloat16 in Llama 7B's shapes (width
4096, ffn 11008, 32 heads, vocabulary 32000), as many layers as fit.

Convention: seconds are of the whole command, the interpreter's start and the hashing of what is read included, to the last
byte on disk (fsync). `cp` copies the source of that row and syncs, right before; the source's pages are dropped from the
page cache before each. Peak memory is the process's largest resident set, mapped pages included.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from argosy.core.formats import TensorEntry
from argosy.core.formats.files import write_file
from argosy.core.formats.safetensors import folder_files

WIDTH, FFN, HEADS, VOCAB = 4096, 11008, 32, 32000
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
OUTER = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,), "lm_head.weight": (VOCAB, WIDTH)}
LAYER = {
    **{f"self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"},
    **{f"mlp.{name}_proj.weight": (FFN, WIDTH) for name in ("gate", "up")},
    "mlp.down_proj.weight": (WIDTH, FFN),
    "input_layernorm.weight": (WIDTH,),
    "post_attention_layernorm.weight": (WIDTH,),
}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("folder", type=Path)
    words.add_argument("--gb", type=float, default=8)
    words.add_argument("--shard-gb", type=float, default=5)
    options = words.parse_args()
    options.folder.mkdir(parents=True)
    try:
        run(options.folder, options.gb, options.shard_gb)
    finally:
        shutil.rmtree(options.folder)


def run(folder: Path, gb: float, shard_gb: float) -> None:
    source, ours, back = folder / "source", folder / "ours", folder / "back"
    make(source, gb, shard_gb)
    print(
        "| | GB | s | GB/s | peak memory MB | bound MB | cp s | cp GB/s | of cp |\n|---|---|---|---|---|---|---|---|---|"
    )
    row("hub -> argosy", source, ours, "to=argosy")
    row("argosy -> hub", ours, back, f"shard_gb={shard_gb}")
    print(f"\nthere and back: {check(source, back)}", flush=True)
    shutil.rmtree(back)
    killed("argosy -> hub", source, ours, back, f"shard_gb={min(shard_gb, gb / 8)}")
    shutil.rmtree(ours)
    killed("hub -> argosy", source, source, ours, "to=argosy")


def make(folder: Path, gb: float, shard_gb: float) -> None:
    """The source, from one block of random bytes shifted from tensor to tensor."""
    noise = np.random.default_rng(0).integers(0, 1 << 16, (1 << 28) + 9973, np.uint16)
    shapes = list(tensors(gb))
    entries = [
        TensorEntry(
            name,
            shape,
            BFLOAT16,
            lambda i=i, shape=shape: noise[i : i + int(np.prod(shape))].view(BFLOAT16).reshape(shape),
        )
        for i, (name, shape) in enumerate(shapes)
    ]
    layers = sum(name.endswith("q_proj.weight") for name, _ in shapes)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    for file in folder_files(entries, shard_gb * 1e9):
        write_file(folder / file.name, file)
    (folder / "config.json").write_text(json.dumps(config))
    sync(folder)
    print(
        f"{layers} layers, {len(shapes)} tensors, {size(folder) / 1e9:.2f} GB in shards of {shard_gb:g} GB\n",
        flush=True,
    )


def tensors(gb: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    layer = sum(2 * int(np.prod(shape)) for shape in LAYER.values())
    layers = max(1, int((gb * 1e9 - 4 * VOCAB * WIDTH) / layer))
    yield from OUTER.items()
    for i in range(layers):
        yield from ((f"model.layers.{i}.{name}", shape) for name, shape in LAYER.items())


def row(name: str, source: Path, target: Path, *words: str) -> None:
    copied = copy_s(source, target.with_name("copy"))
    forget(source)
    start = time.monotonic()
    report = json.loads(
        subprocess.run(command(source, target, *words, "--json"), check=True, stdout=subprocess.PIPE).stdout
    )
    seconds = time.monotonic() - start
    gb, memory = size(source) / 1e9, report["memory"]
    print(
        f"| {name} | {gb:.2f} | {seconds:.1f} | {gb / seconds:.2f} | {memory['peak_bytes'] / 1e6:.0f} "
        f"| {memory['bound_bytes'] / 1e6:.0f} | {copied:.1f} | {gb / copied:.2f} | {copied / seconds:.0%} |",
        flush=True,
    )


def copy_s(source: Path, target: Path) -> float:
    forget(source)
    start = time.monotonic()
    subprocess.run(["cp", "-r", source, target], check=True)
    sync(target)
    seconds = time.monotonic() - start
    shutil.rmtree(target)
    return seconds


def killed(name: str, first: Path, source: Path, target: Path, *words: str) -> None:
    """SIGKILL when half is written, then the same command again, then `--check` against the first folder."""
    part, half = target.with_name(target.name + ".part"), size(source) / 2
    process = subprocess.Popen(command(source, target, *words), stdout=subprocess.DEVNULL)
    while process.poll() is None and size(part) < half:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    written_gb = size(part) / 1e9
    start = time.monotonic()
    report = json.loads(
        subprocess.run(command(source, target, *words, "--json"), check=True, stdout=subprocess.PIPE).stdout
    )
    seconds = time.monotonic() - start
    kept_gb = report["kept_bytes"] / 1e9
    print(
        f"{name}, killed with {written_gb:.2f} GB written: resumed in {seconds:.1f} s, {kept_gb:.2f} GB kept; {check(first, target)}",
        flush=True,
    )


def check(a: Path, b: Path) -> str:
    done = subprocess.run(command(a, "--check", b), stdout=subprocess.PIPE, text=True)
    return f"exit code {done.returncode}: {done.stdout.splitlines()[-2]}"


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "argosy", "convert", *map(str, words)]


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


def sync(folder: Path) -> None:
    for path in files(folder):
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def forget(folder: Path) -> None:
    """Drops its pages from the page cache."""
    for path in files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
