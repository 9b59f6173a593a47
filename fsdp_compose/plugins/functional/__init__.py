"""Functional mode: the gather of a group is an operation that autograd differentiates."""

from typing import TYPE_CHECKING

from ..._on_demand import on_demand

if TYPE_CHECKING:
    from .differentiable_gather import gather_parameter as gather_parameter
    from .differentiable_gather import with_inputs as with_inputs
    from .functional_mode import FunctionalMode as FunctionalMode
else:
    __getattr__ = on_demand(
        __name__, {"differentiable_gather": "gather_parameter with_inputs", "functional_mode": "FunctionalMode"}
    )
