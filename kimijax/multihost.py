"""Several processes, one on each host, that work together through `jax.distributed`.

Every process runs the same programs over the devices of all of them, in the same order. `initialize` comes before
anything that asks JAX for a device.
"""

import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import jax

# JAX has no public way to its key-value store, nor to the address that it found for the coordinator.
from jax._src import distributed

from .errors import ConfigError

# Seconds. A server has a closer watch of its own (`engine.remote`); training has these.
START_TIMEOUT = 300  # until all processes are there
HEARTBEAT_TIMEOUT = 30  # after which a silent process is lost, and the others end with an error
SHUTDOWN_TIMEOUT = 30  # that the first to end waits for the others
COLLECTIVE_TIMEOUT = 300  # in one collective, where all processes live but one does not come; compiling takes long

# The flags of XLA that bound a collective; those of JAX 0.11 and 0.12 alike. Unset, most of them wait for ever.
_XLA_TIMEOUTS = (
    "xla_gpu_nccl_termination_timeout_seconds",
    "xla_gpu_first_collective_call_terminate_timeout_seconds",
    "xla_cpu_collective_timeout_seconds",
    "xla_cpu_collective_call_terminate_timeout_seconds",
)

_FLAGS = "--num-hosts, --host-id and --coordinator"


@dataclass(frozen=True)
class HostsConfig:
    """Which processes work together; checked when made: ConfigError names the flag.

    Attributes:
      num_hosts: processes; "auto": what SLURM, Kubernetes or Open MPI say of this job.
      host_id: which of them this is, from 0; None where there is one, or for "auto".
      coordinator: host:port at which process 0 is reached by all, a port that is free there; None as for `host_id`.
    """

    num_hosts: int | Literal["auto"] = 1
    host_id: int | None = None
    coordinator: str | None = None

    def __post_init__(self) -> None:
        n, i = self.num_hosts, self.host_id
        if n == "auto":
            for flag, value in (("--host-id", i), ("--coordinator", self.coordinator)):
                if value is not None:
                    fix = f"leave it out, or give all of {_FLAGS}"
                    raise ConfigError(flag, value, "none beside --num-hosts auto", fix)
            return
        if n < 1:
            raise ConfigError("--num-hosts", n, "1 or more, or auto")
        if n > 1 and (i is None or self.coordinator is None):
            flag = "--host-id" if i is None else "--coordinator"
            expected = "a number from 0" if i is None else "host:port of host 0"
            raise ConfigError(flag, None, f"{expected}: {n} hosts need all of {_FLAGS}", "or use --num-hosts auto")
        if i is not None and not 0 <= i < n:
            raise ConfigError("--host-id", i, f"0 ... {n - 1}: --num-hosts is {n}")
        if self.coordinator is not None:
            if n == 1 and i is None:
                raise ConfigError("--coordinator", self.coordinator, f"all of {_FLAGS}, or none of them")
            host, colon, port = self.coordinator.rpartition(":")
            if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
                raise ConfigError("--coordinator", self.coordinator, "host:port", "name host 0 and a port free there")

    @property
    def is_several(self) -> bool:
        return self.num_hosts != 1


def hosts_value(text: str) -> int | Literal["auto"]:
    """A value of --num-hosts. ValueError: neither a number nor auto."""
    return "auto" if text == "auto" else int(text)


def initialize(hosts: HostsConfig) -> None:
    """Join the other processes; `jax.devices()` then lists the devices of all. Nothing happens for a single host.

    Each process sees all devices of its host, under SLURM too, where JAX by itself would take one a task.

    Raises:
      ConfigError: there is no cluster to ask, or the others could not be reached in START_TIMEOUT seconds.
    """
    if not hosts.is_several:
        return
    if hosts.host_id:
        _wait_for(hosts)
    set_xla_timeouts()
    # The only one that a CPU has between processes; of no concern to GPUs.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    timeouts: dict[str, Any] = {
        "initialization_timeout": START_TIMEOUT,
        "heartbeat_timeout_seconds": HEARTBEAT_TIMEOUT,
        "shutdown_timeout_seconds": SHUTDOWN_TIMEOUT,
    }
    if hosts.num_hosts == "auto":
        check_slurm()
        try:
            jax.distributed.initialize(local_device_ids=[], **timeouts)  # empty: no device is hidden
        except ValueError as e:
            expected = "a step of SLURM, an indexed Job of Kubernetes (with the package kubernetes) or Open MPI"
            raise ConfigError("--num-hosts", "auto", expected, f"give all of {_FLAGS} ({e})") from e
        except RuntimeError as e:
            raise ConfigError("--num-hosts", "auto", "processes that find each other", str(e)) from e
        return
    try:
        jax.distributed.initialize(
            hosts.coordinator, hosts.num_hosts, hosts.host_id, cluster_detection_method="deactivate", **timeouts
        )
    except RuntimeError as e:
        expected = f"an address at which {hosts.num_hosts} processes meet within {START_TIMEOUT} s"
        raise ConfigError("--coordinator", hosts.coordinator, expected, str(e)) from e


def _wait_for(hosts: HostsConfig) -> None:
    """Wait until something listens at the coordinator's address: JAX itself would abort where nothing ever does."""
    assert hosts.coordinator is not None
    host, _, port = hosts.coordinator.rpartition(":")
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError as e:
            if time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            expected = f"host 0 to listen there within {START_TIMEOUT} s"
            fix = "start all hosts; the address must be reachable from each"
            raise ConfigError("--coordinator", hosts.coordinator, expected, f"{fix} ({e})") from e
        return


def set_xla_timeouts() -> None:
    """Bound collectives, but for flags that the user has set. XLA reads them when the first device is asked for."""
    given = os.environ.get("XLA_FLAGS", "")
    flags = [f"--{name}={COLLECTIVE_TIMEOUT}" for name in _XLA_TIMEOUTS if f"--{name}=" not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *flags]).strip()


def check_slurm() -> None:
    """ConfigError where SLURM runs more than one process of this step on a node: each would take all its devices."""
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")  # like 1(x4), or 2,1
    if {part.partition("(")[0] for part in tasks.split(",")} != {"1"}:
        raise ConfigError("SLURM_STEP_TASKS_PER_NODE", tasks, "one process a node", "srun --ntasks-per-node=1")


def coordinator_host() -> str:
    """The name or address at which all processes reach process 0."""
    address = distributed.global_state.coordinator_address
    assert address is not None, "initialize comes first"
    return address.rpartition(":")[0].strip("[]")


def publish(key: str, value: str) -> None:
    """Let every process read a text under a name, once."""
    _store().key_value_set(key, value)


def published(key: str, timeout: float) -> str:
    """What some process has published or will, within `timeout` seconds. ConfigError: none has."""
    try:
        return _store().blocking_key_value_get(key, int(timeout * 1000))
    except RuntimeError as e:
        raise ConfigError("hosts", None, f"{key} of host 0 within {timeout:.0f} s", str(e)) from e


def _store() -> Any:
    client = distributed.global_state.client
    assert client is not None, "initialize comes first"
    return client


def leave(code: int) -> NoReturn:
    """End this process where it is. At an ordinary end JAX waits for the others, who may never come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
