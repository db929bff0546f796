"""Who writes what: the paper's ways (arXiv 2408.04307, section 4), as printed, and ours.

Under ZeRO-2 every rank writes its shard of the optimizer; the ways differ in who writes weights.

baseline: rank 0 those of the rest, the first expert-parallel group those of experts.
EE: the holders of an expert write equal parts of it.
EE+EN: the rest is spread over all ranks by whole layers, evenly, whatever experts are saved.
EE+AN: whole layers, largest first, go to the rank with least, experts of this save included.
ours: `write_plan`, from the same holders.
"""

from collections.abc import Mapping

from megatron_resilient.algorithms.write_plan import Masters, plan_writes
from tools.reproduce.moc_setup import OPTIMIZER, Case, Model

PRINTED = ("baseline", "EE", "EE+EN", "EE+AN")
WAYS = (*PRINTED, "ours")


def rank_bytes(
    way: str, case: Case, model: Model, k: int, save: int = 0, masters: Masters = "selected"
) -> list[float]:
    """Returns the bytes that every rank writes in one save with K experts of each layer."""
    element_bytes = model.element_bytes(model.wanted(model.select(save, k), masters))
    if way == "ours":
        return [float(own) for own in plan_writes(case.held(model), element_bytes).bytes]
    load = _experts_and_optimizer(way, case, model, element_bytes)
    units = {f"dense/0.0/weight/{name}": size for name, size in model.dense().items()}
    sizes = {key: size * element_bytes[key] for key, size in units.items()}
    if way in ("baseline", "EE"):
        load[0] += sum(sizes.values())
        return load
    # The pattern of EN is fixed; that of AN follows the experts of the save.
    level = [0.0] * case.ranks if way == "EE+EN" else load
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        rank = min(range(case.ranks), key=lambda rank: (level[rank], rank))
        level[rank] += sizes[key]
        if level is not load:
            load[rank] += sizes[key]
    return load


def _experts_and_optimizer(
    way: str, case: Case, model: Model, element_bytes: Mapping[str, int]
) -> list[float]:
    load = [0.0] * case.ranks
    for key, (size, kinds) in model.arrays().items():
        own = size * element_bytes.get(key, 0)
        if kinds != OPTIMIZER and key.startswith("dense"):
            continue
        holders = list(range(case.ranks))
        if key.startswith("expert"):
            holders = case.expert_holders(model, int(key.split("/")[2]))
        if kinds != OPTIMIZER and way == "baseline":
            holders = holders[:1]
        for rank in holders:
            load[rank] += own / len(holders)
    return load


def bottleneck(way: str, case: Case, model: Model, k: int, masters: Masters = "selected") -> float:
    """Returns the bytes of the rank with most, in the mean over a rotation of saves."""
    saves = range(-(-model.experts // k))
    most = [max(rank_bytes(way, case, model, k, save, masters)) for save in saves]
    return sum(most) / len(most)
