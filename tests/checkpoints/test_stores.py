"""Files under one set of names: folders, shards, pickles."""

import json
import pickle
import re
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from massmerge.checkpoints.stores import HeaderStore, PickleStore, open_file, open_folder
from massmerge.errors import InputError
from massmerge.io.tensor_file import TensorInfo
from models import FAMILIES, save_as

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2), "steps": torch.tensor(7)}


def assert_holds(store, state):
    assert store.infos.keys() == state.keys()
    for name, tensor in state.items():
        assert (store.infos[name].shape, store.infos[name].dtype) == (tuple(tensor.shape), tensor.dtype)
        assert store.read(name).equal(tensor)


@pytest.fixture(scope="module")
def bert():
    return FAMILIES["bert"].make_base()


@pytest.mark.parametrize("form", ["safetensors", "sharded safetensors", "bin", "sharded bin"])
def test_a_folder_gives_the_model_s_state_dict(tmp_path, bert, form):
    save_as(bert, tmp_path, form)
    assert_holds(open_folder(tmp_path), bert.state_dict())


@pytest.mark.parametrize("form", ["sharded safetensors", "sharded bin"])
def test_a_sharded_folder_has_more_than_one_file_of_weights(tmp_path, bert, form):
    save_as(bert, tmp_path, form)
    store = open_folder(tmp_path)
    assert len({info.path for info in store.infos.values()}) > 1


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth", ".bin"])
def test_a_file_gives_its_state_dict(tmp_path, suffix):
    path = tmp_path / f"expert{suffix}"
    save_file(STATE, path) if suffix == ".safetensors" else torch.save(STATE, path)
    assert_holds(open_file(path), STATE)


@pytest.mark.parametrize("wrapper", ["state_dict", "model_state_dict", "model"])
def test_a_training_checkpoint_gives_the_state_dict_inside(tmp_path, wrapper):
    torch.save({wrapper: STATE, "epoch": 3}, tmp_path / "last.pt")
    assert_holds(open_file(tmp_path / "last.pt"), STATE)


def test_the_prefix_of_data_parallel_training_is_dropped(tmp_path):
    torch.save({f"module.{name}": tensor for name, tensor in STATE.items()}, tmp_path / "last.pt")
    assert_holds(open_file(tmp_path / "last.pt"), STATE)


