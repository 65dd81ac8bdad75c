"""A unit of the model as plain numbers: whole at first, then, pass by pass, the part of one rank.

There are two kinds of values. Work is what one micro-batch makes a rank do: kernels, tensors and collectives. States
are the parameters and what training keeps of each. They are lowered apart: work does not depend on ZeRO, and states
depend neither on the micro-batch nor on recomputation.

Work is counted for one sequence; what does not grow with the batch is counted whole. A collective names the tensors (or
states) that it moves, and no number of bytes of its own. So a pass that shrinks a tensor also shrinks what is sent of
it, in whatever order the passes run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from math import inf

from costmodels.vocabulary.terms import Pass, Term
from costmodels.vocabulary.workload import CollectiveKind, GroupPlacement, OpClass


class Role(Enum):
    """What a collective is for. Recomputation repeats some roles and not others."""

    PLACEMENT = auto()  # brings an operator's output, or its gradient, to where its users want it
    SEPARATE_REDUCTION = auto()  # gradients of a block's input that a framework does not sum before it reduces them
    ATTENTION = auto()  # brings together what attention needs of other ranks' positions
    DISPATCH = auto()  # rows to the ranks of their experts
    COMBINE = auto()  # and back
    GATHER = auto()  # parameters
    REDUCE = auto()  # gradients
    REPLICAS = auto()  # gradients that every micro-batch reduces over the shards, over their replicas, once a step


class Hides(Enum):
    """What a collective may hide behind.

    ``KERNELS``: the price leaves out the share that the recipe says is hidden. ``BLOCKS``: the price leaves out what
    these kernels hide. For the others the exposed time depends on the units of a rank, the schedule and the number of
    micro-batches: it is found when a layout is evaluated.
    """

    NOTHING = auto()
    KERNELS = auto()  # the products that it is split and interleaved with
    BLOCKS = auto()  # the kernels ``behind`` which it runs, block by block
    UNIT = auto()  # the pass of a unit that each micro-batch makes
    LAST_BACKWARD = auto()  # the backward pass of the last micro-batch
    FIRST_FORWARD = auto()  # the forward pass of the next step's first micro-batch
    OTHER_MICRO_BATCH = auto()  # the opposite pass of another micro-batch, where the schedule has one beside it


@dataclass(frozen=True, slots=True)
class Work:
    """What one kernel does in one pass. ``moved_bytes`` without ``weight_bytes``, which do not follow the batch."""

    flops: float
    moved_bytes: float
    weight_bytes: float
    launches: int

    def times(self, share: float) -> Work:
        """This rank's ``share`` of it; the host launches as many kernels as before."""
        return Work(self.flops * share, self.moved_bytes * share, self.weight_bytes * share, self.launches)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operator. ``id`` is also its output tensor's; ids ascend in the order in which operators run."""

    id: int
    operator: str
    op_class: OpClass
    is_view: bool  # launches nothing and moves nothing, as a rule
    is_kept_product: bool  # selective recomputation keeps its output
    is_eight_bit: bool  # where the precision has 8 bits
    forward: Work
    backward: Work
    weight_gradient_flops: float  # part of the backward pass
    scores: float  # of attention: query-key pairs
    query_rows: float  # of attention: heads times positions of queries
    norm_elements: float  # of norms: elements that they pass over; 0 for other operators
    inputs: tuple[int, ...]  # tensors, one entry an operand
    keys_and_values: tuple[int, ...]  # of attention: tensors that every position looks at
    storage: int  # tensor that owns the memory of its output
    saves: tuple[int, ...]  # tensors whose memory autograd keeps for its backward pass
    saved_extra_bytes: float  # kept besides
    follows_batch: bool
    is_aligned: bool = True  # heads of attention, or sides of a product, are as wide as tensor cores want them
    is_causal: bool = False  # attention of which a fused kernel skips what lies behind each query

    def times(self, share: float) -> Kernel:
        """This rank's ``share`` of its work."""
        return Kernel(
            self.id,
            self.operator,
            self.op_class,
            self.is_view,
            self.is_kept_product,
            self.is_eight_bit,
            self.forward.times(share),
            self.backward.times(share),
            self.weight_gradient_flops * share,
            self.scores * share,
            self.query_rows * share,
            self.norm_elements * share,
            self.inputs,
            self.keys_and_values,
            self.storage,
            self.saves,
            self.saved_extra_bytes * share,
            self.follows_batch,
            self.is_aligned,
            self.is_causal,
        )


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that an operator reads or writes, or whose memory autograd keeps."""

    id: int
    bytes: float  # of this rank's part
    kept_bytes: float  # of this rank's part, as it is kept for the backward pass
    whole_bytes: float  # of all tensor-parallel ranks' parts together
    item_bytes: int
    is_floating: bool
    follows_batch: bool

    @property
    def is_activation(self) -> bool:
        """Whether it comes from the model's inputs and may have a gradient."""
        return self.is_floating and self.follows_batch

    def times(self, share: float, kept_share: float) -> Tensor:
        """One rank's part: ``share`` of it, of which, or of the whole where it is gathered, ``kept_share`` is kept."""
        kept, whole = self.kept_bytes * kept_share, self.whole_bytes
        return Tensor(self.id, self.bytes * share, kept, whole, self.item_bytes, self.is_floating, self.follows_batch)

    def grown(self, rows: float) -> Tensor:
        """So many times as many rows, on every rank."""
        return Tensor(
            self.id,
            self.bytes * rows,
            self.kept_bytes * rows,
            self.whole_bytes * rows,
            self.item_bytes,
            self.is_floating,
            self.follows_batch,
        )


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of one micro-batch, or of one step where it moves states.

    Its bytes are ``times`` the bytes of its tensors, or the elements of its states, and ``fixed_bytes``; their meaning
    is that of ``costmodels.vocabulary.workload.Collective.num_bytes``.
    """

    kind: CollectiveKind
    group: GroupPlacement
    term: Term  # where its time is counted
    runs_in: Pass
    role: Role
    of: tuple[int, ...] = ()  # ids of tensors, or kinds of states
    of_whole: bool = False  # of the tensors as all tensor-parallel ranks hold them together
    times: float = 1.0
    fixed_bytes: float = 0.0
    follows_batch: bool = True
    hides: Hides = Hides.NOTHING
    hidden_share: float = 0.0  # of its time, where ``hides`` is KERNELS
    rate: float = 1.0  # over what the links sustain, where several ranks of a node are in a group
    repeats: float = 1.0  # so often
    wait_s: float = 0.0  # for the group's last rank, each time; nothing hides it
    behind: tuple[int, ...] = ()  # kernels whose blocks it runs beside, one repetition a block
    issued_by_host: bool = False  # counted when the host's time to issue a unit is
    each_tensor: bool = False  # of states: one collective for every parameter, not one for all of a unit
    is_buffered: bool = False  # what is sent lies beside what is received
    copies: float | None = None  # rows that a token is sent as, where a node gets only one of them
    nodes: float | None = None  # then the most nodes that get it; None: any number

    def num_bytes(self, tensors: Mapping[int, Tensor]) -> float:
        """Bytes of one sequence, or of any number where it does not follow the batch."""
        each = (tensors[i].whole_bytes if self.of_whole else tensors[i].bytes for i in self.of)
        return self.times * sum(each) + self.fixed_bytes


@dataclass(frozen=True)
class Loss:
    """The loss of a unit that computes it. ``copies``: kernels whose outputs are the logits once more."""

    kernel: int
    logits: int  # tensor that it takes
    copies: frozenset[int]
    head: int | None  # kernel that makes the logits


@dataclass(frozen=True)
class ExpertRows:
    """What of a unit works on rows that are sorted by expert: kernels, and tensors that enter and leave them."""

    kernels: frozenset[int]
    dispatched: tuple[int, ...]
    combined: tuple[int, ...]
    rows_per_token: float
    most_experts: int  # of a weight of the unit


@dataclass(frozen=True)
class Recomputation:
    """What one mode of recomputation keeps from forward to backward, and what it runs again in between."""

    kept: frozenset[int]  # tensors
    kept_extras_of: frozenset[int]  # kernels whose bytes besides tensors are kept
    keeps_logits: bool
    kernels: frozenset[int]  # run again
    roles: frozenset[Role] = frozenset()  # whose collectives run again
    waits_for_host: bool = False  # the host issues all that runs again, as it does forward
    stops_before: float = inf  # neither this kernel nor what comes behind it runs again, collectives included
    keeps_results: bool = False  # of collectives too, and what products make for them to sum

    def keeps(self, collective: Collective) -> bool:
        """Whether a forward collective's result is kept. Attention brings keys and values inside one operator."""
        within = collective.role is Role.ATTENTION and collective.kind is not CollectiveKind.ALL_TO_ALL
        return self.keeps_results and collective.runs_in is Pass.FORWARD and not within

    def repeats(self, collective: Collective) -> bool:
        """Whether a forward collective runs again."""
        is_asked = collective.runs_in is Pass.FORWARD and collective.role in self.roles
        return is_asked and not self.keeps(collective) and max(collective.of, default=-1) < self.stops_before


