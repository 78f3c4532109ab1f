"""Options of sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from penjing.core.runtime import onnx_runtime
from penjing.core.runtime.onnx_runtime import EXACT_PRODUCTS, INPUT, OUTPUT, open_session


@pytest.mark.parametrize("vnni", [False, True])
def test_the_slower_exact_products_are_taken_only_without_vnni(
    vnni: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx = pytest.importorskip("onnx")
    image, logits = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in (INPUT, OUTPUT))
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", [INPUT], [OUTPUT])], "graph", [image], [logits])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    monkeypatch.setattr(onnx_runtime, "has_vnni", lambda: vnni)
    other = "session.intra_op.allow_spinning"
    options = open_session(tmp_path / "model.onnx", {EXACT_PRODUCTS: "1", other: "0"}).get_session_options()
    assert options.get_session_config_entry(other) == "0"
    if vnni:
        with pytest.raises(RuntimeError):
            options.get_session_config_entry(EXACT_PRODUCTS)
    else:
        assert options.get_session_config_entry(EXACT_PRODUCTS) == "1"


def test_vnni_is_read_from_the_processors_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, expected in (("fma avx2", False), ("avx2 avx512_vnni", True), ("avx_vnni avx2", True)):
        onnx_runtime.has_vnni.cache_clear()
        monkeypatch.setattr(Path, "read_text", lambda *_, flags=flags, **__: f"flags\t\t: {flags}\nbugs\t\t:\n")
        assert onnx_runtime.has_vnni() is expected
    onnx_runtime.has_vnni.cache_clear()
