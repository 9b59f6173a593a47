"""``plan()``: what is asked, a simulated step, its facts as plain data, and advice, words and pictures made of these.

``fsdp_compose.plan`` builds what is to be simulated, since that takes ``fully_shard``."""

from .advice import advise as advise
from .asked import dtype_of as dtype_of
from .asked import load_factory as load_factory
from .asked import mesh_shape_of as mesh_shape_of
from .asked import world_sizes_of as world_sizes_of
from .picture import check_picture as check_picture
from .result import Plan as Plan
from .step import simulate as simulate
