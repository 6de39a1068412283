"""Weights of ONNX files under the names of the modules that they were exported from."""

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from massmerge.checkpoints.stores import open_file
from massmerge.errors import InputError
from models import assert_same, open_pair, state_of, weights_of
from pairs import BERT, write_pair

W, B = torch.randn(3, 5), torch.randn(3)


def initializer(name, tensor):
    return numpy_helper.from_array(tensor.contiguous().numpy(), name)


def write(path, nodes, weights):
    graph = helper.make_graph(nodes, "g", [], [], [initializer(n, t) for n, t in weights.items()])
    onnx.save(helper.make_model(graph), path)
    return path


def product(weight, name="", scopes=None):
    node = helper.make_node("MatMul", ["x", weight], ["y"], name=name)
    if scopes is not None:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(scopes))
    return node


def export(path, state, linear):
    """A state dict as exporters write it: matrices of linear layers transposed and without a name of their own."""
    nodes = [
        product(f"onnx::MatMul_{i}", "/" + name.removesuffix(".weight").replace(".", "/").replace("layer/", "layer."))
        for i, name in enumerate(linear)
    ]
    for node in nodes:
        node.name += "/MatMul"
    weights = {name: t for name, t in state.items() if name not in linear}
    return write(path, nodes, weights | {f"onnx::MatMul_{i}": state[name].T for i, name in enumerate(linear)})


@pytest.mark.parametrize(
    "node",
    [
        product("onnx::MatMul_7", "/encoder/layer.0/dense/MatMul"),
        product("val_7", "node_MatMul_3", ["", "encoder", "encoder.layer.0", "encoder.layer.0.dense", "linear_1"]),
    ],
    ids=["named by the node", "named by its note"],
)
def test_a_matrix_without_a_name_has_that_of_the_module_which_multiplies_by_it(tmp_path, node):
    store = open_file(write(tmp_path / "m.onnx", [node], {node.input[1]: W.T, "encoder.layer.0.dense.bias": B}))
    assert store.infos.keys() == {"encoder.layer.0.dense.weight", "encoder.layer.0.dense.bias"}
    assert store.infos["encoder.layer.0.dense.weight"].shape == (3, 5)
    assert store.read("encoder.layer.0.dense.weight").equal(W)
    assert store.read("encoder.layer.0.dense.bias").equal(B)


def test_a_module_of_a_list_is_not_named_twice(tmp_path):
    store = open_file(write(tmp_path / "m.onnx", [product("onnx::7", "/head/head.0/MatMul")], {"onnx::7": W.T}))
    assert store.infos.keys() == {"head.0.weight"}


def test_a_matrix_with_a_name_stays_as_it_is(tmp_path):
    node = helper.make_node("Gemm", ["x", "head.weight"], ["y"], name="/head/Gemm", transB=1)
    store = open_file(write(tmp_path / "m.onnx", [node], {"head.weight": W}))
    assert store.read("head.weight").equal(W)


def test_equal_weights_that_are_stored_once_are_found_under_each_name(tmp_path):
    node = helper.make_node("Identity", ["a.bias"], ["b.bias"])
    store = open_file(write(tmp_path / "m.onnx", [node], {"a.bias": B}))
    assert store.read("b.bias").equal(B) and store.read("a.bias").equal(B)


def test_an_expert_in_an_onnx_file_is_read_as_the_one_it_was_exported_from(tmp_path):
    base = BERT.make_base()
    expert = BERT.make_expert(base, 0)
    write_pair(tmp_path, base, expert)
    state = {f"encoder.{n}": t.detach() for n, t in expert.bert.state_dict().items() if "pooler" not in n}
    linear = [n for n in state if ".layer." in n and n.endswith("weight") and "LayerNorm" not in n]
    export(tmp_path / "expert.onnx", state | {"classifier.0.weight": W}, linear)
    opened, found = open_pair(tmp_path, "expert.onnx")
    wanted = state_of(expert, BERT.base)
    wanted |= {n: t for n, t in base.state_dict().items() if n.startswith("pooler")}
    assert_same(weights_of(opened, found), wanted)
    assert list(found.beside) == ["classifier.0.weight"]
    assert any("lacks these" in text and "pooler.dense.bias" in text for text in found.warnings)


def test_quantised_weights_are_refused_with_the_remedy(tmp_path):
    node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
    with pytest.raises(InputError, match=r"quantised \(MatMulInteger\).*use the float32"):
        open_file(write(tmp_path / "m.onnx", [node], {"w": W}))


def test_weights_in_another_file_are_refused_with_the_remedy(tmp_path):
    outside = TensorProto(name="w", data_type=1, dims=[3, 5], data_location=1)
    onnx.save(helper.make_model(helper.make_graph([], "g", [], [], [outside])), tmp_path / "m.onnx")
    with pytest.raises(InputError, match=r"another file.*onnx\.save"):
        open_file(tmp_path / "m.onnx")


def test_a_truncated_or_strange_file_is_an_error_of_ours_and_nothing_else(tmp_path):
    whole = write(tmp_path / "m.onnx", [product("onnx::7", "/a/MatMul")], {"onnx::7": W.T}).read_bytes()
    generator = torch.Generator().manual_seed(0)
    for cut in range(len(whole)):
        damaged = bytearray(whole[:cut] if cut % 2 else whole)
        if not cut % 2:
            damaged[cut] = int(torch.randint(256, (), generator=generator))
        (tmp_path / "d.onnx").write_bytes(damaged)
        try:
            store = open_file(tmp_path / "d.onnx")
            for name in store.infos:
                assert store.read(name).shape == store.infos[name].shape
        except InputError:
            continue
