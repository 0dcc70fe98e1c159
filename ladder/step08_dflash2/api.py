"""The entries of step 08: each is an operator under ``torch.compile``, and prefill's or decode's code otherwise."""

import torch

from ladder.contract import kernel_entry

from . import decode, ops, prefill


@kernel_entry
def dflash2_attention(
    q, k, v, *, causal=False, scale=None, windows=None, softcap=0.0, sinks=None, return_lse=False, out=None, right=None
):  # fmt: skip
    """softmax(scale * q k^T) v in one kernel launch, under a causal mask, range windows, a softcap, learned sinks.

    Args:
        q: (B, Hq, Sq, D). k: (B, Hkv, Sk, D). v: (B, Hkv, Sk, Dv). float16, bfloat16 or float32, any strides, head
            sizes up to 256. Hq is any multiple of Hkv; query head h reads KV head h // (Hq // Hkv). On a CUDA device,
            or on the CPU: by the kernels when Triton's interpreter is on, by PyTorch otherwise. Their dtype decides,
            under ``torch.autocast`` too.
        causal: query i sees keys j <= i + Sk - Sq (aligned to the bottom right).
        scale: factor on the scores; None is 1/sqrt(D).
        windows: ``RangeWindows``, which keys each range of queries sees; tiles outside are neither loaded nor computed.
            None: all.
        softcap: c > 0 turns a scaled score s into c * tanh(s / c), before the mask; 0 leaves it.
        sinks: (Hq,) float: one more logit a row, with no value, in the softmax's denominator; None for none.
        return_lse: also return the natural log-sum-exp of each row's scores, the sink's included.
        out: tensor (B, Hq, Sq, Dv) for the result, any strides; not the memory of k or v. None allocates.
        right: how many keys after its own position a query sees, as in FlashAttention's window_size=(left, right) and
            in bidirectional models; None is 0 under a causal mask, and all keys without one.

    Returns:
        (B, Hq, Sq, Dv) in the dtype of q; with return_lse also (B, Hq, Sq) float32. A row that sees no key is 0, and
        its log-sum-exp -inf, or sinks[h].

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted.
        NotImplementedError: head sizes above 256; gradients, forward-mode derivatives and ``torch.func`` transforms
            (step 04 is differentiable).

    Source: Dao, "FlashAttention-2", algorithm 1; softcap: Gemma Team, "Gemma 2", section 2; learned sinks: OpenAI,
    "gpt-oss-120b & gpt-oss-20b Model Card", section 2.2.
    """
    run = ops.attention if torch.compiler.is_compiling() else prefill.dense
    return run(
        q, k, v, causal=causal, scale=scale, windows=windows, softcap=softcap, sinks=sinks, return_lse=return_lse,
        out=out, right=right,
    )  # fmt: skip


@kernel_entry
def dflash2_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, *,
    causal=False, scale=None, windows=None, softcap=0.0, sinks=None, return_lse=False, out=None, right=None,
):  # fmt: skip
    """Attention over a ragged batch: sequences of different lengths packed one after another, no padding.

    The lengths stay on the device: the grid has a slot for every tile that total_q tokens in that many sequences can
    need, and each program finds its sequence by a binary search.

    Args:
        q: (total_q, Hq, D). k: (total_k, Hkv, D). v: (total_k, Hkv, Dv). As in ``dflash2_attention``.
        cu_seqlens_q, cu_seqlens_k: (num_seqs + 1,) int32 or int64, where each sequence starts. Checked on a CPU only.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths in tokens, or None. A small max_seqlen_q chooses tiles
        for
            short chunks; max_seqlen_k is accepted for FlashAttention's sake.
        out: tensor (total_q, Hq, Dv) for the result, any strides. None allocates.
        The others as in ``dflash2_attention``; causal and windows are aligned to the bottom right of each sequence.

    Returns:
        (total_q, Hq, Dv); with return_lse also (Hq, total_q) float32.

    Raises:
        As ``dflash2_attention``.

    Source: the packed layout of FlashAttention's ``flash_attn_varlen_func``.
    """
    run = ops.varlen if torch.compiler.is_compiling() else prefill.varlen
    return run(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, scale=scale, windows=windows,
        softcap=softcap, sinks=sinks, return_lse=return_lse, out=out, right=right,
    )  # fmt: skip


@kernel_entry
def dflash2_paged_prefill(
    q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q=None, *,
    causal=True, scale=None, windows=None, softcap=0.0, sinks=None, return_lse=False, out=None, right=None,
):  # fmt: skip
    """Attention of a chunk of new tokens of each sequence over its pages, where the chunk's keys already are.

    Args:
        q: (total_q, Hq, D), the newest tokens of all sequences packed.
        k_cache: (num_pages, page_size, Hkv, D). v_cache: (num_pages, page_size, Hkv, Dv). Any strides.
        block_table: (B, max_pages) int32, the pages of each sequence in order. Entries past a sequence's pages may be
            anything. Checked on a CPU only.
        seq_lens: (B,) int32, keys of each sequence, the chunk's included.
        cu_seqlens_q: (B + 1,) int32 or int64, where each sequence's chunk starts in q.
        max_seqlen_q: as in ``dflash2_varlen``. causal: True unless said otherwise.
        The others as in ``dflash2_varlen``.

    Returns:
        As ``dflash2_varlen``. The rows of a sequence whose length is negative, or more than its row of the block table
        can address, are NaN on a GPU, an error on a CPU.

    Raises:
        As ``dflash2_attention``.

    Source: pages are Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    section 4.1; chunks are Agrawal et al., "Sarathi-Serve", section 4.
    """
    run = ops.paged_prefill if torch.compiler.is_compiling() else prefill.paged_prefill
    return run(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, causal=causal, scale=scale,
        windows=windows, softcap=softcap, sinks=sinks, return_lse=return_lse, out=out, right=right,
    )  # fmt: skip


