"""How large buffers are allocated (glibc only; elsewhere nothing is changed).

A merge and a model want opposite things. A merge's buffers are all of other sizes, and on the heap they leave holes. A model
allocates the same buffers for every batch, and memory that went back to the system in between comes back page by page,
which can take as long as the arithmetic. Both settings apply to the process, and the last one holds. Allocator
settings from glibc's own environment variables are kept.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_LARGEST_ON_HEAP = 32 << 20  # what glibc takes at most
_NEVER = 2**31 - 1
_TOP = (
    8 << 20
)  # small buffers that are freed and wanted again: to fetch their pages anew takes longer than to read a disk
_kept = False  # whether `keep_buffers` has been called
_OWN_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


@contextmanager
def mapped_buffers() -> Iterator[None]:
    """Map every buffer from 1 MB on by itself, and give it back when it is freed; afterwards the setting is what it was.

    Otherwise holes grow with the tasks: 981 MB at the peak of a merge of 20 experts of ViT-B/32 size, against 579 MB.
    """
    _set(_MMAP_THRESHOLD, 1 << 20)
    _set(_TRIM_THRESHOLD, _TOP)
    try:
        yield
    finally:
        # glibc raises both by itself until somebody sets one; where it would come to is as near as one gets to before.
        _set(_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
        _set(_TRIM_THRESHOLD, _NEVER if _kept else 2 * _LARGEST_ON_HEAP)


def keep_buffers() -> None:
    """Take buffers of up to 32 MB from the heap, and keep what is freed for the next batch.

    For processes of our own, commands and the service: whoever uses the library has an allocator of theirs.
    """
    global _kept
    _kept = True
    _set(_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
    _set(_TRIM_THRESHOLD, _NEVER)


def _set(parameter: int, value: int) -> None:
    if any(name in os.environ for name in _OWN_SETTINGS):
        return
    with suppress(AttributeError, OSError, TypeError):  # TypeError: Windows has no library of that name
        ctypes.CDLL(None).mallopt(parameter, value)
