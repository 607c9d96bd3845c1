"""The file format needs no torch: a checkpoint is written, committed, verified and read with numpy alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from safetensors.numpy import load_file

MODULES = [
    *(f"files.{name}" for name in ("direct", "local_file", "scratch_file", "thread_pool")),
    *(f"checkpoint.io.{name}" for name in ("checksums", "range_reader", "range_writer", "remote", "storage")),
    *(
        f"checkpoint.{name}"
        for name in ("names.index_map", "ranks.agreement", "ranks.file_barrier", "ranks.save_thread")
    ),
    *(
        f"checkpoint.format.{name}"
        for name in ("contents", "hugging_face", "manifest", "names_json", "safetensors_layout")
    ),
    *(f"checkpoint.format.{name}" for name in ("tensor_files", "training_json")),
    *(f"checkpoint.publish.{name}" for name in ("commit", "consolidation", "per_rank_files", "shared_files", "target")),
    "checkpoint.publish.writing",
]
SCRIPT = """
import sys
sys.modules["torch"] = None  # an import of torch raises
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np

for name in sys.argv[2:]:
    import_module(f"shardwise.{name}")

from shardwise.checkpoint import latest, verify
from shardwise.checkpoint.format import tensor_files, training_json
from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.checkpoint.names.index_map import Place
from shardwise.checkpoint.publish.shared_files import SharedFiles
from shardwise.checkpoint.publish.target import FileSet, Written


@dataclass
class ArrayPiece:
    '''Rows from `row` on of a matrix.'''

    name: str
    shape: tuple
    array: np.ndarray
    row: int
    is_whole: bool = False

    def __post_init__(self):
        self.names = (self.name,)
        self.places = (Place.whole(self.name, self.shape),)
        self.stored = [StoredTensor(self.name, "F32", self.shape)]
        self.start = self.row * self.shape[1]

    def held_at(self, place):
        return place.runs.within(self.start, self.start + self.array.size).moved(here=-self.start).inverse()

    def chunks(self, runs):
        for part in runs.stretches(5):
            first = int(part.there[0])
            yield int(part.here[0]), self.array.reshape(-1)[first : first + part.numel].view(np.uint8).data

    def begin_overwrite(self):
        return self.array.size > 0

    def fill(self, reader, layout, place, past_cache):
        runs = self.held_at(place)
        start = layout.byte_range(place.name, int(runs.here[0]), int(runs.here[0])).start
        reader.ask(start, self.array.reshape(-1).view(np.uint8).data, past_cache)
        return tensor_files.Read(self.array.nbytes, 0)


run = Path(sys.argv[1])
whole = np.arange(42, dtype=np.float32).reshape(6, 7)
pieces = [ArrayPiece("w", (6, 7), whole[:2].copy(), 0), ArrayPiece("w", (6, 7), whole[2:].copy(), 2)]
files = tensor_files.files_for("model", pieces[:1], 10**9)
target = SharedFiles(run / "step-000003")
target.begin()
target.create([FileSet(files, pieces)])
reports = [target.write([FileSet(files, [piece])], rank).to_json() for rank, piece in enumerate(pieces)]
document = training_json.describe(step=3, optimizer=None, rng=[], extra={"from": "numpy"})
target.commit([FileSet(files, [])], Written.of_ranks(reports), {training_json.NAME: training_json.encode(document)})

assert latest(run) == run / "step-000003"
verify(run / "step-000003")
contents = Contents.of(run / "step-000003")
assert training_json.read(contents)["extra"] == {"from": "numpy"}
into = ArrayPiece("w", (6, 7), np.zeros((3, 7), np.float32), 1)
found = tensor_files.find(contents, "model")
assert tensor_files.read(contents, found, [(into, into.places[0])]).read_bytes == 84
assert (into.array == whole[1:4]).all()
assert not [name for name, module in sys.modules.items() if name.split(".")[0] == "torch" and module is not None]
"""


def test_a_checkpoint_is_written_verified_and_read_without_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), *MODULES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert load_file(tmp_path / "step-000003" / "model.safetensors")["w"].ravel().tolist() == list(range(42))
