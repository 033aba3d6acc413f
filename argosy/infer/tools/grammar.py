"""Structured output: computes the tokens that may follow, so that a completion matches a JSON schema, a regular expression, a list of
choices or a grammar. Host only: NumPy, and llguidance, which walks a trie of all tokens through a parser of bytes.

    grammars = Grammars(tokenizer, vocab)
    grammar = grammars.get(read_structure({"json": schema}))
    matcher = grammar.matcher(ends)              # one for each completion
    bits, states = grammar_masks([matcher, ...]) # before each token; matcher.push(token) after it

A token matches as the bytes that it decodes to after other text. So several byte tokens may form a character, and every tokenization of
a text is allowed. Special tokens match no text; only grammars written here name them (`Structure.special`). An end-of-sequence token is
allowed where the text is complete.

llguidance compiles recursively. A chain of 2,000 definitions in 60 kB of schema would overflow the 8 MB stack of a thread, and end the
process. So grammars are compiled in a thread whose stack grows with their text.
"""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from argosy.core.errors import BadInput
from argosy.data.tokenizers import Tokenizer
from argosy.infer.tools.gbnf import unescape

State = Literal["open", "accepting", "complete", "blocked"]
Kind = Literal["json", "json_object", "regex", "choice", "grammar", "tools"]

KINDS = ("json", "json_object", "regex", "choice", "grammar")
OPTIONS = ("whitespace_pattern", "disable_any_whitespace")
# The whitespace that programs write: a space, or a line break and an indent. If any whitespace were allowed, a confused model would
# write blanks until it reaches the limit on tokens.
WHITESPACE = r" |\r?\n[ \t]{0,64}"
# Number of compiled grammars that are cached.
KEPT = 32
# Number of grammars that are compiled at the same time.
COMPILING = 2
# The most states of a lexer. Each takes up to 2 kB, so one grammar may take 100 MB. The default of 250,000 would be 500 MB.
LEXER_STATES = 50_000
# llguidance's limit on the work for one mask. With the default of 200,000, a regular expression of 16 kB delays the engine by a second.
# A tenth of that is enough for URLs, long texts and lists of 1,500 choices over 49k tokens.
LEXER_FUEL = 50_000
# Bytes of stack, and more for each byte of a grammar. Chains of definitions were seen to take up to 1,000 for each byte.
STACK, STACK_FOR_EACH_BYTE = 64 << 20, 2048


class TooManyGrammars(BadInput):
    """Raised if too many grammars are being compiled."""


@dataclass(frozen=True)
class Structure:
    """A Lark grammar that a completion must match.

    kind: the kind of structure that the request named.
    lark: the text of the grammar.
    special: whether the grammar names special tokens, such as `<|end|>`. A complement (`~/a/`) in it may then match them too.
    """

    kind: Kind
    lark: str
    special: bool = False


def read_structure(structured: Mapping[str, Any]) -> Structure:
    """Converts a description of structured output, with the names of vLLM's `structured_outputs`, to a grammar.

    Args:
        structured: one of `json` (a JSON schema as a dict or as text, or a pydantic class), `json_object` (True), `regex`, `choice` (a
            list of texts) and `grammar` (Lark or GBNF). The first two may come with `whitespace_pattern`, a regular expression for the
            whitespace between JSON tokens, or `disable_any_whitespace` (True).

    Raises:
        BadInput: `structured` has none or several of these, an unknown name, or a value of another type.
    """
    structured = {name: value for name, value in structured.items() if value is not None and value is not False}
    if unknown := sorted(set(structured) - {*KINDS, *OPTIONS}):
        raise BadInput(f"structured output has no `{unknown[0]}`", hint=f"one of {', '.join(KINDS)}")
    kinds = [name for name in KINDS if name in structured]
    if len(kinds) != 1:
        kinds_text = "nothing" if not kinds else " and ".join(f"`{name}`" for name in kinds)
        raise BadInput(f"structured output asks for {kinds_text}", hint=f"one of {', '.join(KINDS)}")
    kind, options = kinds[0], [name for name in OPTIONS if name in structured]
    if options and not kind.startswith("json"):
        raise BadInput(f"`{options[0]}` has no effect on `{kind}`", hint="it is for json and json_object")
    if len(options) == 2:
        raise BadInput("`whitespace_pattern` and `disable_any_whitespace` exclude each other")
    for name in ("json_object", "disable_any_whitespace"):
        if structured.get(name, True) is not True:
            raise BadInput(f"`{name}` is true or false")
    value = structured[kind]
    if kind == "json":
        return Structure(kind, json_rule("start", value, whitespace_rule(structured)))
    if kind == "json_object":
        return Structure(kind, json_rule("start", {"type": "object"}, whitespace_rule(structured)))
    if kind == "regex":
        return Structure(kind, _regex(_text(kind, value)))
    if kind == "choice":
        return Structure(kind, _regex("|".join(map(_literally, _choices(value)))))
    return Structure("grammar", _lark(_text(kind, value)))


