"""Names of models on a hub, "org/name" or "org/name@revision", as directories of this machine.

Everything goes through huggingface_hub: its cache and its locks, its tokens, HF_ENDPOINT, HF_HUB_OFFLINE and so on.
`fetch` downloads, and needs no process group; `local` only looks into the cache. No torch.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from shardwise.downloads import LargeFile, download
from shardwise.errors import CheckpointError, HubError, one_line
from shardwise.suggest import nearest_path

if TYPE_CHECKING:
    from huggingface_hub.utils._safetensors import SafetensorsFileMetadata

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
_CONFIGURATION = (".json", ".jinja", ".model", ".txt", ".tiktoken")
"""Endings of the files of a model's configuration and tokenizer, at the top of its repository."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt",
    "tekken.json",
)  # fmt: skip
"""Files of which a directory with a tokenizer has at least one."""
_RUNS = "runs/"
"""Where runs are unless `log.directory` says otherwise: what begins so is a path, whether it exists or not."""
_TEMPLATES = "additional_chat_templates/"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([^@\s]+))?", re.ASCII)
_HASH, _SHOWN = 40, 8
"""Digits of a commit's hash, and how many of them are shown."""
_COMMIT = re.compile(rf"[0-9a-f]{{{_HASH}}}")
_CONFIG = "config.json"
_MAKE_ROOM = "make room, or set HF_HOME to a directory with more"
_KINDS = {"model": "model", "dataset": "data set"}
_NOT_KNOWN, _FORBIDDEN = 401, 403
"""HTTP's statuses where there is no token, or a wrong one; and where a token may not do something."""
_AT_ONCE = 8
"""Number of files that are downloaded, and of headers that are read, at the same time."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of a hub, at a revision."""

    repository: str
    revision: str | None = None
    """A branch, a tag or a commit's hash; None = main."""

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit's hash: what it names never changes."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str) -> HubName:
        """Return the name of the same repository at a commit."""
        return HubName(self.repository, commit)


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit."""

    name: HubName
    """Pinned to the commit."""
    files: Mapping[str, int]
    """Bytes by path."""
    sha256: Mapping[str, str] = field(default_factory=dict)
    """Checksums of the files that are stored outside of git, the large ones, by path."""
    is_whole: bool = True
    """False where the hub was not asked and only the files in the cache are known."""

    @property
    def configuration(self) -> list[str]:
        """Paths of the files of the model's configuration and tokenizer."""
        return [path for path in self.files if path.startswith(_TEMPLATES) or _is_configuration(path)]


_LISTED: dict[tuple[HubName, str], Listing] = {}
"""Listings of commits that this process knows, by name and kind."""


def say_nothing(line: str) -> None:
    """Take a line, and show it nowhere."""


def shown(text: str) -> str:
    """Return a text as it is, except that a commit's hash in a name is shortened."""
    name = hub_name(text)
    return text if name is None or not name.is_pinned else text[: -(_HASH - _SHOWN)]


