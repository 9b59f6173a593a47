"""The public names of ``torch.distributed.fsdp``, FSDP2's, by fsdp_compose: change one import, and what stands around
the model goes on::

    from fsdp_compose.drop_in import FSDPModule, MixedPrecisionPolicy, fully_shard

``install()`` does it for code that cannot be edited. The policies are torch's own classes. What differs from the
package's own names: ``fully_shard`` takes FSDP2's keywords; a sharded module has FSDP2's methods, and is an
``FSDPModule`` by ``isinstance()`` without being of another class; parameters are cut between rows; a mesh made by
default is named "fsdp"; a ``reduce_dtype`` that is left out means what it means in the torch that is installed.

The wing imports what users call; nothing imports it.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, OffloadPolicy

from ..api import UnshardHandle
from ..api import register_forward_method as register_fsdp_forward_method
from .install import install, uninstall
from .module import FSDPModule, GradientReductionHandle, share_comm_ctx
from .sharding import MixedPrecisionPolicy, fully_shard

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "install",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "uninstall",
]
