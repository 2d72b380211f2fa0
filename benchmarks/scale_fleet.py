"""Simulates the large fleet of scale.py: the product's registry and chooser, with simulated instances and clock.

As on several hosts, each proxy has its own registry and chooser and shares no state with the others. The simulation
sends nothing and waits for nothing.
"""

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from benchmarks.report import percentile
from benchmarks.routing_simulation import Run, service_time
from handlers.chat.sessions.session_id_minter import SessionIdMinter
from handlers.requests.incoming import Caller
from torchmoor.config.recovery import RecoverySettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.metrics.invocations import InvocationMetrics
from torchmoor.proxy.dispatch.chooser import Chooser
from torchmoor.proxy.http import message
from torchmoor.proxy.http.head import Layout
from torchmoor.proxy.instances.instance import Instance, InstanceState, Lease
from torchmoor.proxy.instances.recovery import share_after
from torchmoor.proxy.instances.registry import Registry
from torchmoor.proxy.routing.reported_status import ReportedStatus
from torchmoor.proxy.routing.strategy import FIRST_ATTEMPT
from torchmoor.wire.session_ids import SessionId, verify

ENDPOINT = "llava"
KEYS = {"k0": bytes(range(32))}
EXPIRES_AT = 2_000_000_000
SLOW_START_S = 10.0
SLOW_START = RecoverySettings(slow_start_s=SLOW_START_S, least_share=0.1)


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of the fleet, and its load.

    room: sessions per instance. slots: concurrent turns per instance; further ones wait there. think_s: mean time
    between an answer and the session's next question. turn_s: mean time of a turn; rebuild_s: additional time if the
    instance rebuilds the session. num_lost instances are gone from lost_at_s to back_at_s.
    """

    num_instances: int
    num_sessions: int
    num_proxies: int = 8
    room: int = 1500
    slots: int = 48
    openings_s: float = 300.0
    status_interval_s: float = 50.0  # of 1,000 instances at 20 per second (HealthSettings.max_status_per_s)
    duration_s: float = 60.0
    think_s: float = 60.0
    turn_s: float = 1.0
    rebuild_s: float = 0.5
    num_lost: int = 50
    lost_at_s: float = 20.0
    back_at_s: float = 40.0


HEAD = message.Request(message.RequestLine(b"POST", b"/", b"", is_http10=False), [], Layout(()))


@dataclass(eq=False, slots=True)
class Request:
    """A request as the chooser sees it (torchmoor.proxy.dispatch.chooser)."""

    session: SessionId | None = None
    opens_session: bool = False
    target_model: str | None = None
    num_body_bytes = 0
    strategy_request = FIRST_ATTEMPT
    head = HEAD


@dataclass(eq=False, slots=True)
class Server:
    """A simulated instance, which all proxies share: its sessions, and its running and waiting turns."""

    name: str
    num_sessions: int = 0
    num_running: int = 0
    life: int = 0  # grows with each loss, which deletes the instance's sessions
    waiting: list["Turn"] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Turn:
    """One question. delay_s: the time that its instance works on it; until its end it may also wait."""

    session: int
    asked_at: float
    delay_s: float
    server: Server
    life: int
    lease: Lease


class Proxy:
    """One front proxy's view of the fleet."""

    def __init__(self, plan: Plan, seed: int) -> None:
        settings = EndpointSettings(name=ENDPOINT, variants=(VariantSettings(model=ENDPOINT),))
        self.registry = Registry([settings])
        variant = self.registry.endpoints()[0].variants[0]
        metrics = InvocationMetrics(ENDPOINT, variant.name)
        self.chooser = Chooser(variant, metrics, Random(seed), binds_late=False, are_journaled=True)
        self.instances: dict[str, Instance] = {}
        names = [f"llava-{number}" for number in range(plan.num_instances)]
        Random(seed).shuffle(names)  # each proxy knows them in another order
        for name in names:
            instance = Instance(
                name=name, endpoint=ENDPOINT, model=ENDPOINT, port=1, capacity=1000, state=InstanceState.READY
            )
            instance.take_status(ReportedStatus(session_room=plan.room))
            self.instances[name] = instance
            self.registry.add(instance)

    def choose(self, text: str) -> Instance | None:
        """Verify a session id and return the instance for the session's turn."""
        session = verify(text, KEYS, endpoint=ENDPOINT)
        assert session is not None
        choice = self.chooser.choose(Request(session=session))
        return None if choice is None else choice.instance

    def open(self) -> Instance | None:
        """Return the instance for a new session."""
        request = Request(opens_session=True)
        choice = self.chooser.choose(request)
        if choice is None:
            return None
        self.chooser.on_sent(request, choice.instance)
        return choice.instance


