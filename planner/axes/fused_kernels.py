"""Operators that a framework runs as one, though models are traced with each by itself.

Activations. A gated layer is traced as it is written: the activation of one product's output times another's, and in
experts times each row's weight. A framework that fuses these reads the products' outputs and writes what the next
product takes, and its backward pass computes what lies between once more: autograd keeps the products' outputs alone.

Projections. One product makes queries, keys and values. What autograd keeps of values is a view of its output, and
keeps all of it, also where queries and keys are kept as rotary positions made them anew.

Sources: Megatron-LM, megatron/core/fusions/fused_bias_swiglu.py, ``SwiGLUFunction`` and ``WeightedSwiGLUFunction``,
which save their inputs alone (on unless --no-bias-swiglu-fusion); megatron/core/transformer/attention.py,
``get_query_key_value_tensors``, which splits the output of ``linear_qkv``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from costmodels.vocabulary.workload import OpClass
from planner.axes.lowered import Kernel, RankUnit, RankWork, Work

PRODUCTS = (OpClass.GEMM, OpClass.GROUPED_GEMM)
GATED = 2  # products, at least, whose outputs such a kernel takes


def with_fused_projections(work: RankWork) -> RankWork:
    """``work``, where what attention keeps of one of its projections keeps the outputs of all of them."""
    unit = work.unit
    products = {kernel.id: kernel for kernel in unit.kernels if kernel.op_class in PRODUCTS}
    tensors = dict(unit.tensors)
    for attention in (kernel for kernel in unit.kernels if kernel.keys_and_values):
        kept = [products[i] for i in attention.saves if i in products]
        beside = [each for each in products.values() if kept and each.inputs == kept[0].inputs and each not in kept]
        if kept:
            whole, own = sum(unit.tensors[each.id].bytes for each in beside), tensors[kept[0].id]
            tensors[own.id] = replace(own, kept_bytes=own.kept_bytes + whole)
    return replace(work, unit=replace(unit, tensors=tensors))


def with_fused_activations(work: RankWork, *, in_experts: bool = False) -> RankWork:
    """``work``, with the elementwise kernels between the products of gated layers as one kernel each.

    ``in_experts``: those of experts are part of the products themselves.
    """
    unit = work.unit
    fused: dict[int, Kernel] = {}
    gone: set[int] = set()
    for chain in _chains(unit):
        one = _as_one(unit, chain, in_experts=in_experts)
        if one is not None:
            fused[one.id] = one
            gone.update(kernel.id for kernel in chain if kernel.id != one.id)
    if not fused:
        return work
    kernels = tuple(fused.get(kernel.id, kernel) for kernel in unit.kernels if kernel.id not in gone)
    experts = unit.experts and replace(unit.experts, kernels=unit.experts.kernels - gone)
    return replace(work, unit=replace(unit, kernels=kernels, experts=experts))


def _chains(unit: RankUnit) -> Iterator[Sequence[Kernel]]:
    """Of each product the elementwise kernels in order that make what it takes, and nothing for any other."""
    kernels = {kernel.id: kernel for kernel in unit.kernels}
    users: Mapping[int, set[int]] = defaultdict(set)
    for kernel in unit.kernels:
        for tensor in kernel.inputs:
            users[tensor].add(kernel.id)
    for product in unit.kernels:
        if product.op_class not in PRODUCTS:
            continue
        chain: dict[int, Kernel] = {}
        ahead = list(product.inputs[:1])
        while ahead:
            kernel = kernels.get(ahead.pop())
            if kernel is not None and _is_elementwise(kernel) and users[kernel.id] <= {product.id, *chain}:
                chain[kernel.id] = kernel
                ahead += kernel.inputs
        yield sorted(chain.values(), key=lambda kernel: kernel.id)


def _is_elementwise(kernel: Kernel) -> bool:
    return kernel.op_class is OpClass.MEMORY_BOUND and not kernel.is_view and not kernel.norm_elements


def _as_one(unit: RankUnit, chain: Sequence[Kernel], *, in_experts: bool) -> Kernel | None:
    """The kernels of ``chain`` as one, by the name of the last; None where they are no gated activation.

    As part of experts' products it moves nothing forward, and reads its inputs again backward.
    """
    inside = {kernel.id for kernel in chain}
    entering = tuple(dict.fromkeys(i for kernel in chain for i in kernel.inputs if i not in inside))
    storages = {kernel.id: kernel.storage for kernel in unit.kernels}
    made_by = {kernel.id: kernel.op_class for kernel in unit.kernels if kernel.op_class in PRODUCTS}
    classes = [made_by[i] for i in entering if i in made_by]
    if len(chain) < GATED or len(classes) < GATED:
        return None
    last = chain[-1]
    read = sum(unit.tensors[i].bytes for i in entering)
    written = unit.tensors[last.id].bytes
    # Its inputs and its output's gradient are read, and its inputs' gradients written.
    moved = read + written, 2 * read + written
    if is_inside := in_experts and OpClass.GEMM not in classes:
        moved = 0.0, read
    return replace(
        last,
        forward=Work(sum(kernel.forward.flops for kernel in chain), moved[0], 0.0, 0 if is_inside else 1),
        backward=Work(sum(kernel.backward.flops for kernel in chain), moved[1], 0.0, 0 if is_inside else 1),
        inputs=entering,
        saves=tuple(dict.fromkeys(storages.get(i, i) for i in entering)),
        saved_extra_bytes=sum(kernel.saved_extra_bytes for kernel in chain),
    )
