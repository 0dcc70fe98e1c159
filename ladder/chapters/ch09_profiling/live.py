"""Where the reader's GPU spends the time of a prompt, by torch.profiler: the live cell of chapter 09.

The model is DeepSeek-V2-Lite with random weights and only a few layers, so that it fits a small card. All of its
layers after the first are alike, so the shares of a few are about the shares of all.
"""

import dataclasses
import functools
import re

import torch

from ladder.chapters import live_process, plots
from ladder.chapters.ch09_profiling.tables import end_to_end
from ladder.lab import results
from ladder.lab.names import title

TOKENS = 16384
BACKENDS = ("step07", "step08")
ATTENTION = r"dflash\d_(prefill|decode|mla|merge)|fused_attention|flash_fwd|fmha|scaled_dot_product"  # not fused norms
TOPIC = live_process.Topic(
    "profile", "ladder.chapters.ch09_profiling.live",
    "profiles a prompt of 16,384 tokens with the attention of step 07 and of step 08, and lists the kernels that take "
    "its time on your GPU.",
    ("step0*/**/*.py", "engine/**/*.py", "profile/*.py", "contract.py", "chapters/ch09_profiling/live.py"),
)  # fmt: skip


def show(*, again=False):
    """The profile of this machine's GPU; None, with the reason printed, where there is none. ``again``: not cached."""
    doc = live_process.document(TOPIC, again)
    return doc and Profile(doc)


def model(device):
    """DeepSeek-V2-Lite with as many layers as fit the card, two to four of them."""
    from ladder.engine.models import find

    spec = find("deepseek-v2-lite")
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    layers = min(4, max(2, int((free - 4e9) // 1.3e9)))  # a layer weighs 1.2 GB
    return dataclasses.replace(spec, config=dataclasses.replace(spec.config, num_layers=layers))


def measure(name, doing, device="cuda", spec=None, tokens=TOKENS, backends=BACKENDS):
    """The document: a row for each backend."""
    from ladder.engine import bench
    from ladder.engine.engine import Engine
    from ladder.engine.sampling import SamplingParams
    from ladder.profile import measure as profile

    device = torch.device(device)
    spec = spec or model(device)
    prompt = [[n % (spec.config.vocab - 1) + 1 for n in range(tokens)]]
    rows = []
    for number, backend in enumerate(backends):
        doing(number, len(backends), f"a prompt of {tokens:,} tokens with {backend}")
        case = {"mode": "profile", "model": spec.name, "layers": spec.config.num_layers, "tokens": tokens}
        try:
            engine = Engine(
                spec, backend, device=device, kv_tokens=tokens + 64, max_len=tokens + 8, max_seqs=1, chunk_tokens=tokens
            )
            batch = functools.partial(engine.generate, prompt, SamplingParams(max_tokens=1))
            found = profile(batch, attention=ATTENTION)
        except (torch.OutOfMemoryError, ValueError) as error:  # the engine refuses what would not fit
            rows.append({"case": case, "impl": backend, "skipped": str(error).splitlines()[0]})
            continue
        rows.append(results.row(
            case, engine.backend.name, step_ms=found.step_ms, work_ms=found.work_ms, busy=found.busy_share,
            attention_ms=found.attention_share * found.work_ms, attention=found.attention_names,
            other=found.other_names,
        ))  # fmt: skip
        bench.release(engine)
    return results.document(rows, device=device)


class Profile(live_process.Shown):
    """The kernels of a prompt under two backends, and what Amdahl's law says of the change."""

    def verdict(self):
        """Attention's share under both, predicted and measured gain."""
        if len(self.measured) < 2:
            return f"The model could not be profiled here: {self.doc['rows'][-1].get('skipped', '')}"
        old, new = self.measured
        if not (old["attention_ms"] and new["attention_ms"]):
            return "The profiler saw no kernel of attention, by its name, under one of the two."
        share, gain = old["attention_ms"] / old["work_ms"], old["attention_ms"] / new["attention_ms"]
        whole, predicted = old["work_ms"] / new["work_ms"], end_to_end(share, gain)
        return (
            f"With {title(old['impl'])} attention takes {share:.0%} of the time of a prompt. With {title(new['impl'])} "
            f"it is {gain:.2f} x as fast, so Amdahl's law promises {predicted:.2f} x for the whole prompt. Measured: "
            f"{whole:.2f} x. What is more than promised comes from the launches around attention that step 08 fuses."
        )

    def table(self):
        """(headings, rows of text): the longest kernels of each backend."""
        lines = []
        for row in self.doc["rows"]:
            if "skipped" in row:
                lines.append((row["impl"], row["skipped"], "", "", ""))
                continue
            kernels = [(ms, name, "yes") for name, ms in row["attention"].items()]
            kernels += [(ms, name, "") for name, ms in row["other"].items()]
            for ms, name, ours in sorted(kernels, reverse=True)[:8]:
                lines.append((title(row["impl"]), _short(name), ours, f"{ms:.3g}", f"{ms / row['work_ms']:.0%}"))
        return ("backend", "kernel", "attention", "ms", "of the time"), lines

    @plots.styled
    def figure(self):
        """Milliseconds of attention and of everything else."""
        figure, axes = plots.canvas(2.4)
        for place, row in enumerate(reversed(self.measured)):
            ours, rest = row["attention_ms"], row["work_ms"] - row["attention_ms"]
            named = place == 0
            axes.barh(place, ours, color=plots.BLUE, edgecolor=plots.INK, lw=0.6, label="attention" if named else None)
            axes.barh(
                place, rest, left=ours, color=plots.PALE, edgecolor=plots.INK, lw=0.6, hatch="//",
                label="the rest" if named else None,
            )  # fmt: skip
            axes.text(ours + rest, place, f" {ours + rest:.3g} ms", va="center", fontsize=9)
        axes.set_yticks(range(len(self.measured)), [title(row["impl"]) for row in reversed(self.measured)])
        axes.margins(x=0.12)
        axes.set_xlabel(f"milliseconds of GPU time, {self.measured[0]['case']['layers']} layers")
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, 1.35), ncol=2)
        return figure


def _short(kernel):
    """A kernel's name without template arguments and return type; of a mangled C++ name the parts that are names."""
    if kernel.startswith("_ZN"):
        parts, rest = [], kernel[3:]
        while digits := re.match(r"\d+", rest):
            end = digits.end() + int(digits[0])
            parts.append(rest[digits.end() : end])
            rest = rest[end:]
        kernel = "::".join(parts)
    name = kernel.split("<")[0].removeprefix("void ")
    return name if len(name) <= 48 else name[:45] + "..."


if __name__ == "__main__":
    live_process.serve(measure, [TOPIC.name])
