"""Letters drawn with the fonts of Debian: a font's letters all lie in one split, as a writer's would.

The letters stand where the font puts them, at one size, so that two fonts of the same design are found as near-duplicates
and kept together too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from benchmarks.suites.fetch import deb_archive
from benchmarks.suites.vision.examples import Examples, drawn

SIDE = 64
EM = 44  # pixels: most fonts' highest letters still stand on the image

# The packages `fonts-…` and the SHA-256 of each.
JAPANESE = {
    "aoyagi-kouzan-t": "6e961f85ca7cd69e9357666db55f3409bea3619abc123cb3a168823e55a2a90d",
    "aoyagi-soseki": "d5d32b6d26155a5731c1a766d0e66ccd63778c5eebc955cf868a63b86c269585",
    "baekmuk": "19dbd99e597a35c8f63a36b3e880d8f3df61099e1cb92c5744146240fc4bee55",
    "cherrybomb": "0af3a10a7484b93ddbb012bd81b1629ae4a00e6f337080daa37411dcdf5cecb9",
    "dejima-mincho": "c86e6a7e9e54708ea9c0daa9ca321746890ab6d7c08493de65f3b90d9fa9100d",
    "dotgothic16": "970fd4b56295b515788dfea8eb442e4fcffcdb57b03e80ffbcb2775f7b153dde",
    "horai-umefont": "1b1ed2bef53ff395439ce3999b8c28dc8b9bff9d4d0de31cc440a1f331b4a9b9",
    "ipaexfont-gothic": "0e3d7f1f7449ca6424fbe52788dcfe69f65636a9641be1f7cc62bd6cc20f3fd8",
    "ipaexfont-mincho": "1165917e97744c542bc832fe4b46fc0d55b446543da6e6773ecc5d036162bccd",
    "kiloji": "d80100f41da216751b3d80a27dd573d12a5cde02d883d2867d866e6895527c6e",
    "klee": "5378d3169728ceb95a2ae653a64762cd8f3b82a968a4ae72bb168a034fbf4c54",
    "komatuna": "d56eb2506ea24aeb85d1b4f299011fb6ab83ab4e23823b1b34cd041822b7ab58",
    "konatu": "72163bf8300a59c53438d510c564eb4c35439e6ac56bda2f5cc04052c9850a98",
    "kouzan-mouhitsu": "924536ceff9359b99996e56cd24633df67d696a343ba46f9e3106e8cee228dbe",
    "lxgw-wenkai": "6d1e4c4aac78ad32062aefa2c836ee4d6e58f9dcf8b3f4407c9eefe304615318",
    "migmix": "5c23291d8c0306c20c3f7cc1edec4324edb8678537699c9a727011faa362626d",
    "misaki": "8bb6ee999bbecf997e069dc62cea22a99b72853f3e96d851c8acd970f577296c",
    "mona": "c58ceae953dd26c2470b50a2b85dc3add8f64bb4e5092d3fcd02b1321817e2d6",
    "motoya-l-cedar": "e107f9eca4c82752feed9917311a5dee8a98d7c762ca824d85b40cbf32e53cd1",
    "motoya-l-maruberi": "22af24c8dd84ace4709b4a8e899f81e8d290c0c36c0f43c49af2c185c9988c31",
    "mplus": "d84cf5bc7ba7ff4cc95bc23177eb9354aae8d8965490059ef54b3951ba14f61b",
    "nanum": "5e86c346e6485b694e1f0ebd27132892fcf014d1b975de4fd21d1654ddf37043",
    "oradano-mincho-gsrr": "4394a54a57f99539d4d2de7aef8a71133ab3f65948ef71cd2fcec9e9fc652e3f",
    "rampart": "b89555111a11d3efe14fc9358cb6d96c18be1c22c4004f728264cb820c6b4a11",
    "reggae": "8fa9711914c8687397d795384b4a72bee33f22dfba8aed2ed84a5c3bf2b69f4f",
    "rocknroll": "4993542455f142a75ecd1838d769986993d2f56abd2cd79b189841079b1bbffe",
    "sawarabi-gothic": "2fe2add38a94ba26a86f18727583821201f8f46691ebb1c01e85b9f2b236cb96",
    "sawarabi-mincho": "a63cca0c7da5d6de86824060c79ee4628beea54f701a8f49196d73337d01d5e7",
    "seto": "1ce0b6124d635036d64462d7f0bece68d79608713a51d0664d4aa03da882fe2c",
    "stick": "ddc9236a7e4a3a6d029178d208093821510e61d7658fd3e1b716485a97df90f1",
    "takao-gothic": "baf3137b76b21f4bdd5e0378ff4d71479dae6c0c459fd0848d089ec2b60b8cfa",
    "takao-mincho": "1368fb47c8d5c2beae180d8b39007c2dc2cdf1c2aebe1972c946f8c45ac4972a",
    "train": "5f491b046bc5170bfbad9c685c8fddca204fe5f19716871f77cfea75d930f88a",
    "umeplus": "a41c0d3cca4f0de68e9262325cca5340ce9dc781ff558b53b5fef3f587aa2337",
    "unfonts-core": "aa3674928f81920dff1705f9948d29ff86e73f56500a55ba00f093d2f724c7bb",
    "vlgothic": "81b0a42456747e7ec2f801028b254c33f8c720a99e15140c23f0861329687448",
    "wqy-zenhei": "cfed2c29164ff2f133e40ed2046610b172b8618d174840936ac4ec9b6fd668e7",
    "yusei-magic": "4030d34292e317ecc9dc10a68ae309a8c27ec93f256c058d248017b5051beede",
}
NASKH = {
    "arabeyes": "344e3dbfc374e675f667ebbaf63e55e858d42c1f2df3d39c27612559a5c1458e",
    "farsiweb": "6ef5fc0f0f3800b68619339b6fd87b3a62e78443410c71e5d9fc46196c4f5b32",
    "freefarsi": "7d561bb0df29658faea588587e8912cd7e271c16635b9ffc99023acd6f96083e",
    "hosny-amiri": "9960dfd0dd13077d8922e0fb742d735377e8eb62c8b08816a86abbc9cd8b9612",
    "hosny-thabit": "44b33ae726eac3015c3a7df9cea263fe5843fa4947e23e4e527990a561d89ec7",
    "kacst": "1a83306b736dbc0a26a10d89b924f1aaaa6743ab5218b2b474be6bbb00b6fa89",
    "lemonada": "b0b601446b73f0a72448229f9c6aa4607239ece25d4b56093d1d430ba8acd33c",
    "nafees": "bcadfdc9e1ad4b5c323e64d6c7830f142f84e538ad1077f6f92ecd05ca91c0b7",
    "noto-core": "58f4f0bb6720f919f92096b3508e1412a0f1544424ade6c5b5bf1eb694dd64ba",
    "paktype": "d1e61d9f8fb651e3b959088671c7153f8b3d20d080199f6e23e297ff5c798d1f",
    "sil-harmattan": "77b0064ccf235d7634b3f892458e3ff5b0078695667de3291712e1c90ad3529a",
    "sil-lateef": "0f927935b288a060a19a0a1b62e5d6a60d55c0206dd92973ece66386e10e8e68",
    "sil-scheherazade": "81b583ef38fc0e977031ad8efe310459c10552dfa0acebfb09440f9b6836870d",
    "ukij-uyghur": "c8a8e30d2727630147926a44e41b8fdf7141a66f063c46d13b9c3fc708fa4ec3",
}
PLAYFUL = {
    "aenigma": "c7f33a4e5932af82a92c81a5a993a1d117c4309b47532cb0d9c3ad34bc54f5a8",
}

KOREAN = {
    "alee": "9d38eb6c2ff02864035d56d89a398288371891d2e7e20fb909f9ef18c0a23c54",
    "baekmuk": "19dbd99e597a35c8f63a36b3e880d8f3df61099e1cb92c5744146240fc4bee55",
    "nanum": "5e86c346e6485b694e1f0ebd27132892fcf014d1b975de4fd21d1654ddf37043",
    "nanum-extra": "05ee7f37582df6a9cec4b259e58d1ca7919bf8c6c3c6502959639a7e51411559",
    "unfonts-core": "aa3674928f81920dff1705f9948d29ff86e73f56500a55ba00f093d2f724c7bb",
    "unfonts-extra": "2b86a0ac83702e7d5d2bf4739926110fcbaf871f1671261a31a990367155bd5f",
    "woowa-bm": "926b0404d616a0b48c1443ee9077020d720ece1914e6dec09d9435ff0ea68fa6",
}
GEORGIAN = {
    "bpg-georgian": "49f4da40b766e073e58a731b66fa6a4b28c0265fbfefbb62e8199a2565072431",
    "noto-core": "58f4f0bb6720f919f92096b3508e1412a0f1544424ade6c5b5bf1eb694dd64ba",
    "dejavu-core": "8892669e51aab4dc56682c8e39d8ddb7d70fad83c369344e1e240bf3ca22bb76",
    "freefont-ttf": "4ca1c21ebc479198a3a5879d236c8317d6f7b2f1c403f7890e24c02eead05615",
}
# Packages that collect designs which have nothing in common but their maker: each family is a writer of its own.
COLLECTIONS = (
    "aenigma", "alee", "arabeyes", "baekmuk", "bpg-georgian", "dejavu-core", "freefont-ttf", "kacst", "nanum",
    "nanum-extra", "noto-core", "ukij-uyghur", "unfonts-core", "unfonts-extra", "woowa-bm",
)  # fmt: skip
FONTS_OF_A_WRITER = 4  # weights and widths of one design

# へ is left out: it is the same in katakana, and many fonts share it.
HIRAGANA = "あいうえおかきくけこさしすせそたちつてとなにぬねのはひふほまみむめもやゆよらりるれろわをん"
ARABIC = "ابتثجحخدذرزسشصضطظعغفقكلمنهوي"
# Syllables that differ from the next by one stroke or one part.
HANGUL = "가나다라마바사아자차카타파하거너더러머버서어저처고노도로모보소오조초구누두루무부수우각간감강"
MKHEDRULI = "აბგდევზთიკლმნოპრსტუფქღყშჩცძწჭხჯ"
CAPITALS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def kana() -> Examples:
    """Japanese syllables in 45 hiragana, of brushes, pens, pixels and printers."""
    return letters(JAPANESE, HIRAGANA)


def arabic() -> Examples:
    """The 28 letters of Arabic as they stand alone; many differ by dots only."""
    return letters(NASKH, ARABIC)


def hangul() -> Examples:
    """Korean syllables of two or three parts."""
    return letters(KOREAN, HANGUL)


def georgian() -> Examples:
    """Letters of Georgian: 31, without the rare ჟ and ჰ, so that ten fonts make a test split."""
    return letters(GEORGIAN, MKHEDRULI)


def capitals() -> Examples:
    """Capital letters of several hundred playful fonts."""
    return letters(PLAYFUL, CAPITALS)


def letters(packages: Mapping[str, str], alphabet: str) -> Examples:
    """Each letter of an alphabet in each font of some packages, black on white, 64 × 64."""
    folders = [deb_archive(f"fonts-{name}", sha256=digest) for name, digest in packages.items()]
    rows = [row for name, folder in zip(packages, folders, strict=True) for row in _package(name, folder, alphabet)]
    return drawn(rows, folders, "free (Debian main), by font")


def writer(package: str, family: str) -> str:
    """Who drew a font: the package, or in a collection the family without its last words (weights, widths)."""
    return " ".join(family.replace("_", " ").split()[:2]) if package in COLLECTIONS else package


def glyph(font: ImageFont.FreeTypeFont, letter: str) -> Image.Image | None:
    """A letter in the middle of the image; None if the font has none, or draws it as what it draws for missing ones."""
    mask = font.getmask(letter)
    if mask.getbbox() is None or bytes(mask) == bytes(font.getmask("\uffff")):
        return None
    image = Image.new("L", (SIDE, SIDE), 255)
    ImageDraw.Draw(image).text((SIDE / 2, SIDE / 2), letter, font=font, fill=0, anchor="mm")
    return image if min(image.tobytes()) < 128 else None


def _package(name: str, folder: Path, alphabet: str) -> Iterator[tuple[Image.Image, str, str]]:
    """Images, letters and writers of a package's fonts, of each writer a few."""
    used: Counter[str] = Counter()
    for path in sorted(path for kind in ("*.ttf", "*.otf", "*.ttc") for path in folder.rglob(kind)):
        try:
            font = ImageFont.truetype(path, EM, layout_engine=ImageFont.Layout.BASIC)
            images = [glyph(font, letter) for letter in alphabet]
        except OSError:  # a font of bitmaps, or one that FreeType cannot read
            continue
        who = writer(name, font.getname()[0] or path.stem)
        found = [image for image in images if image is not None]
        # A font with one picture for several letters, such as for small and capital ones, would teach what is wrong.
        if len({image.tobytes() for image in found}) == len(alphabet) and used[who] < FONTS_OF_A_WRITER:
            used[who] += 1
            yield from ((image, letter, who) for image, letter in zip(found, alphabet, strict=True))
