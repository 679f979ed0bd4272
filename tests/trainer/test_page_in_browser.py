"""The page of a model server in Debian's Chromium, with answers as the server writes them.

`--record-page FOLDER` writes pictures of each task, scheme and width; `--record-page docs` those of docs/endpoints.md.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from browser import CHROMIUM
from finetune_trainer.serving.page import FILES, HEADERS, page
from suite_plugins.patience import patient

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (make install)")
from playwright.sync_api import Browser, Page, expect, sync_playwright

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
WAIT = patient(60) * 1000
"""Timeout of the browser's waits, in milliseconds."""
WIDTHS = (360, 768, 1440)
DOCS_PICTURES: Mapping[str, str] = {"entities-light-768": "page.png", "chat-dark-768": "page-chat.png"}
"""Picture -> its name in docs/."""
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
CHAT = {"name": "talker", "task": "text-generation"}
MODELS: Mapping[str, dict[str, Any]] = {
    "classes": {"name": "reviews", "task": "text-classification", "labels": ["negative", "neutral", "positive"]},
    "entities": {"name": "names", "task": "token-classification", "labels": ["PER", "LOC"]},
    "answers": {"name": "reader", "task": "question-answering"},
    "chat": CHAT,
    "summary": {"name": "short", "task": "summarization"},
    "gaps": {"name": "filler", "task": "masked-lm", "mask_token": "<mask>"},
}
SHARES = [
    {"label": "neutral", "score": 0.2},
    {"label": "positive", "score": 0.75},
    {"label": "negative", "score": 0.05},
]
OTHERS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "classes": ({"name": "mails", "task": "text-classification", "labels": ["ham", "spam"]},),
    "chat": ({"name": "writer", "task": "text-generation"},),
}
"""Further models of a server, such as adapters."""
ENTITIES = [
    {"entity_group": "PER", "score": 0.99, "word": "Ada Lovelace", "start": 0, "end": 12},
    {"entity_group": "PER", "score": 0.98, "word": "Charles Babbage", "start": 17, "end": 32},
    {"entity_group": "LOC", "score": 0.97, "word": "London", "start": 36, "end": 42},
]
ANSWER = {"answer": "1830", "score": 0.91, "start": 59, "end": 63}
GAPS = [
    {"sequence": "", "score": 0.6, "token": 1, "token_str": " Paris"},
    {"sequence": "", "score": 0.1, "token": 2, "token_str": " Lyon"},
]
REPLY = "The castle, the old bridge, and the clock."
ANSWERS: Mapping[str, Any] = {
    "classes": [SHARES],
    "entities": ENTITIES,
    "answers": ANSWER,
    "summary": [{"summary_text": "The bridge closes in March."}],
    "gaps": GAPS,
}


def events(*texts: str) -> list[bytes]:
    chunks = [json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}) for text in texts]
    return [f"data: {each}\n\n".encode() for each in [*chunks, "[DONE]"]]


STREAM = events("The castle, ", "the old bridge, ", "and the clock.")


