"""Files of tokens are read as those who write them mean it, and refused where they are not whole."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from planner.errors import InputError
from planner.executor.data import TokenData
from planner.executor.token_file import TokenDtype, map_tokens

TOKENS = np.array([0, 1, 255, 256, 65535, 7, 8], dtype=np.uint16)


def megatron(folder: Path, lengths: list[int], code: int = 8, skip: int = 0) -> Path:
    """Tokens with an index, laid out as Megatron-Core's ``_IndexWriter`` does."""
    path = folder / "tokens.bin"
    TOKENS.tofile(path)
    starts = np.cumsum([0, *lengths[:-1]]) * 2 + skip
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    content = header + np.array(lengths, "<i4").tobytes() + starts.astype("<i8").tobytes()
    path.with_suffix(".idx").write_bytes(content + np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    return path


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_raw_numbers(dtype: str, tmp_path: Path) -> None:
    TOKENS.astype(dtype).tofile(tmp_path / "tokens.bin")
    assert map_tokens(tmp_path / "tokens.bin", TokenDtype(dtype)).long().tolist() == TOKENS.tolist()


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
def test_numpy_s_own(dtype: str, tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", TOKENS.astype(dtype))
    assert map_tokens(tmp_path / "tokens.npy", TokenDtype.BYTES).long().tolist() == TOKENS.tolist()


def test_megatron_s_index_says_the_dtype(tmp_path: Path) -> None:
    assert map_tokens(megatron(tmp_path, [3, 4]), TokenDtype.BYTES).long().tolist() == TOKENS.tolist()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    np.save(tmp_path / "table.npy", np.zeros((2, 2), np.uint16))
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    cases = {"odd.bin": "no multiple of 2", "table.npy": "not a row", "objects.npy": "Python objects", "none": "none"}
    for name, words in cases.items():
        with pytest.raises(InputError, match=words):
            map_tokens(tmp_path / name, TokenDtype.UINT16)


@pytest.mark.parametrize(
    ("lengths", "code", "skip", "words"),
    [([3, 3], 8, 0, "to its end"), ([3, 4], 8, 2, "to its end"), ([3, 4], 7, 0, "dtype 7"), ([3, 4], 4, 0, "to its")],
)
def test_an_index_that_contradicts_its_file_is_refused(
    lengths: list[int], code: int, skip: int, words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        map_tokens(megatron(tmp_path, lengths, code, skip), TokenDtype.BYTES)


def test_half_an_index_is_refused(tmp_path: Path) -> None:
    index = megatron(tmp_path, [3, 4]).with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:40])
    with pytest.raises(InputError, match="ends before"):
        map_tokens(tmp_path / "tokens.bin", TokenDtype.BYTES)


def test_a_token_beyond_the_vocabulary_is_named() -> None:
    data = TokenData(torch.tensor([1, 2, 3, 300, 4]), 2, seed=0, vocab_size=256)
    with pytest.raises(InputError, match="token 300.*0 to 255"):
        data.global_batch(0, 2)


def test_samples_go_on_where_another_batch_size_left_off() -> None:
    """12 sequences in 3 steps of 4; then steps of 2 begin with the 13th."""
    whole = TokenData(torch.arange(101), 2, seed=0)
    other = TokenData(torch.arange(101), 2, seed=0, origin=12 - 3 * 2)
    tokens, _ = other.global_batch(3, 2)
    expected, _ = whole.global_batch(6, 2)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize(
    ("start", "kind"),
    [(b"PAR1", "Parquet"), (b"\x1f\x8b", "gzip"), (b"PK\x03\x04", "zip"), (b"MMIDIDX\0\0", "beside the .bin")],
)
def test_files_of_other_kinds_are_no_bytes_to_learn(start: bytes, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(start + bytes(1000))
    with pytest.raises(InputError, match=kind):
        map_tokens(path, TokenDtype.BYTES)


def test_tokens_without_a_header_are_no_text(tmp_path: Path) -> None:
    """The halves of tokens of 16 bits were trained on as bytes, without a word."""
    path = tmp_path / "tokens.bin"
    TOKENS.tofile(path)
    with pytest.raises(InputError, match="no text.*how many bytes") as error:
        map_tokens(path)
    assert "--data-dtype uint16" in (error.value.hint or "")
    assert map_tokens(path, TokenDtype.BYTES).tolist() == list(TOKENS.tobytes())
    path.write_bytes("Größe, 大きさ\n".encode())
    assert map_tokens(path).dtype is torch.uint8


@pytest.mark.parametrize("content", [b'{"text": "Once"}\n{"text": "upon"}\n', b'[\n  {"text": "Once"}\n]\n'])
def test_json_is_no_text_unless_it_is_asked_for(content: bytes, tmp_path: Path) -> None:
    """Of lines with a text each, the keys and quotes were learned as well, without a word."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is JSON") as error:
        map_tokens(path)
    assert "--data-dtype uint8" in (error.value.hint or "")
    assert map_tokens(path, TokenDtype.BYTES).tolist() == list(content)


@pytest.mark.parametrize("path", [Path(), Path("/")])
def test_a_folder_is_no_file_of_tokens(path: Path) -> None:
    """It was called a defect of ours: neither has a name to which an ending could be added."""
    with pytest.raises(InputError, match="is a folder"):
        map_tokens(path)


def test_megatron_s_prefix_is_told_by_its_file(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        map_tokens(megatron(tmp_path, [3, 4]).with_suffix(""))
    assert (error.value.hint or "").endswith("tokens.bin")


@pytest.mark.parametrize(("wide", "dtype", "words"), [("uint32", "uint16", "32 bits"), ("int64", "uint32", "64 bits")])
def test_numbers_that_are_wider_than_said_are_refused(wide: str, dtype: str, words: str, tmp_path: Path) -> None:
    """Half of all tokens were read as 0, and trained on."""
    tokens = np.arange(1000) % 300
    tokens.astype(wide).tofile(tmp_path / "tokens.bin")
    with pytest.raises(InputError, match=f"holds numbers of {words}: as {dtype} every second token is 0"):
        map_tokens(tmp_path / "tokens.bin", TokenDtype(dtype))
    for each in (tokens, np.zeros(1000), np.tile([0, 7], 500)):  # what such tokens may be by themselves
        each.astype(dtype).tofile(tmp_path / "tokens.bin")
        assert map_tokens(tmp_path / "tokens.bin", TokenDtype(dtype)).long().tolist() == each.tolist()
