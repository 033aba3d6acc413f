"""The prompts of a benchmark: random token ids with exact lengths, or the prompts of a file."""

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

# The default number of tokens of a completion.
OUTPUT_LEN = 128
# As in vLLM, conversations of ShareGPT outside these lengths in tokens are left out.
SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048


@dataclass(frozen=True)
class BenchSample:
    """The prompt of one request.

    prompt: a text, token ids, or the messages of a chat.
    output_len: the most tokens of the completion; None: as many as `reply` has.
    reply: the reply in a ShareGPT conversation; None: the sample is no such conversation.
    """

    prompt: str | list[int] | list[dict[str, Any]]
    output_len: int | None
    reply: str | None = None


class SampleSource:
    """The source of samples: random token ids, or a file.

    file: the samples of the file; None: prompts are random.

    Raises:
        BadInput: the file cannot be read, has no prompts, or has prompts that the route does not take.
    """

    def __init__(self, settings: BenchSettings):
        self.settings = settings
        self.file = None if settings.data == "random" else read_samples(Path(settings.data), settings)

    @property
    def is_random(self) -> bool:
        return self.file is None

    def samples(self, count: int, seed: int, vocab: int, server: int = 0) -> list[BenchSample]:
        """Returns `count` samples. Samples of a file are shuffled, and repeated if the file has fewer.

        Args:
            seed: equal seeds give equal samples.
            vocab: random token ids are below this.
            server: index of the server. Random prompts for different servers have equal lengths but different ids, because two URLs may
                be one server, whose prefix cache would have the prompts of the other round.
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
    """Draws samples of random token ids. Each has exactly the length that was drawn for it.

    Args:
        vocab: token ids are below this.
        random: the generator of the lengths.
        ids: the generator of the ids.
    """

    def lengths(mean: int) -> list[int]:
        low, high = int(mean * (1 - settings.range_ratio)), int(mean * (1 + settings.range_ratio))
        return random.integers(max(low, 1), high + 1, count).tolist()

    # All rounds and servers share the prefix.
    prefix = np.random.default_rng(settings.seed).integers(0, vocab, settings.prefix_len).tolist()
    inputs, outputs = lengths(settings.input_len), lengths(settings.output_len or OUTPUT_LEN)
    return [BenchSample(prefix + ids.integers(0, vocab, n).tolist(), m) for n, m in zip(inputs, outputs)]


def read_samples(path: Path, settings: BenchSettings) -> list[BenchSample]:
    """Reads the samples of a file. A JSON list is read as ShareGPT's format, a file whose first line is a JSON object as JSONL, and any
    other file as text with one prompt per line.

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
    """Samples with the first question of each conversation, and its reply, whose length is used if `output_len` is None."""
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
    """Sets the output length of ShareGPT's samples to that of their replies, and leaves out very short and very long samples.

    Args:
        lengths: number of tokens of each prompt and of its reply.
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
    """Converts samples to those that the server takes. The server's tokenizer counts the tokens of ShareGPT's replies. Random token ids
    become text if the route takes no ids.

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
    """The number of tokens of a text, by the server's /tokenize. The field of the text is `prompt`, or `content` in llama.cpp."""
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
        # A server that expects another name for the text responds without tokens.
        for name in names:
            if isinstance(document, dict) and document.get(name):
                return document[name]
    return None
