"""What a user can say about data. Knows nothing of models: the vocabulary is handed to whoever builds a pipeline."""

from typing import Literal

from pydantic import Field

from argosy.core.settings import Settings


class DataSettings(Settings):
    source: str = "stdlib"
    """Where text comes from: a text or JSONL file, a folder or glob of them, a folder written by `argosy data prepare`,
    or a registered name: stdlib, docstrings, synthetic. `NAME:ARGUMENT` chooses the reader, as in `text:server.log`."""

    tokenizer: str = "byte"
    """What turns text into tokens: `byte`, or a tokenizer file, Hub folder or GGUF file."""

    sequence: int = Field(default=256, gt=0)
    """Tokens in a row."""

    batch: int = Field(default=8, gt=0)
    """Rows in a step, over all processes together."""

    packing: Literal["split", "fit"] = "split"
    """split: documents joined to one stream and cut every `sequence` tokens, no padding. fit: whole documents packed
    into rows by best fit; only documents longer than a row are cut."""

    shuffle: bool = True
    """Draw the rows of each epoch in an order of its own. Off: the order of the source."""

    seed: int | None = None
    """Seed of the order of the rows, and of synthetic tokens. None: the run's."""

    epochs: float | None = Field(default=None, gt=0)
    """Passes over the rows, ended after the last whole batch; a stream rounds up. None: as the run has steps for."""

    held_out: float = Field(default=0.01, ge=0, lt=1)
    """Share of the corpus kept for evaluation and never trained on."""

    max_bytes: int | None = Field(default=None, gt=0)
    """Read no more than this many bytes of text, in the order of the source. None: all of it."""

    documents: Literal["whole", "paragraphs"] = "whole"
    """Text files: one document each, or one document for each paragraph between blank lines."""

    invalid: Literal["error", "replace"] = "error"
    """Bytes that are not UTF-8: stop with their place, or put U+FFFD."""

    bos: bool = False
    """Put the tokenizer's beginning-of-sequence token in front of every document."""

    online: bool = False
    """Tokenize and pack while training, writing nothing. The position is then exact only under the same number of
    processes, and rows are shuffled within windows instead of over the whole corpus."""

    prefetch: int = Field(default=2, ge=0)
    """Batches made ahead of the step that takes them."""

    cache: str | None = None
    """Folder of the tokenized corpora. None: `argosy/corpora` under $XDG_CACHE_HOME, or under ~/.cache."""
