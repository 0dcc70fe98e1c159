"""Step 08 as a library: what it exports, what it refuses, torch.compile, explain and warmup, what importing costs."""

import importlib
import inspect
import json

import pytest
import torch
from support.process import WITHOUT_TRITON, python
from support.step08_checks import DEVICE, ON_GPU, WINDOWS

import ladder.step08_dflash2 as step08
from ladder.contract import check_starts
from ladder.lab.decode_problem import DecodeProblem
from ladder.lab.problem import MINILM, AttentionProblem
from ladder.step08_dflash2 import (
    RangeWindows,
    decision,
    dflash2_attention,
    dflash2_paged_prefill,
    dflash2_varlen,
    dispatch,
    eager,
    explain,
    warmup,
)
from ladder.step08_dflash2.dispatch import device_code
from ladder.step08_dflash2.hopper import prefill as hopper
from ladder.step08_dflash2.tiles import launch_config, scale_factors

explaining = importlib.import_module("ladder.step08_dflash2.explain")  # whose name in the package is the function's
WINDOW = WINDOWS["sink 4, window 7"]
HOPPER = dispatch.Machine(90, 132, True)


@pytest.fixture(params=("kernel", "eager"))
def path(request, monkeypatch):
    """Both implementations that a machine has: on a GPU the kernels alone."""
    if request.param == "eager":
        if ON_GPU:
            pytest.skip("CUDA tensors have no eager path")
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return request.param


def dense_inputs(dtype="float16", **changes):
    return AttentionProblem(**{**dict(Hq=4, Hkv=2, Sq=9, Sk=20, D=16, Dv=8, dtype=dtype), **changes}).make(DEVICE)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def packed_inputs():
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in dense_inputs())
    return q, k, v, int32(0, 3, 9), int32(0, 5, 20)


def paged_inputs():
    inputs = DecodeProblem(B=2, Hq=4, Hkv=2, D=16, Dv=8, page_size=8, dtype="float16", lengths=(5, 20), max_context=32).make(DEVICE)
    return packed_inputs()[0], inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.seq_lens, int32(0, 3, 9)


ENTRIES = {
    "attention": (dflash2_attention, dense_inputs),
    "varlen": (dflash2_varlen, packed_inputs),
    "paged_prefill": (dflash2_paged_prefill, paged_inputs),
}
OPTIONS = {
    "plain": dict(causal=True),
    "windows": dict(causal=True, windows=WINDOW),
    "everything": dict(causal=False, windows=WINDOW, softcap=3.0, scale=-0.3, sinks=torch.linspace(-1, 1, 4, device=DEVICE)),
}


def alike(a, b):
    """Equal in every bit: the same path was taken twice."""
    a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


# Exports and imports


def test_exports():
    assert {"attention", "dflash2_attention", "dflash2_varlen", "dflash2_paged_prefill", "dflash2_decode", "dflash2_mla_decode",
            "RangeWindows", "fused_qkv_rope_append", "fused_norm_router", "warmup", "explain"} <= set(step08.__all__)  # fmt: skip
    assert set(step08.__all__) <= set(dir(step08))
    assert len(set(step08.__all__)) == len(step08.__all__)
    assert step08.attention is dflash2_attention
    with pytest.raises(AttributeError, match="has no attribute 'dflash3_attention'"):
        _ = step08.dflash3_attention


@pytest.mark.parametrize("name", ENTRIES)
def test_keywords_and_docstrings(name):
    function = ENTRIES[name][0]
    keywords = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert [p.name for p in keywords] == ["causal", "scale", "windows", "softcap", "sinks", "return_lse", "out", "right"]
    assert [p.default for p in keywords] == [name == "paged_prefill", None, None, 0.0, None, False, None, None]
    for word in ("Args:", "Returns:", "Raises:", "Source:"):
        assert word in function.__doc__, f"{name} lacks {word}"


def test_runs_without_triton():
    out = python(
        WITHOUT_TRITON
        + """
import torch
from ladder.lab.parity import Oracle
from ladder.lab.problem import MINILM
from ladder.step08_dflash2 import RangeWindows, dflash2_attention, explain, warmup
q, k, v = MINILM.replace(B=1, Sq=64, Sk=64, causal=True).make()
assert Oracle(q, k, v, causal=True).check(*dflash2_attention(q, k, v, causal=True, return_lse=True))
dflash2_attention(q, k, v, causal=True, windows=RangeWindows.sliding(3))
assert warmup([MINILM]) == 1 and "eager" in explain(MINILM)
assert not [name for name in sys.modules if name.split(".")[0] == "triton"]
print("ran")
""",
        CUDA_VISIBLE_DEVICES="",
    )
    assert out.strip() == "ran"


