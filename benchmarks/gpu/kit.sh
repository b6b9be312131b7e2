# . benchmarks/gpu/kit.sh [llama8b|qwen3moe]   The server's arguments of the GPU benchmark, and its commands in short.
# Sourced by bash on the GPU host, with SGLang and specgov importable (PYTHONPATH). Then, for example:
#   plain    -o out/plain.json    --loads ramp,steady_64
#   governed -o out/governed.json --loads ramp,steady_64 --repeats 2 --profile mine.json --tuned tuned.json
# TP=2 in front of a command is for two GPUs.
GPU=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
MODEL=${1:-llama8b}
COMMON=(--model-path "$GPU/models/$MODEL" --load-format dummy --skip-tokenizer-init --attention-backend fa3
  --sampling-backend pytorch --mem-fraction-static 0.6 --disable-radix-cache --grammar-backend none
  --disable-prefill-cuda-graph --chunked-prefill-size 4096 --max-running-requests 256
  --cuda-graph-bs-decode 1 2 4 8 16 32 64 96 128 192 256)
SPECULATING=(--speculative-algorithm EAGLE3 --speculative-draft-model-path "$GPU/models/$MODEL-eagle3"
  --speculative-eagle-topk 1 --speculative-adaptive --speculative-adaptive-config "$GPU/tiers.json"
  --speculative-num-steps 7 --speculative-num-draft-tokens 8)
# Several GPUs: NCCL alone and no NVLink multicast, which a program that ends badly can leave broken for the whole host.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
SEVERAL=(--disable-custom-all-reduce --enforce-disable-flashinfer-allreduce-fusion)
export PYTHONUNBUFFERED=1 TQDM_DISABLE=1 PYTHONWARNINGS=ignore SGLANG_GRAMMAR_BACKEND=none

plain() { # a server that cannot speculate
  python3 "$GPU/contest.py" --plain no-speculation "$@" -- "${COMMON[@]}" --tp-size "${TP:-1}" "${SEVERAL[@]}"
}
governed() { # a server with every tier, and all contestants
  python3 "$GPU/contest.py" "$@" -- "${COMMON[@]}" "${SPECULATING[@]}" --tp-size "${TP:-1}" "${SEVERAL[@]}"
}
fixed() { # a server without Specgov at one tier: fixed NUM_STEPS OPTIONS
  local k=$1; shift
  echo "{\"1\": {\"candidate_steps\": [$k]}}" > "/tmp/tier-$k.json"
  python3 "$GPU/contest.py" --plain "no-plugin-$k" --plain-num-steps "$k" "$@" -- "${COMMON[@]}" "${SPECULATING[@]}" \
    --speculative-adaptive-config "/tmp/tier-$k.json" --speculative-num-steps "$k" \
    --speculative-num-draft-tokens $((k + 1)) --tp-size "${TP:-1}" "${SEVERAL[@]}"
}
