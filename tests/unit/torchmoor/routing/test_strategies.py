"""Strategies: the instance for a request, and the reason."""

import sys
from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from tests.unit.torchmoor.routing.candidates import FakeCandidate, change, named, pool_of
from torchmoor.proxy.dispatch.dispatchers import choose_weighted
from torchmoor.proxy.routing.kv_aware import KvAware, PrefixIndex, chain
from torchmoor.proxy.routing.least_outstanding import LeastOutstanding
from torchmoor.proxy.routing.pool import MAX_WALKED, C, Pool
from torchmoor.proxy.routing.prefix_aware import PrefixAware
from torchmoor.proxy.routing.random import RandomChoice
from torchmoor.proxy.routing.session_failover import place_of, rendezvous
from torchmoor.proxy.routing.strategy import FIRST_ATTEMPT, Pick, Strategy, StrategyRequest, find_roomiest

NOBODY = frozenset[str]()
RNG = Random(1)  # where nothing is drawn


def prefix_aware(threshold: int = 2) -> PrefixAware:
    return PrefixAware(prefix_length=1024, concurrency_threshold=threshold)


def kv_aware() -> KvAware:
    """Return a strategy with blocks of 4 bytes, two of which outweigh one outstanding request."""
    return KvAware(max_prompt_bytes=64, block_bytes=4, bytes_per_request=8, max_blocks_per_instance=100)


# All strategies


@pytest.mark.parametrize("strategy", [LeastOutstanding(), RandomChoice(Random(1)), prefix_aware(), kv_aware()])
def test_strategies_leave_out_full_unready_and_tried_instances(strategy: Strategy) -> None:
    """Full, unready and tried instances are left out; the result is None if no other is left."""
    blocked = [
        FakeCandidate("full", outstanding=4),
        FakeCandidate("down", is_ready=False),
        FakeCandidate("tried"),
    ]
    request = StrategyRequest(excluded=frozenset({"tried"}), prefix=b"prompt")

    assert strategy.choose(request, pool_of()) is None
    assert strategy.choose(request, pool_of(*blocked)) is None
    for load in range(4):
        free = FakeCandidate("free", outstanding=load)
        pick = strategy.choose(request, pool_of(*blocked, free))
        assert pick.instance is free


def test_least_outstanding_takes_the_least_loaded() -> None:
    """The instance with the fewest outstanding invocations is chosen."""
    instances = [FakeCandidate("a", 2), FakeCandidate("b", 1), FakeCandidate("c", 3)]

    pick = LeastOutstanding().choose(FIRST_ATTEMPT, pool_of(*instances))

    assert pick == (instances[1], "least-outstanding-requests")


@pytest.mark.parametrize("strategy", [LeastOutstanding(), RandomChoice(Random(1)), prefix_aware(64), kv_aware()])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_strategies_give_an_instance_that_comes_back_its_share(strategy: Strategy, share: float) -> None:
    """A returning instance gets its share of what the others get, for every strategy; alone it gets all."""
    others = [FakeCandidate(f"i{index}", capacity=64) for index in range(3)]
    instances = [FakeCandidate("back", share=share, capacity=64), *others]
    pool, taken = pool_of(*instances), Counter[str]()

    running: list[FakeCandidate] = []
    for number in range(2000):
        pick = strategy.choose(StrategyRequest(prefix=b"prompt %d" % number), pool)
        change(pool, pick.instance, outstanding=pick.instance.outstanding + 1)
        taken[pick.instance.name] += 1
        running.append(pick.instance)
        if len(running) > 20:
            ended = running.pop(0)
            change(pool, ended, outstanding=ended.outstanding - 1)

    usual = sum(taken[other.name] for other in others) / 3
    assert 0 < taken["back"] < usual * share * 1.6
    pick = strategy.choose(StrategyRequest(prefix=b"prompt"), pool_of(FakeCandidate("back", share=share)))
    assert pick.instance.name == "back"


# PREFIX_AWARE


