"""Pictures out of games, icon themes and maps that Debian carries: a thing's pictures all lie in one split."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from benchmarks.suites.fetch import deb_archive
from benchmarks.suites.vision.examples import SEED, Examples, drawn, over

# Peoples of at least seven figures.
RACES = (
    "drakes", "dunefolk", "dwarves", "elves-wood", "goblins", "human-loyalists", "human-magi", "human-outlaws", "merfolk",
    "nagas", "orcs", "undead", "undead-skeletal",
)  # fmt: skip
# Themes of PNG icons, with the SHA-256 of each package, and the folders that say what an icon is for.
THEMES = {
    "elementary-xfce": "012bd2eda0e19b162b9cdc167e904a4a4254f7c2e6409862d0f29a56d3630b75",
    "faenza": "0ba952f8c066ba427182d165b48453cad6360bd4c62ee1abfbec464662e92b2c",
    "gnome": "243520edcff2c309065b7e12ae08f666580e6098ecafa0c0f7d28c75aedcfdc3",
    "mate": "356945b21bf2449ab4d3c0cead5abbc84fab247b140c6d0252263470df49dc54",
    "oxygen": "3e49023e148906e41457a98a19a09858ddd761ef4f212fa356232924b3cebcce",
}
CONTEXTS = {
    "actions": "action", "apps": "application", "categories": "category", "devices": "device", "emblems": "emblem",
    "mimetypes": "file type", "places": "place", "status": "status",
}  # fmt: skip
SUBJECTS = (
    "animals", "buildings", "food", "geography", "office", "people", "plants", "recreation", "tools", "transportation",
)  # fmt: skip
# Bodies whose map is of photographs all over, or nearly.
WORLDS = (
    "callisto", "ceres", "dione", "enceladus", "europa", "ganymede", "iapetus", "io", "mars", "mercury", "mimas", "moon",
    "rhea", "tethys", "triton",
)  # fmt: skip
ANGLES = ("0", "45", "90", "135", "180", "225", "270", "315")
POSES = 20  # of one figure: some peoples have many more than others
FRAMES = 16  # of one figure in one direction
PIXELS = 4_000_000  # larger drawings, a few, take longer to open than all others
MOST = 9  # stamps on one image of the counting task


def units() -> Examples:
    """Figures of a game of strategy in every pose, 72 × 72: which people they belong to."""
    folder = deb_archive("wesnoth-1.16-data", sha256="1012b964bd412a6770685e3324ae3b61e176caff7846192d1ee63d55cd621e26")
    top = folder / "usr" / "share" / "games" / "wesnoth" / "1.16" / "data" / "core" / "images" / "units"
    used: Counter[str] = Counter()
    rows = []
    for race in RACES:
        for path in sorted((top / race).rglob("*.png")):
            image = over(Image.open(path), "white")
            who = f"{race} {figure(path.stem)}"
            if image.size == (72, 72) and used[who] < POSES:
                used[who] += 1
                rows.append((image, race, who))
    return drawn(rows, [folder], "GPL-2+")


def figure(name: str) -> str:
    """Whose picture it is: the name without pose, direction and number."""
    return re.split(r"[-+]", name)[0]


def heading() -> Examples:
    """People, animals and ships on their way, seen from above at a slant: which of eight directions they take."""
    folder = deb_archive("unknown-horizons", sha256="ff49ea196d0f57c80d4cd4509c030240cbe632881f8c5b2a1265dd3e3795f100")
    top = folder / "usr" / "share" / "unknown-horizons" / "content" / "gfx" / "units"
    used: Counter[tuple[str, str]] = Counter()
    rows = []
    for path in sorted(top.rglob("as_*/*/*/*.png")):
        who, action, angle = path.parts[-4:-1]
        # Coloured outlines and waves are laid over a figure; they are none.
        if angle in ANGLES and "overlay" not in action and "color" not in action and used[who, angle] < FRAMES:
            used[who, angle] += 1
            rows.append((squared(Image.open(path).convert("RGBA")), angle, who))
    return drawn(rows, [folder], "CC-BY-SA-3.0")


def squared(image: Image.Image) -> Image.Image:
    """A picture without its transparent margin, in the middle of a white square."""
    image = image.crop(image.getchannel("A").getbbox())
    side = max(image.size) + 4
    ground = Image.new("RGBA", (side, side), "white")
    ground.alpha_composite(image, ((side - image.width) // 2, (side - image.height) // 2))
    return ground.convert("RGB")


def icons() -> Examples:
    """Icons of five desktops, 48 × 48: what they stand for; all drawings of one name are kept together."""
    folders = [deb_archive(f"{name}-icon-theme", sha256=digest) for name, digest in THEMES.items()]
    found = [(path, CONTEXTS[context]) for folder in folders for path, context in icon_files(folder)]
    rows = [(over(Image.open(path), "white"), context, path.stem) for path, context in found]
    return drawn(
        [row for row in rows if row[0].size == (48, 48)],
        folders,
        "GPL-2+, GPL-3+, LGPL-2+, LGPL-3+, CC-BY-SA, by theme",
    )


def icon_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """The icons of 48 pixels below a folder with their context, links left out: they are other names of the same."""
    for path in sorted(folder.rglob("*.png")):
        parts = set(path.parts)
        context = next((part for part in path.parts if part in CONTEXTS), None)
        if context and parts & {"48", "48x48"} and not path.is_symlink():
            yield path, context


def clipart() -> Examples:
    """Drawings by many hands, at most 128 × 128: what they are about."""
    folder = deb_archive("openclipart-png", sha256="f07f1545a2970c2cf3fa339bc2405da1a95cf2b1827bfa05bf73eb1c20291c02")
    rows = []
    for subject in SUBJECTS:
        top = folder / "usr" / "share" / "openclipart" / "png" / subject
        for path in sorted(top.rglob("*.png")):
            # A card of one deck is that of another with another frame.
            if pixels(path) > PIXELS or "cards" in path.parts:
                continue
            with Image.open(path) as opened:
                image = opened.convert("RGBA")
            image.thumbnail((128, 128))
            rows.append((over(image, "white"), subject, re.sub(r"[\d_]+(\w?)$", "", path.stem) + str(path.parent)))
    return drawn(rows, [folder], "public domain")


def pixels(path: Path) -> int:
    """How many pixels a PNG file has, from its first bytes: Pillow refuses to open one that is too large."""
    with path.open("rb") as file:
        head = file.read(24)
    return int.from_bytes(head[16:20]) * int.from_bytes(head[20:24])


def counts() -> Examples:
    """One to nine of the same picture scattered over an image of 96 × 96: how many."""
    digest = "6db6c1bfc870a47f1499d6203b083522eacb57c5f9c87d468f2e92eb6d9d5f34"
    folder = deb_archive("tuxpaint-stamps-default", sha256=digest)
    chance = random.Random(SEED)
    rows = []
    for path in sorted((folder / "usr" / "share" / "tuxpaint" / "stamps").rglob("*.png")):
        if "_mirror" in path.stem or "_flip" in path.stem:
            continue
        with Image.open(path) as opened:
            stamp = opened.convert("RGBA")
        stamp = stamp.crop(stamp.getchannel("A").getbbox())
        rows += [
            (scattered(stamp, count, chance), str(count), str(path)) for count in chance.sample(range(1, MOST + 1), 6)
        ]
    return drawn(rows, [folder], "GPL-2")


def scattered(stamp: Image.Image, count: int, chance: random.Random) -> Image.Image:
    """A picture so many times on a grey or coloured ground, each of its own size and place; none covers another."""
    image = Image.new("RGBA", (96, 96), tuple(chance.randint(120, 255) for _ in range(3)))
    for cell in chance.sample(range(16), count):
        side = chance.randint(15, 23)
        small = stamp.copy()
        small.thumbnail((side, side))
        left, top = 24 * (cell % 4), 24 * (cell // 4)
        place = left + chance.randint(0, 24 - small.width), top + chance.randint(0, 24 - small.height)
        image.alpha_composite(small, place)
    return image.convert("RGB")


def worlds() -> Examples:
    """Parts of the maps of planets and moons, grey, 64 × 64: of which one."""
    folder = deb_archive("stellarium-data", sha256="45aaebf39a814acbd6dcccea058c2f5651bcb5635599da03a215feeb51f4d5a5")
    rows = []
    for name in WORLDS:
        with Image.open(folder / "usr" / "share" / "stellarium" / "textures" / f"{name}.png") as opened:
            rows += [(part, name, "") for part in parts(opened.convert("L"))]
    return drawn(rows, [folder], "public domain, CC-BY-SA, GPL-2+ and free with credit (NASA/JPL-Caltech), by map")


def parts(world: Image.Image, across: int = 16, down: int = 5) -> Iterator[Image.Image]:
    """The squares of a map of 1024 × 512 that lie far enough from the poles to be undistorted; none overlaps another."""
    world = world.resize((across * 64, across * 32))
    first = (across * 32 - down * 64) // 2
    for row in range(down):
        for column in range(across):
            left, top = 64 * column, first + 64 * row
            yield world.crop((left, top, left + 64, top + 64))
