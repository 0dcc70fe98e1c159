"""``python -m ladder.engine``: what it prints, writes and refuses."""

import json
import os
import subprocess
import sys

import pytest
import torch
from support import ROOT
from support.engine_models import MLA, TINY

from ladder.engine import __main__ as cli
from ladder.engine import bench
from ladder.engine.models import tiny_moe
from ladder.lab import results


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "tiny_moe.safetensors"
    tiny_moe.save(tiny_moe.TinyMoE(TINY.config).initialise(0, 0.3), path, dtype=torch.float32)
    return path


def run(*arguments):
    return cli.main([str(a) for a in arguments])


def test_generate_streams_and_logs(weights, capsys):
    common = ("generate", "--checkpoint", weights, "--device", "cpu", "--max-tokens", 5)
    assert run(*common, "--backend", "step04", "--prompt", "import ") == 0
    out, err = capsys.readouterr()
    assert out.startswith("import ") and out.endswith("\n") and len(out) > len("import ") + 2
    assert "attention backend step04_gqa" in err and "KV pool 64 tokens in 1 pages of 64" in err and "5 tokens in" in err
    assert run(*common, "--backend", "sdpa", "--prompt", "import ") == 0
    assert capsys.readouterr().out == out
    assert run(*common, "--backend", "sdpa", "--prompt", "import ", "--prompt", "def ") == 0
    both = capsys.readouterr().out
    assert both.startswith("--- 0\n" + out.rstrip("\n")) and "--- 1\ndef " in both


