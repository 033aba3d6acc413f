"""The prompts of a benchmark: random token ids of exact length, or those of a file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from argosy.client.client import ClientTransport, ask
from argosy.client.settings import BenchSettings
from argosy.core.counts import plural
from argosy.core.errors import ArgosyError, BadInput
from argosy.core.formats.recognize import HEAD_BYTES, refuse_binary

# Tokens of an answer where nothing says another number.
OUTPUT_LEN = 128
# Conversations of ShareGPT outside these lengths in tokens are left out, as vLLM leaves them out.
SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048


@dataclass(frozen=True)
class BenchSample:
    """One request.

    prompt: text, token ids, or the messages of a chat.
    output_len: most tokens of its answer; None: as many as `reply` has.
    """

    prompt: str | list[int] | list[dict[str, Any]]
    output_len: int | None
    reply: str | None = None


class SampleSource:
    """Where samples come from.

    Args:
        vocab: random token ids are below this.

    Raises:
        BadInput: the file cannot be read, or holds no prompts, or chats for a route that takes none.
    """

    def __init__(self, settings: BenchSettings):
        self.settings = settings
        self.file = None if settings.data == "random" else read_samples(Path(settings.data), settings)

    @property
    def is_random(self) -> bool:
        return self.file is None

    def samples(self, count: int, seed: int, vocab: int, server: int = 0) -> list[BenchSample]:
        """So many samples. The samples of a file are shuffled, and repeated where it has fewer.

        Args:
            server: random prompts of another server have equal lengths and other ids. Two addresses may be one server, whose prefix
                cache would know the prompts of the round before.
        """
        random = np.random.default_rng([self.settings.seed, seed])
        if self.file is None:
            ids = np.random.default_rng([self.settings.seed, seed, server, 2])
            return random_samples(self.settings, count, vocab, random, ids)
        order = [int(i) for _ in range(-(-count // len(self.file))) for i in random.permutation(len(self.file))]
        return [self.file[i] for i in order[:count]]


def random_samples(
    settings: BenchSettings, count: int, vocab: int, random: np.random.Generator, ids: np.random.Generator
) -> list[BenchSample]:
    """Samples of random token ids, each of exactly the length that was drawn for it.

    Args:
        random: draws the lengths. ids: draws the ids.
    """

    def lengths(mean: int) -> list[int]:
        low, high = int(mean * (1 - settings.range_ratio)), int(mean * (1 + settings.range_ratio))
        return random.integers(max(low, 1), high + 1, count).tolist()

    # The prefix is that of every round and every server.
    prefix = np.random.default_rng(settings.seed).integers(0, vocab, settings.prefix_len).tolist()
    inputs, outputs = lengths(settings.input_len), lengths(settings.output_len or OUTPUT_LEN)
    return [BenchSample(prefix + ids.integers(0, vocab, n).tolist(), m) for n, m in zip(inputs, outputs)]


def read_samples(path: Path, settings: BenchSettings) -> list[BenchSample]:
    """The samples of a file: ShareGPT where it is one JSON list, JSONL where its first line is an object, otherwise text.

    Raises:
        BadInput: as `SampleSource`.
    """
    try:
        data = path.read_bytes()
        refuse_binary(data[:HEAD_BYTES], str(path))
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text") from None
    except OSError as error:
        hint = "`data=random` needs no file" if isinstance(error, FileNotFoundError) else None
        raise BadInput(f"cannot read {path}: {(error.strerror or '').lower()}", hint=hint) from None
    start = text.lstrip()[:1]
    if start == "[":
        samples = _sharegpt(text, path, settings.output_len)
    elif start == "{":
        samples = [_of_line(line, n, path, settings.output_len) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        samples = [BenchSample(line, settings.output_len or OUTPUT_LEN) for line in text.splitlines() if line.strip()]
    if not samples:
        raise BadInput(f"{path} holds no prompts")
    if settings.api != "chat" and any(isinstance(s.prompt, list) and s.prompt and isinstance(s.prompt[0], dict) for s in samples):
        raise BadInput(f"{path} holds chats", hint="api=chat")
    if settings.api == "chat" and any(isinstance(s.prompt, list) and isinstance(s.prompt[0], int) for s in samples):
        raise BadInput(f"{path} holds token ids, which chats do not take", hint="api=completions")
    return samples


def _of_line(line: str, number: int, path: Path, output_len: int | None) -> BenchSample:
    where = f"line {number} of {path}"
    try:
        row = json.loads(line)
    except ValueError:
        raise BadInput(f"{where} is no JSON") from None
    row = row if isinstance(row, dict) else {}
    prompt, most = row.get("prompt", row.get("messages")), row.get("max_tokens", row.get("output_tokens"))
    good = isinstance(prompt, str)
    if isinstance(prompt, list):
        good = all(type(token) is int for token in prompt) or all(isinstance(message, dict) for message in prompt)
    if not (prompt and good) or not (most is None or (type(most) is int and most > 0)):
        raise BadInput(f"{where} has no `prompt` or `messages`, or no whole `max_tokens`")
    return BenchSample(prompt, output_len or most or OUTPUT_LEN)


def _sharegpt(text: str, path: Path, output_len: int | None) -> list[BenchSample]:
    """The first question of each conversation, with its answer, whose length becomes `output_len`."""
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise BadInput(f"{path} is no JSON", where=str(error)) from None
    samples = []
    for row in rows:
        turns = row.get("conversations", row.get("conversation")) if isinstance(row, dict) else None
        turns = [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
        texts = [turn.get("value", turn.get("content")) for turn in turns[:2]]
        if len(texts) == 2 and all(isinstance(text, str) and text for text in texts):
            samples.append(BenchSample(str(texts[0]), output_len, str(texts[1])))
    return samples


def sharegpt_samples(samples: Sequence[BenchSample], lengths: Sequence[tuple[int, int]]) -> list[BenchSample]:
    """ShareGPT's samples with the lengths of their answers, without those that are very short or long.

    Args:
        lengths: tokens of each prompt and of its reply.
    """
    usable_samples = []
    for sample, (prompt, reply) in zip(samples, lengths):
        most = sample.output_len or reply
        if prompt >= SHORTEST and most >= SHORTEST and prompt <= LONGEST_PROMPT and prompt + most <= LONGEST:
            usable_samples.append(BenchSample(sample.prompt, most))
    return usable_samples


async def prepare_samples(
    server: ClientTransport, source: SampleSource, samples: list[BenchSample], model: str, api: str
) -> list[BenchSample]:
    """Samples as the server takes them. The lengths of ShareGPT's answers are counted by its tokenizer, and random token ids become
    text where the route takes no ids.

    Raises:
        BadInput: the server has no /tokenize or /detokenize.
    """
    if source.is_random and api == "chat":
        return [BenchSample(await detokenized_text(server, list(s.prompt), model), s.output_len) for s in samples]  # pyright: ignore[reportArgumentType]
    if any(sample.output_len is None for sample in samples):
        pairs = [(await token_count(server, str(s.prompt), model), await token_count(server, s.reply or "", model)) for s in samples]
        if not (usable_samples := sharegpt_samples(samples, pairs)):
            raise BadInput(f"none of {plural(len(samples), 'conversation')} has a length of {SHORTEST} to {plural(LONGEST, 'token')}")
        return (usable_samples * -(-len(samples) // len(usable_samples)))[: len(samples)]
    return samples


async def token_count(server: ClientTransport, text: str, model: str) -> int:
    """Number of a text's tokens, by the server's /tokenize. Servers call the text `prompt` or, llama.cpp, `content`."""
    tokens = await _first_of(server, "/tokenize", [{"model": model, "prompt": text}, {"content": text}], "tokens")
    if not isinstance(tokens, list):
        raise BadInput("the server has no /tokenize to count the tokens of ShareGPT's answers", hint="set `output_len`")
    return len(tokens)


async def detokenized_text(server: ClientTransport, ids: list[int], model: str) -> str:
    """The text of token ids, by the server's /detokenize."""
    bodies = [{"model": model, "tokens": ids}, {"tokens": ids}]
    text = await _first_of(server, "/detokenize", bodies, "prompt", "content")
    if not isinstance(text, str) or not text:
        raise BadInput("the server has no /detokenize to make random chats with", hint="api=completions, or data=FILE")
    return text


async def _first_of(server: ClientTransport, path: str, bodies: list[dict[str, Any]], *names: str) -> Any:
    for body in bodies:
        try:
            document = await ask(server, "POST", path, body)
        except ArgosyError:
            continue
        # A server that knows another name for the text answers with no tokens.
        for name in names:
            if isinstance(document, dict) and document.get(name):
                return document[name]
    return None
