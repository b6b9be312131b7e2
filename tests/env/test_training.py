"""Training: masks and rewards of its environment, numpy against Stable-Baselines3, and that it learns."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from specgov.env.actor import ESTIMATES, network_of
from specgov.env.domains import Domain, domain_of, random_domain
from specgov.env.export import export_run
from specgov.env.training import Recipe, Run, TrainingError
from specgov.env.training_env import PRIVILEGED, DomainGroup, DomainVecEnv
from specgov.policies.bundle import load_bundle
from specgov.policies.features import OBSERVATION_SIZE, entries_of
from specgov.policies.network import NUM_TIERS, Network, following_the_model

# Drafts are never accepted, so tier 0 is the best at any batch size.
USELESS = """
[useless]
tests = "Drafts that are never accepted."
engine = { tiers = [0, 3], transport_lag_steps = 0 }
arrivals = { kind = "closed", concurrency = 4 }
[[useless.classes]]
conditional_acceptance = [0.0]
prompt = { median_tokens = 100 }
output = { median_tokens = 100 }
"""


@pytest.fixture
def useless(tmp_path):
    path = tmp_path / "useless.toml"
    path.write_text(USELESS)
    return str(path)


def small(**changes):
    recipe = Recipe(
        n_envs=32,
        envs_per_domain=8,
        steps=2048,
        time_limit_s=None,
        rollout_steps=16,
        batch_size=128,
        hidden=(16,),
        evaluation_domains=2,
        evaluation_steps=20,
        evaluate_every=2,
    )
    return replace(recipe, **changes)


def test_random_domains_are_scenarios_that_run_and_the_same_seed_draws_the_same():
    kinds, cold, believed = set(), set(), set()
    for seed in range(12):
        first, again = (random_domain(np.random.default_rng(seed)) for _ in range(2))
        assert first.scenario.table == again.scenario.table
        group = DomainGroup(first, 3, seed, "rate", {})
        observation = group.start()
        for _ in range(5):
            step = group.step(np.full(3, first.scenario.engine.tiers[-1]))
            assert np.isfinite(step.observation).all()
            assert step.observation.shape == observation.shape == (3, OBSERVATION_SIZE + PRIVILEGED)
            assert (step.reward <= 1e-6).all()
        kinds.add(first.scenario.table.arrivals.kind)
        cold.add(first.scenario.engine.draft_kv_stays_warm)
        point = (16, 3, 9000)
        believed.add(bool(first.believed.step_ms(*point) == first.scenario.profile.step_time.step_ms(*point)))
    assert kinds == {"closed", "steady", "pieces"}
    assert cold == believed == {False, True}


def test_an_open_loop_is_drawn_where_latency_counts():
    kinds = {
        random_domain(np.random.default_rng(s), open_loop=True).scenario.table.arrivals.kind for s in range(8)
    }
    assert kinds == {"steady", "pieces"}


def test_the_reward_is_what_is_lost_to_the_best_tier(useless):
    """Tier 0 is the best and loses nothing. Tier 3 brings the same 4 tokens and takes longer: it loses
    ``rate_0 x (T_3 - T_0)`` tokens, rate_0 = 4 / T_0. With a lag of 2 the first step is the engine's own.
    """
    domain = domain_of(useless)
    group = DomainGroup(domain, 1, 0, "rate", {})
    group.start()
    server = group.simulation.server
    rewards, expected = [], []
    for _ in range(6):
        truth, mean = server.truth(), group._mean_tokens  # of 4 and 4 T_3 / T_0, over the steps so far
        step = group.step(np.array([3]))
        t0, t3 = truth.expected_ms[0]
        rewards.append(step.reward[0])
        expected.append(-4 * (t3 / t0 - 1) / mean)
    assert rewards[0] == 0.0
    np.testing.assert_allclose(rewards[1:], expected[1:])
    assert group.tokens_lost > 0


def test_masks_and_ends_of_the_training_environment(useless):
    domains = iter([domain_of(useless), domain_of("moe"), domain_of(useless)])
    env = DomainVecEnv(lambda: next(domains), 2, 3, redraw_steps=4)
    env.reset()
    assert env.action_masks()[0].tolist() == [True, False, False, True, False, False, False, False]
    assert env.action_masks().shape == (6, NUM_TIERS)
    ends = []
    for _ in range(4):
        env.step_async(np.full(6, 3))
        observation, _, done, infos = env.step_wait()
        ends.append(done.tolist())
    assert ends[:3] == [[False] * 6] * 3
    # At the fourth step the second group got a new domain: cut off, as by a time limit.
    assert ends[3] == [False] * 3 + [True] * 3
    assert infos[0] == {}
    assert infos[4]["TimeLimit.truncated"] is True
    assert infos[4]["terminal_observation"].shape == observation[4].shape
    assert env.env_method("action_masks", indices=[5])[0].tolist() == env.action_masks()[0].tolist()


def model_of(recipe, folder):
    run = Run(recipe, folder)
    return run._model(run._environment())


def observations(n):
    rng = np.random.default_rng(4)
    seen = rng.uniform(0, 1, (n, OBSERVATION_SIZE + PRIVILEGED)).astype(np.float32)
    masks = rng.random((n, NUM_TIERS)) < 0.6
    masks[:, 0] = True
    return seen, masks


@pytest.mark.parametrize("without_estimates", [False, True])
def test_numpy_equals_stable_baselines3(tmp_path, without_estimates):
    """Probabilities of a network with random weights, both in double precision; then single precision.

    In single precision logits of 80 leave each of the two an error of some 1e-6 of its own.
    """
    model = model_of(small(hidden=(64, 64), without_estimates=without_estimates), tmp_path)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    seen, masks = observations(500)
    network = network_of(model.policy)
    theirs = their_probabilities(model, seen, masks)
    ours = network.probabilities(seen[:, :OBSERVATION_SIZE], masks)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    best, _ = model.predict(seen, deterministic=True, action_masks=masks)
    clear = np.sort(theirs, axis=1)[:, -1] - np.sort(theirs, axis=1)[:, -2] > 1e-5
    assert clear.sum() > 450
    assert (network.best(seen[:, :OBSERVATION_SIZE], masks) == best)[clear].all()

    model.policy.double()
    arrays = {name: tensor.astype(np.float64) for name, tensor in network.tensors().items()}
    exact = Network.from_tensors(arrays, 2, network.clip)
    ours = exact.probabilities(seen[:, :OBSERVATION_SIZE].astype(np.float64), masks)
    np.testing.assert_allclose(ours, their_probabilities(model, seen.astype(np.float64), masks), atol=1e-6)


def their_probabilities(model, seen, masks):
    policy = model.policy
    with torch.no_grad():
        latent = policy.mlp_extractor.forward_actor(torch.tensor(seen))
        distribution = policy._get_action_dist_from_latent(latent)
        distribution.apply_masking(masks)
        return distribution.distribution.probs.numpy()


def test_before_training_the_actor_follows_the_model(tmp_path):
    model = model_of(small(), tmp_path)
    seen = observations(100)[0][:, :OBSERVATION_SIZE]
    ours, plain = network_of(model.policy), following_the_model((16,), 80.0)
    np.testing.assert_allclose(ours.logits(seen), plain.logits(seen), atol=1e-4)


def test_the_ablation_hides_the_estimates(tmp_path):
    """Whatever the estimators say, the logits are the same; another batch size changes them."""
    model = model_of(small(without_estimates=True), tmp_path)
    with torch.no_grad():
        model.policy.action_net.weight += 0.3
    network = network_of(model.policy)
    seen, _ = observations(1)
    seen = seen[:, :OBSERVATION_SIZE]
    other = seen.copy()
    for block in ESTIMATES:
        other[:, entries_of(block)] = 0.123
    np.testing.assert_array_equal(network.logits(seen), network.logits(other))
    other[:, entries_of("batch_size")] = 2.0
    assert not np.allclose(network.logits(seen), network.logits(other))


def test_it_unlearns_a_preference_for_a_tier_that_never_pays(useless, tmp_path):
    """From three to one for tier 3, which never pays, to tier 0 nearly always, without the model's help."""
    run = Run(
        small(scenarios=(useless,), without_estimates=True, steps=10_000, learning_rate=3e-3),
        tmp_path / "run",
    )
    env = run._environment()
    model = run._model(env)
    with torch.no_grad():
        model.policy.action_net.bias[3] += np.log(3.0)
    seen, mask = env.reset(), env.action_masks()

    def share_of_tier_3():
        return float(network_of(model.policy).probabilities(seen[:, :OBSERVATION_SIZE], mask)[:, 3].mean())

    before = share_of_tier_3()
    model.learn(10_000)
    assert before == pytest.approx(0.75, abs=0.01)
    assert share_of_tier_3() < 0.05


