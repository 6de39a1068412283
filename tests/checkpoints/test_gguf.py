"""Bases in GGUF."""

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
