"""What a call of step 08 launches and why: ``explain`` in words, and ``warmup`` ahead of the first."""

import torch

from ladder.contract import check_flag, check_integer, check_scale
from ladder.rungs import MAX_HEAD_DIM

from .api import dflash2_attention, dflash2_decode, dflash2_mla_decode, dflash2_paged_prefill, dflash2_varlen
from .checks import check_options
from .decision import decide, decode_call, prefill_call
from .dispatch import RUNG, device_code, interpreting, machine
from .hopper import decode as hopper_decode
from .hopper import mla as hopper_mla
from .hopper import prefill as hopper_prefill
from .tiles import FIXED
from .windows import RangeWindows

OPTIONS = ("windows", "softcap", "sinks", "right", "page_size", "ragged", "return_lse")  # of explain and warmup


def explain(
    problem, *, windows=None, softcap=0.0, sinks=False, right=None, page_size=0, ragged=False, return_lse=False,
    device=None
):  # fmt: skip
    """What step 08 does with a problem, in words: which kernel, which tiles, how many programs, and why.

    Args:
        problem: shapes as ``ladder.lab.problem.AttentionProblem`` has them (B, Hq, Hkv, Sq, Sk, D, Dv, causal, dtype),
            or as ``ladder.lab.decode_problem.DecodeProblem`` (q_len, page_size, lengths) for decode.
        windows, softcap, right: as the call is given them. sinks: whether it has learned sinks.
        page_size: K and V lie in pages of that many tokens; 0: they do not. ragged: packed sequences; pages imply it.
        return_lse: as in a call. device: where it would run; None is the GPU when there is one, else the CPU.

    Returns:
        A few sentences, one a line. Nothing is launched.

    Raises:
        TypeError, ValueError: naming the argument, what came and what
        is wanted. NotImplementedError: head sizes above 256.
    """
    device = _device(device)
    _check_problem("problem", problem)
    page_size = _check_layout(sinks, ragged, page_size)
    if hasattr(problem, "q_len"):
        check_flag(RUNG, "return_lse", return_lse)
        return _explain_decode(problem, windows, softcap, sinks, device)
    p, paged = problem, page_size > 0
    ragged = ragged or paged
    q, k, v = _meta_tensors(p, ragged, page_size)
    windows, softcap, right = check_options((q, k, v), p.Hq, p.causal, windows, softcap, None, return_lse, right)
    lines = [f"Prefill of {p.B} x {p.Hq} heads on {p.Hkv}, {p.Sq} queries on {p.Sk} keys, head size {p.D}"
             + (f"/{p.Dv}" if p.Dv != p.D else "") + f", {p.dtype}{', causal' if right == 0 else ''}"
             + (f", {right} keys to the right" if right else "") + (f", {windows!r}" if windows is not None else "")
             + (f", softcap {softcap}" if softcap else "") + (", learned sinks" if sinks else "") + (f", pages of {page_size}" if paged else ", packed" if ragged else "") + "."]  # fmt: skip  # noqa: E501
    if device_code(torch.empty(0, dtype=q.dtype, device=device)) is None:
        return "\n".join([*lines, f"Path: eager PyTorch in float32, because {_why_eager(device)}."])
    decision = decide(_call_of(p, q, k, v, ragged, page_size, right, windows, softcap), device)
    config = decision.plan
    if decision.kernel == "dflash2_prefill_hopper":
        lines.append("Kernel: dflash2_prefill_hopper, Gluon for sm_90 (TMA, wgmma, specialised warps).")
        return "\n".join([*lines, *hopper_prefill.describe_prefill(p, config, ragged)])
    why = f", because the sm_90 kernel has no case for it: {decision.why_not}." if decision.why_not else "."
    lines.append(f"Kernel: dflash2_prefill, portable Triton, on {_where(device)}{why}")
    pack, block_m, block_n = config["PACK"], config["BLOCK_M"], config["BLOCK_N"]
    block_t = block_m // pack
    rows = (
        f"{block_m} rows, {block_t} queries of {pack} heads that share K and V," if pack > 1 else f"{block_m} queries"
    )
    lines.append(
        f"Tiles: {rows} by {block_n} keys, {config['num_warps']} warps, {config['num_stages']} stages of loads under "
        f"way."
    )
    if config["TAIL_D"]:
        lines.append(f"A head of {p.D} is {config['BLOCK_D']} + {config['TAIL_D']} columns, not the next power of two.")
    row_tiles = p.Sq // block_t * p.B + p.B if ragged else -(-p.Sq // block_t) * p.B
    lines.append(
        f"Programs: {row_tiles * (p.Hq // pack)}, one a tile of queries; no keys are split, so no second pass."
    )

    def visits(mask):
        count, tiles = mask.visited_tiles(p.Sq, p.Sk, False, block_t, block_n, right=right)
        return count, sum(masked for *_, masked in tiles)

    everything = -(-p.Sq // block_t) * -(-p.Sk // block_n)
    count, masked = visits(windows or RangeWindows([]))
    share = f"{count / everything:.1%}" if everything else "none"
    lines.append(f"Visits {count} of {everything} tiles a head and sequence ({share}), {masked} of them with a mask.")
    if windows is not None:
        without, _ = visits(RangeWindows([]))
        lines.append(f"Without windows it would visit {without}, {without / max(1, count):.1f} x as many.")
    return "\n".join(lines)


def _explain_decode(p, windows, softcap, sinks, device):
    windows, softcap, _ = check_options(
        (torch.empty(0, device="meta"),), p.Hq, True, windows, softcap, None, False, None
    )
    dtype = getattr(torch, p.dtype)
    words = [
        w for w, on in (("windows", windows is not None), ("softcap", softcap > 0), ("learned sinks", sinks)) if on
    ]
    lines = [f"Decode of {p.B} x {p.q_len} new tokens, {p.Hq} heads on {p.Hkv}, head size {p.D}" + (f"/{p.Dv}" if p.Dv != p.D else "")  # noqa: E501
             + f", {p.dtype}, pages of {p.page_size}" + (", a latent cache whose first columns are the value" if p.latent else "")  # noqa: E501
             + "".join(f", {w}" for w in words) + "."]  # fmt: skip
    if device_code(torch.empty(0, dtype=dtype, device=device)) is None:
        return "\n".join([*lines, f"Path: eager PyTorch in float32, because {_why_eager(device)}."])
    q, out = (torch.empty(p.B, p.q_len, p.Hq, n, dtype=dtype, device="meta") for n in (p.D, p.Dv))
    cache = torch.empty(1, p.page_size, p.Hkv, p.D, dtype=dtype, device="meta")
    v_cache = cache[..., : p.Dv] if p.latent else cache.new_empty(1, p.page_size, p.Hkv, p.Dv)
    call = decode_call(q, cache, v_cache, out, p.capacity, latent=p.latent, windows=windows, softcap=softcap)
    decision = decide(call, device)
    if decision.kernel != "dflash2_decode":
        return "\n".join(
            [*lines, *(hopper_mla.describe_mla if p.latent else hopper_decode.describe_decode)(p, decision.plan)]
        )
    plan, _ = decision.plan
    tiles, rows = plan.config, p.q_len * (p.Hq // p.Hkv)
    why = f", because of sm_90's kernel: {decision.why_not}." if decision.why_not else "."
    lines.append(f"Kernel: dflash2_decode, portable Triton, on {_where(device)}{why}")
    lines.append(f"Tiles: {tiles['BLOCK_M']} rows for the {rows} of a KV head ({p.q_len} tokens x {p.Hq // p.Hkv} "
        f"heads), so K and V are read "
                 f"{plan.row_tiles} x, by {tiles['BLOCK_N']} keys, {tiles['num_warps']} warps, {tiles['num_stages']} "
                 f"stages.")  # fmt: skip
    programs = p.Hkv * plan.row_tiles * plan.num_slots
    if plan.kind == FIXED:
        lines.append(
            f"Programs: {programs}, one a sequence, KV head and row tile; keys are not split, so nothing is merged."
        )
    else:
        lines.append(f"Programs: up to {programs}. The device cuts the batch into about {plan.target} parts of equal "
            f"length a KV head, no part below "
                     f"{plan.min_tiles * tiles['BLOCK_N']} keys, and the part of a sequence that finishes last merges "
                     f"the others in the same launch.")  # fmt: skip
    return "\n".join(lines)


def _where(device):
    return f"sm_{machine(device).arch}" if device.type == "cuda" else "Triton's interpreter, with a Hopper's tiles"


def _why_eager(device):
    if device.type == "cpu" and interpreting():
        return "Triton's interpreter multiplies bfloat16 wrongly, or Triton is not installed"
    return (
        f"tensors are on {device.type} and Triton's interpreter is off"
        if device.type == "cpu"
        else f"tensors are on {device.type}"
    )


def warmup(shapes, device=None):
    """Compile ahead of the first request: one short launch for each shape, of the kernel that a call would take.

    Args:
        shapes: problems as ``explain`` takes them, or pairs (problem, options) with its options, such as
            ``(AttentionProblem(...), dict(windows=..., page_size=64))``. Lengths count only as far as they choose
            tiles, splits or mask code.
        device: as in ``explain``.

    Returns:
        How many launches were made. Memory is that of a few hundred tokens a shape, freed again.

    A kernel is compiled for head sizes, dtype, mask features and 16-byte alignment, not for a length or a batch, of
    which only a few classes differ in code: give lengths of each size that will come. Triton keeps it on disk, so the
    next process only loads it.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted.
    """
    device, launches = _device(device), 0
    if hasattr(shapes, "dtype") or not hasattr(shapes, "__iter__"):
        raise TypeError(
            f"{RUNG}: shapes is a {type(shapes).__name__}; want a list of problems, or of pairs (problem, options)"
        )
    for shape in shapes:
        problem, options = shape if isinstance(shape, (tuple, list)) and len(shape) == 2 else (shape, {})
        _check_problem("shapes", problem)
        if not isinstance(options, dict):
            raise TypeError(f"{RUNG}: shapes holds options {options!r}; want a dict with keywords of explain")
        if unknown := sorted(set(options) - set(OPTIONS)):
            raise TypeError(f"{RUNG}: shapes holds the option {unknown[0]!r}; want some of {', '.join(OPTIONS)}")
        _check_layout(options.get("sinks", False), options.get("ragged", False), options.get("page_size", 0))
        if hasattr(problem, "q_len"):  # its pages are its own, and its mask ends at its last token
            _warm_decode(
                problem, {k: v for k, v in options.items() if k not in ("right", "page_size", "ragged")}, device
            )
        else:
            _warm_prefill(problem, device, **options)
        launches += 1
    return launches


def _warm_prefill(
    p, device, *, windows=None, softcap=0.0, sinks=False, right=None, page_size=0, ragged=False, return_lse=False
):  # fmt: skip
    short = p.replace(B=1, Sq=min(p.Sq, 256), Sk=min(p.Sk, 256))
    if p.Sq and p.Sk:  # sm_90 has a kernel of its own where the diagonal meets the corners of the tiles
        short = short.replace(Sk=short.Sq + (p.Sk - p.Sq) % 128)
    ragged = ragged or page_size > 0
    q, k, v = (torch.zeros(x.shape, dtype=x.dtype, device=device) for x in _meta_tensors(short, ragged, page_size))
    options = dict(
        causal=p.causal, scale=check_scale(RUNG, p.scale, p.D), windows=windows, softcap=softcap, right=right,
        return_lse=return_lse,
        sinks=torch.zeros(p.Hq, device=device) if sinks else None,
    )  # fmt: skip
    cu_q, cu_k, lengths = (
        torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, short.Sq], [0, short.Sk], [short.Sk])
    )
    table = torch.arange(k.shape[0], dtype=torch.int32, device=device)[None]
    if _warm_hopper(p, q, k, v, (cu_q, cu_k, table, lengths), ragged, page_size, options):
        return
    if page_size:
        dflash2_paged_prefill(q, k, v, table, lengths, cu_q, short.Sq, **options)
    elif ragged:
        dflash2_varlen(q, k, v, cu_q, cu_k, short.Sq, short.Sk, **options)
    else:
        dflash2_attention(q, k, v, **options)


