"""Where a scripted fault is played: a run on a virtual cluster, what is done to it, and what came of it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.reliability.drill import ROOT
from benchmarks.virtual_cluster import INTERFACE, VirtualCluster
from planner.cli.main import main as planner_main
from planner.executor.options import RunOptions

TIMEOUT_S = 15.0  # given to planner, to torchrun's rendezvous
SHUTDOWN_S = 10.0  # torchrun's patience with ranks that it told to end
EVERY = 5  # steps between checkpoints
STRIKE_AT = 12  # the step after which faults strike
PAUSE_S = 0.02  # of every block: so that a step lasts long enough to be aimed at
MANY_STEPS = 100_000
START_S = RunOptions().timeout_s  # for a run to get to ``STRIKE_AT`` on a busy machine
PLANS = {4: "plan.json", 2: "two.json", 1: "one.json"}  # by ranks


class DrillError(RuntimeError):
    """The drill itself could not go on: nothing is said of planner."""


@dataclass
class Scene:
    """One fault's folder and processes. ``fault`` is what the model does, ``kind:rank``."""

    cluster: VirtualCluster
    folder: Path  # with plans and the model; the current one
    name: str
    port: int
    fault: str = ""
    running: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    def __post_init__(self) -> None:
        """Makes the fault's own folder."""
        self.own.mkdir()

    @property
    def own(self) -> Path:
        """Files of this fault alone."""
        return self.folder / self.name.replace(" ", "-").replace("/", "-")

    @property
    def checkpoints(self) -> Path:
        """Of the run."""
        return self.own / "checkpoints"

    def options(self, steps: int = MANY_STEPS) -> list[str]:
        """What every run is given."""
        saves = ["--checkpoint-dir", str(self.checkpoints), "--checkpoint-every", str(EVERY)]
        log = ["--log-file", str(self.own / "log.jsonl")]
        return ["--steps", str(steps), "--timeout", f"{TIMEOUT_S:g}", "--data", "data", *saves, *log]

    def start(self, host: int, words: list[str], environment: Mapping[str, str]) -> None:
        """A command on a host that knows its own name; what it says goes to files."""
        namespace = self.cluster.hosts[host].namespace
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', f"host{host}"]
        own = {"DRILL_FAULT": self.fault, "DRILL_TRIGGER": str(self.own / "trigger"), "DRILL_PAUSE_S": str(PAUSE_S),
               "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}  # fmt: skip
        with (self.own / f"talk-{len(self.running)}").open("wb") as talk:
            self.running.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", namespace, *named, sys.executable, *words],
                    env={**os.environ, **own, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=talk,
                    stderr=talk,
                    start_new_session=True,
                )
            )

    def one_host(self, *options: str, steps: int = MANY_STEPS) -> None:
        """``planner run`` of two ranks on host 0."""
        self.start(0, ["-m", "planner", "run", PLANS[2], *self.options(steps), *options], {})

    def two_hosts(
        self,
        *options: str,
        launcher: tuple[str, ...] = (),
        plans: tuple[str, str] = (PLANS[4], PLANS[4]),
        hosts: tuple[int, ...] = (0, 1),
        steps: int = MANY_STEPS,
    ) -> None:
        """``torchrun`` on both hosts, of two ranks each."""
        address = self.cluster.hosts[0].address
        rendezvous = launcher or ("--master-addr", address, "--master-port", str(self.port))
        for host in hosts:
            words = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(host),
                     "--shutdown-timeout", f"{SHUTDOWN_S:g}", "--monitor-interval", "0.1",
                     "--rdzv-conf", f"timeout={TIMEOUT_S:g},join_timeout={TIMEOUT_S:g}",
                     *rendezvous]  # fmt: skip
            run = ["-m", "planner", "run", plans[host], *self.options(steps), *options]
            self.start(host, [*words, *run], {"GLOO_SOCKET_IFNAME": INTERFACE})

    def steps(self) -> dict[int, float]:
        """Losses by step, as the run's log has them. DrillError where one step stands there twice, unlike."""
        return losses_of(self.own / "log.jsonl")

    def wait_for(self, what: Callable[[], object], limit_s: float = START_S) -> None:
        """DrillError where it does not come to pass, or the run ends before."""
        deadline_s = time.monotonic() + limit_s
        while not what():
            if time.monotonic() > deadline_s or (self.running and not self.alive()):
                raise DrillError(f"{self.name}: the run did not come so far:\n{self.talk()[-3000:]}")
            time.sleep(0.02)

    def wait_for_step(self, step: int = STRIKE_AT) -> None:
        """Until ``step`` is done, and a checkpoint is committed."""
        self.wait_for(lambda: max(self.steps(), default=0) >= step and newest_whole(self.checkpoints))

    def pull_trigger(self) -> None:
        """From now on the model does what ``fault`` says."""
        (self.own / "trigger").touch()

    def alive(self) -> list[int]:
        """Processes on all hosts. Whoever has ended is waited for, so that no zombie counts."""
        for process in self.running:
            process.poll()
        return [pid for host in range(len(self.cluster.hosts)) for pid in self.cluster.pids(host)]

    def pid_of(self, rank: int) -> int:
        """The process of a rank."""
        for pid in self.alive():
            with contextlib.suppress(OSError):
                if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return pid
        raise DrillError(f"{self.name}: rank {rank} does not run:\n{self.talk()[-3000:]}")

    def tell_rank(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to a rank."""
        os.kill(self.pid_of(rank), number)

    def tell_launchers(self, number: signal.Signals, *places: int) -> None:
        """Sends a signal to the launchers at ``places``."""
        for place in places:
            self.running[place].send_signal(number)

    def ended_after(self, limit_s: float) -> float | None:
        """Seconds until nothing runs on any host; None: something still does after ``limit_s``."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < limit_s:
            if not self.alive():
                return time.monotonic() - began_s
            time.sleep(0.05)
        return None

    def codes(self) -> list[int | None]:
        """Exit codes of the launchers; below 0: the signal that ended it; None: it runs."""
        return [process.poll() for process in self.running]

    def talk(self) -> str:
        """What the launchers and their ranks said, without names of this machine."""
        texts = [path.read_text("utf-8", "replace") for path in sorted(self.own.glob("talk-*"))]
        return "\n".join(texts).replace(str(self.folder), "DIR")

    def resumed(self, to_step: int) -> Resumed:
        """``planner run --resume`` on one rank, in a copy of this process, which has imported torch already."""
        log, talk = self.own / "resumed.jsonl", self.own / "resumed"
        words = ["planner", "run", PLANS[1], "--steps", str(to_step), "--checkpoint-dir", str(self.checkpoints),
                 "--resume", "--log", str(log), "--data", "data"]  # fmt: skip
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        code = planned(words, talk, alone)
        text = talk.read_text("utf-8", "replace").replace(str(self.folder), "DIR")
        return Resumed(code, text, losses_of(log))


@dataclass(frozen=True)
class Resumed:
    """What a run that went on came to."""

    code: int
    talk: str
    losses: dict[int, float]


def planned(words: list[str], talk: Path, environment: Mapping[str, str] | None = None) -> int:
    """The exit code of a command of planner, which a copy of this process runs: it has imported all already."""
    child = os.fork()
    if child == 0:
        _become(words, talk, environment or {})
    deadline_s = time.monotonic() + START_S
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline_s:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.05)