def may_be_name(text: str | os.PathLike[str]) -> bool:
    """Return whether a text has the form of a name, whatever exists on this machine."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def hub_name(text: str | os.PathLike[str]) -> HubName | None:
    """Return the name that a text is; None for a path of this machine (an existing one always is, and any below
    `runs/`), a URL and anything that is not of the form "org/name" or "org/name@revision"."""
    if not isinstance(text, str) or text.startswith(_RUNS):
        return None
    found = _NAME.fullmatch(text)
    return None if found is None or os.path.exists(text) else HubName(found[1], found[2])  # noqa: PTH110


def check_there(text: str, takes_names: bool = True) -> None:
    """Raise CheckpointError if nothing is at the path that a text is. Names of a hub and URLs pass. Commands call this
    before torch is imported, which takes seconds. `takes_names`: whether the message may propose a name of a hub."""
    path = Path(text)
    if "://" in text or hub_name(text) is not None:
        return
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        named = takes_names and not text.startswith(_RUNS)
        hint = nearest_path(path) or ("; a model on a hub is named org/name" if named else "")
        raise CheckpointError(f"{text}: no such checkpoint{hint}") from None
    except (OSError, ValueError):  # whoever reads it says why it cannot be read
        return


def settled(text: str) -> str:
    """Return a path that exists, and a name of a hub with its commit: what names nothing is found before torch is
    imported. Raises CheckpointError as `check_there`, HubError as `fetch`."""
    check_there(text)
    return pinned(text, repr(text))


def local(text: str | os.PathLike[str]) -> Path:
    """Return the directory of a model: a path as it is, a name as the directory in the cache that `fetch` has filled.

    No network. Raises HubError if a name is not in the cache.
    """
    name = hub_name(text)
    if name is None:
        return Path(text)
    folder = _cached_folder(name)
    if folder is None:
        raise HubError(f"{name} is not in the cache {_cache()}")
    return folder


def fetch(
    text: str | os.PathLike[str], where: str, *, weights: bool = False, say: Callable[[str], None] = say_nothing
) -> Path:
    """Return the directory of a model as `local` does, and download first what of it is missing.

    One process of a machine is to call this; the others' calls then find everything in the cache. What an interrupted
    process or a connection that broke had brought of the weights is kept, and the next call goes on from there.

    Args:
        text: a path, which is returned as it is, or a name.
        where: the beginning of messages: where the user wrote the name, and the name, as in "model.path='org/name'".
        weights: download the weights as well, not only the files of the configuration and of the tokenizer.
        say: takes the line that says what is downloaded, and how many bytes. With weights, huggingface_hub shows its
            progress bar.

    Raises:
        HubError: there is no such repository or revision; it is gated; the hub cannot be reached; the disk has no room
            for what is missing; there are no weights that can be read by range.
    """
    name = hub_name(text)
    if name is None:
        return Path(text)
    listed = listing(name, where)
    folder = _download(listed, listed.configuration, where)
    if not weights:
        return folder
    return _download(listed, weight_files(listed, where), where, say)


def fetch_adapter(text: str, where: str) -> Path:
    """Return the directory of a PEFT adapter that is named on a hub, after downloading what of it is missing. Raises
    HubError as `fetch` does, or if the repository has no adapter in safetensors."""
    name = hub_name(text)
    assert name is not None
    listed = listing(name, where)
    if ADAPTER not in listed.files:
        raise HubError(f"{where}: {name.repository} has no {ADAPTER}: no adapter to load")
    return _download(listed, [*listed.configuration, ADAPTER], where)


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory has a tokenizer that transformers may be able to load."""
    return any((directory / file).exists() for file in TOKENIZER_FILES)


def fetch_config(name: HubName, where: str) -> Path:
    """Return a model's `config.json`, alone of its files, after downloading it if it is not in the cache. Raises
    HubError as `fetch` does."""
    listed = listing(name, where)
    if _CONFIG not in listed.files:
        raise HubError(f"{where}: {name.repository} has no {_CONFIG}: it is not a model of transformers")
    return _download(listed, [_CONFIG], where) / _CONFIG


class Fetchers(Protocol):
    """The ranks that need the same files. Every method is collective."""

    def on_first(self, task: Callable[[], str]) -> str:
        """Return on every rank what a task returns on rank 0."""

    def work(self, task: Callable[[], object]) -> object:
        """Run each rank's task, which may take longer than others would wait in a collective."""


def fetch_together(
    text: str, where: str, peers: Fetchers, *, weights: bool = False, say: Callable[[str], None] = say_nothing
) -> Path:
    """Do the same as `fetch` with all ranks: rank 0 pins the name to a commit, the first rank of each machine
    downloads, and the others wait without a timeout. Every rank must call this, with the same text.

    The first rank of a machine is the one whose LOCAL_RANK is 0. Where there is no such variable every rank calls
    huggingface_hub, whose file locks let one of them download.
    """
    commit = peers.on_first(lambda: pinned(text, where))

    def task() -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            fetch(commit, where, weights=weights, say=say)

    peers.work(task)
    return fetch(commit, where, weights=weights)


