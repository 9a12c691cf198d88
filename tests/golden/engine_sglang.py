"""Runs an exported draft in SGLang's own draft class, found and filled by its own registry and loader, on a CPU.

Llama heads run over SGLang's own pools and `torch_native` attention. That backend cannot run latent attention, so an
MLA head gets `_LatentAttention` in its place: plain attention over what the class hands to any backend. Nothing else is
replaced but torchvision, an import of the image models, for which an empty stand-in does.
"""

import importlib
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

from .engine_cases import MLA, PROMPT, ROWS, Case, Outputs, inputs, target_embedding, target_head


class _AnyAttribute(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyAttribute(name, (), {})


class _StandIn(types.ModuleType):
    """A module of which anything can be imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyAttribute(name, (), {})


importlib.import_module("transformers.image_utils")  # looks for torchvision, so before the stand-in
for _name in ("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional"):
    sys.modules[_name] = _StandIn(_name)
    sys.modules[_name].__spec__ = importlib.machinery.ModuleSpec(_name, None, is_package=True)

from sglang.srt import runtime_context  # noqa: E402  # pyright: ignore[reportMissingImports]
from sglang.srt.configs.device_config import DeviceConfig  # noqa: E402  # pyright: ignore[reportMissingImports]
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402  # pyright: ignore[reportMissingImports]
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402  # pyright: ignore[reportMissingImports]
from sglang.srt.distributed import parallel_state  # noqa: E402  # pyright: ignore[reportMissingImports]
from sglang.srt.layers.attention import torch_native_backend  # noqa: E402  # pyright: ignore[reportMissingImports]
from sglang.srt.layers.attention.base_attn_backend import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    AttentionBackend,
)
from sglang.srt.mem_cache import memory_pool  # noqa: E402  # pyright: ignore[reportMissingImports]
from sglang.srt.mem_cache.memory_pool import KVWriteLoc  # noqa: E402  # pyright: ignore[reportMissingImports]
from sglang.srt.model_executor import forward_context  # noqa: E402  # pyright: ignore[reportMissingImports]
from sglang.srt.model_executor.forward_batch_info import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_loader import get_model  # noqa: E402  # pyright: ignore[reportMissingImports]
from sglang.srt.server_args import ServerArgs  # noqa: E402  # pyright: ignore[reportMissingImports]

LENGTH = 64  # rows of the cache


def run(case: Case, directory: Path) -> Outputs:
    """Outputs of `directory`/export for the target `directory`/target."""
    _publish(case, directory)
    config = ModelConfig(model_path=str(directory / "export"), dtype="float32", is_draft_model=True)
    model: Any = get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
    _share(case, model)
    backend = _LatentAttention(config.hf_config) if case.base is MLA else _native_backend(config)
    return _outputs(case, _Stepper(model, backend))


def _publish(case: Case, directory: Path) -> None:
    """The server's arguments and its one-rank groups, which the classes read; a window reaches SGLang by a flag."""
    arguments = ServerArgs(
        model_path=str(directory / "target"),
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        skip_tokenizer_init=True,
        speculative_draft_window_size=None if case.window is None else case.window - 1,
    )
    runtime_context.publish(arguments, role="test", ranks=runtime_context.SpawnRanks(world_rank=0))
    if not torch.distributed.is_initialized():
        parallel_state.init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        parallel_state.initialize_model_parallel("gloo")


def _share(case: Case, model: Any) -> None:
    """What `set_embed` and `set_embed_and_head` do but for their calls to CUDA."""
    if case.config.get("target_hidden_size") in (None, case.config["hidden_size"]):
        model.model.embed_tokens.weight = torch.nn.Parameter(torch.from_numpy(target_embedding(case)))
    if model.load_lm_head_from_target:
        model.lm_head.weight = torch.nn.Parameter(torch.from_numpy(target_head(case)))


def _native_backend(config: Any) -> Any:
    """SGLang's own pools and attention."""
    heads, width = config.num_key_value_heads, config.head_dim
    pool = memory_pool.MHATokenToKVPool(LENGTH, 1, torch.float32, heads, width, 1, "cpu", False)
    requests = memory_pool.ReqToTokenPool(1, LENGTH, "cpu", False)
    requests.req_to_token[1] = torch.arange(1, LENGTH + 1)
    runner = types.SimpleNamespace(device="cpu", req_to_token_pool=requests, token_to_kv_pool=pool)
    return torch_native_backend.TorchNativeAttnBackend(runner)


class _LatentAttention(AttentionBackend):
    """One request, in plain PyTorch, over SGLang's own pool of latent rows.

    The class attends to expanded keys and values of the rows of a prompt, and in the latent space afterwards.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.rank = config.kv_lora_rank
        self.token_to_kv_pool = memory_pool.MLATokenToKVPool(
            LENGTH, 1, torch.float32, self.rank, config.qk_rope_head_dim, 1, "cpu", False
        )

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> torch.Tensor:
        if save_kv_cache:  # k are latent rows; those of a prompt are stored before
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(batch), k.view(len(k), 1, -1), None)
            k = self.token_to_kv_pool.get_key_buffer(0)[1 : 1 + batch.seq_lens_sum]  # row 0 is for padding
            v = k[..., : self.rank]
        q = q.view(len(q), layer.tp_q_head_num, layer.head_dim)
        k, v = (
            x.view(len(x), -1, w).expand(-1, q.shape[1], -1) for x, w in ((k, layer.head_dim), (v, layer.v_head_dim))
        )
        t, s = len(q), len(k)
        seen = torch.arange(s)[None] <= torch.arange(s - t, s)[:, None]
        scores = torch.einsum("tnh,snh->nts", q, k) * layer.scaling
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("nts,snv->tnv", weights, v).reshape(t, -1)


class _Stepper:
    """The draft over one request's cache."""

    def __init__(self, model: Any, backend: Any) -> None:
        self.model, self.backend, self.length = model, backend, 0
        self.fused: list[torch.Tensor] = []
        self.normed: list[torch.Tensor] = []
        model.model.fc.register_forward_hook(
            lambda _, given, out: self.fused.append(out[0] if isinstance(out, tuple) else out)
        )
        model.model.norm.register_forward_hook(lambda _, given, out: self.normed.append(out[0]))

    def step(self, ids: np.ndarray, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends rows: logits of the last, and what the next step is fed of every row."""
        n, start = len(ids), self.length
        self.length += n
        many = n > 1
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND if many else ForwardMode.DECODE,
            batch_size=1,
            input_ids=torch.from_numpy(ids),
            req_pool_indices=torch.tensor([1]),
            seq_lens=torch.tensor([self.length]),
            out_cache_loc=torch.arange(start + 1, self.length + 1),
            seq_lens_sum=self.length,
            positions=torch.arange(start, self.length),
            extend_num_tokens=n if many else None,
            extend_seq_lens=torch.tensor([n]) if many else None,
            extend_prefix_lens=torch.tensor([start]) if many else None,
            extend_start_loc=torch.tensor([0]) if many else None,
            extend_seq_lens_cpu=[n] if many else None,
            extend_prefix_lens_cpu=[start] if many else None,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            spec_info=types.SimpleNamespace(hidden_states=hidden),
        )
        context = forward_context.ForwardContext(attn_backend=self.backend)
        with torch.no_grad(), forward_context.forward_context(context):
            out = self.model(batch.input_ids, batch.positions, batch)
        return out.next_token_logits, out.hidden_states


def _outputs(case: Case, stepper: _Stepper) -> Outputs:
    given, model, rows = inputs(), stepper.model, list(ROWS)
    logits, fed = stepper.step(given.ids[:PROMPT], torch.from_numpy(given.taps[:PROMPT]))
    # The server asks for the last row's logits only; the other kept rows go through the same head here.
    early = stepper.normed[0][rows[:-1]] @ model.lm_head.weight[: len(logits[0])].T  # the table is padded
    feedback, kept = list(fed[rows]), [*early, logits[0]]
    for j in range(case.chain):
        logits, fed = stepper.step(given.ids[PROMPT + j :][:1], fed[-1:])
        feedback, kept = [*feedback, fed[0]], [*kept, logits[0]]
    ids = model.get_hot_token_id()
    return Outputs(
        features=stepper.fused[0][rows].detach().numpy(),
        feedback=torch.stack(feedback).detach().numpy(),
        logits=torch.stack(kept).detach().numpy(),
        target_ids=(torch.arange(len(kept[0])) if ids is None else ids).numpy().astype(np.int64),
    )
