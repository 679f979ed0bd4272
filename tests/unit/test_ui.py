"""`finetune ui` over real HTTP: answered requests, pages of runs in any state, and nothing outside of the workspace."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from html import unescape
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_command import finetune
from finetune_contract.browser_requests import foreign
from finetune_contract.choices import Stage
from finetune_operator.cli.local.workspace import locked
from finetune_operator.extras.ui.pages import Pages
from finetune_operator.extras.ui.reading import Content
from finetune_operator.extras.ui.request_checks import Keys
from finetune_operator.extras.ui.run_reading import readable_lines
from finetune_operator.extras.ui.ui_runs import Workspace
from finetune_operator.extras.ui.ui_server import MOST_CONNECTIONS, Server
from process_support import http_fuzz
from suite_plugins.fuzz import examples
from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until
from ui_support import Client, history_lines, serving, write_run


def text_of(html: str) -> str:
    """Return the text of a page, in one line."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs in every state, and other files that may lie beside them."""
    folder = tmp_path_factory.mktemp("ui") / "runs"
    write_run(folder, "finished")
    write_run(folder, "stopped", done=(Stage.PREPARE,))
    failed = write_run(folder, "failed", done=(Stage.PREPARE,))
    failure = {"class": "OutOfMemory", "reason": "HostMemory", "message": "It took <all>.", "hint": "Take less.",
               "stage": "train", "rank": 1, "exitCode": 137}  # fmt: skip
    (failed.root / "failure.json").write_text(json.dumps(failure))
    write_run(folder, "planned", done=()).logs.joinpath("prepare.log").unlink()
    broken = folder / "broken"
    broken.mkdir()
    (broken / "plan.json").write_text('{"name": "bro')
    (broken / "metrics.json").write_text("[" * 100_000)
    (broken / "history.jsonl").write_text(
        '{"step": 1, "loss": 1e999}\n[]\n{"step": 2' + "0" * 400 + ', "loss": 1}\n{"st'
    )
    (broken / "failure.json").mkdir()
    (folder / "quiet").mkdir()
    (folder / "quiet" / "notes.txt").write_text("no run")
    return folder


@pytest.fixture(scope="module")
def client(workspace: Path) -> Iterator[Client]:
    with serving(workspace) as client:
        yield client


# ------------------------------------------------------------------------------------------------------------- access


def test_the_server_listens_on_the_local_address_only(client: Client) -> None:
    assert client.server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "attacker.example:{port}"},
        {"Host": "127.0.0.1.attacker.example:{port}"},
        {"Host": "127.0.0.1"},
        {"Host": "127.0.0.1:1"},
        {"Host": ""},
        {"Host": None},
        {"Origin": "http://attacker.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors", "Sec_Fetch_Dest": "script"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors", "Sec_Fetch_Dest": "empty"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "iframe"},
    ],
    ids=str,
)
def test_requests_of_other_sites_are_refused_even_with_the_token(
    client: Client, headers: dict[str, str | None]
) -> None:
    own = {name: value and value.format(port=client.server.port) for name, value in headers.items()}
    for path in ("/", f"/?token={client.server.keys.token}", "/static/ui.js"):
        reply = client.send(path, **own)
        assert reply.code in (403, 421)
        assert b"finished" not in reply.body
        assert "Set-Cookie" not in reply.headers


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LocalHost"])
def test_both_local_names_are_answered(client: Client, name: str) -> None:
    assert client.send("/", Host=f"{name}:{client.server.port}").code == 200


def test_a_link_that_is_opened_from_elsewhere_is_answered(client: Client) -> None:
    opened = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert client.send("/", **opened).code == 200


@pytest.mark.parametrize(
    "path", ["/", "/run/finished", "/run/finished/report", "/run/finished/log/train", "/static/ui.js"]
)
@pytest.mark.parametrize("cookie", [None, "finetune-ui-{port}=guess", "other={token}", "\x01=;;"])
def test_nothing_is_answered_without_the_token(client: Client, path: str, cookie: str | None) -> None:
    sent = cookie and cookie.format(port=client.server.port, token=client.server.keys.token)
    reply = client.send(path, Cookie=sent)
    assert reply.code == 403
    assert "finetune ui has printed" in reply.text


