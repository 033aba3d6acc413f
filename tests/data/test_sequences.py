"""Pairs, labeled answers and steps from JSONL to batches: sequences of a record stay together, and only answers count."""

import json
from itertools import islice

import numpy as np
import pytest
from test_chat_mask import tokenizer_for
from test_prepare import Bytes
from test_records import HI, HO, write_rows

from argosy.core.errors import BadInput
from argosy.data.batch import Field
from argosy.data.chat import template as chat
from argosy.data.encoding import Encoding
from argosy.data.inspect import example, render
from argosy.data.pack import corpus_of
from argosy.data.pipeline import build, eval_batches
from argosy.data.prepare import prepare
from argosy.data.rows.sequences import SequenceRows
from argosy.data.settings import DataSettings
from argosy.data.sources.jsonl import JsonLines
from argosy.train.objectives.preferences.sequences import FIELDS, PER_SEQUENCE, PER_TOKEN

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OTHER = {"role": "assistant", "content": "no"}
DOCUMENT = {"document": Field("B s", np.int32, "row")}


@pytest.fixture(scope="module", autouse=True)
def end_children():
    yield
    chat.close_all()


def batches_of(folder, rows, per_group=2, make=build, tokenizer=None, extras=("margin",), **values):
    source = write_rows(folder, rows)
    settings_fields = {"sequence": 64, "batch": 2, "held_out": 0, "shuffle": False, "cache": str(folder / "cache")}
    settings = DataSettings(source=str(source), **settings_fields | values)
    fields = {**FIELDS, **DOCUMENT, **dict.fromkeys(extras, PER_SEQUENCE)}
    return make(settings, tokenizer or Bytes(), vocab=50000, seed=0, fields=fields, rows_per_group=per_group)


def rendered_rows(batch, tokenizer=None) -> list[str]:
    """The rows as text, with what does not count in ⟦ ⟧."""
    return [part.split("--\n", 1)[1].strip("\n") for part in render(batch, tokenizer or Bytes()).split("row ")[1:]]


def text_pairs(count):
    return [{"prompt": f"{i} + 1 =", "chosen": f" {i + 1}", "rejected": " no idea" * (i % 3 + 1)} for i in range(count)]


# ---- records


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [HI], "chosen": [HO], "rejected": [OTHER]},
        {"prompt": "hi", "chosen": [HO], "rejected": [OTHER]},
        {"chosen": [HI, HO], "rejected": [HI, OTHER]},
        {"prompt": "hi", "chosen": [HI, HO], "rejected": [HI, OTHER], "messages": [HI, HO], "score_chosen": 8.0},
        {"prompt": [HI], "chosen": [HI, HO], "rejected": [HI, OTHER]},
        {"instruction": "hi", "input": "", "output": "ho", "chosen": "ho", "rejected": "no"},
    ],
)
def test_a_pair_in_every_spelling_gives_the_same_two_conversations(tmp_path, row):
    tokenizer = tokenizer_for(CHATML, "<|im_start|>", "<|im_end|>")
    batches = batches_of(tmp_path, [row], tokenizer=tokenizer)
    assert "`preference`" in batches.summary().text
    assert [text.replace("⟦", "[").replace("⟧", "]") for text in rendered_rows(next(batches), tokenizer)] == [
        "[<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n]ho<|im_end|>[\n]",
        "[<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n]no<|im_end|>[\n]",
    ]


@pytest.mark.parametrize(
    ("completion", "rejected", "prompt"),
    [
        ("\n\nHuman: hi\n\nAssistant: I do", "\n\nHuman: hi\n\nAssistant: I don't", "\n\nHuman: hi\n\nAssistant:"),
        ("Count: one two", "Count: one tower", "Count: one"),
        ("same word here", "same words here", "same"),
        ("abc", "xyz", ""),
    ],
)
def test_an_implicit_prompt_ends_where_an_answer_begins(tmp_path, completion, rejected, prompt):
    (document,) = JsonLines(write_rows(tmp_path, [{"chosen": completion, "rejected": rejected}])).documents()
    record = document.record
    assert record is not None
    (other,) = record.others
    assert (record.prompt, record.completion) == (prompt, completion.removeprefix(prompt))
    assert (other.prompt, other.completion) == (prompt, rejected.removeprefix(prompt))


