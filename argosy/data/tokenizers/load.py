"""Loads a tokenizer by what a user writes for `data.tokenizer`.

    byte                      256 bytes, <bos>, <eos>
    tokenizer.json            a file of the `tokenizers` library
    tokenizer.model           SentencePiece
    vocab.txt                 WordPiece
    cl100k_base.tiktoken      tiktoken's ranks, if the name of the file tells their split rule (also Kimi's tiktoken.model)
    bpe_simple_vocab.txt.gz   CLIP's list of merges
    model.gguf                the tokenizer inside a GGUF file
    hf:OWNER/NAME             the tokenizer of a model on the Hub
    a folder                  a Hub folder (also vocab.json with merges.txt), a run directory or a prepared corpus (tokenizer/)

File sizes are checked before anything is parsed. The caller has to check whether a vocabulary fits a model.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from argosy.core.errors import BadInput
from argosy.core.hub.download import local_model
from argosy.data.tokenizers import TextStream, Tokenizer
from argosy.data.tokenizers.config import TokenizerConfig, read_bytes, read_config, read_text

__all__ = ["TextStream", "Tokenizer", "find_tokenizer", "load_tokenizer"]

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json",
                "vocab.txt", "*.tiktoken")  # fmt: skip
"""Patterns of the files that a folder's tokenizer is read from: the first match is taken."""
BESIDE = ("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
          "chat_template.json", "additional_chat_templates/*.jinja")  # fmt: skip
"""Patterns of what is read beside them."""
KINDS = "`byte`, a tokenizer.json, a SentencePiece .model, a .gguf file, a Hub folder or a run directory"


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Loads a tokenizer.

    Args:
        spec: `byte`, a file, a folder, a run directory, or a model of the Hub.

    Raises:
        BadInput: there is no such file or folder, or it holds no tokenizer of a known kind.
        Damaged: a file contradicts itself.
        Unsupported: a file of a known kind has a feature that is not supported.
    """
    if str(spec) == "byte":
        from argosy.data.tokenizers.byte import ByteTokenizer

        return ByteTokenizer()
    check_tokenizer(spec)
    tokenizer = find_tokenizer(_path(spec))
    if tokenizer is None:
        raise BadInput(f"no tokenizer in `{spec}`", where="it holds no vocabulary", hint=KINDS)
    return tokenizer


def check_tokenizer(spec: str | Path) -> None:
    """Checks that there is a tokenizer, without reading it.

    Raises:
        BadInput: there is no such file or folder, or the folder holds no vocabulary.
    """
    if str(spec) == "byte":
        return
    path = _path(spec)
    if not path.exists():
        raise BadInput(f"no tokenizer at `{spec}`", where="no such file or folder", hint=KINDS)
    if path.is_dir() and not any(matching(folder, VOCABULARIES) for folder in (path, path / "tokenizer")):
        raise BadInput(f"no tokenizer in `{spec}`", where=f"it holds none of {', '.join(VOCABULARIES)}", hint=KINDS)


def _path(spec: str | Path) -> Path:
    """The local path. All files of a Hub model but its weights are downloaded."""
    return Path(local_model(spec, small=True)).expanduser()


def find_tokenizer(path: str | Path) -> Tokenizer | None:
    """Reads the tokenizer of a folder or file; None: the folder or GGUF file holds no tokenizer.

    Raises:
        BadInput: the file is of an unknown kind.
        Damaged, Unsupported: as in `load_tokenizer`.
    """
    path = Path(path)
    if not path.is_dir():
        return read_file(path, read_config(path.parent) if is_vocabulary(path.name) else TokenizerConfig())
    for folder in (path, path / "tokenizer"):
        if files := matching(folder, VOCABULARIES):
            return read_file(files[0], read_config(folder))
    return None


def matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """The files of a folder that match any of the glob patterns, in the order of the patterns, without duplicates."""
    paths = (path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file())
    return list(dict.fromkeys(paths))


def is_vocabulary(name: str) -> bool:
    """Whether a file of this name holds a vocabulary, and is not only read beside one."""
    return any(fnmatchcase(name, pattern) for pattern in VOCABULARIES)


def read_file(path: Path, config: TokenizerConfig) -> Tokenizer | None:
    """Reads the tokenizer of one file, as its suffix says. `config` comes from the files beside it. None: a GGUF file without one."""
    from argosy.data.tokenizers import convert, ranks

    if path.suffix == ".gguf":
        from argosy.data.tokenizers.gguf import read_gguf

        return read_gguf(path)
    if path.suffix == ".model":
        return _read_model(path, config)
    if path.name == "vocab.json":
        merges = read_text(path.with_name("merges.txt"))
        return fast(*convert.from_vocab_and_merges(read_text(path), merges, config, path), path)
    if path.suffix == ".json":
        return fast(read_text(path), config, path)
    if path.suffix == ".txt":
        # A token may be one of Unicode's other line ends.
        lines = read_text(path).removesuffix("\n").split("\n")
        text = convert.from_word_pieces([line.removesuffix("\r") for line in lines], config.raw)
        return fast(text, config.filled(convert.BERT_ROLES), path)
    if path.suffix == ".tiktoken":
        return fast(*ranks.from_ranks(read_text(path), config, path), path)
    if path.name.endswith(".txt.gz"):
        return fast(convert.from_clip(path), config.filled(convert.CLIP_ROLES), path)
    raise BadInput(f"`{path.name}` is not a tokenizer", where=str(path), hint=KINDS)


def _read_model(path: Path, config: TokenizerConfig) -> Tokenizer:
    """Reads a file with the ending `.model`: a SentencePiece model, or tiktoken's ranks."""
    from argosy.data.tokenizers.pieces import PieceTokenizer
    from argosy.data.tokenizers.ranks import from_ranks, holds_ranks

    data = read_bytes(path)
    if holds_ranks(data):
        return fast(*from_ranks(read_text(path), config, path), path)
    return PieceTokenizer(data, config, path)


def fast(text: str, config: TokenizerConfig, path: Path) -> Tokenizer:
    """Makes a tokenizer from the text of a tokenizer.json: the byte tokenizer if a byte tokenizer has saved it."""
    from argosy.data.tokenizers.byte import ByteTokenizer, tokenizer_json
    from argosy.data.tokenizers.fast import FastTokenizer

    return ByteTokenizer(config) if text == tokenizer_json() else FastTokenizer(text, config, path)
