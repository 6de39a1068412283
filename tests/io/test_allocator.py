"""Buffers are given back during a merge, and kept for the next batch afterwards."""

import platform
import resource

import pytest
import torch

from massmerge.io.allocator import keep_buffers, mapped_buffers

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is set")
ROUNDS = 40


def share_taken(megabytes: int) -> float:
    """How many of the pages of buffers that come and go the system had to hand out, 1 being all."""
    torch.empty(megabytes << 20, dtype=torch.uint8).fill_(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(ROUNDS):
        torch.empty(megabytes << 20, dtype=torch.uint8).fill_(1)
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return taken * resource.getpagesize() / (ROUNDS * megabytes << 20)


def test_kept_buffers_are_taken_from_the_system_once():
    keep_buffers()
    assert share_taken(8) < 0.5


def test_mapped_buffers_go_back_each_time_and_are_kept_again_afterwards():
    with mapped_buffers():
        assert share_taken(30) >= 0.9  # larger than what other tests may have left on the heap
    assert share_taken(30) < 0.5


def test_a_merge_that_fails_leaves_buffers_kept():
    with pytest.raises(ValueError, match="no"), mapped_buffers():
        raise ValueError("no")
    assert share_taken(8) < 0.5


def test_settings_of_the_environment_are_left_alone(monkeypatch):
    keep_buffers()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000000")
    with mapped_buffers():
        assert share_taken(30) < 0.5