def test_a_pair_is_two_whole_rows_with_their_margin(tmp_path):
    batch = next(batches_of(tmp_path, [{**text_pairs(3)[2], "margin": 0.5}]))
    learned = [bytes(row[mask > 0][:-1].tolist()).decode() for row, mask in zip(batch["targets"], batch["mask"])]
    assert learned == [" 3", " no idea no idea no idea"]
    assert {int(row[mask > 0][-1]) for row, mask in zip(batch["targets"], batch["mask"])} == {Bytes().eos}
    assert batch["margin"].tolist() == [[0.5], [0.5]]
    assert batch["live"].tolist() == [[1], [1]]
    for row in range(2):
        filled = int(batch["segments"][row].sum())
        assert batch["mask"][row, filled - 1] == 0, "the last token is an input without a target"
        assert (batch["targets"][row, : filled - 1] == batch["tokens"][row, 1:filled]).all()


def test_columns_are_renamed_and_the_rest_is_listed(tmp_path):
    rows = [{"question": "1 + 1 =", "good": " 2", "bad": " 3", "id": 7}]
    batches = batches_of(tmp_path, rows, columns={"prompt": "question", "chosen": "good", "rejected": "bad"})
    assert rendered_rows(next(batches))[0].startswith("⟦1 + 1 =⟧ 2")
    assert "Ignored columns: `id`." in batches.summary().text


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"prompt": "a", "completion": "b", "label": True}, "kto"),
        ({"prompt": "a", "completion": "b", "label": 3}, "completion"),
        ({"prompt": "a", "completions": ["b"], "labels": [True]}, "stepwise"),
        ({"chosen": "a b", "rejected": "a c", "messages": [HI, HO]}, "preference"),
    ],
)
def test_the_first_record_tells_the_format(tmp_path, row, format):
    assert JsonLines(write_rows(tmp_path, [row])).format == format


def test_a_pair_file_still_fine_tunes_on_its_chosen_answers(tmp_path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    assert JsonLines(write_rows(tmp_path, rows), columns={"completion": "chosen"}).format == "completion"


@pytest.mark.parametrize(
    ("row", "problem", "hint"),
    [
        ({"question": "1?", "chosen": "a", "rejected": "b"}, "pair without `prompt`", "data.columns.prompt=question"),
        ({"prompt": "p", "chosen": "a", "rejected": [OTHER]}, "a chosen answer that is a text, and", "both are texts"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": "big"}, "`margin` is a text", "a number"),
        ({"prompt": [HI], "chosen": "a", "rejected": "b"}, "a prompt of messages", "prompt"),
        ({"chosen": [HI, HO], "rejected": [OTHER]}, "no common prompt", "give the prompt"),
        ({"prompt": "p", "completions": ["a", "b"], "labels": [True]}, "not a list of 2 truth values", "[true, false]"),
        ({"prompt": "p", "completions": [], "labels": []}, "not a list of texts", "First step"),
    ],
)
def test_wrong_records_are_refused_with_their_line(tmp_path, row, problem, hint):
    source = JsonLines(write_rows(tmp_path, [row]))
    with pytest.raises(BadInput) as caught:
        list(source.documents())
    assert problem in caught.value.what
    assert hint in (caught.value.hint or "")
    assert "t.jsonl:1" in str(caught.value.where)


# ---- what is left out


def test_equal_answers_and_empty_ones_are_dropped_and_counted(tmp_path):
    pair = {"prompt": "p", "chosen": " a", "rejected": " a"}
    batches = batches_of(tmp_path, [*text_pairs(3), pair, {**pair, "rejected": ""}, {**pair, "chosen": ""}])
    text = batches.summary().text
    assert "3 pairs" in text
    assert "1 pair whose rejected answer is the chosen one" in text
    assert "2 pairs without an answer" in text


def test_an_empty_message_is_no_answer(tmp_path):
    """The template would write the end of a turn after it, and a model would learn to say nothing."""
    tokenizer = tokenizer_for(CHATML, "<|im_start|>", "<|im_end|>")
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "ho", "arguments": {}}}]}
    empty, blank = {**HO, "content": ""}, {**HO, "content": " \n"}
    pairs = [(HO, OTHER), (empty, OTHER), (HO, empty), (blank, OTHER)]
    rows = [{"prompt": [HI], "chosen": [chosen], "rejected": [rejected]} for chosen, rejected in pairs]
    batches = batches_of(tmp_path, rows, tokenizer=tokenizer)
    assert "1 pair," in batches.summary().text
    assert "3 pairs without an answer" in batches.summary().text
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls[0].function.name if m.tool_calls }}")
    (tmp_path / "calls").mkdir()
    with_calls = batches_of(
        tmp_path / "calls", [{"prompt": [HI], "chosen": [call], "rejected": [OTHER]}],
        tokenizer=tokenizer_for(template, "<|im_start|>", "<|im_end|>"),
    )  # fmt: skip
    assert "1 pair," in with_calls.summary().text