def whitespace_rule(structured: Mapping[str, Any]) -> str | None:
    """The regular expression for whitespace between JSON tokens, by the options of `read_structure`; None: no whitespace is allowed."""
    if structured.get("disable_any_whitespace"):
        return None
    return _text("whitespace_pattern", structured.get("whitespace_pattern", WHITESPACE)) or None


def json_rule(name: str, schema: Any, whitespace: str | None = WHITESPACE) -> str:
    """Writes a rule of a Lark grammar that matches the JSON values of a schema. A `$ref` is looked up in that schema only.

    Args:
        name: the name of the rule.
        schema: the JSON schema as a dict or as text, or a pydantic class.
        whitespace: a regular expression for the whitespace between JSON tokens; None: no whitespace is allowed.

    Raises:
        BadInput: `schema` is no JSON schema.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"the schema is not JSON: {str(error)[:80]}") from None
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if not isinstance(schema, Mapping):
        raise BadInput("a JSON schema is an object")
    if "x-guidance" in schema:
        raise BadInput("`x-guidance` in a schema is not supported", hint="whitespace_pattern sets the whitespace")
    blanks = {"whitespace_flexible": False} if whitespace is None else {"whitespace_pattern": whitespace}
    try:
        return f"{name}: %json {json.dumps({**schema, 'x-guidance': blanks}, allow_nan=False)}"
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"the schema is not JSON: {str(error)[:80]}") from None


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadInput(f"`{name}` is a text")
    return value


def _choices(value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(choice, str) for choice in value):
        raise BadInput("`choice` is a list of texts")
    return list(value)


def _literally(text: str) -> str:
    """A regular expression that only this text matches."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _regex(regex: str) -> str:
    from llguidance import regex_to_lark

    # A literal of Lark may not contain a line break.
    return "start: /" + regex_to_lark(regex, "").replace("\n", r"[\x0a]") + "/"


