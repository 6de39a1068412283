"""Routed peers against obviously right twins: loops over tokens and experts, dense merges, the experts themselves."""

import json
import math
from collections import Counter
from functools import cache

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from massmerge.answers import Prediction
from massmerge.errors import InputError
from massmerge.moerging import PEERS
from massmerge.moerging.entropy import entropy
from massmerge.moerging.twin import fit_router
from massmerge.moerging.votes import Pass, shares
from massmerge.prepare import prepare
from massmerge.recipe import Recipe
from massmerge.trees import replace_module
from models import FAMILIES, logits_of, read_deltas, rows_of, write_family, write_recipe, write_shifted
from naive import svd

TASKS = {"a": 2, "b": 3, "c": 4}
QUICK = {"wemoe": {"steps": 2, "batch_size": 2}, "twin": {"epochs": 2}}


@cache
def opened(folder):
    return prepare(Recipe.load(folder / "recipe.yaml"), folder, download=False)


def some_inputs(name, count=4):
    return {task: rows_of(FAMILIES[name].make_inputs(count, seed)) for seed, task in enumerate(TASKS)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Gives a family's base and experts, made once."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            if name == "clip":
                clip_folder(made[name])
            else:
                write_family(made[name], name, TASKS)
        return made[name]

    return folder


@pytest.fixture(scope="module")
def peers(folders):
    """Gives a peer of the bert family with hardly any training, made once."""
    made = {}

    def peer(name):
        if name not in made:
            made[name] = PEERS[name](opened(folders("bert")), some_inputs("bert"), **QUICK.get(name, {}))
        return made[name]

    return peer


# Twins


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
def test_tokens_are_routed_as_a_loop_over_tokens_and_experts_does(folders, family, name):
    options, (gate, rank, top_k) = TOKEN_PEERS[name]
    folder, inputs = folders(family), FAMILIES[family].make_inputs(2)
    model, layers = looped(folder, family, gate, rank, top_k)
    wanted = model(**inputs)
    output, speaks = PEERS[name](opened(folder), **options).forward(inputs)
    assert torch.allclose(output.last_hidden_state, wanted.last_hidden_state, atol=2e-5)
    for i in range(2):
        votes = Counter(Counter(sorted(layer.chosen[i].tolist())).most_common(1)[0][0] for layer in layers)
        assert {t: votes[t] / len(layers) for t in range(3)} == pytest.approx(dict(enumerate(speaks[i].tolist())))


def test_the_loops_inputs_go_to_several_experts(folders):
    _, speaks = PEERS["smile_1"](opened(folders("bert")), gate=4, rank=6).forward(FAMILIES["bert"].make_inputs(2))
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
def test_wemoe_with_constant_gates_is_task_arithmetic(folders, family):
    folder, inputs = folders(family), FAMILIES[family].make_inputs(3)
    peer = PEERS["wemoe"](opened(folder), steps=0)
    assert len(peer.gates) == 2, "one for each block"
    for gate in peer.gates.values():
        gate.second.weight.zero_()
    wanted = dense(folder, family, [0.3] * 3)(**inputs)
    assert torch.allclose(peer.forward(inputs)[0].last_hidden_state, wanted.last_hidden_state, atol=2e-5)


@torch.no_grad()
def test_wemoe_with_gates_that_differ_merges_each_input_for_itself(folders):
    folder, inputs = folders("bert"), FAMILIES["bert"].make_inputs(3)
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
def test_twin_with_a_certain_router_and_full_rank_is_the_expert(folders, family):
    folder, inputs = folders(family), FAMILIES[family].make_inputs(3)
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
def test_twin_mixes_experts_by_the_routers_weights(folders):
    folder, inputs = folders("bert"), FAMILIES["bert"].make_inputs(2)
    peer = PEERS["twin"](opened(folder), some_inputs("bert", 2), kept=1.0, epochs=1)
    peer.router = type("Fixed", (nn.Module,), {"forward": lambda self, x: torch.tensor([[0.2, 0.5, 0.3]] * 2).log()})()
    # The shared expert is 0.3 of all; on top of it comes each expert's difference to it, by weights that sum to 1.
    wanted = dense(folder, "bert", [0.2, 0.5, 0.3])(**inputs)
    assert torch.allclose(peer.forward(inputs)[0].last_hidden_state, wanted.last_hidden_state, atol=2e-5)


# Votes


def test_a_layer_votes_for_the_task_of_most_real_tokens_and_the_layers_are_counted():
    current = Pass(2, torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]))
    current.vote(torch.tensor([1, 2, 1, 2, 2, 0, 0, 2, 2, 2]), 3)
    current.vote(torch.tensor([2, 2, 1, 0, 0, 1, 1, 0, 0, 2]), 3)
    current.vote(torch.tensor([1, 0]), 3)  # a pooled layer sees one row of each input
    assert [vote.tolist() for vote in current.votes] == [[1, 2], [2, 0], [1, 0]], "equals go to the first"
    assert shares(current.votes, 3).tolist() == [pytest.approx([0, 2 / 3, 1 / 3]), pytest.approx([2 / 3, 0, 1 / 3])]


