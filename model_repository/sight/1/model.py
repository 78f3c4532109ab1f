"""The entry point of Triton server's Python backend: what a decoder sees with, as a model of its own."""

import os
import sys

# The server's Python takes no PYTHONPATH; penjing, or a package with a family of its own, may lie there. What the
# working directory holds, numpy for an older server, still comes first.
sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]

from penjing.serve.triton.pulse import EYES_SLOT, announce  # noqa: E402

announce(EYES_SLOT)  # before the imports, which take seconds

import triton_python_backend_utils as pb_utils  # noqa: E402  # pyright: ignore[reportMissingImports] (the server's)

from penjing.core.errors import PenjingError  # noqa: E402
from penjing.serve.families.sight import PART  # noqa: E402
from penjing.serve.triton.batch_adapter import BatchAdapter  # noqa: E402


class TritonPythonModel:
    """One instance of the model `sight`."""

    def initialize(self, args: dict[str, str]) -> None:
        try:
            self.adapter = BatchAdapter(args, pb_utils, PART, EYES_SLOT)
        except PenjingError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: list) -> None:
        self.adapter.execute(requests)

    def finalize(self) -> None:
        self.adapter.finalize()
