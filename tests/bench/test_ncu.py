"""Nsight Compute's table, read into rows."""

import pytest
import torch

from ladder.bench import ncu
from ladder.rungs import find


def printed(*launches):
    """What ``ncu --csv --page raw`` prints of launches {counter: value}, after the program's own words."""
    names = ["ID", "Kernel Name", *launches[0][1]]
    units = ["", "", *("ms" if name == ncu.DURATION else "%" for name in launches[0][1])]
    rows = [names, units, *([str(n), kernel, *values.values()] for n, (kernel, values) in enumerate(launches))]
    return "==PROF== Connected\na word of the program\n" + "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)


def test_rows_hold_shares_and_stalls():
    counters = {ncu.DURATION: "1.5", ncu.SHARES["tensor_cores"]: "83.83", ncu.SHARES["l2_hits"]: "96.3",
                ncu.REGISTERS: "1,168", ncu.LOCAL[0]: "2", ncu.STALL.format("barrier"): "3", ncu.STALL.format("selected"): "1"}  # fmt: skip
    short = {**dict.fromkeys(counters, "0"), ncu.DURATION: "0.25"}
    row = ncu.row("decode", find(8), ncu.read(printed(("dflash2_merge(int)", short), ("dflash2_decode(int*)", counters))))
    assert row["kernel"] == "dflash2_decode" and row["us"] == 1500 and row["us_all"] == 1750 and row["launches"] == 2
    assert row["shares"] == {"tensor_cores": 0.8383, "l2_hits": 0.963} and row["registers"] == 1168 and row["spill_instructions"] == 2
    assert row["stalls"] == {"barrier": 0.75, "selected": 0.25} and row["case"]["mode"] == "ncu_decode"


def test_no_table_is_an_error_with_its_reason():
    with pytest.raises(ValueError, match="no counters were read: ==ERROR== ERR_NVGPUCTRPERM"):
        ncu.read("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM")
    with pytest.raises(ValueError, match="it printed nothing"):
        ncu.read("")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_wants(capsys):
    with pytest.raises(SystemExit) as stopped:
        ncu.main([])
    assert stopped.value.code == 2 and "want a CUDA device and Nsight Compute" in capsys.readouterr().err


def test_the_command_asks_for_every_counter_once():
    command = ncu.command("ncu", "prefill", find(5))
    counters = command[command.index("--metrics") + 1].split(",")
    assert len(set(counters)) == len(counters) == 2 + len(ncu.SHARES) + len(ncu.LOCAL) + len(ncu.STALLS)
    assert command[-1] == "prefill:5"