def test_pairs_that_a_template_has_rendered_elsewhere_are_reported_once_each(tmp_path):
    tokenizer = tokenizer_for(CHATML, "<|im_start|>", "<|im_end|>")
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    rendered = {"prompt": prompt, "chosen": "ho<|im_end|>", "rejected": "no<|im_end|>"}
    rows = [rendered, {**rendered, "chosen": "other<|im_end|>"}, {"prompt": "p", "chosen": "a", "rejected": "b"}]
    batches = batches_of(tmp_path, rows, tokenizer=tokenizer)
    assert "Warning: 2 pairs hold names of special tokens (<|im_start|>)" in batches.summary().text
    assert "data.special=true" in batches.summary().text
    quiet = batches_of(tmp_path, rows, tokenizer=tokenizer, special=True)
    assert "Warning" not in quiet.summary().text
    assert (next(quiet)["tokens"][0] == tokenizer.encode("<|im_start|>", special=True)[0]).sum() == 2


def test_nothing_but_equal_answers_is_an_error(tmp_path):
    with pytest.raises(BadInput, match="of 2 pairs, 2 have a rejected answer equal to the chosen one") as caught:
        batches_of(tmp_path, [{"prompt": "p", "chosen": "a", "rejected": "a"}] * 2)
    assert "data.columns.rejected" in str(caught.value.hint)


@pytest.mark.parametrize("too_long", ["drop", "cut", "error"])
def test_a_pair_too_long_is_handled_as_a_whole(tmp_path, too_long):
    long = [{"prompt": "p", "chosen": " a" * 40, "rejected": " b"}, {"prompt": "p" * 70, "chosen": "a", "rejected": "b"}]
    rows = [*text_pairs(2), *long]
    if too_long == "error":
        with pytest.raises(BadInput, match="2 of 4 records are longer than a row of 64 tokens"):
            batches_of(tmp_path, rows, too_long=too_long)
        return
    batches = batches_of(tmp_path, rows, too_long=too_long)
    text = batches.summary().text
    kept_pairs = 2 if too_long == "drop" else 3
    assert len(batches.table.rows) == 2 * kept_pairs
    if too_long == "drop":
        assert "2 pairs longer than a row (data.too_long=drop)" in text
    else:
        assert "1 pair whose answer begins after the end of a row" in text
        assert "Cut: 1 pair longer than a row of 64" in text


