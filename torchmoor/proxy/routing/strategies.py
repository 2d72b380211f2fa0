"""The table of routing strategies. To add one, write its module and add it here."""

from __future__ import annotations

from torchmoor.proxy.routing.kv_aware import KvAware
from torchmoor.proxy.routing.least_outstanding import LeastOutstanding
from torchmoor.proxy.routing.prefix_aware import PrefixAware
from torchmoor.proxy.routing.random import RandomChoice
from torchmoor.proxy.routing.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {
    each.name: each for each in (LeastOutstanding, RandomChoice, PrefixAware, KvAware)
}
