"""Models of transformers that compute something else where they are exported, traced as they are trained.

The gated delta rule of Qwen3-Next, Qwen3.5 and OLMo Hybrid solves a triangular system; for export, whose targets may
lack that, it goes through the rows of each chunk one by one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator

_EXPORTED, _COMPILED = "is_torchdynamo_exporting", "is_torchdynamo_compiling"


@contextlib.contextmanager
def as_trained() -> Generator[None]:
    """Inside, their code is told that it is not exported.

    Code that also asks whether it is compiled is left alone: it takes the way of training where it is exported.
    """
    named = [vars(module) for name, module in sys.modules.items() if name.startswith("transformers.models.")]
    asking = [names for names in named if _EXPORTED in names and _COMPILED not in names]
    answers = [names[_EXPORTED] for names in asking]
    for names in asking:
        names[_EXPORTED] = lambda: False
    try:
        yield
    finally:
        for names, answer in zip(asking, answers, strict=True):
            names[_EXPORTED] = answer
