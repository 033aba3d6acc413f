"""Fine-tuning data from JSONL to batches: the ids are those of inference, the answers are learned, and nothing is lost unsaid."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import shared
from test_chat_mask import tokenizer_for
from test_records import GOOD, HI, HO, TOOL, write_rows
from test_tokenize import tokenizer_of

from argosy.cli.verbs.data import prepared_text
from argosy.core.errors import BadInput
from argosy.data.chat import mask as chat_mask
from argosy.data.chat import template as chat
from argosy.data.chat.conversations import CLOCK, ConversationEncoder
from argosy.data.chat.mask import MaskedConversation, Way, encode_all, encode_with_mask
from argosy.data.chat.published import PUBLISHED
from argosy.data.encoding import Encoding
from argosy.data.inspect import render
from argosy.data.pipeline import build, eval_batches, find
from argosy.data.pipeline import tokenizer_for as tokenizer_in
from argosy.data.prepare import corpus_identity, open_prepared
from argosy.data.rows.encoders import encoder_for
from argosy.data.settings import DataSettings
from argosy.data.sources.jsonl import JsonLines
from argosy.data.tokenizers.load import load_tokenizer
from argosy.infer.lm import LM
from argosy.jobs import data as job

# A refusal for a word, and no special token anywhere.
STRICT = (
    "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('no is not allowed') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def end_children():
    yield
    chat.close_all()


@pytest.fixture(scope="module")
def smollm2():
    return tokenizer_of("smollm2")


def settings_for(folder, rows, **values) -> DataSettings:
    path = write_rows(folder, rows)
    fields = {"sequence": 96, "batch": 1, "held_out": 0, "shuffle": False, "cache": str(folder / "cache")}
    return DataSettings(source=str(path), **fields | values)


def encode_rows(tokenizer, folder, rows, **options) -> list[tuple[list[int], list[int]]]:
    """The ids of each record, and which of them are learned."""
    source = JsonLines(write_rows(folder, rows))
    encoder = encoder_for(source, Encoding(tokenizer, **options))
    return [
        (document.tokens.tolist(), [1] * len(document.tokens) if document.weights is None else document.weights.tolist())
        for document in encoder.encode(list(source.documents()))
    ]


def chat_ids(tokenizer, messages, **options) -> list[int]:
    """The ids that `lm.chat` feeds for these messages."""
    return LM.chat_prompt(SimpleNamespace(tokenizer=tokenizer), messages, **options)


# ---- ids


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "Qwen-Qwen2.5-7B-Instruct", "meta-llama-Llama-3.2-3B-Instruct"])
def test_the_ids_before_an_answer_are_those_that_chat_feeds(tmp_path, name, monkeypatch):
    """Llama's prompts end with two line breaks, which this vocabulary joins to one token unless an answer follows."""
    template = shared(f"chat_templates/{name}.jinja").read_text()
    tokenizer = tokenizer_for(template, "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
    messages = json.loads(shared("chat_templates/golden.json").read_text())["conversations"]["system_multi"]["messages"]
    rows = [{"messages": [*messages[:2], HO]}, {"messages": [HI, HO]} | ({"tools": [TOOL]} if "tools" in template else {})]
    answers = encode_rows(tokenizer, tmp_path, rows)
    for (ids, learned), row in zip(answers, rows):
        prompt = chat_ids(tokenizer, row["messages"][:-1], tools=row.get("tools"), **({"date_string": "26 Jul 2024"}))
        first = learned.index(1)
        assert ids[:first] == prompt
        text = tokenizer.decode([token for token, is_learned in zip(ids, learned) if is_learned], skip_special=False)
        assert text in ("ho<|im_end|>", "ho<|eot_id|>")


@pytest.mark.parametrize("name", ["smollm2", "stories260k", "byte"])
@pytest.mark.parametrize(
    ("prompt", "completion"), [("Once upon a ti", "me there was"), ("Say:\n\n", "Blue"), ("", "once"), ("2 + 2 =", " 4")]
)
def test_a_completion_follows_its_prompt_as_it_is_generated(tmp_path, name, prompt, completion):
    """The prompt alone decides its ids; the end of sequence is learned, and the beginning is where prompts have one."""
    tokenizer = tokenizer_of(name)
    ((ids, learned),) = encode_rows(tokenizer, tmp_path, [{"prompt": prompt, "completion": completion}])
    fed = LM.encode(SimpleNamespace(tokenizer=tokenizer), prompt)
    assert ids[: learned.index(1)] == fed
    assert learned == [0] * len(fed) + [1] * (len(ids) - len(fed))
    assert ids[-1] == tokenizer.eos
    assert tokenizer.decode(ids) == prompt + completion


def test_texts_go_through_no_template_and_alpaca_does(tmp_path, smollm2):
    instruction = {"instruction": "Add.", "input": "2 2", "output": "4"}
    ((ids, learned),) = encode_rows(smollm2, tmp_path, [instruction])
    messages = [{"role": "user", "content": "Add.\n\n2 2"}]
    assert ids[: learned.index(1)] == chat_ids(smollm2, messages)
    ((ids, learned),) = encode_rows(smollm2, tmp_path, [instruction], template="alpaca")
    text = smollm2.decode(ids[: learned.index(1)])
    assert text.startswith("Below is an instruction")
    assert text.endswith("### Input:\n2 2\n\n### Response:\n")
    assert encode_rows(tokenizer_of("byte"), tmp_path, [instruction])[0][1].count(1) == len("4") + 1
    ((ids, _),) = encode_rows(smollm2, tmp_path, [{"prompt": "Add.", "completion": " 4"}])
    assert smollm2.decode(ids, skip_special=False) == "Add. 4<|im_end|>"


def test_a_beginning_of_sequence_is_the_templates_own(tmp_path):
    tokenizer = tokenizer_of("stories260k")
    tokenizer.chat_templates = {"default": STRICT}
    assert tokenizer.adds_bos
    ((ids, _),) = encode_rows(tokenizer, tmp_path, [GOOD])
    assert tokenizer.bos not in ids
    ((ids, _),) = encode_rows(tokenizer, tmp_path, [GOOD], bos=True)
    assert ids[0] == tokenizer.bos
    tokenizer.chat_templates = {}


def test_only_messages_that_count_are_learned(tmp_path, smollm2):
    rows = [
        {"messages": [HI, {**HO, "content": "first", "weight": 0}, HI, {**HO, "content": "second"}]},
        {"prompt": [HI, {**HO, "content": "first"}, HI], "completion": [{**HO, "content": "second"}]},
    ]
    for row in rows:
        ((ids, learned),) = encode_rows(smollm2, tmp_path, [row])
        assert smollm2.decode([t for t, is_learned in zip(ids, learned) if is_learned], skip_special=False) == "second<|im_end|>"
        ((_, learned),) = encode_rows(smollm2, tmp_path, [row], learn="all")
        assert all(learned)


def test_weights_need_a_mark_for_each_message(tmp_path):
    marked = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}a{% endgeneration %}{% endif %}{% endfor %}"
    twice = marked.replace("%}a{%", "%}a{% endgeneration %}{% generation %}b{%")
    rows = [{"messages": [HI, {**HO, "weight": 0}, HI, HO]}]
    ((ids, learned),) = encode_rows(tokenizer_for(marked), tmp_path, rows)
    assert (len(ids), sum(learned)) == (2, 1)
    with pytest.raises(BadInput, match="not one for each message"):
        encode_rows(tokenizer_for(twice), tmp_path, rows)


