"""What recurrent operators (``lstm``, ``gru``, ``rnn_tanh``, ``rnn_relu``) are made of: matrices, steps, states."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from planner.operators.call import OpCall, TensorValue


@dataclass(frozen=True)
class RecurrentWeights:
    """The matrices of all layers and directions, in order, and how often each is applied."""

    entering: tuple[TensorValue, ...]  # (gates, input or the layer's before)
    hidden: tuple[TensorValue, ...]  # (gates, state)
    projecting: tuple[TensorValue, ...]  # (narrow state, state), of LSTMs that have it
    num_rows: int  # sequences times steps
    num_sequences: int

    @property
    def num_steps(self) -> int:
        """Positions of a sequence; of packed ones the mean."""
        return max(1, self.num_rows // self.num_sequences)

    @property
    def all(self) -> tuple[TensorValue, ...]:
        """Every matrix."""
        return (*self.entering, *self.hidden, *self.projecting)


def recurrent_weights(call: OpCall) -> RecurrentWeights | None:
    """The matrices of ``call``; None where its tensors are not those of a recurrent layer."""
    matrices = [value for name, value in call.tensors.items() if name.startswith("params") and len(value.shape) == 2]
    states = [value for name, value in call.tensors.items() if name.partition(".")[0] == "hx"]
    if not matrices or not states:
        return None
    is_projected = len({state.shape[-1] for state in states}) > 1  # LSTM's two states: the first is the narrow one
    each = 3 if is_projected else 2
    inputs = call.operands[0]
    return RecurrentWeights(
        entering=tuple(matrices[::each]),
        hidden=tuple(matrices[1::each]),
        projecting=tuple(matrices[2::each]) if is_projected else (),
        num_rows=prod(inputs.shape[:-1]),
        num_sequences=max(1, prod(states[0].shape[1:-1])),
    )
