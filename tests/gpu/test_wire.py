"""Encodings of what is sent: a device and the host read each other's bytes."""

from __future__ import annotations

import pytest
import torch

from fsdp_compose.plugins.transports import Bfloat16, Int8
from tests.gpu.test_cuda import DEVICE

pytestmark = pytest.mark.gpu

FORMATS = [Bfloat16(), Int8(), Int8(64)]


@pytest.mark.parametrize("numel", [1, 255, 256, (1 << 25) + 3])
@pytest.mark.parametrize("encoding", FORMATS, ids=lambda item: item.name)
def test_decoding_gives_the_same_bits(encoding, numel):
    source = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    source[::7] *= 1e-6
    packed = {
        device: torch.empty(encoding.nbytes(numel), dtype=torch.uint8, device=device) for device in (DEVICE, "cpu")
    }
    for device, memory in packed.items():
        encoding.encode(source.to(device), memory)
    for memory in packed.values():
        for adds in (False, True):
            decoded = []
            for device in packed:
                out = torch.ones(numel, device=device)
                encoding.decode(memory.to(device), out, adds)
                decoded.append(out.cpu())
            if adds:  # the host may add and multiply in one operation, which rounds once
                torch.testing.assert_close(decoded[0], decoded[1], atol=1e-6, rtol=1e-6)
            else:
                assert torch.equal(decoded[0], decoded[1])
    twice = torch.empty_like(packed[DEVICE])
    encoding.encode(source.to(DEVICE), twice)
    assert torch.equal(twice, packed[DEVICE])