def pinned(text: str, where: str) -> str:
    """Return a name with the hash of the commit that it names now; a path, or a name that has it already, as it is.
    Raises HubError as `fetch`."""
    name = hub_name(text)
    return text if name is None or name.is_pinned else str(listing(name, where).name)


def listing(name: HubName, where: str, kind: str = "model") -> Listing:
    """Return the files of a repository: one request, or none if the name is pinned and its listing is in the cache.

    Args:
        where: the beginning of messages, as in `fetch`.
        kind: "model" or "dataset".

    Raises:
        HubError: as in `fetch`.
    """
    if (name, kind) in _LISTED:
        return _LISTED[name, kind]
    with reaching(name, where, kind):
        from huggingface_hub import HfApi, constants

        known = _cached_listing(name, kind) if name.is_pinned or constants.is_offline_mode() else None
        if known is not None and (known.is_whole or constants.is_offline_mode()):
            return known
        try:
            api = HfApi()
            ask = api.model_info if kind == "model" else api.dataset_info
            info = ask(name.repository, revision=name.revision, files_metadata=True)
        except _unreachable():
            known = _cached_listing(name, kind)
            if known is None:
                raise
            return known
        assert info.sha is not None
        _remember(name, kind, info.sha)
        files = info.siblings or ()
        sizes = {file.rfilename: file.size or 0 for file in files}
        large = {file.rfilename: file.lfs.sha256 for file in files if file.lfs is not None}
        found = Listing(name.at(info.sha), sizes, large)
        _LISTED[found.name, kind] = found
        return found


def weight_files(listed: Listing, where: str) -> list[str]:
    """Return the paths of a model's safetensors files. Those that an index names are read from the index, which is
    downloaded if it is not in the cache. Raises HubError if there are none, and says if there are pickles instead."""
    if SINGLE in listed.files:
        return [SINGLE]
    if INDEX not in listed.files:
        if not listed.is_whole:
            raise HubError(f"{where}: {_not_cached(listed.name)}, and the hub cannot be asked")
        pickles = sorted(path for path in listed.files if path.endswith(_PICKLES))
        if pickles:
            raise HubError(
                f"{where}: {listed.name.repository} has its weights only as pickles ({pickles[0]}), which are not "
                "loaded: convert it once with transformers' from_pretrained(...) and save_pretrained(a directory), "
                "and give that"
            )
        raise HubError(f"{where}: {listed.name.repository} has no {SINGLE} and no {INDEX}: no weights to load")
    index = _download(listed, [INDEX], where) / INDEX
    try:
        named = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubError(f"{where}: {INDEX} of {listed.name} is damaged: {one_line(error, with_type=True)}") from None
    lost = [path for path in named if path not in listed.files]
    if lost:
        raise HubError(f"{where}: {INDEX} of {listed.name} names {lost[0]!r}, which the repository does not have")
    return named


def headers(listed: Listing, paths: list[str], where: str) -> dict[str, SafetensorsFileMetadata]:
    """Return the headers of safetensors files by path, from the first bytes of each. Raises HubError."""
    from concurrent.futures import ThreadPoolExecutor

    with reaching(listed.name, where):
        from huggingface_hub import HfApi

        api = HfApi()

        def read(path: str) -> SafetensorsFileMetadata:
            return api.parse_safetensors_file_metadata(
                listed.name.repository, path, repo_type="model", revision=listed.name.revision
            )

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return dict(zip(paths, pool.map(read, paths), strict=True))


