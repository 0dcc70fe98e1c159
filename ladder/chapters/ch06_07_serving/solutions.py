"""One right answer to each exercise of chapters 06 and 07. Try first: ``ladder.chapters.ch01_05_rungs.exercises.hint``
gives away less."""

import torch


def slots(block_table, positions, page_size):
    """Slots (n,) in the flattened pool of the tokens at ``positions``
    (n,) of a sequence with this row of the block table."""
    page = block_table[positions // page_size].long()  # 32 bits hold a page's number, not every slot's
    return page * page_size + positions % page_size


def merge_splits(parts, lses):
    """(out (R, Dv), lse (R,)) from normalised parts (S, R, Dv) and
    their lses (S, R); a part with lse -inf may hold anything."""
    top = lses.amax(dim=0)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = torch.exp(lses - top)
    total = weights.sum(dim=0)
    parts = torch.where(weights[..., None] > 0, parts, 0.0)
    out = (weights[..., None] * parts).sum(dim=0) / total.masked_fill(total == 0, 1.0)[:, None]
    return out, top + torch.log(total)


def fewest_splits(num_tasks, slots, most):
    """The fewest splits, 1 .. most, that fill 85 % of the slots of every wave; if none does, those that fill most."""
    filled = []
    for splits in range(1, most + 1):
        programs = splits * num_tasks
        filled.append(programs / (-(-programs // slots) * slots))
        if filled[-1] >= 0.85:
            return splits
    return 1 + filled.index(max(filled))


def group(expert_ids, num_experts):
    """(order, offsets): assignments sorted by expert, stable, those outside 0 .. num_experts - 1 dropped."""
    ids = expert_ids.flatten()
    order = torch.sort(ids, stable=True).indices
    order = order[(ids[order] >= 0) & (ids[order] < num_experts)]
    counts = torch.bincount(ids[order], minlength=num_experts)
    return order, torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def tiles(offsets, block_rows):
    """[(expert, first row)]: a tile for every block of rows of an expert that has any."""
    ends = offsets.tolist()
    return [(e, row) for e in range(len(ends) - 1) for row in range(ends[e], ends[e + 1], block_rows)]


def absorbed_scores(q, w, latent):
    """Scores (H, S) of q (H, D) against keys w[h] @ latent[s], for w (H, D, L) and latent (S, L), keys never made."""
    return torch.bmm(q[:, None], w)[:, 0] @ latent.T
