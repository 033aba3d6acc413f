"""Text to ids and back: from what a user writes to a `Tokenizer`.

    byte                      256 bytes, <bos>, <eos>
    tokenizer.json            a file of the `tokenizers` library
    tokenizer.model           SentencePiece
    vocab.txt                 WordPiece
    cl100k_base.tiktoken      ranks, where their rule is known by name (also Kimi's tiktoken.model)
    bpe_simple_vocab.txt.gz   CLIP's list of merges
    model.gguf                the one inside a GGUF file
    a folder                  a Hub folder (also vocab.json with merges.txt), or a run directory (its tokenizer/)

Notable: no special token is ever added to a text, and text that looks like one is text. Files are bounded before they
are parsed. Knows nothing of models: whether a vocabulary fits is the caller's question.
"""

from pathlib import Path

from argosy.core.errors import BadInput
from argosy.data.tokenizers import TextStream, Tokenizer
from argosy.data.tokenizers.config import TokenizerConfig, read_bytes, read_config, read_text

__all__ = ["TextStream", "Tokenizer", "find_tokenizer", "load_tokenizer"]

FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json",
         "vocab.txt")  # fmt: skip
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
        return read_file(path, read_config(path.parent) if path.name in FILES else TokenizerConfig())
    for folder in (path, path / "tokenizer"):
        for file in [*(folder / name for name in FILES), *sorted(folder.glob("*.tiktoken"))]:
            if file.is_file():
                return read_file(file, read_config(folder))
    return None


def read_file(path: Path, config: TokenizerConfig) -> Tokenizer | None:
    """The tokenizer of one file, by its suffix; `config` are what stands beside it."""
    from argosy.data.tokenizers import convert, ranks

    if path.suffix == ".gguf":
        from argosy.data.tokenizers.gguf import read_gguf

        return read_gguf(path)
    if path.suffix == ".model":
        return read_model(path, config)
    if path.name == "vocab.json":
        merges = read_text(path.with_name("merges.txt"))
        return fast(*convert.from_vocab_and_merges(read_text(path), merges, config, path), path)
    if path.suffix == ".json":
        return fast(read_text(path), config, path)
    if path.suffix == ".txt":
        lines = read_text(path).removesuffix("\n").split("\n")  # a token may be one of Unicode's other line ends
        text = convert.from_word_pieces([line.removesuffix("\r") for line in lines], config.raw)
        return fast(text, config.filled(convert.BERT_ROLES), path)
    if path.suffix == ".tiktoken":
        return fast(*ranks.from_ranks(read_text(path), config, path), path)
    if path.name.endswith(".txt.gz"):
        return fast(convert.from_clip(path), config.filled(convert.CLIP_ROLES), path)
    raise BadInput(f"`{path.name}` is no tokenizer", where=str(path), hint=KINDS)


def read_model(path: Path, config: TokenizerConfig) -> Tokenizer:
    """A file called `.model`: SentencePiece's, or tiktoken's ranks under the same name."""
    from argosy.data.tokenizers.pieces import PieceTokenizer
    from argosy.data.tokenizers.ranks import from_ranks, holds_ranks

    data = read_bytes(path)
    if holds_ranks(data):
        return fast(*from_ranks(read_text(path), config, path), path)
    return PieceTokenizer(data, config, path)


def fast(text: str, config: TokenizerConfig, path: Path) -> Tokenizer:
    """A tokenizer.json; the one that a byte tokenizer was saved as is that byte tokenizer."""
    from argosy.data.tokenizers.byte import ByteTokenizer, tokenizer_json
    from argosy.data.tokenizers.fast import FastTokenizer

    return ByteTokenizer() if text == tokenizer_json() else FastTokenizer(text, config, path)