@pytest.mark.parametrize("packing", ["alone", "fit"])
def test_a_long_prompt_is_cut_at_its_beginning_alike_for_both_answers(tmp_path, packing):
    """As TRL's truncation that keeps the end; the answers stay whole."""
    prompt = "".join(chr(ord("a") + i % 26) for i in range(200))
    rows = [
        *text_pairs(2),
        {"prompt": prompt, "chosen": " yes it is", "rejected": " no"},
        {"prompt": "p" * 9, "chosen": " a" * 40, "rejected": " b"},
        {"prompt": "q" * 60, "chosen": "c" * 63, "rejected": " b"},
        {"prompt": "r" * 60, "chosen": "c" * 62, "rejected": " b"},
    ]
    batches = batches_of(tmp_path, rows, too_long="cut_prompt", packing=packing, batch=6 if packing == "fit" else 8)
    text = batches.summary().text
    assert "2 pairs whose answer leaves no room for its prompt (data.too_long=cut_prompt)" in text
    assert "Cut: 2 pairs longer than a row of 64, at the beginning of the prompt (data.too_long=cut_prompt)." in text
    prompts_and_answers = set()
    batch = next(batches)
    for row in range(len(batch["tokens"])):
        for slot in np.unique(batch["segments"][row][batch["segments"][row] > 0]):
            here = batch["segments"][row] == slot
            tokens, mask = batch["tokens"][row][here], batch["mask"][row][here] > 0
            learned = bytes(batch["targets"][row][here][mask][:-1].tolist()).decode()
            prompts_and_answers.add((bytes(tokens[: int(np.argmax(mask)) + 1].tolist()).decode(), learned))
    kept_prompt = prompt[-(64 - len(" yes it is") - 1) :]
    assert {
        ("0 + 1 =", " 1"),
        ("0 + 1 =", " no idea"),
        (kept_prompt, " yes it is"),
        (kept_prompt, " no"),
        ("r", "c" * 62),
        ("r", " b"),
    } <= prompts_and_answers
    assert len(prompts_and_answers) == 8


def test_settings_that_would_cut_or_ignore_are_refused(tmp_path):
    for values, problem in (
        ({"packing": "split"}, "would cut `preference` records"),
        ({"too_long": "continue"}, "would cut `preference` records"),
        ({"learn": "all"}, "only the answers count"),
        ({"online": True}, "not read online"),
    ):
        with pytest.raises(BadInput, match=problem):
            batches_of(tmp_path, text_pairs(2), **values)
    for row in ({"prompt": "a", "completion": "b"}, {"prompt": "p:", "completions": ["one"], "labels": [True]}):
        with pytest.raises(BadInput, match=r"data\.too_long=cut_prompt is for pairs and labeled answers"):
            batches_of(tmp_path, [row], per_group=1, extras=(), too_long="cut_prompt")


# ---- rows


def test_pairs_stay_together_through_shuffling_packing_and_evaluation(tmp_path):
    for packing in (None, "fit"):
        fields = {"batch": 4, "shuffle": True, "packing": packing, "held_out": 0.3}
        batches = batches_of(tmp_path, text_pairs(30), **fields)
        for batch in [*islice(batches, 12), *batches_of(tmp_path, text_pairs(30), make=eval_batches, **fields)]:
            live = batch["live"] > 0
            assert (live[::2] == live[1::2]).all()
            chosen, rejected = batch["document"][::2][live[::2]], batch["document"][1::2][live[1::2]]
            assert (chosen % 2 == 0).all()
            assert (rejected == chosen + 1).all()
            for row, slots in enumerate(live):
                assert np.unique(batch["segments"][row]).tolist() in (
                    list(range(slots.sum() + 1)), list(range(1, slots.sum() + 1)),
                )  # fmt: skip


