"""Rewards by reward models: each scores the conversation of a prompt and its completion, in the trainer's process."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.errors import BadInput, UserError
from argosy.rl.rewards.settings import RewardSettings


class ModelReward:
    """A reward model: a language model with a head of one score (`LM.rewards`)."""

    def __init__(self, lm: Any):
        self.lm = lm

    @classmethod
    def opened(cls, folder: Path, reward: RewardSettings, load: Callable[[Path], Any] | None) -> "ModelReward":
        """Loads the reward model of a folder.

        Args:
            load: loads a language model. The default is `argosy.infer.load.load_lm`.

        Raises:
            BadInput, Damaged: the folder is no model, or the model's head does not give one score.
        """
        if load is None:
            from argosy.infer.load import load_lm as load
        lm = load(folder)
        scores = getattr(lm.config, "scored", 0)
        if scores != 1:
            problem = f"gives {scores} scores, not one" if scores else "has no head of scores"
            raise BadInput(f"the reward model `{reward.of}` {problem}", hint="`argosy train reward model=FOLDER` trains one")
        return cls(lm)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> tuple[np.ndarray, list[tuple[int, str, str]]]:
        """Scores completions. Returns the scores [n], and the failures as (row, kind, message). A score is NaN where a conversation
        cannot be scored, for example because it is longer than the model's context.
        """
        from argosy.infer.scores import conversation_ids

        scores, failed = np.full(len(completions), np.nan, np.float32), list[tuple[int, str, str]]()
        rows: dict[int, list[int]] = {}
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            try:
                ids = conversation_ids(self.lm, whole_conversation(prompt, completion))
                if not ids:
                    raise BadInput("an empty text has no score")
                self.lm.check_ids(ids, len(ids))
                rows[i] = ids
            except UserError as error:
                failed.append((i, "raised", f"completion {i}: {error.what}"))
        if rows:
            scores[list(rows)] = self.lm.rewards(list(rows.values()))
        for i in rows:
            if not np.isfinite(scores[i]):
                failed.append((i, "not finite", f"the score of completion {i} is {scores[i]}"))
                scores[i] = np.nan
        return scores, failed


def whole_conversation(prompt: Any, completion: Any) -> Any:
    """Joins a prompt and its completion to one text, or to one list of messages if the prompt is a list of messages.

    Raises:
        BadInput: the prompt is a text and the completion a list of messages.
    """
    if isinstance(prompt, str):
        if not isinstance(completion, str):
            raise BadInput("the prompt is a text and its completion a list of messages", hint="give both as texts or as messages")
        return prompt + completion
    messages: list[Mapping[str, Any]] = list(prompt)
    return messages + ([{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion))
