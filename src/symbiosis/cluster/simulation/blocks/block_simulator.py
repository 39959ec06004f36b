"""The event loop of block instances: arrivals, devices, links and the policies over virtual time."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from symbiosis.cluster.policies.blocks.block_policy import BlockPolicyConfig, provision_cluster
from symbiosis.cluster.policies.blocks.block_queue import ChainRequest
from symbiosis.cluster.policies.blocks.block_scaling import ScaleOut, choose_scale_outs, requests_to_move
from symbiosis.cluster.policies.blocks.block_state import BlockDevice, BlockInstance
from symbiosis.cluster.policies.blocks.catalog import BlockCatalog
from symbiosis.cluster.policies.blocks.dispatch import BlockDispatcher, Hop, KvRule
from symbiosis.cluster.policies.blocks.topology import BlockTopology
from symbiosis.cluster.simulation.trace import Trace

_TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """How one request was served: the chain is reported for every request."""

    number: int
    application: str
    chain: tuple[str, ...]
    loss: float
    """Of this chain, above the application's own."""
    latency_s: float
    first_token_s: float
    output: int


@dataclass(slots=True)
class BlockTimeline:
    """The cluster at regular times."""

    seconds: list[float] = field(default_factory=list)
    queues_s: list[list[float]] = field(default_factory=list)
    """T_queue of each device."""
    unfinished: list[int] = field(default_factory=list)


@dataclass(slots=True)
class BlockRun:
    """Everything a report needs."""

    served: list[ServedRequest] = field(default_factory=list)
    rejected: int = 0
    end_s: float = 0.0
    busy_s: float = 0.0
    batches: int = 0
    rows: int = 0
    """Requests in these batches."""
    row_bytes: int = 0
    """Of rows between servers."""
    kv_bytes: int = 0
    """Of keys and values between servers."""
    hops: int = 0
    """Of requests between servers."""
    transfer_s: float = 0.0
    """That requests were on the way, all together."""
    moves: int = 0
    """Of keys and values."""
    preemptions: int = 0
    scale_outs: int = 0
    loads: int = 0
    weight_bytes: int = 0
    """Loaded at the start."""
    timeline: BlockTimeline = field(default_factory=BlockTimeline)


