"""How long a step takes, and which settings take least: a model of time on top of ``inspect``'s dry run.

``hardware`` describes machines, ``schedule`` tells a step's time from its events. ``setting`` is one way to shard a
model, ``search`` tries many, and ``answer`` is what it found. ``calibration`` measures a machine, and turns the times
into ``hardware``: ``workload`` is what it measures."""

from .answer import Rejected as Rejected
from .answer import Result as Result
from .answer import Tuning as Tuning
from .calibration import calibrate as calibrate
from .calibration import write_hardware as write_hardware
from .hardware import BUSY as BUSY
from .hardware import PRESETS as PRESETS
from .hardware import SOFTWARE as SOFTWARE
from .hardware import Curve as Curve
from .hardware import Device as Device
from .hardware import Hardware as Hardware
from .hardware import Level as Level
from .hardware import Network as Network
from .hardware import hardware_of as hardware_of
from .hardware import read_hardware as read_hardware
from .schedule import Schedule as Schedule
from .schedule import Span as Span
from .schedule import schedule as schedule
from .search import tune as tune
from .setting import Setting as Setting
from .setting import apply_setting as apply_setting
from .workload import Workload as Workload
