"""Measured training runs as rows of a CSV, read into plain values; the columns are documented in docs/calibrate.md."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from costmodels.vocabulary.choices import Recompute

GIB = 2**30
KIND_NOT_SAID = "kind not said"  # of a peak: of tensors, of the allocator or of the device; it can be held against none
TRUE_WORDS = {"true", "1", "yes"}
FALSE_WORDS = {"false", "0", "no"}
# Where the size of the vocabulary is not said: GPT-2's 50,257 padded as Megatron-LM pads it, and Llama's.
PADDED_GPT_VOCAB, LLAMA_VOCAB = 51_200, 32_000
GATED_MLPS = ("swiglu", "geglu")
# Frameworks whose own recipes shard the optimiser where nothing is said.
DISTRIBUTED_OPTIMIZER_FRAMEWORKS = ("nemo", "megatron-bridge")
# Words of the ZeRO column that name a stage, the most telling first; FSDP's default is FULL_SHARD.
SHARDING_WORDS = {
    "SHARD_GRAD_OP": 2,
    "FULL_SHARD": 3,
    "HYBRID_SHARD": 3,
    "HSDP": 3,
    "DISTRIBUTED OPTIMIZER": 1,
    "DDP": 0,
    "NONE": 0,
}


MEASURED = ("iteration_time_s", "tokens_per_s_per_gpu", "peak_memory_gb_per_gpu")  # one of which a table has
MOST = 1e15  # of any number in a table: far above every batch, rate and memory


class UnpriceableRunError(ValueError):
    """A row lacks something that has no default, or was run in a way that is not modelled; the message says which."""


@dataclass(frozen=True)
class Architecture:
    """The shape of the model that was trained."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int | None
    ffn: int
    vocab: int
    seq_len: int
    mlp_type: str
    is_tied: bool
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0


@dataclass(frozen=True)
class Hardware:
    """The machine that a row names."""

    gpu_type: str
    memory_gb: float | None
    num_devices: int
    devices_per_node: int
    inter_node_bits_per_s: float | None  # per device and direction


@dataclass(frozen=True)
class Layout:
    """How the work was split.

    ``etp``: ranks that split an expert between them (None: not said). ``shard_size``: ranks that ZeRO divides over
    (None: all data-parallel ranks). ``shards_in_node``: where that is not said, those of one node.
    """

    dp: int
    tp: int
    pp: int
    virtual_stages: int
    cp: int
    ep: int
    sequence_parallel: bool
    zero_stage: int
    shard_size: int | None
    global_batch_size: int
    micro_batch_size: int
    schedule: str
    recompute: Recompute
    offload: str
    shards_in_node: bool = False
    etp: int | None = None


@dataclass(frozen=True)
class Software:
    """What ran, and where, in the words of the table's columns; blank where it is not said."""

    framework: str = ""
    version: str = ""
    kernels: tuple[str, ...] = ()
    partition: str = ""
    stage_layers: tuple[int, ...] = ()  # blocks of each stage, first to last
    vocab_parallel: str = ""
    overlap: tuple[tuple[str, bool], ...] = ()  # what is said to run beside computation, or not to
    cluster: str = ""


@dataclass(frozen=True)
class Run:
    """One row."""

    id: str
    source: str
    group: str
    architecture: Architecture
    hardware: Hardware
    layout: Layout
    precision: str
    flash_attention: bool | None
    software: Software
    step_time_s: float | None
    peak_memory_bytes: float | None
    peak_memory_kind: str  # allocated, reserved, device or ""
    assumptions: tuple[str, ...] = ()
    memory_of: str = "worst"  # pipeline rank on which memory was read: worst, first or last


@dataclass(frozen=True)
class Rejected:
    """A row that could not be read into a run, and why."""

    id: str
    source: str
    reason: str
    step_time_s: float | None = None


