"""A program for `two_processes`: loads kimi-nano over all devices and prints what it answers, as one line of JSON.

Host 0 leads and the others follow; or with --mode spmd every process asks the same of its own engine, with no channel
between them.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax

import kimijax
from kimijax import multihost
from kimijax.engine.remote import Follower, Leader
from kimijax.generate import LLM
from kimijax.multihost import HostsConfig

PROMPTS = ("What does textwrap.dedent do?", "Which function returns the largest item of an iterable?", "Hello!")
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.9, "seed": 6, "repetition_penalty": 1.2, "logprobs": 2},
)


def arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="tp")
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--draft")
    parser.add_argument("--mode", choices=("lead", "spmd"), required=True)
    parser.add_argument("--num-hosts", type=int, default=1)
    parser.add_argument("--host-id", type=int)
    parser.add_argument("--coordinator")
    return parser.parse_args(given)


def load(draft: str | None, devices: int = 1, preset: str = "tp") -> LLM:
    batch = 8  # as many as the largest group of `dp-attention`
    sizes = kimijax.EngineConfig(max_batch=batch, context_length=256, chunk_size=64, burst=4, batch_factor=8)
    return kimijax.load("nano", draft=draft, engine=sizes, devices=devices, preset=preset)


def answers(llm: LLM, max_tokens: int = 20) -> list[list[int]]:
    """Token ids, of several prompts at once."""
    found: list[list[int]] = []
    for sampling in ASKED:
        made = llm.generate(list(PROMPTS), max_tokens=max_tokens, **sampling)
        found += [list(answer.token_ids) for answer in made]
    return found


def leave(reason: str, code: int) -> None:
    print(reason, file=sys.stderr)
    multihost.leave(code)


def main(given: Sequence[str]) -> None:
    args = arguments(given)
    multihost.initialize(HostsConfig(args.num_hosts, args.host_id, args.coordinator))

    def loaded() -> LLM:
        return load(args.draft, args.devices, args.preset)

    if args.mode == "spmd":
        print(json.dumps(answers(loaded())))
    elif jax.process_index():
        follower = Follower.join(leave)
        assert follower.follow(loaded().engine.repeat).kind == "end"
        follower.close()
    else:
        leader = Leader.gather(leave)
        llm = loaded()
        llm.engine.lead(leader)
        print(json.dumps(answers(llm)))
        leader.end()


if __name__ == "__main__":
    main(sys.argv[1:])
