"""Shapes of the parameters of real groups, for what needs no tensors (``padding.py``, tests of layouts)."""

Shape = tuple[int, ...]

MODELS: dict[str, list[Shape]] = {
    "Llama-3-8B block": [
        (4096, 4096),  # q
        (1024, 4096),  # k
        (1024, 4096),  # v
        (4096, 4096),  # o
        (14336, 4096),  # gate
        (14336, 4096),  # up
        (4096, 14336),  # down
        (4096,),  # norms
        (4096,),
    ],
    "GPT-2 small block": [
        *[(768,), (768,), (2304, 768), (2304,), (768, 768), (768,)],  # norm, qkv, projection
        *[(768,), (768,), (3072, 768), (3072,), (768, 3072), (768,)],  # norm, MLP
    ],
    "GPT-2 small embeddings": [(50257, 768), (1024, 768), (768,), (768,)],
    "128 fused experts": [(128, 2880, 5760), (128, 5760), (128, 2880, 2880), (128, 2880)],
    "256 stacked experts": [(256, 4096, 7168), (256, 7168, 2048)],  # of DeepSeek-V3
    "32 stacked experts": [(32, 4096, 7168), (32, 7168, 2048)],  # what one of eight expert-parallel ranks has of them
    "256 separate experts": [(2048, 7168), (2048, 7168), (7168, 2048)] * 256,
}