attention = dflash2_attention  # the name that every rung has


@kernel_entry
def dflash2_decode(
    q, k_cache, v_cache, block_table, seq_lens, *,
    causal=True, scale=None, windows=None, softcap=0.0, sinks=None, num_kv_splits=None, return_lse=False,
    out=None, workspace=None, schedule=None, config=None,
):  # fmt: skip
    """Attention of the newest tokens of every sequence over its pages: one kernel, also when the keys are split.

    Args:
        q: (B, q_len, Hq, D), the last q_len tokens of each sequence, or (B, Hq, D) for one. float16, bfloat16 or
            float32, any strides. D and Dv up to 256. Made for 1 .. 16 new tokens; more are right, and slower than
            ``dflash2_paged_prefill``.
        k_cache: (num_pages, page_size, Hkv, D). v_cache: (num_pages, page_size, Hkv, Dv). Any strides; their dead slots
            may hold anything, NaN too. Hq is any multiple of Hkv.
        block_table: (B, max_pages) int32. Entries that no visible key needs may be anything: those past a sequence's
            length, and those before its window. The others are pages of the cache, which only a CPU checks.
        seq_lens: (B,) int32, keys of each sequence, its q_len newest included. Read by the device only, so a captured
            graph replays at any lengths.
        causal: token i stands at p = seq_lens - q_len + i and sees keys j <= p; False: all keys of its sequence.
        scale: factor on the scores; None is 1/sqrt(D).
        windows: ``RangeWindows``; keys outside are neither loaded nor followed in the block table. None: all.
        softcap: when positive, scores become softcap * tanh(scale * q.k / softcap), before the mask.
        sinks: (Hq,), float16, bfloat16 or float32: one more logit of every row of a head, with no value.
        num_kv_splits: most parts that a sequence's keys are cut into. None lets the device cut the batch into parts of
            about equal length. With a number given, a row's bits depend on its own sequence alone, whatever the rest.
        return_lse: also return the natural log-sum-exp, sinks included.
        out: tensor for the result, of its shape and dtype. None allocates.
        workspace: a ``DecodeWorkspace``, which calls on one stream may share. None allocates what is needed.
        schedule: from ``get_decode_schedule``, for calls with the same lengths, as those of all layers of a step.
        config: launch parameters that replace those of ``decode_config``, for tuning.

    Returns:
        The shape of q with Dv for D; with return_lse also (B, Hq, q_len) float32, or (B, Hq) for q (B, Hq, D).
        Rows that see no key are 0; their log-sum-exp is -inf, or the sink's logit. On a GPU a sequence whose length is
        negative or beyond max_pages * page_size gives NaN.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted; on a CPU also for such a length, and
        for
            an entry of the block table that a length reaches and that is no page.
        NotImplementedError: head sizes above 256; gradients.

    Source: Dao et al., "Flash-Decoding"; Kwon et al., "PagedAttention"; sinks as in OpenAI's gpt-oss, softcap as in
        Gemma Team, "Gemma 2", section 2.
    """
    run = ops.decode if torch.compiler.is_compiling() else decode.paged_decode
    return run(
        q, k_cache, v_cache, block_table, seq_lens, causal=causal, scale=scale, windows=windows, softcap=softcap,
        sinks=sinks,
        num_kv_splits=num_kv_splits, return_lse=return_lse, out=out, workspace=workspace, schedule=schedule,
        config=config,
    )  # fmt: skip


@kernel_entry
def dflash2_mla_decode(
    q, latent_cache, block_table, seq_lens, *,
    scale, head_dim_v=512, causal=True, windows=None, softcap=0.0, sinks=None, num_kv_splits=None, return_lse=False,
    out=None, workspace=None, schedule=None, config=None,
):  # fmt: skip
    """Multi-head latent attention with the projections absorbed: every head reads the same latent key.

    Args:
        q: (B, q_len, H, 576): 512 columns against the latent, 64 rotary ones. (B, H, 576) for one new token.
        latent_cache: (num_pages, page_size, 576). Its first ``head_dim_v`` columns are also the value, loaded once.
        scale: has no default: the model's scale belongs to its unabsorbed head size (1/sqrt(192) in DeepSeek-V2 and
            V3, times the factor of its rotary scaling), which the shapes here do not show.
        head_dim_v: columns of the value: a power of two, at least 16.
        The others as in ``dflash2_decode``.

    Returns:
        (B, q_len, H, head_dim_v), or (B, H, head_dim_v) for one token;
        with return_lse also (B, H, q_len) float32, or (B, H).

    Raises:
        As ``dflash2_decode``; head_dim_v that is no such power of two;
        NotImplementedError for D above twice head_dim_v.

    Source: DeepSeek-AI, "DeepSeek-V2", section 2.1; the shared tile is FlashMLA's.
    """
    run = ops.mla_decode if torch.compiler.is_compiling() else decode.mla_decode
    return run(
        q, latent_cache, block_table, seq_lens, scale=scale, head_dim_v=head_dim_v, causal=causal, windows=windows,
        softcap=softcap, sinks=sinks, num_kv_splits=num_kv_splits, return_lse=return_lse, out=out, workspace=workspace,
        schedule=schedule, config=config,
    )  # fmt: skip
