"""The block pool and its caches: holding, sharing, evicting and reading blocks."""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from handlers.engine.builtin.free_blocks import FreeBlocks
from handlers.engine.builtin.kv_cache import BLOCK, BlockPool, CacheShape, SequenceCache
from handlers.errors import OutOfMemory

SHAPE = CacheShape(num_layers=3, num_kv_heads=2, head_size=4, dtype=torch.float16, device=torch.device("cpu"))
ONE_NUMBER = CacheShape(num_layers=1, num_kv_heads=1, head_size=1, dtype=torch.int64, device=torch.device("cpu"))


# Free blocks


def runs(blocks: set[int]) -> list[list[int]]:
    """Group the blocks into maximal runs of neighbours."""
    found: list[list[int]] = []
    for block in sorted(blocks):
        if found and found[-1][-1] == block - 1:
            found[-1].append(block)
        else:
            found.append([block])
    return found


@settings(max_examples=200, deadline=None)
@given(data=st.data(), size=st.integers(0, 24))
def test_free_blocks_are_a_set_that_prefers_neighbours(data: Any, size: int) -> None:
    """No block is allocated twice, freed blocks join their neighbours, and runs are preferred."""
    free, expected, taken = FreeBlocks(size), set(range(size)), list[int]()

    for _ in range(data.draw(st.integers(0, 20))):
        if taken and data.draw(st.booleans()):
            block = taken.pop(data.draw(st.integers(0, len(taken) - 1)))
            free.give(block)
            expected.add(block)
        else:
            count = data.draw(st.integers(0, len(expected)))
            after = data.draw(st.sampled_from([None, *taken]))
            widest = max((len(run) for run in runs(expected)), default=0)
            behind = next((len(run) for run in runs(expected) if after is not None and run[0] == after + 1), 0)
            found = free.take(count, after)
            assert len(found) == len(set(found)) == count
            assert set(found) <= expected
            if behind:
                assert found[: min(behind, count)] == list(range(after + 1, after + 1 + min(behind, count)))
            elif count and count <= widest:
                assert found == list(range(found[0], found[0] + count))
            expected -= set(found)
            taken += found
        assert list(free) == sorted(expected)
        assert len(free) == len(expected)
        assert repr(free) == f"<FreeBlocks {len(expected)} in {len(runs(expected))} gaps>"


def test_sequences_that_grow_in_turns_stay_in_one_piece() -> None:
    """A new run leaves room behind the previous one, so that a conversation's next turn is adjacent."""
    free = FreeBlocks(64)
    tables = [free.take(4), free.take(4), free.take(4)]

    for _ in range(3):
        for table in tables:
            table += free.take(2, table[-1])

    assert [table == list(range(table[0], table[0] + 10)) for table in tables] == [True] * 3


# One cache


def new_pool(num_tokens: int, shape: CacheShape = SHAPE) -> BlockPool:
    return BlockPool(shape, shape.num_bytes(num_tokens))


def stored(pool: BlockPool, tokens: list[int], scope: str = "") -> SequenceCache:
    """Return a pinned cache that holds these tokens."""
    cache = SequenceCache(pool, scope)
    cache.match([*tokens, -1])
    cache.reserve(len(tokens))
    cache.advance(tokens[cache.length :])
    return cache


def num_found(pool: BlockPool, prompt: list[int], scope: str = "") -> int:
    """Return how many leading positions of the prompt a new cache would share."""
    cache = SequenceCache(pool, scope)
    length = cache.match(prompt)
    cache.drop()
    return length


