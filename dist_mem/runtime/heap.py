"""Keep freed memory in the process, so that the next step need not get it from the system again. Imports no torch.

glibc returns large blocks to the system when they are freed, and takes them back page by page, cleared, in the next
step. On CPUs that costs up to a tenth of a training step. GPUs have an allocator of their own.
"""

from __future__ import annotations

import ctypes
import os

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_OPTIONS = {
    # Larger blocks have a mapping of their own, which free() returns. This is glibc's largest threshold. Without any
    # mapping, a small block that stays in the place of a large one makes the next large one take new memory.
    _M_MMAP_THRESHOLD: 32 * 2**20,  # bytes
    _M_TRIM_THRESHOLD: 2**31 - 1,  # the largest value: the top of the heap is not returned below 2 GiB
    _M_TOP_PAD: 64 * 2**20,  # bytes; the heap grows in steps of this size
}


def keep_heap() -> bool:
    """Configure the allocator of this process to keep what is freed; return whether it is glibc's, and so was.

    The process stays as large as it has been once: memory that a start needs only once is reused, not returned.
    """
    version = "CS_GNU_LIBC_VERSION"
    if version not in os.confstr_names or not os.confstr(version):
        return False  # macOS or musl
    set_option = ctypes.CDLL(None).mallopt
    return all(set_option(option, value) == 1 for option, value in _OPTIONS.items())