@dataclass(slots=True)
class Phase:
    """The turns that began in one part of the time."""

    delays_s: list[float] = field(default_factory=list)
    num_rebuilt: int = 0
    num_unserved: int = 0

    def percentile(self, share: float) -> float:
        return percentile(self.delays_s, share)


@dataclass(slots=True)
class Outcome:
    """The results of a simulation.

    sessions: number per instance after all openings. moved: by instance, turns of sessions whose own instance was lost;
    num_strays: turns of sessions whose own instance works, at another one.
    """

    sessions: Counter[str]
    phases: dict[str, Phase]
    moved: Counter[str]
    num_strays: int
    num_disagreements: int


class Fleet:
    """Proxies, instances and sessions."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan = plan
        self.rng = Random(seed)
        self.proxies = [Proxy(plan, seed + number) for number in range(plan.num_proxies)]
        self.servers = {f"llava-{number}": Server(f"llava-{number}") for number in range(plan.num_instances)}
        self._minters = {name: SessionIdMinter(KEYS, name, random_bytes=self.rng.randbytes) for name in self.servers}
        self.ids: list[str] = []
        self.homes: list[str] = []  # the instance that each id names

    def open_sessions(self) -> None:
        """Open all sessions, evenly over `openings_s`, while the instances report their free room in turn."""
        plan = self.plan
        names = list(self.servers)
        num_reports = 0
        for number in range(plan.num_sessions):
            now = plan.openings_s * number / plan.num_sessions
            due = int(now / plan.status_interval_s * len(names))
            while num_reports < due:
                server = self.servers[names[num_reports % len(names)]]
                for proxy in self.proxies:
                    proxy.instances[server.name].take_status(
                        ReportedStatus(session_room=plan.room - server.num_sessions)
                    )
                num_reports += 1
            instance = self.proxies[number % plan.num_proxies].open()
            if instance is None:
                raise SystemExit("the fleet has too little capacity for the sessions")
            self.servers[instance.name].num_sessions += 1
            self.homes.append(instance.name)
            self.ids.append(self._minters[instance.name].mint(EXPIRES_AT, Caller(ENDPOINT, "")).text)

    def ask_closed_loop(self, *, num_proxies: int, num_users: int, slots: int, num_requests: int) -> Run:
        """Simulate users who send the next request without a session as soon as the last one is answered.

        Each user always uses the same one of the first `num_proxies`. The first tenth of the requests warms up.
        """
        ends: list[tuple[float, int, int, float, Server, Lease]] = []
        waiting: dict[str, deque[tuple[float, int, float, Lease]]] = {name: deque() for name in self.servers}
        running: Counter[str] = Counter()
        latencies: list[float] = []
        rng, now, number = Random(1), 0.0, 0

        def start(server: Server, asked_at: float, user: int, service_s: float, lease: Lease) -> None:
            nonlocal number
            number += 1
            heapq.heappush(ends, (now + service_s, number, user, asked_at, server, lease))

        def ask(user: int) -> None:
            choice = self.proxies[user % num_proxies].chooser.choose(Request())
            assert choice is not None
            server, service_s = self.servers[choice.instance.name], service_time(rng, 1.0)
            lease = choice.instance.lease()
            if running[server.name] < slots:
                running[server.name] += 1
                start(server, now, user, service_s, lease)
            else:
                waiting[server.name].append((now, user, service_s, lease))

        for user in range(num_users):
            ask(user)
        while len(latencies) < num_requests:
            now, _, user, asked_at, server, lease = heapq.heappop(ends)
            latencies.append(now - asked_at)
            lease.release()
            if waiting[server.name]:
                start(server, *waiting[server.name].popleft())
            else:
                running[server.name] -= 1
            ask(user)
        for *_, lease in ends:
            lease.release()
        for line in waiting.values():
            for *_, lease in line:
                lease.release()
        return Run(latencies[num_requests // 10 :], num_requests / now)

    def report_rooms(self) -> None:
        """Report the free room of each instance to each proxy."""
        for proxy in self.proxies:
            for name, instance in proxy.instances.items():
                instance.take_status(ReportedStatus(session_room=self.plan.room - self.servers[name].num_sessions))

    def set_state(self, names: Sequence[str], state: InstanceState) -> None:
        """Set the state of instances in every proxy, as its probes would."""
        for proxy in self.proxies:
            for name in names:
                proxy.registry.set_state(name, state)

    def set_share(self, names: Sequence[str], share: float) -> None:
        """Set the share of the usual load that instances get, in every proxy."""
        for proxy in self.proxies:
            for name in names:
                proxy.instances[name].share = share
                proxy.registry.refresh(proxy.instances[name])

    def run(self) -> Outcome:
        """Simulate a minute of questions, during which instances are lost and come back."""
        return _Run(self).run()


class _Run:
    """The event loop of `Fleet.run`."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.plan = fleet.plan
        self.rng = fleet.rng
        self.homes = homes = fleet.homes
        self.outcome = Outcome(Counter(homes), {name: Phase() for name in ("before", "lost", "back")}, Counter(), 0, 0)
        self.holders: list[tuple[str, int]] = [(home, 0) for home in homes]
        self.lost = set(self.rng.sample(list(fleet.servers), self.plan.num_lost))
        rate = 1 / self.plan.think_s
        self.events: list[tuple[float, int, Turn | int]] = [
            (self.rng.expovariate(rate), session, session) for session in range(len(homes))
        ]
        self.number = len(homes)
        self.marks = self._marks()

    def _marks(self) -> list[tuple[float, str, float]]:
        """Return the changes of the lost instances: moment, kind and elapsed time since they are back; latest first."""
        plan = self.plan
        marks = [(plan.lost_at_s, "lost", 0.0), (plan.back_at_s, "back", 0.0)]
        marks += [(plan.back_at_s + step, "share", float(step)) for step in range(1, int(SLOW_START_S) + 1)]
        return marks[::-1]

    def run(self) -> Outcome:
        heapq.heapify(self.events)
        now = 0.0
        while self.events:
            now, _, what = heapq.heappop(self.events)
            if now > self.plan.duration_s:
                break
            while self.marks and self.marks[-1][0] <= now:
                self._change(*self.marks.pop())
            if isinstance(what, Turn):
                self._end(now, what)
            else:
                self._ask(now, what, now)
        return self.outcome

    def _push(self, when: float, what: "Turn | int") -> None:
        self.number += 1
        heapq.heappush(self.events, (when, self.number, what))

    def _change(self, now: float, kind: str, elapsed_s: float) -> None:
        names = sorted(self.lost)
        if kind == "lost":
            self.fleet.set_state(names, InstanceState.DOWN)
            for name in names:
                server = self.fleet.servers[name]
                server.life += 1
                server.num_running = 0
                waiting, server.waiting = server.waiting, []
                for turn in waiting:
                    self._retry(now, turn)
            return
        if kind == "back":
            self.fleet.set_share(names, share_after(0.0, SLOW_START))
            self.fleet.set_state(names, InstanceState.READY)
            return
        self.fleet.set_share(names, share_after(elapsed_s, SLOW_START))

    def _phase(self, asked_at: float) -> Phase:
        plan = self.plan
        name = "before" if asked_at < plan.lost_at_s else "lost" if asked_at < plan.back_at_s else "back"
        return self.outcome.phases[name]

    def _ask(self, now: float, session: int, asked_at: float) -> None:
        phase = self._phase(asked_at)
        text = self.fleet.ids[session]
        proxy = self.fleet.proxies[self.rng.randrange(self.plan.num_proxies)]
        instance = proxy.choose(text)
        if instance is None:
            phase.num_unserved += 1
            return
        server = self.fleet.servers[instance.name]
        home = self.homes[session]
        if instance.name != home:
            if home in self.lost:
                self.outcome.moved[instance.name] += 1
            else:
                self.outcome.num_strays += 1
            other = self.fleet.proxies[self.rng.randrange(self.plan.num_proxies)].choose(text)
            self.outcome.num_disagreements += other is None or other.name != instance.name
        delay_s = service_time(self.rng, self.plan.turn_s)
        if self.holders[session] != (server.name, server.life):
            self.holders[session] = (server.name, server.life)
            phase.num_rebuilt += 1
            delay_s += self.plan.rebuild_s
        turn = Turn(session, asked_at, delay_s, server, server.life, instance.lease())
        if server.num_running < self.plan.slots:
            server.num_running += 1
            self._push(now + delay_s, turn)
        else:
            server.waiting.append(turn)

    def _retry(self, now: float, turn: Turn) -> None:
        """Send the turn of a lost instance to another one."""
        turn.lease.release()
        self._ask(now, turn.session, turn.asked_at)

    def _end(self, now: float, turn: Turn) -> None:
        server = turn.server
        if turn.life != server.life:
            self._retry(now, turn)
            return
        turn.lease.release()
        self._phase(turn.asked_at).delays_s.append(now - turn.asked_at)
        if server.waiting:
            following = server.waiting.pop(0)
            self._push(now + following.delay_s, following)
        else:
            server.num_running -= 1
        self._push(now + self.rng.expovariate(1 / self.plan.think_s), turn.session)
