"""How many drafts the next round verifies, chosen by what a round costs and how many drafts have passed lately.

A round of k drafts takes cost[k] plain steps (its seconds by those of a round without drafts) and yields the length

    L[k] = 1 + c[0] + c[0] c[1] + ... + c[0] ... c[k - 1]      c[i]: chance that draft i passes if those before it did

tokens a row, so that it decodes L[k] / cost[k] times as fast as plain decoding: the speed-up, which is 1 for k = 0.
`Adaptive.choose` takes the k where it is largest. Both factors are estimates. What keeps them true costs time: rounds
without drafts while drafting pays (probes), for the cost of a plain step, and rounds with more drafts than pay so far
(trials), for the chances of drafts that nobody sees otherwise.

Speculation can lose: in trials, and while estimates lag behind a drafter that has become bad. An `Allowance` bounds
what it loses, whatever the drafter does. Over any run of rounds

    seconds spent <= (seconds of plain decoding for the same tokens + reserve plain steps) / (1 - share)

as far as the estimated costs are true, and with the worst case of a round more for each that is chosen before the one
before it was observed. Gains are no licence to lose later: the allowance does not grow beyond its reserve.

Nothing here reads a clock or draws a random number: the same observations lead to the same choices.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..errors import ConfigError
from .step_costs import StepCosts

UNKNOWN_CHANCE = 0.8  # of drafts of which nothing is recorded: hopeful, so that they are tried


@dataclass(frozen=True)
class AdaptiveConfig:
    """Settings. Steps are rounds of a batch, half-lives and intervals are counted in them."""

    share: float = 0.02  # of the time, that may be lost against plain decoding in the long run
    reserve: float = 8.0  # plain steps that may be lost at once; a round that could lose more is never taken
    half_life: float = 32.0  # after it what a group's drafts did counts half
    memory: float = 512.0  # the same of all groups together, which a group is thought to be like until it shows
    prior_rounds: float = 4.0  # rounds of its own that weigh as much as what is thought beforehand
    margin: float = 0.03  # another k must be faster by this share; plain decoding need not
    patience: int = 4  # for so many steps on end
    probe_interval: int = 128
    probe_steps: int = 2
    trial_interval: int = 128  # at first; twice as long after a trial that changed nothing
    longest_trial_interval: int = 1024
    trial_steps: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigError("adaptive.share", self.share, "a number between 0 and 1")
        for name in ("reserve", "half_life", "memory", "prior_rounds"):
            if not vars(self)[name] > 0:
                raise ConfigError(f"adaptive.{name}", vars(self)[name], "a positive number")
        if self.margin < 0:
            raise ConfigError("adaptive.margin", self.margin, "0 or more")
        for name in ("patience", "probe_interval", "probe_steps", "trial_interval", "trial_steps"):
            if vars(self)[name] < 1:
                raise ConfigError(f"adaptive.{name}", vars(self)[name], "1 or more")
        if self.longest_trial_interval < self.trial_interval:
            expected = f"at least trial_interval ({self.trial_interval})"
            raise ConfigError("adaptive.longest_trial_interval", self.longest_trial_interval, expected)


class _Window:
    """Rounds that came to each position and passed it; what is older counts less."""

    def __init__(self, size: int, half_life: float) -> None:
        self._reached, self._passed = [0.0] * size, [0.0] * size
        self._keep, self._at = 0.5 ** (1 / half_life), 0

    def add(self, now: int, at_least: Sequence[int]) -> None:
        """`at_least[i]`: rounds of this step that accepted i drafts or more, i = 0 ... k."""
        fade = self._keep ** (now - self._at)
        self._at = now
        self._reached = [x * fade for x in self._reached]
        self._passed = [x * fade for x in self._passed]
        for i in range(len(at_least) - 1):
            self._reached[i] += at_least[i]
            self._passed[i] += at_least[i + 1]

    def chances(self, now: int, before: Sequence[float], weight: float) -> list[float]:
        """By position, drawn towards `before` by `weight` rounds."""
        fade = self._keep ** (now - self._at)
        pairs = zip(self._passed, self._reached, before, strict=True)
        return [(passed * fade + weight * c) / (reached * fade + weight) for passed, reached, c in pairs]


class AcceptanceTracker[Group: Hashable]:
    """What became of drafts lately, by position and group of requests.

    A group's chances are thought to be those of all groups, and these to be what was recorded, until its own rounds
    outweigh that. Rounds fade with every step, also of positions that nobody drafts any more: in the end the recorded
    value returns, and the position is worth a try. While it fails, all groups' long memory holds that back. The time
    that this takes grows with the groups of a batch: they are meant to be kinds of requests, not each its own.
    """

    def __init__(self, most: int, recorded: Sequence[float], config: AdaptiveConfig) -> None:
        """Args:
        most: largest k.
        recorded: acceptance by position (unconditional, as `Acceptance.by_position`) where the drafter was measured;
          further positions are thought to be as the last, and all as `UNKNOWN_CHANCE` where nothing is recorded.
        config: half-lives and weights.
        """
        if any(not 0 <= x <= 1 for x in recorded) or list(recorded) != sorted(recorded, reverse=True):
            raise ValueError(f"recorded acceptance: found {list(recorded)}, expected falling shares, at most 1")
        own = [x / before if before else 0.0 for x, before in zip(recorded, (1.0, *recorded), strict=False)]
        last = own[-1] if own else UNKNOWN_CHANCE
        self.recorded = tuple((own + [last] * most)[:most])  # conditional
        self._config, self._step = config, 0
        self._all = _Window(most, config.memory)
        self._of_all: list[float] | None = None  # chances of a new group, once a step
        self._windows: dict[Group, _Window] = {}

    def record(self, k: int, accepted: Mapping[Group, Sequence[int]], n_steps: int = 1) -> None:
        """The accepted drafts of each row's round of k, of a step or several. ValueError: a number outside 0 ... k."""
        n = len(self.recorded)
        if not 0 <= k <= n:
            raise ValueError(f"found a round of {k} drafts, expected 0 ... {n}")
        by_group = {group: [numbers.count(a) for a in range(k + 1)] for group, numbers in accepted.items()}
        for group, numbers in accepted.items():
            if sum(by_group[group]) != len(numbers):
                raise ValueError(f"group {group}: found accepted drafts {list(numbers)}, expected 0 ... {k}")
        self._step += n_steps
        self._of_all = None
        if k == 0:  # nothing is learned of drafts; what is known fades when it is next looked at
            return
        everyone = [0] * (k + 1)
        for group, counts in by_group.items():
            everyone = [a + b for a, b in zip(everyone, counts, strict=True)]
            if group not in self._windows:
                self._windows[group] = _Window(n, self._config.half_life)
            self._windows[group].add(self._step, _at_least(counts))
        self._all.add(self._step, _at_least(everyone))

    def chances(self, group: Group) -> list[float]:
        """For each position the chance that its draft passes if those before it did."""
        weight = self._config.prior_rounds
        if self._of_all is None:
            self._of_all = self._all.chances(self._step, self.recorded, weight)
        window = self._windows.get(group)
        return list(self._of_all) if window is None else window.chances(self._step, self._of_all, weight)


