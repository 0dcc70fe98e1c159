"""Tile sizes, splits and the scale of a launch of step 07: arithmetic on shapes, no tensor is touched."""

import torch

MIN_SPLIT_KEYS = 256  # fewer are read faster than their partial result is merged


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
        tail = head_dim - head_dim_v
        block_d, tail_d = head_dim_v, max(16, 1 << (tail - 1).bit_length()) if tail else 0
    widest = max(block_d + tail_d, block_dv)
    block_m = max(16, min(64, 1 << (max(1, rows) - 1).bit_length()))
    if itemsize == 4:
        block_m, block_n = 16, 32 if widest <= 64 else 16
        num_warps, num_stages = 4 if widest <= 128 else 8 if widest <= 256 else 16, 1
    elif widest > 256:
        block_n, num_warps, num_stages = (32, 4, 3) if block_m <= 32 else (64, 8, 2)
        if block_m == 16 and arch == 90:
            num_stages = 5
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
    # The last three: a tile never steps from one sequence or page to the next, and packed keys have no such stride.
    wide = any(abs(s) * max(256, x.shape[-1]) >= 1 << 30 for x in (k, v) for s in x.stride()[-3:])
    return dict(ALIGNED=unit if aligned else 0, WIDE=wide)


def _fit_page(block_n, page_size):
    """The tile that lets one lookup serve it: the page where that is a smaller power of two, at least 16."""
    return page_size if 16 <= page_size < block_n and page_size & (page_size - 1) == 0 else block_n


def few(tasks, capacity, num_processors):
    """Whether even the most splits leave no two programs to a processor."""
    return tasks * max(1, capacity // MIN_SPLIT_KEYS) <= num_processors
