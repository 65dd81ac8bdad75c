"""A pipeline schedule replayed action by action: what a rank holds, counted without the code under test."""

from collections.abc import Iterator, Mapping, Sequence

from costmodels.vocabulary.action import BACKWARD, FORWARD, INPUT_GRADIENT, Action


def before_each_backward(
    actions: Sequence[Action], kept: Mapping[int, float], waiting: Mapping[int, float]
) -> Iterator[tuple[int, int | None, list[int], float]]:
    """Before every action of a backward pass: its stage, whose gradients wait, which stages have any, the bytes held.

    Gradients wait of the pass before, unless that was its stage's last, or passes are split: None. Of the stages those
    count whose passes have begun, or all where passes are split. ``kept``, ``waiting``: bytes of one micro-batch in
    each stage, as of ``peak_in_flight``.
    """
    held, halves, buffer = 0.0, set[tuple[int, int]](), None
    is_split = any(action.kind == INPUT_GRADIENT for action in actions)
    begun = set(kept) & {action.stage for action in actions} if is_split else set[int]()
    left = {stage: sum(action[:2] == (BACKWARD, stage) for action in actions) for stage in kept}
    for kind, stage, microbatch in actions:
        if kind == FORWARD:
            held += kept[stage]
            continue
        begun.add(stage)
        yield stage, buffer, sorted(begun), held
        if kind == BACKWARD:
            left[stage] -= 1
            buffer = stage if left[stage] and not is_split else None
        if kind == INPUT_GRADIENT:
            halves.add((stage, microbatch))
            held += waiting[stage]
        else:
            held -= kept[stage] + (waiting[stage] if (stage, microbatch) in halves else 0.0)
