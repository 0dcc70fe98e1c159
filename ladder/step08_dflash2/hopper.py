"""Launching the Hopper kernel: what it can take, its tiles, and the order of its work. Needs CUDA of capability 9.0."""

import functools

import torch

from ladder.step05_fused.attention import LOG2_E

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
    if width <= 192 and width_v <= 128:  # no room for a second Q, nor for the output: Q comes early, the output leaves from registers
        return {**plain, "DIRECT": True, "Q_EARLY": True}
    if width != width_v:  # Q's memory does not have the output's shape
        return {**plain, "N": 64, "DIRECT": True}
    return {**plain, "N": 64, "O_IN_Q": True}


def width_of(head_dim):
    """The head size that the kernel computes for ``head_dim``, and its two parts; columns beyond are zeros."""
    return next((width, parts) for width, parts in WIDTHS if head_dim <= width)


def supports_prefill(
    q, k, v, *, out=None, paged=False, scale=None, causal=False, right=None, windows=None, softcap=0.0, sinks=None
):  # fmt: skip
    """None when the Hopper kernel takes this call, else the reason in words why it does not.

    Masks, softcap and sinks are all taken; what the copy engine cannot address is not.
    """
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {str(q.dtype).removeprefix('torch.')}: the tensor cores of this kernel take bfloat16 and float16"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"head size {max(q.shape[-1], v.shape[-1])} is above 256"
    if v.shape[-1] > width_of(q.shape[-1])[0]:
        return f"the values are wider than the keys ({v.shape[-1]} against {q.shape[-1]})"
    if scale is not None and abs(scale) < 1e-37:
        return "a scale of zero"
    for name, x in (("q", q), ("k", k), ("v", v), *([] if out is None else [("out", out)])):
        if x.stride(-1) != 1 or x.data_ptr() % 16 or any(s % 8 or s <= 0 for s in x.stride()[:-1]):
            return f"{name} has strides {x.stride()}; the copy engine wants rows of neighbours and strides of 16 bytes"
        if 0 in x.shape:
            return f"{name} is empty"
    if paged:
        page_size = k.shape[1]
        if page_size < 16 or page_size & (page_size - 1):
            return f"page_size {page_size} is no power of two of at least 16"
    return None


@functools.cache
def _layout(rank, columns):
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=rank)


def _describe(x, rows, columns):
    """A TMA descriptor of boxes of (rows, columns) of a (batch, heads, tokens, D) view that ``supports_prefill``."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    descriptor = object.__new__(TensorDescriptor)  # its own checks repeat ours and cost more than the launch
    descriptor.__dict__.update(
        base=x, shape=list(x.shape), strides=list(x.stride()), block_shape=[1, 1, rows, columns], layout=_layout(4, columns), padding="zero"
    )
    return descriptor


def _describe_parts(x, rows, columns, more):
    """Descriptors of the first ``columns`` of a head and of the ``more`` behind them."""
    first = _describe(x, rows, columns)
    return first, _describe(x, rows, more) if more else first


@functools.cache
def _processors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


_counters = {}


def _counter(device):
    """The ticket counter of this stream: zero between launches. A graph being captured gets one of its own."""
    stream = torch.cuda.current_stream(device).cuda_stream
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    if (device, stream) not in _counters:
        _counters[device, stream] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counters[device, stream]


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
    """Query heads side by side, for kv_bytes of K and V a KV head; ``limited``: rows differ in the keys they see. Measured, see TUNING.md.

    Without a limit all tiles weigh the same: few heads, so that programs share K and V while they come from memory, and the
    next head's come one by one. Under the diagonal the heaviest tiles of a section come first, and its light ones fill the
    gaps that they leave: more heads, as long as their K and V stay in the L2 cache, and of the longest a few even so.
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
    if ragged:  # one tile more for each sequence but the last, which stands empty where a length is whole tiles: not counted for splits
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
        section = choose_section(group, 2 * max(1, seqlen_k) * (head_dim + head_dim_v), seqlen_k, right is not None)  # a block table may have no column
    work = num_m * num_heads * (1 if ragged else num_seqs) * num_splits
    return chosen, num_m, num_splits, fit_section(num_heads * num_seqs, section), min(work, grid or processors)


