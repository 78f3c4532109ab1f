"""torch's exporter to ONNX in tests: the conftest of all has the fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.onnx._internal.exporter._registration import ONNXRegistry


@pytest.fixture(scope="session", autouse=True)
def one_table_of_translators() -> Iterator[None]:
    """torch's exporter builds its table of hundreds of translators anew for each network, which takes longer than many
    of these networks. Here it is built once, and each export gets a copy."""
    build, built = ONNXRegistry.from_torchlib, dict[int, ONNXRegistry]()

    def copied(opset_version: int) -> ONNXRegistry:
        if opset_version not in built:
            built[opset_version] = build(opset_version)
        registry = ONNXRegistry()
        registry._opset_version = opset_version
        registry.functions = {name: list(found) for name, found in built[opset_version].functions.items()}
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(copied))
        yield
