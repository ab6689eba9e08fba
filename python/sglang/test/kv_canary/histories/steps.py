"""A step: one forward on both sides, with what is damaged meanwhile, and what is sampled after it."""

from __future__ import annotations

import random

from ..oracle import Forward
from .damage import Damages
from .forwards import Forwards
from .operations import TOKENS, Step


class Steps(Forwards, Damages):
    """Handler of steps."""

    def _do_step(self, op: Step) -> None:
        forward = self._forward(op)
        if forward is None:
            return
        delta = -forward.requests[0].count if op.style == "decode" else 0
        self.world.upload()
        plan = self.world.plan(forward, delta=delta)
        forward = forward.without_padding  # stale rows are no requests
        self.world.head(plan)
        for _, model in self._groups():
            self.oracle.head(forward, model)
        if op.ending == "aborted":
            for request in forward.requests:
                if 0 < request.row < self.spec.request_rows:
                    self._release(request.row)
            return
        self._run_layers(forward, op.seed)
        self._damage(op.during)
        self.world.upload()
        self.world.tail(plan)
        for _, model in self._groups():
            self.oracle.tail(forward, model)
        if op.ending == "full":
            self._damage(op.before_content)
            self.world.upload()
            self.world.content(plan)
            for _, model in self._groups():
                self.oracle.content(forward, model)
        if forward.parents is not None:
            self._accept(forward)
        if op.samples:
            self._sample(forward, random.Random(op.seed))

    def _sample(self, forward: Forward, rng: random.Random) -> None:
        """Each request's next token, after the drafts that it kept beyond the first."""
        sampled = {}
        for request in forward.requests:
            row = self.rows[request.row] if 0 < request.row < self.spec.request_rows else None
            if row is None or row.is_new or len(row.slots) <= request.prefix:
                continue
            offset, length = self.spec.token_offset, len(row.slots)
            if len(row.tokens) <= length + offset:
                row.tokens += rng.choices(TOKENS, k=length + offset + 1 - len(row.tokens))
            first = request.prefix + 1 if forward.uniform else length
            sampled[request.row] = tuple(row.tokens[first + offset : length + offset + 1])
        if sampled:
            self.world.next_tokens(sampled)
            self.oracle.next_tokens(sampled)

    def _accept(self, forward: Forward) -> None:
        """Keep the path to each request's last token and free the others, as after the verification of drafts."""
        for request in forward.requests:
            if not 0 < request.row < self.spec.request_rows or not request.count:
                continue
            row = self.rows[request.row]
            if request.prefix < 0 or len(row.slots) != request.prefix + request.count:
                continue  # a made-up request
            path = [request.count - 1]
            while (parent := forward.parent(request, path[0])) >= 0:
                path.insert(0, parent)
            new = row.slots[request.prefix :]
            kept = [new[i] for i in path]
            dropped = [slot for slot in new if slot not in kept]
            row.slots[request.prefix :] = kept
            row.is_new |= path[0] != 0  # trees of drafts have one root
            offset = self.spec.token_offset
            first = request.start
            tokens = [forward.tokens[first + i] for i in path]
            row.tokens[request.prefix + offset :] = tokens
            end = request.prefix + len(kept)
            self.world.table[request.row][request.prefix : end] = kept
            self._free_swa(dropped)
            self._free_full(dropped)

    def _run_layers(self, forward: Forward, seed: int) -> None:
        """Fresh bytes for every written slot, the padding slot included."""
        rng = random.Random(seed)
        for g, model in self._groups():
            for full_slot in forward.out_slots:
                slot = model.locate(full_slot)[0] or 0
                for memory in (m for ms in g.memories.values() for m in ms):
                    memory.write(slot, rng.randbytes(memory.shape.row_bytes))
