"""Hiccups of the host, by hand: steps of 4 ms, 1 ms for each draft step and 0.01 ms for the request."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from specgov.env.hiccups import Hiccups
from specgov.env.scenario import ScenarioError, parse_scenario, scenario_text
from specgov.env.server import Server, SimulationError

ALWAYS = 1e6
"""Hiccups a second: one begins with each step in which none lasts."""


def step_ms(server: Server, tiers: tuple[int, ...]) -> list[float]:
    return [float(server.step(np.array([tier])).step_ms[0]) for tier in tiers]


def test_a_step_takes_the_host_s_time_where_that_is_longer(small: SimpleNamespace) -> None:
    hiccups = Hiccups(ALWAYS, most_steps=3, ms=(6.0, 6.0), caught_up=0.0)
    server = Server(small.config(classes=(small.never,), hiccups=hiccups), small.listed([(0.0, 10, 20)]))
    assert step_ms(server, (0, 1, 3, 0)) == pytest.approx([6.0, 6.0, 7.01, 6.0])
    assert server.truth().expected_ms[0].tolist() == pytest.approx([4.01, 5.01, 7.01])


def test_what_is_caught_up_is_one_step_at_most_and_half_a_step_at_a_time(small: SimpleNamespace) -> None:
    # Rate 100 a second and steps of 4.01 ms: begins with a probability of 0.4 where none lasts. Hiccups of a
    # single step, 10 ms: 5.99 ms are owed, but no more than the step's own 4.01 made up for, 2.005 at a time.
    hiccups = Hiccups(100.0, most_steps=1, ms=(10.0, 10.0), caught_up=1.0)
    server = Server(small.config(classes=(small.never,), hiccups=hiccups), small.listed([(0.0, 10, 300)]))
    took = step_ms(server, (0,) * 250)
    assert {round(ms, 3) for ms in took} == {10.0, 2.005, 4.01}
    begins = [at for at in range(3, 247) if took[at] > 9 and max(took[at + 1 : at + 4]) < 9]
    assert len(begins) > 10
    for at in begins:
        assert took[at + 1 : at + 4] == pytest.approx([2.005, 2.005, 4.01])


def test_rate_length_and_range_are_as_given(small: SimpleNamespace) -> None:
    # 300 environments of 400 steps of 4 ms each: one in 50 steps is the first of a hiccup of 3 steps in the
    # mean, so that (1 + 50 - 1) = 50 calm steps lie between two and a share of 3 / 53 is held. The standard
    # error is about 1.5 % of it.
    hiccups = Hiccups(1e3 / 4.01 / 50, most_steps=5, ms=(20.0, 40.0), caught_up=0.0)
    config = small.config(hiccups=hiccups)
    server = Server(config, small.keyed(concurrency=1, max_prompt=10), n_envs=300)
    took = np.array([server.step(np.zeros(300, int)).step_ms for _ in range(400)])
    held = took > 5
    assert held.mean() == pytest.approx(3 / 53, rel=0.08)
    assert took[held].min() >= 20
    assert took[held].max() <= 40
    assert took[held].mean() == pytest.approx(30, rel=0.03)


def test_hiccups_do_not_depend_on_the_other_environments_and_end_with_a_reset(small: SimpleNamespace) -> None:
    hiccups = Hiccups(20.0, most_steps=8)
    config = small.config(hiccups=hiccups)
    alone, many = (Server(config, small.keyed(concurrency=1), n_envs=n, seed=3) for n in (1, 4))
    for _ in range(200):
        first, among = alone.step(np.zeros(1, int)), many.step(np.zeros(4, int))
        assert first.step_ms[0] == among.step_ms[0]
    alone.reset(seed=3)
    again = Server(config, small.keyed(concurrency=1), seed=3)
    assert [step_ms(alone, (0,))[0] for _ in range(100)] == [step_ms(again, (0,))[0] for _ in range(100)]


def test_an_empty_server_has_none(small: SimpleNamespace) -> None:
    hiccups = Hiccups(ALWAYS, ms=(6.0, 6.0))
    server = Server(small.config(classes=(small.never,), hiccups=hiccups), small.listed([(0.0, 10, 2)]))
    assert step_ms(server, (0, 0, 0)) == pytest.approx([6.0, 6.0, 0.0])
    assert server.exhausted.all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"per_s": -1.0},
        {"per_s": float("nan")},
        {"most_steps": 0},
        {"ms": (9.0, 8.0)},
        {"ms": (-1.0, 8.0)},
        {"caught_up": 1.1},
    ],
)
def test_hiccups_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SimulationError, match=f"hiccups.{next(iter(wrong))}"):
        Hiccups(**wrong)  # type: ignore[arg-type]


def test_a_scenario_s_table_is_the_server_s() -> None:
    text = scenario_text("host_hiccups")
    config = parse_scenario(text, "x.toml").server_config()
    assert config.hiccups == Hiccups(2.0, 10, (10.0, 40.0), 0.5)
    with pytest.raises(ScenarioError, match=r"hiccups.ms: must be the least and the most"):
        parse_scenario(text.replace("[10, 40]", "[40, 10]"), "x.toml")
