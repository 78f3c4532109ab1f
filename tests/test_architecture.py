"""The shape of the code base: imports point down, no circles, no bare names, files stay short."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import BaseModel

from penjing.core import cli

pytestmark = pytest.mark.xdist_group("architecture")  # whose files are parsed once

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "kernels": {"kernels"},
    "core": {"kernels", "core"},
    "train": {"kernels", "core", "train"},
    "compress": {"kernels", "core", "train", "compress"},
    "curate": {"kernels", "core", "curate"},
    "serve": {"kernels", "core", "serve", "model_repository"},  # the last holds the files that Triton server reads
    "model_repository": {"core", "serve"},
}
BESIDE = {
    "train/align": (
        "penjing.serve.engine.",
        "penjing.serve.runner.",
        "penjing.serve.sampling.",
        "penjing.serve.client.",
    )
}
"""Folders that may import from a stage beside theirs: learning from a model's own answers needs the engine, or a client
of servers that have it."""
COMMAND_LINE = "penjing.core.cli"
REACHES_UP = {"ask_server", "write_repository"}
"""Functions of the command line for what needs two stages; nothing else of core imports a stage."""
MORE_COMMANDS = ("penjing.core.imports.commands", "penjing.core.recipe_cli", "penjing.serve.cli_running")
LIGHT = ("penjing.core.cli_options", "penjing.core.errors", "penjing.serve.options", *MORE_COMMANDS)
STAGE_COMMANDS = ("penjing.curate.cli", "penjing.train.cli", "penjing.compress.cli", "penjing.serve.cli")
MAX_LINES = 400
WRITTEN = (".py", ".cpp", ".h", ".cu", ".toml", ".sh", ".html", ".yaml", ".yml", ".pbtxt")
"""Endings of what has that limit: what people write and read, documents aside."""
MAX_ADAPTER_LINES = 60
DOOR = "api"  # `import penjing`: its files are modules beside the stages, and may import all of them
SCRIPTS = ("benchmarks", "docs", "tests")
OTHERS = ("docker", "recipes")
# A door shows a stage to its users: it may import all of it, and its commands are called as what does them.
DOORS = (
    "core/cli.py",
    "core/imports/commands.py",
    "core/info.py",
    "core/recipe_cli.py",
    "train/cli.py",
    "compress/cli.py",
    "serve/cli.py",
    "serve/cli_running.py",
    "curate/cli.py",
)
MAX_MODULES = 16
MANY_MODULES = ("kernels", "kernels/gpu")  # their idea is one operation a file
ASKS_THE_FAMILY = re.compile(r"\bis_classifier\b|\bis_encoder\b|\bis_\w+_artifact\b|[\"']task[\"'] (not )?in\b")
FAMILY_FILE = "core/family.py"
PAGES = {
    "core/pages/page.py": "the frame of every page",
    "compress/report/run_page.py": "the page of a run",
    "compress/report/study_page.py": "the page of a sensitivity study",
    "compress/report/compare.py": "the page that compares runs",
    "compress/report/search_page.py": "the page of a joint search",
    "curate/report.py": "the page of a corpus",
    "train/align/page.py": "the page of a run that learns from rewards",
    "train/search/page.py": "the page of a search for settings",
    "serve/bench/load_page.py": "the page of a load",
}
MARKUP = re.compile(r"<(html|head|body|table|h[1-6])\b")
FORMATS = {
    "penjing.json": "penjing.core.manifest.Manifest",
    "config.json of a graph": "penjing.core.graph.config.GraphConfig",
    "quantization.json": "penjing.core.artifact.onnx.Quantization",
    "parity.json": "penjing.core.artifact.parity.Parity",
    "report.json": "penjing.compress.report.schema.Report",
    "export.json": "penjing.compress.export.record.ExportRecord",
    "index.json": "penjing.train.data.shards.ShardIndex",
    "report.json of a corpus": "penjing.curate.report.CorpusReport",
    "search.json": "penjing.train.search.state.SearchState",
    "a placement on Ray": "penjing.train.launch.ray_nodes.RayRun",
    "keys.toml": "penjing.serve.access.keys.KeyFile",
}
"""The class that writes and reads each kind of file that has a version."""
ENTRIES = {
    ("compress", "check"): "an entry of each family's table",
    ("compress", "quantize"): "an entry of each family's table",
    ("compress", "measure"): "parity of each family, and of its exports",
    ("serve", "parity"): "an entry of each family's table",
    ("serve", "signature"): "an entry of each family's table",
    ("serve", "workload"): "an entry of each family's table",
}
"""Public names of several modules of a stage, and why they mean one thing."""
MAX_README_LINES = 90


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("penjing", *parts)).removesuffix(".__init__")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """(imported module or name, whether the import stands at the top level) of each import in a file."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, top_level: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, top_level) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            found.extend((f"{node.module}.{alias.name}", top_level) for alias in node.names)
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):  # no expression imports
                visit(child, top_level and not lazy and not typing_only)

    visit(parsed(path), True)
    return found


