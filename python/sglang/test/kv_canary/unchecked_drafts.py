"""Real servers whose draft model's KV is not checked: DFLASH and multi-layer EAGLE, on any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from sglang_kv_canary.testing.eagle_mode import V2
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.scripted_models import write_scripted_dflash
from sglang_kv_canary.wiring.releases import release

from .eagle_dp_serving import EagleDpE2EBase, MtpDpE2EBase, on_cpu
from .eagle_serving import EagleE2EBase

__all__ = [
    "DflashE2EBase",
    "DflashInStepE2EBase",
    "LayersE2EBase",
    "LayersInStepE2EBase",
    "dflash_on_cpu",
    "layers_of_one_kind",
]


def layers_of_one_kind() -> None:
    """Multi-layer EAGLE with drafts of one layer, and without the device "cuda" that 0.5.12.post1 names."""
    from sglang.srt.models.deepseek_nextn import DeepseekV3ForCausalLMNextN
    from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for model in (LlamaForCausalLMEagle, DeepseekV3ForCausalLMNextN):
        model.__init__ = _of_any_layer(model.__init__)
    if release().has_own_canary:
        return
    worker = "sglang.srt.speculative.multi_layer_eagle_worker_v2.MultiLayerEagleDraftWorker"
    HookRegistry.register(f"{worker}.draft_forward", _on_cpu, HookType.AROUND)


def unpadded_between_layers() -> None:
    """Multi-layer EAGLE in step with other ranks without the CUDA graph of its draft-extend, from 0.5.22 on.

    SGLang hands the padding of the first layer to the second, whose attention ends with an error. A graph pads copies.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if release().has_own_canary:
        path = f"{ForwardBatch.__module__}.ForwardBatch"
        HookRegistry.register(f"{path}.prepare_mlp_sync_batch", _remember, HookType.BEFORE)
        HookRegistry.register(f"{path}.post_forward_mlp_sync_batch", _unpad, HookType.AFTER)


_PADDED = (
    "extend_num_tokens",
    "extend_prefix_lens",
    "extend_prefix_lens_cpu",
    "extend_seq_lens",
    "extend_seq_lens_cpu",
    "input_ids",
    "out_cache_loc",
    "positions",
    "req_pool_indices",
    "req_pool_indices_cpu",
    "seq_lens",
    "seq_lens_cpu",
    "seq_lens_sum",
)


def _remember(batch: Any, _: Any) -> None:
    if batch.forward_mode.is_draft_extend_v2():
        batch.before_padding = {name: getattr(batch, name) for name in _PADDED}


def _unpad(_: Any, batch: Any, *__: Any) -> None:
    for name, value in batch.__dict__.pop("before_padding", {}).items():
        setattr(batch, name, value)


def _of_any_layer(create: Callable[..., None]) -> Callable[..., None]:
    """All layers have the same weights: each guesses the token after its last one."""

    def created(*args: Any, draft_model_idx: int | None = None, **kwargs: Any) -> None:
        create(*args, **kwargs)

    return created


def _on_cpu(draft: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return on_cpu(draft)(*args, **kwargs)


def dflash_on_cpu() -> None:
    """SGLang hands input embeddings on as bfloat16, whatever the model's type. Newer releases ask for a GPU."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if release().has_own_canary:
        from sglang.srt.arg_groups import speculative_hook

        speculative_hook.current_platform = _AnyPlatform()
    model = "sglang.srt.models.dflash.DFlashDraftModel"
    HookRegistry.register(f"{model}.forward", _in_the_models_dtype, HookType.AROUND)


def dflash_in_step_on_cpu() -> None:
    """SGLang asks for a GPU where its arguments have DP attention beside DFLASH."""
    from sglang.srt.arg_groups import speculative_hook

    speculative_hook.attn_dp_enabled_of = lambda _: False


class _AnyPlatform:
    """Stands in for SGLang's platform where it reads the arguments of DFLASH."""

    def is_out_of_tree(self) -> bool:
        return True

    def supports_speculative_algorithm(self, _: str) -> bool:
        return True

    def supports_speculative_draft_attention_backend(self, *_: str) -> bool:
        return True


def _in_the_models_dtype(
    original: Callable[..., Any], model: Any, *args: Any, input_embeds: Any = None, **kwargs: Any
) -> Any:
    return original(model, *args, input_embeds=input_embeds.to(model.fc.weight.dtype), **kwargs)


_EAGLE = MODES["eagle"]
MODES["eagle_layers"] = replace(
    _EAGLE,
    name="eagle_layers",
    server_args={
        **_EAGLE.server_args,
        "enable_multi_layer_eagle": True,
        "speculative_num_steps": 2,
        "speculative_num_draft_tokens": 3,
    },
    cpu_fill_ins=(*_EAGLE.cpu_fill_ins, layers_of_one_kind),
)
_IN_STEP = MODES["mtp_dp"]
MODES["layers_dp"] = replace(
    _IN_STEP,
    name="layers_dp",
    server_args={
        **_IN_STEP.server_args,
        "enable_multi_layer_eagle": True,
        "speculative_num_steps": 2,
        "speculative_num_draft_tokens": 3,
    },
    cpu_fill_ins=(*_IN_STEP.cpu_fill_ins, layers_of_one_kind, unpadded_between_layers),
)


def _with_dflash(server_args: Mapping[str, Any]) -> dict[str, Any]:
    """DFLASH takes the number of draft tokens from its draft model."""
    others = {k: v for k, v in server_args.items() if not k.startswith("speculative_")}
    return {**others, "speculative_algorithm": "DFLASH"}


MODES["dflash"] = replace(
    _EAGLE,
    name="dflash",
    server_args=_with_dflash(_EAGLE.server_args),
    cpu_fill_ins=(*_EAGLE.cpu_fill_ins, dflash_on_cpu),
)

# Drafts borrow the target's head, which each rank then has whole.
MODES["dflash_dp"] = replace(
    MODES["eagle3_dp"],
    name="dflash_dp",
    server_args={**_with_dflash(MODES["eagle3_dp"].server_args), "enable_dp_lm_head": True},
    cpu_fill_ins=(*MODES["eagle3_dp"].cpu_fill_ins, dflash_on_cpu, dflash_in_step_on_cpu),
)


class UncheckedDraftE2EBase(EagleE2EBase):
    """The target has a canary, and its draft model none."""

    runners: ClassVar[frozenset[str]] = frozenset({"target"})
    flags: ClassVar[Mapping[str, Any]] = {**EagleE2EBase.flags, "log_level": "warning"}


class LayersE2EBase(UncheckedDraftE2EBase):
    mode_name = "eagle_layers"
    speculation: ClassVar[dict[str, Any]] = V2


class LayersInStepE2EBase(MtpDpE2EBase):
    """With data-parallel attention."""

    mode_name = "layers_dp"
    runners: ClassVar[frozenset[str]] = frozenset({"target"})


class DflashE2EBase(UncheckedDraftE2EBase):
    mode_name = "dflash"
    speculation: ClassVar[dict[str, Any]] = {}

    @classmethod
    def write_draft(cls, folder: Path) -> str:
        return write_scripted_dflash(folder)


class DflashInStepE2EBase(EagleDpE2EBase):
    """With data-parallel attention."""

    mode_name = "dflash_dp"
    runners: ClassVar[frozenset[str]] = frozenset({"target"})
    speculation: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def write_draft(cls, folder: Path) -> str:
        return write_scripted_dflash(folder)
