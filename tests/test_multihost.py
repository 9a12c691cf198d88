"""Which hosts work together, and the channel between them."""

import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kimijax import multihost
from kimijax.engine import remote
from kimijax.engine.device import Start
from kimijax.engine.remote import Follower, Host, Leader, Link
from kimijax.engine.wire import Held, Message
from kimijax.errors import ConfigError
from kimijax.multihost import HostsConfig
from kimijax.serve import config

from .two_processes import free_port, run_processes


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--num-hosts 2", ("--host-id", "--num-hosts", "--coordinator")),
        ("--num-hosts 2 --host-id 1", ("--coordinator", "--num-hosts", "--host-id")),
        ("--num-hosts 2 --coordinator a:1", ("--host-id", "--num-hosts", "--coordinator")),
        ("--coordinator a:1", ("--coordinator", "--num-hosts", "--host-id")),
        ("--host-id 1", ("--host-id", "--num-hosts")),
        ("--num-hosts 2 --host-id 2 --coordinator a:1", ("--host-id", "0 ... 1")),
        ("--num-hosts 2 --host-id 0 --coordinator a", ("--coordinator", "host:port")),
        ("--num-hosts 2 --host-id 0 --coordinator a:0", ("--coordinator", "host:port")),
        ("--num-hosts 2 --host-id 0 --coordinator :80", ("--coordinator", "host:port")),
        ("--num-hosts 0", ("--num-hosts", "1 or more")),
        ("--num-hosts many", ("--num-hosts", "auto")),
        ("--num-hosts auto --host-id 1", ("--host-id", "auto")),
        ("--num-hosts auto --coordinator a:1", ("--coordinator", "auto")),
    ],
)
def test_incomplete_flags_are_refused_by_name(
    flags: str, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        config.parse_args(flags.split())
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert all(name in text for name in names), text


def test_flags_of_sglang_are_the_same() -> None:
    ours = config.parse_args("--num-hosts 2 --host-id 1 --coordinator node0:5000".split())
    assert ours == config.parse_args("--nnodes 2 --node-rank 1 --dist-init-addr node0:5000".split())
    assert ours.hosts == HostsConfig(2, 1, "node0:5000")
    assert HostsConfig("auto").is_several
    assert not HostsConfig(1, 0, "node0:5000").is_several  # as a script with a number of hosts may write it


def test_a_cluster_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "8(x2)")
    with pytest.raises(ConfigError, match="ntasks-per-node=1"):
        multihost.initialize(HostsConfig("auto"))


def test_a_coordinator_that_never_listens_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multihost, "START_TIMEOUT", 0.1)
    address = f"localhost:{free_port()}"
    with pytest.raises(ConfigError, match=f"^--coordinator: found '{address}', expected host 0 to listen"):
        multihost.initialize(HostsConfig(2, 1, address))


SLURM = """
import os, sys
job, _, _, _, number = sys.argv[1:6]
names = dict(JOB_ID=job, STEP_NODELIST="localhost", NTASKS="2", PROCID=number, LOCALID="0")
os.environ |= {f"SLURM_{name}": value for name, value in names.items()}
import jax
from kimijax.multihost import HostsConfig, initialize
initialize(HostsConfig("auto"))
print(jax.process_index(), jax.device_count(), jax.local_device_count())
"""


def test_slurm_says_who_the_hosts_are() -> None:
    # JAX takes one of the upper 4,096 ports, by the number of the job.
    done = run_processes(SLURM, 2, 4, [str(os.getpid())])
    assert [p.stdout.split() for p in done] == [["0", "8", "4"], ["1", "8", "4"]], done


