"""Routed peers against obviously right twins: loops over tokens and experts, dense merges, the experts themselves."""

from collections import Counter

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from massmerge.model.trees import replace_module
from massmerge.research.peers import PEERS
from models import FAMILIES, logits_of, read_deltas, rows_of, write_recipe, write_shifted
from naive import svd
from peer_sources import TASKS, is_mlp, opened, peer_folder, some_inputs


class LoopOverTokens(nn.Module):
    """A linear layer that looks at one token after the other, and for each at one expert after the other."""

    def __init__(self, layer, experts, biases, gate, top_k):
        super().__init__()
        self.layer, self.experts, self.biases, self.gate, self.top_k = layer, experts, biases, gate, top_k
        self.chosen = []

    def forward(self, x):
        out = self.layer(x).clone()
        rows, flat = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        best = []
        for i, row in enumerate(rows.double()):
            scores = [float((v[: self.gate] @ row).norm()) for _, _, v in self.experts]
            picked = sorted(range(len(scores)), key=lambda t: -scores[t])[: self.top_k]
            weights = torch.tensor([scores[t] for t in picked]).softmax(0)
            for weight, t in zip(weights, picked, strict=True):
                u, s, v = self.experts[t]
                update = u @ (s * (v @ row))
                flat[i] += weight * (update.float() + (0 if self.biases[t] is None else self.biases[t]))
            best.append(picked[0])
        self.chosen = torch.tensor(best).view(len(x), -1)
        return out


def looped(folder, name, gate, rank, top_k):
    """The base with every linear layer looped over tokens and experts, and those layers."""
    base = FAMILIES[name].base.from_pretrained(folder / "base").eval()
    _, deltas = read_deltas(folder, name, list(TASKS))
    layers = []
    for path, module in list(base.named_modules()):
        if not isinstance(module, nn.Linear | Conv1D):
            continue
        matrices = [deltas[t][f"{path}.weight"] for t in TASKS]
        matrices = [m.mT if isinstance(module, Conv1D) else m for m in matrices]
        if not any(m.any() for m in matrices):  # an expert of ViT has no pooler
            continue
        biases = [deltas[t].get(f"{path}.bias") for t in TASKS]
        experts = [svd(m, rank) for m in matrices]
        layers.append(LoopOverTokens(module, experts, biases, gate, top_k))
        replace_module(base, path, layers[-1])
    return base, layers


TOKEN_PEERS = {
    "smile_1": ({"gate": 4, "rank": 6}, (4, 6, 1)),
    "arrow": ({"rank": 5, "top_k": 2}, (1, 5, 2)),
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "family"),
    [("smile_1", f) for f in ("bert", "vit", "dinov2", "gpt2")] + [("arrow", "bert"), ("arrow", "vit")],
)
def test_tokens_are_routed_as_a_loop_over_tokens_and_experts_does(root, family, name):
    options, (gate, rank, top_k) = TOKEN_PEERS[name]
    folder, inputs = peer_folder(root, family), FAMILIES[family].make_inputs(2)
    model, layers = looped(folder, family, gate, rank, top_k)
    wanted = model(**inputs)
    output, speaks = PEERS[name](opened(folder), **options).forward(inputs)
    assert torch.allclose(output.last_hidden_state, wanted.last_hidden_state, atol=2e-5)
    for i in range(2):
        votes = Counter(Counter(sorted(layer.chosen[i].tolist())).most_common(1)[0][0] for layer in layers)
        assert {t: votes[t] / len(layers) for t in range(3)} == pytest.approx(dict(enumerate(speaks[i].tolist())))


def test_the_loops_inputs_go_to_several_experts(root):
    _, speaks = PEERS["smile_1"](opened(peer_folder(root, "bert")), gate=4, rank=6).forward(
        FAMILIES["bert"].make_inputs(2)
    )
    assert (speaks > 0).sum() > 2, "or the twin above would show nothing of a choice"


@torch.no_grad()
def test_smile_with_one_expert_of_full_rank_is_that_expert_where_only_linear_weights_differ(tmp_path):
    family = FAMILIES["bert"]
    base = family.make_base()
    base.save_pretrained(tmp_path / "base")
    linear = [p for p, m in base.named_modules() if isinstance(m, nn.Linear)]
    names = [f"{path}.{own}" for path in linear for own in ("weight", "bias")]
    shift = {name: torch.randn_like(base.get_parameter(name)) * 0.05 for name in names}
    write_shifted(tmp_path / "only", "bert", base, shift)
    write_recipe(tmp_path, ["only"])
    inputs = family.make_inputs(3)
    peer = PEERS["smile_1"](opened(tmp_path), rank=64)
    expert = family.expert.from_pretrained(tmp_path / "only").eval()
    found = logits_of(peer.predict(rows_of(inputs))[1])
    assert list(found.values()) == pytest.approx(sorted(expert(**inputs).logits[1].tolist(), reverse=True), abs=1e-5)


