"""What it costs a proxy process that others count beside it: CPU time a request, without a network.

python benchmarks/routing_shared.py
"""

import os
from random import Random
from time import thread_time

from report import median
from routing_stage import undisturbed

from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.proxy.instances.instance import Instance, InstanceState, Lease
from torchmoor.proxy.instances.registry import Registry
from torchmoor.proxy.instances.shared_counts import SharedCounts

NUM_REQUESTS = 10_000


def time_to_share(processes: int, instances: int = 20) -> float:
    """Median CPU microseconds of choosing, counting and counting out one request in one process of several.

    All are equally busy: each of the others begins and ends a request between two of this one's. One has no map.
    """
    file = SharedCounts.make_file(processes)
    sides = []
    for row in range(processes):
        registry = Registry([EndpointSettings(name="e", variants=(VariantSettings(model="m"),))])
        counts = SharedCounts(file, num_rows=processes, row=row)
        for number in range(instances):
            instance = Instance(
                name=f"i{number}", endpoint="e", model="m", port=1, capacity=1000, state=InstanceState.READY
            )
            registry.add(instance)
            if processes > 1:
                counts.attach(instance, number)
        sides.append((counts, registry.endpoints()[0].variants[0].pool, registry.instances()))
    rng = Random(3)
    held: list[list[Lease]] = [[] for _ in sides]
    most = max(1, int(0.7 * instances / processes))
    spent = []
    for _ in range(NUM_REQUESTS):
        for number, (_, _, members) in enumerate(sides[1:], 1):
            held[number].append(rng.choice(members).lease())
            if len(held[number]) > most:
                held[number].pop(0).release()
        counts, pool, _ = sides[0]
        began = thread_time()
        if processes > 1:
            counts.refresh()
        chosen = pool.find_least_outstanding()
        assert chosen is not None
        held[0].append(chosen.lease())
        if len(held[0]) > most:
            held[0].pop(0).release()
        spent.append(thread_time() - began)
    for counts, _, _ in sides:
        counts.close()
    os.close(file)
    return median(spent) * 1e6


def main() -> None:
    with undisturbed() as is_ahead:
        print(f"ahead of other processes: {is_ahead}")
        measure()


def measure() -> None:
    for processes in (1, 2, 4):
        for instances in (20, 1000):
            best = min(time_to_share(processes, instances) for _ in range(5))  # least disturbed by others
            print(f"{processes} processes, {instances} instances: {best:.2f} us a request")


if __name__ == "__main__":
    main()
