"""Launching decode: arguments checked, tiles and programs chosen, one kernel a call, also when the keys are split."""

import torch

from ladder.contract import FLOATS, check_integer, check_out, check_paged

from . import eager
from .checks import check_decode_options, check_latent, check_written, unlike
from .decision import decide, decode_call, v_is_k
from .dispatch import RUNG, device_code, workspace_on
from .hopper import decode as hopper_decode
from .hopper import mla as hopper_mla
from .schedule import fill_schedule, launch_schedule
from .tiles import FOUND, GIVEN, block_b, plan_decode, scale_factors, softcap_kind
from .windows import UNLIMITED


def paged_decode(
    q, k_cache, v_cache, block_table, seq_lens, *, causal=True, scale=None, windows=None, softcap=0.0, sinks=None,
    num_kv_splits=None, return_lse=False, out=None, workspace=None, schedule=None, config=None,
):  # fmt: skip
    """``dflash2_decode`` outside torch.compile."""
    one_token = isinstance(q, torch.Tensor) and q.ndim == 3
    if one_token:
        q = q[:, None]
    scale = check_paged(RUNG, q, k_cache, v_cache, block_table, seq_lens, scale=scale)
    given, out = out is not None, check_out(RUNG, out, q, (*q.shape[:3], v_cache.shape[3]), one_token=one_token)
    if given:
        check_written(out, q=q, k_cache=k_cache, v_cache=v_cache)
    options = check_decode_options(
        (q, k_cache, v_cache),
        causal,
        windows,
        softcap,
        sinks,
        num_kv_splits,
        return_lse,
        workspace,
        schedule,
        config,
        None,
    )
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32) if return_lse else None
    kernels = device_code(q, "portable.decode_kernel")
    if kernels is None:
        result = eager.decode(
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            causal=False,
            scale=scale,
            return_lse=return_lse,
            out=out,
            **options,
        )
        lse = result[1] if return_lse else None
    elif out.numel():
        launch(
            kernels, q, k_cache, v_cache, block_table, seq_lens, out, lse,
            scale=scale, workspace=workspace, schedule=schedule, config=config, **options,
        )  # fmt: skip
    if one_token:
        out, lse = out[:, 0], lse[..., 0] if return_lse else None
    return (out, lse) if return_lse else out


def mla_decode(
    q, latent_cache, block_table, seq_lens, *, scale, head_dim_v=512, causal=True, windows=None, softcap=0.0,
    sinks=None,
    num_kv_splits=None, return_lse=False, out=None, workspace=None, schedule=None, config=None,
):  # fmt: skip
    """``dflash2_mla_decode`` outside torch.compile."""
    if not isinstance(latent_cache, torch.Tensor) or latent_cache.ndim != 3:
        raise unlike("latent_cache", latent_cache, "a torch.Tensor (num_pages, page_size, D)")
    head_dim_v = check_integer(RUNG, "head_dim_v", head_dim_v, 1)
    if not 16 <= head_dim_v <= latent_cache.shape[2] or head_dim_v & (head_dim_v - 1):
        raise ValueError(f"{RUNG}: head_dim_v is {head_dim_v}; want a power of two, 16 .. {latent_cache.shape[2]}")
    if scale is None:
        raise TypeError(f"{RUNG}: scale is None; want the model's, 1/sqrt(192) for DeepSeek-V2")
    one_token = isinstance(q, torch.Tensor) and q.ndim == 3
    if one_token:
        q = q[:, None]
    if isinstance(q, torch.Tensor) and q.ndim == 4 and q.dtype in FLOATS:  # of a q that check_paged will take
        check_latent(latent_cache, q)
    k_cache = latent_cache[:, :, None]
    v_cache = k_cache[..., :head_dim_v]
    scale = check_paged(RUNG, q, k_cache, v_cache, block_table, seq_lens, scale=scale, any_heads=True)
    if q.shape[-1] > 2 * head_dim_v:
        raise NotImplementedError(f"{RUNG}: D = {q.shape[-1]} is above twice head_dim_v = {head_dim_v}")
    given, out = out is not None, check_out(RUNG, out, q, (*q.shape[:3], head_dim_v), one_token=one_token)
    if given:
        check_written(out, q=q, latent_cache=latent_cache)
    options = check_decode_options(
        (q, latent_cache), causal, windows, softcap, sinks, num_kv_splits, return_lse, workspace, schedule, config, None
    )
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32) if return_lse else None
    kernels = device_code(q, "portable.decode_kernel")
    if kernels is None:
        result = eager.mla_decode(
            q, latent_cache, block_table, seq_lens,
            causal=False, scale=scale, head_dim_v=head_dim_v, return_lse=return_lse, out=out, **options,
        )  # fmt: skip
        lse = result[1] if return_lse else None
    elif out.numel():
        launch(
            kernels, q, k_cache, v_cache, block_table, seq_lens, out, lse,
            scale=scale, workspace=workspace, schedule=schedule, config=config, latent_cache=latent_cache, **options,
        )  # fmt: skip
    if one_token:
        out, lse = out[:, 0], lse[..., 0] if return_lse else None
    return (out, lse) if return_lse else out


