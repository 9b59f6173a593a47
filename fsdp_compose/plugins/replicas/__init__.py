"""Replicas that come and go: ``set_replicas()``, and the average between them."""

from typing import TYPE_CHECKING

from ..._on_demand import on_demand

if TYPE_CHECKING:
    from .between import ReplicaTransport as ReplicaTransport
    from .between import agree_between as agree_between
    from .setters import broadcast_replicas as broadcast_replicas
    from .setters import set_replicas as set_replicas
else:
    __getattr__ = on_demand(
        __name__, {"between": "ReplicaTransport agree_between", "setters": "broadcast_replicas set_replicas"}
    )
