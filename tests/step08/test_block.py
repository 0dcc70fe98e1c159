"""A whole attention block against the same block in float64, token by token: prefill, chunks, decode; GQA and MLA."""

import math

import pytest
import torch
from support.step08_block import BLOCKS, DEVICE, HIDDEN, PAGE, randomised, served

from ladder.lab import interpret
from ladder.step06_paged import PagedKVCache
from ladder.step07_dflash1 import DecodeWorkspace
from ladder.step08_dflash2.fusion import (
    AttentionBatch,
    BlockOutput,
    DFlash2AttentionBlock,
    DFlash2MLABlock,
    rope_tables,
)


def norm(x, weight, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x, position, theta=10000.0, interleaved=False):
    """One head's columns at one position, by complex multiplication."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = torch.complex(a.contiguous(), b.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    return torch.stack([turned.real, turned.imag], -1).flatten(-2) if interleaved else torch.cat([turned.real, turned.imag], -1)


def attend(q, keys, values, scale, low=0, sink_logit=None):
    """One query over the keys from ``low`` on."""
    scores = scale * keys[low:] @ q
    if sink_logit is not None:
        scores = torch.cat([scores, sink_logit[None]])
    weights = scores.softmax(0)
    return weights[: len(keys) - low] @ values[low:]


def exact_block(block, xs, residuals):
    """(normed, residual) of every token of one sequence in float64."""
    w = {name: p.detach().double().cpu() for name, p in block.named_parameters()}
    rows, keys, values = [], [], []
    for p, (x, residual) in enumerate(zip(xs.double().cpu(), residuals.double().cpu())):
        residual = x + residual
        y = norm(residual, w["input_norm"])
        if isinstance(block, DFlash2MLABlock):
            q = norm(w["weight_q_a"] @ y, w["q_a_norm"]) if "weight_q_a" in w else y
            q = (w["weight_q"] @ q).view(block.num_heads, -1)
            q = torch.cat([q[:, : block.nope], rotated(q[:, block.nope :], p, interleaved=block.interleaved)], 1)
            latent = w["weight_kv_a"] @ y
            kv = (w["weight_kv_b"] @ norm(latent[: block.rank], w["kv_a_norm"])).view(block.num_heads, -1)
            pe = rotated(latent[block.rank :], p, interleaved=block.interleaved)
            keys.append(torch.cat([kv[:, : block.nope], pe.expand(block.num_heads, -1)], 1))
            values.append(kv[:, block.nope :])
        else:
            qkv = (w["weight_qkv"] @ y + w.get("bias_qkv", 0)).view(-1, block.head_dim)
            q, k, v = qkv.split([block.num_heads, block.num_kv_heads, block.num_kv_heads])
            if "q_norm" in w:
                q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
            group = block.num_heads // block.num_kv_heads
            q = rotated(q, p, interleaved=block.interleaved)
            keys.append(rotated(k, p, interleaved=block.interleaved).repeat_interleave(group, 0))
            values.append(v.repeat_interleave(group, 0))
        scale = block.scale or q.shape[1] ** -0.5
        low = max(0, p - 2) if block.windows else 0
        heads = [attend(q[h], torch.stack(keys)[:, h], torch.stack(values)[:, h], scale, low, w["sinks"][h] if "sinks" in w else None)
                 for h in range(block.num_heads)]  # fmt: skip
        residual = residual + w["weight_o"] @ torch.cat(heads)
        rows.append((norm(residual, w["post_norm"]), residual))
    return tuple(torch.stack(x) for x in zip(*rows))


def run(block, server, xs, residuals, steps, workspace=None):
    """The block's outputs for each sequence, concatenated over steps of (new tokens of each sequence, decode)."""
    found, begun = [[], []], [0, 0]
    for number, (counts, decode) in enumerate(steps):
        batch = server.step(counts, decode, context=not decode and number > 0 and isinstance(block, DFlash2MLABlock))
        x, residual = (
            torch.cat([y[s][begun[s] : begun[s] + counts[s]] for s in range(2)]) for y in (xs, residuals)
        )
        output = block(x, residual, server.cos, server.sin, batch, *server.caches, workspace=workspace)
        for s, start in ((0, 0), (1, counts[0])):
            found[s].append(BlockOutput(*(None if y is None else y[start : start + counts[s]] for y in output[:4]), output[4]))
            begun[s] += counts[s]
        if output.expert_counts is not None:
            assert output.expert_counts.tolist() == torch.bincount(output.topk_ids.flatten(), minlength=block.router.num_experts).tolist()
    return found


