"""The settings of data. They do not depend on the model, whose vocabulary is passed when a pipeline is built."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from argosy.core.errors import BadInput
from argosy.core.settings import Settings
from argosy.core.settings.schema import Also, BelongsTo, MayChange
from argosy.data.images.settings import ImageSettings
from argosy.data.mixtures.settings import MixedSource, RecordFormat, mixed_source
from argosy.data.sources.steps import RecordSteps

MADE_WITH = ("tokenizer", "held_out", "max_bytes", "documents", "invalid", "encoding", "format", "columns", "labels", "negatives",
             "prompts", "bos", "special", "learn", "template", "map", "filter", "deduplicate")  # fmt: skip
"""The settings that decide the tokens of a prepared corpus. A run on such a folder may repeat these settings, but not change them."""


class DataSettings(Settings):
    """The data of a run. `max_bytes`, `documents`, `invalid`, `encoding`, `format` and `columns` describe how one source is read, so
    changing `source` discards what earlier layers (a recipe) set for them. `held_out`, a share, applies to any source."""

    source: Annotated[
        str | list[MixedSource],
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
            "grain_train_files",
            "train_data_path",
            "datasets.path",
        ),
    ] = "stdlib"
    """Where the data comes from: a file (text, JSON lines, CSV, Parquet, Arrow, TFRecord, ArrayRecord, Bagz, tar, token ids,
    `.npz`), a folder, glob or range (`a-{000..010}.tar`) of such files, a folder of MDS shards, an address (`s3://`, `gs://`,
    `https://`), a folder written by `argosy data prepare`, or a name: stdlib, docstrings, synthetic. What a file holds chooses its
    reader; `NAME:ARGUMENT` names it, as in `text:server.log`. A list is a mixture, of paths or of groups:
    `[{path: a.jsonl, weight: 3}, {path: b.parquet, weight: 1}]`."""

    weight_unit: Literal["rows", "tokens"] = "rows"
    """What the weights of a mixture count. rows: of `sequence` tokens, padding included; tokens: those that are predicted."""

    mixture_temperature: float | None = Field(default=None, gt=0)
    """Makes the weights of a mixture from sizes: size ** (1 / temperature). 1: in proportion to their sizes; larger: more alike. None:
    the weights that sources have."""

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
    """Rows per update, over all devices and processes, before `accumulate` splits them."""

    packing: Annotated[
        Literal["split", "fit", "alone"] | None, Also("sample_packing", "group_by_length", "pad_to_sequence_len")
    ] = None
    """How documents become rows. split: joined to one stream and cut every `sequence` tokens, without padding. fit: packed into rows by
    best fit, so that only documents longer than a row are cut (`too_long`). alone: one document per row, so that `batch` counts
    conversations, or sequences of pairs; the rest of the row is padding. None: split for text; fit for conversations, since a part in
    another row would lack its prompt; alone for pairs, labeled completions and steps.
    """

    too_long: Annotated[
        Literal["continue", "cut", "cut_prompt", "drop", "error"] | None,
        Also("excess_length_strategy", "truncation_mode", "truncation"),
    ] = None
    """What happens to a document longer than a row, unless packing is split. continue: the rest goes into further rows; cut: the end is
    removed; cut_prompt: for pairs and labeled completions, the beginning of the prompt is removed, by the same amount for both
    completions, or the whole record if a completion leaves no room for a prompt; drop: the whole document is removed, for a pair both
    completions; error: the run ends before its first step. Cut and dropped documents are counted. None: continue for text, cut for
    conversations, drop for pairs and the like, since a completion without its end is another completion.
    """

    shuffle: Annotated[bool, Also("enable_data_shuffling", "shuffle_data")] = True
    """Shuffles the rows of each epoch differently. Off: rows come in the order of the source."""

    shuffle_block: Annotated[int | None, Also("io_block_size")] = Field(default=None, gt=0)
    """Rows of a block, for sources where reading each row from another place is dear, such as disks of a network: blocks are shuffled,
    then the rows of every `shuffle_window` blocks. None: all rows are shuffled."""

    shuffle_window: Annotated[
        int,
        Also("window_blocks"),
        Also("shuffle_buffer_size", "shuffle_buffer", note="it counts blocks of data.shuffle_block rows"),
    ] = Field(default=64, gt=0)
    """Number of blocks whose rows are shuffled together, where `shuffle_block` is set."""

    seed: Annotated[int | None, Also("data_seed", "data_shuffle_seed", "shuffle_seed")] = Field(
        default=None, ge=0, lt=2**32
    )
    """Random seed of the row order and of synthetic tokens. None: the run's seed."""

    epochs: Annotated[float | None, MayChange(), Also("max_epochs", "num_epochs", "num_train_epochs", "total_epochs")] = Field(
        default=None, gt=0
    )
    """Passes over the rows, after which the run ends even if it has steps left; the last batch is complete. With `online`, passes are
    rounded up. None: as many as `steps` needs.
    """

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
    """What to do with bytes that are no text in the file's encoding. error: report their position; replace: read them as U+FFFD."""

    encoding: Annotated[str, BelongsTo("source")] = "utf-8"
    """The encoding of text, JSON lines and CSV files, by a name that Python knows: utf-8, utf-16, latin-1, cp1252, shift_jis, ..."""

    format: Annotated[
        RecordFormat,
        BelongsTo("source"),
        Also("dataset_format"),
    ] = "auto"
    """The format of the records of a file. text: documents; completion: `prompt` and `completion`; messages: OpenAI's; alpaca:
    `instruction`, `input`, `output`; sharegpt: `conversations`; preference: `chosen` and `rejected`; kto: `prompt`, `completion` and
    `label`; stepwise: `prompt`, `completions` and `labels`; prompt: `prompt`, with any other columns for rewards; classification:
    `text` and `label`, with `text_pair` for two texts; pair: `anchor` and `positive`; triplet, rerank: and `negative`;
    negatives: and a list `negatives`, or columns `negative_1`, `negative_2` ...; similarity: `sentence1`, `sentence2` and `score`.
    auto: the format of the first record; prompt, classification, similarity and rerank if the objective trains on them. A record of
    another format is an error.
    """

    columns: Annotated[
        dict[str, str],
        BelongsTo("source"),
        Also("field_messages", "dataset_text_field", "columns_mapping"),
        Also("train_data_columns", "eval_data_columns", "text_column", "text_key", note="data.columns.text=NAME"),
        Also("token_weights", "loss_weights", "sample_weight", note="data.columns.weights=COLUMN reads them"),
    ] = Field(default_factory=dict)
    """Names of the columns of a file that differ from the format's: `data.columns.messages=dialog` reads messages from the
    column `dialog`. `role`, `content`, `from` and `value` rename what a message holds. `data.columns.weights=NAME` weighs the loss by
    the column NAME: a number a record, or a list of one a message or a token."""

    map: Annotated[str | None, BelongsTo("source"), Also("formatting_func", "preprocessing_function")] = None
    """A function of yours that every record passes first, as FILE.py:FUNCTION: it gets a mapping of columns, and returns one, a list of
    them, or None for no record. Its file belongs to the data: a run does not resume with another."""

    filter: Annotated[str | None, BelongsTo("source")] = None
    """A function of yours, as FILE.py:FUNCTION, that gets a record's columns, after `map`, and returns whether to keep it."""

    deduplicate: Annotated[Literal["no", "exact", "minhash"], BelongsTo("source"), Also("dedup", "dedupe")] = "no"
    """Leaves out documents that occur before. exact: the same text; minhash: nearly the same, by 5-grams of words: two documents whose
    sets of them overlap by 85 % are found with 99 % probability, by 50 % with 5 %. Both keep hashes of all documents in memory."""

    labels: Annotated[list[str], BelongsTo("source"), Also("label_names", "class_names")] = Field(default_factory=list)
    """The classes of `classification` records, in the order of the model's scores. Empty: the classes of the file, sorted by name
    (LABEL_0, LABEL_1 ... for integers); a file of decimal numbers has no classes.
    """

    negatives: Annotated[int, BelongsTo("source"), Also("num_negatives")] = Field(default=1, gt=0)
    """Negatives of a record of `negatives`. Further ones are left out and counted; where a record has fewer, their places are empty.
    A run takes `objective.negatives`.
    """

    prompts: Annotated[dict[Literal["anchor", "positive", "negative", "sentence1", "sentence2"], str], BelongsTo("source")] = Field(
        default_factory=dict
    )
    """What is put before the texts of a column, for sentence encoders: `data.prompts.anchor='query: '`. `negative` is before all
    negatives. Empty: the default prompt of the model's folder, if it has one."""

    image: Annotated[ImageSettings, BelongsTo("source")] = ImageSettings()
    """How images are prepared, for models that read images."""

    learn: Annotated[
        Literal["answers", "all"],
        Also("assistant_only_loss", "completion_only_loss", "roles_to_train", note="answers, the default, is that"),
        Also("train_on_inputs", "train_on_prompt", note="data.learn=all is that; the default learns answers only"),
    ] = "answers"
    """The tokens of conversations that count in the loss. answers: the assistant's turns with their end tokens, and completions;
    conversations without any are left out and counted. all: every token. Texts are always learned whole.
    """

    template: Annotated[str | None, Also("chat_template", "chat_template_path", "chat_template_jinja")] = None
    """The chat template of conversations: the name of one of the tokenizer's; a published one (chatml, gemma, llama3, mistral or
    zephyr); a Jinja file; or `alpaca` (Stanford's text, for Alpaca records). A published template or a file replaces the tokenizer's,
    and is stored with the run. None: the tokenizer's; Alpaca records without one get Stanford's text.
    """

    bos: Annotated[bool | None, Also("add_bos", "add_bos_token")] = None
    """Adds the tokenizer's beginning-of-sequence token before every document that lacks it. None: as the tokenizer does for a prompt,
    so that training and generation agree (Llama and Gemma: yes, GPT-2 and Qwen: no). Chat templates write their own.
    """

    special: bool = False
    """Encodes the names of special tokens in a text (`<|im_start|>`) as those tokens, for text that was rendered by a chat template
    elsewhere. Off: they are ordinary text, and a warning counts the documents that contain some."""

    online: Annotated[bool, Also("streaming", "dataset_streaming")] = False
    """Tokenizes and packs while training, and writes nothing. A run then resumes only with the same number of processes,
    and rows are shuffled within windows of about 1 MiB of text instead of over the whole corpus."""

    prefetch: Annotated[
        int, MayChange(), Also("prefetch_factor", "dataloader_prefetch_factor", "num_workers", "dataloader_num_workers")
    ] = Field(default=2, ge=0)
    """Number of batches prepared ahead of the step that uses them."""

    cache: Annotated[str | None, MayChange(), Also("dataset_prepared_path", "cache_dir")] = None
    """Folder where tokenized corpora are cached. None: `argosy/corpora` under $XDG_CACHE_HOME, or under ~/.cache."""

    @field_validator("source", mode="before")
    @classmethod
    def _sources(cls, value: Any) -> Any:
        """Reads the sources of a mixture one by one, so that a mistake is named with its source and key."""
        return [mixed_source(source, number) for number, source in enumerate(value, 1)] if isinstance(value, list | tuple) else value

    @property
    def steps(self) -> RecordSteps:
        """The functions of the user that are applied to records before they are read."""
        return RecordSteps(self.map, self.filter)

    @property
    def source_name(self) -> str:
        """The source as one line. The paths of a mixture are separated by commas."""
        return self.source if isinstance(self.source, str) else ", ".join(mixed.path for mixed in self.source)

    @property
    def single_source(self) -> str:
        """The source, for code that reads only one source.

        Raises:
            BadInput: the source is a mixture.
        """
        if isinstance(self.source, str):
            return self.source
        problem = "a mixture of sources is for training on rows of data, and this reads one source"
        raise BadInput(problem, where=f"data.source={self.source_name}", hint="name one source")
