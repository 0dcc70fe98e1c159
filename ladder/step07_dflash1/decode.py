"""Decode of step 07, over pages and over MLA's latent cache: one kernel a call, also when the keys are split."""

import torch

from ladder.contract import (
    check_flag,
    check_integer,
    check_out,
    check_paged,
    expect,
    kernel_entry,
    merge_config,
)
from ladder.step05_fused.attention import scale_factors
from ladder.step06_paged.attention import choose_num_splits, processors

from .checks import RUNG, device_code
from .tiles import MIN_SPLIT_KEYS, arch, decode_config, few, layout


@kernel_entry
def paged_decode(
    q, k_cache, v_cache, block_table, seq_lens, *,
    scale=None, num_kv_splits=None, return_lse=False, out=None, workspace=None, config=None,
):  # fmt: skip
    """Attention of the newest tokens of every sequence over its pages: one kernel, also when the keys are split.

    Arguments, results and errors as in ``ladder.step06_paged.paged_decode``, except

        workspace: a ``DecodeWorkspace``, which calls on one stream may share. None allocates what is needed.
        config: launch parameters that replace those of ``decode_config``, for tuning.
    """
    return _decode(q, k_cache, v_cache, block_table, seq_lens, scale, num_kv_splits, return_lse, out, workspace, config)


@kernel_entry
def mla_decode(
    q, latent_cache, block_table, seq_lens, *,
    scale, head_dim_v=512, num_kv_splits=None, return_lse=False, out=None, workspace=None, config=None,
):  # fmt: skip
    """Multi-head latent attention with the projections absorbed: every head reads the same latent key.

    Args:
        q: (B, q_len, H, 576): 512 columns against the latent, 64 rotary ones. (B, H, 576) for one new token.
        latent_cache: (num_pages, page_size, 576). Its first ``head_dim_v`` columns are also the value, loaded once.
        scale: has no default: the model's scale belongs to its unabsorbed head size (1/sqrt(192) in DeepSeek-V2 and
            V3, times the factor of its rotary scaling), which the shapes here do not show.
        head_dim_v: columns of the value: a power of two, at least 16.
        The others as in ``paged_decode``.

    Returns:
        (B, q_len, H, head_dim_v); with return_lse also (B, H, q_len) float32.

    Raises:
        As ``paged_decode``.

    Source: DeepSeek-AI, "DeepSeek-V2", section 2.1; the shared tile is FlashMLA's.
    """
    expect(RUNG, "latent_cache", latent_cache, ("num_pages", "page_size", "D"))
    head_dim, head_dim_v = latent_cache.shape[2], check_integer(RUNG, "head_dim_v", head_dim_v, 1)
    if not 16 <= head_dim_v <= head_dim or head_dim_v & (head_dim_v - 1):
        raise ValueError(f"{RUNG}: head_dim_v is {head_dim_v}; want a power of two, 16 .. {head_dim}")
    if scale is None:
        raise TypeError(f"{RUNG}: scale is None; want the model's, 1/sqrt(192) for DeepSeek-V2")
    if head_dim > 2 * head_dim_v:
        raise NotImplementedError(f"{RUNG}: D = {head_dim} is above twice head_dim_v = {head_dim_v}")
    k_cache = latent_cache[:, :, None]
    v_cache = k_cache[..., :head_dim_v]
    return _decode(
        q, k_cache, v_cache, block_table, seq_lens, scale, num_kv_splits, return_lse, out, workspace, config, mla=True
    )


class DecodeWorkspace:
    """Scratch memory of split decode: partial outputs, their log-sum-exps, and counters of finished splits.

    It grows to the largest call and is then reused, by the calls of one stream, one after another. Growing allocates,
    so run every shape once before capturing a CUDA graph: the largest batch need not be the one that wants most. What a
    call lacks in a capture it takes for itself, from the graph's memory; what a graph has captured stays when the
    workspace grows later. A call that is not split needs none of it.
    """

    def __init__(self, device="cuda"):
        self.partials = torch.empty(0, dtype=torch.float32, device=device)
        self.counters = torch.zeros(0, dtype=torch.int32, device=device)  # every launch leaves them at zero
        self.device = self.partials.device  # with its number: "cuda" may be another one when the workspace grows
        self._captured = []  # those that a graph works on, kept when the workspace grows

    @property
    def nbytes(self):
        """Bytes held."""
        return 4 * sum(x.numel() for x in {id(x): x for x in (self.partials, self.counters, *self._captured)}.values())

    def reserve(self, elements, counters):
        """(partials, counters) of at least so many float32 elements and counters, for one call."""
        partials, zeros = self.partials, self.counters
        if partials.numel() < elements:
            partials = torch.empty(elements, dtype=torch.float32, device=self.device)
        if zeros.numel() < counters:
            zeros = torch.zeros(counters, dtype=torch.int32, device=self.device)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # A capture's zeros are written by its replay only: no other call may have them.
            held = {id(x) for x in self._captured}
            self._captured += [x for x in (self.partials, self.counters) if id(x) not in held]
        else:
            self.partials, self.counters = partials, zeros
        return partials, zeros


