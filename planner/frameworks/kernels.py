"""Which attention kernel, and which way of sending rows to experts, the words for a run's kernels mean."""

from __future__ import annotations

from collections.abc import Collection

from costmodels.recipe import AttentionKernel, Recipe, attention_kernel

# Words for attention kernels, and those of costmodels/recipes/attention.json. ``flash`` without a generation is what
# the recipe's framework runs; PyTorch's own scaled dot product runs FlashAttention-2 where it can.
ATTENTION_KERNELS = {
    "flash1": "flash1",
    "flash2": "flash2",
    "triton": "triton",
    "cudnn": "cudnn",
    "sdpa": "flash2",
    "fused-softmax": "fused_softmax",
    "eager": "eager",
}
# Dispatchers of experts' rows that send a token once to each node of its experts.
ONCE_A_NODE = ("hybridep", "deepep")
KERNEL_WORDS = ("compile", "flash", *ATTENTION_KERNELS, *ONCE_A_NODE)


def attention_name_for(
    recipe: Recipe, kernels: Collection[str], device_name: str, *, uses_flash: bool | None = None
) -> str:
    """Name of the attention kernel: the one that ``kernels`` name, else the recipe's, as it is on the device.

    ``uses_flash``: whether attention is fused, where the run says so; None: as the recipe's framework does.
    """
    named = next((ATTENTION_KERNELS[word] for word in kernels if word in ATTENTION_KERNELS), None)
    if named is None:
        fused = ("flash" in kernels) or (recipe.uses_flash if uses_flash is None else uses_flash)
        named = recipe.flash_kernel if fused else recipe.plain_kernel
    kernel = attention_kernel(named)
    return named if is_fast_on(kernel, device_name) or kernel.elsewhere is None else kernel.elsewhere


def is_fast_on(kernel: AttentionKernel, device_name: str) -> bool:
    """Whether ``kernel`` is on this device as fast as its rate says."""
    return not kernel.devices or device_name.upper().startswith(kernel.devices)


def dispatches_once_a_node(kernels: Collection[str]) -> bool:
    """Whether ``kernels`` name a dispatcher that sends a token once to each node of its experts."""
    return any(word in ONCE_A_NODE for word in kernels)
