"""Stand-in for SGLang's CPU kernel library, for tests, in plain torch; chains of drafts (topk 1) only.

It never defines ``convert_weight_packed``, so that SGLang's cpu_has_amx_support() is False and every layer
keeps its plain torch path: only the attention kernels and the small helpers of speculation below are used.
"""

import ctypes
import importlib.util
import math
from pathlib import Path

import torch

__version__ = "0.0.0+stub"
_lib = torch.library.Library("sgl_kernel", "FRAGMENT")


def _attend(q, k, v, scale, mask, logit_cap, sinks):
    # q [T, H, D]  k/v [S, Hkv, D]
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
    s = torch.einsum("thd,shd->hts", q.float(), k.float()) * scale
    if logit_cap and logit_cap > 0:
        s = logit_cap * torch.tanh(s / logit_cap)
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf)
    if sinks is not None:
        sk = sinks.float().view(-1, 1, 1).expand(-1, s.shape[1], 1)
        p = torch.softmax(torch.cat([s, sk], dim=-1), dim=-1)[..., :-1]
    else:
        p = torch.softmax(s, dim=-1)
    return torch.einsum("hts,shd->thd", p, v.float()).to(q.dtype)


def extend_attention_cpu(
    q,
    k,
    v,
    o,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_seq_lens,
    extend_start_loc,
    max_len_extend,
    sm_scale,
    logit_cap,
    is_cross_attn=False,  # 0.5.9 has nothing from here on
    sliding_window=0,
    encoder_lens=None,
    sinks=None,
    tree_mask=None,
    is_causal=True,
):
    assert not is_cross_attn
    tree_at = 0
    for i in range(seq_lens.shape[0]):
        n, s0, total = int(extend_seq_lens[i]), int(extend_start_loc[i]), int(seq_lens[i])
        if n == 0:
            continue
        slots = req_to_token[int(req_pool_indices[i]), :total].long()
        prefix = total - n
        mask = torch.ones(n, total, dtype=torch.bool)
        if tree_mask is not None:
            mask[:, prefix:] = tree_mask.view(-1)[tree_at : tree_at + n * n].view(n, n).bool()
            tree_at += n * n
        elif is_causal:
            qpos = torch.arange(prefix, total).unsqueeze(1)
            mask = torch.arange(total).unsqueeze(0) <= qpos
            if sliding_window and sliding_window > 0:
                mask &= torch.arange(total).unsqueeze(0) > qpos - sliding_window
        o[s0 : s0 + n] = _attend(
            q[s0 : s0 + n], k_buffer[slots], v_buffer[slots], sm_scale, mask, logit_cap, sinks
        )


def decode_attention_cpu(
    q,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    o,
    key,
    value,
    loc,
    attn_logits,
    req_to_token,
    req_pool_indices,
    seq_lens,
    sm_scale,
    logit_cap,
    is_cross_attn=False,  # 0.5.9 has nothing from here on
    sliding_window=0,
    encoder_lens=None,
    sinks=None,
):
    assert not is_cross_attn
    if key is not None:
        k_buffer[loc.long()] = key.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc.long()] = value.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for i in range(seq_lens.shape[0]):
        total = int(seq_lens[i])
        lo = max(0, total - sliding_window) if sliding_window and sliding_window > 0 else 0
        slots = req_to_token[int(req_pool_indices[i]), lo:total].long()
        o[i : i + 1] = _attend(
            q[i : i + 1], k_buffer[slots], v_buffer[slots], sm_scale, None, logit_cap, sinks
        )


def _has_kv_scales():
    """Newer SGLang passes key/value scales to the two attention ops; 0.5.16 does not."""
    root = Path(importlib.util.find_spec("sglang").origin).parent
    return "key_scale" in (root / "srt/layers/attention/intel_amx_backend.py").read_text()


