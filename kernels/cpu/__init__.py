"""The C++ kernels for CPUs: INT8 and float linear layers, paged attention, a whole decoder step.

`extension()` gives them as typed functions on torch tensors, or None where they were not built. The library is plain
C behind ctypes (no torch or Python headers, so one build serves every torch), and calls run without the GIL.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penjing.kernels.cpu.functions import CpuExtension


@cache
def extension() -> CpuExtension | None:
    """The extension, loaded at the first call; None, said once in the log, where it is missing or of another version.

    Raises:
        ValueError: PENJING_CPU_ISA or PENJING_CPU_THREADS holds a value that does not fit this processor.
    """
    from penjing.kernels.cpu.functions import CpuExtension
    from penjing.kernels.cpu.library import MissingLibrary, load_library

    try:
        library = load_library()
    except MissingLibrary as missing:
        logging.getLogger("penjing").warning("%s; CPU kernels run on torch, several times slower", missing)
        return None
    return CpuExtension(library)
