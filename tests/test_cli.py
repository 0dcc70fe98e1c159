"""The command line: a climb as a reader and as a program see it, and errors that help."""

import json
import subprocess
import sys

import pytest
import torch

from ladder import __main__ as cli
from ladder import climb, rungs
from ladder.lab import results, roofline
from ladder.lab.problem import AttentionProblem

TINY = ["--shape", "plain", "--seqlen", "40", "--mask", "causal", "--device", "cpu"]


@pytest.fixture
def known_limits(monkeypatch):
    """Skip measuring the machine: these tests look at something else."""
    monkeypatch.setattr(roofline, "measure_limits", lambda *args, **kwargs: roofline.Limits(1.0, 0.1, 0.1))


def run(*args):
    """python -m ladder in a process of its own: (exit code, stdout, stderr)."""
    done = subprocess.run([sys.executable, "-m", "ladder", *args], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_quick_json_on_standard_output_is_schema_1_with_every_rung_ok_on_real_input():
    code, out, err = run("--quick", "--json", "-", "--device", "cpu")
    assert code == 0, err
    doc = json.loads(out)  # nothing but JSON on standard output
    results.validate(doc)
    assert doc["schema"] == 1
    real = {row["impl"]: row for row in results.select(doc, input="minilm")}
    for rung in rungs.RUNGS:
        assert real[rung.name]["ok"] is True
        assert real[rung.name]["max_error"] <= real[rung.name]["budget"]
    assert doc["command"].startswith("python -m ladder --quick")
    assert doc["limits"]["matmul_tflops"] > 0 and doc["limits"]["read_tbs"] > 0
    assert "minilm" in err and "step05_fused" in err, "the table goes to standard error"


def test_table_says_that_interpreted_times_mean_nothing_and_names_the_rung_a_feature_arrives_with(known_limits, capsys):
    assert cli.main(["--shape", "qwen3-moe", "--seqlen", "16", *TINY[4:], "--no-peers"]) == 0
    out = capsys.readouterr().out
    assert "interpreter" in out and "mean nothing" in out
    (fused,) = (line for line in out.splitlines() if "step05_fused" in line)
    time, rate, _, memory, share = (cell.strip() for cell in fused.strip("│").split("│")[3:])
    assert time.startswith("(") and time.endswith(")") and {rate, memory, share} == {"-"}
    assert "step01_naive, step02_tiled, step03_online_softmax: grouped heads (32 query heads on 4 KV heads)" in out
    assert "arrive with step04_gqa" in out


def test_rungs_can_be_chosen_and_json_goes_to_a_file(known_limits, tmp_path, capsys):
    target = tmp_path / "out.json"
    assert cli.main([*TINY, "--rungs", "1,3", "--no-peers", "--json", str(target)]) == 0
    doc = results.load(str(target))
    assert [row["impl"] for row in doc["rows"]] == ["step01_naive", "step03_online_softmax"]
    assert list(tmp_path.iterdir()) == [target], "no partial file stays behind"
    capsys.readouterr()


def test_plot_writes_a_figure(known_limits, tmp_path, capsys):
    target = tmp_path / "climb.png"
    assert cli.main([*TINY, "--rungs", "1-2", "--plot", str(target)]) == 0
    assert target.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and target.stat().st_size > 10_000
    capsys.readouterr()


@pytest.mark.parametrize(
    "args, words",
    [
        (["--rungs", "9"], ["--rungs", "'9'", "step01_naive"]),
        (["--rungs", "2-x"], ["--rungs", "'2-x'"]),
        (["--rungs", "3-1"], ["--rungs", "3-1", "1-3"]),
        (["--quick", "--seqlen", "64"], ["--seqlen", "--quick"]),
        (["--dtype", "bfloat16", "--device", "cpu"], ["--dtype", "bfloat16", "float16"]),
        (["--json", "."], ["--json", "is a folder"]),
        (["--seqlen", "0"], ["--seqlen", "0", "at least 1"]),
        (["--shape", "gpt2"], ["--shape", "gpt2", "minilm"]),
        (["--dtype", "float8"], ["--dtype", "float8", "bfloat16"]),
        (["--plot", "x.txt"], ["--plot", "'.txt'", ".png"]),
    ],
)
def test_bad_arguments_are_named(args, words, capsys):
    with pytest.raises(SystemExit) as error:
        cli.parse_args(args)
    assert error.value.code == 2
    message = capsys.readouterr().err
    for word in words:
        assert word in message


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_target_that_cannot_be_written_is_refused_before_anything_is_measured(option, monkeypatch, capsys):
    monkeypatch.setattr(roofline, "measure_limits", lambda *args, **kwargs: pytest.fail("measured first"))
    with pytest.raises(SystemExit) as error:
        cli.main([*TINY, "--rungs", "1", option, "no/such/folder/out.png"])
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert option in message and "no/such/folder" in message.replace("\\", "/")


class BrokenRung:
    """A rung whose answer is a little wrong, or whose call fails."""

    name, title, number, needs_triton, features, max_head_dim = "step99_broken", "Broken", 99, False, frozenset(), None

    def __init__(self, attention):
        self.attention = attention

    def why_not(self, problem):
        return None

    def bytes_moved(self, problem):
        return 0


def wrong(q, k, v, *, causal, scale):
    return rungs.find(1).attention(q, k, v, causal=causal, scale=scale) * 1.05


def nan(q, k, v, *, causal, scale):
    out = rungs.find(1).attention(q, k, v, causal=causal, scale=scale)
    out[0, 0, 0, 0] = float("nan")
    return out


def crash(q, k, v, *, causal, scale):
    raise RuntimeError("illegal memory access")


@pytest.mark.parametrize(
    "attention, reason", [(wrong, "over the budget"), (nan, "not finite"), (crash, "illegal memory access")]
)
def test_a_wrong_rung_fails_the_climb_and_says_why(attention, reason, known_limits, monkeypatch, capsys):
    problem = AttentionProblem(Hq=2, Hkv=2, Sq=32, Sk=32, D=16, Dv=16)
    (step,) = climb.climb(problem, [BrokenRung(attention)], torch.device("cpu"), with_peers=False)
    assert not step.ok and reason in step.row["reason"]

    monkeypatch.setattr(rungs, "parse", lambda text: [BrokenRung(attention)])
    assert cli.main([*TINY, "--no-peers"]) == 1
    captured = capsys.readouterr()
    assert "FAIL" in captured.out and reason.split()[0] in captured.out and "failed parity" in captured.err


def test_the_real_input_takes_the_mask_and_the_dtype_that_were_asked_for():
    chosen = climb.problems(torch.device("cpu"), shapes=["minilm"], masks=(True,), dtype="float32")
    assert [(p.input, p.causal, p.dtype) for p in chosen] == [("minilm", True, "float32")]


def test_progress_is_reported_rung_by_rung():
    seen = []
    problem = AttentionProblem(Hq=1, Hkv=1, Sq=8, Sk=8, D=16, Dv=16)
    done = dict(with_peers=False, on_step=lambda step: seen.append(step.impl))
    climb.climb(problem, rungs.parse("1-3"), torch.device("cpu"), **done)
    assert seen == ["step01_naive", "step02_tiled", "step03_online_softmax"]


@pytest.mark.parametrize("done", (0, 1))
def test_an_interrupted_climb_keeps_the_problems_that_were_measured(known_limits, monkeypatch, tmp_path, capsys, done):
    real, seen = climb.climb, []

    def stops(*args, **kwargs):
        if len(seen) == done:
            raise KeyboardInterrupt
        seen.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(climb, "climb", stops)
    file = tmp_path / "climb.json"
    args = [*TINY[:2], "--seqlen", "24", "40", *TINY[4:], "--rungs", "1", "--no-peers", "--json", str(file)]
    assert cli.main(args) == 130
    assert f"{2 - done} of 2 problems are not measured" in capsys.readouterr().err
    assert file.exists() == bool(done)
    if done:
        doc = results.load(file)
        assert doc["complete"] is False and len(doc["not_run"]) == 1 and len(doc["rows"]) == 1


def test_keep_adds_to_a_record(known_limits, tmp_path, capsys):
    file, base = tmp_path / "climb.json", [*TINY[:2], "--no-peers"]
    assert cli.main([*base, "--seqlen", "24", *TINY[4:], "--rungs", "1", "--json", str(file)]) == 0
    assert cli.main([*base, "--seqlen", "40", *TINY[4:], "--rungs", "1-2", "--keep", "--json", str(file)]) == 0
    doc = results.load(file)
    assert [(row["impl"][:6], row["case"]["Sq"], "recorded" in row) for row in doc["rows"]] == [
        ("step01", 40, False), ("step02", 40, False), ("step01", 24, True)
    ]  # fmt: skip
    assert doc.get("complete", True)
    file.write_text("{}")
    assert cli.main([*base, "--seqlen", "24", *TINY[4:], "--rungs", "1", "--keep", "--json", str(file)]) == 2
    assert "climb.json" in capsys.readouterr().err and file.read_text() == "{}"
    with pytest.raises(SystemExit):
        cli.main([*base, "--keep"])
    assert "wants --json FILE" in capsys.readouterr().err


def test_a_full_disk_costs_no_earlier_file(known_limits, tmp_path, capsys, full_disk):
    for option, file in (("--json", tmp_path / "climb.json"), ("--plot", tmp_path / "climb.png")):
        file.write_text("before")
        with full_disk():
            assert cli.main([*TINY, "--rungs", "1-2", "--no-peers", option, str(file)]) == 2
        assert f"cannot write {file}: " in capsys.readouterr().err and file.read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 2, "nothing partial is left"


def test_keep_does_not_forget_that_a_run_was_cut_short(known_limits, tmp_path):
    file = tmp_path / "climb.json"
    base = ["--shape", "plain", "--no-peers", "--rungs", "1", "--json", str(file)]
    assert cli.main([*base, "--seqlen", "24", *TINY[4:]]) == 0
    lost = [AttentionProblem(Hq=16, Hkv=16, Sq=n, Sk=n, D=128, Dv=128, causal=True, dtype="float16") for n in (40, 56)]
    lost = [p.label() for p in lost]
    results.write({**results.load(file), "complete": False, "not_run": lost}, file)
    assert cli.main([*base, "--keep", "--seqlen", "32", *TINY[4:]]) == 0
    doc = results.load(file)
    assert doc["complete"] is False and doc["not_run"] == lost and len(doc["rows"]) == 2
    assert cli.main([*base, "--keep", "--seqlen", "40", *TINY[4:]]) == 0
    assert results.load(file)["not_run"] == lost[1:], "what is measured now is missing no more"
    assert cli.main([*base, "--keep", "--seqlen", "56", *TINY[4:]]) == 0
    assert results.load(file).get("complete", True) and len(results.load(file)["rows"]) == 4


def test_a_record_that_breaks_during_a_run_does_not_take_it_along(known_limits, monkeypatch, tmp_path, capsys):
    file, real = tmp_path / "climb.json", climb.climb
    run = [*TINY[:2], "--no-peers", "--seqlen", "24", *TINY[4:], "--rungs", "1", "--json", str(file)]
    assert cli.main(run) == 0

    def breaks(*args, **kwargs):
        file.write_text("{}")
        return real(*args, **kwargs)

    monkeypatch.setattr(climb, "climb", breaks)
    assert cli.main([*run, "--keep"]) == 0
    assert file.read_text() == "{}" and len(results.load(tmp_path / "climb.new.json")["rows"]) == 1
    assert "this run alone goes to" in capsys.readouterr().err
