"""What an engine says of itself."""

from __future__ import annotations

from types import SimpleNamespace as Record
from typing import Any

import pytest

from kvbaton_vllm.describe import describe, model_name


def config(**transfer: Any) -> Any:
    more = {"kv_role": "kv_producer", "enable_permute_local_kv": False, **transfer}
    return Record(
        parallel_config=Record(
            data_parallel_index=3, pipeline_parallel_size=2, decode_context_parallel_size=1
        ),
        model_config=Record(
            use_mla=False,
            get_total_num_kv_heads=lambda: 8,
            served_model_name="tiny",
            model="/models/tiny",
        ),
        kv_transfer_config=Record(get_from_extra_config=lambda _key, default: default, **more),
    )


SCHEDULER = Record(
    engine_id="e_dp3",
    transfer_tp_size=4,
    _TRANSFER_MODE="pull",
    _is_hma_required=False,
    use_host_buffer=True,
    side_channel_host="10.0.0.5",
    side_channel_port=5603,
)


def test_everything_that_the_router_can_use() -> None:
    engine = describe(config(), SCHEDULER, "http://10.0.0.5:8100", "0.32.0")
    body = engine.body()
    body.pop("nixl_version", None)
    assert engine.engine_id == "e_dp3"
    assert body == {
        "base_url": "http://10.0.0.5:8100",
        "role": "prefill",
        "model": "tiny",
        "dp_rank": 3,
        "vllm_version": "0.32.0",
        "tp_size": 4,
        "pp_size": 2,
        "dcp_size": 1,
        "transfer_mode": "pull",
        "kv_heads": 8,
        "is_mla": False,
        "permute_received": False,
        "hma_required": False,
        "host_buffer": True,
        "enforce_compat": True,
        "side_channel_host": "10.0.0.5",
        "side_channel_port": 5603,
    }


@pytest.mark.parametrize(
    ("kv_role", "role"),
    [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", "both"), (None, None)],
)
def test_roles(kv_role: str | None, role: str | None) -> None:
    assert describe(config(kv_role=kv_role), SCHEDULER, None, "0.32.0").role == role


def test_a_latent_cache_has_one_head() -> None:
    latent = config()
    latent.model_config.use_mla = True
    more = describe(latent, SCHEDULER, None, "0.32.0").more
    assert (more["is_mla"], more["kv_heads"]) == (True, 1)


@pytest.mark.parametrize(
    ("served", "name"), [("a", "a"), (["a", "b"], "a"), (None, "/m"), ([], "/m"), ("", "/m")]
)
def test_the_name_of_the_model(served: object, name: str) -> None:
    assert model_name(Record(served_model_name=served, model="/m")) == name
