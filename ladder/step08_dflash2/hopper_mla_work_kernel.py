"""Device code that tells a program of the MLA kernels for sm_90 which keys of which sequence are its work."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

KEYS = gl.constexpr(64)  # of a tile
PLAIN = (  # lengths and strides: values, never reasons to compile again
    "stride_ob", "stride_om", "stride_oh", "stride_pages", "batch", "num_heads", "q_len", "capacity", "num_slots", "num_splits",
    "target", "most", "min_tiles", "right",
)  # fmt: skip


@gluon.jit
def dflash2_mla_tiles(length, capacity):
    """Tiles of a sequence; none when no page holds its length."""
    return gl.where((length < 0) | (length > capacity), 0, (length + KEYS - 1) // KEYS)


@gluon.jit
def dflash2_mla_splits(tiles, chunk):
    return gl.maximum(1, (2 * tiles + chunk) // (2 * chunk))


@gluon.jit
def dflash2_mla_add(a, b):
    return a + b


@gluon.jit
def dflash2_mla_slot(slot, seq_lens_ptr, batch, capacity, target, most, min_tiles, num_splits, num_slots, FOUND: gl.constexpr, BLOCK_B: gl.constexpr):
    """(sequence, split, splits of it, slots in use) of a slot, as ``decode_kernel.dflash2_find``; sequence ``batch`` is no work."""
    if FOUND:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        total = 0
        longest = 0
        for first in range(0, batch, BLOCK_B):
            b = first + gl.arange(0, BLOCK_B, LAYOUT)
            tiles = dflash2_mla_tiles(gl.load(seq_lens_ptr + b, mask=b < batch, other=0), capacity)
            total += gl.sum(tiles, 0)
            longest = gl.maximum(longest, gl.max(tiles, 0))
        mean = (total + batch - 1) // batch
        wanted = gl.where(longest * 4 > mean * 5, most, target)
        chunk = gl.maximum(min_tiles, (total + wanted - 1) // wanted)
        seq = 0
        before = 0
        used = 0
        for first in range(0, batch, BLOCK_B):
            b = first + gl.arange(0, BLOCK_B, LAYOUT)
            tiles = dflash2_mla_tiles(gl.load(seq_lens_ptr + b, mask=b < batch, other=0), capacity)
            wants = gl.where(b < batch, dflash2_mla_splits(tiles, chunk), 0)
            done = (b < batch) & (used + gl.associative_scan(wants, 0, dflash2_mla_add) <= slot)
            seq += gl.sum(done.to(gl.int32), 0)
            before += gl.sum(gl.where(done, wants, 0), 0)
            used += gl.sum(wants, 0)
        mine = gl.load(seq_lens_ptr + seq, mask=seq < batch, other=0)
        split = slot - before
        splits = dflash2_mla_splits(dflash2_mla_tiles(mine, capacity), chunk)
    else:
        used = num_slots
        seq = slot // num_splits
        split = slot % num_splits
        mine = gl.load(seq_lens_ptr + seq, mask=seq < batch, other=0)
        splits = gl.maximum(1, gl.minimum(num_splits, dflash2_mla_tiles(mine, capacity)))
    return seq, split, splits, used


@gluon.jit
def dflash2_mla_work(slot, seq_lens_ptr, batch, capacity, target, most, min_tiles, num_splits, num_slots, FOUND: gl.constexpr, BLOCK_B: gl.constexpr):
    """(sequence, split, splits of it, first tile, the one after the last, length, whether no page holds it, slots in use)."""
    seq, split, splits, used = dflash2_mla_slot(
        slot, seq_lens_ptr, batch, capacity, target, most, min_tiles, num_splits, num_slots, FOUND, BLOCK_B
    )
    length = gl.load(seq_lens_ptr + seq, mask=seq < batch, other=0)
    beyond = (length < 0) | (length > capacity)
    length = gl.where(beyond, 0, length)
    tiles = dflash2_mla_tiles(length, capacity)
    return seq, split, splits, tiles * split // splits, tiles * (split + 1) // splits, length, beyond, used


@gluon.jit
def dflash2_mla_next(work, works, counter_ptr):
    """The work after ``work``, or -1. One program for each work needs no counter; else all draw numbers from it."""
    following = -1
    if works > gl.num_programs(0):
        ticket = gl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")
        if ticket == works - 1:  # every program draws one number too many: the last draw leaves the counter at zero
            gl.store(counter_ptr, 0)
        following = ticket + gl.num_programs(0)
        following = gl.where(following < works, following, -1)
    return following
