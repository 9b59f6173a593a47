"""FSDP2's public names (``torch.distributed.fsdp``), implemented by fsdp_compose. Change one import, and the code
around the model keeps working::

    from fsdp_compose.drop_in import FSDPModule, MixedPrecisionPolicy, fully_shard

``install()`` does the same for code that you cannot edit. The policies are torch's own classes. These names differ
from the package's own: ``fully_shard`` takes FSDP2's keywords. A sharded module has FSDP2's methods and passes
``isinstance(module, FSDPModule)``, also with torch's own class of that name. Shard boundaries fall between rows. The
default mesh's dimension is named "fsdp". A ``reduce_dtype`` left out means what it means in the installed torch.

This annex uses the public functions; only ``integrations`` imports it.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, OffloadPolicy

from ..extension import UnshardHandle
from ..extension import register_forward_method as register_fsdp_forward_method
from .install import install, installed, uninstall
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
    "installed",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "uninstall",
]