def _warm_hopper(p, q, k, v, packed, ragged, page_size, options):
    """Launch the sm_90 kernel on the short tensors in the variant that problem ``p`` takes, which its lengths choose;
    whether it was."""
    if not (p.B and p.Sq) or device_code(q) is None:
        return False
    options = dict(options)
    return_lse, names = options.pop("return_lse"), ("windows", "softcap", "right")
    options |= zip(
        names,
        check_options(
            (q, k, v),
            p.Hq,
            p.causal,
            options["windows"],
            options["softcap"],
            options["sinks"],
            return_lse,
            options["right"],
        ),
    )
    ragged = ragged or page_size > 0
    whole = _meta_tensors(p, ragged, page_size)
    decision = decide(
        _call_of(p, *whole, ragged, page_size, options["right"], options["windows"], options["softcap"]), q.device
    )
    if decision.kernel != "dflash2_prefill_hopper":
        return False
    out = q.new_empty(*q.shape[:-1], p.Dv)
    cu_q, cu_k, table, lengths = packed
    if page_size:
        packed = dict(cu_seqlens_q=cu_q, block_table=table, seq_lens=lengths)
    else:
        packed = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k) if ragged else {}
    config, _, num_splits, *_ = decision.plan
    lse = q.new_empty(*((p.Hq, len(q)) if ragged else q.shape[:3]), dtype=torch.float32) if return_lse else None
    # The number of splits is a value; whether there are any is a variant.
    hopper_prefill.launch_prefill(q, k, v, out, lse, num_splits=min(num_splits, 2), config=config, **packed, **options)
    return True


