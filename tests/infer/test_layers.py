"""How layers are put together in programs."""

import pytest

from argosy.infer.forward.layers import equal_runs


@pytest.mark.parametrize(
    ("kinds", "most", "sizes"),
    [
        ("a" * 30, 6, [6] * 5),
        ("a" * 28, 6, [4] * 7),
        ("a" * 7, 6, [1] * 7),
        ("a" * 5, 1, [1] * 5),
        ("aaab" * 6, 6, [4] * 6),
        ("aaab" * 6, 8, [8] * 3),
        ("aaab" * 6, 3, [1] * 24),
        ("aaaaab" * 4 + "aa", 6, [6] * 4 + [2]),
        ("a" + "b" * 12, 6, [1, 6, 6]),
        ("", 6, []),
    ],
)
def test_layers_run_together_where_the_plan_repeats(kinds: str, most: int, sizes: list[int]):
    runs = equal_runs(kinds, most)
    assert [end - start for start, end in runs] == sizes
    assert [start for start, _ in runs] == [sum(sizes[:i]) for i in range(len(sizes))]
