"""Tables of the rotary embedding, as transformers scales them: plain, linear, YaRN, Llama 3."""

import math
import numbers

import torch

from ladder.contract import check_flag, check_integer

from .checks import RUNG, check_number

ROPE_KEYS = {  # what each type of rotary scaling reads, besides its own name and rope_theta
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
             "mscale_all_dim",
             "truncate"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}  # fmt: skip


def rope_tables(head_dim, max_positions, theta=None, scaling=None, *, device="cpu"):
    """cos and sin of the rotary embedding for every position.

    Args:
        head_dim: columns that are rotated (``rot_dim``): even; less than the head's size where the model rotates a
            part.
        max_positions: rows of the tables.
        theta: base of the frequencies; None is the ``rope_theta`` of ``scaling``, or 10000 where that names none.
        scaling: None, or the ``rope_scaling`` or ``rope_parameters`` entry of a model's config.json: a dict with
            "rope_type" or "type" among "default" (also when there is neither); "linear" (factor); "yarn" (factor,
            original_max_position_embeddings, and optionally beta_fast, beta_slow, attention_factor, mscale,
            mscale_all_dim, truncate); "llama3" (factor, low_freq_factor, high_freq_factor,
            original_max_position_embeddings). Each may have "rope_theta". They mean what they mean in transformers; any
            other key is refused unless its value is None.
        device: of the tables.

    Returns:
        cos, sin: (max_positions, head_dim / 2) float32, YaRN's attention factor
        multiplied in. Angles are computed in float64, so that position 128k is as exact
        as position 1. DeepSeek's models also scale their softmax: see ``yarn_mscale``.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted.

    Source: Su et al., "RoFormer"; Peng et al., "YaRN", section 3.
    """
    head_dim = check_integer(RUNG, "head_dim", head_dim, 2)
    max_positions = check_integer(RUNG, "max_positions", max_positions, 0)
    if head_dim % 2:
        raise ValueError(f"{RUNG}: head_dim is {head_dim}; want an even number: columns are rotated in pairs")
    if theta is not None and not _is_positive(theta):
        raise ValueError(f"{RUNG}: theta is {theta!r}; want a positive number")
    radians, factor = frequencies(head_dim, theta, scaling)
    angles = torch.arange(max_positions, dtype=torch.float64, device="cpu")[:, None] * radians
    return tuple((f(angles) * factor).float().to(device=device) for f in (torch.cos, torch.sin))


def yarn_mscale(factor, mscale=1.0):
    """YaRN's 0.1 * mscale * ln(factor) + 1, and 1 up to a factor of 1.

    DeepSeek multiplies its softmax scale by the square of it, with ``mscale_all_dim`` of its rope_scaling for mscale.

    Raises:
        TypeError, ValueError: ``factor`` or ``mscale`` is no finite number.

    Source: Peng et al., "YaRN", section 3.4.
    """
    factor, mscale = check_number("factor", factor, signed=True), check_number("mscale", mscale, signed=True)
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _is_positive(number):
    return isinstance(number, numbers.Real) and not isinstance(number, bool) and 0 < number < math.inf


def frequencies(dim, theta=None, scaling=None):
    """(dim / 2,) float64 radians per position, and the factor on cos and sin."""
    if scaling is not None and not isinstance(scaling, dict):
        raise TypeError(f"{RUNG}: scaling is a {type(scaling).__name__}; want a dict with a 'rope_type', or None")
    scaling = {name: given for name, given in (scaling or {}).items() if given is not None or name == "truncate"}
    kinds = {name: scaling.pop(name) for name in ("rope_type", "type") if name in scaling} or {"rope_type": "default"}
    kind = next(iter(kinds.values()))
    if any(other != kind for other in kinds.values()):
        raise ValueError(
            f"{RUNG}: scaling has rope_type {kind!r} and type {kinds['type']!r}; want one of them, or the same twice"
        )
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise ValueError(f"{RUNG}: scaling has type {kind!r}; want 'default', 'linear', 'yarn' or 'llama3'")
    if scaling.pop("partial_rotary_factor", 1) != 1:
        raise ValueError(
            f"{RUNG}: scaling has a partial_rotary_factor other than 1; want none: head_dim is the number of rotated "
            f"columns"
        )
    for name in scaling:
        if name not in ROPE_KEYS[kind] and name != "rope_theta":
            raise ValueError(
                f"{RUNG}: scaling[{name!r}] is {scaling[name]!r}; want no such key: type {kind!r} does not read it"
            )

    def value(name, default=None):
        number = scaling.get(name, default)
        if not _is_positive(number):
            raise ValueError(f"{RUNG}: scaling[{name!r}] is {number!r}; want a positive number for type {kind!r}")
        return float(number)

    base = value("rope_theta", 10000.0 if theta is None else theta)
    if theta is not None and base != theta:
        raise ValueError(
            f"{RUNG}: theta is {theta} and scaling['rope_theta'] is {base}; want one of them, or the same twice"
        )
    plain = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if kind == "default":
        return plain, 1.0
    factor = value("factor")
    if kind == "linear":
        return plain / factor, 1.0
    trained = value("original_max_position_embeddings")
    if kind == "llama3":
        low, high = value("low_freq_factor"), value("high_freq_factor")
        if high <= low:
            raise ValueError(f"{RUNG}: scaling['high_freq_factor'] is {high}; want more than low_freq_factor, {low}")
        turns = trained * plain / (2 * math.pi)  # of each pair within the trained context
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return plain * keep + plain / factor * (1 - keep), 1.0
    if base <= 1:
        raise ValueError(f"{RUNG}: theta is {base:g}; want more than 1 for type 'yarn', which divides by its logarithm")
    first, last = (
        dim * math.log(trained / (value(name, default) * 2 * math.pi)) / (2 * math.log(base))
        for name, default in (("beta_fast", 32), ("beta_slow", 1))
    )  # the pairs that turn so often within the trained context
    truncate = scaling.get("truncate", True)
    check_flag(RUNG, "scaling['truncate']", truncate)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64, device="cpu") - first) / ((last - first) or 0.001)).clamp(0, 1)
    if "attention_factor" in scaling:
        attention = value("attention_factor")
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        attention = yarn_mscale(factor, value("mscale")) / yarn_mscale(factor, value("mscale_all_dim"))
    else:
        attention = yarn_mscale(factor)
    return plain * (1 - ramp) + plain / factor * ramp, attention
