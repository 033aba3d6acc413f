"""The engine on a CPU: what a step costs as one program and by layer, and tokens a second of `generate`.

    ./run python bench/engine_cpu.py forward [PRESET] [ROWS ...]     compile and step, the two in turn
    ./run python bench/engine_cpu.py generate [PRESET] [PROMPTS ...] 128 tokens in, 64 out; the first call compiles
    ./run python bench/engine_cpu.py adapters [PRESET] [ROWS ...]    a decode step with 4 adapters of rank 16, and without
    ./run python bench/engine_cpu.py sampler [VOCABULARY]            compile and step by rows and settings
    ./run python bench/engine_cpu.py schema TOKENIZER [PRESET] [ROWS ...]    a token with a JSON schema and without, in turn
    ./run python bench/engine_cpu.py blocks GGUF [ROWS ...]              a decode step with weights in blocks and in float32
    ./run python bench/engine_cpu.py cache MODEL TEXT [ROWS ...]        a decode step by type of cache, in turn; then perplexity
    ./run python bench/engine_cpu.py speculate MODEL [DRAFTS] [ROWS ...]     n-grams and without them, on two texts, in turn

CPU time of the process stands beside wall time, since the machines that this was written on are shared.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from argosy.data.tokenizers.load import find_tokenizer
from argosy.infer.cpu.prepare import WeightPreparation
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.request import Request
from argosy.infer.forward.passes import ByLayer, OneProgram, PassKind, whole_sequences
from argosy.infer.forward.step import split_words
from argosy.infer.load import load_lm, random_lm
from argosy.infer.sampling import sampler
from argosy.infer.sampling.sample import Sampling, sampling_columns
from argosy.infer.settings import EngineSettings, NGram
from argosy.models.parts.attention.attend import Paged
from argosy.models.parts.attention.cache import bytes_of_caches, empty_pools
from argosy.models.parts.weight import split
from argosy.ops.narrow import FORMS
from argosy.ops.programs.programs import Programs, abstract_arrays
from argosy.run.settings.recipe_files import preset_config

PROMPT, ANSWER, HELD, TURNS = 128, 64, 150, 3


def clocked(call: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return time.perf_counter() - wall, time.process_time() - cpu


def forward(preset: str = "smollm2-135m", *rows: str) -> None:
    """A decode step of rows that hold 150 tokens each."""
    model = random_lm(preset_config(preset), 0).module
    engine = Engine(model, EngineSettings(slots=32, context=2048))
    for count in [int(word) for word in rows] or [1, 8, 32]:
        sizes = engine.runner.batches.decode_sizes(count)
        words = np.zeros(sizes.words, np.int32)
        d, *_ = split_words(words, sizes)
        d["slot"][:], d["length"][:], d["table"][:] = np.arange(count), HELD, -1
        d["table"][:, :10] = np.arange(10 * count).reshape(count, 10)
        picks, calls = np.arange(count, dtype=np.int32), {}
        ahead, inputs = Programs(), (words, picks, sizes)
        prepares = WeightPreparation(model, panels=True)
        kinds = {"OneProgram": OneProgram(model), "ByLayer": ByLayer(model, preparation=prepares)}
        kinds["ByLayer prepared ahead"] = ByLayer(model, run=ahead, preparation=prepares)
        for name, forward in kinds.items():
            weights = forward.prepared(engine.weights())
            if name.endswith("ahead"):
                with ahead.ahead():
                    forward.step(weights, abstract_arrays(engine.runner.caches), abstract_arrays(engine.runner.slots.last), *inputs)

            def call(forward: Any = forward, weights: Any = weights, inputs: Any = inputs) -> Any:
                logits, engine.runner.caches, _ = forward.step(weights, engine.runner.caches, engine.runner.slots.last, *inputs)
                return logits

            calls[name] = call
            print(f"{count} rows, {name}: compiled in {clocked(call)[1]:.1f} CPU s", flush=True)
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for _ in range(20):
            for name, call in calls.items():
                spent[name].append(clocked(call))
        for name, times in spent.items():
            wall, cpu = 1e3 * np.median(times, 0)
            print(f"{count} rows, {name}: {wall:.1f} ms a step, {cpu:.1f} CPU ms", flush=True)


def adapters(preset: str = "smollm2-135m", *rows: str) -> None:
    """A decode step of rows that hold 150 tokens each: of an engine without adapters, of one that has room for four, and of that one
    with another of four adapters in each row. In turn."""
    model = random_lm(preset_config(preset), 0).module
    kinds: Any = (("none", {}), ("room", {"enabled": True, "adapters": 4, "rank": 16}))
    engines = {name: Engine(model, EngineSettings(slots=32, context=2048, lora=settings)) for name, settings in kinds}
    engines["used"] = engines["room"]
    banks = engines["room"].adapters
    assert banks is not None
    banks._bank.arrays = {name: jnp.full(a.shape, 1e-3, a.dtype) for name, a in banks.arrays.items()}
    factor_bytes = sum(a.nbytes for a in banks.arrays.values())
    weight_bytes = sum(a.nbytes for a in engines["none"].weights().values())
    print(f"factors: {factor_bytes / 1e6:.0f} MB beside {weight_bytes / 1e6:.0f} MB", flush=True)
    weights = {name: engine.runner.forward.prepared(engine.weights()) for name, engine in engines.items()}
    for count in [int(word) for word in rows] or [1, 8, 32]:
        sizes = engines["none"].runner.batches.decode_sizes(count)
        words = np.zeros(sizes.words, np.int32)
        d, *_ = split_words(words, sizes)
        d["slot"][:], d["length"][:], d["table"][:] = np.arange(count), HELD, -1
        d["table"][:, :10] = np.arange(10 * count).reshape(count, 10)
        picks = np.arange(count, dtype=np.int32)

        def call(name: str, sizes: Any = sizes, words: Any = words, picks: Any = picks) -> Any:
            runner = engines[name].runner
            banks._places[:] = np.arange(32) % 4 if name == "used" else -1
            logits, runner.caches, _ = runner.forward.step(weights[name], runner.caches, runner.slots.last, words, picks, sizes)
            return logits

        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for turn in range(21):
            for name in engines:
                took = clocked(lambda name=name: call(name))
                spent[name] += [took] if turn else []
        base = np.asarray(spent["none"])
        for name, times in spent.items():
            wall, cpu = 1e3 * np.median(times, 0)
            more = 100 * (np.median(np.asarray(times) / base, 0) - 1)
            print(f"{count} rows, {name}: {wall:.1f} ms a step ({more[0]:+.0f} %), {cpu:.1f} CPU ms ({more[1]:+.0f} %)", flush=True)


def blocks(file: str, *rows: str) -> None:
    """A decode step of rows that hold 150 tokens each, with the weights packed in the file's blocks and in float32; their logits are
    compared bit for bit."""
    settings, engines, weights = EngineSettings(slots=32, context=2048), {}, {}
    for name in ("float32", "blocks"):
        engines[name] = Engine(load_lm(file, blocks=name == "blocks").module, settings, exclusive=True)
        weights[name] = engines[name].runner.forward.prepared(engines[name].weights())
        size = sum(a.nbytes for a in jax.tree.leaves(weights[name]))
        print(f"{name}: {size / 1e6:.1f} MB of weights", flush=True)
    for count in [int(word) for word in rows] or [1, 8, 32]:
        sizes = engines["blocks"].runner.batches.decode_sizes(count)
        words = np.zeros(sizes.words, np.int32)
        d, *_ = split_words(words, sizes)
        d["slot"][:], d["length"][:], d["table"][:] = np.arange(count), HELD, -1
        d["table"][:, :10] = np.arange(10 * count).reshape(count, 10)
        picks = np.arange(count, dtype=np.int32)

        def call(name: str, inputs: Any = (words, picks, sizes)) -> Any:
            runner = engines[name].runner
            logits, runner.caches, _ = runner.forward.step(weights[name], runner.caches, runner.slots.last, *inputs)
            return logits

        assert np.asarray(call("blocks")).tobytes() == np.asarray(call("float32")).tobytes()
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for _ in range(30):
            for name in engines:
                spent[name].append(clocked(lambda name=name: call(name)))
        for name, times in spent.items():
            wall, cpu = 1e3 * np.median(times, 0)
            least = 1e3 * np.min(times, 0)
            summary = f"{wall:.1f} ms a step (least {least[0]:.1f}), {cpu:.1f} CPU ms (least {least[1]:.1f})"
            print(f"{count} rows, {name}: {summary}", flush=True)


def cache(folder: str, text: str, *rows: str) -> None:
    """A decode step of rows that hold 150 tokens each, and 1,000; then the text's first 2,048 tokens, computed in calls of 256."""
    lm = load_lm(folder)
    for count in [int(word) for word in rows] or [1, 8, 32]:
        for cached in (HELD, 1000):
            # One more page than the step writes to, for each row.
            each = cached // 16 + 1
            engines = {
                form: Engine(lm.module, EngineSettings(slots=32, context=2048, pages=max(128, count * each), cache_dtype=form))
                for form in (None, *FORMS)
            }
            weights = engines[None].runner.forward.prepared(engines[None].weights())
            sizes = engines[None].runner.batches.decode_sizes(count)
            words = np.zeros(sizes.words, np.int32)
            d, *_ = split_words(words, sizes)
            d["slot"][:], d["length"][:], d["table"][:] = np.arange(count), cached, -1
            d["table"][:, :each] = np.arange(each * count).reshape(count, each)
            picks = np.arange(count, dtype=np.int32)

            def call(engine: Engine, inputs: Any = (words, picks, sizes), weights: Any = weights) -> Any:
                runner = engine.runner
                logits, runner.caches, _ = runner.forward.step(weights, runner.caches, runner.slots.last, *inputs)
                return logits

            spent: dict[str | None, list[tuple[float, float]]] = {form: [] for form in engines}
            for turn in range(13):
                for form, engine in engines.items():
                    took = clocked(lambda engine=engine: call(engine))
                    spent[form] += [took] if turn else []
            base = np.asarray(spent[None])
            for form, times in spent.items():
                wall, cpu = 1e3 * np.median(times, 0)
                more = 100 * (np.median(np.asarray(times) / base, 0) - 1)
                size = bytes_of_caches(engines[form].runner.caches) / engines[form].pages.count * count * each / 1e6
                summary = f"{wall:.1f} ms a step ({more[0]:+.0f} %), {cpu:.1f} CPU ms ({more[1]:+.0f} %), {size:.1f} MB of pages in use"
                print(f"{count} rows of {cached}, {form or 'float32'}: {summary}", flush=True)
    quality(lm, Path(text).read_text())


