"""The names that torchtitan's options had in 2024 and early 2025, put under those of today."""

from __future__ import annotations

from planner.errors import InputError
from planner.formats.documents import Document, flag, number, section

_TO_PARALLELISM = {
    "training": ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree"),
    "experimental": ("context_parallel_degree", "context_parallel_rotate_method", "pipeline_parallel_degree",
                     "pipeline_parallel_schedule", "enable_async_tensor_parallel"),
}  # fmt: skip
# Section and name, then today's.
_RENAMED = {
    ("training", "batch_size"): ("training", "local_batch_size"),
    ("training", "data_parallel_degree"): ("parallelism", "data_parallel_shard_degree"),
    ("training", "compile"): ("compile", "enable"),
    **{(old, name): ("parallelism", name) for old, names in _TO_PARALLELISM.items() for name in names},
}
_MICROBATCHES, _SPLIT = "pipeline_parallel_microbatches", "pipeline_parallel_split_points"


def renamed(document: Document, converter: str) -> tuple[str, ...]:
    """Puts options under today's names, and says which; InputError where both names are there.

    ``converter``: of a model to 8 bits, which a section of its own switched on.
    """
    found: list[str] = []
    for (old_section, old), (new_section, new) in _RENAMED.items():
        held = section(document, old_section)
        if old not in held:
            continue
        if new in section(document, new_section):
            raise InputError(
                f"{old_section}.{old} is the older name of {new_section}.{new}, and the file has both",
                hint=f"keep {new_section}.{new}",
            )
        _put(document, new_section, new, held.pop(old))
        found.append(f"{old_section}.{old} as {new_section}.{new}")
    if flag(section(document, "float8"), "enable_float8_linear"):
        _put(document, "model", "converters", [converter])
        found.append("float8.enable_float8_linear as model.converters")
    found += _microbatches(document)
    return (f"names of an older torchtitan are read as today's: {', '.join(found)}",) if found else ()


def _microbatches(document: Document) -> list[str]:
    """The number of micro-batches of a pipeline, in place of which today's configs say their size."""
    parallelism = section(document, "parallelism")
    degree = number(parallelism, "pipeline_parallel_degree", 1) or 1
    for name in ("experimental", "parallelism"):
        held = section(document, name)
        if held.get(_SPLIT):
            raise InputError(
                f"{name}.{_SPLIT} is not read", hint="name the stages: parallelism.module_fqns_per_model_part"
            )
        many = number(held, _MICROBATCHES)
        if many is None or degree == 1:
            continue
        local = number(section(document, "training"), "local_batch_size", 8) or 8
        if many < 1 or local % many:
            raise InputError(
                f"{name}.{_MICROBATCHES} {many} does not divide the local batch of {local}", hint="correct the file"
            )
        _put(document, "parallelism", "pipeline_parallel_microbatch_size", local // many)
        return [f"{name}.{_MICROBATCHES} as parallelism.pipeline_parallel_microbatch_size"]
    return []


def _put(document: Document, name: str, key: str, value: object) -> None:
    if not isinstance(dict.get(document, name), Document):
        document[name] = Document({})
    section(document, name)[key] = value