# What all peers promise


@pytest.mark.parametrize("name", PEERS)
def test_answers_depend_neither_on_padding_nor_on_the_rest_of_the_batch(peers, name):
    peer = peers(name)
    rows = rows_of(FAMILIES["bert"].make_inputs(5, seed=3))
    rows = [{k: v[:n] for k, v in row.items()} for row, n in zip(rows, (7, 3, 5, 2, 6), strict=True)]
    together, alone = peer.predict(rows), peer.predict(rows, batch_size=1)
    longer = {k: torch.cat([v, torch.zeros(4, dtype=v.dtype)]) for k, v in rows[1].items()}
    padded = peer.predict([longer])[0]
    for one, other in [*zip(together, alone, strict=True), (together[1], padded)]:
        assert logits_of(one) == pytest.approx(logits_of(other), abs=1e-5)
        assert one.routing.weights == pytest.approx(other.routing.weights, abs=1e-5)


@pytest.mark.parametrize("name", PEERS)
def test_outcomes_are_the_answers_with_the_head_chosen_and_with_the_head_told(peers, name):
    peer = peers(name)
    rows = rows_of(FAMILIES["bert"].make_inputs(4, seed=5))
    told = ["c", "a", "b", "c"]
    pairs = peer.outcomes(rows, told, batch_size=3)
    for i, (row, (unknown, known)) in enumerate(zip(rows, pairs, strict=True)):
        assert isinstance(unknown, Prediction) and known.task == told[i]
        assert unknown.task == max(unknown.routing.weights, key=unknown.routing.weights.get)
        assert logits_of(unknown) == pytest.approx(logits_of(peer.predict([row])[0]), abs=1e-5)
        assert logits_of(known) == pytest.approx(logits_of(peer.predict([row], task=told[i])[0]), abs=1e-5)
    assert peer.tasks == list(TASKS) and {t: len(names) for t, names in peer.labels.items()} == TASKS


