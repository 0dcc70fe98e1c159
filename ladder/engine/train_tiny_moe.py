"""Train ``tiny-moe``: ``python -m ladder.engine.train_tiny_moe --minutes 3 --out DIR``.

Plain PyTorch and autograd. Bytes of the standard library's sources (``corpus.py``), sequences of 1,024 tokens and for
the second half of the time of 4,096; bfloat16 products on float32 master weights on a GPU. Writes into DIR:

    tiny_moe.safetensors      the weights, float16
    tiny_moe_training.json    settings, corpus, loss curve, held-out bits per byte
    routing_trace.npz         the experts that held-out tokens chose, as ``dspark_mini.trace`` reads them
    tiny_moe_qkv.safetensors  attention inputs of three layers on held-out text, as ``ladder.lab.problem`` reads them

Ctrl-C leaves results of what was learnt so far, marked as unfinished,
and DIR/state.pt, from which ``--resume`` goes on.
"""

import argparse
import json
import math
import platform
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from . import corpus
from .context import Context
from .models.tiny_moe import TinyMoE, TinyMoEConfig, save

BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
LONG_AT = 0.5  # share of the run after which sequences have their full length
EVALUATE_EVERY = 0.1  # of the run
TRACE_LAYERS, TRACE_TOKENS = (0, 3, 5), 1024


