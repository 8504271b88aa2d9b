"""JupyterLab as a process, and Chromium in front of it: browser tests and `bench/overhead/first_view.py` share it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # machines without playwright run the other tests
    from playwright.sync_api import Browser, Page

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
START_S = 300
MEASURED_UNTIL_STOPPED = """
from tracefuse.measure import rounds
rounds.TIGHT, rounds.MAX_ROUNDS = 0.0, 10**9
"""
"""For a notebook of which a test wants to see the measuring: on a quiet machine it is over before a browser has looked."""
IS_READY = "() => window.jupyterapp?.shell?.currentWidget?.sessionContext?.isReady === true"
RUN_ALL = """async () => {
    const panel = window.jupyterapp.shell.currentWidget;
    await panel.context.ready;
    await panel.sessionContext.ready;
    await window.jupyterapp.commands.execute("notebook:run-all-cells");
    while (panel.sessionContext.session?.kernel?.status !== "idle") await new Promise((done) => setTimeout(done, 25));
    const outputs = [...panel.content.model.cells].flatMap((cell) => cell.sharedModel.outputs ?? []);
    return outputs.filter((o) => o.output_type === "error").map((o) => `${o.ename}: ${o.evalue}`);
}"""
# A kernel that is not up yet may never answer; the server ends it with itself.
SHUT_DOWN = """() => Promise.race([
    window.jupyterapp.shell.currentWidget.sessionContext.shutdown(),
    new Promise((done) => setTimeout(done, 10000)),
])"""


def chromium() -> str | None:
    """The path of an installed Chromium. Playwright's own download is never used."""
    return next((path for name in CHROMIUM_NAMES if (path := shutil.which(name))), None)


@contextmanager
def browsing() -> Iterator[Browser]:
    """A running Chromium without a screen."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium(), args=CHROMIUM_FLAGS)
        yield running
        running.close()


@dataclass
class Lab:
    """A JupyterLab at `url`, whose files lie in `root`."""

    url: str
    root: Path

    def open(self, page: Page, name: str) -> None:
        """Go to the notebook `name` and wait until its kernel has started."""
        page.goto(f"{self.url}/doc/tree/{name}?reset", wait_until="domcontentloaded")
        page.wait_for_function(IS_READY)


def _settings(folder: Path, plugin: str, **values: Any) -> None:
    path = folder / f"{plugin}.jupyterlab-settings"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"JupyterLab ended with {process.returncode}:\n{log.read_text()}")
        try:
            urllib.request.urlopen(f"{url}/api/status", timeout=1).read()
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"JupyterLab did not answer in {START_S} s:\n{log.read_text()}")


@contextmanager
def serving(home: Path, python: str = sys.executable) -> Iterator[Lab]:
    """An interpreter's JupyterLab with folders of its own in `home`, so that no setting of this machine's user reaches it."""
    root = home / "root"
    root.mkdir(parents=True)
    _settings(
        home / "settings", "@jupyterlab/apputils-extension/notification", fetchNews="false", checkForUpdates=False
    )
    _settings(home / "settings", "@jupyterlab/notebook-extension/tracker", windowingMode="none")
    folders = {
        "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "IPYTHONDIR": "ipython",
    }  # fmt: skip
    environment = os.environ | {name: str(home / folder) for name, folder in folders.items()}
    port = _free_port()
    command = [
        python, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=",
        f"--ServerApp.root_dir={root}", "--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly",
    ]  # fmt: skip
    log = home / "lab.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        _wait(f"http://127.0.0.1:{port}", process, log)
        yield Lab(f"http://127.0.0.1:{port}", root)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
