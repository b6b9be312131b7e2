"""Models and machines as the parametric step time sees them, and a small catalogue of both.

Figures are those that makers publish: model sizes from the configuration files of the models' own
repositories, machine figures from data sheets (dense arithmetic, without sparsity).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specgov.policies.step_time.grid import StepTimeError


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A transformer, by what a decode step has to read and compute.

    ``dense_params`` are read in every step, whatever the batch: attention, dense feed-forward layers, shared
    experts, the output head. ``expert_params`` is the size of one expert summed over all layers, and each
    token uses ``experts_per_token`` of ``num_experts`` in each; all three are 0 for a dense model.
    """

    name: str
    layers: int
    hidden: int
    dense_params: float
    kv_bytes_per_token: float
    vocab: int
    weight_bytes: float = 2.0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_params: float = 0.0

    @property
    def active_params(self) -> float:
        """Parameters that take part in the computation of one token."""
        return self.dense_params + self.experts_per_token * self.expert_params

    def quantized(self, weight_bytes: float) -> ModelSpec:
        """The same model with its weights stored in ``weight_bytes`` bytes a parameter."""
        return replace(self, weight_bytes=weight_bytes)


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """A device by its data sheet: bytes/s of memory, dense bf16 FLOP/s, bytes/s to its peers one way."""

    name: str
    memory_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float
    source: str


def transformer(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    intermediate: int = 0,
    num_experts: int = 0,
    experts_per_token: int = 0,
    moe_intermediate: int = 0,
    attention_input: int = 0,
    extra_params: float = 0.0,
) -> ModelSpec:
    """A model from its configuration file: grouped-query attention, gated feed-forward layers, bf16.

    Args:
        name: as people call it.
        layers: hidden layers.
        hidden: width.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        vocab: rows of the output head.
        intermediate: width of the dense feed-forward layer, 0 where every layer is a mixture of experts.
        num_experts: experts a layer, 0 for a dense model.
        experts_per_token: experts that a token uses.
        moe_intermediate: width of an expert.
        attention_input: width of what attention reads, where it is not ``hidden`` (an EAGLE draft reads token
            and feature, twice the width).
        extra_params: further parameters that each step reads.

    """
    query, key_value = heads * head_dim, 2 * kv_heads * head_dim
    attention = (attention_input or hidden) * (query + key_value) + query * hidden
    dense = (
        layers * (attention + 3 * hidden * intermediate + hidden * num_experts)
        + vocab * hidden
        + extra_params
    )
    return ModelSpec(
        name=name,
        layers=layers,
        hidden=hidden,
        dense_params=float(dense),
        kv_bytes_per_token=float(2 * layers * key_value),
        vocab=vocab,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert_params=float(layers * 3 * hidden * moe_intermediate),
    )


def eagle3_draft(
    target: ModelSpec, *, intermediate: int, heads: int, kv_heads: int, vocab: int = 32_000
) -> ModelSpec:
    """A one-layer EAGLE-3 draft for ``target``: reads three hidden states, its own reduced vocabulary."""
    head_dim = 128
    return transformer(
        f"{target.name} EAGLE-3",
        layers=1,
        hidden=target.hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        intermediate=intermediate,
        attention_input=2 * target.hidden,
        extra_params=3.0 * target.hidden * target.hidden,
    )


