"""Transports of the user and formats on the wire: ``set_transport()`` and ``set_wire_formats()``."""

from .setters import change_meshes as change_meshes
from .setters import refuse_unless_between_iterations as refuse_unless_between_iterations
from .setters import set_transport as set_transport
from .setters import set_wire_formats as set_wire_formats
from .wire import WireFormat as WireFormat
from .wire import finish_with as finish_with
