"""A small MoE serving engine that runs any rung of the ladder end to end.

Continuous batching with chunked prefill, a paged KV pool sized by a fraction of the memory, decode as CUDA graphs,
greedy and temperature sampling, streaming and cancellation; about the size of nano-vllm, and meant to be read.

    python -m ladder.engine generate --model tiny-moe --backend step08 --prompt "import "
    python -m ladder.engine bench --model deepseek-v2-lite --backend step08 --input-len 4096 --output-len 512
    torchrun --nproc-per-node 2 -m ladder.engine bench --model deepseek-v2-lite    # tensor parallel, see ``parallel``
"""
