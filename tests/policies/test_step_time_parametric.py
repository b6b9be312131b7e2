"""Expected values follow from the formulas, worked out by hand on round numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgov.policies.profile import load_profile
from specgov.policies.step_time import (
    DRAFTS,
    HARDWARE,
    MODELS,
    Coefficients,
    HardwareSpec,
    ModelSpec,
    ParametricStepTime,
    PrefillCost,
    StepNoise,
    StepTimeError,
    model_from_config,
    roofline_prior,
)

MACHINE = HardwareSpec("round", 1e12, 1e14, 1e11, "made up")
# 1e9 parameters: 2 ms to read at 1 TB/s; 2e9 FLOPs a token: 0.02 ms at 100 TFLOP/s.
DENSE = ModelSpec("dense", layers=10, hidden=1000, dense_params=1e9, kv_bytes_per_token=1e5, vocab=1000)
DRAFT = ModelSpec("draft", layers=1, hidden=1000, dense_params=1e8, kv_bytes_per_token=1e4, vocab=1000)
EXACT = Coefficients(
    fixed_ms=1.0,
    request_us=0.0,
    token_us=0.0,
    memory_efficiency=1.0,
    compute_efficiency=1.0,
    attention_efficiency=1.0,
    draft_pass_ms=0.1,
    draft_extend_ms=0.3,
    overlap=1.0,
    novelty=1.0,
    all_reduce_latency_us=10.0,
    tile_tokens=1.0,
)


def model(**changes: object) -> ParametricStepTime:
    return replace(ParametricStepTime(DENSE, DRAFT, MACHINE, 1, EXACT), **changes)


def test_a_step_without_speculation() -> None:
    # fixed 1, weights 2, arithmetic of 10 tokens 0.2, cache of 1e4 tokens: 1e9 bytes, 1 ms.
    assert model(can_speculate=False).step_ms(10, 0, 1e4) == pytest.approx(1 + 2 + 0.2 + 1)


def test_tier_0_pays_for_draft_extend() -> None:
    # 0.3, draft weights 0.2, arithmetic 0.002 * 10, cache 0.1.
    assert model().step_ms(10, 0, 1e4) == pytest.approx(4.2 + 0.3 + 0.2 + 0.02 + 0.1)


def test_a_step_of_two_drafts() -> None:
    verify = 2 + 0.02 * 30 + 1  # 30 tokens
    drafting = 2 * (0.1 + 0.2 + 0.02 + 0.1)
    extend = 0.3 + 0.2 + 0.002 * 30 + 0.1
    assert model().step_ms(10, 2, 1e4) == pytest.approx(1 + verify + drafting + extend)


def test_weights_and_arithmetic_overlap() -> None:
    # 100 tokens: weights 2, arithmetic 2: their 2-norm is 2 sqrt 2.
    overlapped = model(coefficients=replace(EXACT, overlap=2.0), can_speculate=False)
    assert overlapped.step_ms(100, 0, 0) == pytest.approx(1 + 2 * 2**0.5)


def test_arithmetic_is_paid_in_whole_tiles() -> None:
    tiled = model(coefficients=replace(EXACT, tile_tokens=64.0), can_speculate=False)
    assert tiled.step_ms(1, 0, 0) == tiled.step_ms(64, 0, 0) == pytest.approx(1 + 2 + 1.28)
    assert tiled.step_ms(65, 0, 0) == pytest.approx(1 + 2 + 2.56)


def test_experts_are_read_as_tokens_touch_them() -> None:
    # 8 experts of 1e9 parameters (2 ms each), 2 a token, and 1e9 that every step reads.
    moe = ModelSpec("moe", 10, 1000, 1e9, 0.0, 1000, num_experts=8, experts_per_token=2, expert_params=1e9)
    server = model(model=moe, can_speculate=False)
    # One token: 2 of 8; arithmetic 0.06. Two tokens: 8 (1 - 0.75^2) = 3.5; arithmetic 0.12.
    assert server.step_ms(1, 0, 0) == pytest.approx(1 + 2 + 4 + 0.06)
    assert server.step_ms(2, 0, 0) == pytest.approx(1 + 2 + 7 + 0.12)


def test_drafts_that_are_alike_touch_fewer_experts() -> None:
    moe = ModelSpec("moe", 10, 1000, 1e9, 0.0, 1000, num_experts=8, experts_per_token=2, expert_params=1e9)
    alike = model(model=moe, coefficients=replace(EXACT, novelty=0.0))
    unlike = model(model=moe)
    assert alike.step_ms(4, 0, 0) == unlike.step_ms(4, 0, 0)
    assert alike.step_ms(4, 1, 0) == unlike.step_ms(4, 1, 0)
    # k = 3: two unlike tokens a request instead of four: 8 experts * (0.75^8 - 0.75^16) * 2 ms.
    difference = unlike.step_ms(4, 3, 0) - alike.step_ms(4, 3, 0)
    assert difference == pytest.approx(16 * (0.75**8 - 0.75**16))


def test_tensor_parallelism_divides_and_adds_all_reduces() -> None:
    # Weights 1, arithmetic 0.1, cache 0.5; 20 all-reduces of 0.01 ms and 10 * 1000 * 2 bytes, 0.2 us.
    pair = model(tensor_parallel_size=2, can_speculate=False)
    assert pair.step_ms(10, 0, 1e4) == pytest.approx(1 + 1 + 0.1 + 0.5 + 20 * (0.01 + 0.0002))


def test_a_batch_is_padded() -> None:
    padded = model().with_graph_batch_sizes((4, 8))
    assert (
        padded.step_ms(np.array([1, 5, 9]), 2, 0).tolist()
        == model().step_ms(np.array([4, 8, 9]), 2, 0).tolist()
    )


def test_prefill() -> None:
    # fixed 1, weights 2, arithmetic 20, draft: 0.3 + 0.2 + 2.
    assert model().prefill_ms(np.array([0, 1000])).tolist() == pytest.approx([0.0, 25.5])


@given(
    name=st.sampled_from(sorted(MODELS)),
    machine=st.sampled_from(sorted(HARDWARE)),
    tp=st.sampled_from([1, 2, 4, 8]),
    batch=st.integers(1, 512),
    num_steps=st.integers(0, 15),
    context=st.integers(0, 10**7),
)
def test_the_prior_grows_with_work(
    name: str, machine: str, tp: int, batch: int, num_steps: int, context: int
) -> None:
    prior = roofline_prior(MODELS[name], DRAFTS[name], HARDWARE[machine], tp)
    here = prior.step_ms(batch, num_steps, context)
    assert np.isfinite(here)
    assert here > 0
    assert prior.step_ms(batch + 1, num_steps, context) >= here
    assert prior.step_ms(batch, num_steps + 1, context) > here
    assert prior.step_ms(batch, num_steps, context + 1000) > here


def test_the_catalogue_has_the_sizes_that_names_say() -> None:
    """Public parameter counts, less the input embeddings, of which a decode step reads a few rows only."""
    for name, billions, embeddings in (
        ("llama-3.1-8b", 8.03, 128_256 * 4096 / 1e9),
        ("llama-3.3-70b", 70.55, 128_256 * 8192 / 1e9),
        ("qwen3-8b", 8.19, 151_936 * 4096 / 1e9),
        ("qwen3-30b-a3b", 30.53, 151_936 * 2048 / 1e9),
    ):
        spec = MODELS[name]
        total = (spec.dense_params + spec.num_experts * spec.expert_params) / 1e9
        assert total == pytest.approx(billions - embeddings, rel=0.005)
    assert MODELS["llama-3.1-8b"].kv_bytes_per_token == 2 * 2 * 32 * 8 * 128


def test_a_model_from_its_configuration_file() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    }
    assert model_from_config(config, "llama-3.1-8b") == MODELS["llama-3.1-8b"]
    draft = {
        **config,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 32000,
    }
    expected = DRAFTS["llama-3.1-8b"]
    assert model_from_config(draft, expected.name) == expected


def test_a_configuration_without_a_figure_is_refused() -> None:
    with pytest.raises(StepTimeError, match="'hidden_size' is missing"):
        model_from_config({}, "nothing")


def test_the_residual_meets_the_table_at_its_cells() -> None:
    for name in ("h200-llama-3.1-8b", "h200-qwen3-30b-a3b"):
        profile = load_profile(name)
        grid = profile.grid
        context, batch, tier = np.meshgrid(
            grid.context_tokens, grid.batch_sizes, grid.num_steps, indexing="ij"
        )
        met = profile.residual_step_time.step_ms(batch, tier, batch * context)
        np.testing.assert_allclose(met, grid.step_ms, rtol=1e-9)


def test_the_residual_keeps_its_last_ratio_beyond_the_table() -> None:
    profile = load_profile("h200-llama-3.1-8b")
    ratio = [
        profile.residual_step_time.step_ms(batch, 3, batch * 512)
        / profile.parametric.step_ms(batch, 3, batch * 512)
        for batch in (256, 400)
    ]
    assert ratio[0] == pytest.approx(ratio[1])


def test_noise_keeps_the_median_and_adds_stalls() -> None:
    noise = StepNoise(sigma=0.1, stall_probability=0.25, stall_ms=50.0)
    noisy = noise.apply(np.array([10.0, 10.0, 10.0]), np.array([0.0, 1.0, 0.0]), np.array([0.3, 0.9, 0.2]))
    assert noisy.tolist() == pytest.approx([10.0, 10 * np.exp(0.1), 60.0])


def test_prefill_cost() -> None:
    assert PrefillCost(2.0, 0.01).prefill_ms(np.array([0, 1, 500])).tolist() == pytest.approx(
        [0.0, 2.01, 7.0]
    )
