"""Launching paged decode: arguments checked, splits chosen, two kernels."""

import torch

from ladder.contract import check_flag, check_integer, check_out, check_paged, expect, kernel_entry
from ladder.step05_fused.attention import LOG2_E, attention, bytes_moved, check_device

# Dense prefill is step 05's.
__all__ = ["attention", "bytes_moved", "choose_num_splits", "decode_bytes_moved", "paged_decode"]

CPU_PROCESSORS = 4  # the interpreter runs programs one after another; a few splits show the idea


@kernel_entry
def paged_decode(
    q, k_cache, v_cache, block_table, seq_lens, *,
    scale=None, num_kv_splits=None, return_lse=False, out=None, workspace=None,
):  # fmt: skip
    """Attention of the newest tokens of every sequence over its pages.

    Args:
        q: (B, q_len, Hq, D), the last q_len tokens of each sequence, or (B, Hq, D) for one. float16, bfloat16 or
            float32, any strides. D and Dv up to 256.
        k_cache: (num_pages, page_size, Hkv, D). v_cache: (num_pages, page_size, Hkv, Dv). Any strides; their dead slots
            may hold anything, NaN too.
        block_table: (B, max_pages) int32. Entries past a sequence's pages may be anything; the others are pages of the
            cache, which only a CPU checks: a GPU reads whatever lies there.
        seq_lens: (B,) int32, keys of each sequence, its q_len newest included. Token i sees keys
            j <= seq_lens - q_len + i. Read by the device only, so a captured graph replays at any lengths.
        scale: factor on the scores; None is 1/sqrt(D).
        num_kv_splits: parts that a sequence's keys are cut into. None chooses from the batch size, the heads, the
            processors and the capacity of the block table. With a number given, a row's bits depend on its own
            sequence alone, whatever the rest of the batch.
        return_lse: also return the natural log-sum-exp.
        out: tensor for the result, of its shape and dtype. None allocates.
        workspace: float32 tensor of at least ``workspace_elements`` elements. None allocates.

    Returns:
        The shape of q with Dv for D; with return_lse also (B, Hq, q_len) float32, or (B, Hq) for q (B, Hq, D).
        Rows that see no key are 0 with log-sum-exp -inf. On a GPU a sequence whose length is negative or beyond
        max_pages * page_size gives NaN.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted; on a CPU also for such a length, and
            for an entry of the block table that a length reaches and that is no page.
        NotImplementedError: head sizes above 256.

    Source: Dao et al., "Flash-Decoding"; Kwon et al., "PagedAttention".
    """
    rung = "step06_paged"
    one_token = isinstance(q, torch.Tensor) and q.ndim == 3
    if one_token:
        q = q[:, None]
    scale = check_paged(rung, q, k_cache, v_cache, block_table, seq_lens, scale=scale)
    check_flag(rung, "return_lse", return_lse)
    split_kernel, merge_kernel = _kernels(rung, q)
    (batch, q_len, num_heads, head_dim), (_, page_size, num_kv_heads, head_dim_v) = q.shape, v_cache.shape
    capacity, rows = block_table.shape[1] * page_size, batch * num_heads * q_len
    config = decode_config(head_dim, head_dim_v, q_len, page_size, q.element_size())
    row_tiles = -(-q_len // config["BLOCK_M"])
    num_kv_splits = check_integer(rung, "num_kv_splits", num_kv_splits, 1, optional=True)
    if num_kv_splits is None:
        tasks = batch * num_heads * row_tiles
        num_kv_splits = choose_num_splits(tasks, capacity, config["BLOCK_N"], processors(q.device))
    out = check_out(rung, out, q, (batch, q_len, num_heads, head_dim_v), one_token=one_token)
    lse = q.new_empty(batch, num_heads, q_len, dtype=torch.float32) if return_lse else None
    needed = workspace_elements(batch, q_len, num_heads, head_dim_v, num_kv_splits)
    if workspace is None:
        workspace = q.new_empty(needed, dtype=torch.float32)
    else:
        expect(rung, "workspace", workspace, None, (torch.float32,), q.device, optional=True, contiguous=True)
        if workspace.numel() < needed:
            raise ValueError(f"{rung}: workspace has {workspace.numel()} elements; want {needed}")
    part_lse, part_out = workspace.view(-1)[: rows * num_kv_splits], workspace.view(-1)[rows * num_kv_splits :]
    if rows:
        with torch.cuda.device_of(q):
            split_kernel[(num_heads * num_kv_splits * row_tiles * batch,)](
                q, k_cache, v_cache, block_table, seq_lens, part_out, part_lse,
                *q.stride(), *k_cache.stride(), *v_cache.stride(), *block_table.stride(),
                num_heads, num_heads // num_kv_heads, q_len, capacity, num_kv_splits, abs(scale) * LOG2_E,
                HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v, PAGE_SIZE=page_size, NEGATE=scale < 0, **config,
            )  # fmt: skip
            merge_kernel[(rows,)](
                part_out, part_lse, seq_lens, out, lse, *out.stride(), num_heads, q_len, capacity, num_kv_splits,
                HEAD_DIM_V=head_dim_v, BLOCK_DV=config["BLOCK_DV"], BLOCK_N=config["BLOCK_N"], BLOCK_S=16,
                HAS_LSE=return_lse, num_warps=4,
            )  # fmt: skip
    if one_token:
        out, lse = out[:, 0], lse[..., 0] if return_lse else None
    return (out, lse) if return_lse else out


def choose_num_splits(num_tasks, capacity, block_n, num_processors, programs_per_processor=2, filled=0.85):
    """The fewest splits that keep the chip busy: at least ``filled`` of the program slots of every wave taken.

    Args:
        num_tasks: programs there are without splitting. capacity: most keys that a sequence can have, by its block
            table: the lengths themselves are on the device. block_n: keys in a tile; a split has at least one.
        num_processors: of the device. programs_per_processor: how many programs of this kernel each runs at a time.
    """
    slots, num_tasks = programs_per_processor * num_processors, max(1, num_tasks)
    most = max(1, min(-(-capacity // block_n), 2 * slots // num_tasks))
    efficiencies = []
    for splits in range(1, most + 1):
        waves = splits * num_tasks / slots
        efficiencies.append(waves / -(-splits * num_tasks // slots))
        if efficiencies[-1] >= filled:
            return splits
    return 1 + max(range(most), key=lambda i: efficiencies[i])


def decode_config(head_dim, head_dim_v, q_len, page_size, itemsize):
    """Tile sizes and warps. Tiles divide the pages where they can, so that one lookup serves a tile."""
    # At least 32: Triton 3.6 lets wgmma read past the end of a V tile 16 wide.
    block_d, block_dv = (max(32, 1 << (d - 1).bit_length()) for d in (head_dim, head_dim_v))
    widest = max(block_d, block_dv)
    block_n = (32 if widest <= 64 else 16) if itemsize == 4 else 64 if widest <= 128 else 32
    if 16 <= page_size < block_n and page_size & (page_size - 1) == 0:
        block_n = page_size
    block_m = min(16 if itemsize == 4 else 64, max(16, 1 << (q_len - 1).bit_length()) if q_len else 16)
    return dict(
        BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_M=block_m, BLOCK_N=block_n,
        PRECISION="ieee" if itemsize == 4 else "tf32", num_warps=4,
        num_stages=2 if itemsize == 4 else 5,  # two of them wait for the page lookup
    )  # fmt: skip


def workspace_elements(batch, q_len, num_heads, head_dim_v, num_kv_splits):
    """float32 elements of workspace: a partial output and a log-sum-exp for each row and split."""
    return batch * q_len * num_heads * num_kv_splits * (head_dim_v + 1)


def processors(device):
    """Streaming multiprocessors of ``device``."""
    if device.type != "cuda":
        return CPU_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def decode_bytes_moved(problem):
    """Bytes that one decode call loads and stores: K and V once per query head, L2 serving the repeats of a group.

    Needs B, Hq, Hkv, q_len, D, Dv, itemsize, page_size, keys (over all sequences)
    and capacity: the fields of ``ladder.lab.decode_problem.DecodeProblem``.
    """
    p = problem
    config = decode_config(p.D, p.Dv, p.q_len, p.page_size, p.itemsize)
    splits = choose_num_splits(p.B * p.Hq, p.capacity, config["BLOCK_N"], 132)
    rows = p.B * p.Hq * p.q_len
    partial = 2 * 4 * rows * splits * (p.Dv + 1)  # written by the splits, read by the merge
    return p.itemsize * (p.Hq * p.keys * (p.D + p.Dv) + rows * (splits * p.D + p.Dv)) + partial


def _kernels(rung, q):
    """The two kernels, imported on first use as step 05's is."""
    check_device(rung, q)
    from .kernel import paged_decode_merge, paged_decode_split

    return paged_decode_split, paged_decode_merge
