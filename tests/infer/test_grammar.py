"""Structured output: masks against brute force, and answers of a random model against the schemas they were asked to match."""

import json
import re
import string
import threading
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from helpers import shared
from pydantic import BaseModel

from argosy.core.errors import BadInput
from argosy.data.tokenizers import Tokenizer
from argosy.data.tokenizers.byte import ByteTokenizer, tokenizer_json
from argosy.data.tokenizers.config import TokenizerConfig
from argosy.data.tokenizers.fast import FastTokenizer
from argosy.data.tokenizers.load import find_tokenizer
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.request import Event, Request
from argosy.infer.lm import LM
from argosy.infer.sampling import sampler
from argosy.infer.sampling.sample import Sampling
from argosy.infer.settings import EngineSettings
from argosy.infer.tools import grammar as grammars
from argosy.infer.tools.grammar import Grammars, Matcher, grammar_masks, read_structure, token_bytes, unpacked_bits
from argosy.models import FAMILIES
from argosy.weights.build import random_model

EOS = frozenset({ByteTokenizer.eos})
VOCAB = 258
SIZES = EngineSettings(slots=4, page=8, context=128, pages=24, budget=64, budget_decoding=32)


@pytest.fixture(scope="module")
def lm() -> LM:
    config = FAMILIES["llama"].examples()["plain"].model_copy(update={"vocab": VOCAB})
    return LM(config, random_model(config, 0).module, ByteTokenizer())


@pytest.fixture(scope="module")
def engine(lm: LM) -> Engine:
    return Engine(lm.module, SIZES)


def allowed_tokens(matcher: Matcher) -> set[int]:
    vocab = matcher.grammar.vocab
    return set(np.flatnonzero(unpacked_bits(grammar_masks([matcher])[0][0], vocab)).tolist())


# ---------------------------------------------------------------- masks


class Tiny(ByteTokenizer):
    """Few tokens, some with the bytes of others, and one that is half a character."""

    pieces = (b"a", b"b", b"ab", b"ba", b"aab", b"1", b"12", b"2", b"-", b"\xc3", b"\xa9", "é".encode(), b"a", b"", b"<eos>", b"<unk>")
    vocab, eos, bos, unknown = len(pieces), 14, None, 15
    hidden = frozenset({14})

    def piece(self, token: int, first: bool) -> bytes:
        return self.pieces[token] if token < len(self.pieces) else b""


ORACLE = [
    (r"(ab)*", "ab"),
    (r"a{1,3}b?", "ab"),
    (r"-?1(2|1)*", "12-"),
    (r"(a|é)b", "abé"),
    (r"aab|ab|12", "ab12"),
    (r"[ab]{2,4}-", "ab-"),
]


@pytest.mark.parametrize("regex, letters", ORACLE)
def test_a_token_is_allowed_exactly_if_the_text_can_still_be_completed(regex: str, letters: str):
    """Against all texts of up to 7 characters: of these regexes, every text that can be completed can be within that."""
    tokenizer, V = Tiny(), Tiny.vocab + 3
    whole = {"".join(t).encode() for n in range(8) for t in product(letters, repeat=n) if re.fullmatch(regex, "".join(t))}
    beginnings = {text[:n] for text in whole for n in range(len(text) + 1)}
    grammar = Grammars(tokenizer, V).get(read_structure({"regex": regex}))
    pieces = token_bytes(tokenizer, V)
    assert pieces[13:] == [b""] * (V - 13), "special tokens, unknown text and ids beyond the tokenizer stand for nothing"
    seen = 0

    def walk(text: bytes, tokens: list[int]) -> None:
        nonlocal seen
        matcher = grammar.matcher([Tiny.eos])
        for token in tokens:
            matcher.push(token)
        right = {token for token, piece in enumerate(pieces) if piece and text + piece in beginnings}
        right |= {Tiny.eos} if text in whole else set()
        assert allowed_tokens(matcher) == right, (text, tokens)
        seen += 1
        for token in sorted(right - {Tiny.eos}):
            if len(text + pieces[token]) <= 3:
                walk(text + pieces[token], [*tokens, token])

    walk(b"", [])
    assert seen > 4


