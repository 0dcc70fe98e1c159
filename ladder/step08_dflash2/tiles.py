"""How a call of step 08 is cut: tiles from a table for each
architecture, the splits of decode, and the numbers of a launch."""

import functools
from typing import NamedTuple

import torch

from ladder.contract import merge_config
from ladder.step05_fused.attention import LOG2_E
from ladder.step07_dflash1.tiles import layout, prefill_config, split_head

from .dispatch import RUNG
from .windows import UNLIMITED

LARGE_SOFTCAP = 256.0
SMALL_SHARED = (86, 89, 120)  # processors with 99 KB of shared memory for a program
MIN_SPLIT_KEYS = 256  # fewer are read faster than their partial result is merged
FIXED, FOUND, GIVEN = 0, 1, 2  # as in portable.decode_kernel
SEQUENCES_AT_A_TIME = 1024  # of the batch that a program's search looks at


@functools.lru_cache(maxsize=4096)
def launch_config(
    head_dim, head_dim_v, itemsize, arch, page_size=0, ragged=False, group=1, tokens=None, most_tokens=None,
    num_ranges=0, softcap=False
):  # fmt: skip
    """Launch parameters of ``dflash2_prefill``: step 07's measured tiles, fitted to short chunks and to masks.

    Args:
        head_dim, head_dim_v: sizes of a query/key and of a value head. itemsize: bytes of an element.
        arch: 10 * major + minor of the compute capability. page_size: of the cache; 0 without pages. ragged: packed.
        group: query heads of a KV head.
        tokens: new tokens of a sequence, or their mean where sequences differ; None when unknown.
        most_tokens: an upper bound of it that the host knows; None when it does not.
        num_ranges: of the windows; 0 without. softcap: whether there is one.

    Returns:
        A dict of the kernel's compile-time arguments; do not change it, calls share it.
    """
    config = prefill_config(head_dim, head_dim_v, itemsize, arch, 0, ragged)
    small = 128  # keys of a tile; a softcap and ranges take registers, which large tiles leave none of
    if (softcap or num_ranges) and itemsize == 2 and config["BLOCK_D"] + config["TAIL_D"] > 192:
        small = 32
    elif softcap or num_ranges > 1:
        small = 64
    if page_size and itemsize == 2:
        # A page of 16 is no reason for tiles of 16 keys, which rescale the output four times as often as tiles of 64: a
        # tile looks up the page of each of its keys instead. One stage of loads is that lookup.
        config["num_stages"] += 1
        small = min(small, 64)
    elif page_size:
        config["BLOCK_N"] = prefill_config(head_dim, head_dim_v, itemsize, arch, page_size, ragged)["BLOCK_N"]
    config["BLOCK_N"] = min(config["BLOCK_N"], small)
    pack = 1
    if tokens is not None and tokens <= config["BLOCK_M"]:
        # A chunk shorter than a tile fills it with the heads of its group, which then load K and V together.
        pack = next(p for p in range(min(group, config["BLOCK_M"]), 0, -1) if group % p == 0)
    if most_tokens is not None and most_tokens * pack < config["BLOCK_M"]:
        # a tile holds the heads of a token, whatever the bound
        block_m = max(16, 1 << (max(1, most_tokens) * pack - 1).bit_length())
        if block_m <= 32:  # few rows: memory binds, so small programs with more loads under way
            config.update(
                BLOCK_M=block_m, BLOCK_N=min(config["BLOCK_N"], 32), num_warps=4,
                num_stages=config["num_stages"] + (itemsize == 2),
            )  # fmt: skip
        elif block_m < config["BLOCK_M"]:
            config.update(BLOCK_M=block_m, BLOCK_N=min(config["BLOCK_N"], 64), num_warps=4)
    return {**config, "PACK": pack}


@functools.lru_cache(maxsize=4096)
def layout_of(dtype, aligned, k_strides, v_strides, head_dim, head_dim_v):
    """``layout`` of step 07 for tensors of these strides; aligned: whether k and v begin at multiples of 16 bytes."""
    k, v = (
        torch.empty_strided((*[1] * (len(s) - 1), d), s, dtype=dtype, device="meta")
        for s, d in ((k_strides, head_dim), (v_strides, head_dim_v))
    )
    found = layout(k, v)
    return found if aligned else {**found, "ALIGNED": 0}


