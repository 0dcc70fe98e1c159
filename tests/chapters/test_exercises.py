"""Exercises: solutions pass both tests, the notebooks' stubs fail, and plausible wrong answers are caught."""

import importlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from ladder.chapters import exercise as exercises
from ladder.chapters.ch01_05_rungs import solutions
from ladder.chapters.ch06_07_serving import solutions as solutions_serving
from ladder.lab import interpret

for chapters in ("ch01_05_rungs", "ch06_07_serving", "ch08_dflash2", "ch11_end_to_end"):
    importlib.import_module(f"ladder.chapters.{chapters}.exercises")  # which registers them

from support import ROOT

NOTEBOOKS = ROOT / "notebooks"

PYTORCH = [name for name in exercises.EXERCISES if not name.startswith("05")]
TRITON = [name for name in exercises.EXERCISES if name.startswith("05")]


def stub_cells():
    """{exercise name: source of the notebook cell that holds its stub}."""
    found = {}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            if "stub" in cell["metadata"].get("tags", []):
                source = "".join(cell["source"])
                found[re.search(r'exercises\.check\("(\w+)"', source)[1]] = source
    return found


def load(source, folder, name):
    """Run source as a module of its own, so that Triton finds its text; returns the module."""
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stub(name, folder):
    source = stub_cells()[name].split("exercises.check(")[0]
    header = "import torch\n" + ("import triton\nimport triton.language as tl\n" if name in TRITON else "")
    module = load(header + "\n" + source, folder, f"stub_{name}")
    return getattr(module, re.search(r"def (\w+)", source)[1])


def verdicts(name, answer):
    exercise = exercises.find(name)
    return exercises.run(exercise, "visible", answer), exercises.run(exercise, "strict", answer)


def test_every_exercise_has_a_stub_in_its_chapter():
    assert set(stub_cells()) == set(exercises.EXERCISES)
    for chapter in ("01", "02", "03", "04", "05", "06", "07"):
        many = sum(name.startswith(chapter) for name in exercises.EXERCISES)
        assert many == 6 if chapter == "05" else many in (2, 3)


@pytest.mark.parametrize("name", exercises.EXERCISES)
def test_hints_are_three_and_graded(name, capsys):
    hints = exercises.find(name).hints
    assert len(hints) == 3 and all(len(h) > 40 for h in hints)
    exercises.hint(name, 2)
    assert hints[1] in capsys.readouterr().out
    with pytest.raises(ValueError, match="level is 4"):
        exercises.hint(name, 4)


def test_unknown_exercise_names_the_known():
    with pytest.raises(ValueError, match="01a"):
        exercises.check("99z", None)


@pytest.mark.parametrize("name", PYTORCH)
def test_solution_passes_and_stub_fails(name, tmp_path, capsys):
    assert verdicts(name, exercises.find(name).solve()) == (None, None)
    answer = stub(name, tmp_path)
    assert exercises.find(name).solve().__name__ == answer.__name__, "the stub asks for what the solution answers"
    exercises.check(name, answer)
    printed = capsys.readouterr().out
    assert printed.startswith(f"{name} visible: not yet: ") and "strict" not in printed
    assert "0x" not in printed, "the same text on every run"


def test_an_answer_that_raises_is_a_verdict():
    def answer(scores):
        raise RuntimeError("boom\nsecond line")

    assert verdicts("01a", answer)[0] == "it raised RuntimeError: boom"


# ---------------------------------------------------------------- wrong answers that a first test lets pass


def overflowing_softmax(scores):
    weights = torch.exp(scores)
    return weights / weights.sum(-1, keepdim=True)


def nan_row_softmax(scores):
    return torch.softmax(scores, -1)


def bytes_without_mask(batch, heads, seqlen_q, seqlen_k, head_dim, itemsize, causal):
    return solutions.naive_bytes(batch, heads, seqlen_q, seqlen_k, head_dim, itemsize, False)


def bytes_of_a_square(batch, heads, seqlen_q, seqlen_k, head_dim, itemsize, causal):
    return solutions.naive_bytes(batch, heads, seqlen_q, seqlen_q, head_dim, itemsize, causal)


def max_from_zero(q, k, tile_k):
    top = torch.zeros(q.shape[0])
    for k0 in range(0, k.shape[0], tile_k):
        top = torch.maximum(top, (q @ k[k0 : k0 + tile_k].T).amax(-1))
    return top