@contextmanager
def reaching(name: HubName, where: str, kind: str = "model") -> Iterator[None]:
    """Turn what huggingface_hub raises inside the block into a HubError that begins with `where`. See `fetch`."""
    try:
        yield
    except HubError:
        raise
    except ModuleNotFoundError as error:
        if error.name != "huggingface_hub":
            raise
        raise HubError(
            f"{where} is not a path of this machine{nearest_path(Path(str(name)))}; names of a hub need "
            "huggingface_hub: pip install 'shardwise[hf]'"
        ) from None
    except Exception as error:
        _explain(error, name, where, kind)


# What went wrong ------------------------------------------------------------------------------------------------------


def _explain(error: Exception, name: HubName, where: str, kind: str) -> NoReturn:
    """Raise the HubError for an exception of huggingface_hub."""
    from huggingface_hub import constants, errors

    chain = [*_causes(error)]

    def any_is(*kinds: type[BaseException]) -> bool:
        return any(isinstance(one, kinds) for one in chain)

    host = constants.ENDPOINT.partition("://")[2]
    page = _page(name, kind)
    missing = f"no such file or directory here{nearest_path(Path(str(name))) or ','} and"
    answer = next((one for one in chain if isinstance(one, errors.HfHubHTTPError)), None)
    status = None if answer is None else answer.response.status_code
    is_full = any(isinstance(one, OSError) and one.errno == errno.ENOSPC for one in chain)
    cases = (
        (
            any_is(errors.GatedRepoError),
            gated(name, kind),
        ),
        (
            any_is(errors.RevisionNotFoundError),
            f"{name.repository} has no revision {name.revision!r}: give a branch, a tag or a commit of {page}",
        ),
        (
            any_is(errors.RepositoryNotFoundError),
            f"{missing} no {_KINDS[kind]} {name.repository} on {host}: check the name, or, if it is private, log in "
            "with `hf auth login`",
        ),
        (any_is(errors.HFValidationError), f"{missing} no name that a hub can have: {one_line(error)}"),
        (status == _NOT_KNOWN, f"{host} does not accept the token: log in with `hf auth login`, or set HF_TOKEN anew"),
        (
            any_is(errors.OfflineModeIsEnabled) or constants.is_offline_mode(),
            f"{missing} {_not_cached(name)}: HF_HUB_OFFLINE=1 forbids to fetch it",
        ),
        (status is not None, f"{host} answered {status} for {name.repository}: {one_line(chain[-1])}"),
        (is_full, f"the disk of the cache {_cache()} is full: {_MAKE_ROOM}"),
        (
            any_is(*_unreachable()),
            f"{missing} {host} cannot be reached ({one_line(chain[-1])}), and {_not_cached(name)}: check the "
            "network, HF_ENDPOINT and proxies, or give a directory",
        ),
        (True, f"{name} cannot be fetched from {host}: {one_line(error, with_type=True)}"),
    )
    raise HubError(f"{where}: {next(said for applies, said in cases if applies)}") from error


def gated(name: HubName, kind: str) -> str:
    """Return what to do about a repository that is gated."""
    page = _page(name, kind)
    return f"{name.repository} is gated: ask for access at {page}, then log in with `hf auth login`, or set HF_TOKEN"


def _page(name: HubName, kind: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name.repository}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _unreachable() -> tuple[type[BaseException], ...]:
    """Return the exceptions of a hub that does not answer: those of the HTTP client that huggingface_hub is built on,
    which is the base of its own errors, and Python's."""
    from huggingface_hub.errors import HfHubHTTPError

    client = HfHubHTTPError.__bases__[0]
    return (client, ConnectionError, TimeoutError)


def _not_cached(name: HubName) -> str:
    return f"{name} is not, or not completely, in the cache {_cache()}"


# The cache ------------------------------------------------------------------------------------------------------------


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _is_configuration(path: str) -> bool:
    return "/" not in path and path.endswith(_CONFIGURATION)


def _place(name: HubName, kind: str) -> Path:
    """Return the cache's directory of a repository, which has `refs/REVISION` (a commit's hash) and
    `snapshots/COMMIT/`."""
    return _cache() / "--".join([f"{kind}s", *name.repository.split("/")])


