"""The engine's programs at Kimi-K2.5's real widths, compiled from shapes alone: bytes, temporaries, collectives."""

import dataclasses
import functools
import json
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import pytest

from kimijax.checkpoint import with_int4
from kimijax.config import TargetConfig, load_config
from kimijax.draft_loading import declare_stand_in
from kimijax.errors import ConfigError
from kimijax.plan import main
from kimijax.plan_compile import PARTS, CompiledProgram, Sizes, compile_programs, cpu_mesh
from kimijax.plan_hlo import Module, shape_bytes
from kimijax.plan_roofline import DRAFT_COLLECTIVES, LAYER_COLLECTIVES, OTHER_COLLECTIVES
from kimijax.plan_weights import make_plan
from kimijax.sharding import PRESETS, Preset

from .test_plan import k25_config

BF16 = jnp.dtype(jnp.bfloat16)
SIZES = Sizes()
EXPERTS_OF_A_LAYER = 384 * 24_772_608  # one expert in INT4 with its scales


@pytest.fixture(scope="module")
def k25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("k25") / "config.json"
    path.write_text(json.dumps(k25_config()))
    return path


def target_of(path: Path, n_layers: int) -> TargetConfig:
    return dataclasses.replace(with_int4(load_config(path)), n_layers=n_layers)


@functools.cache
def compiled(path: Path, preset: Preset, n_layers: int, names: tuple[str, ...]) -> dict[str, CompiledProgram]:
    target = target_of(path, n_layers)
    drafter = declare_stand_in(target, BF16)
    programs = compile_programs(target, drafter, SIZES, cpu_mesh(8, preset), with_drafts=False, names=names)
    return {p.name: p for p in programs}


def check_temporaries(program: CompiledProgram) -> None:
    """None is as large as one layer's experts on a device, and no expert's weights are copied."""
    slice_ = EXPERTS_OF_A_LAYER / 8
    assert program.largest
    assert max(t.nbytes for t in program.largest) < slice_
    assert not [t for t in program.largest if t.weight is not None and ".experts." in t.weight]


def weight_bytes(path: Path, preset: Preset, n_layers: int) -> int:
    """On a device, of the model with so many layers."""
    config = k25_config()
    config["text_config"]["num_hidden_layers"] = n_layers
    other = path.with_name(f"{n_layers}.json")
    other.write_text(json.dumps(config))
    return make_plan(other, preset=preset).device.weight_bytes


@pytest.mark.parametrize("preset", PRESETS)
def test_three_layers_of_real_width(preset: Preset, k25: Path) -> None:
    decode = compiled(k25, preset, 3, ("decode",))["decode"]
    check_temporaries(decode)
    assert decode.layer_collectives().total() == LAYER_COLLECTIVES[preset]
    assert decode.collectives_of("layers").total() <= 3 * LAYER_COLLECTIVES[preset]
    assert decode.collectives_of("drafter").total() == 0
    assert decode.collectives_of("rest").total() <= OTHER_COLLECTIVES[preset][0]
    parts = (decode.collectives_of(part) for part in PARTS)
    assert sum(parts, Counter()) == Counter(c.kind for c in decode.collectives)
    # Weights, and the cache: a part of each position, or an eighth of the requests, where the preset splits it.
    shares = 8 if preset in ("dcp", "dp-attention") else 1
    cache = 8 * 4096 * 3 * 576 * 2 // shares
    seen = 8 * 163_840 * 5  # of each request, which tokens it had and how often
    assert decode.arguments == pytest.approx(weight_bytes(k25, preset, 3) + cache + seen, rel=1e-4)


@pytest.mark.slow
def test_temporaries_do_not_grow_with_the_layers(k25: Path) -> None:
    few, more = (compiled(k25, "tp", n, ("decode",))["decode"].temporaries for n in (3, 5))
    assert more < 1.02 * few


@pytest.mark.slow
def test_prefill_sums_twice_a_layer(k25: Path) -> None:
    program = compiled(k25, "tp", 3, ("prefill",))["prefill"]
    check_temporaries(program)
    assert program.layer_collectives() == {"all-reduce": 2}
    (first, *_) = (c for c in program.collectives if c.layer == 1)
    assert first.nbytes == 512 * 7168 * 2  # in bfloat16, as on a GPU


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_drafting_and_verification(preset: Preset, k25: Path) -> None:
    verify = compiled(k25, preset, 2, ("verify",))["verify"]
    check_temporaries(verify)
    assert verify.collectives_of("drafter").total() == SIZES.draft_tokens * DRAFT_COLLECTIVES[preset]
    assert verify.collectives_of("rest").total() <= OTHER_COLLECTIVES[preset][1]


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "gigabytes"), [("tp", 76.2), ("dp-attention", 90.7)])
def test_all_61_layers(preset: Preset, gigabytes: float, k25: Path) -> None:
    programs = compiled(k25, preset, 61, ("decode", "verify", "prefill"))
    cache = 8 * (4096 + 64) * 70_272 / (8 if preset == "dp-attention" else 1)
    for program in programs.values():
        assert program.compile_seconds < 120
        check_temporaries(program)
        assert program.temporaries < 3e9
    assert programs["decode"].arguments - cache == pytest.approx(gigabytes * 1e9, rel=0.02)
    layers = programs["verify"].collectives_of("layers").total()
    assert layers == pytest.approx(61 * LAYER_COLLECTIVES[preset], abs=2)  # the dense layer has no exchange of rows


