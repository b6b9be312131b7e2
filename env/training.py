"""Training of the ``ppo`` rule: MaskablePPO on random servers, measured on an evaluation split as it goes.

A run is a folder: ``run.json`` (recipe and progress), ``checkpoint.zip`` (parameters and optimiser) and
``best/``, the policy that did best on the evaluation split, as a bundle. Resuming reads the parameters only,
with torch's ``weights_only``: nothing in a checkpoint is executed.

On discounting. The reward is that of an average-reward problem (``tokens - λ Δt`` and its kin), whose mean is
about 0 under the policy that is running, so a discount by step stands for one by time: it only says how many
steps ahead consequences count. A decision applies some three steps later, a batch changes over a hundred, a
cold draft ends with its request: gamma 0.99 sees the first two and a part of the third; `latency` and `slo`,
whose rewards come when requests leave, take 0.997.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sb3_contrib import MaskablePPO
from stable_baselines3.common.callbacks import BaseCallback

from specgov.env.actor import CLIP, FollowModelPolicy, network_of, statistics
from specgov.env.domains import RECORDED, Domain, domain_of, random_domain
from specgov.env.rewards import REWARDS
from specgov.env.training_env import DomainVecEnv
from specgov.env.validation import EvaluationSplit
from specgov.policies.bundle import Bundle, Card, save_bundle
from specgov.policies.features import OBSERVATION_SIZE
from specgov.policies.network import Network, following_the_model
from specgov.policies.profile import load_profile

RANDOM = "random"
"""Stands for random domains in a recipe's scenarios."""

RUN_FILE, CHECKPOINT_FILE, BEST_FOLDER = "run.json", "checkpoint.zip", "best"

_EVALUATION_SEED = 7_000_000
_EVALUATION_ENVS = 6
_GAMMA = {"rate": 0.99, "latency": 0.997, "slo": 0.997}


class TrainingError(ValueError):
    """A run cannot be made or resumed as asked; the message says what to do."""


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        scenarios: ``random``, and names or files of scenarios that are played beside it.
        reward: ``rate``, ``latency`` or ``slo``; ``reward_options`` are its settings.
        seed: of everything that chance decides.
        n_envs: environments, in groups of ``envs_per_domain`` that share a domain.
        redraw_steps: after so many steps one group gets a new domain.
        steps: decisions to train on.
        time_limit_s: wall time after which no new round begins; None = no limit.
        rollout_steps, batch_size, epochs, learning_rate, entropy, gamma, gae_lambda: PPO's; gamma None is
            that of the reward.
        hidden: widths of the network's layers.
        average_rounds: the policy that is measured and kept is a running mean of the weights over about so
            many rounds (1 = none): each round sees few domains and leans towards them.
        score_scale: how closely the untrained policy follows the model.
        without_estimates: hide the estimators from the network (an ablation).
        evaluate_every: rounds between evaluations on the split of ``evaluation_domains`` random domains.
        patience: evaluations without improvement after which training ends.
        least_gain: what counts as improvement of the score, which is a logarithm.

    Raises:
        TrainingError: a value makes no sense.

    """

    scenarios: tuple[str, ...] = (RANDOM,)
    reward: str = "rate"
    reward_options: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    n_envs: int = 384
    envs_per_domain: int = 12
    redraw_steps: int = 8
    steps: int = 3_000_000
    time_limit_s: float | None = 280.0
    rollout_steps: int = 32
    batch_size: int = 2048
    epochs: int = 4
    learning_rate: float = 3e-4
    entropy: float = 0.0
    gamma: float | None = None
    gae_lambda: float = 0.9
    hidden: tuple[int, ...] = (64, 64)
    average_rounds: float = 30.0
    score_scale: float = 80.0
    without_estimates: bool = False
    evaluate_every: int = 6
    evaluation_domains: int = 20
    evaluation_steps: int = 200
    patience: int = 10
    least_gain: float = 2e-4

    def __post_init__(self) -> None:
        if self.reward not in REWARDS:
            raise TrainingError(f"no reward {self.reward!r}; there are {', '.join(REWARDS)}")
        if not 1 <= self.n_envs <= 1024 or self.n_envs % self.envs_per_domain:
            raise TrainingError(
                f"n_envs is {self.n_envs}: give a multiple of {self.envs_per_domain}, the size of a domain's "
                "group, up to 1024"
            )
        for name in (
            "average_rounds",
            "steps",
            "rollout_steps",
            "batch_size",
            "epochs",
            "evaluate_every",
            "patience",
        ):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} must be 1 or more, not {getattr(self, name)}")

    @property
    def groups(self) -> int:
        """Domains that are played at the same time."""
        return self.n_envs // self.envs_per_domain

    def domains(self, seed: int) -> Callable[[], Domain]:
        """A function that draws one domain after another."""
        rng = np.random.default_rng(seed)
        named = [domain_of(name) for name in self.scenarios if name != RANDOM]
        choices: list[Domain | None] = [*named, *([None] if RANDOM in self.scenarios else [])]

        def draw() -> Domain:
            chosen = choices[rng.integers(len(choices))]
            return random_domain(rng, self.reward != "rate") if chosen is None else chosen

        return draw


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands: decisions made, seconds used, score on the evaluation split and the best so far."""

    steps: int
    seconds: float
    score: float
    best_score: float
    evaluations: int


