"""The partial eigensolver: what it returns, what it leaves alone, and what threads do to it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from massmerge.linalg.lapack import top_eigh


def gram(n: int, seed: int, dtype: str = "float64") -> NDArray:
    x = np.random.default_rng(seed).standard_normal((n + 5, n)).astype(dtype)
    return x.T @ x


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 1), (7, 7), (40, 3), (40, 39)])
def test_values_are_the_k_largest_in_falling_order(n: int, k: int, dtype: str) -> None:
    matrix = gram(n, seed=n, dtype=dtype)
    values, _ = top_eigh(matrix, k)
    expected = np.linalg.eigvalsh(matrix.astype("float64"))[::-1][:k]
    np.testing.assert_allclose(values, expected, rtol=1e-4 if dtype == "float32" else 1e-10)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_are_orthonormal_eigenvectors(dtype: str) -> None:
    matrix = gram(30, seed=1, dtype=dtype)
    values, vectors = top_eigh(matrix, 8)
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(8), atol=tolerance)
    np.testing.assert_allclose(vectors @ matrix, values[:, None] * vectors, atol=tolerance * values[0])


@pytest.mark.parametrize(
    "matrix", [np.eye(24), np.zeros((24, 24)), np.ones((24, 24)), np.kron(np.eye(4), np.ones((6, 6)))]
)
def test_vectors_of_repeated_eigenvalues_are_orthonormal(matrix: NDArray) -> None:
    _, vectors = top_eigh(matrix, 10)
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(10), atol=1e-10)


def test_the_given_matrix_is_not_changed() -> None:
    matrix = gram(20, seed=2)
    before = matrix.copy()
    top_eigh(matrix, 4)
    np.testing.assert_array_equal(matrix, before)


def test_a_strided_view_gives_the_same_bytes_as_its_copy() -> None:
    view = gram(40, seed=3)[::2, ::2]
    assert top_eigh(view, 5)[1].tobytes() == top_eigh(view.copy(), 5)[1].tobytes()


@pytest.mark.parametrize(("shape", "k"), [((4, 4), 0), ((4, 4), 5), ((4, 3), 1)])
def test_an_impossible_request_names_the_number_and_the_shape(shape: tuple[int, int], k: int) -> None:
    with pytest.raises(ValueError, match=rf"{k} eigenvalues .*\({shape[0]}, {shape[1]}\)"):
        top_eigh(np.zeros(shape), k)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_two_threads_give_the_same_bytes_as_one(dtype: str) -> None:
    matrices = [gram(160, seed=s, dtype=dtype) for s in range(8)]

    def solve(matrix: NDArray) -> tuple[bytes, bytes]:
        values, vectors = top_eigh(matrix, 20)
        return values.tobytes(), vectors.tobytes()

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(solve, matrices))
    assert together == [solve(matrix) for matrix in matrices]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_an_error_not_a_result(value: float, dtype: str) -> None:
    matrix = np.eye(8, dtype=dtype)
    matrix[3, 3] = value
    with pytest.raises(np.linalg.LinAlgError):
        top_eigh(matrix, 2)
