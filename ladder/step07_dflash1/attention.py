"""Launching the first DFlash: arguments checked, tiles and splits chosen, one kernel for each call."""

import torch

from ladder.contract import (
    INTEGERS,
    check_attention,
    check_flag,
    check_integer,
    check_out,
    check_paged,
    check_starts,
    expect,
    kernel_entry,
    merge_config,
)  # fmt: skip
from ladder.step05_fused.attention import LOG2_E, check_device
from ladder.step06_paged.attention import choose_num_splits, processors

RUNG = "step07_dflash1"
MIN_SPLIT_KEYS = 256  # fewer are read faster than their partial result is merged


@kernel_entry
def attention(q, k, v, *, causal=False, scale=None, return_lse=False, out=None, config=None):
    """softmax(scale * q k^T) v in one kernel launch.

    Args:
        q: (B, Hq, Sq, D). k: (B, Hkv, Sk, D). v: (B, Hkv, Sk, Dv). float16, bfloat16 or float32, any strides, on a
            CUDA device, or on the CPU when Triton's interpreter is on. Head sizes up to 256.
            Hq is any multiple of Hkv; query head h reads KV head h // (Hq // Hkv).
        causal: query i sees keys j <= i + Sk - Sq (aligned to the bottom right).
        scale: factor on the scores; None is 1/sqrt(D).
        return_lse: also return the natural log-sum-exp of each row's scaled scores.
        out: tensor (B, Hq, Sq, Dv) for the result, any strides. None allocates.
        config: launch parameters that replace those of ``prefill_config``, for tuning.

    Returns:
        (B, Hq, Sq, Dv) in the dtype of q; with return_lse also (B, Hq, Sq) float32.
        Rows that see no key are 0 with log-sum-exp -inf.

    Raises:
        TypeError, ValueError: see ``ladder.contract``; also bfloat16 in the interpreter, which multiplies it wrongly.
        NotImplementedError: head sizes above 256; gradients (step 04 is differentiable).

    Source: Dao, "FlashAttention-2", algorithm 1; the exponent as one multiply-add is its section 3.1.
    """
    scale = check_attention(RUNG, q, k, v, causal=causal, scale=scale)
    check_flag(RUNG, "return_lse", return_lse)
    kernel = _device_code(q).dflash1_prefill
    (batch, num_heads, seqlen_q, head_dim), (_, num_kv_heads, seqlen_k, _) = q.shape, k.shape
    head_dim_v = v.shape[3]
    out = check_out(RUNG, out, q, (batch, num_heads, seqlen_q, head_dim_v))
    lse = q.new_empty(batch, num_heads, seqlen_q, dtype=torch.float32) if return_lse else None
    config = merge_config(RUNG, prefill_config(head_dim, head_dim_v, q.element_size(), arch(q.device)), config)
    num_tiles = -(-seqlen_q // config["BLOCK_M"])
    if num_tiles * num_heads * batch:
        with torch.cuda.device_of(q):  # the launch goes to the current device
            kernel[(num_tiles * num_heads * batch,)](
                q, k, v, out, lse, None, None, None, None, None,
                *q.stride(), *k.stride(), *v.stride(), *out.stride(), 0, 0,
                num_tiles, num_heads, num_heads // num_kv_heads, batch, seqlen_q, seqlen_k, seqlen_q, _scale_log2(scale),
                HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v, PAGE_SIZE=0, CAUSAL=causal, SIGN=_sign(scale),
                HAS_LSE=return_lse, RAGGED=False, TOP_K=0, **layout(k, v), **config,
            )  # fmt: skip
    return (out, lse) if return_lse else out


@kernel_entry
def attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, *,
    causal=False, scale=None, return_lse=False, out=None, out_index=None, config=None,
):  # fmt: skip
    """Attention over a ragged batch: sequences of different lengths packed one after another, no padding.

    The lengths stay on the device: the grid has a slot for every tile that total_q tokens in that many sequences can
    need, and each program finds its sequence by a binary search.

    Args:
        q: (total_q, Hq, D). k: (total_k, Hkv, D). v: (total_k, Hkv, Dv). As in ``attention``.
        cu_seqlens_q, cu_seqlens_k: (num_seqs + 1,) int32 or int64, where each sequence starts. Checked on a CPU only.
        causal, scale, return_lse, config: as in ``attention``; causal is aligned to the bottom right of each sequence.
        out: tensor for the result. With ``out_index`` it may have more rows than that writes. None allocates.
        out_index: (total_q, top_k) int32 or int64: token t's row is stored at rows out_index[t], not at t; a negative
            entry is stored nowhere. ``group_tokens(...).places`` puts every token behind each of its experts, which
            saves the pass that would permute the output. Rows that no entry names are left as they were. That entries
            are rows of out is checked on a CPU only.

    Returns:
        (total_q, Hq, Dv), or (total_q * top_k, Hq, Dv) with out_index; with return_lse also (Hq, total_q) float32.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted. NotImplementedError: as ``attention``.

    Source: the packed layout of FlashAttention's ``flash_attn_varlen_func``.
    """
    scale = check_attention(RUNG, q, k, v, causal=causal, scale=scale, packed=True)
    num_seqs = check_starts(RUNG, "cu_seqlens_q", cu_seqlens_q, q)
    check_starts(RUNG, "cu_seqlens_k", cu_seqlens_k, k, num_seqs)
    return _packed_prefill(
        q, k, v, cu_seqlens_q, cu_seqlens_k, None, None, causal, scale, return_lse, out, out_index, config
    )


