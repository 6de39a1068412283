import hashlib
import tracemalloc

import pytest

from massmerge.io.checksums import file_sha256


@pytest.mark.parametrize("size", [0, 1, 5_000_000])
def test_a_file_in_pieces_has_the_checksum_of_the_whole(tmp_path, size):
    path, data = tmp_path / "file", bytes(i % 251 for i in range(size))
    path.write_bytes(data)
    assert file_sha256(path, b"start") == hashlib.sha256(b"start" + data).hexdigest()


def test_a_small_file_takes_a_small_buffer(tmp_path):
    # A merge of small experts sums dozens of files; new pages for each of them took more time than all its arithmetic.
    path = tmp_path / "file"
    path.write_bytes(b"small")
    tracemalloc.start()
    try:
        file_sha256(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()
