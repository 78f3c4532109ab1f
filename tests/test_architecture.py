"""The shape of the code base: imports point down, no circles, no bare names, files stay short."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from penjing.core import cli

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "kernels": {"kernels"},
    "core": {"kernels", "core"},
    "train": {"kernels", "core", "train"},
    "compress": {"kernels", "core", "train", "compress"},
    "serve": {"kernels", "core", "serve", "model_repository"},  # the last holds the files that Triton server reads
    "model_repository": {"core", "serve"},
}
COMMAND_LINE = "penjing.core.cli"
REACHES_UP = {"ask_server", "write_repository"}
"""Functions of the command line for what needs two stages; nothing else of core imports a stage."""
LIGHT = ("penjing.core.cli_options", "penjing.core.recipe_cli", "penjing.core.errors")
STAGE_COMMANDS = ("penjing.train.cli", "penjing.compress.cli", "penjing.serve.cli")
MAX_LINES = 400
MAX_ADAPTER_LINES = 60
DOOR = "api"  # `import penjing`: its files are modules beside the stages, and may import all of them
SCRIPTS = ("benchmarks", "docs", "tests")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("penjing", *parts)).removesuffix(".__init__")


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """(imported module or name, whether the import stands at the top level) of each import in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
        for node in ast.walk(block)
    }
    found = []
    for node in ast.walk(tree):
        top_level = id(node) not in lazy and id(node) not in typing_only
        if isinstance(node, ast.Import):
            found += [(alias.name, top_level) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            found += [(f"{node.module}.{alias.name}", top_level) for alias in node.names]
    return found


MODULES = {module_name(path): path for path in sources(*MAY_IMPORT)}


def own_modules(path: Path, top_level_only: bool = False) -> set[str]:
    """Modules of penjing that a file imports."""
    found = set()
    for name, top_level in imports(path):
        if name.startswith("penjing.") and (top_level or not top_level_only):
            found.add(name if name in MODULES else name.rpartition(".")[0])
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    path = MODULES[module]
    stage = module.split(".")[1]
    for imported in own_modules(path):
        assert imported in MODULES, f"{path}: {imported} does not exist, or is the door, which nothing else imports"
        if module != COMMAND_LINE:
            assert imported.split(".")[1] in MAY_IMPORT[stage], f"{path} imports {imported}: imports point down"


def test_the_door_opens_on_modules_that_exist() -> None:
    beside = {f"penjing.{path.stem}" for path in sources(DOOR)} - {"penjing.__init__"}
    for path in sources(DOOR):
        assert own_modules(path) <= {*MODULES, *beside}, f"{path}: {own_modules(path) - {*MODULES, *beside}} moved"


def test_command_lines_import_what_does_the_work_lazily() -> None:
    for module in (COMMAND_LINE, *STAGE_COMMANDS):
        for imported in own_modules(MODULES[module], top_level_only=True):
            assert imported in LIGHT, f"{module} imports {imported}"


def test_the_command_line_reaches_up_in_named_functions_alone() -> None:
    tree = ast.parse(MODULES[COMMAND_LINE].read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found = {
        name
        for name, function in functions.items()
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[:2] not in (["penjing", "core"],)
        if (node.module or "").startswith("penjing.")
    }
    assert found == REACHES_UP
    assert set(cli.STAGES.values()) == set(STAGE_COMMANDS)


def test_modules_import_in_no_circle() -> None:
    graph = {module: own_modules(path) - {module} for module, path in MODULES.items()}
    finished: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, "circle: " + " → ".join((*trail[trail.index(module) :], module))
        if module in finished:
            return
        for imported in graph.get(module, ()):
            visit(imported, (*trail, module))
        finished.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("path", sources(*MAY_IMPORT, DOOR, *SCRIPTS), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_bare_imports(path: Path) -> None:
    for name, _ in imports(path):
        first = name.split(".")[0]
        assert first not in (*MAY_IMPORT, DOOR), f"{path} imports {name}: write penjing.{name}"
        assert first not in ("pickle", "cloudpickle", "dill"), f"{path} imports {first}: no pickle is read"


@pytest.mark.parametrize("path", sources(*MAY_IMPORT, DOOR), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short(path: Path) -> None:
    limit = MAX_ADAPTER_LINES if path.match("model_repository/*/1/model.py") else MAX_LINES
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


def test_models_know_one_device_and_no_quantization() -> None:
    for path in sources("core/models"):
        for name, _ in imports(path):
            assert not re.search(r"torch\.distributed|int8|quant", name), f"{path} imports {name}"


def test_scheduling_is_free_of_torch() -> None:
    for name in ("request", "sequence", "blocks", "scheduler"):
        path = ROOT / "serve" / "engine" / f"{name}.py"
        assert path.exists()
        assert not any(imported.split(".")[0] == "torch" for imported, _ in imports(path)), f"{path} imports torch"


def test_no_folder_shadows_the_package() -> None:
    assert not (ROOT / "penjing").exists()
