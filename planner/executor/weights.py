"""Initial weights from safetensors: by FQN, or by Hugging Face's names where ``transformers`` made the model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner.errors import InputError
from planner.models.huggingface import from_pretrained

MAX_HEADER_BYTES = 10**8  # as the format's own reader allows
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
           "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
           "BOOL": torch.bool}  # fmt: skip


def load_weights(module: nn.Module, path: Path) -> None:
    """Fills ``module`` as ``matched_weights`` has it."""
    own = module.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, value in matched_weights(module, path).items():
            own[name].copy_(value)


def matched_weights(module: nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """What ``path`` has for every name of ``module``'s state, which needs no values. InputError if anything is missing.

    ``path`` is a .safetensors file or a folder of them, whose tensors are mapped and not read. A model of
    ``transformers`` in a folder with its config.json is read by ``transformers``, which knows how its names and layouts
    changed, and reads the whole.
    """
    if path.is_dir() and (path / "config.json").is_file() and hasattr(module, "config"):
        stored = from_pretrained(module, path)
    else:
        stored = read_safetensors(path)
    own = module.state_dict(keep_vars=True)
    source = {id(own[name]): name for name in stored if name in own}  # tied ones stand in a file once
    missing = sorted(name for name, value in own.items() if id(value) not in source)
    foreign = sorted(set(stored) - set(own))
    if missing or foreign:
        texts = [f"{len(names)} {what}, the first {names[0]}" for what, names in
                 (("tensors of the model are not in it", missing), ("of its tensors are not in the model", foreign))
                 if names]  # fmt: skip
        raise InputError(f"{path} does not fit the model: {'; '.join(texts)}", hint="name the weights of this model")
    for name, value in stored.items():
        if value.shape != own[name].shape:
            raise InputError(f"{path}: {name} has the shape {list(value.shape)}, the model's {list(own[name].shape)}",
                             hint="name the weights of this model")  # fmt: skip
        if own[name].is_floating_point() and not value.is_floating_point():
            raise InputError(f"{path}: {name} is stored as {str(value.dtype).removeprefix('torch.')}, as quantised "
                             "weights are, and without their scales it is another number",
                             hint="store it as F32 or BF16, unquantised")  # fmt: skip
    return {name: stored[source[id(value)]] for name, value in own.items()}


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of ``path``, mapped: a header of JSON, then raw bytes. Nothing in the file is executed."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path} holds no .safetensors file", hint="name a folder of weights, or one file")
    found: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            found |= _read_file(file)
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror}", hint="check the path of the weights") from error
        except (ValueError, KeyError, TypeError, RuntimeError, struct.error) as error:
            raise InputError(f"{file} is not a whole safetensors file: {error}", hint="download it again") from error
    return found


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"its header of {length} bytes is larger than the file")
        header: dict[str, Any] = json.loads(file.read(length))
    content = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[8 + length :]
    found: dict[str, torch.Tensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise InputError(f"{path}: {name} is {entry['dtype']}, which is not read",
                             hint=f"store it as one of {', '.join(_DTYPES)}")  # fmt: skip
        dtype, (start, end) = _DTYPES[entry["dtype"]], entry["data_offsets"]
        piece = content[start:end]
        if start < 0 or len(piece) != end - start:
            raise ValueError(f"{name} lies outside it")
        if (8 + length + start) % dtype.itemsize:
            piece = piece.clone()
        found[name] = piece.view(dtype).view(entry["shape"])
    return found
