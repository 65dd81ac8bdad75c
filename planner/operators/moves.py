"""Operators that move values or look at them another way: views, transposes, pieces, rows."""

from __future__ import annotations

from dataclasses import replace

from planner.operators import placement_rules, saved_rules
from planner.operators.record import ONE_PASS, PLAIN, REPEATED, Operator, Trait, named, traits
from planner.operators.traffic_rules import (
    adds_rows_to_zeros,
    joins_pieces,
    puts_part_into_zeros,
    rows_taken,
    sums_expanded,
)

_PIECES = replace(ONE_PASS, view_backward=joins_pieces)
_PART = replace(ONE_PASS, view_backward=puts_part_into_zeros)
_EXPANDED = replace(ONE_PASS, view_backward=sums_expanded)
_ROWS = replace(ONE_PASS, reads=rows_taken)
_TABLE = replace(_ROWS, backward=adds_rows_to_zeros)

VIEWS = (
    Operator(
        names=named("reshape flatten view _unsafe_view"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=placement_rules.view,
        kept_as=REPEATED,
        traits=traits(Trait.KEEPS_ORDER),
    ),
    Operator(
        names=named("view_as reshape_as"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=placement_rules.view,
        kept_as=REPEATED,
        traits=traits(Trait.KEEPS_ORDER),
    ),
    Operator(
        names=named("unflatten squeeze unsqueeze"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=placement_rules.view,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("expand"),
        work=_EXPANDED,
        saved=saved_rules.nothing,
        placements=placement_rules.view,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("expand_as broadcast_to"),
        work=_EXPANDED,
        saved=saved_rules.nothing,
        placements=None,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("transpose permute"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=placement_rules.transpose,
        kept_as=REPEATED,
        traits=traits(Trait.PERMUTES_DIMS),
    ),
    Operator(
        names=named("split split_with_sizes chunk"),
        work=_PIECES,
        saved=saved_rules.nothing,
        placements=placement_rules.along_dim,
        kept_as=REPEATED,
        traits=traits(Trait.FOLLOWS_AS_VIEW),
    ),
    Operator(
        names=named("unbind"),
        work=_PIECES,
        saved=saved_rules.nothing,
        placements=placement_rules.taking_dim_away,
        kept_as=REPEATED,
        traits=PLAIN,  # of a tensor that is split along its dim DTensor refuses it
    ),
    Operator(
        names=named("tensor_split"),
        work=_PIECES,
        saved=saved_rules.nothing,
        placements=placement_rules.along_dim,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("slice"),
        work=_PART,
        saved=saved_rules.nothing,
        placements=placement_rules.slicing,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("narrow"),
        work=_PART,
        saved=saved_rules.nothing,
        placements=placement_rules.along_dim,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("select"),
        work=_PART,
        saved=saved_rules.nothing,
        placements=placement_rules.taking_dim_away,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("diagonal"),
        work=_PART,
        saved=saved_rules.nothing,
        placements=None,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("getitem"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=placement_rules.getitem,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("numpy_T"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=None,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
)

MOVES = (
    Operator(
        names=named("cat"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=placement_rules.concatenate,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named(
            "concat stack hstack vstack pad constant_pad_nd repeat rot90 tril triu fill_diagonal diff im2col col2im"
        ),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=None,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("flip roll"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=None,
        kept_as=REPEATED,
        traits=traits(Trait.MIXES_POSITIONS),
    ),
)

ROWS = (
    Operator(
        names=named("embedding"),
        work=_TABLE,
        saved=saved_rules.embedding_indices,
        placements=placement_rules.embedding,
        kept_as=REPEATED,
        traits=traits(Trait.LOOKS_UP),
    ),
    Operator(
        names=named("embedding_bag"),
        work=ONE_PASS,
        saved=saved_rules.indices,
        placements=None,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("index index_select"),
        work=_ROWS,
        saved=saved_rules.indices,
        placements=None,
        kept_as=REPEATED,
        traits=traits(Trait.LOOKS_UP, Trait.MOVES_ROWS, Trait.LINEAR),
    ),
    Operator(
        names=named("gather"),
        work=_ROWS,
        saved=saved_rules.selected_and_indices,
        placements=None,
        kept_as=REPEATED,
        traits=traits(Trait.MOVES_ROWS),
    ),
    Operator(
        names=named("take_along_dim"),
        work=ONE_PASS,
        saved=saved_rules.selected_and_indices,
        placements=None,
        kept_as=REPEATED,
        traits=traits(Trait.MOVES_ROWS),
    ),
    Operator(
        names=named("masked_select"),
        work=ONE_PASS,
        saved=saved_rules.selected_and_indices,
        placements=None,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("index_put masked_scatter repeat_interleave scatter scatter_add"),
        work=ONE_PASS,
        saved=saved_rules.indices,
        placements=None,
        kept_as=REPEATED,
        traits=traits(Trait.MOVES_ROWS),
    ),
    Operator(
        names=named("index_add index_copy"),
        work=ONE_PASS,
        saved=saved_rules.source_and_indices,
        placements=None,
        kept_as=REPEATED,
        traits=traits(Trait.MOVES_ROWS),
    ),
    Operator(
        names=named("scatter_reduce"),
        work=ONE_PASS,
        saved=saved_rules.operands_and_result,
        placements=None,
        kept_as=REPEATED,
        traits=traits(Trait.MOVES_ROWS),
    ),
    Operator(
        names=named("topk"),
        work=ONE_PASS,
        saved=saved_rules.both_results,
        placements=None,
        kept_as=REPEATED,
        traits=traits(Trait.CHOOSES),
    ),
    Operator(
        names=named("sort"),
        work=ONE_PASS,
        saved=saved_rules.returned_indices,
        placements=None,
        kept_as=REPEATED,
        traits=traits(Trait.CHOOSES),
    ),
    Operator(
        names=named("kthvalue cummax"),
        work=ONE_PASS,
        saved=saved_rules.returned_indices,
        placements=None,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("argmax argmin"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=None,
        kept_as=REPEATED,
        traits=traits(Trait.CHOOSES),
    ),
    Operator(
        names=named("argsort multinomial"),
        work=ONE_PASS,
        saved=None,
        placements=None,
        kept_as=REPEATED,
        traits=traits(Trait.CHOOSES),
    ),
)
