"""Byte ranges of files in one host's memory, for ranks of other hosts: each rank serves its host's directory.

A client sends the server's token, then any number of requests: first byte, number of bytes, and the name as it is below
the directory. The answer is the size of the file, -1 if there is none, and the bytes."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import struct
import threading
from pathlib import Path
from typing import NamedTuple

from shardwise.comm.backends.tree_channel import listening_socket, reachable

_TOKEN_BYTES = 16
_CONNECT_S = 5.0
"""Seconds for connecting to one address."""
_BACKLOG = 128
"""Ranks that may connect at a time."""
_REQUEST, _ANSWER = struct.Struct("<qqH"), struct.Struct("<q")


class Address(NamedTuple):
    """Where a server is reached."""

    token: bytes
    port: int
    hosts: list[str]
    """Addresses of its host, the likeliest first. The last is the host's name."""


class FileServer:
    """Serves the files of a directory's directories from threads of this process, until `close`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._listener, hosts = listening_socket(_BACKLOG)
        self.address = Address(secrets.token_bytes(_TOKEN_BYTES), self._listener.getsockname()[1], hosts)
        threading.Thread(target=self._accept, name="shardwise-files", daemon=True).start()

    def close(self) -> None:
        """Take no more clients."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="shardwise-files", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, ValueError):
            client.settimeout(_CONNECT_S)  # strangers
            if not secrets.compare_digest(_received(client, _TOKEN_BYTES), self.address.token):
                return
            client.settimeout(None)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                start, length, name_bytes = _REQUEST.unpack(_received(client, _REQUEST.size))
                folder, _, name = _received(client, name_bytes).decode().partition("/")
                if {folder, name} & {"", ".", ".."} or "/" in name:
                    return
                try:
                    file = (self._directory / folder / name).open("rb")
                except FileNotFoundError:
                    client.sendall(_ANSWER.pack(-1))
                    continue
                with file:
                    nbytes = os.fstat(file.fileno()).st_size
                    client.sendall(_ANSWER.pack(nbytes))
                    if start >= 0 and 0 < length <= nbytes - start:
                        client.sendfile(file, start, length)


class ServedFile:
    """A file that another host's rank serves, open for reading by several threads. See `storage.Source`."""

    def __init__(self, address: Address, name: str, timeout_s: float) -> None:
        """name: "directory/file", as it is below the served directory. The server is reached at the first use."""
        self._address, self._name, self._timeout_s = address, name.encode(), timeout_s
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()

    @property
    def nbytes(self) -> int:
        """The file's size. Raises OSError if the server is not reached, FileNotFoundError if it has no such file."""
        with self._lock:
            return self._ask(0, 0)[1]

    def read_at(self, start: int, into: memoryview) -> None:
        """See `storage.Source`."""
        if not into.nbytes:
            return
        with self._lock:
            connection, nbytes = self._ask(start, into.nbytes)
            if start + into.nbytes > nbytes:
                raise EOFError(nbytes)
            _receive(connection, into.cast("B"))

    def read_pages(self, start: int, into: memoryview) -> int:
        """See `storage.Source`."""
        return 0

    def _ask(self, start: int, length: int) -> tuple[socket.socket, int]:
        if self._connection is None:
            self._connection = _connected(self._address, self._timeout_s)
        self._connection.sendall(_REQUEST.pack(start, length, len(self._name)) + self._name)
        (nbytes,) = _ANSWER.unpack(_received(self._connection, _ANSWER.size))
        if nbytes < 0:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._name.decode())
        return self._connection, int(nbytes)


def _connected(address: Address, timeout_s: float) -> socket.socket:
    problems = []
    for host in reachable(address.hosts):
        try:
            connection = socket.create_connection((host, address.port), timeout=min(_CONNECT_S, timeout_s))
        except OSError as error:
            problems.append(f"{host}: {error}")
            continue
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(address.token)
        return connection
    raise ConnectionError(f"copies in the memory of {address.hosts[-1]} are not reached ({'; '.join(problems)})")


def _received(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    _receive(connection, memoryview(data))
    return bytes(data)


def _receive(connection: socket.socket, into: memoryview) -> None:
    while into.nbytes:
        count = connection.recv_into(into)
        if not count:
            raise ConnectionError("a rank that serves copies in memory is gone")
        into = into[count:]
