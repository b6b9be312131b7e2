"""What every test rests on: interrupts that arrive, no deadlines, and certificates of the tests' own."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import trustme

# Where the tests run as a shell's background job they, and what they start, would ignore interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass  # SGLang's environment, whose tests read this file too
else:  # 200 ms for an example would be a duration that a test asserts
    settings.register_profile(
        "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("patient")


@dataclass(frozen=True)
class Pki:
    """An authority's certificate, and certificate and key of a server (localhost) and a client, as files."""

    folder: Path
    authority: trustme.CA

    @property
    def ca(self) -> str:
        return str(self.folder / "ca.pem")

    def issue(self, name: str, *hosts: str) -> tuple[str, str]:
        """Write ``name``.pem and ``name``.key, over older ones; their paths."""
        certificate = self.authority.issue_cert(*hosts)
        pair = (self.folder / f"{name}.pem", self.folder / f"{name}.key")
        pair[0].write_bytes(b"".join(part.bytes() for part in certificate.cert_chain_pems))
        pair[1].write_bytes(certificate.private_key_pem.bytes())
        return str(pair[0]), str(pair[1])


def make_pki(folder: Path) -> Pki:
    import trustme  # not in SGLang's environment, whose tests read this file too

    folder.mkdir(exist_ok=True)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    return Pki(folder, authority)


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return make_pki(tmp_path / "pki")


@pytest.fixture
def other_pki(tmp_path: Path) -> Pki:
    """An authority that nobody knows."""
    return make_pki(tmp_path / "other-pki")