def _lark(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

    text = text if is_lark_syntax(text) else unescape(text)
    try:
        # RecursionError: the parser that translates GBNF is recursive.
        return any_to_lark(text)
    except (Exception, RecursionError) as error:
        raise BadInput(
            f"`grammar` is neither Lark nor GBNF: {_line(str(error))}", hint="Lark begins with a rule `start`, GBNF with `root`"
        ) from None


# ---------------------------------------------------------------- compiling


class Grammars:
    """Compiles grammars over the tokens of one model, and caches the latest ones. Any thread may use it.

    Args:
        vocab: the model's vocabulary size, which may be larger than the tokenizer's.

    Raises:
        BadInput: there is no tokenizer, or the text that it decodes is not the concatenation of its tokens' texts.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab: int):
        if tokenizer is None:
            raise BadInput("structured output needs a tokenizer, and this model has none")
        if tokenizer.trims:
            raise BadInput(
                f"structured output is not supported with this tokenizer: it drops {tokenizer.trims} spaces at the end of a text"
            )
        self.tokenizer, self.vocab = tokenizer, vocab
        self._libraries: dict[bool, Any] = {}
        self._cache: OrderedDict[Structure, Grammar] = OrderedDict()
        self._lock, self._building = threading.Lock(), threading.Lock()
        self._turns = threading.Semaphore(COMPILING)

    def get(self, structure: Structure, *, seconds: float | None = None) -> "Grammar":
        """Compiles a grammar, or takes it from the cache.

        Args:
            seconds: time limit; None: no limit.

        Raises:
            BadInput: llguidance does not support the grammar, nothing matches it, or compiling takes too long.
            TooManyGrammars: other grammars were being compiled all that time.
        """
        if (cached := self._lookup(structure)) is not None:
            return cached
        self.library(structure.special)
        end = None if seconds is None else time.monotonic() + seconds
        if not self._turns.acquire(timeout=seconds):
            raise TooManyGrammars(f"no turn to compile the grammar within {seconds:g} seconds", hint="try again")
        if (cached := self._lookup(structure)) is not None:
            self._turns.release()
            return cached
        # The compiling thread releases the semaphore, because a thread that takes too long continues.
        grammar = _deep(lambda: Grammar(self, structure), _stack(structure), end, self._turns.release)
        if grammar is None:
            raise BadInput(f"compiling the grammar takes more than {seconds:g} seconds", hint="make it simpler")
        with self._lock:
            self._cache[structure] = grammar
            while len(self._cache) > KEPT:
                self._cache.popitem(last=False)
        return grammar

    def _lookup(self, structure: Structure) -> "Grammar | None":
        with self._lock:
            if structure in self._cache:
                self._cache.move_to_end(structure)
            return self._cache.get(structure)

    def library(self, special: bool = False) -> Any:
        """llguidance's trie of all tokens. It is built at the first call, which takes 0.7 s for 49k tokens.

        Args:
            special: whether it includes the special tokens.
        """
        with self._building:
            if special not in self._libraries:
                from llguidance import LLTokenizer

                names = special_names(self.tokenizer, self.vocab) if special else {}
                tokens: Any = _Tokens(token_bytes(self.tokenizer, self.vocab), names)
                self._libraries[special] = LLTokenizer(tokens)
            return self._libraries[special]


def token_bytes(tokenizer: Tokenizer, vocab: int) -> list[bytes]:
    """The bytes that each token decodes to after other text. They are empty for special tokens, for the unknown token, and for ids
    beyond the tokenizer's vocabulary."""
    silent = {*tokenizer.hidden, tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.unknown}
    pieces = [b"" if token in silent else tokenizer.piece(token, False) for token in range(vocab)]
    # For llguidance, the byte 0xff marks special tokens. It does not occur in UTF-8 text.
    return [b"" if b"\xff" in piece else piece for piece in pieces]


def special_names(tokenizer: Tokenizer, vocab: int) -> dict[int, bytes]:
    """The names of the special tokens that a grammar may name: those written as `<...>`, except the tokens for the beginning and the
    end of texts, for padding, and for unknown text."""
    silent = {tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.unknown}
    names = {token: tokenizer.piece(token, False) for token in tokenizer.hidden if token < vocab and token not in silent}
    return {token: name for token, name in names.items() if re.fullmatch(rb"<[^<>\s]+>", name)}


class _Tokens:
    """The interface of a tokenizer that llguidance expects. It has one token more, without bytes, which is allowed where the text is
    complete."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: Mapping[int, bytes]):
        self.tokens, self.eos_token_id = [*(special.get(i, piece) for i, piece in enumerate(tokens)), b""], len(tokens)
        self.special_token_ids = sorted(special)

    def __call__(self, text: Any) -> list[int]:
        raise RuntimeError("grammars do not force tokens")


class Grammar:
    """A compiled grammar. All its matchers share the states of one lexer."""

    def __init__(self, grammars: Grammars, structure: Structure):
        self.grammars, self.structure, self.vocab = grammars, structure, grammars.vocab
        self._inner = self._compiled()
        first = self.matcher(())
        if grammar_masks([first])[1] == ["blocked"]:
            error = first.inner.get_error()
            why = _reason(error) if error and "NoExtension" not in error else "no text of this model's tokens matches it"
            raise BadInput(f"`{structure.kind}`: {why}")

    def _compiled(self) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        # Without this option, llguidance would allow only its own tokenization where only one text can follow.
        text = f'{self.structure.lark}\n%llguidance {{"no_forcing": true}}\n'
        limits = LLParserLimits(max_lexer_states=LEXER_STATES, step_lexer_fuel=LEXER_FUEL, verbose_errors=False)
        inner = LLMatcher(self.grammars.library(self.structure.special), text, log_level=0, limits=limits)
        if inner.is_error():
            raise BadInput(f"`{self.structure.kind}`: {_reason(inner.get_error())}")
        return inner

    def matcher(self, ends: Collection[int]) -> "Matcher":
        """A matcher for one completion.

        Args:
            ends: token ids that may end the completion once it matches.
        """
        return Matcher(self, ends)

    def copy(self) -> Any:
        return self._inner.deep_copy()

    def renew(self) -> None:
        """Compiles the grammar again, with an empty lexer, after completions have filled the old one with states."""
        self._inner = _deep(self._compiled, _stack(self.structure), None)


class Matcher:
    """The state of one completion in its grammar."""

    def __init__(self, grammar: Grammar, ends: Collection[int]):
        self.grammar, self.tokens = grammar, []
        self.ends = np.asarray(sorted(token for token in ends if 0 <= token < grammar.vocab), np.int64)
        self.inner = grammar.copy()

    def push(self, token: int) -> bool:
        """Adds a token to the completion. Returns whether the completion matches and nothing may follow."""
        self.tokens.append(token)
        if not self.inner.consume_token(token):
            self.again()
        return self.inner.is_stopped() and not self.inner.is_error()

    def again(self) -> bool:
        """Parses the completion again with an empty lexer, if earlier completions have filled the old one with states. Returns whether
        that succeeded."""
        if "too many states" not in self.inner.get_error():
            return False
        self.grammar.renew()
        self.inner = self.grammar.copy()
        return self.inner.consume_tokens(self.tokens)


def grammar_masks(matchers: Sequence[Matcher]) -> tuple[np.ndarray, list[State]]:
    """Computes the masks of the tokens that may follow each completion, in parallel, and the state of each completion.

    The masks are [rows, ceil(vocab / 32)] int32, one bit per token, the lowest bit first. A state is `open` if the completion does not
    match yet, `accepting` if it matches and more may follow, and `complete` if it matches and nothing may follow. It is `blocked` if
    the completion does not match and no token may follow, because a limit of llguidance was reached, or the model has no token for the
    text that must follow.
    """
    from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

    V = matchers[0].grammar.vocab
    full = np.zeros((len(matchers), V // 32 + 1), np.int32)
    if len(matchers) == 1:
        fill_next_token_bitmask(matchers[0].inner, full)
    else:
        fill_next_token_bitmask_par(_executor(), [(m.inner, i) for i, m in enumerate(matchers)], full)
    for i, matcher in enumerate(matchers):
        # After an error, llguidance's mask allows the end of the text.
        if matcher.inner.is_error():
            full[i] = 0
            if matcher.again():
                fill_next_token_bitmask(matcher.inner, full, i)
            if matcher.inner.is_error():
                full[i] = 0
    bits = full.view(np.uint32)
    done: list[bool] = [word >= 1 << V % 32 for word in bits[:, V // 32].tolist()]
    bits[:, V // 32] &= np.uint32((1 << V % 32) - 1)
    some = [bool(row.any()) for row in bits]
    names: dict[tuple[bool, bool], State]
    names = {(True, False): "open", (True, True): "accepting", (False, True): "complete", (False, False): "blocked"}
    states: list[State] = [names[flags] for flags in zip(some, done)]
    for row, matcher, complete in zip(bits, matchers, done):
        if complete:
            np.bitwise_or.at(row, matcher.ends // 32, np.uint32(1) << (matcher.ends % 32).astype(np.uint32))
    return full[:, : -(-V // 32)], states


def unpacked_bits(bits: np.ndarray, vocab: int) -> np.ndarray:
    """Unpacks a mask [W] int32, one bit per token, into booleans [vocab]."""
    return np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), bitorder="little")[:vocab].astype(bool)


def packed_bits(allowed: np.ndarray) -> np.ndarray:
    """Packs booleans [vocab] into a mask [ceil(vocab / 32)] int32, one bit per token, the lowest bit first."""
    return np.packbits(np.pad(allowed, (0, -len(allowed) % 32)), bitorder="little").view(np.int32)


@cache
def _executor() -> Any:
    from llguidance import LLExecutor

    return LLExecutor()


# ---------------------------------------------------------------- threads with a deep stack


def _stack(structure: Structure) -> int:
    return STACK + STACK_FOR_EACH_BYTE * len(structure.lark.encode("utf-8", "replace"))


_starting = threading.Lock()


def _deep(work: Callable[[], Any], stack: int, end: float | None, after: Callable[[], object] = lambda: None) -> Any:
    """Runs `work` in a thread with a larger stack. Returns its result, or None if it has not ended by `end`; it continues then.

    Args:
        stack: bytes of the stack.
        end: the time limit, on the clock of `time.monotonic`; None: no limit.
        after: called in the thread when the work ends, however long it takes.
    """
    outcomes: list[Any] = []

    def go() -> None:
        try:
            outcomes.append((work(), None))
        except BaseException as error:
            outcomes.append((None, error))
        finally:
            after()

    thread = threading.Thread(target=go, daemon=True, name="grammar")
    with _starting:
        before = threading.stack_size(stack)
        try:
            thread.start()
        except RuntimeError:
            after()
            raise BadInput(f"no memory for a stack of {stack >> 20} MB, to compile the grammar") from None
        finally:
            threading.stack_size(before)
    thread.join(None if end is None else max(0.0, end - time.monotonic()))
    if not outcomes:
        return None
    result, error = outcomes[0]
    if error is not None:
        raise error
    return result


# ---------------------------------------------------------------- errors


def _reason(error: str) -> str:
    """The mistake in llguidance's report, in one line, without its position, the grammar's text, or the stack of a panic."""
    if error.startswith("panic: missing special token"):
        return "special tokens have no names in a grammar, write them by id, such as <[2]>"
    if "Default retriever does not fetch" in error:
        return "a `$ref` to another document, which is never fetched"
    if "coerce_one_of" in error:
        return "`oneOf` is supported where its cases exclude each other, write `anyOf`"
    inner = re.search(r"^error: (.+)$", error, re.MULTILINE)
    text = inner[1] if inner else error.partition("\n")[0]
    text = re.sub(r"^(at )?\d+\(\d+\): ", "", text).removeprefix("failed to compile JSON schema: ")
    return _line(re.sub(r'^invalid regex ".*" \(in regex\): ', "", text))


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
