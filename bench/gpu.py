"""Everything that a machine with one GPU can tell in a quarter of an hour, without a network: one command, one page of tables.

    python bench/gpu.py              on a machine with an NVIDIA GPU, Python 3.12 and a recent jax
    python bench/gpu.py --tiny       the same parts in small sizes, on any device; CI runs it on CPUs
    python bench/gpu.py kernels      of one part or several: packages kernels train decode profile verbs

Each part is a process of its own with a time limit, so that the failure of one does not end the others. Beside jax, flax, optax and
orbax it needs the small packages of requirements/base.in: the part `packages` names those that are missing, each with what it is for,
and `pip install --no-index --find-links FOLDER -r requirements/base.in` installs them from a folder of wheels.

kernels   the largest difference of each implementation from the reference in float32, as a share of the reference's largest number, in
          value and gradient; and milliseconds of both
train     an update of a model of 1.2B parameters in bfloat16 by each attention: milliseconds, tokens a second, MFU, memory as the run
          predicted it, as the compiler counts it and as the device had it at its peak
decode    tokens a second of the engine at 1, 8 and 32 rows, in bfloat16 with one step and with eight a dispatch, and by presets of
          `argosy quantize`; beside the floor, which is the bytes of the weights over the device's bandwidth
profile   where the time of a training step and of a decode step goes: the kernels that took most of it
verbs     seconds of verbs as a user types them: a run, its resume, text from it, its quantization, text from that

MFU counts 6 FLOPs a token and parameter that is multiplied (embedding lookups left out) and causal attention halved, over the maker's
dense bfloat16 peak.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Seconds of each part.
LIMITS = {"packages": 60, "kernels": 150, "train": 210, "decode": 300, "profile": 150, "verbs": 120}
# Dense bfloat16 FLOP/s and bytes/s of memory, by what the device's name contains: NVIDIA's data sheets.
PEAKS = {
    "B200": (2250e12, 8e12),
    "H200": (989e12, 4.8e12),
    "H100": (989e12, 3.35e12),
    "A100": (312e12, 2.04e12),
    "L4": (121e12, 0.3e12),
}
# Modules whose names differ from those of their packages.
MODULES = {"orbax-checkpoint": "orbax.checkpoint", "pyyaml": "yaml"}


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("parts", nargs="*", help=", ".join(LIMITS))
    words.add_argument("--tiny", action="store_true")
    words.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = words.parse_args()
    if unknown := [name for name in options.parts if name not in LIMITS]:
        words.error(f"no part {unknown[0]}: {', '.join(LIMITS)}")
    if options.here:
        sys.path.insert(0, str(ROOT))
        PARTS[options.parts[0]](options.tiny)
        return 0
    failed = []
    for name in options.parts or LIMITS:
        begin = time.monotonic()
        command = [sys.executable, __file__, name, "--here", *(["--tiny"] if options.tiny else [])]
        print(f"\n## {name}\n", flush=True)
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=LIMITS[name]).returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {LIMITS[name]} s"
        if code:
            failed.append(name)
        print(f"\n({name}: {'done' if not code else f'exit {code}'}, {time.monotonic() - begin:.0f} s)", flush=True)
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall parts ran")
    return 1 if failed else 0


def table(*head: str) -> Callable[..., None]:
    """Prints a table's head, and returns a function that prints its rows."""
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    return lambda *cells: print(f"| {' | '.join(map(str, cells))} |", flush=True)


def peaks() -> tuple[float, float] | None:
    """The FLOP/s and bytes/s of this device; None where they are not known."""
    import jax

    kind = jax.devices()[0].device_kind
    return next((peak for name, peak in PEAKS.items() if name in kind), None)


def seconds_of(call: Callable[[], Any], turns: int) -> float:
    """The median time of a call, after one that compiles."""
    import jax

    jax.block_until_ready(call())
    times = []
    for _ in range(turns):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]


# ---------------------------------------------------------------- packages


def packages(tiny: bool) -> None:
    """The device and the versions, and the packages that are missing."""
    listed = (ROOT / "requirements" / "base.in").read_text(encoding="utf-8").splitlines()
    names = [re.split(r"[<>=]", line)[0].strip() for line in listed if line.strip() and not line.startswith("#")]
    names = [name for name in names if name not in ("uv", "hatchling", "editables")]

    def is_missing(name: str) -> bool:
        module = MODULES.get(name, name.replace("-", "_"))
        try:
            return importlib.util.find_spec(module) is None
        except ModuleNotFoundError:
            return True

    missing = sorted({name for name in names if is_missing(name)} | absent_requirements(names))
    if missing:
        raise SystemExit(f"missing packages: {' '.join(missing)}")
    import flax
    import jax

    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit", 0)
    print(f"{device.device_kind}, {memory / 2**30:.0f} GiB for jax; Python {sys.version.split()[0]}, jax {jax.__version__}, "
          f"flax {flax.__version__}")  # fmt: skip


