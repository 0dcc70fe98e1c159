"""Launching decode: arguments checked, tiles and programs chosen, one kernel a call, also when the keys are split."""

import functools
from typing import NamedTuple

import torch

from ladder.contract import FLOATS, check_integer, kernel_entry, merge_config
from ladder.step06_paged.attention import check_out, processors
from ladder.step06_paged.cache import check_paged
from ladder.step07_dflash1.attention import DecodeWorkspace, arch, layout, split_head

from . import eager, hopper_decode
from .attention import (
    MAX_HEAD_DIM,
    RUNG,
    check_options,
    check_written,
    device_code,
    hopper_code,
    scale_factors,
    softcap_kind,
)
from .windows import UNLIMITED, RangeWindows

__all__ = ["DecodeWorkspace", "decode_bytes_moved", "decode_config", "dflash2_decode", "dflash2_mla_decode", "get_decode_schedule"]

SMALL_SHARED = (86, 89, 120)  # processors with 99 KB of shared memory for a program
MIN_SPLIT_KEYS = 256  # fewer are read faster than their partial result is merged
FIXED, FOUND, GIVEN = 0, 1, 2  # as in decode_kernel
SEQUENCES_AT_A_TIME = 1024  # of the batch that a program's search looks at


@kernel_entry
def dflash2_decode(
    q, k_cache, v_cache, block_table, seq_lens, *,
    causal=True, scale=None, windows=None, softcap=0.0, sinks=None, num_kv_splits=None, return_lse=False,
    out=None, workspace=None, schedule=None, config=None,
):  # fmt: skip
    """Attention of the newest tokens of every sequence over its pages: one kernel, also when the keys are split.

    Args:
        q: (B, q_len, Hq, D), the last q_len tokens of each sequence, or (B, Hq, D) for one. float16, bfloat16 or
            float32, any strides. D and Dv up to 256. Made for 1 .. 16 new tokens; more are right, and slower than
            ``dflash2_paged_prefill``.
        k_cache: (num_pages, page_size, Hkv, D). v_cache: (num_pages, page_size, Hkv, Dv). Any strides; their dead slots
            may hold anything, NaN too. Hq is any multiple of Hkv.
        block_table: (B, max_pages) int32. Entries that no visible key needs may be anything: those past a sequence's
            length, and those before its window. The others are pages of the cache, which only a CPU checks.
        seq_lens: (B,) int32, keys of each sequence, its q_len newest included. Read by the device only, so a captured
            graph replays at any lengths.
        causal: token i stands at p = seq_lens - q_len + i and sees keys j <= p; False: all keys of its sequence.
        scale: factor on the scores; None is 1/sqrt(D).
        windows: ``RangeWindows``; keys outside are neither loaded nor followed in the block table. None: all.
        softcap: when positive, scores become softcap * tanh(scale * q.k / softcap), before the mask.
        sinks: (Hq,), float16, bfloat16 or float32: one more logit of every row of a head, with no value.
        num_kv_splits: most parts that a sequence's keys are cut into. None lets the device cut the batch into parts of
            about equal length. With a number given, a row's bits depend on its own sequence alone, whatever the rest.
        return_lse: also return the natural log-sum-exp, sinks included.
        out: tensor for the result, of its shape and dtype. None allocates.
        workspace: a ``DecodeWorkspace``, which calls on one stream may share. None allocates what is needed.
        schedule: from ``get_decode_schedule``, for calls with the same lengths, as those of all layers of a step.
        config: launch parameters that replace those of ``decode_config``, for tuning.

    Returns:
        The shape of q with Dv for D; with return_lse also (B, Hq, q_len) float32, or (B, Hq) for q (B, Hq, D).
        Rows that see no key are 0; their log-sum-exp is -inf, or the sink's logit. On a GPU a sequence whose length is
        negative or beyond max_pages * page_size gives NaN.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted; on a CPU also for such a length, and for
            an entry of the block table that a length reaches and that is no page.
        NotImplementedError: head sizes above 256; gradients.

    Source: Dao et al., "Flash-Decoding"; Kwon et al., "PagedAttention"; sinks as in OpenAI's gpt-oss, softcap as in
        Gemma Team, "Gemma 2", section 2.
    """
    if torch.compiler.is_compiling():
        _refuse_under_compile(config)
        lse_shape = _lse_shape(q)
        out = q.new_empty(*q.shape[:-1], v_cache.shape[-1]) if out is None else out
        lse = torch.ops.ladder.dflash2_decode(
            q, k_cache, v_cache, block_table, seq_lens, causal, scale, _flat(windows), softcap, sinks, num_kv_splits, return_lse,
            out, *_tensors(workspace), schedule,
        )  # fmt: skip
        return (out, lse.view(lse_shape)) if return_lse else out
    return _decode(
        q, k_cache, v_cache, block_table, seq_lens, causal=causal, scale=scale, windows=windows, softcap=softcap, sinks=sinks,
        num_kv_splits=num_kv_splits, return_lse=return_lse, out=out, workspace=workspace, schedule=schedule, config=config,
    )  # fmt: skip


