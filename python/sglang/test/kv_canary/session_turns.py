"""Turns of a streaming session, one after the other."""

from __future__ import annotations

from typing import Any

__all__ = ["ANSWER", "take_turns"]

ANSWER = 4  # tokens


def take_turns(serving: Any, session: str, tokens: list[int], turns: int = 3) -> None:
    """Open `session` on a `Serving`, add `tokens` and an answer in each turn, and close it."""
    body = {"capacity_of_str_len": 4096, "streaming": True, "session_id": session}
    serving.post("/open_session", body)
    for turn in range(turns):
        params = {"temperature": 0.0, "max_new_tokens": ANSWER, "ignore_eos": True}
        body = {"rid": f"{session}.{turn}", "input_ids": tokens, "sampling_params": params}
        answer = serving.post("/generate", {**body, "session_params": {"id": session}})
        assert answer["meta_info"]["completion_tokens"] == ANSWER
    serving.post("/close_session", {"session_id": session})
