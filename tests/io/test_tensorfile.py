"""Safetensors files read and written one tensor at a time."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from massmerge.errors import InputError
from massmerge.io import tensor_file
from massmerge.io.tensor_file import (
    DTYPES,
    TensorInfo,
    read_header,
    read_span,
    read_tensor,
    read_tensors,
    write_stream,
    write_tensors,
)


def some_tensors(dtype):
    values = torch.arange(24).reshape(2, 3, 4) % 2 if dtype == torch.bool else torch.arange(24).reshape(2, 3, 4)
    return {"cube": values.to(dtype), "scalar": values.max().to(dtype), "empty": torch.empty(0, 5, dtype=dtype)}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def raw_file(path, header, data=b""):
    """A file with any header whatever."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"x": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_what_the_library_writes_is_read_back_equal(tmp_path, dtype):
    save_file(some_tensors(dtype), tmp_path / "x.safetensors")
    assert_equal(dict(read_tensors(tmp_path / "x.safetensors")), some_tensors(dtype))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_what_is_written_the_library_reads_back_equal(tmp_path, dtype):
    write_tensors(tmp_path / "x.safetensors", some_tensors(dtype))
    assert_equal(load_file(tmp_path / "x.safetensors"), some_tensors(dtype))


def test_a_transposed_tensor_is_written_as_it_looks_and_not_as_it_lies_in_memory(tmp_path):
    tensor = torch.randn(3, 5).T
    write_tensors(tmp_path / "x.safetensors", {"x": tensor})
    assert load_file(tmp_path / "x.safetensors")["x"].equal(tensor)


def test_the_same_tensors_give_the_same_bytes_in_whatever_order_they_come(tmp_path):
    tensors = some_tensors(torch.float32)
    write_tensors(tmp_path / "a.safetensors", tensors)
    write_tensors(tmp_path / "b.safetensors", dict(reversed(tensors.items())))
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_the_data_starts_at_a_multiple_of_eight(tmp_path):
    for length in range(1, 9):
        write_tensors(tmp_path / "x.safetensors", {"x" * length: torch.zeros(1)})
        assert read_header(tmp_path / "x.safetensors")["x" * length].offset % 8 == 0


def test_a_stream_that_gives_too_few_bytes_for_a_tensor_is_refused(tmp_path):
    with pytest.raises(ValueError, match="4 bytes for a tensor of 8"):
        write_stream(tmp_path / "x.safetensors", {"x": TensorInfo((2,), torch.float32)}, [memoryview(b"1234")])


def test_tensors_are_copied_from_other_files_piece_by_piece(tmp_path, monkeypatch):
    tensors = {"a": torch.arange(50.0), "b": torch.zeros(0, 3), "c": torch.arange(7, dtype=torch.int8)}
    write_tensors(tmp_path / "a.safetensors", tensors)
    infos = read_header(tmp_path / "a.safetensors")
    monkeypatch.setattr(tensor_file, "_COPIED", 24)
    write_stream(tmp_path / "b.safetensors", infos, infos.values())
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


def test_a_span_of_a_tensor_holds_its_numbers_in_a_row(tmp_path):
    write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(3), "b": torch.arange(12.0).reshape(3, 4)})
    span = read_span(read_header(tmp_path / "a.safetensors")["b"], 3, 9)
    assert span.tolist() == [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def test_a_tensor_that_was_read_does_not_change_with_the_file(tmp_path):
    write_tensors(tmp_path / "x.safetensors", {"x": torch.ones(4)})
    tensor = read_tensor(read_header(tmp_path / "x.safetensors")["x"])
    write_tensors(tmp_path / "x.safetensors", {"x": torch.zeros(4)})
    assert tensor.equal(torch.ones(4))


@pytest.mark.parametrize(
    "kept", [0, 4, 8, 40, -1], ids=["empty", "half a length", "no header", "half a header", "byte"]
)
def test_a_truncated_file_is_refused_by_name_with_the_remedy(tmp_path, kept):
    path = tmp_path / "cut.safetensors"
    write_tensors(path, {"x": torch.ones(4)})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match=rf"{re.escape(str(path))}.*damaged.*(?s:.*)Download or save it again"):
        read_header(path)


def test_a_file_with_bytes_too_many_is_refused(tmp_path):
    path = tmp_path / "long.safetensors"
    write_tensors(path, {"x": torch.ones(4)})
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(InputError, match="damaged"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"\xff\xfe\x00 garbage", b""),
        (b"{not json}", b""),
        ([1, 2], b""),
        (b"[" * 100_000, b""),
        ({"x": 3}, b""),
        ({"x": {"dtype": "F32"}}, b""),
        (entry(dtype="F31"), b"12345678"),
        (entry(shape=(3,)), b"12345678"),
        (entry(shape=(-2, -1)), b"12345678"),
        (entry(shape=("two",)), b"12345678"),
        (b'{"x": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 8]}}', b"12345678"),
        (entry(offsets=(-8, 0)), b""),
        (entry(offsets=(8, 16)), b"12345678"),
        (entry(offsets=(8, 16)), b"12345678" * 2),
        (entry() | {"y": entry(offsets=(4, 12))["x"]}, b"12345678" + b"1234"),
        (entry() | {"y": entry()["x"]}, b"12345678"),
        (entry() | {"y": entry(offsets=(12, 20))["x"]}, b"12345678" * 2 + b"1234"),
        (b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
         b'"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', b"12345678"),
        (entry(shape=(2.5,)), b"12345678"),
        (entry(shape=(True, 2)), b"12345678"),
        (entry(shape=(2**64, 0), offsets=(0, 0)), b""),
    ],
    ids=[
        "garbage", "no json", "list", "deep nesting", "no entry", "no shape", "unknown dtype", "other size",
        "negative shape", "shape in words", "infinite shape", "before the data", "beyond the end",
        "hole before the first", "overlap", "the same bytes twice", "hole", "a name twice", "broken number", "no number",
        "nothing of a size beyond all memory",
    ],
)  # fmt: skip
def test_a_header_that_makes_no_sense_is_refused_by_name(tmp_path, header, data):
    path = raw_file(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(InputError, match=re.escape(str(path))):
        read_header(path)


def test_a_header_longer_than_the_file_is_not_read_into_memory(tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(InputError, match=f"header would be {1 << 60} bytes long, the file has 10"):
        read_header(path)


def test_a_file_cut_after_its_header_was_read_is_told_when_its_data_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"x": torch.ones(4)})
    info = read_header(path)["x"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="truncated"):
        read_tensor(info)
