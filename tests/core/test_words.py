"""Text to values and layers, held against PyYAML, Python's own readers, and what people mean."""

import json
import subprocess
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.core.errors import BadInput, SettingsError
from argosy.core.settings.scalars import parse_number, scalar, yaml_line
from argosy.core.settings.words import SELF, words_layer, yaml_layer

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False)
    | st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)
    | st.sampled_from(["1e5", "no", "none", "010", "1:30", "2026-11-21", "25k", "=", "<<", ".5", "1_0", "~", "a: b"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab=1", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("4_096", 4096),
        ("1e5", 100_000),
        ("3e-4", 0.0003),
        ("25k", 25_000),
        ("4M", 4_000_000),
        ("1.5B", 1_500_000_000),
        ("0.1B", 100_000_000),
        ("64Ki", 65_536),
        ("-3", -3),
        ("010", 10),
        (".5", 0.5),
        ("9007199254740993", 9007199254740993),
        ("9007199254740993k", 9007199254740993000),
        ("k", None),
        ("12m", None),
        ("0x10", None),
        ("1.2.3", None),
        ("", None),
    ],
)
def test_numbers_as_people_write_them(text, meaning):
    assert parse_number(text) == meaning
    assert type(parse_number(text)) is type(meaning)


def test_a_huge_exponent_stays_cheap():
    assert parse_number("1e999999999") == float("inf")
    assert scalar("9" * 5000) == float("inf")


@pytest.mark.parametrize("text", ["true", "True", "false", "yes", "off", "null", "~", "12", "-1.5", "abc", "1.0e+5"])
def test_scalars_that_every_yaml_reader_reads_alike(text):
    assert scalar(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "meaning"), [("010", 10), ("1:30", "1:30"), ("2026-11-21", "2026-11-21"), ("1e5", 1e5), ("none", None)]
)
def test_scalars_that_yaml_1_1_misreads(text, meaning):
    assert scalar(text) == meaning
    assert yaml.safe_load(text) != meaning


@settings(derandomize=True, database=None, deadline=None)
@given(PLAIN)
def test_what_is_written_reads_back_here_and_in_pyyaml(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("yaml") / "a.yml"
    path.write_text(f"a: {yaml_line(value)}\n", encoding="utf-8")
    assert repr(yaml.safe_load(path.read_text(encoding="utf-8"))["a"]) == repr(value)
    assert repr(yaml_layer(path).values["a"]) == repr(value)
    assert "\n" not in yaml_line(value)


def test_a_file_keeps_text_and_lines(tmp_path):
    path = tmp_path / "a.yml"
    path.write_text("# first\nlang: no\ngroup:\n  id: 007\n  items: [no, 'no']\non: 1\n")
    layer = yaml_layer(path)
    assert layer.values == {"lang": False, "group": {"id": 7, "items": [False, "no"]}, "on": 1}
    assert layer.text("lang") == "no"
    assert layer.text("group.id") == "007"
    assert layer.text("group.items.1") is None  # quoted: text already
    assert layer.where("group.id") == "a.yml:4"
    assert layer.under("model").where("model.group.id") == "a.yml:4"


@pytest.mark.parametrize(
    ("content", "says", "line"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", "not YAML", "bad.yml:3"),
        ("a: 1\n\tb: 2\n", "not YAML", "bad.yml:2"),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "`b.c` is set twice", "bad.yml:4"),
        ("- 1\n- 2\n", "`key: value` lines", "bad.yml:1"),
        ("just text\n", "`key: value` lines", "bad.yml:1"),
        ("a: !!python/object/apply:os.system [ls]\n", "a YAML tag", "bad.yml:1"),
        ("a: &x\n  b: *x\n", "expand without end", "bad.yml:1"),
        ("a: 1\n---\nb: 2\n", "not YAML", "bad.yml:2"),
        ("? [1, 2]\n: 3\n", "a key that is not a name", "bad.yml:1"),
    ],
)
def test_malformed_files_name_their_line(tmp_path, content, says, line):
    path = tmp_path / "bad.yml"
    path.write_text(content)
    with pytest.raises((BadInput, SettingsError)) as caught:
        yaml_layer(path)
    text = str(caught.value)
    assert says in text
    assert line in text
    assert len(text.splitlines()) <= 5
    assert caught.value.exit_code == 2


