"""What a compiled program is made of, from XLA's own text: its collectives, and what its temporary arrays are.

Read from the optimised module and from the buffer assignment that belongs to it. A temporary array that depends on
weights alone is a copy of them: converted, transposed or moved. It is told from what a program must keep anyway.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "c64": 64, "c128": 128}

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|condition|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_ALLOCATION = re.compile(r"^allocation \d+: .*preallocated-temp")
_VALUE = re.compile(r"^ value: <\d+ (\S+) @\d+> \(size=(\d+),offset=(\d+)\): (\S+)")


@dataclass(frozen=True)
class Collective:
    """One collective operation of the program, however often it is run."""

    kind: str  # one of KINDS
    nbytes: int  # of the whole result on one device; of the whole operand where the result is a part of it
    layer: int | None  # of the target
    in_drafter: bool
    in_branch: bool  # run only where some request asks for it: filters of sampling, say


@dataclass(frozen=True)
class Temporary:
    """Arrays of one shape among the temporaries."""

    nbytes: int  # of one
    shape: str
    count: int
    weight: str | None  # what it is a copy of, layers as *; None: no copy of a weight


@dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    rest: str  # operands and attributes
    computation: str


def shape_bytes(text: str) -> int:
    """Of all array shapes in a type, e.g. `(bf16[8,7168]{1,0}, f32[8])`."""
    total = 0
    for dtype, dims in _SHAPE.findall(text):
        if dtype == "token":
            continue
        bits = _BITS.get(dtype) or int(re.sub(r"^\D+(\d+).*$", r"\1", dtype))
        total += math.prod(int(d) for d in dims.split(",") if d) * bits // 8
    return total


class Module:
    """The text of an optimised module."""

    def __init__(self, text: str, weight: Callable[[str], str | None]) -> None:
        """weight: from what JAX calls an argument of the program, `leaves[3]` say, to the weight's name; None: it is
        none."""
        self._weight = weight
        self._found: dict[str, _Instruction] = {}
        self._members: dict[str, list[str]] = {}  # computation -> instructions, in the order of the schedule
        self._roots: dict[str, str] = {}
        self._callers: dict[str, list[tuple[str, int]]] = {}  # computation -> (instruction, which of its operands)
        self._origins: dict[str, frozenset[str] | None] = {}
        computation = ""
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                computation = header[2]
            elif match := _INSTRUCTION.match(line):
                self._add(match, computation)

    def _add(self, match: re.Match[str], computation: str) -> None:
        root, name, type_, op, rest = match.groups()
        inside = rest[: _closing(rest)]
        operands = tuple(re.findall(r"%([\w.\-]+)", inside)) if op != "constant" else ()
        self._found[name] = _Instruction(name, type_, op, operands, rest, computation)
        self._members.setdefault(computation, []).append(name)
        if root:
            self._roots[computation] = name
        if op in ("while", "call"):
            for called in _CALLED.findall(rest):
                self._callers.setdefault(called, []).append((name, 0))
        elif op == "conditional":
            listed = re.search(r"branch_computations=\{([^}]*)\}", rest)
            branches = re.findall(r"%([\w.\-]+)", listed[1]) if listed else _CALLED.findall(rest)
            for i, called in enumerate(branches):
                self._callers.setdefault(called, []).append((name, i + 1))

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """All of them, in no order."""
        found: list[Collective] = []
        for x in self._found.values():
            kind = x.op.removesuffix("-start")
            if kind not in KINDS:
                continue
            shapes = [m[0] for m in _SHAPE.finditer(x.type)]
            if x.op.endswith("-start") and kind in ("all-gather", "collective-permute"):
                shapes = shapes[-1:]  # operand, result
            nbytes = sum(map(shape_bytes, shapes))
            if kind == "reduce-scatter":
                nbytes *= _group_size(x.rest)
            if "_promoted" in x.rest:  # the CPU's sums are float32 where the program's are bfloat16
                nbytes //= 2
            where = re.search(r'op_name="([^"]*)"', x.rest)
            path = where[1] if where else ""
            layer = re.search(r"\blayer_(\d+)\b", path)
            in_drafter = "/drafter/" in path
            found.append(Collective(kind, nbytes, int(layer[1]) if layer else None, in_drafter, "/branch_" in path))
        return tuple(found)

    def temporaries(self, assignment: str, least: int = 1 << 20) -> tuple[Temporary, ...]:
        """Arrays of at least so many bytes, the largest first, from the text of the buffer assignment."""
        self._trace_all()
        found: Counter[tuple[int, str, str]] = Counter()
        is_temporary = False
        for line in assignment.splitlines():
            if line.startswith("allocation "):
                is_temporary = bool(_ALLOCATION.match(line))
            elif is_temporary and (match := _VALUE.match(line)):
                name, size, _, shape = match.groups()
                # An element of a tuple is another name of an array that stands here under its own.
                if int(size) >= least and "{" not in name:
                    origin = self._origin(name)
                    copied = ", ".join(sorted(origin)) if origin else ""
                    found[int(size), shape.partition("{")[0], copied] += 1
        rows = [Temporary(size, shape, n, copied or None) for (size, shape, copied), n in found.items()]
        return tuple(sorted(rows, key=lambda t: (-t.nbytes, t.shape)))

    def _trace_all(self) -> None:
        """Callers stand behind what they call, and operands before what uses them: in this order no array is traced
        through more than its operands."""
        for computation in reversed(self._members):
            for name in self._members[computation]:
                self._origin(name)

    def _origin(self, name: str) -> frozenset[str] | None:
        """The weights that an array is made of alone; none: of constants; None: of something else."""
        if name not in self._origins:
            self._origins[name] = None  # what depends on itself changes from turn to turn
            self._origins[name] = self._traced(self._found[name]) if name in self._found else None
        return self._origins[name]

    def _traced(self, x: _Instruction) -> frozenset[str] | None:
        if x.op == "parameter":
            return self._argument(x)
        if x.op == "get-tuple-element":
            index = re.search(r"index=(\d+)", x.rest)
            assert index is not None
            return self._element(self._found[x.operands[0]], int(index[1]))
        if x.op in ("while", "conditional", "tuple"):
            return None
        parts = [self._origin(operand) for operand in x.operands]
        known = [p for p in parts if p is not None]
        return frozenset().union(*known) if len(known) == len(parts) else None

    def _argument(self, x: _Instruction) -> frozenset[str] | None:
        """Of a parameter: a weight of the program, or what the one caller of a computation passes."""
        argument = re.search(r'op_name="([^"]*)"', x.rest)
        weight = self._weight(argument[1].replace("\\'", "'")) if argument else None
        if weight is not None:
            return frozenset((weight,))
        callers, number = self._callers.get(x.computation, []), int(x.rest.partition(")")[0])
        if len(callers) != 1:
            return None
        caller = self._found[callers[0][0]]
        if caller.op == "call":
            return self._origin(caller.operands[number])
        return self._origin(caller.operands[callers[0][1]]) if caller.op == "conditional" else None

    def _element(self, x: _Instruction, index: int) -> frozenset[str] | None:
        """Of one element of a tuple."""
        if x.op == "tuple":
            return self._origin(x.operands[index])
        if x.op == "while":
            return self._unchanged(x, index)
        if x.op != "parameter":
            return None
        callers = self._callers.get(x.computation, [])
        if len(callers) != 1:
            return None
        caller = self._found[callers[0][0]]
        if caller.op == "while":
            return self._unchanged(caller, index)
        return self._element(self._found[caller.operands[callers[0][1]]], index)

    def _unchanged(self, loop: _Instruction, index: int) -> frozenset[str] | None:
        """Of an element that a loop carries, if every turn passes it on as it is."""
        body = re.search(r"body=%([\w.\-]+)", loop.rest)
        assert body is not None
        root = self._found[self._roots[body[1]]]
        if root.op != "tuple":
            return None
        passed = self._found[root.operands[index]]
        if passed.op != "get-tuple-element" or f"index={index}" not in re.findall(r"index=\d+", passed.rest):
            return None
        if self._found[passed.operands[0]].op != "parameter":
            return None
        return self._element(self._found[loop.operands[0]], index)


def _closing(text: str) -> int:
    """Where the bracket closes that is open at the start."""
    depth = 1
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return i
    return len(text)


def _group_size(attributes: str) -> int:
    """Devices that take part, from any of the three forms of replica groups."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    if tiled := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(tiled[1])
    listed = re.search(r"replica_groups=\{\{([^}]*)\}", attributes)
    return listed[1].count(",") + 1 if listed else 1