def model_from_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """A model from the contents of its ``config.json``, as Hugging Face repositories hold it.

    An EAGLE-3 draft is known by its architecture's name.

    Raises:
        StepTimeError: a figure is missing or no number.

    """
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        num_experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
        is_draft = any("eagle3" in str(each).lower() for each in config.get("architectures", ()))
        return transformer(
            name,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads", heads)),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab=int(config.get("draft_vocab_size") or config["vocab_size"]),
            intermediate=0 if num_experts else int(config["intermediate_size"]),
            num_experts=num_experts,
            experts_per_token=int(config["num_experts_per_tok"]) if num_experts else 0,
            moe_intermediate=int(config["moe_intermediate_size"]) if num_experts else 0,
            attention_input=2 * hidden if is_draft else 0,
            extra_params=3.0 * hidden * hidden if is_draft else 0.0,
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise StepTimeError(f"the configuration of {name} does not describe a transformer: {what}") from error


_LLAMA_8B = transformer(
    "llama-3.1-8b",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128_256,
    intermediate=14_336,
)
_LLAMA_70B = transformer(
    "llama-3.3-70b",
    layers=80,
    hidden=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    vocab=128_256,
    intermediate=28_672,
)
_QWEN3_8B = transformer(
    "qwen3-8b", layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, vocab=151_936, intermediate=12_288
)
_QWEN3_1_7B = transformer(
    "qwen3-1.7b",
    layers=28,
    hidden=2048,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocab=151_936,
    intermediate=6_144,
)
_QWEN3_4B = transformer(
    "qwen3-4b", layers=36, hidden=2560, heads=32, kv_heads=8, head_dim=128, vocab=151_936, intermediate=9_728
)
_QWEN3_14B = transformer(
    "qwen3-14b",
    layers=40,
    hidden=5120,
    heads=40,
    kv_heads=8,
    head_dim=128,
    vocab=151_936,
    intermediate=17_408,
)
_QWEN3_32B = transformer(
    "qwen3-32b",
    layers=64,
    hidden=5120,
    heads=64,
    kv_heads=8,
    head_dim=128,
    vocab=151_936,
    intermediate=25_600,
)
_QWEN3_MOE = transformer(
    "qwen3-30b-a3b",
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    vocab=151_936,
    num_experts=128,
    experts_per_token=8,
    moe_intermediate=768,
)

MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        _LLAMA_8B, _LLAMA_70B, _QWEN3_1_7B, _QWEN3_4B, _QWEN3_8B, _QWEN3_14B, _QWEN3_32B, _QWEN3_MOE
    )
}  # fmt: skip
"""Target models by name."""

DRAFTS: dict[str, ModelSpec] = {
    "llama-3.1-8b": eagle3_draft(_LLAMA_8B, intermediate=14_336, heads=32, kv_heads=8),
    "llama-3.3-70b": eagle3_draft(_LLAMA_70B, intermediate=28_672, heads=64, kv_heads=8),
    "qwen3-1.7b": eagle3_draft(_QWEN3_1_7B, intermediate=6_144, heads=16, kv_heads=8),
    "qwen3-4b": eagle3_draft(_QWEN3_4B, intermediate=9_728, heads=32, kv_heads=8),
    "qwen3-8b": eagle3_draft(_QWEN3_8B, intermediate=12_288, heads=32, kv_heads=8),
    "qwen3-14b": eagle3_draft(_QWEN3_14B, intermediate=17_408, heads=40, kv_heads=8),
    "qwen3-32b": eagle3_draft(_QWEN3_32B, intermediate=25_600, heads=64, kv_heads=8),
    "qwen3-30b-a3b": eagle3_draft(_QWEN3_MOE, intermediate=12_288, heads=32, kv_heads=4),
}
"""A one-layer EAGLE-3 draft for each target, by the target's name."""

HARDWARE: dict[str, HardwareSpec] = {
    spec.name: spec
    for spec in (
        HardwareSpec("A100-80GB", 2.039e12, 312e12, 300e9, "NVIDIA A100 80GB SXM data sheet"),
        HardwareSpec("A100-40GB", 1.555e12, 312e12, 300e9, "NVIDIA A100 40GB SXM data sheet"),
        HardwareSpec("H100", 3.35e12, 989e12, 450e9, "NVIDIA H100 SXM data sheet"),
        HardwareSpec("H100-NVL", 3.9e12, 835e12, 300e9, "NVIDIA H100 NVL data sheet"),
        HardwareSpec("H200", 4.8e12, 989e12, 450e9, "NVIDIA H200 SXM data sheet"),
        HardwareSpec("B200", 8.0e12, 2250e12, 900e9, "NVIDIA DGX B200 data sheet"),
        HardwareSpec("MI300X", 5.3e12, 1307e12, 448e9, "AMD Instinct MI300X data sheet"),
        HardwareSpec(
            "RTX-4090", 1.008e12, 165e12, 32e9, "NVIDIA Ada GPU architecture paper, bf16 with fp32 sum"
        ),
        HardwareSpec(
            "RTX-5090", 1.792e12, 210e12, 64e9, "NVIDIA RTX Blackwell architecture paper, bf16 with fp32 sum"
        ),
        HardwareSpec("L40S", 0.864e12, 362e12, 32e9, "NVIDIA L40S data sheet"),
    )
}
"""Machines by name, one GPU each."""
