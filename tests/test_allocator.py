"""Buffers are given back during a merge, and kept for the next batch afterwards."""

import platform
import resource

import pytest
import torch

from massmerge.allocator import keep_buffers, mapped_buffers

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is set")
ROUNDS = 20
PAGES = ROUNDS * (8 << 20) // resource.getpagesize()


def pages_taken(rounds: int = ROUNDS) -> int:
    """How many pages the system hands out while buffers of 8 MB come and go."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        torch.empty(8 << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_kept_buffers_are_taken_from_the_system_once():
    keep_buffers()
    pages_taken(1)
    assert pages_taken() < PAGES / 4


def test_mapped_buffers_go_back_each_time_and_are_kept_again_afterwards():
    with mapped_buffers():
        inside = pages_taken()
    pages_taken(1)
    assert inside >= PAGES > 4 * pages_taken()


def test_a_failed_merge_leaves_buffers_kept():
    with pytest.raises(ValueError, match="no"), mapped_buffers():
        raise ValueError("no")
    pages_taken(1)
    assert pages_taken() < PAGES / 4