def test_import_is_light():
    out = python(
        """
import sys, torch
before = set(sys.modules)
import ladder.step08_dflash2
assert not torch.cuda.is_initialized()
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(new & {"triton", "transformers", "matplotlib", "numpy"}), hasattr(torch.ops.ladder, "dflash2_attention"))
"""
    )
    assert out.strip() == "[] True"


# Which implementation


@pytest.mark.skipif(ON_GPU, reason="on a GPU nothing falls back")
def test_dispatch_on_a_cpu(monkeypatch):
    half, brain = torch.empty(0, dtype=torch.float16), torch.empty(0, dtype=torch.bfloat16)
    assert device_code(half).__name__ == "ladder.step08_dflash2.portable.prefill_kernel"
    assert device_code(brain) is None  # the interpreter multiplies it wrongly
    monkeypatch.delenv("TRITON_INTERPRET")
    assert device_code(half) is None
    q, k, v = dense_inputs("bfloat16")
    out = dflash2_attention(q, k, v, causal=True, windows=WINDOW)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), eager.attention(q.float(), k.float(), v.float(), causal=True, scale=0.25, windows=WINDOW),
                               rtol=2e-2, atol=2e-2)  # fmt: skip


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("options", OPTIONS)
def test_paths_agree_and_out_is_filled(path, name, options):
    function, inputs = ENTRIES[name]
    arguments, options = inputs(), OPTIONS[options]
    want = getattr(eager, name)(*arguments, **{"scale": 0.25, **options})
    got, lse = function(*arguments, **options, return_lse=True)
    torch.testing.assert_close(got, want, rtol=4e-3, atol=4e-3)
    assert lse.dtype == torch.float32
    out = torch.full_like(got.transpose(0, 1), float("nan")).transpose(0, 1)  # another layout
    result = function(*arguments, **options, out=out)
    assert result is out and torch.equal(out, got)


def test_hopper_kernel_is_asked_first(monkeypatch):
    """The hook of the sm_90 kernel: a reason sends the call to the portable one, None launches."""
    calls = []

    class Hopper:
        reason = None

        @classmethod
        def supports_prefill(cls, call):
            calls.append((len(call.q[0]), call.capacity is not None, call.right, call.num_ranges, call.softcap))
            return cls.reason

        @staticmethod
        def launch_prefill(q, k, v, out, lse, *, cu_seqlens_q, cu_seqlens_k, block_table, seq_lens, max_seqlen_q,
                           causal, right, scale, windows, softcap, sinks, plan):  # fmt: skip
            assert plan
            out.fill_(7.0)
            calls.append((scale, max_seqlen_q, cu_seqlens_q is None, cu_seqlens_k is None, block_table is None, seq_lens is None))

    monkeypatch.setattr(dispatch, "machine", lambda _: HOPPER)
    monkeypatch.setattr(decision, "_decide_prefill", decision._decide_prefill.__wrapped__)
    monkeypatch.setattr(hopper, "supports_prefill", Hopper.supports_prefill)
    monkeypatch.setattr(hopper, "launch_prefill", Hopper.launch_prefill)
    for name, shape, flags in (("attention", (4, False), (None, True, True, True, True)),
                               ("varlen", (3, False), (None, False, False, True, True)),
                               ("paged_prefill", (3, True), (None, False, True, False, False))):  # fmt: skip
        function, inputs = ENTRIES[name]
        calls.clear()
        out = function(*inputs(), causal=True, windows=WINDOW, softcap=2.0)
        assert (out == 7).all() and calls == [(*shape, 0, 1, True), (0.25, *flags)]
    Hopper.reason = "it is Tuesday"
    calls.clear()
    assert not (dflash2_attention(*dense_inputs()) == 7).all() and len(calls) == 1


