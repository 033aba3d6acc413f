"""How a good file becomes a bad one: bits, lengths, numbers, JSON.

Notable: every mutation is drawn from a `random.Random` alone, so an input is found again by its kind, seed and number. JSON
is mutated as a tree, so that most results still parse and reach the reader behind the parser. Knows no format but JSON.
"""

import json
import random
import struct
from collections.abc import Callable
from typing import Any

EXTREMES = [0, -1, 1, 2, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
HUGE = 10**30
TEXTS = [
    "",
    " ",
    "\0",
    "\ud800",
    "a" * 5000,
    "../../etc/passwd",
    "/etc/passwd",
    "nan",
    "\ufeff",
    "(a+)+$",
    "[",
    "%s",
    "{0.__class__}",
]


def mutate_bytes(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """One to four mutations of a file, mostly near its beginning, where what counts is written."""
    for _ in range(draw.choice([1, 1, 2, 4])):
        data = draw.choice(BYTES)(draw, data, other)
    return data


def somewhere(draw: random.Random, data: bytes) -> int:
    near = min(len(data), draw.choice([64, 4096, 1 << 30, 1 << 30]))
    return draw.randrange(near) if near else 0


def flip(draw: random.Random, data: bytes, other: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(draw.randrange(1, 5)):
        if out:
            out[somewhere(draw, data)] ^= 1 << draw.randrange(8)
    return bytes(out)


def cut_data(draw: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def drop(draw: random.Random, data: bytes, other: bytes) -> bytes:
    at = somewhere(draw, data)
    return data[:at] + data[at + draw.choice([1, 4, 8, 100]) :]


def repeat(draw: random.Random, data: bytes, other: bytes) -> bytes:
    at, size = somewhere(draw, data), draw.choice([1, 8, 64, 1000])
    return data[: at + size] + data[at:]


def splice(draw: random.Random, data: bytes, other: bytes) -> bytes:
    at = somewhere(draw, data)
    start = somewhere(draw, other)
    return data[:at] + other[start : start + draw.choice([8, 100, 10_000])] + data[at + draw.choice([0, 8, 100]) :]


def number(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """A number of some width, in place of what stands there."""
    raw = draw.choice([
        struct.pack("<Q", draw.choice(EXTREMES) % 2**64), struct.pack("<I", draw.choice(EXTREMES) % 2**32),
        struct.pack("<f", draw.choice([float("nan"), float("inf"), -0.0, 1e38])),
        b"\xff" * draw.randrange(1, 11) + b"\x01",
    ])  # fmt: skip
    at = somewhere(draw, data)
    return data[:at] + raw + data[at + len(raw) :]


def small_count(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """A byte that counts or names something, changed by a little."""
    at = somewhere(draw, data)
    return data[:at] + bytes([(data[at] + draw.choice([-1, 1, 2, 16])) % 256]) + data[at + 1 :] if data else data


BYTES: list[Callable[[random.Random, bytes, bytes], bytes]] = [
    flip, cut_data, drop, repeat, splice, number, number, small_count,
]  # fmt: skip


def mutate_json(draw: random.Random, value: Any) -> Any:
    """One to four mutations of a tree, which is changed."""
    for _ in range(draw.choice([1, 1, 2, 4])):
        holders = list(containers(value))
        if holders:
            change(draw, draw.choice(holders))
        else:
            value = leaf(draw, value)
    return value


def containers(value: Any) -> Any:
    """Every list and object that holds something; long ones count once."""
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict | list) and node:
            yield node
            stack.extend((node.values() if isinstance(node, dict) else node) if len(node) < 300 else [])


def change(draw: random.Random, holder: Any) -> None:
    keys = list(holder) if isinstance(holder, dict) else range(len(holder))
    key, chance = draw.choice(keys), draw.random()
    if chance < 0.6:
        holder[key] = leaf(draw, holder[key])
    elif chance < 0.72:
        del holder[key]
    elif chance < 0.8:
        holder[key] = holder[draw.choice(keys)]
    elif isinstance(holder, list):
        holder.insert(key, holder[draw.choice(keys)])
    else:
        holder[draw.choice([f"{key}x", draw.choice(TEXTS), str(key).upper()])] = holder.pop(key)


def leaf(draw: random.Random, old: Any) -> Any:
    """What stands in place of a value: another number, another type, something deep."""
    if isinstance(old, bool) and draw.random() < 0.5:
        return not old
    if isinstance(old, int | float) and draw.random() < 0.5:
        return draw.choice([old + 1, old - 1, -old, old * 1000, old / 3, old * 2])
    return draw.choice([
        draw.choice(EXTREMES), HUGE, -HUGE, 0.5, float("nan"), float("inf"), 1e-320, None, True, False, [], {}, [old], {"a": old},
        str(old)[:500], draw.choice(TEXTS), [draw.choice(EXTREMES)] * 3, ["a", 1, None], nest(draw.choice([10, 100, 450])),
    ])  # fmt: skip


def nest(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def write_json(draw: random.Random, value: Any) -> bytes:
    """The tree as JSON text; sometimes with keys twice, nested beyond any stack, or with characters as they are."""
    try:
        text = json.dumps(value, ensure_ascii=draw.random() < 0.5)
    except RecursionError:  # several deep things in each other
        text = "[" * 3000
    if draw.random() < 0.05 and text.startswith("{") and len(text) > 2:
        text = "{" + text[1:-1] + ", " + text[1:]
    if draw.random() < 0.01:
        text = text.replace("0", "[" * 200_000, 1)
    return text.encode("utf-8", "surrogatepass")