def test_prefix_returns_to_its_instance_once_and_for_all_as_the_share_grows() -> None:
    """A prefix returns to its instance once as the share grows, and stays; in the end all have returned."""
    instances = named(3)
    pool, strategy = pool_of(*instances), prefix_aware(threshold=9)
    requests = [StrategyRequest(prefix=b"prompt %d" % number) for number in range(300)]

    def owned() -> set[int]:
        picks = [strategy.choose(request, pool) for request in requests]
        return {number for number, pick in enumerate(picks) if pick is not None and pick.instance is instances[0]}

    usual, before = owned(), set[int]()
    for share in (0.1, 0.4, 0.7, 1.0):
        change(pool, instances[0], share=share)
        now = owned()
        assert before <= now <= usual
        assert abs(len(now) / len(usual) - share) < 0.2
        before = now
    assert before == usual


def test_same_prefix_goes_to_the_same_instance_whatever_follows_it() -> None:
    """Only the first PrefixLength bytes of a body count, and all proxies choose the same instance."""
    here, elsewhere = pool_of(*named(5)), pool_of(*reversed(named(5)))
    strategy = prefix_aware()
    owners = set()

    for number in range(50):
        prefix = (b"%d " % number) * 600
        first = strategy.choose(StrategyRequest(prefix=prefix[:1024] + b"one question"), here)
        second = prefix_aware().choose(StrategyRequest(prefix=prefix[:1024] + b"another"), elsewhere)
        assert (first.instance.name, first.reason) == (second.instance.name, "prefix-aware")
        owners.add(first.instance.name)

    assert len(owners) == 5


def test_prefix_id_separates_applications_that_share_a_prefix() -> None:
    """A prefix with another id is another prefix, and id and prefix are not simply joined."""
    pool, strategy = pool_of(*named(20)), prefix_aware()

    def owner(prefix_id: bytes, prefix: bytes) -> str:
        pick = strategy.choose(StrategyRequest(prefix=prefix, prefix_id=prefix_id), pool)
        return pick.instance.name

    assert len({owner(b"app%d" % number, b"You are helpful.") for number in range(20)}) > 8
    assert len({(owner(b"x" * n, b"x" * (20 - n))) for n in range(20)}) > 5
    assert owner(b"app1", b"prompt") == owner(b"app1", b"prompt")


def test_prefix_moves_on_when_its_instance_is_at_the_threshold_and_comes_back() -> None:
    """At the threshold, a prefix goes to the next instance in its order as long as the load lasts."""
    instances = named(4)
    pool, strategy = pool_of(*instances), prefix_aware(threshold=2)
    request = StrategyRequest(prefix=b"prompt")
    chosen = []

    for _ in range(8):
        pick = strategy.choose(request, pool)
        assert pick is not None
        chosen.append(pick)
        change(pool, pick.instance, outstanding=pick.instance.outstanding + 1)

    assert [pick.reason for pick in chosen] == ["prefix-aware"] * 2 + ["prefix-aware-overflow"] * 6
    assert Counter(pick.instance.name for pick in chosen) == {f"i{index}": 2 for index in range(4)}
    assert all(a.instance is b.instance for a, b in list(pairwise(chosen))[::2])

    change(pool, chosen[0].instance, outstanding=1)

    assert strategy.choose(request, pool) == (chosen[0].instance, "prefix-aware")


def test_prefix_goes_to_the_least_loaded_when_all_are_at_the_threshold() -> None:
    """If all instances are at the threshold, the least loaded one is chosen, as SageMaker documents."""
    instances = [FakeCandidate("a", 3), FakeCandidate("b", 2), FakeCandidate("c", 3)]

    pick = prefix_aware(threshold=2).choose(StrategyRequest(prefix=b"prompt"), pool_of(*instances))

    assert pick == (instances[1], "prefix-aware-overflow")


def test_prefix_search_ends_when_many_are_at_the_threshold() -> None:
    """The one instance of hundreds below the threshold is found by its load, without a walk past the others."""
    instances = named(300)
    for instance in instances[1:]:
        instance.outstanding = 2
    strategy = prefix_aware(threshold=2)
    pool = pool_of(*instances)

    for number in range(20):
        pick = strategy.choose(StrategyRequest(prefix=b"%d" % number), pool)
        assert pick.instance is instances[0]
    assert MAX_WALKED < 300


# KV_AWARE


