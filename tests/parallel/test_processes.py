"""What processes tell each other, over a stand-in for the coordination service of jax, one process after the other."""

import json
from collections import Counter

import pytest

from argosy.parallel import processes


class Service:
    """Keys and values, as `jax.distributed` has them."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def blocking_key_value_get(self, key: str, _: int) -> str:
        return self.values[key]

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

    def key_value_delete(self, key: str) -> None:
        del self.values[key]


@pytest.fixture
def act(monkeypatch: pytest.MonkeyPatch):
    """Makes a call as one of three processes."""
    service, calls = Service(), [Counter[str]() for _ in range(3)]
    monkeypatch.setattr(processes, "_client", lambda: service)
    monkeypatch.setattr(processes, "process_count", lambda: 3)
    monkeypatch.setattr(processes, "_dropped", Counter())

    def acted(rank: int, value: object = None) -> object:
        monkeypatch.setattr(processes, "rank", lambda: rank)
        monkeypatch.setattr(processes, "_calls", calls[rank])
        return processes.broadcast("step", lambda: value)

    acted.service = service
    return acted


def test_what_all_have_read_is_removed(act):
    for step in range(50):
        assert act(0, {"step": step}) == {"step": step}
        assert act(1) == act(2) == {"step": step}
    assert len(act.service.values) <= 4, "the last value, and how far the two others are"


def test_what_one_has_not_read_stays(act):
    for step in range(5):
        act(0, step)
        act(1)
    assert [act(2) for _ in range(5)] == list(range(5))
    act(0, 5)
    values = {key: json.loads(value) for key, value in act.service.values.items()}
    assert values == {"argosy/step/6": {"value": 5}, "argosy/step/read/1": 5, "argosy/step/read/2": 5}