def test_masks_in_parallel_are_those_of_each_alone():
    grammar = Grammars(ByteTokenizer(), VOCAB).get(read_structure({"json_object": True}))
    matchers = [grammar.matcher(EOS) for _ in range(5)]
    for n, matcher in enumerate(matchers):
        for byte in b'{"a'[:n]:
            matcher.push(byte)
    bits, states = grammar_masks(matchers)
    assert [row.tolist() for row in bits] == [grammar_masks([matcher])[0][0].tolist() for matcher in matchers]
    assert states == ["open"] * 5
    assert len({row.tobytes() for row in bits}) > 2


def test_the_end_is_allowed_where_the_text_is_complete_and_only_there():
    grammar = Grammars(ByteTokenizer(), VOCAB).get(read_structure({"regex": "[0-9]{2,}"}))
    matcher, digits = grammar.matcher([257, ord("x"), 10**6]), set(b"0123456789")
    assert allowed_tokens(matcher) == digits
    assert not matcher.push(ord("1"))
    assert allowed_tokens(matcher) == digits
    assert not matcher.push(ord("2"))
    assert allowed_tokens(matcher) == digits | {257, ord("x")}


def test_a_grammar_that_has_become_too_complex_blocks_the_answer_and_never_ends_it(monkeypatch: pytest.MonkeyPatch):
    """llguidance allows the end in a state of error."""
    monkeypatch.setattr(grammars, "LEXER_STATES", 25)
    grammar = Grammars(ByteTokenizer(), VOCAB).get(read_structure({"regex": "[ab]*a[ab]{9}"}))
    matcher, states = grammar.matcher(EOS), []
    for byte in b"abaabbab":
        states += grammar_masks([matcher])[1]
        matcher.push(byte)
    assert set(states) == {"open", "blocked"}
    assert states[-1] == "blocked"
    assert not allowed_tokens(matcher)


def test_the_states_of_earlier_answers_do_not_fill_the_lexer_of_later_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammars, "LEXER_STATES", 60)
    grammar, chance = Grammars(ByteTokenizer(), VOCAB).get(read_structure({"regex": "[ab]*a[ab]{9}"})), Random(0)
    renewals = []
    monkeypatch.setattr(grammar, "renew", lambda: (renewals.append(1), type(grammar).renew(grammar)))
    for _ in range(40):
        matcher = grammar.matcher(EOS)
        for _ in range(12):
            assert grammar_masks([matcher])[1] in (["open"], ["accepting"])
            matcher.push(chance.choice(b"ab"))
    assert renewals, "the states of the lexer were renewed"


# ---------------------------------------------------------------- tokenizers


def sentencepiece() -> Tokenizer:
    return find_tokenizer(shared("models/stories260k/tokenizer.model").parent)


def bytelevel() -> Tokenizer:
    return find_tokenizer(shared("tokenizers/smollm2/tokenizer.json").parent)


def wordpiece() -> Tokenizer:
    words = ["[UNK]", "[SEP]", "play", "##ing", "##s", "a", ".", "{", "}", '"', "##a"]
    model = {
        "type": "WordPiece", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "[UNK]",
        "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
    }  # fmt: skip
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [{"id": i, "content": words[i], "special": True} | flags for i in (0, 1)]
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None, "model": model,
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    }  # fmt: skip
    return FastTokenizer(json.dumps(content), TokenizerConfig(), Path("tokenizer.json"))