def sent(strategy: KvAware, pool: Pool[FakeCandidate], body: bytes) -> tuple[str, str]:
    """Choose for a body and record it, as the dispatcher does; return the instance and the reason."""
    request = StrategyRequest(prefix=body)
    pick = strategy.choose(request, pool)
    strategy.note_sent(request, pick.instance.name, body_bytes=len(body))
    strategy.index.check_integrity()
    return pick.instance.name, pick.reason


def test_longer_conversation_goes_where_its_beginning_went() -> None:
    """A turn that resends its conversation goes to the instance that served the last turn."""
    instances = named(3)
    pool, strategy = pool_of(*instances), kv_aware()
    assert sent(strategy, pool, b"aaaabbbbcccc") == ("i0", "least-outstanding-requests")
    change(pool, instances[0], outstanding=1)

    assert sent(strategy, pool, b"xxxxbbbb") == ("i1", "least-outstanding-requests")
    assert sent(strategy, pool, b"aaaabbbbccccdddd") == ("i0", "kv-aware")


def test_longest_match_wins_among_equally_loaded() -> None:
    """Of equally loaded instances that hold the start, the one with the longest match is chosen."""
    instances = named(2)
    pool, strategy = pool_of(*instances), kv_aware()
    strategy.index.record("i0", chain(b"aaaabbbb", 4))
    strategy.index.record("i1", chain(b"aaaabbbbcccc", 4))

    assert strategy.choose(StrategyRequest(prefix=b"aaaabbbbccccdddd"), pool) == (instances[1], "kv-aware")


def test_match_is_weighed_against_load() -> None:
    """A match of two blocks equals one request of load; beyond that, the idle instance is chosen."""
    busy, idle = FakeCandidate("busy", outstanding=1), FakeCandidate("idle")
    pool, strategy = pool_of(busy, idle), kv_aware()
    strategy.index.record("busy", chain(b"aaaabbbbcccc", 4))
    request = StrategyRequest(prefix=b"aaaabbbbcccc")
    assert strategy.choose(request, pool) == (busy, "kv-aware")

    change(pool, busy, outstanding=2)

    assert strategy.choose(request, pool) == (idle, "least-outstanding-requests")


def test_holder_that_cannot_take_the_request_is_passed_over() -> None:
    """A holder that is full, unready, tried or gone is skipped, and least outstanding decides."""
    free = FakeCandidate("free", outstanding=1)
    pool = pool_of(FakeCandidate("full", 4), FakeCandidate("down", is_ready=False), FakeCandidate("tried"), free)
    strategy = kv_aware()
    for name in ("full", "down", "tried", "gone"):
        strategy.index.record(name, chain(b"aaaabbbb", 4))

    pick = strategy.choose(StrategyRequest(prefix=b"aaaabbbb", excluded=frozenset({"tried"})), pool)

    assert pick == (free, "least-outstanding-requests")


def test_prompt_shorter_than_a_block_matches_nothing() -> None:
    """A prompt shorter than a block matches nothing, and bytes after the last whole block do not count."""
    assert chain(b"abc", 4) == []
    assert chain(b"abcdef", 4) == chain(b"abcdxy", 4) != chain(b"abce", 4)


def test_index_is_bounded_and_keeps_the_beginnings() -> None:
    """The index drops the last blocks of a long chain first, and an instance's share is limited."""
    index = PrefixIndex(max_blocks_per_instance=4)
    long, other = chain(bytes(range(24)), 4), chain(b"zzzz", 4)

    index.record("a", long)
    assert index.matches(long) == {"a": 4}
    index.record("a", other)

    assert index.matches(long) == {"a": 3}
    assert index.matches(other) == {"a": 1}
    index.check_integrity()


def test_prompt_that_an_instance_no_longer_held_takes_all_older_ones_along() -> None:
    """If an answer shows that a prompt was evicted, prompts used before it are removed, too."""
    index = PrefixIndex(max_blocks_per_instance=100)
    old, asked, recent = chain(b"old!", 4), chain(b"ask!", 4), chain(b"new!", 4)
    assert index.record("a", old) is None
    assert index.record("a", asked) is None
    assert index.record("a", recent) is None

    held = index.record("a", asked)
    assert held.num_blocks == 1
    index.forget_unused_since("a", held.used_at)

    assert index.matches(old) == {}
    assert index.matches(recent) == {"a": 1}
    assert index.matches(asked) == {"a": 1}  # the answer has just computed it again
    index.forget_unused_since("nobody", 99)
    index.check_integrity()