def quality(lm: Any, text: str, most: int = 2048, width: int = 256) -> None:
    """Perplexity by type of cache, and the divergence of the next token's distribution from that with a float32 cache."""
    ids = np.asarray(lm.encode(text[: 8 * most]))[: most + 1]
    forward, before = ByLayer(lm.module), []
    weights, kind = forward.prepared(split(lm.module)[1]), PassKind(whole_sequences, _logits)
    table, t = jnp.arange(most // 16, dtype=jnp.int32)[None], jnp.arange(width, dtype=jnp.int32)[None]
    for form in (None, *FORMS):
        caches = empty_pools(lm.module.layers.holds(), 1, most // 16, 16, longest=most, slack=most, narrow=form)
        losses, apart, same = [], [], []
        for i, at in enumerate(range(0, most, width)):
            where = (jnp.zeros(1, jnp.int32), jnp.full(1, at, jnp.int32), jnp.full(1, width, jnp.int32))
            inputs = ids[None, at : at + width].astype(np.int32), Paged(table, *where, t)
            logits, caches = forward(kind, weights, inputs, caches)
            chances = np.asarray(jax.nn.log_softmax(logits[0]))
            losses.append(-chances[np.arange(width), ids[at + 1 : at + width + 1]])
            if form is None:
                before.append(chances)
            apart.append((np.exp(before[i]) * (before[i] - chances)).sum(-1))
            same.append(before[i].argmax(-1) == chances.argmax(-1))
        kl, loss, top = (np.concatenate(a) for a in (apart, losses, same))
        apart_by = f"KL {kl.mean():.2e} (largest {kl.max():.1e}), {100 * top.mean():.2f} % same likeliest"
        summary = f"perplexity {np.exp(loss.mean()):.4f}, {apart_by}"
        print(f"{len(loss)} tokens, {form or 'float32'}: {summary}", flush=True)


def _logits(model: Any, x: Any) -> Any:
    return model.unembed(x)


def generate(preset: str = "smollm2-135m", *prompts: str) -> None:
    lm, rng = random_lm(preset_config(preset), 0), np.random.default_rng(0)
    for count in [int(word) for word in prompts] or [1, 8, 32]:
        for turn in range(4):
            prompts = [rng.integers(3, lm.config.vocab, PROMPT).tolist() for _ in range(count)]
            wall, cpu = clocked(lambda prompts=prompts: lm.generate(prompts, ANSWER, ignore_eos=True))
            tokens = count * ANSWER
            first = " (first)" if not turn else ""
            print(f"{count} prompts{first}: {tokens / wall:.0f} tokens/s, {1e3 * cpu / tokens:.1f} CPU ms a token", flush=True)


def sampler_(vocabulary: str = "49152") -> None:
    V = int(vocabulary)
    for rows in (1, 8, 32):
        state, owners = sampler.empty_slots(32, V), jnp.arange(rows, dtype=jnp.int32)
        logits = jnp.asarray(3 * np.random.default_rng(0).standard_normal((rows, V)), jnp.float32)
        start = time.process_time()
        program = sampler.sample.lower(state, logits, owners).compile()
        print(f"{rows} rows: compiled in {time.process_time() - start:.1f} CPU s", flush=True)
        for options in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "typical_p": 0.9}):
            columns = {name: jnp.asarray(column) for name, column in sampling_columns([Sampling(**options)] * 32).items()}
            state, spent = state._replace(settings=columns), []
            for _ in range(8):
                start = time.process_time()
                state, out = program(state, logits, owners)
                jax.block_until_ready(out)
                spent.append(time.process_time() - start)
            print(f"  {options or 'greedy'}: {1e3 * min(spent):.1f} CPU ms a step", flush=True)


