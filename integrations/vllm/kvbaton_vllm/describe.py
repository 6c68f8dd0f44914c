"""What an engine can say of itself, from vLLM's configuration; reads attributes only."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from kvbaton_vllm.registry import EngineDescription

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
_NIXL = ("nixl", "nixl-cu12", "nixl-cu13")


def describe(
    vllm_config: Any, scheduler: Any, base_url: str | None, vllm_version: str
) -> EngineDescription:
    """Describes the engine that runs with this configuration and this half of the connector."""
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    transfer = vllm_config.kv_transfer_config
    is_mla = bool(model.use_mla)
    return EngineDescription(
        engine_id=scheduler.engine_id,
        base_url=base_url,
        role=_ROLES.get(transfer.kv_role),
        model=model_name(model),
        dp_rank=parallel.data_parallel_index,
        vllm_version=vllm_version,
        more={
            "tp_size": scheduler.transfer_tp_size,
            "pp_size": parallel.pipeline_parallel_size,
            "dcp_size": parallel.decode_context_parallel_size,
            "transfer_mode": scheduler._TRANSFER_MODE,
            "kv_heads": 1 if is_mla else model.get_total_num_kv_heads(),
            "is_mla": is_mla,
            "permute_received": bool(transfer.enable_permute_local_kv),
            "hma_required": bool(scheduler._is_hma_required),
            "host_buffer": bool(scheduler.use_host_buffer),
            "enforce_compat": bool(
                transfer.get_from_extra_config("enforce_handshake_compat", True)
            ),
            "nixl_version": nixl_version(),
            # What its hand-offs name, whether or not anything listens there.
            "side_channel_host": scheduler.side_channel_host,
            "side_channel_port": scheduler.side_channel_port,
        },
    )


def model_name(model_config: Any) -> str | None:
    """The name that the engine serves its model under."""
    name = model_config.served_model_name or model_config.model
    if isinstance(name, list):
        return str(name[0]) if name else None
    return None if name is None else str(name)


def nixl_version() -> str | None:
    """The version of NIXL that is installed."""
    for name in _NIXL:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
