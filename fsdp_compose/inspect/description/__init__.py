"""``describe(model)``: facts are collected, then shown as text, JSON or HTML by files that know nothing of models."""

from .collecting import collect as collect
from .describe import describe as describe