def test_a_template_without_an_end_of_turn_is_warned_of(tmp_path, smollm2):
    """A model would be trained to answer and never to stop, which shows in no loss."""
    (tmp_path / "mine.jinja").write_text(STRICT)
    settings = settings_for(tmp_path, [GOOD] * 2, template=str(tmp_path / "mine.jinja"))
    warned = build(settings, smollm2, vocab=smollm2.vocab, seed=0).summary()
    assert "the answers of 2 conversations end with no special token" in warned.warning
    without_template = settings.model_copy(update={"template": None})
    assert not build(without_template, smollm2, vocab=smollm2.vocab, seed=0).summary().warning


def test_rendering_ends_with_the_preparation(tmp_path, smollm2):
    """A process for each core would otherwise stay for all of training."""
    build(settings_for(tmp_path, [GOOD]), smollm2, vocab=smollm2.vocab, seed=0)
    assert all(child._process is None for child in chat.CHILDREN)


def test_dates_in_templates_do_not_depend_on_the_day(tmp_path):
    tokenizer = tokenizer_for("{{ strftime_now('%d %B %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}")
    ((ids, _),) = encode_rows(tokenizer, tmp_path, [GOOD], learn="all")
    assert tokenizer.decode(ids) == f"{CLOCK:%d %B %Y}hiho"


