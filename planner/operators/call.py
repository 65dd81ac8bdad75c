"""One call of an operator as the rules see it: its tensors by name, its other arguments, its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

AttributeValue = bool | int | float | str | None | tuple[int | None, ...]

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "bfloat16": 2, "float16": 2, "int32": 4, "float32": 4,
    "int64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip

FLOATING = frozenset(name for name in ITEM_BYTES if name.startswith(("float", "bfloat", "complex")))


@dataclass(frozen=True)
class TensorValue:
    """A tensor that an operator reads or writes."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False
    is_weight: bool = False  # a parameter, or computed from parameters alone
    is_parameter: bool = False  # a parameter or a view of one: its memory is not an activation
    num_stored: int | None = None  # elements its memory holds, where fewer than the shape says (expanded)

    @property
    def num_elements(self) -> int:
        """Elements by shape."""
        return prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes that must move to read it all once; a broadcast operand counts by its real size."""
        stored = self.num_elements if self.num_stored is None else min(self.num_elements, self.num_stored)
        return stored * self.item_bytes


@dataclass(frozen=True)
class OpCall:
    """A call of ``name`` (``linear`` for ``aten.linear.default``)."""

    name: str
    tensors: Mapping[str, TensorValue]  # by schema name; those of a list are ``tensors.0``, ``tensors.1``, ...
    output: TensorValue
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])
    output_bytes: int = 0  # of all outputs

    @property
    def operands(self) -> tuple[TensorValue, ...]:
        """The tensors in order."""
        return tuple(self.tensors.values())

    def tensor(self, *names: str) -> TensorValue:
        """The tensor under the first of ``names`` that there is."""
        for name in names:
            if name in self.tensors:
                return self.tensors[name]
        raise KeyError(f"{self.name} has no tensor {' or '.join(names)}, only {', '.join(self.tensors)}")

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient flows back through this call."""
        return self.output.requires_grad


@dataclass(frozen=True)
class Saved:
    """What autograd keeps for one call: names of tensors (``output`` is the result) and bytes besides."""

    tensors: tuple[str, ...] = ()
    extra_bytes: int = 0