MODULES = {module_name(path): path for path in sources(*MAY_IMPORT)}


def own_modules(path: Path, top_level_only: bool = False) -> set[str]:
    """Modules of penjing that a file imports."""
    found = set()
    for name, top_level in imports(path):
        if name.startswith("penjing.") and (top_level or not top_level_only):
            found.add(name if name in MODULES else name.rpartition(".")[0])
    return found


def test_imports_point_down() -> None:
    faults: list[str] = []
    for module, path in MODULES.items():
        stage = module.split(".")[1]
        beside = BESIDE.get(relative(path.parent), ())
        for imported in own_modules(path):
            if imported not in MODULES:
                faults.append(f"{path}: {imported} does not exist, or is the door, which nothing else imports")
            elif (
                module != COMMAND_LINE
                and not imported.startswith(beside)
                and imported.split(".")[1] not in MAY_IMPORT[stage]
            ):
                faults.append(f"{path} imports {imported}: imports point down")
    assert not faults, "\n".join(faults)


def test_the_door_opens_on_modules_that_exist() -> None:
    beside = {f"penjing.{path.stem}" for path in sources(DOOR)} - {"penjing.__init__"}
    for path in sources(DOOR):
        assert own_modules(path) <= {*MODULES, *beside}, f"{path}: {own_modules(path) - {*MODULES, *beside}} moved"


def test_command_lines_import_what_does_the_work_lazily() -> None:
    for module in (COMMAND_LINE, *STAGE_COMMANDS, *MORE_COMMANDS[1:]):
        for imported in own_modules(MODULES[module], top_level_only=True):
            assert imported in LIGHT, f"{module} imports {imported}"


def test_the_command_line_reaches_up_in_named_functions_alone() -> None:
    tree = parsed(MODULES[COMMAND_LINE])
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


def test_no_bare_imports() -> None:
    faults: list[str] = []
    for path in sources(*MAY_IMPORT, DOOR, *SCRIPTS):
        for name, _ in imports(path):
            first = name.split(".")[0]
            if first in (*MAY_IMPORT, DOOR):
                faults.append(f"{path} imports {name}: write penjing.{name}")
            if first in ("pickle", "cloudpickle", "dill"):
                faults.append(f"{path} imports {first}: no pickle is read")
    assert not faults, "\n".join(faults)


def test_files_are_short() -> None:
    def limit(path: Path) -> int:
        return MAX_ADAPTER_LINES if path.match("model_repository/*/1/model.py") else MAX_LINES

    files = [path for folder in (*MAY_IMPORT, DOOR, *SCRIPTS, *OTHERS) for path in (ROOT / folder).rglob("*")]
    files = [path for path in (*files, *ROOT.glob("*")) if path.suffix in WRITTEN and path.is_file()]
    assert {".cpp", ".h", ".toml", ".sh", ".html"} <= {path.suffix for path in files}
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert not {name: length for name, length in lengths.items() if length > limit(ROOT / name)}


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


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def models() -> list[type[BaseModel]]:
    """Every pydantic class of the product."""
    found: dict[str, type[BaseModel]] = {}
    for module, path in MODULES.items():
        if path.name == "__main__.py" or path.match("model_repository/*/1/model.py"):
            continue
        tree = parsed(path)
        if not any(isinstance(node, ast.ClassDef) for node in tree.body) or relative(path).startswith("kernels/gpu"):
            continue
        for each in vars(import_module(module)).values():
            if isinstance(each, type) and issubclass(each, BaseModel) and each.__module__ == module:
                found[f"{module}.{each.__qualname__}"] = each
    return list(found.values())


