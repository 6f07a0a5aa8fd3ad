"""What adapters begin as: random numbers that depend on the seed and the weight's name alone, or singular vectors."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping

import numpy as np

from onward.graph.adapters.adapted import AdaptedWeight
from onward.graph.adapters.uses import Reading

_MORE_VECTORS = 8
"""Which an approximate subspace has than are asked for: those at its end are the least exact."""


class Start:
    """The values that the trained tensors of one weight begin with, computed when they are asked for.

    Args:
        adapted: the weight.
        stored: gives its values.
        kind: as `adapter.start`.
        seed: of the run.
        given: values of all tensors, instead.
        pissa_iterations: as `adapter.pissa_iterations`.
    """

    def __init__(
        self,
        adapted: AdaptedWeight,
        stored: Callable[[], np.ndarray],
        kind: str,
        seed: int,
        given: Mapping[str, np.ndarray] | None = None,
        pissa_iterations: int | None = None,
    ) -> None:
        self.adapted, self.kind, self.seed = adapted, kind, seed
        self._iterations = pissa_iterations
        self._stored, self._given = stored, given or {}

    def a(self) -> np.ndarray:
        """Values of A."""
        if self.adapted.a in self._given:
            return self._given[self.adapted.a]
        if self.kind == "pissa":
            return self._principal[0].reshape(self.adapted.shapes[self.adapted.a])
        shape = self.adapted.shapes[self.adapted.a]
        if self.adapted.reading is Reading.LOOKUP:
            return np.zeros(shape, np.float32)
        random = self._random()
        if self.kind == "gaussian":
            return random.standard_normal(shape, np.float32) / np.float32(self.adapted.rank)
        bound = 1 / math.sqrt(self.adapted.matrix[1])  # what torch's linear layers begin with
        return ((random.random(shape, np.float32) * 2 - 1) * bound).astype(np.float32)

    def b(self) -> np.ndarray:
        """Values of B."""
        if self.adapted.b in self._given:
            return self._given[self.adapted.b]
        shape = self.adapted.shapes[self.adapted.b]
        if self.kind == "pissa":
            return self._principal[1].reshape(shape)
        if self.adapted.reading is Reading.LOOKUP:  # a table's A is read row by row: B is the random one
            return self._random().standard_normal(shape, np.float32)
        return np.zeros(shape, np.float32)

    def magnitude(self) -> np.ndarray:
        """The norms of the stored weight's outputs."""
        if self.adapted.magnitude in self._given:
            return self._given[self.adapted.magnitude]
        matrix, factor = self._matrix(), self._given.get(self.adapted.factor)
        if factor is not None:  # of a file of ONNX Runtime: over the norms of the adapted weight
            a, b = (self._given[name].astype(np.float32) for name in (self.adapted.a, self.adapted.b))
            if self.adapted.is_flat:
                a, b = a.reshape(self.adapted.rank, -1), b.reshape(-1, self.adapted.rank)
            matrix = matrix + self.adapted.scale * (b @ a)
        norms: np.ndarray = np.linalg.norm(matrix, axis=-1)
        return (norms if factor is None else norms * factor).astype(np.float32)

    def residual(self) -> np.ndarray:
        """What a weight keeps where its largest singular vectors became the adapter."""
        a, b = self._principal
        product = self.adapted.scale * (b @ a)
        if not self.adapted.is_flat and not self.adapted.outputs_first:
            product = np.swapaxes(product, -1, -2)
        stored = self._stored()
        rest: np.ndarray = stored.astype(np.float32) - product.reshape(stored.shape)
        return rest.astype(stored.dtype)

    def _random(self) -> np.random.Generator:
        digest = hashlib.sha256(f"{self.seed} {self.adapted.weight}".encode()).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))

    def _matrix(self) -> np.ndarray:
        """The stored weight in fp32, outputs on the axis before the last."""
        stored = self._stored().astype(np.float32)
        if self.adapted.is_flat:
            return stored.reshape(self.adapted.matrix)
        return stored if self.adapted.outputs_first else np.swapaxes(stored, -1, -2)

    @functools.cached_property
    def _principal(self) -> tuple[np.ndarray, np.ndarray]:
        """A and B of the largest singular vectors, which multiply, scaled, to the nearest matrix of this rank."""
        rank = self.adapted.rank
        if self._iterations is None:
            left, sizes, right = np.linalg.svd(self._matrix(), full_matrices=False)
        else:
            left, sizes, right = largest_singular_vectors(self._matrix(), rank, self._iterations, self._random())
        roots = np.sqrt(sizes[..., :rank] / np.float32(self.adapted.scale))
        a, b = roots[..., :, None] * right[..., :rank, :], left[..., :, :rank] * roots[..., None, :]
        return a.astype(np.float32), b.astype(np.float32)


def largest_singular_vectors(
    matrix: np.ndarray, rank: int, iterations: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """About the largest `rank` singular values of a stack of matrices, and some more, with their vectors.

    A random subspace that each iteration turns towards them (Halko et al., arXiv:0909.4061, algorithm 4.4).
    """
    turned, outputs, inputs = np.swapaxes(matrix, -1, -2), *matrix.shape[-2:]
    width = min(rank + _MORE_VECTORS, outputs, inputs)
    basis = np.linalg.qr(matrix @ random.standard_normal((*matrix.shape[:-2], inputs, width), np.float32)).Q
    for _ in range(iterations):
        basis = np.linalg.qr(matrix @ np.linalg.qr(turned @ basis).Q).Q
    left, sizes, right = np.linalg.svd(np.swapaxes(basis, -1, -2) @ matrix, full_matrices=False)
    return basis @ left, sizes, right
