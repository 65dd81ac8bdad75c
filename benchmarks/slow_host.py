"""A host that computes half as fast as another: ``python -m benchmarks.slow_host``.

Two virtual hosts (``benchmarks/virtual_cluster.py``), each on a processor of its own; beside the second's runs a loop
that takes half of it. What a user would do: ``planner profile``, which names the slow host and writes a profile of each
kind, then a search that takes all hosts for the slow one, and one over both kinds. Both plans, and the best without a
pipeline, run as ``planner verify`` runs them. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.measured_plans import GLOBAL_BATCH_SIZE, RESULTS, ROUNDS, SIZES, SOURCE
from benchmarks.virtual_cluster import virtual_cluster, why_unavailable
from planner.plan.schema import Plan

LINK_BITS_PER_S = 500e6
SLOW = 1  # the host, and its processor


def main() -> int:
    """Exit code 0; 1 where this machine has no namespaces or ``planner profile`` found no slow host."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    today = datetime.datetime.now(tz=datetime.UTC).date()
    parser.add_argument("--output", type=Path, default=RESULTS / f"slow_host_{today}.md")
    options = parser.parse_args()
    if (reason := why_unavailable()) is not None:
        print(reason, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, half_of_a_processor_taken():
        text = measured_in(Path(folder))
    if text is None:
        print("planner profile found no slow host", file=sys.stderr)
        return 1
    options.output.write_text(text, encoding="utf-8")
    print(text)
    return 0


@contextmanager
def half_of_a_processor_taken() -> Generator[None]:
    """Something else works on the slow host's processor all the time."""
    loop = subprocess.Popen(["taskset", "-c", str(SLOW), sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


def measured_in(folder: Path) -> str | None:
    """The record, as Markdown; None where no slow host was found."""
    model, profile, task, out = (folder / name for name in ("model.py", "profile.json", "plans.json", "measured"))
    model.write_text(SOURCE.format(**SIZES))
    kinds = [folder / f"profile-{kind}.json" for kind in ("usual", "slow")]
    with virtual_cluster(2, LINK_BITS_PER_S) as cluster:
        module = ["--module", "planner", "profile", "-o", str(profile), "--disk", str(folder)]
        said = cluster.torchrun(1, module, timeout_s=600.0, has_own_core=True)[0].stderr
        print(said, flush=True)
        if not all(kind.exists() for kind in kinds):
            return None
        both = f"{kinds[0]}:1,{kinds[1]}:1"
        asked = {
            "all as the slow host": ["--hardware", str(profile), "--gpus", "2"],
            "both kinds": ["--hardware", both],
            "both kinds, no pipeline": ["--hardware", both, "--pp", "1"],
        }
        plans = {name: searched(model, arguments) for name, arguments in asked.items()}
        task.write_text(json.dumps([plan.model_dump(mode="json") for plan in plans.values()]))
        program = ["--module", "benchmarks.measured_plans", "--rank", str(task), str(out)]
        cluster.torchrun(1, program, timeout_s=1200.0, has_own_core=True)
    times_s = [json.loads(line)["step_time_s"] for line in out.read_text().splitlines()]
    lines = [line.strip() for line in said.splitlines() if line.startswith("! slow to compute")]
    slow = lines[0].partition(". ")[0].removeprefix("! ") if lines else ""
    return report(
        slow, {name: (plan, median(times_s[i :: len(plans)])) for i, (name, plan) in enumerate(plans.items())}
    )


def searched(model: Path, arguments: list[str]) -> Plan:
    """The plan that ``planner search`` writes; the path of its model is absolute."""
    plan = model.with_name("plan.json")
    sizes = ["--seq-len", str(SIZES["seq_len"]), "--global-batch", str(GLOBAL_BATCH_SIZE)]
    command = [sys.executable, "-m", "planner", "search", f"{model}:gpt", *sizes, "--precision", "fp32"]
    subprocess.run([*command, *arguments, "-o", str(plan)], check=True, capture_output=True)
    found = Plan.model_validate_json(plan.read_bytes())
    return found.model_copy(update={"model": found.model.model_copy(update={"source": f"{model}:gpt"})})


def report(slow: str, rows: dict[str, tuple[Plan, float]]) -> str:
    """A table of what was searched over, what was chosen, and both times."""
    lines = [
        "# A slow host",
        "",
        f"`python -m benchmarks.slow_host`, 2 hosts on a processor each, half of the second's taken by a loop; a GPT "
        f"of {SIZES['layers']} blocks of width {SIZES['hidden']}, {GLOBAL_BATCH_SIZE} sequences of {SIZES['seq_len']} "
        f"tokens in float32; medians of {ROUNDS} rounds. `planner profile` says: {slow}.",
        "",
        "| searched over | plan | predicted | measured |",
        "|---|---|---|---|",
    ]
    for name, (plan, measured_s) in rows.items():
        assert plan.prediction is not None
        predicted_s = plan.prediction.step_time_s
        lines.append(f"| {name} | {described(plan)} | {predicted_s:.2f} s | {measured_s:.2f} s |")
    return "\n".join(lines) + "\n"


def described(plan: Plan) -> str:
    """How the work is shared."""
    if plan.pipeline.batch_shares:
        sizes = " and ".join(str(share.micro_batch_size) for share in plan.pipeline.batch_shares)
        return f"replicas with {sizes} sequences"
    if plan.mesh.pp == 1:
        return "replicas with equal shares"
    cut = "/".join(str(len(stage.modules)) for stage in plan.pipeline.stages)
    return f"pipeline, {plan.pipeline.schedule}, cut {cut}"


if __name__ == "__main__":
    sys.exit(main())
