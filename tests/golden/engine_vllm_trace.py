"""Serves a request in vLLM's own engine with an exported draft, and notes what its proposer drafts in each round."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_MLA_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
               "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
               "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}  # fmt: skip

from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
from vllm.v1.spec_decode.eagle import EagleProposer  # pyright: ignore[reportMissingImports]

from .engine_trace import NEW, PROMPT, STEPS, Round


def run(directory: Path) -> tuple[list[int], list[Round]]:
    """The greedy output for `directory`/target with the draft `directory`/export, and the rounds."""
    seen: list[tuple[int, tuple[int, ...]]] = []
    propose = EagleProposer.propose

    def noted(self: Any, *args: Any, **parts: Any) -> Any:
        drafts = propose(self, *args, **parts)
        last = parts["token_indices_to_sample"]
        positions = parts["target_positions"]
        seen.append((int(positions[-1 if last is None else int(last[0])]), tuple(drafts[0].tolist())))
        return drafts

    EagleProposer.propose = noted
    llm = LLM(
        model=str(directory / "target"),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        async_scheduling=False,
        speculative_config={"model": str(directory / "export"), "method": "eagle3", "num_speculative_tokens": STEPS},
    )
    seen.clear()  # of the profiling run
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    (request,) = llm.generate([{"prompt_token_ids": PROMPT.tolist()}], sampling, use_tqdm=False)
    positions = [position for position, _ in seen]
    accepted = [b - a - 1 for a, b in pairwise(positions)]
    counted = sum(m.value for m in llm.get_metrics() if m.name.endswith("spec_decode_num_accepted_tokens"))
    if counted != sum(accepted):
        raise AssertionError(f"vLLM counts {counted} accepted tokens, its positions say {sum(accepted)}")
    return list(request.outputs[0].token_ids), [
        Round(position, drafts, n) for (position, drafts), n in zip(seen, accepted, strict=False)
    ]