# Refusals


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(windows=4), TypeError, "windows is a int; want a RangeWindows, or None"),
        (dict(windows=(0, None, 0, 4)), TypeError, "windows is a tuple; want a RangeWindows"),
        (dict(softcap=-1.0), ValueError, "softcap is -1.0; want a finite number of at least 0"),
        (dict(softcap=float("nan")), ValueError, "softcap is nan; want a finite number"),
        (dict(softcap="30"), TypeError, "softcap is '30'; want a real number"),
        (dict(softcap=True), TypeError, "softcap is True; want a real number"),
        (dict(sinks=[0.0] * 4), TypeError, r"sinks is a list; want a torch.Tensor \(4,\)"),
        (dict(sinks=torch.zeros(3)), ValueError, r"sinks has shape \(3,\); want \(4,\)"),
        (dict(sinks=torch.zeros(4, dtype=torch.float64)), ValueError, "sinks has dtype torch.float64; want"),
        (dict(sinks=torch.zeros(4, device="meta")), ValueError, "sinks is on meta; want"),
        (dict(return_lse=1), TypeError, "return_lse is 1; want True or False"),
        (dict(causal=1), TypeError, "causal is 1; want True or False"),
        (dict(scale="x"), TypeError, "scale is 'x'; want a real number"),
        (dict(scale=float("inf")), ValueError, "scale is inf; want a finite number"),
        (dict(out=3), TypeError, "out is a int; want a torch.Tensor"),
        (dict(out=torch.zeros(1)), ValueError, r"out has shape \(1,\); want \("),
    ],
)
def test_refusals(path, name, changes, error, message):
    function, inputs = ENTRIES[name]
    changes = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) and v.device.type != "meta" else v for k, v in changes.items()}
    with pytest.raises(error, match=f"step08_dflash2: {message}"):
        function(*inputs(), **changes)


def test_tokens_of_no_sequence_are_refused_where_offsets_are_not_read():
    """The kernels would look for a first sequence behind the only offset."""
    cu, q = torch.empty(1, dtype=torch.int32, device="meta"), torch.empty(5, 4, 16, device="meta")
    with pytest.raises(ValueError, match="step08_dflash2: cu_seqlens_q has no sequence; want one at least for the 5 packed tokens"):
        check_starts("step08_dflash2", "cu_seqlens_q", cu, q)
    assert check_starts("step08_dflash2", "cu_seqlens_q", cu, q[:0]) == 0


@pytest.mark.parametrize(
    "name, place, value, error, message",
    [
        ("attention", 0, [], TypeError, r"q is a list; want a torch.Tensor \(B, Hq, Sq, D\)"),
        ("attention", 1, torch.zeros(1, 2, 20, 15, dtype=torch.float16), ValueError, r"k has shape \(1, 2, 20, 15\); want \(1, Hkv, Sk, 16\)"),
        ("varlen", 0, None, TypeError, "q is a NoneType"),
        ("varlen", 2, torch.zeros(1, 20, 2, 8), ValueError, r"v has shape \(1, 20, 2, 8\); want \(20, 2, Dv\)"),
        ("varlen", 3, [0, 9], TypeError, "cu_seqlens_q is a list"),
        ("varlen", 4, torch.tensor([0, 20], dtype=torch.int32), ValueError, "cu_seqlens_k has 1 sequences; want 2"),
        ("varlen", 3, torch.tensor([0, 0, 3, 3, 9, 9], dtype=torch.int32)[::2], ValueError, "cu_seqlens_q has stride"),
        ("varlen", 3, torch.tensor([0.0, 3, 9]), ValueError, "cu_seqlens_q .*float32.*want .*int32 or int64"),
        ("paged_prefill", 3, torch.zeros(2, 4), ValueError, "block_table has dtype torch.float32; want int32"),
        ("paged_prefill", 5, torch.tensor([0, 9], dtype=torch.int32), ValueError, "cu_seqlens_q has 1 sequences; want 2, those of seq_lens"),
    ],
)
def test_refused_tensors(name, place, value, error, message):
    function, inputs = ENTRIES[name]
    arguments = list(inputs())
    arguments[place] = value.to(DEVICE) if isinstance(value, torch.Tensor) else value
    with pytest.raises(error, match=f"step08_dflash2: {message}"):
        function(*arguments)


