"""Files of tokens, mapped into memory: raw numbers, NumPy's ``.npy``, and Megatron-LM's ``.bin`` with its ``.idx``."""

from __future__ import annotations

import re
import struct
from enum import StrEnum
from pathlib import Path

import numpy as np
import torch

from planner.errors import InputError

_MAGIC = b"MMIDIDX\x00\x00"
NUM_LOOKED_AT = 2**16  # bytes in which tokens of 16 or 32 bits have a zero byte, and text has none
FEWEST_NUMBERS = 32  # of which every second is 0, that are taken for no chance
_JSON = re.compile(rb'\s*(\[\s*)?\{\s*"[^"\n]*"\s*:')  # how objects begin, a line each or in one list
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, number of sequences, number of entries of documents
# Megatron-Core, megatron/core/datasets/indexed_dataset.py: the codes of DType that are whole numbers.
_MEGATRON_DTYPES = {1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 8: torch.uint16}
_NUMPY_DTYPES = {"u1": torch.uint8, "u2": torch.uint16, "u4": torch.uint32, "i1": torch.int8, "i2": torch.int16,
                 "i4": torch.int32, "i8": torch.int64}  # fmt: skip


class TokenDtype(StrEnum):
    """What a file without a header holds."""

    BYTES = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"


_OTHER_KINDS = {
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\xfd7zXZ": "compressed by xz",
    b"PK\x03\x04": "a zip archive",
    b"\x93NUMPY": "NumPy's, though not named .npy",
    _MAGIC[:8]: "an index of Megatron-LM's, which lies beside the .bin that is to be named",
}


def map_tokens(path: Path, dtype: TokenDtype | None = None) -> torch.Tensor:
    """The tokens of ``path`` (num_tokens,), read when they are used. InputError where the file is not one of tokens.

    ``dtype`` is that of a file that does not say its own: neither ``.npy`` nor beside an ``.idx``. None: it is text.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder", hint="name one file of text or of tokens")
    binary = path.with_name(f"{path.name}.bin")
    try:
        if path.suffix == ".npy":
            return _numpy(path)
        index = path.with_suffix(".idx")
        if path.suffix == ".bin" and index.exists():
            return _megatron(path, index)
        _check_plain(path, dtype)
        return _mapped(path, 0, getattr(torch, (dtype or TokenDtype.BYTES).value))
    except (OSError, RuntimeError, ValueError) as error:
        hint = f"name {binary}" if binary.exists() else "check the path of the data"
        raise InputError(f"cannot read {path}: {error}", hint=hint) from error


def _check_plain(path: Path, dtype: TokenDtype | None) -> None:
    """InputError for a file of another kind than tokens or text, by how it begins; without ``dtype``, than text."""
    with path.open("rb") as file:
        start = file.read(NUM_LOOKED_AT)
    found = next((kind for magic, kind in _OTHER_KINDS.items() if start.startswith(magic)), None)
    if found is not None:
        raise InputError(f"{path} is {found}, not a file of tokens or text",
                         hint="write its tokens as .npy of uint16 or uint32, or as text")  # fmt: skip
    if dtype is None and _JSON.match(start):
        raise InputError(f"{path} is JSON, whose keys and quotes would be learned as text",
                         hint="write the texts in it to a file of their own, or their tokens as .npy; --data-dtype "
                         "uint8 takes it as it is")  # fmt: skip
    if dtype is None and b"\0" in start:
        raise InputError(f"{path} is no text, for it holds zero bytes, and nothing says how many bytes a token has",
                         hint="say it by --data-dtype uint16, uint32 or uint8; Megatron-LM's .bin needs its .idx "
                         "beside it")  # fmt: skip
    if dtype is not None and dtype is not TokenDtype.BYTES:
        _check_width(path, dtype, np.frombuffer(start[: len(start) // 8 * 8], dtype.value))


def _check_width(path: Path, dtype: TokenDtype, numbers: np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]) -> None:
    """InputError where every second of ``numbers`` is zero, as the upper halves of small numbers twice as wide are."""
    if len(numbers) >= FEWEST_NUMBERS and numbers[::2].any() and not numbers[1::2].any():
        bits = 16 * numbers.itemsize
        raise InputError(
            f"{path} holds numbers of {bits} bits: as {dtype.value} every second token is 0",
            hint="give --data-dtype uint32" if bits == 32 else "write its tokens as .npy, or as uint32",
        )


def _mapped(path: Path, start: int, dtype: torch.dtype) -> torch.Tensor:
    size = path.stat().st_size
    if (size - start) % dtype.itemsize:
        raise InputError(f"{path} has {size - start:,} bytes of tokens, no multiple of {dtype.itemsize}",
                         hint="is --data-dtype right?")  # fmt: skip
    whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    return whole[start:].view(dtype)


def _numpy(path: Path) -> torch.Tensor:
    """The header says dtype and shape; the numbers are mapped behind it, where NumPy aligns them to 64 bytes."""
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    name = array.dtype.str[1:]
    if array.ndim != 1 or array.dtype.str[0] == ">" or name not in _NUMPY_DTYPES:
        raise InputError(f"{path} holds {array.dtype} of shape {list(array.shape)}, not a row of whole numbers",
                         hint="save one token after the other, as uint16 or uint32")  # fmt: skip
    return _mapped(path, int(array.offset), _NUMPY_DTYPES[name])  # pyright: ignore[reportAttributeAccessIssue]


def _megatron(path: Path, index: Path) -> torch.Tensor:
    """All sequences one after the other, as ``preprocess_data.py`` writes them."""
    content = index.read_bytes()
    if len(content) < _HEADER.size or not content.startswith(_MAGIC):
        raise InputError(f"{index} is no index of Megatron-LM's", hint="rename it, if the file beside it has no index")
    _, version, code, count, _ = _HEADER.unpack_from(content)
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise InputError(f"{index} has version {version} and dtype {code}, of which only 1 and whole numbers are known",
                         hint="write it again with Megatron-LM's preprocess_data.py")  # fmt: skip
    if len(content) < _HEADER.size + 12 * count:
        raise InputError(f"{index} ends before its {count} sequences do", hint="is it a whole copy?")
    dtype = _MEGATRON_DTYPES[code]
    lengths = np.frombuffer(content, "<i4", count, _HEADER.size).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", count, _HEADER.size + 4 * count)
    ends = np.cumsum(lengths) * dtype.itemsize
    if not np.array_equal(pointers[1:], ends[:-1]) or (count and (pointers[0] or ends[-1] != path.stat().st_size)):
        raise InputError(f"{index} does not describe {path}: its sequences do not follow each other to its end",
                         hint="take both files of one run of preprocess_data.py")  # fmt: skip
    return _mapped(path, 0, dtype)
