"""The commands: every benchmark lists its cells, and older names still run what they name."""

import subprocess
import sys

import pytest
import torch
from support import ROOT

from ladder import OLD_COMMANDS
from ladder.bench import harness
from ladder.bench.__main__ import NAMES, main


@pytest.mark.parametrize("old, new", OLD_COMMANDS.items())
def test_an_old_command_runs_the_new_one(old, new):
    done = subprocess.run([sys.executable, "-m", old, "--help"], cwd=ROOT, capture_output=True, text=True)
    now = new.replace("ladder.bench.", "ladder.bench ") if ".bench." in new else new.rpartition(".")[2]
    assert done.returncode == 0 and "usage: " in done.stdout and now in done.stdout.splitlines()[0], done.stderr


def test_a_module_that_never_was_is_still_missing():
    done = subprocess.run([sys.executable, "-m", "ladder.bench_v3"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "No module named ladder.bench_v3" in done.stderr


@pytest.mark.parametrize("name", ["step07", "step08", "fusion", "variants"])
def test_every_benchmark_names_its_cells_once(name, capsys):
    assert main([name, "--list"]) == 0
    cells = capsys.readouterr().out.splitlines()
    assert cells and len(set(cells)) == len(cells)
    assert main([name, "--list", "--cells", f"^{cells[-1].split()[0]}"]) == 0
    assert cells[-1] in capsys.readouterr().out.splitlines()


def test_no_name_and_a_wrong_one_list_the_names(capsys):
    for argv, code in (([], 2), (["step09"], 2), (["--help"], 0)):
        assert main(argv) == code
        said = capsys.readouterr()
        assert all(name in said.out + said.err for name in NAMES)


def test_step07_lists_its_sweeps_when_asked(capsys):
    assert main(["step07", "--list", "--sweep", "--cells", "^sweep"]) == 0
    assert "sweep groups" in capsys.readouterr().out.splitlines()


def test_peers_leave_out_other_peoples_implementations_alone():
    """A suite's own rungs are always measured; of rung 08's suite only those behind its first may be left out."""
    from types import SimpleNamespace

    def measured(suite, peers, *names):
        calls = {name: lambda: torch.zeros(1) for name in names}
        bench = harness.Bench(torch.device("cpu"), dry=True, left_out=harness._optional(suite) - set(peers.split(",")))
        bench.work(harness.Work({"mode": "test"}, calls), "a cell")
        return [row["impl"] for row in bench.rows]

    step07, step08 = SimpleNamespace(impls=()), SimpleNamespace(impls=("step08_dflash2", "step07_dflash1"))
    assert measured(step07, "fa3", "step06_paged", "step07_dflash1", "fa3", "flex") == ["step06_paged", "step07_dflash1", "fa3"]
    assert measured(step08, "fa3", "step08_dflash2", "step07_dflash1", "fa3") == ["step08_dflash2", "fa3"]
