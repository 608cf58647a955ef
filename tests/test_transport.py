"""What transports say of themselves, and why one can't be had."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moe_a2a.op_host import heap, transport

FIELDS = {"semantics", "resources", "submitter", "engine", "link"}


def test_every_transport_has_five_fields() -> None:
    for name, describe in transport.DESCRIPTIONS.items():
        described = describe("because")
        assert (described.name, described.reason) == (name, "because")
        assert set(described.describe()) == FIELDS and all(described.describe().values())
    assert {*transport.NAMES} - {"auto"} == {*transport.DESCRIPTIONS} - {"npu"}, (
        "what isn't there isn't offered"
    )


def test_probing_says_why() -> None:
    reasons = transport.probe()
    assert reasons["cpu-shm"] == "" and reasons["collective"] == ""
    assert reasons["npu"].startswith("not implemented yet")
    with pytest.raises(ValueError, match="no transport 'rdma'; there are cpu-shm, cuda"):
        transport.missing("rdma")


@pytest.mark.parametrize("name", ["cuda", "hip"])
def test_a_gpu_is_probed_step_by_step(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    other, build = ("hip", "CUDA") if name == "cuda" else ("cuda", "ROCm")
    monkeypatch.setattr(torch.version, name, None)
    monkeypatch.setattr(torch.version, other, None)
    assert f"isn't a build for {build}" in transport.missing(name)

    monkeypatch.setattr(torch.version, name, "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert transport.missing(name) == "torch sees no GPU here"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    properties = SimpleNamespace(major=7, minor=5, gcnArchName="gfx900:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert f"no line for {'sm_75' if name == 'cuda' else 'gfx900'} (device cuda:1)" in transport.missing(name)

    properties.major, properties.minor, properties.gcnArchName = 9, 0, "gfx942"
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    assert "moe_a2a[triton]" in transport.missing(name)

    monkeypatch.setattr("importlib.util.find_spec", lambda module: object())
    assert "no symmetric memory for device cuda:1" in transport.missing(name)
    monkeypatch.setattr(heap, "_symmetric_memory", lambda device: object())
    assert transport.missing(name) == ""
