"""Conversations rendered, masked and tokenized a second: `./run python bench/conversations.py [--count 500]`.

Real instructions (shared/data/instruct), as conversations of one and of four turns, by three published chat templates. `one by one`
is `chat_mask.encode_with_mask` in a loop; `together` is `chat_mask.encode_all`, as data is prepared.
"""

import argparse
import json
import time
from pathlib import Path

from argosy.data.chat import mask as chat_mask
from argosy.data.tokenizers.load import load_tokenizer

DATA = Path(__file__).parents[2] / "shared" / "data"
TEMPLATES = ("SmolLM2-135M-Instruct", "Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct")


def conversations(count: int, turns: int) -> list[list[dict[str, str]]]:
    """Instructions as conversations of so many turns each."""
    lines = (DATA / "instruct" / "instruction_1100.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    chats = []
    for number in range(count):
        messages = []
        for turn in range(turns):
            row = rows[(number * turns + turn) % len(rows)]
            prompt = "\n\n".join(part for part in (row["instruction"], row["input"]) if part)
            messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": row["output"]}]
        chats.append(messages)
    return chats


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--count", type=int, default=500)
    count = words.parse_args().count
    tokenizer = load_tokenizer(DATA / "tokenizers" / "smollm2")
    print("| template | turns | way | conversations/s |\n|---|---|---|---|")
    for name in TEMPLATES:
        tokenizer.chat_templates = {"default": (DATA / "chat_templates" / f"{name}.jinja").read_text()}
        for turns in (1, 4):
            sample = conversations(count, turns)
            chat_mask.encode_with_mask(tokenizer, sample[0])
            start = time.perf_counter()
            alone = [chat_mask.encode_with_mask(tokenizer, messages) for messages in sample[: count // 5]]
            print(f"| {name} | {turns} | one by one | {len(alone) / (time.perf_counter() - start):,.0f} |", flush=True)
            many = [chat_mask.MaskedConversation(messages) for messages in sample]
            way = chat_mask.Way(tokenizer.chat_templates)
            list(chat_mask.encode_all(tokenizer, many[:64], way))
            start = time.perf_counter()
            together = list(chat_mask.encode_all(tokenizer, many, way))
            print(f"| {name} | {turns} | together | {count / (time.perf_counter() - start):,.0f} |", flush=True)
            assert together[: len(alone)] == alone or "strftime_now" in tokenizer.chat_templates["default"]


if __name__ == "__main__":
    main()
