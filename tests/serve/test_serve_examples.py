"""The inputs that the service's page offers to try."""

import base64
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from massmerge.errors import InputError
from massmerge.serve.loaded import load_bundle
from massmerge.serve.settings import ServiceSettings
from models import image_bundle, text_bundle


def png(side, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def shown(bundle, examples, column=None):
    return load_bundle(ServiceSettings(bundle, examples=examples, column=column, threads=1)).examples


def opened(example):
    return Image.open(io.BytesIO(base64.b64decode(example["image"].partition(",")[2])))


def test_a_column_of_a_table_of_texts(root, tmp_path):
    table = tmp_path / "mail.csv"
    table.write_text("id,text\n1,win a prize\n2,see you at noon\n")
    assert shown(text_bundle(root), table, "text") == [{"text": "win a prize"}, {"text": "see you at noon"}]
    with pytest.raises(InputError, match=r"mail\.csv: name the column that holds the inputs: --column NAME"):
        shown(text_bundle(root), table)


def test_pictures_of_a_table_and_of_a_folder(root, tmp_path):
    table, folder = tmp_path / "images.parquet", tmp_path / "images"
    pq.write_table(pa.table({"image": pa.array([png(16), png(900)], pa.binary())}), table)
    folder.mkdir()
    (folder / "a.png").write_bytes(png(16))
    assert [opened(example).size for example in shown(image_bundle(root), table, "image")] == [(16, 16), (512, 512)]
    assert shown(image_bundle(root), folder)[0]["image"].endswith(base64.b64encode(png(16)).decode())


def test_a_picture_that_is_none_is_named(root, tmp_path):
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"a\.png: not a readable image"):
        shown(image_bundle(root), tmp_path)