# ---- many at once


def test_many_conversations_in_two_processes_are_those_of_one_by_one(smollm2, monkeypatch):
    monkeypatch.setattr(chat_mask, "children", lambda: chat.children()[:1] * 2)
    monkeypatch.setattr(chat_mask, "TOGETHER", 3)
    talks = [[HI, {**HO, "content": f"answer {n}"}, HI, {**HO, "content": "x" * (n % 5 + 1)}] for n in range(20)]
    way = Way(smollm2.chat_templates)
    together = list(encode_all(smollm2, [MaskedConversation(talk) for talk in talks], way))
    assert together == [encode_with_mask(smollm2, talk) for talk in talks]
    assert list(encode_all(smollm2, [], way)) == []


def test_a_conversation_that_kills_its_process_does_not_harm_its_neighbors():
    class Mortal:
        """Dies of the word `boom`."""

        def ask(self, request):
            if any("boom" in json.dumps(job) for job in request["jobs"]):
                raise chat.costly("its process ended")
            return chat.CHILD.ask(request)

    jobs = [chat.RenderJob("{{ messages[0].content }}", [{"content": word}], [(1, False)]) for word in ("a", "boom", "b")]
    first, dead, last = chat.all_rendered(jobs, {}, None, Mortal())
    assert (first[0]["text"], last[0]["text"]) == ("a", "b")
    with pytest.raises(BadInput, match="costs too much"):
        chat.checked_answer(dead[0])


# ---- what is refused, left out and counted


@pytest.mark.parametrize(("name", "rows", "fields", "says", "hint"), [
    ("byte", [GOOD], {}, "messages need a chat template, and this tokenizer has none", "chatml, gemma, llama3, mistral, zephyr"),
    ("byte", [GOOD], {"template": "chatlm"}, "no chat template `chatlm`", "did you mean `chatml`"),
    ("smollm2", [GOOD], {"template": "defualt"}, "no chat template `defualt`", "did you mean `default`"),
    ("smollm2", [GOOD], {"template": "alpaca"}, "do not fit Alpaca's text", "leave `data.template` out"),
    ("strict", [GOOD, {"messages": [HI, {**HO, "content": "no"}]}], {}, "no is not allowed", ""),
    ("unclear", [{"messages": [HI, HO]}], {}, "does not show where message 1", "generation"),
    ("broken", [GOOD], {}, "is not Jinja", ""),
])  # fmt: skip
def test_what_cannot_be_rendered_is_reported_with_its_line(tmp_path, name, rows, fields, says, hint):
    templates = {"strict": STRICT, "unclear": "{{ messages | length }}{{ add_generation_prompt }}", "broken": "{% if %}"}
    tokenizer = tokenizer_for(templates[name]) if name in templates else tokenizer_of(name)
    with pytest.raises(BadInput) as e:
        encode_rows(tokenizer, tmp_path, rows, **fields)
    assert says in e.value.what
    assert hint in (e.value.hint or "")
    assert "template" in fields or f"t.jsonl:{len(rows)}" in (e.value.where or "")


def test_records_without_an_answer_are_counted_and_left_out(tmp_path, smollm2):
    settings = settings_for(tmp_path, [{"messages": [HI]}, {**GOOD, "id": 3}, {"messages": [HI, HI]}])
    batches = build(settings, smollm2, vocab=smollm2.vocab, seed=0)
    summary = batches.summary()
    assert (summary.documents, summary.unanswered) == (1, 2)
    assert "`messages` by the tokenizer's chat template, 1 file" in summary.text
    assert "1 conversation, " in summary.text
    assert "2 conversations without an answer (data.learn=answers)" in summary.text
    assert "Ignored columns: `id`." in summary.text
    assert "data.packing=fit, the default for them" in summary.text
    share = 100 * summary.learned / summary.targets
    assert f"{share:.3g} % of targets learned" in summary.text
    batch = next(batches)
    assert int(batch["mask"].sum()) == summary.learned == 2
    assert smollm2.decode(batch["targets"][batch["mask"] > 0].tolist(), skip_special=False) == "ho<|im_end|>"


