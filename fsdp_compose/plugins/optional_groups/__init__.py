"""Groups that a rank may skip: the scheduler of a root that has such groups, and what ranks tell each other."""

from typing import TYPE_CHECKING

from ..._on_demand import on_demand

if TYPE_CHECKING:
    from .skipping_order import check_optional as check_optional
    from .skipping_order import scheduler_of as scheduler_of
else:
    __getattr__ = on_demand(__name__, {"skip_protocol": "", "skipping_order": "check_optional scheduler_of"})
