"""Scripted faults of training on a virtual cluster: none may lose a committed checkpoint or hang beyond its time-out.

    python -m benchmarks.reliability.fault_drill [--only NAME ...] [--output FILE.json]

Runs of a small model, of two hosts with two ranks each under torchrun, or of one host under ``planner run``, save every
few steps. When some steps are done, one fault strikes. Asked is then:

- whether every process ended within the time-out and what the launchers wait for, with the exit codes expected, and
  with words that name the culprit where there is one;
- whether anything still runs on the hosts, or is left in the folder of checkpoints;
- whether the newest committed checkpoint is whole by a reader of the drill's own, is no older than it may be, and
  is the one that ``planner run --resume`` takes; and whether losses before the fault and after the resumption are those
  of a run that nothing disturbed, to 1e-5.

Needs root and iproute2. Hosts are removed at the end, and on Ctrl-C.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reliability.drill import RESULTS, ROOT, commit, save, working_folder
from benchmarks.reliability.fault_scene import EVERY, PLANS, DrillError, Resumed, Scene, newest_whole, planned
from benchmarks.reliability.faults import FAULTS, Fault
from benchmarks.virtual_cluster import VirtualCluster, virtual_cluster, why_unavailable

LINK_BITS_PER_S = 1e9
BASE_STEPS = 80
TOLERANCE = 1e-5
FIRST_PORT = 29500  # each fault has one of its own, as the one before may still be in use
DATA_BYTES = 200_000


def prepare() -> None:
    """Plans, the model and data, in the current folder."""
    shutil.copy(Path(__file__).with_name("fault_model.py"), "model.py")
    pins = "--pp 2 --dp 2 --zero 1 --micro-batch 2 --schedule 1F1B --global-batch 16 --seq-len 32 --precision fp32"
    commands = [f"search model.py --gpus 4 --hardware cpu-gloo {pins} -o {PLANS[4]}",
                *(f"replan {PLANS[4]} --gpus {gpus} -o {PLANS[gpus]}" for gpus in (2, 1))]  # fmt: skip
    for command in commands:
        if planned(["planner", *command.split()], Path("talk")):
            raise DrillError(f"{command}: {Path('talk').read_text()}")
    Path("data").write_bytes(bytes(number * number // 7 % 251 for number in range(DATA_BYTES)))


def undisturbed(cluster: VirtualCluster) -> dict[int, float]:
    """Losses of a run of two hosts that ends by itself."""
    scene = Scene(cluster, Path.cwd(), "undisturbed", FIRST_PORT)
    scene.two_hosts("--keep", "100", steps=BASE_STEPS)
    if scene.ended_after(600.0) is None or scene.codes() != [0, 0]:
        raise DrillError(f"the undisturbed run ended with {scene.codes()}:\n{scene.talk()[-3000:]}")
    return scene.steps()


@dataclass(frozen=True)
class Outcome:
    """What was left of a run that a fault struck."""

    ended_s: float | None  # from the strike until nothing ran on any host
    codes: list[int | None]
    last: int  # step that was finished
    newest: int  # step whose checkpoint is whole; 0: none
    resumed: Resumed | None
    left: list[str]  # in the folder of checkpoints, behind the resumption, that is no checkpoint


def played(fault: Fault, scene: Scene) -> Outcome:
    """Plays one fault, and goes on from what it left."""
    try:
        with fault.disk(scene.checkpoints):
            fault.act(scene)
            ended_s, codes = scene.ended_after(fault.limit_s), scene.codes()
            scene.cluster.end_processes()
            if scene.checkpoints.is_mount():  # what follows needs a disk that works
                shutil.copytree(scene.checkpoints, scene.own / "saved")
        if (scene.own / "saved").exists():
            (scene.own / "saved").rename(scene.own / "checkpoints-of-a-good-disk")
            scene.checkpoints.rmdir()
            (scene.own / "checkpoints-of-a-good-disk").rename(scene.checkpoints)
        newest, resumed, left = newest_whole(scene.checkpoints), None, list[str]()
        if newest:
            resumed = scene.resumed(newest + EVERY)
            names = (path.name for path in scene.checkpoints.iterdir())
            left = sorted(name for name in names if not re.fullmatch(r"step-\d+(\.damaged)?|\.lock", name))
        return Outcome(ended_s, codes, max(scene.steps(), default=0), newest, resumed, left)
    finally:
        scene.cluster.end_processes()
        scene.cluster.set_link_up(1, True)
        scene.cluster.set_link_rate(1, LINK_BITS_PER_S)


def problems(fault: Fault, outcome: Outcome, talk: str, before: dict[int, float], base: dict[int, float]) -> list[str]:
    """What is not as it must be. ``before``: the losses that the struck run had."""
    found: list[str] = []
    if outcome.ended_s is None:
        found.append(f"something ran for more than {fault.limit_s:g} s")
    if outcome.codes != list(fault.codes):
        found.append(f"exit codes {outcome.codes} instead of {list(fault.codes)}")
    if not re.search(fault.says, talk, re.DOTALL):
        found.append(f"nobody said {fault.says!r}")
    if f'File "{ROOT}/planner' in talk or "internal error" in talk:  # torchrun's own traceback is not ours
        found.append("a traceback, or an internal error")
    found += [f"left: {name}" for name in outcome.left]
    if outcome.last > max(base):
        found.append(f"the run went on to step {outcome.last}")
    if difference(before, base) > TOLERANCE:
        found.append("losses before the fault are not those of the undisturbed run")
    lost = max(0, outcome.last - outcome.newest)
    if lost > fault.most_lost:
        found.append(f"{lost} steps were lost, more than {fault.most_lost}")
    if outcome.resumed is not None:
        found += _of_resumption(fault, outcome.resumed, outcome.newest, base)
    return found


def _of_resumption(fault: Fault, resumed: Resumed, newest: int, base: dict[int, float]) -> list[str]:
    found: list[str] = []
    if resumed.code or list(resumed.losses) != list(range(newest + 1, newest + EVERY + 1)):
        found.append(f"resumed from step {newest} with exit code {resumed.code} to {list(resumed.losses)}")
    if not re.search(fault.resume_says, resumed.talk, re.DOTALL):
        found.append(f"the resumption did not say {fault.resume_says!r}")
    if difference(resumed.losses, base) > TOLERANCE:
        found.append("losses behind the resumption are not those of the undisturbed run")
    return found


def difference(losses: dict[int, float], base: dict[int, float]) -> float:
    """The largest relative one. DrillError where a run was faster than the undisturbed one is long."""
    if not losses.keys() <= base.keys():
        raise DrillError(f"there is nothing to compare step {max(losses)} with")
    return max((abs(loss / base[step] - 1) for step, loss in losses.items() if math.isfinite(loss)), default=0.0)


def said_of(fault: Fault, talk: str) -> str:
    """The lines that the pattern was found in."""
    found = re.search(fault.says, talk, re.DOTALL) if fault.says else None
    if found is None:
        return ""
    begin, end = talk.rfind("\n", 0, found.start()) + 1, talk.find("\n", found.end())
    return " ".join(talk[begin : end if end >= 0 else None].split())[:300]


def record_of(fault: Fault, scene: Scene, outcome: Outcome, base: dict[int, float]) -> dict[str, Any]:
    """One line of the results."""
    before, talk = {step: loss for step, loss in scene.steps().items() if step in base}, scene.talk()
    found = problems(fault, outcome, talk, before, base)
    if found:
        print(*found, talk[-6000:], outcome.resumed and outcome.resumed.talk[-3000:], sep="\n", file=sys.stderr)
    resumed = outcome.resumed
    return {
        "commit": commit(),
        "ended_s": None if outcome.ended_s is None else round(outcome.ended_s, 1),
        "limit_s": fault.limit_s,
        "exit_codes": outcome.codes,
        "said": said_of(fault, talk),
        "steps_done": outcome.last,
        "newest_checkpoint": outcome.newest,
        "resumed": "" if resumed is None else resumed.talk.partition("\n")[0][:300],
        "largest_difference": difference(before | ({} if resumed is None else resumed.losses), base),
        "problems": found,
    }


def main() -> int:
    """Plays the faults and prints what came of each; 1 where one was not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[f.name for f in FAULTS], help="of these alone")
    parser.add_argument("--output", type=Path, default=RESULTS / "reliability_faults.json", help="file of results")
    options = parser.parse_args()
    reason = why_unavailable()
    if reason is not None:
        print(f"nothing was played: {reason}")
        return 1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which what is started hears, too
    output, num_bad = options.output.absolute(), 0
    with working_folder() as folder, virtual_cluster(2, LINK_BITS_PER_S) as cluster:
        prepare()
        base = undisturbed(cluster)
        for place, fault in enumerate(FAULTS):
            if options.only and fault.name not in options.only:
                continue
            began_s = time.monotonic()
            scene = Scene(cluster, folder, fault.name, FIRST_PORT + 1 + place, fault.model)
            try:
                record = record_of(fault, scene, played(fault, scene), base)
            except DrillError as error:  # the fault could not be played: nobody knows what would have come of it
                record = {"commit": commit(), "problems": [str(error)]}
            save(output, {fault.name: record})
            num_bad += bool(record["problems"])
            verdict = "; ".join(record["problems"]) or "passed"
            print(f"{fault.name}: {verdict} ({time.monotonic() - began_s:.0f} s)", flush=True)
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