def launch(
    kernels, q, k_cache, v_cache, block_table, seq_lens, out, lse, *,
    right, scale, windows, softcap, sinks, num_kv_splits, workspace=None, schedule=None, config=None, latent_cache=None,
):  # fmt: skip
    """Launch the kernel that ``decide`` chooses on checked arguments, q and out (B, q_len, Hq, .), none of them empty;
    fills out and lse. latent_cache: what k_cache and v_cache are views of, for MLA.
    """
    (batch, q_len, num_heads, head_dim), (_, page_size, num_kv_heads, head_dim_v) = q.shape, v_cache.shape
    device, capacity, latent = q.device, block_table.shape[1] * page_size, latent_cache is not None
    call = decode_call(
        q, k_cache, v_cache, out, capacity, latent=latent, windows=windows, softcap=softcap, scale=scale,
        num_kv_splits=num_kv_splits,
        scheduled=schedule is not None, config=config,
    )  # fmt: skip
    decision = decide(call, device)
    if decision.kernel != "dflash2_decode":
        what = dict(
            scale=scale, right=right, sinks=sinks, num_kv_splits=num_kv_splits, workspace=workspace, plan=decision.plan
        )
        if latent:
            hopper_mla.launch_mla(q, latent_cache, block_table, seq_lens, out, lse, **what)
        else:
            hopper_decode.launch_decode(q, k_cache, v_cache, block_table, seq_lens, out, lse, **what)
        return
    plan, layout = decision.plan
    num_slots, kind = (plan.num_slots, plan.kind) if schedule is None else (schedule.shape[0], GIVEN)
    row_tiles = plan.row_tiles
    split = num_slots > batch or kind == GIVEN  # a schedule may give one sequence two slots and another none
    partials = part_lse = counters = None
    if split:
        workspace = workspace_on(device, workspace)
        part_rows = num_kv_heads * row_tiles * num_slots * plan.merge["MERGE_ROWS"]
        apart = plan.apart and kind == FOUND
        partials, counters = workspace.reserve(
            part_rows * (head_dim_v + 1) + 4 * num_slots * apart, batch * num_kv_heads * row_tiles
        )
        part_lse = partials[part_rows * head_dim_v :]
        if apart:
            kind, schedule = GIVEN, part_lse[part_rows : part_rows + 4 * num_slots].view(torch.int32)
            launch_schedule(kernels, schedule, seq_lens, q_len, capacity, windows, plan)
    sign, scale_log2, cap_scale = scale_factors(scale, softcap)
    with torch.cuda.device_of(q):
        kernels.dflash2_decode[(num_kv_heads * row_tiles * num_slots,)](
            q, k_cache, v_cache, block_table, seq_lens, None if windows is None else windows.table(device), sinks,
            schedule,
            out, lse, partials, part_lse, counters,
            *q.stride(), *k_cache.stride(), *v_cache.stride(), *out.stride(), *block_table.stride(),
            0 if sinks is None else sinks.stride(0),
            batch, num_kv_heads, q_len, capacity, num_slots, plan.num_splits, plan.target, plan.most, plan.min_tiles,
            right or 0, scale_log2, cap_scale,
            GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v, PAGE_SIZE=page_size,
            V_IS_K=v_is_k(latent, head_dim_v), SCHEDULE=kind,
            SPLIT=split, BLOCK_B=block_b(batch), NUM_RANGES=0 if windows is None else len(windows),
            LIMIT_RIGHT=right is not None and q_len > 1,  # the last token sees every key: a length ends there
            SOFTCAP=softcap_kind(softcap, q.dtype), HAS_SINKS=sinks is not None, SIGN=sign, HAS_LSE=lse is not None,
            **layout, **plan.merge, **plan.config,
        )  # fmt: skip


def decode_bytes_moved(problem):
    """Bytes that one decode call loads and stores: K and V once per KV head (once in all for a latent cache), and what
    the splits leave for the merge. Needs the fields of ``ladder.lab.decode_problem.DecodeProblem``.
    """
    p, rows = problem, problem.q_len * (problem.Hq // problem.Hkv)
    plan = plan_decode(
        p.B,
        p.q_len,
        p.Hq // p.Hkv,
        p.Hkv,
        p.D,
        p.Dv,
        p.page_size,
        p.capacity,
        p.itemsize,
        90,
        132,
        p.latent,
        None,
        UNLIMITED,
        None,
    )
    schedule = torch.empty(plan.num_slots, 4, dtype=torch.int32)
    fill_schedule(schedule, torch.tensor(p.seq_lens, dtype=torch.int32), p.q_len, p.capacity, None, plan)
    used, parts = int((schedule[:, 0] >= 0).sum()), int(((schedule[:, 0] >= 0) & (schedule[:, 2] > 1)).sum())
    partial = 2 * 4 * parts * p.Hkv * rows * (p.Dv + 1)
    return plan.row_tiles * p.kv_bytes + p.itemsize * p.Hkv * rows * (used * p.D + p.B * p.Dv) + partial
