"""What step 07 checks beyond the contract, and where its kernels come from."""

import importlib

from ladder.contract import INTEGERS, expect
from ladder.step05_fused.attention import check_device

RUNG = "step07_dflash1"


def check_out_index(out_index, q):
    """Check where rows go; returns top_k."""
    expect(RUNG, "out_index", out_index, (q.shape[0], "top_k"), INTEGERS, q.device, contiguous=True)
    if not out_index.shape[1]:
        raise ValueError(f"{RUNG}: out_index has shape {tuple(out_index.shape)}; want at least one column")
    return out_index.shape[1]


def check_rows(name, index, rows):
    """ValueError when an entry of ``index`` is not below ``rows``; on a CPU only, for it reads the entries."""
    if index.device.type == "cpu" and index.numel() and (most := int(index.max())) >= rows:
        wanted = f"at most {rows - 1}, the last row of out, or below 0 for none"
        raise ValueError(f"{RUNG}: {name} holds {most}; want {wanted}")


def device_code(q, module="kernel"):
    """A module of kernels, imported on first use, once it is checked that they can run on ``q``."""
    check_device(RUNG, q)
    return importlib.import_module(f"ladder.step07_dflash1.{module}")