@pytest.mark.parametrize("num_tokens", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK])
def test_cache_holds_exactly_the_bytes_of_the_formula(num_tokens: int) -> None:
    """Reserving n positions costs num_bytes in whole blocks of the memory allocated at the start."""
    pool = new_pool(10 * BLOCK)
    cache = SequenceCache(pool)

    cache.reserve(num_tokens)

    blocks = -(-num_tokens // BLOCK)
    assert cache.num_bytes == pool.used_bytes == SHAPE.num_bytes(num_tokens) == 2 * 3 * 2 * 4 * 2 * BLOCK * blocks
    assert cache.capacity == blocks * BLOCK
    assert pool.storage.nbytes == pool.capacity_bytes == SHAPE.num_bytes(10 * BLOCK)


def test_storage_that_the_device_cannot_hold_is_out_of_memory() -> None:
    """A cache that exceeds the device's memory fails at the start with a reason."""
    with pytest.raises(OutOfMemory, match="no room for a KV cache"):
        BlockPool(SHAPE, 1 << 60)


def test_reserve_keeps_what_is_stored_and_unpin_gives_back_the_rest() -> None:
    """Blocks never move; those that are empty at the end of a turn are free again."""
    pool = new_pool(40 * BLOCK)
    cache = stored(pool, list(range(70)))
    table = list(cache.table)

    cache.reserve(500)
    assert cache.table[:5] == table
    cache.unpin()

    assert (cache.table, cache.length) == (table, 70)
    assert pool.num_used == 5


def test_positions_are_valid_only_after_advance() -> None:
    """A step that failed half way does not extend the cache, and others find nothing of it."""
    pool = new_pool(10 * BLOCK)
    cache = SequenceCache(pool)
    cache.reserve(2 * BLOCK)
    tokens = list(range(2 * BLOCK))

    assert cache.length == 0
    assert num_found(pool, [*tokens, 1]) == 0

    cache.advance(tokens)
    assert cache.tokens == tokens
    assert num_found(pool, [*tokens, 1]) == 2 * BLOCK


def test_truncate_and_drop_give_back_blocks() -> None:
    """Blocks of removed positions are free at once."""
    pool = new_pool(20 * BLOCK)
    cache = stored(pool, list(range(200)))

    assert cache.truncate(1000) == 200
    assert cache.truncate(10) == 10
    assert (cache.length, cache.capacity, pool.num_used) == (10, BLOCK, 1)
    cache.drop()
    assert (cache.length, cache.num_bytes, pool.num_used) == (0, 0, 0)
    cache.drop()
    assert repr(cache) == "<SequenceCache 0/0 positions>"
    assert repr(pool) == "<BlockPool 0/20 blocks, 0 idle caches>"


@given(held=st.lists(st.integers(0, 3), max_size=8), tokens=st.lists(st.integers(0, 3), max_size=8))
def test_common_prefix_is_the_longest_one(held: list[int], tokens: list[int]) -> None:
    """The result equals that of a loop over single positions."""
    cache = SequenceCache(new_pool(BLOCK))
    cache.advance(held)

    expected = 0
    while expected < min(len(held), len(tokens)) and held[expected] == tokens[expected]:
        expected += 1

    assert cache.common_prefix(tokens) == expected


# Sharing


def test_beginning_is_shared_in_whole_blocks() -> None:
    """A prompt that begins like a stored one shares its full blocks."""
    pool = new_pool(20 * BLOCK)
    system = list(range(2 * BLOCK + 5))
    first = stored(pool, [*system, 7, 8])
    second = SequenceCache(pool)

    assert second.match([*system, 9]) == 2 * BLOCK
    assert second.table == first.table[:2]
    assert second.tokens == system[: 2 * BLOCK]
    assert pool.num_used == 3


def test_one_token_is_always_left_to_compute() -> None:
    """For a fully stored prompt, the last position is computed for its logits."""
    pool = new_pool(20 * BLOCK)
    tokens = list(range(2 * BLOCK))
    first = stored(pool, tokens)

    assert num_found(pool, tokens) == BLOCK
    assert first.match(tokens) == 2 * BLOCK - 1


def test_scopes_share_nothing() -> None:
    """The same tokens in another scope are not shared."""
    pool = new_pool(20 * BLOCK)
    tokens = list(range(3 * BLOCK))
    stored(pool, tokens, "a")

    assert num_found(pool, tokens, "b") == 0
    assert num_found(pool, tokens, "") == 0
    assert num_found(pool, tokens, "a") == 2 * BLOCK


def test_images_of_different_keys_share_nothing() -> None:
    """Image positions differ by key; the text before the image is shared."""
    pool = new_pool(20 * BLOCK)
    before = list(range(BLOCK))
    stored(pool, [*before, *[-1] * BLOCK, 5])

    assert num_found(pool, [*before, *[-2] * BLOCK, 5]) == BLOCK
    assert num_found(pool, [*before, *[-1] * BLOCK, 6]) == 2 * BLOCK


def test_same_tokens_behind_another_beginning_are_not_shared() -> None:
    """A block is identified by all tokens up to its end, not only its own."""
    pool = new_pool(20 * BLOCK)
    same = [5] * BLOCK
    stored(pool, [*[1] * BLOCK, *same])

    other = stored(pool, [*[2] * BLOCK, *same])

    assert num_found(pool, [*[1] * BLOCK, *same, 9]) == 2 * BLOCK
    assert num_found(pool, [*same, 9]) == 0
    assert pool.num_used == 4
    other.drop()
    assert num_found(pool, [*[2] * BLOCK, *same, 9]) == 0


def test_own_positions_win_unless_others_have_more() -> None:
    """A kept conversation keeps its own blocks, down to the single position, if they are the longest match."""
    pool = new_pool(20 * BLOCK)
    cache = stored(pool, list(range(40)))
    other = stored(pool, [*range(36), *range(100, 160)])
    table = list(cache.table)

    assert cache.match([*range(38), 0, 0]) == 38
    assert cache.table == table
    assert cache.match([*range(36), *range(100, 160), 3]) == 96
    assert cache.table == other.table


def test_truncation_leaves_a_shared_block_whole() -> None:
    """Truncating inside a shared block releases it; a block without other holders can be written again."""
    pool = new_pool(20 * BLOCK)
    cache = stored(pool, list(range(3 * BLOCK)))
    other = SequenceCache(pool)
    other.match(list(range(3 * BLOCK)))

    assert cache.truncate(BLOCK + 3) == BLOCK
    assert num_found(pool, list(range(3 * BLOCK))) == 2 * BLOCK  # the other cache still holds it
    other.truncate(BLOCK + 3)
    assert other.length == BLOCK + 3
    assert num_found(pool, list(range(3 * BLOCK))) == BLOCK


def test_beginning_computed_twice_at_the_same_time_is_shared_all_the_same() -> None:
    """Of two blocks with equal content one is indexed, and blocks after either are found through both."""
    pool = new_pool(20 * BLOCK)
    tokens = list(range(4 * BLOCK))
    caches = [SequenceCache(pool), SequenceCache(pool)]
    for cache in caches:
        cache.reserve(3 * BLOCK)
    for cache in caches:
        cache.advance(tokens[:BLOCK])
    caches[1].advance(tokens[BLOCK : 3 * BLOCK])

    assert num_found(pool, tokens) == 3 * BLOCK
    assert caches[0].match(tokens) == 3 * BLOCK
    pool.check_integrity(caches)
    assert caches[0].table[1:] == caches[1].table[1:]


def test_what_is_written_after_a_truncation_has_its_own_name() -> None:
    """Blocks written after a truncation are identified by their new content, though another cache holds the old."""
    pool = new_pool(20 * BLOCK)
    old, new = list(range(3 * BLOCK)), [*range(BLOCK), *range(500, 500 + 2 * BLOCK)]
    cache = stored(pool, old[: 2 * BLOCK])
    other = stored(pool, old[: 2 * BLOCK])

    cache.truncate(BLOCK)
    cache.reserve(3 * BLOCK)
    cache.advance(new[BLOCK:])

    assert other.table != cache.table[:2]
    assert num_found(pool, [*new, 1]) == 3 * BLOCK
    assert num_found(pool, [*old[: 2 * BLOCK], *new[2 * BLOCK :], 1]) == 2 * BLOCK


# Eviction


def test_least_recently_used_idle_cache_goes_first() -> None:
    """Pinned caches keep their blocks; as many idle ones as necessary are evicted, the least recently used first."""
    pool = new_pool(8 * BLOCK)
    caches = [stored(pool, [i] * 2 * BLOCK) for i in range(4)]
    for i in (2, 0, 1):
        caches[i].unpin()
    caches[2].pin()
    caches[2].unpin()

    SequenceCache(pool).reserve(3 * BLOCK)

    assert [cache.length for cache in caches] == [0, 0, 2 * BLOCK, 2 * BLOCK]
    assert pool.num_evicted == 2


def test_nothing_is_evicted_in_vain() -> None:
    """If evicting all idle caches would not free enough, also because of shared blocks, none is evicted."""
    pool = new_pool(4 * BLOCK)
    tokens = list(range(2 * BLOCK))
    pinned, idle = stored(pool, [*tokens, 1]), stored(pool, [*tokens, 1])
    idle.unpin()
    assert pool.num_used == 4

    with pytest.raises(OutOfMemory, match="64 tokens"):
        pinned.reserve(5 * BLOCK)

    assert idle.length == 2 * BLOCK + 1
    pinned.reserve(4 * BLOCK)
    assert (idle.length, pool.num_evicted) == (0, 1)


class UnreadTable(list[int]):
    """A table of blocks that must not be read."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the table is read")


def test_only_the_caches_that_go_are_read() -> None:
    """On a GPU, idle caches may hold 100,000 blocks: reading all of them would delay each stream by a step."""
    pool = new_pool(4 * BLOCK)
    oldest, newest = stored(pool, [1] * 2 * BLOCK), stored(pool, [2] * 2 * BLOCK)
    for cache in (oldest, newest):
        cache.unpin()
    newest.table = UnreadTable(newest.table)

    SequenceCache(pool).reserve(2 * BLOCK)

    assert [cache.length for cache in (oldest, newest)] == [0, 2 * BLOCK]


def test_evicted_cache_can_be_used_again() -> None:
    """The next turn of an evicted cache computes everything again."""
    pool = new_pool(4 * BLOCK)
    cache = stored(pool, list(range(3 * BLOCK)))
    cache.unpin()
    other = SequenceCache(pool)
    other.reserve(2 * BLOCK)

    cache.pin()
    assert cache.match(list(range(3 * BLOCK))) == 0
    cache.reserve(2 * BLOCK)
    cache.advance(list(range(2 * BLOCK)))
    pool.check_integrity([cache, other])


def test_audit_notices_what_is_not_accounted_for() -> None:
    """A block that a cache lost without releasing it, or released while holding it, is an error."""
    pool = new_pool(4 * BLOCK)
    cache = stored(pool, list(range(40)))

    pool.check_integrity([cache])
    with pytest.raises(RuntimeError, match="holders"):
        pool.check_integrity([])
    pool.release(cache.table[:1])
    with pytest.raises(RuntimeError, match="holders"):
        pool.check_integrity([cache])


# All operations against a naive model

PROMPTS = [  # sequences with common beginnings of up to four blocks
    [token for piece in pieces for token in [piece] * BLOCK] + tail
    for pieces in itertools.chain.from_iterable(itertools.product([0, 1], repeat=n) for n in range(4))
    for tail in ([0], [1], [0] * 9 + [1] * 3)
]

ACTIONS = ["turn", "turn", "turn", "begin_turn", "go_on", "unpin", "unpin", "truncate", "fail_step", "reopen"]


class PoolMachine(RuleBasedStateMachine):
    """Each stored number identifies its scope and all tokens before it; a cache must read exactly its own."""

    @initialize(capacity=st.sampled_from([5, 9, 16]))
    def start(self, capacity: int) -> None:
        self.pool = new_pool(capacity * BLOCK, ONE_NUMBER)
        self.pool.storage.fill_(-1)
        self.cells = self.pool.storage[0, 0, 0, :, 0]
        self.names: dict[tuple[str | int, int], int] = {}  # by the name of the tokens before, and the token
        self.held: dict[SequenceCache, list[int]] = {}
        self.idle: list[SequenceCache] = []
        self.pending: dict[SequenceCache, list[int]] = {}
        for scope in ("", "", "", "a"):
            self.held[SequenceCache(self.pool, scope)] = []

    def name(self, scope: str, tokens: list[int]) -> list[int]:
        """Return a number for each position, which stands for the scope and all tokens up to there."""
        found: list[int] = []
        before: str | int = scope
        for token in tokens:
            before = self.names.setdefault((before, token), len(self.names))
            found.append(before)
        return found

    def pick(self, data: Any) -> SequenceCache:
        """Return a cache, pinned as for a turn, that is not in the middle of one."""
        cache: SequenceCache = data.draw(st.sampled_from(list(self.held)), label="cache")
        self.pending.pop(cache, None)
        cache.pin()
        if cache in self.idle:
            self.idle.remove(cache)
        return cache

    def grow(self, cache: SequenceCache, num_tokens: int) -> bool:
        """Reserve with eviction of idle caches; return False without memory."""
        pinned = {block for c in self.held if c not in self.idle for block in c.table}
        missing = -(-num_tokens // BLOCK) - len(cache.table)
        try:
            cache.reserve(num_tokens)
        except OutOfMemory:
            assert missing > self.pool.capacity - len(pinned)
            assert all(c.table for c in self.idle)
            return False
        assert missing <= self.pool.capacity - len(pinned)
        evicted = [c for c in self.idle if not c.table]
        assert evicted == self.idle[: len(evicted)]
        for c in evicted:
            self.held[c] = []
        del self.idle[: len(evicted)]
        return True

    @rule(data=st.data(), action=st.sampled_from(ACTIONS))
    def act(self, data: Any, action: str) -> None:
        """A single rule, because hypothesis disables some rules in each run, and the mixture matters."""
        getattr(self, action)(data)

    def turn(self, data: Any) -> None:
        """Run a whole turn."""
        cache = self.begin_turn(data)
        self.step(cache, self.pending.pop(cache))
        self.let_go(cache)

    def begin_turn(self, data: Any) -> SequenceCache:
        """Match and reserve; other turns may run before the missing positions are computed."""
        cache = self.pick(data)
        prompt = data.draw(st.sampled_from(PROMPTS), label="prompt")
        own = min(cache.common_prefix(prompt), len(prompt) - 1)
        kept = cache.match(prompt)
        assert own // BLOCK * BLOCK <= kept < len(prompt)
        assert kept >= own or kept % BLOCK == 0
        self.held[cache] = prompt[:kept]
        whole = prompt + [0] * data.draw(st.sampled_from([0, 4, BLOCK]), label="new tokens")
        self.pending[cache] = whole[kept:] if self.grow(cache, len(whole)) else []
        return cache

    def go_on(self, data: Any) -> None:
        """Run a step of a turn in progress."""
        if begun := [c for c, tokens in self.pending.items() if tokens]:
            cache = data.draw(st.sampled_from(begun), label="cache")
            num_tokens = data.draw(st.sampled_from([5 * BLOCK, BLOCK, 3]), label="tokens")
            self.step(cache, self.pending[cache][:num_tokens])
            del self.pending[cache][:num_tokens]

    def step(self, cache: SequenceCache, tokens: list[int], is_good: bool = True) -> None:
        slots = cache.slots[cache.length : cache.length + len(tokens)]
        for block in {int(slot) // BLOCK for slot in slots}:
            assert sum(block in c.table for c in self.held) == 1
        known = self.held[cache]
        names = self.name(cache.scope, known + tokens)[len(known) :]
        self.cells[slots] = torch.tensor(names, dtype=torch.int64) if is_good else -7
        if is_good:
            cache.advance(tokens)
            self.held[cache] = known + tokens

    def fail_step(self, data: Any) -> None:
        """Fail a step, whose positions then belong to no cache."""
        cache = self.pick(data)
        if self.grow(cache, cache.length + 5):
            self.step(cache, [0] * 5, is_good=False)

    def truncate(self, data: Any) -> None:
        cache = self.pick(data)
        wanted = data.draw(st.integers(0, cache.length), label="length")
        left = cache.truncate(wanted)
        assert left == wanted or left == wanted // BLOCK * BLOCK
        self.held[cache] = self.held[cache][:left]

    def unpin(self, data: Any) -> None:
        self.let_go(self.pick(data))

    def let_go(self, cache: SequenceCache) -> None:
        cache.unpin()
        assert cache.capacity - cache.length < BLOCK
        if cache.table:
            self.idle.append(cache)

    def reopen(self, data: Any) -> None:
        """Close a cache and open another in its place."""
        cache = self.pick(data)
        cache.drop()
        del self.held[cache]
        self.held[SequenceCache(self.pool, cache.scope)] = []

    @invariant()
    def caches_read_what_they_hold(self) -> None:
        for cache, tokens in getattr(self, "held", {}).items():
            assert cache.tokens == tokens
            expected = self.name(cache.scope, tokens)
            assert self.cells[cache.slots[: cache.length]].tolist() == expected
            if cache.run is not None:
                assert self.cells[cache.run : cache.run + cache.length].tolist() == expected
            if cache.table:
                assert (cache.run is not None) == all(b == cache.table[0] + i for i, b in enumerate(cache.table))

    @invariant()
    def pool_is_consistent(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity([c for c in self.held if c not in self.idle])

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for cache in self.held:
                cache.drop()
            self.pool.check_integrity([])
            assert self.pool.num_used == 0


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


# Threads


@pytest.fixture
def workers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def test_threads_open_share_evict_and_drop_at_the_same_time(workers: ThreadPoolExecutor) -> None:
    """Four threads on a pool that is too small lose no block and get no block twice."""
    pool = new_pool(24 * BLOCK)
    start = threading.Barrier(4)

    def work(number: int) -> list[SequenceCache]:
        caches = [SequenceCache(pool, str(number % 2)) for _ in range(4)]
        start.wait()
        for i in range(150):
            cache = caches[i % 4]
            cache.pin()
            prompt = [i % 3] * (BLOCK * (1 + i % 4) + number)
            cache.match(prompt)
            try:
                cache.reserve(len(prompt) + 8)
            except OutOfMemory:
                pass
            else:
                cache.advance(prompt[cache.length :])
                assert cache.tokens == prompt
            if i % 7 == 0:
                cache.drop()
            cache.unpin()
        return caches

    caches = [cache for future in [workers.submit(work, i) for i in range(4)] for cache in future.result(30)]

    pool.check_integrity([])
    for cache in caches:
        cache.drop()
    pool.check_integrity([])
    assert pool.num_used == 0
    assert pool.num_evicted > 0
