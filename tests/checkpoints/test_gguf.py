"""Bases in GGUF."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from massmerge import InputError
from massmerge.checkpoints import find_source
from massmerge.checkpoints.backbone import open_base
from massmerge.checkpoints.gguf import write_plain

TOKENS = ["<s>", "</s>", "a", "b", "c", "ab", "d", "e"]


def test_a_gguf_base_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    for text in ("small.gguf", "."):
        with pytest.raises(InputError, match=r"a GGUF file.*write_plain\('.*small\.gguf', 'FOLDER'\)"):
            find_source(text, tmp_path, download=False)


def write_gguf(path):
    """A Llama of one block in weights of 8 bits, and what they were before."""
    gguf = pytest.importorskip("gguf")
    writer, q8 = gguf.GGUFWriter(path, "llama"), gguf.GGMLQuantizationType.Q8_0
    for name, value in {
        "context_length": 64, "block_count": 1, "embedding_length": 32, "feed_forward_length": 64, "head_count": 2,
        "head_count_kv": 2, "rope_dimension_count": 16, "layer_norm_rms_eps": 1e-5, "vocab_size": len(TOKENS),
        "tokenizer_model": "gpt2", "token_list": TOKENS, "token_merges": ["a b"], "bos_token_id": 0, "eos_token_id": 1,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    draw, shapes = np.random.default_rng(0), {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    shapes |= {f"attn_{part}": (32, 32) for part in ("q", "k", "v", "output")}
    shapes = {f"blk.0.{name}": shape for name, shape in shapes.items()} | {"token_embd": (len(TOKENS), 32)}
    held = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, numbers in held.items():
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(numbers, q8), raw_dtype=q8)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def test_a_gguf_file_is_written_as_a_folder_in_full_numbers(tmp_path):
    held = write_gguf(tmp_path / "small.gguf")
    write_plain(tmp_path / "small.gguf", tmp_path / "base")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base").model
    pairs = {"token_embd": model.embed_tokens, "blk.0.ffn_down": model.layers[0].mlp.down_proj}
    for name, module in pairs.items():
        assert module.weight.dtype == torch.float32
        torch.testing.assert_close(module.weight.detach(), torch.from_numpy(held[name]), atol=0.02, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "base")("abc")["input_ids"][-2:] == [5, 4]
    opened = open_base(find_source("base", tmp_path, download=False))
    assert len(opened.slots) > 8


def test_a_file_that_is_no_gguf_is_an_error_in_words(tmp_path):
    (tmp_path / "small.gguf").write_bytes(b"no such thing")
    pytest.importorskip("gguf")
    with pytest.raises(InputError, match=r"small\.gguf: transformers cannot read this GGUF file"):
        write_plain(tmp_path / "small.gguf", tmp_path / "out")
    with pytest.raises(InputError, match="no such file"):
        write_plain(tmp_path / "missing.gguf", tmp_path / "out")


def test_a_configuration_beside_a_gguf_file_may_not_name_code(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoConfig": "evil.Config"}}')
    with pytest.raises(InputError, match="auto_map"):
        write_plain(tmp_path / "small.gguf", tmp_path / "out")


def write_headers(path: Path, layers: int) -> Path:
    """A GGUF file of a tiny Llama that holds its word embeddings and nothing else."""
    gguf = pytest.importorskip("gguf")
    file = gguf.GGUFWriter(path, "llama")
    file.add_block_count(layers)
    for add in (file.add_embedding_length, file.add_feed_forward_length, file.add_context_length, file.add_vocab_size):
        add(32)
    file.add_head_count(2)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_tokenizer_model("llama")
    file.add_token_list([f"t{i}" for i in range(32)])
    file.add_token_scores([0.0] * 32)
    file.add_tensor("token_embd.weight", np.zeros((32, 32), dtype=np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


@pytest.mark.parametrize(
    ("layers", "words"), [(1, "weights are missing"), (1000, "describes a model of"), (10**9, "num_hidden_layers")]
)
def test_a_gguf_file_that_lacks_what_it_describes_is_refused_and_nothing_is_written(tmp_path, layers, words):
    with pytest.raises(InputError, match=words):
        write_plain(write_headers(tmp_path / "small.gguf", layers), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]


def test_what_is_at_the_target_of_a_gguf_file_stays(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="already exists"):
        write_plain(write_headers(tmp_path / "small.gguf", 1), tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"