def _at_least(counts: Sequence[int]) -> list[int]:
    out, n = list(counts), 0
    for i in reversed(range(len(out))):
        n += out[i]
        out[i] = n
    return out


def expected_lengths(chances: Iterable[float]) -> list[float]:
    """Tokens a row of a round of k drafts, the target's own included: entry k."""
    lengths, product = [1.0], 1.0
    for c in chances:
        product *= c
        lengths.append(lengths[-1] + product)
    return lengths


class Allowance:
    """What may still be lost against plain decoding, in plain steps.

    A round is allowed if its worst case is covered, in which every row gets the one token that it gets anyway. The
    balance therefore stays at 0 or above, and the rounds of any stretch together lose at most what it was at the start
    plus what the stretch added: `share` of its time.
    """

    def __init__(self, share: float, reserve: float) -> None:
        self._share, self._reserve = share, reserve
        self.balance = reserve

    def covers(self, cost: float) -> bool:
        """Whether a round of `cost` plain steps may be taken."""
        return cost - 1 <= self.balance

    def settle(self, cost: float, length: float) -> None:
        """A round of `cost` plain steps gave `length` tokens a row."""
        self.balance = min(self._reserve, self.balance + self._share * cost + length - cost)


class Choice(NamedTuple):
    """A round's k, and why: the fastest; a probe or a trial; or less than the fastest, which could lose too much."""

    k: int
    reason: Literal["best", "probe", "trial", "allowance"]