def absent_requirements(names: list[str]) -> set[str]:
    """Packages that installed ones of these need, on this machine, directly or not, and that are not installed."""
    from packaging.requirements import Requirement

    absent, known, queue = set[str](), set[str](), list(names)
    while queue:
        name = queue.pop()
        if name in known:
            continue
        known.add(name)
        try:
            needs = [Requirement(line) for line in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:
            if name not in names:
                absent.add(name)
            continue
        queue += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return absent


# ---------------------------------------------------------------- kernels


def kernels(tiny: bool) -> None:
    """The implementations that are chosen here, beside the reference in float32."""
    row = table("op", "implementation", "case", "type", "value", "gradient", "ms", "reference ms")
    wrong = 0
    for op, case, implementation, dtype, run, exact in cases(tiny):
        try:
            value, gradient, mine, other = compared(run, exact)
        except Exception as error:
            wrong += 1
            row(op, implementation, case, dtype, "failed", f"{type(error).__name__}: {str(error).splitlines()[0][:80]}", "", "")
            continue
        bound = {"float32": 2e-3, "bfloat16": 3e-2, "float16": 1e-2}[dtype]
        is_near = value < bound and gradient < bound
        wrong += not is_near
        row(op, implementation, case, dtype, f"{value:.1e}", f"{gradient:.1e}{'' if is_near else ' TOO FAR'}", f"{1e3 * mine:.2f}",
            f"{1e3 * other:.2f}")  # fmt: skip
    if wrong:
        raise SystemExit(f"{wrong} implementations failed or are too far from the reference")


def compared(run: Callable[[], Any], exact: Callable[[], Any]) -> tuple[float, float, float, float]:
    """The largest differences in value and gradients, and seconds of both."""
    import jax
    import numpy as np

    def far(a: Any, b: Any) -> float:
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        if not np.isfinite(a).all():
            return float("inf")
        return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))

    (value, gradients), (want, exact_gradients) = run(), exact()
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(exact_gradients), strict=True)
    return far(value, want), max((far(a, b) for a, b in pairs), default=0.0), seconds_of(run, 5), seconds_of(exact, 5)


