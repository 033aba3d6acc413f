"""Each instruction of IFEval, followed and not, and the cases in which the authors' program surprises.

Cases marked (authors) are behavior of google-research/instruction_following_eval that is easily done otherwise.
"""

import json
from pathlib import Path

import pytest
from helpers import shared

from argosy.core.errors import BadInput, UnknownName
from argosy.evals.instruction_following.checks import CHECKS, check_instructions, follows
from argosy.evals.instruction_following.ifeval import instruction_accuracies, loose_responses
from argosy.evals.instruction_following.language import KNOWN, language_of
from argosy.evals.instruction_following.sentences import sentences_of, words_apart
from argosy.evals.rows import read_rows

LEAST, LESS = "at least", "less than"
SECTION = {"section_spliter": "Section", "num_sections": 2}
SECOND_SO = {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"}

CASES = [
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": LEAST}, "IT is A test", "IT is a test"),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": LESS}, "IT is", "IT IS"),
    # (authors) A contraction is two words, and a single capital is one.
    ("change_case:capital_word_frequency", {"capital_frequency": 3, "capital_relation": LEAST}, "I DON'T", "I do"),
    ("change_case:english_capital", {}, "THIS IS WHAT THE MAN SAID, 3 TIMES.", "THIS IS WHAT THE Man SAID"),
    ("change_case:english_capital", {}, "IT IS THE END OF THE DAY", "DAS IST NICHT DAS ENDE DER WELT"),
    ("change_case:english_lowercase", {}, "this is what the man said.", "This is what the man said."),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it. "}, " say IT. Yes.", "Yes. Say it."),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:two_responses", {}, "******one******two", "one******two******three"),
    ("combination:two_responses", {}, "one******two******", "one************two"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [address]", "[name], address]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. see you", "Bye.\nPS see you"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye. p. s. so", "P.S"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P. P.S: so", "P.S. so"),
    ("detectable_format:constrained_response", {}, "Well. My answer is no. Ha", "My answer is: no."),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', '{"a": [1]'),
    # (authors) Any JSON value is JSON.
    ("detectable_format:json_format", {}, "3", "Here: {}"),
    ("detectable_format:multiple_sections", SECTION, "Section 1 a\nSection 2 b", "Section 1 a"),
    ("detectable_format:multiple_sections", {"section_spliter": "PARAGRAPH", "num_sections": 1}, "PARAGRAPH 1", "Paragraph 1"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n - b", "* a\n* b\n* c"),
    # (authors) Bold text at the beginning of a line is no bullet, and a rule of dashes is one.
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "**a** b\n---", "**a** b"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a* and * *"),
    # (authors) Bold text counts twice: by its inner pair of asterisks too.
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "**a**", "a * b"),
    ("detectable_format:title", {}, "so <<The title>> it", "so <<>> it"),
    ("detectable_format:title", {}, "<<a b>>", "<<a\nb>>"),
    ("keywords:existence", {"keywords": ["sun", "moon"]}, "Sunday at the MOON", "Sunday"),
    ("keywords:forbidden_words", {"forbidden_words": ["sun"]}, "Sunday", "the Sun, though"),
    ("keywords:frequency", {"keyword": "sun ", "frequency": 2, "relation": LEAST}, "Sunday in the sun", "the sun"),
    ("keywords:frequency", {"keyword": "sun", "frequency": 2, "relation": LESS}, "the sun", "sun, sun"),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 2, "let_relation": LEAST}, "Eel", "el"),
    ("keywords:letter_frequency", {"letter": "!", "let_frequency": 2, "let_relation": LESS}, "a!", "a!!"),
    ("language:response_language", {"language": "de"}, "Das ist nicht das Ende der Welt.", "This is not the end of the world."),
    # (authors) A response without letters is in any language.
    ("language:response_language", {"language": "ta"}, "123 !", "this is not it"),
    ("length_constraints:nth_paragraph_first_word", SECOND_SO, "a\n\n'So, b", "a\n\nb so"),
    ("length_constraints:nth_paragraph_first_word", SECOND_SO | {"nth_paragraph": 1}, "so what\n\nb", "so"),
    # (authors) The place counts empty parts, the number does not.
    ("length_constraints:nth_paragraph_first_word", SECOND_SO, "a\n\nso", "a\n\n\n\nso"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***a *** b", "a *** *** b"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": LEAST}, "One. Two!", "One, two."),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": LESS}, "Mr. Bell said so.", "One? Two."),
    ("length_constraints:number_words", {"num_words": 3, "relation": LEAST}, "a b-c", "a b"),
    ("length_constraints:number_words", {"num_words": 3, "relation": LESS}, "a b", "a b c"),
    ("punctuation:no_comma", {}, "one; two", "one, two"),
    ("startend:end_checker", {"end_phrase": " The End. "}, 'so it was. the end."', "The end. No."),
    ("startend:quotation", {}, ' "so" ', '"so" he said'),
    ("startend:quotation", {}, '""', '"'),
]


