"""How a process on a CPU takes memory for tensors: from what it had before, as torch's allocator does on GPUs."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # malloc.h of the GNU C library
_NEVER = -1  # read there as the largest size


def keep_freed_memory() -> bool:
    """Lets the C library keep what tensors free for those that follow; False where it is another than GNU's.

    By default it maps each large tensor anew, and the system clears that page by page: 3 to 8 % of a step of a GPT of
    width 256 on one core. What a process once had it holds to its end.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    return option is not None and bool(option(_MMAP_MAX, 0)) and bool(option(_TRIM_THRESHOLD, _NEVER))
