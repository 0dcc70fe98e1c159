"""Step 08 under the names that other projects already call.

``flash_attn``: FlashAttention-3's functions, same signatures. ``transformers``:
an attention backend for Hugging Face models. Each module is imported by name;
neither is needed by the ladder, and ``transformers`` is an optional dependency.
"""
