"""Certificates for tests, made with the `openssl` program; tests that want them skip where it is missing."""

import shutil
import subprocess
from pathlib import Path

import pytest

from ripstop.model.config import Tls

PAST = ("20200101000000Z", "20200102000000Z")
NOW = ("20200101000000Z", "20991231235959Z")
CONFIG = """\
[ca]
default_ca = here
[here]
database = {folder}/index.txt
new_certs_dir = {folder}
default_md = sha256
policy = any
rand_serial = yes
unique_subject = no
copy_extensions = copy
[any]
commonName = supplied
[req]
distinguished_name = name
[name]
"""


class Authority:
    """A certificate authority in a folder; `ca` is what its clients trust."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("the openssl program is not here to make certificates with")
        self.folder = folder
        self.ca = folder / "ca.pem"
        (folder / "index.txt").touch()
        (folder / "conf").write_text(CONFIG.format(folder=folder))
        self._make("ca", "basicConstraints=critical,CA:TRUE", NOW, signed_by="ca")

    def node(self, name: str = "node", *, names: str = "IP:127.0.0.1,DNS:localhost", expired: bool = False) -> Tls:
        """A node's certificate and key, and the authority's."""
        self._make(name, f"subjectAltName={names}", PAST if expired else NOW, signed_by="ca")
        return Tls(self.folder / f"{name}.pem", self.folder / f"{name}.key", self.ca)

    def _make(self, name: str, extension: str, when: tuple[str, str], signed_by: str) -> None:
        key, request = f"{name}.key", f"{name}.csr"
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key)
        self._openssl("req", "-new", *new_key, "-out", request, "-subj", f"/CN={name}", "-addext", extension)
        signer = ("-selfsign",) if name == signed_by else ("-cert", f"{signed_by}.pem")
        dates = ("-startdate", when[0], "-enddate", when[1])
        made = ("-keyfile", f"{signed_by}.key", "-in", request, "-out", f"{name}.pem", "-notext")
        self._openssl("ca", "-batch", *signer, *dates, *made)

    def _openssl(self, command: str, *words: str) -> None:
        argv = ["openssl", command, "-config", "conf", *words]
        done = subprocess.run(argv, cwd=self.folder, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