def _remember(name: HubName, kind: str, commit: str) -> None:
    """Store the commit that a revision names, as huggingface_hub does when it downloads by that revision: without a
    network it is looked up there."""
    if name.is_pinned:
        return
    path = _place(name, kind) / "refs" / (name.revision or "main")
    with suppress(OSError):  # the cache may be read-only
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(commit)
        partial.replace(path)


def _cached_folder(name: HubName, kind: str = "model") -> Path | None:
    """Return the directory of a name in the cache, perhaps incomplete; None if there is none."""
    commit = name.revision if name.is_pinned else None
    if commit is None:
        try:
            commit = (_place(name, kind) / "refs" / (name.revision or "main")).read_text().strip()
        except OSError:
            return None
    found = _place(name, kind) / "snapshots" / str(commit)
    return found if found.is_dir() else None


def _cached_listing(name: HubName, kind: str) -> Listing | None:
    """Return the listing of a name from the cache: the one that was stored with a download, else the files that are
    there. None if it was never downloaded."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    folder = _cached_folder(name, kind)
    if folder is None:
        return None
    pinned = name.at(folder.name)
    try:
        tree = get_cached_repo_tree(name.repository, repo_type=kind, revision=folder.name)
        large = {file.path: file.lfs.sha256 for file in tree if file.lfs is not None}
        return Listing(pinned, {file.path: file.size for file in tree}, large)
    except CachedRepoTreeNotFoundError:
        found = (path for path in folder.rglob("*") if path.is_file())
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}
        return Listing(pinned, sizes, is_whole=False)


def cached(listed: Listing, paths: list[str]) -> Path | None:
    """Return the directory in the cache if it has all of some files; else None."""
    folder = _cached_folder(listed.name)
    return folder if folder is not None and all((folder / path).exists() for path in paths) else None


def _download(listed: Listing, paths: list[str], where: str, say: Callable[[str], None] | None = None) -> Path:
    """Return the directory in which the given files of a repository are, after downloading those that are missing.

    say: takes the line that says what is downloaded; None = say nothing, and show no progress bar.
    """
    name = listed.name
    with reaching(name, where):
        from huggingface_hub import snapshot_download

        folder = _cached_folder(name)
        missing = paths if folder is None else [path for path in paths if not (folder / path).exists()]
        if folder is not None and not missing:
            return folder
        large = _large_files(listed, missing) if say is not None else []
        nbytes = sum(listed.files[path] for path in missing)
        had = sum(file.had_bytes for file in large)
        check_room(nbytes - had, name, where, _cache())
        if say is not None:
            files = f"{len(missing)} of {len(paths)} files of weights"
            rest = f"the last {_size(nbytes - had)}, of {_size(nbytes)}" if had else _size(nbytes)
            say(f"{shown(str(name))}: downloading {files}, {rest}, to {_cache()}")
            download(large)
        return Path(
            snapshot_download(
                name.repository,
                revision=name.revision,
                allow_patterns=[_literally(path) for path in missing],
                max_workers=_AT_ONCE,
                tqdm_class=None if say is not None and len(large) < len(missing) else _silent_bar(),
            )
        )


def _large_files(listed: Listing, paths: list[str]) -> list[LargeFile]:
    """Return the files among `paths` whose downloads another process can continue: those that the hub stores outside
    of git, unless HF_XET_HIGH_PERFORMANCE asks for Xet's transfer, which begins a file anew."""
    from huggingface_hub import constants, hf_hub_url

    if constants.HF_XET_HIGH_PERFORMANCE and not constants.HF_HUB_DISABLE_XET and find_spec("hf_xet") is not None:
        return []
    name, place = listed.name, _place(listed.name, "model")
    return [
        LargeFile(
            hf_hub_url(name.repository, path, revision=name.revision), listed.sha256[path], listed.files[path], place
        )
        for path in paths
        if path in listed.sha256
    ]