def cases(tiny: bool) -> Iterator[tuple[str, str, str, str, Callable[[], Any], Callable[[], Any]]]:
    """Op, case, implementation, type, and two functions that give value and gradients: of the implementation, of the reference."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from argosy.ops.attention import ATTENTION, Score, See
    from argosy.ops.grouped import GROUPED_MATMUL
    from argosy.ops.matmul import MATMUL
    from argosy.ops.paged.attention import PAGED_ATTENTION

    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    def both(op: Any, name: str, refused: tuple[Any, ...], function: Callable[..., Any], args: tuple[Any, ...], dtype: str) -> Any:
        """The functions of a case, or None where the implementation refuses it."""
        low = tuple(a.astype(dtype) for a in args)
        if op[name].refuses(*refused) is not None:
            return None

        def loss(implementation: Any, *arguments: Any) -> Any:
            y = function(implementation, *arguments)
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

        def result(implementation: Any) -> Any:
            return jax.jit(jax.value_and_grad(partial(loss, implementation), tuple(range(len(args))), has_aux=True))

        mine, other = result(op[name]), result(op[op.default])

        def of(program: Any, arguments: tuple[Any, ...]) -> Any:
            (_, y), gradients = program(*arguments)
            return y, gradients

        def exact() -> Any:
            with jax.default_matmul_precision("highest"):
                return of(other, args)

        return partial(of, mine, low), exact

    slots, page, pages, cached = (4, 16, 32, 40) if tiny else (32, 16, 4096, 1000)
    for case, (queries, N, K, H) in {"decoding": (1, 8, 2, 128), "chunks of 4": (4, 8, 2, 128)}.items():
        q = normal(slots, queries, N, H)
        pools = normal(pages, page, K, H), normal(pages, page, K, H)
        need = -(-cached // page)
        grid = np.full((slots, need + 2), -1, np.int32)
        grid[:, :need] = random.permutation(pages)[: slots * need].reshape(slots, need) if slots * need <= pages else (
            random.integers(0, pages, (slots, need))
        )
        lengths = jnp.asarray(cached - np.arange(slots) % 7, jnp.int32)
        at = lengths[:, None] - queries + jnp.arange(queries, dtype=jnp.int32)
        tables, score = jnp.asarray(grid), Score(H**-0.5)
        for name in PAGED_ATTENTION.preferred:
            for dtype in ("float32", "bfloat16"):
                low = q.astype(dtype), tuple(pool.astype(dtype) for pool in pools)
                if name == PAGED_ATTENTION.default or PAGED_ATTENTION[name].refuses(*low, tables, lengths, score, False):
                    continue

                def paged(implementation: Any, rest: tuple[Any, ...], q: Any, k: Any, v: Any) -> Any:
                    return implementation.run(q, (k, v), *rest)

                rest = tables, lengths, at, score
                mine = jax.jit(partial(paged, PAGED_ATTENTION[name], rest))
                reference = jax.jit(partial(paged, PAGED_ATTENTION[PAGED_ATTENTION.default], rest))

                def exact(q: Any = q, pools: Any = pools, reference: Any = reference) -> Any:
                    with jax.default_matmul_precision("highest"):
                        return reference(q, *pools), ()

                yield "paged attention", case, name, dtype, lambda mine=mine, low=low: (mine(low[0], *low[1]), ()), exact
    T = 40 if tiny else 1024
    shapes = {
        "whole rows": (2, T, 4, 2, 64, None, False),
        "packed": (2, T, 8, 2, 128, None, True),
        "window": (2, T, 4, 4, 64, T // 4, True),
    }
    for case, (B, length, N, K, H, window, packed) in shapes.items():
        q, k, v = normal(B, length, N, H), normal(B, length, K, H), normal(B, length, K, H)
        at = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (B, length))
        segments = jnp.where(at < length // 3, 1, 2) if packed else None
        see, score = See(at, at, segments, segments, aligned=True), Score(H**-0.5, window)
        for name in sorted({*ATTENTION.preferred, "blocked"} - {ATTENTION.default}):
            for dtype in ("float32", "bfloat16"):
                low = tuple(a.astype(dtype) for a in (q, k, v))

                def attend(implementation: Any, q: Any, k: Any, v: Any, see: Any = see, score: Any = score) -> Any:
                    return implementation.run(q, k, v, see, score)

                if errors := both(ATTENTION, name, (*low, see, score, False), attend, (q, k, v), dtype):
                    yield "attention", case, name, dtype, *errors
    rows, D, M, E = (64, 32, 48, 4) if tiny else (8192, 2048, 1024, 16)
    x, w, sizes = normal(rows, D), normal(E, D, M) * D**-0.5, jnp.full(E, rows // E, jnp.int32)
    for name in GROUPED_MATMUL.preferred:
        for dtype in ("float32", "bfloat16"):

            def multiply(implementation: Any, x: Any, w: Any) -> Any:
                return implementation.run(x, w, sizes)

            refused = x.astype(dtype), w.astype(dtype)
            if errors := both(GROUPED_MATMUL, name, refused, multiply, (x, w), dtype):
                yield "grouped matmul", "even experts", name, dtype, *errors
    a, b = normal(rows, D), normal(D, M)
    for name in MATMUL:

        def product(implementation: Any, a: Any, b: Any) -> Any:
            return implementation.run(a, b, 1, 0, a.dtype)

        if name != MATMUL.default and (errors := both(MATMUL, name, (), product, (a, b), "float32")):
            yield "products", f"{rows} x {D} x {M}", name, "float32", *errors


# ---------------------------------------------------------------- training


def train(tiny: bool) -> None:
    """An update of a 1.2B model by each attention."""
    import jax

    words = training_words(tiny)
    settings = "attention", "remat", "run"
    row = table(*settings, "ms a step", "tokens/s", "MFU", "GiB: predicted", "compiler", "peak", "losses of steps 1 to 4")
    failed = 0
    fast = "cudnn" if jax.default_backend() == "gpu" else "blocked"
    for name, remat, layers in (fast, "none", "scan"), (fast, "none", "unroll"), ("reference", "full", "scan"):
        # A process each: a device's peak of memory is that of the whole process.
        run_words = [f"execution.{word}={value}" for word, value in zip(settings, (name, remat, layers), strict=True)]
        command = [sys.executable, "-c", STEP, json.dumps([*words, *run_words]), str(4 if tiny else 8)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMITS["train"] // 2)
        if done.returncode:
            failed += 1
            row(name, remat, layers, "failed", *[""] * 5, (done.stderr.strip().splitlines() or [""])[-1][:100])
            continue
        report = json.loads(done.stdout.strip().splitlines()[-1])
        peak = peaks()
        mfu = f"{report['flops'] / report['seconds'] / peak[0]:.1%}" if peak else "-"
        sizes = [f"{report[kind] / 2**30:.2f}" for kind in ("predicted", "compiler", "peak")]
        losses = " ".join(f"{loss:.4f}" for loss in report["losses"][:4])
        row(name, remat, layers, f"{1e3 * report['seconds']:.1f}", f"{report['tokens'] / report['seconds']:,.0f}", mfu, *sizes, losses)
    if failed:
        raise SystemExit(f"{failed} ways failed")


def training_words(tiny: bool) -> list[str]:
    """A run of a model of 1.2B parameters, as settings."""
    words = ["data.source=synthetic", "optimizer=adamw", "precision=bfloat16", "steps=100", "eval.batches=0"]
    return words + (["data.batch=2", "data.sequence=64"] if tiny else ["model=llama3.2-1b", "data.batch=8", "data.sequence=2048"])


STEP = """
import json, sys, time
sys.path.insert(0, ".")
import jax
from argosy.models.hub import rows
from argosy.run.assembly.assemble import assemble
from argosy.run.settings.compose import compose
from argosy.run.assembly.decided import Decided
from argosy.run.memory import compiled_need, estimated_need
from argosy.run.settings.run import Run