# Answers go on to the limit of tokens, through every kind of token that JSON has.
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}, "sort": {"enum": ["cat", "dog"]}},
        "required": ["name", "age", "sort"],
        "additionalProperties": False,
    },
}


def schema(tokenizer: str, preset: str = "smollm2-135m", *rows: str) -> None:
    lm = random_lm(preset_config(preset), 0)
    lm.tokenizer = find_tokenizer(Path(tokenizer))
    start = time.process_time()
    grammar = lm.grammar({"json": SCHEMA})
    print(f"trie of {lm.config.vocab} tokens and grammar: {time.process_time() - start:.2f} CPU s", flush=True)
    spent: list[float] = []
    counted(spent)
    for count in [int(word) for word in rows] or [1, 8, 32]:
        prompts, turns = [[5 + i] * 16 for i in range(count)], {"without": None, "with": grammar}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
        for turn in range(9 if count < 32 else 4):
            for name, structured in turns.items():
                del spent[:]
                options: Any = {"ignore_eos": True, "temperature": 1.0, "structured": structured}
                took = clocked(lambda prompts=prompts, options=options: lm.generate(prompts, ANSWER, **options))
                if turn:
                    times[name].append((1e3 * took[0] / ANSWER, 1e3 * took[1] / ANSWER))
        masks = 1e3 * sum(spent) / ANSWER
        wall, cpu = (np.asarray([[run[i] for run in times[name]] for name in turns]) for i in (0, 1))
        for name, runs in times.items():
            print(f"{count} rows, {name}: {np.median(runs, 0)[0]:.1f} ms a step, {np.median(runs, 0)[1]:.1f} CPU ms", flush=True)
        ratio = [100 * (float(np.median(a[1] / a[0])) - 1) for a in (wall, cpu)]
        print(f"{count} rows: {ratio[0]:+.1f} % wall, {ratio[1]:+.1f} % CPU (pairs, median); masks {masks:.2f} ms a step", flush=True)