def read_runs(path: Path) -> Iterator[Run | Rejected]:
    """Every row of ``path`` in order. ValueError where the file has no such columns."""
    with path.open(newline="", encoding="utf-8-sig") as file:  # with the mark that spreadsheets write before a table
        reader = csv.DictReader(file)
        if not set(MEASURED) & set(reader.fieldnames or ()):
            raise ValueError(
                f"{path} has none of the columns {', '.join(MEASURED)}: is it a table of runs, with commas?"
            )
        for number, row in enumerate(reader, start=1):
            yield _read(row, number, path.name)


def read_out_of_memory(path: Path) -> Iterator[Run | Rejected]:
    """Rows of configurations that ran out of memory, in the columns of out_of_memory_runs.csv or of the runs."""
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), start=1):
            yield _read(_renamed(row) if "grad_accum" in row else row, number, path.name)


def _renamed(row: Mapping[str, str]) -> dict[str, str]:
    """An out-of-memory row in the columns of the runs."""
    notes = f'{row["notes"]} attention kernel "{row["kernel"]}"'
    is_parallel = "sequence_parallel=1" in notes or "tpmodeRED" in notes
    batch = int(row["dp"]) * int(row["micro_batch"]) * int(row["grad_accum"])
    is_llama = row["kernel"] != "fused softmax"
    is_tied = row.get("framework") == "nanotron" or not is_llama
    return {
        **row,
        "source_title": row["source"],
        "sp": str(is_parallel and int(row["tp"]) > 1),
        "zero_stage_or_fsdp": row["zero_stage"],
        "global_batch_sequences": str(batch),
        "precision": "fp16" if "fp16" in notes else "bf16",
        "flash_attention": str("flash" in row["kernel"]),
        "mlp_type": "swiglu" if is_llama else "gelu",
        "tied_embeddings": str(is_tied),
        "notes": notes,
    }


def _read(row: Mapping[str, str], number: int, file_name: str) -> Run | Rejected:
    name = row.get("id") or f"{file_name}:{number}"
    source = row.get("source_title") or row.get("source_ref") or file_name
    try:
        if None in row:  # where csv keeps the cells beyond the header's
            raise UnpriceableRunError(
                "it has more cells than there are columns: is a decimal comma or a quote missing?"
            )
        return _run(row, name, source)
    except UnpriceableRunError as error:
        return Rejected(name, source, str(error), _told_s(row))


def _run(row: Mapping[str, str], name: str, source: str) -> Run:
    assumed: list[str] = []
    words = row.get("peak_memory_kind") or ""
    memory = None if KIND_NOT_SAID in words else _measured(row, "peak_memory_gb_per_gpu")
    unit = GIB if "GiB" in words else 1e9
    flash = _flag(row, "flash_attention")
    layout = _layout(row, assumed)
    return Run(
        id=name,
        source=source,
        group=row.get("group") or "",
        architecture=_architecture(row, assumed),
        hardware=_hardware(row, assumed),
        layout=layout,
        precision=(row.get("precision") or "").lower() or _assume(assumed, "precision", "bf16"),
        flash_attention=flash,
        software=_software(row),
        step_time_s=_step_time_s(row, layout),
        peak_memory_bytes=None if memory is None else memory * unit,
        peak_memory_kind=_memory_kind(words) if memory is not None else "",
        memory_of=_memory_rank(words.lower()),
        assumptions=tuple(assumed),
    )


def _software(row: Mapping[str, str]) -> Software:
    layers = (row.get("stage_layers") or "").strip()
    vocab_parallel = (row.get("vocab_parallel") or "").strip().lower()
    pairs = (word.partition("=") for word in (row.get("overlap") or "").lower().split())
    try:
        stage_layers = tuple(int(each) for each in re.split(r"[\s,-]+", layers)) if layers else ()
    except ValueError as error:
        raise UnpriceableRunError(f"stage_layers is {layers!r}, not numbers of blocks") from error
    return Software(
        framework=(row.get("framework") or "").strip().lower(),
        version=(row.get("framework_version") or "").strip(),
        kernels=tuple((row.get("kernels") or "").lower().split()),
        partition=(row.get("partition") or "").strip().lower(),
        stage_layers=stage_layers,
        vocab_parallel=vocab_parallel,
        overlap=tuple((name, value == "on") for name, _, value in pairs),
        cluster=(row.get("cluster") or "").strip(),
    )


