"""python -m ladder.profile: what it counts as attention, what it decides, and what it reads of Nsight Compute."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ladder import profile
from ladder.profile import __main__ as program

pytestmark = pytest.mark.filterwarnings("default")

CPU, CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA

MODULE = """
import torch
from torch.nn.functional import scaled_dot_product_attention

class SparseExperts(torch.nn.Linear):
    pass

def attention_only():
    q = torch.randn(1, 4, 256, 32)
    for _ in range(4):
        scaled_dot_product_attention(q, q, q)

def products_only():
    x = torch.randn(300, 300)
    for _ in range(4):
        x = torch.mm(x, x) / 300

def eager_attention():
    x = torch.randn(300, 300)
    with torch.profiler.record_function("my attention"):
        for _ in range(4):
            torch.mm(torch.softmax(torch.mm(x, x), -1), x)

loads = 0

def load():
    global loads
    loads += 1
    model = SparseExperts(64, 64)
    return lambda: model(torch.randn(32, 64))

def dense():
    return torch.nn.Linear(8, 8)(torch.randn(2, 8))

def wants(x):
    return x

number = 3
"""


@pytest.fixture
def batches(tmp_path, monkeypatch):
    (tmp_path / "batches_of_a_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "batches_of_a_test"
    sys.modules.pop("batches_of_a_test", None)


def measure(batches, name, **more):
    return profile.measure(profile.load_step(f"{batches}:{name}"), steps=2, warmup=1, **more)


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="a GPU in use has its own numbers")
def test_shares_on_the_cpu(batches):
    only, none, eager = (measure(batches, name) for name in ("attention_only", "products_only", "eager_attention"))
    assert only.attention_share > 0.5 and "flash" in next(iter(only.attention_names))
    assert only.context == 256 and not only.dflash_names and only.busy_share is None
    assert none.attention_share == 0 and not none.attention_names and "aten::mm" in none.other_names
    assert eager.attention_share > 0.5 and "aten::mm" in eager.attention_names
    assert measure(batches, "products_only", attention="aten::mm").attention_share > 0.5
    assert "record_function('attention')" in profile.describe(none)
    for found in (only, none, eager):
        assert 0 < found.work_ms and 0 < found.step_ms and found.memory["peak"] >= found.memory["first"] > 1 << 20


def test_a_loader_is_loaded_once_and_experts_are_seen(batches):
    found = measure(batches, "load")
    assert sys.modules[batches].loads == 1
    assert found.moe and "SparseExperts" in found.moe_because
    assert measure(batches, "dense").moe is False
    assert measure(batches, "products_only").moe is None


@pytest.mark.parametrize("name, message", [
    ("nothing", "want PACKAGE:CALLABLE"), ("batches_of_a_test:missing", "has no missing; it has SparseExperts, attention_only"),
    ("batches_of_a_test:number", "is a int; want something to call"), ("batches_of_a_test:wants", "needs no argument"),
    ("no_such_module_here:step", "No module named"),
])  # fmt: skip
def test_bad_modules_are_named(batches, capsys, name, message):
    assert program.main(["--module", name]) == 2
    assert message in capsys.readouterr().err


# Events of a GPU, as torch.profiler gives them


def kernel(name, start, end, annotation=False):
    time_range = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(name=name, device_type=CUDA, time_range=time_range, is_user_annotation=annotation)


def operator(name, launched=(), parent=None, shapes=()):
    kernels = [SimpleNamespace(name=k, duration=us) for k, us in launched]
    return SimpleNamespace(
        name=name, device_type=CPU, kernels=kernels, cpu_parent=parent, input_shapes=list(shapes), self_cpu_time_total=7.0
    )


def test_gpu_time_by_name_by_range_and_once():
    outer = operator("attention of mine")
    events = [
        kernel("dflash2_prefill", 0, 300), kernel("ampere_gemm", 300, 400), kernel("ampere_gemm", 400, 600),
        kernel("ncclDevKernel_AllReduce", 700, 800), kernel("attention of mine", 0, 400, annotation=True),
        kernel("ProfilerStep#1", 0, 1000),
        outer, operator("aten::mm", [("ampere_gemm", 100)], outer), operator("aten::mm", [("ampere_gemm", 200)]),
        operator("cuLaunchKernel", [("dflash2_prefill", 300)], outer),
    ]  # fmt: skip
    found = profile.summarise(events, steps=2, wall=1000e-6)
    assert found.work_ms == pytest.approx(0.35)  # 700 us of two batches; ranges are not kernels
    assert found.attention_share == pytest.approx(400 / 700)  # the kernel by name, and the product within the range
    assert found.communication_share == pytest.approx(100 / 700)
    assert found.busy_share == pytest.approx(0.7)
    assert found.attention_names == pytest.approx({"dflash2_prefill": 0.15, "ampere_gemm": 0.05})
    assert found.other_names == pytest.approx({"ampere_gemm": 0.1, "ncclDevKernel_AllReduce": 0.05})
    assert found.dflash_names == ["dflash2_prefill"]


def test_busy_time_counts_overlap_once():
    events = [kernel("a", 0, 100), kernel("b", 50, 150), kernel("c", 60, 70), kernel("d", 200, 250)]
    assert profile.summarise(events, steps=1, wall=400e-6).busy_share == pytest.approx(0.5)


def test_context_is_the_longest_key():
    name = "aten::scaled_dot_product_attention"
    events = [operator(name, shapes=[[1, 4, 5, 8], [1, 4, n, 8], [1, 4, n, 8]]) for n in (9000, 70)] + [operator("aten::mm")]
    assert profile.summarise(events, steps=1, wall=1.0).context == 9000
    assert profile.summarise(events[2:], steps=1, wall=1.0).context is None


# The decision


def found(**changes):
    values = dict(
        device="H200", gpus=1, steps=3, step_ms=50.0, work_ms=48.0, attention_share=0.4, communication_share=0.0, busy_share=0.95,
        dflash_names=[], attention_names={"flash_fwd": 19.0}, other_names={"gemm": 20.0}, memory={}, memory_curve=[],
        moe=True, context=32768,
    )  # fmt: skip
    return profile.Found(**{**values, **changes})


@pytest.mark.parametrize("name, changes, target, said", [
    ("kernel", {}, 40, "All three: use the kernel. Attention twice as fast would save 20% of the time, four times as fast 30%"),
    ("scheduling", dict(attention_share=0.3), 40, "a kernel twice as fast would save 15%"),
    ("scheduling", dict(busy_share=0.5), 40, "no kernel running 50% of the time"),
    ("scheduling", {}, 60, "kernels are not what a batch waits for"),
    ("scheduling", dict(attention_share=0.1, communication_share=0.25), 40, "Communication takes 25%"),
    ("dense", dict(moe=False), 40, "nothing to a dense model"),
    ("wait", dict(context=8192), 40, "at 8,192 tokens it can wait"),
    ("unknown", {}, None, "say --target-ms"),
    ("unknown", dict(moe=None), 40, "say --moe or --no-moe"),
    ("unknown", dict(context=None), 40, "say --context"),
    ("unknown", dict(busy_share=None), 40, "a CPU has no such number"),
])  # fmt: skip
def test_the_rule(name, changes, target, said):
    answer = profile.decide(found(**changes), target)
    assert answer.name == name
    assert said in "\n".join(answer.lines)
    several = profile.decide(found(gpus=8, **changes), target)
    assert "One GPU" not in "\n".join(several.lines)


def test_thresholds_are_exclusive():
    assert profile.decide(found(attention_share=0.3001), 40).name == "kernel"
    assert profile.decide(found(context=8193), 40).name == "kernel"
    assert profile.decide(found(busy_share=0.8), 40).name == "kernel"
    assert profile.decide(found(), 50.0).name == "scheduling"


# Memory


def test_memory_curve_sees_a_spike():
    curve = profile.MemoryCurve(on_gpu=False, interval=0.001)
    with curve:
        block = torch.ones(64 << 20)  # 256 MiB, touched
        del block
    assert curve.summary()["peak"] >= curve.samples[0][1]
    points = [(0.1 * i, 100 + (400 if i == 7 else 0)) for i in range(20)]
    curve.samples = points
    assert len(curve.points(5)) == 5 and max(v for _, v in curve.points(5)) == 500
    line = profile.curve(points)
    assert line.startswith("▁" * 7 + "█" + "▁" * 12) and "100 B .. 500 B in 1.90 s" in line
    text = profile.describe(found(memory=curve.summary(), memory_curve=points))
    assert "the peak is 400% above the median, a spike that temporary buffers make" in text


def test_kv_pools():
    from ladder.step06_paged import PagedKVCache

    cache = PagedKVCache(7, 16, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=32, dtype=torch.float16)
    assert dict(kind="PagedKVCache", bytes=2 * 7 * 16 * 2 * 8 * 2, tokens=112) in profile.kv_pools()
    assert "KV pool: PagedKVCache" in profile.describe(found(pools=profile.kv_pools()))
    del cache


# Nsight Compute

DETAILS = '''==PROF== Connected to process 12 (/usr/bin/python3)
a line of the program
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","12","dflash2_prefill","GPU Speed Of Light Throughput","Memory Throughput","%","71.50"
"0","12","dflash2_prefill","GPU Speed Of Light Throughput","Compute (SM) Throughput","%","82.00"
"0","12","dflash2_prefill","GPU Speed Of Light Throughput","Duration","msecond","1.5"
"0","12","dflash2_prefill","Memory Workload Analysis","Memory Throughput","Gbyte/second","3,400.1"
"1","12","dflash2_decode","GPU Speed Of Light Throughput","Memory Throughput","%","90"
"1","12","dflash2_decode","GPU Speed Of Light Throughput","Compute (SM) Throughput","%","10"
"1","12","dflash2_decode","GPU Speed Of Light Throughput","Duration","usecond","1,000"
"2","12","dflash2_decode","GPU Speed Of Light Throughput","Memory Throughput","%","30"
"2","12","dflash2_decode","GPU Speed Of Light Throughput","Compute (SM) Throughput","%","10"
"2","12","dflash2_decode","GPU Speed Of Light Throughput","Duration","nsecond","1,000,000"
'''
RAW = '''"ID","Kernel Name","gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed","gpu__time_duration.sum","sm__throughput.avg.pct_of_peak_sustained_elapsed"
"","","%","us","%"
"0","flash_fwd_kernel","20.0","12.5","70.0"
'''


def test_ncu_details(tmp_path):
    (tmp_path / "a.csv").write_text(DETAILS)
    decode, prefill = profile.read_ncu(tmp_path / "a.csv")
    assert prefill == dict(kernel="dflash2_prefill", launches=1, us=1500.0, memory=pytest.approx(0.715), compute=pytest.approx(0.82))
    assert decode == dict(kernel="dflash2_decode", launches=2, us=2000.0, memory=pytest.approx(0.6), compute=pytest.approx(0.1))
    text = profile.describe_ncu([decode, prefill])
    assert "dflash2_decode: 2 launches, 2000.0 us, memory 60%, compute 10%: bound by memory" in text
    assert "both used well" in text and "did not run" not in text


def test_ncu_raw(tmp_path, capsys):
    (tmp_path / "b.csv").write_text(RAW)
    assert program.main(["--ncu-csv", str(tmp_path / "b.csv")]) == 0
    out = capsys.readouterr().out
    assert "flash_fwd_kernel: 1 launches, 12.5 us, memory 20%, compute 70%: bound by compute" in out
    assert "None of them has dflash in its name: DFlash did not run." in out


@pytest.mark.parametrize("text, message", [
    ("hello\n", "has no column Kernel Name"), (DETAILS.split("\n")[2] + "\n", "no kernel with a duration"),
])  # fmt: skip
def test_ncu_files_that_are_none(tmp_path, capsys, text, message):
    (tmp_path / "c.csv").write_text(text)
    with pytest.raises(SystemExit):
        program.main(["--ncu-csv", str(tmp_path / "c.csv")])
    assert message in capsys.readouterr().err


# The command


def test_command_in_words_and_json(batches, tmp_path, capsys):
    target = tmp_path / "out.json"
    arguments = ["--module", f"{batches}:attention_only", "--steps", "2", "--moe", "--context", "9000", "--json", str(target)]
    assert program.main(arguments) == 0
    out = capsys.readouterr().out
    for part in ("Attention takes", "the threshold is 30%", "1. Is the model a mixture of experts? yes (as you said)",
                 "3. Are there contexts above 8,192 tokens? yes (9,000 tokens, as you said)", "DFlash is not in use",
                 "ncu --kernel-name regex:dflash --set full --csv", "Memory:"):  # fmt: skip
        assert part in out
    record = json.loads(target.read_text())
    assert record["decision"] == "unknown" and record["measured"]["context"] == 9000 and record["ncu"] is None
    assert program.main([*arguments[:-1], "-"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["steps"] == 2


@pytest.mark.parametrize("arguments, message", [
    ([], "want --module PACKAGE:CALLABLE, --ncu-csv FILE, or both"), (["--module", "a:b", "--steps", "0"], "--steps: 0; want at least 1"),
    (["--module", "a:b", "--attention", "("], "no regular expression"), (["--module", "a:b", "--target-ms", "-1"], "positive number"),
    (["--ncu-csv", "/no/such/file"], "no file /no/such/file"), (["--module", "a:b", "--json", "/no/such/x.json"], "no folder /no/such"),
    (["--module", "a:b", "--json", "/"], "/ is a folder; want a file"),
])  # fmt: skip
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        program.main(arguments)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_as_a_program(batches, tmp_path):
    """Its name does not hide the standard library's profile; the working directory is searched."""
    (tmp_path / "uses_cprofile.py").write_text("import cProfile, torch\ndef step():\n    cProfile.run('1 + 1'); torch.ones(9).sum()\n")
    root = Path(profile.__file__).parents[2]
    path = os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, "-m", "ladder.profile", "--module", "uses_cprofile:step"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Attention takes 0%" in done.stdout and "First look at scheduling" in done.stdout


def test_a_full_disk_costs_no_earlier_file(tmp_path, monkeypatch, capsys, full_disk):
    file = tmp_path / "out.json"
    file.write_text("before")
    monkeypatch.setattr(program, "load_step", lambda name: None)
    monkeypatch.setattr(program, "measure", lambda step, **options: found(context_because="x" * 2000))
    with full_disk():
        assert program.main(["--module", "a:b", "--json", str(file)]) == 2
    assert f"cannot write {file}: " in capsys.readouterr().err and file.read_text() == "before"
