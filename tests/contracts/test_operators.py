"""What every record of an operator must answer, and that nobody but the registry knows operators by name."""

import ast
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch

from costmodels.vocabulary.choices import Placement
from planner.models.causal_attention import causal_attention
from planner.operators.call import OpCall, Saved, TensorValue
from planner.operators.collectives import COLLECTIVES
from planner.operators.placement_rules import Applied, Operand
from planner.operators.record import UNKNOWN, Operator, Trait, WorkRules
from planner.operators.registry import (
    OPERATORS,
    kept_by_selective_recomputation,
    names_with,
    operator_called,
    operator_of,
)
from planner.operators.traffic_rules import Backward, BytesRead
from planner.operators.work import saved_for_backward, work_of

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(name for operator in OPERATORS for name in operator.names)

# Operators of Python, of transformers, and what torch's functions are called where they fall apart into others.
NOT_ATEN = {
    "causal_attention",
    "getitem",
    "scan",
    "grouped_mm",
    "grouped_mm_fallback",
    "float",
    "softsign",
    "interpolate",
} | {name for operator in COLLECTIVES for name in operator.names}
FOREIGN_KERNELS = {"planner.causal_attention", "transformers.grouped_mm_fallback"}

SHAPE = (2, 4, 8, 8)
ATTRIBUTES = {"dim": 1, "dims": (0, 2, 1, 3), "dim0": 1, "dim1": 2, "equation": "abcd,abce->abde", "num_groups": 2}


def call_of(name: str) -> OpCall:
    """A call with every tensor that the operator can take, all wanting gradients."""
    value = TensorValue(SHAPE, "float32", requires_grad=True)
    tensors = dict.fromkeys(tensor_arguments(name), value)
    return OpCall(name, tensors, value, ATTRIBUTES, value.num_bytes)


def tensor_arguments(name: str) -> tuple[str, ...]:
    packet = getattr(torch.ops.aten, name, None) or getattr(torch.ops.aten, f"{name}_", None)
    if name == causal_attention.__name__:
        packet = torch.ops.planner.causal_attention
    if packet is None:
        return ("self", "weight")
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema
        found = [argument for argument in schema.arguments if "Tensor" in str(argument.type)]
        if found and not any(argument.is_out for argument in schema.arguments):
            return tuple(name for argument in found for name in names_of(argument))
    return ("self",)


def names_of(argument: torch.Argument) -> tuple[str, ...]:
    """As a graph names tensors: two of a list."""
    return (f"{argument.name}.0", f"{argument.name}.1") if "List" in str(argument.type) else (argument.name,)


def test_no_answer_is_a_default() -> None:
    for record in (Operator, WorkRules):
        assert all(field.default is MISSING and field.default_factory is MISSING for field in fields(record))


def test_an_operator_has_one_record() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert all(name in operator.names for operator in OPERATORS for name in operator.names)


@pytest.mark.parametrize("name", NAMES)
def test_every_question_has_an_answer(name: str) -> None:
    operator, call = operator_called(name), call_of(name)
    assert name in operator.names
    assert operator_of(f"aten.{name}.default") is operator
    assert_known_name(name)
    assert_work(operator.work, call)
    saved = saved_for_backward(call)
    assert saved is None or set(saved.tensors) <= {*call.tensors, "output"}
    assert saved is None or saved.extra_bytes >= 0
    assert_placements(operator)
    assert set(operator.kept_as) <= kept_by_selective_recomputation()
    assert all(operator.has(trait) == (name in names_with(trait)) for trait in Trait)


def assert_known_name(name: str) -> None:
    is_aten = hasattr(torch.ops.aten, name) or hasattr(torch.ops.aten, f"{name}_")
    assert is_aten != (name in NOT_ATEN), "a name that no operator of torch has"


def assert_work(rules: WorkRules, call: OpCall) -> None:
    assert isinstance(rules.reads(call), BytesRead)
    assert isinstance(rules.backward(call, 0), Backward)
    assert isinstance(rules.view_backward(call), Backward)
    work = work_of(call, 0, is_view=False)
    assert (work.op_class is rules.op_class) == (rules.products(call) is not None or not rules.op_class.is_product)
    assert (work.flops > 0) == work.op_class.is_product
    assert work.num_kernels >= 1
    assert work_of(call, 0, is_view=True).bytes_written == 0


def assert_placements(operator: Operator) -> None:
    if operator.placements is None:
        return
    for num_operands in (1, 2, 3):
        operands = tuple(Operand((4, 8) if i else SHAPE, is_parameter=i > 0) for i in range(num_operands))
        for strategy in operator.placements(Applied(operands, SHAPE, ATTRIBUTES, batch_dependent=True), 2):
            assert len(strategy.operands) == len(strategy.partial_gradients) == num_operands
            assert isinstance(strategy.output, Placement)
            assert strategy.compute_fraction in (0.5, 1.0)


