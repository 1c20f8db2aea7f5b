"""Loads a page in the engine of a browser, and prints what is there as JSON; a process of its own, for it may crash.

    python browser.py PAGE.html PICTURE.png WIDTH < script.js

The script is an expression; its value is ``value``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtGui import QImage
from PyQt6.QtWebEngineCore import (
    QWebEnginePage,
    QWebEngineProfile,
    QWebEngineSettings,
    QWebEngineUrlRequestInterceptor,
)
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

#: Height of the window before that of the page is known, and at most.
HEIGHT, TALLEST = 900, 12_000
#: Milliseconds between looks at the size, and at what is painted; looks at that at most.
POLL_MS, PAINT_MS, LOOKS = 50, 300, 20
#: Pixels between those that are looked at.
STEP = 3


class Requests(QWebEngineUrlRequestInterceptor):
    """Notes what is asked for, and lets nothing through but files."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def interceptRequest(self, info) -> None:
        url = info.requestUrl()
        self.urls.append(url.toString())
        info.block(url.scheme() != "file")


class Page(QWebEnginePage):
    """Notes what scripts and the engine say."""

    def __init__(self, profile: QWebEngineProfile) -> None:
        super().__init__(profile)
        self.said: list[str] = []

    def javaScriptConsoleMessage(self, level, message, line, source) -> None:
        self.said.append(f"{level.name}: {message} ({source}:{line})")


def colors(image: QImage) -> dict[str, float]:
    """Share of the pixels that have each color, of those in a grid."""
    found: dict[str, int] = {}
    for y in range(0, image.height(), STEP):
        for x in range(0, image.width(), STEP):
            name = image.pixelColor(x, y).name()
            found[name] = found.get(name, 0) + 1
    return {name: n / sum(found.values()) for name, n in found.items()}


def main(page: Path, picture: Path, width: int, script: str) -> None:
    """Loads, measures, takes the picture, prints."""
    app = QApplication(["browser"])
    profile = QWebEngineProfile()
    requests = Requests()
    profile.setUrlRequestInterceptor(requests)
    # Else the engine refuses what a file asks of the network before it is noted.
    settings = profile.settings()
    assert settings is not None
    settings.setAttribute(QWebEngineSettings.WebAttribute.LocalContentCanAccessRemoteUrls, True)
    view = QWebEngineView()
    view.resize(width, HEIGHT)
    shown = Page(profile)
    view.setPage(shown)
    view.show()
    seen: dict[str, object] = {}

    def finish(before: QImage | None = None, looks: int = LOOKS) -> None:
        """Prints when two pictures in a row are equal and painted to the end."""
        image = view.grab().toImage()
        end = image.copy(0, image.height() * 9 // 10, image.width(), image.height() // 10)
        if looks and (image != before or len(colors(end)) < 2):
            QTimer.singleShot(PAINT_MS, lambda: finish(image, looks - 1))
            return
        image.save(str(picture))
        print(json.dumps({**seen, "requests": requests.urls, "console": shown.said, "colors": colors(image)}))
        sys.stdout.flush()
        os._exit(0)  # the engine's processes need not end in order

    def measured(value: object) -> None:
        seen["value"] = value
        shown.runJavaScript("document.documentElement.scrollHeight", resized)

    def resized(height: object) -> None:
        wanted = min(TALLEST, int(float(str(height))))
        view.resize(width, wanted)
        wait(wanted)

    def wait(wanted: int) -> None:
        """Takes the picture when the page has its new size, and time to be painted."""

        def asked(inner: object) -> None:
            done = int(float(str(inner))) == wanted
            QTimer.singleShot(PAINT_MS if done else POLL_MS, finish if done else lambda: wait(wanted))

        shown.runJavaScript("window.innerHeight", asked)

    def loaded(whole: bool) -> None:
        seen["loaded"] = whole
        shown.runJavaScript(script, measured)

    shown.loadFinished.connect(loaded)
    view.load(QUrl.fromLocalFile(str(page.resolve())))
    app.exec()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.stdin.read())