def test_generate_on_the_eager_path(weights):
    """Without the interpreter step 08 runs on CPU tensors by itself, and gives the yardstick's text."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    texts = {}
    for backend in ("step08", "sdpa"):
        command = [sys.executable, "-m", "ladder.engine", "generate", "--checkpoint", str(weights), "--backend", backend,
                   "--device", "cpu", "--prompt", "def main(", "--max-tokens", "40"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        texts[backend] = done.stdout
    assert texts["step08"] == texts["sdpa"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("generate", "--prompt", "x", "--backend", "nix"), "backend is 'nix'; want one of sdpa"),
        (("generate", "--prompt", "x" * 300), "want at most 256, the context of tiny-moe"),
        (("generate", "--prompt-ids", "1,b"), "want integers with commas"),
        (("generate", "--prompt-ids", "1,999", "--backend", "sdpa"), "token 999; want 0 .. 255"),
        (("bench", "--backend", "sdpa", "--mem-fraction", "1e-9", "--input-len", "8", "--output-len", "4"), "GiB for weights"),
        (("bench", "--backend", "sdpa"), "max_len is 4608; want at most 256"),
    ),
)
def test_errors_are_one_line(arguments, message, weights, capsys):
    assert run(*arguments, "--checkpoint", weights, "--device", "cpu") == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


def test_errors_of_arguments(capsys):
    for arguments, message in (
        (("generate",), "want prompts as text or as --prompt-ids"),
        (("generate", "--prompt", "x", "--window", "4"), "is not SINK,WINDOW"),
        (("bench", "--input-len", "0"), "--input-len: 0; want at least 1"),
        (("bench", "--json", "/nowhere/x.json"), "cannot write /nowhere/x.json"),
        (("generate", "--prompt", "x", "--window", "4"), "argument --window: '4' is not"),
        (("bench", "--memory-table", "--requests", "-1"), "--requests: -1; want at least 0"),
        (("bench", "--with-transformers"), "transformers has no tiny-moe"),
        (("quality", "--sequences", "0"), "--sequences: 0; want at least 1"),
        (("quality", "--context", "0"), "--context: 0; want at least 2"),
    ):
        with pytest.raises(SystemExit):
            run(*arguments)
        assert message in capsys.readouterr().err
    assert run("generate", "--model", "deepseek-v2-lite", "--prompt", "x") == 2
    assert "give the prompt as numbers, --prompt-ids" in capsys.readouterr().err


def test_bench_says_first_that_transformers_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        run("bench", "--model", "deepseek-v2-lite", "--with-transformers")
    assert "needs the package transformers" in capsys.readouterr().err


def test_weights_that_are_no_safetensors(tmp_path, capsys):
    (tmp_path / "weights").write_text("[project]")
    assert run("generate", "--prompt", "x", "--checkpoint", tmp_path / "weights", "--device", "cpu") == 2
    assert "is no safetensors file" in capsys.readouterr().err


def test_quality_beyond_the_context(weights, capsys):
    assert run("quality", "--context", "257", "--sequences", "1", "--checkpoint", weights, "--device", "cpu") == 2
    assert "context is 257; want at most 256" in capsys.readouterr().err


def test_bench_writes_results(weights, tmp_path, capsys):
    file = tmp_path / "out.json"
    assert run("bench", "--checkpoint", weights, "--backend", "step04", "--device", "cpu", "--input-len", 20, "--output-len", 6,
               "--concurrency", 3, "--fit", "--page-size", 16, "--json", file) == 0  # fmt: skip
    doc = results.load(file)
    (row,) = doc["rows"]
    assert row["case"] == {"mode": "engine", "model": "tiny-moe", "input_len": 20, "output_len": 6, "concurrency": 3, "dtype": "float32",
                           "weights": "checkpoint"}  # fmt: skip
    assert row["impl"] == "step04_gqa" and row["output_tokens"] == 18 and row["kv_pool_tokens"] == 3 * 32
    assert 0 < row["ttft_p50_ms"] <= row["ttft_ms"] and 0 < row["itl_ms"] <= row["itl_p99_ms"] and row["tok_s"] > 0
    assert "TTFT" in capsys.readouterr().out


def test_bench_of_two_backends_is_one_document(weights, tmp_path):
    file = tmp_path / "out.json"
    assert run("bench", "--checkpoint", weights, "--backend", "step04,sdpa", "--device", "cpu", "--input-len", 9, "--output-len", 3,
               "--concurrency", 2, "--json", file) == 0  # fmt: skip
    assert [row["impl"] for row in results.load(file)["rows"]] == ["step04_gqa", "sdpa"]
    assert run("bench", "--checkpoint", weights, "--backend", "step03", "--device", "cpu", "--input-len", 5, "--output-len", 3,
               "--concurrency", 2, "--keep", "--json", file) == 0  # fmt: skip
    assert [row["impl"] for row in results.load(file)["rows"]][-2:] == ["step04_gqa", "sdpa"]  # behind the new one, with their commit
    assert "commit" in results.load(file)["rows"][-1]
    doc = results.load(file)
    doc["machine"]["torch"] = "0.1"
    results.write(doc, file)
    assert run("bench", "--checkpoint", weights, "--backend", "step03", "--device", "cpu", "--keep", "--json", file) == 2


def test_interrupted_bench_keeps_what_it_has(weights, tmp_path, monkeypatch, capsys):
    file, real, calls = tmp_path / "out.json", bench.Engine.step, []

    def step(self):
        calls.append(1)
        if len(calls) == 12:  # within the measured run, after its first tokens
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(bench.Engine, "step", step)
    assert run("bench", "--checkpoint", weights, "--backend", "sdpa", "--device", "cpu", "--input-len", 20, "--output-len", 30,
               "--concurrency", 2, "--json", file) == 130  # fmt: skip
    doc = json.loads(file.read_text())
    assert doc["partial"] is True and doc["rows"][0]["partial"] is True and 0 < doc["rows"][0]["output_tokens"] < 60
    assert "partial" in capsys.readouterr().err


def test_a_run_cut_short_leaves_what_a_file_has(weights, tmp_path, monkeypatch, capsys):
    file, real, calls = tmp_path / "out.json", bench.Engine.step, []
    shape = ("--checkpoint", weights, "--device", "cpu", "--input-len", 9, "--output-len", 20, "--concurrency", 2)
    assert run("bench", "--backend", "sdpa", *shape, "--json", file) == 0
    whole = file.read_text()

    def step(self):
        calls.append(1)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(bench.Engine, "step", step)
    stop = 1  # before there is a row
    assert run("bench", "--backend", "sdpa", *shape, "--json", file) == 130
    assert file.read_text() == whole and "left as it is" in capsys.readouterr().err
    stop, calls[:] = 12, []  # within it: a partial row does not replace a whole one of the same case
    assert run("bench", "--backend", "sdpa", *shape, "--keep", "--json", file) == 130
    assert file.read_text() == whole


def test_what_cannot_run_is_refused_before_another_backend_is_measured(weights, tmp_path, capsys):
    for backends, dtype in (("sdpa,nonsense", "float32"), ("sdpa,step07", "bfloat16")):
        assert run("bench", "--checkpoint", weights, "--backend", backends, "--device", "cpu", "--dtype", dtype, "--json", tmp_path / "x.json") == 2
        assert "backend" in capsys.readouterr().err and not (tmp_path / "x.json").exists()


def test_memory_table(weights, capsys):
    assert run("bench", "--checkpoint", weights, "--backend", "sdpa", "--device", "cpu", "--input-len", 20, "--output-len", 12,
               "--page-size", 16, "--memory-table", "--requests", 4, "--fractions", 0.5, "--json", "-") == 0  # fmt: skip
    out, err = capsys.readouterr()
    (row,) = json.loads(out)["rows"]
    assert row["mixed_requests"] == 4 and row["out_of_memory"] == 0 and row["concurrency"] >= 1
    assert row["concurrency"] == row["kv_pool_tokens"] // 32  # 20 + 12 tokens are two pages of 16
    assert "at once" in err


def test_percentile():
    assert bench.percentile([3, 1, 2], 0.5) == 2 and bench.percentile(list(range(100)), 0.99) == 99


def test_transformers_peer_runs():
    pytest.importorskip("transformers", minversion="5.0")
    row = bench.transformers_peer(MLA, input_len=20, output_len=3, concurrency=2, dtype=torch.float32, device="cpu")
    assert row["measured_steps"] == 3 and row["itl_ms"] > 0 and row["impl"].startswith("transformers")
    with pytest.raises(RuntimeError, match="transformers has no tiny-moe"):
        bench.transformers_peer(TINY, input_len=2, output_len=2, concurrency=1)


def test_a_memory_table_takes_several_backends_and_keeps_what_fits(weights, tmp_path, monkeypatch, capsys):
    file = tmp_path / "out.json"
    shape = ("bench", "--checkpoint", weights, "--device", "cpu", "--input-len", 8, "--output-len", 4, "--memory-table", "--json", file)
    assert run(*shape, "--backend", "step04_gqa,sdpa", "--fractions", 0.4, 0.5) == 0
    rows = results.load(file)["rows"]
    assert [(r["impl"], r["case"]["mem_fraction"]) for r in rows] == [(b, f) for b in ("step04_gqa", "sdpa") for f in (0.4, 0.5)]
    assert {r["limited_by"] for r in rows} == {"max_seqs"}
    file.unlink()
    assert run(*shape, "--backend", "sdpa", "--fractions", 0.5, 1e-9) == 2  # the second holds no model
    doc = results.load(file)
    assert doc["partial"] is True and [r["case"]["mem_fraction"] for r in doc["rows"]] == [0.5]
    real = bench.memory_table

    def table(*arguments, fractions, **options):
        if fractions == [0.5]:
            raise bench.Interrupted([])
        return real(*arguments, fractions=fractions, **options)

    monkeypatch.setattr(bench, "memory_table", table)
    assert run(*shape, "--backend", "sdpa", "--fractions", 0.4, 0.5) == 130
    assert [r["case"]["mem_fraction"] for r in results.load(file)["rows"]] == [0.4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("--fit", "--page-size", "0"), "--page-size: 0; want at least 1"),
        (("--chunk-tokens", "0"), "--chunk-tokens: 0; want at least 1"),
        (("--memory-table", "--fractions", "0.9", "1.5"), "--fractions: 1.5; want above 0, at most 1"),
        (("--memory-table", "--fractions", "nan"), "--fractions: nan; want above 0"),
    ),
)
def test_sizes_that_are_none_are_refused_before_anything_is_measured(arguments, message, capsys):
    with pytest.raises(SystemExit):
        run("bench", *arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("prompt", (("--prompt", ""), ("--prompt-ids", "1,999"), ("--prompt-ids", "-1")))
def test_a_prompt_that_is_none_is_refused_before_loading(prompt, weights, monkeypatch, capsys):
    monkeypatch.setattr(cli, "Engine", None)
    assert run("generate", "--checkpoint", weights, "--device", "cpu", "--backend", "sdpa", *prompt) == 2
    assert "engine: prompt" in capsys.readouterr().err


def test_interrupted_while_loading(weights, monkeypatch, capsys):
    def load(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "Engine", load)
    assert run("generate", "--checkpoint", weights, "--device", "cpu", "--prompt", "x") == 130
    assert "interrupted before there was an answer" in capsys.readouterr().err


def test_interrupted_quality_keeps_the_policies_that_are_done(weights, tmp_path, monkeypatch, capsys):
    file, calls = tmp_path / "out.json", []

    def bits(*_):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr("ladder.engine.quality.bits_per_byte", bits)
    assert run("quality", "--checkpoint", weights, "--device", "cpu", "--context", 64, "--sequences", 1, "--json", file) == 130
    doc = results.load(file)
    assert doc["partial"] is True and [r["case"]["policy"] for r in doc["rows"]] == ["exact"]


def test_a_stream_shows_what_it_held_back(capsys):
    """An answer that ends within a character: the same text as when several answers are shown at their end."""
    half = "é".encode()[0]
    for show, tokens in ((cli.Streams(["x"], cli.Bytes()), [97, half]), (cli.Streams(["x"], Words()), [0, 1])):
        capsys.readouterr()
        for token in tokens:
            show.event(cli_event(token), ())
        show.close()
        assert capsys.readouterr().out == "a\ufffd\n"


class Words:
    """A tokenizer whose second token is half a character."""

    def decode(self, ids):
        return "".join(("a", "\ufffd")[n] for n in ids)


def cli_event(token):
    from ladder.engine.engine import Event

    return Event(0, token, None)


def test_backends_have_the_names_of_rungs():
    for name in ("step04", "4", "04", "step04_gqa", "step08_dflash2", "8", "sdpa"):
        cli.backends.make(name, "cpu")
    for name in ("step04_gqa,sdpa", "step08_nonsense", "step09_x", "step00", "9", ""):
        with pytest.raises(ValueError, match="backend is .*; want one of sdpa"):
            cli.backends.make(name, "cpu")


def test_keep_wants_a_file(capsys):
    assert run("bench", "--model", "tiny-moe", "--device", "cpu", "--keep") == 2
    assert "want --json FILE" in capsys.readouterr().err


def test_repeats_count_the_preemptions_of_one_run(monkeypatch):
    """A pool that makes somebody give way, in every run alike."""
    from ladder.engine import bench
    from ladder.engine.models import find

    options = dict(concurrency=4, input_len=60, output_len=120, kv_tokens=512, device="cpu")
    once, thrice = (bench.throughput(find("tiny-moe"), "sdpa", repeats=n, **options) for n in (1, 3))
    assert once["preemptions"] == thrice["preemptions"] > 0 and thrice["repeats"] == 3