@pytest.fixture(params=["kernels", "torch"])
def path(request, monkeypatch):
    if request.param == "torch":
        if DEVICE.type == "cuda":
            pytest.skip("a GPU has the kernels")
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    else:
        pytest.importorskip("triton")
    assert interpret.is_enabled() == (request.param == "kernels") or DEVICE.type == "cuda"


@pytest.mark.parametrize("name", BLOCKS)
def test_block_serves(name, path):
    """A prompt each, one token each, a chunk each, two tokens each: every output as if the sequence were computed at once."""
    block = randomised(BLOCKS[name]())
    steps = [((5, 3), False), ((1, 1), True), ((2, 3), False), ((2, 2), True)]
    xs, residuals = ([torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n + i)).to(DEVICE) for n in (10, 9)] for i in (0, 50))
    found = run(block, served(block), xs, residuals, steps, workspace=DecodeWorkspace(DEVICE))
    for s in range(2):
        normed, residual = exact_block(block, xs[s], residuals[s])
        for i, want in ((0, normed), (1, residual)):
            got = torch.cat([output[i] for output in found[s]]).double().cpu()
            torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4 if DEVICE.type == "cpu" else 2e-2)
        if block.router is None:
            assert found[s][0][2:] == (None, None, None)
            continue
        scores = normed @ block.gate.double().cpu().T
        scores = scores.sigmoid() if block.router.scoring == "sigmoid" else scores.softmax(-1)
        if block.router.num_groups is None and DEVICE.type == "cpu":
            assert torch.cat([output[3] for output in found[s]]).tolist() == scores.topk(block.router.top_k)[1].tolist()


def test_first_layer_has_no_residual():
    block = randomised(BLOCKS["llama"]())
    x = torch.randn(4, HIDDEN, device=DEVICE)
    outputs = []
    for residual in (None, torch.zeros_like(x)):
        server = served(block)
        outputs.append(block(x, residual, server.cos, server.sin, server.step((2, 2), True), *server.caches))
    assert torch.equal(outputs[0].normed, outputs[1].normed) and torch.equal(outputs[0].residual, outputs[1].residual)


@pytest.mark.parametrize("name", ["llama", "v2 lite"])
def test_padding_tokens_change_nothing(name):
    """A graph captured for more tokens than there are: the last ones have no slot, and belong to no sequence."""
    block = randomised(BLOCKS[name]())
    x = torch.randn(7, HIDDEN, device=DEVICE)
    server = served(block)
    want = block(x[:5], None, server.cos, server.sin, server.step((3, 2), False), *server.caches)
    server = served(block)
    batch = server.step((3, 2), False)
    batch.positions = torch.cat([batch.positions, batch.positions[:2]])
    batch.slot_mapping = torch.cat([batch.slot_mapping, torch.full_like(batch.slot_mapping[:2], -1)])
    if DEVICE.type == "cpu":  # where offsets are checked: they must end at the last token
        batch.cu_seqlens_q = torch.tensor([0, 3, 5, 7], dtype=torch.int32)
        batch.seq_lens = torch.cat([batch.seq_lens, torch.full_like(batch.seq_lens[:1], 2)])
        batch.block_table = torch.cat([batch.block_table, torch.full_like(batch.block_table[:1], 6)])
        for cache in server.caches:
            cache[[0, 6]] = 0  # pages for what nobody will look at
    got = block(x, None, server.cos, server.sin, batch, *server.caches)
    torch.testing.assert_close(got.residual[:5], want.residual)


