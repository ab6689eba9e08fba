"""The serving mode of EAGLE, on any device: a scripted target, whose draft (`write_scripted_eagle`) is often right."""

from __future__ import annotations

from .mode_config import MODES, ModeConfig
from .quick_interpreter import quick_interpreter
from .scripted_models import write_scripted_llama as write_target
from .spec_fill_ins import eagle_on_cpu

__all__ = ["EAGLE", "V1", "V2"]

_MHA = MODES["mha"]
# Short requests: on a CPU every attention kernel is interpreted. At most 8 requests of 72 tokens at once.
POOL_SLOTS = 640
CHUNK = 16  # most prompts take two chunks or more

EAGLE = MODES["eagle"] = ModeConfig(
    name="eagle",
    write_model=write_target,
    pools=("FULL",),
    halves=("K", "V"),
    server_args={
        **_MHA.server_args,
        "load_format": "auto",
        "max_total_tokens": POOL_SLOTS,
        "max_running_requests": 8,
        "chunked_prefill_size": CHUNK,
        "context_length": 256,
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    },
    cpu_args={
        **_MHA.cpu_args,
        "attention_backend": "triton",
        "triton_attention_num_kv_splits": 1,
        "disable_cuda_graph": True,
    },
    cuda_args=_MHA.cuda_args,
    cpu_fill_ins=(eagle_on_cpu, quick_interpreter),
)
V1 = {"disable_overlap_schedule": True}
V2 = {"disable_overlap_schedule": False}
