"""Which batches a run takes when some are left out."""

from typing import Any

from argosy.data.batch import Batches
from argosy.data.numbered import Numbered, merge_windows


class Counting(Batches):
    """Batch n is n."""

    fingerprint, tokens_per_batch, bytes_per_token = {}, 1, None

    def __init__(self) -> None:
        self.handed = 0

    def __next__(self) -> Any:
        self.handed += 1
        return self.handed

    def position(self) -> dict[str, Any]:
        return {"handed": self.handed}

    def seek(self, position: dict[str, Any]) -> None:
        self.handed = position.get("handed", 0)

    def close(self) -> None: ...


def take_batches(windows: list[tuple[int, int]], steps: int) -> list[int]:
    batches = Numbered(Counting(), windows)
    batches.begin(0)
    return [next(batches) for _ in range(steps)]  # pyright: ignore[reportReturnType]


def test_windows_are_passed_over():
    assert take_batches([], 3) == [1, 2, 3]
    assert take_batches([(3, 4), (6, 6)], 5) == [1, 2, 5, 7, 8]
    assert take_batches([(1, 2), (3, 3), (2, 5)], 2) == [6, 7]


def test_windows_that_overlap_or_touch_are_one():
    assert merge_windows([(7, 9), (1, 3), (2, 4), (5, 5)]) == [(1, 5), (7, 9)]


def test_every_step_resumes_with_the_batches_it_would_have_had():
    """The position that a checkpoint holds is that before the windows that follow it."""
    windows, whole = [(3, 4), (6, 6)], [1, 2, 5, 7, 8, 9]
    for steps in range(6):
        first = Numbered(Counting(), windows)
        first.begin(0)
        for _ in range(steps):
            next(first)
        again = Numbered(Counting(), windows)
        again.restore(first.state())
        again.begin(steps)
        assert again.number == first.number
        assert [next(again) for _ in range(6 - steps)] == whole[steps:]


def test_what_a_step_took_is_known_for_the_last_steps():
    batches = Numbered(Counting(), [(2, 3)])
    batches.begin(0)
    for _ in range(3):
        next(batches)
    number, before = batches.of_step(2)
    assert before is not None
    assert (number, before.state()) == (4, {"position": {"handed": 1}, "fingerprint": {}})
    assert batches.of_step(3)[0] == 5
