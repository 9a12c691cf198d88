"""The control channel: host 0 decides, and says to the others which program to call with which host arrays.

Every host holds the same programs, weights and state, each its own part of them. Host 0 runs the scheduler; before it
calls a program it sends the call to the followers, who repeat the calls in the order in which they come, so that the
collectives inside meet. What the devices computed never travels here.

Whoever hears nothing for LOST_AFTER seconds, or whose connection breaks, takes the other for lost. The secret that
followers show keeps strays out, not attackers: like JAX's own, the channel belongs in a network that can be trusted.
"""

import contextlib
import ipaddress
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from ..errors import ConfigError
from ..multihost import START_TIMEOUT, coordinator_host, publish, published
from ..penalties import ProcessorRows
from ..sampling import SamplingRows
from .device import Start
from .rule_programs import Begin
from .wire import Message, Packer, Unpacker, WireError, decode, encode

BEAT = 1.0  # seconds between two signs of life
LOST_AFTER = 10.0  # seconds of silence after which a host is lost
_FAREWELL = 5.0  # seconds that a host waits for the others to have read its last message
_KEY = "kimijax/control"
_JOINED = 2**16  # bytes up to which a frame is copied together: one system call
TYPES = (Start, SamplingRows, ProcessorRows, Begin)  # what programs' host arguments are made of

Lost = Callable[[str, int], None]  # told why, and the exit code that follows; may be called on any thread

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Host:
    """One of the processes."""

    id: int
    name: str  # of the machine
    devices: int

    def __str__(self) -> str:
        return f"host {self.id} ({self.name})"


class Link:
    """A connection on which frames go both ways. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(LOST_AFTER)
        self._socket = connection
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        self.send_parts(encode(message))

    def send_parts(self, parts: Sequence[bytes | memoryview]) -> None:
        """OSError where the other end is gone, or reads nothing for LOST_AFTER seconds."""
        if sum(len(p) for p in parts) <= _JOINED:
            parts = [b"".join(parts)]
        with self._sending:
            for part in parts:
                self._socket.sendall(part)

    def receive(self) -> Message:
        """The next frame. OSError: the other end is gone, silent for LOST_AFTER seconds, or speaks otherwise."""
        return decode(self._read)

    def _read(self, n: int) -> bytearray:
        buffer = bytearray(n)
        view = memoryview(buffer)
        while view:
            got = self._socket.recv_into(view)
            if got == 0:
                raise ConnectionResetError("the connection was closed")
            view = view[got:]
        return buffer

    def close(self) -> None:
        """Whoever waits on either end is told."""
        with contextlib.suppress(OSError):  # it is broken already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class _Pulse(threading.Thread):
    """Signs of life. A link that fails is its reader's concern."""

    def __init__(self, links: Sequence[Link]) -> None:
        super().__init__(name="pulse", daemon=True)
        self._links = links
        self._frame = encode(Message("beat"))
        self.start()

    def run(self) -> None:
        left = list(self._links)
        while left:
            time.sleep(BEAT)
            for link in list(left):
                try:
                    link.send_parts(self._frame)
                except OSError:
                    left.remove(link)


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing was heard of it for {LOST_AFTER:.0f} s"
    return str(error) or type(error).__name__


