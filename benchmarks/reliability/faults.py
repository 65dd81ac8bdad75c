"""The scripted faults: what is done to a run, and what must come of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reliability.fault_scene import EVERY, PLANS, SHUTDOWN_S, STRIKE_AT, TIMEOUT_S, Scene, mounted, planned

SLACK_S = 15.0  # for processes to notice, speak and end on a busy machine
SOON_S = TIMEOUT_S + SHUTDOWN_S + SLACK_S  # a peer notices by the time-out; torchrun then waits for its other ranks
SLOWLY_S = 2 * TIMEOUT_S + SHUTDOWN_S + SLACK_S  # a step that does not end is waited for twice as long
FROM_START_S = SOON_S + 80.0  # with the start of processes on a busy machine
SMALL_DISK_BYTES = 600_000  # two checkpoints of the model and a half
SOME_STEPS = 30


@dataclass(frozen=True)
class Fault:
    """One script. ``act`` starts a run and does to it what ``name`` says."""

    name: str
    act: Callable[[Scene], None]
    says: str  # a pattern of what is said, with the culprit where there is one
    codes: tuple[int, ...]  # exit codes of the launchers
    model: str = ""  # what the model does, ``kind:rank``
    limit_s: float = SOON_S
    most_lost: int = 2 * EVERY  # steps; a checkpoint may be under way when the next interval begins
    resume_says: str = "going on after step"
    disk: Callable[[Path], AbstractContextManager[None]] = lambda _place: nullcontext()  # for checkpoints


def _on_two_hosts(strike: Callable[[Scene], None]) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        scene.two_hosts()
        scene.wait_for_step()
        strike(scene)

    return act


def _on_one_host(strike: Callable[[Scene], None], steps: int = 100_000) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        scene.one_host(steps=steps)
        scene.wait_for_step()
        strike(scene)

    return act


def _lose_power(scene: Scene) -> None:
    scene.cluster.set_link_up(1, False)
    for pid in scene.cluster.pids(1):
        os.kill(pid, signal.SIGKILL)


def _host_never_comes(scene: Scene) -> None:
    scene.two_hosts(hosts=(0,))


def _ranks_never_come(scene: Scene) -> None:
    """Ranks as a job scheduler starts them, without torchrun: half of them."""
    address = scene.cluster.hosts[0].address
    for rank in (0, 1):
        scene.start(
            0,
            ["-m", "planner", "run", PLANS[4], *scene.options()],
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": address,
             "MASTER_PORT": str(scene.port), "GLOO_SOCKET_IFNAME": "eth0"},
        )  # fmt: skip


def _another_plan(scene: Scene) -> None:
    plan = json.loads(Path(PLANS[4]).read_text())
    plan["pipeline"]["schedule"] = "GPipe"
    Path("another.json").write_text(json.dumps(plan))
    scene.two_hosts(plans=(PLANS[4], "another.json"))


def _restarted_by_torchrun(scene: Scene) -> None:
    endpoint = f"{scene.cluster.hosts[0].address}:{scene.port}"
    scene.two_hosts(
        launcher=("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "drill", "--max-restarts", "2"),
        steps=SOME_STEPS,
    )
    scene.wait_for_step()
    scene.tell_rank(1, signal.SIGKILL)


def _restarted_by_planner(scene: Scene) -> None:
    scene.one_host("--max-restarts", "2", steps=SOME_STEPS)
    scene.wait_for_step()
    scene.tell_rank(1, signal.SIGKILL)


def _data_cut(scene: Scene) -> None:
    data = scene.own / "data"
    shutil.copy("data", data)
    scene.one_host("--data", str(data))
    scene.wait_for_step()
    os.truncate(data, 0)


def _data_removed(scene: Scene) -> None:
    data = scene.own / "data"
    shutil.copy("data", data)
    scene.one_host("--data", str(data), steps=SOME_STEPS)
    scene.wait_for_step()
    data.unlink()


def _disk_full(scene: Scene) -> None:
    scene.one_host(steps=SOME_STEPS)
    scene.wait_for_step(SOME_STEPS)


def _disk_read_only(scene: Scene) -> None:
    scene.one_host(steps=SOME_STEPS)
    scene.wait_for_step()
    mount = ["mount", "-o", "remount,ro", str(scene.own / "checkpoints")]
    scene.wait_for(lambda: subprocess.run(mount, capture_output=True, check=False).returncode == 0)  # busy: a save


def _fewer_ranks(scene: Scene) -> None:
    """Host 1 is lost for good; its run goes on with two ranks under a new plan, on host 0."""
    scene.two_hosts()
    scene.wait_for_step()
    _lose_power(scene)
    scene.ended_after(SLOWLY_S)
    code = planned(["planner", "replan", PLANS[4], "--gpus", "2", "-o", "fewer.json"], scene.own / "replan")
    assert code == 0, (scene.own / "replan").read_text()
    scene.start(0, ["-m", "planner", "run", "fewer.json", *scene.options(SOME_STEPS), "--resume"], {})


def _old_checkpoints(scene: Scene) -> Path:
    """Those of the undisturbed run after steps 20 and 25; the newer one's folder."""
    for step in (20, 25):
        shutil.copytree(Path("undisturbed/checkpoints") / f"step-{step}", scene.checkpoints / f"step-{step}")
    return scene.checkpoints / "step-25"


