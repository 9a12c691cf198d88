"""Stages of training that several processes run together, one after the other: a program for `two_processes`.

python -c "from tests.train_jobs import main; main()" JOBS --num-hosts N --host-id I --coordinator HOST:PORT
"""

import argparse
import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kimijax.multihost import HostsConfig, initialize

PROGRAM = "from tests.train_jobs import main; main()"


@dataclass(frozen=True)
class Job:
    """One stage on a run's folder."""

    stage: str  # fit or features
    recipe: str
    out: str
    overrides: tuple[str, ...] = ()
    stop: int = 0  # how often the process is asked before it says that it is to stop; 0: never
    host: int = 0  # the one that is stopped

    def run(self, index: int) -> bool:
        """Whether the stage says that it is done; `index` is this process's."""
        from kimijax.train import draft_recipe, features, fit

        from .feature_cases import small_files

        recipe = draft_recipe.load_draft_recipe(self.recipe, self.overrides)
        asked = itertools.count(1)

        def stop() -> bool:
            return bool(self.stop) and index == self.host and next(asked) >= self.stop

        with small_files():
            stage = fit.fit if self.stage == "fit" else features.extract
            return stage(recipe, Path(self.out), stop)


def arguments(jobs: Sequence[Job]) -> list[str]:
    return [json.dumps([dataclasses.asdict(job) for job in jobs])]


def main() -> None:
    """Run them; prints a list of what each said."""
    parser = argparse.ArgumentParser()
    parser.add_argument("jobs", type=json.loads)
    parser.add_argument("--num-hosts", type=int)
    parser.add_argument("--host-id", type=int)
    parser.add_argument("--coordinator")
    args = parser.parse_args()
    initialize(HostsConfig(args.num_hosts, args.host_id, args.coordinator))
    jobs = [Job(**{**job, "overrides": tuple(job["overrides"])}) for job in args.jobs]
    print("\nFINISHED", [job.run(args.host_id) for job in jobs], flush=True)