def test_every_trait_is_some_operators() -> None:
    assert all(names_with(trait) for trait in Trait)


def test_selective_recomputation_keeps_all_products_and_nothing_else() -> None:
    for operator in OPERATORS:
        if operator not in COLLECTIVES:
            assert bool(operator.kept_as) == operator.work.op_class.is_product, operator.names


def test_what_is_kept_is_an_operator_of_torch() -> None:
    for name in kept_by_selective_recomputation() - FOREIGN_KERNELS:
        namespace, _, operator = name.partition(".")
        assert hasattr(getattr(torch.ops, namespace), operator), name


def test_an_unknown_operator_is_priced_by_its_bytes_and_replicated() -> None:
    assert operator_called("no such operator") is UNKNOWN
    value = TensorValue(SHAPE, "float32", requires_grad=True)
    call = OpCall("no such operator", {"self": value}, value, output_bytes=value.num_bytes)
    assert saved_for_backward(call) is None  # the tracer measures, or keeps all, and warns
    assert UNKNOWN.placements is None
    work = work_of(call, 0, is_view=False)
    assert (work.flops, work.bytes_read, work.bytes_written) == (0, value.num_bytes, value.num_bytes)


def test_an_operator_that_writes_in_place_has_the_record_of_the_one_that_does_not() -> None:
    assert operator_of("aten.relu_.default") is operator_called("relu")
    assert operator_of("aten.__and__.Tensor") is operator_called("__and__")
    assert operator_of("aten.detach_.default") is operator_called("detach_")


def test_without_gradient_nothing_is_kept() -> None:
    value = TensorValue(SHAPE, "float32")
    assert saved_for_backward(OpCall("mul", {"self": value, "other": value}, value)) == Saved()


# -- nobody else knows operators by name ------------------------------------------------------------


# The records; words of other frameworks' configs; functions of torch that have a stand-in where there is no GPU.
AT_HOME = ("planner/operators", "planner/formats/targets", "planner/executor/cuda_kernels.py")


def sources() -> Iterator[Path]:
    for package in ("planner", "costmodels", "hardware_profiles"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if not any(path.is_relative_to(ROOT / home) for home in AT_HOME):
                yield path


def collections_of_names(tree: ast.Module) -> Iterator[tuple[int, list[str]]]:
    """Line and members of every literal collection, word list and alternative of names in ``tree``.

    A ``Literal`` type is none: it says what a value of ours may be.
    """
    types = {id(node.slice) for node in ast.walk(tree) if isinstance(node, ast.Subscript) and is_literal(node)}
    for node in ast.walk(tree):
        if id(node) in types:
            continue
        match node:
            case ast.Set(elts=members) | ast.List(elts=members) | ast.Tuple(elts=members):
                yield node.lineno, [name for member in members if (name := name_in(member)) is not None]
            case ast.Dict(keys=members):
                yield node.lineno, [name for member in members if member and (name := name_in(member)) is not None]
            case ast.MatchOr(patterns=patterns):
                values = [pattern.value for pattern in patterns if isinstance(pattern, ast.MatchValue)]
                yield node.lineno, [name for value in values if (name := name_in(value)) is not None]
            case ast.Call(func=ast.Attribute(attr="split", value=ast.Constant(value=str(text)))):
                yield node.lineno, text.split()
            case _:
                pass


def is_literal(node: ast.Subscript) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "Literal"


def name_in(node: ast.expr) -> str | None:
    """``"linear"``, ``"aten.linear.default"`` or ``_aten.linear.default`` as ``linear``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    elif isinstance(node, ast.Attribute):
        text = ast.unparse(node)
    else:
        return None
    parts = text.rpartition("aten.")[2].split(".")
    return parts[0].removesuffix("_") if parts[0] != text or isinstance(node, ast.Constant) else None


def test_only_the_registry_knows_operators_by_name() -> None:
    known = set(NAMES)
    strays = [
        f"{path.relative_to(ROOT)}:{line} {sorted(known.intersection(names))}"
        for path in sources()
        for line, names in collections_of_names(ast.parse(path.read_text(encoding="utf-8")))
        if len(known.intersection(names)) >= 2 and 2 * len(known.intersection(names)) >= len(set(names))
    ]
    assert not strays, "an operator's traits belong into its record: planner/operators/"


@pytest.mark.parametrize(
    "text",
    [
        'X = {"linear", "conv1d"}',
        'X = ("topk", "sort")',
        'X = frozenset("relu gelu".split())',
        'X = {"mm": 1, "bmm": 2}',
        "X = (_aten.mm.default, torch.ops.aten.bmm.default)",
        'match x:\n    case "split" | "chunk":\n        pass',
    ],
)
def test_such_knowledge_would_be_found(text: str) -> None:
    assert any(set(NAMES).intersection(names) == set(names) for _, names in collections_of_names(ast.parse(text)))
    assert all(len(names) == 2 for _, names in collections_of_names(ast.parse(text)))
