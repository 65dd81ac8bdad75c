"""What one call of an operator costs, forward and backward, and what autograd keeps of it."""

from __future__ import annotations

from dataclasses import dataclass

from hardware_profiles.vocabulary import OpClass
from planner.operators.call import OpCall, Saved
from planner.operators.product_rules import Products
from planner.operators.record import WorkRules
from planner.operators.registry import operator_called
from planner.operators.traffic_rules import Backward


@dataclass(frozen=True)
class OpWork:
    """All that one call costs."""

    op_class: OpClass
    flops: int = 0
    backward_flops: int = 0
    weight_gradient_flops: int = 0
    recomputed_flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    param_bytes_read: int = 0
    backward_bytes: int = 0
    num_kernels: int = 0
    num_backward_kernels: int = 0


def work_of(call: OpCall, saved_bytes: int, *, is_view: bool, measured: Products | None = None) -> OpWork:
    """The work of ``call``; ``saved_bytes`` is what its backward reads again of what was kept.

    ``is_view``: it moved nothing forward. ``measured`` stands in where there is no rule.
    """
    rules = operator_called(call.name).work
    if is_view:
        backward = rules.view_backward(call) if call.requires_grad else Backward()
        return OpWork(OpClass.VIEW, backward_bytes=backward.num_bytes, num_backward_kernels=backward.num_kernels)
    backward = rules.backward(call, saved_bytes) if call.requires_grad else Backward()
    read = rules.reads(call)
    op_class, products = _products(call, rules, measured)
    if not call.requires_grad:
        products = Products(products.flops, 0, 0)
    return OpWork(
        op_class=op_class,
        flops=products.flops,
        backward_flops=products.backward_flops,
        weight_gradient_flops=products.weight_gradient_flops,
        recomputed_flops=products.recomputed_flops,
        bytes_read=read.total,
        bytes_written=call.output_bytes,
        param_bytes_read=read.of_weights,
        backward_bytes=backward.num_bytes,
        num_kernels=rules.kernels(call),
        num_backward_kernels=backward.num_kernels,
    )


def saved_for_backward(call: OpCall) -> Saved | None:
    """What ``call`` keeps; None where there is no rule (the caller then keeps all and says so)."""
    if not call.requires_grad:
        return Saved()
    rule = operator_called(call.name).saved
    return None if rule is None else rule(call)


def _products(call: OpCall, rules: WorkRules, measured: Products | None) -> tuple[OpClass, Products]:
    """The products of ``call`` by its rule, or as they were measured."""
    products = rules.products(call)
    if products is not None:
        return rules.op_class, products
    if measured is not None and (measured.flops or measured.backward_flops):
        return OpClass.GEMM, measured
    return OpClass.MEMORY_BOUND, Products(0, 0, 0)
