"""Every setting's resume rule: a marked field may change, any other is refused by its name."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from argosy.checkpoint.resume import differences, may_change
from argosy.core.settings import dump, flatten
from argosy.core.settings.schema import Settings, shape_of
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run

MAY_CHANGE = re.compile(
    r"dir|steps|track|execution\.(microbatches|gather|offload|compiler_options)"
    r"|(mesh|checkpoint|eval|guard|stragglers|log|sample|profile)\..*|data\.(cache|prefetch|epochs)"
)  # docs/guides/resume.md


@pytest.fixture(scope="module")
def run() -> Run:
    return compose(Run, "tiny", []).value


def change_key(tree: Any, key: str, value: Any) -> Any:
    """The tree with one key changed and nothing validated."""
    name, _, rest = key.partition(".")
    return tree.model_copy(update={name: change_key(getattr(tree, name), rest, value) if rest else value})


def fields(tree: Settings, prefix: str = "") -> Iterator[str]:
    for name, info in type(tree).model_fields.items():
        value, kind = getattr(tree, name), shape_of(info)
        if isinstance(value, Settings):
            if kind.kind == "choice":
                for option in kind.of.registry:
                    cls = kind.of.pick(option)
                    if isinstance(value, cls):
                        yield from fields(value, f"{prefix}{name}.")
            else:
                yield from fields(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_field_resumes_when_changed_or_is_refused_by_name(run: Run):
    stored, seen = dump(run), 0
    for key in fields(run):
        refused_changes = differences(stored, change_key(run, key, "another value"))
        names = [name for name, _, _ in refused_changes]
        assert names == ([] if MAY_CHANGE.fullmatch(key) else [key]), key
        seen += 1
    assert seen > 60
    assert differences(stored, run) == []


def test_the_marks_are_those_that_the_documentation_lists(run: Run):
    for key in flatten(run):
        assert may_change(run, key) == bool(MAY_CHANGE.fullmatch(key)), key


def test_another_choice_is_refused_by_its_tag_and_its_keys(run: Run):
    other = compose(Run, "tiny", ["optimizer=lion"]).value
    assert "optimizer.name" in [key for key, _, _ in differences(dump(run), other)]
    more = compose(Run, "tiny", ["schedule=wsd"]).value
    assert "schedule.name" in [key for key, _, _ in differences(dump(run), more)]


def test_a_setting_newer_than_the_checkpoint_counts_as_its_default(run: Run):
    stored = dump(run)
    del stored["accumulate"]
    del stored["data"]["packing"]
    assert differences(stored, run) == []
    assert [key for key, _, _ in differences(stored, change_key(run, "accumulate", 2))] == ["accumulate"]


def test_a_setting_that_is_gone_is_named(run: Run):
    stored = dump(run) | {"of_old": 3}
    assert differences(stored, run) == [("of_old", 3, None)]
