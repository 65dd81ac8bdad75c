"""CP-SAT without pandas: the part of ``ortools.sat.python.cp_model`` that our programs use.

That module imports pandas, for series of variables that we have none of, and takes a third of a short search with it.
Below it lies ``cp_model_helper``, OR-Tools' own binding to the solver, on which this one stands as that one does: the
same calls build the same programs. Nothing else of OR-Tools is imported, and nobody else imports OR-Tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ortools.sat.python.cp_model_helper import (
    BoolArgumentConstraint,
    BoundedLinearExpression,
    CpBaseModel,
    CpModelProto,
    CpSolverResponse,
    CpSolverStatus,
    FlatIntExpr,
    IntVar,
    LinearArgumentConstraint,
    LinearExpr,
    ResponseHelper,
    SatParameters,
    SolveWrapper,
)
from ortools.util.python.sorted_interval_list import Domain

Expression = LinearExpr | int
Status = CpSolverStatus
Variable = IntVar


class CpModel:
    """A program in the making."""

    def __init__(self) -> None:
        self._base: Any = CpBaseModel(None)  # the types that it ships leave out the methods that add constraints
        self.proto: CpModelProto = self._base.model_proto

    def new_int_var(self, least: int, most: int, name: str) -> IntVar:
        """A variable with ``least`` <= value <= ``most``."""
        return IntVar(self.proto).with_name(name).with_domain(Domain(least, most))

    def new_bool_var(self, name: str) -> IntVar:
        """A variable that is 0 or 1."""
        return self.new_int_var(0, 1, name)

    def add(self, constraint: BoundedLinearExpression | bool) -> None:
        """A comparison of linear expressions that must hold; a bare truth value, where it compared constants."""
        if isinstance(constraint, bool):
            self._base._add_bool_argument_constraint(BoolArgumentConstraint.bool_or, *([1] if constraint else []))
        else:
            self._base._add_bounded_linear_expression(constraint)

    def add_exactly_one(self, variables: Iterable[IntVar]) -> None:
        """One of them is 1, the others are 0."""
        self._base._add_bool_argument_constraint(BoolArgumentConstraint.exactly_one, *variables)

    def add_element(self, index: IntVar, values: Sequence[int], target: IntVar) -> None:
        """``target`` = ``values[index]``."""
        self._base._add_element(index, values, target)

    def add_allowed_assignments(self, variables: Sequence[IntVar], rows: Iterable[Sequence[int]]) -> None:
        """The values of ``variables`` are one of ``rows``."""
        self._base._add_table(variables, rows, False)

    def add_multiplication_equality(self, target: Expression, factors: Iterable[IntVar]) -> None:
        """``target`` = the product of ``factors``."""
        self._base._add_linear_argument_constraint(LinearArgumentConstraint.prod, target, *factors)

    def minimize(self, expression: Expression) -> None:
        """The objective: integers times variables, and a constant."""
        objective = self.proto.objective
        objective.scaling_factor = 1.0
        if isinstance(expression, int):
            objective.offset = expression
            return
        flat = FlatIntExpr(expression)
        for variable in flat.vars:
            objective.vars.append(variable.index)
        objective.coeffs.extend(flat.coeffs)
        objective.offset = flat.offset


class Solution:
    """What a program's solver answered."""

    def __init__(self, response: CpSolverResponse) -> None:
        self._response = response

    def value(self, expression: Expression) -> int:
        """Of a variable or an expression."""
        return ResponseHelper.value(self._response, expression)

    @property
    def objective_value(self) -> float:
        """Of the solution."""
        return self._response.objective_value

    @property
    def best_objective_bound(self) -> float:
        """No solution is below."""
        return self._response.best_objective_bound


def solved(model: CpModel, time_limit_s: float) -> tuple[CpSolverStatus, Solution]:
    """Runs the solver: one worker and a fixed seed, so that the answer is the same whenever it is not cut short."""
    parameters = SatParameters()
    parameters.num_workers = 1
    parameters.random_seed = 0
    parameters.max_time_in_seconds = time_limit_s
    parameters.catch_sigint_signal = False  # the handler of Ctrl-C is the caller's
    wrapper = SolveWrapper()
    wrapper.set_parameters(parameters)
    response = wrapper.solve(model.proto)
    return response.status, Solution(response)


def sum_of(terms: Iterable[Expression]) -> Expression:
    """Their sum as one linear expression."""
    return LinearExpr.sum(list(terms))