@dataclass
class Answering:
    """A server with prepared answers, as only one in trouble, or with a model that writes markup, would send them."""

    models: list[dict[str, Any]]
    """Metadata of each model, the default one first."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    stream: list[bytes] | None = None
    """Pieces of a stream, in place of a body."""
    hold: threading.Event | None = None
    """Event that a stream waits for after its first piece."""
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(
    metadata: dict[str, Any], body: Any = None, stream: list[bytes] | None = None, others: Sequence[dict[str, Any]] = ()
) -> Iterator[Answering]:
    state = Answering([metadata, *others], body=body, stream=stream)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            files = {f"/page/{name}": found for name, found in FILES.items()}
            files["/"] = (
                page([{"name": model["name"], "parameters": model} for model in state.models]),
                "text/html; charset=utf-8",
            )
            content, media = files.get(self.path, (b"", ""))
            self.send_response(200 if media else 404)
            for name, value in {**HEADERS, "Content-Type": media}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}, sent))
            self.send_response(state.status)
            for name, value in state.headers.items():
                self.send_header(name, value)
            self.end_headers()
            whole = [json.dumps(state.body).encode()] if state.stream is None else state.stream
            for at, chunk in enumerate(whole):
                if at == 1 and state.hold is not None:
                    state.hold.wait(patient(60))
                self.wfile.write(chunk)
                self.wfile.flush()

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        if state.hold is not None:
            state.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        expect.set_options(timeout=WAIT)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=WAIT)
        yield browser
        browser.close()


@pytest.fixture
def view(browser: Browser) -> Iterator[Page]:
    """Yield a page; the test fails if the policy refuses something or a script breaks."""
    complaints: list[str] = []
    context = browser.new_context()
    context.set_default_timeout(WAIT)
    view = context.new_page()
    view.on("console", lambda message: complaints.append(message.text))
    view.on("pageerror", lambda error: complaints.append(str(error)))
    yield view
    refused = [each for each in complaints if "Failed to load resource" not in each]
    context.close()
    assert refused == []


def send_example(view: Page, state: Answering) -> None:
    view.goto(state.url)
    view.get_by_role("button", name="Example").click()
    view.keyboard.press("Control+Enter")
    expect(view.locator("#took")).to_contain_text("Answered in")


def record(view: Page, folder: Path, name: str) -> None:
    if folder.name == "docs":
        if name not in DOCS_PICTURES:
            return
        name = DOCS_PICTURES[name].removesuffix(".png")
    view.evaluate("window.scrollTo(0, 0)")
    view.screenshot(path=folder / f"{name}.png", full_page=True)


def test_labels_have_bars_in_order_of_their_probability(view: Page) -> None:
    with serving(MODELS["classes"], ANSWERS["classes"]) as state:
        send_example(view, state)
        rows = view.locator("#answer tbody tr")
        expect(rows).to_have_text(["positive75.0 %", "neutral20.0 %", "negative5.0 %"])
        values = [rows.nth(at).get_by_role("progressbar").get_attribute("value") for at in range(3)]
        assert values == ["0.75", "0.2", "0.05"]
        path, _, sent = state.requests[0]
        assert (path, sent["parameters"]) == ("/", {"top_k": 3})
        assert sent["inputs"] == view.get_by_label("Text").input_value()


def test_pairs_have_two_fields_and_several_labels_can_be_chosen(view: Page) -> None:
    model = MODELS["classes"] | {"pairs": True, "label_form": "multi_label_classification"}
    both = [
        {"label": "positive", "score": 0.9},
        {"label": "neutral", "score": 0.6},
        {"label": "negative", "score": 0.1},
    ]
    with serving(model, both) as state:
        send_example(view, state)
        expect(view.locator("#answer .figure")).to_have_text("positive, neutral")
        inputs = state.requests[0][2]["inputs"]
        assert inputs == {
            "text": view.get_by_label("First text").input_value(),
            "text_pair": view.get_by_label("Second text").input_value(),
        }


def test_model_of_several_is_chosen_with_the_keyboard(view: Page) -> None:
    with serving(MODELS["classes"], ANSWERS["classes"], others=OTHERS["classes"]) as state:
        send_example(view, state)
        expect(view.locator("#about")).to_have_text("3 labels: negative, neutral, positive")
        view.get_by_label("Model").focus()
        view.keyboard.press("ArrowDown")
        expect(view.locator("h1")).to_have_text("mails")
        expect(view).to_have_title("mails · finetune")
        expect(view.locator("#about")).to_have_text("2 labels: ham, spam")
        expect(view.locator("#answer")).to_contain_text("No answer yet")
        expect(view.get_by_label("Model")).to_be_focused()
        state.body = [{"label": "spam", "score": 0.9}, {"label": "ham", "score": 0.1}]
        view.keyboard.press("Control+Enter")
        expect(view.locator("#answer .figure")).to_have_text("spam")
        assert [(path, sent["parameters"]) for path, _, sent in state.requests] == [
            ("/", {"top_k": 3}), ("/models/mails", {"top_k": 2}),
        ]  # fmt: skip
        view.get_by_text("The request with curl").click()
        expect(view.locator("#curl")).to_contain_text("/models/mails'")
    with serving(MODELS["classes"], ANSWERS["classes"]) as state:
        view.goto(state.url)
        expect(view.get_by_label("Model")).to_be_hidden()


def test_conversation_with_another_model_begins_empty(view: Page) -> None:
    with serving(CHAT, stream=events("One ", "two"), others=OTHERS["chat"]) as state:
        state.hold = threading.Event()
        view.goto(state.url)
        view.get_by_label("Message").fill("Count.")
        view.keyboard.press("Control+Enter")
        expect(view.locator("#talk li").nth(1)).to_contain_text("One")
        view.get_by_label("Model").select_option("writer")
        expect(view.locator("#talk li")).to_have_count(0)
        expect(view.get_by_role("button", name="Send")).to_be_enabled()
        state.hold.set()
        view.get_by_label("Message").fill("Write.")
        view.keyboard.press("Control+Enter")
        expect(view.locator("#talk li").nth(1)).to_contain_text("writer")
        expect(view.locator("#took")).to_contain_text("Answered in")
        assert [(sent["model"], len(sent["messages"])) for _, _, sent in state.requests] == [
            ("talker", 1),
            ("writer", 1),
        ]


def test_regression_shows_a_number(view: Page) -> None:
    with serving(MODELS["classes"] | {"label_form": "regression"}, [{"label": "score", "score": -3.25}]) as state:
        send_example(view, state)
        expect(view.locator("#answer")).to_have_text("-3.25")


def test_entities_are_marked_correctly_after_surrogate_pairs(view: Page) -> None:
    moved = [each | {"start": each["start"] + 2, "end": each["end"] + 2} for each in ENTITIES]
    with serving(MODELS["entities"], moved) as state:
        view.goto(state.url)
        view.get_by_label("Text").fill("🙂 Ada Lovelace met Charles Babbage in London in June 1833.")
        view.get_by_role("button", name="Send").click()
        marks = view.locator("#answer .passage mark")
        expect(marks).to_have_text(["Ada LovelacePER", "Charles BabbagePER", "LondonLOC"])
        expect(view.locator("#answer .legend li")).to_have_text(["LOC 1", "PER 2"])
        state.body = []
        view.get_by_role("button", name="Send").click()
        expect(view.locator("#answer")).to_contain_text("No entities in this text.")


def test_answer_is_marked_in_its_paragraph_and_its_absence_is_shown(view: Page) -> None:
    with serving(MODELS["answers"], ANSWER) as state:
        send_example(view, state)
        expect(view.locator("#answer mark")).to_have_text("1830")
        state.body = {"answer": "", "score": 0.9, "start": 0, "end": 0}
        view.get_by_role("button", name="Send").click()
        expect(view.locator("#answer")).to_contain_text("no answer to this question")
        expect(view.locator("#answer mark")).to_have_count(0)


def test_text_and_gaps(view: Page) -> None:
    with serving(MODELS["summary"], ANSWERS["summary"]) as state:
        send_example(view, state)
        expect(view.locator("#answer")).to_have_text("The bridge closes in March.")
    with serving(MODELS["gaps"], GAPS) as state:
        send_example(view, state)
        expect(view.locator("#answer tbody tr")).to_have_text(["Paris60.0 %", "Lyon10.0 %"])
        assert "<mask>" in state.requests[0][2]["inputs"]


def test_chat_streams_continues_and_restarts(view: Page) -> None:
    with serving(CHAT, stream=STREAM) as state:
        state.hold = threading.Event()
        view.goto(state.url)
        view.get_by_label("Message").fill("What to see?")
        view.keyboard.press("Control+Enter")
        expect(view.locator("#talk li").nth(1)).to_contain_text("The castle, ")
        expect(view.locator("#talk li[aria-busy=true]")).to_have_count(1)
        state.hold.set()
        expect(view.locator("#talk li").nth(1)).to_contain_text(REPLY)
        expect(view.locator("#took")).to_contain_text("Answered in")
        view.get_by_label("Message").fill("And then?")
        view.keyboard.press("Control+Enter")
        expect(view.locator("#talk li")).to_have_count(4)
        expect(view.locator("#took")).to_contain_text("Answered in")
        assert [path for path, _, _ in state.requests] == ["/v1/chat/completions"] * 2
        assert state.requests[1][2]["messages"] == [
            {"role": "user", "content": "What to see?"},
            {"role": "assistant", "content": REPLY},
            {"role": "user", "content": "And then?"},
        ]
        view.get_by_role("button", name="New conversation").click()
        expect(view.locator("#talk li")).to_have_count(0)
        expect(view.locator("#empty")).to_be_visible()


def test_stop_ends_an_answer_that_is_being_written(view: Page) -> None:
    with serving(CHAT, stream=events("One ", "two")) as state:
        state.hold = threading.Event()
        view.goto(state.url)
        view.get_by_label("Message").fill("Count.")
        view.get_by_role("button", name="Send").click()
        expect(view.locator("#talk li").nth(1)).to_contain_text("One")
        view.get_by_role("button", name="Stop").click()
        expect(view.locator("#took")).to_contain_text("Stopped after")
        expect(view.get_by_role("button", name="Stop")).to_be_hidden()
        expect(view.get_by_role("button", name="Send")).to_be_enabled()


def test_markup_of_the_model_and_of_the_user_stays_text(view: Page) -> None:
    model = {"name": HOSTILE, "task": "text-classification", "labels": [HOSTILE]}
    with serving(model, [{"label": HOSTILE, "score": 0.9}]) as state:
        send_example(view, state)
        expect(view.locator("h1")).to_have_text(HOSTILE)
        expect(view.locator("#answer tbody th")).to_have_text(HOSTILE)
        state.status, state.body = 422, {"error": HOSTILE}
        view.get_by_role("button", name="Send").click()
        expect(view.locator("#problem")).to_contain_text(HOSTILE)
    with serving(MODELS["entities"], [{"entity_group": HOSTILE, "score": 1, "start": 0, "end": len(HOSTILE)}]) as state:
        view.goto(state.url)
        view.get_by_label("Text").fill(HOSTILE)
        view.get_by_role("button", name="Send").click()
        expect(view.locator("#answer .passage")).to_contain_text(HOSTILE)
    with serving(CHAT, stream=events(HOSTILE)) as state:
        send_example(view, state)
        expect(view.locator("#talk")).to_contain_text(HOSTILE)
    assert "owned" not in view.title()
    assert view.locator("main img, main script").count() == 0


def test_refusals_are_shown_with_a_hint(view: Page) -> None:
    with serving(MODELS["classes"], {"error": "The queue of 256 rows is full."}) as state:
        state.status, state.headers = 429, {"Retry-After": "7"}
        view.goto(state.url)
        view.get_by_role("button", name="Send").click()
        expect(view.get_by_role("alert")).to_contain_text('"Text" is empty')
        expect(view.get_by_label("Text")).to_be_focused()
        assert state.requests == []
        view.get_by_label("Text").fill("a")
        view.get_by_role("button", name="Send").click()
        expect(view.get_by_role("alert")).to_contain_text("429: The queue of 256 rows is full. Try again in 7 s.")
    view.get_by_role("button", name="Send").click()
    expect(view.get_by_role("alert")).to_contain_text("Cannot connect")


def test_token_is_requested_on_401_and_stored_nowhere(view: Page) -> None:
    with serving(MODELS["classes"], {"error": "No token."}) as state:
        state.status = 401
        view.goto(state.url)
        expect(view.get_by_label("Token")).to_be_hidden()
        view.get_by_label("Text").fill("it's good")
        view.get_by_role("button", name="Send").click()
        expect(view.get_by_label("Token")).to_be_focused()
        state.status, state.body = 200, ANSWERS["classes"]
        view.keyboard.type("s3cret")
        view.keyboard.press("Control+Enter")
        expect(view.locator("#took")).to_contain_text("Answered in")
        assert state.requests[1][1]["authorization"] == "Bearer s3cret"
        view.get_by_text("The request with curl").click()
        curl = view.locator("#curl").inner_text()
        assert "s3cret" not in curl
        assert "Bearer $TOKEN" in curl
        assert "it'\\''s good" in curl
        assert view.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        view.reload()
        assert view.locator("#token").input_value() == ""


def test_all_can_be_done_with_the_keyboard(view: Page) -> None:
    with serving(MODELS["classes"], ANSWERS["classes"]) as state:
        view.goto(state.url)
        reached = []
        for _ in range(4):
            view.keyboard.press("Tab")
            reached.append(view.evaluate("document.activeElement.id || document.activeElement.tagName"))
            assert view.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", reached
        assert reached == ["text", "send", "example", "SUMMARY"]
        view.keyboard.press("Shift+Tab")
        view.keyboard.press("Enter")
        expect(view.get_by_label("Text")).to_be_focused()
        view.keyboard.press("Tab")
        view.keyboard.press("Enter")
        expect(view.locator("#answer tbody tr")).to_have_count(3)
        expect(view.get_by_role("button", name="Send")).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", MODELS)
def test_page_has_no_barriers_and_is_no_wider_than_the_screen(
    view: Page, kind: str, scheme: str, request: pytest.FixtureRequest
) -> None:
    axe = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed (make install)")
    script = (Path(axe.__path__[0]) / "axe.min.js").read_text(encoding="utf-8")
    view.emulate_media(color_scheme="dark" if scheme == "dark" else "light", reduced_motion="reduce")
    with serving(MODELS[kind], ANSWERS.get(kind), STREAM if kind == "chat" else None, OTHERS.get(kind, ())) as state:
        send_example(view, state)
        view.get_by_text("The request with curl").click()
        view.evaluate(f"(() => {{ {script} }})()")
        for width in WIDTHS:
            view.set_viewport_size({"width": width, "height": 800})
            wider = view.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wider == 0, width
            found = view.evaluate("axe.run().then((said) => said.violations.map((v) => [v.id, v.nodes[0].html]))")
            assert found == [], width
            if folder := request.config.getoption("--record-page"):
                record(view, Path(folder), f"{kind}-{scheme}-{width}")