def scale_factors(scale, softcap):
    """(sign, scale_log2, cap_scale): the kernel computes exp2(scale_log2 * x) of x = sign * q.k, with a softcap of
    x = tanh(cap_scale * sign * q.k). Both factors are positive; a zero scale is a zero q.
    """
    sign = 0 if abs(scale) < 1e-37 else 1 if scale > 0 else -1  # below that, float32 rounds the scale to 0
    size = abs(scale) if sign else 1.0
    return (sign, softcap * LOG2_E, size / softcap) if softcap > 0 else (sign, size * LOG2_E, 1.0)


def softcap_kind(softcap, dtype):
    """What a kernel does about a softcap: 0 nothing, 1 a tanh that is exact to a unit of 1, 2 one that is exact where
    it is small.

    The cap multiplies the error of its tanh, 1e-7: up to ``LARGE_SOFTCAP`` no 16-bit result shows that. Models' caps
    are 30 and 50.
    """
    return 0 if softcap == 0 else 1 if softcap <= LARGE_SOFTCAP and dtype != torch.float32 else 2


class DecodePlan(NamedTuple):
    """How a call is launched. kind: FIXED or FOUND. num_slots: programs of a KV head's row tile. num_splits: of a
    sequence when FIXED. target, most: splits of the batch, see ``dflash2_chunk``. min_tiles: least tiles of a split.
    merge: tile of the merge. apart: the schedule is found by a launch of its own.
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
def plan_decode(
    batch, q_len, group, num_kv_heads, head_dim, head_dim_v, page_size, capacity, itemsize, arch, num_processors,
    latent,
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
        return DecodePlan(
            config, row_tiles, FIXED, batch * num_kv_splits, num_kv_splits, target, most, min_tiles, merge, False
        )
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
        A dict of launch parameters, and: programs_per_sm, the programs per processor that the batch is cut into when
        its lengths are about equal; most_per_sm, when they are not; min_split_keys, fewest keys of a split;
        merge_registers, float32 values of partial outputs that a thread of the merge has under way; schedule_apart, to
        find the schedule by a launch of its own, for a kernel that has no register left for it.
    """
    block_d, tail_d = split_head(head_dim)
    block_dv = max(32, 1 << (head_dim_v - 1).bit_length())
    if latent:
        block_d, tail_d = (
            head_dim_v,
            max(16, 1 << (head_dim - head_dim_v - 1).bit_length()) if head_dim > head_dim_v else 0,
        )
    widest = max(block_d + tail_d, block_dv)
    block_m = max(16, min(64, 1 << (max(1, rows) - 1).bit_length()))
    programs_per_sm, most_per_sm = 2, 16
    if itemsize == 4:
        block_m, block_n = 16, 32 if widest <= 64 else 16
        num_warps, num_stages = 4 if widest <= 128 else 8 if widest <= 256 else 16, 1
    elif widest > 256:
        block_n, num_warps, num_stages = (
            (32, 4, 5 if arch == 90 else 3) if block_m == 16 else (32 if block_m == 32 else 64, 8, 2)
        )
        # Two programs of 16 rows and two tiles of 37 KB share a processor; one of 64 rows fills its memory and
        # registers.
        programs_per_sm, most_per_sm = (2, 8) if block_m <= 32 else (1, 4)
        if arch != 90:  # half the rows: the accumulator of 64 x 512 fits no other register file
            block_m, block_n, num_warps, num_stages = min(block_m, 32), 32, 8, 2
    elif block_m == 16 and widest <= 128:  # small programs, several to a processor
        block_n, num_warps, num_stages = 64 if few or widest <= 64 else 32, 2, 4
        # four tiles of 32 KB, less the one computed, and Q are too much
        if block_n * widest > 4096 and arch in SMALL_SHARED:
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


def block_b(batch):
    return min(SEQUENCES_AT_A_TIME, 1 << (max(1, batch) - 1).bit_length())


def reach_of(windows, q_len):
    """Most keys that q_len tokens can see under ``windows``, whatever the length."""
    if windows is None or len(windows) != 1:
        return UNLIMITED
    start, stop, sink, left = windows.flat
    return min(UNLIMITED, sink + left + q_len) if start == 0 and stop == UNLIMITED else UNLIMITED


def frozen(config):
    """``config`` as a key of a cache; TypeError when it is no dict."""
    return None if config is None else tuple(sorted(merge_config(RUNG, {}, config).items()))
