"""What a checkpoint's folder holds, as JSON of ours: which bytes of which file are which part of which tensor.

``manifest.json`` stands beside files of raw tensors. Nothing of a checkpoint is pickled, so nothing in one is ever
executed. Each file has its SHA-256 here, and the manifest has its own, so what is damaged is found before it is used.
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticSerializationError

from costmodels.vocabulary.choices import Optimizer
from planner.errors import InputError
from planner.json_file import FileFormat
from planner.output_file import write_text

FILE_NAME = "manifest.json"
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
              "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
              "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
              "bool": 1, "complex128": 16, "complex64": 8, "complex32": 4}  # fmt: skip
_DATA_FILE = re.compile(r"rank-\d+\.bin")
Count = Annotated[int, Field(ge=0)]


class DamagedError(InputError):
    """A checkpoint that is not whole, or not as it was written."""


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Chunk(_Value):
    """A box of a tensor: where it lies in the tensor, and where its bytes lie, in row-major order."""

    offset: tuple[Count, ...]
    shape: tuple[Count, ...]
    file: str
    at: Count  # bytes from the file's beginning


class StoredTensor(_Value):
    """One tensor of the whole model, in boxes that fill it without overlap."""

    dtype: str  # torch's name for it
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...]


class StoredFile(_Value):
    """One file of tensors."""

    bytes: Count
    sha256: str


class Progress(_Value):
    """Where a run stands and what it trains with: what follows from these is not stored."""

    step: Count  # optimiser steps done
    sequences: Count  # of the data, seen in these steps
    seed: Count  # of the initial weights, of dropout (with the step) and of the order of samples
    seq_len: Annotated[int, Field(ge=1)]
    optimizer: Optimizer
    layout: str  # the degrees it was written under, for people
    # Compared where a run goes on, for what changed to be said; None in checkpoints of earlier versions.
    data: str | None = None
    optimization: str | None = None
    model: str | None = None  # of the code or config, whose names and shapes may be another model's


class Manifest(_Value):
    """The whole of manifest.json. Tensors are named by the FQNs of the whole model, whatever the layout."""

    schema_version: Literal[1] = 1
    progress: Progress
    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]
    digest: str = ""

    def signed(self) -> Manifest:
        """The same with the SHA-256 of everything else."""
        return self.model_copy(update={"digest": self.checksum()})

    def checksum(self) -> str:
        """The SHA-256 of everything but ``digest``, and but what earlier versions did not write."""
        return hashlib.sha256(self.model_dump_json(exclude={"digest"}, exclude_none=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in ``folder``; DamagedError with the reason where there is no valid one."""
    return _FORMAT.read(folder / FILE_NAME)


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Writes ``manifest`` with its digest into ``folder``; its path."""
    write_text(folder / FILE_NAME, manifest.signed().model_dump_json())
    return folder / FILE_NAME


def damage_of(folder: Path, manifest: Manifest, names: list[str]) -> str | None:
    """What is wrong with the files ``names`` of ``folder``, if anything is: all of their bytes are read."""
    for name in names:
        path, stored = folder / name, manifest.files[name]
        try:
            size = path.stat().st_size
            if size != stored.bytes:
                return f"{name} has {size} bytes instead of {stored.bytes}"
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != stored.sha256:
                    return f"the bytes of {name} are not those that were written"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def _contradictions(manifest: Manifest) -> list[str]:
    """What a schema cannot say. Names of files above all: a checkpoint reads nothing outside its folder."""
    try:
        if manifest.checksum() != manifest.digest:
            return ["digest is not that of the rest: the file was changed"]
    except PydanticSerializationError:
        return ["a text in it cannot be written as UTF-8"]
    found = [f"files.{name} is not a name of ours" for name in manifest.files if not _DATA_FILE.fullmatch(name)]
    for name, tensor in manifest.tensors.items():
        found += [f"tensors.{name}: {problem}" for problem in _problems(tensor, manifest.files)]
    return found


def _problems(tensor: StoredTensor, files: dict[str, StoredFile]) -> list[str]:
    if tensor.dtype not in ITEM_BYTES:
        return [f"dtype {tensor.dtype!r} is unknown"]
    size = ITEM_BYTES[tensor.dtype]
    for chunk in tensor.chunks:
        if len(chunk.offset) != len(tensor.shape) or len(chunk.shape) != len(tensor.shape):
            return ["a part has another number of dimensions"]
        if any(o + s > n for o, s, n in zip(chunk.offset, chunk.shape, tensor.shape, strict=True)):
            return ["a part lies outside it"]
        if chunk.file not in files or chunk.at + math.prod(chunk.shape) * size > files[chunk.file].bytes:
            return [f"a part lies outside {chunk.file}"]
        if chunk.at % size:
            return [f"a part of {chunk.file} begins inside a number"]
    if sum(math.prod(chunk.shape) for chunk in tensor.chunks) != math.prod(tensor.shape):
        return ["its parts do not fill it"]
    return []


_FORMAT = FileFormat(
    name="checkpoint of planner",
    model=Manifest,
    version=1,
    contradictions=_contradictions,
    error_class=DamagedError,
    way_out="name a --checkpoint-dir that planner run wrote",
)
