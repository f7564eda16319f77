"""Streams, progress, Ctrl-C."""

import io
import os
import signal
import sys

import pytest

from yeoul.cli.terminal import interrupt_noted, progress, write


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_pipe_gets_exactly_what_the_model_said(capsys):
    write("a\x1b[31m\tb\r\n")
    assert capsys.readouterr().out == "a\x1b[31m\tb\r\n"


def test_a_terminal_gets_no_control_characters(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    write("a\x1b[31m\tb\x07\x9b\nč😀")
    assert terminal.getvalue() == "a\ufffd[31m\tb\ufffd\ufffd\nč😀"


def test_ctrl_c_is_noted_once_and_raises_the_second_time():
    before = signal.getsignal(signal.SIGINT)
    with interrupt_noted() as interrupt:
        assert not interrupt.pressed
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.pressed
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_progress_elsewhere_is_a_few_plain_lines(capsys):
    with progress("model", "MB", 1e6) as show:
        for done in range(0, 50_000_001, 1_000_000):
            show(done, 50_000_000)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 11
    assert lines[0] == "model: 0 of 50 MB" and lines[-1] == "model: 50 of 50 MB"


def test_progress_on_a_terminal_is_a_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress("model", "MB", 1e6) as show:
        show(1_000_000, 2_000_000)
        show(2_000_000, 2_000_000)
    shown = terminal.getvalue()
    assert "model" in shown and "2 of 2 MB" in shown and "\x1b[" in shown