@pytest.mark.parametrize("sequences", (0, 2))
@pytest.mark.parametrize("decode", (False, True))
@pytest.mark.parametrize("name", ["llama", "v3"])
def test_no_tokens(name, decode, sequences):
    """What a rank without work calls: results of no rows, and a cache as it was."""
    block = randomised(BLOCKS[name]())
    server = served(block)
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    table, lengths = (torch.zeros(shape, dtype=torch.int32, device=DEVICE) for shape in ((sequences, 6), (sequences,)))
    batch = AttentionBatch(none, none.long(), table, lengths)
    if not decode:
        batch.cu_seqlens_q = torch.zeros(sequences + 1, dtype=torch.int32, device=DEVICE)
    got = block(torch.empty(0, HIDDEN, device=DEVICE), None, server.cos, server.sin, batch, *server.caches)
    assert got.normed.shape == got.residual.shape == (0, HIDDEN)
    assert got.expert_counts is None or not got.expert_counts.any()
    assert all(cache.isnan().all() for cache in server.caches)


def test_same_layout_as_the_paged_cache():
    """Step 06's cache and this block mean the same slots."""
    block = randomised(BLOCKS["llama"]())
    cache = PagedKVCache(6, PAGE, num_kv_heads=1, head_dim=16, max_seqs=1, max_seq_len=20, dtype=torch.float32, device=DEVICE)
    cache.allocate(0, 6)
    slots = torch.tensor([int(cache.block_table[0, p // PAGE]) * PAGE + p % PAGE for p in range(6)], device=DEVICE)
    positions, lens = torch.arange(6, device=DEVICE), torch.tensor([6], dtype=torch.int32, device=DEVICE)
    batch = AttentionBatch(positions, slots, cache.block_table, lens, cu_seqlens_q=torch.tensor([0, 6], dtype=torch.int32, device=DEVICE))
    x, (cos, sin) = torch.randn(6, HIDDEN, device=DEVICE), rope_tables(16, 20, device=DEVICE)
    block(x, None, cos, sin, batch, cache.k_pages, cache.v_pages)
    _, v = cache.read(0)
    want = norm(x, block.input_norm) @ block.weight_qkv[-16:].T
    torch.testing.assert_close(v.flatten(1), want, rtol=1e-4, atol=1e-4)


def test_refusals():
    block = BLOCKS["llama"]()
    server = served(block)
    batch = server.step((2, 1), True)
    with pytest.raises(ValueError, match="x has 3 tokens for 2 sequences; want as many for each in decode, or cu_seqlens_q"):
        block(torch.zeros(3, HIDDEN, device=DEVICE), None, server.cos, server.sin, batch, *server.caches)
    with pytest.raises(TypeError, match="router is a dict; want a Router, or None"):
        DFlash2AttentionBlock(HIDDEN, 4, 2, 16, router={})
    with pytest.raises(ValueError, match="head_dim is 0; want an integer of at least 1"):
        DFlash2AttentionBlock(HIDDEN, 4, 2, 0)
    with pytest.raises(ValueError, match="q_lora_rank is 0; want"):
        DFlash2MLABlock(HIDDEN, 4, q_lora_rank=0)
    block = BLOCKS["v2 lite"]()
    server = served(block)
    batch = server.step((2, 1), False)
    batch.context_slots = batch.slot_mapping
    with pytest.raises(ValueError, match="one of context_slots and cu_seqlens_k is None; want both, or neither"):
        block(torch.zeros(3, HIDDEN, device=DEVICE), None, server.cos, server.sin, batch, *server.caches)


def test_parameters_load_and_want_no_gradients():
    block, other = randomised(BLOCKS["v3"]()), BLOCKS["v3"]()
    other.load_state_dict(block.state_dict())
    assert all(torch.equal(a, b) and not b.requires_grad for a, b in zip(block.parameters(), other.parameters(), strict=True))
    assert math.isclose(BLOCKS["v2 lite"]().scale, 32**-0.5) and block.scale == 0.3


@pytest.mark.parametrize("name", ["qwen3 moe", "v3"])
def test_torch_compile_sees_one_graph(name, monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    block = randomised(BLOCKS[name]())
    x = torch.randn(4, HIDDEN, device=DEVICE)

    def prompt_then_decode(call):
        server = served(block)
        block(x, None, server.cos, server.sin, server.step((2, 2), False), *server.caches)
        return call(x[:2], x[2:], server.cos, server.sin, server.step((1, 1), True), *server.caches)

    plain = prompt_then_decode(block)
    for a, b in zip(plain, prompt_then_decode(torch.compile(block, fullgraph=True, backend="aot_eager")), strict=True):
        torch.testing.assert_close(a, b)
