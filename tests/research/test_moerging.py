"""Routed peers: what all of them promise, how they are trained, what is refused."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from massmerge.errors import InputError
from massmerge.model.answers import Prediction
from massmerge.research.peers import PEERS
from massmerge.research.peers.entropy import entropy
from massmerge.research.peers.twin import fit_router
from massmerge.research.peers.votes import Pass, shares
from models import FAMILIES, logits_of, rows_of, write_recipe, write_shifted
from peer_sources import TASKS, is_mlp, opened, peer_folder, some_inputs

QUICK = {"wemoe": {"steps": 2, "batch_size": 2}, "twin": {"epochs": 2}}


@pytest.fixture(scope="module")
def peers(root):
    """Gives a peer of the bert family with hardly any training, made once."""
    made = {}

    def peer(name):
        if name not in made:
            made[name] = PEERS[name](opened(peer_folder(root, "bert")), some_inputs("bert"), **QUICK.get(name, {}))
        return made[name]

    return peer


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
    given = ["c", "a", "b", "c"]
    pairs = peer.outcomes(rows, given, batch_size=3)
    for i, (row, (unknown, known)) in enumerate(zip(rows, pairs, strict=True)):
        assert isinstance(unknown, Prediction) and known.task == given[i]
        assert unknown.task == max(unknown.routing.weights, key=unknown.routing.weights.get)
        assert logits_of(unknown) == pytest.approx(logits_of(peer.predict([row])[0]), abs=1e-5)
        assert logits_of(known) == pytest.approx(logits_of(peer.predict([row], task=given[i])[0]), abs=1e-5)
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


def test_sizes_are_those_that_the_methods_promise(root):
    base = FAMILIES["bert"].base.from_pretrained(peer_folder(root, "bert") / "base")
    linear = {p: m for p, m in base.named_modules() if isinstance(m, nn.Linear)}
    plain = sum(t.numel() for t in base.state_dict().values())
    smile = PEERS["smile_1"](opened(peer_folder(root, "bert")), gate=4, rank=6)
    per_task = sum(6 * (m.in_features + m.out_features + 1) + m.out_features for m in linear.values())
    assert smile.nbytes == 4 * (plain + 3 * per_task)
    wider = PEERS["smile_1"](opened(peer_folder(root, "bert")), gate=9, rank=6)
    assert wider.nbytes - smile.nbytes == 4 * 3 * 3 * sum(m.in_features for m in linear.values()), (
        "gates beyond the rank"
    )
    mlps = sum(p.numel() for path, m in linear.items() if is_mlp(path) for p in m.parameters())
    gates = 2 * (32 * 32 + 32 + 32 * 3 + 3)
    assert PEERS["wemoe"](opened(peer_folder(root, "bert")), steps=0).nbytes == 4 * (plain + 3 * mlps + gates)


# Training


@pytest.mark.parametrize("name", ["wemoe", "twin"])
def test_training_repeats_and_follows_its_seed(root, peers, name):
    def trained(seed):
        peer = PEERS[name](opened(peer_folder(root, "bert")), some_inputs("bert"), seed=seed, **QUICK[name])
        return {k: t for k, t in peer.own_tensors() if k.startswith(("gate.", "router."))}

    first, other = trained(0), trained(1)
    torch.manual_seed(99)
    again = trained(0)
    assert all(first[key].equal(again[key]) for key in first)
    assert any(not first[key].equal(other[key]) for key in first)
    assert all(not tensor.requires_grad for tensor in first.values())


def test_training_leaves_the_generator_of_others_alone(root):
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    for name, options in QUICK.items():
        PEERS[name](opened(peer_folder(root, "bert")), some_inputs("bert"), **options)
    assert torch.rand(3).equal(wanted)


def test_a_step_moves_gates_to_where_the_heads_are_surer(root):
    inputs = some_inputs("bert", 1)  # one input a task: every draw is the same

    def unsure(peer):
        answers = [peer.predict(items, task=task, top=9)[0] for task, items in inputs.items()]
        return sum(float(entropy(torch.tensor([list(logits_of(a).values())]))) for a in answers)

    before = PEERS["wemoe"](opened(peer_folder(root, "bert")), steps=0)
    after = PEERS["wemoe"](opened(peer_folder(root, "bert")), inputs, steps=1, rate=1e-3, batch_size=1)
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


def test_what_cannot_be_is_refused_by_name(root, peers):
    with pytest.raises(InputError, match="no task 'x'"):
        peers("arrow").predict([], task="x")
    with pytest.raises(InputError, match="2 inputs, but 1 tasks"):
        peers("arrow").outcomes(rows_of(FAMILIES["bert"].make_inputs(2)), ["a"])
    for name in ("wemoe", "twin"):
        with pytest.raises(InputError, match="no inputs for b"):
            PEERS[name](opened(peer_folder(root, "bert")), {**some_inputs("bert"), "b": []})
    with pytest.raises(InputError, match="gate = 0"):
        PEERS["smile_1"](opened(peer_folder(root, "bert")), gate=0)
    with pytest.raises(InputError, match="kept = 0"):
        PEERS["twin"](opened(peer_folder(root, "bert")), some_inputs("bert"), kept=0)


def test_experts_that_change_no_linear_layer_are_refused(tmp_path):
    base = FAMILIES["bert"].make_base()
    base.save_pretrained(tmp_path / "base")
    norm = "encoder.layer.0.output.LayerNorm.weight"
    write_shifted(tmp_path / "n", "bert", base, {norm: torch.ones(32)})
    write_recipe(tmp_path, ["n"])
    with pytest.raises(InputError, match="no task changes a linear layer"):
        PEERS["smile_1"](opened(tmp_path))


def test_the_entropy_of_a_multi_label_head_is_the_sum_over_its_labels():
    several = "multi_label_classification"
    assert float(entropy(torch.zeros(2, 8), several)) == pytest.approx(8 * math.log(2), abs=1e-5)
    assert float(entropy(torch.tensor([[100.0, 100.0]]), several)) == pytest.approx(0.0, abs=1e-6)