@dataclass(frozen=True)
class RankUnit:
    """The kernels and tensors of one unit, for one sequence."""

    kernels: tuple[Kernel, ...]
    tensors: Mapping[int, Tensor]
    entering: frozenset[int]  # tensors that own the memory of floating inputs
    boundary: Mapping[int, float]  # tensors sent where the pipeline is cut behind the unit, and the share a rank sends
    is_block: bool
    loss: Loss | None = None
    experts: ExpertRows | None = None
    is_split: bool = False  # among ranks that share its operators: the host issues kernels of parts of tensors
    gathered: tuple[int, ...] = ()  # tensors that cross to the next block in parts, and are gathered inside
    recomputations: tuple[Recomputation, ...] = ()  # one a mode, in the order of ``Recompute``

    @cached_property
    def saved(self) -> frozenset[int]:
        """Tensors whose memory autograd keeps."""
        return frozenset(tensor for kernel in self.kernels for tensor in kernel.saves)


@dataclass(frozen=True)
class RankWork:
    """One unit on one rank: what each sequence of a micro-batch makes it do and hold."""

    unit: RankUnit
    collectives: tuple[Collective, ...] = ()
    part_of_sequence: float = 1.0  # of each sequence's positions, those on this rank
    num_blocks: int = 1  # of keys and values, on which attention works one after another, adding up what each gives


class StateKind(Enum):
    """Parameters of one unit that are treated alike."""

    DENSE = 0  # trainable
    FROZEN = 1
    TIED = 2  # used here but owned by an earlier unit: a pipeline that parts them holds a copy
    EXPERT = 3  # trainable, one matrix an expert


@dataclass(frozen=True, slots=True)
class State:
    """One parameter that a unit owns or uses."""

    names: tuple[str, ...]  # FQNs
    kind: StateKind
    elements: float


@dataclass(frozen=True)
class RankStates:
    """One unit's parameters on one rank, before ZeRO divides them."""

    states: tuple[State, ...]

    def each(self, share: Callable[[State], float]) -> RankStates:
        """One rank's share of every state."""
        return RankStates(tuple(State(s.names, s.kind, s.elements * share(s)) for s in self.states))

    def tensors(self, kind: StateKind) -> int:
        """Number of parameters of one kind."""
        return sum(state.kind is kind for state in self.states)

    def elements(self, kind: StateKind) -> float:
        """Of all parameters of one kind."""
        return sum(state.elements for state in self.states if state.kind is kind)
