"""Finished parts of a merge."""

import torch

from massmerge.bundle import parts as module
from massmerge.bundle.parts import Parts, forget_headers
from massmerge.io.tensor_file import read_header


def test_the_header_of_a_part_is_read_once_for_all_tasks_that_ask(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(module, "read_header", lambda path: read.append(path) or read_header(path))
    parts = Parts(tmp_path, "mark")
    name = parts.put("000001", {"0.s": torch.ones(2)})
    for _ in range(3):
        assert parts.header("000001")["0.s"].shape == (2,)
        assert Parts(tmp_path, "", {"a": name}).header("a")["0.s"].shape == (2,)
    assert len(read) == 1
    forget_headers()
    parts.header("000001")
    assert len(read) == 2