@kernel_entry
def dflash2_mla_decode(
    q, latent_cache, block_table, seq_lens, *,
    scale, head_dim_v=512, causal=True, windows=None, softcap=0.0, sinks=None, num_kv_splits=None, return_lse=False,
    out=None, workspace=None, schedule=None, config=None,
):  # fmt: skip
    """Multi-head latent attention with the projections absorbed: every head reads the same latent key.

    Args:
        q: (B, q_len, H, 576): 512 columns against the latent, 64 rotary ones. (B, H, 576) for one new token.
        latent_cache: (num_pages, page_size, 576). Its first ``head_dim_v`` columns are also the value, loaded once.
        scale: has no default: the model's scale belongs to its unabsorbed head size (1/sqrt(192) in DeepSeek-V2 and
            V3, times the factor of its rotary scaling), which the shapes here do not show.
        head_dim_v: columns of the value: a power of two, at least 16.
        The others as in ``dflash2_decode``.

    Returns:
        (B, q_len, H, head_dim_v), or (B, H, head_dim_v) for one token; with return_lse also (B, H, q_len) float32, or (B, H).

    Raises:
        As ``dflash2_decode``; head_dim_v that is no such power of two; NotImplementedError for D above twice head_dim_v.

    Source: DeepSeek-AI, "DeepSeek-V2", section 2.1; the shared tile is FlashMLA's.
    """
    if torch.compiler.is_compiling():
        _refuse_under_compile(config)
        lse_shape = _lse_shape(q)
        out = q.new_empty(*q.shape[:-1], head_dim_v) if out is None else out
        lse = torch.ops.ladder.dflash2_mla_decode(
            q, latent_cache, block_table, seq_lens, scale, head_dim_v, causal, _flat(windows), softcap, sinks, num_kv_splits,
            return_lse, out, *_tensors(workspace), schedule,
        )  # fmt: skip
        return (out, lse.view(lse_shape)) if return_lse else out
    return _mla_decode(
        q, latent_cache, block_table, seq_lens, scale=scale, head_dim_v=head_dim_v, causal=causal, windows=windows,
        softcap=softcap, sinks=sinks, num_kv_splits=num_kv_splits, return_lse=return_lse, out=out, workspace=workspace,
        schedule=schedule, config=config,
    )  # fmt: skip


