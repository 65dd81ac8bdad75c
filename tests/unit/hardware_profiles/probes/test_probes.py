"""The probes themselves, on this machine's CPU and disk, as small as they can be."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hardware_profiles.probes import issuing, timing
from hardware_profiles.probes.communication import Placement, pair_rounds, placements_of
from hardware_profiles.probes.compute import time_attention, time_gemms
from hardware_profiles.probes.detect import detect
from hardware_profiles.probes.hosts import host_facts, shaper_rate_bytes_per_s
from hardware_profiles.probes.issuing import time_issuing
from hardware_profiles.probes.measurement import CollectiveTiming
from hardware_profiles.probes.memory import pinned_copy_bytes_per_s, time_element_wise, time_launches
from hardware_profiles.probes.storage import measure_storage
from hardware_profiles.probes.timing import CoreShare, seconds_per_call, seconds_per_cold_call
from tests.unit.hardware_profiles.probes.measurements import device

CPU = torch.device("cpu")


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """So many threads for torch's operators."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def _busy(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_the_clock_sees_what_a_call_takes():
    samples = seconds_per_call(lambda: _busy(0.005), CPU, budget_s=0.1)
    assert len(samples) >= 2
    assert all(0.005 <= sample < 1 for sample in samples)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [1], indirect=True)
def test_what_other_processes_take_of_a_core_is_in_its_share_alone():
    core = CoreShare(CPU)
    samples = seconds_per_call(lambda: (_busy(0.005), time.sleep(0.02)), CPU, budget_s=0.2)  # away, as another runs
    assert max(samples) < 0.02
    assert core.value() < 0.4


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_several_threads_are_timed_by_the_clock_on_the_wall():
    core = CoreShare(CPU)
    assert min(seconds_per_call(lambda: time.sleep(0.01), CPU, budget_s=0.05)) >= 0.01
    assert core.value() > 0.99


def test_a_budget_that_is_spent_still_leaves_two_samples():
    assert len(seconds_per_call(lambda: _busy(0.01), CPU, budget_s=0.0)) == 2


def test_between_cold_calls_caches_are_filled_untimed(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    now_s = [0.0]

    def takes(seconds: float, what: str) -> None:
        order.append(what)
        now_s[0] += seconds

    class Other:
        def add_(self, _value: float) -> None:
            takes(5.0, "other")

    monkeypatch.setattr(timing.torch, "zeros", lambda _size: Other())
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(timing.time, "thread_time", lambda: now_s[0])
    assert seconds_per_cold_call(lambda: takes(1.0, "call"), budget_s=100.0, num_samples=3) == (1.0, 1.0, 1.0)
    assert order == ["call", *["other", "call"] * 3]


def test_operators_are_counted_and_timed():
    past = time.monotonic()  # a deadline that has passed leaves the fewest sizes a fit needs
    gemms = time_gemms(CPU, "fp32", past, stride=3)
    assert len(gemms) == 4
    for op in gemms:
        m, k, n = (int(part) for part in op.shape.split()[0].split("x"))
        assert op.flops == 2 * m * k * n
        assert op.num_bytes == 4 * (m * k + k * n + m * n)
        assert min(op.samples_s) > 0
    attention = time_attention(CPU, "fp32", past, stride=3)
    assert {op.shape.endswith("with backward") for op in attention} == {True, False}
    streams = time_element_wise(CPU, "fp32", torch.float32, past)
    assert max(op.num_bytes for op in streams) >= 2**20
    assert min(time_launches(CPU)) > 0
    assert pinned_copy_bytes_per_s(CPU) == ()


def test_a_disk_is_written_and_read_and_left_as_it_was(tmp_path: Path):
    found = measure_storage(tmp_path, num_bytes=2**24, num_samples=1)
    assert found is not None
    assert found.write_samples_bytes_per_s[0] > 0
    assert found.read_samples_bytes_per_s[0] > 0
    assert not list(tmp_path.iterdir())
    assert measure_storage(tmp_path, num_bytes=2**60) is None


def test_a_shaper_is_read_from_what_tc_lists():
    assert shaper_rate_bytes_per_s([{"kind": "tbf", "options": {"rate": 62500000, "burst": 32000}}]) == 62.5e6
    assert shaper_rate_bytes_per_s([{"kind": "noqueue", "options": {}}]) is None
    assert shaper_rate_bytes_per_s([{"kind": "fq"}, "nonsense", None]) is None
    assert shaper_rate_bytes_per_s({"not": "a list"}) is None


def test_facts_of_this_host(tmp_path: Path):
    detected = detect()
    facts = host_facts(detected, environment={"NCCL_DEBUG": "INFO", "SECRET": "x", "GLOO_SOCKET_IFNAME": "lo"})
    assert facts.settings == {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo"}
    assert facts.interface == "lo"
    assert facts.ram_bytes == detected.ram_bytes
    assert host_facts(detected).key == facts.key
    assert host_facts(detected, proc=tmp_path, environment={}).label  # with nothing to read there is still a name


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 8, 9, 12])
def test_every_pair_of_hosts_is_timed_both_ways(num_hosts: int):
    keys = [f"host{rank // 2}" for rank in range(2 * num_hosts)]
    rounds = pair_rounds(keys)
    ways = {(keys[a], keys[b]) for pairs in rounds for a, b in pairs}
    assert ways == {(a, b) for a in set(keys) for b in set(keys)}
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_groups_fill_the_world():
    assert Placement(2, 2).groups(8) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert placements_of((2, 4, 8)) == (Placement(2, 1), Placement(2, 2), Placement(2, 4), Placement(8, 1))
    assert placements_of((4,)) == (Placement(4, 1),)


