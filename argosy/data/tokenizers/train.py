"""Trains a byte-level BPE vocabulary with the `tokenizers` library.

The same texts give the same file, byte for byte. `<|bos|>` and `<|eos|>` have the ids 0 and 1. The 256 bytes follow, so any text can be
encoded without loss. Text is split into words as in Qwen: each digit is a word, and line breaks are separate from other words.
"""

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from argosy.core.errors import BadInput
from argosy.data.tokenizers import Tokenizer
from argosy.data.tokenizers.config import TokenizerConfig
from argosy.data.tokenizers.fast import FastTokenizer
from argosy.data.tokenizers.rules import QWEN2

BOS, EOS = "<|bos|>", "<|eos|>"
LEAST = 256 + 2  # the bytes and both special tokens
# The largest number of characters in a token, because a line of dashes should not become a token.
LONGEST = 24


def train(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Trains a tokenizer of `vocab` tokens, or fewer, if no further pair of tokens occurs twice in the texts.

    BPE is by Sennrich et al., arXiv 1508.07909; on bytes, by Radford et al., Language Models are Unsupervised Multitask Learners.

    Raises:
        BadInput: `vocab` is less than 258, or there is no text.
    """
    if vocab < LEAST:
        raise BadInput(
            f"a vocabulary of {vocab} tokens", where="256 bytes, <|bos|> and <|eos|>", hint=f"at least {LEAST}"
        )
    texts = iter(texts)
    first = next((text for text in texts if text), None)
    if first is None:
        raise BadInput("no text to train a tokenizer on")
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN2), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, min_frequency=2, special_tokens=[BOS, EOS], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), max_token_length=LONGEST,
    )  # fmt: skip
    library.train_from_iterator(chain([first], texts), trainer)
    config = TokenizerConfig({"bos_token": BOS, "eos_token": EOS}, adds_bos=False)
    return FastTokenizer(library.to_str(pretty=False), config, Path("tokenizer.json"))