@pytest.mark.parametrize(("num_kept", "is_remembered"), [(0, False), (20, False), (60, True)])
def test_receipt_is_judged_by_what_was_expected(num_kept: int, is_remembered: bool) -> None:
    """If half of the body is expected, a fifth of the tokens may be only the template.

    Half of them are the expected match.
    """
    strategy = kv_aware()
    older, asked = StrategyRequest(prefix=b"old!"), StrategyRequest(prefix=b"aaaabbbb")
    assert strategy.note_sent(older, "a", body_bytes=4) is None
    assert strategy.note_sent(asked, "a", body_bytes=8) is None

    expected = strategy.note_sent(StrategyRequest(prefix=b"aaaabbbbccccdddd"), "a", body_bytes=16)
    assert expected.share == 0.5
    strategy.check("a", expected, num_kept=num_kept, num_tokens=100)

    assert bool(strategy.index.matches(chain(b"old!", 4))) is is_remembered
    assert strategy.index.matches(chain(b"aaaabbbb", 4)) == {"a": 2}


def test_instance_that_lost_its_memory_is_forgotten() -> None:
    """An instance that lost its memory is removed from the index, and no other is."""
    index = PrefixIndex(max_blocks_per_instance=100)
    hashes = chain(b"aaaabbbb", 4)
    index.record("a", hashes)
    index.record("b", hashes[:1])

    index.forget("a")
    index.forget("a")

    assert index.matches(hashes) == {"b": 1}
    index.check_integrity()


def test_matches_of_a_popular_prompt_are_few_and_the_longest() -> None:
    """A system prompt held by a thousand instances costs as much as one held by sixteen."""
    index = PrefixIndex(max_blocks_per_instance=100)
    hashes = chain(b"aaaabbbb", 4)
    for number in range(1000):
        index.record(f"i{number}", hashes[:1])
    index.record("best", hashes)

    found = index.matches(hashes)

    assert len(found) == 17
    assert next(iter(found.items())) == ("best", 2)


def test_index_check_notices_too_many_blocks() -> None:
    """The index check compares the number of blocks with the bound."""
    index = PrefixIndex(max_blocks_per_instance=2)
    index.record("a", chain(b"aaaabbbb", 4))
    index.max_blocks = 1

    with pytest.raises(RuntimeError):
        index.check_integrity()


# Variants


@pytest.mark.parametrize("unit", [1.0, sys.float_info.max / 3.5, sys.float_info.min])
def test_weights_are_shares_of_the_traffic(unit: float) -> None:
    """Traffic is divided by weights, and a weight of 0 gets none. The sum of two weights may be infinite."""
    rng = Random(3)

    counts = Counter(choose_weighted(rng, "abc", [3 * unit, 0, unit]) for _ in range(4000))

    assert set(counts) == {"a", "c"}
    assert 2850 < counts["a"] < 3150
    assert choose_weighted(rng, "ab", [0, 0]) is None
    assert choose_weighted(rng, "", []) is None


def test_rounding_of_weights_still_chooses_something() -> None:
    """A random point at the very end of the range chooses the heaviest variant, despite rounding."""

    class AlmostOne(Random):
        def random(self) -> float:
            return 1.0

    assert choose_weighted(AlmostOne(), "ab", [0.1, 0.2]) == "b"


# Sessions


def test_new_session_goes_to_the_most_room_then_the_fewest_outstanding() -> None:
    """Rooms within an eighth of the most are equal, so that load decides between them."""
    tight = FakeCandidate("tight", 0, session_room=10)
    roomy_but_busy = FakeCandidate("busy", 2, session_room=100)
    roomy = FakeCandidate("roomy", 1, session_room=90)
    pool = pool_of(tight, roomy_but_busy, roomy)

    assert find_roomiest(pool, NOBODY, RNG) is roomy
    assert find_roomiest(pool, frozenset({"roomy"}), RNG) is roomy_but_busy
    change(pool, roomy_but_busy, is_ready=False)
    change(pool, roomy, outstanding=4)
    assert find_roomiest(pool, NOBODY, RNG) is tight


