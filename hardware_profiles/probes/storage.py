"""Times large sequential writes to and reads from the disk under a folder, past the operating system's cache."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from hardware_profiles.probes.measurement import StorageMeasurement

CHUNK_BYTES = 16 * 2**20
LARGEST_SHARE_OF_FREE = 0.1


def measure_storage(folder: Path, *, num_bytes: int = 2**28, num_samples: int = 3) -> StorageMeasurement | None:
    """Writes a temporary file of ``num_bytes`` to ``folder`` and reads it back; None where the disk is too full.

    Data are forced to the disk before the clock stops (fsync), and dropped from the cache before they are read
    (posix_fadvise); a hypervisor may still cache below.
    """
    free = shutil.disk_usage(folder).free
    if num_bytes > LARGEST_SHARE_OF_FREE * free:
        return None
    writes: list[float] = []
    reads: list[float] = []
    content = os.urandom(CHUNK_BYTES)
    num_chunks = max(1, num_bytes // CHUNK_BYTES)
    for _ in range(num_samples):
        with tempfile.NamedTemporaryFile(dir=folder, prefix="planner-profile-", buffering=0) as file:
            start_s = time.perf_counter()
            for _ in range(num_chunks):
                file.write(content)
            os.fsync(file.fileno())
            writes.append(num_chunks * CHUNK_BYTES / (time.perf_counter() - start_s))
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            start_s = time.perf_counter()
            while file.read(CHUNK_BYTES):
                pass
            reads.append(num_chunks * CHUNK_BYTES / (time.perf_counter() - start_s))
    return StorageMeasurement(
        folder=str(folder),
        free_bytes=free,
        write_samples_bytes_per_s=tuple(writes),
        read_samples_bytes_per_s=tuple(reads),
    )