@kernel_entry
def paged_prefill(
    q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, *,
    scale=None, return_lse=False, out=None, out_index=None, config=None,
):  # fmt: skip
    """Causal attention of a chunk of new tokens of each sequence over its pages, where the chunk's keys already are.

    Args:
        q: (total_q, Hq, D), the newest tokens of all sequences packed.
        k_cache, v_cache, block_table, seq_lens: as in ``paged_decode``; seq_lens counts the chunk too.
        cu_seqlens_q: (B + 1,) int32 or int64, where each sequence's chunk starts in q.
        scale, return_lse, out, out_index, config: as in ``attention_varlen``.

    Returns, Raises: as ``attention_varlen``; lengths beyond the block table as ``paged_decode``.
    """
    scale = check_paged(RUNG, q, k_cache, v_cache, block_table, seq_lens, scale=scale, packed=True)
    check_starts(RUNG, "cu_seqlens_q", cu_seqlens_q, q, seq_lens.shape[0], "seq_lens")
    return _packed_prefill(
        q, k_cache, v_cache, cu_seqlens_q, None, block_table, seq_lens, True, scale, return_lse, out, out_index, config
    )


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
    one_token = isinstance(q, torch.Tensor) and q.ndim == 3
    if one_token:
        q = q[:, None]
    scale = check_paged(RUNG, q, k_cache, v_cache, block_table, seq_lens, scale=scale)
    out = check_out(RUNG, out, q, (*q.shape[:3], v_cache.shape[3]), one_token=one_token)
    lse = _decode(q, k_cache, v_cache, block_table, seq_lens, out, scale, num_kv_splits, return_lse, workspace, config)
    if one_token:
        out, lse = out[:, 0], lse[..., 0] if return_lse else None
    return (out, lse) if return_lse else out


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
    if not isinstance(latent_cache, torch.Tensor):
        raise TypeError(f"{RUNG}: latent_cache is a {type(latent_cache).__name__}; want a torch.Tensor (num_pages, page_size, D)")
    if latent_cache.ndim != 3:
        raise ValueError(f"{RUNG}: latent_cache is {tuple(latent_cache.shape)}; want a tensor (num_pages, page_size, D)")
    head_dim_v = check_integer(RUNG, "head_dim_v", head_dim_v, 1)
    if not 16 <= head_dim_v <= latent_cache.shape[2] or head_dim_v & (head_dim_v - 1):
        raise ValueError(f"{RUNG}: head_dim_v is {head_dim_v}; want a power of two, 16 .. {latent_cache.shape[2]}")
    if scale is None:
        raise TypeError(f"{RUNG}: scale is None; want the model's, 1/sqrt(192) for DeepSeek-V2")
    one_token = isinstance(q, torch.Tensor) and q.ndim == 3
    if one_token:
        q = q[:, None]
    k_cache = latent_cache[:, :, None]
    v_cache = k_cache[..., :head_dim_v]
    scale = check_paged(RUNG, q, k_cache, v_cache, block_table, seq_lens, scale=scale, any_heads=True)
    if q.shape[-1] > 2 * head_dim_v:
        raise NotImplementedError(f"{RUNG}: D = {q.shape[-1]} is above twice head_dim_v = {head_dim_v}")
    out = check_out(RUNG, out, q, (*q.shape[:3], head_dim_v), one_token=one_token)
    latent = head_dim_v > 16  # 16 value columns fill no tile of theirs, of 32: loaded again
    lse = _decode(
        q, k_cache, v_cache, block_table, seq_lens, out, scale, num_kv_splits, return_lse, workspace, config, latent=latent
    )
    if one_token:
        out, lse = out[:, 0], lse[..., 0] if return_lse else None
    return (out, lse) if return_lse else out


