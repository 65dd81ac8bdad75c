"""A cluster on one machine: hosts are network namespaces, switches are bridges, and links are shaped to a rate.

Traffic between processes of one host goes over that host's loopback and is fast; traffic between hosts goes through
veth pairs whose both ends are shaped by a token bucket (``tc ... tbf``). Needs root and iproute2 on Linux.
As a program, it runs a command on every rank: ``python -m benchmarks.virtual_cluster --hosts 2 --processes 2 -- FILE``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE_FILES = Path("/etc/netns")  # where iproute2 looks for a namespace's own files of /etc
INTERFACE = "eth0"
MASTER_PORT = 29500  # any: every cluster has addresses of its own
# One token bucket holds a few segments: larger buckets would let whole small messages pass unshaped.
SEGMENT_BYTES = 16_000
BURST_BYTES = 32_000
QUEUE = "50ms"  # longest stay in the shaper's queue before packets are dropped
GRACE_S = 5.0


class VirtualClusterError(RuntimeError):
    """A namespace, link or process of a virtual cluster could not be set up, or a run on it failed."""


@dataclass(frozen=True)
class VirtualHost:
    """One host: a network namespace and its address."""

    namespace: str
    address: str
    switch: str  # namespace of the switch that it is plugged into
    port: str  # the switch's end of the link


@dataclass(frozen=True)
class RankOutput:
    """What torchrun on one host printed."""

    host: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class VirtualCluster:
    """Running hosts. Link rates can be changed at any time; ``torchrun`` starts ranks on all hosts."""

    hosts: tuple[VirtualHost, ...]

    def set_link_rate(self, host: int, bits_per_s: float, *, direction: str = "both") -> None:
        """Shapes one host's link: ``send``, ``receive`` or ``both`` (as seen from the host)."""
        place = self.hosts[host]
        if direction not in ("send", "receive", "both"):
            raise ValueError(f"direction must be send, receive or both, got {direction!r}")
        if direction != "receive":
            _shape(place.namespace, INTERFACE, bits_per_s)
        if direction != "send":
            _shape(place.switch, place.port, bits_per_s)

    def set_link_up(self, host: int, is_up: bool) -> None:
        """Plugs one host's cable in, or out: what is sent meanwhile is lost, and nobody is told."""
        place = self.hosts[host]
        _run("ip", "-n", place.switch, "link", "set", place.port, "up" if is_up else "down")

    def pids(self, host: int) -> list[int]:
        """What runs on one host."""
        return _pids(self.hosts[host : host + 1])

    def start(self, host: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Starts one command on a host. It ends, at the latest, with the cluster."""
        return subprocess.Popen(
            [_tool("ip"), "netns", "exec", self.hosts[host].namespace, *command],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def torchrun(
        self,
        processes_per_host: int,
        arguments: Sequence[str],
        timeout_s: float = 300.0,
        *,
        has_own_core: bool = False,
    ) -> tuple[RankOutput, ...]:
        """Runs ``torchrun ARGUMENTS`` with ``processes_per_host`` ranks on every host and waits for all of them.

        ``has_own_core``: all of host i runs on processor i of this machine.
        VirtualClusterError with the tail of stderr where a rank fails or ``timeout_s`` passes.
        """
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(self.hosts)),
                   "--nproc-per-node", str(processes_per_host), "--master-addr", self.hosts[0].address,
                   "--master-port", str(MASTER_PORT)]  # fmt: skip
        environment = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        running: list[subprocess.Popen[str]] = []
        for index in range(len(self.hosts)):
            pinned = [_tool("taskset"), "-c", str(index)] if has_own_core else []
            started = [*pinned, *command, "--node-rank", str(index), *arguments]
            running.append(self.start(index, started, environment))
        return self._collect(running, timeout_s)

    def _collect(self, running: Sequence[subprocess.Popen[str]], timeout_s: float) -> tuple[RankOutput, ...]:
        deadline_s = time.monotonic() + timeout_s
        outputs: list[RankOutput] = []
        failed: list[str] = []
        for index, process in enumerate(running):
            try:
                stdout, stderr = process.communicate(timeout=max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.end_processes()
                stdout, stderr = process.communicate()
                failed.append(f"host {index} did not end within {timeout_s:g} s:\n{stderr[-2000:]}")
            else:
                if process.returncode != 0:
                    failed.append(f"host {index} ended with {process.returncode}:\n{stderr[-2000:]}")
            outputs.append(RankOutput(index, stdout, stderr))
        if failed:
            raise VirtualClusterError("\n".join(failed))
        return tuple(outputs)

    def end_processes(self) -> None:
        """Ends what runs inside the hosts: the namespaces are this cluster's own, and so is all in them."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline_s = time.monotonic() + GRACE_S
            while (pids := _pids(self.hosts)) and time.monotonic() < deadline_s:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(0.1)


def why_unavailable() -> str | None:
    """Why no virtual cluster can be started here, or None where it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is missing (package iproute2)"
    name = f"vc-{os.getpid()}-{secrets.token_hex(3)}-try"
    with _owned_namespaces() as add:
        try:
            add(name)
            _run("ip", "-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", "peer0")
            _shape(name, INTERFACE, 1e9)
        except VirtualClusterError as error:
            return f"this kernel or container does not allow it: {error}"
    return None


@contextlib.contextmanager
def virtual_cluster(
    num_hosts: int, link_bits_per_s: float, *, num_switches: int = 1, uplink_bits_per_s: float | None = None
) -> Generator[VirtualCluster]:
    """Hosts with links of ``link_bits_per_s`` in each direction, torn down whatever happens inside.

    Hosts are plugged into the switches in equal runs; further switches hang on the first by an uplink each, of
    ``uplink_bits_per_s`` (None: unshaped).
    """
    if num_hosts < 1 or num_switches < 1 or num_hosts % num_switches:
        raise ValueError(f"{num_hosts} hosts cannot be spread evenly over {num_switches} switches")
    prefix = f"vc-{os.getpid()}-{secrets.token_hex(3)}"
    with _owned_namespaces() as add:
        switches = [f"{prefix}-s{index}" for index in range(num_switches)]
        for index, switch in enumerate(switches):
            add(switch)
            _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge0", "up")
            if index > 0:
                _plug(switch, "up0", switches[0], f"down{index}", uplink_bits_per_s)
                _run("ip", "-n", switch, "link", "set", "up0", "master", "bridge0")
        hosts: list[VirtualHost] = []
        for index in range(num_hosts):
            host = VirtualHost(
                namespace=f"{prefix}-h{index}",
                address=_address(index),
                switch=switches[index * num_switches // num_hosts],
                port=f"port{index}",
            )
            add(host.namespace)
            _plug(host.namespace, INTERFACE, host.switch, host.port, link_bits_per_s)
            _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/16", "dev", INTERFACE)
            _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
            hosts.append(host)
            add.files(host.namespace, hosts=f"127.0.0.1 localhost\n{_names(num_hosts)}", **{"resolv.conf": ""})
        cluster = VirtualCluster(tuple(hosts))
        try:
            yield cluster
        finally:
            cluster.end_processes()


@contextlib.contextmanager
def _owned_namespaces() -> Generator[_AddNamespace]:
    """Yields what adds namespaces; those that were added are removed at the end, with their links."""
    add = _AddNamespace([])
    try:
        with _exits_on_sigterm():
            yield add
    finally:
        for name in reversed(add.names):
            with contextlib.suppress(VirtualClusterError):
                _run("ip", "netns", "del", name)
            shutil.rmtree(NAMESPACE_FILES / name, ignore_errors=True)


@contextlib.contextmanager
def _exits_on_sigterm() -> Generator[None]:
    """SIGTERM ends the process as ``sys.exit`` does, through whatever cleans up, where nobody else listens to it."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass(frozen=True)
class _AddNamespace:
    names: list[str]

    def files(self, name: str, **contents: str) -> None:
        """Files that ``ip netns exec`` shows in /etc to what runs in namespace ``name``."""
        folder = NAMESPACE_FILES / name
        folder.mkdir(parents=True)
        for file, content in contents.items():
            (folder / file).write_text(content)

    def __call__(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        self.names.append(name)


def _address(host: int) -> str:
    return f"10.77.{host // 250}.{host % 250 + 1}"


def _names(num_hosts: int) -> str:
    """Lines of /etc/hosts: without them every connection waits for a name server that cannot be reached."""
    return "".join(f"{_address(index)} host{index}\n" for index in range(num_hosts))


def _plug(inner: str, interface: str, switch: str, port: str, bits_per_s: float | None) -> None:
    """A cable from ``interface`` of one namespace to a new port of a switch, up and shaped at both ends."""
    _run("ip", "-n", inner, "link", "add", interface, "type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge0")
    for namespace, name in ((inner, interface), (switch, port)):
        _run("ip", "-n", namespace, "link", "set", name, "gso_max_size", str(SEGMENT_BYTES), "up")
        if bits_per_s is not None:
            _shape(namespace, name, bits_per_s)


def _shape(namespace: str, interface: str, bits_per_s: float) -> None:
    """Every packet that leaves ``interface`` waits for its tokens; the last rate set holds."""
    if bits_per_s <= 0:
        raise ValueError(f"a link's rate must be above 0 bits/s, got {bits_per_s:g}")
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf",
         "rate", f"{bits_per_s:.0f}bit", "burst", str(BURST_BYTES), "latency", QUEUE)  # fmt: skip


def _pids(hosts: Sequence[VirtualHost]) -> list[int]:
    return [int(pid) for host in hosts for pid in _run("ip", "netns", "pids", host.namespace).split()]


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([_tool(tool), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise VirtualClusterError(f"{tool} {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise VirtualClusterError(f"{name} is missing (package iproute2)")
    return path


def main() -> None:
    """Runs torchrun with the arguments after ``--`` on a virtual cluster, and shows what the first host prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2, help="ranks on every host")
    parser.add_argument("--link-mbit", type=float, default=500.0, help="rate of every host's link, Mbit/s")
    parser.add_argument("--slow-host", type=int, help="this host's link has a fifth of the rate")
    parser.add_argument("--slow-direction", choices=("send", "receive", "both"), default="both")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds")
    parser.add_argument("arguments", nargs="*", help="what torchrun runs: FILE or -m MODULE, and its arguments")
    given = parser.parse_args()
    reason = why_unavailable()
    if reason is not None or not given.arguments:
        print(f"nothing was run: {reason or 'no command after --'}")
        return
    with virtual_cluster(given.hosts, given.link_mbit * 1e6) as cluster:
        if given.slow_host is not None:
            cluster.set_link_rate(given.slow_host, given.link_mbit * 1e6 / 5, direction=given.slow_direction)
        outputs = cluster.torchrun(given.processes, given.arguments, given.timeout)
        sys.stdout.write(outputs[0].stdout)
        sys.stderr.write(outputs[0].stderr)


if __name__ == "__main__":
    main()