@pytest.mark.slow  # half a minute
def test_command_line(k25: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--model", str(k25), "--compile", "--layers", "2", "--compile-drafts", "2", "--draft", "stand-in"]
    assert main([*line, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [p["name"] for p in printed["compiled"]["programs"]] == ["decode", "verify", "prefill"]
    assert printed["compiled"]["layers"] == 2
    _, verify, prefill = printed["compiled"]["programs"]
    assert prefill["collectives"]["layer"] == {"all-reduce": 2}
    assert verify["collectives"]["layer"] == {"all-reduce": 2}
    assert sum(verify["collectives"]["drafter"].values()) == 2 * DRAFT_COLLECTIVES["tp"]
    beside, alone = (printed["presets"]["tp"][key] for key in ("cache_tokens_beside_all", "cache_tokens"))
    temporaries = max(p["temporaries"] for p in printed["compiled"]["programs"])
    assert (alone - beside) * 70_272 == pytest.approx(printed["draft_bytes"]["tp"] + temporaries, abs=70_272)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices", "16", "--compile"], "devices: found 16, expected at most the 8 devices of the CPU backend"),
        (["--compile", "--layers", "62"], "layers: found 62, expected 1 to 61"),
        (["--compile", "--preset", "dp-attention", "--compile-batch", "4"], "max_batch: found 4, expected a multiple"),
        (["--preset", "tp4"], "preset: found 'tp4', expected tp8"),
        (["--gpu", "H20"], "gpu: found 'H20', expected one of H200"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    flags: list[str], message: str, k25: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(k25), *flags]) == 2
    assert message in capsys.readouterr().err


def test_no_virtual_devices_are_made_up() -> None:
    with pytest.raises(ConfigError, match="devices: found 9"):
        cpu_mesh(9, "tp")


MODULE = """\
HloModule jit_f

%body (t: (s32[], bf16[8,4], f32[8,4])) -> (s32[], bf16[8,4], f32[8,4]) {
  %t = (s32[], bf16[8,4]{1,0}, f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %w = bf16[8,4]{1,0} get-tuple-element(%t), index=1
  %x = f32[8,4]{1,0} get-tuple-element(%t), index=2
  %copied = f32[8,4]{1,0} convert(%w)
  %sum = f32[8,4]{1,0} add(%copied, %x)
  %reduced = f32[8,4]{1,0} all-reduce(%sum), to_apply=%add_promoted, metadata={op_name="jit(f)/while/body/layer_3/dot"}
  ROOT %next = (s32[], bf16[8,4]{1,0}, f32[8,4]{1,0}) tuple(%i, %w, %reduced)
}

ENTRY %main (p: bf16[8,4], q: f32[8,4]) -> f32[8,4] {
  %p = bf16[8,4]{1,0} parameter(0), metadata={op_name="leaves[5]"}
  %q = f32[8,4]{1,0} parameter(1), metadata={op_name="x"}
  %zero = s32[] constant(0)
  %turned = bf16[4,8]{1,0} transpose(%p), dimensions={1,0}
  %start = (s32[], bf16[8,4]{1,0}, f32[8,4]{1,0}) tuple(%zero, %p, %q)
  %loop = (s32[], bf16[8,4]{1,0}, f32[8,4]{1,0}) while(%start), condition=%cond, body=%body
  %y = f32[8,4]{1,0} get-tuple-element(%loop), index=2
  ROOT %part = f32[1,4]{1,0} reduce-scatter(%y), replica_groups={{0,1,2,3,4,5,6,7}}, metadata={op_name="f/branch_1/s"}
}
"""
ASSIGNMENT = """\
allocation 0: size 64, parameter 0
 value: <1 p @0> (size=64,offset=0): bf16[8,4]{1,0}
allocation 1: size 4096, preallocated-temp:
 value: <2 copied @0> (size=128,offset=0): f32[8,4]{1,0}
 value: <3 sum @0> (size=128,offset=128): f32[8,4]{1,0}
 value: <4 turned @0> (size=64,offset=256): bf16[4,8]{1,0}
 value: <5 loop{2} @0> (size=128,offset=128): f32[8,4]{1,0}
"""


def test_what_is_read_from_the_compilers_text() -> None:
    module = Module(MODULE, {"leaves[5]": "layers.*.o"}.get)
    reduced, part = module.collectives
    assert (reduced.kind, reduced.nbytes, reduced.layer, reduced.in_branch) == ("all-reduce", 64, 3, False)
    assert (part.kind, part.nbytes, part.layer, part.in_branch) == ("reduce-scatter", 128, None, True)
    found = {(t.nbytes, t.shape, t.count, t.weight) for t in module.temporaries(ASSIGNMENT, least=1)}
    # A weight converted within the loop that carries it, one transposed, and what depends on the input.
    assert found == {
        (128, "f32[8,4]", 1, "layers.*.o"),
        (128, "f32[8,4]", 1, None),
        (64, "bf16[4,8]", 1, "layers.*.o"),
    }
    assert shape_bytes("(s32[], pred[3], s4[2,8]{1,0}, f8e4m3fn[5])") == 4 + 3 + 8 + 5
