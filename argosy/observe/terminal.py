"""What a run looks like while it goes on: one plain line a logged step."""

import sys
from collections.abc import Mapping
from typing import Any


class Terminal:
    """Shows a run on stderr."""

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def plan(self, facts: Mapping[str, Any]) -> None:
        self.say("  ".join(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in facts.items()))

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        self.say(f"step {step}  loss {numbers['loss']:.4f}  {numbers['tokens_per_s']:,.0f} tokens/s")

    def evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        self.say(f"step {step}  eval loss {numbers['eval_loss']:.4f}")

    def sample(self, step: int, text: str) -> None:
        self.say(f"step {step}  sample: {text}")
