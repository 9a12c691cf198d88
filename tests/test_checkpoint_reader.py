"""Reading over a mesh: what each process reads, how far it reads ahead, and how it stops."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimijax import checkpoint, checkpoint_reader, synthetic
from kimijax.checkpoint import Checked
from kimijax.checkpoint_reader import Leaf, read_leaves
from kimijax.config import load_config
from kimijax.errors import CheckpointError
from kimijax.names import Path as ParameterPath
from kimijax.safetensors_io import FilePool, TensorInfo
from kimijax.sharding import PRESETS, Preset, make_mesh

from .checkpoint_cases import loaded
from .golden import FAMILIES, with_quantization, write_checkpoint

K25 = with_quantization(FAMILIES["kimi_k25"], "int4")

# Parameters of whose tensors more bytes are read than local shards hold: halves of each head, of which both are read;
# and where a split runs along the inputs.
HALVES = {"k_up", "v_up"}
CUT_INTO_COLUMNS: dict[Preset, set[str]] = {
    "tp": {"o", "down", "down_packed", "down_scale"},
    "dcp": {"o", "down", "down_packed", "down_scale"},
    "ep": {"o", "down"},
    "dp-attention": set(),
}


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of real headers, in the published layout."""
    directory = tmp_path_factory.mktemp("headers") / "c"
    synthetic.write(K25, directory, sparse=True)
    return directory


class Recorded(FilePool):
    """Counts how often each byte of a tensor is read; reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: dict[str, np.ndarray] = {}

    def read_into(self, info: TensorInfo, start: int, out: np.ndarray) -> None:
        counts = self.reads.setdefault(info.name, np.zeros(info.nbytes, np.int64))
        counts[start : start + out.nbytes] += 1
        out.view(np.uint8)[...] = 0


class AtOnce:
    """An executor that has no threads."""

    def submit(self, job: Callable[..., None], *args: Any) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(job(*args))
        return done


class Local:
    """The sharding as one of several processes sees it."""

    def __init__(self, whole: Any, devices: list[Any]) -> None:
        self._whole, self._devices = whole, devices

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[Any, Any]:
        found = self._whole.devices_indices_map(shape)
        return {d: found[d] for d in self._devices}


def needed_rows(leaf: Leaf, sharding: Any, name: str) -> tuple[np.ndarray, int]:
    """Which rows of a tensor, along its view's first dimension, some local shard needs values of, and how many values
    that are: element by element, without the reader's arithmetic."""
    [piece] = [s.piece for s in leaf.sources if s.piece.name == name]
    wanted = np.zeros(leaf.shape, bool)
    for index in sharding.addressable_devices_indices_map(leaf.shape).values():
        wanted[index] = True
    values = np.zeros(piece.view, bool)
    values[tuple(slice(b, b + n) for b, n in zip(piece.begin, piece.block, strict=True))] = wanted[piece.at]
    return values.reshape(piece.view[0], -1).any(1), int(values.sum())


