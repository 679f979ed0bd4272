"""`finetune ui` as a process: it prints an address that works, and Ctrl-C ends it well."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

from suite_plugins.patience import patient
from ui_support import write_run


def test_printed_address_shows_the_runs_and_ctrl_c_ends_the_command_with_0(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "reviews")
    command = [str(Path(sys.executable).parent / "finetune"), "ui", "--port", "0", "--no-cluster"]
    # As a shell starts its background processes.
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        text, _, url = process.stdout.readline().strip().partition(" at ")
        assert text == "Serving runs"
        with build_opener(HTTPCookieProcessor()).open(url, timeout=patient(60)) as page:
            assert b"reviews" in page.read()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=patient(60))
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
