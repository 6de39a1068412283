"""A model that only routes: what the whole model says of the task, from the part of the base that a first pass reads."""

import pytest

import massmerge
from massmerge.model.load import load_routing
from massmerge.model.speed import packed
from massmerge.routing.sessions import Sessions
from models import FAMILIES, family_bundle, rows_of, with_options, write_family


def base_bytes(model) -> int:
    return sum(tensor.nbytes for tensor in model.core.base.parameters())


@pytest.mark.parametrize("name", ["bert", "vit", "t5", "llama"])
def test_it_routes_as_the_whole_model_does_and_holds_less_of_the_base(root, name):
    bundle, rows = family_bundle(root, name), rows_of(FAMILIES[name].make_inputs(4))
    whole, part = massmerge.load(bundle), load_routing(bundle, mapped=False)
    assert [r.selected for r in part.route(rows)] == [r.selected for r in whole.route(rows)]
    assert part.route(rows)[0].residuals == pytest.approx(whole.route(rows)[0].residuals, abs=1e-5)
    assert base_bytes(part) < 0.85 * base_bytes(whole)


@pytest.mark.parametrize("name", ["bert", "t5", "llama"])
def test_weights_that_are_read_into_memory_are_held_once_in_the_processors_layout(root, monkeypatch, name):
    monkeypatch.setattr(packed, "_LEAST_VALUES", 0)
    bundle, rows = family_bundle(root, name), rows_of(FAMILIES[name].make_inputs(3))
    rows += [{"input_ids": rows[0]["input_ids"][:2]}]  # fewer tokens than are worth packing
    part = load_routing(bundle, mapped=False)
    packs = [m for m in part.core.base.modules() if isinstance(m, packed.PackedLinear) and m.pack._packed is not None]
    assert packs and not any(layer.weight.numel() for layer in packs)
    for row in rows:
        whole = massmerge.load(bundle).route([row])[0]
        assert part.route([row])[0].residuals == pytest.approx(whole.residuals, abs=1e-5)


def test_blocks_behind_the_last_voting_site_are_dropped_and_all_before_it_are_kept(root, tmp_path):
    bundle = with_options(family_bundle(root, "llama"), tmp_path / "early", router={"site": ["O0"]})
    layers = load_routing(bundle).core.base.layers
    sizes = [{name: p.numel() for name, p in layer.named_parameters()} for layer in layers]
    assert sizes[0]["self_attn.q_proj.weight"] and sizes[0]["input_layernorm.weight"]
    assert not any(sizes[1].values()) and not sizes[0]["mlp.up_proj.weight"] and not sizes[0]["self_attn.o_proj.weight"]


def test_a_fixed_first_pass_needs_none_of_the_weights_that_it_replaces(tmp_path):
    rows = rows_of(FAMILIES["bert"].make_inputs(3))
    massmerge.merge(write_family(tmp_path, "bert", {"a": 2, "b": 2}, router={"first_pass": "fixed"}), tmp_path / "out")
    whole, part = massmerge.load(tmp_path / "out"), load_routing(tmp_path / "out")
    assert not part.core.base.encoder.layer[0].attention.self.query.weight.numel()
    assert [r.selected for r in part.route(rows)] == [r.selected for r in whole.route(rows)]


def test_sessions_share_evidence_where_nothing_is_answered(bert):
    row = rows_of(FAMILIES["bert"].make_inputs(6))
    memory = Sessions()
    alone, together = bert.route(row), bert.route(row, session="one", memory=memory)
    assert {tuple(r.selected) for r in together} == {tuple(together[0].selected)} and len(memory) == 1
    assert [r.residuals for r in alone] != [r.residuals for r in together]
