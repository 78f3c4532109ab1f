"""Emoji as four vendors draw them, with their names: npm's packages emoji-datasource-apple, -google, -twitter and
-facebook.

1 911 drawings of 64 × 64 with Unicode's names (Apple draws 1 908, Facebook 1 860); skin tones are left out, as they
are near duplicates.
https://github.com/iamcal/emoji-data (MIT; the drawings have licences of their own: Noto's is Apache 2.0, Twemoji's
CC BY 4.0, Apple's and Facebook's may not be passed on).
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import tarfile
import urllib.request
from pathlib import Path

from penjing.core.cache import cache_dir
from penjing.core.errors import InputError, SetupError
from penjing.core.files import holding, publish_folder
from penjing.core.progress import Progress

VERSION = "16.0.0"
_REGISTRY = "https://registry.npmjs.org"
_TABLE = "pairs.jsonl"
# npm's "integrity" of each package: SHA-512 in base64.
VENDORS = {
    "apple": "dVYjsK0FnCry9F+PBtnivhG2K0xdwlmqYaSgiUtztUdAGPYiHYhZcVKvNBqC791g2qyEcFNTBO6utg4eQ3uLTw==",
    "google": "ZRexfzs7MVoLnmzZmNsO4TKhnAJp5D++Vm6PpUpH/jEQQlemp3l88CjZ+DoZ2faM9R4QxZkOPJCoT8DlPhfQ3A==",
    "twitter": "7F+uCuHH+7Qnrc15P5tnbvKkg9E6tlzi4MnT2uW1RlN4pLYTza6cP/dstIfSDMtpjFLWuZewWg8jBbuL2eyELQ==",
    "facebook": "b9ZxJdB7nMWGckH1vyCjPSosaa6MJYuojPPFiQ0LmDIZS8vlG454XKcmTFKrXIMAA72O4MRJMYFhvWI8pjyciQ==",
}
BUILTIN = "builtin:emoji-"


def emoji_pairs(vendor: str, progress: Progress) -> Path:
    """The table of a vendor's drawings and their names in the cache; fetched on the first call (70 MB).

    Raises:
        InputError: there is no such vendor, or what came is not what was pinned.
        SetupError: no network.
    """
    if vendor not in VENDORS:
        raise InputError(f"data.sources: there is no {BUILTIN}{vendor}; take {', '.join(BUILTIN + v for v in VENDORS)}")
    folder = cache_dir() / "emoji" / f"{vendor}-{VERSION}"
    with holding(folder.with_suffix(".lock")):
        if not folder.exists():
            progress.start(f"fetching emoji of {vendor}", 1)
            with publish_folder(folder) as partial:
                unpack(_download(f"emoji-datasource-{vendor}", partial), vendor, VENDORS[vendor], partial)
            progress.advance()
    return folder / _TABLE


def unpack(packed: Path, vendor: str, integrity: str, folder: Path) -> None:
    """Take drawings and names out of npm's package `packed`, which is removed.

    Raises:
        InputError: it is not the package of that SHA-512, or has not what is looked for.
    """
    with open(packed, "rb") as file:
        actual = base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
    if actual != integrity:
        raise InputError(f"{packed.name} has SHA-512 {actual[:12]}…, pinned is {integrity[:12]}…; it is not used")
    images, rows = dict[str, bytes](), list[dict[str, str]]()
    with tarfile.open(packed, "r:gz") as archive:
        names: list[dict[str, object]] = []
        for member in archive:
            wanted = member.name.startswith(f"package/img/{vendor}/64/") and member.name.endswith(".png")
            if not wanted and member.name != "package/emoji.json":
                continue
            content = archive.extractfile(member)
            assert content is not None, "a file has content"
            if wanted:
                images[Path(member.name).name] = content.read()
            else:
                names = json.load(content)
    for emoji in names:
        image = str(emoji["image"])
        if emoji.get(f"has_img_{vendor}") and image in images:
            rows.append({"image": f"images/{image}", "text": _said(emoji)})
    if not rows:
        raise InputError(f"{packed.name} holds no drawings of {vendor}; report this")
    (folder / "images").mkdir()
    for row in rows:
        (folder / row["image"]).write_bytes(images[Path(row["image"]).name])
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in sorted(rows, key=lambda row: row["image"]))
    (folder / _TABLE).write_text("".join(lines), encoding="utf-8")
    packed.unlink()


def _said(emoji: dict[str, object]) -> str:
    """Unicode's name, and the short names that add a word: "grinning face (grinning)"."""
    name = str(emoji.get("name") or "").lower().replace("regional indicator symbol letters", "flag")
    shorts = emoji.get("short_names")
    words = [str(short).replace("_", " ").replace("-", " ") for short in shorts] if isinstance(shorts, list) else []
    others = [word for word in words if word not in name]
    return f"{name} ({', '.join(others)})" if others and name else name or ", ".join(words)


def _download(package: str, folder: Path) -> Path:
    """npm's package as it is published: by npm where there is one, else from its public address."""
    if shutil.which("npm") is not None:
        done = subprocess.run(
            ["npm", "pack", f"{package}@{VERSION}"], cwd=folder, capture_output=True, timeout=1800, check=False
        )
        found = list(folder.glob("*.tgz"))
        if not done.returncode and len(found) == 1:
            return found[0]
    address, target = f"{_REGISTRY}/{package}/-/{package}-{VERSION}.tgz", folder / f"{package}.tgz"
    try:
        with urllib.request.urlopen(address, timeout=60) as answer, open(target, "wb") as file:
            shutil.copyfileobj(answer, file)
    except OSError as error:
        raise SetupError(f"cannot fetch {package} from {_REGISTRY} ({error}); connect to a network") from error
    return target
