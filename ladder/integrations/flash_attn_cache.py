"""What the FlashAttention interface does to a cache: find pages,
rotate and append new keys, skip padding on the left."""

import torch

from ladder.contract import INTEGERS, check_paged
from ladder.rungs import MAX_HEAD_DIM
from ladder.step08_dflash2.dispatch import RUNG

from .flash_attn_checks import check_tensor, readable


def places(x, cu_seqlens):
    """(sequence, token within it) of each row: (B, S) of a batch, (total,) of packed tokens."""
    if cu_seqlens is None:
        batch, tokens = x.shape[:2]
        return torch.arange(batch, device=x.device)[:, None], torch.arange(tokens, device=x.device)[None]
    rows = torch.arange(x.shape[0], device=x.device)
    cu_seqlens = cu_seqlens.long()
    seq = torch.searchsorted(cu_seqlens, rows, right=True) - 1
    seq = seq.clamp(max=max(0, cu_seqlens.numel() - 2))  # rows behind the last sequence
    return seq, rows - cu_seqlens[seq]


def rotate(name, x, positions, cos, sin, interleaved):
    """Rotary embedding of the first 2 * cos.shape[1] columns of x (..., H, D) at ``positions`` (...)."""
    if readable(positions) and positions.numel():
        low, high = (int(n) for n in positions.aminmax())
        if low < 0 or high >= cos.shape[0]:
            raise ValueError(
                f"{name}: rotary_cos has {cos.shape[0]} positions; want one for {low if low < 0 else high}"
            )
    half = cos.shape[1]
    # on a GPU: NaN shows it, an assertion would end the process
    outside = (positions < 0) | (positions >= cos.shape[0])
    row = positions.long().clamp(0, cos.shape[0] - 1)
    cos, sin = (table[row].float().masked_fill(outside[..., None], float("nan")).unsqueeze(-2) for table in (cos, sin))
    rotated, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = rotated.split(half, dim=-1)
        rotated = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


def pages_of_sequences(name, k_cache, page_table, cache_batch_idx, batch):
    """(B, pages) int32. A cache without pages is one with a page as long as a row."""
    table = page_table
    if table is not None:
        check_tensor(name, "page_table", table, "B", "pages", dtypes=INTEGERS[:1])
        if table.device != k_cache.device:
            raise ValueError(f"{name}: page_table is on {table.device}; want {k_cache.device}, the device of k_cache")
    else:
        table = torch.arange(k_cache.shape[0], dtype=torch.int32, device=k_cache.device)[:, None]
    if cache_batch_idx is not None:
        check_tensor(name, "cache_batch_idx", cache_batch_idx, batch, dtypes=INTEGERS)
        if cache_batch_idx.device != table.device:
            raise ValueError(
                f"{name}: cache_batch_idx is on {cache_batch_idx.device}; want {table.device}, the device of q"
            )
        if batch and readable(table):
            low, high = (int(n) for n in cache_batch_idx.aminmax())
            if low < 0 or high >= len(table):
                raise ValueError(
                    f"{name}: cache_batch_idx holds {low if low < 0 else high}; want 0 .. {len(table) - 1}"
                )
        table = table[cache_batch_idx.long().clamp(0, max(0, len(table) - 1))]
    if table.shape[0] != batch:
        owner = "page_table" if page_table is not None else "k_cache"
        raise ValueError(
            f"{name}: {owner} has {table.shape[0]} sequences; want {batch}, those of q, or cache_batch_idx"
        )
    return table


def check_before_append(q, k_cache, v_cache, table, lengths, scale):
    """What attention would refuse once the new keys are written."""
    check_paged(RUNG, q, k_cache, v_cache[..., :MAX_HEAD_DIM], table, lengths, scale=scale, packed=q.ndim == 3)


def append_rows(k_cache, v_cache, k, v, table, lengths, cu_seqlens_new):
    """Write new keys and values behind each sequence, in place.
    Returns (B,) bool: sequences without room for all of theirs.

    Nothing is written for those, and nothing waits for the device: where a token has no place of its own, its row
    repeats the write of a token that has one, or writes back what the cache holds.
    """
    (num_pages, page_size), num_tokens = k_cache.shape[:2], k.shape[:-2].numel()
    if not num_tokens or not table.shape[1] or not num_pages:
        return torch.full_like(lengths, num_tokens > 0, dtype=torch.bool)
    seq, token = (x.expand(k.shape[:-2]).flatten() for x in places(k, cu_seqlens_new))
    position = lengths[seq].long() + token
    page = table[seq, (position // page_size).clamp(0, table.shape[1] - 1)].long()
    inside = (position >= 0) & (position < table.shape[1] * page_size) & (page >= 0) & (page < num_pages)
    lost = torch.zeros_like(lengths).index_add_(0, seq, (~inside).to(lengths.dtype)) > 0
    written = ~lost[seq]
    donor = written.int().argmax(0, keepdim=True)  # a token that is written, if there is one
    some = written[donor]
    page = torch.where(written, page, torch.where(some, page[donor], 0))
    slot = torch.where(written, position % page_size, torch.where(some, position[donor] % page_size, 0))
    for cache, rows in ((k_cache, k), (v_cache, v)):
        rows = rows.reshape(num_tokens, *rows.shape[-2:])
        cache[page, slot] = torch.where(
            written[:, None, None], rows, torch.where(some[:, None, None], rows[donor], cache[0, 0])
        )
    return lost


def check_room(name, k_cache, k, table, lengths, cu_seqlens_new):
    """Before anything is written, on a CPU only: every new token has a slot."""
    seq, token = places(k, cu_seqlens_new)
    position, page_size = lengths[seq].long() + token, k_cache.shape[1]
    if not readable(position) or not position.numel():
        return
    low, high = (int(n) for n in position.aminmax())
    if low < 0 or high >= table.shape[1] * page_size:
        raise ValueError(f"{name}: cache_seqlens puts a new token at {low if low < 0 else high}; want room for it, "
                         f"0 .. {table.shape[1] * page_size - 1}")  # fmt: skip
    page = table[seq, position // page_size]
    low, high = (int(n) for n in page.aminmax())
    if low < 0 or high >= len(k_cache):
        raise ValueError(
            f"{name}: page_table has page {low if low < 0 else high} for a new token; want 0 .. {len(k_cache) - 1}"
        )


def skip_leftpad(k_cache, v_cache, table, lengths, leftpad):
    """The cache as pages of one token, and a table that starts behind each sequence's padding."""
    page_size = k_cache.shape[1]
    position = leftpad[:, None].long() + torch.arange(table.shape[1] * page_size, device=table.device)
    position.clamp_(0, table.shape[1] * page_size - 1)  # entries behind the end are not followed
    table = table.gather(1, position // page_size) * page_size + (position % page_size).to(torch.int32)
    return (
        k_cache.flatten(0, 1)[:, None],
        v_cache.flatten(0, 1)[:, None],
        table.to(torch.int32),
        torch.where(leftpad < 0, -1, lengths - leftpad),
    )
