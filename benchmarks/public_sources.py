"""What published figures leave unsaid, source by source: machine, model, depth, and what confounds them.

Everything here that a source does not state is an assumption, and says so in ``confounds``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specgov.policies.step_time import DRAFTS, HARDWARE, MODELS, HardwareSpec, ModelSpec
from specgov.policies.step_time.specs import eagle3_draft, transformer

LLAMA_8B = MODELS["llama-3.1-8b"]
QWEN3_8B = MODELS["qwen3-8b"]
# EAGLE, the first version, drafts over the target's whole vocabulary.
EAGLE_8B = eagle3_draft(LLAMA_8B, intermediate=14_336, heads=32, kv_heads=8, vocab=LLAMA_8B.vocab)
NO_DRAFT = ModelSpec("none", layers=0, hidden=1, dense_params=0.0, kv_bytes_per_token=0.0, vocab=0)
QWEN25_7B = transformer(
    "qwen2.5-coder-7b",
    layers=28,
    hidden=3584,
    heads=28,
    kv_heads=4,
    head_dim=128,
    vocab=152_064,
    intermediate=18_944,
)
RTX_PRO_6000 = HardwareSpec("RTX-PRO-6000", 1.792e12, 500e12, 64e9, "NVIDIA RTX PRO 6000 data sheet")


@dataclass(frozen=True)
class Source:
    """A source whose ratio of speculation to none can be predicted.

    ``accept_length`` fills in what a row does not state, by (draft, num_steps); where neither has one, the
    first row of a series (same draft) fixes it: that is the one free factor. ``spec_model`` is the target
    where the server that speculates runs another precision. ``skip_batch_sizes`` were not filled by the load.
    """

    hardware: HardwareSpec
    model: ModelSpec
    drafts: dict[str, ModelSpec]
    confounds: str
    tensor_parallel_size: int = 1
    context_tokens: int = 400
    num_steps: int = 0
    spec_model: ModelSpec | None = None
    accept_length: dict[tuple[str, int], float] = field(default_factory=dict)
    skip_batch_sizes: tuple[int, ...] = ()


_EAGLES = {"EAGLE": EAGLE_8B, "EAGLE3": DRAFTS["llama-3.1-8b"]}
SOURCES: dict[str, Source] = {
    "vllm20780": Source(
        HARDWARE["H100"],
        LLAMA_8B,
        _EAGLES,
        "GPU not named (H100 in sibling issues); vLLM V1 of mid 2025, drafts host-bound; context 400 taken",
    ),
    "vllm16937": Source(
        HARDWARE["H100"],
        LLAMA_8B,
        _EAGLES,
        "accept length not stated: that of vllm20780, same engine, model and prompts; context taken as 400",
        accept_length={("EAGLE", 2): 2.1, ("EAGLE", 4): 2.39, ("EAGLE", 7): 2.47, ("EAGLE3", 2): 2.36},
    ),
    "specforge339": Source(
        HARDWARE["H100"],
        MODELS["qwen3-30b-a3b"],
        {"EAGLE3 (zhuyksir DenseHead)": DRAFTS["qwen3-30b-a3b"]},
        "20 prompts: a batch of 16 is barely filled; mixture of experts on 2 GPUs; trees but for two rows",
        tensor_parallel_size=2,
        skip_batch_sizes=(32, 64),
    ),
    "eagle3_t5": Source(
        HARDWARE["A100-80GB"],
        LLAMA_8B,
        _EAGLES,
        "depth not stated (2 taken); accept length fixed by each draft's first row; hardware second-hand",
        num_steps=2,
    ),
    "gpustack_qwen3_8b": Source(
        HARDWARE["H100"],
        QWEN3_8B,
        {"EAGLE3 Tengyunw": DRAFTS["qwen3-8b"]},
        "FP8 against bf16, and another engine; latency with prefill; accept length fixed by batch size 1",
        spec_model=QWEN3_8B.quantized(1.0),
    ),
    "tengyunw": Source(
        HARDWARE["H200"],
        QWEN3_8B,
        {"EAGLE3": DRAFTS["qwen3-8b"]},
        "accept length not stated: fixed by the row on the RTX 5090, which is the only other one",
    ),
    "sgl4716": Source(
        HARDWARE["H100"],
        MODELS["llama-3.3-70b"],
        {"EAGLE3": DRAFTS["llama-3.3-70b"]},
        "one pair; a tree of 64 tokens on 8 GPUs, where all-reduce latency decides and is a guess",
        tensor_parallel_size=8,
    ),
    "llamacpp6828": Source(
        HARDWARE["RTX-4090"],
        LLAMA_8B.quantized(0.56),
        {"lookup --draft 5": NO_DRAFT},
        "4-bit kernels that dequantise are not near the roofline; accept length fixed by one slot",
    ),
}

NOT_PREDICTED: dict[str, str] = {
    "angelslim_docs": "hardware and depth not stated",
    "eagle3_t4": "accept length and the tree's size not stated",
    "sgl21599_high": "hardware, model and concurrency not stated",
    "sgl23336": "hardware and concurrency not stated",
    "vllm47808_blog": "the model's configuration is not in the catalogue; verification adapts",
    "vllm48944": "accept length not stated, and the model is not in the catalogue",
    "vllm49548_tax": "no drafts at all: a tax of another engine at tier 0",
    "sgl29538": "accept length and depth not stated; the model is not in the catalogue",
    "sgl33083": "no batch size has both; the model is not in the catalogue",
    "sgl_glm52_pinned": "no batch size has both; the model is not in the catalogue",
    "sgl_glm52_post1": "no batch size has both; the model is not in the catalogue",
    "strixhalo53": "accept length not stated; the model is not in the catalogue",
    "vllm44697": "accept length not stated; pipeline parallel over PCIe",
    "tokenspeed905": "accept length not stated; the model is not in the catalogue",
    "sgl6949": "hardware, concurrency and accept length not stated",
    "imp1466": "hardware and model not stated",
    "llamacpp22931": "hardware and accept length not stated",
    "trtllm3035": "hardware and model not stated",
    "vllm5000": "no drafts at all: a tax of another engine at tier 0",
}
