"""What several processes of one stage must agree on: what the run is, its folder, when to stop, and when all are done.

A process that is lost, or that gives up, is noticed by the others through `kimijax.multihost`, which ends them with an
error: nothing here waits for it for longer.
"""

import hashlib
import itertools
import json
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import multihost as orbax_multihost

from kimijax.errors import ConfigError

from .draft_recipe import DraftRecipe
from .run_record import plain, versions

_visits = itertools.count()  # a barrier is used once
_STOP = ".stop"
_WAIT_SECONDS = 7 * 24 * 3600  # for the slowest; a lost one ends the wait at once


def is_first() -> bool:
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """A line on stderr, which says from which of several processes it is."""
    host = f"host {jax.process_index()}: " if jax.process_count() > 1 else ""
    print(f"{host}{text}", file=sys.stderr, flush=True)


def wait_for_all(name: str) -> None:
    """Return once every process has come here, however long it takes; `name` is for messages."""
    key = f"kimijax.train.{next(_visits)}.{name}"
    orbax_multihost.get_barrier_sync_fn()(key=key, timeout_ms=_WAIT_SECONDS * 1000)


def check_alike(recipe: DraftRecipe, out: Path) -> None:
    """Refuse processes that were started with different recipes or programs, or that see different folders: their
    collectives would not match, and their files not meet.

    Args:
      recipe: of this process.
      out: the run's folder, which exists for the first process.
    Raises:
      ConfigError: names what differs, and between which processes.
    """
    if jax.process_count() == 1:
        return
    parts = {"devices of a process": jax.local_device_count(), "versions": versions(), **plain(recipe)}
    digests = [hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest() for value in parts.values()]
    found = multihost_utils.process_allgather(np.frombuffer(b"".join(digests), np.uint8).reshape(len(parts), -1))
    for process, other in enumerate(found):
        for name, same in zip(parts, (other == found[0]).all(axis=1), strict=True):
            if not same:
                fix = "start all with one command, but for --host-id, in one environment"
                raise ConfigError(name, f"a difference between hosts 0 and {process}", "the same on all hosts", fix)
    _check_shared(out)


def _check_shared(out: Path) -> None:
    """ConfigError where a process does not see what the first one writes."""
    token = multihost_utils.process_allgather(np.frombuffer(secrets.token_bytes(8), np.uint8))[0].tobytes().hex()
    mark = out / f".hosts-{token}"
    if is_first():
        mark.touch()
    wait_for_all("mark")
    sees = gathered(np.array(mark.exists()))
    if is_first():
        mark.unlink()
    if not sees.all():
        fix = "put it on a file system that all of them mount"
        raise ConfigError("--out", str(out), f"one folder of all hosts; host {int(sees.argmin())} has another", fix)


def gathered(own: np.ndarray) -> np.ndarray:
    """This process's array and those of the others: [processes, ...]."""
    return own[None] if jax.process_count() == 1 else np.asarray(multihost_utils.process_allgather(own))


class StopTogether:
    """Asked after every update: whether to stop. Of several processes all say so after the same one, the update after
    that in which one of them was asked: the answer of the others comes while the devices compute."""

    def __init__(self, stop: Callable[[], bool], mesh: Mesh | None) -> None:
        """
        Args:
          stop: whether this process is asked to stop.
          mesh: of the run.
        """
        self._stop, self._mesh = stop, mesh
        self._asked: jax.Array | None = None
        if mesh is not None:
            self._any = jax.jit(jnp.any, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self) -> bool:
        own = self._stop()
        if self._mesh is None or jax.process_count() == 1:
            return own
        votes = np.full(jax.local_device_count(), own)
        sharding = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        before, self._asked = self._asked, self._any(jax.make_array_from_process_local_data(sharding, votes))
        return before is not None and bool(before)


class StopShared:
    """Asked now and then by processes that write into one folder: whether one of them was asked to stop. Within `with`.

    Those that work in step ask the same number of times and hear the same; others find a mark in the folder.
    """

    def __init__(self, stop: Callable[[], bool], folder: Path, *, in_step: bool) -> None:
        """
        Args:
          stop: whether this process is asked to stop.
          folder: where the mark is put; it may be made later.
          in_step: whether all processes ask together.
        """
        self._stop, self._mark, self._in_step = stop, folder / _STOP, in_step

    def __enter__(self) -> Self:
        self._clear()  # of a session that was killed
        wait_for_all("clear")
        return self

    def __exit__(self, *exception: object) -> None:
        self._clear()

    def __call__(self) -> bool:
        own = self._stop()
        if jax.process_count() == 1:
            return own
        if self._in_step:
            return bool(gathered(np.array(own)).any())
        if own:
            self._mark.touch()
        return own or self._mark.exists()

    def _clear(self) -> None:
        if is_first():
            self._mark.unlink(missing_ok=True)
