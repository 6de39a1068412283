"""Files at addresses: looked up, read by ranges, retried, cached."""

import pytest

from massmerge.errors import InputError, MassError
from massmerge.io.addresses import hub_id, is_address, is_inner_name, split_address
from massmerge.io.remote import list_files, look_up, put, remove, store_of
from massmerge.io.remote_cache import fetched
from massmerge.io.rows import read_inputs
from massmerge.io.tensor_file import read_header, read_tensor, write_tensors
from remote import FlakyFileSystem, flaky, serving  # noqa: F401

DATA = bytes(range(256)) * 1024


@pytest.fixture
def stored(flaky, tmp_path):  # noqa: F811
    (tmp_path / "file").write_bytes(DATA)
    put(tmp_path / "file", "flaky://bucket/folder/file")
    return "flaky://bucket/folder/file"


def test_addresses_are_told_from_paths_and_hub_ids():
    assert is_address("s3://bucket/model") and is_address("memory://x")
    assert not any(map(is_address, ("me/model", "/data/s3", "C:\\data", "what is 3://4 ?", "./a://")))
    assert hub_id("hf://me/name@v1") == "me/name@v1"
    assert hub_id("hf://me/name/file.csv") is None and hub_id("me/name") is None


@pytest.mark.parametrize("address", ["s3://bucket/../other", "simplecache::s3://bucket/x"])
def test_an_address_that_leaves_its_place_is_refused(address):
    with pytest.raises(InputError, match=r"not an address|is refused"):
        split_address(address)


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "a\\b", ""])
def test_names_of_a_listing_stay_in_their_folder(name):
    assert not is_inner_name(name) and is_inner_name("a/b.json")


def test_a_range_costs_its_bytes_alone(stored):
    with look_up(stored).open(buffering=0) as file:
        file.seek(1000)
        assert file.read(100_000) == DATA[1000:101_000]
    assert FlakyFileSystem.bytes_read == 100_000


@pytest.mark.parametrize("fault", ["throttle_every", "cut_every"])
def test_every_tenth_read_may_fail(stored, monkeypatch, fault):
    monkeypatch.setattr(FlakyFileSystem, fault, 10)
    file = look_up(stored)
    for start in range(0, len(DATA), 8192):
        with file.open(buffering=0) as opened:
            opened.seek(start)
            assert opened.read(8192) == DATA[start : start + 8192]
    assert FlakyFileSystem.asked > len(DATA) / 8192


def test_a_store_that_stays_broken_is_an_error_of_the_disk_kind(stored, monkeypatch):
    monkeypatch.setattr(FlakyFileSystem, "throttle_every", 1)
    with look_up(stored).open() as file, pytest.raises(OSError, match=r"SlowDown.*tried 5 times") as caught:
        file.read(10)
    assert caught.value.filename == stored and FlakyFileSystem.asked == 5


def test_a_missing_file_and_an_unknown_protocol_are_named(flaky):  # noqa: F811
    assert look_up("flaky://bucket/none") is None
    with pytest.raises(InputError, match="flaky://bucket/none: no such file"):
        fetched("flaky://bucket/none")
    with pytest.raises(InputError, match="knows no such protocol"):
        store_of("nonsense://bucket")


def test_a_missing_client_is_named():
    pytest.importorskip("fsspec")
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with pytest.raises(MassError, match="pip install s3fs"):
            store_of("s3://bucket/x")


def test_a_file_that_was_replaced_has_changed(stored, tmp_path):
    file = look_up(stored)
    assert not file.changed()
    (tmp_path / "file").write_bytes(DATA[::-1])
    put(tmp_path / "file", stored)
    assert file.changed()


def test_a_copy_is_fetched_once_for_each_version(stored, tmp_path):
    first = fetched(stored)
    assert first.read_bytes() == DATA and fetched(stored) == first
    assert FlakyFileSystem.bytes_read == len(DATA)
    (tmp_path / "file").write_bytes(b"another")
    put(tmp_path / "file", stored)
    assert fetched(stored).read_bytes() == b"another"


def test_a_listing_goes_one_folder_deep(stored, tmp_path):
    put(tmp_path / "file", "flaky://bucket/folder/in/file")
    put(tmp_path / "file", "flaky://bucket/folder/in/deep/file")
    put(tmp_path / "file", "flaky://bucket/folder2/file")
    assert set(list_files("flaky://bucket/folder")) == {"file", "in/file"}


def test_tensors_are_read_where_they_lie(flaky, tmp_path):  # noqa: F811
    import torch

    tensors = {name: torch.randn(64, 64) for name in "abcdefghijklmnop"}
    write_tensors(tmp_path / "x.safetensors", tensors)
    put(tmp_path / "x.safetensors", "flaky://bucket/x.safetensors")
    infos = read_header(look_up("flaky://bucket/x.safetensors"))
    before = FlakyFileSystem.bytes_read
    assert before <= 1 << 16 and read_tensor(infos["c"]).equal(tensors["c"])
    assert FlakyFileSystem.bytes_read - before == 64 * 64 * 4


def test_rows_at_an_address_keep_its_name(flaky, tmp_path):  # noqa: F811
    (tmp_path / "rows.csv").write_text("text\none\ntwo\n")
    put(tmp_path / "rows.csv", "flaky://bucket/rows.csv")
    found = list(read_inputs(["flaky://bucket/rows.csv"], image=False, column="text"))
    assert [(row.name, row.item) for row in found] == [
        ("flaky://bucket/rows.csv:1", "one"),
        ("flaky://bucket/rows.csv:2", "two"),
    ]


def test_a_web_server_is_read_by_ranges_though_it_is_busy(flaky, tmp_path):  # noqa: F811
    (tmp_path / "file").write_bytes(DATA)
    with serving(tmp_path) as (address, handler):
        file = look_up(f"{address}/file")
        for start in (0, 70_000, 140_000):
            with file.open(buffering=0) as opened:
                opened.seek(start)
                assert opened.read(1000) == DATA[start : start + 1000]
        assert handler.sent == 3000 and look_up(f"{address}/none") is None
        with pytest.raises(InputError, match="nothing can be written"):
            put(tmp_path / "file", f"{address}/other")
        with pytest.raises(InputError, match="nothing can be written"):
            remove(f"{address}/file")


def test_a_web_server_without_ranges_is_refused_and_not_downloaded(flaky, tmp_path):  # noqa: F811
    (tmp_path / "file").write_bytes(DATA)
    with serving(tmp_path, ranges=False) as (address, _), look_up(f"{address}/file").open(buffering=0) as file:
        file.seek(5)
        with pytest.raises(InputError, match="whole files instead of byte ranges"):
            file.read(10)
