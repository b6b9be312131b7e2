"""The trained policy in torch, for MaskablePPO: the same network as ``specgov.policies.network``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from torch import nn

from specgov.env.training_env import PRIVILEGED
from specgov.policies.features import OBSERVATION_SIZE, entries_of
from specgov.policies.network import COLD_CHARGE, DRAFT_STAYS_WARM, NUM_TIERS, SCORES, Network

ESTIMATES = (
    "acceptance",
    "confidence",
    "accept_length",
    "step_ms_0",
    "step_time_ratio",
    "time_correction",
    "relative_rate",
)
"""Blocks of the observation that estimators make; what an ablation takes away."""

CLIP = 5.0
_LEAST_SD = 0.05


class Trunk(nn.Module):
    """Normalisation and hidden layers; the actor's output has the model's scores beside it.

    Observations are those of ``training_env``: the critic sees the privileged entries, the actor does not.

    Args:
        mean, sd: of the observation, shape (D,).
        hidden: widths of the actor's and of the critic's layers.
        without_estimates: hide what the estimators say, the model's scores included.

    """

    mean: torch.Tensor
    sd: torch.Tensor
    keep: torch.Tensor

    def __init__(
        self,
        mean: NDArray[np.float32],
        sd: NDArray[np.float32],
        hidden: tuple[int, ...],
        without_estimates: bool,
    ) -> None:
        super().__init__()
        keep = np.ones_like(mean)
        if without_estimates:
            for block in ESTIMATES:
                keep[entries_of(block)] = 0.0
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("sd", torch.tensor(sd))
        self.register_buffer("keep", torch.tensor(keep))
        self.policy_net = _layers(len(mean), hidden)
        self.value_net = _layers(len(mean) + PRIVILEGED, hidden)
        self.latent_dim_pi = hidden[-1] + NUM_TIERS
        self.latent_dim_vf = hidden[-1]

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the actor's and the critic's last layer see."""
        return self.forward_actor(observation), self.forward_critic(observation)

    def forward_actor(self, observation: torch.Tensor) -> torch.Tensor:
        """Hidden layer and scores, shape (n, latent_dim_pi)."""
        charge = torch.zeros_like(observation[:, SCORES])
        charge[:, 0] = COLD_CHARGE * (1 - observation[:, DRAFT_STAYS_WARM])
        scores = (observation[:, SCORES] - 1.0 - charge) * self.keep[SCORES]
        return torch.cat([self.policy_net(self._normalised(observation) * self.keep), scores], dim=1)

    def forward_critic(self, observation: torch.Tensor) -> torch.Tensor:
        """Hidden layer, shape (n, latent_dim_vf)."""
        seen = torch.cat([self._normalised(observation), observation[:, OBSERVATION_SIZE:]], dim=1)
        hidden: torch.Tensor = self.value_net(seen)
        return hidden

    def _normalised(self, observation: torch.Tensor) -> torch.Tensor:
        seen = observation[:, :OBSERVATION_SIZE]
        return torch.clamp((seen - self.mean) / self.sd, -CLIP, CLIP)


class FollowModelPolicy(MaskableActorCriticPolicy):
    """Actor and critic whose untrained actor follows the model; ``trunk`` are the arguments of ``Trunk``.

    ``score_scale`` says how closely: with 50 a tier that promises 2 % less is taken e^-1 as often.
    """

    action_net: nn.Linear

    def __init__(self, *args: Any, trunk: dict[str, Any], score_scale: float = 50.0, **kwargs: Any) -> None:
        self._trunk, self._score_scale = trunk, score_scale
        super().__init__(*args, **kwargs)

    def _build_mlp_extractor(self) -> None:
        # Typed as Stable-Baselines3's own extractor, whose interface it has.
        self.mlp_extractor = Trunk(**self._trunk)  # type: ignore[assignment]

    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        with torch.no_grad():
            self.action_net.weight.zero_()
            self.action_net.weight[:, -NUM_TIERS:] = self._score_scale * torch.eye(NUM_TIERS)
            self.action_net.bias.zero_()


def network_of(policy: nn.Module) -> Network:
    """The actor of a ``FollowModelPolicy`` as it is now, in numpy.

    Raises:
        TypeError: it is another policy.

    """
    trunk = getattr(policy, "mlp_extractor", None)
    if not isinstance(policy, FollowModelPolicy) or not isinstance(trunk, Trunk):
        raise TypeError(f"expected a FollowModelPolicy, not {type(policy).__name__}")
    keep = _numpy(trunk.keep)
    linear = [layer for layer in trunk.policy_net if isinstance(layer, nn.Linear)]
    layers = [(_numpy(layer.weight), _numpy(layer.bias)) for layer in linear]
    layers[0] = (layers[0][0] * keep, layers[0][1])
    head = _numpy(policy.action_net.weight)
    head[:, -NUM_TIERS:] *= keep[SCORES]
    return Network(
        _numpy(trunk.mean), _numpy(trunk.sd), CLIP, tuple(layers), head, _numpy(policy.action_net.bias)
    )


def statistics(observations: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Mean and standard deviation by entry, the latter not too small for what later varies more."""
    mean, sd = observations.mean(axis=0), observations.std(axis=0)
    return mean.astype(np.float32), np.maximum(sd, _LEAST_SD).astype(np.float32)


def _layers(width: int, hidden: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for out in hidden:
        layers += [nn.Linear(width, out), nn.Tanh()]
        width = out
    return nn.Sequential(*layers)


def _numpy(tensor: torch.Tensor) -> NDArray[np.float32]:
    return tensor.detach().cpu().numpy().astype(np.float32).copy()