def plan_problem(p, right, *, ragged=False, page_size=0, processors=132, windows=False):
    """``plan_prefill`` of a problem (fields of ``AttentionProblem``), whose sequences are all of one length."""
    ragged = ragged or page_size > 0
    rows = p.B * p.Sq if ragged else p.Sq
    keys = -(-p.Sk // page_size) * page_size if page_size else p.B * p.Sk if ragged else p.Sk
    return plan_prefill(
        p.B, p.Hq, p.Hq // p.Hkv, rows, keys, p.D, p.Dv, right, ragged, page_size > 0, p.Sq, processors, windows=windows
    )


def describe_prefill(p, right, *, ragged=False, page_size=0, processors=132):
    """Sentences about how a problem (fields of ``AttentionProblem``) is launched, for ``explain``."""
    config, num_m, splits, section, grid = plan_problem(p, right, ragged=ragged, page_size=page_size, processors=processors)
    (_, (d1, d2)) = width_of(p.D)
    tiles = num_m * p.Hq * (1 if ragged else p.B)
    lines = [
        f"Tiles: {64 * config['WG']} queries, {config['WG']} warp groups of 64 rows, by {config['N']} keys; "
        f"{config['STAGES']} tiles of K and of V under way, brought by a warp of their own.",
        f"A head of {p.D} is computed as {d1}{f' + {d2}' if d2 else ''} columns; what lies beyond is filled with zeros.",
        f"Work: {tiles} tiles{f' in {splits} splits of the keys each, merged by a second launch' if splits > 1 else ''}, drawn from a "
        f"counter by {grid} programs; {section} head{'s' if section > 1 else ''} side by side, which share K and V in the L2 cache.",
    ]
    lines.append("The warp groups take turns on the tensor cores." if config["TURNS"] else "The warp groups run freely: they drift apart by themselves.")
    return lines


def launch_prefill(
    q, k, v, out, lse, *, cu_seqlens_q=None, cu_seqlens_k=None, block_table=None, seq_lens=None, max_seqlen_q=None,
    causal=False, right=None, scale, windows=None, softcap=0.0, sinks=None, num_splits=None, config=None,
):  # fmt: skip
    """Run the kernel on checked arguments that ``supports_prefill``; fills ``out`` and, unless None, ``lse``.

    q, out: (B, H, S, D), or packed (total, H, D) with ``cu_seqlens_q``. k, v: likewise, or pages (num_pages, page_size,
    H, D) with ``block_table`` and ``seq_lens``. right: keys after its own position that a query sees; None is 0 under
    ``causal`` and all without.
    """
    from triton.experimental.gluon import language as gl

    from .attention import softcap_kind
    from .hopper_kernel import dflash2_prefill_hopper

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
    group, processors = num_heads // num_kv_heads, _processors(q.device)
    config, num_m, num_splits, section, grid = plan_prefill(
        num_seqs, num_heads, group, seqlen_q, seqlen_k, head_dim, head_dim_v, right, ragged, page_size > 0,
        max_seqlen_q, processors, num_splits, windows is not None, None if config is None else tuple(sorted(config.items())),
    )  # fmt: skip
    block_n = config["N"]
    sinks, seq_lens, block_table = (x if x is None or x.is_contiguous() else x.contiguous() for x in (sinks, seq_lens, block_table))
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
        counter = _counter(q.device) if config["DYNAMIC"] else None
        dflash2_prefill_hopper[(grid,)](
            *_describe_parts(q4, 64, d1, d2), *_describe_parts(k4, key_rows, d1, d2),
            *_describe_parts(v4, key_rows, v1, v2), *_describe_parts(out4, 64, v1, v2),
            target, target_lse, sinks, cu_seqlens_q, cu_seqlens_k, seq_lens, block_table, table, counter,
            *strides_o, seqlen_q, 0 if block_table is None else block_table.stride(0),
            seqlen_q, seqlen_k, num_heads, group, num_seqs, num_m, section, num_splits, work, right or 0,
            2 * LOG2_E * positive / softcap if softcap else positive * LOG2_E, softcap * LOG2_E,
            D1=d1, D2=d2, V1=v1, V2=v2, HEAD_V=head_dim_v, HAS_RIGHT=right is not None, RAGGED=ragged, PAGE=page_size,
            NUM_RANGES=0 if windows is None else len(windows), CAP=softcap_kind(softcap, q.dtype), NEGATIVE=scale < 0,
            HAS_SINKS=sinks is not None, HAS_LSE=target_lse is not None, SPLIT=num_splits > 1,
            DT=gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16, num_warps=4, **config,
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
        part_out, part_lse, out, lse, sinks, None if cu_seqlens_q is None else cu_seqlens_q[-1:], *out.stride(), rows, out.shape[1], out.shape[2], splits,
        HEAD_V=head_dim_v, BLOCK_V=1 << (head_dim_v - 1).bit_length(), BLOCK=block, RAGGED=cu_seqlens_q is not None,
        HAS_SINKS=sinks is not None, HAS_LSE=lse is not None,
    )  # fmt: skip


MLA_TILE = 64  # rows, and keys
MERGE_PROGRAMS = 1024  # of a whole batch: each costs time where nothing was split, which the host does not know
MLA_MIN_TILES = 4  # fewer keys are read faster than their partial result is merged


def supports_mla(q, latent_cache, out, *, scale, windows=None, softcap=0.0, schedule=None):
    """None when the Hopper MLA kernel takes this call of q (B, q_len, H, 576), else the reason in words why it does not."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {str(q.dtype).removeprefix('torch.')}: the tensor cores of this kernel take bfloat16 and float16"
    if q.shape[3] != 576 or out.shape[3] != 512:
        return f"head sizes {q.shape[3]}/{out.shape[3]}: it is built for 576/512"
    if windows is not None or softcap > 0 or schedule is not None:
        return "range windows, softcap and a schedule go with the portable kernel"
    if abs(scale) < 1e-37:
        return "a scale of zero"
    page_size = latent_cache.shape[1]
    if page_size < 16 or page_size & (page_size - 1):
        return f"page_size {page_size} is no power of two of at least 16"
    if q.shape[1] > 1 and q.stride(1) != q.shape[2] * q.stride(2):
        return "the heads of two tokens do not follow one another"
    if out.stride(3) != 1:
        return f"out has strides {out.stride()}; its rows must lie together"
    for name, x in (("q", q), ("latent_cache", latent_cache)):
        if x.stride(-1) != 1 or x.data_ptr() % 16 or any(s % 8 or s <= 0 for s in x.stride()[:-1]):
            return f"{name} has strides {x.stride()}; the copy engine wants rows of neighbours and strides of 16 bytes"
        if 0 in x.shape:
            return f"{name} is empty"
    return None


def _describe_rows(x, rows, columns):
    """A TMA descriptor of boxes of (rows, columns) of a (batch, rows, D) view."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(
        base=x, shape=list(x.shape), strides=list(x.stride()), block_shape=[1, rows, columns], layout=_layout(3, 64), padding="zero"
    )
    return descriptor


