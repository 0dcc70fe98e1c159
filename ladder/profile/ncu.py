"""What Nsight Compute wrote of each kernel, and what its two throughputs say."""

import csv

from .decide import FULL, _short
from .measure import ProfileError

COLUMNS = {  # of the raw page -> name here; the details page names them after its metrics
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute",
    "gpu__time_duration.sum": "us",
    "Memory Throughput": "memory", "Compute (SM) Throughput": "compute", "Duration": "us",
}  # fmt: skip
MICROSECONDS = {
    "nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3, "second": 1e6, "s": 1e6,
}  # fmt: skip


def read_ncu(path):
    """Kernels of ``ncu --csv``, ``--page details`` or ``--page raw``.

    Returns:
        A list of {"kernel", "launches", "us", "memory", "compute"}: microseconds in all, shares 0 .. 1 of the peak
        weighted by time; longest first.

    Raises:
        ProfileError: no table of kernels in the file.
    """
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        # ncu writes ==PROF== and the program's words too
        lines = [line for line in file if line.lstrip().startswith('"')]
    rows = list(csv.reader(lines))
    header = next((i for i, row in enumerate(rows) if "Kernel Name" in row), None)
    if header is None:
        raise ProfileError(f"{path} has no column Kernel Name; want what ncu --csv --page details (or raw) wrote")
    names = rows[header]
    launches = {}  # id -> {"kernel", metrics}
    if "Metric Name" in names:
        places = [names.index(n) for n in ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")]
        for row in rows[header + 1 :]:
            if len(row) != len(names):
                continue
            number, kernel, metric, unit, value = (row[i] for i in places)
            launch = launches.setdefault(number, {"kernel": kernel})
            if metric in COLUMNS and (unit == "%" or COLUMNS[metric] == "us"):  # Memory Throughput is in GB/s elsewhere
                launch.setdefault(COLUMNS[metric], _number(value, unit))
    else:
        wanted = {i: COLUMNS[n] for i, n in enumerate(names) if n in COLUMNS}
        units, *data = rows[header + 1 :] or [[]]
        for row in data:
            if len(row) == len(names):
                launch = launches.setdefault(row[names.index("ID")], {"kernel": row[names.index("Kernel Name")]})
                launch |= {key: _number(row[i], units[i]) for i, key in wanted.items()}
    kernels = {}
    for launch in launches.values():
        if not all(launch.get(key) is not None for key in ("us", "memory", "compute")):
            continue
        kernel = kernels.setdefault(
            launch["kernel"], dict(kernel=launch["kernel"], launches=0, us=0.0, memory=0.0, compute=0.0)
        )
        kernel["launches"] += 1
        kernel["us"] += launch["us"]
        for key in ("memory", "compute"):
            kernel[key] += launch["us"] * launch[key]
    if not kernels:
        raise ProfileError(f"{path} has no kernel with a duration, memory and compute throughput; want ncu --set full")
    for kernel in kernels.values():
        for key in ("memory", "compute"):
            kernel[key] /= kernel["us"] or 1.0
    return sorted(kernels.values(), key=lambda kernel: -kernel["us"])


def _number(value, unit):
    """A cell as microseconds or a share; None when it holds no number."""
    try:
        number = float(value.replace(",", ""))
    except ValueError:
        return None
    return number / 100 if unit == "%" else number * MICROSECONDS.get(unit, 1.0)


def describe_ncu(kernels):
    """What the two throughputs of each kernel say."""
    lines = ["Kernels by Nsight Compute (use of memory and of compute, of their peaks):"]
    for kernel in kernels:
        memory, compute = kernel["memory"], kernel["compute"]
        if memory >= FULL and compute >= FULL:
            verdict = "both used well: as it should be in prefill"
        elif memory >= FULL:
            verdict = "bound by memory: right for decode, in prefill a sign of too small tiles"
        elif compute >= FULL:
            verdict = "bound by compute: right for prefill of long contexts"
        else:
            verdict = "neither is used: latency, too few programs, or waiting within the kernel"
        lines.append(
            f"  {_short(kernel['kernel'])}: {kernel['launches']} launches, {kernel['us']:.1f} us, memory {memory:.0%}, "
            f"compute {compute:.0%}: {verdict}."
        )
    if not any("dflash" in kernel["kernel"].lower() for kernel in kernels):
        lines.append("  None of them has dflash in its name: DFlash did not run.")
    return "\n".join(lines)
