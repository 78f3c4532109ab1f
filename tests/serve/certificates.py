"""Certificates of this machine's own, which nobody trusts unless told to."""

from __future__ import annotations

import subprocess
from pathlib import Path


def localhost_certificate(folder: Path) -> tuple[Path, Path]:
    """cert.pem and key.pem of localhost, made by openssl in `folder`."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *files, *subject]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