def most_splits(tiles, min_tiles):
    """Splits of a sequence of so many tiles when cut as finely as allowed: to the nearest, as the device does it."""
    return max(1, (2 * tiles + min_tiles) // (2 * min_tiles))


@functools.lru_cache(maxsize=1024)
def plan_mla(batch, rows, capacity, processors, num_kv_splits, tile=MLA_TILE):
    """(row tiles, found on the device, slots, splits of a sequence when not, target, most): see ``decode_kernel.dflash2_chunk``."""
    row_tiles = -(-rows // tile)
    target = max(1, processors // row_tiles)
    most = 2 * target
    tiles = -(-capacity // MLA_TILE)
    if num_kv_splits is not None:
        num_kv_splits = min(num_kv_splits, max(1, tiles))  # no sequence has more
        return row_tiles, False, batch * num_kv_splits, num_kv_splits, target, most
    of_one = most_splits(tiles, MLA_MIN_TILES)
    if of_one == 1 or batch >= 2 * target:
        return row_tiles, of_one > 1, batch if of_one == 1 else batch + most, 1, target, most
    return row_tiles, True, min(batch * of_one, most + batch), 1, target, most


def mla_design(rows):
    """(kernel, rows of its tile) for a sequence of so many query rows. It depends on nothing else: so fixed splits give fixed bits.

    "few": ``hopper_mla_few_kernel``; "many": ``hopper_mla_kernel``.
    """
    if rows <= 32:
        return "few", 16 if rows <= 16 else 32
    return "many", MLA_TILE


def mla_merges(kind, batch, target, num_kv_splits):
    """Whether the last programs to finish a sequence merge it; else a launch spreads that over the chip.

    They do with few splits of each sequence, and with many rows where next to none is split, which the host does not know; the
    split count alone chooses where it is given. target: as ``plan_mla`` finds it.
    """
    if num_kv_splits is not None:
        return kind == "few" and num_kv_splits <= 8
    return batch >= 16 if kind == "few" else 3 * batch >= 2 * target


def merge_config(batch, rows, num_kv_splits):
    """Blocks (rows, columns, splits) of the merge; the split count alone chooses where it is given."""
    many = num_kv_splits > 8 if num_kv_splits is not None else batch * rows < 1024
    return dict(BLOCK_M=1, BLOCK_V=64, BLOCK_S=64) if many else dict(BLOCK_M=4, BLOCK_V=128, BLOCK_S=4)


def describe_mla(p, processors=132):
    """Sentences about how a problem (fields of ``ladder.lab.decode_problem.DecodeProblem``) with a latent cache is launched, for ``explain``."""
    rows = p.q_len * p.Hq
    kind, tile = mla_design(rows)
    row_tiles, found, slots, _, target, _ = plan_mla(p.B, rows, p.capacity, processors, None, tile)
    name = "dflash2_mla_few_hopper" if kind == "few" else "dflash2_mla_hopper"
    lines = [f"Kernel: {name}, Gluon for sm_90 (TMA, wgmma, specialised warps).",
             f"Tiles: {tile} rows for the {rows} of a sequence ({p.q_len} tokens x {p.Hq} heads), so the latents are read {row_tiles} x, by {MLA_TILE} keys. "
             + ("Keys and value columns are the rows of its products: memory binds." if kind == "few" else
                "Two warp groups share tiles in pairs: each makes the probabilities of one, and multiplies both with half of the value columns.")]  # fmt: skip
    if found:
        where = "in the same launch" if mla_merges(kind, p.B, target, None) else "by a second one"
        lines.append(f"Work: the device cuts the batch into about {target} parts of equal length a row tile, no part below {MLA_MIN_TILES * MLA_TILE} keys. Programs "
                     f"draw them from a counter, and what was split is merged {where}.")  # fmt: skip
    else:
        lines.append(f"Work: {row_tiles * slots} parts, one a sequence and row tile; keys are not split, so nothing is merged.")
    return lines


def launch_mla(q, latent_cache, block_table, seq_lens, out, lse, *, scale, right, sinks, num_kv_splits, workspace, design=None, merges=None):
    """Run the kernel on checked arguments that ``supports_mla``; fills ``out`` and, unless None, ``lse``.

    workspace: a ``DecodeWorkspace``, or None. right: as in ``launch_prefill``. design, merges: what ``mla_design`` and ``mla_merges``
    would choose.
    """
    from triton.experimental.gluon import language as gl

    from ladder.step07_dflash1.attention import DecodeWorkspace

    from .hopper_mla_few_kernel import dflash2_mla_few_hopper
    from .hopper_mla_kernel import dflash2_mla_hopper
    from .merge_kernel import dflash2_mla_merge_parts

    batch, q_len, num_heads, head_dim = q.shape
    page_size, rows, device = latent_cache.shape[1], q_len * num_heads, q.device
    capacity = block_table.shape[1] * page_size
    kind, tile = mla_design(rows) if design is None else design
    processors = _processors(device)
    row_tiles, found, slots, num_splits, target, most = plan_mla(batch, rows, capacity, processors, num_kv_splits, tile)
    works, split = row_tiles * slots, slots > batch
    merges = split and (mla_merges(kind, batch, target, num_kv_splits) if merges is None else merges)
    workspace = DecodeWorkspace(device) if workspace is None and split else workspace
    if workspace is not None and workspace.partials.device != device:
        raise ValueError(f"step08_dflash2: workspace is on {workspace.partials.device}; want a DecodeWorkspace on {device}")
    if split:
        part_rows = works * tile
        part_out, counter = workspace.reserve(part_rows * 514 + 2 * batch, 1 + 2 * works)
        part_lse, meta, arrivals = part_out[part_rows * 512 :], part_out[part_rows * 514 :], counter[1:]
    else:
        part_out = part_lse = meta = arrivals = out  # not written where no sequence is split
        counter = _counter(device)
    sinks, seq_lens, block_table = (x if x is None or x.is_contiguous() else x.contiguous() for x in (sinks, seq_lens, block_table))
    flat = torch.as_strided(q, (batch, rows, head_dim), (q.stride(0), q.stride(2), 1)) if batch * rows else q
    key_rows = min(page_size, MLA_TILE)
    block_b = min(1024, max(128, 1 << (batch - 1).bit_length()))
    strides, numbers = out.stride()[:3], (capacity, slots, num_splits, target, most, MLA_MIN_TILES)
    if kind == "few":
        kernel, widths, grid, counters = dflash2_mla_few_hopper, (64,), min(works, processors), (arrivals, counter)
        chosen = dict(ROWS=tile, SLOTS=8 if tile == 16 else 7)
        block_b = 1 if batch == 1 else block_b
    else:
        kernel, widths, grid, counters = dflash2_mla_hopper, (256, 64), min(works, processors), (arrivals, counter)
        chosen = dict(WIDE=out.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in out.stride()[:3]))
        block_b = 1 if found and batch == 1 else 128  # lengths that the producer's few registers hold
    with torch.cuda.device(device):
        kernel[(grid,)](
            *(_describe_rows(flat, tile, n) for n in widths), *(_describe_rows(latent_cache, key_rows, n) for n in widths),
            block_table, seq_lens, out, part_out, part_lse, meta, lse, sinks, *counters, *strides, block_table.stride(0),
            batch, num_heads, q_len, *numbers, q_len if right is None else right, abs(scale) * LOG2_E,
            PAGE=page_size, FOUND=found, BLOCK_B=block_b, NEGATIVE=scale < 0, HAS_SINKS=sinks is not None, HAS_LSE=lse is not None,
            SPLIT=split, MERGES=merges, DT=gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16, num_warps=4, **chosen,
        )  # fmt: skip
        if split and not merges:
            blocks = merge_config(batch, rows, num_kv_splits)
            columns = 512 // blocks["BLOCK_V"]
            programs = min(-(-rows // blocks["BLOCK_M"]), max(1, MERGE_PROGRAMS // (batch * columns)))
            dflash2_mla_merge_parts[(batch * programs, columns)](
                part_out, part_lse, meta, out, lse, sinks, *strides, num_heads, q_len, slots, programs, PART_ROWS=tile, HEAD_V=512, **blocks,
                HAS_SINKS=sinks is not None, HAS_LSE=lse is not None, num_warps=4,
            )  # fmt: skip
