"""Text to ids and back: from what a user writes to a `Tokenizer`.

    byte                      256 bytes, <bos>, <eos>
    tokenizer.json            a file of the `tokenizers` library
    tokenizer.model           SentencePiece
    vocab.txt                 WordPiece
    cl100k_base.tiktoken      ranks, where their rule is known by name
    model.gguf                the one inside a GGUF file
    a folder                  a Hub folder (also vocab.json with merges.txt), or a run directory (its tokenizer/)

Notable: no special token is ever added to a text, and text that looks like one is text. Files are bounded before they
are parsed. Knows nothing of models: whether a vocabulary fits is the caller's question.
"""

from pathlib import Path

from argosy.core.errors import BadInput
from argosy.data.tokenizers import Stream, Tokenizer
from argosy.data.tokenizers.facts import Facts, read_bytes, read_facts, read_text

__all__ = ["Stream", "Tokenizer", "find_tokenizer", "load_tokenizer"]

FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
"""What a folder's tokenizer is read from: the first that is there."""
KINDS = "`byte`, a tokenizer.json, a SentencePiece .model, a .gguf file, a Hub folder or a run directory"


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """The tokenizer that `byte`, a file, a folder or a run directory names.

    Raises:
        BadInput: nothing is there, or no kind that is known.
        Damaged: a file that contradicts itself.
        Unsupported: a file of a known kind that nothing here can follow.
    """
    if str(spec) == "byte":
        from argosy.data.tokenizers.byte import ByteTokenizer

        return ByteTokenizer()
    path = Path(spec).expanduser()
    if not path.exists():
        raise BadInput(f"no tokenizer at `{spec}`", where="no such file or folder", hint=KINDS)
    tokenizer = find_tokenizer(path)
    if tokenizer is None:
        raise BadInput(f"no tokenizer in `{spec}`", where=f"it holds none of {', '.join(FILES)}", hint=KINDS)
    return tokenizer


def find_tokenizer(path: str | Path) -> Tokenizer | None:
    """The tokenizer of a folder or file; None where a folder or a GGUF holds none.

    Raises:
        BadInput: a file of no kind that is known.
        Damaged, Unsupported: as `load_tokenizer`.
    """
    path = Path(path)
    if not path.is_dir():
        return read_file(path, read_facts(path.parent) if path.name in FILES else Facts())
    for folder in (path, path / "tokenizer"):
        for name in FILES:
            if (folder / name).is_file():
                return read_file(folder / name, read_facts(folder))
    return None


def read_file(path: Path, facts: Facts) -> Tokenizer | None:
    """The tokenizer of one file, by its suffix; `facts` are what stands beside it."""
    from argosy.data.tokenizers import convert

    if path.suffix == ".gguf":
        from argosy.data.tokenizers.gguf import read_gguf

        return read_gguf(path)
    if path.suffix == ".model":
        from argosy.data.tokenizers.pieces import PieceTokenizer

        return PieceTokenizer(read_bytes(path), facts, path)
    if path.name == "vocab.json":
        merges = read_text(path.with_name("merges.txt"))
        text = convert.from_vocab_and_merges(read_text(path), merges, path)
        return fast(text, facts.filled(convert.GPT2_ROLES), path)
    if path.suffix == ".json":
        return fast(read_text(path), facts, path)
    if path.suffix == ".txt":
        text = convert.from_word_pieces(read_text(path).splitlines(), facts.config)
        return fast(text, facts.filled(convert.BERT_ROLES), path)
    if path.suffix == ".tiktoken":
        return fast(convert.from_ranks(read_text(path), path), facts, path)
    raise BadInput(f"`{path.name}` is no tokenizer", where=str(path), hint=KINDS)


def fast(text: str, facts: Facts, path: Path) -> Tokenizer:
    """A tokenizer.json; the one that a byte tokenizer was saved as is that byte tokenizer."""
    from argosy.data.tokenizers.byte import ByteTokenizer, tokenizer_json
    from argosy.data.tokenizers.fast import FastTokenizer

    return ByteTokenizer() if text == tokenizer_json() else FastTokenizer(text, facts, path)
