"""The scheduler's own token lists for the next forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from ..config import TokenCheck
from ..plan.anchor import anchor_of
from ..plan.expected_inputs import (
    TAIL_TOKENS,
    ExpectedLater,
    ExpectedTokens,
    KnownTokens,
    RowStart,
)
from ..plan.host_chain import chain_of_tokens
from ..runner.manager import CanaryManager
from ..token_oracle import TokenOracleManager
from .context import context
from .guard import attempt_aside
from .releases import release


class _Request(NamedTuple):
    """A request of the batch, and what is noted of it right before the forward."""

    request: Any
    prefix: int
    length: int
    start: int  # see KnownTokens
    start_chain: int


def expected_tokens_of(
    manager: CanaryManager, forward_batch: Any, requests: list[Any]
) -> ExpectedTokens | ExpectedLater | None:
    """The requests' own token lists for an extend forward. None for other forwards.

    Mode `tail`: every new token, and the last TAIL_TOKENS of each cached prefix. Mode `all`: the whole prefix as well.
    In every mode, a request that is new in its row starts with the chain of its own tokens.

    Where HEAD may come after the layers, a function that reads the lists. Nothing changes them while the model's
    forward is being launched: this is the scheduler's thread, and it takes up results between steps.
    """
    prefix_lens, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    if not manager.armed or prefix_lens is None:
        return None
    has_tokens = forward_batch.input_embeds is None  # otherwise placeholders
    noted = attempt_aside(_noted, requests, prefix_lens, lengths, has_tokens)
    read = partial(_lists_on_device, manager, noted, len(prefix_lens), has_tokens)
    may_wait = forward_batch.forward_mode._name_ == "EXTEND" and manager.late.may_take_head(lengths)
    if may_wait and any(prefix_lens):
        may_wait = noted is not None and attempt_aside(_keep_prefixes, noted)
    return read if may_wait else read()


def _keep_prefixes(noted: list[_Request]) -> bool:
    """Whether rows with a prefix keep it until the result is there, as far as they belong to a living request.

    The row of a chunk before the last one may be re-pointed to equal slots of the prefix cache. Then HEAD would not see
    what attention has read. That of a decode, which SGLang may run as a prefill of one token, may be given away while
    the prefix cache keeps the slots. Then HEAD would write a wrong chain.
    """
    return all(each.length > 1 and _is_last_chunk(each) for each in noted if each.prefix)


def _is_last_chunk(noted: _Request) -> bool:
    request = noted.request
    known = len(request.origin_input_ids) + len(request.output_ids)
    return noted.prefix + noted.length >= known


def _noted(
    requests: list[Any], prefix_lens: list[int], lengths: list[int], has_tokens: bool
) -> list[_Request] | None:
    """None if the batch does not match `requests`."""
    if len(requests) != len(prefix_lens):
        return None
    return [
        _note(request, int(prefix), int(length), has_tokens)
        for request, prefix, length in zip(requests, prefix_lens, lengths, strict=True)
    ]


def _note(request: Any, prefix: int, length: int, has_tokens: bool) -> _Request:
    """Once for each forward: the row has this request, this long, from now on."""
    start, chain = RowStart.KEEP, 0
    if context.row_owners.extend(request, prefix, length):
        start, chain = _row_start(request, prefix, has_tokens)
    return _Request(request, prefix, length, start, chain)


def _lists_on_device(
    manager: CanaryManager, noted: list[_Request] | None, count: int, has_tokens: bool
) -> ExpectedTokens | None:
    """Of `count` requests, on the device."""
    known = None
    if noted is not None:
        # Lists do not have placeholders.
        mode = manager.config.token_check if has_tokens else TokenCheck.NONE
        known = attempt_aside(_known_of_batch, noted, mode, manager.token_oracle)
    if known is None:  # the owners are unknown, so no row may be compared with its previous owner
        known = [KnownTokens(start=RowStart.FORGET)] * count
    device, memory = manager.identity.device, manager.state.token_lists
    expected = attempt_aside(ExpectedTokens.from_lists, known, device, memory)
    if expected is None:  # the same for all rows, because the device cannot learn which
        manager.state.row_memory.forget()
    return expected


def _known_of_batch(
    noted: list[_Request], mode: TokenCheck, oracle: TokenOracleManager | None
) -> list[KnownTokens]:
    return [_known_tokens(request, mode, oracle) for request in noted]


def _known_tokens(
    noted: _Request, mode: TokenCheck, oracle: TokenOracleManager | None
) -> KnownTokens:
    request, prefix, length, start, chain = noted
    if mode is TokenCheck.NONE:
        return KnownTokens(start=start, start_chain=chain)
    first = 0 if mode is TokenCheck.ALL else max(0, prefix - TAIL_TOKENS)
    tokens = tokens_of_request(request, first, prefix + length, oracle)
    # A decode in a mixed batch. Under overlap the host does not have its token yet.
    if start == RowStart.KEEP and length == 1 and first + len(tokens) <= prefix:
        start = RowStart.DECODES
    return KnownTokens(first, tokens, start, chain)


def tokens_of_request(
    request: Any, first: int, end: int, oracle: TokenOracleManager | None
) -> Sequence[int]:
    """The request's own list from `first` to `end`, if it is that long. With an oracle, answers are the oracle's."""
    tokens, known = release().tokens_of(request)
    end = min(end, known)
    if first or end < len(tokens):  # a copy of a list touches each token
        tokens = tokens[first:end]
    if oracle is None:
        return tokens
    own = max(0, len(request.origin_input_ids) - first)
    answer = range(first + own, first + len(tokens))
    return [*tokens[:own], *(oracle.oracle.token(request.rid, p) for p in answer)]


def _row_start(request: Any, prefix: int, has_tokens: bool) -> tuple[int, int]:
    """(tokens in the row, chain of the last one) of a request that is new in it."""
    if prefix and not has_tokens:
        return RowStart.FORGET, 0
    anchor = anchor_of(context.session_rows.namespace_of(request))
    if not prefix:
        return 0, anchor
    tokens, known = release().tokens_of(request)
    return prefix, chain_of_tokens(tokens, anchor, count=min(prefix, known))
