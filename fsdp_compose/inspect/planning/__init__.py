"""``plan()``: what is asked, a simulated step, its facts as plain data, and advice, words and pictures made of these.

``fsdp_compose.plan`` builds what is to be simulated, since that takes ``fully_shard``."""

from .advice import advise as advise
from .asked import mesh_shape_of as mesh_shape_of
from .facts import Plan as Plan
from .step import simulate as simulate
