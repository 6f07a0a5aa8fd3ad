"""A browser that ends at once is started again; of one that never starts, what it printed is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients import chromium


@pytest.fixture
def browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of Chromium that prints, and ends."""
    program = tmp_path / "browser"
    program.write_text(f'#!/bin/sh\necho started >> "{tmp_path / "starts"}"\necho no display >&2\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setattr(chromium, "CHROMIUM", str(program))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return program


def test_a_browser_that_never_starts_is_shown(browser: Path, tmp_path: Path) -> None:
    expected = "Chromium did not start 3 times: .*it printed: no display"
    with pytest.raises(AssertionError, match=expected), chromium.open_page("about:blank", tmp_path):
        pass
    assert (tmp_path / "starts").read_text().split() == ["started"] * 3


@pytest.mark.skipif(chromium.CHROMIUM is None, reason="there is no chromium: its second start is not tested")
def test_a_browser_is_started_again(browser: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path("/usr/bin/chromium")
    once = f'[ "$(wc -l < "{tmp_path / "starts"}")" -gt 1 ] && exec {real} "$@"\nexit 1\n'
    browser.write_text(browser.read_text().replace("exit 1\n", once))
    with chromium.open_page("data:text/html,<p>here</p>", tmp_path) as page:
        page.wait_for("document.body?.innerText === 'here'", 60)
    assert (tmp_path / "starts").read_text().split() == ["started"] * 2
