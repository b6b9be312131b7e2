"""The policy network in numpy: a tanh MLP over the observation beside the model's own scores of the tiers.

    z = clip((x - mean) / sd, -clip, clip)
    h = tanh(W_n .. tanh(W_1 z + b_1) .. + b_n)
    logits = A [h; s] + c                    s_k = relative_rate_k - 1, the model's score of tier k

Tier 0 scores ``COLD_CHARGE`` less on engines whose draft goes cold there, as with ``greedy``.
With ``A = [0 | scale * I]`` and ``c = 0`` the largest logit is that of the tier with the largest expected
output rate: "follow the model" is where training starts from, and what it learns is a correction. Tiers that
the engine does not have are masked, so one network serves every set of tiers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specgov.policies.features import MAX_NUM_STEPS, OBSERVATION_SIZE, entries_of

Float32s = NDArray[np.float32]
Flags = NDArray[np.bool_]

NUM_TIERS = MAX_NUM_STEPS + 1
"""Outputs of a network: num_steps 0..MAX_NUM_STEPS."""

SCORES = entries_of("relative_rate")
DRAFT_STAYS_WARM = entries_of("draft_stays_warm").start
COLD_CHARGE = 0.03


@dataclass(frozen=True, slots=True)
class Network:
    """Weights, all float32.

    ``mean`` and ``sd`` have shape (OBSERVATION_SIZE,). ``layers`` are (weight (out, in), bias (out,)), and
    ``head_weight`` has shape (NUM_TIERS, last out + NUM_TIERS), ``head_bias`` (NUM_TIERS,).
    """

    mean: Float32s
    sd: Float32s
    clip: float
    layers: tuple[tuple[Float32s, Float32s], ...]
    head_weight: Float32s
    head_bias: Float32s

    @property
    def hidden(self) -> tuple[int, ...]:
        """Width of each hidden layer."""
        return tuple(len(bias) for _, bias in self.layers)

    def logits(self, observation: Float32s) -> Float32s:
        """Scores of num_steps 0.., shape (N, NUM_TIERS), for observations of shape (N, OBSERVATION_SIZE)."""
        hidden = np.clip((observation - self.mean) / self.sd, -self.clip, self.clip)
        for weight, bias in self.layers:
            hidden = np.tanh(hidden @ weight.T + bias)
        scores = observation[:, SCORES] - np.float32(1.0)
        scores[:, 0] -= np.float32(COLD_CHARGE) * (1 - observation[:, DRAFT_STAYS_WARM])
        return np.asarray(np.concatenate([hidden, scores], axis=1) @ self.head_weight.T + self.head_bias)

    def probabilities(self, observation: Float32s, mask: Flags) -> Float32s:
        """Softmax over the tiers that ``mask``, one for all or one each, allows; shape (N, NUM_TIERS)."""
        logits = np.where(mask, self.logits(observation), -np.inf)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))

    def best(self, observation: Float32s, mask: Flags) -> NDArray[np.intp]:
        """The num_steps with the largest logit among those that ``mask`` allows, shape (N,)."""
        best: NDArray[np.intp] = np.argmax(np.where(mask, self.logits(observation), -np.inf), axis=1)
        return best

    def towards(self, other: Network, weight: float) -> Network:
        """The mean of the two, ``other`` counting ``weight``; they have the same layout and normalisation."""
        here, there = self.tensors(), other.tensors()
        mixed = {name: here[name] + np.float32(weight) * (there[name] - here[name]) for name in here}
        return Network.from_tensors(mixed, len(self.layers), self.clip)

    def tensors(self) -> dict[str, Float32s]:
        """The arrays by the names that they have in a file."""
        named = {
            "mean": self.mean,
            "sd": self.sd,
            "head.weight": self.head_weight,
            "head.bias": self.head_bias,
        }
        for number, (weight, bias) in enumerate(self.layers):
            named |= {f"layer{number}.weight": weight, f"layer{number}.bias": bias}
        return named

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Float32s], layers: int, clip: float) -> Network:
        """The inverse of ``tensors``; the shapes are those of ``expected_shapes``."""
        return cls(
            tensors["mean"],
            tensors["sd"],
            clip,
            tuple((tensors[f"layer{i}.weight"], tensors[f"layer{i}.bias"]) for i in range(layers)),
            tensors["head.weight"],
            tensors["head.bias"],
        )


def expected_shapes(hidden: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a network with these hidden widths, by name."""
    shapes: dict[str, tuple[int, ...]] = {"mean": (OBSERVATION_SIZE,), "sd": (OBSERVATION_SIZE,)}
    width = OBSERVATION_SIZE
    for number, out in enumerate(hidden):
        shapes |= {f"layer{number}.weight": (out, width), f"layer{number}.bias": (out,)}
        width = out
    return shapes | {"head.weight": (NUM_TIERS, width + NUM_TIERS), "head.bias": (NUM_TIERS,)}


def following_the_model(hidden: tuple[int, ...], scale: float = 50.0) -> Network:
    """A network whose logits are ``scale`` times the model's scores, whatever the observation."""
    tensors = {name: np.zeros(shape, np.float32) for name, shape in expected_shapes(hidden).items()}
    tensors["sd"] += 1
    tensors["head.weight"][:, -NUM_TIERS:] = scale * np.eye(NUM_TIERS, dtype=np.float32)
    return Network.from_tensors(tensors, len(hidden), clip=5.0)