class DecodeWorkspace:
    """Scratch memory of split decode: partial outputs, their log-sum-exps, and counters of finished splits.

    It grows to the largest call and is then reused, by the calls of one stream, one after another. Growing allocates, so
    run every shape once before capturing a CUDA graph: the largest batch need not be the one that wants most. What a call
    lacks in a capture it takes for itself, from the graph's memory; what a graph has captured stays when the workspace
    grows later. A call that is not split needs none of it.
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
            self._captured += [x for x in (self.partials, self.counters) if all(x is not kept for kept in self._captured)]
        else:
            self.partials, self.counters = partials, zeros
        return partials, zeros


def _decode(
    q, k_cache, v_cache, block_table, seq_lens, out, scale, num_kv_splits, return_lse, workspace, config, latent=False
):  # fmt: skip
    """Launch ``dflash1_decode`` on checked arguments; returns the log-sum-exp or None."""
    check_flag(RUNG, "return_lse", return_lse)
    if workspace is not None and not isinstance(workspace, DecodeWorkspace):
        raise TypeError(f"{RUNG}: workspace is a {type(workspace).__name__}; want a DecodeWorkspace on {q.device}, or None")
    num_kv_splits = check_integer(RUNG, "num_kv_splits", num_kv_splits, 1, optional=True)
    kernel = _device_code(q).dflash1_decode
    (batch, q_len, num_heads, head_dim), (_, page_size, num_kv_heads, head_dim_v) = q.shape, v_cache.shape
    group = num_heads // num_kv_heads
    capacity, rows = block_table.shape[1] * page_size, q_len * group
    # A caller who fixes the splits wants bits that do not depend on the batch, so the tile must not either.
    few = num_kv_splits is None and _few(batch * num_kv_heads, capacity, processors(q.device))
    chosen = decode_config(head_dim, head_dim_v, rows, page_size, q.element_size(), arch(q.device), latent, few)
    config = merge_config(RUNG, chosen, config)
    block_m = config["BLOCK_M"]
    row_tiles = -(-rows // block_m)
    groups = batch * num_kv_heads * row_tiles
    if num_kv_splits is None:
        num_kv_splits = choose_num_splits(groups, capacity, MIN_SPLIT_KEYS, processors(q.device), filled=0.95)
    lse = q.new_empty(batch, num_heads, q_len, dtype=torch.float32) if return_lse else None
    if not groups:
        return lse

    partials = part_lse = counters = None
    if num_kv_splits > 1:
        workspace = DecodeWorkspace(q.device) if workspace is None else workspace
        if workspace.partials.device != q.device:
            raise ValueError(f"{RUNG}: workspace is on {workspace.partials.device}; want a DecodeWorkspace on {q.device}")
        part_rows = groups * num_kv_splits * block_m
        partials, counters = workspace.reserve(part_rows * (head_dim_v + 1), groups)
        part_lse = partials[part_rows * head_dim_v :]
    merge_rows = min(block_m, 1 << (rows - 1).bit_length())
    merge_dv = min(config["BLOCK_DV"], 4096 // merge_rows)
    with torch.cuda.device_of(q):
        kernel[(groups * num_kv_splits,)](
            q, k_cache, v_cache, block_table, seq_lens, out, lse, partials, part_lse, counters,
            *q.stride(), *k_cache.stride(), *v_cache.stride(), *out.stride(), *block_table.stride(),
            num_kv_heads, q_len, capacity, num_kv_splits, _scale_log2(scale),
            GROUP=group, HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v, PAGE_SIZE=page_size, V_IS_K=latent,
            SPLIT=num_kv_splits > 1, MERGE_ROWS=merge_rows, MERGE_DV=merge_dv, MERGE_SPLITS=4096 // (merge_rows * merge_dv),
            **layout(k_cache, v_cache), SIGN=_sign(scale), HAS_LSE=return_lse, **config,
        )  # fmt: skip
    return lse


def _packed_prefill(q, k, v, cu_q, cu_k, block_table, seq_lens, causal, scale, return_lse, out, out_index, config):
    """Launch ``dflash1_prefill`` on checked packed tokens; K and V packed too, or in pages."""
    check_flag(RUNG, "return_lse", return_lse)
    kernel = _device_code(q).dflash1_prefill
    (total_q, num_heads, head_dim), num_kv_heads, head_dim_v = q.shape, k.shape[-2], v.shape[-1]
    paged = block_table is not None
    page_size = k.shape[1] if paged else 0
    top_k, rows = 0, total_q
    if out_index is not None:
        top_k = _check_out_index(out_index, q)
        rows = total_q * top_k
    out = check_out(RUNG, out, q, (rows, num_heads, head_dim_v), more_rows=top_k > 0)
    if top_k:
        check_rows("out_index", out_index, out.shape[0])
    lse = q.new_empty(num_heads, total_q, dtype=torch.float32) if return_lse else None
    chosen = prefill_config(head_dim, head_dim_v, q.element_size(), arch(q.device), page_size, ragged=True)
    config = merge_config(RUNG, chosen, config)
    num_seqs = cu_q.numel() - 1
    num_tiles = total_q // config["BLOCK_M"] + num_seqs
    k_strides, v_strides = (x.stride() if paged else (0, *x.stride()) for x in (k, v))  # (page, key, head, dim)
    if total_q and num_heads:
        with torch.cuda.device_of(q):
            kernel[(num_tiles * num_heads,)](
                q, k, v, out, lse, cu_q, cu_k, block_table, seq_lens, out_index,
                0, q.stride(1), q.stride(0), q.stride(2),
                k_strides[0], k_strides[2], k_strides[1], k_strides[3],
                v_strides[0], v_strides[2], v_strides[1], v_strides[3],
                0, out.stride(1), out.stride(0), out.stride(2), *(block_table.stride() if paged else (0, 0)),
                num_tiles, num_heads, num_heads // num_kv_heads, num_seqs, 0,
                block_table.shape[1] * page_size if paged else 0, total_q, _scale_log2(scale),
                HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v, PAGE_SIZE=page_size, CAUSAL=causal, SIGN=_sign(scale),
                HAS_LSE=return_lse, RAGGED=True, TOP_K=top_k, **layout(k, v), **config,
            )  # fmt: skip
    return (out, lse) if return_lse else out


def prefill_config(head_dim, head_dim_v, itemsize, arch, page_size=0, ragged=False):
    """Tile sizes, warps and pipeline stages: the largest tiles that this processor's registers hold without spilling.

    Args:
        head_dim, head_dim_v: sizes of a query/key and of a value head. itemsize: bytes of an element.
        arch: 10 * major + minor of the compute capability. page_size: of the cache; 0 without pages.
        ragged: packed sequences, whose bookkeeping takes registers too.
    """
    block_d, tail_d = split_head(head_dim)
    block_dv = max(32, 1 << (head_dim_v - 1).bit_length())  # 16: Triton 3.6 lets wgmma read past the end of the V tile
    widest = max(block_d + tail_d, block_dv)
    if itemsize == 4:  # float32 goes through the ordinary multipliers, where small tiles keep registers free
        block_m, block_n, num_stages = (64, 32, 1) if widest <= 64 else (32, 32, 1) if widest <= 128 else (32, 16, 1)
    elif arch == 90:
        block_m, block_n, num_stages = 128, 64, 3 if block_dv <= 128 else 2  # measured on an H200
        if head_dim == head_dim_v == 128 and not ragged:
            block_n = 128
    elif 100 <= arch < 120:
        block_m, block_n, num_stages = (128, 64, 2) if widest <= 192 and block_dv <= 128 else (128, 32, 2)
    else:  # Ampere, Ada and small Blackwells: operands pass through registers, and masks take more
        plain = head_dim == head_dim_v == widest <= 128 and not ragged
        block_m, block_n, num_stages = (128, 64, 2) if plain else (64, 32, 2)
    if page_size:
        block_n = _fit_page(block_n, page_size)
        num_stages += itemsize < 4  # one stage is the page lookup
    return dict(
        BLOCK_D=block_d, TAIL_D=tail_d, BLOCK_DV=block_dv, BLOCK_M=block_m, BLOCK_N=block_n,
        PRECISION="ieee" if itemsize == 4 else "tf32", num_warps=8, num_stages=num_stages,
    )  # fmt: skip


def decode_config(head_dim, head_dim_v, rows, page_size, itemsize, arch, latent=False, few=False):
    """As ``prefill_config``, for ``rows`` = new tokens times query heads of a KV group; ``few``: no two programs to a
    processor even when split, so that one program has to keep its memory busy alone.
    """
    block_d, tail_d = split_head(head_dim)
    block_dv = max(32, 1 << (head_dim_v - 1).bit_length())
    if latent:
        block_d, tail_d = head_dim_v, max(16, 1 << (head_dim - head_dim_v - 1).bit_length()) if head_dim > head_dim_v else 0
    widest = max(block_d + tail_d, block_dv)
    block_m = max(16, min(64, 1 << (max(1, rows) - 1).bit_length()))
    if itemsize == 4:
        block_m, block_n = 16, 32 if widest <= 64 else 16
        num_warps, num_stages = 4 if widest <= 128 else 8 if widest <= 256 else 16, 1
    elif widest > 256:
        block_n, num_warps, num_stages = (32, 4, 5 if block_m == 16 and arch == 90 else 3) if block_m <= 32 else (64, 8, 2)
        if arch != 90:  # half the rows: the accumulator of 64 x 512 fits no other register file
            block_m, block_n, num_warps, num_stages = min(block_m, 32), 32, 8, 2
    elif block_m == 16 and widest <= 128:  # small programs, several to a processor: measured on an H200
        block_n = _fit_page(64 if few or widest <= 64 else 32, page_size)
        num_warps, num_stages = 2, 5 if block_n > 16 else 7  # two of them wait for the page lookup
    else:
        block_n, num_warps, num_stages = (64 if widest <= 128 else 32), 4, 5
    return dict(
        BLOCK_D=block_d, TAIL_D=tail_d, BLOCK_DV=block_dv, BLOCK_M=block_m, BLOCK_N=_fit_page(block_n, page_size),
        PRECISION="ieee" if itemsize == 4 else "tf32", num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def split_head(head_dim):
    """(BLOCK_D, TAIL_D): a head as one power of two, or as two where that wastes less: 192 = 128 + 64, 96 = 64 + 32."""
    whole = max(16, 1 << (head_dim - 1).bit_length())
    block = whole // 2
    tail = max(16, 1 << (head_dim - block - 1).bit_length()) if head_dim > block else 0
    return (block, tail) if block >= 16 and 0 < tail and block + tail < whole else (whole, 0)


def arch(device):
    """10 * major + minor of the compute capability; a Hopper's on the CPU, so that the interpreter walks its tiles."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def layout(k, v):
    """What the kernels are told about addresses: ALIGNED, elements of 16 bytes when every row of k and v starts on 16
    bytes, else 0; WIDE, whether an offset within a tile needs 64 bits.
    """
    unit = 16 // k.element_size()
    aligned = all(
        x.data_ptr() % 16 == 0 and x.stride(-1) == 1 and all(s % unit == 0 for s in x.stride()[:-1]) for x in (k, v)
    )
    # The last three: no tile steps from one tensor of a batch, or page, to the next, but packed keys have no such stride in front.
    wide = any(abs(s) * max(256, x.shape[-1]) >= 1 << 30 for x in (k, v) for s in x.stride()[-3:])
    return dict(ALIGNED=unit if aligned else 0, WIDE=wide)


