"""A checkpoint's manifest is refused where anything in it or beside it is not as it was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from costmodels.vocabulary.choices import Optimizer
from planner.plan.manifest import (
    FILE_NAME,
    ITEM_BYTES,
    Chunk,
    DamagedError,
    Manifest,
    Progress,
    StoredFile,
    StoredTensor,
    damage_of,
    read_manifest,
    write_manifest,
)

CONTENT = bytes(range(64))
PROGRESS = Progress(step=3, sequences=48, seed=0, seq_len=8, optimizer=Optimizer.ADAMW, layout="dp=2")


def manifest() -> Manifest:
    """Of one tensor (4, 2) in two files' halves, of which one is used."""
    chunks = tuple(Chunk(offset=(2 * i, 0), shape=(2, 2), file="rank-0.bin", at=16 * i) for i in range(2))
    tensor = StoredTensor(dtype="float32", shape=(4, 2), chunks=chunks)
    file = StoredFile(bytes=64, sha256=hashlib.sha256(CONTENT).hexdigest())
    return Manifest(progress=PROGRESS, tensors={"model.weight": tensor}, files={"rank-0.bin": file})


def written(folder: Path) -> Path:
    write_manifest(folder, manifest())
    (folder / "rank-0.bin").write_bytes(CONTENT)
    return folder


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read_manifest(written(tmp_path)) == manifest().signed()
    assert damage_of(tmp_path, manifest(), ["rank-0.bin"]) is None


def test_a_manifest_of_the_version_before_data_were_told_is_whole() -> None:
    """Its digest is what commit ed8ba2b wrote of the same manifest."""
    assert manifest().checksum() == "21777003a8b0d1d6c32f2725371bb7ea287cde4eae52a5c64c73bb32fb6e93c9"
    told = PROGRESS.model_copy(update={"data": "4 tokens"})
    assert manifest().model_copy(update={"progress": told}).checksum() != manifest().checksum()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content[:-1], "63 bytes instead of 64"),
        (lambda content: bytes([1]) + content[1:], "are not those that were written"),
        (None, "cannot be read"),
    ],
)
def test_a_damaged_file_is_found(damage: Callable[[bytes], bytes] | None, words: str, tmp_path: Path) -> None:
    file = written(tmp_path) / "rank-0.bin"
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(CONTENT))
    assert words in str(damage_of(tmp_path, manifest(), ["rank-0.bin"]))


def test_a_changed_manifest_is_found(tmp_path: Path) -> None:
    path = written(tmp_path) / FILE_NAME
    changed = json.loads(path.read_text())
    changed["progress"]["step"] = 4
    path.write_text(json.dumps(changed))
    with pytest.raises(DamagedError, match="the file was changed"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("content", ["", '{"schema_version": 1, "prog', "\x80\x04}q\x00.", '{"schema_version": 2}'])
def test_half_a_manifest_and_foreign_files_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    with pytest.raises(DamagedError):
        read_manifest(tmp_path)


def forged(change: Callable[[dict[str, Any]], object]) -> Manifest:
    """A manifest that somebody changed and signed again."""
    content = manifest().model_dump(mode="json")
    change(content)
    return Manifest.model_validate(content).signed()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["files"].update({"../secret": {"bytes": 1, "sha256": ""}}), "not a name of ours"),
        (lambda m: m["tensors"]["model.weight"]["chunks"][0].update(file="rank-1.bin"), "lies outside rank-1.bin"),
        (lambda m: m["tensors"]["model.weight"]["chunks"][1].update(at=56), "lies outside rank-0.bin"),
        (lambda m: m["tensors"]["model.weight"]["chunks"][1].update(at=2), "begins inside a number"),
        (lambda m: m["tensors"]["model.weight"]["chunks"][1].update(offset=[3, 0]), "a part lies outside it"),
        (lambda m: m["tensors"]["model.weight"]["chunks"].pop(), "its parts do not fill it"),
        (lambda m: m["tensors"]["model.weight"].update(dtype="quint8"), "dtype 'quint8' is unknown"),
        (lambda m: m["tensors"]["model.weight"].update(shape=[4, 2, 1]), "another number of dimensions"),
    ],
)
def test_nothing_outside_the_folder_or_the_files_is_read(
    change: Callable[[dict[str, Any]], object], words: str, tmp_path: Path
) -> None:
    (tmp_path / FILE_NAME).write_text(forged(change).model_dump_json())
    with pytest.raises(DamagedError, match=words):
        read_manifest(tmp_path)


def test_a_text_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path) / FILE_NAME
    path.write_text(path.read_text().replace("dp=2", "\\ud800"))
    with pytest.raises(DamagedError, match="cannot be written as UTF-8"):
        read_manifest(tmp_path)


def test_every_dtype_whose_bytes_can_be_written_can_be_read() -> None:
    """Checkpoints of models with complex buffers, as of rotary tables, were written and then taken for damaged."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    names = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in dtypes}
    packed = {name for name in names if name.startswith(("q", "bits")) or name.strip("uint") in set("1234567")}
    assert {name: names[name] for name in names.keys() - packed} == ITEM_BYTES
