"""A network of queues, simulated event by event: the oracle of `si.model.Network`."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush

from scalein.model import Stage


def simulate(stages: list[Stage], routes: Mapping[str, Mapping[str, float]], rate: float, requests: int,
             seed: int) -> list[float]:
    """Latencies: requests arrive at random, and visit the stages that they are sent to one after the other."""
    dice = random.Random(seed)
    by_name = {stage.name: stage for stage in stages}
    free, queues = {stage.name: stage.workers for stage in stages}, {stage.name: deque() for stage in stages}
    events: list[tuple[float, int, str, object]] = []
    count = 0

    def push(time: float, kind: str, about: object) -> None:
        nonlocal count
        count += 1
        heappush(events, (time, count, kind, about))

    def visits(name: str) -> Iterator[str]:
        """The stages that a request visits, in order."""
        yield name
        sent = routes.get(name, {})
        if sum(each % 1 for each in sent.values()) <= 1 + 1e-9:
            chosen, left = dice.random(), None
            for target, times in sent.items():
                if chosen is not None and chosen < times % 1:
                    left, chosen = target, None
                elif chosen is not None:
                    chosen -= times % 1
            numbers = {target: int(times) + (target == left) for target, times in sent.items()}
        else:
            numbers = {target: int(times) + (dice.random() < times % 1) for target, times in sent.items()}
        for target, times in numbers.items():
            for _ in range(times):
                yield from visits(target)

    def arrive(time: float, name: str, request: tuple[float, Iterator[str]]) -> None:
        if free[name]:
            free[name] -= 1
            serve(time, name, request)
        else:
            queues[name].append(request)

    def serve(time: float, name: str, request: tuple[float, Iterator[str]]) -> None:
        stage = by_name[name]
        scv = stage.variability
        service = stage.service_s if scv == 0 else dice.gammavariate(1 / scv, stage.service_s * scv)
        push(time + service, "done", (name, request))

    time, found = 0.0, []
    for _ in range(requests):
        time += dice.expovariate(rate)
        push(time, "enter", visits(stages[0].name))
    while events:
        now, _, kind, about = heappop(events)
        if kind == "enter":
            arrive(now, next(about), (now, about))
            continue
        name, request = about
        if queues[name]:
            serve(now, name, queues[name].popleft())
        else:
            free[name] += 1
        following = next(request[1], None)
        if following is None:
            found.append(now - request[0])
        else:
            arrive(now, following, request)
    return found[requests // 10:]  # without the first tenth, which found the queues empty
