"""Helpers shared by the tests: witnesses that count processes without asking the code under test."""

from __future__ import annotations
