"""Recognizes the language of a text by its script and its most frequent words.

Most scripts belong to one language here. Languages in Latin, Cyrillic, Arabic and Devanagari scripts are distinguished by words that
every longer text contains. This is enough to check whether a response is in the requested language. A text of a few words may be taken
for a related language.
"""

import re
import unicodedata
from collections import Counter

# The scripts that only one language of `KNOWN` uses. In a text with kana, Han characters count as Japanese.
SCRIPTS = {
    "HANGUL": "ko",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "CJK": "zh",
    "THAI": "th",
    "GUJARATI": "gu",
    "GURMUKHI": "pa",
    "TELUGU": "te",
    "KANNADA": "kn",
    "TAMIL": "ta",
    "BENGALI": "bn",
    "MALAYALAM": "ml",
    "HEBREW": "he",
    "GREEK": "el",
}
SHARED = {
    "LATIN": {
        "en": "the of and to in is that it for was on are with as be this at have from or by not but you we they an which his her "
        "their will can all would there been has had more if your our what when who so my i he she do about up out no me them",
        "de": "der die das und ist nicht ein eine zu den mit von für auf sich im dem des ich sie es auch als an wie wir aber oder "
        "bei nach aus dass sind war wird haben hat einen einer um über so nur kann ihr mein sein durch wenn noch",
        "fr": "le la les de des et est un une à en que qui dans pour pas sur au aux avec ce il elle je vous nous plus par sont ne "
        "se mais ou où cette ses son sa leur être avoir fait comme tout très d'un c'est qu'il du",
        "es": "el la los las de y que en un una es por con para no se del al lo como más su sus pero o este esta está son ser muy "
        "también ha le me mi si sobre todo entre cuando hay desde fue yo nosotros",
        "pt": "o a os as de e que em um uma é por com para não se do da dos das ao à no na nos nas como mais seu sua mas ou este "
        "esta está são ser muito também foi me meu você eu ele ela isso quando pela pelo há já entre",
        "it": "il lo la i gli le di e che in un una è per con non si del della dei delle al alla nel nella come più suo sua ma o "
        "questo questa sono essere molto anche ha da mi io noi quando dal dalla sul sulla tra fra ci perché",
        "nl": "de het een en van in is dat op te zijn met voor niet aan er om ook als bij maar of uit door naar over deze die "
        "wordt worden heeft hebben kan ik je wij we hij zij ze nog meer dan wat geen",
        "sv": "och att det i en på är som för med av till den har de inte ett om jag men var sig från vi så kan när man nu hans "
        "eller hon han också efter vid",
        "fi": "ja on ei se että hän oli ovat myös kun mutta olla joka tai kuin niin jos sen mitä voi nyt vain minä sinä me te he "
        "tämä tämän ole ollut hyvin sekä jotka kanssa mukaan koko ne siitä minun olen voit",
        "sw": "na ya wa kwa ni la katika za kuwa cha si hii huu hiyo kama lakini pia sana yake wake yangu watu mtu hapa kila au "
        "ili ambayo ambao hivyo baada kabla bila zaidi tu wao mimi wewe sisi yeye vya",
        "vi": "và của là có không cho được một các trong những với người để này khi từ đã sẽ cũng như tôi bạn chúng ta rất nhiều "
        "về tại ra vào đến hơn nhưng hoặc thì mà nếu theo trên",
        "tr": "ve bir bu da de için ile çok olarak olan daha gibi en ne var kadar sonra ama veya ben sen biz o onun değil her "
        "şey mi mı olduğu",
        "pl": "i w na nie się z do to że jest o jak a po za co od przez dla ale tak są był czy przy które który oraz tym jego jej",
        "id": "yang dan di ini itu dengan untuk tidak dari dalam akan pada juga ke ada saya adalah kami kita mereka bisa oleh "
        "atau karena lebih sudah anda",
        "ro": "și de în a la cu nu o un este pe care că din pentru mai se au sunt ca sau dar lui ei fost acest această să",
    },
    "CYRILLIC": {
        "ru": "и в не на что я с он как это по но они к у из за от о так же для мы вы был была были все его её только или если "
        "когда может есть бы ещё уже очень мой чтобы",
        "bg": "и на да се не в за от е са че с по как това които ще може до си съм този тази бъде със като или но един една "
        "много при ги го ви към беше след най",
        "uk": "і в не на що я з він як це по але вони до у та за від про так для ми ви був була були все його її тільки або якщо "
        "коли може є ще вже дуже мій щоб",
    },
    "ARABIC": {
        "ar": "في من على أن إلى التي الذي هذا هذه ما لا كان مع عن هو هي ذلك كل بعد قد لم أو إن بين كما يمكن وهو عند",
        "fa": "و در به از که این را است با برای آن یک می های خود تا بر هم شود شده نیز کرد اما یا بود هر ما است. شما",
        "ur": "کے کی میں ہے اور سے کا کو نے پر یہ کہ ہیں بھی ایک اس تھا نہیں ہو گیا جو کر لیے تو آپ ہم وہ تھے ہوئے",
    },
    "DEVANAGARI": {
        "hi": "के की है में और से का को यह ने पर हैं भी एक था नहीं कि हो जो कर लिए तो आप हम वह गया इस अपने होता करने",
        "mr": "आणि आहे या हे ते आहेत नाही एक होते मध्ये व च्या ची चा होता मी तुम्ही आम्ही आपण करण्यासाठी केले जे पण की साठी असे "
        "त्या असते",
        "ne": "र छ को मा हो यो पनि छन् एक गर्न ले लाई हुन्छ भएको थियो तपाईं हामी म हाम्रो तर गर्ने छैन यस त्यो भने गरेको हुन् सबै",
    },
}
KNOWN = frozenset(SCRIPTS.values()) | {language for some in SHARED.values() for language in some}
# Letters that a language has and similar languages in the same script do not have. Each counts as a tenth of a frequent word.
LETTERS = {
    "de": "ßäöü",
    "es": "ñ¿¡",
    "pt": "ãõ",
    "fr": "êèùœ",
    "vi": "ơưđạảấầẩẫậắằẳẵặẹẻẽếềểễệỉịọỏốồổỗộớờởỡợụủứừửữựỳỵỷỹ",
    "sv": "å",
    "tr": "ğşı",
    "pl": "łżźśćńęą",
    "ro": "țșă",
    "ru": "ыэё",
    "bg": "ъ",
    "uk": "іїєґ",
    "fa": "پچژگ",
    "ur": "ےٹڈڑںھہ",
    "ar": "ةىأإ",
    "mr": "ळ",
}
_WORDS = re.compile(r"[^\W\d_]+(?:['’\u0300-\u036f\u0900-\u0dff]+[^\W\d_]*)*")