def check_room(nbytes: int, name: HubName, where: str, cache: Path) -> None:
    """Raise HubError if the disk of a cache has not so many bytes left."""
    place = next(path for path in (cache, *cache.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    if free < nbytes:
        raise HubError(
            f"{where}: {name.repository} needs {_size(nbytes)} more in the cache {cache}, whose disk has {_size(free)} "
            f"left: {_MAKE_ROOM}"
        )


def _size(nbytes: int) -> str:
    return f"{nbytes:,} bytes ({nbytes / 2**30:,.2f} GiB)"


def _literally(path: str) -> str:
    """Return the pattern that matches a path and nothing else."""
    return re.sub(r"([*?[])", r"[\1]", path)


def _silent_bar() -> type[Any]:
    from huggingface_hub import utils

    shown: Any = utils  # huggingface_hub does not export its bar to type checkers
    bar: type[Any] = type("Silent", (shown.tqdm,), {"__init__": _init_silently})
    return bar


def _init_silently(bar: Any, *args: Any, **kwargs: Any) -> None:
    super(type(bar), bar).__init__(*args, **{**kwargs, "disable": True})


# Uploads --------------------------------------------------------------------------------------------------------------


def check_token(where: str) -> None:
    """Raise HubError if nothing can be uploaded, because there is no token or HF_HUB_OFFLINE is set. No request.

    where: the beginning of the message, as in "hub.push_to='org/name'".
    """
    with _writing(where):
        from huggingface_hub import constants, get_token

        if constants.is_offline_mode():
            raise HubError(f"{where}: HF_HUB_OFFLINE=1 forbids to upload")
        if get_token() is None:
            raise HubError(f"{where}: {_LOG_IN}")


def upload(name: str, files: Mapping[str, Path | bytes], private: bool, message: str) -> str:
    """Upload a model's files in one commit and return the address of the repository. Weights of an earlier upload that
    are not among the files are removed.

    Args:
        name: "org/name"; the repository is created if it does not exist.
        files: paths of files, or their contents, by name in the repository.
        private: whether a repository that is created is private.
        message: the commit's message.

    Raises:
        HubError: there is no token, or it may not write there; or the hub cannot be reached.
    """
    if not may_be_name(name) or "@" in name:
        raise HubError(f"{name!r} is not the name of a repository: give org/name")
    check_token(name)
    with _writing(name):
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        api = HfApi()
        url = api.create_repo(name, private=private, exist_ok=True)
        there = api.list_repo_files(name)
        old = [path for path in there if path.endswith((".safetensors", INDEX)) and path not in files]
        operations: list[Any] = [CommitOperationDelete(path) for path in old]
        operations += [
            CommitOperationAdd(path, data if isinstance(data, bytes) else str(data)) for path, data in files.items()
        ]
        api.create_commit(name, operations, commit_message=message)
        return str(url)


_LOG_IN = "no token to upload with: log in with `hf auth login`, or set HF_TOKEN, with one that may write"


@contextmanager
def _writing(where: str) -> Iterator[None]:
    """Turn what huggingface_hub raises inside the block into a HubError that begins with `where`."""
    try:
        yield
    except HubError:
        raise
    except ModuleNotFoundError as error:
        if error.name != "huggingface_hub":
            raise
        raise HubError(f"{where}: uploads need huggingface_hub: pip install 'shardwise[hf]'") from None
    except Exception as error:
        from huggingface_hub import constants, errors

        host = constants.ENDPOINT.partition("://")[2]
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
        if status in {_NOT_KNOWN, _FORBIDDEN}:
            said = f"the token may not write there on {host}: use one with write access, or another namespace"
        elif status is None and isinstance(error, _unreachable()):
            said = f"{host} cannot be reached ({one_line(error)})"
        else:
            said = f"{host} refused the upload: {one_line(error, with_type=True)}"
        raise HubError(f"{where}: {said}") from error
