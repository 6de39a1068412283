"""Buffers are given back during a merge, and kept for the next batch afterwards.

Each case has a process of its own: what other tests have left on the heap would be used first.
"""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is set")
MEASURE = """
import ctypes, resource
from massmerge.io.allocator import keep_buffers, mapped_buffers

def fill(size):  # as torch allocates tensors on the CPU, but without the seconds that its import takes
    library, buffers = ctypes.CDLL(None), [ctypes.c_void_p() for _ in range(3)]
    for buffer in buffers:
        assert library.posix_memalign(ctypes.byref(buffer), ctypes.c_size_t(64), ctypes.c_size_t(size)) == 0
        ctypes.memset(buffer, 1, size)
    for buffer in buffers:
        library.free(buffer)

def share_taken(megabytes, rounds=10):
    fill(megabytes << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        fill(megabytes << 20)
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return taken * resource.getpagesize() / (3 * rounds * megabytes << 20)
"""


def shares(code: str, **environment: str) -> list[float]:
    """What the code prints: how many pages of buffers that come and go the system had to hand out, 1 being all."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE + code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return [float(line) for line in done.stdout.split()]


def test_kept_buffers_are_taken_from_the_system_once():
    (kept,) = shares("keep_buffers(); print(share_taken(30))")
    assert kept < 0.5


def test_mapped_buffers_go_back_each_time_and_are_kept_again_afterwards():
    mapped, after = shares("with mapped_buffers():\n    print(share_taken(8))\nprint(share_taken(8))")
    assert mapped >= 0.9 and after < 0.5


def test_a_merge_that_fails_leaves_buffers_kept():
    code = "try:\n    with mapped_buffers():\n        raise ValueError\nexcept ValueError:\n    print(share_taken(8))"
    (after,) = shares(code)
    assert after < 0.5


def test_settings_of_the_environment_are_left_alone():
    own = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}
    (mapped,) = shares("with mapped_buffers():\n    print(share_taken(8))", **own)
    assert mapped < 0.5
