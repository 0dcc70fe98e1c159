"""What the models share: RMS norm, rotary positions, the router, and experts run as one grouped product.

Everything here works on packed tokens (T, width), with and without gradients: training and serving are one model.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

AWAY = 1 << 20  # the number of an expert that another rank computes
GROUPED_MM = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)  # public since torch 2.10


def linear(x, weight):
    """x @ weight.T in the dtype of x: master weights in float32 are cast where they are used."""
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x, weight, eps):
    """x (T, width) over its root mean square, times ``weight``.
    Source: Zhang and Sennrich, "Root Mean Square Layer Norm"."""
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


def rotary_table(head_dim, length, theta, device=None):
    """Cosines and sines (length, head_dim): the first half of a row is cos, the second sin. float32.

    Source: Su et al., "RoFormer", section 3.2.
    """
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float().to(device)


def rotate(x, cos_sin):
    """Rotate x (T, H, D) by the positions whose rows ``cos_sin`` (T, D) holds; first and second half are the pairs."""
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def add_norm(x, residual, weight, eps):
    """RMS norm of x + residual, and the sum; residual None is none yet."""
    total = x if residual is None else x + residual
    return rms_norm(total, weight, eps), total


def choose_experts(logits, top_k, renormalize, scale=1.0, bias=None):
    """Softmax over all experts, then the ``top_k`` largest.

    Args:
        logits: (T, num_experts) float32. renormalize: make the chosen weights of a token sum to 1. scale: on the
            weights.
        bias: (num_experts,), added to the probabilities for the choice but not to the weights, or None.

    Returns:
        weights (T, top_k) float32, ids (T, top_k) int64, probs (T, num_experts).
    """
    probs = logits.softmax(dim=-1)
    if bias is None:
        weights, ids = probs.topk(top_k, dim=-1)
    else:
        ids = (probs + bias).topk(top_k, dim=-1).indices
        weights = probs.gather(-1, ids)
    weights = weights / weights.sum(dim=-1, keepdim=True) if renormalize else weights
    return weights * scale if scale != 1.0 else weights, ids, probs


def sort_by_expert(ids, num_experts):
    """A stable sort of the assignments ids (T, top_k) by expert, on the device.

    Returns:
        order (T * top_k,): the assignment at each row; places (T, top_k): the row of each assignment;
        ends (num_experts,) int32: where each expert's rows end.
    """
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(flat), device=ids.device)
    counts = (flat[:, None] == torch.arange(num_experts, device=ids.device)).sum(dim=0)
    return order, places.view(ids.shape), counts.cumsum(0, dtype=torch.int32)


class Dispatch(torch.autograd.Function):
    """x (T, width) copied behind each of its experts. The gradient
    gathers too, where autograd's own would scatter-add."""

    @staticmethod
    def forward(ctx, x, order, places):
        ctx.save_for_backward(places)
        return x[order // places.shape[1]]

    @staticmethod
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        return grad[places].sum(dim=1), None, None


class Collect(torch.autograd.Function):
    """Rows in expert order back as (T, top_k, width): a permutation, so its gradient is one too."""

    @staticmethod
    def forward(ctx, rows, order, places):
        ctx.save_for_backward(order)
        return rows[places]

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        return grad.flatten(0, 1)[order], None, None


def grouped_product(x, weight, ends, short=False):
    """x[rows of expert e] @ weight[e].T for every expert: the library's grouped product, or a loop on the CPU.

    Args:
        x: (rows, K) in expert order. weight: (num_experts, N, K). ends: (num_experts,) int32.
        short: there may be rows behind the last end, of other ranks' experts; nobody looks at theirs in the result.
    """
    if grouped_mm_works(x):
        if short and not grouped_mm_works(x, short):
            ends = torch.cat([ends[:-1], ends.new_full((1,), len(x))])  # the last expert computes them, for form's sake
        return GROUPED_MM(x, weight.to(x.dtype).transpose(-2, -1), offs=ends)
    bounds = [0, *ends.tolist()]
    return torch.cat([linear(x[a:b], w) for a, b, w in zip(bounds, bounds[1:], weight)])


_checked = {}


def grouped_mm_works(x, short=False):
    """Whether this torch's grouped product serves ``x``: bfloat16 on a GPU, tried once on ragged groups, with gradients
    where they are wanted. ``short``: also with rows behind the last group.
    """
    if GROUPED_MM is None or not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    gradients = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    key = (x.device, gradients, short)
    if key not in _checked:
        with torch.inference_mode(False), torch.set_grad_enabled(gradients):
            generator = torch.Generator(x.device).manual_seed(0)
            a = torch.randn(203, 64, generator=generator, device=x.device, dtype=x.dtype).requires_grad_(gradients)
            w = torch.randn(5, 96, 64, generator=generator, device=x.device, dtype=x.dtype).requires_grad_(gradients)
            last = 190 if short else 203
            ends = torch.tensor([3, 3, 90, 131, last], dtype=torch.int32, device=x.device)
            bounds = [0, *ends.tolist()]

            def outcome(product):
                return torch.autograd.grad(product.square().sum(), (a, w)) if gradients else (product,)

            try:
                got = outcome(GROUPED_MM(a, w.transpose(-2, -1), offs=ends)[:last])
                want = outcome(torch.cat([F.linear(a[i:j], w[e]) for e, (i, j) in enumerate(zip(bounds, bounds[1:]))]))
                _checked[key] = all(bool((g - t).norm() < 0.02 * t.norm()) for g, t in zip(got, want))
            except RuntimeError as error:
                print(f"grouped_mm does not run here, experts run one by one: {str(error).splitlines()[0]}")
                _checked[key] = False
    return _checked[key]


def swiglu(gate_up):
    """silu(first half) * second half. Source: Shazeer, "GLU Variants Improve Transformer"."""
    if serving_on_gpu(gate_up):
        return fast_swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def run_experts(x, ids, weights, gate_up, down, num_shared=0, table=None, later=False):
    """sum_k weights[:, k] * expert[ids[:, k]](x), tokens sorted by expert so that each weight is read once.

    Args:
        x: (T, width). ids, weights: (T, top_k), the router's choice. gate_up: (experts, 2 * hidden, width).
        down: (experts, width, hidden). num_shared: how many experts at the end of the stack every token uses, with
            weight 1.
        table: (turns, experts of the router) int32: token t finds its expert e in the stack at table[t % turns, e], or
            ``AWAY`` where another rank adds that part. None: the stack holds all of them.
        later: on a GPU, leave the sum to the add and norm that follow; see ``Parts``.

    Returns:
        (T, width) in the dtype of x.
    """
    if serving_on_gpu(x):
        return fast_experts(x, ids, weights, gate_up, down, num_shared, table=table, later=later)
    total = gate_up.shape[0]
    if table is not None:
        ids = here(ids, table)
    if num_shared:
        shared = torch.arange(total - num_shared, total, device=ids.device, dtype=ids.dtype)
        ids = torch.cat([ids, shared.expand(len(ids), -1)], dim=1)
        weights = torch.cat([weights, weights.new_ones(len(ids), num_shared)], dim=1)
    order, places, ends = sort_by_expert(ids, total)
    rows = Dispatch.apply(x, order, places)
    if table is not None:
        rows = rows[: ends[-1]]
    rows = grouped_product(swiglu(grouped_product(rows, gate_up, ends)), down, ends)
    if table is not None:  # what other ranks add is 0 here
        rows = torch.cat([rows, rows.new_zeros(len(order) - len(rows), rows.shape[1])])
    return (Collect.apply(rows, order, places) * weights[..., None].to(x.dtype)).sum(dim=1)


def here(ids, table):
    """The router's choices (T, top_k) as numbers in this rank's stack,
    ``AWAY`` for those of other ranks; see ``run_experts``."""
    turn = torch.arange(len(ids), device=ids.device) % len(table)
    return table[turn[:, None], ids.long()]


# Serving on a GPU: the same, a launch for each pass.

# rows that experts compute at once: of more, experts run in two halves, one after the other in the same memory
MOST_ROWS = 1 << 17
FEW_ASSIGNMENTS = 1024  # sorted by one quadratic launch; more by step 07's counting sort
_fastest = {}  # (shape of gate_up, tokens) -> "library" or "streamed", measured by ``tune_experts``


def serving_on_gpu(x):
    """Whether the engine runs ``x`` on a GPU; training, also its evaluation, stays with plain operations."""
    return x.is_cuda and torch.is_inference_mode_enabled()


def fast_swiglu(gate_up):
    """``swiglu`` of (rows, 2 * hidden) in one launch."""
    from .kernels import engine_swiglu

    gate_up = gate_up.contiguous()
    rows, hidden = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, hidden)
    if rows:
        block_r, block = swiglu_tile(rows, hidden)
        engine_swiglu[(-(-rows // block_r) * -(-hidden // block),)](
            gate_up, out, rows, hidden, gate_up.stride(0), BLOCK_R=block_r, BLOCK=block
        )
    return out


def swiglu_tile(rows, hidden):
    """(rows, columns) of a program: with many rows tiles that waste no columns, 64 bytes of each thread in flight."""
    if rows < FEW_ASSIGNMENTS:
        return 1, min(1024, 1 << (hidden - 1).bit_length())
    block = min((512, 256, 128, 64), key=lambda n: -hidden % n)
    return 4096 // block, block


def spread(source, out):
    """out (T, H, n) = source (T, n) for every head."""
    tokens, heads, width = out.shape
    if not serving_on_gpu(source) or source.stride(1) != 1 or out.stride(2) != 1 or width & (width - 1):
        out.copy_(source[:, None])
    elif tokens:
        from .kernels import engine_spread

        engine_spread[(-(-tokens // 16),)](
            source, out, tokens, source.stride(0), *out.stride()[:2], HEADS=heads, WIDTH=width, BLOCK=16
        )


def place_rows(ids, num_experts, num_shared, table=None):
    """The stable sort of ``sort_by_expert`` with the shared experts' assignments behind each token's own.

    Args:
        ids: (T, top_k) int32 or int64, the router's choice among num_experts; with a ``table``, see ``run_experts``,
            among its columns. Those that are not here come last.

    Returns:
        order (rows,), source (rows,), the assignment and the token at each row; places (T, top_k + num_shared);
        offsets (num_experts + num_shared + 1,), where each expert's rows start. All int32.
    """
    from .kernels import engine_place

    ids = ids.contiguous()
    tokens, top_k = ids.shape
    each, total = top_k + num_shared, tokens * (top_k + num_shared)
    if total > FEW_ASSIGNMENTS:
        from ladder.step07_dflash1 import group_tokens

        stack = num_experts + num_shared
        if table is not None:
            ids = here(ids, table).clamp_max(stack)  # one more group: the rest
        if num_shared:
            shared = torch.arange(num_experts, stack, device=ids.device, dtype=ids.dtype)
            ids = torch.cat([ids, shared.expand(tokens, -1)], dim=1)
        groups = group_tokens(ids, stack + (table is not None))
        return groups.order, groups.order // each, groups.places, groups.offsets[: stack + 1]
    numbers = torch.empty(3, total, dtype=torch.int32, device=ids.device)
    offsets = torch.empty(num_experts + num_shared + 1, dtype=torch.int32, device=ids.device)
    order, source, places = numbers
    everyone = max(16, 1 << (total - 1).bit_length())
    block = min(16, everyone)
    engine_place[(-(-total // block),)](
        ids, table, order, source, places, offsets, total, num_experts, 0 if table is None else table.shape[1],
        TURNS=1 if table is None else len(table), TOP_K=top_k, SHARED=num_shared, ALL=everyone, BLOCK=block,
        EXPERTS=1 << (num_experts + num_shared).bit_length(),
    )  # fmt: skip
    return order, source, places.view(tokens, each), offsets


@dataclass
class Parts:
    """What experts made of tokens, not yet summed: the sum, the residual add and the next norm are one launch.

    rows (assignments, width) in expert order; places (T, top_k + shared), the rows of each token; weights (T, top_k);
    base (T, width) to add, or None; behind: the rest of the rows, where they are in two pieces, or None.
    """

    rows: torch.Tensor | None
    places: torch.Tensor
    weights: torch.Tensor
    base: torch.Tensor | None
    behind: torch.Tensor | None = None

    def add_norm(self, residual, weight, eps):
        """``add_norm`` of the sum, once: the rows are then given back."""
        from .kernels import engine_combine_norm

        tokens, top_k = self.weights.shape
        normed, total = torch.empty_like(residual), torch.empty_like(residual)
        block = 1 << (residual.shape[1] - 1).bit_length()
        if tokens:
            engine_combine_norm[(tokens,)](
                self.rows, self.behind, len(self.rows), self.places, self.weights, self.base, residual, weight, normed,
                total, residual.shape[1], eps,
                TOP_K=top_k, SHARED=self.places.shape[1] - top_k, BLOCK=block, num_warps=max(1, min(8, block // 512)),
            )  # fmt: skip
        self.rows = self.behind = self.base = None  # a layer's caller holds this object until the layer is done
        return normed, total


def fast_experts(x, ids, weights, gate_up, down, num_shared, product=None, table=None, later=False):
    """``run_experts`` on a GPU.

    product: "library", the grouped product of torch; "streamed", two launches that read each chosen expert once, for
        few rows; None is what ``tune_experts`` found, else the library's.
    """
    from .kernels import engine_combine

    experts = gate_up.shape[0] - num_shared
    shared, base, behind, rows_of_shared = None, None, None, num_shared
    streamed = (product or _fastest.get((gate_up.shape, len(x)), "library")) == "streamed"
    if not streamed and num_shared and len(x) * ids.shape[1] > FEW_ASSIGNMENTS:
        # Everyone's experts need no gathering: two plain products, at a plain product's speed.
        shared, rows_of_shared = (gate_up[experts:], down[experts:]), 0
        gate_up, down = gate_up[:experts], down[:experts]
    order, source, places, offsets = place_rows(ids, experts, rows_of_shared, table)
    two = later and table is None and not streamed and places.numel() > MOST_ROWS
    bounds = HostCopy(offsets) if two else None
    if shared:
        base = shared_experts(x, *shared)
    if streamed:
        rows = streamed_experts(x, source, offsets, gate_up, down)
    elif two and (half := middle(bounds.wait())):  # the device is busy with everyone's experts meanwhile
        n, split = half
        rows = library_experts(x, places, gate_up[:n], down[:n], offsets[1 : n + 1], 0, split)
        behind = library_experts(x, places, gate_up[n:], down[n:], offsets[n + 1 :] - split, split)
    else:
        rows = library_experts(x, places, gate_up, down, offsets[1:], short=table is not None)
    weights = weights.contiguous()
    if later and table is None:
        return Parts(rows, places, weights, base, behind)
    out = torch.empty_like(x)
    tokens, width = x.shape
    block = min(1024, 1 << (width - 1).bit_length())
    if tokens:
        engine_combine[(tokens, -(-width // block))](
            rows, places, weights, base, None if table is None else offsets, out, width, len(offsets) - 1,
            TOP_K=ids.shape[1], SHARED=rows_of_shared, BLOCK=block,
        )  # fmt: skip
    return out


class HostCopy:
    """A small tensor on its way to the host, while the device works on."""

    def __init__(self, tensor):
        self.host, self.event = tensor, None
        if tensor.is_cuda:
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def wait(self):
        if self.event:
            self.event.synchronize()
        return self.host.tolist()


def middle(bounds):
    """(n, rows) such that the first n experts have about half of all rows; None where one piece would be empty."""
    n = min(range(len(bounds)), key=lambda n: abs(2 * bounds[n] - bounds[-1]))
    return (n, bounds[n]) if 0 < bounds[n] < bounds[-1] else None


def library_experts(x, places, gate_up, down, ends, first=0, last=None, short=False):
    """Rows first .. last in expert order (last - first, width) by the library's grouped products.

    places (T, each): the rows of each token. gate_up, down, ends: of
    the experts of these rows, ends counted from first.
    """
    rows = dispatch(x, places, first, places.numel() if last is None else last)
    rows = grouped_product(rows, gate_up, ends, short)
    rows = fast_swiglu(rows)  # under the same name: what a product read is given back before the next one writes
    return grouped_product(rows, down, ends, short)


def dispatch(x, places, first, last):
    """Rows first .. last in expert order, (last - first, width): each of x (T, width) at ``places`` (T, each)."""
    from .kernels import engine_dispatch

    x = x.contiguous()
    tokens, width = x.shape
    out = x.new_empty(last - first, width)
    block = min(2048, 1 << (width - 1).bit_length())
    if tokens:
        engine_dispatch[(tokens, -(-width // block))](
            x,
            places,
            out,
            width,
            first,
            last,
            EACH=places.shape[1],
            BLOCK=block,
            num_warps=max(1, min(4, block // 512)),
        )
    return out


def shared_experts(x, gate_up, down):
    """The sum of a few experts that every token uses: x (T, width),
    gate_up (n, 2 * hidden, width), down (n, width, hidden)."""
    count, _, hidden = down.shape
    inner = linear(x, gate_up.flatten(0, 1)).view(len(x) * count, 2 * hidden)
    inner = fast_swiglu(inner).view(len(x), count, hidden)
    out = linear(inner[:, 0], down[0])
    for n in range(1, count):
        out.addmm_(inner[:, n], down[n].t())
    return out


def streamed_experts(x, source, offsets, gate_up, down):
    """Rows in expert order (rows, width) of the experts of x (T, width): gather, products and gate in two launches."""
    from .kernels import engine_experts_down, engine_experts_up

    experts, width, hidden = down.shape
    x = x.contiguous()
    inner = x.new_empty(len(source), hidden)
    rows = x.new_empty(len(source), width)
    half = x.element_size() == 2
    tile = dict(BLOCK_M=16, BLOCK_N=64 if half else 16, BLOCK_K=128 if half else 32,
                PRECISION="tf32" if half else "ieee",
                num_warps=4, num_stages=3 if half else 2)  # fmt: skip

    def even(columns, summed):
        return columns % tile["BLOCK_N"] == 0 and summed % tile["BLOCK_K"] == 0

    # Gate and up are two tiles a stage: 6 % faster with a fourth where shared memory holds it.
    stages = 4 if half and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0) else tile["num_stages"]
    engine_experts_up[(experts * -(-hidden // tile["BLOCK_N"]),)](
        x, gate_up, inner, source, offsets, width, hidden, EVEN=even(hidden, width), **{**tile, "num_stages": stages}
    )
    engine_experts_down[(experts * -(-width // tile["BLOCK_N"]),)](
        inner, down, rows, offsets, hidden, width, EVEN=even(width, hidden), **tile
    )
    return rows


@torch.inference_mode()
def tune_experts(gate_up, down, tokens, top_k, num_shared, repeats=5):
    """Measure which grouped product is faster for so many tokens with
    random routing, once for a shape; returns its name."""
    key = (gate_up.shape, tokens)
    if key not in _fastest and gate_up.element_size() == 2:
        experts, width = gate_up.shape[0] - num_shared, gate_up.shape[2]
        device = gate_up.device
        x = torch.randn(tokens, width, device=device, dtype=gate_up.dtype)
        ids = torch.rand(tokens, experts, device=device).topk(top_k, dim=1).indices
        weights = torch.full((tokens, top_k), 1 / top_k, device=device)
        times = {}
        for product in ("library", "streamed"):
            try:
                times[product] = _time_experts(
                    lambda: fast_experts(x, ids, weights, gate_up, down, num_shared, product), repeats
                )
            except RuntimeError as error:  # a library that cannot be captured
                print(f"{product} experts cannot be captured: {str(error).splitlines()[0]}")
        _fastest[key] = min(times, key=times.get)
    return _fastest.get(key, "library")


def _time_experts(run, repeats):
    """Milliseconds of ``repeats`` calls in a CUDA graph, as they will run: launches cost nothing there."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events meanwhile
        for _ in range(repeats):
            run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
