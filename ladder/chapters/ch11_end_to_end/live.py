"""The engine on the reader's GPU, at a size that fits the card: the live cell of chapter 11."""

import dataclasses

import torch

from ladder.chapters import live_process, plots
from ladder.lab import results
from ladder.lab.names import title

BACKENDS = ("step07", "step08")
SHAPE = dict(input_len=4096, output_len=512, concurrency=8)
PROMPT = "import math\n\n\ndef area(radius):\n    return math.pi * radius ** 2\n\n\nclass Circle:\n    def "
TOPIC = live_process.Topic(
    "engine", "ladder.chapters.ch11_end_to_end.live",
    "compares the logits of the small model under step 07 and step 08 with float32, serves 8 requests of 4,096 + 512 "
    "tokens with a large one, as many of its layers as fit, and shows your GPU beside the record.",
    ("step0*/**/*.py", "engine/**/*.py", "contract.py", "chapters/ch11_end_to_end/live.py"),
)  # fmt: skip


def show(*, again=False):
    """The engine on this machine's GPU; None, with the reason printed, where there is none. ``again``: not cached."""
    doc = live_process.document(TOPIC, again)
    return doc and Served(doc)


def model(device):
    """DeepSeek-V2-Lite with random weights, cut to the layers that fit the card's free memory."""
    from ladder.engine.models import find

    spec = find("deepseek-v2-lite")
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    layers = min(spec.config.num_layers, max(2, int((0.85 * free - 4.5e9) // 1.3e9)))  # a layer and its cache
    return dataclasses.replace(spec, config=dataclasses.replace(spec.config, num_layers=layers))


def logits(backend, device, dtype):
    """tiny-moe's logits (vocab,) for the token after ``PROMPT``, in float32."""
    from ladder.engine.engine import Engine
    from ladder.engine.models import find
    from ladder.engine.sampling import SamplingParams

    engine = Engine(find("tiny-moe"), backend, device=device, dtype=dtype, kv_tokens=512, max_seqs=1)
    prefill, seen = engine.runner.prefill, []

    def watched(chunks):
        seen.append(prefill(chunks))
        return seen[-1]

    engine.runner.prefill = watched
    engine.generate([list(PROMPT.encode())], SamplingParams(max_tokens=1))
    return seen[-1][-1].float()


def parity(device, low, backends):
    """Rows: the relative distance of each backend's logits in ``low`` precision from PyTorch's in float32.

    PyTorch's own attention in the same precision sets the budget, with half of it to spare: the model rounds
    everywhere, not only in attention.
    """
    want = logits("sdpa", device, torch.float32)
    error = {b: float((logits(b, device, low) - want).norm() / want.norm()) for b in ("sdpa", *backends)}
    budget = 1.5 * error["sdpa"] + 1e-5
    return [
        results.row({"mode": "logits", "model": "tiny-moe"}, backend, max_error=error[backend], budget=budget,
                    ok=error[backend] <= budget)
        for backend in backends
    ]  # fmt: skip


def measure(name, doing, device="cuda", spec=None, shape=SHAPE, low=torch.bfloat16, backends=BACKENDS, **options):
    """The document: rows of logits, and a row of served requests for each backend."""
    from ladder.engine import bench

    device = torch.device(device)
    doing(0, 3, "logits of tiny-moe in bf16 against float32")
    try:
        rows = parity(device, low, backends)
    except (torch.OutOfMemoryError, ValueError) as error:
        rows = [_left_out({"mode": "logits", "model": "tiny-moe"}, "logits", error)]
    spec = spec or model(device)
    for number, backend in enumerate(backends, 1):
        doing(number, 3, f"{shape['concurrency']} requests with {backend}")
        try:
            row = bench.throughput(spec, backend, **shape, fit=True, device=device, **options)
        except (torch.OutOfMemoryError, ValueError) as error:  # the engine refuses what would not fit
            row = _left_out(bench.case(spec, **shape), backend, error)
        row["layers"] = spec.config.num_layers
        rows.append(row)
    return results.document(rows, device=device)


def _left_out(case, impl, error):
    return {"case": case, "impl": impl, "skipped": str(error).splitlines()[0]}


class Served(live_process.Shown):
    """Time to first token, time between tokens and throughput of two backends, here and as recorded."""

    FIELDS = (("ttft_ms", "time to first token, ms"), ("itl_ms", "between tokens, ms"), ("tok_s", "tokens/s"))

    @property
    def served(self):
        """Rows of requests that were served."""
        return [row for row in self.measured if row["case"]["mode"] == "engine"]

    def recorded(self, row):
        """The published row of the same case, or an empty dict: only the whole model is recorded."""
        from ladder.engine.models import find

        if row["layers"] != find("deepseek-v2-lite").config.num_layers:
            return {}
        found = [e for e in results.select(results.load("engine"), row["impl"], **row["case"]) if "ttft_ms" in e]
        return found[0] if found else {}

    def verdict(self):
        """Whether the logits are right, and the ratios of the two backends."""
        wrong = [row for row in self.measured if not row.get("ok", True)]
        if wrong:
            return "Parity FAILED. " + "; ".join(
                f"{row['impl']}: logits are {row['max_error']:.1e} from float32, budget {row['budget']:.1e}"
                for row in wrong
            )
        said = ""
        if any(row["case"]["mode"] == "logits" for row in self.measured):
            said = "Parity ok: both backends' logits are as near to float32 as those of PyTorch's own attention."
        if len(self.served) < 2:
            return f"{said} {self.doc['rows'][-1].get('skipped', 'Nothing was served.')}".strip()
        old, new = self.served
        return (
            f"{said} From step 07 to step 08 the first token comes {old['ttft_ms'] / new['ttft_ms']:.2f} x as fast and "
            f"the following ones {old['itl_ms'] / new['itl_ms']:.2f} x."
        )

    def table(self):
        """(headings, rows of text)."""
        headings = ["backend", "layers"]
        headings += [text for _, name in self.FIELDS for text in (name, "recorded")]
        lines = []
        for row in self.doc["rows"]:
            if "skipped" in row:
                lines.append((title(row["impl"]), row["skipped"], *[""] * 6))
            elif row["case"]["mode"] == "engine":
                there = self.recorded(row)
                cells = [f"{x[f]:.4g}" if f in x else "" for f, _ in self.FIELDS for x in (row, there)]
                lines.append((title(row["impl"]), str(row["layers"]), *cells))
        return headings, lines

    @plots.styled
    def figure(self):
        """Bars of the three numbers, a panel each; hatched: the record."""
        figure, panels = plots.canvas(2.6, columns=3)
        for axes, (field, name) in zip(panels, self.FIELDS):
            for place, row in enumerate(self.served):
                here, there = row.get(field, 0), self.recorded(row).get(field)
                axes.bar(place - 0.2, here, width=0.4, color=plots.BLUE if place else plots.SKY, edgecolor=plots.INK)
                number = f"{here:.1f}" if here < 100 else f"{here:,.0f}"
                axes.text(place - 0.2, here, number, ha="center", va="bottom", fontsize=8)
                if there:
                    axes.bar(place + 0.2, there, width=0.4, color="none", edgecolor=plots.INK, lw=0.5, hatch="///")
            axes.set_xticks(range(len(self.served)), [row["impl"][:6] for row in self.served])
            axes.margins(y=0.15)
            axes.set_title(name, fontsize=9)
        return plots.caption(figure, "Filled: this GPU. Hatched: the record, where the whole model fits.")


if __name__ == "__main__":
    live_process.serve(measure, [TOPIC.name])
