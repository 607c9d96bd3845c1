"""Names of a hub as directories, against the mock hub; each client is a process with a cache of its own."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from shardwise.hub import HubName, fetch, hub_name, local
from tests.hub import mock

CODE = """
import sys
from shardwise.errors import HubError
from shardwise.hub import fetch
try:
    print(fetch(sys.argv[1], f"model.path={sys.argv[1]!r}", weights=sys.argv[2] == "weights", say=print))
except HubError as error:
    print("error:", error)
assert "torch" not in sys.modules
"""
HEADER = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
TENSORS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)
SINGLE = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "model.safetensors": TENSORS}
SHARDED = {
    "config.json": b"{}",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    ).encode(),
    "model-1.safetensors": TENSORS,
    "model-2.safetensors": TENSORS * 2,
    "consolidated.safetensors": bytes(5000),
    "original/params.json": b"{}",
    "pytorch_model.bin": bytes(7000),
    "README.md": b"# ",
}


@pytest.fixture
def hub() -> Iterator[mock.Hub]:
    with mock.running() as hub:
        yield hub


def had(  # noqa: PLR0913
    hub: mock.Hub, home: Path, text: str, what: str = "weights", *, code: str = CODE, token: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """Return the last line that a client prints: the directory, or the error."""
    variables = {**os.environ, **hub.environment(home, token), **(environment or {})}
    command = [sys.executable, "-c", code, text, what]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, cwd=home.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("org/na.me-1_2@v1.0", HubName("org/na.me-1_2", "v1.0")),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1")),
        ("name", None),
        ("org/name/file", None),
        ("./org/name", None),
        ("/org/name", None),
        ("../name", None),
        ("s3://org/name", None),
        ("org/name@", None),
        ("org/a name", None),
        (Path("org/name"), None),
    ],
)
def test_names_are_told_from_paths(text: str | Path, name: HubName | None) -> None:
    assert hub_name(text) == name


def test_a_local_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org/name").mkdir(parents=True)
    assert hub_name("org/name") is None
    assert fetch("org/name", "") == local("org/name") == Path("org/name")


def test_only_what_is_asked_for_is_downloaded(hub: mock.Hub, tmp_path: Path) -> None:
    hub.add("org/sharded", SHARDED)
    folder = Path(had(hub, tmp_path / "home", "org/sharded", "configuration"))
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors.index.json"}
    assert Path(had(hub, tmp_path / "home", "org/sharded")) == folder
    weights = {"model-1.safetensors", "model-2.safetensors"}
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors.index.json", *weights}
    assert (folder / "model-2.safetensors").read_bytes() == TENSORS * 2
    assert sum(r.sent_bytes for r in hub.recorded(".safetensors")) == 3 * len(TENSORS)


def test_what_is_in_the_cache_costs_one_request_and_a_pinned_name_none(hub: mock.Hub, tmp_path: Path) -> None:
    commit = hub.add("org/single", SINGLE).refs["main"]
    home = tmp_path / "home"
    folder = had(hub, home, "org/single")
    asked = len(hub.requests)
    assert had(hub, home, "org/single") == folder
    assert [(r.path, r.status) for r in hub.requests[asked:]] == [("/api/models/org/single/revision/main", 200)] or [
        r.path for r in hub.requests[asked:]
    ] == ["/api/models/org/single"]
    assert had(hub, home, f"org/single@{commit}") == folder
    assert had(hub, home, "org/single", environment={"HF_HUB_OFFLINE": "1"}) == folder
    assert len(hub.requests) == asked + 1


def test_a_revision_is_read(hub: mock.Hub, tmp_path: Path) -> None:
    repository = hub.add("org/single", SINGLE)
    old = repository.refs["main"]
    repository.commit({**SINGLE, "config.json": b'{"model_type": "gpt2"}'}, "v2")
    assert b"gpt2" in (Path(had(hub, tmp_path / "home", "org/single@v2")) / "config.json").read_bytes()
    assert b"llama" in (Path(had(hub, tmp_path / "home", f"org/single@{old}")) / "config.json").read_bytes()


@pytest.mark.parametrize("offers_xet", [False, True], ids=["http", "xet offered"])
def test_a_killed_download_is_gone_on_with(hub: mock.Hub, tmp_path: Path, offers_xet: bool) -> None:
    """A process that is killed keeps every byte that it had, and nothing is downloaded twice."""
    hub.offers_xet = offers_xet
    environment = {"HF_HUB_DISABLE_XET": "0"} if offers_xet else {}
    big = os.urandom(64 * 2**20)
    hub.add("org/sharded", {**SHARDED, "model-2.safetensors": big})
    hub.bytes_per_s = 40 * 2**20
    variables = {**os.environ, **hub.environment(tmp_path / "home"), **environment}
    client = subprocess.Popen([sys.executable, "-c", CODE, "org/sharded", "weights"], env=variables)
    while sum(path.stat().st_size for path in (tmp_path / "home").rglob("*.partial")) <= 10 * 2**20:
        assert client.poll() is None
        time.sleep(0.01)
    client.kill()
    client.wait()
    (partial,) = (tmp_path / "home").rglob("*.partial")
    had_bytes = partial.stat().st_size
    hub.bytes_per_s = None
    hub.cut["model-2.safetensors"] = 12 * 2**20  # and what is gone on with is cut as well
    said = had(hub, tmp_path / "home", "org/sharded", environment=environment)
    assert (Path(said) / "model-2.safetensors").read_bytes() == big
    sent = [r for r in hub.recorded("model-2.safetensors") if r.method == "GET" and r.path.startswith("/cdn")]
    assert [r.status for r in sent] == [200, 206, 206]
    assert sent[1].sent_bytes == 12 * 2**20
    assert sent[2].sent_bytes == len(big) - had_bytes - 10 * 2**20  # whole chunks of ten MiB are kept
    assert sum(r.sent_bytes for r in hub.recorded("model-1.safetensors")) == len(TENSORS)
    assert not [*(tmp_path / "home").rglob("*.partial")]


@pytest.mark.parametrize("wrong", [bytes(40), bytes(4000)], ids=["too short", "too long"])
def test_damaged_bytes_of_a_killed_download_are_fetched_anew(hub: mock.Hub, tmp_path: Path, wrong: bytes) -> None:
    """As a power failure leaves them."""
    hub.add("org/single", SINGLE)
    blobs = tmp_path / "home" / "hub" / "models--org--single" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(TENSORS).hexdigest()}.partial").write_bytes(wrong)
    assert (Path(had(hub, tmp_path / "home", "org/single")) / "model.safetensors").read_bytes() == TENSORS
    assert [path.stat().st_size for path in blobs.glob("*") if len(path.name) == 64] == [len(TENSORS)]


def test_processes_that_download_at_the_same_time_download_once(hub: mock.Hub, tmp_path: Path) -> None:
    hub.add("org/single", {**SINGLE, "model.safetensors": TENSORS + bytes(2**20)})
    hub.bytes_per_s = 2**19
    variables = {**os.environ, **hub.environment(tmp_path / "home")}
    command = [sys.executable, "-c", CODE, "org/single", "weights"]
    clients = [subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {client.communicate(timeout=120)[0].splitlines()[-1] for client in clients}
    assert len(folders) == 1
    assert sum(r.sent_bytes for r in hub.recorded("model.safetensors")) == len(TENSORS) + 2**20


def test_an_interrupt_ends_a_download_and_keeps_its_bytes(hub: mock.Hub, tmp_path: Path) -> None:
    big = os.urandom(48 * 2**20)
    hub.add("org/single", {**SINGLE, "model.safetensors": big})
    hub.bytes_per_s = 20 * 2**20
    variables = {**os.environ, **hub.environment(tmp_path / "home")}
    command = [sys.executable, "-c", CODE, "org/single", "weights"]
    client = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not sum(path.stat().st_size for path in (tmp_path / "home").rglob("*.partial")):
        assert client.poll() is None
        time.sleep(0.01)
    client.send_signal(signal.SIGINT)
    client.communicate(timeout=60)
    (partial,) = (tmp_path / "home").rglob("*.partial")
    had_bytes = partial.stat().st_size
    assert 0 < had_bytes < len(big)
    hub.bytes_per_s = None
    variables = {**os.environ, **hub.environment(tmp_path / "home")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    said, folder = done.stdout.splitlines()
    assert f"the last {len(big) - had_bytes:,} bytes" in said
    assert (Path(folder) / "model.safetensors").read_bytes() == big


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("org/none", r"no such file or directory here; did you mean org/nine\? and no model org/none on 127.0.0.1:\d+"),
        (
            "org/open@v9",
            r"org/open has no revision 'v9': give a branch, a tag or a commit of http://127.0.0.1:\d+/org/open",
        ),
        ("org/gated", r"org/gated is gated: ask for access at http://127.0.0.1:\d+/org/gated, then .* `hf auth login`"),
        ("org/private", "no model org/private on .* if it is private, log in with `hf auth login`"),
        ("org/pickled", r"only as pickles \(pytorch_model.bin\).*save_pretrained"),
        ("org/empty", "org/empty has no model.safetensors and no model.safetensors.index.json"),
        ("org/broken", "model.safetensors.index.json of .* is damaged: KeyError"),
        ("org/lost", "names 'model-9.safetensors', which the repository does not have"),
        ("org/na--me", "no name that a hub can have: Cannot have -- or"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(hub: mock.Hub, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "org" / "nine").mkdir(parents=True)
    config = {"config.json": b"{}"}
    hub.add("org/open", SINGLE)
    hub.add("org/gated", SINGLE, gated=True)
    hub.add("org/private", SINGLE, private=True)
    hub.add("org/pickled", {**config, "pytorch_model.bin": b"x"})
    hub.add("org/empty", config)
    hub.add("org/broken", {**config, "model.safetensors.index.json": b"{}"})
    index = json.dumps({"weight_map": {"a": "model-9.safetensors"}}).encode()
    hub.add("org/lost", {**config, "model.safetensors.index.json": index})
    line = had(hub, tmp_path / "home", text)
    assert line.startswith(f"error: model.path={text!r}: ")
    assert re.search(said, line), line
    assert not any(r.sent_bytes for r in hub.recorded(".bin"))


def test_without_a_network(hub: mock.Hub, tmp_path: Path) -> None:
    hub.add("org/single", SINGLE)
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    line = had(hub, tmp_path / "home", "org/single", environment=nobody)
    assert "127.0.0.1:9 cannot be reached" in line
    assert "check the network, HF_ENDPOINT and proxies, or give a directory" in line
    line = had(hub, tmp_path / "home", "org/single", environment={"HF_HUB_OFFLINE": "1"})
    assert f"not completely, in the cache {tmp_path / 'home' / 'hub'}: HF_HUB_OFFLINE=1 forbids" in line
    folder = had(hub, tmp_path / "home", "org/single")
    assert had(hub, tmp_path / "home", "org/single", environment=nobody) == folder  # the cache has it
    had(hub, tmp_path / "other", "org/single", "configuration")
    line = had(hub, tmp_path / "other", "org/single", environment={"HF_HUB_OFFLINE": "1"})
    assert "HF_HUB_OFFLINE=1 forbids" in line


def test_a_hub_that_fails(hub: mock.Hub, tmp_path: Path) -> None:
    hub.add("org/single", SINGLE)
    hub.status["/api/models"] = 500
    assert "answered 500 for org/single" in had(hub, tmp_path / "home", "org/single")


def test_a_token_opens_gated_repositories(hub: mock.Hub, tmp_path: Path) -> None:
    hub.add("org/gated", SINGLE, gated=True)
    assert "is gated" in had(hub, tmp_path / "home", "org/gated", token=mock.READER)
    assert (Path(had(hub, tmp_path / "home", "org/gated", token=mock.WRITER)) / "model.safetensors").exists()


def test_no_room_is_said_before_anything_is_downloaded(hub: mock.Hub, tmp_path: Path) -> None:
    hub.add("org/sharded", SHARDED)
    code = f"""
