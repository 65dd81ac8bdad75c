"""How torch.distributed.checkpoint keeps tensors here: one raw file a rank, and a manifest in place of its pickle."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from planner.plan.manifest import (
    Chunk,
    DamagedError,
    Manifest,
    Progress,
    StoredFile,
    StoredTensor,
    write_manifest,
)

ALIGNMENT = 64  # bytes: a part can be read in place whatever its dtype


@dataclass(frozen=True)
class _Written:
    """Where one rank put a part, and what its file came to."""

    file: str
    at: int
    file_bytes: int
    sha256: str


class ManifestWriter(StorageWriter):
    """Writes to ``partial`` and renames it to ``target`` once every rank's file is whole, then calls ``then``.

    Ranks that have all they need elsewhere write no file. What fails leaves ``target`` as it was.
    """

    def __init__(self, target: Path, progress: Progress, then: Callable[[], None]) -> None:
        self._target, self._progress, self._then = target, progress, then
        self._partial = target.parent / f".{target.name}.partial"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Has nothing to forget: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Has nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Takes the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0, before any rank writes: makes the folder, without what an earlier attempt left there."""
        if self._partial.exists():
            shutil.rmtree(self._partial)
        self._partial.mkdir(parents=True)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's parts one after the other, each at a multiple of ``ALIGNMENT``."""
        name, checksum = f"rank-{dist.get_rank()}.bin", hashlib.sha256()
        starts: list[int] = []
        if plan.items:
            with (self._partial / name).open("wb") as file:
                for item in plan.items:
                    value = planner.resolve_data(item)
                    assert isinstance(value, torch.Tensor)
                    starts.append(file.tell())
                    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
                    content = plain.flatten().view(torch.uint8).numpy().data
                    for piece in (content, bytes(-len(content) % ALIGNMENT)):
                        file.write(piece)
                        checksum.update(piece)
                end = file.tell()
                file.flush()
                os.fsync(file.fileno())
            written = [_Written(name, start, end, checksum.hexdigest()) for start in starts]
        else:
            written = []
        results = [WriteResult(item.index, 0, place) for item, place in zip(plan.items, written, strict=True)]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, once all ranks have written: the manifest, a look at every file, and the new name."""
        written: dict[MetadataIndex, _Written] = {result.index: result.storage_data for r in results for result in r}
        tensors: dict[str, StoredTensor] = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [(chunk, written[MetadataIndex(name, chunk.offsets)]) for chunk in stored.chunks]
            tensors[name] = StoredTensor(
                dtype=str(stored.properties.dtype).removeprefix("torch."),
                shape=tuple(stored.size),
                chunks=tuple(
                    Chunk(offset=tuple(chunk.offsets), shape=tuple(chunk.sizes), file=place.file, at=place.at)
                    for chunk, place in chunks
                ),
            )
        files = {w.file: StoredFile(bytes=w.file_bytes, sha256=w.sha256) for w in written.values()}
        written_to = write_manifest(self._partial, Manifest(progress=self._progress, tensors=tensors, files=files))
        for path in (written_to, self._partial):
            _sync(path)
        for file, expected in files.items():
            size = (self._partial / file).stat().st_size
            if size != expected.bytes:
                raise DamagedError(f"{file} has {size} bytes after {expected.bytes} were written",
                                   hint="is the disk full, or shared by all ranks?")  # fmt: skip
        self._partial.replace(self._target)
        _sync(self._target.parent)
        self._then()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path may be one."""
        return True


class ManifestReader(StorageReader):
    """Reads the parts that a rank needs of a checkpoint whose manifest was read and whose files were looked at."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Has nothing to forget."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """The manifest in torch's words."""
        return Metadata({name: _metadata(tensor) for name, tensor in self._manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Has nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Takes the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Takes the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies what is asked for out of the mapped files."""
        mapped: dict[str, torch.Tensor] = {}
        places = {
            MetadataIndex(name, chunk.offset): (tensor.dtype, chunk)
            for name, tensor in self._manifest.tensors.items()
            for chunk in tensor.chunks
        }
        for item in plan.items:
            dtype, chunk = places[item.storage_index]
            if chunk.file not in mapped:
                path, size = self._folder / chunk.file, self._manifest.files[chunk.file].bytes
                mapped[chunk.file] = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
            value = _part(mapped[chunk.file], chunk, getattr(torch, dtype))
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                value = value.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(value)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path may be one."""
        return True


def _metadata(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)) for chunk in tensor.chunks]
    return TensorStorageMetadata(TensorProperties(getattr(torch, tensor.dtype)), torch.Size(tensor.shape), chunks)


def _part(file: torch.Tensor, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
    size = math.prod(chunk.shape) * dtype.itemsize
    return file[chunk.at : chunk.at + size].view(dtype).view(chunk.shape)


def _sync(path: Path) -> None:
    """Makes sure that ``path`` is on the disk: a rename that outlives a power cut must not outlive its content."""
    with contextlib.suppress(OSError):  # some file systems do not sync folders
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
