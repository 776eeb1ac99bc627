"""TLS: versions, clients, reload, and what is not TLS."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from .certificates import Certificate, make_certificate
from .fake_server import FrontEnd, Server, wait_for
from .test_access import log_of
from .test_http import exchange, post, receive_all, split_response


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"), "first")


@pytest.fixture(scope="module")
def secure(make_server: Callable[..., Server], certificate: Certificate) -> Server:
    return make_server(
        owner={"token_interval_us": 10_000},
        tls_certificate=str(certificate.certificate),
        tls_key=str(certificate.key),
        api_keys=("secret",),
    )


@pytest.fixture(scope="module")
def hasty(make_server: Callable[..., Server], certificate: Certificate) -> Server:
    return make_server(
        tls_certificate=str(certificate.certificate),
        tls_key=str(certificate.key),
        api_keys=("secret",),
        header_timeout_ms=1000,
    )


def context_for(certificate: Certificate) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate.certificate))


def client_for(server: Server, certificate: Certificate) -> httpx.Client:
    return httpx.Client(
        base_url=server.front_end.url,
        verify=context_for(certificate),
        headers={"Authorization": "Bearer secret"},
        timeout=60,
    )


def open_tls(server: Server, context: ssl.SSLContext) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", server.front_end.port), timeout=120)
    return context.wrap_socket(plain, server_hostname="127.0.0.1")


def test_httpx_and_keep_alive(secure: Server, certificate: Certificate) -> None:
    assert secure.front_end.url.startswith("https://")
    with client_for(secure, certificate) as client:
        for i in range(5):
            answer = client.post("/v1/completions", json={"prompt": f"hello {i}", "max_tokens": 50})
            assert answer.json()["choices"][0]["text"] == f"hello {i}"
        long = client.post("/v1/completions", json={"prompt": "y" * 2000, "max_tokens": 48})
        assert long.json()["choices"][0]["text"] == "y" * 48
        large = client.post("/v1/completions", content=b" " * 300_000)
        assert large.json()["error"]["code"] == "invalid_json"
        assert client.get("/").text.rstrip().endswith("</html>")
    wait_for(lambda: secure.front_end.stats()["connections_open"] == 0, "connections to end")


def test_openai_client(secure: Server, certificate: Certificate) -> None:
    openai = pytest.importorskip("openai")
    http = openai.DefaultHttpxClient(verify=context_for(certificate))
    url = f"{secure.front_end.url}/v1"
    with openai.OpenAI(base_url=url, api_key="secret", http_client=http, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "over TLS"}]
        chunks = client.chat.completions.create(model="fake", messages=messages, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "over TLS"


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
def test_new_versions(secure: Server, certificate: Certificate, version: str) -> None:
    context = context_for(certificate)
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    context.set_alpn_protocols(["h2", "http/1.1"])
    with open_tls(secure, context) as connection:
        assert connection.version() == version.replace("_", ".")
        assert connection.selected_alpn_protocol() == "http/1.1"
        name = connection.cipher()[0].replace("-", "_")
        assert name.endswith(("GCM_SHA256", "GCM_SHA384", "CHACHA20_POLY1305_SHA256"))
        request = post(extra="Authorization: Bearer secret\r\n")
        for byte in request[:80]:
            connection.send(bytes([byte]))  # a record each
        connection.sendall(request[80:])
        assert split_response(receive_all(connection))[0] == 200  # and a clean end of TLS


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_old_versions_and_weak_ciphers_are_refused(
    secure: Server, certificate: Certificate
) -> None:
    old = context_for(certificate)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = ssl.TLSVersion.TLSv1
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    weak = context_for(certificate)
    weak.maximum_version = ssl.TLSVersion.TLSv1_2
    weak.set_ciphers("AES128-SHA:ECDHE-ECDSA-AES128-SHA")
    for context in (old, weak):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            open_tls(secure, context)


@pytest.mark.parametrize(
    "request_bytes",
    [
        *(f"{name} / HTTP/1.1\r\nHost: x\r\n\r\n".encode()
          for name in ("GET", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "TRACE", "ODD")),
        post(extra="Authorization: Bearer secret\r\n"),
        post(b" " * 1_000_000),
        b"\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"get / HTTP/1.1\r\n",
    ],
    ids=lambda request: request[:8].decode().strip(),
)  # fmt: skip
def test_plain_http_is_told_to_speak_tls(
    secure: Server, certificate: Certificate, request_bytes: bytes
) -> None:
    status, headers, body = split_response(exchange(secure, request_bytes))
    assert (status, headers["connection"]) == (400, "close")
    assert headers["x-request-id"]
    assert json.loads(body)["error"]["code"] == "plain_http"
    with client_for(secure, certificate) as client:  # others go on
        assert client.get("/health").status_code == 200


def test_plain_http_is_counted_and_logged(
    make_server: Callable[..., Server], certificate: Certificate, tmp_path: Path
) -> None:
    path = tmp_path / "access.log"
    server = make_server(
        tls_certificate=str(certificate.certificate),
        tls_key=str(certificate.key),
        access_log=str(path),
    )
    request = b"HEAD /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: plain\r\n\r\n"
    status, headers, body = split_response(exchange(server, request))
    assert (status, headers["x-request-id"], body) == (400, "plain", b"")
    (line,) = log_of(path, 1)
    assert (line["id"], line["status"], line["path"]) == ("plain", 400, "/health")
    with client_for(server, certificate) as client:
        text = client.get("/metrics").text
    assert 'blink_http_responses_total{status="400"} 1' in text
    assert "blink_tls_failures_total 1" in text


def test_what_is_not_tls_is_cut_off(hasty: Server, certificate: Certificate) -> None:
    before, _ = failures(hasty, certificate)
    for sent in (b"\0" + post(), b"\x16\x03\x01\x00\x05hello", bytes(3000), b""):
        data = b""
        with (
            socket.create_connection(("127.0.0.1", hasty.front_end.port), timeout=120) as plain,
            suppress(ConnectionError),  # what was sent too late meets a closed socket
        ):
            plain.sendall(sent)
            data = receive_all(plain)
        assert b"HTTP" not in data
    after, num_late = failures(hasty, certificate)
    assert after - before - num_late == 4


def failures(server: Server, certificate: Certificate) -> tuple[int, int]:
    """Return what the server has counted, and how often this client was too late to ask it: each
    time is a failure more."""
    for num_late in range(100):
        with suppress(httpx.TransportError), client_for(server, certificate) as client:
            text = client.get("/metrics").text
            line = next(x for x in text.splitlines() if x.startswith("blink_tls_failures_total "))
            return int(line.split()[1]), num_late
    raise AssertionError("always too late")


def test_client_that_leaves_frees_its_slot(secure: Server, certificate: Certificate) -> None:
    # The end of TLS stands in the socket like a request would; the end behind it is seen.
    body = b'{"prompt": "x", "max_tokens": 2000, "ignore_eos": true}'  # would take twenty seconds
    connection = open_tls(secure, context_for(certificate))
    connection.sendall(post(body, extra="Authorization: Bearer secret\r\n"))
    wait_for(lambda: bool(secure.ring.slots()), "the request to be in the ring")
    connection.unwrap().close() if connection.version() == "TLSv1.2" else connection.close()
    secure.wait_until_empty()
    wait_for(lambda: secure.front_end.stats()["requests_aborted"] == 1, "the abort")


def test_reload_takes_a_new_certificate(make_server: Callable[..., Server], tmp_path: Path) -> None:
    first = make_certificate(tmp_path, "server")
    server = make_server(tls_certificate=str(first.certificate), tls_key=str(first.key))
    old_context = context_for(first)
    held = open_tls(server, old_context)
    make_certificate(tmp_path, "server", algorithm="rsa:2048")
    server.front_end.reload()
    with pytest.raises(ssl.SSLCertVerificationError):
        open_tls(server, old_context)
    with open_tls(server, context_for(first)) as connection:
        connection.sendall(post())
        assert split_response(receive_all(connection))[0] == 200
    with held:  # what began under the old one goes on
        held.sendall(post())
        assert split_response(receive_all(held))[0] == 200
    first.key.write_text("gone", encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"TLS key .*server\.key"):
        server.front_end.reload()
    with open_tls(server, context_for(first)) as connection:
        connection.sendall(post())
        assert split_response(receive_all(connection))[0] == 200


def openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


def why_refused(make_server: Callable[..., Server], certificate: Path, key: Path) -> str:
    with pytest.raises(RuntimeError) as caught:
        make_server(tls_certificate=str(certificate), tls_key=str(key))
    message = str(caught.value)
    assert "error:0" not in message and "routines" not in message  # OpenSSL's own lines
    return message


def test_bad_keys_are_named_at_the_start(
    make_server: Callable[..., Server], certificate: Certificate, tmp_path: Path
) -> None:
    """The bug: OpenSSL's codes stood for what is wrong, and nothing said what to do."""
    others = {kind: make_certificate(tmp_path, kind, algorithm=kind) for kind in ("ec", "rsa:2048")}
    text = certificate.key.read_text()
    made = {name: tmp_path / name for name in ("new", "old", "der", "empty", "plain", "cut")}
    openssl("pkey", "-in", certificate.key, "-aes128", "-passout", "pass:x", "-out", made["new"])
    openssl("ec", "-in", certificate.key, "-aes128", "-passout", "pass:x", "-out", made["old"])
    openssl("pkey", "-in", certificate.key, "-outform", "der", "-out", made["der"])
    made["empty"].write_text("")
    made["plain"].write_text("no key\n")
    made["cut"].write_text(text[: len(text) // 2])
    for key, said in (
        (others["ec"].key, f"not the key of the certificate {certificate.certificate}"),
        (others["rsa:2048"].key, f"not the key of the certificate {certificate.certificate}"),
        (made["new"], "it is encrypted, and nobody is there to type its password"),
        (made["old"], "it is encrypted, and nobody is there to type its password"),
        (made["der"], "it is DER, not PEM; openssl pkey -inform der"),
        (made["empty"], "it is empty"),
        (made["plain"], "it is no PEM file"),
        (made["cut"], "its PEM is damaged"),
        (certificate.certificate, "it holds a certificate and no key"),
        (tmp_path / "missing", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ):
        message = why_refused(make_server, certificate.certificate, key)
        assert message.startswith(f"TLS key {key}: {said}"[:60]) and said in message


def test_bad_certificates_are_named_at_the_start(
    make_server: Callable[..., Server], certificate: Certificate, tmp_path: Path
) -> None:
    text = certificate.certificate.read_text()
    made = {name: tmp_path / name for name in ("der", "empty", "plain", "cut", "chain")}
    openssl("x509", "-in", certificate.certificate, "-outform", "der", "-out", made["der"])
    made["empty"].write_text("")
    made["plain"].write_text("no certificate\n")
    made["cut"].write_text(text[: len(text) // 2])
    made["chain"].write_text(text + text[: len(text) // 2])
    weak = make_certificate(tmp_path, "weak", algorithm="rsa:1024")
    for path, said in (
        (made["der"], "it is DER, not PEM; openssl x509 -inform der"),
        (made["empty"], "it is empty"),
        (made["plain"], "it is no PEM file"),
        (made["cut"], "its PEM is damaged"),
        (made["chain"], "its PEM is damaged"),
        (weak.certificate, "OpenSSL does not take it for a server (ee key too small)"),
        (certificate.key, "it holds a key and no certificate"),
        (tmp_path / "missing", "No such file or directory"),
    ):
        message = why_refused(make_server, path, certificate.key)
        assert message.startswith(f"TLS certificate {path}: {said}")
    with pytest.raises(ValueError, match="need each other"):
        make_server(tls_certificate=str(certificate.certificate))


def test_chains_combined_files_and_pipes(
    make_server: Callable[..., Server], tmp_path: Path
) -> None:
    """Files with more than one PEM block, and a key from a pipe, which can be read once."""
    root = make_certificate(tmp_path, "root")
    middle = make_certificate(tmp_path, "middle", issuer=root)
    leaf = make_certificate(tmp_path, "leaf", issuer=middle)
    chain = tmp_path / "chain.pem"
    chain.write_text(
        leaf.key.read_text() + leaf.certificate.read_text() + middle.certificate.read_text()
    )
    read_end, write_end = os.pipe()
    os.write(write_end, chain.read_bytes())
    os.close(write_end)
    try:
        server = make_server(tls_certificate=str(chain), tls_key=f"/dev/fd/{read_end}")
        open_tls(server, context_for(root)).close()  # who trusts the root alone needs the chain
        with pytest.raises(RuntimeError, match="it is empty"):
            server.front_end.reload()
        open_tls(server, context_for(root)).close()
    finally:
        os.close(read_end)


def test_a_front_end_says_its_scheme(secure: Server) -> None:
    assert isinstance(secure.front_end, FrontEnd)
    assert secure.front_end.url == f"https://127.0.0.1:{secure.front_end.port}"
