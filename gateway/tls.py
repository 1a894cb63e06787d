"""The gateway's certificate and key. New ones take the place of the old without a restart.

Connections that are open keep what they began with. A pair that cannot be used changes nothing.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import structlog

from wire.config import Settings, SettingsError

log = structlog.get_logger()


class ServerTls:
    """What the gateway shows to its clients."""

    def __init__(self, cert_file: Path, key_file: Path) -> None:
        """Read the pair. Raises SettingsError if it cannot be used."""
        self.files = (cert_file, key_file)
        try:
            self.context = _context(*self.files)
        except CertificateError as error:
            raise SettingsError(str(error)) from None

    def read_again(self) -> None:
        """Take over what the files hold now; if that cannot be used, keep what was read before."""
        try:
            _context(*self.files)  # so that a bad pair never gets near the one in use
            self.context.load_cert_chain(*self.files, password=_no_password)
        except (CertificateError, _EncryptedError, OSError) as error:
            log.error("certificate_kept", why=str(error))
        else:
            log.info("certificate_read", file=str(self.files[0]))


class CertificateError(Exception):
    """A certificate or key that cannot be used; the text names it and says why."""


def server_tls(settings: Settings) -> ServerTls | None:
    """Read the certificate if there is to be one. Raises SettingsError if it cannot be used."""
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return None
    return ServerTls(settings.tls_cert_file, settings.tls_key_file)


def _context(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    """Make a context of TLS 1.2 and later. Raises CertificateError."""
    for name, path in (("TLS_CERT_FILE", cert_file), ("TLS_KEY_FILE", key_file)):
        try:
            path.read_bytes()
        except OSError as error:
            raise CertificateError(f"{name}={path}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert_file, key_file, password=_no_password)
    except ssl.SSLError as error:
        raise CertificateError(_why(error, cert_file, key_file)) from None
    except _EncryptedError:
        raise CertificateError(f"TLS_KEY_FILE={key_file}: is encrypted") from None
    return context


class _EncryptedError(ValueError):
    """The key can only be read with a password."""


def _no_password() -> str:
    """Keep OpenSSL from asking on the terminal."""
    raise _EncryptedError


def _why(error: ssl.SSLError, cert_file: Path, key_file: Path) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"TLS_CERT_FILE={cert_file}: does not belong to TLS_KEY_FILE={key_file}"
    return (
        f"TLS_CERT_FILE={cert_file}, TLS_KEY_FILE={key_file}: no PEM of a certificate and its key "
        f"({error.reason or 'PEM'})"
    )