@dataclass(frozen=True)
class Status:
    """Where speculation stands, for a log line and for metrics.

    Attributes:
      k: in use.
      speed_up: over plain decoding, as estimated; 1 for k = 0.
      drafts: k; for k = 0 the number of drafts that would come closest to paying.
      length: expected tokens a row of a round of `drafts`, the target's own included.
      break_even: the length from which on such a round pays.
    """

    k: int
    speed_up: float
    drafts: int
    length: float
    break_even: float

    def __str__(self) -> str:
        if self.k == 0:
            needs = f"{self.drafts} drafts pay from an acceptance length of {self.break_even:.2f} on"
            return f"no drafts: {needs}, expected are {self.length:.2f}"
        length = f"acceptance length {self.length:.2f}, which pays from {self.break_even:.2f} on"
        return f"{self.k} drafts: {self.speed_up:.2f} times plain decoding; {length}"


class _Use:
    """What a bucket does."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.doubts = 0  # steps on end at which another k was better
        self.since_probe = 0  # steps with drafts since the last without
        self.probes_left = 0


class Adaptive[Bucket: Hashable, Group: Hashable]:
    """Chooses k step by step. Buckets have a k each; acceptance, trials and the allowance are common to all."""

    def __init__(
        self, costs: StepCosts[Bucket], recorded: Sequence[float] = (), config: AdaptiveConfig | None = None
    ) -> None:
        """Args:
        costs: measured at warm-up.
        recorded: see `AcceptanceTracker`.
        config: settings; None: the defaults.
        """
        if len(costs.ks) < 2:
            raise ValueError(f"found costs of k {costs.ks}, expected one beside 0 to choose from")
        self.config = AdaptiveConfig() if config is None else config
        self.costs = costs
        self.tracker = AcceptanceTracker[Group](costs.ks[-1], recorded, self.config)
        self.allowance = Allowance(self.config.share, self.config.reserve)
        self._uses: dict[Bucket, _Use] = {}
        self._trial = (0, 0)  # k of the trial, steps left
        self._since_trial, self._trial_interval = 0, self.config.trial_interval

    def choose(self, bucket: Bucket, rows: Mapping[Group, int]) -> Choice:
        """The k of a round that is to come.

        Args:
          bucket: whose program will run.
          rows: how many of the batch's rows belong to each group.
        """
        costs, chances = self.costs.relative(bucket), self._chances(rows)
        gains = _speed_ups(costs, chances)
        use = self._uses.get(bucket)
        if use is None:
            use = self._uses[bucket] = _Use(_fastest(gains))
        self._reconsider(use, gains)
        choice = self._experiment(use, costs, chances) or Choice(use.k, "best")
        if not self.allowance.covers(costs[choice.k]):
            covered = {k: gain for k, gain in gains.items() if k == 0 or self.allowance.covers(costs[k])}
            choice = Choice(_fastest(covered), "allowance")
        use.since_probe = 0 if choice.k == 0 else use.since_probe + 1
        return choice

    def observe(
        self, bucket: Bucket, k: int, seconds: float, accepted: Mapping[Group, Sequence[int]], n_rounds: int = 1
    ) -> None:
        """What the rounds of one program were.

        Args:
          bucket: whose program ran.
          k: drafts a round.
          seconds: of each round; one measurement, however many rounds it is the mean of.
          accepted: drafts of each row in each of the rounds, by group; zeros where k is 0.
          n_rounds: how many there were.
        """
        n, total = sum(map(len, accepted.values())), sum(map(sum, accepted.values()))
        if not n:
            raise ValueError("found a round without rows, expected at least one")
        self.tracker.record(k, accepted, n_rounds)
        self.costs.observe(bucket, k, seconds)
        cost = self.costs.relative(bucket)[k]
        for _ in range(n_rounds):
            self.allowance.settle(cost, 1 + total / n)

    def status(self, bucket: Bucket, rows: Mapping[Group, int]) -> Status:
        """Estimates for a batch like this; changes nothing."""
        costs, chances = self.costs.relative(bucket), self._chances(rows)
        gains = _speed_ups(costs, chances)
        use = self._uses.get(bucket)
        k = _fastest(gains) if use is None else use.k
        drafts = k or _fastest({n: gain for n, gain in gains.items() if n})
        return Status(k, gains[k], drafts, gains[drafts] * costs[drafts], costs[drafts])

    def _chances(self, rows: Mapping[Group, int]) -> list[tuple[float, list[float]]]:
        """(share of the rows, chances by position) of each group."""
        n = sum(rows.values())
        if n < 1:
            raise ValueError(f"found {n} rows, expected at least one")
        return [(count / n, self.tracker.chances(group)) for group, count in rows.items() if count]

    def _reconsider(self, use: _Use, gains: Mapping[int, float]) -> None:
        """Another k from now on, if one has been better for long enough."""
        best, wanted = _fastest(gains), use.k
        if gains[best] > gains[use.k] * (1 + self.config.margin):
            wanted = best
        elif gains[use.k] < 1:
            wanted = 0
        use.doubts = use.doubts + 1 if wanted != use.k else 0
        if use.doubts >= self.config.patience:
            use.k, use.doubts = wanted, 0
            self._since_trial, self._trial_interval = 0, self.config.trial_interval

    def _experiment(
        self, use: _Use, costs: Mapping[int, float], chances: Sequence[tuple[float, list[float]]]
    ) -> Choice | None:
        """A probe or trial that is under way or due."""
        c = self.config
        if use.k > 0 and use.since_probe >= c.probe_interval:
            use.probes_left = c.probe_steps
        if use.probes_left:
            use.probes_left -= 1
            return Choice(0, "probe")
        k, left = self._trial
        if left == 0:
            self._since_trial += 1
            if self._since_trial < self._trial_interval:
                return None
            k, left = self._candidate(use.k, costs, chances), c.trial_steps
            self._since_trial, self._trial_interval = 0, min(2 * self._trial_interval, c.longest_trial_interval)
        self._trial = (k, left - 1)
        return Choice(k, "trial") if k > use.k else None  # another bucket may use as many already

    def _candidate(self, k: int, costs: Mapping[int, float], chances: Sequence[tuple[float, list[float]]]) -> int:
        """The larger k that would be fastest if the drafts not seen now were as good as recorded; k itself if none can.

        One is left out that would not pay if all its drafts passed, or whose worst case is not covered.
        """
        recorded = self.tracker.recorded
        hoped = [(share, own[:k] + [max(x) for x in zip(own, recorded, strict=True)][k:]) for share, own in chances]
        now = _speed_ups(costs, chances)[k]
        larger = {
            n: gain
            for n, gain in _speed_ups(costs, hoped).items()
            if n > k and (n + 1) / costs[n] > now and self.allowance.covers(costs[n])
        }
        return _fastest(larger) if larger else k


def _speed_ups(costs: Mapping[int, float], chances: Sequence[tuple[float, list[float]]]) -> dict[int, float]:
    """Speed-up over plain decoding of each k, for (share of the rows, chances) of the groups."""
    lengths = [(share, expected_lengths(own)) for share, own in chances]
    return {k: sum(share * of_k[k] for share, of_k in lengths) / cost for k, cost in costs.items()}


def _fastest(gains: Mapping[int, float]) -> int:
    """The k of the largest speed-up; the smallest of a tie."""
    return max(gains, key=lambda k: (gains[k], -k))