def test_a_call_that_the_template_does_not_write_is_no_empty_answer(tmp_path, smollm2):
    """SmolLM2's template knows no tools: the turn would be the end of a turn alone, and would be learned."""
    rows = [json.loads(line) for line in shared("../cases/tools_without_template.jsonl").read_text().splitlines()]
    tokenizer = tokenizer_for(shared("chat_templates/SmolLM2-135M-Instruct.jinja").read_text(), "<|im_start|>", "<|im_end|>")
    for learn in ("answers", "all"):
        with pytest.raises(BadInput, match="does not write the tool calls of message 1, of the assistant") as caught:
            encode_rows(tokenizer, tmp_path, rows, learn=learn)
        assert str(caught.value.where).endswith(":1")
        assert "data.template" in str(caught.value.hint)
    template = shared("chat_templates/Qwen-Qwen2.5-7B-Instruct.jinja").read_text()
    qwen = tokenizer_for(template, "<|im_start|>", "<|im_end|>")
    ((ids, learned), *_) = encode_rows(qwen, tmp_path, rows)
    assert '"name": "weather"' in qwen.decode([token for token, counts in zip(ids, learned) if counts])


def test_a_developer_speaks_as_the_system_where_the_template_knows_no_developer(tmp_path):
    """Qwen's template would drop the message; chats are asked in the same way."""
    tokenizer = tokenizer_for(shared("chat_templates/Qwen-Qwen2.5-7B-Instruct.jinja").read_text(), "<|im_start|>", "<|im_end|>")
    system, developer = ({"role": role, "content": f"{role} words"} for role in ("system", "developer"))
    both = {"role": "system", "content": "system words\n\ndeveloper words"}
    assistant = {**HO, "weight": 0}
    begins = [developer], [{**developer, "role": "system"}], [system, developer], [both]
    rows = [{"messages": [*begin, HI, assistant, HI, HO]} for begin in begins]
    answers = encode_rows(tokenizer, tmp_path, rows)
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]
    for ids, learned in answers:
        assert "developer words" in tokenizer.decode(ids)
        assert tokenizer.decode([token for token, counts in zip(ids, learned) if counts], skip_special=False) == "ho<|im_end|>"


def test_tools_that_the_template_does_not_write_are_an_ignored_column(tmp_path, smollm2):
    rows = [{"messages": [HI, HO], "tools": [TOOL]}, {"messages": [HI, HO]}]
    for template, ignored in (("SmolLM2-135M-Instruct", True), ("Qwen-Qwen2.5-7B-Instruct", False)):
        (tmp_path / template).mkdir()
        tokenizer = tokenizer_for(shared(f"chat_templates/{template}.jinja").read_text(), "<|im_start|>", "<|im_end|>")
        text = build(settings_for(tmp_path / template, rows, sequence=512), tokenizer, vocab=60_000, seed=0).summary().text
        assert ("Ignored columns: `tools`." in text) == ignored


def test_names_of_speakers_that_the_template_does_not_write_are_said(tmp_path, smollm2):
    rows = [{"messages": [{**HI, "name": "Ann"}, {**HO, "refusal": None}]}]
    text = build(settings_for(tmp_path, rows, sequence=512), smollm2, vocab=60_000, seed=0).summary().text
    assert "Ignored columns: `name of messages`." in text
    plain = [{"messages": [HI, HO]}]
    assert "Ignored" not in build(settings_for(tmp_path, plain, sequence=512), smollm2, vocab=60_000, seed=0).summary().text