def _become(words: list[str], talk: Path, environment: Mapping[str, str]) -> None:
    """Runs planner in this process, and does not return."""
    code = 1
    try:
        with talk.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ.update(environment)
        sys.argv = words
        planner_main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def losses_of(log: Path) -> dict[int, float]:
    """By step. A step that was done again after a restart must have come to the same."""
    found: dict[int, float] = {}
    for line in log.read_text().splitlines() if log.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):  # the line that was being written when rank 0 was killed
            record: dict[str, Any] = json.loads(line)
            step, loss = int(record["step"]), float(record["loss"])
            if abs(found.setdefault(step, loss) - loss) > 1e-5 * abs(loss):
                raise DrillError(f"step {step} had the loss {found[step]}, and then {loss}")
    return found


def newest_whole(folder: Path) -> int:
    """The newest checkpoint whose files are those that its manifest tells of, by a reader of the drill's own; or 0."""
    steps = sorted((int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit()), reverse=True)
    return next((step for step in steps if is_whole(folder / f"step-{step}")), 0)


def is_whole(folder: Path) -> bool:
    """Whether each file has the length and SHA-256 that the manifest says."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
        contents = {name: (folder / name).read_bytes() for name in manifest["files"]}
    except (OSError, ValueError):
        return False
    return all(
        len(contents[name]) == said["bytes"] and hashlib.sha256(contents[name]).hexdigest() == said["sha256"]
        for name, said in manifest["files"].items()
    )


@contextlib.contextmanager
def mounted(place: Path, size_bytes: int) -> Generator[None]:
    """A file system of its own in memory, which is full when ``size_bytes`` are there."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
