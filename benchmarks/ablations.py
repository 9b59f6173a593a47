"""Single checks of fsdp_compose, and how to switch them off: what ``host_overhead.py --ablate`` measures."""

from __future__ import annotations

from typing import Any

from fsdp_compose.core.comm import control_exchange
from fsdp_compose.core.flat import gradient
from fsdp_compose.core.group import change_detection, kept_tensors, state
from fsdp_compose.core.runtime import hooks

# What is replaced, of a class or a module, and what it then answers.
ABLATIONS: dict[str, list[tuple[Any, str, Any]]] = {
    "what the user changed since (slots, memory, requires_grad)": [
        (change_detection.ChangeDetector, "is_unchanged", True)
    ],
    "gradients that came late, or past the outputs": [(change_detection.ChangeDetector, "has_unsharded_grads", False)],
    "gradients put on the sharded parameters meanwhile": [(change_detection.ChangeDetector, "has_grads", False)],
    "backward that entered past the outputs": [(state._FSDPState, "refuse_unseen_backward", None)],
    "step between forward and backward": [(state._FSDPState, "check_versions", None)],
    "parameter edited or replaced inside forward": [(change_detection.ChangeDetector, "was_forward_unchanged", True)],
    "tensors that forward keeps on modules": [
        (kept_tensors.KeptTensors, "new_ones", []),
        (change_detection.ChangeDetector, "newly_kept", []),
    ],
    "values that functional_call() substitutes for parameters": [(hooks, "is_functional_call", False)],
    "requires_grad set between forward and backward": [(change_detection.ChangeDetector, "was_toggled", False)],
    "gradient that the user holds": [(gradient.GradientMemory, "_is_held_elsewhere", False)],
    "control exchange (its bytes only: there are no ranks to talk to)": [
        (control_exchange.ControlExchange, "start", None),
        (control_exchange.ControlExchange, "wait", True),
    ],
}


def ablate(name: str) -> None:
    """Switch a check off in this process, permanently; before any model is built."""
    for owner, method, answer in ABLATIONS[name]:
        setattr(owner, method, lambda *_, answer=answer: answer)