def test_a_pickle_of_the_time_before_zip_files_is_read(tmp_path):
    torch.save(STATE, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert_holds(open_file(tmp_path / "old.bin"), STATE)


def test_a_state_dict_of_parameters_gives_plain_tensors(tmp_path):
    torch.save({"w": torch.nn.Parameter(torch.ones(2))}, tmp_path / "x.pt")
    tensor = open_file(tmp_path / "x.pt").read("w")
    assert not tensor.requires_grad


def test_a_tensor_read_from_a_pickle_is_a_copy_of_its_own(tmp_path):
    torch.save(STATE, tmp_path / "x.pt")
    store = open_file(tmp_path / "x.pt")
    store.read("a.bias").zero_()
    assert store.read("a.bias").equal(STATE["a.bias"])


def odd_tensors() -> dict[str, torch.Tensor]:
    """Tensors that are all of their storage, parts of one, turned around, empty, or of one number."""
    whole = torch.randn(6, 5)
    return {
        "whole": whole, "again": whole, "part": whole[2:4], "column": whole[:, 1], "turned": torch.randn(4, 3).T,
        "half": torch.randn(7).bfloat16(), "number": torch.tensor(3.0), "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False]), "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }  # fmt: skip


@pytest.mark.parametrize("byte_order", ["little", "big"])
def test_every_tensor_of_a_pickle_is_what_torch_loads(tmp_path, monkeypatch, byte_order):
    tensors = odd_tensors()
    torch.save(tensors, tmp_path / "x.pt")
    if byte_order == "big":
        with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
            for info in old.infolist():
                new.writestr(info, b"big" if info.filename.endswith("byteorder") else old.read(info))
        (tmp_path / "y.pt").rename(tmp_path / "x.pt")
    expected = torch.load(tmp_path / "x.pt", weights_only=True)
    store = PickleStore([tmp_path / "x.pt"])
    assert all(torch.equal(store.read(name), tensor) for name, tensor in expected.items())
    assert store.infos["whole"].shares_bytes(store.infos["again"])
    assert not store.infos["whole"].shares_bytes(store.infos["part"])


def test_a_pickle_is_opened_once_not_for_every_tensor(tmp_path, monkeypatch):
    torch.save(odd_tensors(), tmp_path / "x.pt")
    store = PickleStore([tmp_path / "x.pt"])
    monkeypatch.setattr(torch, "load", None)
    assert store.read("part").shape == (2, 5)


def test_safetensors_are_preferred_to_pickles(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    torch.save({"x": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert open_folder(tmp_path).read("x") == 1


def test_a_header_without_data_gives_shapes_and_refuses_values():
    store = HeaderStore({"x": TensorInfo((2,), torch.float32)})
    assert store.infos["x"].nbytes == 8
    with pytest.raises(InputError, match="x: its data has not been downloaded"):
        store.read("x")


class Harmful:
    """Unpickling this would leave a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("save", [torch.save, lambda data, path: path.write_bytes(pickle.dumps(data))])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path, save):
    trace = tmp_path / "trace"
    save({"x": Harmful(trace)}, tmp_path / "evil.bin")
    with pytest.raises(InputError, match=r"evil\.bin: holds more than tensors.*Save its state dict as safetensors"):
        open_file(tmp_path / "evil.bin")
    assert not trace.exists()


@pytest.mark.parametrize("data", [[torch.ones(2)], {"lr": 0.1}, torch.ones(2), {1: torch.ones(2)}, {"x": {}}])
def test_a_pickle_that_is_no_state_dict_is_refused_with_what_to_save_instead(tmp_path, data):
    torch.save(data, tmp_path / "x.pt")
    with pytest.raises(InputError, match=r"x\.pt: not a state dict.*model\.state_dict\(\)"):
        open_file(tmp_path / "x.pt")


@pytest.mark.parametrize("kept", [0, 3, 100, -50], ids=["empty", "three bytes", "head", "no directory"])
def test_a_truncated_pickle_is_refused_by_name(tmp_path, kept):
    path = tmp_path / "cut.bin"
    torch.save(STATE, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match=rf"{re.escape(str(path))}: .*[Ss]ave"):
        open_file(path)


@pytest.mark.parametrize("data", [b"junkjunk", b"\x80\x02.", b"(", b"\x80\x02}q\x00(K\x01u.", b"\x00" * 64])
def test_bytes_that_are_no_pickle_at_all_are_refused_by_name(tmp_path, data):
    (tmp_path / "junk.pt").write_bytes(data)
    with pytest.raises(InputError, match=r"junk\.pt: .*[Ss]ave"):
        open_file(tmp_path / "junk.pt")


def test_a_file_of_another_kind_is_refused_with_the_kinds_that_are_read(tmp_path):
    (tmp_path / "expert.h5").write_bytes(b"")
    with pytest.raises(InputError, match=r"expert\.h5.*\.safetensors, \.pt, \.pth, \.bin or \.onnx"):
        open_file(tmp_path / "expert.h5")


def test_a_folder_without_weights_is_refused_with_the_names_looked_for(tmp_path):
    with pytest.raises(InputError, match=r"contains no weights.*model\.safetensors, pytorch_model\.bin"):
        open_folder(tmp_path)


def write_index(folder, shards):
    names = {f"t{i}": name for i, name in enumerate(shards)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize("shard", ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", ".."])
def test_an_index_that_points_outside_the_folder_is_refused(tmp_path, shard):
    write_index(tmp_path, [shard])
    with pytest.raises(InputError, match=r"index\.json: names a shard outside of its folder"):
        open_folder(tmp_path)


def test_an_index_of_endless_shards_is_refused_before_any_is_looked_for(tmp_path):
    write_index(tmp_path, [f"{i}.safetensors" for i in range(10_001)])
    with pytest.raises(InputError, match=r"index\.json: names 10,001 shards"):
        open_folder(tmp_path)


def test_missing_shards_are_all_listed(tmp_path):
    save_file({"t0": torch.ones(1)}, tmp_path / "a.safetensors")
    write_index(tmp_path, ["a.safetensors", "b.safetensors", "c.safetensors"])
    with pytest.raises(InputError, match=r"shards are missing:\s+b\.safetensors\s+c\.safetensors\s+Download"):
        open_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": []}', "[" * 100_000])
def test_an_index_that_is_none_is_refused_by_name(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match=r"index\.json: not a weight index"):
        open_folder(tmp_path)


def test_shapes_of_a_pickle_are_known_without_a_copy_of_its_data(tmp_path):
    torch.save({"x": torch.zeros(1000, 1000)}, tmp_path / "x.pt")
    assert PickleStore([tmp_path / "x.pt"]).infos["x"].shape == (1000, 1000)
