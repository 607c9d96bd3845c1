"""A double of vLLM's weight transfer, with both forms that `WeightSource` has had: a trainer, and a receiver.

The control plane is that of vLLM's HTTP routes. Tensors travel over a socket of this machine instead of NCCL: the
receiver takes them in the order and with the names, dtypes and shapes that `update_weights` has announced.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import torch
from torch import Tensor


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class SourceOf032(ABC):
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class SourceOf033(ABC):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        assert isinstance(cls.__dict__.get("metadata"), cached_property)

    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError


SOURCES: dict[str, type] = {"0.32": SourceOf032, "0.33": SourceOf033}


@contextmanager
def installed(version: str) -> Iterator[None]:
    """A context in which the names are importable that vLLM of a version has. Other libraries look for it later."""
    names = ["vllm", "vllm.distributed", "vllm.distributed.weight_transfer", "vllm.distributed.weight_transfer.base"]
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[names[-1]].__dict__.update(ParamMeta=ParamMeta, WeightSource=SOURCES[version])
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


class Trainer:
    """The trainer's engine. Rank 0 drives the receiver; the others take part in what their source gathers."""

    def __init__(self, source: Any, rank: int, url: str, port: int) -> None:
        self._source, self._rank, self._url, self._port = source, rank, url, port
        if rank == 0:
            self._post("init_weight_transfer_engine", {"init_info": {}})

    def send_weights(self) -> None:
        is_new = isinstance(self._source, SourceOf033)
        meta = self._source.metadata if is_new else self._source.metadata()
        pairs = self._source.iter_full() if is_new else iter(self._source)
        if self._rank:
            for _ in pairs:
                pass
            return
        self._post("start_weight_update")
        update = {
            "names": [one.name for one in meta],
            "dtype_names": [str(one.dtype).removeprefix("torch.") for one in meta],
            "shapes": [list(one.shape) for one in meta],
        }
        with ThreadPoolExecutor(1) as pool, socket.create_connection(("127.0.0.1", self._port)) as wire:
            received = pool.submit(self._post, "update_weights", {"update_info": update})
            for one, (name, tensor) in zip(meta, pairs, strict=True):
                assert (one.name, one.dtype, one.shape) == (name, tensor.dtype, tuple(tensor.shape))
                wire.sendall(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
            wire.shutdown(socket.SHUT_WR)
            received.result()
        self._post("finish_weight_update")

    def _post(self, path: str, body: Any = None) -> None:
        httpx.post(f"{self._url}/{path}", json=body, timeout=60).raise_for_status()


class Receiver:
    """A server that holds the weights of the last finished update."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.calls: list[str] = []
        self._coming: dict[str, Tensor] | None = None
        self._wire = socket.create_server(("127.0.0.1", 0))
        self.port = self._wire.getsockname()[1]
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                receiver.called(self.path.strip("/"), json.loads(body) if body else None)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def called(self, path: str, body: Any) -> None:
        self.calls.append(path)
        if path == "start_weight_update":
            self._coming = {}
        elif path == "update_weights":
            self._receive(**body["update_info"])
        elif path == "finish_weight_update":
            assert self._coming is not None
            self.weights, self._coming = self._coming, None

    def _receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        assert self._coming is not None
        connection, _ = self._wire.accept()
        with connection, connection.makefile("rb") as data:
            for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype_name))
                data.readinto(tensor.reshape(-1).view(torch.uint8).numpy())
                self._coming[name] = tensor
            assert not data.read(1), "more was sent than was announced"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._wire.close()
