"""Training data: tokens of a file or of real text, addressed by step, data-parallel rank and position.

Which samples a step sees depends on the seed and the step alone, never on the mesh: each global
batch is split over the data-parallel ranks as ``torch.utils.data.DistributedSampler`` splits one,
rank ``r`` of ``d`` taking the positions r, r + d, r + 2d, ... of it; where ranks have unlike shares
of it, as ``RankPlace.sequences`` says.
"""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from planner.errors import InputError, PlanError
from planner.executor.mesh import RankPlace
from planner.executor.order import key_of, shuffled
from planner.executor.token_file import TokenDtype, map_tokens
from planner.plan.schema import BatchShare, Plan

NUM_BYTE_TOKENS = 256
NUM_PICKED = 256  # tokens that data are told apart by: each rank reads as many pages of a mapped file
MAX_STANDARD_LIBRARY_BYTES = 2**23  # 8 MiB: more text than the test runs read, in well under a second


@dataclass(frozen=True)
class TokenData:
    """A text as tokens, cut into samples of ``seq_len`` inputs with their next tokens as labels."""

    tokens: torch.Tensor  # of any whole-number dtype (num_tokens,); a file's are mapped, not read
    seq_len: int
    seed: int
    vocab_size: int | None = None  # None: not known, so nothing is checked
    origin: int = 0  # position at which step 0 would begin: not 0 where a run went on with another batch size

    @property
    def num_samples(self) -> int:
        """Samples in one epoch; the last token of each is only a label."""
        return max(0, len(self.tokens) - 1) // self.seq_len

    @property
    def picked(self) -> torch.Tensor:
        """Some hundred tokens spread over all."""
        return self.tokens[:: max(1, len(self.tokens) // NUM_PICKED)]

    @functools.cached_property
    def text(self) -> str:
        """The same for the same data wherever they lie: length, dtype and a digest of tokens spread over them."""
        digest = hashlib.sha256(self.picked.numpy().tobytes()).hexdigest()
        return f"{len(self.tokens):,} tokens of {str(self.tokens.dtype).removeprefix('torch.')} ({digest[:12]})"

    def global_batch(self, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``input_ids`` and ``labels``, int64 (size, seq_len), of the whole batch of ``step``."""
        start = self.origin + step * size
        return self._batch(range(start, start + size))

    def local_batch(
        self, step: int, size: int, place: RankPlace, shares: Sequence[BatchShare] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the batch of ``step``: (its sequences, seq_len); size / dp_degree where all are alike."""
        start = self.origin + step * size
        return self._batch([start + sequence for sequence in place.sequences(size, shares)])

    def sample(self, position: int) -> int:
        """The sample at ``position`` of the run. Each epoch visits every sample once, in an order of its own."""
        epoch, offset = divmod(position, self.num_samples)
        return shuffled(offset, self.num_samples, key_of(self.seed, epoch))

    def _batch(self, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        starts = [self.sample(position) * self.seq_len for position in positions]
        whole = torch.stack([self.tokens[start : start + self.seq_len + 1].long() for start in starts])
        if self.vocab_size is not None and not 0 <= int(whole.min()) <= int(whole.max()) < self.vocab_size:
            raise InputError(
                f"the data hold the token {int(whole.max() if whole.max() >= self.vocab_size else whole.min())}, "
                f"the model's vocabulary is 0 to {self.vocab_size - 1}",
                hint="were they written for another tokenizer, or with another --data-dtype?",
            )
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()  # losses take views of labels


def load_tokens(path: Path | None, dtype: TokenDtype | None = None) -> torch.Tensor:
    """The tokens of ``path``, or the bytes of the running Python's standard library."""
    if path is None:
        return torch.frombuffer(bytearray(_standard_library()), dtype=torch.uint8)
    return map_tokens(path, dtype)


def open_data(
    plan: Plan, path: Path | None, vocab_size: int | None, seed: int, dtype: TokenDtype | None = None
) -> TokenData:
    """The samples that ``plan`` trains on; an error where the text or the vocabulary is too small."""
    data = TokenData(load_tokens(path, dtype), plan.training.seq_len, seed, vocab_size)
    if data.num_samples < plan.training.global_batch_size:
        raise InputError(
            f"{path or 'the standard library'} holds {data.num_samples} samples of {data.seq_len} tokens, "
            f"fewer than one global batch of {plan.training.global_batch_size}",
            hint="pass a larger file, or plan with a shorter sequence or a smaller batch",
        )
    if vocab_size is not None and data.tokens.dtype == torch.uint8 and _are_bytes(data, path, vocab_size):
        raise PlanError(
            f"the data are byte-level tokens (0 to 255), but the model's vocabulary has {vocab_size} entries",
            hint=f"train a model with a vocabulary of at least {NUM_BYTE_TOKENS}, or name a file of tokens; a model "
            "that takes more tokens than its embedding has rows says how many in its attribute vocab_size",
        )
    return data


def _are_bytes(data: TokenData, path: Path | None, vocab_size: int) -> bool:
    """Whether ``data`` of one byte each are text, and no tokens of so small a vocabulary."""
    return vocab_size < NUM_BYTE_TOKENS and (path is None or int(data.picked.max()) >= vocab_size)


def _standard_library() -> bytes:
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    total = 0
    for file in sorted(folder.glob("*.py")):
        parts.append(file.read_bytes())
        total += len(parts[-1])
        if total >= MAX_STANDARD_LIBRARY_BYTES:
            break
    return b"\n".join(parts)