def dense(folder, name, scales):
    """The base plus the deltas of the tasks, each times its scale."""
    base, deltas = read_deltas(folder, name, list(TASKS))
    state = {k: v + sum(s * deltas[t][k] for s, t in zip(scales, TASKS, strict=True)) for k, v in base.items()}
    model = FAMILIES[name].base.from_pretrained(folder / "base").eval()
    model.load_state_dict(state)
    return model


@torch.no_grad()
@pytest.mark.parametrize("family", ["bert", "vit", "gpt2", "clip"])
def test_wemoe_with_constant_gates_is_task_arithmetic(root, family):
    folder, inputs = peer_folder(root, family), FAMILIES[family].make_inputs(3)
    peer = PEERS["wemoe"](opened(folder), steps=0)
    assert len(peer.gates) == 2, "one for each block"
    for gate in peer.gates.values():
        gate.second.weight.zero_()
    wanted = dense(folder, family, [0.3] * 3)(**inputs)
    assert torch.allclose(peer.forward(inputs)[0].last_hidden_state, wanted.last_hidden_state, atol=2e-5)


@torch.no_grad()
def test_wemoe_with_gates_that_differ_merges_each_input_for_itself(root):
    folder, inputs = peer_folder(root, "bert"), FAMILIES["bert"].make_inputs(3)
    peer = PEERS["wemoe"](opened(folder), steps=0)
    given = [[0.9, 0.1, 0.0], [0.0, 0.8, -0.3], [0.2, 0.2, 0.7]]
    for gate in peer.gates.values():
        gate.forward = lambda x: torch.tensor(given)
    output, speaks = peer.forward(inputs)
    base, deltas = read_deltas(folder, "bert", list(TASKS))
    for i, gates in enumerate(given):
        state = {}
        for key, value in base.items():
            scales = gates if is_mlp(key.rpartition(".")[0]) else [0.3] * 3
            state[key] = value + sum(s * deltas[t][key] for s, t in zip(scales, TASKS, strict=True))
        model = FAMILIES["bert"].base.from_pretrained(folder / "base").eval()
        model.load_state_dict(state)
        alone = {k: v[i : i + 1] for k, v in inputs.items()}
        assert torch.allclose(output.last_hidden_state[i], model(**alone).last_hidden_state[0], atol=2e-5)
    assert speaks.argmax(1).tolist() == [0, 1, 2]


class OneHot(nn.Module):
    """A router that sends the rows of a batch to given tasks, however they look."""

    def __init__(self, tasks):
        super().__init__()
        self.tasks = torch.tensor(tasks)

    def forward(self, x):
        return torch.where(nn.functional.one_hot(self.tasks, 3).bool(), 0.0, -torch.inf)


@torch.no_grad()
@pytest.mark.parametrize("family", ["bert", "dinov2", "gpt2"])
def test_twin_with_a_certain_router_and_full_rank_is_the_expert(root, family):
    folder, inputs = peer_folder(root, family), FAMILIES[family].make_inputs(3)
    peer = PEERS["twin"](opened(folder), some_inputs(family, 2), kept=1.0, epochs=1)
    peer.router = OneHot([2, 0, 1])
    for i, prediction in enumerate(peer.predict(rows_of(inputs), top=4)):
        task = "cab"[i]
        expert = FAMILIES[family].expert.from_pretrained(folder / task).eval()
        wanted = expert(**{k: v[i : i + 1] for k, v in inputs.items()}).logits[0]
        assert prediction.task == task
        found = logits_of(prediction)
        assert [found[task, label] for label in expert.config.id2label.values()] == pytest.approx(
            wanted.tolist(), abs=1e-4
        )


@torch.no_grad()
def test_twin_mixes_experts_by_the_routers_weights(root):
    folder, inputs = peer_folder(root, "bert"), FAMILIES["bert"].make_inputs(2)
    peer = PEERS["twin"](opened(folder), some_inputs("bert", 2), kept=1.0, epochs=1)
    peer.router = type("Fixed", (nn.Module,), {"forward": lambda self, x: torch.tensor([[0.2, 0.5, 0.3]] * 2).log()})()
    # The shared expert is 0.3 of all; on top of it comes each expert's difference to it, by weights that sum to 1.
    wanted = dense(folder, "bert", [0.2, 0.5, 0.3])(**inputs)
    assert torch.allclose(peer.forward(inputs)[0].last_hidden_state, wanted.last_hidden_state, atol=2e-5)
