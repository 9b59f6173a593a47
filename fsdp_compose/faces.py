"""The one factory of sharded faces: what users, optimizers and checkpoints see of a sharded parameter.

A face is a leaf ``nn.Parameter`` over this rank's run of the parameter inside the shard. Today it is a plain local
view. The runtime reads and writes shards and never calls an operation on a face, so the kind of tensor that a face
is can change here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.nn as nn

# Where a face or an original parameter remembers the group that owns it: a (module label, FQN) pair of strings.
OWNER_ATTRIBUTE = "_fsdp_compose_owner"


def make_face(local: torch.Tensor, original: nn.Parameter, fqn: str) -> nn.Parameter:
    """A sharded face over ``local``, a view of the shard, with the attributes the user had set on ``original``.

    Its gradients arrive without autograd, so that a gradient hook would never run: registering one raises.
    """
    face = nn.Parameter(local, requires_grad=original.requires_grad)
    face.__dict__.update(original.__dict__)
    for name in _HOOK_METHODS:
        face.__dict__[name] = partial(_refuse_hook, name, fqn)
    return face


def copy_attributes(face: nn.Parameter, to: nn.Parameter) -> None:
    """Give another parameter the attributes that the user has set on ``face``."""
    to.__dict__.update({key: value for key, value in face.__dict__.items() if key not in _HOOK_METHODS})


_HOOK_METHODS = ("register_hook", "register_post_accumulate_grad_hook")


def _refuse_hook(method: str, fqn: str, *_: Any) -> None:
    raise ValueError(
        f"{method}() on the sharded parameter {fqn}: gradient hooks on sharded parameters are not supported and would "
        "never run; look at .grad after backward"
    )


def rebind_face(face: nn.Parameter, local: torch.Tensor) -> None:
    """Make ``face`` a view of another shard, keeping the object."""
    face.data = local


def face_local(face: nn.Parameter) -> torch.Tensor:
    """The local elements behind ``face``, detached."""
    return face.detach()


def face_memory(faces: Sequence[nn.Parameter]) -> tuple[list[int], set[torch.dtype]]:
    """Where the faces' elements are: differs from an earlier answer when somebody gave a face other memory
    (``module.to()``, ``to_empty()``, ``p.data = ...``). Empty faces have no address; their dtype must do."""
    return [*map(_data_ptr, faces)], {*map(_dtype, faces)}


_data_ptr = torch.Tensor.data_ptr
_dtype = attrgetter("dtype")


def make_gradient(local: torch.Tensor) -> torch.Tensor:
    """What ``face.grad`` holds, over ``local``, a view of the flat gradient."""
    return local