class DenseContext(Context):
    """Sequences of one length, packed; causal attention by SDPA. Gathers what training wants to know about routing."""

    def __init__(self, cos_sin, seq_len, keep=False):
        self.seq_len, self.keep = seq_len, keep
        self.table = cos_sin[:seq_len]
        self.cos_sin = None
        self.balance, self.counts, self.ids, self.inputs = [], [], [], []

    def attend(self, attention, x):
        if self.cos_sin is None:
            self.cos_sin = self.table.repeat(len(x) // self.seq_len, 1)
        q, k, v = (t.unflatten(0, (-1, self.seq_len)).transpose(1, 2) for t in attention.project(x, self.cos_sin))
        if self.keep:
            self.inputs.append((q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def routed(self, layer, ids, probs):
        """Switch's balance loss: experts times sum over experts of
        (share of assignments * mean probability); 1 is even."""
        num_experts = probs.shape[1]
        share = (ids[..., None] == torch.arange(num_experts, device=ids.device)).sum(dim=(0, 1)) / ids.numel()
        self.balance.append(num_experts * (share * probs.mean(dim=0)).sum())
        self.counts.append(share.detach())
        if self.keep:
            self.ids.append(ids)


def cross_entropy(model, tokens, dtype, keep=False):
    """Mean nats a byte over tokens (B, S + 1), and the context that saw the forward."""
    seq_len = tokens.shape[1] - 1
    context = DenseContext(model.cos_sin, seq_len, keep)
    hidden = model(tokens[:, :-1].flatten(), context, dtype=dtype)
    return F.cross_entropy(model.logits(hidden), tokens[:, 1:].flatten()), context


@torch.no_grad()
def bits_per_byte(model, text, seq_len, batch, dtype, most):
    """Held-out bits per byte over windows of ``seq_len`` tokens, none overlapping, at most ``most`` tokens in all."""
    count = max(1, min((len(text) - 1) // seq_len, most // seq_len))
    windows = torch.stack([text[i * seq_len : (i + 1) * seq_len + 1] for i in range(count)]).long()
    total = 0.0
    for part in windows.split(max(1, batch)):
        total += cross_entropy(model, part, dtype)[0].item() * len(part)
    return total / count / math.log(2)


class Run:
    """One training run: its model, data, clock and record."""

    def __init__(self, args):
        self.args, self.device = args, torch.device(args.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        torch.manual_seed(args.seed)
        torch.backends.cuda.matmul.allow_tf32 = True
        config = TinyMoEConfig(**json.loads(args.config)) if args.config else TinyMoEConfig()
        with self.device:
            self.model = TinyMoE(config).initialise(args.seed)
        docs = corpus.documents(args.corpus)
        order = np.random.default_rng(args.seed).permutation(len(docs))
        load = lambda held: torch.frombuffer(  # noqa: E731
            bytearray(corpus.join([docs[i] for i in order if docs[i][2] == held])), dtype=torch.uint8
        ).to(self.device)
        self.text, self.held_out = load(False), load(True)
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=BETAS, fused=self.device.type == "cuda")
        self.generator = torch.Generator(self.device).manual_seed(args.seed)
        self.step, self.tokens, self.seconds, self.curve, self.evaluations = 0, 0, 0.0, [], []
        self.best = (math.inf, None)
        self.corpus = corpus.describe(docs)
        self.stopped = None

    @property
    def progress(self):
        share = self.seconds / (60 * self.args.minutes)
        return min(1.0, max(share, self.step / self.args.steps) if self.args.steps else share)

    def batch(self, seq_len):
        """(B, seq_len + 1) random windows of the text: the same number of tokens at every length."""
        count = max(1, self.args.batch_tokens // seq_len)
        starts = torch.randint(len(self.text) - seq_len - 1, (count, 1), generator=self.generator, device=self.device)
        return self.text[starts + torch.arange(seq_len + 1, device=self.device)].long()

    def learning_rate(self):
        warm = min(1.0, (self.step + 1) / self.args.warmup)
        return self.args.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.progress)))

    def train(self):
        context = self.model.config.context
        mark = time.perf_counter()  # evaluations are outside the clock: the run's length is time spent learning
        shown, next_evaluation = time.perf_counter(), self.progress + EVALUATE_EVERY
        print(f"{sum(p.numel() for p in self.model.parameters()):,} parameters, {len(self.text):,} bytes to learn, "
              f"{len(self.held_out):,} held out, {self.device}, from step {self.step}", flush=True)  # fmt: skip
        while self.progress < 1.0 and not self.stopped:
            seq_len = min(context, self.args.short if self.progress < LONG_AT else context)
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            loss, seen = cross_entropy(self.model, self.batch(seq_len), self.dtype)
            balance = torch.stack(seen.balance).mean()
            (loss + self.args.balance * balance).backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step, self.tokens = self.step + 1, self.tokens + self.args.batch_tokens
            if self.step % self.args.log_every == 0 or self.step == 1:
                bits = loss.item() / math.log(2)  # waits for the device, so the clock below is right
                if not math.isfinite(bits):
                    raise SystemExit(f"training: the loss is {bits} at step {self.step}; want a smaller --lr")
                hottest = torch.stack(seen.counts).amax(dim=1).mean().item() * self.model.config.num_experts
                self.curve.append({"step": self.step, "tokens": self.tokens, "seq_len": seq_len,
                                   "bits_per_byte": round(bits, 4),
                                   "balance": round(balance.item(), 4), "hottest_expert": round(hottest, 3),
                                   "grad_norm": round(norm.item(), 4),
                                   "lr": round(self.learning_rate(), 7)})  # fmt: skip
                if time.perf_counter() - shown > 5:
                    shown = time.perf_counter()
                    print(f"{self.progress:4.0%}  step {self.step}  {bits:.3f} bits per byte  hottest expert "
                        f"{hottest:.2f} x mean  "
                          f"{self.tokens / max(1e-9, self.seconds) / 1e6:.2f} M tokens/s", flush=True)  # fmt: skip
            elif self.device.type == "cuda" and self.step % 8 == 0:
                torch.cuda.synchronize()  # keep the host's clock honest without a log line
            now = time.perf_counter()
            self.seconds, mark = self.seconds + now - mark, now
            if self.progress >= next_evaluation or self.progress >= 1.0:
                next_evaluation = self.progress + EVALUATE_EVERY
                self.evaluate()
                mark = time.perf_counter()
        if not self.evaluations or self.evaluations[-1]["step"] != self.step:
            self.evaluate()

    def evaluate(self):
        """Held-out bits per byte at the length that is being trained; the best weights are the best at full length."""
        context = self.model.config.context
        long = self.progress >= LONG_AT
        length = min(context if long else self.args.short, len(self.held_out) - 1)
        bits = bits_per_byte(
            self.model, self.held_out, length, self.args.batch_tokens // length, self.dtype, self.args.evaluate_tokens
        )
        self.evaluations.append(
            {"step": self.step, "tokens": self.tokens, "seq_len": length, "held_out_bits_per_byte": round(bits, 4)}
        )
        print(
            f"{self.progress:4.0%}  step {self.step}  held out: {bits:.4f} bits per byte at {length} tokens", flush=True
        )
        if long and not any(e["seq_len"] == length for e in self.evaluations[:-1]):
            self.best = (math.inf, None)  # shorter sequences are another measure
        if bits < self.best[0]:
            self.best = (bits, {k: v.detach().to("cpu", copy=True) for k, v in self.model.state_dict().items()})

    def write(self):
        """Everything that DIR gets; the weights are those of the best evaluation."""
        out = Path(self.args.out)
        finished = self.progress >= 1.0 and not self.stopped
        if not finished or self.args.keep_state:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                        "generator": self.generator.get_state().cpu(), "best": self.best,
                        **{k: getattr(self, k) for k in ("step", "tokens", "seconds", "curve", "evaluations")}},
                        out / "state.pt")  # fmt: skip
        self.model.load_state_dict(self.best[1])
        save(self.model, out / "tiny_moe.safetensors", held_out_bits_per_byte=f"{self.best[0]:.4f}")
        stored = {k: v.half().to(v) for k, v in self.best[1].items()}
        self.model.load_state_dict(stored)  # what readers will load
        longest = min(self.model.config.context, len(self.held_out) - 1)
        lengths = sorted({n for n in (512, 1024, 2048) if n < longest} | {longest})
        table = {str(n): round(bits_per_byte(self.model, self.held_out, n, self.args.batch_tokens // n, self.dtype, self.args.evaluate_tokens), 4)  # noqa: E501
                 for n in lengths}  # fmt: skip
        record = {
            "finished": finished,
            "command": "python -m ladder.engine.train_tiny_moe",
            "settings": {k: v for k, v in vars(self.args).items() if k not in ("out", "resume", "keep_state", "install")},  # noqa: E501
            "optimizer": {"name": "AdamW", "betas": BETAS, "weight_decay": WEIGHT_DECAY, "clip": CLIP, "schedule": "cosine over the run"},  # noqa: E501
            "machine": {"gpu": torch.cuda.get_device_name() if self.device.type == "cuda" else None,
                        "torch": torch.__version__, "python": platform.python_version()},
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "corpus": self.corpus,
            "steps": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 1),
            "held_out_bits_per_byte": table,
            "evaluations": self.evaluations,
            "curve": self.curve,
        }  # fmt: skip
        (out / "tiny_moe_training.json").write_text(json.dumps(record, indent=1) + "\n")
        self.write_inputs(out)
        print(f"{'finished' if finished else 'stopped early'}: {self.tokens:,} tokens in {self.seconds:.0f} s, held "
            f"out {table} bits per byte; "
              f"wrote {', '.join(sorted(p.name for p in out.iterdir()))} to {out}", flush=True)  # fmt: skip

    @torch.no_grad()
    def write_inputs(self, out):
        """The routing of held-out text, and the attention inputs of its first sequence."""
        from safetensors.torch import save_file

        seq_len = min(TRACE_TOKENS, self.model.config.context, (len(self.held_out) - 1) // 4)
        tokens = torch.stack([self.held_out[i * seq_len : (i + 1) * seq_len + 1] for i in range(4)]).long()
        _, seen = cross_entropy(self.model, tokens, self.dtype, keep=True)
        np.savez_compressed(
            out / "routing_trace.npz",
            topk_ids=torch.stack(seen.ids).to("cpu", torch.uint8).numpy(),
            seq_offsets=np.arange(0, 4 * seq_len + 1, seq_len),
            num_experts=self.model.config.num_experts,
            generated=False,
        )
        layers = [n for n in TRACE_LAYERS if n < self.model.config.num_layers]
        save_file(
            {
                f"layer{n}.{name}": x[0].to("cpu", torch.float16).contiguous()
                for n in layers
                for name, x in zip("qkv", seen.inputs[n])
            },
            str(out / "tiny_moe_qkv.safetensors"),
        )

    def resume(self, path):
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self.best = tuple(state["best"])
        for name in ("step", "tokens", "seconds", "curve", "evaluations"):
            setattr(self, name, state[name])


def install(out):
    """Put the results of a finished run where the repository keeps them.

    Raises:
        FileNotFoundError: one of them is missing. ValueError: the run did not finish, or the weights are over 16 MB.
    """
    root = Path(__file__).resolve().parents[2]
    places = {
        "tiny_moe.safetensors": "ladder/engine/data/tiny_moe.safetensors",
        "tiny_moe_training.json": "ladder/engine/data/tiny_moe_training.json",
        "tiny_moe_qkv.safetensors": "ladder/lab/data/tiny_moe_qkv.safetensors",
        "routing_trace.npz": "dspark_mini/data/tiny_moe_trace.npz",
    }
    for name in places:
        if not (Path(out) / name).is_file():
            raise FileNotFoundError(f"training: no {name} in {out}; want the folder of a run")
    if not json.loads((Path(out) / "tiny_moe_training.json").read_text())["finished"]:
        raise ValueError(f"training: the run in {out} did not finish; go on with --resume")
    if (Path(out) / "tiny_moe.safetensors").stat().st_size > 16_000_000:
        raise ValueError("training: the weights are over 16 MB; want a smaller model")
    for name, place in places.items():
        (root / place).parent.mkdir(exist_ok=True)
        shutil.copyfile(Path(out) / name, root / place)
        print(f"{name} -> {place}")


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m ladder.engine.train_tiny_moe", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--minutes", type=float, default=3.0, help="length of the run; the schedule follows it (default 3)"
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="stop after so many steps even if time is left; 0: by the clock alone"
    )
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--corpus", help="folder of Python sources instead of the standard library")
    parser.add_argument("--config", help="JSON that replaces fields of TinyMoEConfig, for trials at reduced size")
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens of a step")
    parser.add_argument("--short", type=int, default=1024, help="sequence length of the first part of the run")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument(
        "--balance", type=float, default=5e-3, help="weight of the balance loss: small, so that real skew stays"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=20, help="steps between points of the loss curve")
    parser.add_argument(
        "--evaluate-tokens", type=int, default=1 << 20, help="held-out tokens of an evaluation, at most"
    )
    parser.add_argument("--keep-state", action="store_true", help="keep DIR/state.pt after a finished run too")
    parser.add_argument(
        "--install",
        action="store_true",
        help="train nothing: copy the results in DIR to their places in the repository",
    )
    parser.add_argument("--resume", action="store_true", help="go on from DIR/state.pt")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: cuda was asked for, and PyTorch sees no GPU")
    out = Path(args.out)
    if args.install:
        try:
            install(out)
        except (FileNotFoundError, ValueError) as error:
            parser.error(str(error))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    state = out / "state.pt"
    if args.resume and not state.is_file():
        parser.error(f"argument --resume: there is no {state}")
    run = Run(args)
    if args.resume:
        run.resume(state)

    def stop(number, frame):
        run.stopped = signal.Signals(number).name

    before = [(s, signal.signal(s, stop)) for s in (signal.SIGINT, signal.SIGTERM)]
    try:
        run.train()
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        if run.best[1] is not None:
            run.write()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
