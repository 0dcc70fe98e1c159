"""Greedy and temperature sampling; a request's random numbers depend
on its seed and position, never on its batch-mates."""

from dataclasses import dataclass

import torch

from ladder.contract import check_integer

from .checks import check_number


@dataclass(frozen=True)
class SamplingParams:
    """How a request is answered.

    max_tokens: most tokens to generate. temperature: 0 is greedy. top_p: sample
    from the fewest tokens that hold this much probability, 1 from all. seed: of
    this request. stop: token ids that end the answer (the last token says which).

    Raises:
        TypeError, ValueError: naming the field, what came and what is wanted. None is no value of any of them.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple = ()

    def __post_init__(self):
        try:  # what is wrong here would fail a step of the engine, and everyone in it
            stop = tuple(self.stop)
        except TypeError:
            raise TypeError(f"sampling: stop is {self.stop!r}; want token ids, such as (0,)") from None
        checked = dict(
            max_tokens=check_integer("sampling", "max_tokens", self.max_tokens, 1),
            temperature=check_number("sampling", "temperature", self.temperature),
            top_p=check_number("sampling", "top_p", self.top_p, most=1.0, above=True),
            seed=check_integer("sampling", "seed", self.seed, 0),
            stop=tuple(check_integer("sampling", "stop", token, 0) for token in stop),
        )
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def sample(logits, params, positions):
    """The next token of each row.

    Args:
        logits: (B, vocab) float32. params: B ``SamplingParams``. positions: B ints, where the new tokens will stand.

    Returns:
        (B,) int64 on the device of ``logits``.
    """
    greedy = logits.argmax(dim=-1)
    if all(p.temperature == 0 for p in params):
        return greedy
    column = dict(device=logits.device, dtype=torch.float32)
    temperature = torch.tensor([p.temperature for p in params], **column)[:, None]
    scaled = logits / temperature.clamp_min(1e-6)
    if any(p.top_p < 1 for p in params):
        top_p = torch.tensor([p.top_p for p in params], **column)[:, None]
        ordered, index = scaled.softmax(dim=-1).sort(dim=-1, descending=True)
        outside = ordered.cumsum(dim=-1) - ordered >= top_p  # the mass before a token already suffices
        # float32's sum may reach 1 early: whoever asked for all tokens has them all, whoever else asked
        outside &= top_p < 1
        outside[:, 0] = False  # also where top_p is 0 in float32
        scaled = scaled.masked_fill(torch.zeros_like(outside).scatter(1, index, outside), float("-inf"))
    keys = torch.tensor([_mix(p.seed * 0x9E3779B1 + at) for p, at in zip(params, positions)], device=logits.device)
    # Gumbel's trick: the largest of score + noise is a sample of the softmax.
    noise = uniform(keys, logits.shape[1])
    drawn = (scaled - noise.log().neg().log()).argmax(dim=-1)
    return torch.where(temperature[:, 0] > 0, drawn, greedy)


def uniform(keys, count):
    """(B, count) float32 in (0, 1) from keys (B,) int64: a hash of (key, column), so any row can be made alone."""
    x = (keys[:, None] + 0x9E3779B1 * torch.arange(1, count + 1, device=keys.device)) & 0xFFFFFFFF
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):  # Wellons' lowbias32; products stay below 2^63
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    return ((x >> 9).float() + 0.5) / (1 << 23)  # 24 bits would be rounded, the largest to 1: noise without bound


def _mix(x):
    """32 well-mixed bits of an integer, on the host."""
    x &= 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) & 0xFFFFFFFF