def _warm_decode(p, options, device):
    """One decode call of the problem's batch and capacity on a cache of one page that every entry names."""
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.zeros(p.Hq, device=device)
    dtype = getattr(torch, p.dtype)
    q = torch.zeros(p.B, p.q_len, p.Hq, p.D, dtype=dtype, device=device)
    table = torch.zeros(p.B, p.capacity // p.page_size, dtype=torch.int32, device=device)
    lengths = torch.full((p.B,), min(p.capacity, p.page_size), dtype=torch.int32, device=device)
    if p.latent:
        cache = torch.zeros(1, p.page_size, p.D, dtype=dtype, device=device)
        dflash2_mla_decode(
            q, cache, table, lengths, scale=p.D**-0.5 if p.scale is None else p.scale, head_dim_v=p.Dv, **options
        )
    else:
        caches = (torch.zeros(1, p.page_size, p.Hkv, n, dtype=dtype, device=device) for n in (p.D, p.Dv))
        dflash2_decode(q, *caches, table, lengths, scale=p.scale, **options)


def _meta_tensors(p, ragged, page_size):
    """q, k, v of a problem without memory, contiguous in the layout that the call takes."""
    dtype = getattr(torch, p.dtype)
    if page_size:
        pages = -(-p.Sk // page_size)
        shapes = (p.B * p.Sq, p.Hq, p.D), (p.B * pages, page_size, p.Hkv, p.D), (p.B * pages, page_size, p.Hkv, p.Dv)
    elif ragged:
        shapes = (p.B * p.Sq, p.Hq, p.D), (p.B * p.Sk, p.Hkv, p.D), (p.B * p.Sk, p.Hkv, p.Dv)
    else:
        shapes = (p.B, p.Hq, p.Sq, p.D), (p.B, p.Hkv, p.Sk, p.D), (p.B, p.Hkv, p.Sk, p.Dv)
    return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)


def _call_of(p, q, k, v, ragged, page_size, right, windows, softcap):
    """What is decided about: the call on q, k, v of ``_meta_tensors`` of problem ``p``."""
    pages = -(-p.Sk // page_size) * page_size if page_size else None
    out = q.new_empty(*q.shape[:-1], p.Dv)
    return prefill_call(
        q, k, v, out, right=right, windows=windows, softcap=softcap, num_seqs=p.B if ragged else None, capacity=pages,
        longest=p.Sq if ragged else None,
    )  # fmt: skip


def _check_problem(name, problem):
    missing = [field for field in ("B", "Hq", "Hkv", "D", "Dv", "dtype") if not hasattr(problem, field)]
    if missing:
        raise TypeError(
            f"{RUNG}: {name} {'is' if name == 'problem' else 'holds'} a {type(problem).__name__}, which has no "
            f"{missing[0]}; "
            "want an AttentionProblem or a DecodeProblem"
        )
    for field, least in (("B", 0), ("Hq", 1), ("Hkv", 1), ("D", 1), ("Dv", 1), ("Sq", 0), ("Sk", 0), ("q_len", 1)):
        if hasattr(problem, field):
            check_integer(RUNG, f"{name}.{field}", getattr(problem, field), least)
    if problem.Hq % problem.Hkv:
        raise ValueError(f"{RUNG}: {name}.Hq is {problem.Hq}; want a multiple of Hkv = {problem.Hkv}")
    if getattr(problem, "latent", False) and (problem.Dv < 16 or problem.Dv & (problem.Dv - 1)):
        raise ValueError(f"{RUNG}: {name}.Dv is {problem.Dv} in a latent cache; want a power of two, at least 16")
    if getattr(problem, "latent", False) and problem.D > 2 * problem.Dv:
        raise NotImplementedError(f"{RUNG}: {name}.D is {problem.D}, above twice Dv = {problem.Dv}")
    if max(problem.D, problem.Dv) > MAX_HEAD_DIM and not getattr(problem, "latent", False):
        raise NotImplementedError(f"{RUNG}: head sizes {problem.D}/{problem.Dv}; want at most {MAX_HEAD_DIM}")


def _check_layout(sinks, ragged, page_size):
    """``page_size`` as an integer, once these options of a call are what they should be."""
    check_flag(RUNG, "sinks", sinks)
    check_flag(RUNG, "ragged", ragged)
    return check_integer(RUNG, "page_size", page_size, 0)


def _device(device):
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        wrong = TypeError if isinstance(error, TypeError) else ValueError
        raise wrong(f"{RUNG}: device is {device!r}; want 'cpu', 'cuda' or a torch.device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{RUNG}: device is {str(device)!r}, and PyTorch sees no GPU; want 'cpu'")
    return (
        torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
    )
