"""The image tasks that are drawn or cut out: what is on them, and that nothing of one kind lies in two splits."""

import io
import random

import numpy as np
import pytest
from PIL import Image, ImageFont

from benchmarks.suites import run
from benchmarks.suites.near_duplicates import image_groups
from benchmarks.suites.splits import SPLITS, Caps, make_split
from benchmarks.suites.vision import examples, games, glyphs, printed, recipe, tasks
from massmerge.errors import InputError

SMALL = Caps(train=200, validation=30, test=60, least_test=30)


def _noise(seed, side=32):
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side), dtype=np.uint8)
    return examples.png(Image.fromarray(pixels))


def _font():
    return ImageFont.load_default(size=glyphs.EM)


def test_images_of_one_thread_share_a_group_whatever_they_show():
    groups = image_groups([_noise(seed) for seed in range(4)], ["font", "", "font", ""])
    assert groups[0] == groups[2]
    assert len(set(groups.tolist())) == 3


def test_a_font_like_another_takes_all_its_letters_with_it():
    images = [_noise(0), _noise(1), _noise(0), _noise(2)]
    groups = image_groups(images, ["one", "one", "two", "two"])
    assert len(set(groups.tolist())) == 1


def test_groups_that_hold_many_labels_are_dealt_whole_and_every_label_stands_in_every_split():
    fonts = np.repeat(np.arange(30), 10)
    labels = list("abcdefghij") * 30
    split = make_split(labels, fonts, 0, SMALL)
    held = [{int(fonts[row]) for row in getattr(split, part)} for part in SPLITS]
    assert not (held[0] & held[1] or held[0] & held[2] or held[1] & held[2])
    assert all({labels[row] for row in getattr(split, part)} == set("abcdefghij") for part in SPLITS)
    assert len(split.test) >= SMALL.least_test


def test_a_label_that_only_one_font_has_is_refused_by_name():
    fonts = np.repeat(np.arange(30), 10)
    labels = list("abcdefghij") * 30
    labels[-1] = "only here"
    with pytest.raises(InputError, match="only here"):
        make_split(labels, fonts, 0, SMALL)


def test_a_letter_is_drawn_black_on_white_and_a_missing_one_not_at_all():
    image = glyphs.glyph(_font(), "A")
    assert image.size == (glyphs.SIDE, glyphs.SIDE)
    assert image.getextrema() == (0, 255)
    assert glyphs.glyph(_font(), "\U0010fffe") is None
    assert glyphs.glyph(_font(), " ") is None


@pytest.mark.parametrize(
    ("package", "family", "writer"),
    [
        ("takao-gothic", "TakaoPGothic", "takao-gothic"),
        ("ukij-uyghur", "UKIJ_Mac Ekran", "UKIJ Mac"),
        ("noto-core", "Noto Sans Arabic", "Noto Sans"),
    ],
)
def test_a_package_is_one_writer_unless_it_is_a_collection(package, family, writer):
    assert glyphs.writer(package, family) == writer


def test_alphabets_have_no_letter_twice():
    for alphabet in (glyphs.HIRAGANA, glyphs.ARABIC, glyphs.CAPITALS, glyphs.HANGUL, glyphs.MKHEDRULI):
        assert len(set(alphabet)) == len(alphabet)


def test_the_poses_of_a_figure_are_one_figure():
    assert {games.figure(name) for name in ("ghost-n-1", "ghost-s-attack-3", "ghost", "ghost+female")} == {"ghost"}