class BlockSimulator:
    """Runs one trace; the adapter of each of its requests names the application."""

    def __init__(
        self,
        trace: Trace,
        catalog: BlockCatalog,
        topology: BlockTopology,
        config: BlockPolicyConfig,
        *,
        watch: Callable[[BlockSimulator], None] = lambda simulator: None,
    ) -> None:
        """Raises `DoesNotFit` if the blocks do not fit the devices. `watch` is called once a second of virtual time."""
        count = max(1, len(trace))
        prompt, output = sum(trace.prompts) / count, sum(trace.outputs) / count
        self.cluster, self.traffic = provision_cluster(catalog, topology, config, prompt=prompt, output=output)
        self._trace, self._catalog, self._topology, self._config = trace, catalog, topology, config
        self._dispatcher = BlockDispatcher(self.cluster, config.dispatch)
        self._watch = watch
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.now = 0.0
        self._link_free = [0.0] * len(topology.servers)
        self._running: dict[int, BlockInstance | None] = dict.fromkeys(range(topology.num_devices))
        self._parked: list[tuple[int, ChainRequest]] = []
        self.requests: dict[int, ChainRequest] = {}
        """That have arrived and not ended."""
        self._first_token: dict[int, float] = {}
        self.result = BlockRun(weight_bytes=sum(each.weight_bytes for each in self.cluster.devices))

    def run(self) -> BlockRun:
        """Until every request has ended."""
        arrivals, count, number, next_tick = self._trace.arrivals, len(self._trace), 0, 0.0
        while number < count or self.requests:
            arrival = arrivals[number] if number < count else float("inf")
            at = min(arrival, next_tick)
            if self._events and self._events[0][0] <= at:
                self.now, _, action = heapq.heappop(self._events)
                action()
            elif arrival <= next_tick:
                self.now = arrival
                self._arrive(number)
                number += 1
            else:
                self.now = next_tick
                self._tick()
                next_tick += _TICK_S
                assert self._events or number < count or not self.requests, "requests wait, and nothing happens"
        self.result.end_s = self.now
        return self.result

    def _push(self, at: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, action))

    # Requests come and go

    def _arrive(self, number: int) -> None:
        trace = self._trace
        application = self._catalog.applications[trace.adapters[number]]
        prompt, output = trace.prompts[number], trace.outputs[number]
        costs = [self._catalog.blocks[block] for block in application.own.blocks]
        if any(
            each.weight_bytes + self.cluster.kv_bytes(each, prompt + output + 1) > self._topology.memory_bytes for each in costs
        ):
            self.result.rejected += 1
            return
        request = ChainRequest(number, application, prompt, output, self.now, application.allowed)
        self.requests[number] = request
        heapq.heappush(self._parked, (number, request))
        self._admit()

    def _admit(self) -> None:
        """Parked requests by arrival; others pass those whose application has no room."""
        left, full = [], set()
        while self._parked:
            number, request = heapq.heappop(self._parked)
            name = request.application.name
            if name in full or not self._dispatcher.can_admit(request, self.now):
                full.add(name)
                left.append((number, request))
                continue
            self._send([request], None)
        for entry in left:
            heapq.heappush(self._parked, entry)

    def _end(self, request: ChainRequest) -> None:
        chain = request.chains[0]
        self.cluster.release(request)
        del self.requests[request.number]
        self.result.served.append(
            ServedRequest(
                request.number,
                request.application.name,
                chain.blocks,
                chain.loss,
                self.now - request.arrived,
                self._first_token.pop(request.number) - request.arrived,
                request.output,
            )
        )

    def _preempt(self, request: ChainRequest) -> None:
        """It gives up its keys and values, and begins again when there is room."""
        if request.has_owner:
            self.cluster.instance(request, request.position).queue.remove(request)
        self.cluster.release(request)
        request.epoch += 1
        request.position, request.is_prefill, request.recomputed, request.has_lost_kv = 0, True, 0, False
        request.chains = request.application.allowed
        heapq.heappush(self._parked, (request.number, request))
        self.result.preemptions += 1

    # The way from block to block

    def _send(self, requests: Sequence[ChainRequest], source: int | None) -> None:
        """To their next blocks, from a device or from the scheduler (None)."""
        groups: dict[tuple[int, str, bool], list[tuple[ChainRequest, int]]] = {}
        arrives: dict[tuple[int, str, bool], float] = {}
        sizes: Counter[tuple[int, str, bool]] = Counter()
        pairs: Counter[tuple[str, str]] = Counter()
        can_stay = self._dispatcher.can_stay
        for request, epoch in [(each, each.epoch) for each in requests]:
            if request.epoch != epoch:
                continue  # preempted for one before it
            position = request.position
            if source is not None and can_stay(request, source, self.now):
                block = request.blocks[position]
                self.cluster.devices[source].instances[block].queue.add(request, self.now)
                if position:
                    pairs[request.blocks[position - 1], block] += 1
                continue
            if request.has_lost_kv:
                request.position, request.is_prefill, request.has_lost_kv = 0, True, False
            hop = self._next_hop(request, source)
            if hop is None:
                continue
            at = self._settle(request, hop)
            if at is None:
                continue
            far = source is not None and source != hop.device
            if source is not None and request.position:
                pairs[request.blocks[request.position - 1], hop.block] += 1
            key = (hop.device, hop.block, far)
            groups.setdefault(key, []).append((request, epoch))
            arrives[key] = max(arrives.get(key, self.now), at)
            sizes[key] += hop.size if far else 0
        for (before, after), count in pairs.items():
            self.traffic.add(before, after, count)
        for key, group in groups.items():
            device, block, far = key
            at = arrives[key]
            if far and source is not None:
                sent = self._transfer(source, device, sizes[key])
                self.result.transfer_s += (sent - self.now) * len(group)
                if not self._topology.is_local(source, device):
                    self.result.row_bytes += sizes[key]
                    self.result.hops += len(group)
                at = max(at, sent)
            instance = self.cluster.devices[device].instances[block]
            if at <= self.now:
                for request, epoch in group:
                    if request.epoch == epoch:
                        instance.queue.add(request, self.now)
                if device != source:
                    self._start(self.cluster.devices[device])
            else:
                self._push(at, partial(self._receive, instance, group))

    def _next_hop(self, request: ChainRequest, source: int | None) -> Hop | None:
        """None: it was preempted, since no device has room."""
        while (hop := self._dispatcher.next_hop(request, source, self.now)) is None:
            victims = [self._dispatcher.victim(each, request) for each in self._wanted_devices(request)]
            youngest = max((each for each in victims if each is not None), key=lambda each: each.number, default=request)
            self._preempt(youngest)
            if youngest is request:
                return None
        return hop

    def _wanted_devices(self, request: ChainRequest) -> list[int]:
        if request.has_owner:
            return [request.devices[request.position]]
        block = request.chains[0].blocks[request.position]
        return [each.device for each in self.cluster.instances_of(block)]

    def _settle(self, request: ChainRequest, hop: Hop) -> float | None:
        """Carry out a decision; the earliest time at the next block. None: the request begins its chain again."""
        cluster, position, at = self.cluster, request.position, self.now
        instance = hop.instance
        if instance is None:
            instance = self._load(hop.block, hop.device, hop.load_s, hop.evicted)
        if not request.has_owner:
            request.chains = tuple(each for each in request.chains if each.blocks[position : position + 1] == (hop.block,))
            cluster.assign(request, instance)
        elif hop.move is None:
            cluster.grow(request, position)
            at = request.kv_ready[position]
        else:
            at = self._move(request, position, instance, hop.move.copied)
            cluster.grow(request, position)
            if hop.move.restarts:
                request.position, request.is_prefill = 0, True
                self._send([request], None)
                return None
            if not request.is_prefill:
                request.recomputed = hop.move.computed
        return at

    def _move(self, request: ChainRequest, position: int, target: BlockInstance, copied: int) -> float:
        """Keys and values go to another instance; when they are there."""
        source = request.devices[position]
        size = copied * target.cost.kv_bytes
        ready = self._transfer(source, target.device, size) if size else self.now
        if not self._topology.is_local(source, target.device):
            self.result.kv_bytes += size
        self.result.transfer_s += ready - self.now
        self.result.moves += 1
        self.cluster.move(request, position, target, ready)
        return ready

    def _transfer(self, source: int, target: int, size: int) -> float:
        """When bytes are there. A server sends to others one after the other."""
        topology = self._topology
        if topology.is_local(source, target):
            return self.now + topology.transfer_s(source, target, size)
        server = topology.server_of[source]
        start = max(self.now, self._link_free[server])
        self._link_free[server] = start + size / topology.net_bytes_s
        return self._link_free[server] + topology.net_s

    def _receive(self, instance: BlockInstance, group: Sequence[tuple[ChainRequest, int]]) -> None:
        moved = []
        for request, epoch in group:
            if request.epoch != epoch:
                continue
            if request.devices[request.position] != instance.device:
                moved.append(request)  # its keys and values have gone elsewhere meanwhile
                continue
            instance.queue.add(request, self.now)
        if moved:
            self._send(moved, instance.device)
        self._start(self.cluster.devices[instance.device])

    # Devices

    def _start(self, device: BlockDevice, follows: BlockInstance | None = None) -> None:
        """The next batch; `follows` goes on with the rows it just got."""
        if self._running[device.number] is not None:
            return
        instance = follows or device.next_instance(self.now)
        if instance is None:
            return
        batch = instance.queue.take()
        seconds = batch.seconds + (0.0 if follows else self._topology.run_s)
        self._running[device.number] = instance
        device.busy_until = self.now + seconds
        self.result.busy_s += seconds
        self.result.batches += 1
        self.result.rows += len(batch.requests)
        entries = [(each, each.epoch) for each in batch.requests]
        self._push(device.busy_until, partial(self._finish_batch, device, instance, entries))

    def _finish_batch(self, device: BlockDevice, instance: BlockInstance, batch: Sequence[tuple[ChainRequest, int]]) -> None:
        self._running[device.number] = None
        instance.used_at = self.now
        going, ended = [], False
        for request, epoch in batch:
            if request.epoch != epoch:
                continue
            request.recomputed = 0
            request.position += 1
            if request.position == len(request.chains[0].blocks):
                self._first_token.setdefault(request.number, self.now)
                request.generated += 1
                request.position, request.is_prefill = 0, False
                request.chains = request.chains[:1]
                if request.generated == request.output:
                    self._end(request)
                    ended = True
                    continue
            going.append(request)
        self._send(going, device.number)
        self._start(device, self._single_follower(device, instance, going))
        if ended and self._parked:
            self._admit()

    def _single_follower(
        self, device: BlockDevice, instance: BlockInstance, going: Sequence[ChainRequest]
    ) -> BlockInstance | None:
        """Consecutive blocks on a device run as one instance if no other request comes to the second, or leaves the first."""
        live = [each for each in going if each.has_owner]
        if not live or len(live) < len(going):
            return None
        found = self.cluster.instance(live[0], live[0].position)
        if found.device != device.number or not live[0].position or not self.traffic.is_single(instance.block, found.block):
            return None
        is_whole = len(found.queue) and all(self.cluster.instance(each, each.position) is found for each in live)
        return found if is_whole and found.ready_at <= self.now else None

    # Instances

    def _load(self, block: str, device: int, load_s: float, evicted: Sequence[BlockInstance]) -> BlockInstance:
        for each in evicted:
            self.cluster.remove_instance(each)
        made = self.cluster.add_instance(block, device, self.now + load_s)
        self.result.loads += 1
        self._push(made.ready_at, partial(self._start, self.cluster.devices[device]))
        return made

    def _scale(self, plan: ScaleOut) -> None:
        for each in plan.evicted:
            self.cluster.remove_instance(each)
        for block in plan.missing:
            self._load(block, plan.target, plan.load_s, ())
        self._push(self.now + plan.load_s, partial(self._balance, plan))
        self.result.scale_outs += 1

    def _balance(self, plan: ScaleOut) -> None:
        """Requests go to the new instances, with their keys and values."""
        target, can_copy = self.cluster.devices[plan.target], self._config.dispatch.kv_rule is not KvRule.RECOMPUTE
        for request, positions in requests_to_move(self.cluster, plan):
            at = request.position
            waits = at in positions and request in self.cluster.instance(request, at).queue
            if waits:
                self.cluster.instance(request, at).queue.remove(request)
            ready = self.now
            for position in positions:
                instance = target.instances[request.blocks[position]]
                ready = max(ready, self._move(request, position, instance, request.tokens if can_copy else 0))
            request.has_lost_kv = not can_copy
            if waits and can_copy:
                self._push(ready, partial(self._receive, target.instances[request.blocks[at]], [(request, request.epoch)]))
            elif waits:
                self._send([request], None)

    def _tick(self) -> None:
        for found in choose_scale_outs(self.cluster, self.traffic, self._config.scaling, self.now):
            self._scale(found)
        if self._parked:
            self._admit()
        timeline = self.result.timeline
        timeline.seconds.append(self.now)
        timeline.queues_s.append([round(each.queue_s(self.now), 6) for each in self.cluster.devices])
        timeline.unfinished.append(len(self.requests))
        self._watch(self)
