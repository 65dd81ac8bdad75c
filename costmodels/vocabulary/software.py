"""How the software of a run is named in one word: ``torchtitan``, ``megatron-lm@2022``, ``accelerate+compile``."""

from __future__ import annotations

from typing import NamedTuple

# Collectives of tensor parallelism run beside the products, where a framework has an option for that.
TENSOR_OVERLAP = "tp-comm-overlap"


class Named(NamedTuple):
    """A framework, a version of it, and words for the kernels that a run chose; blank where it is not said."""

    name: str
    version: str = ""
    kernels: tuple[str, ...] = ()

    @property
    def is_compiled(self) -> bool:
        """By torch.compile."""
        return "compile" in self.kernels

    @property
    def overlaps_tensors(self) -> bool:
        """Its run asks for the option that has collectives of tensor parallelism beside the products."""
        return TENSOR_OVERLAP in self.kernels


def named(software: str) -> Named:
    """The parts of ``NAME[@VERSION][+KERNEL]...``, whether or not they are known; kernels in lower case."""
    head, *kernels = software.split("+")
    name, _, version = head.partition("@")
    return Named(name.strip(), version.strip(), tuple(word.strip().lower() for word in kernels))
