"""Imported by the process that ranks are forked from: in what it imports next, asserts show values as under pytest."""

from _pytest.assertion import install_importhook
from _pytest.config import get_config

install_importhook(get_config())  # no public way (pytest 9.2)
