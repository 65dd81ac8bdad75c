"""What is priced: settings by hand, layouts and cuts drawn from today's space with a fixed seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

from benchmarks.frozen_prices.adapter import Json, Space, Table
from planner.errors import PlannerError

SEED = 20261122
SAMPLED = 300  # layouts looked at to draw a few that differ
MAX_ACTIONS = 6_000  # of a schedule: longer ones take long to simulate
TINY, HF, OLD = "examples/tiny_gpt.py", "tests/fixtures/hf/", "a100-80gb:32,h100:32"
COLUMNS = "model seq_len global_batch_size hardware num_devices precision optimizer recipe attention".split()
# "-": the recipe's flash kernel, or the model's own sequences, or as many devices as the mixed cluster has.
SETTINGS = f"""
gpt2-1.5b 1024 256 dgx-h100-80gb 1 bf16 adamw planner -
gpt2-1.5b 1024 256 dgx-h100-80gb 8 bf16 adamw planner eager
gpt2-1.5b 1024 512 dgx-a100-80gb 64 bf16 adamw megatron-core -
gpt2-1.5b 1024 96 dgx-a100-80gb 24 bf16 adamw megatron-lm-2020 fused_softmax
gpt2-1.5b 1024 64 rtx-4090-x8 8 bf16 sgd planner flash2
gpt2-1.5b 1024 48 rtx-4090-x8 3 fp32 adam torchtitan eager
gpt2-1.5b 1024 128 dgx-b200 16 fp8 adamw torchtitan-compiled cudnn
gpt2-1.5b 1024 16 cpu-gloo 4 fp32 adamw planner -
gpt2-1.5b 1024 256 dgx-2-v100-32gb 32 fp16 adam megatron-lm-2020 eager
gpt2-1.5b 2048 120 gb200-nvl72 72 bf16 adamw nanotron flash2
llama3-8b 4096 256 dgx-h100-80gb 64 bf16 adamw planner -
llama3-8b 4096 256 dgx-h100-80gb 64 fp8 adamw torchtitan-compiled -
llama3-8b 4096 192 dgx-h100-80gb 48 bf16 adamw torchtitan -
llama3-8b 4096 64 dgx-h100-80gb 2 bf16 adamw fsdp-llm-foundry flash2
llama3-8b 4096 512 dgx-a100-80gb 128 bf16 adamw megatron-lm-2022 flash1
llama3-8b 4096 256 dgx-a100-80gb 32 bf16 adam megatron-deepspeed eager
llama3-8b 4096 128 dgx-a100-80gb 16 bf16 adamw internevo -
llama3-8b 4096 96 dgx-a100-80gb 24 fp16 adamw megatron-layouts-2023 -
llama3-8b 4096 256 {OLD} - bf16 adamw planner -
llama3-8b 4096 128 {OLD} - fp16 adamw megatron-core fused_softmax
llama3-8b 4096 64 dgx-b200 8 bf16 adamw nemo -
llama3-8b 4096 512 dgx-b200 256 fp8 adamw nemo cudnn
llama3-8b 4096 144 gb200-nvl72 144 bf16 adamw planner -
llama3-8b 4096 32 rtx-4090-x8 16 fp16 adamw planner eager
llama3-8b 4096 32 cpu-gloo 8 bf16 sgd planner -
llama3-8b 8192 256 dgx-h100-80gb 128 bf16 adamw nanotron-2025 flash2
llama3-8b 8192 512 dgx-h100-80gb 512 bf16 adamw planner triton
llama3-8b 8192 32 dgx-h100-80gb 32 fp32 sgd planner eager
llama3-70b 4096 512 dgx-h100-80gb 256 bf16 adamw planner -
llama3-70b 4096 512 dgx-h100-80gb 512 fp8 adamw nemo -
llama3-70b 4096 256 dgx-a100-80gb 128 bf16 adamw megatron-layouts-2023-fused-norm -
llama3-70b 4096 240 dgx-a100-80gb 240 bf16 adamw megatron-core-overlap -
llama3-70b 4096 128 dgx-b200 64 bf16 adamw torchtitan eager
llama3-70b 4096 144 gb200-nvl72 72 fp8 adamw megatron-core -
llama3-70b 4096 128 {OLD} - bf16 adamw planner -
llama3-70b 8192 64 dgx-h100-80gb 64 bf16 adamw fsdp-compiled -
gpt3-175b 2048 1536 dgx-a100-80gb 384 bf16 adamw megatron-lm-2022 eager
gpt3-175b 2048 512 dgx-a100-80gb 512 fp16 adam megatron-lm-2022 fused_softmax
gpt3-175b 2048 512 dgx-h100-80gb 256 bf16 adamw planner -
gpt3-175b 2048 512 dgx-h100-80gb 128 fp8 adamw megatron-core -
gpt3-175b 2048 576 gb200-nvl72 288 bf16 adamw planner -
gpt3-175b 2048 64 {OLD} - bf16 sgd megatron-layouts-2023 -
mixtral-8x7b 4096 256 dgx-h100-80gb 64 bf16 adamw planner -
mixtral-8x7b 4096 256 dgx-h100-80gb 128 bf16 adamw megatron-core - once
mixtral-8x7b 4096 128 dgx-h100-80gb 16 fp8 adamw nemo - once
mixtral-8x7b 4096 128 dgx-a100-80gb 32 bf16 adamw megatron-core-overlap eager
mixtral-8x7b 4096 96 dgx-a100-80gb 48 fp16 adam torchtitan -
mixtral-8x7b 4096 128 dgx-b200 64 bf16 adamw torchtitan-compiled -
mixtral-8x7b 4096 144 gb200-nvl72 72 bf16 adamw planner - once
mixtral-8x7b 4096 64 {OLD} - bf16 adamw planner -
mixtral-8x7b 4096 16 rtx-4090-x8 8 bf16 adamw planner -
deepseek-v3 4096 1024 dgx-h100-80gb 512 bf16 adamw planner - once
deepseek-v3 4096 512 dgx-h100-80gb 256 fp8 adamw megatron-core -
deepseek-v3 4096 144 gb200-nvl72 144 bf16 adamw nemo - once
{HF}llama 4096 256 dgx-a100-80gb 64 bf16 adamw planner -
{HF}gpt2 - 64 dgx-a100-80gb 8 fp16 adamw megatron-lm-2022 eager
{HF}qwen3 - 64 dgx-h100-80gb 24 bf16 adamw torchtitan -
{TINY} - 16 cpu-gloo 1 fp32 adamw planner -
{TINY} - 32 cpu-gloo 8 fp32 sgd planner eager
{TINY} - 64 dgx-h100-80gb 8 bf16 adamw nanotron -
{TINY} - 48 dgx-a100-80gb 12 bf16 adam planner -
"""
OFFLOADING = ("dgx-",)  # profiles that say what their hosts can do
# So many layouts of those with these pins, the first of the whole space.
DRAWS: tuple[tuple[Json, int], ...] = (
    ({}, 8),
    ({"schedule": "ZB-2P"}, 2),
    ({"schedule": "ZBVZeroBubble"}, 2),
    ({"schedule": "DualPipeV"}, 1),
    ({"schedule": "1F1B"}, 3),
    ({"zero": 3, "pp": 1}, 1),
)
EXPERT_DRAWS: tuple[tuple[Json, int], ...] = (({"ep": 2}, 2), ({"ep": 4}, 2), ({"ep": 8}, 3))
OFFLOAD_DRAWS: tuple[tuple[Json, int], ...] = (({"offload": "cpu"}, 4), ({"offload": "nvme"}, 1))
SPREAD = "pp dp_replicate dp_shard cp tp ep zero_stage schedule virtual_stages recompute sequence_parallel groups"
SEARCHES: tuple[tuple[str, int, Json], ...] = (
    ("gpt2-1.5b 1024 256 dgx-h100-80gb", 8, {}),
    ("gpt2-1.5b 1024 96 dgx-a100-80gb", 24, {}),
    ("llama3-8b 4096 256 dgx-h100-80gb", 64, {}),
    ("llama3-8b 4096 256 dgx-h100-80gb", 64, {"offload": "cpu"}),
    ("llama3-8b 4096 256 dgx-h100-80gb", 64, {"tp": 8, "pp": 4}),
    ("llama3-8b 4096 256 " + OLD, 64, {}),
    ("llama3-8b 4096 192 dgx-a100-80gb", 48, {"recompute": "full", "zero": 1}),
    ("llama3-70b 4096 512 dgx-h100-80gb", 256, {}),
    ("llama3-70b 4096 256 dgx-a100-80gb", 128, {"schedule": "ZBVZeroBubble"}),
    ("gpt3-175b 2048 512 dgx-a100-80gb", 512, {}),
    ("mixtral-8x7b 4096 256 dgx-h100-80gb", 64, {}),
    ("deepseek-v3 4096 1024 dgx-h100-80gb", 256, {"ep": 8, "cp": 1}),
    (f"{TINY} - 16 dgx-a100-80gb", 8, {"schedule": "Interleaved1F1B"}),
)


def settings() -> list[Json]:
    """Every setting."""
    return [setting_of(line) for line in SETTINGS.split("\n") if line]


def setting_of(line: str) -> Json:
    """A line of ``SETTINGS``."""
    words = line.split()
    found: Json = {name: None if word == "-" else word for name, word in zip(COLUMNS, words, strict=False)}
    for name in ("seq_len", "global_batch_size", "num_devices"):
        found[name] = None if found[name] is None else int(found[name])
    return {**found, "dispatches_once_a_node": words[len(COLUMNS) :] == ["once"]}


def draw_prices(setting: Json) -> Json:
    """The layouts of one setting, each with the cuts that it is priced with."""
    random = Random(f"{SEED} {setting}")
    draws = list(DRAWS)
    if setting["model"] in ("mixtral-8x7b", "deepseek-v3"):
        draws += EXPERT_DRAWS
    if setting["hardware"].startswith(OFFLOADING):
        draws += OFFLOAD_DRAWS
    layouts: list[Json] = []
    seen: Counter[tuple[str, str]] = Counter()
    space = Space(setting)
    for pins, number in draws:
        layouts += _drawn(space, pins, number, random, seen)
    table = Table(setting, layouts)
    cuts = [_cuts(table, index, layout, random) for index, layout in enumerate(layouts)]
    return {"setting": setting, "layouts": layouts, "cuts": cuts}


def _drawn(space: Space, pins: Json, number: int, random: Random, seen: Counter[tuple[str, str]]) -> Iterator[Json]:
    """So many layouts, each with what was least ``seen`` among some that are looked at."""
    try:
        count, layout_at = space.with_pins(pins)
    except PlannerError:  # no layout satisfies the pins, or the hosts are unknown
        return
    looked_at = [layout_at(i) for i in random.sample(range(count), min(SAMPLED, count))]
    left = [layout for layout in looked_at if _num_actions(layout) <= MAX_ACTIONS]
    for _ in range(min(number, len(left))):
        best = min(left, key=lambda layout: sum(seen[trait] for trait in _traits(layout)))
        left.remove(best)
        seen.update(_traits(best))
        yield best


def _traits(layout: Json) -> list[tuple[str, str]]:
    return [(name, str(layout[name])) for name in SPREAD.split()]


def _num_actions(layout: Json) -> int:
    return 2 * layout["pp"] * layout["virtual_stages"] * layout["num_microbatches"]


def _cuts(table: Table, index: int, layout: Json, random: Random) -> list[list[int]]:
    """The framework's own, the solver's and a random one, each once."""
    own = table.cuts(index)
    starts, num_units = own["framework"], len(table.is_block)
    found = [starts]
    if own.get("solver"):
        found.append(own["solver"]["starts"])
    if len(starts) > 1:
        found.append([0, *sorted(random.sample(range(1, num_units), len(starts) - 1))])
    return [cut for place, cut in enumerate(found) if cut not in found[:place]]


def draw_placements() -> Iterator[Json]:
    """A setting, a degree and whether activations between blocks are split, for some 200 programs."""
    random = Random(SEED)
    for setting in settings():
        for tp in random.sample((2, 4, 8), 1) + ([3] if setting["model"] == TINY else []):
            yield {"setting": setting, "tp": tp, "sequence_parallel": random.random() < 0.5}


def draw_searches() -> Iterator[Json]:
    """Whole searches."""
    for line, num_devices, pins in SEARCHES:
        yield {"setting": setting_of(f"{line} {num_devices} bf16 adamw planner -"), "pins": pins}
