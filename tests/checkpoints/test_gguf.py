"""Bases in GGUF."""

from pathlib import Path

import numpy as np
import pytest

from massmerge import InputError
from massmerge.checkpoints import find_source
from massmerge.checkpoints.gguf import write_plain


def test_a_gguf_base_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    for text in ("small.gguf", "."):
        with pytest.raises(InputError, match=r"a GGUF file.*write_plain\('.*small\.gguf', 'FOLDER'\)"):
            find_source(text, tmp_path, download=False)


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


def write_gguf(path: Path, layers: int) -> Path:
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
        write_plain(write_gguf(tmp_path / "small.gguf", layers), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]


def test_what_is_at_the_target_of_a_gguf_file_stays(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="already exists"):
        write_plain(write_gguf(tmp_path / "small.gguf", 1), tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"
