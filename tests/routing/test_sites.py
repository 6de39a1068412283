"""Places where inputs can be routed, found by tracing a probe forward of every architecture of the tests."""

import json

import pytest
import torch
import transformers as tf
from click.testing import CliRunner

from massmerge.cli.main import main
from massmerge.errors import InputError
from massmerge.routing import choose_sites, find_sites
from models import FAMILIES, family_bundle


@pytest.fixture(scope="module")
def sites():
    """The sites of every family."""
    return {name: find_sites(family.make_base()) for name, family in FAMILIES.items()}


def named(sites, name):
    return next(site for site in sites if site.name == name)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_block_has_a_site_for_its_attention_and_one_for_its_mlp(sites, name):
    assert {"A0", "M0", "A1", "M1"} <= {site.name for site in sites[name]}


@pytest.mark.parametrize("name", FAMILIES)
def test_sites_come_in_the_order_of_a_forward_pass(sites, name):
    depths = [site.depth for site in sites[name]]
    assert depths == sorted(depths)
    assert depths[0] == 0.0
    assert depths[-1] < 1.0


@pytest.mark.parametrize("name", FAMILIES)
def test_every_site_has_a_name_of_its_own(sites, name):
    names = [site.name for site in sites[name]]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_linear_layer_that_a_pass_calls_reads_exactly_one_site(sites, name):
    layers = [module for site in sites[name] for module in site.modules]
    assert len(set(layers)) == len(layers)


SEPARATE = {
    "bert": "encoder.layer.0.attention.self.{}:query key value",
    "roberta": "encoder.layer.0.attention.self.{}:query key value",
    "distilbert": "transformer.layer.0.attention.{}:q_lin k_lin v_lin",
    "vit": "layers.0.attention.{}:q_proj k_proj v_proj",
    "clip": "encoder.layers.0.self_attn.{}:q_proj k_proj v_proj",
    "t5": "encoder.block.0.layer.0.SelfAttention.{}:q k v",
    "llama": "layers.0.self_attn.{}:q_proj k_proj v_proj",
}


@pytest.mark.parametrize("name", SEPARATE)
def test_queries_keys_and_values_read_one_site(sites, name):
    path, _, layers = SEPARATE[name].partition(":")
    assert set(named(sites[name], "A0").modules) == {path.format(layer) for layer in layers.split()}


@pytest.mark.parametrize(("name", "layer"), [("gpt2", "h.0.attn.c_attn"), ("modernbert", "layers.0.attn.Wqkv")])
def test_a_layer_for_queries_keys_and_values_together_is_a_site_alone(sites, name, layer):
    assert named(sites[name], "A0").modules == (layer,)


def test_gate_and_up_projection_of_a_gated_mlp_read_one_site(sites):
    assert named(sites["llama"], "M0").modules == ("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj")


def test_both_inner_layers_of_a_gated_t5_read_one_site():
    base = FAMILIES["t5"].make_base(feed_forward_proj="gated-gelu")
    path = "encoder.block.0.layer.1.DenseReluDense"
    assert named(find_sites(base), "M0").modules == (f"{path}.wi_0", f"{path}.wi_1")


def test_the_sites_of_an_encoder_decoder_lie_in_its_encoder(sites):
    assert all(module.startswith("encoder.") for site in sites["t5"] for module in site.modules)


def test_a_block_that_is_called_again_and_again_has_the_sites_of_one():
    config = tf.AlbertConfig(vocab_size=60, embedding_size=16, hidden_size=32, num_hidden_layers=3,
                             num_attention_heads=2, intermediate_size=64)  # fmt: skip
    names = [site.name for site in find_sites(tf.AlbertModel(config).eval())]
    assert names.count("A0") == names.count("M0") == 1
    assert "M1" not in names


def test_a_site_knows_the_width_of_its_activation(sites):
    assert named(sites["bert"], "M0").width == 32
    assert named(sites["bert"], "D0").width == 64
    assert named(sites["bert"], "D0").modules == ("encoder.layer.0.output.dense",)


def test_a_site_names_the_weights_that_read_it(sites):
    assert named(sites["bert"], "M1").tensors == ("encoder.layer.1.intermediate.dense.weight",)


def test_tracing_leaves_no_hook_behind():
    base = FAMILIES["bert"].make_base()
    find_sites(base)
    assert not any(module._forward_pre_hooks for module in base.modules())


# Which of them vote


def test_auto_for_text_is_the_inputs_of_mlp_and_attention_output_in_every_block(sites):
    assert [site.name for site in choose_sites(sites["bert"], "auto")] == ["O0", "M0", "O1", "M1"]


def test_auto_for_images_is_the_attention_outputs_of_the_first_half_of_the_blocks():
    base = FAMILIES["vit"].make_base(num_hidden_layers=4)
    assert [site.name for site in choose_sites(find_sites(base), "auto", half=True)] == ["O0", "O1"]


@pytest.mark.parametrize("letter", ["A", "M", "O"])
def test_auto_is_another_kind_of_site_where_more_tasks_change_something_there(sites, letter):
    chosen = choose_sites(sites["bert"], "auto", lambda site: 3 if site.name.startswith(letter) else 1)
    assert [site.name for site in chosen] == [f"{letter}0", f"{letter}1"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_layers_behind_attention_and_mlp_are_sites_with_short_names(sites, name):
    names = [site.name for site in sites[name] if site.name in ("A1", "O1", "M1", "D1")]
    assert names == ["A1", "O1", "M1", "D1"]


def test_a_site_can_be_named_by_the_path_of_a_layer_or_of_its_weight(sites):
    path = "encoder.layer.1.attention.self.value"
    assert [s.name for s in choose_sites(sites["bert"], path)] == ["A1"]
    assert [s.name for s in choose_sites(sites["bert"], f"{path}.weight")] == ["A1"]


def test_sites_vote_in_the_order_of_the_pass_and_once_each(sites):
    chosen = choose_sites(sites["bert"], ["M1", "A0", "M1", "encoder.layer.0.attention.self.key"])
    assert [site.name for site in chosen] == ["A0", "M1"]


def test_an_unknown_site_is_refused_with_those_there_are(sites):
    with pytest.raises(InputError, match=r"no site 'M9'\. Choose from A0, O0, M0, D0, A1, O1, M1, D1"):
        choose_sites(sites["bert"], ["M0", "M9"])


# The list of them


@pytest.fixture(scope="module")
def bundle(root):
    return family_bundle(root, "bert")


def test_inspect_lists_the_sites_and_which_of_them_vote(bundle):
    done = CliRunner().invoke(main, ["inspect", str(bundle), "--sites"])
    line = next(row for row in done.output.splitlines() if row.startswith("M0"))
    assert done.exit_code == 0
    assert "encoder.layer.0.intermediate.dense" in line
    assert line.endswith("votes")
    assert not next(row for row in done.output.splitlines() if row.startswith("A1")).endswith("votes")


def test_the_list_of_sites_can_be_had_as_json(bundle):
    done = CliRunner().invoke(main, ["inspect", str(bundle), "--sites", "--json"])
    assert [site["name"] for site in json.loads(done.output) if site["votes"]] == ["O0", "M0", "O1", "M1"]


def test_tracing_does_not_change_the_model():
    base = FAMILIES["vit"].make_base()
    inputs = FAMILIES["vit"].make_inputs(2)
    with torch.inference_mode():
        before = base(**inputs).last_hidden_state
        find_sites(base)
        assert torch.equal(base(**inputs).last_hidden_state, before)
