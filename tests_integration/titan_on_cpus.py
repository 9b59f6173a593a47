"""torchtitan's own entry point, where there is no accelerator: ``titan_on_cpus.py RESULT.json --module ...``

The first rank writes there what the trainer logs, and what the first step's gradients are. What torchtitan asks of a
device is answered here, FlexAttention is not compiled, and gloo gets only what it can do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
import torch.nn.attention.flex_attention as flex
from torch.distributed import fsdp

from tests_integration.side_by_side import names_of_torch, pin_no_memory

RESULT = Path(sys.argv.pop(1))


class Device(ModuleType):
    """torch.cpu, with what torch.cuda has."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def be_a_device() -> None:
    cpu, other = Device("cpu"), torch._utils._get_device_module
    for name in ("set_device", "synchronize", "reset_peak_memory_stats", "empty_cache"):
        setattr(cpu, name, lambda *_: None)
    cpu.device_count, cpu.current_device, cpu.get_device_name = lambda: 1, lambda: 0, lambda *_: "CPU"
    cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**34)
    cpu.memory_stats = lambda *_: {}
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device: cpu if device == "cpu" else other(device)


def communicate_by_gloo() -> None:
    init, barrier, set_factor = dist.init_process_group, dist.barrier, fsdp.FSDPModule.set_gradient_divide_factor
    dist.init_process_group = lambda backend=None, **options: init("gloo", timeout=options.get("timeout"))
    dist.barrier = lambda *_, **__: barrier()

    def all_to_all(
        outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any = None, async_op: Any = 0
    ) -> None:
        whole, sizes = torch.cat(outputs), [len(item) for item in outputs]  # gloo's own wants equal sizes
        dist.all_to_all_single(whole, torch.cat(inputs), sizes, [len(item) for item in inputs], group)
        for output, part in zip(outputs, whole.split(sizes), strict=True):
            output.copy_(part)

    def set_by_sums(self: Any, factor: float) -> None:
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)  # FSDP2 divides by nothing on gloo only so

    dist.all_to_all = all_to_all
    fsdp.FSDPModule.set_gradient_divide_factor = set_by_sums
    pin_no_memory()


be_a_device()
communicate_by_gloo()
import torchtitan.distributed.utils as distributed_utils  # noqa: E402
import torchtitan.models.common.attention as attention  # noqa: E402
import torchtitan.tools.utils as utils  # noqa: E402

utils.get_local_device = distributed_utils.get_local_device = lambda: torch.device("cpu")
flex._validate_device = lambda *_, **__: None
flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
attention.FlexAttention._compiled_flex_attn = staticmethod(flex.flex_attention)
for name in [name for name in vars(attention) if name.endswith("compiled_create_block_mask")]:
    setattr(attention, name, flex.create_block_mask)

import torchtitan.train as train  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402

found: dict[str, Any] = {"losses": [], "norms": [], "grads": []}
log, step = MetricsProcessor.log, torch.optim.AdamW.step


def note(self: Any, number: int, loss: float, most: float, norm: float, extra_metrics: Any = None) -> None:
    found["losses"].append(float(loss))
    found["norms"].append(float(norm))
    log(self, number, loss, most, norm, extra_metrics=extra_metrics)


def note_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
    if not found["losses"]:
        whole = [getattr(param.grad, "full_tensor", lambda grad=param.grad: grad)() for param in parameters(self)]
        found["grads"] += [float(grad.double().norm()) for grad in whole]
    return step(self, *args, **kwargs)


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


MetricsProcessor.log, torch.optim.AdamW.step = note, note_gradients
torch.set_num_threads(1)
before = names_of_torch()
rank = None
train.main()
now = names_of_torch()
changed = [name for name, value in before.items() if now[name] is not value]
assert not changed, changed
import os  # noqa: E402

if os.environ["RANK"] == "0":
    RESULT.write_text(json.dumps(found))
