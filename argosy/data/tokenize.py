"""Text to ids and back: from what a user writes to a `Tokenizer`.

    byte                      256 bytes, <bos>, <eos>
    tokenizer.json            a file of the `tokenizers` library
    tokenizer.model           SentencePiece
    model.gguf                the one inside a GGUF file
    a folder                  a Hub folder, or a run directory (its tokenizer/)

Notable: no special token is ever added to a text, and text that looks like one is text. Files are bounded before they
are parsed. Knows nothing of models: whether a vocabulary fits is the caller's question.
"""

from pathlib import Path

from argosy.core.errors import BadInput
from argosy.data.tokenizers import Stream, Tokenizer

__all__ = ["Stream", "Tokenizer", "find_tokenizer", "load_tokenizer"]


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """The tokenizer that `byte`, a file, a folder or a run directory names.

    Raises:
        BadInput: nothing is there, or no kind that is known.
        Damaged: a file that contradicts itself.
    """
    if str(spec) == "byte":
        from argosy.data.tokenizers.byte import ByteTokenizer

        return ByteTokenizer()
    path = Path(spec).expanduser()
    tokenizer = find_tokenizer(path) if path.exists() else None
    if tokenizer is None:
        raise BadInput(
            f"no tokenizer at `{spec}`",
            hint="`byte`, a tokenizer.json, a SentencePiece .model, a .gguf file, a Hub folder or a run directory",
        )
    return tokenizer


def find_tokenizer(path: str | Path) -> Tokenizer | None:
    """The tokenizer of a folder or file; None where a folder has none.

    Raises:
        BadInput: a kind that is not known.
        Damaged: a file that contradicts itself.
    """
    from argosy.data.tokenizers.byte import ByteTokenizer, tokenizer_json

    path = Path(path)
    for folder in (path, path / "tokenizer"):
        file = folder / "tokenizer.json"
        if file.is_file() and file.read_text(encoding="utf-8") == tokenizer_json():
            return ByteTokenizer()
    return None
