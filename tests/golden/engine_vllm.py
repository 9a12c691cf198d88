"""Runs an exported draft in vLLM's own proposer, model class and weight loader, on its CPU attention kernel.

`EagleProposer.load_model` builds the class that the config names, loads the files and decides which tables are shared;
the target it is given holds only those. Then fusing, the layer over a paged cache, and the logits are called as the
proposer calls them. Nothing is replaced. The latent form runs on CPU_MLA, which takes a latent of 512 and a rotary key
of 64 only; Llama drafts run on CPU_ATTN, which vLLM pairs with a latent target only if that is run as plain attention.
"""

import os
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
               "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}  # fmt: skip

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
from vllm.distributed import (  # pyright: ignore[reportMissingImports]
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
from vllm.forward_context import set_forward_context  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.v1.attention.backend import CommonAttentionMetadata  # pyright: ignore[reportMissingImports]
from vllm.v1.spec_decode.eagle import EagleProposer  # pyright: ignore[reportMissingImports]
from vllm.v1.worker.cpu_model_runner import (  # pyright: ignore[reportMissingImports]
    _set_torch_accelerator_to_noop,
)

from .engine_cases import MLA, PROMPT, ROWS, Case, Outputs, inputs, target_embedding, target_head

BLOCKS = 4  # pages of the cache


def run(case: Case, directory: Path) -> Outputs:
    """Outputs of `directory`/export for the target `directory`/target."""
    os.chdir(directory)
    os.environ["VLLM_MLA_DISABLE"] = str(int(case.base is not MLA))
    _set_torch_accelerator_to_noop()  # as vLLM's own runner does on a CPU
    config = EngineArgs(
        model="target",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        block_size=16 if case.base is MLA else 64,
        speculative_config={"model": "export", "method": "eagle3", "num_speculative_tokens": 3},
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        proposer: Any = EagleProposer(config, torch.device("cpu"))
        proposer.load_model(_target(case))
        return _outputs(case, _Stepper(proposer, config))


def _target(case: Case) -> Any:
    """What sharing asks a target for: its embedding and its head."""
    target: Any = torch.nn.Module()
    target.model = torch.nn.Module()
    embed, head = torch.from_numpy(target_embedding(case)), torch.from_numpy(target_head(case))
    target.model.embed_tokens = VocabParallelEmbedding(*embed.shape)
    target.lm_head = ParallelLMHead(*head.shape)
    for table, values in ((target.model.embed_tokens, embed), (target.lm_head, head)):
        table.weight_loader(table.weight, values)
        table.quant_method.process_weights_after_loading(table)
    return target


class _Stepper:
    """The draft over one request's paged cache, with the metadata that its backend's own builder makes."""

    def __init__(self, proposer: Any, config: Any) -> None:
        self.model, self.config = proposer.model, config
        (self.name,) = proposer._draft_attn_layer_names
        self.layer = config.compilation_config.static_forward_context[self.name]
        backend, spec = self.layer.get_attn_backend(), self.layer.get_kv_cache_spec(config)
        self.builder = backend.get_builder_cls()(spec, [self.name], config, torch.device("cpu"))
        page = (spec.block_size, spec.head_size)  # of latents; keys and values lie side by side, head by head
        if backend.get_name() == "CPU_ATTN":
            page = (spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
        self.layer.kv_cache = torch.zeros(BLOCKS, *page)
        self.length = 0

    def step(self, ids: np.ndarray, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends rows: hidden states for the head, and those that the next step is fed."""
        n = len(ids)
        positions = torch.arange(self.length, self.length + n)
        self.length += n
        starts, lengths = torch.tensor([0, n], dtype=torch.int32), torch.tensor([self.length], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=1,
            num_actual_tokens=n,
            max_query_len=n,
            max_seq_len=self.length,
            block_table_tensor=torch.arange(BLOCKS, dtype=torch.int32)[None],
            slot_mapping=positions,
            positions=positions,
        )
        metadata = {self.name: self.builder.build(0, common)}
        slots = {self.name: positions}
        with torch.no_grad(), set_forward_context(metadata, self.config, num_tokens=n, slot_mapping=slots):
            return self.model(input_ids=torch.from_numpy(ids), positions=positions, hidden_states=features)


def _outputs(case: Case, stepper: _Stepper) -> Outputs:
    given, model = inputs(), stepper.model
    with torch.no_grad():
        features = model.combine_hidden_states(torch.from_numpy(given.taps[:PROMPT]))
    hidden, fed = stepper.step(given.ids[:PROMPT], features)
    kept, feedback = list(hidden[list(ROWS)]), list(fed[list(ROWS)])
    for j in range(case.chain):
        hidden, fed = stepper.step(given.ids[PROMPT + j :][:1], fed[-1:])
        kept, feedback = [*kept, hidden[0]], [*feedback, fed[0]]
    with torch.no_grad():
        logits = model.compute_logits(torch.stack(kept))  # [rows, V], -inf where the draft has no token
    target_ids = torch.isfinite(logits[0]).nonzero()[:, 0]
    return Outputs(
        features=features[list(ROWS)].numpy(),
        feedback=torch.stack(feedback).numpy(),
        logits=logits[:, target_ids].numpy(),
        target_ids=target_ids.numpy(),
    )