@pytest.mark.parametrize(("tasks", "fits"), [("1(x4)", True), ("1", True), ("2,1", False), ("1(x3),2", False)])
def test_one_process_a_node(tasks: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
    if fits:
        multihost.check_slurm()
    else:
        with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE"):
            multihost.check_slurm()


def test_timeouts_of_collectives_leave_the_users_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_collective_timeout_seconds=7 --xla_dump_to=x")
    multihost.set_xla_timeouts()
    flags = os.environ["XLA_FLAGS"].split()
    assert flags[:2] == ["--xla_cpu_collective_timeout_seconds=7", "--xla_dump_to=x"]
    assert f"--xla_gpu_nccl_termination_timeout_seconds={multihost.COLLECTIVE_TIMEOUT}" in flags
    assert sum("xla_cpu_collective_timeout_seconds" in f for f in flags) == 1


class Pair:
    """A leader and its one follower, in this process; `faults` gets what either says of the other."""

    def __init__(self, *, follows: bool = True) -> None:
        self.here, self.there = socket.socketpair()
        self.faults: queue.Queue[tuple[str, str, int]] = queue.Queue()
        self.leader = Leader({Host(1, "second", 4): Link(self.here)}, lambda r, c: self.faults.put(("leader", r, c)))
        if follows:
            self.follower = Follower(Link(self.there), lambda r, c: self.faults.put(("follower", r, c)))

    def close(self) -> None:
        self.leader.close()
        self.there.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    # TCP_NODELAY is no option of the sockets that a pair has.
    monkeypatch.setattr(socket.socket, "setsockopt", lambda *args: None)
    pair = Pair()
    yield pair
    pair.close()


def test_calls_arrive_in_order_and_whole(pair: Pair) -> None:
    start = Start.blank(3, 4)
    pair.leader.call("start", (np.int32(7), start), {})
    pair.leader.call("verify", (np.ones((2, 3), np.int32), Held(0), None), {"k": 2})
    pair.leader.share([np.arange(3, dtype=np.int32)])
    seen: list[Any] = []
    message = pair.follower.follow(lambda program, args, static: seen.append((program, args, static)))
    (first, (place, found), none), (second, (ones, held, nothing), static) = seen
    assert (first, place, none) == ("start", np.int32(7), {})
    assert (second, held, nothing, static) == ("verify", Held(0), None, {"k": 2})
    assert ones.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert isinstance(found, Start)
    assert (found.length, found.left, found.rows.seed.tolist()) == (3, 4, [[0, 0]])
    assert (message.kind, message.arrays[0].tolist()) == ("share", [0, 1, 2])
    ending = threading.Thread(target=pair.leader.end, daemon=True)
    ending.start()
    assert pair.follower.follow(lambda *call: None).kind == "end"
    pair.follower.close()
    ending.join(2)  # it waits for followers to be gone, and no longer
    assert not ending.is_alive()
    assert pair.faults.empty()


def test_hosts_that_differ_are_refused_with_both_sides(pair: Pair) -> None:
    waiting = threading.Thread(target=pair.follower.agree, args=({"preset": "ep", "jax": "0.12"},), daemon=True)
    waiting.start()
    with pytest.raises(ConfigError, match=r"host 1 \(second\): found \{'preset': 'ep'\}.*\{'preset': 'tp'\}"):
        pair.leader.agree({"preset": "tp", "jax": "0.12"})


def test_hosts_that_agree_go_on(pair: Pair) -> None:
    waiting = threading.Thread(target=pair.follower.agree, args=({"preset": "tp"},), daemon=True)
    waiting.start()
    pair.leader.agree({"preset": "tp"})
    waiting.join(5)
    assert not waiting.is_alive()


def test_a_follower_that_fails_is_named(pair: Pair) -> None:
    pair.leader.on_stop = lambda host: pair.faults.put(("stop", str(host), 0))
    pair.follower.stop()
    assert pair.faults.get(timeout=5) == ("stop", "host 1 (second)", 0)
    threading.Thread(target=pair.follower.fail, args=("no memory", 2), daemon=True).start()
    assert pair.faults.get(timeout=5) == ("leader", "host 1 (second) failed: no memory", 2)


def test_the_leader_ends_a_service_that_cannot_go_on(pair: Pair) -> None:
    threading.Thread(target=pair.leader.end, args=(1, "host 2 is lost"), daemon=True).start()
    assert pair.faults.get(timeout=5) == ("follower", "host 0 ended the service: host 2 is lost", 1)


@pytest.mark.parametrize("which", ["follower", "leader"])
def test_a_broken_connection_is_noticed_at_once(pair: Pair, which: str) -> None:
    begun = time.monotonic()
    (pair.there if which == "follower" else pair.here).shutdown(socket.SHUT_RDWR)
    found = [pair.faults.get(timeout=5) for _ in range(2)]
    assert sorted(found) == [
        ("follower", "host 0 is lost: the connection was closed", 1),
        ("leader", "host 1 (second) is lost: the connection was closed", 1),
    ]
    assert time.monotonic() - begun < remote.BEAT
    with pytest.raises(ConnectionError, match=r"host 1 \(second\) is lost"):
        pair.leader.call("copy", (), {})


def test_a_silent_host_is_lost_in_the_stated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "setsockopt", lambda *args: None)
    monkeypatch.setattr(remote, "LOST_AFTER", 0.5)
    silent = Pair(follows=False)  # its connection stays open
    begun = time.monotonic()
    who, reason, code = silent.faults.get(timeout=5)
    assert (who, reason, code) == ("leader", "host 1 (second) is lost: nothing was heard of it for 0 s", 1)
    assert 0.4 < time.monotonic() - begun < 2
    silent.close()


def test_signs_of_life_keep_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "setsockopt", lambda *args: None)
    monkeypatch.setattr(remote, "LOST_AFTER", 0.6)
    monkeypatch.setattr(remote, "BEAT", 0.1)
    idle = Pair()
    with pytest.raises(queue.Empty):
        idle.faults.get(timeout=1.5)
    idle.close()


def test_a_stranger_is_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "setsockopt", lambda *args: None)

    def hello(kind: str = "hello", **changed: Any) -> Host | None:
        here, there = map(Link, socket.socketpair())
        there.send(Message(kind, {"token": "secret", "id": 1, "name": "second", "devices": 4} | changed))
        there.close()
        found = remote.welcome(here, "secret", {1, 2})
        here.close()
        return found

    assert hello() == Host(1, "second", 4)
    changes: list[dict[str, Any]] = [
        {"token": "guéss"},
        {"token": 7},
        {"id": 3},
        {"id": "x"},
        {"devices": "x"},
        {"name": None},
    ]
    for changed in changes:
        assert hello(**changed) is None
    assert hello("beat") is None
