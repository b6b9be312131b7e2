"""Prompt and output lengths, and the mix of request classes over time.

Everything here is a pure function of uniforms that the caller draws, so that a request's attributes depend
only on its key and not on the order in which requests are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specgov.env.traces import Trace

Uniforms = NDArray[np.float64]
Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogNormalLength:
    """A length in tokens: ``median_tokens * exp(sigma * z)``, z standard normal, clipped to min..max.

    ``sigma`` 0 makes every length the median.
    """

    median_tokens: float
    sigma: float = 0.0
    min_tokens: int = 1
    max_tokens: int = 131_072


class Lengths(Protocol):
    """Where the lengths of requests come from."""

    def draw(self, request_class: NDArray[np.int64], uniforms: Uniforms) -> tuple[Tokens, Tokens]:
        """Prompt and output tokens, each (n,), from classes (n,) and uniforms (n, 2) in [0, 1)."""
        ...


class LogNormalLengths:
    """Lengths by class: one lognormal for prompts and one for outputs, independent of each other."""

    def __init__(self, prompt: Sequence[LogNormalLength], output: Sequence[LogNormalLength]) -> None:
        self._prompt = _Columns.of(prompt)
        self._output = _Columns.of(output)

    def draw(self, request_class: NDArray[np.int64], uniforms: Uniforms) -> tuple[Tokens, Tokens]:
        """See ``Lengths.draw``; the two uniforms become two independent normals (Box and Muller 1958)."""
        radius = np.sqrt(-2.0 * np.log1p(-uniforms[:, 0]))
        angle = 2.0 * np.pi * uniforms[:, 1]
        return (
            self._prompt.tokens(request_class, radius * np.cos(angle)),
            self._output.tokens(request_class, radius * np.sin(angle)),
        )


class TraceLengths:
    """Lengths of a request drawn from a trace; a prompt keeps the output length that it came with."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def draw(self, request_class: NDArray[np.int64], uniforms: Uniforms) -> tuple[Tokens, Tokens]:
        """See ``Lengths.draw``; the class has no influence."""
        row = (uniforms[: len(request_class), 0] * len(self._trace)).astype(np.int64)
        return self._trace.prompt_tokens[row], self._trace.output_tokens[row]


@dataclass(frozen=True)
class ClassMix:
    """Share of each request class over time.

    ``start_s`` (m,) ascends from 0; ``weights`` (m, classes) holds from its start to the next one. With
    ``period_s`` the pattern repeats, else the last weights stay.
    """

    start_s: NDArray[np.float64]
    weights: NDArray[np.float64]
    period_s: float | None = None

    def draw(self, time_s: NDArray[np.float64], uniform: Uniforms) -> NDArray[np.int64]:
        """Class of each request, (n,), from its arrival time (n,) and a uniform (n,)."""
        if self.weights.shape[1] == 1:
            return np.zeros(len(time_s), dtype=np.int64)
        if self.period_s is not None:
            time_s = np.mod(time_s, self.period_s)
        part = np.searchsorted(self.start_s, time_s, side="right") - 1
        cumulative = np.cumsum(self.weights, axis=1)[part]
        return np.asarray(np.sum(uniform[:, None] * cumulative[:, -1:] >= cumulative[:, :-1], axis=1))


@dataclass(frozen=True, slots=True)
class _Columns:
    """Parameters of one length by class, as arrays."""

    median_tokens: NDArray[np.float64]
    sigma: NDArray[np.float64]
    min_tokens: NDArray[np.float64]
    max_tokens: NDArray[np.float64]

    @classmethod
    def of(cls, lengths: Sequence[LogNormalLength]) -> _Columns:
        return cls(
            np.array([length.median_tokens for length in lengths], dtype=np.float64),
            np.array([length.sigma for length in lengths], dtype=np.float64),
            np.array([length.min_tokens for length in lengths], dtype=np.float64),
            np.array([length.max_tokens for length in lengths], dtype=np.float64),
        )

    def tokens(self, request_class: NDArray[np.int64], normal: NDArray[np.float64]) -> Tokens:
        tokens = self.median_tokens[request_class] * np.exp(self.sigma[request_class] * normal)
        low, high = self.min_tokens[request_class], self.max_tokens[request_class]
        return np.rint(np.clip(tokens, low, high)).astype(np.int64)
