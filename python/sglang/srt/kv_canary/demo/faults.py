"""The faults of the demo: what each damages, how it would look in production, and what the canary must report."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ..testing.serving import Serving
from ..testing.traffic import random_tokens

Done = dict[str, Any]  # the answer to an injection: what was damaged


@dataclass(frozen=True, slots=True)
class DemoFault:
    """`act` serves requests around one injection and returns its answer.

    A fault is caught if a violation with `reason` is explained by the injection. If `writer` is set, it must also be
    the slot's last writer.
    """

    title: str
    seen_as: str  # how this looks from outside, in a server without the canary
    act: Callable[[Serving], Awaitable[Done]]
    reason: str
    writer: str | None = None

    def is_story(self, event: dict[str, Any]) -> bool:
        """Whether this violation shows the fault as it happened."""
        writer = event["writer"]
        return self.reason in event["reasons"] and (
            self.writer is None or (writer is not None and writer["request_id"] == self.writer)
        )


def _prompt(name: str, length: int = 40) -> list[int]:
    return random_tokens(random.Random(name), length)


async def _together(serving: Serving, *names: str, new_tokens: int = 24) -> None:
    await serving.generate_together([(name, _prompt(name), new_tokens) for name in names])


async def _flipped_in_cached_slot(serving: Serving) -> Done:
    prompt = _prompt("system prompt", 64)
    await serving.generate("ada", [*prompt, 10], 4)
    fault = serving.send("flip_bytes", cached=prompt, position=30, half="V", source=1)
    done = await fault.executed()
    await _together(serving, "bob")  # another prompt: not affected
    await serving.generate("cleo", [*prompt, 11], 4)
    return done


async def _entry_of_another_request(serving: Serving) -> Done:
    fault = serving.send("other_requests_slot", mode="DECODE", rid="dora")
    await _together(serving, "dora", "emil", "fay")
    return await fault.executed()


async def _freed_and_handed_out(serving: Serving) -> Done:
    fault = serving.send("free_live_slot", mode="DECODE", rid="gus", hand_out_next=True)
    await _together(serving, "hana", "gus")
    return await fault.executed()


async def _write_outside_plan(serving: Serving) -> Done:
    fault = serving.send("write_outside_plan", mode="DECODE", rid="ivan")
    await _together(serving, "ivan", "june")
    return await fault.executed()


async def _wrong_position(serving: Serving) -> Done:
    fault = serving.send("wrong_position", mode="DECODE", rid="kim")
    await _together(serving, "kim", "leo")
    return await fault.executed()


async def _freed_twice(serving: Serving) -> Done:
    await _together(serving, "mia", new_tokens=2)
    await serving.flush()  # its slots are free now
    fault = serving.send("double_free")
    done = await fault.executed()
    await _together(serving, "noah", new_tokens=2)
    return done


DEMO_FAULTS: tuple[DemoFault, ...] = (
    DemoFault(
        "bytes flipped in a cached slot",
        "a late transfer or a memory error; every request that shares this prefix is affected",
        _flipped_in_cached_slot,
        "CONTENT",
        writer="ada",
    ),
    DemoFault(
        "a req_to_token entry pointed at another request's slot",
        "a recycled row or a stale page table; one user is answered from another's context",
        _entry_of_another_request,
        "CHAIN",
    ),
    DemoFault(
        "a live slot freed and handed to another request",
        "a free that came too early; its next owner overwrites what the old one still reads",
        _freed_and_handed_out,
        "CHAIN",
        writer="hana",
    ),
    DemoFault(
        "a write into a slot outside the plan",
        "a wrong padding index or a finished row that goes on writing",
        _write_outside_plan,
        "CONTENT",
    ),
    DemoFault(
        "a token fed at a wrong position",
        "off by one in a draft or resumed request; the K is rotated for another place",
        _wrong_position,
        "WRITE_POSITION",
    ),
    DemoFault(
        "a slot freed twice",
        "two owners of one page; the damage shows much later, somewhere else",
        _freed_twice,
        "DOUBLE_FREE",
    ),
)
