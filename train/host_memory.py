"""How the C library hands memory to the CPU backend.

XLA asks for a program's temporary memory anew in each call. glibc gives large blocks back to the system when they are
freed, so that each training step on a CPU pays for hundreds of thousands of page faults: about a fifth of its time.
"""

import ctypes
import sys

# Parameters of mallopt(3), as glibc numbers them.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> bool:
    """Let this process keep what it has freed, for its next allocation: its resident memory stays at the peak.

    To be called before large arrays are made; it concerns the whole process.

    Returns:
      Whether it was done: elsewhere than on Linux with glibc nothing is changed, and nothing needs to be.
    """
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 1 << 28))
    done = [bool(library.mallopt(name, value)) for name, value in settings]  # every one of them is tried
    return all(done)