@dataclass
class Run:
    """A training run in a folder.

    Args:
        recipe: how to train.
        folder: where to keep it.
        command: what the user typed, for the card.
        tensorboard: a folder for TensorBoard's files.

    """

    recipe: Recipe
    folder: Path
    command: str = ""
    tensorboard: Path | None = None
    clock: Callable[[], float] = time.monotonic
    _seconds: float = 0.0
    _history: list[dict[str, float]] = field(default_factory=list)

    def train(self, tell: Callable[[Progress], None] = lambda _: None) -> Progress:
        """Train to the end, from the checkpoint if the folder has one; ``tell`` hears of every evaluation."""
        self.folder.mkdir(parents=True, exist_ok=True)
        done_steps = self._recall()
        env = self._environment()
        model = self._model(env)
        if done_steps:
            model.set_parameters(str(self.folder / CHECKPOINT_FILE), device="cpu")
        split = self._split()
        callback = _Evaluate(self, split, done_steps, tell)
        left = self.recipe.steps - done_steps
        if left > 0:
            model.learn(left, callback=callback, log_interval=1)
        callback.evaluate(model, final=True)
        return callback.progress

    def card(self, steps: int, score: float) -> Card:
        """The card of the policy as it is now."""
        recipe = {k: v for k, v in asdict(self.recipe).items() if v not in (None, {}, False)}
        training = {
            "command": self.command,
            "steps_done": steps,
            "gain_over_the_model_on_the_evaluation_split": f"{100 * np.expm1(score):+.2f} %",
        }
        profile = load_profile(RECORDED)
        return Card(
            name=self.folder.name,
            hidden=self.recipe.hidden,
            clip=CLIP,
            training=training | {k: list(v) if isinstance(v, tuple) else v for k, v in recipe.items()},
            profiles={profile.name: profile.hash},
        )

    def keep(self, model: MaskablePPO, network: Network, progress: Progress, best: bool) -> None:
        """Write progress and checkpoint, and ``network`` if it is the best so far."""
        self._history.append({"steps": progress.steps, "seconds": progress.seconds, "score": progress.score})
        if best:
            card = self.card(progress.steps, progress.score)
            save_bundle(Bundle(card, network), self.folder / BEST_FOLDER)
        model.save(self.folder / CHECKPOINT_FILE)
        document = {"recipe": asdict(self.recipe), "command": self.command, "history": self._history}
        (self.folder / RUN_FILE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    @property
    def history(self) -> list[dict[str, float]]:
        """Steps, seconds and score of each evaluation so far."""
        return self._history

    def _environment(self) -> DomainVecEnv:
        recipe = self.recipe
        return DomainVecEnv(
            recipe.domains(recipe.seed + len(self._history)),
            recipe.groups,
            recipe.envs_per_domain,
            recipe.seed,
            recipe.reward,
            recipe.reward_options,
            recipe.redraw_steps,
        )

    def _model(self, env: DomainVecEnv) -> MaskablePPO:
        recipe = self.recipe
        # Two threads are slower than one for networks of this size.
        torch.set_num_threads(1)
        mean, sd = statistics(self._first_observations())
        trunk = {
            "mean": mean,
            "sd": sd,
            "hidden": recipe.hidden,
            "without_estimates": recipe.without_estimates,
        }
        return MaskablePPO(
            FollowModelPolicy,
            env,
            learning_rate=recipe.learning_rate,
            n_steps=recipe.rollout_steps,
            batch_size=recipe.batch_size,
            n_epochs=recipe.epochs,
            gamma=recipe.gamma or _GAMMA[recipe.reward],
            gae_lambda=recipe.gae_lambda,
            ent_coef=recipe.entropy,
            policy_kwargs={"trunk": trunk, "score_scale": recipe.score_scale},
            tensorboard_log=None if self.tensorboard is None else str(self.tensorboard),
            seed=recipe.seed,
            device="cpu",
        )

    def _first_observations(self) -> NDArray[np.float32]:
        """Observations of random tiers on domains of their own, for mean and standard deviation."""
        recipe = self.recipe
        env = DomainVecEnv(recipe.domains(recipe.seed + 1), max(recipe.groups, 8), 4, 0, recipe.reward)
        rng = np.random.default_rng(recipe.seed)
        env.reset()
        masks = env.action_masks()
        seen = []
        for _ in range(120):
            env.step_async(np.argmax(masks * rng.random(masks.shape), axis=1))
            seen.append(env.step_wait()[0][:, :OBSERVATION_SIZE])
        return np.concatenate(seen)

    def _split(self) -> EvaluationSplit:
        recipe = self.recipe
        draw = recipe.domains(_EVALUATION_SEED)
        return EvaluationSplit(
            [draw() for _ in range(recipe.evaluation_domains)],
            _EVALUATION_ENVS,
            _EVALUATION_SEED,
            recipe.evaluation_steps,
            recipe.reward,
            recipe.reward_options,
        )

    def _recall(self) -> int:
        """Take up the folder's run, if there is one; returns the decisions made so far."""
        path = self.folder / RUN_FILE
        if not path.exists():
            return 0
        document = json.loads(path.read_text(encoding="utf-8"))
        if recipe_of(document["recipe"]).hidden != self.recipe.hidden:
            raise TrainingError(f"{self.folder}: the run has another network; resume with the same options")
        self._history = list(document["history"])
        self._seconds = self._history[-1]["seconds"]
        return int(self._history[-1]["steps"])


class _Evaluate(BaseCallback):
    """Evaluates every few rounds, keeps the best policy, ends training in time."""

    def __init__(
        self, run: Run, split: EvaluationSplit, done_steps: int, tell: Callable[[Progress], None]
    ) -> None:
        super().__init__()
        self._run, self._split, self._tell = run, split, tell
        self._done_steps = done_steps
        self._start_s = run.clock() - run._seconds
        self._rounds = self._stale = self._evaluated_at = 0
        self._ended = False
        self._average: Network | None = None
        self._baseline = split.scores(following_the_model(run.recipe.hidden).best)
        self._best = max((item["score"] for item in run.history), default=-np.inf)
        self.progress = Progress(done_steps, run._seconds, -np.inf, self._best, len(run.history))

    def _on_step(self) -> bool:
        return not self._ended

    def _on_rollout_start(self) -> None:
        """Between rounds: the policy is as the last one left it."""
        recipe = self._run.recipe
        newest = network_of(self.model.policy)
        # A plain mean over the first rounds, then one that forgets.
        weight = 1.0 / min(self._rounds + 1, recipe.average_rounds)
        self._average = newest if self._average is None else self._average.towards(newest, weight)
        if self._rounds % recipe.evaluate_every == 0:
            self.evaluate(self.model)
        self._rounds += 1
        seconds = self._run.clock() - self._start_s
        self._ended |= recipe.time_limit_s is not None and seconds > recipe.time_limit_s
        self._tell(replace(self.progress, steps=self._done_steps + self.num_timesteps, seconds=seconds))

    def evaluate(self, model: Any, final: bool = False) -> None:
        """Measure the policy, and keep it if it is the best."""
        steps = self._done_steps + model.num_timesteps
        if final and steps == self.progress.steps and self.progress.evaluations:
            return
        network = self._average or network_of(model.policy)
        score = float(np.mean(self._split.scores(network.best) - self._baseline))
        best = score > self._best
        self._stale = 0 if score > self._best + self._run.recipe.least_gain else self._stale + 1
        self._best = max(self._best, score)
        seconds = self._run.clock() - self._start_s
        self.progress = Progress(steps, seconds, score, self._best, self.progress.evaluations + 1)
        if self.model is not None:
            self.logger.record("evaluation/score", score)
        self._run.keep(model, network, self.progress, best)
        self._tell(self.progress)
        self._ended |= self._stale >= self._run.recipe.patience


def recipe_of(document: dict[str, Any]) -> Recipe:
    """The recipe that ``run.json`` holds.

    Raises:
        TrainingError: it is not one.

    """
    try:
        recipe = Recipe(**document)
    except TypeError as error:
        raise TrainingError(f"not a recipe of this release: {error}") from error
    return replace(recipe, scenarios=tuple(recipe.scenarios), hidden=tuple(recipe.hidden))
