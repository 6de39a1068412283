"""Routed peers of models that write: each against a plain model made by hand."""

import pytest
import torch

from massmerge import InputError, Recipe
from massmerge.evaluation.from_recipe import open_sources
from massmerge.research.peers import PEERS
from models import write_recipe
from writers import CLASSES, KINDS, NEW, dense_tokens, make_model, make_writers, naive_sum, prompts


def opened(folder, tasks: str):
    """The sources of experts that write, as peers take them."""
    return open_sources(Recipe.load(write_recipe(folder, list(tasks))), folder)


def tokens_of(peer, kind):
    return [one.tokens for one in peer.generate(prompts(kind), batch_size=2, max_new_tokens=NEW)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["smile_2", "arrow"])
def test_a_peer_of_one_expert_at_full_rank_writes_as_the_expert(tmp_path, kind, name):
    """Every token goes to the one expert there is; what is not in a linear layer stays the base's in these methods."""
    states = make_writers(tmp_path, kind, "a")
    peer = PEERS[name](opened(tmp_path, "a"), rank=64)
    model = CLASSES[kind.partition(" ")[0]].from_pretrained(tmp_path / "base").eval()
    linear = {path for path, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
    with torch.no_grad():
        for path in linear:
            module = model.get_submodule(path)
            if path == "lm_head" and "untied" not in kind:  # the embeddings it is tied to stay the base's
                module.weight = torch.nn.Parameter(states["a"]["lm_head.weight"].clone())
                continue
            module.weight.copy_(states["a"][f"{path}.weight"])
            if module.bias is not None:
                module.bias.copy_(states["a"][f"{path}.bias"])
    assert tokens_of(peer, kind) == [dense_tokens(model, row) for row in prompts(kind)]


@pytest.mark.parametrize("kind", KINDS)
def test_wemoe_that_was_not_adapted_writes_as_the_sum_of_all_deltas(tmp_path, kind):
    """Its gates begin as the scale of that sum, whatever they read."""
    states = make_writers(tmp_path, kind)
    peer = PEERS["wemoe"](opened(tmp_path, "ab"), steps=0)
    for gate in peer.gates.values():
        gate.second.weight.zero_()
    expected = make_model(kind)
    expected.load_state_dict(naive_sum(states, 0.3))
    assert tokens_of(peer, kind) == [dense_tokens(expected, row) for row in prompts(kind)]


def test_wemoe_gates_the_mlps_of_encoder_and_decoder(tmp_path):
    make_writers(tmp_path, "t5")
    peer = PEERS["wemoe"](opened(tmp_path, "ab"), steps=0)
    assert {block.rpartition(".")[0] for block in peer.gates} == {"", "decoder"}


@pytest.mark.parametrize("kind", ["t5 untied", "llama untied"])
def test_wemoe_adapts_its_gates_until_it_is_surer_of_the_first_word(tmp_path, kind):
    from massmerge.research.peers.entropy import _logits, entropy

    make_writers(tmp_path, kind)
    inputs = {task: prompts(kind) for task in "ab"}
    found = []
    for steps in (0, 20):
        peer = PEERS["wemoe"](opened(tmp_path, "ab"), inputs, steps=steps, rate=1e-2)
        rows = [peer.core.reader.row(row) for row in prompts(kind)]
        found.append(float(entropy(_logits(peer.core, peer.tree, "a", rows)).detach()))
    assert found[1] < found[0]


@pytest.mark.parametrize("name", ["smile_1", "wemoe"])
def test_a_text_depends_neither_on_padding_nor_on_the_rest_of_the_batch(tmp_path, name):
    kind = "llama untied"
    make_writers(tmp_path, kind)
    peer = PEERS[name](opened(tmp_path, "ab"), **({"steps": 0} if name == "wemoe" else {}))
    together = [one.tokens for one in peer.generate(prompts(kind), batch_size=5, max_new_tokens=NEW)]
    assert together == [one.tokens for one in peer.generate(prompts(kind), batch_size=1, max_new_tokens=NEW)]


def test_sizes_are_without_output_layers_as_those_of_bundles_are(tmp_path):
    make_writers(tmp_path, "llama untied")
    peer = PEERS["smile_1"](opened(tmp_path, "ab"))
    assert not [name for name in peer.tensors() if "lm_head" in name]


def test_twin_is_for_models_with_heads(tmp_path):
    make_writers(tmp_path, "llama untied")
    with pytest.raises(InputError, match="models that write have no heads"):
        PEERS["twin"](opened(tmp_path, "ab"), {"a": prompts("llama"), "b": prompts("llama")})