def _cut_shard(scene: Scene) -> None:
    shard = sorted(_old_checkpoints(scene).glob("rank-*.bin"))[-1]
    os.truncate(shard, shard.stat().st_size // 2)


def _flipped_bit(scene: Scene) -> None:
    shard = min(_old_checkpoints(scene).glob("rank-*.bin"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def _no_manifest(scene: Scene) -> None:
    (_old_checkpoints(scene) / "manifest.json").unlink()


def _signal(number: signal.Signals, rank: int) -> Callable[[Scene], None]:
    return lambda scene: scene.tell_rank(rank, number)


def _to_launchers(number: signal.Signals, *places: int) -> Callable[[Scene], None]:
    return lambda scene: scene.tell_launchers(number, *places)


def _link(bits_per_s: float) -> Callable[[Scene], None]:
    return lambda scene: scene.cluster.set_link_rate(1, bits_per_s)


def _small_disk(place: Path) -> AbstractContextManager[None]:
    return mounted(place, SMALL_DISK_BYTES)


def _cut_link(scene: Scene) -> None:
    scene.cluster.set_link_up(1, False)


SILENT = r"rank {0} \(process \d+ on {1}, last at [^)]+\).* not answer since 15 s"
KILLED = r"rank\s+: {0} \(local_rank: {1}\)\s+exitcode\s+: -9"  # as torchrun says it
TOLD = r"told to stop: step \d+ is saved"
WITHIN, BOTH, SAVED = r"failed in step \d+: ValueError: an error of one rank \(at model.py:\d+", (1, 1), 0

FAULTS = (
    Fault("kill -9 of the first rank", _on_two_hosts(_signal(signal.SIGKILL, 0)), KILLED.format(0, 0), BOTH),
    Fault("kill -9 of the last rank in its forward pass", _on_two_hosts(Scene.pull_trigger), KILLED.format(3, 1), BOTH,
          model="die in forward:3"),
    Fault("a stopped rank", _on_two_hosts(_signal(signal.SIGSTOP, 2)), SILENT.format(2, "host1"), BOTH),
    Fault("a rank that hangs in its forward pass", _on_two_hosts(Scene.pull_trigger),
          r"step \d+ is not finished after 30 s:.*rank 1 is at model.py:|rank 1 .*at model.py:\d+", BOTH,
          model="hang:1", limit_s=SLOWLY_S),
    Fault("SIGTERM to one rank", _on_two_hosts(_signal(signal.SIGTERM, 3)), TOLD,
          BOTH, most_lost=SAVED),
    Fault("SIGTERM to the launcher of one host", _on_two_hosts(_to_launchers(signal.SIGTERM, 1)),
          TOLD, BOTH, most_lost=SAVED),
    Fault("SIGTERM to all launchers", _on_two_hosts(_to_launchers(signal.SIGTERM, 0, 1)),
          TOLD, BOTH, most_lost=SAVED),
    Fault("kill -9 of the first host's launcher", _on_two_hosts(_to_launchers(signal.SIGKILL, 0)),
          "Connection closed by peer|Connection reset by peer", (-9, 1)),
    Fault("kill -9 of the last host's launcher", _on_two_hosts(_to_launchers(signal.SIGKILL, 1)),
          "Connection closed by peer|Connection reset by peer", (1, -9)),
    Fault("the link of a host cut", _on_two_hosts(_cut_link), SILENT.format(2, "host1"), BOTH, limit_s=SLOWLY_S),
    Fault("a link slowed to 1 kbit/s", _on_two_hosts(_link(1e3)), SILENT.format(2, "host1"), BOTH, limit_s=SLOWLY_S),
    Fault("a host without power", _on_two_hosts(_lose_power), SILENT.format(2, "host1"), (1, -9), limit_s=SLOWLY_S),
    Fault("a host that never comes, under torchrun", _host_never_comes, "Timed out .* 1/2 clients joined", (1,),
          limit_s=FROM_START_S),
    Fault("ranks that never come, without torchrun", _ranks_never_come, "ranks 2, 3 of 4 did not come within 15 s",
          (1, 1), limit_s=FROM_START_S),
    Fault("a host with another plan", _another_plan, "ranks 2, 3 were started with another plan", BOTH,
          limit_s=FROM_START_S),
    Fault("kill -9 of a rank under torchrun --max-restarts", _restarted_by_torchrun, "going on after step", (0, 0),
          most_lost=SAVED, limit_s=240.0),
    Fault("half of the ranks lost, planner replan", _fewer_ranks, "going on after step", (1, -9, 0), most_lost=SAVED,
          limit_s=240.0),
    Fault("kill -9 of a rank under planner run --max-restarts", _restarted_by_planner,
          r"rank 1 was killed by SIGKILL.*restart 1 of 2.*going on after step", (0,), most_lost=SAVED, limit_s=240.0),
    Fault("SIGINT to the launcher", _on_one_host(_to_launchers(signal.SIGINT, 0)), "", (130,)),
    Fault("kill -9 of planner's launcher", _on_one_host(_to_launchers(signal.SIGKILL, 0)), "", (-9,)),
    Fault("SIGTERM to planner's launcher", _on_one_host(_to_launchers(signal.SIGTERM, 0)),
          "stopped by SIGTERM, after a checkpoint", (143,), most_lost=SAVED),
    Fault("a rank raises an exception", _on_one_host(Scene.pull_trigger), f"rank 1 {WITHIN}", (1,), model="raise:1"),
    Fault("a loss that is no number", _on_one_host(Scene.pull_trigger), r"error: the loss is nan in step \d+", (1,),
          model="nan:1"),
    Fault("kill -9 while a checkpoint is written", _on_one_host(Scene.pull_trigger), r"rank 1 .*SIGKILL", (1,),
          model="die in write:1"),
    Fault("kill -9 between writing a checkpoint and its commit", _on_one_host(Scene.pull_trigger), r"rank 0 .*SIGKILL",
          (1,), model="die before commit:0"),
    Fault("a full disk", _disk_full, r"checkpoint step-\d+ was not written: .*No space left", (1,), limit_s=60.0,
          most_lost=SOME_STEPS, disk=_small_disk),
    Fault("a disk that becomes read-only", _disk_read_only, r"checkpoint step-\d+ was not written: .*Read-only", (1,),
          limit_s=60.0, most_lost=SOME_STEPS, disk=_small_disk),
    Fault("the data cut while they are read", _data_cut, r"rank \d .*SIGBUS", (1,)),
    Fault("the data removed while they are read", _data_removed, "", (0,), limit_s=60.0, most_lost=SAVED),
    Fault("the newest checkpoint cut in half", _cut_shard, "", (), resume_says="rank-3.bin has .* set aside"),
    Fault("a bit of the newest checkpoint changed", _flipped_bit, "", (), resume_says="the bytes of rank-0.bin.*aside"),
    Fault("the newest checkpoint without its manifest", _no_manifest, "", (), resume_says="manifest.json.* set aside"),
)  # fmt: skip
assert STRIKE_AT > 2 * EVERY