TEXTS = {
    "sentencepiece": (sentencepiece, ["Once upon a time", " a\tb\n", "é日本 x", '{"a": [1, 2]}']),
    "bytelevel": (bytelevel, ["Once upon a time", " a\tb\n", "é日本 x", '{"a": [1, 2]}']),
    "wordpiece": (wordpiece, [" playing", " play plays.", " a."]),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_answers_decode_to_the_very_bytes_that_the_grammar_saw(kind: str):
    """A random walk through the allowed tokens, of a regex that one text matches: decoded after a prompt, and after `bos` alone."""
    from argosy.infer.detokenize import Detokenizer

    make, texts = TEXTS[kind]
    tokenizer, chance = make(), Random(1)
    grammars = Grammars(tokenizer, tokenizer.vocab)
    for text in texts:
        grammar = grammars.get(read_structure({"choice": [text]}))
        for prompt in ([tokenizer.encode(text)[0]], [tokenizer.bos] if tokenizer.bos is not None else []):
            matcher, tokens = grammar.matcher(()), []
            while grammar_masks([matcher])[1] == ["open"]:
                tokens.append(chance.choice(sorted(allowed_tokens(matcher))))
                matcher.push(tokens[-1])
            detokenizer = Detokenizer(tokenizer, prompt, begun=True)
            assert "".join([*map(detokenizer.push, tokens), detokenizer.end()]) == text
            assert not set(tokens) & tokenizer.hidden


def test_a_special_token_is_never_text():
    """Neither by its name, nor where any text may stand, nor where bytes may that are no UTF-8."""
    for tokenizer in (ByteTokenizer(), FastTokenizer(tokenizer_json(), TokenizerConfig(), Path("tokenizer.json"))):
        assert tokenizer.piece(256, False) == b"<bos>"
        grammars = Grammars(tokenizer, VOCAB)
        assert allowed_tokens(grammars.get(read_structure({"choice": ["<bos>"]})).matcher(())) == {ord("<")}
        for structure in ({"regex": "(?s:.)*"}, {"grammar": "start: X\nX: ~/a/"}):
            tokens = allowed_tokens(grammars.get(read_structure(structure)).matcher(()))
            assert len(tokens) > 150
            assert not tokens & {255, 256, 257}


def test_a_tokenizer_that_cannot_be_given_exactly_is_refused():
    tokenizer = ByteTokenizer()
    tokenizer.trims = 1
    with pytest.raises(BadInput, match="drops 1 spaces at the end"):
        Grammars(tokenizer, VOCAB)
    with pytest.raises(BadInput, match="needs a tokenizer"):
        Grammars(None, VOCAB)


# ---------------------------------------------------------------- answers


class Pet(BaseModel):
    name: str
    age: int | None = None


STRING = {"type": "string", "maxLength": 4}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "integer"},
    {"type": "integer", "minimum": -3, "maximum": 250},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 500},
    {"type": "boolean"},
    {"type": "null"},
    {"const": {"a": [1, None, "é"]}},
    {"enum": ["red", "green", 3, None]},
    STRING,
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "pattern": "^[a-c]{2,5}-[0-9]+$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "uuid"},
    {"type": ["integer", "null"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
    {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 4},
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": STRING, "b": {"enum": [1, 2]}}, "required": ["b"], "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 1},
    {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "null"}}, "additionalProperties": False, "maxProperties": 1},
    {"anyOf": [{"type": "boolean"}, {"type": "integer", "maximum": 9, "minimum": 0}]},
    {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    {"$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
    {
        "$defs": {"t": {"type": "object", "properties": {"t": {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}},
                        "required": ["t"], "additionalProperties": False}},
        "$ref": "#/$defs/t",
    },
    {"type": "object", "properties": {"é\"\\": {"type": "boolean"}}, "required": ["é\"\\"], "additionalProperties": False},
    {"type": "object", "properties": {"o": {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"],
                                            "additionalProperties": False}}, "required": ["o"], "additionalProperties": False},
]  # fmt: skip
COMPACT = {"whitespace_pattern": " "}


def answers(engine: Engine, requests: list[Request]) -> list[list[Event]]:
    events = engine.generate(requests)
    assert engine.pages.used == 0
    return events


def text_of(events: list[Event]) -> str:
    tokens = [e.token for e in events if e.token is not None and not (e.finish_reason == "stop" and e.token in EOS)]
    return bytes(tokens).decode()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_every_answer_of_a_random_model_matches_its_schema(lm: LM, engine: Engine, seed: int):
    assert len(SCHEMAS) == 30
    grammars = [lm.grammar({"json": schema} | COMPACT) for schema in SCHEMAS for _ in range(2)]
    requests = [Request([5, i], 100, Sampling(temperature=1.5), EOS, seed, i, grammar=grammar) for i, grammar in enumerate(grammars)]
    complete, different = 0, set()
    for i, events in enumerate(answers(engine, requests)):
        if events[-1].finish_reason == "stop":
            schema, text = SCHEMAS[i // 2], text_of(events)
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
            complete += 1
            different.add((i // 2, text))
        else:
            assert events[-1].finish_reason == "length"
    assert complete >= 50, "the others were cut at 100 tokens"
    assert len(different) > 40, "a random model says different things"


REGEXES = [r"[a-z]{3}\d?", r"(yes|no)!?", r"\d{1,3}(\.\d{1,3}){3}", r"[^a-z\n]{2,6}", r"é+日?", r"a\nb|c/d", r"^x$", r"[a-zé\d]{4}"]


@pytest.mark.slow
def test_every_answer_to_a_regex_matches_all_of_it(lm: LM, engine: Engine):
    grammars = [lm.grammar({"regex": regex}) for regex in REGEXES]
    for seed in range(3):
        requests = [Request([5], 60, Sampling(temperature=1.5), EOS, seed, i, grammar=grammar) for i, grammar in enumerate(grammars)]
        for regex, events in zip(REGEXES, answers(engine, requests), strict=True):
            assert events[-1].finish_reason == "stop" or regex == r"é+日?"
            if events[-1].finish_reason == "stop":
                assert re.fullmatch(regex, text_of(events))


CHOICES = ["yes", "no", "no, never", 'a "b"\n', "é/\\x", "[a-z]*"]


@pytest.mark.slow
def test_every_answer_to_choices_is_one_of_them_and_all_come(lm: LM, engine: Engine):
    choice_grammar = lm.grammar({"choice": CHOICES})
    requests = [Request([5], 20, Sampling(temperature=2.0), EOS, 0, i, grammar=choice_grammar) for i in range(60)]
    assert {text_of(events) for events in answers(engine, requests)} == set(CHOICES)


@pytest.mark.parametrize("text", ['start: "a" ("," "a"){0,2} "."', 'root ::= "a" list "."\nlist ::= ("," "a")* '])
def test_a_grammar_is_lark_or_gbnf(lm: LM, text: str):
    for answer in lm.generate([[5]] * 4, 40, structured={"grammar": text}, temperature=1.0):
        assert re.fullmatch(r"a(,a)*\.", answer.text) or answer.finish_reason == "length"


# (grammar, what it accepts, what it does not), by the documentation of GBNF in llama.cpp.
GBNF = [
    (r'root ::= "\u00e9" [\u0400-\u04ff]+ "\U0001F600"', ["\u00e9\u0436\u0434\U0001F600"], ["e\u0436\U0001F600", "\u00e9\U0001F600"]),
    (r'root ::= "\x41\xe9"', ["A\u00e9"], ["A"]),
    (r'root ::= "\[a\]\"\\/"', ['[a]"\\/'], ["a"]),
    (r"root ::= [\[\]\\/]+", ["[]\\/"], ["a", ""]),
    (r"root ::= [^\"\\\x7F\x00-\x1F]+", ["a b\u00e9"], ['a"', "\x7f", "\n"]),
    (r'root ::= "\x00\x1b\t\n"', ["\0\x1b\t\n"], [""]),
    (r"root ::= [\u002d\x5d\x5e]+", ["-]^"], [".", "a"]),
    (r"root ::= [\x2d-\x2f]", ["-", ".", "/"], [",", "0"]),
    ("root ::= [&&a~~]+", ["&a~"], ["b"]),
    ('root ::= other # it is "\\q" [\\q]\nother ::= "a"', ["a"], ["q"]),
    (r"root ::= [\U0001F600-\U0001F64F]", ["\U0001F610"], ["\U0001F680", "a"]),
]


@pytest.mark.parametrize("grammar, right, wrong", GBNF, ids=[grammar for grammar, _, _ in GBNF])
def test_gbnf_has_the_escapes_of_llama_cpp(grammar: str, right: list[str], wrong: list[str]):
    compiled = Grammars(ByteTokenizer(), VOCAB).get(read_structure({"grammar": grammar}))

    def accepts(text: str) -> bool:
        matcher = compiled.matcher(EOS)
        for byte in text.encode():
            if not unpacked_bits(grammar_masks([matcher])[0][0], VOCAB)[byte]:
                return False
            matcher.push(byte)
        return grammar_masks([matcher])[1][0] in ("accepting", "complete")

    assert [text for text in right if not accepts(text)] == []
    assert [text for text in wrong if accepts(text)] == []


def test_any_json_object_and_a_pydantic_class(lm: LM):
    """Greedy, by a model that has learned nothing."""
    pets = lm.generate([[5], [6]], 400, structured={"json": Pet}, logit_bias={ord('"'): 30.0})
    for pet in pets:
        Pet.model_validate_json(pet.text)
    pets = lm.generate([[5], [6]], 200, structured={"json_object": True}, logit_bias={ord("}"): 30.0})
    assert [json.loads(answer.text) for answer in pets] == [{}, {}]


@pytest.mark.slow
def test_whitespace_of_json_is_what_was_asked_for(lm: LM):
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    blank = {ord(c): 50.0 for c in " \n\t\r"}
    loud = lm.generate([[5]], 400, structured={"json": schema}, logit_bias=blank | {10: 80.0})[0].text
    runs = re.findall(r"\s+", loud)
    assert {run[0] for run in runs} == {"\n"}
    assert max(map(len, runs)) == 65
    for none in ({"disable_any_whitespace": True}, {"whitespace_pattern": ""}):
        tight = lm.generate([[5]], 300, structured={"json": schema} | none, logit_bias=blank)[0].text
        assert not re.search(r"\s", tight)
    text = lm.generate([[5]], 300, structured={"json": schema, "whitespace_pattern": " ?"}, logit_bias=blank)[0].text
    assert {len(run) for run in re.findall(r"\s+", text)} == {1}


# ---------------------------------------------------------------- in the engine


def plain(events: list[Event]) -> list[tuple[int | None, str | None]]:
    return [(event.token, event.finish_reason) for event in events]


@pytest.mark.slow
def test_a_grammar_that_allows_everything_changes_no_token(lm: LM, engine: Engine):
    """Tokens by their ids, special ones too: the mask is applied, and takes nothing away."""
    every = lm.grammar({"grammar": "start: " + " ".join("<[0-257]>" for _ in range(9))})
    for sampling in (Sampling(), Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.2)):
        free = [Request([5, i], 8, sampling, EOS, 3, i) for i in range(3)]
        expected = answers(engine, free)
        constrained = answers(engine, [replace(request, grammar=every) for request in free])
        # The second round finds its prompts in the prefix cache, which `reused` counts.
        assert [[event[1:-1] for event in events] for events in constrained] == [
            [event[1:-1] for event in events] for events in expected
        ]


def test_an_answer_in_a_grammar_is_the_same_in_any_company(lm: LM, engine: Engine):
    request = Request([7, 8], 40, Sampling(temperature=1.2), EOS, 5, grammar=lm.grammar({"json": SCHEMAS[20]}))
    alone = answers(engine, [request])[0]
    others = [Request([5, i], 30, Sampling(temperature=1.5), EOS, 1, i) for i in range(3)]
    schemas = [lm.grammar({"json": schema}) for schema in SCHEMAS[:4]]
    mixed = [Request([6, i], 30, Sampling(temperature=1.5), EOS, 2, i, grammar=g) for i, g in enumerate(schemas)]
    expected = answers(engine, others)
    outputs = answers(engine, [*others, *mixed, request])
    assert plain(outputs[-1]) == plain(alone)
    assert [plain(events) for events in outputs[:3]] == [plain(events) for events in expected], "a mask is its own row's"


@pytest.mark.slow
def test_a_mask_survives_preemption_and_new_weights_and_leaves_with_its_owner(lm: LM):
    engine = Engine(lm.module, EngineSettings(slots=4, page=8, context=64, pages=11, budget=64, budget_decoding=32))
    patterns = ["(ab|cd){20}", "[ab]{40}"]  # another mask for each token, and the same for all
    both = [lm.grammar({"regex": regex}) for regex in patterns]
    requests = [Request([5, i], 50, Sampling(temperature=1.0), EOS, row=i, grammar=both[i % 2]) for i in range(4)]
    numbers = [engine.add(request) for request in requests]
    events: list[Event] = []
    for _ in range(12):
        events += engine.step()
    engine.swap_weights({address: a * 1.5 for address, a in engine.weights().items()})
    events += list(engine.run())
    assert engine.scheduler.preemptions > 4
    for i, number in enumerate(numbers):
        assert re.fullmatch(patterns[i % 2], text_of([event for event in events if event.id == number]))
    engine.swap_weights({address: a / 1.5 for address, a in engine.weights().items()})
    expected = [5]
    for _ in range(12):  # greedily, without an engine and its slots
        expected.append(int(lm.logits([expected])[0, -1].argmax()))
    assert [event.token for event in answers(engine, [Request([5], 12)])[0]] == expected[1:]


def test_log_probabilities_are_the_models_own_and_those_of_what_the_mask_leaves(lm: LM, engine: Engine):
    ab_grammar = lm.grammar({"regex": "[ab]{4}"})
    events = answers(engine, [Request([5], 10, Sampling(temperature=1.0), EOS, grammar=ab_grammar)])[0][:-1]
    tokens = [event.token for event in events if event.token is not None]
    logits = lm.logits([[5, *tokens]])[0][:-1].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose([e.logprob for e in events], log_probs[range(4), tokens], atol=1e-4)
    logits_left = logits[:, [97, 98]]
    logits_left = logits_left - np.log(np.exp(logits_left).sum(-1, keepdims=True))
    np.testing.assert_allclose([e.drawn for e in events], logits_left[range(4), [t - 97 for t in tokens]], atol=1e-4)


@pytest.mark.parametrize("ends", [EOS, frozenset()], ids=["with eos", "ignore_eos"])
def test_an_answer_ends_by_stop_as_soon_as_nothing_may_follow(lm: LM, engine: Engine, ends: frozenset[int]):
    ab_grammar = lm.grammar({"regex": "ab"})
    for most in (2, 3, 50):
        events = answers(engine, [Request([5], most, stop_tokens=ends, grammar=ab_grammar)])[0]
        assert plain(events) == [(97, None), (98, None), (None, "stop")], "also where it ends at the limit of tokens"
    assert plain(answers(engine, [Request([5], 1, stop_tokens=ends, grammar=ab_grammar)])[0]) == [(97, "length")]
    nothing = lm.grammar({"regex": ""})
    assert plain(answers(engine, [Request([5], 9, stop_tokens=ends, grammar=nothing)])[0]) == [(None, "stop")]


LATE = [{"json": {"type": "integer", "minimum": 0, "maximum": 9}}, {"grammar": 'start: "a" | "b" "c"?'}, {"choice": ["x", "xy"]}]


def test_the_end_is_seen_with_the_last_token_in_every_kind_of_grammar(lm: LM, engine: Engine):
    for structure, last in zip(LATE, ("7", "a", "y"), strict=True):
        bias = {ord(c): 50.0 for c in ("7axy")}
        most = 2 if last == "y" else 1
        events = answers(engine, [Request([5], most, Sampling(logit_bias=bias), EOS, grammar=lm.grammar(structure))])[0]
        assert text_of(events)[-1] == last
        assert events[-1].finish_reason == "stop"


def test_bans_and_a_grammar_that_leave_nothing_end_the_answer_with_the_reason(lm: LM, engine: Engine):
    abc_grammar = lm.grammar({"regex": "[ab]{2}c"})
    options: list[dict[str, Any]] = [
        {"bad_words": ((99,),)},
        {"allowed_tokens": (97,)},
        {"bad_words": ((97, 99), (98, 99))},
    ]
    requests = [Request([5], 9, Sampling(**one_of), EOS, grammar=abc_grammar) for one_of in options]
    for events in answers(engine, requests):
        assert re.fullmatch("[ab]{2}", text_of(events))
        assert plain(events)[-1] == (None, "blocked")
    allowed_events = answers(engine, [Request([5], 9, Sampling(bad_words=((97,),), temperature=1.0), EOS, grammar=abc_grammar)])[0]
    assert text_of(allowed_events) == "bbc", "what bans leave of the grammar is said"


def test_an_answer_that_matches_ends_by_stop_where_bans_leave_nothing_more(lm: LM, engine: Engine):
    ab_grammar = lm.grammar({"regex": "ab*"})
    for options, ends in ({"bad_words": ((98,),)}, frozenset()), ({"bad_words": ((98,),), "min_tokens": 5}, EOS):
        assert plain(answers(engine, [Request([5], 9, Sampling(**options), ends, grammar=ab_grammar)])[0]) == [
            (97, None),
            (None, "stop"),
        ]


def test_min_tokens_hold_the_end_back_while_the_grammar_allows_more(lm: LM, engine: Engine):
    digits = lm.grammar({"regex": "[0-9]*"})
    forced = {257: 60.0}
    events = answers(engine, [Request([5], 9, Sampling(min_tokens=4, logit_bias=forced), EOS, grammar=digits)])[0]
    assert re.fullmatch("[0-9]{4}", text_of(events))
    assert plain(events)[-1] == (257, "stop")
    short = lm.grammar({"regex": "a"})
    assert plain(answers(engine, [Request([5], 9, Sampling(min_tokens=4), EOS, grammar=short)])[0]) == [(97, None), (None, "stop")]


@pytest.mark.slow
def test_nothing_compiles_after_warming_up(lm: LM):
    engine = Engine(lm.module, EngineSettings(slots=3, page=8, context=64, pages=24, budget=64, budget_decoding=32))
    number = engine.warm_up()
    grammars = [lm.grammar({"json": schema}) for schema in SCHEMAS[:6]]
    sizes = [program.compilations for program in (sampler.write_slot, sampler.write_masks, sampler.sample)]
    samplings = [Sampling(temperature=1.0), Sampling(min_tokens=2), Sampling(top_k=3, temperature=1.0)]
    answers(engine, [Request([5, i], 30, samplings[i % 3], EOS, row=i, grammar=grammars[i % 6] if i % 4 else None) for i in range(14)])
    assert engine.stats.compilations == number
    after = [program.compilations for program in (sampler.write_slot, sampler.write_masks, sampler.sample)]
    assert after == sizes


def test_a_grammar_over_another_vocabulary_is_refused(engine: Engine):
    other = Grammars(ByteTokenizer(), VOCAB + 6).get(read_structure({"regex": "a"}))
    with pytest.raises(BadInput, match="264 tokens for a model with 258"):
        engine.add(Request([5], 3, grammar=other))
    assert not engine._requests


# ---------------------------------------------------------------- what is refused


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "asks for nothing"),
    ({"regex": "a", "choice": ["b"]}, "`regex` and `choice`"),
    ({"regexp": "a"}, "no `regexp`"),
    ({"structural_tag": "{}"}, "no `structural_tag`"),
    ({"disable_additional_properties": True, "json_object": True}, "no `disable_additional_properties`"),
    ({"regex": "a", "whitespace_pattern": " "}, "no effect on `regex`"),
    ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "exclude each other"),
    ({"json": {}, "whitespace_pattern": "("}, "json"),
    ({"json": "{"}, "not JSON"),
    ({"json": [1]}, "is an object"),
    ({"json": {"const": float("nan")}}, "not JSON"),
    ({"json": {"x-guidance": {"lenient": True}}}, "x-guidance"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"not": {}}}, "not"),
    ({"json": {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}}, "write `anyOf`"),
    ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "greater than maximum"),
    ({"json": {"$ref": "#"}}, "no text"),
    ({"json": {"$ref": "#/$defs/gone"}}, "json"),
    ({"json": {"$ref": "http://127.0.0.1:9/schema.json"}}, "never fetched"),
    ({"json": {"type": "string", "format": "gone"}}, "format"),
    ({"regex": "("}, "unclosed group"),
    ({"regex": "(?=a)a"}, "look-around"),
    ({"regex": 3}, "is a text"),
    ({"json_object": 1}, "true or false"),
    ({"json_object": True, "disable_any_whitespace": "no"}, "true or false"),
    ({"json_object": True, "whitespace_pattern": 3}, "is a text"),
    ({"choice": []}, "list of texts"),
    ({"choice": "yes"}, "list of texts"),
    ({"grammar": "start: other"}, "other"),
    ({"grammar": "hello"}, "neither Lark nor GBNF"),
    ({"grammar": r'root ::= "\q"'}, r"unknown escape \q"),
    ({"grammar": r'root ::= "\ud83d"'}, r"\ud83d is no character"),
    ({"grammar": r"root ::= [\U00110000]"}, r"\U00110000 is no character"),
    ({"grammar": "root ::= " + "(" * 5000}, "neither Lark nor GBNF"),
    ({"grammar": "start: " + "(" * 5000}, "nested"),
    ({"grammar": "start: <|eos|>"}, "by id"),
]