def test_every_duplicate_is_reported(tmp_path):
    path = tmp_path / "bad.yml"
    path.write_text("a: 1\na: 2\nb: 1\nb: 2\n")
    with pytest.raises(SettingsError) as caught:
        yaml_layer(path)
    assert len(caught.value.problems) == 2


def test_missing_and_unreadable_files(tmp_path):
    (tmp_path / "tiny.yml").write_text("a: 1\n")
    with pytest.raises(BadInput, match=r"no settings file") as caught:
        yaml_layer(tmp_path / "tin.yml")
    assert caught.value.hint == f"did you mean `{tmp_path / 'tiny.yml'}`?"
    with pytest.raises(BadInput, match="cannot read"):
        yaml_layer(tmp_path)
    (tmp_path / "latin.yml").write_bytes("a: \xe9".encode("latin-1"))
    with pytest.raises(BadInput, match="UTF-8"):
        yaml_layer(tmp_path / "latin.yml")


def test_an_empty_file_says_nothing(tmp_path):
    (tmp_path / "empty.yml").write_text("# nothing\n")
    assert yaml_layer(tmp_path / "empty.yml").values == {}


@pytest.mark.parametrize("depth", [60, 100_000])
def test_nesting_has_a_limit(depth):
    code = f"from argosy.core.settings.words import words_layer; words_layer(['a=' + '[' * {depth} + ']' * {depth}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1  # an exception, where composing such nodes ends the process by a signal
    assert "nested too deeply" in done.stderr


def test_aliases_cannot_stand_for_a_billion_values(tmp_path):
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    (tmp_path / "bomb.yml").write_text("\n".join(lines))
    with pytest.raises(BadInput, match="expand without end"):
        yaml_layer(tmp_path / "bomb.yml")


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["a=1", "b.c=x"], {"a": 1, "b": {"c": "x"}}),
        (["a=[1, no, x]"], {"a": [1, False, "x"]}),
        (["a={b: 1, c: {d: 2}}", "a.c.e=3"], {"a": {"b": 1, "c": {"d": 2, "e": 3}}}),
        (["a.b=1", "a={b: 2, c: 3}"], {"a": {"b": 2, "c": 3}}),
        (["p=hello: world # x"], {"p": "hello: world # x"}),
        (["p=@file", "q=a=b", "r=''", 's="1"'], {"p": "@file", "q": "a=b", "r": "", "s": "1"}),
        (["o=muon", "o.n=6"], {"o": {SELF: "muon", "n": 6}}),
        (["o.n=6", "o=muon"], {"o": {"n": 6, SELF: "muon"}}),
        (["steps=1", "steps=2"], {"steps": 2}),
        (["a=none"], {"a": None}),
    ],
)
def test_words(words, values):
    assert words_layer(words).values == values


@pytest.mark.parametrize(
    ("word", "says", "hint"),
    [
        ("--steps=5", "unknown option `--steps`", "`steps=5`"),
        ("--dry-run", "unknown option `--dry-run`", "`dry_run=value`"),
        ("steps", "`steps` is not a setting", "`key=value`"),
        ("a.=3", "names no setting", "dots"),
        ("=3", "names no setting", "dots"),
        ("a..b=3", "names no setting", "dots"),
        ("a.b=", "`a.b=` has no value", "a.b=none"),
        ("a=[1, 2", "not YAML", None),
    ],
)
def test_words_that_are_none(word, says, hint):
    with pytest.raises(SettingsError) as caught:
        words_layer([word])
    (problem,) = caught.value.problems
    assert says in problem.what
    assert hint is None or hint in (problem.hint or "")
    assert len(str(problem).splitlines()) <= 5


def test_every_bad_word_is_reported_at_once():
    with pytest.raises(SettingsError) as caught:
        words_layer(["steps", "a=1", "--b=2", "c="])
    assert len(caught.value.problems) == 3


def test_values_are_json_able():
    values = words_layer(["a={b: [1, 2.5, x, none, yes]}"]).values
    assert json.loads(json.dumps(values)) == {"a": {"b": [1, 2.5, "x", None, True]}}
