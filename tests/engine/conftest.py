"""Crash dumps of the engine tests go to the test's own folder."""

import tempfile

import pytest


@pytest.fixture(autouse=True)
def crash_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path
