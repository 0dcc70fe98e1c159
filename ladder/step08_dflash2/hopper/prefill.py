"""Launching the Hopper kernel of prefill: what it can take, its tiles,
and the order of its work. Needs CUDA of capability 9.0."""

import functools

import torch

from ladder.step05_fused.attention import LOG2_E

from .. import dispatch
from ..tiles import softcap_kind
from .descriptors import contiguous, counter, describe_parts, refuse
from .shape import PrefillShape

L2_BYTES = 32 << 20  # of the 50 MB: K and V of the heads that run side by side
WIDTHS = ((64, (64, 0)), (96, (64, 32)), (128, (128, 0)), (192, (128, 64)), (256, (256, 0)))  # as tiles: powers of two
MAX_SPLITS = 32
SHORT = 2048  # queries
PAGED_REGS = dict(CONSUMER_REGS=232, PRODUCER_REGS=40)


@functools.cache
def config_for(width, width_v, short=False):
    """Tuned tiles for head sizes ``width`` and ``width_v`` (of WIDTHS): see TUNING.md.

    short: no sequence is longer than SHORT, where tiles of 192 rows leave too much of the last one empty.
    """
    plain = dict(N=128, STAGES=2, WG=2, O_IN_Q=False, QBUF=1, DIRECT=False, Q_EARLY=False, CHAINS=False, HALVES=False,
                 CONSUMER_REGS=240, PRODUCER_REGS=24)  # fmt: skip
    if max(width, width_v) <= 64:  # exponentials bind: maxima and exponentials are ordered for their pipe
        small = {**plain, "STAGES": 4, "QBUF": 2, "CHAINS": True, "HALVES": True}
        return small if short else {**small, "WG": 3, "CONSUMER_REGS": 160, "PRODUCER_REGS": 32}
    if max(width, width_v) <= 96:
        return {**plain, "STAGES": 3}
    if max(width, width_v) <= 128:  # two Q beside two slots of K and V fill the memory
        return {**plain, "QBUF": 2, "CHAINS": True}
    # no room for a second Q, nor for the output: Q comes early, the output leaves from registers
    if width <= 192 and width_v <= 128:
        return {**plain, "DIRECT": True, "Q_EARLY": True}
    if width != width_v:  # Q's memory does not have the output's shape
        return {**plain, "N": 64, "DIRECT": True}
    return {**plain, "N": 64, "O_IN_Q": True}


def width_of(head_dim):
    """The head size that the kernel computes for ``head_dim``, and its two parts; columns beyond are zeros."""
    return next((width, parts) for width, parts in WIDTHS if head_dim <= width)


def supports_prefill(call):
    """None when the Hopper kernel takes this ``decision.PrefillCall``, else the reason in words why it does not.

    Masks, softcap and sinks are all taken; what the copy engine cannot address is not.
    """
    head_dim, head_dim_v = call.q[0][-1], call.v[0][-1]
    if max(head_dim, head_dim_v) > WIDTHS[-1][0]:
        return f"head size {max(head_dim, head_dim_v)} is above {WIDTHS[-1][0]}"
    if head_dim_v > width_of(head_dim)[0]:
        return f"the values are wider than the keys ({head_dim_v} against {head_dim})"
    return refuse(call, call.k[0][1] if call.capacity is not None else None, q=call.q, k=call.k, v=call.v, out=call.out)