def test_variables_that_the_template_does_not_read_are_said(tmp_path, smollm2):
    """A misspelled `enable_thinking` changes nothing, and nobody would know."""
    rows = [{**GOOD, "chat_template_kwargs": {"enable_thinkin": False}}]
    summary = build(settings_for(tmp_path, rows), smollm2, vocab=smollm2.vocab, seed=0).summary()
    assert "enable_thinkin of chat_template_kwargs" in summary.ignored


def test_what_an_assistant_refused_with_is_learned_as_its_words(tmp_path, smollm2):
    rows = [{"messages": [HI, {"role": "assistant", "content": None, "refusal": "No, thanks."}]}]
    ((ids, learns),) = encode_rows(smollm2, tmp_path, rows)
    learned = [token for token, counts in zip(ids, learns) if counts]
    assert smollm2.decode(learned, skip_special=False) == "No, thanks.<|im_end|>"


def test_conversations_of_nothing_but_empty_answers_are_left_out(tmp_path, smollm2):
    nothing = {"messages": [HI, {**HO, "content": ""}, HI, {**HO, "content": " "}]}
    some = {"messages": [HI, {**HO, "content": ""}, HI, HO]}
    answers = encode_rows(smollm2, tmp_path, [nothing, some, {"messages": [HI, HO]}])
    assert [len(ids) > 0 for ids, _ in answers] == [False, True, True]
    assert all(len(ids) for ids, _ in encode_rows(smollm2, tmp_path, [nothing], learn="all"))


@pytest.mark.parametrize("online", [False, True])
def test_texts_that_a_template_has_rendered_elsewhere_are_reported(tmp_path, smollm2, online):
    """36 tokens for 11: names of special tokens are text unless data.special is on."""
    rendered = {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "completion": "ho<|im_end|>"}
    rows = [rendered, {"prompt": "hi", "completion": "ho"}, {**rendered, "prompt": "hi"}]
    settings = settings_for(tmp_path, rows, online=online)
    text = build(settings, smollm2, vocab=50_000, seed=0).summary().text
    least = "at least " if online else ""
    assert f"Warning: {least}2 examples hold names of special tokens (<|im_start|>, <|im_end|>)" in text
    assert "Warning" not in build(settings.model_copy(update={"special": True}), smollm2, vocab=50_000, seed=0).summary().text


def test_records_none_of_which_has_an_answer_are_an_error(tmp_path, smollm2):
    settings = settings_for(tmp_path, [{"messages": [HI]}] * 2)
    with pytest.raises(BadInput, match="none of 2 records has an answer"):
        build(settings, smollm2, vocab=smollm2.vocab, seed=0)
    whole = settings.model_copy(update={"learn": "all"})
    assert build(whole, smollm2, vocab=smollm2.vocab, seed=0).summary().learned is None


def test_an_empty_example_is_left_out_whatever_is_learned(tmp_path):
    rows = [{"prompt": "", "completion": ""}, {"prompt": "", "completion": "a"}]
    for learn in ("answers", "all"):
        empty, full = encode_rows(tokenizer_of("byte"), tmp_path, rows, learn=learn)
        assert (empty, full) == (([], []), ([97, 257], [1, 1]))


LONG = [{"prompt": "p" * 10, "completion": "c" * 50}, {"prompt": "p" * 5, "completion": "c" * 5},
        {"prompt": "p" * 70, "completion": "c"}]  # fmt: skip


@pytest.mark.parametrize(("too_long", "says", "learned"), [
    (None, "Cut: 1 example longer than a row of 32 (data.too_long=cut).", 23 + 6),
    ("drop", "2 examples longer than a row (data.too_long=drop)", 6),
    ("continue", "3 examples", 51 + 6 + 2),
])  # fmt: skip
def test_what_is_longer_than_a_row_is_cut_or_left_out_and_counted(tmp_path, too_long, says, learned):
    settings = settings_for(tmp_path, LONG, sequence=32, too_long=too_long)
    batches = build(settings, tokenizer_of("byte"), vocab=258, seed=0)
    summary = batches.summary()
    assert says in summary.text
    unlearned = "1 example whose answer begins after the end of a row" in summary.text
    assert unlearned == (too_long is None)
    seen = sum(int(next(batches)["mask"].sum()) for _ in range(summary.rows))
    assert seen == summary.learned == learned


