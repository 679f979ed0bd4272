"""`finetune ui` in Debian's Chromium: pages that stay up to date, fit a telephone, and run nothing that a run has
written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import CHROMIUM, WIDTHS
from finetune_contract.choices import Stage
from finetune_operator.cli.cluster.cluster_jobs import Connection
from finetune_operator.cli.local.workspace import locked
from finetune_operator.extras.ui.ui_jobs import ClusterJobs
from suite_plugins.patience import patient
from ui_support import Client, api_server, history_lines, serving, write_run

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (make install)")
from playwright.sync_api import Browser, Page, expect, sync_playwright

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
WAIT = patient(60) * 1000
"""Timeout of the browser's waits, in milliseconds."""
JOB_PAGES = ("/job/team/reviews", "/job/team/broken")
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        expect.set_options(timeout=WAIT)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=WAIT)
        yield browser
        browser.close()


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write_run(folder, "finished", log=f"{HOSTILE}\n" + "a line of the log that is rather long\n" * 60)
    write_run(folder, "going-on", done=(Stage.PREPARE,), steps=3)
    return folder


@pytest.fixture
def client(workspace: Path) -> Iterator[Client]:
    with api_server() as api:
        connection = Connection(api.write_kubeconfig(workspace.parent / "config"))
        with serving(workspace, ClusterJobs(connection)) as client:
            yield client


@pytest.fixture
def page(browser: Browser, client: Client) -> Iterator[Page]:
    """Yield the first page; the test fails if the browser refuses something or a script breaks."""
    complaints: list[str] = []
    context = browser.new_context()
    context.set_default_timeout(WAIT)
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(client.server.url())
    yield page
    context.close()
    assert complaints == []


def points(page: Page) -> int:
    """Return the number of points of the first curve."""
    return len(str(page.locator("#curves polyline").first.get_attribute("points")).split())


def test_the_list_leads_to_runs_and_to_their_comparison(page: Page) -> None:
    assert "token" not in page.url
    expect(page.locator("#runs tbody tr")).to_have_count(2)
    page.get_by_label("Compare finished").check()
    page.get_by_label("Compare going-on").check()
    page.get_by_role("button", name="Compare the selected runs").click()
    expect(page.locator("#curves svg[role=img]").first).to_be_visible()
    page.get_by_role("link", name="finetune").click()
    page.get_by_role("link", name="finished").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("finished")
    expect(page.locator("#curves svg[role=img]").first).to_be_visible()


def test_page_of_a_running_training_follows_its_curve_log_and_end(page: Page, workspace: Path) -> None:
    root = workspace / "going-on"
    page.clock.install()
    with locked(workspace, "going-on"):
        page.get_by_role("link", name="going-on").click()
        expect(page.locator("h1 .badge")).to_have_text("running")
        assert points(page) == 3
        page.locator("#log-prepare summary").click()

        with (root / "history.jsonl").open("a") as file:
            file.write(history_lines(4, first=4))
        with (root / "logs" / "train.log").open("a") as file:
            file.write(f"{HOSTILE}\nstep 7\n")
        page.clock.run_for(3000)
        expect(page.locator("#log-train-lines")).to_contain_text("step 7")
        assert points(page) == 7
        expect(page.locator("#log-prepare-lines")).to_be_visible()
    (root / "failure.json").write_text(
        json.dumps({"class": "DataError", "reason": "MissingColumn", "message": "There is no text.", "stage": "train"})
    )
    page.clock.run_for(3000)
    expect(page.locator("h1 .badge")).to_have_text("failed")
    expect(page.locator("#head")).to_contain_text("There is no text.")
    assert "owned" not in page.title()


def test_choices_stay_while_the_list_is_renewed(page: Page, workspace: Path) -> None:
    page.clock.install()
    page.reload()
    page.get_by_label("Compare finished").check()
    write_run(workspace, "newer")
    page.clock.run_for(3000)
    expect(page.locator("#runs tbody tr")).to_have_count(3)
    expect(page.get_by_label("Compare finished")).to_be_checked()
    expect(page.get_by_label("Compare newer")).not_to_be_checked()


def test_page_reports_a_stopped_server(browser: Browser, workspace: Path) -> None:
    context = browser.new_context()
    page = context.new_page()
    with serving(workspace) as client:
        page.clock.install()
        page.goto(client.server.url())
        expect(page.locator("#gone")).to_be_hidden()
    page.clock.run_for(3000)
    expect(page.locator("#gone")).to_be_visible()
    context.close()


def test_report_of_a_run_runs_no_script(browser: Browser, client: Client, workspace: Path) -> None:
    (workspace / "finished" / "report.html").write_text(
        "<!DOCTYPE html><title>a</title><script>document.title='owned'</script><p>b"
    )
    context = browser.new_context()
    page = context.new_page()
    page.goto(client.server.url())
    page.goto(f"http://127.0.0.1:{client.server.port}/run/finished/report")
    assert (page.title(), page.locator("p").inner_text()) == ("a", "b")
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_the_screen(page: Page, client: Client, scheme: str) -> None:
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    base = f"http://127.0.0.1:{client.server.port}"
    for path in ("/", "/run/finished", "/run/going-on", "/compare?run=finished&run=going-on", *JOB_PAGES):
        answer = page.goto(base + path)
        assert answer is not None
        if path in JOB_PAGES:
            expect(page.locator("#stages tbody tr").first).to_be_visible()
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 800})
            wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wider == 0, (path, width)


def test_pages_are_whole_without_scripts(browser: Browser, client: Client) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(client.server.url())
    page.goto(f"http://127.0.0.1:{client.server.port}/run/finished")
    expect(page.locator("#curves svg[role=img]").first).to_be_visible()
    page.locator("#log-train summary").click()
    expect(page.locator("#log-train-lines")).to_contain_text("a line of the log")
    context.close()