@pytest.mark.parametrize("name", PEERS)
def test_what_is_saved_weighs_what_the_peer_says(peers, name, tmp_path):
    peer = peers(name)
    peer.save(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert sum(t.nbytes for t in saved.values()) == peer.nbytes > peer.base.num_parameters() * 4
    assert (tmp_path / "model.safetensors").stat().st_size > peer.nbytes
    about = json.loads((tmp_path / "peer.json").read_text())
    assert about["tasks"] == list(TASKS) and about["options"] == peer.options


def test_sizes_are_those_that_the_methods_promise(folders):
    base = FAMILIES["bert"].base.from_pretrained(folders("bert") / "base")
    linear = {p: m for p, m in base.named_modules() if isinstance(m, nn.Linear)}
    plain = sum(t.numel() for t in base.state_dict().values())
    smile = PEERS["smile_1"](opened(folders("bert")), gate=4, rank=6)
    per_task = sum(6 * (m.in_features + m.out_features + 1) + m.out_features for m in linear.values())
    assert smile.nbytes == 4 * (plain + 3 * per_task)
    wider = PEERS["smile_1"](opened(folders("bert")), gate=9, rank=6)
    assert wider.nbytes - smile.nbytes == 4 * 3 * 3 * sum(m.in_features for m in linear.values()), (
        "gates beyond the rank"
    )
    mlps = sum(p.numel() for path, m in linear.items() if is_mlp(path) for p in m.parameters())
    gates = 2 * (32 * 32 + 32 + 32 * 3 + 3)
    assert PEERS["wemoe"](opened(folders("bert")), steps=0).nbytes == 4 * (plain + 3 * mlps + gates)


def is_mlp(path):
    return "intermediate" in path or (path.endswith("output.dense") and "attention" not in path)


# Training


@pytest.mark.parametrize("name", ["wemoe", "twin"])
def test_training_repeats_and_follows_its_seed(folders, peers, name):
    def trained(seed):
        peer = PEERS[name](opened(folders("bert")), some_inputs("bert"), seed=seed, **QUICK[name])
        return {k: t for k, t in peer.own_tensors() if k.startswith(("gate.", "router."))}

    first, other = trained(0), trained(1)
    torch.manual_seed(99)
    again = trained(0)
    assert all(first[key].equal(again[key]) for key in first)
    assert any(not first[key].equal(other[key]) for key in first)
    assert all(not tensor.requires_grad for tensor in first.values())


def test_training_leaves_the_generator_of_others_alone(folders):
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    for name, options in QUICK.items():
        PEERS[name](opened(folders("bert")), some_inputs("bert"), **options)
    assert torch.rand(3).equal(wanted)


def test_a_step_moves_gates_to_where_the_heads_are_surer(folders):
    inputs = some_inputs("bert", 1)  # one input a task: every draw is the same

    def unsure(peer):
        answers = [peer.predict(items, task=task, top=9)[0] for task, items in inputs.items()]
        return sum(float(entropy(torch.tensor([list(logits_of(a).values())]))) for a in answers)

    before = PEERS["wemoe"](opened(folders("bert")), steps=0)
    after = PEERS["wemoe"](opened(folders("bert")), inputs, steps=1, rate=1e-3, batch_size=1)
    for block, gate in before.gates.items():
        moved = after.gates[block].second.bias - gate.second.bias
        for task in range(3):
            slopes = []
            for shift in (0.3, -0.6):
                with torch.no_grad():
                    gate.second.bias[task] += shift
                slopes.append(unsure(before))
            with torch.no_grad():
                gate.second.bias[task] += 0.3
            # Adam's first step is the rate against the gradient's sign.
            assert float(moved[task]) == pytest.approx(-1e-3 * math.copysign(1, slopes[0] - slopes[1]), rel=0.05)
    shared = [k for k in before.tensors() if not k.startswith("gate.")]
    assert all(before.tensors()[k].equal(after.tensors()[k]) for k in shared), "nothing but gates is trained"


def test_the_entropy_of_even_logits_is_that_of_a_fair_draw():
    assert float(entropy(torch.zeros(2, 8))) == pytest.approx(math.log(8), abs=1e-6)
    assert float(entropy(torch.tensor([[100.0, 0.0]]))) == pytest.approx(0.0, abs=1e-6)


def test_the_router_of_twin_learns_tasks_that_can_be_told_apart():
    generator = torch.Generator().manual_seed(0)
    owners = torch.arange(3).repeat_interleave(40)
    given = torch.randn(120, 16, generator=generator) + 4 * torch.eye(3, 16)[owners]
    router = fit_router(given[::2], owners[::2], 3, epochs=50, batch_size=16, rate=5e-4, seed=0)
    assert (router(given[1::2]).argmax(1) == owners[1::2]).float().mean() > 0.95


# What is refused


def test_what_cannot_be_is_refused_by_name(folders, peers):
    with pytest.raises(InputError, match="no task 'x'"):
        peers("arrow").predict([], task="x")
    with pytest.raises(InputError, match="2 inputs, but 1 tasks"):
        peers("arrow").outcomes(rows_of(FAMILIES["bert"].make_inputs(2)), ["a"])
    for name in ("wemoe", "twin"):
        with pytest.raises(InputError, match="no inputs for b"):
            PEERS[name](opened(folders("bert")), {**some_inputs("bert"), "b": []})
    with pytest.raises(InputError, match="gate = 0"):
        PEERS["smile_1"](opened(folders("bert")), gate=0)
    with pytest.raises(InputError, match="kept = 0"):
        PEERS["twin"](opened(folders("bert")), some_inputs("bert"), kept=0)


def test_experts_that_change_no_linear_layer_are_refused(tmp_path):
    base = FAMILIES["bert"].make_base()
    base.save_pretrained(tmp_path / "base")
    norm = "encoder.layer.0.output.LayerNorm.weight"
    write_shifted(tmp_path / "n", "bert", base, {norm: torch.ones(32)})
    write_recipe(tmp_path, ["n"])
    with pytest.raises(InputError, match="no task changes a linear layer"):
        PEERS["smile_1"](opened(tmp_path))


def clip_folder(folder):
    """A CLIP tower with experts that have linear heads of their own."""
    family = FAMILIES["clip"]
    base = family.make_base()
    base.save_pretrained(folder / "base")
    tasks = []
    for seed, (task, labels) in enumerate(TASKS.items()):
        family.make_expert(base, seed).save_pretrained(folder / task)
        save_file({"weight": torch.randn(labels, 32)}, folder / f"{task}.safetensors")
        head = {"weights": f"{task}.safetensors", "labels": [f"{task}{i}" for i in range(labels)]}
        tasks.append({"name": task, "expert": task, "head": head})
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"base": "base", "tasks": tasks}, sort_keys=False))
    return folder