@pytest.mark.parametrize(("values", "says", "hint"), [
    ({"too_long": "error"}, "2 of 3 documents are longer than a row of 32", "raise `data.sequence`"),
    ({"too_long": "drop", "packing": "split"}, "data.too_long=drop is for whole documents", "leave `data.too_long` out"),
    ({"sequence": 4, "too_long": "drop"}, "nothing to train on is left", "raise `data.sequence`"),
])  # fmt: skip
def test_settings_that_leave_nothing_or_contradict_are_errors(tmp_path, values, says, hint):
    settings = settings_for(tmp_path, LONG, **{"sequence": 32} | values)
    with pytest.raises(BadInput, match=says) as e:
        build(settings, tokenizer_of("byte"), vocab=258, seed=0)
    assert hint in (e.value.hint or "")


@pytest.mark.parametrize("online", [False, True])
def test_alone_every_conversation_has_a_row_of_its_own(tmp_path, smollm2, online):
    """So a batch is a number of conversations, whatever their lengths."""
    rows = [{"messages": [HI, {**HO, "content": "ho " * (i + 1)}]} for i in range(9)]
    settings = settings_for(tmp_path, rows, packing="alone", batch=3, online=online)
    batches = build(settings, smollm2, vocab=50_000, seed=0)
    assert "data.packing=alone" in batches.summary().text
    seen = []
    for _ in range(3):
        batch = next(batches)
        assert (batch["segments"].max(1) == 1).all()
        assert ((batch["segments"] == 1).sum(1) == (batch["tokens"] > 0).sum(1)).all()
        seen += [smollm2.decode(row[mask > 0].tolist()).split().count("ho") for row, mask in zip(batch["targets"], batch["mask"])]
    assert seen == list(range(1, 10))


@pytest.mark.parametrize("too_long", ["cut", "drop"])
def test_alone_what_is_longer_than_a_row_is_cut_or_left_out_too(tmp_path, too_long):
    settings = settings_for(tmp_path, LONG, sequence=20, packing="alone", too_long=too_long)
    batches = build(settings, tokenizer_of("byte"), vocab=258, seed=0)
    assert len(batches.table.rows) == (2 if too_long == "cut" else 1)
    counts = batches.summary()
    assert (counts.cut, counts.dropped, counts.unlearned) == ((1, 0, 1) if too_long == "cut" else (0, 2, 0))


def test_split_packing_counts_what_continues_without_its_prompt(tmp_path):
    settings = settings_for(tmp_path, LONG, sequence=32, packing="split")
    summary = build(settings, tokenizer_of("byte"), vocab=258, seed=0).summary()
    assert "Cut: 3 examples at the end of a row" in summary.text


# ---- held out, online, resume, prepared


def many(count: int) -> list[dict]:
    return [{"prompt": f"question {n}: ", "completion": "yes " * (n % 7 + 1)} for n in range(count)]


@pytest.mark.parametrize("rows", [many(3), many(200)], ids=["few", "many"])
def test_whole_records_are_held_out(tmp_path, rows):
    settings = settings_for(tmp_path, rows, held_out=0.1, sequence=64)
    train, held_batches = (make(settings, tokenizer_of("byte"), vocab=258, seed=0) for make in (build, eval_batches))
    tokenizer = tokenizer_of("byte")
    texts = []
    for corpus in (train.table.rows.corpus, held_batches.table.rows.corpus):
        assert corpus.documents
        texts += [tokenizer.decode(corpus.tokens[a:b].tolist()) for a, b in zip(corpus.starts, corpus.starts[1:])]
    assert sorted(texts) == sorted(row["prompt"] + row["completion"] for row in rows)