_SC = "float ks, float vs, " if _has_kv_scales() else ""
_lib.define(
    "decode_attention_cpu(Tensor q, Tensor(a!) kb, Tensor(b!) vb, "
    + _SC
    + "Tensor(c!) o, Tensor? k, Tensor? v, Tensor loc, Tensor(d!) logits, Tensor r2t, "
    "Tensor rpi, Tensor sl, float scale, float cap, bool cross=False, int window=0, Tensor? enc=None, "
    "Tensor? sinks=None) -> ()"
)
_lib.define(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor kb, Tensor vb, "
    + _SC
    + "Tensor r2t, Tensor rpi, Tensor sl, Tensor el, Tensor es, int maxlen, "
    "float scale, float cap, bool cross=False, int window=0, Tensor? enc=None, Tensor? sinks=None, "
    "Tensor? tree_mask=None, bool is_causal=True) -> ()"
)
if _SC:
    _lib.impl("decode_attention_cpu", decode_attention_cpu, "CPU")
    _lib.impl("extend_attention_cpu", extend_attention_cpu, "CPU")
else:
    _lib.impl(
        "decode_attention_cpu", lambda q, kb, vb, *a: decode_attention_cpu(q, kb, vb, 1.0, 1.0, *a), "CPU"
    )
    _lib.impl(
        "extend_attention_cpu",
        lambda q, k, v, o, kb, vb, *a: extend_attention_cpu(q, k, v, o, kb, vb, 1.0, 1.0, *a),
        "CPU",
    )


# ---- KV bookkeeping ---------------------------------------------------------------------------
def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    tgt, src = tgt_loc.tolist(), src_loc.tolist()
    for p, st in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(p + s * st, st) for s in src]
        for t, r in zip(tgt, rows, strict=True):
            ctypes.memmove(p + t * st, r, st)


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    at = 0
    for r, a, b in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[r, a:b] = out_cache_loc[at : at + b - a].to(req_to_token.dtype)
        at += b - a


def assign_extend_cache_locs_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    at = 0
    for r, a, b in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        out_cache_loc[at : at + b - a] = req_to_token[r, a:b].to(out_cache_loc.dtype)
        at += b - a


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    n = topk * num_steps
    for i, (r, s) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        out_cache_loc[i * n : (i + 1) * n] = req_to_token[r, s : s + n].to(out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    if topk != 1:
        raise NotImplementedError("this sgl_kernel knows chains of drafts only, not trees")
    return req_to_token[req_pool_indices.long()].contiguous()


# ---- EAGLE helpers -----------------------------------------------------------------------------
def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    idx = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.view(-1)[idx].to(bonus_tokens.dtype))


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    src = accept_index.view(-1)
    src = src[src > -1].long()
    accept_out_cache_loc[: src.numel()] = out_cache_loc[src]


def rotate_input_ids_cpu(input_ids, extend_start_loc, extend_seq_lens, topk_index, select_index=None):
    for i, (s, n) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)):
        if n <= 0:
            continue
        input_ids[s : s + n - 1] = input_ids[s + 1 : s + n].clone()
        last = int(select_index[i]) if select_index is not None else s + n - 1
        input_ids[last] = topk_index.view(-1)[i].to(input_ids.dtype)


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
):
    if topk != 1:
        raise NotImplementedError("this sgl_kernel knows chains of drafts only, not trees")
    n, full_mask = draft_token_num, int(tree_mask_mode) == 0
    mask, chain = tree_mask.view(-1), torch.tril(torch.ones(n, n, dtype=tree_mask.dtype))
    at = 0
    for b, seq_len in enumerate(verified_seq_len.tolist()):
        width = seq_len + n if full_mask else n
        mask[at : at + n * width].view(n, width)[:, -n:] = chain
        at += n * width
        positions.view(-1)[b * n : (b + 1) * n] = seq_len + torch.arange(n)
        retrieve_index.view(-1, n)[b] = b * n + torch.arange(n)
        retrieve_next_token.view(-1, n)[b, : n - 1] = torch.arange(1, n)


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    bs = candidates.shape[0]
    steps = accept_index.shape[1]
    target = target_predict.reshape(-1)
    for b in range(bs):
        last = int(retrive_index[b, 0])
        accept_index[b, 0] = last
        num, cur = 0, 0
        for _ in range(1, steps):
            cur = int(retrive_next_token[b, cur])
            hit = False
            while cur != -1:
                if int(candidates[b, cur]) == int(target[last]):
                    predicts[last] = target[last].to(predicts.dtype)
                    num += 1
                    last = int(retrive_index[b, cur])
                    accept_index[b, num] = last
                    hit = True
                    break
                cur = int(retrive_next_sibling[b, cur])
            if not hit:
                break
        accept_token_num[b] = num
        predicts[last] = target[last].to(predicts.dtype)