def test_the_token_of_the_url_becomes_a_cookie_and_leaves_the_address(client: Client) -> None:
    url = urlsplit(client.server.url())
    reply = client.send(f"/run/finished?a=1&{url.query}", Cookie=None)
    assert (reply.code, reply.headers["Location"]) == (303, "/run/finished?a=1")
    cookie = reply.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    assert client.send("/", Cookie=cookie.partition(";")[0]).code == 200
    assert client.send("//evil.example/?" + url.query, Cookie=None).headers["Location"] == "/evil.example/"
    for wrong in ("wrong", "", "%ff%00", "%f0%9f%98%80"):
        assert client.send(f"/?token={wrong}", Cookie=None).code == 403


def test_a_token_for_the_command_line_of_a_browser_is_good_once() -> None:
    keys = Keys()
    once = keys.for_one_use()
    assert once != keys.token
    assert [keys.fits(once), keys.fits(once), keys.fits(keys.token), keys.fits(keys.token)] == [True, False, True, True]


def test_refused_host_gets_a_hint_at_the_working_tunnel() -> None:
    refused = foreign({"Host": "localhost:9000"}, 8642)
    assert refused is not None
    assert "ssh -L 8642:127.0.0.1:8642" in refused.text


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "FOO"])
def test_only_reading_methods_are_answered(client: Client, method: str) -> None:
    reply = client.send("/", method)
    assert (reply.code, reply.headers["Allow"]) == (405, "GET, HEAD")


def test_head_has_the_headers_of_get_and_no_body(client: Client) -> None:
    get, head = client.send("/static/ui.css"), client.send("/static/ui.css", "HEAD")
    assert head.code == 200
    assert head.body == b""
    assert head.headers["Content-Length"] == str(len(get.body)) == get.headers["Content-Length"]


@pytest.mark.parametrize(
    "path", ["/", "/run/finished", "/run/gone", "/compare", "/static/ui.js", "/?token=x", "/run/finished/report"]
)
def test_every_answer_forbids_foreign_content_framing_and_sniffing(client: Client, path: str) -> None:
    headers = client.send(path).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "script-src 'unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"


def test_no_page_holds_a_script_or_style_of_its_own(client: Client) -> None:
    for page in (client.page(), client.page("run", "finished"), client.page("compare")):
        assert re.findall(r"<script(?! src=\"/static/ui.js\" defer>)", page) == []
        assert re.search(r"<style|\sstyle=|\son\w+=", page) is None


def test_a_report_is_sandboxed(client: Client) -> None:
    reply = client.send("/run/finished/report")
    assert reply.code == 200
    assert b"<p>report</p>" in reply.body
    assert reply.headers["Content-Security-Policy"].startswith("sandbox; default-src 'none'")


def test_an_unchanged_page_is_not_sent_again(client: Client) -> None:
    etag = client.send("/run/finished").headers["Etag"]
    reply = client.send("/run/finished", If_None_Match=etag)
    assert (reply.code, reply.body) == (304, b"")


def test_a_request_that_is_none_is_answered_and_ends(client: Client) -> None:
    with socket.create_connection(("127.0.0.1", client.server.port), timeout=patient(60)) as connection:
        connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b"Bad Request" in connection.recv(4096)
    assert client.send("/" + "a" * 70_000).code == 414


