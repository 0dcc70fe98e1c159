# ruff: noqa: E501  (rows of a table)
"""Classic attention bugs, planted one at a time into a rung's source: the edge matrix has to catch every one.

A mutant is a copy of the rung's package in which one piece of text is another. Each mutant names the case that catches
it; ``test_rungs.py`` shows that the rung itself passes these cases.
"""

import importlib
import inspect
import itertools
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.checks import CASES, DEVICE, check, small_tiles
from support.ragged import LENGTHS, check_ragged
from support.step08_checks import WINDOWS, WindowOracle

from ladder.lab.parity import nan_allocations
from ladder.lab.problem import AttentionProblem
from ladder.rungs import find
from ladder.step08_dflash2.windows import RangeWindows


@dataclass(frozen=True)
class Mutant:
    rung: int
    bug: str
    old: str
    new: str
    case: str
    file: str = "attention.py"
    times: int = 1  # how often ``old`` stands in the file


MUTANTS = (
    Mutant(1, "scale forgotten", "(q * scale)", "q", "dense 17x33"),
    Mutant(1, "mask one too wide", "seqlen_k - seqlen_q + 1", "seqlen_k - seqlen_q + 2", "causal 17x33"),
    Mutant(1, "mask one too narrow", "seqlen_k - seqlen_q + 1", "seqlen_k - seqlen_q", "causal 17x33"),
    Mutant(1, "aligned to the top left", "seqlen_k - seqlen_q + 1", "1", "causal 17x33"),
    Mutant(1, "finite sentinel", 'float("-inf")', "-1e4", "sunken logits causal"),
    Mutant(1, "rows that see nothing are NaN", "if causal and seqlen_q > seqlen_k", "if False", "rows that see nothing"),
    Mutant(1, "softmax over the queries", "torch.softmax(scores, dim=-1)", "torch.softmax(scores, dim=-2)", "dense 15x15"),
    #
    Mutant(2, "scale forgotten", ".float() * scale", ".float()", "dense 17x33"),
    Mutant(2, "maximum of the last tile", "torch.maximum(row_max, scores.amax(dim=-1))", "scores.amax(dim=-1)", "huge logits"),
    Mutant(2, "sum of the last tile", "row_sum += probs", "row_sum = probs", "dense 17x33"),
    Mutant(2, "mask one too wide", "query[:, None] + offset", "query[:, None] + offset + 1", "causal 17x33"),
    Mutant(2, "aligned to the top left", "query[:, None] + offset", "query[:, None]", "causal 17x33"),
    Mutant(2, "finite sentinel in the mask", 'offset, float("-inf")', "offset, -1e4", "sunken logits causal"),
    Mutant(2, "finite sentinel for the maximum", 'rows, float("-inf")', "rows, -1e4", "sunken logits"),
    Mutant(2, "tile position forgotten", "torch.arange(k0, k0 + k_tile.shape[2]", "torch.arange(k_tile.shape[2]", "causal 17x33"),
    Mutant(2, "division by zero", "masked_fill(row_sum == 0, 1.0)", "clone()", "rows that see nothing"),
    Mutant(2, "last rows of the output not written", "range(0, seqlen_q, tile_q)", "range(0, seqlen_q - tile_q + 1, tile_q)",
           "dense 33x17"),
    #
    Mutant(3, "accumulator not rescaled", "acc *= rescale[..., None]", "pass", "rising logits"),
    Mutant(3, "sum not rescaled", "row_sum * rescale +", "row_sum +", "rising logits"),
    Mutant(3, "rescale upside down", "torch.exp(row_max - finite_max)", "torch.exp(finite_max - row_max)", "rising logits"),
    Mutant(3, "maximum of the tile alone", "torch.maximum(row_max, scores.amax(dim=-1))", "scores.amax(dim=-1)", "huge logits"),
    Mutant(3, "-inf - -inf", 'new_max.masked_fill(new_max == float("-inf"), 0.0)', "new_max", "rows that see nothing"),
    Mutant(3, "scale forgotten", ".float() * scale", ".float()", "scale 3.0"),
    Mutant(3, "mask one too narrow", "key > query[:, None] + offset", "key >= query[:, None] + offset", "causal 33x17"),
    Mutant(3, "aligned to the top left", "query[:, None] + offset", "query[:, None]", "causal 33x17"),
    Mutant(3, "finite sentinel in the mask", 'offset, float("-inf")', "offset, -1e4", "sunken logits causal"),
    Mutant(3, "log-sum-exp in base 2", "torch.log(row_sum)", "torch.log2(row_sum)", "dense 17x33"),
    Mutant(3, "log-sum-exp without the maximum", "row_max + torch.log", "torch.log", "dense 17x33"),
    #
    Mutant(4, "KV head h % Hkv", "q_tile.reshape(batch, num_kv_heads, group * (q1 - q0), head_dim)",
           "q_tile.unflatten(1, (group, num_kv_heads)).transpose(1, 2).reshape(batch, num_kv_heads, group * (q1 - q0), head_dim)",
           "6 heads on 2"),
    Mutant(4, "rows are position-major", ".repeat(group)", ".repeat_interleave(group)", "12 heads on 2"),
    Mutant(4, "loop ends one key early", "q1 + offset)", "q1 + offset - 1)", "causal 17x33"),
    Mutant(4, "loop ends at the top-left diagonal", "min(seqlen_k, q1 + offset)", "min(seqlen_k, q1)", "causal 17x33"),
    Mutant(4, "mask one too wide", "query[:, None] + offset", "query[:, None] + offset + 1", "causal 17x33"),
    Mutant(4, "accumulator not rescaled", "acc *= rescale[..., None]", "pass", "rising logits"),
    Mutant(4, "sum not rescaled", "row_sum * rescale +", "row_sum +", "rising logits"),
    Mutant(4, "scale forgotten", ".float() * scale", ".float()", "scale -0.7"),
    Mutant(4, "log-sum-exp in base 2", "torch.log(row_sum)", "torch.log2(row_sum)", "dense 17x33"),
    Mutant(4, "ragged: one key of the next sequence", "as_batch(k[k0:k1]), as_batch(v[k0:k1])",
           "as_batch(k[k0:k1 + 1]), as_batch(v[k0:k1 + 1])", "ragged"),
    Mutant(4, "ragged: query starts used for keys", "as_batch(k[k0:k1])", "as_batch(k[q0:q0 + k1 - k0])", "ragged"),
    Mutant(4, "ragged: mask of the whole batch", "as_batch(q[q0:q1]), as_batch", "as_batch(q[q0:q1]).flip(2), as_batch", "ragged"),
    #
    Mutant(5, "accumulator not rescaled", "acc = acc * rescale[:, None]", "acc = acc", "rising logits", "kernel.py"),
    Mutant(5, "sum not rescaled", "row_sum * rescale +", "row_sum +", "rising logits", "kernel.py"),
    Mutant(5, "mask one too wide", "query[:, None] + causal_offset", "query[:, None] + causal_offset + 1", "causal 17x33", "kernel.py"),
    Mutant(5, "mask one too narrow", "key[None, :] <= query", "key[None, :] < query", "causal 17x33", "kernel.py"),
    Mutant(5, "unmasked tiles one key too far", "tile * BLOCK_M + causal_offset + 1)", "tile * BLOCK_M + causal_offset + 2)",
           "causal 33x47", "kernel.py"),
    Mutant(5, "loop ends one key early", "(tile + 1) * BLOCK_M + causal_offset)", "(tile + 1) * BLOCK_M + causal_offset - 1)",
           "causal 33x34", "kernel.py"),
    Mutant(5, "aligned to the top left", "causal_offset = seqlen_k - seqlen_q", "causal_offset = 0", "causal 17x33", "kernel.py"),
    Mutant(5, "KV head h % Hkv", "head // group_size", "head % (num_heads // group_size)", "6 heads on 2", "kernel.py"),
    Mutant(5, "scale forgotten", "scores * scale_log2 - finite_max", "scores - finite_max", "scale 3.0", "kernel.py"),
    Mutant(5, "scale in base e", "abs(scale) * LOG2_E", "abs(scale)", "scale 3.0"),
    Mutant(5, "sign of the scale forgotten", "SCALE_SIGN=sign", "SCALE_SIGN=1", "scale -0.7"),
    Mutant(5, "finite sentinel in the mask", 'tl.where(visible, scores, float("-inf"))', "tl.where(visible, scores, -1e4)",
           "sunken logits causal", "kernel.py"),
    Mutant(5, "finite sentinel for the maximum", 'tl.full([BLOCK_M], float("-inf"), tl.float32)', "tl.full([BLOCK_M], -1e4, tl.float32)",
           "sunken logits", "kernel.py"),
    Mutant(5, "-inf - -inf", 'tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max", "rows that see nothing", "kernel.py"),
    Mutant(5, "division by zero", "acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]", "acc / row_sum[:, None]",
           "rows that see nothing", "kernel.py"),
    Mutant(5, "log-sum-exp in base 2", " * 0.6931471805599453", "", "dense 17x33", "kernel.py"),
    Mutant(5, "keys past the end are seen", "visible = (key < seqlen_k)[None, :]", "visible = (key >= 0)[None, :]", "dense 17x33", "kernel.py"),
    Mutant(5, "values read past the end", "mask=(key < seqlen_k)[:, None] & (dim_v < HEAD_DIM_V)[None, :]",
           "mask=(dim_v < HEAD_DIM_V)[None, :]", "in_nan dense", "kernel.py"),
    Mutant(5, "dims of K read past the end", "k = tl.load(k_ptrs, mask=(dim < HEAD_DIM)[:, None], other=0.0)", "k = tl.load(k_ptrs)",
           "in_nan dense", "kernel.py"),
    Mutant(5, "last rows not written", "-(-seqlen_q // config", "(seqlen_q // config", "dense 33x17"),
    Mutant(5, "stride of a row assumed", "key.to(tl.int64)[None, :] * stride_kn", "key.to(tl.int64)[None, :] * HEAD_DIM", "bshd", "kernel.py"),
    Mutant(5, "stride of an element assumed", "dim_v.to(tl.int64)[None, :] * stride_vd", "dim_v.to(tl.int64)[None, :]", "dims_first", "kernel.py"),
    Mutant(5, "batch stride of another tensor", "v_ptr + batch * stride_vb", "v_ptr + batch * stride_kb", "batch of 3 grouped", "kernel.py"),
    Mutant(5, "log-sum-exp of the wrong head", "(batch * num_heads + head) * seqlen_q", "(batch + head) * seqlen_q", "batch of 3", "kernel.py"),
    #
    Mutant(8, "accumulator not rescaled", "acc = acc * rescale[:, None]", "acc = acc", "rising logits", "portable/prefill_kernel.py"),
    Mutant(8, "sum not rescaled", "row_sum * rescale +", "row_sum +", "rising logits", "portable/prefill_kernel.py"),
    Mutant(8, "mask one too wide", "<= last_visible[:, None]", "<= last_visible[:, None] + 1", "causal 17x33", "portable/prefill_kernel.py"),
    Mutant(8, "mask one too narrow", "<= last_visible[:, None]", "< last_visible[:, None]", "causal 17x33", "portable/prefill_kernel.py"),
    Mutant(8, "unmasked tiles one key too far", "first_position + right + 1", "first_position + right + 2", "causal 33x47", "portable/prefill_kernel.py"),
    Mutant(8, "loop ends one key early", "last_position + right + 1", "last_position + right", "causal 33x34", "portable/prefill_kernel.py"),
    Mutant(8, "aligned to the top left", "offset = seqlen_k - seqlen_q", "offset = 0", "causal 17x33", "portable/prefill_kernel.py"),
    Mutant(8, "KV head h % Hkv", "kv_head = (head // group_size)", "kv_head = (head % (num_heads // group_size))", "12 heads on 2",
           "portable/prefill_kernel.py"),
    Mutant(8, "sign of the scale forgotten", "-1  # below that", "1  # below that", "scale -0.7", "tiles.py"),
    Mutant(8, "finite sentinel in the mask", 'tl.where(visible, scores, float("-inf"))', "tl.where(visible, scores, -1e4)",
           "sunken logits causal", "portable/prefill_kernel.py"),
    Mutant(8, "-inf - -inf", 'tl.where(new_max == float("-inf"), 0.0, new_max)', "tl.where(new_max < 1e38, new_max, 0.0)", "rows that see nothing",
           "portable/prefill_kernel.py"),
    Mutant(8, "division by zero", "tl.where(row_sum == 0.0, 1.0, row_sum)", "row_sum + 0.0", "rows that see nothing", "portable/prefill_kernel.py"),
    Mutant(8, "log-sum-exp in base 2", " * 0.6931471805599453", "", "dense 17x33", "portable/prefill_kernel.py"),
    Mutant(8, "values read past the end", "v = tl.load(v_ptrs, mask=live & (dim_v < HEAD_DIM_V)[None, :], other=0.0)",
           "v = tl.load(v_ptrs, mask=(dim_v < HEAD_DIM_V)[None, :], other=0.0)", "in_nan dense", "portable/prefill_kernel.py"),
    Mutant(8, "batch stride of another tensor", "v_start += seq64 * stride_vb", "v_start += seq64 * stride_kb", "batch of 3 grouped",
           "portable/prefill_kernel.py"),
    Mutant(8, "last rows not written", "-(-seqlen_q // block_t)", "(seqlen_q // block_t)", "dense 33x17", "prefill.py"),
    Mutant(8, "heads of a packed row mixed up", "(row % PACK).to(tl.int64) * stride_oh", "(PACK - 1 - row % PACK).to(tl.int64) * stride_oh",
           "packed", "portable/prefill_kernel.py"),
    Mutant(8, "ragged: the tile of another sequence", "tile - (first_token // BLOCK_T + seq)", "tile - first_token // BLOCK_T", "ragged",
           "portable/prefill_kernel.py"),
    Mutant(8, "ragged: keys of the first sequence", "k_start += start_k.to(tl.int64) * stride_kn", "k_start += 0", "ragged", "portable/prefill_kernel.py"),
    Mutant(8, "window one key too wide", "low = position - left", "low = position - left - 1", "sink 4, window 7", "portable/prefill_kernel.py"),
    Mutant(8, "window one key too narrow", "low = position - left", "low = position - left + 1", "sink 4, window 7", "portable/prefill_kernel.py"),
    Mutant(8, "window from the top left", "tl.minimum(position, last_position), seqlen_k", "query, seqlen_k", "sliding 5", "portable/prefill_kernel.py"),
    Mutant(8, "sinks of the mask forgotten", " | (key[None, :] < sink[:, None])", "", "sink 4, window 7", "portable/prefill_kernel.py"),
    Mutant(8, "sink tiles not visited", "sink_end = tl.minimum(window, (", "sink_end = tl.minimum(0, (", "sink 4, window 7", "portable/prefill_kernel.py"),
    Mutant(8, "tiles at the left edge without a mask", "tl.max(low, axis=0)", "tl.min(low, axis=0)", "sliding 16", "portable/prefill_kernel.py"),
    Mutant(8, "first tile of the window skipped", "window = tl.minimum(last, first_key // BLOCK_N)",
           "window = tl.minimum(last, (first_key + BLOCK_N - 1) // BLOCK_N)", "sliding 5", "portable/prefill_kernel.py"),
    Mutant(8, "negative positions not counted from the end", "start += tl.where(start < 0, seqlen_k, 0)", "start += 0",
           "a range from the end", "portable/prefill_kernel.py"),
    Mutant(8, "NaN before the window is loaded", "live = live & ((key >= first_key) | (key < last_sink))", "pass", "NaN before the window",
           "portable/prefill_kernel.py"),
    Mutant(8, "softcap after the scale alone", "dflash2_tanh(scores * cap_scale, SOFTCAP == 2)", "dflash2_tanh(scores, SOFTCAP == 2)", "softcap",
           "portable/prefill_kernel.py"),
    Mutant(8, "learned sink counted as a key with a value of its own maximum", 'row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)',
           "row_sum = tl.zeros([BLOCK_M], tl.float32)", "learned sinks", "portable/prefill_kernel.py"),
    Mutant(8, "learned sink in base e", "to(tl.float32) * 1.4426950408889634", "to(tl.float32)", "learned sinks", "portable/prefill_kernel.py"),
    Mutant(8, "learned sink of the first head for all", "(head + row % PACK) * stride_sink", "0", "learned sinks", "portable/prefill_kernel.py"),
)  # fmt: skip

_count = itertools.count()


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """plant(mutant) -> the module of the mutated package, importable until the test ends."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def plant(mutant):
        package = f"mutant_{next(_count)}"
        names.append(package)
        source = Path(find(mutant.rung).module.__file__).parent
        shutil.copytree(source, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
        file = tmp_path / package / mutant.file
        text = file.read_text()
        found = text.count(mutant.old)
        assert found == mutant.times, f"the text to change stands {found} times in {mutant.file}"
        assert mutant.old != mutant.new
        file.write_text(text.replace(mutant.old, mutant.new))
        importlib.invalidate_caches()
        module = importlib.import_module(package)
        assert Path(inspect.unwrap(module.attention).__code__.co_filename).parent == tmp_path / package
        return module

    yield plant
    for name in [n for n in sys.modules if n.split(".")[0] in names]:
        del sys.modules[name]


# Cases that rung 08 alone can compute: the problem's shape, and how attention is called.
STEP08 = {
    "packed": (dict(Hq=6, Hkv=2, Sq=3, Sk=40), {}),
    "softcap": (dict(Sq=20, Sk=40), dict(softcap=3.0)),
    "learned sinks": (dict(Hq=6, Hkv=2, Sq=20, Sk=40), dict(sinks=torch.linspace(-2, 3, 6))),
    "a range from the end": (dict(Sq=40, Sk=50), dict(windows=RangeWindows([(-20, -7, 2, 6)]))),
    "NaN before the window": (dict(Sq=5, Sk=60), dict(windows=WINDOWS["sliding 5"])),
    "sliding 16": (dict(Sq=40, Sk=47), dict(windows=WINDOWS["sliding 16"])),  # a window's edge on that of a tile
    **{name: (dict(Sq=40, Sk=50), dict(windows=WINDOWS[name])) for name in ("sliding 5", "sink 4, window 7")},
}


def check_step08(module, case):
    """The windows of the planted package are the original's class, which its check would not know: they are made anew."""
    shape, options = STEP08[case]
    q, k, v = AttentionProblem(**{**dict(Hq=2, Hkv=1, D=16, Dv=16, causal=True), **shape}).make(DEVICE)
    if case == "NaN before the window":
        k[:, :, :50], v[:, :, :50] = float("nan"), float("nan")
    call = {name: x.to(DEVICE) if name == "sinks" else x for name, x in options.items()}
    if "windows" in call:
        call["windows"] = module.RangeWindows(call["windows"].ranges)
    with small_tiles(module.attention) as attention, nan_allocations():
        out, lse = attention(q, k, v, causal=True, return_lse=True, **call)
    parity = WindowOracle(q, k, v, right=0, **{**options, **{n: x for n, x in call.items() if n == "sinks"}}).check(out, lse)
    assert parity, parity.reason


def check_mutant(module, case):
    """The checks of ``test_rungs.py`` on a planted module, with small tiles so that several are crossed."""
    if case in STEP08:
        check_step08(module, case)
    elif case == "ragged":
        with small_tiles(module.attention):
            entry = module.dflash2_varlen if hasattr(module, "dflash2_varlen") else module.attention_varlen
            check_ragged(entry, *LENGTHS["mixed"], causal=True)
    else:
        check(module.attention, CASES[case], small=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"step{m.rung:02}-{m.bug}")
@pytest.mark.filterwarnings("ignore")  # a broken kernel may also warn
def test_bug_is_caught(plant, mutant):
    module = plant(mutant)
    with pytest.raises(AssertionError) as caught:
        check_mutant(module, mutant.case)
    words = ("max error", "not finite", "lse", "not 0", "log-sum-exp")
    assert any(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("rung", (*range(1, 6), 8))
def test_a_copy_without_a_bug_passes(plant, rung):
    """The control: what catches the mutants is the bug, not the copying."""
    old = {1: "(q * scale) @", 2: "acc = q.new_zeros", 3: "acc *= rescale", 4: "acc *= rescale"}.get(rung, "acc = acc * rescale")
    file = {5: "kernel.py", 8: "portable/prefill_kernel.py"}.get(rung, "attention.py")
    module = plant(Mutant(rung, "none", old, old.replace(" ", "  ", 1), "", file))
    assert module.attention is not find(rung).attention
    for case in sorted({m.case for m in MUTANTS if m.rung == rung}):
        check_mutant(module, case)