def test_folders_of_a_stage_import_in_no_circle() -> None:
    graph: dict[str, dict[str, str]] = {}
    for path in MODULES.values():
        folder = relative(path.parent)
        if relative(path) in DOORS or path.name == "__main__.py":
            continue
        for imported in own_modules(path) & set(MODULES):
            other = relative(MODULES[imported].parent)
            if other != folder and other.split("/")[0] == folder.split("/")[0]:
                graph.setdefault(folder, {})[other] = f"{relative(path)} imports {imported}"
    finished: set[str] = set()

    def visit(folder: str, trail: tuple[str, ...]) -> None:
        if folder in trail:
            circle = (*trail[trail.index(folder) :], folder)
            raise AssertionError("circle of folders: " + "; ".join(graph[a][b] for a, b in pairwise(circle)))
        if folder in finished:
            return
        for other in graph.get(folder, {}):
            visit(other, (*trail, folder))
        finished.add(folder)

    for folder in graph:
        visit(folder, ())


def test_folders_are_small() -> None:
    counts = Counter(relative(path.parent) for path in sources(*MAY_IMPORT, DOOR) if path.name != "__init__.py")
    for folder, count in counts.items():
        assert count <= MAX_MODULES or folder in MANY_MODULES, (
            f"{folder} holds {count} modules, more than {MAX_MODULES}: move what belongs together into a folder"
        )


def test_the_family_of_a_folder_is_asked_in_one_place() -> None:
    faults = [
        f"{relative(path)}:{number} says {found[0]!r}"
        for path in sources(*MAY_IMPORT, DOOR)
        if relative(path) != FAMILY_FILE
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (found := ASKS_THE_FAMILY.search(line))
    ]
    rule = f"ask family_of in {FAMILY_FILE}, and put what differs into the families' tables"
    assert not faults, "\n".join([*faults, rule])


def test_a_kind_of_page_has_one_template() -> None:
    written = {relative(path) for path in sources(*MAY_IMPORT, DOOR) if MARKUP.search(path.read_text(encoding="utf-8"))}
    assert written == set(PAGES), "HTML stands in the modules of PAGES alone; a new kind of page is a line there"


def test_a_file_format_has_one_class() -> None:
    found = {f"{each.__module__}.{each.__qualname__}" for each in models() if "schema_version" in each.model_fields}
    assert found == set(FORMATS.values()), "classes with a schema_version; a new format is a line of FORMATS"


def test_every_field_of_a_configuration_says_what_it_means() -> None:
    silent = [
        f"{each.__module__}.{each.__qualname__}.{name}"
        for each in models()
        for name, field in each.model_fields.items()
        if not field.description
    ]
    assert not silent, f"give these a Field(description=...): {', '.join(silent)}"


@pytest.mark.parametrize("stage", ["core", "train", "compress", "serve", "curate"])
def test_a_public_name_has_one_meaning_in_a_stage(stage: str) -> None:
    """Not in kernels, where an operation has one name in torch and in the Triton language."""
    places: dict[str, list[str]] = {}
    for path in sources(stage):
        if relative(path) in DOORS:
            continue
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
                "_"
            ):
                places.setdefault(node.name, []).append(relative(path))
    several = {name: sorted(set(paths)) for name, paths in places.items() if len(set(paths)) > 1}
    for name, paths in several.items():
        assert (stage, name) in ENTRIES, f"{name} is defined in {' and '.join(paths)}: give each meaning its own name"
    assert {name for of, name in ENTRIES if of == stage} <= set(several), "ENTRIES holds names that are defined once"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_no_large_file_is_kept() -> None:
    """Weights and data sets stay out; the limit is twice the largest table of rows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no checkout of git")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert {str(path): size for path in files if path.is_file() and (size := path.stat().st_size) > 500_000} == {}