@pytest.mark.parametrize("structure, problem", WRONG, ids=[f"{next(iter(g), 'empty')}-{i}" for i, (g, _) in enumerate(WRONG)])
def test_what_is_not_supported_is_refused_by_its_name(structure: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch):
    import socket

    def connect(*_: Any) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", connect)
    with pytest.raises(BadInput, match=re.escape(problem)) as error:
        Grammars(ByteTokenizer(), VOCAB).get(read_structure(structure))
    assert len(str(error.value)) < 500


def deep(levels: int) -> dict[str, Any]:
    """Definitions that refer to each other in a chain."""
    links = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "null"}]} for i in range(levels)}
    return {"$defs": links | {f"d{levels}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def test_a_long_chain_of_definitions_does_not_end_the_process():
    """2,000 levels need 12 MB of stack, and a thread has 8."""
    grammars = Grammars(ByteTokenizer(), VOCAB)
    grammar = grammars.get(read_structure({"json": deep(2_500)}))
    assert allowed_tokens(grammar.matcher(())) == {*b"-0123456789n"}
    rules = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(6_000)) + '\nr6000: "a"'
    assert allowed_tokens(grammars.get(read_structure({"grammar": rules})).matcher(())) == {ord("a")}


def test_compiling_has_a_deadline_and_takes_turns(monkeypatch: pytest.MonkeyPatch):
    store, hold = Grammars(ByteTokenizer(), VOCAB), threading.Event()
    compiled = grammars.Grammar._compiled
    monkeypatch.setattr(grammars.Grammar, "_compiled", lambda self: (hold.wait(), compiled(self))[1])
    for text in ("a", "b"):
        with pytest.raises(BadInput, match=r"more than 0\.01 seconds"):
            store.get(read_structure({"regex": text}), seconds=0.01)
    with pytest.raises(BadInput, match="no turn"):
        store.get(read_structure({"regex": "c"}), seconds=0.01)
    hold.set()
    assert allowed_tokens(store.get(read_structure({"regex": "c"}), seconds=60.0).matcher(())) == {ord("c")}


def test_a_thread_that_cannot_start_gives_its_turn_back(monkeypatch: pytest.MonkeyPatch):
    def start(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    store = Grammars(ByteTokenizer(), VOCAB)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for _ in range(grammars.COMPILING + 1):
            with pytest.raises(BadInput, match="no memory for a stack of 64 MB"):
                store.get(read_structure({"regex": "a"}), seconds=5.0)
    assert store.get(read_structure({"regex": "a"}), seconds=60.0)


def test_the_latest_grammars_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammars, "KEPT", 2)
    store = Grammars(ByteTokenizer(), VOCAB)
    first, two = (store.get(read_structure({"regex": text})) for text in "ab")
    assert store.get(read_structure({"regex": "a"})) is first
    store.get(read_structure({"regex": "c"}))
    assert store.get(read_structure({"regex": "a"})) is first
    assert store.get(read_structure({"regex": "b"})) is not two
    assert store.get(read_structure({"json": {"type": "null"}})) is store.get(read_structure({"json": '{"type": "null"}'}))


def test_letters_of_a_choice_are_no_regex(lm: LM):
    for text in (string.punctuation, "\n\t\r\x00 ", "日本é\U0001f600"):
        assert lm.generate([[5]], 80, structured={"choice": [text]})[0].text == text