# A text that goes on as it began, and one that does not.
ACCESSORS = """    def get_{0}(self):
        return self.{0}

    def set_{0}(self, {0}):
        self.{0} = {0}

"""
FIELDS = "name age email address phone city country company title salary".split()  # noqa: SIM905
TEXTS = {
    "code": "class Person:\n" + "".join(map(ACCESSORS.format, FIELDS)),
    "prose": "The old lighthouse keeper had not spoken to anyone for eleven days when the boat came in. ",
}


def speculate(model: str, drafts: str = "4", *rows: str) -> None:
    """128 tokens of each row, of code at temperature 0 and of prose at temperature 1."""
    lm = load_lm(model)
    for count in [int(word) for word in rows] or [1, 8]:
        plain = EngineSettings(slots=count, context=1024, reuse=False)
        speculative = plain.model_copy(update={"speculative": NGram(tokens=int(drafts))})
        engines = {"without": Engine(lm.module, plain, exclusive=True), "with": Engine(lm.module, speculative, exclusive=True)}
        for text, prompt in TEXTS.items():
            sampling = Sampling(temperature=float(text == "prose"))
            requests = [Request(lm.encode(prompt), 2 * ANSWER, sampling, row=row) for row in range(count)]
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
            tokens: dict[str, Any] = {}
            before = {name: counts(engine) for name, engine in engines.items()}
            for turn in range(TURNS + 1):
                for name, engine in engines.items():
                    start = time.perf_counter(), time.process_time()
                    tokens[name] = [[event.token for event in events] for events in engine.generate(requests)]
                    took = time.perf_counter() - start[0], time.process_time() - start[1]
                    times[name] += [took] if turn else []
            token_count = sum(map(len, tokens["with"]))
            for name, engine in engines.items():
                steps, drafted, accepted = (np.subtract(counts(engine), before[name]) // (TURNS + 1)).tolist()
                wall, cpu = 1e3 * np.median(times[name], 0) / token_count
                words = f"{steps} steps, {wall:.1f} ms a token, {cpu:.1f} CPU ms; {accepted} of {drafted} drafts accepted"
                print(f"{count} rows, {text}, {name}: {words}", flush=True)
            print(f"{count} rows, {text}: {'the same' if tokens['with'] == tokens['without'] else 'OTHER'} tokens", flush=True)


def counts(engine: Engine) -> tuple[int, int, int]:
    """Steps, drafts, and accepted drafts so far."""
    speculation = engine.speculation
    return (engine.stats.steps, 0, 0) if speculation is None else (engine.stats.steps, speculation.drafted, sum(speculation.accepted))


def counted(spent: list[float]) -> None:
    """Adds the wall time of each call of `mask_rows` to the list."""
    from argosy.infer.engine import engine

    inner = engine.mask_rows

    def masks(*arguments: Any) -> Any:
        start = time.perf_counter()
        mask = inner(*arguments)
        spent.append(time.perf_counter() - start)
        return mask

    engine.mask_rows = masks


if __name__ == "__main__":
    modes = {
        "forward": forward, "generate": generate, "adapters": adapters, "sampler": sampler_, "schema": schema,
        "speculate": speculate, "cache": cache, "blocks": blocks,
    }  # fmt: skip
    modes[sys.argv[1]](*sys.argv[2:])
