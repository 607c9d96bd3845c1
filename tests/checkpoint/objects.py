"""A file system as object stores are: `objects:///some/folder/name`.

Objects are written from beginning to end and appear when they are closed; there are no ranged writes, no renames, no
empty directories. It keeps them in a folder, so that several ranks see them.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import fsspec


class ObjectStore(fsspec.AbstractFileSystem):
    """See above. `read_bytes` counts what was asked for."""

    protocol = "objects"
    cachable = True
    read_bytes = 0
    before_write: Any = None
    """Called with the path and the data of each object before it appears."""

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).removeprefix("objects://").rstrip("/") or "/"

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        root = Path(self._strip_protocol(path))
        if not root.exists():
            raise FileNotFoundError(path)
        found = [self.info(str(each)) for each in (sorted(root.iterdir()) if root.is_dir() else [root])]
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        file = Path(self._strip_protocol(path))
        if not file.exists():
            raise FileNotFoundError(path)
        size = file.stat().st_size
        return {"name": str(file), "size": size, "type": "directory" if file.is_dir() else "file"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        with Path(self._strip_protocol(path)).open("rb") as file:
            file.seek(start or 0)
            data = file.read() if end is None else file.read(end - (start or 0))
        ObjectStore.read_bytes += len(data)
        return data

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """There are none."""

    def rm_file(self, path: str) -> None:
        Path(self._strip_protocol(path)).unlink()

    def mv(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("objects cannot be renamed")

    cp_file = mv

    def open(self, path: str, mode: str = "rb", **_: Any) -> Any:  # type: ignore[override]
        assert mode == "wb", "written once, read by cat_file"
        return _Upload(Path(self._strip_protocol(path)))


class _Upload(io.BytesIO):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def seek(self, *_: Any) -> int:
        raise io.UnsupportedOperation("objects are written in order")

    def close(self) -> None:
        if self.closed:
            return
        data = self.getvalue()
        super().close()
        if ObjectStore.before_write is not None:
            ObjectStore.before_write(self._path, data)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.parent.parent / f".{os.getpid()}.upload"
        partial.write_bytes(data)
        partial.replace(self._path)


fsspec.register_implementation("objects", ObjectStore, clobber=True)
