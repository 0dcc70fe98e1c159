"""What the article measured that chapters 10 and 11 are held against."""

# The article's numbers: two A100 of 80 GB, tensor parallel, SGLang; DFlash 1 then DFlash 2. It says "about" to each of
# them.
ARTICLE = {
    "ttft_ms": ("time to first token", "ms", 810.0, 580.0),
    "itl_ms": ("inter-token latency", "ms", 23.0, 17.0),
    "peak_gb": ("peak memory of a card", "GB", 62.0, 53.0),
    "tok_s": ("throughput", "tokens/s", 320.0, 430.0),
}
ARTICLE_CONCURRENCY = {0.85: 48, 0.90: 56, 0.95: 64}  # one A100 of 80 GB; the last "occasionally" out of memory