def test_more_refusals(path):
    q, k, v = dense_inputs()
    with pytest.raises(NotImplementedError, match="step08_dflash2: head size 264 is above 256"):
        dflash2_attention(*dense_inputs(D=264))
    for value in ("x", 1.5, True):
        with pytest.raises(TypeError, match="step08_dflash2: max_seqlen_q is .*; want an integer"):
            dflash2_varlen(*packed_inputs(), value)
    with pytest.raises(ValueError, match="step08_dflash2: max_seqlen_k is -1; want an integer of at least 0"):
        dflash2_varlen(*packed_inputs(), None, -1)
    for right, error in ((-1, ValueError), (0.5, TypeError)):
        with pytest.raises(error, match=f"step08_dflash2: right is {right}"):
            dflash2_attention(q, k, v, right=right)
    with pytest.raises(ValueError, match="right is 3 under a causal mask; want 0 or None"):
        dflash2_varlen(*packed_inputs(), causal=True, right=3)
    with pytest.raises(ValueError, match="elements on top of each other"):
        dflash2_attention(q, k, v, out=q.new_zeros(1, 4, 1, 8).expand(1, 4, 9, 8))
    with pytest.raises(ValueError, match="step08_dflash2: q is on meta; want a tensor with elements"):
        dflash2_attention(*(x.to("meta") for x in (q, k, v)))


@pytest.mark.skipif(ON_GPU, reason="on a GPU lengths and pages are not read by the host")
def test_lengths_and_pages_are_read_on_a_cpu(path):
    arguments = list(paged_inputs())
    arguments[4] = torch.tensor([5, 33], dtype=torch.int32)
    with pytest.raises(ValueError, match="step08_dflash2: seq_lens holds 33; want 0 .. 32"):
        dflash2_paged_prefill(*arguments)
    arguments = list(paged_inputs())
    arguments[3][1, 1] = 10**6
    with pytest.raises(ValueError, match=r"step08_dflash2: block_table\[1, 1\] is 1000000"):
        dflash2_paged_prefill(*arguments)


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("place", (0, 1, 2, "sinks"))
def test_forward_only(path, name, place):
    function, inputs = ENTRIES[name]
    arguments, sinks = inputs(), torch.zeros(4, device=DEVICE)
    (sinks if place == "sinks" else arguments[place]).requires_grad_()
    with pytest.raises(NotImplementedError, match="step08_dflash2: .* requires gradients; forward only.*step04_gqa"):
        function(*arguments, sinks=sinks)
    with torch.no_grad():
        function(*arguments, sinks=sinks)


def test_checked_shapes_are_remembered_with_their_types():
    """A call that passed must not let a wrong one through: 1 is no flag although it equals True."""
    q, k, v = dense_inputs()
    dflash2_attention(q, k, v, causal=True, scale=1.0)
    with pytest.raises(TypeError, match="causal is 1"):
        dflash2_attention(q, k, v, causal=1, scale=1.0)
    with pytest.raises(TypeError, match="scale is True"):
        dflash2_attention(q, k, v, causal=True, scale=True)


def test_scale_factors():
    assert scale_factors(0.5, 0.0)[0] == 1 and scale_factors(-0.5, 0.0)[0] == -1 and scale_factors(0.0, 0.0)[0] == 0
    sign, outer, inner = scale_factors(-0.5, 4.0)
    assert sign == -1 and inner == 0.125 and outer == pytest.approx(4 / 0.6931471805599453)


# torch.compile


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ENTRIES)
def test_compiles_as_one_graph(path, name, options):
    function, inputs = ENTRIES[name]
    arguments, options = inputs(), OPTIONS[options]
    torch._dynamo.reset()

    def model(*tensors):
        out, lse = function(*(t + 0 for t in tensors), **options, return_lse=True)
        return out * 2, lse

    compiled = torch.compile(model, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    assert alike(compiled(*arguments), model(*arguments))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ENTRIES)
def test_compiled_out_is_filled(path, name):
    function, inputs = ENTRIES[name]
    arguments = inputs()
    torch._dynamo.reset()
    want = function(*arguments, causal=True)
    out = torch.full_like(want, float("nan"))
    compiled = torch.compile(lambda *a: function(*a[:-1], causal=True, out=a[-1]) + 1, fullgraph=True, backend="aot_eager")
    result = compiled(*arguments, out)
    assert torch.equal(out, want) and torch.equal(result, want + 1)


