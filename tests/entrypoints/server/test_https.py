"""HTTPS: with a certificate, with clients' own, and with files that do not fit."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from entrypoints.server_process import ServerProcess

from atom.entrypoints.server_options import OptionError, ServerOptions

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ca`, and `server` and `client` that descend from it: NAME.pem and NAME.key."""
    folder = tmp_path_factory.mktemp("certificates")

    def run(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    run("req", "-x509", *key, "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        files = ("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        run("req", *key, "-nodes", *files)
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        run("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)
    run("ec", "-aes128", "-passout", "pass:x", "-in", "server.key", "-out", "encrypted.key")
    return folder


def options(folder: Path, certificate: str, key: str | None, ca: str | None = None) -> None:
    files = [None if name is None else str(folder / name) for name in (certificate, key, ca)]
    ServerOptions(ssl_certfile=files[0], ssl_keyfile=files[1], ssl_ca_certs=files[2])


@pytest.mark.parametrize(
    ("certificate", "key", "ca", "says"),
    [
        ("server.pem", "client.key", None, "client.key"),
        ("server.pem", None, None, "server.pem"),
        ("server.pem", "encrypted.key", None, "encrypted"),
        ("missing.pem", "server.key", None, "No such file"),
        ("server.pem", "server.key", "names", "names"),
    ],
)
def test_files_that_do_not_fit(
    folder: Path, certificate: str, key: str | None, ca: str | None, says: str
) -> None:
    with pytest.raises(OptionError, match=says):
        options(folder, certificate, key, ca)


def test_a_key_without_a_certificate(folder: Path) -> None:
    options(folder, "server.pem", "server.key", "ca.pem")
    with pytest.raises(OptionError, match="go with --ssl-certfile"):
        ServerOptions(ssl_keyfile=str(folder / "server.key"))


def test_only_clients_with_a_certificate_are_served(folder: Path, tiny_llama_dir: Path) -> None:
    flags = ("--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key", "--ssl-ca-certs")
    files = [str(folder / each) if "." in each else each for each in (*flags, "ca.pem")]
    server = ServerProcess(tiny_llama_dir, *files)
    try:
        url = server.wait_ready().url
        assert url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health", verify=trusting)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url.replace('https', 'http')}/health")
        trusting.load_cert_chain(folder / "client.pem", folder / "client.key")
        with httpx.Client(verify=trusting, timeout=60) as client:
            assert client.get(f"{url}/health").status_code == 200
            body = {"prompt": "a", "max_tokens": 3, "stream": True}
            streamed = client.post(f"{url}/v1/completions", json=body)
            assert streamed.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(f"{url}/health")
    finally:
        server.stop()
