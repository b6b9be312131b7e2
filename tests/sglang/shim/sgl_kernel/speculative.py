import torch


def reconstruct_indices_from_tree_mask(
    tree_mask,
    verified_seq_len,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    batch_size,
    draft_token_num,
):
    n = draft_token_num
    m = tree_mask.view(-1)[: batch_size * n * n].view(batch_size, n, n).bool()
    pos = positions.view(-1)
    ri, rn, rs = (t.view(-1, n) for t in (retrieve_index, retrieve_next_token, retrieve_next_sibling))
    for b in range(batch_size):
        anc = m[b] & torch.tril(torch.ones(n, n, dtype=torch.bool), -1)
        parent = [max((j for j in range(i) if anc[i, j]), default=-1) for i in range(n)]
        for t in range(n):
            pos[b * n + t] = int(anc[t].sum()) + int(verified_seq_len[b])
            ri[b, t] = b * n + t
            rn[b, t] = min((k for k in range(t + 1, n) if anc[k, t]), default=-1)
            rs[b, t] = (
                -1
                if parent[t] < 0
                else min((k for k in range(t + 1, n) if parent[k] == parent[t]), default=-1)
            )
