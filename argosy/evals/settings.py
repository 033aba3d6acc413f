"""Settings of `argosy eval`. This module does not import jax, so that mistakes are reported before the slow import."""

from typing import ClassVar

from pydantic import Field

from argosy.adapt.methods.settings import AT_LOAD
from argosy.core.settings import Settings

# The task of models that draw images.
IMAGES = "images"


class EvalSettings(Settings):
    """The tasks of an evaluation, their files, and how they are scored."""

    elsewhere: ClassVar = AT_LOAD

    tasks: str | None = None
    """Tasks, separated by commas: `perplexity,arc_easy,bbh`. A prefix such as `bbh` or `arc` names all tasks that start with it. None:
    the tasks in the file of `data`. `images` evaluates a run or a diffusers folder that draws images.
    """
    data: str | None = None
    """A folder of task files, or one file: JSONL in a layout of the guide, or any text for perplexity."""
    text: str | None = None
    """The text for perplexity, where `data` is a folder of other tasks."""
    limit: int | None = Field(None, gt=0)
    """The first N rows of each task; of a text, the first N windows; of images, how many are drawn. None: all, or 1,000 images."""
    shots: int | None = Field(None, ge=0)
    """Solved examples before each question, never the question itself. None: the number of the task, 0 for most."""
    seed: int = Field(0, ge=0)
    """Random seed of the choice of examples."""
    steps: int | None = Field(None, gt=0)
    """Images: steps from noise to image. None: those of the run."""
    guidance: float | None = Field(None, ge=0)
    """Images: scale of classifier-free guidance, 1 for none. None: that of the run."""
    clip: str | None = None
    """Images: a CLIP, by which drawn images are compared with what they were drawn from (CLIP score): a folder of transformers'
    `CLIPModel`, or hf:OWNER/NAME. None: they are not."""
    chat: bool = False
    """Sends each question as a user's message, rendered with the model's chat template."""
    window: int | None = Field(None, gt=0)
    """Perplexity: tokens of a window. None: 2048, or the model's context if that is shorter."""
    stride: int | None = Field(None, gt=0)
    """Perplexity: tokens from one window to the next. Smaller than the window, each token sees more of the text before it, and windows
    cost window/stride times as much. None: the window, so each token is read once."""
    batch: int = Field(2048, gt=0)
    """Tokens per forward pass, padding included, for log-probabilities and vectors. A larger value uses a larger device better, and
    needs more memory for activations; on two CPU cores 1024 to 2048 is the fastest.
    """
    query_prompt: str | None = None
    """Retrieval: what is put before each query, such as `query: `; "" for nothing. None: the folder's prompt `query`, or its default.
    """
    document_prompt: str | None = None
    """Retrieval: what is put before each document. None: the folder's prompt `document`, `passage` or `corpus`, or its default."""
    max_tokens: int | None = Field(None, gt=0)
    """Limit of a generated completion in tokens. None: the task's own limit."""
    dtype: str | None = None
    """Type of weights and activations, float32 or bfloat16. None: float32 on CPUs, bfloat16 elsewhere."""
    quantization: str | None = None
    """A preset of `argosy quantize`, such as w8 or w4, or a YAML file of rules, by which weights are quantized as they are read. None:
    they stay as they are stored."""
    adapter: str | None = None
    """A folder of low-rank adapters in the PEFT library's format, to apply to the model."""
    rows: str | None = None
    """A file to write, with one JSON line per row: its metrics, and the generated completion."""
    against: str | None = None
    """A file that `rows` wrote for another model: adds the difference to it, row by row, with its 95 % interval."""