@pytest.mark.parametrize(("kind", "arguments", "followed", "not_followed"), CASES)
def test_each_instruction_is_followed_and_not(kind: str, arguments: dict, followed: str, not_followed: str):
    assert follows(kind, followed, arguments)
    assert not follows(kind, not_followed, arguments)


def test_every_kind_has_a_case_and_every_kind_of_the_file_is_known():
    assert {kind for kind, *_ in CASES} == set(CHECKS)
    path = shared("eval/ifeval_541.jsonl")
    rows = read_rows(path)
    check_instructions(path, rows)
    assert {kind for row in rows for kind in row["instruction_id_list"]} == set(CHECKS)


def test_arguments_that_are_none_are_left_out_as_in_the_copy_of_the_hub():
    arguments = {"num_bullets": 1, "keywords": None, "relation": None}
    assert follows("detectable_format:number_bullet_lists", "* a", arguments)


@pytest.mark.parametrize(
    ("kinds", "arguments", "error", "problem"),
    [
        (["punctuation:no_coma"], [{}], UnknownName, "punctuation:no_coma"),
        (["punctuation:no_comma"], [], BadInput, "1 instructions and arguments for 0"),
        (["keywords:existence"], [{}], BadInput, "needs `keywords`"),
        (["keywords:existence"], [{"keywords": []}], BadInput, "a list of texts"),
        (["punctuation:no_comma"], [{"commas": 3}], BadInput, "no argument `commas`"),
        (["language:response_language"], [{"language": "tlh"}], BadInput, "a language: "),
        (["length_constraints:number_words"], [{"num_words": "3", "relation": LEAST}], BadInput, "a whole number"),
        (["length_constraints:number_words"], [{"num_words": 3, "relation": "about"}], BadInput, "`less than` or"),
        (["keywords:existence"], [{"keywords": ["good", "("]}], BadInput, "`keywords` of keywords:existence is no regular"),
        (["keywords:forbidden_words"], [{"forbidden_words": ["c("]}], BadInput, "`forbidden_words` of keywords:forbidden_words"),
        (["keywords:frequency"], [{"keyword": "[", "frequency": 1, "relation": LEAST}], BadInput, "`keyword` of"),
        (["detectable_content:postscript"], [{"postscript_marker": "P.S.)"}], BadInput, "`postscript_marker` of"),
        (["detectable_format:multiple_sections"], [{"section_spliter": "*", "num_sections": 2}], BadInput, "`section_spliter` of"),
        (["keywords:letter_frequency"], [{"letter": "ab", "let_frequency": 1, "let_relation": LEAST}], BadInput, "one character"),
    ],
)
def test_an_instruction_that_cannot_be_checked_is_an_error(kinds: list, arguments: list, error: type, problem: str):
    rows = [
        {"prompt": "a", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
        {"prompt": "b", "instruction_id_list": kinds, "kwargs": arguments},
    ]
    with pytest.raises(error) as caught:
        check_instructions(Path("a.jsonl"), rows)
    assert problem in str(caught.value)
    assert "row 2 of 2" in str(caught.value)


# ---------------------------------------------------------------- strict and loose


def test_the_eight_versions_of_a_loose_response():
    assert loose_responses("Sure!\n*a*\nb\nBye") == [
        "Sure!\n*a*\nb\nBye", "Sure!\na\nb\nBye", "*a*\nb\nBye", "a\nb\nBye", "Sure!\n*a*\nb", "Sure!\na\nb", "*a*\nb", "a\nb",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("response", "strict", "loose"),
    [
        ("all good", (1.0, 1.0), (1.0, 1.0)),
        # Without its first line the response has no comma.
        ("Sure, here it is:\nall good", (0.0, 0.5), (1.0, 1.0)),
        # The first line alone is short enough, and has a comma.
        ("Sure, here it is:\nall, good and long, too long by far", (0.0, 0.0), (0.0, 0.5)),
        # Each instruction may hold for another version.
        ("a, b\nc d e f g h", (0.0, 0.0), (1.0, 1.0)),
        ("", (0.0, 0.0), (0.0, 0.0)),
        (" \n ", (0.0, 0.0), (0.0, 0.0)),
    ],
)
def test_strict_and_loose_at_both_levels(response: str, strict: tuple, loose: tuple):
    row = {
        "prompt": "p",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{}, {"num_words": 7, "relation": LESS}],
    }
    scores = instruction_accuracies(4, row, response)
    assert (scores.values["prompt_level_strict_acc"], scores.values["inst_level_strict_acc"]) == strict
    assert (scores.values["prompt_level_loose_acc"], scores.values["inst_level_loose_acc"]) == loose
    assert scores.weight("inst_level_strict_acc") == scores.weight("inst_level_loose_acc") == 2
    assert scores.weight("prompt_level_strict_acc") == 1


