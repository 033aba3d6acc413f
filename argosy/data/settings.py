"""The settings of data. They do not depend on the model; its vocabulary is passed when a pipeline is built."""

from typing import Annotated, Literal

from pydantic import Field

from argosy.core.settings import Settings
from argosy.core.settings.schema import Also, BelongsTo, MayChange

MADE_WITH = ("tokenizer", "held_out", "max_bytes", "documents", "invalid", "format", "columns", "bos", "special", "learn",
             "template")  # fmt: skip
"""What decides the tokens of a prepared corpus. A run on such a folder may repeat these settings, but not change them."""


"""What an encoder is made with, beside its tokenizer."""


class DataSettings(Settings):
    """The data of a run. `max_bytes`, `documents`, `invalid`, `format` and `columns` describe how one source is read, so changing
    `source` discards what earlier layers (a recipe) set for them. `held_out`, a share, applies to any source."""

    source: Annotated[
        str,
        Also(
            "dataset",
            "datasets",
            "dataset_name",
            "dataset_path",
            "train_file",
            "training.dataset",
            "hf_path",
            "dataset_type",
            "data_path",
            "data_dir",
            "train_data",
            "train_files",
        ),
    ] = "stdlib"
    """Where the data comes from: a text, JSONL or JSON file, a folder or glob of such files, a folder written by `argosy data prepare`,
    or a name: stdlib, docstrings, synthetic. `NAME:ARGUMENT` chooses the reader, as in `text:server.log`."""

    tokenizer: Annotated[
        str,
        Also("tokenizer_path", "tokenizer_name", "hf_assets_path", "tokenizer_name_or_path", "model.tokenizer_path"),
    ] = "byte"
    """`byte`, or a tokenizer file, Hub folder, run directory or GGUF file. A prepared corpus has its own, which is used
    unless this is set."""

    sequence: Annotated[
        int,
        Also(
            "seq_length",
            "max_seq_len",
            "max_length",
            "training.seq_len",
            "context_length",
            "n_ctx",
            "block_size",
            "seq_len",
            "max_seq_length",
            "sequence_len",
            "max_target_length",
        ),
    ] = Field(default=256, gt=0)
    """Length of a row in tokens, at most the model's context."""

    batch: Annotated[
        int,
        Also(
            "per_device_batch_size",
            "micro_batch_size",
            "device_batch_size",
            "train_batch_size",
            "local_batch_size",
            "training.local_batch_size",
            "batch_size",
            "global_batch_size",
            "per_device_train_batch_size",
            note="it is the whole batch, over all devices and before accumulation splits it: per device x devices x accumulation",
        ),
        Also("total_batch_size", note="it counts rows: tokens / data.sequence"),
    ] = Field(default=8, gt=0)
    """Rows of an update, over all devices and processes, before `accumulate` splits them."""

    packing: Annotated[
        Literal["split", "fit", "alone"] | None, Also("sample_packing", "group_by_length", "pad_to_sequence_len")
    ] = None
    """How documents become rows. split: joined to one stream and cut every `sequence` tokens, without padding. fit: packed into
    rows by best fit, so that only documents longer than a row are cut (`too_long`). alone: one document a row, so that `batch` counts
    conversations, or sequences of pairs; the rest of the row is padding. None: split for text; fit for conversations, since the rest
    of one in another row would lack its prompt; alone for pairs, labeled answers and steps."""

    too_long: Annotated[
        Literal["continue", "cut", "cut_prompt", "drop", "error"] | None,
        Also("excess_length_strategy", "truncation_mode", "truncation"),
    ] = None
    """What happens to a document longer than a row, where documents stay whole. continue: the rest goes into further rows; cut: the
    rest is left out; cut_prompt: of pairs and labeled answers the beginning of the prompt is left out, as much for both answers, and
    the whole record where an answer leaves no room for any of the prompt; drop: all of it is left out, of a pair both answers; error:
    the run ends before its first step. What is cut or left out is counted. None: continue for text, cut for conversations, drop for
    pairs and the like, since an answer without its end is another answer."""

    shuffle: Annotated[bool, Also("enable_data_shuffling", "shuffle_data")] = True
    """Shuffles the rows of each epoch differently. Off: rows come in the order of the source."""

    seed: Annotated[int | None, Also("data_seed", "data_shuffle_seed", "shuffle_seed")] = Field(
        default=None, ge=0, lt=2**32
    )
    """Random seed of the row order and of synthetic tokens. None: the run's seed."""

    epochs: Annotated[float | None, MayChange(), Also("max_epochs", "num_epochs", "num_train_epochs", "total_epochs")] = Field(
        default=None, gt=0
    )
    """Passes over the rows, after which the run ends even if it has steps left; the last batch is complete. With `online`,
    passes are rounded up. None: as many as the steps take."""

    held_out: Annotated[float, Also("val_set_size", "validation_split", "val_split", "eval_split")] = Field(
        default=0.01, ge=0, lt=1
    )
    """Share of the corpus kept for evaluation and never trained on. 0: no evaluation."""

    max_bytes: Annotated[int | None, BelongsTo("source"), Also("max_train_samples", "max_samples")] = Field(
        default=None, gt=0
    )
    """The most bytes of text to read, in the order of the source. None: all of it."""

    documents: Annotated[Literal["whole", "paragraphs"], BelongsTo("source")] = "whole"
    """How text files are split. whole: one document per file; paragraphs: one document per paragraph between blank lines."""

    invalid: Annotated[Literal["error", "replace"], BelongsTo("source")] = "error"
    """What to do with bytes that are not UTF-8. error: report their position; replace: read them as U+FFFD."""

    format: Annotated[
        Literal["auto", "text", "completion", "messages", "alpaca", "sharegpt", "preference", "kto", "stepwise", "prompt"],
        BelongsTo("source"),
        Also("dataset_format"),
    ] = "auto"
    """What the records of a JSONL file are. text: documents; completion: `prompt` and `completion`; messages: OpenAI's; alpaca:
    `instruction`, `input`, `output`; sharegpt: `conversations`; preference: `chosen` and `rejected`; kto: `prompt`, `completion`
    and `label`; stepwise: `prompt`, `completions` and `labels`; prompt: `prompt`, with any other columns for rewards. auto: what the
    first record is, or `prompt` for reinforcement learning. Any other record is an error."""

    columns: Annotated[
        dict[str, str], BelongsTo("source"), Also("field_messages", "dataset_text_field", "columns_mapping")
    ] = Field(default_factory=dict)
    """Names of the columns of a JSONL file that differ from the format's: `data.columns.messages=dialog` reads messages from the
    column `dialog`. `role`, `content`, `from` and `value` rename what a message holds."""

    learn: Annotated[
        Literal["answers", "all"],
        Also("assistant_only_loss", "completion_only_loss", "roles_to_train", note="answers, the default, is that"),
        Also("train_on_inputs", "train_on_prompt", note="data.learn=all is that; the default learns answers only"),
    ] = "answers"
    """Which tokens of conversations count in the loss. answers: what the assistant says with the token that ends its turn, and
    completions; conversations without any are left out and counted. all: every token. Text is learned whole."""

    template: Annotated[str | None, Also("chat_template", "chat_template_path", "chat_template_jinja")] = None
    """The chat template of conversations: the name of one of the tokenizer's; a published one (chatml, gemma, llama3, mistral or
    zephyr); a Jinja file; or `alpaca` (Stanford's text, for Alpaca records). A published one or a file becomes the tokenizer's own,
    kept with the run. None: the tokenizer's; Alpaca records without one get Stanford's text."""

    bos: Annotated[bool | None, Also("add_bos", "add_bos_token")] = None
    """Puts the tokenizer's beginning-of-sequence token in front of every document that does not begin with it. None: as the
    tokenizer does for a prompt, so that training and generation agree (Llama and Gemma: yes, GPT-2 and Qwen: no); a chat template
    writes its own."""

    special: bool = False
    """Encodes the names of special tokens in a text (`<|im_start|>`) as those tokens, for text that was rendered by a chat template
    elsewhere. Off: they are ordinary text, and a warning counts the documents that contain some."""

    online: Annotated[bool, Also("streaming")] = False
    """Tokenizes and packs while training, and writes nothing. A run then resumes only with the same number of processes,
    and rows are shuffled within windows of about 1 MiB of text instead of over the whole corpus."""

    prefetch: Annotated[
        int, MayChange(), Also("prefetch_factor", "dataloader_prefetch_factor", "num_workers", "dataloader_num_workers")
    ] = Field(default=2, ge=0)
    """Number of batches prepared ahead of the step that uses them."""

    cache: Annotated[str | None, MayChange(), Also("dataset_prepared_path", "cache_dir")] = None
    """Folder where tokenized corpora are cached. None: `argosy/corpora` under $XDG_CACHE_HOME, or under ~/.cache."""