@pytest.mark.parametrize(("room", "is_equal"), [(88, True), (87, False)])
def test_room_below_seven_eighths_of_the_most_is_less(room: int, is_equal: bool) -> None:
    """A room of at least seven eighths of the largest counts as equal, and a smaller one as less."""
    busy, idle = FakeCandidate("busy", 2, session_room=100), FakeCandidate("idle", 0, session_room=room)

    assert find_roomiest(pool_of(busy, idle), NOBODY, RNG) is (idle if is_equal else busy)


def test_unknown_room_counts_as_the_most_and_nothing_known_is_no_choice() -> None:
    """An unknown room counts as the largest, so that new instances are used; if all are unknown, the result is None."""
    known, unknown = FakeCandidate("known", 1, session_room=50), FakeCandidate("unknown", 0)
    assert find_roomiest(pool_of(known, unknown), NOBODY, RNG) is unknown
    known.outstanding = 0
    assert find_roomiest(pool_of(known, unknown), NOBODY, RNG) is unknown
    assert find_roomiest(pool_of(unknown), NOBODY, RNG) is None
    assert find_roomiest(pool_of(), NOBODY, RNG) is None


def test_of_many_instances_two_are_compared_for_a_new_session() -> None:
    """Two random instances are compared, so that proxies with old data do not all choose one.

    A full one is not chosen.
    """
    many = pool_of(*(FakeCandidate(f"i{number}", session_room=50 + number % 50) for number in range(100)))
    rng = Random(1)

    chosen = Counter(found.name for _ in range(2000) if (found := find_roomiest(many, NOBODY, rng)))

    assert len(chosen) > 60
    assert max(chosen.values()) < 100
    full = [FakeCandidate(f"i{number}", session_room=0) for number in range(99)]
    free = FakeCandidate("free", session_room=1)
    one_free = pool_of(*full, free)
    assert all(find_roomiest(one_free, NOBODY, rng) is free for _ in range(20))
    assert find_roomiest(pool_of(*full), frozenset({each.name for each in full}), rng) is None


def test_rendezvous_moves_only_the_sessions_of_the_instance_that_left() -> None:
    """Only sessions of a leaving instance move, and the order of instances in a proxy does not matter."""
    instances = [FakeCandidate(name) for name in "abcd"]
    sessions = [f"session-{number}" for number in range(400)]
    before = {session: rendezvous(session, instances) for session in sessions}
    assert None not in before.values()

    instances[1].is_ready = False
    after = {session: rendezvous(session, instances[::-1]) for session in sessions}

    moved = {session for session in sessions if before[session] is not after[session]}
    assert moved == {session for session in sessions if before[session] is instances[1]}
    assert all(60 < count < 140 for count in Counter(chosen.name for chosen in before.values() if chosen).values())


def test_rendezvous_without_a_ready_instance_is_none() -> None:
    assert rendezvous("session", [FakeCandidate("a", is_ready=False)]) is None


def test_all_proxies_compute_the_same_instance_and_place() -> None:
    """The results are fixed, because proxies of several versions share a fleet."""
    instances = [FakeCandidate(name) for name in "abcd"]
    sessions = [f"session-{number}" for number in range(8)]

    chosen = [rendezvous(session, instances) for session in sessions]
    places = [place_of(session) for session in sessions]

    assert "".join(each.name for each in chosen if each) == "abdbbdab"
    assert [round(place, 4) for place in places] == [0.3644, 0.2468, 0.1771, 0.9274, 0.5781, 0.0676, 0.222, 0.5321]


def test_places_are_spread_evenly() -> None:
    """Places are spread evenly, so that a returning instance gets its share of sessions."""
    places = [place_of(f"session-{number}") for number in range(1000)]

    assert all(0 <= place < 1 for place in places)
    assert all(200 < sum(low <= place < low + 0.25 for place in places) < 300 for low in (0, 0.25, 0.5, 0.75))


def test_room_of_an_instance_that_comes_back_counts_with_its_share() -> None:
    """The room of a returning instance counts with its share, because returning sessions may still take some of it."""
    back, steady = FakeCandidate("back", session_room=10, share=0.5), FakeCandidate("steady", session_room=8)

    assert find_roomiest(pool_of(back, steady), NOBODY, RNG) is steady