# ---------------------------------------------------------------- sentences, words, languages


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("no end", 1),
        ("One. Two! Three? four", 4),
        ("Dr. Smith met Mrs. Jones at 3.15 p.m. in Paris.", 1),
        ("He came at 5 p.m. She left.", 2),
        ("J. R. R. Tolkien wrote it. I read it.", 2),
        ("Wait... what? Wait... What?", 3),
        ('"Go." She went. (He stayed.) Why?', 4),
        ("It costs $3.50, e.g. here, i.e. there.", 1),
        ("a line without an end\nanother line\n\nand a third.", 1),
        ("Really?! Yes!!", 2),
        ("See www.example.com for more. Or not.", 2),
    ],
)
def test_sentences(text: str, count: int):
    assert len(sentences_of(text)) == count


def test_words_apart():
    assert words_apart("DON'T stop, it's WELL-KNOWN (U.S.) \"OK\"") == ["DO", "N'T", "stop", "it", "'s", "WELL-KNOWN", "U.S.", "OK"]


SAID = {
    "en": "Write a short story about a man who lives in the mountains and does not want to leave his home.",
    "de": "Schreibe eine kurze Geschichte über einen Mann, der in den Bergen lebt und sein Haus nicht verlassen will.",
    "fr": "Écris une courte histoire sur un homme qui vit dans les montagnes et ne veut pas quitter sa maison.",
    "es": "Escribe una historia corta sobre un hombre que vive en las montañas y no quiere dejar su casa.",
    "pt": "Escreva uma pequena história sobre um homem que vive nas montanhas e não quer deixar a sua casa.",
    "it": "Scrivi una breve storia su un uomo che vive in montagna e non vuole lasciare la sua casa.",
    "nl": "Schrijf een kort verhaal over een man die in de bergen woont en zijn huis niet wil verlaten.",
    "sv": "Skriv en kort berättelse om en man som bor i bergen och inte vill lämna sitt hem.",
    "fi": "Kirjoita lyhyt tarina miehestä, joka asuu vuorilla ja ei halua lähteä kotoaan, vaikka hän on yksin.",
    "sw": "Andika hadithi fupi kuhusu mtu ambaye anaishi katika milima na hataki kuondoka nyumbani kwake.",
    "vi": "Hãy viết một câu chuyện ngắn về một người đàn ông sống trên núi và không muốn rời khỏi nhà của mình.",
    "tr": "Dağlarda yaşayan ve evini terk etmek istemeyen bir adam hakkında kısa bir hikaye yaz.",
    "pl": "Napisz krótką historię o mężczyźnie, który mieszka w górach i nie chce opuścić swojego domu.",
    "id": "Tulislah cerita pendek tentang seorang pria yang tinggal di pegunungan dan tidak ingin meninggalkan rumahnya.",
    "ro": "Scrie o poveste scurtă despre un bărbat care trăiește în munți și nu vrea să-și părăsească casa.",
    "ru": "Напиши короткий рассказ о человеке, который живёт в горах и не хочет покидать свой дом.",
    "bg": "Напиши кратка история за човек, който живее в планината и не иска да напусне дома си.",
    "uk": "Напиши коротке оповідання про чоловіка, який живе в горах і не хоче залишати свій дім.",
    "ar": "اكتب قصة قصيرة عن رجل يعيش في الجبال ولا يريد أن يترك بيته.",
    "fa": "یک داستان کوتاه درباره مردی که در کوه زندگی می‌کند و نمی‌خواهد خانه خود را ترک کند بنویس.",
    "ur": "پہاڑوں میں رہنے والے ایک آدمی کے بارے میں ایک مختصر کہانی لکھیں جو اپنا گھر چھوڑنا نہیں چاہتا ہے۔",
    "hi": "पहाड़ों में रहने वाले एक आदमी के बारे में एक छोटी कहानी लिखिए जो अपना घर नहीं छोड़ना चाहता है।",
    "mr": "डोंगरात राहणाऱ्या आणि आपले घर सोडू न इच्छिणाऱ्या एका माणसाबद्दल एक छोटी गोष्ट लिहा, जी सर्वांना आवडते आहे.",
    "ne": "पहाडमा बस्ने र आफ्नो घर छोड्न नचाहने एक मानिसको बारेमा छोटो कथा लेख्नुहोस् जो सबैलाई मन पर्छ र राम्रो छ।",
    "bn": "পাহাড়ে বাস করে এমন একজন মানুষের সম্পর্কে একটি ছোট গল্প লিখুন।",
    "pa": "ਪਹਾੜਾਂ ਵਿੱਚ ਰਹਿਣ ਵਾਲੇ ਇੱਕ ਆਦਮੀ ਬਾਰੇ ਇੱਕ ਛੋਟੀ ਕਹਾਣੀ ਲਿਖੋ।",
    "gu": "પર્વતોમાં રહેતા એક માણસ વિશે ટૂંકી વાર્તા લખો.",
    "ta": "மலைகளில் வாழும் ஒரு மனிதனைப் பற்றி ஒரு சிறுகதை எழுதுங்கள்.",
    "te": "పర్వతాలలో నివసించే ఒక వ్యక్తి గురించి చిన్న కథ రాయండి.",
    "kn": "ಪರ್ವತಗಳಲ್ಲಿ ವಾಸಿಸುವ ಒಬ್ಬ ಮನುಷ್ಯನ ಬಗ್ಗೆ ಒಂದು ಸಣ್ಣ ಕಥೆ ಬರೆಯಿರಿ.",
    "ml": "മലകളിൽ താമസിക്കുന്ന ഒരു മനുഷ്യനെക്കുറിച്ച് ഒരു ചെറുകഥ എഴുതുക.",
    "th": "เขียนเรื่องสั้นเกี่ยวกับชายคนหนึ่งที่อาศัยอยู่บนภูเขา",
    "ko": "산에 살면서 집을 떠나고 싶어하지 않는 한 남자에 대한 짧은 이야기를 쓰세요.",
    "ja": "山に住んでいて家を離れたくない男についての短い物語を書いてください。",
    "zh": "写一个关于一个住在山里不想离开家的人的短篇故事。",
    "he": "כתוב סיפור קצר על אדם שגר בהרים ולא רוצה לעזוב את ביתו.",
    "el": "Γράψε μια σύντομη ιστορία για έναν άνθρωπο που ζει στα βουνά.",
}


@pytest.mark.parametrize("language", sorted(SAID))
def test_the_language_of_a_sentence(language: str):
    assert language_of(SAID[language]) == language
    assert language_of(SAID[language].upper()) == language


def test_every_language_of_the_file_is_known_and_tested():
    rows = [json.loads(line) for line in shared("eval/ifeval_541.jsonl").read_text().splitlines()]
    languages = {fields["language"] for row in rows for fields in row["kwargs"] if fields.get("language")}
    assert languages <= KNOWN == set(SAID)
    assert language_of("123 -") is None
