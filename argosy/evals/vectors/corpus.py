"""Reads and checks a retrieval set in the files of BEIR: corpus.jsonl, queries.jsonl and qrels/test.tsv."""

from dataclasses import dataclass, field
from pathlib import Path

from argosy.core.errors import BadInput
from argosy.evals.rows import Fields, read_rows, read_task_text

CORPUS, QUERIES, JUDGEMENTS = "corpus.jsonl", "queries.jsonl", ("qrels/test.tsv", "qrels.tsv")
FILES = f"{CORPUS}, {QUERIES} and {JUDGEMENTS[0]}"


@dataclass(frozen=True)
class RetrievalCorpus:
    """The documents of a retrieval set.

    ids: the id of each document.
    texts: the title and the text of each document.
    """

    ids: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


def find_corpus(folder: Path) -> Path:
    """Finds the folder of a retrieval set: this folder, or a direct subfolder with its files.

    Raises:
        BadInput: there is no such folder, or there are several.
    """
    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    folders = [candidate for candidate in (folder, *inside) if _file(candidate, CORPUS) is not None]
    if len(folders) != 1:
        problem = f"{len(folders) or 'no'} retrieval sets in {folder}"
        raise BadInput(problem, where=", ".join(map(str, folders[:4])) or f"looked for {CORPUS}", hint=f"data=FOLDER with {FILES}")
    return folders[0]


def read_corpus(folder: Path) -> tuple[list[Fields], RetrievalCorpus]:
    """Reads a retrieval set. Returns the judged queries and the documents. A query has the fields `id`, `query` and `relevant`, the
    grade of each judged document by id.

    Raises:
        BadInput: a file is missing, a row is not in the format of BEIR, or no document is relevant.
    """
    documents, queries = (_texts(folder, name) for name in (CORPUS, QUERIES))
    grades: dict[str, dict[str, int]] = {}
    path = next((file for name in JUDGEMENTS if (file := _file(folder, name)) is not None), None)
    if path is None:
        raise BadInput(f"{folder} has no {JUDGEMENTS[0]}", hint=f"a retrieval set is {FILES}")
    for number, line in enumerate(read_task_text(path).splitlines(), 1):
        parts = line.split("\t")
        if not line.strip() or (number == 1 and not _is_grade(parts[-1])):
            # The first line may name the columns.
            continue
        where = f"{path}, line {number}"
        # Files of trec_eval have a second column, which is not used.
        parts = parts if len(parts) != 4 else [parts[0], *parts[2:]]
        if len(parts) != 3 or not _is_grade(parts[2]):
            raise BadInput(f"no judgement: {line[:60]!r}", where=where, hint="query id, document id and grade, with tabs between them")
        query, document, grade = parts
        for name, ids, it in ((QUERIES, queries, query), (CORPUS, documents, document)):
            if it not in ids:
                raise BadInput(f"`{it[:60]}` is no id in {name}", where=where)
        grades.setdefault(query, {})[document] = int(grade)
    rows = [{"id": query, "query": queries[query], "relevant": of} for query, of in grades.items()]
    if not any(grade > 0 for of in grades.values() for grade in of.values()):
        raise BadInput(f"{path} judges no document as relevant", hint="a grade above 0 is relevant")
    return rows, RetrievalCorpus(list(documents), list(documents.values()))


def _is_grade(text: str) -> bool:
    return text.strip().removeprefix("-").isdecimal()


def _file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _texts(folder: Path, name: str) -> dict[str, str]:
    """Reads the texts of a file, by id. If a row has a title, it is put before the text."""
    path = _file(folder, name)
    if path is None:
        raise BadInput(f"{folder} has no {name}", hint=f"a retrieval set is {FILES}")
    texts: dict[str, str] = {}
    for number, row in enumerate(read_rows(path), 1):
        where = f"{path}, row {number}"
        id, title, text = row.get("_id", row.get("id")), row.get("title") or "", row.get("text")
        if not isinstance(id, str | int) or isinstance(id, bool) or not isinstance(title, str) or not isinstance(text, str):
            raise BadInput("no `_id` with a `text`", where=where, hint="rows have _id, text and maybe title")
        if not (whole := f"{title} {text}".strip()):
            raise BadInput("a text without anything in it", where=where)
        if str(id) in texts:
            raise BadInput(f"`{str(id)[:60]}` is the id of two rows", where=where)
        texts[str(id)] = whole
    return texts