def test_error_of_one_page_is_reported_and_others_still_work(
    client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(Workspace, "plan")
    reply = client.send("/run/finished")
    assert (reply.code, reply.text) == (
        500,
        "This page cannot be rendered; the terminal of finetune ui shows the error.\n",
    )
    assert "/run/finished: AttributeError" in capsys.readouterr().err
    assert client.send("/").code == 200


# -------------------------------------------------------------------------------------------------------------- pages


def test_the_list_shows_the_runs_with_their_states(client: Client) -> None:
    page = client.page()
    rows = dict(re.findall(r'<a href="/run/(\w+)">.*?<span class="badge [^"]*">([^<]+)</span>', page, re.DOTALL))
    assert rows == {
        "finished": "succeeded",
        "stopped": "interrupted",
        "failed": "failed",
        "planned": "not started",
        "broken": "damaged",
    }
    assert "accuracy 0.9125" in text_of(page)


def test_the_page_of_a_run_shows_metrics_gate_stages_curves_log_and_plan(client: Client) -> None:
    text = text_of(client.page("run", "finished"))
    for part in (
        "finished succeeded",
        "accuracy 0.9125 0.5",
        "accuracy at least 0.8, is 0.9125 met",
        "train done 0:30",
        "Loss",
        "Learning rate",
        "step 1 loss 0.7",
        "hf://org/model",
        "Reasons",
    ):
        assert part in text


def test_failed_run_shows_cause_and_hint_and_interrupted_run_its_step(client: Client) -> None:
    failed, stopped = text_of(client.page("run", "failed")), text_of(client.page("run", "stopped"))
    assert "OutOfMemory (HostMemory) in train, rank 1, exit code 137 It took <all>. Take less." in failed
    assert "train failed" in failed
    assert "train stopped" in stopped
    assert "25 % step 10/40 loss 0.500" in stopped


def test_damaged_run_lists_its_unreadable_files(client: Client) -> None:
    text = text_of(client.page("run", "broken"))
    assert "plan.json is damaged: it is not JSON." in text
    assert "failure.json cannot be read: it is not a regular file." in text


def test_compare_page_shows_runs_and_differing_settings(tmp_path: Path) -> None:
    write_run(tmp_path, "first")
    other = write_run(tmp_path, "second", spec={"training": {"learningRate": 0.001, "seed": 7}})
    metrics = json.loads(other.metrics.read_text())
    other.metrics.write_text(json.dumps({**metrics, "evaluate": {"accuracy": 0.5, "loss": 1e999, "f1": 10**400}}))
    with serving(tmp_path) as client:
        page = client.send("/compare?run=first&run=second&run=gone&run=first").text
    text = text_of(page)
    assert re.search(r'<td class="number best">0.9125</td><td class="number">0.5000</td>', page)
    assert "training.seed 42 7" in text
    assert "training.learningRate" in text
    assert "training.weightDecay" not in text
    assert page.count("<polyline") >= 4


def test_a_run_that_works_is_running_until_its_process_lets_go(tmp_path: Path) -> None:
    write_run(tmp_path, "first", done=(Stage.PREPARE,))
    runs = Workspace(tmp_path)
    with locked(tmp_path, "first"):
        [run] = runs.runs().runs
        assert (run.state, run.stage) == ("running", "train")
    [run] = runs.runs().runs
    assert run.state == "interrupted"


def test_looking_at_a_workspace_turns_no_run_away(tmp_path: Path) -> None:
    write_run(tmp_path, "first", done=(Stage.PREPARE,))
    runs = Workspace(tmp_path)
    for _ in range(3):
        runs.runs()
        with locked(tmp_path, "first"):
            runs.runs()


def test_curves_follow_a_growing_restarted_or_cut_history(tmp_path: Path) -> None:
    paths = write_run(tmp_path, "first", steps=3)
    runs = Workspace(tmp_path)
    assert [row["step"] for row in runs.history("first")[0]] == [1, 2, 3]
    with paths.history.open("a") as file:
        file.write(history_lines(2, first=4) + '{"step": 6, "lo')
    assert [row["step"] for row in runs.history("first")[0]] == [1, 2, 3, 4, 5]
    paths.history.write_text(history_lines(1))
    assert [row["step"] for row in runs.history("first")[0]] == [1]


def test_the_end_of_a_huge_history_and_of_a_huge_log_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune_operator.extras.ui.run_reading.HISTORY_BYTES", 1000)
    paths = write_run(tmp_path, "first", steps=50)
    (paths.logs / "train.log").write_text("".join(f"line {number}\n" for number in range(20_000)))
    runs = Workspace(tmp_path)
    rows, cut = runs.history("first")
    assert cut
    assert 3 < len(rows) < 50
    assert rows[-1]["step"] == 50
    log = runs.log("first", "train")
    assert log is not None
    assert log.cut
    assert len(log.lines) == 400
    assert log.lines[-1] == "line 19999"


def test_long_history_is_sampled_with_its_evaluations_and_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune_operator.extras.ui.run_reading.HISTORY_LINES", 10)
    paths = write_run(tmp_path, "first", steps=99)
    with paths.history.open("a") as file:
        file.write('{"step": 99, "eval_loss": 0.5}\n' + history_lines(101, first=100))
    rows, cut = Workspace(tmp_path).history("first")
    steps = [row["step"] for row in rows if "loss" in row]
    assert not cut
    assert (steps[0], steps[1] - steps[0], steps[-1]) == (1, 21, 200)
    assert [row["eval_loss"] for row in rows if "eval_loss" in row] == [0.5]


def test_a_log_is_shown_as_a_terminal_leaves_it() -> None:
    raw = b"\x1b[31mred\x1b[0m\n10%\r 50%\r100%\r\n\x1b]8;;http://x\x07link\x1b]8;;\x07\nbell\x07\xff\n"
    assert readable_lines(Content(raw)) == ["red", "100%", "link", "bell\ufffd\ufffd"]


PATHS = ["/", "/run/finished", "/run/failed", "/run/broken/report", "/run/finished/log/train", "/compare?run=finished",
         "/job/team/a", "/static/ui.css", "/?token=x"]  # fmt: skip


@examples(60)
@given(sent=http_fuzz.sendings(PATHS, {}), opened=st.booleans())
def test_no_bytes_cause_a_server_error(client: Client, sent: bytes, opened: bool) -> None:
    own = f"Host: 127.0.0.1:{client.server.port}\r\nCookie: {client.own_cookie()}"
    sent = sent.replace(b"Host: x", own.encode()).replace(b"POST", b"GET") if opened else sent
    statuses = http_fuzz.statuses(http_fuzz.answer(client.server.port, sent))
    assert statuses <= http_fuzz.ALLOWED | {303, 421}, sent[:500]
    assert client.send("/static/icon.svg").code == 200


def test_hostile_names_logs_and_settings_are_text(tmp_path: Path) -> None:
    evil = '<img src=x onerror="alert(1)"></script><script>alert(2)</script>{{ 7*7 }}'
    paths = write_run(
        tmp_path, "first", log=f"{evil}\n", spec={"dataset": {"uri": "hf://org/reviews", "columns": {"text": evil}}}
    )
    paths.metrics.write_text(json.dumps({"evaluate": {evil: 0.5}}))
    paths.history.write_text("".join(json.dumps({"step": step, f"eval_{evil}": 0.5 * step}) + "\n" for step in (1, 2)))
    paths.root.rename(tmp_path / evil.replace("/", "|"))
    odd = tmp_path / os.fsdecode(b"odd \xff name")
    odd.mkdir()
    (odd / "job.json").write_text("{}")
    with serving(tmp_path) as client:
        for page in (client.page(), client.page("run", evil.replace("/", "|")), client.page("compare")):
            assert "<img" not in page
            assert "<script>" not in page
            assert "{{ 7*7 }}" in page
        [link] = re.findall(r'href="(/run/odd[^"]*)"', client.page())
        assert client.send(link).code == 200


def test_secrets_are_hidden_in_every_page_and_log(tmp_path: Path) -> None:
    token = "hf_" + "a1B2c3D4" * 4
    log = f"token is {token}\nAuthorization: Bearer abcdefgh12345678\npassword=hunter22\nhttps://user:pa55word@host/x\n"
    paths = write_run(tmp_path, "first", log=log)
    failure = {"class": "ProgramError", "reason": "X", "message": f"refused {token}", "stage": "train", "logTail": log}
    (paths.root / "failure.json").write_text(json.dumps(failure))
    document = json.loads(paths.job.read_text()) | {"env": [{"name": "API_TOKEN", "value": "sesame-open"}]}
    paths.job.write_text(json.dumps(document))
    (paths.logs / "predict.log").write_text("the program printed sesame-open\n")
    with serving(tmp_path) as client:
        shown = client.page("run", "first") + client.page("run", "first", "log", "train") + client.page()
        shown += client.page("run", "first", "log", "predict")
    for secret in (token, "abcdefgh12345678", "hunter22", "pa55word", "sesame-open"):
        assert secret not in shown


# ------------------------------------------------------------------------------------------------ the workspace's edge


@pytest.mark.parametrize(
    "path",
    [
        "/run/..",
        "/run/../../etc/passwd",
        "/run/%2e%2e",
        "/run/..%2f..%2fetc",
        "/run/%2fetc",
        "/run/.",
        "/run/",
        "/run/quiet",
        "/run/finished%00",
        "/run/finished/log/..%2f..%2fplan.json",
        "/run/finished/log/../plan.json",
        "/run/finished/log/serve",
        "/run/finished/log/",
        "/run/finished/../stopped",
        "/static/..%2fserver.py",
        "/static/../ui_server.py",
        "/static/",
        "/job/default/any",
        "/etc/passwd",
    ],
)
def test_paths_that_lead_elsewhere_find_nothing(client: Client, path: str) -> None:
    reply = client.send(path)
    assert reply.code == 404
    assert "There is no such page" in reply.text


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    secret = write_run(outside, "secret", log="SECRET\n")
    (secret.root / "report.html").write_text("SECRET")
    runs = tmp_path / "runs"
    paths = write_run(runs, "first")
    (runs / "linked").symlink_to(secret.root)
    for file in (paths.report, paths.logs / "train.log", paths.metrics):
        file.unlink()
        file.symlink_to(secret.root / file.relative_to(paths.root))
    (paths.logs / "predict.log").unlink()
    os.mkfifo(paths.logs / "predict.log")
    other = write_run(runs, "second")
    for file in other.logs.iterdir():
        file.unlink()
    other.logs.rmdir()
    other.logs.symlink_to(secret.logs)
    with serving(runs) as client:
        assert client.send("/run/linked").code == 404
        assert "linked" not in client.page()
        assert client.send("/run/first/report").code == 404
        shown = [client.page("run", "first"), client.page("run", "second"), client.page()]
        shown += [client.send(f"/run/{name}/log/{stage}").text for name in ("first", "second") for stage in Stage]
    assert all("SECRET" not in each for each in shown)


def state_of(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Return mode, time of change and content hash of everything below a folder."""
    return {
        str(path): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in (folder, *sorted(folder.rglob("*")))
    }


def test_nothing_is_written(workspace: Path, client: Client) -> None:
    before = state_of(workspace)
    for page in ("/", "/compare?run=finished&run=stopped", "/run/finished/report", "/run/finished/log/train"):
        assert client.send(page).code == 200
    for name in ("finished", "stopped", "failed", "planned", "broken"):
        client.page("run", name)
    client.send("/run/finished", "POST")
    assert state_of(workspace) == before


def test_a_workspace_that_is_not_there_is_an_empty_list_and_stays_away(tmp_path: Path) -> None:
    with serving(tmp_path / "runs") as client:
        assert "There are no runs in" in text_of(client.page())
    assert not (tmp_path / "runs").exists()


def ended(connection: socket.socket) -> bool:
    """Wait until the server ends the connection."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def takes_a_byte(connection: socket.socket) -> bool:
    """Send a byte; return whether the server still takes them."""
    try:
        return connection.send(b"a") == 1
    except OSError:
        return False


def test_slow_connections_end_and_keep_nobody_out(tmp_path: Path) -> None:
    with serving(tmp_path, life_seconds=3.0) as client, ExitStack() as held:
        address = ("127.0.0.1", client.server.port)
        slow = [
            held.enter_context(socket.create_connection(address, timeout=patient(30)))
            for _ in range(MOST_CONNECTIONS + 20)
        ]
        for connection in slow:
            connection.send(b"GET / HTTP/1.1\r\nX: ")
        assert "There are no runs in" in text_of(client.page())
        # The first make room for others; the rest end when their time is up, also one that sends on.
        assert all(map(ended, slow[:20]))
        wait_until(lambda: not takes_a_byte(slow[-1]), "a connection that sends on is ended")
        assert all(map(ended, slow[20:-1]))
        assert "There are no runs in" in text_of(client.page())


# ------------------------------------------------------------------------------------------------------------ command


def test_taken_port_is_reported_with_a_hint(tmp_path: Path) -> None:
    with Server(Pages(Workspace(tmp_path), None), 0) as other:
        ran = finetune("ui", "--port", str(other.port), "--no-cluster", folder=tmp_path)
    assert ran.returncode == 1
    assert f"--port {other.port}: cannot listen on 127.0.0.1" in ran.stderr
    assert "--port 0" in ran.stderr


def test_options_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    ran = finetune("ui", "--no-cluster", "-n", "team", folder=tmp_path)
    assert ran.returncode == 2
    assert "--namespace and --no-cluster exclude each other" in ran.stderr
    (tmp_path / "file").write_text("")
    assert finetune("ui", "--workspace", "file", folder=tmp_path).returncode == 2
    write_run(tmp_path, "one")
    ran = finetune("ui", "--workspace", "one", folder=tmp_path)
    assert ran.returncode == 2
    assert "is the folder of one run; name its parent folder" in ran.stderr