def test_packed_rows_hold_every_pair_once_and_whole(tmp_path):
    alone, packed = (batches_of(tmp_path, text_pairs(9), packing=packing).table.rows for packing in ("alone", "fit"))
    assert packed.slots > 1
    assert len(packed) < len(alone)
    text_by_row = {}
    for rows in (alone, packed):
        batch = rows.gather(np.arange(len(rows)))
        for row, slot in zip(*np.nonzero(batch["live"])):
            here = batch["segments"][row] == slot + 1
            key = int(batch["document"][row, slot])
            text = batch["tokens"][row][here].tolist(), batch["mask"][row][here].tolist()
            assert text_by_row.setdefault(key, text) == text
    assert sorted(text_by_row) == list(range(18))


def test_what_is_held_out_is_whole_pairs_even_from_the_tail(tmp_path):
    """A share of few documents is taken from the end of the corpus."""
    for share in (0.02, 0.5):
        source = JsonLines(write_rows(tmp_path, [{**row, "margin": i} for i, row in enumerate(text_pairs(12))]))
        corpus = prepare(source, Encoding(Bytes()), tmp_path / f"corpus-{share}", held_out=share)
        for split in (corpus.train, corpus.held_out):
            assert split.documents % 2 == 0
            assert split.documents
            assert split.values["margin"][::2].tolist() == split.values["margin"][1::2].tolist()
        margins = [*corpus.train.values["margin"][::2], *corpus.held_out.values["margin"][::2]]
        assert sorted(margins) == list(range(12))
        assert len(corpus.train.tokens) == corpus.train.starts[-1]
        corpus.verify()


# ---- KTO and steps


def labeled_rows(count, prompts=3):
    return [{"prompt": f"q{i % prompts}:", "completion": f" a{i}", "label": i % 2 == 0} for i in range(count)]


def test_an_example_comes_with_its_prompt_and_the_answer_to_another(tmp_path):
    batch = next(batches_of(tmp_path, labeled_rows(4), extras=("desirable",), batch=8))
    texts = [text.split("<")[0] for text in rendered_rows(batch)]
    assert [text[:8] for text in texts[::2]] == ["⟦q0:⟧ a0", "⟦q1:⟧ a1", "⟦q2:⟧ a2", "⟦q0:⟧ a3"]
    assert [text[:8] for text in texts[1::2]] == ["⟦q0:⟧ a1", "⟦q1:⟧ a2", "⟦q2:⟧ a3", "⟦q0:⟧ a1"]
    assert batch["desirable"][::2, 0].tolist() == [1, 0, 1, 0]


def test_answers_to_the_same_prompt_are_not_taken_for_mismatched_ones(tmp_path):
    rows = [{"prompt": "q:", "completion": f" a{i}", "label": True} for i in range(3)]
    batch = next(batches_of(tmp_path, [*rows, {"prompt": "r:", "completion": " b", "label": False}], extras=("desirable",), batch=8))
    assert all(text.startswith("⟦q:⟧ b") for text in rendered_rows(batch)[1:6:2])
    with pytest.raises(BadInput, match="all records have the same one"):
        batches_of(tmp_path, rows, extras=("desirable",))