def get_decode_schedule(
    seq_lens, *, num_heads, num_kv_heads, head_dim, head_dim_v=None, page_size, max_seq_len, q_len=1, dtype=torch.bfloat16,
    windows=None, out=None, config=None,
):  # fmt: skip
    """Cut a batch into parts of about equal length, once for the calls of all layers.

    Without it every program of a call does this for itself, which costs less than one more launch, but adds up over
    layers. It stays valid for other lengths: the numbers are right, only less evenly spread. Calls with a schedule take the
    portable kernel; those of sm_90 find their work at next to no cost, so without one they are the faster ones there.

    Args:
        seq_lens: (B,) int32. num_heads, num_kv_heads, head_dim, head_dim_v, page_size, q_len, dtype, windows: of the calls;
            head_dim_v None is head_dim. MLA's are num_kv_heads = 1, head_dim = 576, head_dim_v = 512.
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
        raise _unlike("seq_lens", seq_lens, "a contiguous int32 torch.Tensor (B,)")
    if not seq_lens.is_contiguous():
        raise ValueError(f"{RUNG}: seq_lens has stride {seq_lens.stride(0)}; want a contiguous tensor")
    sizes = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size, q_len=q_len)
    num_heads, num_kv_heads, head_dim, page_size, q_len = (check_integer(RUNG, name, value, 1) for name, value in sizes.items())
    head_dim_v = head_dim if head_dim_v is None else check_integer(RUNG, "head_dim_v", head_dim_v, 1)
    max_seq_len = check_integer(RUNG, "max_seq_len", max_seq_len, 0)
    if num_heads % num_kv_heads:
        raise ValueError(f"{RUNG}: num_heads is {num_heads}; want a multiple of num_kv_heads = {num_kv_heads}")
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        wrong = ValueError if isinstance(dtype, torch.dtype) else TypeError
        raise wrong(f"{RUNG}: dtype is {dtype!r}; want float16, bfloat16 or float32")
    windows = _check_windows(windows)
    merge_config(RUNG, {}, config)
    if seq_lens.is_meta:
        raise ValueError(f"{RUNG}: seq_lens is on meta; want a tensor with elements, on a CUDA device or a CPU")
    device, batch = seq_lens.device, seq_lens.shape[0]
    plan = _plan(
        batch, q_len, num_heads // num_kv_heads, num_kv_heads, head_dim, head_dim_v, page_size, max_seq_len, dtype.itemsize,
        arch(device), processors(device), head_dim > MAX_HEAD_DIM, None, _reach(windows, q_len), _frozen(config),
    )  # fmt: skip
    if out is None:
        out = seq_lens.new_empty(plan.num_slots, 4)
    elif not isinstance(out, torch.Tensor) or out.shape != (plan.num_slots, 4) or out.dtype != torch.int32 \
            or out.device != device or not out.is_contiguous():  # fmt: skip
        raise _unlike("out", out, f"a contiguous int32 torch.Tensor ({plan.num_slots}, 4) on {device}")
    if device_code(seq_lens, "decode_kernel") is None:
        _fill_schedule(out, seq_lens, q_len, max_seq_len, windows, plan)
    elif plan.num_slots:
        _launch_schedule(out, seq_lens, q_len, max_seq_len, windows, plan)
    return out


def _launch_schedule(schedule, seq_lens, q_len, capacity, windows, plan):
    """Launch ``dflash2_schedule``, which fills the num_slots entries of ``schedule``."""
    batch, kernel = seq_lens.shape[0], device_code(seq_lens, "decode_kernel").dflash2_schedule
    with torch.cuda.device_of(seq_lens):
        kernel[(plan.num_slots,)](
            schedule, seq_lens, None if windows is None else windows.table(seq_lens.device), batch, q_len, capacity,
            plan.target, plan.most, plan.min_tiles,
            NUM_RANGES=0 if windows is None else len(windows), BLOCK_N=plan.config["BLOCK_N"], BLOCK_B=_block_b(batch), num_warps=2,
        )  # fmt: skip


def _decode(
    q, k_cache, v_cache, block_table, seq_lens, *, causal=True, scale=None, windows=None, softcap=0.0, sinks=None,
    num_kv_splits=None, return_lse=False, out=None, workspace=None, schedule=None, config=None, right=None,
):  # fmt: skip
    """``dflash2_decode`` outside torch.compile. right: keys after its own position that a token sees; None is what
    ``causal`` says.
    """
    one_token = isinstance(q, torch.Tensor) and q.ndim == 3
    if one_token:
        q = q[:, None]
    scale = check_paged(
        RUNG, q, k_cache, v_cache, block_table, seq_lens, scale=scale, max_head_dim=MAX_HEAD_DIM, q_layout="(B, q_len, Hq, D)"
    )
    given, out = out is not None, check_out(RUNG, out, q, (*q.shape[:3], v_cache.shape[3]), one_token)
    if given:
        check_written(out, q=q, k_cache=k_cache, v_cache=v_cache)
    options = _check_options(
        (q, k_cache, v_cache), causal, windows, softcap, sinks, num_kv_splits, return_lse, workspace, schedule, config, right
    )
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32) if return_lse else None
    if device_code(q, "decode_kernel") is None:
        result = eager.decode(
            q, k_cache, v_cache, block_table, seq_lens, causal=False, scale=scale, return_lse=return_lse, out=out, **options
        )
        lse = result[1] if return_lse else None
    elif out.numel():
        _launch_decode(
            q, k_cache, v_cache, block_table, seq_lens, out, lse,
            scale=scale, workspace=workspace, schedule=schedule, config=config, **options,
        )  # fmt: skip
    if one_token:
        out, lse = out[:, 0], lse[..., 0] if return_lse else None
    return (out, lse) if return_lse else out


def _mla_decode(
    q, latent_cache, block_table, seq_lens, *, scale, head_dim_v=512, causal=True, windows=None, softcap=0.0, sinks=None,
    num_kv_splits=None, return_lse=False, out=None, workspace=None, schedule=None, config=None, right=None,
):  # fmt: skip
    """``dflash2_mla_decode`` outside torch.compile; right as in ``_decode``."""
    if not isinstance(latent_cache, torch.Tensor) or latent_cache.ndim != 3:
        raise _unlike("latent_cache", latent_cache, "a torch.Tensor (num_pages, page_size, D)")
    head_dim_v = check_integer(RUNG, "head_dim_v", head_dim_v, 1)
    if not 16 <= head_dim_v <= latent_cache.shape[2] or head_dim_v & (head_dim_v - 1):
        raise ValueError(f"{RUNG}: head_dim_v is {head_dim_v}; want a power of two, 16 .. {latent_cache.shape[2]}")
    if scale is None:
        raise TypeError(f"{RUNG}: scale is None; want the model's, 1/sqrt(192) for DeepSeek-V2")
    one_token = isinstance(q, torch.Tensor) and q.ndim == 3
    if one_token:
        q = q[:, None]
    if isinstance(q, torch.Tensor) and q.ndim == 4 and q.dtype in FLOATS:  # of a q that check_paged will take
        _check_latent(latent_cache, q)
    k_cache = latent_cache[:, :, None]
    scale = check_paged(
        RUNG, q, k_cache, k_cache[..., :head_dim_v], block_table, seq_lens,
        scale=scale, max_head_dim=None, q_layout="(B, q_len, H, D)",
    )  # fmt: skip
    if q.shape[-1] > 2 * head_dim_v:
        raise NotImplementedError(f"{RUNG}: D = {q.shape[-1]} is above twice head_dim_v = {head_dim_v}")
    given, out = out is not None, check_out(RUNG, out, q, (*q.shape[:3], head_dim_v), one_token)
    if given:
        check_written(out, q=q, latent_cache=latent_cache)
    options = _check_options(
        (q, latent_cache), causal, windows, softcap, sinks, num_kv_splits, return_lse, workspace, schedule, config, right
    )
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32) if return_lse else None
    if device_code(q, "decode_kernel") is None:
        result = eager.mla_decode(
            q, latent_cache, block_table, seq_lens,
            causal=False, scale=scale, head_dim_v=head_dim_v, return_lse=return_lse, out=out, **options,
        )  # fmt: skip
        lse = result[1] if return_lse else None
    elif out.numel():
        _launch_mla(
            q, latent_cache, block_table, seq_lens, out, lse,
            scale=scale, workspace=workspace, schedule=schedule, config=config, **options,
        )  # fmt: skip
    if one_token:
        out, lse = out[:, 0], lse[..., 0] if return_lse else None
    return (out, lse) if return_lse else out


def _launch_decode(
    q, k_cache, v_cache, block_table, seq_lens, out, lse, *,
    right, scale, windows, softcap, sinks, num_kv_splits, workspace=None, schedule=None, config=None, latent=False,
):  # fmt: skip
    """Launch ``dflash2_decode`` on checked arguments, q and out (B, q_len, Hq, .), none of them empty; fills out and lse."""
    group, page_size = q.shape[2] // k_cache.shape[2], k_cache.shape[1]
    # A table without pages has no memory, and sm_90's kernels look into it before they see that a length is beyond it.
    own = config is None and block_table.shape[1] > 0
    if not latent and own and hopper_decode.pays(q.shape[3], q.shape[1] * group, page_size) and hopper_code(q.device) is not None:
        what = dict(scale=scale, windows=windows, softcap=softcap, schedule=schedule)
        if hopper_decode.supports_decode(q, k_cache, v_cache, out, **what) is None:
            what = dict(scale=scale, right=right, sinks=sinks, num_kv_splits=num_kv_splits, workspace=workspace)
            hopper_decode.launch_decode(q, k_cache, v_cache, block_table, seq_lens, out, lse, **what)
            return
    kernel = device_code(q, "decode_kernel").dflash2_decode
    (batch, q_len, _, head_dim), (_, page_size, num_kv_heads, head_dim_v) = q.shape, v_cache.shape
    device, capacity = q.device, block_table.shape[1] * page_size
    plan = _plan(
        batch, q_len, group, num_kv_heads, head_dim, head_dim_v, page_size, capacity, q.element_size(),
        arch(device), processors(device), latent, num_kv_splits, _reach(windows, q_len), _frozen(config),
    )  # fmt: skip
    num_slots, kind = (plan.num_slots, plan.kind) if schedule is None else (schedule.shape[0], GIVEN)
    config, row_tiles = plan.config, plan.row_tiles
    split = num_slots > batch or kind == GIVEN  # a schedule may give one sequence two slots and another none
    partials = part_lse = counters = None
    if split:
        workspace = DecodeWorkspace(device) if workspace is None else workspace
        if workspace.partials.device != device:
            raise ValueError(f"{RUNG}: workspace is on {workspace.partials.device}; want a DecodeWorkspace on {device}")
        part_rows = num_kv_heads * row_tiles * num_slots * plan.merge["MERGE_ROWS"]
        apart = plan.apart and kind == FOUND
        partials, counters = workspace.reserve(part_rows * (head_dim_v + 1) + 4 * num_slots * apart, batch * num_kv_heads * row_tiles)
        part_lse = partials[part_rows * head_dim_v :]
        if apart:
            kind, schedule = GIVEN, part_lse[part_rows : part_rows + 4 * num_slots].view(torch.int32)
            _launch_schedule(schedule, seq_lens, q_len, capacity, windows, plan)
    sign, scale_log2, cap_scale = scale_factors(scale, softcap)
    with torch.cuda.device_of(q):
        kernel[(num_kv_heads * row_tiles * num_slots,)](
            q, k_cache, v_cache, block_table, seq_lens, None if windows is None else windows.table(device), sinks, schedule,
            out, lse, partials, part_lse, counters,
            *q.stride(), *k_cache.stride(), *v_cache.stride(), *out.stride(), *block_table.stride(),
            0 if sinks is None else sinks.stride(0),
            batch, num_kv_heads, q_len, capacity, num_slots, plan.num_splits, plan.target, plan.most, plan.min_tiles,
            right or 0, scale_log2, cap_scale,
            GROUP=group, HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v, PAGE_SIZE=page_size, V_IS_K=latent, SCHEDULE=kind,
            SPLIT=split, BLOCK_B=_block_b(batch), NUM_RANGES=0 if windows is None else len(windows),
            LIMIT_RIGHT=right is not None and q_len > 1,  # the last token sees every key: a length ends there
            SOFTCAP=softcap_kind(softcap, q.dtype), HAS_SINKS=sinks is not None, SIGN=sign, HAS_LSE=lse is not None,
            **layout(k_cache, v_cache), **plan.merge, **config,
        )  # fmt: skip


def _launch_mla(q, latent_cache, block_table, seq_lens, out, lse, **options):
    """As ``_launch_decode`` for q (B, q_len, H, D) on a latent_cache (num_pages, page_size, D) whose first columns, as many as
    out has, are the value.
    """
    hopper = hopper_code(q.device) if options["config"] is None and block_table.shape[1] > 0 else None  # see there
    what = {name: options[name] for name in ("scale", "windows", "softcap", "schedule")}
    if hopper is not None and hopper.supports_mla(q, latent_cache, out, **what) is None:
        what = {name: options[name] for name in ("scale", "right", "sinks", "num_kv_splits", "workspace")}
        hopper.launch_mla(q, latent_cache, block_table, seq_lens, out, lse, **what)
        return
    k_cache, latent = latent_cache[:, :, None], out.shape[3] > 16  # 16 value columns fill no tile of theirs, of 32: loaded again
    _launch_decode(q, k_cache, k_cache[..., : out.shape[3]], block_table, seq_lens, out, lse, latent=latent, **options)


class DecodePlan(NamedTuple):
    """How a call is launched. kind: FIXED or FOUND. num_slots: programs of a KV head's row tile. num_splits: of a sequence
    when FIXED. target, most: splits of the batch, see ``dflash2_chunk``. min_tiles: least tiles of a split. merge: tile of
    the merge. apart: the schedule is found by a launch of its own.
    """

    config: dict
    row_tiles: int
    kind: int
    num_slots: int
    num_splits: int
    target: int
    most: int
    min_tiles: int
    merge: dict
    apart: bool


@functools.lru_cache(maxsize=4096)
def _plan(
    batch, q_len, group, num_kv_heads, head_dim, head_dim_v, page_size, capacity, itemsize, arch, num_processors, latent,
    num_kv_splits, reach, config,
):  # fmt: skip
    rows = q_len * group
    keys = min(capacity, reach)  # that a sequence can have in sight
    # A caller who fixes the splits wants bits that do not depend on the batch, so the tile must not either.
    few = num_kv_splits is None and batch * num_kv_heads * max(1, keys // MIN_SPLIT_KEYS) <= num_processors
    chosen = decode_config(head_dim, head_dim_v, rows, page_size, itemsize, arch, latent, few)
    config = merge_config(RUNG, chosen, None if config is None else dict(config))
    per_processor, most_per_processor = config.pop("programs_per_sm"), config.pop("most_per_sm")
    min_tiles = max(1, config.pop("min_split_keys") // config["BLOCK_N"])
    apart, in_flight = config.pop("schedule_apart"), 32 * config["num_warps"] * config.pop("merge_registers")
    merge_rows = min(config["BLOCK_M"], 1 << (rows - 1).bit_length())
    merge_dv = min(config["BLOCK_DV"], max(16, in_flight // merge_rows))
    merge = dict(MERGE_ROWS=merge_rows, MERGE_DV=merge_dv, MERGE_SPLITS=max(1, in_flight // (merge_rows * merge_dv)))
    row_tiles = -(-rows // config["BLOCK_M"])
    tasks = num_kv_heads * row_tiles
    if batch == 1:  # one merge waits for every split: fewer of them
        per_processor = min(per_processor, 2)
    target = max(1, per_processor * num_processors // tasks)
    most = max(target, most_per_processor * num_processors // tasks)
    most_tiles = -(-keys // config["BLOCK_N"]) + 2 * (reach < capacity)  # a window may begin and end within a tile
    if num_kv_splits is not None:
        num_kv_splits = min(num_kv_splits, max(1, most_tiles))  # no sequence has more
        return DecodePlan(config, row_tiles, FIXED, batch * num_kv_splits, num_kv_splits, target, most, min_tiles, merge, False)
    of_one = max(1, (2 * most_tiles + min_tiles) // (2 * min_tiles))
    num_slots = min(target, of_one) if batch == 1 else min(most + batch, batch * of_one)
    if of_one == 1 or target == 1 and batch == 1:
        return DecodePlan(config, row_tiles, FIXED, batch, 1, target, most, min_tiles, merge, False)
    return DecodePlan(config, row_tiles, FOUND, num_slots, 1, target, most, min_tiles, merge, apart)


def decode_config(head_dim, head_dim_v, rows, page_size, itemsize, arch, latent=False, few=False):
    """Tile sizes, warps, pipeline stages, and how finely the batch is cut.

    Args:
        head_dim, head_dim_v: sizes of a key and of a value head. rows: new tokens times query heads of a KV group.
        page_size: of the cache. itemsize: bytes of an element. arch: 10 * major + minor of the compute capability.
        latent: the value is part of the key. few: no two programs to a processor even when split, so that one program
            has to keep its memory busy alone.

    Returns:
        A dict of launch parameters, and: programs_per_sm, the programs per processor that the batch is cut into when its
        lengths are about equal; most_per_sm, when they are not; min_split_keys, fewest keys of a split; merge_registers,
        float32 values of partial outputs that a thread of the merge has under way; schedule_apart, to find the schedule by
        a launch of its own, for a kernel that has no register left for it.
    """
    block_d, tail_d = split_head(head_dim)
    block_dv = max(32, 1 << (head_dim_v - 1).bit_length())
    if latent:
        block_d, tail_d = head_dim_v, max(16, 1 << (head_dim - head_dim_v - 1).bit_length()) if head_dim > head_dim_v else 0
    widest = max(block_d + tail_d, block_dv)
    block_m = max(16, min(64, 1 << (max(1, rows) - 1).bit_length()))
    programs_per_sm, most_per_sm = 2, 16
    if itemsize == 4:
        block_m, block_n = 16, 32 if widest <= 64 else 16
        num_warps, num_stages = 4 if widest <= 128 else 8 if widest <= 256 else 16, 1
    elif widest > 256:
        block_n, num_warps, num_stages = (32, 4, 5 if arch == 90 else 3) if block_m == 16 else (32 if block_m == 32 else 64, 8, 2)
        # Two programs of 16 rows and two tiles of 37 KB share a processor; one of 64 rows fills its memory and registers.
        programs_per_sm, most_per_sm = (2, 8) if block_m <= 32 else (1, 4)
        if arch != 90:  # half the rows: the accumulator of 64 x 512 fits no other register file
            block_m, block_n, num_warps, num_stages = min(block_m, 32), 32, 8, 2
    elif block_m == 16 and widest <= 128:  # small programs, several to a processor
        block_n, num_warps, num_stages = 64 if few or widest <= 64 else 32, 2, 4
        if block_n * widest > 4096 and arch in SMALL_SHARED:  # four tiles of 32 KB, less the one computed, and Q are too much
            num_stages = 3
        programs_per_sm = 4  # measured on an H200: 8 x 32k .87 of the read limit, with two .82
    else:
        block_n, num_warps, num_stages = (64 if widest <= 128 else 32), 4, 4 if arch == 90 else 3
    whole = page_size & -page_size  # the largest power of two that divides it: such a tile needs one lookup
    block_n = min(block_n, whole if whole >= 16 else 32)
    if num_stages > 1 and whole < 16:
        num_stages += 1  # a lookup for every key, which the loads wait for
    return dict(
        BLOCK_D=block_d, TAIL_D=tail_d, BLOCK_DV=block_dv, BLOCK_M=block_m, BLOCK_N=block_n,
        PRECISION="ieee" if itemsize == 4 else "tf32", num_warps=num_warps, num_stages=num_stages,
        programs_per_sm=programs_per_sm, most_per_sm=most_per_sm, min_split_keys=MIN_SPLIT_KEYS,
        merge_registers=64 if block_m == 16 and widest <= 256 else 32, schedule_apart=widest > 256 and block_m > 16,
    )  # fmt: skip


def decode_bytes_moved(problem):
    """Bytes that one decode call loads and stores: K and V once per KV head (once in all for a latent cache), and what
    the splits leave for the merge. Needs the fields of ``ladder.lab.decode_problem.DecodeProblem``.
    """
    p, rows = problem, problem.q_len * (problem.Hq // problem.Hkv)
    plan = _plan(
        p.B, p.q_len, p.Hq // p.Hkv, p.Hkv, p.D, p.Dv, p.page_size, p.capacity, p.itemsize, 90, 132, p.latent, None, UNLIMITED, None
    )
    schedule = torch.empty(plan.num_slots, 4, dtype=torch.int32)
    _fill_schedule(schedule, torch.tensor(p.seq_lens, dtype=torch.int32), p.q_len, p.capacity, None, plan)
    used, parts = int((schedule[:, 0] >= 0).sum()), int(((schedule[:, 0] >= 0) & (schedule[:, 2] > 1)).sum())
    partial = 2 * 4 * parts * p.Hkv * rows * (p.Dv + 1)
    return plan.row_tiles * p.kv_bytes + p.itemsize * p.Hkv * rows * (used * p.D + p.B * p.Dv) + partial


def _fill_schedule(out, seq_lens, q_len, capacity, windows, plan):
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


def _block_b(batch):
    return min(SEQUENCES_AT_A_TIME, 1 << (max(1, batch) - 1).bit_length())


def _reach(windows, q_len):
    """Most keys that q_len tokens can see under ``windows``, whatever the length."""
    if windows is None or len(windows) != 1:
        return UNLIMITED
    start, stop, sink, left = windows.flat
    return min(UNLIMITED, sink + left + q_len) if start == 0 and stop == UNLIMITED else UNLIMITED


def _frozen(config):
    """``config`` as a key of a cache; TypeError when it is no dict."""
    return None if config is None else tuple(sorted(merge_config(RUNG, {}, config).items()))


def _check_options(tensors, causal, windows, softcap, sinks, num_kv_splits, return_lse, workspace, schedule, config, right):
    """Check what the shapes of ``tensors`` (q, k_cache, v_cache) do not show; returns the keywords of the launch."""
    q = tensors[0]
    if not isinstance(causal, bool):
        raise TypeError(f"{RUNG}: causal is {causal!r}; want True or False")
    if sinks is not None and not isinstance(sinks, torch.Tensor):
        raise _unlike("sinks", sinks, f"a torch.Tensor ({q.shape[2]},), or None")
    windows, softcap, right = check_options(tensors, q.shape[2], causal, windows, softcap, sinks, return_lse, right)
    if num_kv_splits is not None:
        num_kv_splits = check_integer(RUNG, "num_kv_splits", num_kv_splits, 1, optional=True)
    if workspace is not None and not isinstance(workspace, DecodeWorkspace):
        raise TypeError(f"{RUNG}: workspace is a {type(workspace).__name__}; want a DecodeWorkspace on {q.device}, or None")
    merge_config(RUNG, {}, config)
    if schedule is not None:
        if num_kv_splits is not None:
            raise ValueError(f"{RUNG}: schedule and num_kv_splits are both given; want one of them")
        if not isinstance(schedule, torch.Tensor) or schedule.ndim != 2 or schedule.shape[1] != 4 or schedule.dtype != torch.int32 \
                or schedule.device != q.device or not schedule.is_contiguous():  # fmt: skip
            raise _unlike("schedule", schedule, f"a contiguous int32 torch.Tensor (num_slots, 4) on {q.device}, of get_decode_schedule")
    return dict(right=right, windows=windows, softcap=softcap, sinks=sinks, num_kv_splits=num_kv_splits)


def _check_latent(latent_cache, q):
    """What ``check_paged`` would say of a k_cache, which the caller of MLA does not have."""
    if latent_cache.dtype != q.dtype or latent_cache.device != q.device:
        raise _unlike("latent_cache", latent_cache, f"{q.dtype} on {q.device}, as q")
    if latent_cache.shape[1] == 0 or latent_cache.shape[2] != q.shape[3]:
        wanted = f"(num_pages, page_size, {q.shape[3]}), the columns of q, and pages of at least one token"
        raise ValueError(f"{RUNG}: latent_cache has shape {tuple(latent_cache.shape)}; want {wanted}")


def _check_windows(windows):
    if windows is not None and not isinstance(windows, RangeWindows):
        raise TypeError(f"{RUNG}: windows is a {type(windows).__name__}; want a RangeWindows, or None")
    return windows if windows is not None and len(windows) else None


def _unlike(name, given, wanted):
    """The error that ``given`` is not what is wanted: TypeError when it is no tensor, else ValueError."""
    if not isinstance(given, torch.Tensor):
        return TypeError(f"{RUNG}: {name} is a {type(given).__name__}; want {wanted}")
    return ValueError(f"{RUNG}: {name} is {tuple(given.shape)} {given.dtype} on {given.device}; want {wanted}")


# Under torch.compile the calls are operators that the compiler does not look into. They write ``out``, and return the
# log-sum-exp, (B, Hq, q_len), of no element unless it is asked for.


def _refuse_under_compile(config):
    """Refuse what the operator cannot be told; all else it checks when it runs."""
    if config is not None:
        raise NotImplementedError(f"{RUNG}: config is for tuning outside torch.compile; want None")


def _flat(windows):
    windows = _check_windows(windows)
    return None if windows is None else list(windows.flat)


def _tensors(workspace):
    return (None, None) if workspace is None else (workspace.partials, workspace.counters)


def _lse_shape(q):
    return (q.shape[0], q.shape[1]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])


def _borrowed(partials, counters):
    """A workspace of the tensors of another; what it grows by lasts for one call."""
    if partials is None:
        return None
    workspace = DecodeWorkspace(partials.device)
    workspace.partials, workspace.counters = partials, counters
    return workspace


@torch.library.custom_op("ladder::dflash2_decode", mutates_args=("out", "partials", "counters"))
def _decode_op(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    causal: bool, scale: float | None, windows: list[int] | None, softcap: float, sinks: torch.Tensor | None,
    num_kv_splits: int | None, return_lse: bool, out: torch.Tensor, partials: torch.Tensor | None,
    counters: torch.Tensor | None, schedule: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    result = dflash2_decode(
        q, k_cache, v_cache, block_table, seq_lens, causal=causal, scale=scale,
        windows=None if windows is None else RangeWindows.from_flat(windows), softcap=softcap, sinks=sinks,
        num_kv_splits=num_kv_splits, return_lse=return_lse, out=out, workspace=_borrowed(partials, counters), schedule=schedule,
    )  # fmt: skip
    return result[1] if return_lse else q.new_empty(0, dtype=torch.float32)


@torch.library.custom_op("ladder::dflash2_mla_decode", mutates_args=("out", "partials", "counters"))
def _mla_decode_op(
    q: torch.Tensor, latent_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, scale: float,
    head_dim_v: int, causal: bool, windows: list[int] | None, softcap: float, sinks: torch.Tensor | None,
    num_kv_splits: int | None, return_lse: bool, out: torch.Tensor, partials: torch.Tensor | None,
    counters: torch.Tensor | None, schedule: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    result = dflash2_mla_decode(
        q, latent_cache, block_table, seq_lens, scale=scale, head_dim_v=head_dim_v, causal=causal,
        windows=None if windows is None else RangeWindows.from_flat(windows), softcap=softcap, sinks=sinks,
        num_kv_splits=num_kv_splits, return_lse=return_lse, out=out, workspace=_borrowed(partials, counters), schedule=schedule,
    )  # fmt: skip
    return result[1] if return_lse else q.new_empty(0, dtype=torch.float32)


@_decode_op.register_fake
def _fake_decode(q, k_cache, v_cache, block_table, seq_lens, causal, scale, windows, softcap, sinks, num_kv_splits, return_lse, *tensors):
    return q.new_empty(_lse_shape(q) if return_lse else 0, dtype=torch.float32)


@_mla_decode_op.register_fake
def _fake_mla_decode(
    q, latent_cache, block_table, seq_lens, scale, head_dim_v, causal, windows, softcap, sinks, num_kv_splits, return_lse, *tensors
):  # fmt: skip
    return q.new_empty(_lse_shape(q) if return_lse else 0, dtype=torch.float32)
