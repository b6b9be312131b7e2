"""Stable-Baselines3's rules for a ``VecEnv``, on the adapter."""

from __future__ import annotations

import numpy as np
import pytest
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

from specgov.env.sb3 import ServingVecEnv, make_sb3_env
from specgov.env.scenario import parse_scenario
from specgov.env.serving import ServingEnv
from specgov.env.simulation import ServingSimulation

ENDING = """
[ending]
tests = "A load that ends."
arrivals = { kind = "trace", path = "trace.csv", repeat = false }
[[ending.classes]]
acceptance = "chat"
prompt = { median_tokens = 100 }
output = { median_tokens = 100 }
"""


def test_same_step_reset_with_terminal_observation_and_time_limit():
    """Beside single environments that are reset by hand within the step that ends them."""
    arguments = {"scenario": "mixed_classes", "duration_s": 0.3}
    env = make_sb3_env(2, **arguments)
    env.seed(4)
    observations = env.reset()
    singles = [ServingEnv(**arguments) for _ in range(2)]
    for index, single in enumerate(singles):
        np.testing.assert_array_equal(observations[index], single.reset(seed=4 + index)[0])
    ends = 0
    for step in range(100):
        actions = np.array([step % 6, 5 - step % 6])
        observations, rewards, dones, infos = env.step(actions)
        assert rewards.dtype == np.float32
        for index, single in enumerate(singles):
            observation, reward, terminated, truncated, _ = single.step(actions[index])
            assert dones[index] == (terminated or truncated)
            assert rewards[index] == np.float32(reward)
            if dones[index]:
                np.testing.assert_array_equal(infos[index]["terminal_observation"], observation)
                assert infos[index]["TimeLimit.truncated"] is True
                observation, _ = single.reset()
                ends += 1
            else:
                assert infos[index] == {}
            np.testing.assert_array_equal(observations[index], observation)
    assert ends > 2


def test_a_load_that_ends_is_no_time_limit(tmp_path):
    (tmp_path / "trace.csv").write_text("t_s,in_tok,out_tok\n0,10,3\n")
    env = ServingVecEnv(ServingSimulation(parse_scenario(ENDING, "f", folder=tmp_path)))
    env.reset()
    for _ in range(3):
        _, _, dones, infos = env.step(np.zeros(1, int))
    assert dones.tolist() == [True]
    assert infos[0]["TimeLimit.truncated"] is False


def test_seed_holds_for_one_reset_only():
    env = make_sb3_env(2)

    def first_steps():
        env.reset()
        return np.array([env.step(np.ones(2, int))[0] for _ in range(20)])

    env.seed(1)
    one, following = first_steps(), first_steps()
    env.seed(1)
    np.testing.assert_array_equal(one, first_steps())
    assert not np.array_equal(one, following)


def test_masks_for_maskable_ppo():
    env = make_sb3_env(3, n_actions=8)
    assert is_masking_supported(env)
    masks = get_action_masks(env)
    assert masks.tolist() == [[True] * 6 + [False] * 2] * 3
    assert len(env.env_method("action_masks", indices=[1])) == 1
    with pytest.raises(NotImplementedError):
        env.env_method("render")


def test_attributes():
    env = make_sb3_env(3)
    assert env.get_attr("render_mode") == [None] * 3
    env.set_attr("note", 1)
    assert env.get_attr("note", [0]) == [1]
    with pytest.raises(NotImplementedError):
        env.set_attr("note", 1, indices=[0])
    assert env.env_is_wrapped(VecMonitor) == [False] * 3


@pytest.mark.parametrize("algorithm", [PPO, MaskablePPO])
def test_ppo_trains_on_it(algorithm):
    env = VecNormalize(
        VecMonitor(make_sb3_env(8, n_actions=8 if algorithm is MaskablePPO else None)), norm_obs=False
    )
    model = algorithm("MlpPolicy", env, n_steps=16, batch_size=64, n_epochs=1, seed=0, device="cpu")
    before = [parameter.detach().clone() for parameter in model.policy.parameters()]
    model.learn(8 * 16)
    after = list(model.policy.parameters())
    assert model.num_timesteps == 128
    assert any(not (one == other).all() for one, other in zip(before, after, strict=True))
