"""Token loads of experts over training steps, as users of MoE training report them. Seeded."""

from collections.abc import Iterator

import numpy as np

STEADY = ("uniform", "one hot", "few hot", "zipf 1.2")
CHANGING = ("drifting", "bursts")
DRIFT_STEPS = 100
NAMES = (*STEADY, *CHANGING)


def popularity(name: str, experts: int, steps: int, seed: int) -> np.ndarray:
    """Returns each expert's share of the tokens, step by step, [steps, experts].

    Args:
        name: `uniform`; `one hot` (half of all tokens to one expert); `few hot` (80 % to an eighth
            of the experts); `zipf 1.2`; `drifting` (Zipf whose shares slide from each expert to
            another within 100 steps, and on); `bursts` (Zipf, and now and then an expert at random
            gets four times its share for 10 steps).
        experts: E.
        steps: number of steps.
        seed: of the order of the experts and the bursts.
    """
    random = np.random.default_rng(seed)
    ranking = random.permutation(experts)
    zipf = 1.0 / np.arange(1, experts + 1) ** 1.2
    shares = np.empty((steps, experts))
    burst, until = 0, 0
    for step in range(steps):
        own = np.ones(experts)
        if name == "one hot":
            own[ranking[0]] = experts - 1
        elif name == "few hot":
            hot = max(1, experts // 8)
            own[ranking[:hot]] = 4 * (experts - hot) / hot
        elif name == "zipf 1.2" or name == "bursts":
            own[ranking] = zipf
        elif name == "drifting":
            slid, part = divmod(step, DRIFT_STEPS)
            own[np.roll(ranking, slid)] = zipf * (DRIFT_STEPS - part)
            own[np.roll(ranking, slid + 1)] += zipf * part
        elif name != "uniform":
            raise ValueError(f"no workload is called {name!r}; there are {', '.join(NAMES)}")
        if name == "bursts":
            if step >= until and random.random() < 0.02:
                burst, until = int(random.integers(experts)), step + 10
            if step < until:
                own[burst] *= 4
        shares[step] = own / own.sum()
    return shares


def token_counts(
    name: str, ranks: int, experts: int, pairs_per_rank: int, steps: int, seed: int
) -> Iterator[np.ndarray]:
    """Yields the (token, expert) pairs that each rank sends to each expert, [ranks, experts]."""
    random = np.random.default_rng([seed, 1])
    for shares in popularity(name, experts, steps, seed):
        yield random.multinomial(pairs_per_rank, shares, size=ranks)