import collections, shutil
shutil.disk_usage = lambda path: collections.namedtuple("Usage", "free")({3 * len(TENSORS) - 1})
{CODE}"""
    line = had(hub, tmp_path / "home", "org/sharded", code=code)
    assert f"org/sharded needs {3 * len(TENSORS):,} bytes (0.00 GiB) more in the cache" in line
    assert f"whose disk has {3 * len(TENSORS) - 1:,} bytes" in line
    assert not any(r.sent_bytes for r in hub.recorded("model-1.safetensors"))


def test_without_huggingface_hub(hub: mock.Hub, tmp_path: Path) -> None:
    code = f"import sys; sys.modules['huggingface_hub'] = None\n{CODE}"
    line = had(hub, tmp_path / "home", "org/single", code=code)
    assert "names of a hub need huggingface_hub: pip install 'shardwise[hf]'" in line


def test_several_ranks_download_once(hub: mock.Hub, tmp_path: Path) -> None:
    """The first of the machine, while the others wait longer than they would in a collective."""
    commit = hub.add("org/sharded", {**SHARDED, "model-2.safetensors": os.urandom(3 * 2**20)}).refs["main"]
    hub.bytes_per_s = 3 * 2**20 / 8  # 8 s, where a collective waits for 5
    code = """
import os, sys
from datetime import timedelta
import huggingface_hub.hf_api
import torch
import torch.distributed as dist
from shardwise.hub import fetch_together
from shardwise.train.process.ranks import Ranks
store = dist.FileStore(sys.argv[1], 3)
rank = int(os.environ["RANK"])
store.set(f"imported {rank}", "")
store.wait([f"imported {peer}" for peer in range(3)], timedelta(seconds=100))
dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=5))
ranks = Ranks(rank, 3, torch.device("cpu"))
folder = fetch_together("org/sharded", "here", ranks, weights=True)
assert (folder / "model-2.safetensors").stat().st_size == 3 * 2**20
print(folder.name)
dist.destroy_process_group()
"""
    variables = {**os.environ, **hub.environment(tmp_path / "home")}
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "store")],
            env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    assert [client.communicate(timeout=120)[0].strip() for client in clients] == [commit] * 3
    assert sum(r.sent_bytes for r in hub.recorded("model-2.safetensors")) == 3 * 2**20
    assert len([r for r in hub.requests if r.path.startswith("/api/models/org/sharded/tree")]) <= 2


def test_an_upload_replaces_the_one_before(hub: mock.Hub, tmp_path: Path) -> None:
    """Weights that it no longer has are removed, in the same commit; a repository of another's is refused."""
    code = """
import sys
from shardwise.errors import HubError
from shardwise.hub import upload
try:
    for files in ({"model-1.safetensors": b"a" * 100, "config.json": b"{}"}, {"model.safetensors": b"b" * 50}):
        print(upload(sys.argv[1], files, True, "message"))
except HubError as error:
    print("error:", error)
"""
    assert had(hub, tmp_path / "home", "me/mine", code=code, token=mock.WRITER) == f"{hub.url}/me/mine"
    repository = hub.repositories["model", "me/mine"]
    files = repository.commits[repository.refs["main"]]
    assert files == {".gitattributes": b"", "config.json": b"{}", "model.safetensors": b"b" * 50}
    assert repository.private
    assert len(repository.commits) == 3
    refused = had(hub, tmp_path / "home", "me/other", code=code, token=mock.READER)
    assert re.fullmatch(r"error: me/other: the token may not write there on 127.0.0.1:\d+: use one with .*", refused)
    refused = had(hub, tmp_path / "home", "me/other", code=code)
    assert refused.startswith("error: me/other: no token to upload with: log in with `hf auth login`")
    refused = had(
        hub, tmp_path / "home", "me/x", code=code, token="t", environment={"HF_ENDPOINT": "http://127.0.0.1:9"}
    )
    assert refused.startswith("error: me/x: 127.0.0.1:9 cannot be reached")