def check_workspace(rung, workspace, device):
    """TypeError or ValueError unless ``workspace`` is None or a ``DecodeWorkspace`` on ``device``."""
    if workspace is None:
        return
    if not isinstance(workspace, DecodeWorkspace):
        came = type(workspace).__name__
        raise TypeError(f"{rung}: workspace is a {came}; want a DecodeWorkspace on {device}, or None")
    if workspace.partials.device != device:
        raise ValueError(f"{rung}: workspace is on {workspace.partials.device}; want a DecodeWorkspace on {device}")


def _decode(
    q, k_cache, v_cache, block_table, seq_lens, scale, num_kv_splits, return_lse, out, workspace, config, mla=False
):  # fmt: skip
    """Check, choose tiles and splits, and launch ``dflash1_decode``. mla: the value is the first columns of the key."""
    one_token = isinstance(q, torch.Tensor) and q.ndim == 3
    if one_token:
        q = q[:, None]
    scale = check_paged(RUNG, q, k_cache, v_cache, block_table, seq_lens, scale=scale, any_heads=mla)
    check_flag(RUNG, "return_lse", return_lse)
    check_workspace(RUNG, workspace, q.device)
    num_kv_splits = check_integer(RUNG, "num_kv_splits", num_kv_splits, 1, optional=True)
    (batch, q_len, num_heads, head_dim), (_, page_size, num_kv_heads, head_dim_v) = q.shape, v_cache.shape
    out = check_out(RUNG, out, q, (*q.shape[:3], head_dim_v), one_token=one_token)
    lse = q.new_empty(batch, num_heads, q_len, dtype=torch.float32) if return_lse else None
    kernel, device = device_code(q).dflash1_decode, q.device

    group, capacity = num_heads // num_kv_heads, block_table.shape[1] * page_size
    rows = q_len * group
    latent = mla and head_dim_v > 16  # 16 value columns fill no tile of theirs, of 32: loaded again
    # A caller who fixes the splits wants bits that do not depend on the batch, so the tile must not either.
    alone = num_kv_splits is None and few(batch * num_kv_heads, capacity, processors(device))
    chosen = decode_config(head_dim, head_dim_v, rows, page_size, q.element_size(), arch(device), latent, alone)
    config = merge_config(RUNG, chosen, config)
    block_m = config["BLOCK_M"]
    groups = batch * num_kv_heads * -(-rows // block_m)
    if num_kv_splits is None:
        num_kv_splits = choose_num_splits(groups, capacity, MIN_SPLIT_KEYS, processors(device), filled=0.95)
    partials = part_lse = counters = None
    if groups and num_kv_splits > 1:
        workspace = DecodeWorkspace(device) if workspace is None else workspace
        part_rows = groups * num_kv_splits * block_m
        partials, counters = workspace.reserve(part_rows * (head_dim_v + 1), groups)
        part_lse = partials[part_rows * head_dim_v :]
    if groups:
        sign, scale_log2 = scale_factors(scale)
        merge_rows = min(block_m, 1 << (rows - 1).bit_length())
        merge_dv = min(config["BLOCK_DV"], 4096 // merge_rows)
        with torch.cuda.device_of(q):
            kernel[(groups * num_kv_splits,)](
                q, k_cache, v_cache, block_table, seq_lens, out, lse, partials, part_lse, counters,
                *q.stride(), *k_cache.stride(), *v_cache.stride(), *out.stride(), *block_table.stride(),
                num_kv_heads, q_len, capacity, num_kv_splits, scale_log2,
                GROUP=group, HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v, PAGE_SIZE=page_size, V_IS_K=latent,
                SPLIT=num_kv_splits > 1, MERGE_ROWS=merge_rows, MERGE_DV=merge_dv,
                MERGE_SPLITS=4096 // (merge_rows * merge_dv), SIGN=sign, HAS_LSE=return_lse,
                **layout(k_cache, v_cache), **config,
            )  # fmt: skip
    if one_token:
        out, lse = out[:, 0], lse[..., 0] if return_lse else None
    return (out, lse) if return_lse else out


def decode_bytes_moved(problem):
    """Bytes that one decode call loads and stores: K and V once per KV head (once in all for a latent cache), and what
    the splits leave for the merge. Needs the fields of ``ladder.lab.decode_problem.DecodeProblem``.
    """
    p, rows = problem, problem.q_len * (problem.Hq // problem.Hkv)
    config = decode_config(p.D, p.Dv, rows, p.page_size, p.itemsize, 90, p.latent, few(p.B * p.Hkv, p.capacity, 132))
    row_tiles = -(-rows // config["BLOCK_M"])
    splits = choose_num_splits(p.B * p.Hkv * row_tiles, p.capacity, MIN_SPLIT_KEYS, 132, filled=0.95)
    partial = 2 * 4 * p.B * p.Hkv * rows * splits * (p.Dv + 1) if splits > 1 else 0
    return row_tiles * p.kv_bytes + p.itemsize * p.B * p.Hkv * rows * (splits * p.D + p.Dv) + partial
