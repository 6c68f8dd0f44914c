"""HTTP exchanges of which none lasts longer than it may, whatever the other side does.

Owns sockets, TLS and the token; knows nothing of engines.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

from kvbaton_vllm.errors import Malformed, TokenUnusable, Unreachable
from kvbaton_vllm.settings import Credentials

_LONGEST_ANSWER = 256 << 20
_CHUNK = 1 << 20
_GONE = (http.client.RemoteDisconnected, http.client.IncompleteRead)


@dataclass(frozen=True)
class Answer:
    """A whole answer, and when its request left and its first bytes came, by ``perf_counter``."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    sent: float
    received: float


class Deadline:
    """A moment that does not move."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left, never less than none."""
        return max(0.0, self._end - time.monotonic())

    def within(self, seconds: float) -> Deadline:
        """The earlier of this moment and the one ``seconds`` from now."""
        return Deadline(min(self.left(), seconds))


class Endpoint:
    """One registry's address and how to talk to it; it may be shared by threads.

    Raises:
        ValueError: if the URL or a certificate cannot be used.
    """

    def __init__(self, url: str, credentials: Credentials) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"{url!r} is no URL of a registry")
        self.url = url
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.prefix = parts.path.rstrip("/")
        self._credentials = credentials
        self._tls = _tls(credentials) if parts.scheme == "https" else None

    def connect(self, deadline: Deadline) -> Connection:
        """Opens a connection, with TLS where the URL says so.

        Raises:
            Unreachable: if that does not succeed before the deadline.
        """
        try:
            plain = socket.create_connection((self.host, self.port), timeout=_wait(deadline))
        except OSError as error:
            raise Unreachable(f"{self.url} cannot be reached: {_why(error)}") from error
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None:
            return Connection(self, plain)
        try:
            # Wrapping takes the plain socket over, so the guard must hold the wrapped one.
            secure = self._tls.wrap_socket(
                plain, server_hostname=self.host, do_handshake_on_connect=False
            )
        except (OSError, ValueError) as error:
            plain.close()
            raise Unreachable(f"{self.url}: TLS failed: {_why(error)}") from error
        try:
            with _Guard(secure, deadline):
                secure.do_handshake()
        except (OSError, ValueError) as error:
            secure.close()
            raise Unreachable(f"{self.url}: TLS failed: {_why(error)}") from error
        return Connection(self, secure)

    def authorization(self) -> dict[str, str]:
        """The header that proves who this is; a token file is read each time, so it can change.

        Raises:
            TokenUnusable: if there is one that cannot be sent.
        """
        token = self._credentials.token
        if self._credentials.token_file is not None:
            try:
                token = Path(self._credentials.token_file).read_text(encoding="ascii").strip()
            except (OSError, UnicodeError) as error:
                raise TokenUnusable(f"the token file cannot be read: {error}") from error
        if token is None:
            return {}
        if not token or not all("!" <= character <= "~" for character in token):
            raise TokenUnusable("the token is empty or holds other than visible ASCII characters")
        return {"Authorization": f"Bearer {token}"}


class Connection:
    """An open connection; one thread at a time."""

    def __init__(self, endpoint: Endpoint, sock: socket.socket) -> None:
        self._endpoint = endpoint
        self._sock = sock
        self._http = http.client.HTTPConnection(endpoint.host, endpoint.port)
        self._http.sock = sock

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes it; may be done twice."""
        self._http.close()
        self._sock.close()

    def exchange(
        self,
        method: str,
        path: str,
        deadline: Deadline,
        body: Callable[[], bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Sends one request and reads the whole answer; ``body`` is made as the request leaves.

        Raises:
            Unreachable: if the connection breaks or the answer is not there in time.
            TokenUnusable: if this engine's token cannot be sent.
            Malformed: if the answer is no HTTP, or far too long.
        """
        all_headers = {**self._endpoint.authorization(), **(headers or {})}
        url = self._endpoint.url
        try:
            with _Guard(self._sock, deadline):
                sent = time.perf_counter()
                content = None if body is None else body()
                self._http.request(method, self._endpoint.prefix + path, content, all_headers)
                response = self._http.getresponse()
                received = time.perf_counter()
                content = _read(response, url)
        except (OSError, ValueError, http.client.HTTPException) as error:
            if deadline.left() == 0.0 or isinstance(error, TimeoutError):
                raise Unreachable(f"{url} did not answer in time") from error
            if isinstance(error, http.client.HTTPException) and not isinstance(error, _GONE):
                raise Malformed(f"{url} does not answer in HTTP: {_why(error)}") from error
            raise Unreachable(f"{url} broke the connection off: {_why(error)}") from error
        answer_headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, answer_headers, content, sent, received)


class _Guard:
    """Breaks a socket's connection off at the deadline: a timeout of the socket's own starts anew
    with every byte, so somebody who sends slowly enough would never meet it."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock = sock
        self._deadline = deadline
        self._timer = threading.Timer(deadline.left(), self._break_off)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._sock.settimeout(_wait(self._deadline))
        self._timer.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()

    def _break_off(self) -> None:
        # Not `shutdown` of a TLS socket, which would pull its state from under the reading thread.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)


def _read(response: http.client.HTTPResponse, url: str) -> bytes:
    pieces = []
    length = 0
    while piece := response.read(_CHUNK):
        pieces.append(piece)
        length += len(piece)
        if length > _LONGEST_ANSWER:
            raise Malformed(f"{url} sends an answer without an end")
    if response.length:
        # Reading in pieces does not tell a broken connection from the end.
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(pieces)


def _wait(deadline: Deadline) -> float:
    # A timeout of 0 would make the socket non-blocking.
    return max(deadline.left(), 0.001)


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


def _tls(credentials: Credentials) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=credentials.ca_file)
        if credentials.client_cert is not None:
            context.load_cert_chain(credentials.client_cert, credentials.client_key)
    except OSError as error:
        raise ValueError(f"a certificate or key cannot be used: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
