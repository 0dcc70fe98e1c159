"""How tables and figures call an implementation, and in which order they list them."""

PEER_TITLES = {
    "sdpa": "PyTorch SDPA", "sdpa_flash": "FlashAttention-2", "sdpa_cudnn": "cuDNN", "flex": "flex_attention",
    "fa3": "FlashAttention-3",
}  # fmt: skip


def title(impl):
    """How tables and figures call an implementation: "05 Fused", "FlashAttention-3"."""
    from ladder.rungs import RUNGS

    for rung in RUNGS:
        if rung.name == impl:
            return f"{rung.number:02d} {rung.title}"
    return PEER_TITLES.get(impl, impl)


def in_order(rows):
    """Rows as the ladder has them: its rungs from the first on, then peers, whatever the order of the file."""
    from ladder.rungs import RUNGS

    names = [*(rung.name for rung in RUNGS), *PEER_TITLES]
    return sorted(rows, key=lambda row: names.index(row["impl"]) if row["impl"] in names else len(names))
