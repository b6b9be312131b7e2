"""Expected values are worked out by hand on a small grid, or come from the recordings behind the profiles."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgov.policies.profile import load_profile
from specgov.policies.step_time import StepGrid, StepTimeError, TableStepTime

# Contexts 0 and 100; batch sizes 1, 2, 4; num_steps 0, 2. A step costs 10 + batch + batch * num_steps, and
# batch * context / 100 more.
CONTEXTS, BATCHES, TIERS = [0.0, 100.0], [1, 2, 4], [0, 2]


def small_grid(contexts: list[float] | None = None) -> StepGrid:
    axes = (np.array(CONTEXTS if contexts is None else contexts), np.array(BATCHES), np.array(TIERS))
    context, batch, tier = np.meshgrid(*axes, indexing="ij")
    step_ms = 10.0 + batch + batch * tier + batch * context / 100
    return StepGrid(*axes, step_ms, np.full(step_ms.shape, 20), step_ms, step_ms, step_ms)


@pytest.mark.parametrize(
    ("batch", "num_steps", "total", "expected"),
    [
        (1, 0, 0, 11.0),  # a cell
        (4, 2, 400, 26.0),  # 10 + 4 + 8 + 4
        (2, 1, 0, 14.0),  # between 12 and 16
        (3, 0, 0, 13.0),  # between 12 and 14
        (3, 1, 150, 17.5),  # mean context 50: 10 + 3 + 3 + 1.5
        (4, 2, 800, 30.0),  # context 200 continues the slope: 10 + 4 + 8 + 8
        (2, 3, 0, 18.0),  # num_steps 3 continues the slope: 10 + 2 + 6
        (0, 0, 0, 11.0),  # an empty batch costs what one request costs
    ],
)
def test_values_between_and_beyond_cells(batch: int, num_steps: int, total: int, expected: float) -> None:
    assert TableStepTime(small_grid()).step_ms(batch, num_steps, total) == pytest.approx(expected)


def test_a_batch_is_padded_to_the_next_graph_size() -> None:
    table = TableStepTime(small_grid(), graph_batch_sizes=(1, 4))
    assert table.padded_batch_size(np.array([0, 1, 2, 3, 4, 5])).tolist() == [1, 1, 4, 4, 4, 5]
    assert table.step_ms(np.array([1, 2, 3, 4]), 0, 0).tolist() == [11.0, 14.0, 14.0, 14.0]


def test_attention_reads_real_requests_only() -> None:
    # Two requests of 100 tokens in a graph of 4: 14 without context, and 200 tokens of context.
    table = TableStepTime(small_grid(), graph_batch_sizes=(4,))
    assert table.step_ms(2, 0, 200) == pytest.approx(16.0)


def test_above_the_largest_graph_a_batch_runs_eagerly() -> None:
    # Slope from batch 2 to 4 at num_steps 0 is 1 ms a request: 14 + 2.
    assert TableStepTime(small_grid(), (1, 2, 4)).step_ms(6, 0, 0) == pytest.approx(16.0)
    # Graphs up to 2 only: the grid still knows batch 3 and 4, and the slope beyond 2 is theirs.
    assert TableStepTime(small_grid(), (1, 2)).step_ms(3, 2, 0) == pytest.approx(19.0)
    # The host needs 50 ms to launch the kernels one by one.
    floored = TableStepTime(small_grid(), (1, 2), eager_floor_ms=50.0)
    assert floored.step_ms(np.array([2, 3]), 0, 0).tolist() == [12.0, 50.0]


def test_one_context_means_no_slope() -> None:
    table = TableStepTime(small_grid([100.0]))
    assert table.step_ms(2, 0, np.array([0, 200, 9999])).tolist() == [14.0, 14.0, 14.0]


def test_arguments_broadcast() -> None:
    table = TableStepTime(small_grid(), (1, 2, 4))
    batch = np.array([[1], [2], [3]])
    tiers = np.array([0, 1, 2])
    together = table.step_ms(batch, tiers, batch * 50)
    assert together.shape == (3, 3)
    for row, b in enumerate((1, 2, 3)):
        for column, k in enumerate((0, 1, 2)):
            assert together[row, column] == table.step_ms(b, k, b * 50)


def test_other_graph_sizes_on_the_same_cells() -> None:
    table = TableStepTime(small_grid(), (1, 2, 4)).with_graph_batch_sizes((4,))
    assert table.step_ms(1, 0, 0) == 14.0


@pytest.mark.parametrize("num_steps", [-1, 33])
def test_a_num_steps_out_of_range_is_refused(num_steps: int) -> None:
    with pytest.raises(StepTimeError, match=r"num_steps must be in 0\.\.32"):
        TableStepTime(small_grid()).step_ms(1, num_steps, 0)


@pytest.mark.parametrize("sizes", [(0, 1), (2, 1), (1, 1)])
def test_graph_sizes_must_ascend(sizes: tuple[int, ...]) -> None:
    with pytest.raises(StepTimeError, match="graph batch sizes must ascend"):
        TableStepTime(small_grid(), sizes)


def _grid_with(**changes: object) -> StepGrid:
    grid = small_grid()
    names = (
        "context_tokens",
        "batch_sizes",
        "num_steps",
        "step_ms",
        "count",
        "median_ms",
        "p10_ms",
        "p90_ms",
    )
    return StepGrid(**{name: changes.get(name, getattr(grid, name)) for name in names})


def _changed(value: float) -> Callable[[], np.ndarray]:
    def make() -> np.ndarray:
        step_ms = small_grid().step_ms.copy()
        step_ms[0, 1, 1] = value
        return step_ms

    return make


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": np.array([1, 4, 2])}, "batch_sizes: expected ascending"),
        ({"num_steps": np.array([-1, 2])}, "num_steps: expected ascending, distinct values from 0"),
        ({"count": np.ones((1, 1, 1))}, "count: shape"),
        ({"step_ms": _changed(np.nan)()}, "finite number above 0"),
        ({"step_ms": _changed(0.0)()}, "finite number above 0"),
        ({"step_ms": _changed(11.5)()}, "falls with growing batch size"),
        ({"step_ms": _changed(99.0)()}, "falls with growing"),
    ],
)
def test_a_bad_grid_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(StepTimeError, match=message):
        _grid_with(**changes)


BUNDLED = [load_profile(name) for name in ("h200-llama-3.1-8b", "h200-qwen3-30b-a3b")]


@given(
    profile=st.sampled_from(BUNDLED),
    batch=st.integers(1, 400),
    more=st.integers(0, 300),
    num_steps=st.integers(0, 16),
    deeper=st.integers(0, 16),
    context=st.floats(0, 200_000),
)
def test_no_step_gets_cheaper_with_more_work(
    profile, batch: int, more: int, num_steps: int, deeper: int, context: float
) -> None:
    """At the same mean context of the padded batch, in every direction."""
    table = profile.step_time
    small, large = (int(table.padded_batch_size(b)) for b in (batch, batch + more))
    here = table.step_ms(small, num_steps, small * context)
    assert table.step_ms(large, num_steps, large * context) >= here - 1e-9
    assert table.step_ms(small, num_steps + deeper, small * context) >= here - 1e-9
    assert table.step_ms(small, num_steps, small * (context + 500)) >= here - 1e-9


@given(profile=st.sampled_from(BUNDLED), batch=st.integers(1, 256), total=st.integers(0, 10**6))
def test_the_sum_of_contexts_counts_not_who_has_it(profile, batch: int, total: int) -> None:
    """Batches that pad to the same graph size cost the same for the same sum of sequence lengths."""
    table = profile.step_time
    padded = int(table.padded_batch_size(batch))
    assert table.step_ms(batch, 3, total) == table.step_ms(padded, 3, total)


def test_break_even_of_the_recordings() -> None:
    """Ratios of recorded medians (Llama 8B, H200, context 512), worked out outside this code."""
    table = BUNDLED[0].step_time
    batch = np.array([1, 256])
    no_spec = table.step_ms(batch, 0, batch * 512)
    assert (table.step_ms(batch, 3, batch * 512) / no_spec).round(2).tolist() == [1.13, 2.45]
    assert (table.step_ms(batch, 7, batch * 512) / no_spec).round(2).tolist() == [1.33, 4.30]
