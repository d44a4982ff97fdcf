"""Fixtures of all tests."""

import datetime

import pytest

from totalreduce.foundation.config import Tls


class Authorities:
    """Makes certificates; one authority is the job's, the other one nobody's."""

    def __init__(self, folder):
        trustme = pytest.importorskip("trustme", reason="certificates are made with trustme")
        self._folder = folder
        self._authorities = {name: trustme.CA(organization_name=name) for name in ("job", "foreign")}
        for name, authority in self._authorities.items():
            authority.cert_pem.write_to_path(str(folder / f"{name}-ca.pem"))

    def issue(self, name, authority="job", *, trusts="job", days=1.0):
        """A certificate, signed by ``authority`` and valid for so many days (negative: expired so long ago)."""
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        begin = min(end, datetime.datetime.now(datetime.UTC)) - datetime.timedelta(days=1)
        made = self._authorities[authority].issue_cert(f"{name}.test", not_before=begin, not_after=end)
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        certificate.write_bytes(made.cert_chain_pems[0].bytes())
        key.write_bytes(made.private_key_pem.bytes())
        key.chmod(0o600)
        return Tls(certificate, key, self._folder / f"{trusts}-ca.pem")


@pytest.fixture(scope="session")
def authorities(tmp_path_factory):
    return Authorities(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def rank_tls(authorities):
    """Files of eight ranks, by rank."""
    return [authorities.issue(f"rank{rank}") for rank in range(8)]