@pytest.mark.parametrize("online", [False, True])
def test_batches_of_conversations_resume_bit_for_bit(tmp_path, smollm2, online):
    rows = [{"messages": [{**HI, "content": f"say {n}"}, {**HO, "content": "yes " * (n % 9 + 1)}]} for n in range(40)]
    settings = settings_for(tmp_path, rows, online=online, held_out=0.1, batch=2, shuffle=True)
    stream, other = (build(settings, smollm2, vocab=smollm2.vocab, seed=3) for _ in range(2))
    assert "`messages` by the tokenizer's chat template" in stream.summary().text
    for _ in range(5):
        next(stream)
    evaluation = next(eval_batches(settings, smollm2, vocab=smollm2.vocab, seed=3))
    assert evaluation["mask"].sum() > 0
    other.restore(json.loads(json.dumps(stream.state())))
    for _ in range(4):
        first, two = next(stream), next(other)
        assert all(np.array_equal(first[name], two[name]) for name in first)
        assert first["mask"].sum() > 0
    stream.close()
    other.close()


def test_the_fingerprint_covers_template_and_what_is_learned(tmp_path, smollm2):
    source = JsonLines(write_rows(tmp_path, [GOOD]))
    (tmp_path / "mine.jinja").write_text(STRICT)
    ways = [{}, {"learn": "all"}, {"template": str(tmp_path / "mine.jinja")}, {"template": "default"}]
    identities = [corpus_identity(source, Encoding(smollm2, **way), 0.0) for way in ways]
    assert len({json.dumps(identity) for identity in identities}) == 4
    text = JsonLines(write_rows(tmp_path, [{"text": "a"}], "text.jsonl"))
    assert not {"learn", "template"} & corpus_identity(text, Encoding(smollm2), 0.0).keys()


def test_a_prepared_folder_refuses_another_format_template_or_learning(tmp_path, smollm2):
    path = write_rows(tmp_path, [GOOD] * 3)
    (tmp_path / "mine.jinja").write_text(STRICT)
    words = [f"tokenizer={shared('tokenizers/smollm2')}", "held_out=0"]
    report = job.prepare(job.data_settings(str(path), words), tmp_path / "made", lambda text: None)
    assert "3 conversations" in report["summary"]
    train, _, last = prepared_text(report).splitlines()[1:]
    assert (train, last) == ("  train     3 documents, 102 tokens", report["summary"])
    folder_settings = DataSettings(source=str(tmp_path / "made"), sequence=64, batch=1)
    batches = build(folder_settings, tokenizer_in(folder_settings), vocab=smollm2.vocab, seed=0, source=find(folder_settings))
    assert "`messages` by the tokenizer's chat template" in batches.summary().text
    assert next(batches)["mask"].sum() == 2
    manifest_settings = open_prepared(tmp_path / "made").manifest["settings"]
    assert {name: manifest_settings[name] for name in ("format", "learn", "template")} == {
        "format": "auto",
        "learn": "answers",
        "template": None,
    }
    for values, says in [
        ({"format": "alpaca"}, "data.format=messages, not alpaca"),
        ({"learn": "all"}, "data.learn=answers, not all"),
        ({"columns": {"messages": "m"}}, "data.columns"),
        ({"template": str(tmp_path / "mine.jinja")}, "another chat template"),
    ]:
        with pytest.raises(BadInput, match=says):
            find(DataSettings(source=str(tmp_path / "made"), **values))


def test_a_template_from_a_file_stays_with_the_tokenizer(tmp_path):
    """Whoever chats with the trained model gets the ids that it was trained on."""
    (tmp_path / "mine.jinja").write_text(STRICT)
    settings = settings_for(tmp_path, [GOOD], template=str(tmp_path / "mine.jinja"))
    tokenizer = tokenizer_in(settings)
    tokenizer.save(tmp_path / "kept")
    again = load_tokenizer(tmp_path / "kept")
    batch = next(build(settings, tokenizer, vocab=258, seed=0))
    prompt = chat_ids(again, [HI])
    assert batch["tokens"][0, : len(prompt)].tolist() == prompt
    report = job.prepare(settings, tmp_path / "made", lambda text: None)
    assert "the chat template " in report["summary"]
    assert load_tokenizer(tmp_path / "made" / "tokenizer").chat_template == STRICT
    find(DataSettings(source=str(tmp_path / "made"), template=str(tmp_path / "mine.jinja")))


SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]
# As the pages that the formats are published on write this conversation, with the tokens that open the next answer.
WRITTEN = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<B><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<B><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
    "mistral": "<B>[INST] Be brief.\n\nHi[/INST] Hello<E>[INST] Bye[/INST]",
    "zephyr": "<|system|>\nBe brief.<E>\n<|user|>\nHi<E>\n<|assistant|>\nHello<E>\n<|user|>\nBye<E>\n<|assistant|>\n",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_write_their_formats(name):
    messages = TURNS if name == "gemma" else [SYSTEM, *TURNS]
    text = chat.render(PUBLISHED[name], messages, {"bos_token": "<B>", "eos_token": "<E>"}, add_generation_prompt=True)
    assert text == WRITTEN[name]


@pytest.mark.parametrize(("name", "file", "messages"), [
    ("chatml", "SmolLM2-135M-Instruct", [SYSTEM, *TURNS]),
    ("gemma", "google-gemma-2-2b-it", TURNS),
])  # fmt: skip
def test_published_templates_write_what_the_models_own_do(name, file, messages):
    template = shared(f"chat_templates/{file}.jinja").read_text()
    for prompt in (True, False):
        options = {"special": {"bos_token": "<B>", "eos_token": "<E>"}, "add_generation_prompt": prompt}
        assert chat.render(PUBLISHED[name], messages, **options) == chat.render(template, messages, **options)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_template_is_named_where_the_tokenizer_has_none(tmp_path, name):
    """Answers are learned with the end of their turn, and who chats with the trained model feeds what it was trained on."""
    settings = settings_for(tmp_path, [{"messages": [HI, HO]}], template=name, sequence=128)
    tokenizer = tokenizer_in(settings)
    [(ids, learned)] = encode_rows(tokenizer, tmp_path, [{"messages": [HI, HO]}], template=name)
    assert ids[: len(prompt := chat_ids(tokenizer, [HI]))] == prompt
    taught = [token for token, counts in zip(ids, learned) if counts]
    ends = {"chatml": "<|im_end|>", "gemma": "<end_of_turn>", "llama3": "<|eot_id|>"}
    assert tokenizer.decode(taught).strip() == HO["content"] + ends.get(name, "")
    assert name in ends or taught[-1] == tokenizer.eos
    tokenizer.save(tmp_path / "kept")
    assert load_tokenizer(tmp_path / "kept").chat_template == PUBLISHED[name]


def test_turns_that_end_with_the_tokenizers_own_token_are_no_warning(tmp_path):
    """Byte tokens have none of ChatML's marks, so a model would not learn to stop; the warning names the template that teaches it."""
    for name, warned in (("chatml", True), ("zephyr", False)):
        settings = settings_for(tmp_path, [{"messages": [HI, HO]}], template=name)
        warning = build(settings, tokenizer_in(settings), vocab=258, seed=0).summary().warning
        assert ("data.template=zephyr" in warning) is warned


def test_a_vocabulary_is_trained_on_what_is_said(tmp_path):
    path = write_rows(tmp_path, [{"messages": [{**HI, "content": "tell me " * 40}, {**HO, "content": "well then " * 40}]}] * 3)
    read = job.train_tokenizer(job.data_settings(str(path), []), 300, tmp_path / "words")
    assert read["bytes"] == 3 * (len("tell me ") * 40 + 1 + len("well then ") * 40)
    pieces = load_tokenizer(tmp_path / "words")
    assert not any(b"role" in pieces.piece(token, False) for token in range(pieces.vocab))


def test_what_is_learned_of_a_conversation_is_shown(tmp_path, smollm2):
    settings = settings_for(tmp_path, [GOOD])
    batch = next(build(settings, smollm2, vocab=smollm2.vocab, seed=0))
    text = render(batch, smollm2)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟧ho<|im_end|>\n")
    assert "\x1b[32mho<|im_end|>\x1b[0m" in render(batch, smollm2, color=True)


def test_an_encoder_of_text_and_one_of_records_are_chosen_by_the_source(tmp_path, smollm2):
    assert isinstance(encoder_for(JsonLines(write_rows(tmp_path, [GOOD])), Encoding(smollm2)), ConversationEncoder)
    text = JsonLines(Path(write_rows(tmp_path, [{"text": "a"}], "text.jsonl")))
    assert not isinstance(encoder_for(text, Encoding(smollm2)), ConversationEncoder)
