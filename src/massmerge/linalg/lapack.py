"""LAPACK's partial symmetric eigensolver, called without the interpreter lock.

`scipy.linalg.eigh(subset_by_index=…)` calls the same routine but holds the lock, so two threads factor no faster than
one. The routine's address is public (`scipy.linalg.cython_lapack`), and ctypes releases the lock around a call.

Callers that also use torch should hold scipy's BLAS to one thread (`threadpoolctl.threadpool_limits(1)`, in the main
thread: in another it may do nothing). Two pools that spin on the same cores cost more than the solver gains from a
second thread.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cython_lapack

_ROUTINE = {"float32": "ssyevr", "float64": "dsyevr"}


@cache
def _routine(name: str) -> Any:
    """The C function behind scipy's capsule of that name; every argument is a pointer, as in Fortran."""
    capsule = cython_lapack.__pyx_capi__[name]
    name_of, pointer_of = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer_of(capsule, name_of(capsule))
    if address is None:
        raise ImportError(f"scipy does not give the address of {name}")
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 21)(address)


def top_eigh(gram: NDArray[Any], k: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The k largest eigenvalues of a symmetric matrix, largest first, and their eigenvectors as rows.

    Args:
        gram: (n, n), float32 or float64, symmetric. Not changed.
        k: how many, 1 ≤ k ≤ n.

    Returns:
        values (k,) and vectors (k, n).

    Raises:
        np.linalg.LinAlgError: the solver did not converge, or the matrix holds a value that is not finite.
    """
    n = gram.shape[0]
    if not 1 <= k <= n or gram.shape != (n, n):
        raise ValueError(f"cannot take {k} eigenvalues of a matrix of shape {gram.shape}")
    dtype = gram.dtype
    routine = _routine(_ROUTINE[dtype.name])
    matrix = np.array(gram, order="F")  # overwritten by the solver
    values = np.empty(n, dtype)
    vectors = np.empty((k, n), dtype)  # Fortran's (n, k), so rows here are eigenvectors
    support = np.empty(2 * k, np.int32)
    found, info = ctypes.c_int(), ctypes.c_int()
    unused = np.zeros(1, dtype)  # interval bounds and tolerance: not used with an index range, 0 = default

    def call(work: NDArray[Any], lwork: int, iwork: NDArray[Any], liwork: int) -> None:
        """Run the routine, or with sizes of -1 ask it how much space it wants."""
        size, low, high = ctypes.c_int(n), ctypes.c_int(n - k + 1), ctypes.c_int(n)
        n_work, n_iwork = ctypes.c_int(lwork), ctypes.c_int(liwork)
        ref = ctypes.byref
        routine(
            b"V", b"I", b"L", ref(size), matrix.ctypes.data, ref(size), unused.ctypes.data, unused.ctypes.data,
            ref(low), ref(high), unused.ctypes.data, ref(found), values.ctypes.data, vectors.ctypes.data, ref(size),
            support.ctypes.data, work.ctypes.data, ref(n_work), iwork.ctypes.data, ref(n_iwork), ref(info),
        )  # fmt: skip
        if info.value != 0:
            raise np.linalg.LinAlgError(f"eigensolver returned {info.value} on a matrix of size {n}")

    sizes, isizes = np.empty(1, dtype), np.empty(1, np.int32)
    call(sizes, -1, isizes, -1)  # asks for the workspace sizes
    lwork, liwork = int(sizes[0]), int(isizes[0])
    call(np.empty(lwork, dtype), lwork, np.empty(liwork, np.int32), liwork)
    # With nan or inf inside, the solver reports success, and finds nothing or values that are none, as its build has it.
    if found.value != k or not np.isfinite(values[:k]).all():
        raise np.linalg.LinAlgError(f"eigensolver found {found.value} of {k} eigenvalues; is every entry finite?")
    return values[:k][::-1].copy(), vectors[::-1].copy()