class Leader:
    """Host 0's end, with a link to each follower. One thread at a time calls programs; `end` may come from any."""

    def __init__(self, links: Mapping[Host, Link], lost: Lost) -> None:
        """`links`: followers that have shown the secret; `lost` is called once, when the first of them is."""
        self._links, self._lost = dict(links), lost
        self.on_stop: Callable[[Host], None] = lambda host: log.warning("%s asked to stop: not while starting", host)
        self.hosts = (_this_host(), *sorted(links, key=lambda h: h.id))
        self._packer = Packer(TYPES)
        self._identities: queue.Queue[tuple[Host, dict[str, str]]] = queue.Queue()
        self._changed = threading.Condition()  # guards the two fields below
        self._ending = False
        self._open = set(links)
        _Pulse(list(links.values()))
        for host, link in self._links.items():
            threading.Thread(target=self._listen, args=(host, link), name=f"host {host.id}", daemon=True).start()

    @classmethod
    def gather(cls, lost: Lost) -> Self:
        """Wait for every other process of `jax.distributed`. ConfigError: one has not come within START_TIMEOUT s."""
        token = secrets.token_hex(16)
        links: dict[Host, Link] = {}
        missing = set(range(1, jax.process_count()))
        deadline = time.monotonic() + START_TIMEOUT
        with _listener(coordinator_host()) as listener:
            publish(_KEY, f"{listener.getsockname()[1]} {token}")
            while missing:
                listener.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    connection, address = listener.accept()
                except TimeoutError as e:
                    expected = f"all {jax.process_count()} within {START_TIMEOUT} s"
                    raise ConfigError("hosts", f"none of {sorted(missing)}", expected) from e
                link = Link(connection)
                host = welcome(link, token, missing)
                if host is None:
                    log.warning("a connection from %s that is no host of this service was closed", address[0])
                    link.close()
                    continue
                missing.remove(host.id)
                links[host] = link
        return cls(links, lost)

    def _listen(self, host: Host, link: Link) -> None:
        try:
            while True:
                message = link.receive()
                match message.kind:
                    case "beat":
                        pass
                    case "identity":
                        self._identities.put((host, dict(message.fields)))
                    case "stop":
                        self.on_stop(host)
                    case "failed":
                        self._report(f"{host} failed: {message.fields['reason']}", int(message.fields["code"]))
                    case kind:
                        raise WireError(f"found a message {kind!r} of a follower")
        except OSError as error:
            with self._changed:
                self._open.discard(host)
                self._changed.notify_all()
            self._report(f"{host} is lost: {_why(error)}", 1)

    def _report(self, reason: str, code: int) -> None:
        with self._changed:
            if self._ending:
                return
            self._ending = True  # of several faults the first is the cause
        # On a thread of its own: readers are needed, to see followers go.
        threading.Thread(target=self._lost, args=(reason, code), name="end of service", daemon=True).start()

    def agree(self, identity: Mapping[str, str]) -> None:
        """Wait until every follower has found the same. ConfigError: one has not, and what."""
        for _ in self._links:
            host, theirs = self._identities.get()
            if theirs != dict(identity):
                names = sorted(n for n in {*theirs, *identity} if theirs.get(n) != identity.get(n))
                found, expected = ({n: side.get(n) for n in names} for side in (theirs, identity))
                fix = "start all hosts with the same version, files and flags"
                raise ConfigError(str(host), found, f"what {self.hosts[0]} has, {expected}", fix)
        self._send(Message("agreed"))

    def call(self, program: str, args: tuple[Any, ...], static: Mapping[str, Any]) -> None:
        """Have the followers call a program too. ConnectionError: one is lost; `lost` is told as well."""
        arrays: list[np.ndarray] = []
        packed = self._packer.pack(args, arrays)
        self._send(Message("call", {"program": program, "args": packed, "static": static}, tuple(arrays)))

    def share(self, arrays: Sequence[np.ndarray]) -> None:
        """Give followers, who wait for it in `Follower.shared`, what they cannot compute."""
        self._send(Message("share", {}, tuple(arrays)))

    def _send(self, message: Message) -> None:
        parts = encode(message)
        for host, link in self._links.items():
            try:
                link.send_parts(parts)
            except OSError as error:
                reason = f"{host} is lost: {_why(error)}"
                self._report(reason, 1)
                raise ConnectionError(reason) from error

    def end(self, code: int = 0, reason: str = "", *, at_once: bool = False) -> None:
        """Have the followers end, and wait a little until they have closed their links.

        Args:
          code: their exit code; other than 0: they end where they are.
          reason: to be logged there.
          at_once: they end where they are, though nothing is wrong.
        """
        with self._changed:
            self._ending = True
            links = [self._links[host] for host in self._open]
        parts = encode(Message("end", {"code": code, "reason": reason, "at_once": at_once or code != 0}))
        for link in links:
            try:
                link.send_parts(parts)
            except OSError as error:
                log.debug("a host was not told of the end: %s", error)
        with self._changed:
            self._changed.wait_for(lambda: not self._open, _FAREWELL)

    def close(self) -> None:
        for link in self._links.values():
            link.close()