def choose_splits(tiles, seqlen_k, block_n, processors):
    """How often to split the keys: the fewest that fill 85 % of the last wave, each of at least four tiles of keys."""
    most = min(MAX_SPLITS, max(1, seqlen_k // (4 * block_n)))
    if tiles >= 0.8 * processors or most == 1:
        return 1
    def filled(splits):
        return tiles * splits / (processors * -(-tiles * splits // processors))
    best = max(map(filled, range(1, most + 1)))
    return next(s for s in range(1, most + 1) if filled(s) >= 0.85 * best)


def choose_section(group, kv_bytes, seqlen_k, limited):
    """Query heads side by side, for kv_bytes of K and V a KV head; ``limited``: rows differ in the keys they see.
    Measured, see TUNING.md.

    Without a limit all tiles weigh the same: few heads, so that programs share K and V while
    they come from memory, and the next head's come one by one. Under the diagonal the heaviest
    tiles of a section come first, and its light ones fill the gaps that they leave: more
    heads, as long as their K and V stay in the L2 cache, and of the longest a few even so.
    """
    if not limited:
        return max(group, min(2, (L2_BYTES // 4) // kv_bytes))
    least = 8 if seqlen_k <= 16384 else 4 if seqlen_k <= 65536 else 1
    return max(least, group * max(1, 4 * (L2_BYTES // kv_bytes) // 3))


def fit_section(heads, most):
    """At most ``most`` heads side by side, and no small rest: its longest tiles would be alone at the end."""
    most = min(most, heads)
    divisor = next(d for d in range(most, 0, -1) if heads % d == 0)
    return divisor if 2 * divisor >= most else most


@functools.lru_cache(maxsize=4096)
def plan_prefill(
    num_seqs, num_heads, group, seqlen_q, seqlen_k, head_dim, head_dim_v, right, ragged, paged, longest, processors,
    num_splits=None, windows=False, config=None,
):  # fmt: skip
    """How a call is launched: (compile-time arguments, row tiles, splits of the keys, heads of a section, programs).

    seqlen_q, seqlen_k: of a sequence, or of all packed ones together; with pages, keys that a block table can address.
    right: keys after its own position that a query sees, or None: all. longest: most queries of a sequence, or None.
    windows: whether some keys to the left are hidden.
    config: items of launch parameters that replace the tuned ones.
    """
    (width, _), (width_v, _) = width_of(head_dim), width_of(head_dim_v)
    longest = (longest or seqlen_q) if ragged else seqlen_q
    # Measured: without a mask, groups of 128 columns drift apart by themselves; of 256, under one.
    turns = right is not None if width == 128 else right is None if width == 256 else True
    chosen = {"DYNAMIC": True, "TURNS": turns, "K_AHEAD": True, **config_for(width, width_v, longest <= SHORT)}
    if paged and chosen["WG"] == 2:  # pages are looked up in registers of the producer's
        chosen |= PAGED_REGS
    chosen |= dict(config or ())
    section, grid, block_m = chosen.pop("section", None), chosen.pop("grid", None), 64 * chosen["WG"]
    num_m = filled = -(-seqlen_q // block_m)
    # one tile more for each sequence but the last, which stands empty where a length is whole tiles: not counted for
    # splits
    if ragged:
        num_m = max(1, num_m + num_seqs - 1)
        filled = min(num_m, num_seqs * -(-longest // block_m))
    tiles = filled * num_heads * (1 if ragged else num_seqs)
    if num_splits is None:
        keys = seqlen_k if paged or not ragged else seqlen_k // max(1, num_seqs)
        num_splits = choose_splits(tiles, keys, chosen["N"], processors)
    # Whether every tile but the first of a work is whole, and of that the first group sees the first half.
    aligned = right == 0 and (seqlen_k - seqlen_q) % 128 == 0 and chosen["N"] == block_m == 128
    chosen["ALIGNED"] = chosen.get("ALIGNED", True) and aligned and not (ragged or windows or num_splits > 1)
    if section is None:
        # a block table may have no column
        section = choose_section(group, 2 * max(1, seqlen_k) * (head_dim + head_dim_v), seqlen_k, right is not None)
    work = num_m * num_heads * (1 if ragged else num_seqs) * num_splits
    return chosen, num_m, num_splits, fit_section(num_heads * num_seqs, section), min(work, grid or processors)


def describe_prefill(p, plan, ragged):
    """Sentences about how a problem (fields of ``AttentionProblem``)
    is launched by a ``plan_prefill``, for ``explain``."""
    config, num_m, splits, section, grid = plan
    (_, (d1, d2)) = width_of(p.D)
    tiles = num_m * p.Hq * (1 if ragged else p.B)
    return [
        f"Tiles: {64 * config['WG']} queries, {config['WG']} warp groups of 64 rows, by {config['N']} keys; "
        f"{config['STAGES']} tiles of K and of V under way, brought by a warp of their own.",
        f"A head of {p.D} is computed as {d1}{f' + {d2}' if d2 else ''} columns; what lies beyond is filled with "
        f"zeros.",
        f"Work: {tiles} "
        f"tiles{f' in {splits} splits of the keys each, merged by a second launch' if splits > 1 else ''}, drawn from "
        f"a "
        f"counter by {grid} programs; {section} head{'s' if section > 1 else ''} side by side, which share K and V in "
        f"the L2 cache.",
        "The warp groups take turns on the tensor cores."
        if config["TURNS"]
        else "The warp groups run freely: they drift apart by themselves.",
    ]


def launch_prefill(
    q, k, v, out, lse, *, cu_seqlens_q=None, cu_seqlens_k=None, block_table=None, seq_lens=None, max_seqlen_q=None,
    causal=False, right=None, scale, windows=None, softcap=0.0, sinks=None, num_splits=None, config=None, plan=None,
):  # fmt: skip
    """Run the kernel on checked arguments that ``supports_prefill``; fills ``out`` and, unless None, ``lse``.

    q, out: (B, H, S, D), or packed (total, H, D) with ``cu_seqlens_q``. k, v: likewise, or
    pages (num_pages, page_size, H, D) with ``block_table`` and ``seq_lens``. right: keys after
    its own position that a query sees; None is 0 under ``causal`` and all without. plan: of
    ``plan_prefill``; None makes one, with ``num_splits`` and ``config`` where they are given.
    """
    from triton.experimental.gluon import language as gl

    from .prefill_kernel import dflash2_prefill_hopper

    ragged, page_size = cu_seqlens_q is not None, 0
    right = 0 if causal else right
    if ragged:
        q4, out4 = q.transpose(0, 1)[None], out.transpose(0, 1)[None]
        if block_table is not None:
            page_size = k.shape[1]
            k4, v4, seqlen_k = k.transpose(1, 2), v.transpose(1, 2), block_table.shape[1] * k.shape[1]
        else:
            k4, v4, seqlen_k = k.transpose(0, 1)[None], v.transpose(0, 1)[None], k.shape[0]
        num_seqs = cu_seqlens_q.numel() - 1
    else:
        q4, k4, v4, out4, num_seqs, seqlen_k = q, k, v, out, q.shape[0], k.shape[2]
    (_, num_heads, seqlen_q, head_dim), head_dim_v, num_kv_heads = q4.shape, v4.shape[3], k4.shape[1]
    (_, (d1, d2)), (_, (v1, v2)) = width_of(head_dim), width_of(head_dim_v)
    group = num_heads // num_kv_heads
    config, num_m, num_splits, section, grid = plan or plan_prefill(
        num_seqs, num_heads, group, seqlen_q, seqlen_k, head_dim, head_dim_v, right, ragged, page_size > 0,
        max_seqlen_q, dispatch.machine(q.device).processors, num_splits, windows is not None,
        None if config is None else tuple(sorted(config.items())),
    )  # fmt: skip
    block_n = config["N"]
    sinks, seq_lens, block_table = contiguous(sinks, seq_lens, block_table)
    table = None if windows is None else windows.table(q.device)
    work = num_m * num_heads * (1 if ragged else num_seqs) * num_splits
    target, target_lse, strides_o = out, lse, (out4.stride(2), out4.stride(1), out4.stride(0))
    if num_splits > 1:
        rows = (num_heads * seqlen_q) * (1 if ragged else num_seqs)
        target = torch.empty(num_splits, rows, head_dim_v, dtype=torch.float32, device=q.device)
        target_lse = torch.empty(num_splits, rows, dtype=torch.float32, device=q.device)
        strides_o = (head_dim_v, seqlen_q * head_dim_v, num_heads * seqlen_q * head_dim_v)
    key_rows = min(page_size, block_n) if page_size else block_n
    positive = abs(scale)
    with torch.cuda.device(q.device):
        tickets = counter(q.device) if config["DYNAMIC"] else None
        dflash2_prefill_hopper[(grid,)](
            *describe_parts(q4, 64, d1, d2), *describe_parts(k4, key_rows, d1, d2),
            *describe_parts(v4, key_rows, v1, v2), *describe_parts(out4, 64, v1, v2),
            target, target_lse, sinks, cu_seqlens_q, cu_seqlens_k, seq_lens, block_table, table, tickets,
            *strides_o, seqlen_q, 0 if block_table is None else block_table.stride(0),
            seqlen_q, seqlen_k, num_heads, group, num_seqs, num_m, section, num_splits, work, right or 0,
            2 * LOG2_E * positive / softcap if softcap else positive * LOG2_E, softcap * LOG2_E,
            PrefillShape(
                D1=d1, D2=d2, V1=v1, V2=v2, HEAD_V=head_dim_v, HAS_RIGHT=right is not None, RAGGED=ragged,
                PAGE=page_size,
                NUM_RANGES=0 if windows is None else len(windows), CAP=softcap_kind(softcap, q.dtype),
                NEGATIVE=scale < 0,
                HAS_SINKS=sinks is not None, HAS_LSE=target_lse is not None, SPLIT=num_splits > 1,
                DT=gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16, **config,
            ), num_warps=4,
        )  # fmt: skip
        if num_splits > 1:
            merge_splits(target, target_lse, out4, lse, sinks, cu_seqlens_q)


def merge_splits(part_out, part_lse, out, lse, sinks, cu_seqlens_q=None):
    """out = sum_s e^(lse_s - lse) out_s over (splits, B*H*S, Dv) float32 partials; ``out`` is a (B, H, S, Dv) view.

    With cu_seqlens_q, the S rows are packed queries, and those beyond its last entry are left as they are.
    """
    from .merge_kernel import dflash2_merge_splits

    splits, rows, head_dim_v = part_out.shape
    block = max(1, 2048 // (1 << (head_dim_v - 1).bit_length()))
    dflash2_merge_splits[(-(-rows // block),)](
        part_out, part_lse, out, lse, sinks, None if cu_seqlens_q is None else cu_seqlens_q[-1:], *out.stride(), rows,
        out.shape[1], out.shape[2], splits,
        HEAD_V=head_dim_v, BLOCK_V=1 << (head_dim_v - 1).bit_length(), BLOCK=block, RAGGED=cu_seqlens_q is not None,
        HAS_SINKS=sinks is not None, HAS_LSE=lse is not None,
    )  # fmt: skip
