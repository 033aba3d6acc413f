"""`ClassPrompts`: the prompts of a class-conditional denoiser are the names or numbers of classes."""

from collections.abc import Sequence

import jax.numpy as jnp

from argosy.core.errors import BadInput, nearest
from argosy.models.diffusion.base import Conditions


class ClassPrompts:
    """Converts prompts to class labels.

    Args:
        classes: number of classes, without the null class.
        names: the names of the classes. Prompts may also be their numbers.
    """

    def __init__(self, classes: int, names: Sequence[str] = ()):
        self.classes = classes
        self._ids = {str(i): i for i in range(classes)} | {name: i for i, name in enumerate(names)}

    def encode(self, texts: Sequence[str]) -> Conditions:
        """Returns the class label of each text. An empty text is the null class.

        Raises:
            BadInput: a text is no class.
        """
        for text in texts:
            if text.strip() not in self._ids and text:
                hint = nearest(text.strip(), self._ids) if len(self._ids) > self.classes else f"0 to {self.classes - 1}"
                raise BadInput(f"the prompt {text!r} is no class of this model, which draws {self.classes} classes", hint=hint)
        # An empty prompt, as a negative one may be, is the null class.
        return Conditions(labels=jnp.asarray([self._ids.get(text.strip(), self.classes) for text in texts], jnp.int32))

    def null(self, count: int) -> Conditions:
        return Conditions(labels=jnp.full(count, self.classes, jnp.int32))
