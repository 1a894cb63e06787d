"""Certificates for a test, made with the program openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """A certificate for `name`, signed by itself, and its key; what was there is replaced."""
    if shutil.which("openssl") is None:
        pytest.skip("the program openssl is not installed")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "1", "-subj", f"/CN={name}"]
    command += ["-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1"]
    subprocess.run(
        [*command, "-out", str(certificate), "-keyout", str(key)], check=True, capture_output=True
    )
    return certificate, key