@pytest.mark.filterwarnings("ignore")
def test_lengths_do_not_recompile(path):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda q, k, v: dflash2_attention(q, k, v, causal=True, windows=WINDOW), backend=backend, fullgraph=True, dynamic=True)
    for length in (17, 20, 31, 40):
        q, k, v = dense_inputs(Sq=length, Sk=length + 3)
        assert torch.equal(compiled(q, k, v), dflash2_attention(q, k, v, causal=True, windows=WINDOW))
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore")
def test_wrong_arguments_are_refused_when_compiled():
    torch._dynamo.reset()
    q, k, v = dense_inputs()
    compiled = torch.compile(lambda q, k, v: dflash2_attention(q, k, v), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"k has shape \(1, 2, 20, 15\)"):
        compiled(q, k[..., :15], v)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ENTRIES)
def test_operators_keep_their_promises(path, name):
    """Schema, fake shapes and aliasing, as PyTorch's own check of custom operators sees them."""
    arguments, sinks = ENTRIES[name][1](), torch.zeros(4, device=DEVICE)
    most = () if name == "attention" else (None,)
    tests = ("test_schema", "test_faketensor")
    for return_lse in (False, True):
        rest = (*most, True, None, list(WINDOW.flat), 2.0, sinks, return_lse, None)
        torch.library.opcheck(getattr(torch.ops.ladder, f"dflash2_{name}").default, (*arguments, *rest), test_utils=tests)
        out = torch.zeros_like(ENTRIES[name][0](*arguments))
        torch.library.opcheck(getattr(torch.ops.ladder, f"dflash2_{name}_out").default, (*arguments, *rest, out), test_utils=tests)


# Plans


def test_explain_names_what_is_launched(monkeypatch):
    p = AttentionProblem(Hq=32, Hkv=8, Sq=512, Sk=4096, causal=True)
    text = explain(p, windows=RangeWindows.sink_window(128, 1024))
    if not ON_GPU:
        config = launch_config(128, 128, 2, 90, group=4, tokens=512, most_tokens=512, num_ranges=1)
        assert f"{config['BLOCK_M']} queries by {config['BLOCK_N']} keys" in text and "dflash2_prefill" in text
        count, tiles = RangeWindows.sink_window(128, 1024).visited_tiles(512, 4096, True, config["BLOCK_M"], config["BLOCK_N"])
        assert f"Visits {count} of " in text and f"{sum(m for *_, m in tiles)} of them with a mask" in text
        assert "heads that share K and V" in explain(p.replace(Sq=3), page_size=16)
        assert "128 + 64 columns" in explain(p.replace(D=192), ragged=True)
        assert "bfloat16" in explain(p.replace(dtype="bfloat16")) and "eager" in explain(p.replace(dtype="bfloat16"))
        monkeypatch.delenv("TRITON_INTERPRET")
        assert "eager PyTorch in float32, because tensors are on cpu and Triton's interpreter is off" in explain(p)
    for sizes in (dict(Sq=0), dict(Sk=0), dict(B=0)):
        assert explain(p.replace(**sizes))
    with pytest.raises(TypeError, match="windows is a int"):
        explain(p, windows=3)


def test_explain_and_warmup_of_decode(path):
    p = DecodeProblem(B=2, Hq=8, Hkv=2, D=16, Dv=16, page_size=16, dtype="float16", context=20, max_context=4096)
    text = explain(p, windows=RangeWindows.sliding(9), sinks=True)
    assert "Decode of 2 x 1 new tokens, 8 heads on 2" in text and "learned sinks" in text
    if path == "kernel" and not ON_GPU:
        assert "16 rows for the 4 of a KV head" in text and "not split" in text  # a window of 9 keys is one part
        assert "parts of equal length" in explain(p)
    assert warmup([p, (p, dict(sinks=True, windows=WINDOW))]) == 2
    latent = p.replace(Hkv=1, D=48, Dv=32, latent=True)
    assert "latent" in explain(latent) and warmup([latent]) == 1


