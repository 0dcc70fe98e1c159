"""The schedule of decode: which part of which sequence a program works on, found once for the calls of all layers."""

import torch

from ladder.contract import FLOATS, check_integer, merge_config

from .checks import check_windows, unlike
from .dispatch import RUNG, device_code, machine
from .tiles import FIXED, block_b, frozen, plan_decode, reach_of


def get_decode_schedule(
    seq_lens, *, num_heads, num_kv_heads, head_dim, head_dim_v=None, page_size, max_seq_len, q_len=1,
    dtype=torch.bfloat16,
    windows=None, out=None, config=None,
):  # fmt: skip
    """Cut a batch into parts of about equal length, once for the calls of all layers.

    Without it every program of a call does this for itself, which costs less than one more
    launch, but adds up over layers. It stays valid for other lengths: the numbers are
    right, only less evenly spread. Calls with a schedule take the portable kernel; those of
    sm_90 find their work at next to no cost, so without one they are the faster ones there.

    Args:
        seq_lens: (B,) int32. num_heads, num_kv_heads, head_dim, head_dim_v, page_size, q_len, dtype, windows: of the
            calls; head_dim_v None is head_dim. MLA's are num_kv_heads = 1, head_dim = 576, head_dim_v = 512.
        max_seq_len: keys that a row of the block table can address, max_pages * page_size.
        out: int32 tensor for the result, as an earlier call with the same arguments but other lengths returned it. None
            allocates.
        config: as given to the calls.

    Returns:
        (num_slots, 4) int32 on the device of seq_lens: sequence, split, number of its splits, 0; sequence -1: no work.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted.

    Source: the metadata of FlashMLA and FlashAttention-3's ``get_scheduler_metadata``.
    """
    if not isinstance(seq_lens, torch.Tensor) or seq_lens.ndim != 1 or seq_lens.dtype != torch.int32:
        raise unlike("seq_lens", seq_lens, "a contiguous int32 torch.Tensor (B,)")
    if not seq_lens.is_contiguous():
        raise ValueError(f"{RUNG}: seq_lens has stride {seq_lens.stride(0)}; want a contiguous tensor")
    sizes = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size, q_len=q_len)
    num_heads, num_kv_heads, head_dim, page_size, q_len = (
        check_integer(RUNG, name, value, 1) for name, value in sizes.items()
    )
    head_dim_v = head_dim if head_dim_v is None else check_integer(RUNG, "head_dim_v", head_dim_v, 1)
    max_seq_len = check_integer(RUNG, "max_seq_len", max_seq_len, 0)
    if num_heads % num_kv_heads:
        raise ValueError(f"{RUNG}: num_heads is {num_heads}; want a multiple of num_kv_heads = {num_kv_heads}")
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        wrong = ValueError if isinstance(dtype, torch.dtype) else TypeError
        raise wrong(f"{RUNG}: dtype is {dtype!r}; want float16, bfloat16 or float32")
    windows = check_windows(windows)
    merge_config(RUNG, {}, config)
    if seq_lens.is_meta:
        raise ValueError(f"{RUNG}: seq_lens is on meta; want a tensor with elements, on a CUDA device or a CPU")
    device, batch = seq_lens.device, seq_lens.shape[0]
    # as MLA's is; other tensors so shaped get the same tiles
    latent = num_kv_heads == 1 and head_dim_v < head_dim <= 2 * head_dim_v
    plan = plan_decode(
        batch, q_len, num_heads // num_kv_heads, num_kv_heads, head_dim, head_dim_v, page_size, max_seq_len,
        dtype.itemsize,
        machine(device).arch, machine(device).processors, latent, None, reach_of(windows, q_len), frozen(config),
    )  # fmt: skip
    if out is None:
        out = seq_lens.new_empty(plan.num_slots, 4)
    elif not isinstance(out, torch.Tensor) or out.shape != (plan.num_slots, 4) or out.dtype != torch.int32 \
            or out.device != device or not out.is_contiguous():  # fmt: skip
        raise unlike("out", out, f"a contiguous int32 torch.Tensor ({plan.num_slots}, 4) on {device}")
    kernels = device_code(seq_lens, "portable.decode_kernel")
    if kernels is None:
        fill_schedule(out, seq_lens, q_len, max_seq_len, windows, plan)
    elif plan.num_slots:
        launch_schedule(kernels, out, seq_lens, q_len, max_seq_len, windows, plan)
    return out


def launch_schedule(kernels, schedule, seq_lens, q_len, capacity, windows, plan):
    """Launch ``dflash2_schedule``, which fills the num_slots entries of ``schedule``."""
    batch = seq_lens.shape[0]
    with torch.cuda.device_of(seq_lens):
        kernels.dflash2_schedule[(plan.num_slots,)](
            schedule, seq_lens, None if windows is None else windows.table(seq_lens.device), batch, q_len, capacity,
            plan.target, plan.most, plan.min_tiles,
            NUM_RANGES=0 if windows is None else len(windows), BLOCK_N=plan.config["BLOCK_N"], BLOCK_B=block_b(batch),
            num_warps=2,
        )  # fmt: skip


def fill_schedule(out, seq_lens, q_len, capacity, windows, plan):
    """``dflash2_schedule`` in PyTorch, for CPU tensors without the interpreter."""
    block_n, lengths = plan.config["BLOCK_N"], seq_lens.long()
    lengths = lengths.where((lengths >= 0) & (lengths <= capacity), 0)
    tiles = -(-lengths // block_n)
    if windows is not None:
        position = lengths[:, None] - q_len + torch.arange(q_len)
        sink, left = windows.limits(position, lengths[:, None])
        low = torch.minimum((position - left).amin(1), lengths).clamp(min=0)
        sink_tiles = -(-torch.minimum(sink.amax(1), lengths) // block_n)
        tiles = tiles - (low // block_n - sink_tiles).clamp(min=0)
    out.zero_()
    out[:, 0] = -1
    if not len(tiles):
        return
    total, longest = int(tiles.sum()), int(tiles.max())
    splits = plan.most if longest * 4 > -(-total // len(tiles)) * 5 else plan.target
    chunk = max(plan.min_tiles, -(-total // splits))
    of_each = ((2 * tiles + chunk) // (2 * chunk)).clamp(min=1)
    if plan.kind == FIXED:
        of_each = torch.ones_like(tiles)
    used = int(of_each.sum())
    seq = torch.repeat_interleave(torch.arange(len(tiles)), of_each)
    out[:used, 0] = seq
    out[:used, 1] = torch.arange(used) - (of_each.cumsum(0) - of_each)[seq]
    out[:used, 2] = of_each[seq]
