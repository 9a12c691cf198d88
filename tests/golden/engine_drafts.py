"""Writes the drafts of `engine_cases` with kimijax: what the engines load, and what the test loads again."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from kimijax import checkpoint
from kimijax.config import load_config
from kimijax.draft_checkpoint import load_draft
from kimijax.draft_export import Verifier, save_draft
from kimijax.drafter import Drafter
from kimijax.model import Target
from kimijax.wiring import Wiring
from tests import draft_reference as ref
from tests.test_drafter import tiny_target

from . import engine_trace
from .checkpoint import write_checkpoint, write_tensors
from .engine_cases import MLA, TAPS, TARGET_LAYERS, Case, target_embedding, target_head, tensors
from .families import FAMILIES

WIRING = Wiring(TAPS, target_layers=TARGET_LAYERS, target_hidden=ref.TARGET_WIDTH)
TRACE_WIRING = Wiring(engine_trace.TAPS, engine_trace.TARGET_LAYERS, ref.TARGET_WIDTH)
# A relative path: the export is the same to the byte wherever it lies.
VERIFIER = Verifier("target", ("DeepseekV3ForCausalLM",))


def write(case: Case, directory: Path) -> Path:
    """The draft as `directory`/export, exported from the same draft in its published form.

    `directory`/target has the config of its target, and the tensors that an engine takes from there.
    """
    source, export, verified = (directory / name for name in ("source", "export", "target"))
    for folder in (source, verified):
        folder.mkdir(parents=True)
    latent = {key: MLA[key] for key in ("kv_lora_rank", "qk_rope_head_dim")}  # vLLM goes by the target's
    config = {**FAMILIES["deepseek_v3"], "num_hidden_layers": TARGET_LAYERS, **latent}
    (verified / "config.json").write_text(json.dumps(config))
    lent = {"model.embed_tokens": target_embedding(case), "lm_head": target_head(case)}
    norm = np.ones(ref.TARGET_WIDTH, np.float32)
    write_tensors({f"{n}.weight": a for n, a in (*lent.items(), ("model.norm", norm))}, verified, 1)
    (source / "config.json").write_text(json.dumps(case.config))
    dropped = set[str]() if case.head else {"lm_head.weight"}
    write_tensors({n: np.ascontiguousarray(a) for n, a in tensors(case).items() if n not in dropped}, source, 1)
    drafter = load(case, source)
    verifier = VERIFIER if case.form == "speculators" else None
    save_draft(drafter, export, case.form, verifier=verifier, with_embedding=case.embedding)
    return export


def load(case: Case, directory: Path) -> Drafter:
    return load_draft(directory, WIRING, target(case), dtype=jnp.float32)


def target(case: Case) -> Target:
    """A target of which only embedding and head are filled."""
    out = tiny_target({})
    out.embed.set_value(jnp.asarray(target_embedding(case)))
    out.lm_head.set_value(jnp.asarray(target_head(case)))
    return out


def write_trace(directory: Path) -> Path:
    """The draft of `engine_trace` as `directory`/export, and its whole target as `directory`/target."""
    source, export, verified = (directory / name for name in ("source", "export", "target"))
    source.mkdir(parents=True)
    write_checkpoint(engine_trace.FAMILY, verified, dtype="float32", extras=False)
    (source / "config.json").write_text(json.dumps(engine_trace.CONFIG))
    write_tensors(engine_trace.tensors(), source, 1)
    drafter = load_draft(source, TRACE_WIRING, load_trace_target(directory), dtype=jnp.float32)
    save_draft(drafter, export, "vllm")
    return export


def load_trace_target(directory: Path) -> Target:
    return checkpoint.load(directory / "target", load_config(directory / "target"), dtype=jnp.float32)