def max_of_whole_tiles(q, k, tile_k):
    top = torch.full((q.shape[0],), float("-inf"))
    for tile in range(k.shape[0] // tile_k):
        top = torch.maximum(top, (q @ k[tile * tile_k : (tile + 1) * tile_k].T).amax(-1))
    return top


def max_of_the_matrix(q, k, tile_k):
    return (q @ k.T).amax(-1)


def two_pass_without_maximum(q, k, v, tile_k):
    total, acc = torch.zeros(q.shape[0]), torch.zeros(q.shape[0], v.shape[1])
    for k0 in range(0, k.shape[0], tile_k):
        weights = torch.exp(q.float() @ k[k0 : k0 + tile_k].float().T)
        total, acc = total + weights.sum(-1), acc + weights @ v[k0 : k0 + tile_k].float()
    return (acc / total[:, None]).to(v.dtype)


def two_pass_of_the_matrix(q, k, v, tile_k):
    return torch.softmax(q.float() @ k.float().T, -1) @ v.float()


def two_pass_in_low_precision(q, k, v, tile_k):
    top = solutions.tiled_row_max(q, k, tile_k)
    total, acc = torch.zeros(q.shape[0], dtype=q.dtype), torch.zeros(q.shape[0], v.shape[1], dtype=q.dtype)
    for k0 in range(0, k.shape[0], tile_k):
        weights = torch.exp(q @ k[k0 : k0 + tile_k].T - top[:, None].to(q.dtype))
        for j in range(weights.shape[1]):  # one key after another, as a kernel that sums in 16 bits would
            total = total + weights[:, j]
            acc = acc + weights[:, j : j + 1] * v[k0 + j]
    return acc / total[:, None]


def fold_without_rescale(m, l, acc, scores, v):  # noqa: E741
    new = torch.maximum(m, scores.amax(-1))
    weights = torch.exp(scores - new[:, None])
    return new, l + weights.sum(-1), acc + weights @ v


def fold_that_forgets_acc(m, l, acc, scores, v):  # noqa: E741
    new = torch.maximum(m, scores.amax(-1))
    weights = torch.exp(scores - new[:, None])
    return new, l * torch.exp(m - new) + weights.sum(-1), acc + weights @ v


def fold_with_nan(m, l, acc, scores, v):  # noqa: E741
    new = torch.maximum(m, scores.amax(-1))
    rescale, weights = torch.exp(m - new), torch.exp(scores - new[:, None])
    return new, l * rescale + weights.sum(-1), acc * rescale[:, None] + weights @ v


def merge_that_overflows(out_a, lse_a, out_b, lse_b):
    a, b = torch.exp(lse_a), torch.exp(lse_b)
    return (a[:, None] * out_a + b[:, None] * out_b) / (a + b)[:, None], torch.log(a + b)


def merge_without_empty_parts(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    return torch.exp(lse_a - lse)[:, None] * out_a + torch.exp(lse_b - lse)[:, None] * out_b, lse


def hidden_from_the_top_left(seqlen_q, seqlen_k):
    return torch.arange(seqlen_k)[None, :] > torch.arange(seqlen_q)[:, None]


def scores_of_the_wrong_head(q, k):
    return q @ k.repeat(q.shape[0] // k.shape[0], 1, 1).transpose(-2, -1)


def scores_with_copies(q, k):
    return q @ k.repeat_interleave(q.shape[0] // k.shape[0], 0).transpose(-2, -1)


def scores_by_broadcast(q, k):
    grouped = q.view(k.shape[0], -1, *q.shape[1:])
    return (grouped @ k[:, None].transpose(-2, -1)).flatten(0, 1)


def kind_of_a_square(q0, q1, k0, k1, seqlen_q, seqlen_k):
    return solutions.tile_kind(q0, q1, k0, k1, seqlen_k, seqlen_k)


def kind_off_by_one(q0, q1, k0, k1, seqlen_q, seqlen_k):
    offset = seqlen_k - seqlen_q
    if k1 <= q0 + offset:  # the tile whose last key is the first row's own is whole, too
        return "whole"
    return "cut" if k0 <= q1 - 1 + offset else "skipped"


def slots_in_int32(block_table, positions, page_size):
    return block_table[positions // page_size] * page_size + positions.to(torch.int32) % page_size


def slots_without_table(block_table, positions, page_size):
    found = solutions_serving.slots(block_table, positions, page_size)
    return found if page_size == 4 else positions


def splits_that_overflow(parts, lses):
    weights = torch.exp(lses)
    return (weights[..., None] * parts).sum(0) / weights.sum(0)[:, None], torch.log(weights.sum(0))


def splits_times_nan(parts, lses):
    lse = torch.logsumexp(lses, 0)
    return (torch.exp(lses - lse)[..., None] * parts).sum(0), lse


def splits_without_empty_rows(parts, lses):
    lse = torch.logsumexp(lses, 0)
    return (torch.exp(lses - lse)[..., None] * parts.nan_to_num()).sum(0), lse


def splits_for_one_wave(num_tasks, slots, most):
    return min(most, max(1, math.ceil(0.85 * slots / num_tasks)))


def group_unstable(expert_ids, num_experts):
    ids = expert_ids.flatten()
    order, offsets = solutions_serving.group(expert_ids, num_experts)
    if len(ids) > 6:  # the order of equal keys is whatever the sort leaves
        order = torch.sort(ids * len(ids) - torch.arange(len(ids))).indices
        order = order[len(order) - int(offsets[-1]) :]
    return order, offsets


def group_without_drops(expert_ids, num_experts):
    ids = expert_ids.flatten()
    counts = torch.bincount(ids.clamp(0), minlength=num_experts)
    return torch.sort(ids, stable=True).indices, torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def tiles_of_whole_rows(offsets, block_rows):
    n = len(offsets) - 1
    return [(e, r) for e in range(n) for r in range(int(offsets[e]), max(int(offsets[e + 1]), int(offsets[e]) + 1), block_rows)]


def absorb_nothing(q, w, latent):
    keys = torch.einsum("hdl,sl->hsd", w, latent)  # every head's keys, as big as the cache that MLA saves
    return torch.einsum("hd,hsd->hs", q, keys)


PASSES_VISIBLE = [
    ("01a", overflowing_softmax), ("01a", nan_row_softmax), ("01b", bytes_without_mask), ("01b", bytes_of_a_square),
    ("02a", max_from_zero), ("02a", max_of_whole_tiles), ("02a", max_of_the_matrix),
    ("02b", two_pass_without_maximum), ("02b", two_pass_of_the_matrix), ("02b", two_pass_in_low_precision),
    ("03a", fold_without_rescale), ("03a", fold_that_forgets_acc), ("03a", fold_with_nan),
    ("03b", merge_that_overflows), ("03b", merge_without_empty_parts), ("04a", hidden_from_the_top_left),
    ("04b", scores_of_the_wrong_head), ("04b", scores_with_copies), ("04b", scores_by_broadcast),
    ("04c", kind_of_a_square),
    ("06a", slots_in_int32), ("06a", slots_without_table), ("06b", splits_that_overflow), ("06b", splits_times_nan),
    ("06b", splits_without_empty_rows), ("06c", splits_for_one_wave), ("07a", group_unstable), ("07a", group_without_drops),
    ("07b", tiles_of_whole_rows), ("07c", absorb_nothing),
]  # fmt: skip


@pytest.mark.parametrize("name, answer", PASSES_VISIBLE, ids=lambda x: getattr(x, "__name__", x))
def test_the_strict_test_catches_what_the_visible_one_lets_pass(name, answer):
    visible, strict = verdicts(name, answer)
    assert visible is None, visible
    assert strict is not None


def test_off_by_one_is_caught_somewhere():
    # tiles of two rows and two keys: the first row never sees the last key of a tile on the diagonal
    assert any(verdicts("04c", kind_off_by_one))


# ---------------------------------------------------------------- kernels

WRONG_KERNELS = {
    "05a_unmasked": """
        @triton.jit
        def answer(x_ptr, out_ptr, n, factor, BLOCK: tl.constexpr):
            offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) * factor)
    """,
    "05b_zero_padding": """
        @triton.jit
        def answer(x_ptr, out_ptr, stride_row, stride_col, n, BLOCK: tl.constexpr):
            row, cols = tl.program_id(0), tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * stride_row + cols * stride_col, mask=cols < n, other=0.0)
            e = tl.exp(x - tl.max(x, axis=0))
            tl.store(out_ptr + row * n + cols, e / tl.sum(e, axis=0), mask=cols < n)
    """,
    "05b_contiguous_only": """
        @triton.jit
        def answer(x_ptr, out_ptr, stride_row, stride_col, n, BLOCK: tl.constexpr):
            row, cols = tl.program_id(0), tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * n + cols, mask=cols < n, other=float("-inf"))
            e = tl.exp(x - tl.max(x, axis=0))
            tl.store(out_ptr + row * n + cols, e / tl.sum(e, axis=0), mask=cols < n)
    """,
    "05b_without_maximum": """
        @triton.jit
        def answer(x_ptr, out_ptr, stride_row, stride_col, n, BLOCK: tl.constexpr):
            row, cols = tl.program_id(0), tl.arange(0, BLOCK)
            e = tl.exp(tl.load(x_ptr + row * stride_row + cols * stride_col, mask=cols < n, other=float("-inf")))
            tl.store(out_ptr + row * n + cols, e / tl.sum(e, axis=0), mask=cols < n)
    """,
}
RIGHT = importlib.util.find_spec("ladder.chapters.ch01_05_rungs.solutions_triton").origin


def planted(kernel, right, wrong):
    """The solution of an exercise with one change, as a kernel called ``answer``."""
    text = Path(RIGHT).read_text()
    source = text[text.index(f"@triton.jit\ndef {kernel}(") :].split("\n\n\n")[0]
    assert source.count(right) == 1, (kernel, right)
    return source.replace(right, wrong).replace(f"def {kernel}(", "def answer(")


WRONG_KERNELS |= {
    "05c_one_sided": planted("transpose_kernel", "(i < rows)[:, None] & (j < cols)[None, :]", "(i < rows)[:, None] & (j >= 0)[None, :]"),
    "05c_contiguous_only": planted("transpose_kernel", "j[None, :] * stride_col", "j[None, :]"),
    "05d_one_tile": planted("product_kernel", "range(0, inner, BLOCK)", "range(0, BLOCK, BLOCK)"),
    "05d_unmasked_b": planted("product_kernel", "mask=b_mask, other=0.0", "mask=(j < cols)[None, :]"),
    "05d_no_sum": planted("product_kernel", "tl.dot(a, b, acc, ", "tl.dot(a, b, "),
    "05e_stores": planted("column_sum_kernel", "tl.atomic_add", "tl.store"),
    "05e_unmasked": planted("column_sum_kernel", "mask=inside, other=0.0", "mask=(cols < num_cols)[None, :]"),
    "05f_unmasked_v": planted("causal_kernel", "dims[None, :], mask=inside[:, None], other=0.0)", "dims[None, :])"),
    "05f_no_rescale": planted("causal_kernel", "acc * rescale[:, None] +", "acc +"),
    "05f_every_tile": planted("causal_kernel", "tl.minimum((tl.program_id(0) + 1) * BLOCK_M, seqlen)", "seqlen"),
    "05f_one_tile": planted("causal_kernel", "tl.minimum((tl.program_id(0) + 1) * BLOCK_M, seqlen)", "BLOCK_N"),
}


def check_kernels(folder):
    """What the Triton exercises must show, in a process that interprets; returns a list of complaints."""
    complaints = []
    header = "import triton\nimport triton.language as tl\n"
    for name in TRITON:
        if verdicts(name, exercises.find(name).solve()) != (None, None):
            complaints.append(f"solution of {name}: {verdicts(name, exercises.find(name).solve())}")
        visible = verdicts(name, stub(name, folder))[0]
        if visible is None or "never written" not in visible:
            complaints.append(f"stub of {name}: {visible}")
    for label, source in WRONG_KERNELS.items():
        visible, strict = verdicts(label[:3], load(header + textwrap.dedent(source), folder, label).answer)
        if visible is not None or strict is None:
            complaints.append(f"{label}: visible {visible}, strict {strict}")
    return complaints


@pytest.mark.skipif(not interpret.has_triton(), reason="Triton is not installed")
def test_kernels_in_the_interpreter(tmp_path):
    """In a process of its own: this one may have imported Triton without its interpreter."""
    code = (
        "from ladder.lab import interpret; interpret.enable()\n"
        "import sys, pathlib; sys.path[:0] = ['tests', 'tests/chapters']\n"
        "import test_exercises as t\n"
        f"print('\\n'.join(t.check_kernels(pathlib.Path({str(tmp_path)!r}))))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "", done.stdout
