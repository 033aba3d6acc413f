"""A game of plain text: find a number by asking whether it is higher or lower.

    prompt          between 1 and 9: "                a text of the data
    the model       5                                 up to the end of the line
    the environment higher                            and so on, until `tries` are used up

The number depends on the seed alone. The reward is 1 if the model finds it. Otherwise the reward is that of the best guess: below 0.5,
and larger the nearer the guess is. A turn that is no number counts as a guess and scores 0.
"""

import random
import re

from argosy.rl.environment import Turn

NUMBER = re.compile(r"\s*(-?\d{1,9})\s*")


class Guess:
    """One game, as an environment of `argosy.rl.environment`."""

    def __init__(self, low: int = 1, high: int = 9, tries: int = 3):
        self.low, self.high, self.left = low, high, tries
        self.secret, self.best = low, 0.0

    def reset(self, seed: int) -> None:
        self.secret = random.Random(seed).randint(self.low, self.high)

    def step(self, said: str) -> Turn:
        self.left -= 1
        match = NUMBER.fullmatch(said)
        guess = int(match[1]) if match else None
        counts = {"guess/numbers": float(guess is not None), "guess/right": float(guess == self.secret)}
        if guess == self.secret:
            return Turn("right\n", 1.0 - self.best, True, counts=counts)
        near = 0.0
        if guess is not None and self.low <= guess <= self.high:
            near = 0.5 * (1 - abs(guess - self.secret) / (self.high - self.low + 1))
        gained, self.best = max(near - self.best, 0.0), max(near, self.best)
        reply = "a number\n" if guess is None else "higher\n" if guess < self.secret else "lower\n"
        return Turn(reply, gained, self.left == 0, counts=counts)