class Follower:
    """The end of every other host. One thread follows; `fail` and `stop` may come from any."""

    def __init__(self, link: Link, leave: Lost) -> None:
        """`leave` ends the process: the leader is lost, or told this host to end where it is."""
        self._link, self._leave = link, leave
        self.host = _this_host()
        self._unpacker = Unpacker(TYPES)
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._ended = False
        _Pulse([link])
        self._reader = threading.Thread(target=self._listen, name="host 0", daemon=True)
        self._reader.start()

    @classmethod
    def join(cls, leave: Lost) -> Self:
        """Connect to host 0. ConfigError: it cannot be reached."""
        port, token = published(_KEY, START_TIMEOUT).split()
        address = coordinator_host(), int(port)
        try:
            link = Link(socket.create_connection(address, timeout=LOST_AFTER))
            host = _this_host()
            link.send(Message("hello", {"token": token, "id": host.id, "name": host.name, "devices": host.devices}))
        except OSError as e:
            fix = "TCP between the hosts must be free, not only to the coordinator's port"
            raise ConfigError("hosts", f"no way to {address[0]}:{port} ({e})", "host 0's control channel", fix) from e
        return cls(link, leave)

    def _listen(self) -> None:
        try:
            while True:
                message = self._link.receive()
                if message.kind == "beat":
                    continue
                if message.kind == "end":
                    self._ended = True
                    if message.fields["at_once"]:
                        reason = message.fields["reason"]
                        self._leave(f"host 0 ended the service: {reason}" if reason else "", message.fields["code"])
                self._messages.put(message)
                if self._ended:
                    return
        except OSError as error:
            self._leave(f"host 0 is lost: {_why(error)}", 1)

    def agree(self, identity: Mapping[str, str]) -> None:
        """Tell the leader what this host has found, and wait until all agree; else the leader ends this process."""
        self._link.send(Message("identity", identity))
        message = self._messages.get()
        if message.kind != "agreed":
            raise WireError(f"found a message {message.kind!r}, expected host 0 to agree")

    def follow(self, repeat: Callable[[str, tuple[Any, ...], dict[str, Any]], None]) -> Message:
        """Repeat the leader's calls until something else comes, which is returned: "share" or "end".

        Args:
          repeat: calls a program, given its name, its arguments and the static ones.
        """
        while (message := self._messages.get()).kind == "call":
            args = self._unpacker.unpack(message.fields["args"], message.arrays)
            repeat(message.fields["program"], args, message.fields["static"])
        return message

    def stop(self) -> None:
        """Ask the leader to end the service in order."""
        self._link.send(Message("stop"))

    def fail(self, reason: str, code: int) -> None:
        """Tell the leader that this host cannot go on; wait a little for the leader to end the service."""
        try:
            self._link.send(Message("failed", {"reason": reason, "code": code}))
        except OSError as error:
            log.debug("host 0 was not told: %s", error)
        self._reader.join(_FAREWELL)

    def close(self) -> None:
        self._link.close()


def welcome(link: Link, token: str, missing: set[int]) -> Host | None:
    """Who has connected; None: nobody that is expected."""
    try:
        message = link.receive()
    except OSError:
        return None
    f = message.fields
    if message.kind != "hello" or not secrets.compare_digest(str(f.get("token")).encode(), token.encode()):
        return None
    if f.get("id") not in missing or not isinstance(f.get("name"), str) or not isinstance(f.get("devices"), int):
        return None
    return Host(f["id"], f["name"], f["devices"])


def _this_host() -> Host:
    return Host(jax.process_index(), socket.gethostname(), jax.local_device_count())


def _listener(host: str) -> socket.socket:
    """A socket on a free port, for this machine alone where the coordinator's address is."""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        is_local = False
    if is_local:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