run = compose(Run, "tiny", json.loads(sys.argv[1])).value
a = assemble(run, Decided.here(run))
update = a.with_frozen(a.compile())
state = a.start()
batch = a.place(next(a.batches))
times, losses = [], []
for _ in range(int(sys.argv[2])):
    begin = time.perf_counter()
    state, metrics = update(state, batch)
    losses.append(float(metrics["loss"]))
    times.append(time.perf_counter() - begin)
model, tokens = run.model, run.data.batch * run.data.sequence
mixing = model.mixing_flops(run.data.sequence) // 2
flops = 3 * run.data.batch * (model.flops(run.data.sequence) - model.mixing_flops(run.data.sequence) + mixing)
predicted = estimated_need(run, a.decided, a.shapes, a.places, a.mesh, a.target, a.roles)
sizes = a.compile().memory_analysis()
compiler = sum(getattr(sizes, f"{k}_size_in_bytes") for k in ("argument", "output", "temp")) - sizes.alias_size_in_bytes
stats = jax.devices()[0].memory_stats() or {}
print(json.dumps({"seconds": sorted(times[1:])[len(times[1:]) // 2], "tokens": tokens, "flops": flops, "losses": losses,
                  "predicted": int(predicted.total), "compiler": int(compiler), "peak": stats.get("peak_bytes_in_use", 0)}))
"""


# ---------------------------------------------------------------- decoding


def decode(tiny: bool) -> None:
    """Tokens a second of the engine."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from argosy.infer.load import random_lm
    from argosy.infer.settings import EngineSettings
    from argosy.models.parts.weight import split
    from argosy.run.settings.recipe_files import preset_config

    preset, length, new = ("argosy-1m", 16, 64) if tiny else ("llama3.2-1b", 128, 128)
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    row = table("weights", "steps", "rows", "tokens/s", "ms a step", "floor ms", "first tokens, s")
    plain = np.dtype(dtype).name
    for form, steps in ((plain, 1), (plain, 8), ("w8", 1), *(() if tiny else (("w4", 1), ("fp8", 1), ("mxfp4", 1)))):
        engine = EngineSettings(slots=32, context=length + new + 1, steps=steps)
        lm = random_lm(preset_config(preset), 0, dtype=dtype, engine=engine)
        if form != plain:
            lm.quantize(form)
        size = sum(a.nbytes for address, a in split(lm.module)[1].items() if not address.startswith("embed.") or lm.config.tied)
        peak = peaks()
        for rows in (1, 8, 32):
            rng = np.random.default_rng(rows)

            def spent(count: int, lm: Any = lm, rows: int = rows, rng: Any = rng) -> float:
                """Seconds of an answer to prompts that were not asked before: the prefix cache knows none of them."""
                ids = rng.integers(3, lm.config.vocab, (rows, length)).tolist()
                begin = time.perf_counter()
                lm.generate(ids, max_tokens=count, temperature=0.0, ignore_eos=True)
                return time.perf_counter() - begin

            spent(new), spent(1)
            first, whole = spent(1), spent(new)
            step = (whole - first) / (new - 1)
            floor = f"{1e3 * size / peak[1]:.2f}" if peak else "-"
            row(form, steps, rows, f"{rows * (new - 1) / (whole - first):,.0f}", f"{1e3 * step:.2f}", floor, f"{first:.3f}")


# ---------------------------------------------------------------- profile


def profile(tiny: bool) -> None:
    """The kernels that take most of a training step, and of a decode step of one row and of 32."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from argosy.infer.load import random_lm
    from argosy.infer.settings import EngineSettings
    from argosy.run.assembly.assemble import assemble
    from argosy.run.assembly.decided import Decided
    from argosy.run.settings.compose import compose
    from argosy.run.settings.recipe_files import preset_config
    from argosy.run.settings.run import Run

    preset, length, new = ("argosy-1m", 16, 16) if tiny else ("llama3.2-1b", 128, 64)
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    lm = random_lm(preset_config(preset), 0, dtype=dtype, engine=EngineSettings(slots=32, context=length + new + 1))
    for rows in (1, 32):
        rng = np.random.default_rng(rows)

        def answer(lm: Any = lm, rows: int = rows, rng: Any = rng) -> None:
            ids = rng.integers(3, lm.config.vocab, (rows, length)).tolist()
            lm.generate(ids, max_tokens=new, temperature=0.0, ignore_eos=True)

        answer()
        kernels_of(f"{new} steps of {rows} decoding rows, after their prompts", answer)
    del lm
    run = compose(Run, "tiny", training_words(tiny)).value
    a = assemble(run, Decided.here(run))
    update, state = a.with_frozen(a.compile()), a.start()
    batch = a.place(next(a.batches))
    state, _ = update(state, batch)

    def learn() -> None:
        nonlocal state
        for _ in range(2):
            state, metrics = update(state, batch)
        float(metrics["loss"])

    kernels_of("two training steps", learn)


def kernels_of(title: str, work: Callable[[], None]) -> None:
    """Prints which kernels the device spent this work's time on."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1  # tracing the host would slow the work down
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            begin = time.perf_counter()
            work()
            wall = time.perf_counter() - begin
        planes = list(jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb")))).planes)
        spent: dict[str, list[float]] = {}
        for line in (line for plane in planes for line in plane.lines if line.name.startswith(("Stream", "tf_XLA"))):
            for event in line.events:
                if event.name.startswith("ThunkExecutor"):
                    continue  # a CPU's, and its time is that of the others
                spent.setdefault(re.sub(r"[._]\d+$", "", event.name), []).append(event.duration_ns / 1e6)
    busy = sum(map(sum, spent.values()))
    print(f"\n{title}: {1e3 * wall:.1f} ms, kernels {busy:.1f} ms in {sum(map(len, spent.values()))} launches\n")
    row = table("kernel", "launches", "ms", "of the kernels' time")
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:14]:
        row(name[:90], len(times), f"{sum(times):.2f}", f"{sum(times) / busy:.1%}")


# ---------------------------------------------------------------- verbs


def verbs(tiny: bool) -> None:
    """Verbs as processes, in a folder of their own."""
    steps = 10 if tiny else 200
    run, few = "runs/tiny", "runs/tiny-w4"
    commands = [
        ["train", "tiny", f"dir={run}", f"data.source={ROOT / 'README.md'}", f"steps={steps}"],
        ["train", run, f"steps={2 * steps}"],
        ["generate", run, "Once upon", "max_tokens=16"],
        ["quantize", run, few, "preset=w4"],
        ["generate", few, "Once upon", "max_tokens=16"],
    ]
    row = table("command", "seconds", "last line")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for words in commands:
            begin = time.monotonic()
            command = [sys.executable, "-m", "argosy", *words]
            paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
            failed += done.returncode != 0
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            row(f"`argosy {' '.join(words)}`", f"{time.monotonic() - begin:.1f}", (lines or [""])[-1][:100].replace("|", "/"))
            if done.returncode:
                print("\n".join(lines[-12:]), flush=True)
    if failed:
        raise SystemExit(f"{failed} verbs failed")


PARTS: dict[str, Callable[[bool], None]] = {
    "packages": packages, "kernels": kernels, "train": train, "decode": decode, "profile": profile, "verbs": verbs,
}  # fmt: skip

if __name__ == "__main__":
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".argosy" / "gpu-programs"))
    sys.exit(main())