def _architecture(row: Mapping[str, str], assumed: list[str]) -> Architecture:
    heads, hidden = _whole(row, "heads"), _whole(row, "hidden")
    head_dim = _optional(row, "head_dim")
    mlp = (row.get("mlp_type") or _assume(assumed, "mlp_type", "gelu")).lower()
    tied = _flag(row, "tied_embeddings")
    if tied is None:
        tied = _assume(assumed, "tied_embeddings", str(mlp == "gelu")) == "True"
    return Architecture(
        layers=_whole(row, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=int(_optional(row, "kv_heads") or heads),
        head_dim=None if head_dim is None else int(head_dim),
        ffn=int(_optional(row, "ffn") or _optional(row, "moe_ffn") or _assume(assumed, "ffn", str(4 * hidden))),
        vocab=_whole_or(row, "vocab", LLAMA_VOCAB if mlp in GATED_MLPS else PADDED_GPT_VOCAB, assumed),
        seq_len=_whole(row, "seq_len"),
        mlp_type=mlp,
        is_tied=tied,
        experts=int(_optional(row, "experts") or 0),
        top_k=int(_optional(row, "top_k") or 0),
        expert_ffn=int(_optional(row, "moe_ffn") or 0),
    )


def _hardware(row: Mapping[str, str], assumed: list[str]) -> Hardware:
    link = _optional(row, "inter_node_link_gbps_per_gpu")
    devices = _whole(row, "n_gpus")
    gpu_type = (row.get("gpu_type") or "").strip()
    if not gpu_type:
        raise UnpriceableRunError("gpu_type is blank and has no default")
    per_node = int(_optional(row, "gpus_per_node") or (4 if "V100" in gpu_type and "grad_accum" in row else 8))
    if link is None and devices > per_node:
        assumed.append("inter_node_link_gbps_per_gpu: the profile's own")
    return Hardware(
        gpu_type=gpu_type,
        memory_gb=_optional(row, "gpu_mem_gb") or _memory_in_name(gpu_type),
        num_devices=devices,
        devices_per_node=per_node,
        inter_node_bits_per_s=None if link is None else link * 1e9,
    )


def _memory_in_name(gpu: str) -> float | None:
    """16 from V100-16GB-SXM2."""
    found = re.search(r"(\d+)GB", gpu.upper())
    return None if found is None else float(found.group(1))


def _layout(row: Mapping[str, str], assumed: list[str]) -> Layout:
    words = row.get("zero_stage_or_fsdp") or _assume(assumed, "zero_stage_or_fsdp", _default_sharding(row))
    stage, shard_size = _sharding(words)
    tp, pp, cp = (_whole_or(row, column, 1, assumed) for column in ("tp", "pp", "cp"))
    virtual = int(_optional(row, "vpp") or 1)
    default_schedule = "interleaved-1F1B" if virtual > 1 else "1F1B"
    recompute = (row.get("recompute") or _assume(assumed, "recompute", "none")).lower()
    recompute = re.split(r"\W", recompute)[0]  # what stands in brackets says how
    if recompute not in list(Recompute):
        raise UnpriceableRunError(f"recompute {recompute!r} is not one of none, selective, full")
    return Layout(
        dp=_whole_or(row, "dp", max(1, _whole(row, "n_gpus") // (tp * pp * cp)), assumed),
        tp=tp,
        pp=pp,
        virtual_stages=virtual,
        cp=cp,
        ep=int(_optional(row, "ep") or 1),
        sequence_parallel=bool(_flag(row, "sp")) and tp > 1,
        zero_stage=stage,
        shard_size=shard_size,
        global_batch_size=_whole(row, "global_batch_sequences"),
        micro_batch_size=_whole_or(row, "micro_batch", 1, assumed),
        schedule=row.get("schedule") or default_schedule,
        recompute=Recompute(recompute),
        offload=row.get("offload") or "none",
        shards_in_node="HSDP" in words.upper(),
        etp=int(_optional(row, "etp") or 0) or None,
    )


def _default_sharding(row: Mapping[str, str]) -> str:
    return "1" if row.get("framework") in DISTRIBUTED_OPTIMIZER_FRAMEWORKS else "0"


def _sharding(words: str) -> tuple[int, int | None]:
    """ZeRO stage and shard size from ``1(shard 8, in-node)``, ``FSDP-FULL_SHARD(3)``, ``HSDP(8)``, ``ZeRO-3``, ..."""
    upper = words.upper()
    within = re.search(r"SHARD[ =]*(\d+)", upper) or re.search(r"HSDP\D*(\d+)", upper)
    named = next((stage for word, stage in SHARDING_WORDS.items() if word in upper), None)
    digit = re.match(r"\s*([0-3])\b", upper) or re.search(r"(?:\(|ZERO|STAGE|Z)[ -]?([0-3])\b", upper)
    stage = named if named is not None else int(digit.group(1)) if digit else None
    if stage is None and "FSDP" in upper:
        stage = SHARDING_WORDS["FULL_SHARD"]
    if stage is None:
        raise UnpriceableRunError(f"sharding {words!r} names no ZeRO stage")
    return stage, int(within.group(1)) if within else None


def _step_time_s(row: Mapping[str, str], layout: Layout) -> float | None:
    given, rate = _measured(row, "iteration_time_s"), _measured(row, "tokens_per_s_per_gpu")
    if given is not None or rate is None:
        return given
    return layout.global_batch_size * _whole(row, "seq_len") / (rate * _whole(row, "n_gpus"))


def _told_s(row: Mapping[str, str]) -> float | None:
    """The step time of a row that is rejected, where that can be read."""
    try:
        return _optional(row, "iteration_time_s")
    except UnpriceableRunError:
        return None


def _memory_kind(words: str) -> str:
    lowered = words.lower()
    if "reserved" in lowered:
        return "reserved"
    if "nvidia-smi" in lowered:
        return "device"
    return "allocated" if lowered else ""


def _memory_rank(words: str) -> str:
    """``the logging rank`` of nanotron's log_memory is world rank 0 (nanotron/logging.py, log_rank(rank=0))."""
    if "logging rank" in words or "rank-0" in words:
        return "first"
    return "last" if "last rank" in words else "worst"


def _assume(assumed: list[str], column: str, value: str) -> str:
    assumed.append(f"{column}: {value}")
    return value


def _flag(row: Mapping[str, str], column: str) -> bool | None:
    word = (row.get(column) or "").strip().lower()
    return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None


def _optional(row: Mapping[str, str], column: str) -> float | None:
    text = (row.get(column) or "").strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError as error:
        raise UnpriceableRunError(f"{column} is {text[:40]!r}, not a number") from error
    if not 0 <= number <= MOST:
        raise UnpriceableRunError(f"{column} is {number:g}, not a number from 0 to {MOST:g}")
    return number


def _measured(row: Mapping[str, str], column: str) -> float | None:
    number = _optional(row, column)
    if number == 0:
        raise UnpriceableRunError(f"{column} is 0: leave blank what was not measured")
    return number


def _whole_or(row: Mapping[str, str], column: str, default: int, assumed: list[str]) -> int:
    if not (row.get(column) or "").strip():
        _assume(assumed, column, str(default))
        return default
    return _whole(row, column)


def _whole(row: Mapping[str, str], column: str) -> int:
    number = _optional(row, column)
    if number is None:
        raise UnpriceableRunError(f"{column} is blank and has no default")
    if number < 1 or number != int(number):
        raise UnpriceableRunError(f"{column} is {number}, not a whole number above 0")
    return int(number)
