"""The trainer with the Hub, through the Hub's own client: tokens, and commits in place of branches."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.layout import FailureClass
from hub_stand_in.hub_server import Hub, Repository
from suite_plugins.patience import patient
from trainer_support.tasks import byte_tokenizer, write_byte_decoder, write_lines

TOKEN, WRONG = "hf_right", "hf_of_somebody_else"
NAME = "acme/private"


PROGRAM = """
import json, os, sys
from finetune_contract.data_settings import ModelSource
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.models.loading import load_config, pinned

for case, (token, revision) in json.loads(sys.argv[2]).items():
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    model = ModelSource(uri=sys.argv[1], revision=revision)
    try:
        job, commit = pinned(TrainerJob(name="one", task="text-classification", model=model))
        answer = [load_config(job).model_type, job.model.revision, commit]
    except StageError as error:
        answer = [error.failure_class, error.reason, error.message + error.hint]
    print(json.dumps([case, answer]))
"""
"""Program for a process of its own: the Hub's client reads its address when it is imported."""


@pytest.fixture(scope="module")
def commit(tiny_model: Path) -> str:
    """Return the commit of the only model."""
    return Repository(NAME, tiny_model, private=True).commit


@pytest.fixture(scope="module")
def answers(tiny_model: Path, commit: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Load the model in each case, in this order, and return the results."""
    cases = {
        "without a token": (None, "main"),
        "with somebody else's token": (WRONG, "main"),
        "at a revision that is not there": (TOKEN, "no-such-branch"),
        "at a branch": (TOKEN, "main"),
        "at a commit": (TOKEN, commit),
    }
    with Hub(("127.0.0.1", 0), {NAME: Repository(NAME, tiny_model, private=True)}, TOKEN) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "HF_HOME": str(tmp_path_factory.mktemp("hub")),
        }
        run = [sys.executable, "-c", PROGRAM, f"hf://{NAME}", json.dumps(cases)]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=patient(180))
        hub.shutdown()
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("without a token", "ModelNotFound"),
        ("with somebody else's token", "TokenRefused"),
        ("at a revision that is not there", "RevisionNotFound"),
    ],
)
def test_refusal_by_the_hub_differs_from_an_unreachable_hub(
    answers: dict[str, list[Any]], case: str, reason: str
) -> None:
    assert answers[case][:2] == [FailureClass.MODEL, reason]


def test_hint_names_the_secret_and_no_message_contains_the_token(answers: dict[str, list[Any]]) -> None:
    messages = [answers["without a token"][2], answers["with somebody else's token"][2]]
    assert all("secrets.hubToken" in text for text in messages)
    assert not any(WRONG in text for text in messages)


def test_a_branch_is_pinned_to_the_commit_that_it_is_at_and_a_commit_stays(
    answers: dict[str, list[Any]], commit: str
) -> None:
    assert answers["at a branch"] == answers["at a commit"] == ["bert", commit, commit]


WITHOUT = """
import json, sys
from finetune_trainer.models import hub_revisions
from finetune_trainer.core.failures import StageError
from finetune_trainer.models.loading import load_config, load_tokenizer
from finetune_contract.trainer_job import TrainerJob
from transformers import AutoModel

hub_revisions.PROBE_SECONDS = 1.0  # the time that a test waits for a server that never answers
try:
    job = TrainerJob(name="one", task="text-classification", model={"uri": sys.argv[1]})
    config, tokenizer = load_config(job), load_tokenizer(job)
    AutoModel.from_pretrained(sys.argv[1][5:], revision=hub_revisions.commit_of(sys.argv[1][5:], "main"))
    print(json.dumps([config.model_type, len(tokenizer), hub_revisions.commit_of(sys.argv[1][5:], "main")]))
except StageError as error:
    print(json.dumps([error.failure_class, error.reason]))
"""
"""Program that loads a model, in a process of its own."""


OFFLINE = """
import sys
from finetune_trainer.models.hub_revisions import commit_of
from huggingface_hub import is_offline_mode

commit_of(sys.argv[1], "main")
print(is_offline_mode())
"""


class Unavailable(ThreadingHTTPServer):
    """Answers each request with one status, and counts those for the model."""

    daemon_threads = True

    def __init__(self, status: int) -> None:
        self.status, self.requests = status, 0
        super().__init__(("127.0.0.1", 0), _Refusing)


class _Refusing(BaseHTTPRequestHandler):
    server: Unavailable

    def do_GET(self) -> None:
        self.server.requests += NAME in self.path
        self.send_error(self.server.status)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *arguments: object) -> None:
        """Write nothing."""


def load_from(endpoint: str, cache: Path) -> tuple[list[Any], str]:
    """Load the model in a process of its own; return what it has found, and its log."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache)}
    run = [sys.executable, "-c", WITHOUT, f"hf://{NAME}"]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=patient(300))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def cached(tiny_model: Path, commit: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Return a cache that has the model, and what was loaded while the Hub was there."""
    cache = tmp_path_factory.mktemp("full")
    with Hub(("127.0.0.1", 0), {NAME: Repository(NAME, tiny_model, private=False)}, TOKEN) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        found, log = load_from(f"http://127.0.0.1:{hub.server_port}", cache)
        hub.shutdown()
    assert found[-1] == commit
    assert "cannot be reached" not in log
    return cache, found


@pytest.mark.parametrize("status", [429, 503])
def test_cached_model_takes_one_request_to_an_unavailable_hub(cached: tuple[Path, list[Any]], status: int) -> None:
    cache, expected = cached
    with Unavailable(status) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        found, log = load_from(f"http://127.0.0.1:{hub.server_port}", cache)
        hub.shutdown()
    assert found == expected
    assert hub.requests == 1
    assert log.count("cannot be reached") == 1
    assert f"HTTP status {status}" in log
    assert all(text in log for text in (NAME, expected[-1], f"http://127.0.0.1:{hub.server_port}"))


@pytest.mark.parametrize("listens", [True, False], ids=["a Hub that never answers", "a closed port"])
def test_cached_model_is_used_if_no_hub_answers(cached: tuple[Path, list[Any]], listens: bool) -> None:
    cache, expected = cached
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen(64)
        found, log = load_from(f"http://127.0.0.1:{silent.getsockname()[1]}", cache)
    assert found == expected
    assert log.count("cannot be reached") == 1


@pytest.mark.parametrize(("index", "whole"), [(None, True), (None, False), ('{"weight_map": []}', False), ("{", False)])
def test_only_a_model_with_its_weights_is_used_without_the_hub(
    cached: tuple[Path, list[Any]], tmp_path: Path, index: str | None, whole: bool
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(cached[0], cache, symlinks=True)
    (weights,) = cache.glob("hub/models--*/snapshots/*/model.safetensors")
    if not whole:
        weights.unlink()
    if index is not None:
        weights.with_name("model.safetensors.index.json").write_text(index, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{closed.getsockname()[1]}", "HF_HOME": str(cache)}
        run = [sys.executable, "-c", OFFLINE, NAME]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=patient(120))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == str(whole)


def test_unreachable_hub_fails_the_model_that_is_not_cached(tmp_path: Path) -> None:
    with Unavailable(503) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        found, _ = load_from(f"http://127.0.0.1:{hub.server_port}", tmp_path)
        hub.shutdown()
    assert found == [FailureClass.HUB_UNAVAILABLE, "HubUnavailable"]


def test_refusal_by_the_hub_is_not_answered_from_the_cache(cached: tuple[Path, list[Any]]) -> None:
    cache, _ = cached
    with Hub(("127.0.0.1", 0), {}, TOKEN) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        found, log = load_from(f"http://127.0.0.1:{hub.server_port}", cache)
        hub.shutdown()
    assert found == [FailureClass.MODEL, "ModelNotFound"]
    assert "is used" not in log


FETCH = """
import sys
from finetune_contract.data_settings import ModelSource
from finetune_trainer.models.loading import MODEL_CARD, fetch_card, model_file

model = ModelSource(uri=sys.argv[1])
before = model_file(model, MODEL_CARD)
fetch_card(model)
file = model_file(model, MODEL_CARD)
print(before, None if file is None else file.read_text())
"""


@pytest.mark.parametrize(("text", "found"), [("license: mit", "None license: mit\n"), (None, "None None\n")])
def test_card_of_a_hub_model_is_fetched_once_for_later_stages(text: str | None, found: str, tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    if text is not None:
        (folder / "README.md").write_text(text)
    with Hub(("127.0.0.1", 0), {NAME: Repository(NAME, folder, private=False)}, TOKEN) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "cache")}
        run = [sys.executable, "-c", FETCH, f"hf://{NAME}"]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=patient(300))
        hub.shutdown()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == found


SHAPES = """
import json, sys
from pathlib import Path
from transformers import AutoTokenizer
from finetune_contract.layout import JobPaths
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.prepare.prepare import prepare
from trainer_support.tasks import task_job, training_of

for name in sys.argv[3:]:
    uri, paths = f"hf://acme/{name}", JobPaths(Path(sys.argv[2]) / name)
    job = task_job("text-generation", Path(sys.argv[1]), uri, ["text"], training=training_of(steps=1), predict=None)
    facts, tokenizer = prepare(job, paths, NoProgress()), AutoTokenizer.from_pretrained(sys.argv[1])
    rows = PreparedData.open(paths).features("train", range(2))
    texts = [tokenizer.decode([token for token in row["labels"] if token >= 0]) for row in rows]
    print(json.dumps([name, facts.shape, texts]))
"""
"""Program that prepares data sets of the Hub, and prints what is learnt of two rows of each."""


def test_data_sets_of_the_hub_are_read_by_their_shape(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{{ m.tool_calls | tojson if m.tool_calls }}"
    template += "</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    model = write_byte_decoder(tmp_path / "model", byte_tokenizer(template, ("<pad>", "</s>"), end="</s>"))

    def asked(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {"messages": [{"role": "user", "content": "do"}, {"role": "assistant", "tool_calls": [call]}]}

    data = {
        "alpaca": [
            {"instruction": "2+2", "input": "", "output": "4"},
            {"instruction": "a", "input": "b", "output": "ü"},
        ],
        "calls": [asked("pay", {"amount": 0}), asked("weather", {"city": "Oslo"})],
    }
    for name, rows in data.items():
        for split in ("train", "validation"):
            write_lines(tmp_path / name / f"{split}.jsonl", rows)
    repositories = {f"acme/{name}": Repository(f"acme/{name}", tmp_path / name, private=False) for name in data}
    with Hub(("127.0.0.1", 0), repositories, None) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "home")}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        run = [sys.executable, "-c", SHAPES, str(model), str(tmp_path / "jobs"), *data]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=patient(180))
        hub.shutdown()
    assert done.returncode == 0, done.stdout + done.stderr
    calls = [json.dumps(row["messages"][1]["tool_calls"]) for row in data["calls"]]
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        ["alpaca", "Alpaca", ["4</s>", "ü</s>"]],
        ["calls", "messages", [f"{call}</s>" for call in calls]],
    ]