@pytest.mark.parametrize("group_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("order", ["sorted", "alternating", "pairs"])
def test_the_answer_to_another_prompt_depends_on_the_file_alone(tmp_path, monkeypatch, order, group_bytes):
    """Files are read in groups of about 1 MiB: a group of one prompt alone is no reason to refuse a file with two."""
    monkeypatch.setattr("argosy.data.prepare.GROUP_BYTES", group_bytes)
    count = 200
    prompts = {"sorted": "a" * 100 + "b" * 100, "alternating": "ab" * 100, "pairs": "aabbccdd" * 25}[order]
    rows = [{"prompt": f"{prompt}:", "completion": f" {i}", "label": i % 2 == 0} for i, prompt in enumerate(prompts)]
    batches = batches_of(tmp_path, rows, extras=("desirable",), batch=2 * count)
    texts = [text.split("<")[0] for text in rendered_rows(next(batches))]
    own_texts, other = texts[::2], texts[1::2]
    assert own_texts == [f"⟦{prompt}:⟧ {i}" for i, prompt in enumerate(prompts)]
    partners = [int(text.split("⟧ ")[1]) for text in other]
    assert [text[1] for text in other] == list(prompts), "the prompt stays"
    assert all(prompts[i] != prompts[j] for i, j in enumerate(partners)), "its answer is that to another"
    if order == "sorted":
        assert partners == [*range(100, 164), *range(100, 136), *range(64), *range(36)], "and not always the same"
    if order == "pairs":
        assert partners[:-2] == list(range(2, 200))


def test_answers_of_conversations_go_with_conversations_and_those_of_texts_with_texts(tmp_path):
    tokenizer = tokenizer_for(CHATML, "<|im_start|>", "<|im_end|>")
    rows = [
        {"prompt": [HI], "completion": [HO], "label": True},
        {"prompt": "p:", "completion": " x", "label": True},
        {"prompt": "q:", "completion": " y", "label": True},
        {"prompt": [{**HI, "content": "why"}], "completion": [OTHER], "label": False},
    ]
    texts = rendered_rows(next(batches_of(tmp_path, rows, extras=("desirable",), tokenizer=tokenizer, batch=8)), tokenizer)
    assert "no<|im_end|>" in texts[1]
    assert texts[3].startswith("⟦p:⟧ y")
    assert texts[5].startswith("⟦q:⟧ x")
    assert "ho<|im_end|>" in texts[7]


def test_mismatched_conversations_keep_their_own_prompt(tmp_path):
    tokenizer = tokenizer_for(CHATML, "<|im_start|>", "<|im_end|>")
    rows = [
        {"prompt": [HI], "completion": [HO], "label": True},
        {"prompt": [{**HI, "content": "why"}], "completion": [OTHER], "label": False},
    ]
    batch = next(batches_of(tmp_path, rows, extras=("desirable",), tokenizer=tokenizer))
    assert "hi" in rendered_rows(batch, tokenizer)[1]
    assert "⟧no<|im_end|>⟦" in rendered_rows(batch, tokenizer)[1]


def test_the_last_token_of_each_step_is_marked_with_its_label(tmp_path):
    rows = [{"prompt": "p:", "completions": ["one", "two", "six"], "labels": [True, True, False]}]
    source = write_rows(tmp_path, rows)
    settings = DataSettings(source=str(source), sequence=24, batch=1, held_out=0, cache=str(tmp_path / "cache"))
    batch = next(build(settings, Bytes(), vocab=300, seed=0, fields={**FIELDS, "right": PER_TOKEN}))
    marked = np.flatnonzero(batch["mask"][0])
    assert [chr(token) for token in batch["targets"][0, marked]] == ["\n"] * 3
    assert batch["right"][0, marked].tolist() == [1, 1, 0]
    assert batch["right"].sum() == 2


def test_rows_of_sequences_refuse_nothing_silently(tmp_path):
    """A corpus in which no pair fits says so."""
    with pytest.raises(BadInput, match="every record is longer than a row of 4 tokens"):
        batches_of(tmp_path, text_pairs(2), sequence=4)
    assert len(SequenceRows(corpus_of([]), 2, 8)) == 0


def test_a_file_of_pairs_as_json_array_is_read_too(tmp_path):
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(text_pairs(3)))
    assert len(list(JsonLines(path).documents())) == 3


def test_the_first_record_is_shown_with_what_counts_and_long_ones_without_their_middle(tmp_path):
    batches = batches_of(tmp_path, [{"prompt": "p:", "chosen": " a" * 20, "rejected": " b"}])
    first = batches.example()
    assert first is not None
    assert example(first, Bytes()).split("\n--\n")[1].startswith("⟦p:⟧ b")
    assert len(example(first, Bytes(), most=12).split("\n--\n")[0]) == 12 + len(" ... ")