def test_warmup_compiles_what_a_call_launches(path, monkeypatch):
    p = AttentionProblem(Hq=4, Hkv=2, Sq=20, Sk=30, D=16, Dv=16, causal=True)
    launched, configs = [], []
    for name in ("dflash2_attention", "dflash2_varlen", "dflash2_paged_prefill"):
        real = getattr(explaining, name)
        monkeypatch.setattr(explaining, name, lambda *a, real=real, name=name, **k: launched.append((name, k)) or real(*a, **k))
    real_config = decision.launch_config
    monkeypatch.setattr(decision, "_decide_prefill", decision._decide_prefill.__wrapped__)
    monkeypatch.setattr(decision, "launch_config", lambda *a, **k: configs.append(real_config(*a, **k)) or configs[-1])
    shapes = [p, (p, dict(ragged=True)), (p.replace(Sq=1), dict(page_size=16, sinks=True, windows=WINDOW, softcap=1.0, return_lse=True))]
    assert warmup(shapes) == 3 and warmup([]) == 0
    assert [name for name, _ in launched] == ["dflash2_attention", "dflash2_varlen", "dflash2_paged_prefill"]
    last = launched[-1][1]
    assert last["windows"] == WINDOW and last["sinks"].shape == (4,) and last["return_lse"] and last["causal"]
    if path == "kernel" and not ON_GPU:
        assert configs[-1] == launch_config(16, 16, 2, 90, 16, True, 2, 1, 1, 1, True)


SHARED_MEMORY = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_launch_config_covers_the_head_and_fits(arch):
    for head_dim in range(1, 257):
        for head_dim_v in {head_dim, 128}:
            for itemsize in (2, 4):
                for extra in (dict(), dict(page_size=16, ragged=True), dict(group=7, tokens=3, most_tokens=3), dict(softcap=True, num_ranges=2)):
                    c = launch_config(head_dim, head_dim_v, itemsize, arch, **extra)
                    assert c["BLOCK_D"] + c["TAIL_D"] >= head_dim and c["BLOCK_DV"] >= max(32, head_dim_v)
                    assert all(c[n] & (c[n] - 1) == 0 for n in ("BLOCK_M", "BLOCK_N", "BLOCK_D", "TAIL_D", "BLOCK_DV"))
                    assert c["BLOCK_M"] >= max(16, c["PACK"]) and c["BLOCK_N"] >= 16
                    buffers = itemsize * c["BLOCK_N"] * (c["BLOCK_D"] + c["TAIL_D"] + c["BLOCK_DV"]) * (c["num_stages"] - 1)
                    assert buffers <= SHARED_MEMORY[arch] * 1024, (head_dim, head_dim_v, itemsize, extra)


