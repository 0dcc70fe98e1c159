"""The limits of the reader's GPU beside the recorded ones: the live cell of chapter 00."""

import torch

from ladder.chapters import live_process, plots
from ladder.lab import results
from ladder.lab.roofline import measure_limits

TOPIC = live_process.Topic(
    "machine", "ladder.chapters.live_machine",
    "measures how fast your GPU multiplies matrices and reads memory, and draws its limits beside the recorded ones.",
    ("lab/roofline.py", "lab/timing.py"),
)  # fmt: skip


def show(*, again=False):
    """The limits of this machine's GPU; None, with the reason printed, where there is none. ``again``: not cached."""
    doc = live_process.document(TOPIC, again)
    return doc and Machine(doc)


def measure(name, doing, device="cuda"):
    """The document: one row with the GPU's size, and its limits."""
    doing(0, 1, "a matrix product, and reading and copying memory")
    small = device == "cpu" or torch.cuda.mem_get_info(device)[0] < 16e9
    limits = measure_limits(device, quick=small)
    size = {}
    if device != "cpu":
        card = torch.cuda.get_device_properties(device)
        size = {"sms": card.multi_processor_count, "bytes": card.total_memory}
    row = results.row({"mode": "machine"}, "gpu", ridge=round(limits.ridge, 2), **size)
    return results.document([row], device=device, limits=limits)


class Machine(live_process.Shown):
    """This machine's limits beside those of the recorded results."""

    def verdict(self):
        """What limits attention here."""
        ridge = self.doc["rows"][0]["ridge"]
        return (
            f"{self.where}: work with fewer than {ridge:.0f} FLOPs per byte is limited by memory here, work with more "
            "by arithmetic."
        )

    def table(self):
        """(headings, rows of text)."""
        here, there = self.doc["limits"], results.load("ladder")
        recorded = there["limits"]
        rows = [
            (f"{what}, {unit}", f"{here[name]:.3g}", f"{recorded[name]:.3g}")
            for what, unit, name in (
                ("matrix product", "TFLOP/s", "matmul_tflops"), ("read", "TB/s", "read_tbs"),
                ("copy, read and write counted", "TB/s", "copy_tbs"),
            )
        ]  # fmt: skip
        ridges = [f"{x['matmul_tflops'] / x['read_tbs']:.0f}" for x in (here, recorded)]
        rows.append(("ridge, FLOPs per byte", *ridges))
        row = self.doc["rows"][0]
        if "sms" in row:
            rows += [("memory", plots.size(row["bytes"]), ""), ("SMs", str(row["sms"]), "")]
        return ("", "here", f"recorded on {there['machine']['gpu']}"), rows

    def figure(self):
        """The roofline of this machine, without a dot on it yet."""
        note = "Your GPU in bf16. Look at where the slope ends: this many FLOPs per byte keep its arithmetic busy."
        return plots.roofline(self.doc["limits"], [], title=f"The limits of {self.where}", note=note)


if __name__ == "__main__":
    live_process.serve(measure, [TOPIC.name])
