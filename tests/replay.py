"""A pipeline schedule replayed action by action: what a rank holds, counted without the code under test."""

from collections.abc import Iterator, Mapping, Sequence

from costmodels.vocabulary.action import FORWARD, INPUT_GRADIENT, Action


def before_each_backward(
    actions: Sequence[Action], kept: Mapping[int, float], waiting: Mapping[int, float]
) -> Iterator[tuple[int, float]]:
    """The stage of every action of a backward pass, and the bytes that its rank holds before.

    ``kept``, ``waiting``: bytes of one micro-batch in each stage, as of ``peak_in_flight``.
    """
    held, halves = 0.0, set[tuple[int, int]]()
    for kind, stage, microbatch in actions:
        if kind == FORWARD:
            held += kept[stage]
            continue
        yield stage, held
        if kind == INPUT_GRADIENT:
            halves.add((stage, microbatch))
            held += waiting[stage]
        else:
            held -= kept[stage] + (waiting[stage] if (stage, microbatch) in halves else 0.0)
