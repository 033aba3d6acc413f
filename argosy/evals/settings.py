"""Settings of `argosy eval`. No jax here: mistakes are answered before it is imported."""

from pydantic import Field

from argosy.core.settings import Settings


class EvalSettings(Settings):
    """The tasks of an evaluation, their files, and how they are scored."""

    tasks: str | None = None
    """Tasks, separated by commas: `perplexity,arc_easy,bbh`. A beginning such as `bbh` or `arc` names all tasks that start with it.
    None: what the file of `data` holds."""
    data: str | None = None
    """A folder of task files, or one file: JSONL in a layout of the guide, or any text for perplexity."""
    text: str | None = None
    """The text for perplexity, where `data` is a folder of other tasks."""
    limit: int | None = Field(None, gt=0)
    """The first N rows of each task; of a text, the first N windows. None: all."""
    shots: int | None = Field(None, ge=0)
    """Solved examples before each question, never the question itself. None: the number of the task, 0 for most."""
    seed: int = Field(0, ge=0)
    """Random seed of the choice of examples."""
    chat: bool = False
    """Sends each question as a user's message, rendered with the model's chat template."""
    window: int | None = Field(None, gt=0)
    """Perplexity: tokens of a window. None: 2048, or the model's context if that is shorter."""
    stride: int | None = Field(None, gt=0)
    """Perplexity: tokens from one window to the next. Smaller than the window, each token sees more of the text before it, and windows
    cost window/stride times as much. None: the window, so each token is read once."""
    batch: int = Field(2048, gt=0)
    """Tokens of one forward pass, padding included, where log-probabilities are computed. More fills a larger device, and needs more
    memory for activations; on two CPU cores 1024 to 2048 is the fastest."""
    max_tokens: int | None = Field(None, gt=0)
    """Most tokens of a generated answer. None: the number of the task."""
    dtype: str | None = None
    """Type of weights and activations, float32 or bfloat16. None: float32 on CPUs, bfloat16 elsewhere."""
    quantization: str | None = None
    """A preset of `argosy quantize`, such as w8 or w4, or a YAML file of rules, by which weights are quantized as they are read. None:
    they stay as they are stored."""
    adapter: str | None = None
    """A folder of low-rank adapters in the PEFT library's format, to apply to the model."""
    rows: str | None = None
    """A file to write, with a JSON line for each row: its numbers, and the answer that was generated."""
    against: str | None = None
    """A file that `rows` wrote for another model: adds the difference to it, row by row, with its 95 % interval."""