def test_rooms_of_up_to_sixteen_instances_are_all_compared() -> None:
    """The rooms of up to sixteen instances are all compared; of more, two are drawn."""
    full = [FakeCandidate(f"i{number}", session_room=1) for number in range(15)]
    free = FakeCandidate("free", session_room=100)

    assert all(find_roomiest(pool_of(*full, free), NOBODY, Random(seed)) is free for seed in range(20))


@pytest.mark.parametrize(("num_kept", "is_forgotten"), [(50, False), (49, True)])
def test_much_less_than_expected_means_that_a_prompt_was_evicted(num_kept: int, is_forgotten: bool) -> None:
    """Half of the expected tokens is enough, since bytes are not tokens.

    Less means an eviction of this prompt and older ones.
    """
    strategy = kv_aware()
    older, prompt = (StrategyRequest(excluded=NOBODY, prefix=text * 16) for text in (b"o", b"x"))
    assert strategy.note_sent(older, "a", body_bytes=16) is None
    assert strategy.note_sent(prompt, "a", body_bytes=16) is None
    expected = strategy.note_sent(prompt, "a", body_bytes=64)
    assert expected.share == 0.25

    strategy.check("a", expected, num_kept=num_kept, num_tokens=400)

    for request, is_kept in ((older, not is_forgotten), (prompt, True)):
        pick = strategy.choose(request, pool_of(FakeCandidate("a", outstanding=1), FakeCandidate("b")))
        assert pick.instance.name == ("a" if is_kept else "b")


def test_a_match_that_saves_as_much_as_its_load_costs_is_not_taken() -> None:
    """Eight cached bytes equal one outstanding request; at a tie the least loaded instance is chosen."""
    strategy, request = kv_aware(), StrategyRequest(excluded=NOBODY, prefix=b"x" * 8)
    strategy.note_sent(request, "a", body_bytes=8)
    free = FakeCandidate("b")

    def chosen(outstanding: int) -> str:
        pick = strategy.choose(request, pool_of(FakeCandidate("a", outstanding=outstanding), free))
        return pick.instance.name

    assert [chosen(outstanding) for outstanding in (0, 1, 2)] == ["a", "b", "b"]


def test_exactly_two_of_seventeen_instances_are_compared_for_a_new_session() -> None:
    """The instance with most room is drawn 118 times in 1,000; with three compared instances it would be 176."""
    many = pool_of(*(FakeCandidate(f"i{number}", session_room=10**number) for number in range(17)))

    chosen = Counter(found.name for seed in range(1000) if (found := find_roomiest(many, NOBODY, Random(seed))))

    assert 90 < chosen["i16"] < 147


@pytest.mark.parametrize("strategy", [LeastOutstanding(), RandomChoice(Random(1))])
def test_strategies_that_read_no_body_wait_for_none(strategy: Strategy) -> None:
    assert strategy.num_prefix_bytes == 0


class LastByName(Strategy):
    """A strategy of one file: it takes the last instance by name, for new sessions too."""

    name = "LAST_BY_NAME"

    def choose(self, request: StrategyRequest, pool: Pool[C]) -> Pick[C] | None:
        last = max(pool.open_instances, key=lambda instance: instance.name, default=None)
        return None if last is None else Pick(last, "last-by-name")

    def place_session(self, request: StrategyRequest, pool: Pool[C], rng: Random) -> Pick[C] | None:
        return self.choose(request, pool)


def test_a_strategy_places_new_sessions() -> None:
    """A strategy's own rule places new sessions.

    Otherwise the most room decides, and the strategy if rooms are unknown.
    """
    roomy, last = FakeCandidate("a", session_room=100), FakeCandidate("z", session_room=1)
    pool = pool_of(roomy, last)

    placed = [each.place_session(FIRST_ATTEMPT, pool, RNG) for each in (LeastOutstanding(), LastByName())]

    assert [None if pick is None else pick.instance.name for pick in placed] == ["a", "z"]
    assert LeastOutstanding().place_session(FIRST_ATTEMPT, pool_of(FakeCandidate("b")), RNG) is None