EVERY_THIRD = """
import json
from ladder.lab.compile import matrix as compile_matrix
from ladder.rungs import find
from ladder.lab.compile.cases_step08 import prefill_compile_cases

target = compile_matrix.capability(TARGET)
compile_matrix.cases_of = lambda *_, **__: list(prefill_compile_cases(target))[::3]
for row in compile_matrix.compile_rows([TARGET], [find(8)]):
    print(json.dumps(row))
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", ("sm_80", "sm_90"))
def test_prefill_compiles(target):
    """No spills; on Hopper its own matrix instructions, none of which waits for the one before. A third of the cases: the
    compile matrix has them all."""
    pytest.importorskip("triton.backends.nvidia", reason="Triton's NVIDIA back end compiles these kernels")
    rows = [json.loads(line) for line in python(EVERY_THIRD.replace("TARGET", repr(target))).splitlines()]
    assert len(rows) > 10
    for row in rows:
        assert row["problem"] is None, f"{row['case']}: {row['problem']}"
        assert row["kernel"] == "dflash2_prefill"
        full_tile = "float32" not in row["case"] and not any(f" {m}x" in row["case"] for m in (16, 32))
        if target == "sm_90":
            assert (row["HGMMA"] > 0) == full_tile, row["case"]
            # With a page a key Triton 3.6 leaves ptxas no proof, in rung 07 too; 3.8 does.
            assert not row["serialized"] or " page 1 " in row["case"], row["case"]
        elif "float32" not in row["case"]:
            assert row["HMMA"] > 0, row["case"]


def test_explain_of_decode_on_hopper_names_the_kernel_that_runs(monkeypatch):
    monkeypatch.setattr(explaining, "device_code", lambda *_: object())
    monkeypatch.setattr(dispatch, "machine", lambda _: HOPPER)
    p = DecodeProblem(dtype="bfloat16")
    assert "dflash2_decode_hopper" in explain(p) and "dflash2_decode_hopper" in explain(p, sinks=True)
    assert "faster with this one" in explain(p.replace(D=64, Dv=64))
    assert "range windows" in explain(p, windows=RangeWindows.sliding(9))
    latent = p.replace(Hkv=1, D=576, Dv=512, latent=True, scale=0.07)
    assert "dflash2_mla_few_hopper" in explain(latent.replace(Hq=16), sinks=True)
    assert "dflash2_mla_hopper" in explain(latent.replace(Hq=128)) and "portable" in explain(latent.replace(Hq=128), softcap=30.0)


@pytest.mark.parametrize("layout", [dict(), dict(ragged=True), dict(page_size=64)], ids=str)
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_warmup_on_hopper_compiles_what_the_call_takes(monkeypatch, layout, D, causal):
    """Warp groups, split keys and tiles without masks depend on lengths, which the short launch does not have."""
    launched = []

    def launch_prefill(q, k, v, out, lse, *, cu_seqlens_q=None, cu_seqlens_k=None, block_table=None, seq_lens=None, max_seqlen_q=None,
                       causal=False, right=None, num_splits=None, config=None, windows=None, **_):  # fmt: skip
        num_seqs = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
        rows, keys = (q.shape[2], k.shape[2]) if cu_seqlens_q is None else (q.shape[0], k.shape[0])
        assert rows <= 256 and keys <= 256 + 128
        found = hopper.plan_prefill(
            num_seqs, 32, 4, rows, keys if block_table is None else block_table.shape[1] * 64, D, D, right, cu_seqlens_q is not None,
            block_table is not None, max_seqlen_q, 132, num_splits, windows is not None, config and tuple(sorted(config.items())),
        )  # fmt: skip
        assert not found[0]["ALIGNED"] or (keys - rows) % 128 == 0
        launched.append((found[0], found[2] > 1))

    monkeypatch.setattr(dispatch, "machine", lambda _: HOPPER)
    monkeypatch.setattr(explaining, "device_code", lambda *_: object())
    monkeypatch.setattr(hopper, "launch_prefill", launch_prefill)
    for B, Sq, Sk in ((1, 1, 4096), (1, 100, 4196), (4, 512, 1000), (8, 900, 1000), (4, 4096, 4096), (1, 128, 32768)):
        p = AttentionProblem(B=B, Hq=32, Hkv=8, Sq=Sq, Sk=Sk, D=D, Dv=D, causal=causal, dtype="bfloat16")
        ragged, page_size = bool(layout), layout.get("page_size", 0)
        keys = -(-Sk // page_size) * page_size if page_size else B * Sk if ragged else Sk
        wanted, _, splits, _, _ = hopper.plan_prefill(
            B, 32, 4, B * Sq if ragged else Sq, keys, D, D, 0 if causal else None, ragged, page_size > 0, Sq, 132
        )
        assert warmup([(p, dict(layout, return_lse=True))], "cpu") == 1
        assert launched.pop() == (wanted, splits > 1), f"{B} x {Sq} on {Sk}"


def test_warmup_takes_the_options_of_explain():
    p = DecodeProblem(dtype="float32", D=32, Dv=32, Hq=4, Hkv=2, context=64, page_size=16)
    assert warmup([(p, dict(page_size=16, right=0, ragged=True))]) == 1
    with pytest.raises(TypeError, match="option 'page'"):
        warmup([(p, dict(page=16))])
    with pytest.raises(ValueError, match="page_size is -1"):
        warmup([(MINILM, dict(page_size=-1))])
    with pytest.raises(ValueError, match="problem.Sq is -3"):
        explain(MINILM.replace(Sq=-3))
    with pytest.raises(NotImplementedError, match="head sizes 300"):
        explain(MINILM.replace(D=300))
    latent = p.replace(Hkv=1, D=48, latent=True)
    for problem, error, message in (
        (p.replace(Hq=3), ValueError, "problem.Hq is 3; want a multiple of Hkv = 2"),
        (latent.replace(Dv=24), ValueError, "problem.Dv is 24 in a latent cache; want a power of two"),
        (latent.replace(Dv=16), NotImplementedError, "problem.D is 48, above twice Dv = 16"),
    ):
        with pytest.raises(error, match=message):
            explain(problem)
    with pytest.raises(TypeError, match="return_lse is 1; want True or False"):
        explain(p, return_lse=1)