@pytest.mark.parametrize("processes", [1, 2, 8])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_process_reads_what_its_devices_need_and_once(preset: Preset, processes: int, headers: Path) -> None:
    """Row by row. Bytes beyond that are the other columns of such rows, in those tensors that are cut into columns, and
    the other half of the head in kv_b."""
    checked = checkpoint.check(headers, load_config(headers), mesh=make_mesh(preset=preset))
    each = 8 // processes
    excess: set[str] = set()
    read: dict[str, int] = defaultdict(int)
    for p in range(processes):
        devices = jax.devices()[p * each : (p + 1) * each]
        for path, leaf in checked.leaves.items():
            local = Local(checked.shardings[path], devices)
            pool = Recorded()
            reader = checkpoint_reader._Reader(pool, leaf.dtype, "exact", [])
            checkpoint_reader._begin(leaf, local, reader, AtOnce())  # pyright: ignore[reportArgumentType]
            for source in leaf.sources:
                rows, values = needed_rows(leaf, local, source.piece.name)
                counts = pool.reads.get(source.weight.name, np.zeros(source.weight.nbytes, np.int64))
                assert np.array_equal(counts, np.repeat(rows, counts.size // len(rows))), path
                item = source.weight.nbytes // source.weight.size
                if counts.sum() > values * item:
                    excess.add(str(path[-1]))
                read[str(path[-1])] += int(counts.sum())
    if processes == 1:
        assert excess == HALVES
    else:
        assert excess == HALVES | CUT_INTO_COLUMNS[preset]
    experts = [leaf for leaf in checked.leaves.values() if leaf.path[-1] == "gate_up_packed"]
    assert read["gate_up_packed"] == sum(s.weight.nbytes for leaf in experts for s in leaf.sources)


def watched(monkeypatch: pytest.MonkeyPatch, bound: int) -> list[int]:
    """Loads with a small bound; the bytes under way, at each beginning."""
    monkeypatch.setattr(checkpoint_reader, "_IN_FLIGHT", bound)
    under_way, seen = [0], []
    begin, finish = checkpoint_reader._begin, checkpoint_reader._Task.finish

    def begun(*args: Any) -> Any:
        task = begin(*args)
        under_way[0] += task.nbytes
        seen.append(under_way[0])
        return task

    def finished(task: Any) -> Any:
        array = finish(task)
        under_way[0] -= task.nbytes
        return array

    monkeypatch.setattr(checkpoint_reader, "_begin", begun)
    monkeypatch.setattr(checkpoint_reader._Task, "finish", finished)
    return seen


@pytest.mark.parametrize("bound", [0, 1 << 40])
def test_parameters_under_way_stay_within_the_bound(
    bound: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_checkpoint("kimi_k25", tmp_path / "c", quantization="int4")
    wanted = {p: np.asarray(a) for p, a in loaded(checkpoint.load(directory, load_config(directory))).items()}
    seen = watched(monkeypatch, bound)
    arrays = loaded(checkpoint.load(directory, load_config(directory)))
    largest, total = max(a.nbytes for a in wanted.values()), sum(a.nbytes for a in wanted.values())
    assert max(seen) == total if bound else largest < max(seen) <= 2 * largest
    assert len(seen) == len(arrays)
    for path, value in wanted.items():
        assert np.array_equal(np.asarray(arrays[path]), value), path


def test_the_bound_is_stated() -> None:
    gib = 1 << 30
    assert checkpoint_reader.in_flight_bytes(iter([])) == 2 * gib
    assert checkpoint_reader.in_flight_bytes(iter([gib // 2, gib])) == 2 * gib
    assert checkpoint_reader.in_flight_bytes(iter([5 * gib, gib])) == 10 * gib


def test_the_next_parameters_are_read_while_one_is_transferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first transfer ends only when the last tensor has been read."""
    directory = write_checkpoint("kimi_k25", tmp_path / "c", quantization="int4")
    checked = checkpoint.check(directory, load_config(directory))
    last = max(
        (s.weight for leaf in checked.leaves.values() for s in leaf.sources), key=lambda t: (str(t.file), t.begin)
    )
    reached, put, read_into = Event(), jax.device_put, FilePool.read_into

    def slow(*args: Any) -> Any:
        assert reached.wait(30), "nothing is read during a transfer"
        return put(*args)

    def read(pool: FilePool, info: TensorInfo, start: int, out: np.ndarray) -> None:
        read_into(pool, info, start, out)
        if info.name == last.name:
            reached.set()

    monkeypatch.setattr(jax, "device_put", slow)
    monkeypatch.setattr(FilePool, "read_into", read)
    arrays = read_all(checked)
    assert arrays.keys() == checked.leaves.keys()


def read_all(checked: Checked, **options: Any) -> Mapping[ParameterPath, jax.Array]:
    settings = {"rounding": "exact", "progress": False, "threads": 1} | options
    return read_leaves(checked.leaves, checked.shardings, **settings)


def test_a_failure_stops_what_is_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_checkpoint("kimi_k25", tmp_path / "c", quantization="int4")
    checked = checkpoint.check(directory, load_config(directory))
    cancelled, cancel = Event(), checkpoint_reader._Task.cancel
    last = max(checked.leaves.values(), key=lambda leaf: leaf.position)
    n_reads = 0

    def read(_: FilePool, info: TensorInfo, *args: Any) -> None:
        nonlocal n_reads
        n_reads += 1
        if n_reads == 1:
            raise CheckpointError(f"{info.file}: truncated while in use")
        assert cancelled.wait(30)  # the one that the only thread had begun meanwhile

    def cancels(task: Any) -> None:
        cancel(task)
        if task.leaf is last:
            cancelled.set()

    monkeypatch.setattr(FilePool, "read_into", read)
    monkeypatch.setattr(checkpoint_reader._Task, "cancel", cancels)
    with pytest.raises(CheckpointError, match="truncated while in use"):
        read_all(checked)
    assert n_reads <= 2 < len(checked.leaves)


@pytest.fixture
def direct_file_system(tmp_path: Path) -> Path:
    """A folder of a file system that reads directly; most do, but for those in memory."""
    file = tmp_path / "probe.safetensors"
    file.write_bytes(bytes(4096))
    try:
        with FilePool(direct=True) as pool:
            pool.read(TensorInfo(file, "probe", "U8", (8,), 100))
    except CheckpointError:
        pytest.skip(f"{tmp_path} does not support direct reads")
    return tmp_path


@pytest.mark.parametrize("devices", [1, 8])
def test_direct_reads_load_the_same(devices: int, direct_file_system: Path) -> None:
    directory = write_checkpoint("kimi_k25", direct_file_system / "c", quantization="int4")
    mesh = make_mesh() if devices > 1 else None
    one, two = (
        loaded(checkpoint.load(directory, load_config(directory), mesh=mesh, dtype=jnp.bfloat16, direct=direct))
        for direct in (False, True)
    )
    assert one.keys() == two.keys()
    for path, array in one.items():
        assert np.array_equal(np.asarray(array), np.asarray(two[path])), path