def _fit_page(block_n, page_size):
    """The tile that lets one lookup serve it: the page where that is a smaller power of two, at least 16."""
    return page_size if 16 <= page_size < block_n and page_size & (page_size - 1) == 0 else block_n


def bytes_moved(problem):
    """Bytes that one prefill loads and stores outside the chip's registers and shared memory: Q and the output once, K
    and V once per query tile; L2 serves most of the repeats. Needs B, Hq, Hkv, Sq, Sk, D, Dv, itemsize, causal.
    """
    p, keys_loaded = problem, 0
    block_m = prefill_config(p.D, p.Dv, p.itemsize, 90)["BLOCK_M"]
    for q1 in range(block_m, p.Sq + block_m, block_m):
        keys_loaded += max(0, min(p.Sk, q1 + p.Sk - p.Sq)) if p.causal else p.Sk
    return p.itemsize * p.B * p.Hq * (p.Sq * (p.D + p.Dv) + keys_loaded * (p.D + p.Dv))


def decode_bytes_moved(problem):
    """Bytes that one decode call loads and stores: K and V once per KV head (once in all for a latent cache), and what
    the splits leave for the merge. Needs the fields of ``ladder.lab.decode_problem.DecodeProblem``.
    """
    p, rows = problem, problem.q_len * (problem.Hq // problem.Hkv)
    config = decode_config(p.D, p.Dv, rows, p.page_size, p.itemsize, 90, p.latent, _few(p.B * p.Hkv, p.capacity, 132))
    row_tiles = -(-rows // config["BLOCK_M"])
    splits = choose_num_splits(p.B * p.Hkv * row_tiles, p.capacity, MIN_SPLIT_KEYS, 132, filled=0.95)
    partial = 2 * 4 * p.B * p.Hkv * rows * splits * (p.Dv + 1) if splits > 1 else 0
    return row_tiles * p.kv_bytes + p.itemsize * p.B * p.Hkv * rows * (splits * p.D + p.Dv) + partial


def _few(tasks, capacity, num_processors):
    """Whether even the most splits leave no two programs to a processor."""
    return tasks * max(1, capacity // MIN_SPLIT_KEYS) <= num_processors


def _sign(scale):
    return 0 if abs(scale) < 1e-37 else 1 if scale > 0 else -1  # below that, float32 rounds the scale to 0


def _scale_log2(scale):
    return abs(scale) * LOG2_E if _sign(scale) else 1.0  # a zero scale is a zero q


def _check_out_index(out_index, q):
    """Check where rows go; returns top_k."""
    expect(RUNG, "out_index", out_index, (q.shape[0], "top_k"), INTEGERS, q.device, contiguous=True)
    if not out_index.shape[1]:
        raise ValueError(f"{RUNG}: out_index has shape {tuple(out_index.shape)}; want at least one column")
    return out_index.shape[1]


def check_rows(name, index, rows):
    """ValueError when an entry of ``index`` is not below ``rows``; on a CPU only, for it reads the entries."""
    if index.device.type == "cpu" and index.numel() and int(index.max()) >= rows:
        raise ValueError(f"{RUNG}: {name} holds {int(index.max())}; want at most {rows - 1}, the last row of out, or below 0 for none")


def _device_code(q):
    """The module of kernels, imported on first use; checks that they can run on q."""
    check_device(RUNG, q)
    from . import kernel

    return kernel


