"""Upper bounds for one launch, known before any buffer is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import startup_error

MOST_REQUESTS = 16384  # in one batch: every kernel program keeps one lane per request


@dataclass(frozen=True, slots=True)
class CanaryLaunchCapacities:
    """Sizes from which the device state and the workspaces are allocated."""

    max_batch_size: int  # requests in one forward
    max_request_rows: int  # rows of req_to_token, including padding row 0
    max_context_len: int  # columns of req_to_token
    ring_capacity: int  # violation rows kept
    verify_budget_slots: int  # slots verified per forward, group and half
    content_budget_bytes: int  # K/V bytes re-read per forward
    max_extend_tokens: int  # new tokens in one prefill

    @classmethod
    def from_args(
        cls,
        *,
        max_running_requests: int,
        request_rows: int,
        context_len: int,
        ring_capacity: int,
        verify_budget_slots: int,
        content_budget_bytes: int,
        max_extend_tokens: int | None = None,
    ) -> CanaryLaunchCapacities:
        """Raises ValueError for a size that is not positive, CanaryStartupError for batches that are too large.

        `max_extend_tokens` None: one request's context.
        """
        capacities = cls(
            max_batch_size=max_running_requests,
            max_request_rows=request_rows,
            max_context_len=context_len,
            ring_capacity=ring_capacity,
            verify_budget_slots=verify_budget_slots,
            content_budget_bytes=content_budget_bytes,
            max_extend_tokens=context_len if max_extend_tokens is None else max_extend_tokens,
        )
        for name in cls.__slots__:
            if getattr(capacities, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(capacities, name)}")
        if max_running_requests > MOST_REQUESTS:
            raise startup_error(
                f"a rank runs up to {max_running_requests:,} requests, and the kernels take {MOST_REQUESTS:,}.",
                "larger batches",
            )
        return capacities