class _Delayed(TorchDispatchMode):
    """A host that takes so much for every kernel, by a clock of its own."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds, self.now_s = seconds, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        if not func.is_view:
            self.now_s += self._seconds
        return func(*args, **(kwargs or {}))


def test_what_a_host_takes_for_each_kernel_is_read_as_such(monkeypatch: pytest.MonkeyPatch):
    """By a clock of the host's: what a busy machine adds to 1 ms was 0.1 ms."""
    assert 0 < min(time_issuing(CPU)) < 0.1
    with _Delayed(1e-3) as host:
        monkeypatch.setattr(issuing, "clock_of", lambda _device: lambda: host.now_s)
        assert time_issuing(CPU) == pytest.approx([1e-3] * issuing._SAMPLES)


@pytest.mark.parametrize(
    ("samples_s", "mean_s"),
    [
        ((1.0, 2.0, 1.0, 2.0, 1.0, 2.0), 1.5),  # one direction after the other, every second time
        ((1.0, 9.0, 1.0, 1.0), 1.0),  # one disturbance
        ((1.0, 2.0), 1.5),
        ((3.0,), 3.0),
    ],
)
def test_a_collective_takes_what_many_take_on_average(samples_s: tuple[float, ...], mean_s: float):
    timing = CollectiveTiming(kind="all_to_all", num_ranks=2, stride=1, num_bytes=2**20, samples_s=samples_s)
    assert timing.time_s == pytest.approx(mean_s)


def test_two_visits_to_a_device_are_one_measurement_with_the_samples_of_both() -> None:
    """Operators that one visit had no time for stay as the other timed them."""
    first, later = device(1e11), device(0.5e11)
    joined = first.joined(later.model_copy(update={"operators": later.operators[1:], "core_share": 0.5}))
    assert [op.shape for op in joined.operators] == [op.shape for op in first.operators]
    assert joined.operators[0] == first.operators[0]
    for op, one, two in zip(joined.operators[1:], first.operators[1:], later.operators[1:], strict=True):
        assert op.samples_s == (*one.samples_s, *two.samples_s)
    assert first.model_copy(update={"operators": ()}).joined(later).operators == later.operators
    assert joined.core_share == 0.75
    assert joined.launch_samples_s == (*first.launch_samples_s, *later.launch_samples_s)