def language_of(text: str) -> str | None:
    """The ISO 639-1 code of the language of most of a text; `und` for an unknown script; None for a text without letters."""
    scripts = Counter(_script(letter) for letter in text if letter.isalpha())
    if not scripts:
        return None
    if scripts["HIRAGANA"] + scripts["KATAKANA"] and scripts["CJK"]:
        scripts["HIRAGANA"] += scripts.pop("CJK")
    script = scripts.most_common(1)[0][0]
    if script in SCRIPTS:
        return SCRIPTS[script]
    if script not in SHARED:
        return "und"
    return _of_words(text.lower(), SHARED[script])


def _of_words(text: str, frequent: dict[str, str]) -> str:
    words = _WORDS.findall(unicodedata.normalize("NFC", text))
    spoken = Counter(word for some in frequent.values() for word in set(some.split()))
    scores = {}
    for language, some in frequent.items():
        vocabulary = set(some.split())
        # A word that several languages share counts less for each of them.
        score = sum(1 / spoken[word] for word in words if word in vocabulary)
        scores[language] = score + 0.1 * sum(text.count(letter) for letter in LETTERS.get(language, ""))
    # Of languages with equal scores, the first in the table is taken.
    return max(scores, key=lambda language: scores[language])


def _script(letter: str) -> str:
    return unicodedata.name(letter, "UNKNOWN").partition(" ")[0].partition("-")[0]
