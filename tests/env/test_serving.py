"""The gymnasium environments: checkers, determinism, decision lag, ends, the written table."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.env_checker import check_env as sb3_check_env

import specgov.env  # noqa: F401  (registers the environment)
from specgov.env.sb3 import make_sb3_env
from specgov.env.scenario import ScenarioError, load_scenario, parse_scenario, scenario_text
from specgov.env.server_types import SimulationError
from specgov.env.serving import ServingEnv
from specgov.env.vector import ServingVectorEnv
from specgov.policies.features import BLOCKS, OBSERVATION_VERSION

ENDING = """
[ending]
tests = "A load that ends."
arrivals = { kind = "trace", path = "trace.csv", repeat = false }
[[ending.classes]]
acceptance = "chat"
prompt = { median_tokens = 100 }
output = { median_tokens = 100 }
"""


@pytest.fixture
def ending(tmp_path):
    """Two requests of 3 and 4 tokens, and nothing after them."""
    (tmp_path / "trace.csv").write_text("t_s,in_tok,out_tok\n0,10,3\n1,20,4\n")
    return parse_scenario(ENDING, "f", folder=tmp_path)


@pytest.mark.parametrize(
    "arguments", [{}, {"reward": "latency", "scenario": "quiet_chat"}, {"reward": "slo"}]
)
def test_both_checkers_pass_without_a_warning(arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make("specgov.env:specgov/Serving-v0", **arguments).unwrapped)
        sb3_check_env(gymnasium.make("specgov/Serving-v0", **arguments).unwrapped)


def test_registered_with_a_vector_entry_point():
    env = gymnasium.make_vec("specgov/Serving-v0", num_envs=3, scenario="quiet_chat", truth=False)
    assert isinstance(env.unwrapped, ServingVectorEnv)
    assert env.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    observation, _ = env.reset(seed=1)
    assert env.observation_space.contains(observation)


def test_the_simulator_imports_without_gymnasium():
    code = (
        "import sys; sys.modules['gymnasium'] = None\n"
        "import specgov.env, specgov.env.simulation\n"
        "specgov.env.simulation.ServingSimulation('quiet_chat')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_docstring_has_every_entry_of_the_observation():
    rows = [line.strip().strip("|").split(" | ") for line in ServingEnv.__doc__.splitlines() if " | " in line]
    written = [tuple(cell.strip() for cell in row) for row in rows[1:]]
    span = {block: f"_{block.indices[0]}..{block.indices[-1]}" if block.indices else "" for block in BLOCKS}
    assert written == [(b.name + span[b], b.unit, f"{b.low:g}", f"{b.high:g}") for b in BLOCKS]
    assert f"(version {OBSERVATION_VERSION})" in ServingEnv.__doc__


@pytest.mark.parametrize("reward", ["rate", "latency", "slo"])
def test_single_and_vectorised_go_the_same_way_step_by_step(reward):
    """Environment e of seed s against a single one of seed s + e, over ends of episodes and into the next."""
    arguments = {"scenario": "cold_draft_kv", "reward": reward, "duration_s": 0.5}
    vector = ServingVectorEnv(3, **arguments)
    singles = [ServingEnv(**arguments) for _ in range(3)]
    observations, infos = vector.reset(seed=11)
    for env, single in enumerate(singles):
        observation, info = single.reset(seed=11 + env)
        np.testing.assert_array_equal(observation, observations[env])
        _assert_same_info(info, infos, env)
    rng = np.random.default_rng(0)
    ended, episodes = np.zeros(3, bool), 0
    for _ in range(150):
        actions = rng.integers(0, vector.single_action_space.n, 3)
        observations, rewards, terminated, truncated, infos = vector.step(actions)
        for env, single in enumerate(singles):
            if ended[env]:
                observation, info = single.reset()
                reward, ends = 0.0, (False, False)
                episodes += 1
            else:
                observation, reward, *ends, info = single.step(actions[env])
            np.testing.assert_array_equal(observation, observations[env])
            assert (reward, *ends) == (rewards[env], terminated[env], truncated[env])
            _assert_same_info(info, infos, env)
        ended = terminated | truncated
    assert episodes > 3


def _assert_same_info(info, infos, env):
    held = {name for name in infos if not name.startswith("_") and infos[f"_{name}"][env]}
    assert held == set(info)
    for name in held:
        np.testing.assert_array_equal(info[name], infos[name][env], err_msg=name)


def test_same_seed_same_trajectory_and_other_episodes_differ():
    def play(env, **reset):
        observation, _ = env.reset(**reset)
        steps = [(observation, 0.0)] + [env.step(step % 6)[:2] for step in range(40)]
        return np.array([o for o, _ in steps]), np.array([r for _, r in steps])

    env = ServingEnv("mixed_classes")
    first, second = play(env, seed=3), play(env)
    for one, other in zip(
        (first, second), (play(ServingEnv("mixed_classes"), seed=3), play(env)), strict=True
    ):
        assert np.array_equal(one[0], other[0]) == (one is first)
    env.reset(seed=3)
    for one, other in zip(second, play(env), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_an_action_applies_lag_steps_after_the_newest_known_result(lag):
    """Action i, taken when step i is known, rules step i + lag; before the first the smallest tier runs."""
    env = ServingEnv("mixed_classes", decision_lag_steps=lag)
    env.reset(seed=0)
    actions = [3, 1, 5, 2, 4, 0, 5, 1]
    used = [int(env.step(action)[4]["num_steps"]) for action in actions]
    tiers = env.simulation.tiers
    assert used == [tiers[0]] * (lag - 1) + [int(tiers[a]) for a in actions[: len(actions) - lag + 1]]


def test_time_runs_out_truncated():
    env = ServingEnv("mixed_classes", duration_s=1.0)
    env.reset(seed=0)
    ends_s = [0.0]
    truncated = False
    while not truncated:
        _, _, terminated, truncated, info = env.step(1)
        ends_s.append(ends_s[-1] + (info["idle_ms"] + info["prefill_ms"] + info["step_ms"]) * 1e-3)
        assert not terminated
    assert ends_s[-2] < 1.0 <= ends_s[-1]


def test_a_load_that_ends_terminates(ending):
    env = ServingEnv(ending, reward="slo")
    env.reset(seed=0)
    rewards, tokens = [], 0
    for _ in range(50):
        _, reward, terminated, truncated, info = env.step(0)
        rewards.append(reward)
        tokens += info["output_tokens"]
        assert not truncated
        if terminated:
            break
    assert terminated
    # At tier 0 a token a step: the first request ends with step 3, the second with step 7, both in time.
    assert rewards == [0, 0, 3, 0, 0, 0, 4]
    assert tokens == 7


def test_truth_is_that_of_the_coming_step():
    """Over many steps output tokens agree with what was expected of the tier that ran, to 1 %."""
    env = ServingEnv("mixed_classes", decision_lag_steps=1)
    _, info = env.reset(seed=0)
    expected = produced = expected_ms = took_ms = 0.0
    for step in range(1500):
        action = (step // 3) % 6
        expected += info["expected_tokens"][action]
        expected_ms += info["expected_ms"][action]
        info = env.step(action)[4]
        produced += info["output_tokens"]
        took_ms += info["step_ms"]
    assert produced == pytest.approx(expected, rel=0.01)
    assert took_ms == pytest.approx(expected_ms, rel=0.02)  # medians, against a mean with stalls
    assert 0 < info["acceptance"][0] < 1


def test_masks_and_refused_actions():
    env = ServingEnv("mixed_classes", n_actions=8)
    env.reset(seed=0)
    assert env.action_masks().tolist() == [True] * 6 + [False] * 2
    with pytest.raises(SimulationError, match="n_actions is 2, and the engine has 6 tiers"):
        ServingEnv("mixed_classes", n_actions=2)
    with pytest.raises(SimulationError, match="no reward 'money'; there are rate, latency, slo"):
        ServingEnv(reward="money")
    with pytest.raises(SimulationError, match="decision_lag_steps is 0"):
        ServingEnv(decision_lag_steps=0)


@pytest.mark.parametrize(
    "action", [6, -1, 1.0, "1", None, True, [1], np.array([[1]])], ids=lambda action: repr(action)
)
def test_what_is_no_index_of_a_tier_is_refused_by_every_form(action):
    single = ServingEnv("quiet_chat")
    single.reset(seed=1)
    with pytest.raises(SimulationError, match="actions must be whole numbers from 0 to 5, indices into"):
        single.step(action)
    vector = ServingVectorEnv(2, "quiet_chat")
    vector.reset(seed=1)
    adapter = make_sb3_env(2, scenario="quiet_chat")
    for actions in (np.array([action] * 2), np.array([action]), action):
        with pytest.raises(SimulationError, match=r"in shape \(2,\); got"):
            vector.step(actions)
        with pytest.raises(SimulationError, match=r"in shape \(2,\); got"):
            adapter.step(actions)


def test_actions_of_another_number_of_environments_are_refused_around_an_end_too(ending):
    """Between episodes actions are ignored, their number is not."""
    vector = ServingVectorEnv(2, ending)
    vector.reset(seed=1)
    while not vector.step(np.zeros(2, int))[2].any():
        pass
    with pytest.raises(SimulationError, match=r"in shape \(2,\)"):
        vector.step(np.array([1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"duration_s": 0}, "duration_s must be above 0 and finite, got 0"),
        ({"duration_s": -1.0}, "duration_s must be above 0 and finite, got -1.0"),
        ({"duration_s": math.inf}, "duration_s must be above 0 and finite, got inf"),
        ({"duration_s": math.nan}, "duration_s must be above 0 and finite, got nan"),
        ({"reward_options": {"ttft_ms": 5}}, "reward 'rate' has no option 'ttft_ms'; it has time_constant_s"),
        ({"reward_options": {"n": 5}}, "reward 'rate' has no option 'n'; it has time_constant_s"),
        ({"reward": "latency", "reward_options": {"a": 5}}, "'latency' has no option 'a'; it has none"),
        ({"reward_options": {"time_constant_s": 0}}, "time_constant_s must be a number above 0, got 0"),
        ({"reward": "slo", "reward_options": {"ttft_ms": "5"}}, "ttft_ms must be a number above 0, got '5'"),
        ({"reward": "slo", "reward_options": {"tpot_ms": math.nan}}, "tpot_ms must be a number above 0, got"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_every_form(arguments, message):
    forms = (ServingEnv, ServingVectorEnv, lambda **given: make_sb3_env(1, **given))
    for form in forms:
        with pytest.raises(SimulationError, match=message):
            form(scenario="quiet_chat", **arguments)


def test_a_scenario_is_given_by_name_path_or_object(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(scenario_text("quiet_chat"))
    first = [ServingEnv(given).reset(seed=3)[0] for given in (path, str(path), load_scenario(path))]
    np.testing.assert_array_equal(first, [ServingEnv("quiet_chat").reset(seed=3)[0]] * 3)
    with pytest.raises(ScenarioError, match="no scenario 'none'"):
        ServingEnv("none")