def test_a_run_is_kept_resumed_and_exported(useless, tmp_path):
    recipe = small(scenarios=(useless,), steps=1024)
    told = []
    end = Run(recipe, tmp_path / "run", "specgov train --seed 0").train(told.append)
    assert end.steps >= 1024
    assert told[0].score == 0.0  # before training the policy is the one that it is compared with
    document = json.loads((tmp_path / "run" / "run.json").read_text())
    assert document["recipe"]["steps"] == 1024
    longer = Run(replace(recipe, steps=2048), tmp_path / "run")
    assert longer.train().steps >= 2048
    assert len(longer.history) > len(document["history"])
    card = export_run(tmp_path / "run", tmp_path / "mine", [useless], steps=10)
    assert card.name == "mine"
    assert card.training["command"] == "specgov train --seed 0"
    assert set(card.scores[useless]) == {"share_of_best_rate", "following_the_model"}
    loaded = load_bundle(tmp_path / "mine").network
    np.testing.assert_array_equal(
        loaded.head_weight, load_bundle(tmp_path / "run" / "best").network.head_weight
    )


def test_the_same_seed_trains_the_same_policy(useless, tmp_path):
    recipe = small(steps=1024)
    for name in ("a", "b"):
        Run(recipe, tmp_path / name).train()
    first, second = (load_bundle(tmp_path / name / "best").card.weights_sha256 for name in ("a", "b"))
    assert first == second


@pytest.mark.parametrize("changes", [{"reward": "speed"}, {"n_envs": 100}, {"n_envs": 2048}, {"steps": 0}])
def test_recipes_that_make_no_sense(changes):
    with pytest.raises(TrainingError):
        small(**changes)


def test_another_network_cannot_be_resumed(useless, tmp_path):
    Run(small(scenarios=(useless,), steps=512), tmp_path).train()
    with pytest.raises(TrainingError, match="another network"):
        Run(small(scenarios=(useless,), hidden=(8,)), tmp_path).train()


@pytest.mark.parametrize("reward", ["latency", "slo"])
def test_other_rewards_are_differential(reward):
    """Their running mean by time is taken off, so that they are about as often above as below 0."""
    domain: Domain = random_domain(np.random.default_rng(3), open_loop=True)
    group = DomainGroup(domain, 4, 0, reward, {})
    group.start()
    rewards = np.array([group.step(np.full(4, domain.scenario.engine.tiers[-1])).reward for _ in range(60)])
    assert np.isfinite(rewards).all()
    assert (rewards != 0).any()
    assert np.abs(rewards).max() <= 10