@pytest.mark.parametrize("count", range(1, games.MOST + 1))
def test_scattered_pictures_can_be_counted(count):
    image = np.asarray(games.scattered(Image.new("RGBA", (40, 30), (0, 0, 0, 255)), count, random.Random(count)))
    inked = {(row // 24, column // 24) for row, column in zip(*np.nonzero(image.max(2) == 0), strict=True)}
    assert len(inked) == count


def test_parts_of_a_map_do_not_overlap():
    numbers = np.arange(512 * 1024, dtype=np.int32).reshape(512, 1024)
    seen = [np.asarray(part) for part in games.parts(Image.fromarray(numbers))]
    assert len(seen) == 80
    assert len(np.unique(np.concatenate([part.ravel() for part in seen]))) == 80 * 64 * 64


def test_icons_are_of_one_size_and_links_to_others_are_left_out(tmp_path):
    for name in ("48x48/apps/a.png", "48x48/nothing/b.png", "16x16/apps/c.png", "places/48/d.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "48x48/apps/z.png").symlink_to(tmp_path / "48x48/apps/a.png")
    assert [(path.name, kind) for path, kind in games.icon_files(tmp_path)] == [
        ("a.png", "apps"),
        ("d.png", "places"),
    ]


def test_the_size_of_a_drawing_is_known_before_it_is_opened(tmp_path):
    Image.new("L", (300, 7)).save(tmp_path / "wide.png")
    assert games.pixels(tmp_path / "wide.png") == 2100


def test_a_squared_picture_has_a_white_margin_and_keeps_its_shape():
    picture = Image.new("RGBA", (30, 30), (0, 0, 0, 0))
    picture.paste((9, 9, 9, 255), (5, 5, 15, 25))
    pixels = np.asarray(games.squared(picture))
    assert pixels.shape == (24, 24, 3)
    assert (pixels[0] == 255).all()
    assert (pixels[..., 0] == 9).sum() == 200


def test_drawn_examples_name_all_their_packages(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "source.json").write_text(f'{{"name": "{name}"}}')
    found = examples.drawn([(Image.new("L", (2, 2)), "a", "font")], [tmp_path / "one", tmp_path / "two"], "free")
    assert found.source == {"packages": [{"name": "one"}, {"name": "two"}]}
    assert found.threads == ("font",)
    assert Image.open(io.BytesIO(found.images[0])).size == (2, 2)


def test_pictures_of_a_manual_stand_under_their_chapter_and_page():
    manual = (
        'Node: Top, Next: Pitches, Up: (dir)\n[image src="lilypond/00/logo.png"]\n'
        "Node: Pitches, Next: Rhythms, Prev: Top, Up: Musical notation\n"
        'Node: Clefs,  Next: Keys,  Up: Pitches\n[image src="lilypond/1a/clef.png" alt=""]\n'
        'Node: Chords, Up: Top\n[image src="lilypond/2b/chord.png"]\n'
    )
    assert list(printed.pictures(manual)) == [
        ("1a/clef.png", "pitches", "Clefs"),
        ("2b/chord.png", "chords", "Chords"),
    ]


def test_parts_of_a_page_do_not_overlap_and_have_ink():
    page = Image.new("L", (3 * printed.SIDE, printed.SIDE + 9), 255)
    page.paste(0, (printed.SIDE + 50, 0, 2 * printed.SIDE + 50, 20))
    first, second = (np.asarray(part) for part in printed.parts(page))
    assert first.shape == second.shape == (printed.SIDE, printed.SIDE)
    assert (first == 0).sum() + (second == 0).sum() == 20 * printed.SIDE


def test_a_printed_text_is_broken_between_words_and_cut_where_the_page_ends():
    font = ImageFont.load_default(14)
    page, longer = (np.asarray(printed.page_of("right " * count, font)) for count in (3, 300))
    assert page.shape == (printed.PAGE, printed.PAGE)
    assert page[:, -3:].min() == longer[:, -3:].min() == 255  # no letter on the margin
    assert (longer < 128).sum() > 3 * (page < 128).sum() > 0


def test_a_text_with_letters_that_a_font_lacks_is_not_printed_with_it():
    font = ImageFont.load_default(14)
    assert printed.has_letters(font, "a right")
    assert not printed.has_letters(font, "a \u10d0 right")


def test_sets_name_tasks_that_exist_once():
    sets = (tasks.WIDE14, tasks.WIDE, tasks.ALIKE, tasks.SCRIPTS)
    assert [len(names) for names in sets] == [len(set(names)) for names in sets] == [14, 20, 10, 5]
    assert {name for names in sets for name in names} <= tasks.TASKS.keys()


def test_the_wide_sets_have_two_kinds_of_glyphs_as_the_papers_twenty():
    assert set(tasks.WIDE) & set(tasks.SCRIPTS) == set(tasks.WIDE14) & set(tasks.SCRIPTS) == {"kana", "capitals"}


def test_every_set_that_is_built_by_default_exists():
    assert set(run.DEFAULT_SETS["vision"]) == recipe.SETS.keys() - {"all"}
