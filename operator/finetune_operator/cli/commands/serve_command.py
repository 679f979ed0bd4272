"""`finetune serve`: serves a model on this machine over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from finetune_operator.cli.commands.predict_command import model_uri, task_of
from finetune_operator.cli.terminal.console import UsageError, note, print_line

if TYPE_CHECKING:
    from finetune_contract.trainer_job import TrainerJob
    from finetune_operator.cli.local.adapter_folders import AdapterFolder

_EXAMPLE_INPUTS: dict[str, Any] = {
    "question-answering": {"question": "What is it?", "context": "It is a test."},
    "masked-lm": "It is a [MASK].",
}


def serve(
    model: Annotated[
        str,
        typer.Argument(metavar="RUN|MODEL", help="Folder of a run, of a model or of a LoRA adapter, or hf://name."),
    ],
    port: Annotated[int, typer.Option("--port", metavar="PORT", help="Port to listen on.")] = 8080,
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="ADDRESS", help="Address to listen on; 0.0.0.0: accept requests of other machines."
        ),
    ] = "127.0.0.1",
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="TASK", help="Task of the model. Default: from the folder's config.json."),
    ] = None,
    optimization: Annotated[
        str, typer.Option("--optimization", metavar="NAME", help="Optimization of the model, as in finetune predict.")
    ] = "none",
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-batch-tokens", metavar="TOKENS", min=1, help="Maximum padded tokens of a batch. Default: 2,048."
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter", metavar="NAME=FOLDER", help="LoRA adapter of the model, served as model NAME; repeatable."
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="MODEL", help="Base model of an adapter's folder. Default: the one it names."),
    ] = None,
) -> None:
    """Serve a model on this machine over HTTP.

    The server supports the Open Inference Protocol, Hugging Face's inference JSON and, for generative models,
    OpenAI's API. Ctrl-C finishes the accepted requests and stops it. FINETUNE_SERVE_TOKEN sets a token that
    clients must send.

    \b
    Examples:
      finetune serve runs/quickstart
      finetune serve ./model --port 9000 --optimization measured
      finetune serve hf://org/name --task text-classification
      finetune serve runs/quickstart/adapter
      finetune serve ./base --adapter reviews=runs/reviews/adapter --adapter mails=./mails
    """
    from finetune_operator.cli.local.adapter_folders import adapter_folder, is_adapter, named_adapters

    _check_port(host, port)
    with tempfile.TemporaryDirectory(prefix="finetune-serve-") as folder:
        named = named_adapters(adapter or ())
        alone = adapter_folder(model) if is_adapter(model) else None
        if alone is not None:
            job, workspace = _job_of_base(alone, base, task), Path(folder)
        else:
            job, workspace = _job_of(model, task, base, named, Path(folder))
        job = _with_serving(job, optimization, batch_tokens, [*([] if alone is None else [alone]), *named], alone)
        raise typer.Exit(_run(job, Path(folder) / "serve.json", workspace, host, port))


def _job_of(
    model: str, task: str | None, base: str | None, adapters: Sequence[AdapterFolder], folder: Path
) -> tuple[TrainerJob, Path]:
    """Return the job of the named model, and its workspace. The adapters name its task if nothing else does."""
    from pydantic import ValidationError

    from finetune_contract.layout import JobPaths
    from finetune_contract.trainer_job import TrainerJob

    if base is not None:
        raise UsageError(f"--base: {model} is no folder of an adapter; omit --base")
    task = task or next((adapter.task for adapter in adapters if adapter.task), None)
    run = None if "://" in model else JobPaths(Path(model).expanduser().resolve())
    if run is not None and run.job.is_file():
        try:
            job = TrainerJob.model_validate_json(run.job.read_bytes())
        except (OSError, ValidationError) as error:
            raise UsageError(f"RUN: {run.job} cannot be read: {str(error).splitlines()[0]}") from error
        if task is not None and task != job.task:
            raise UsageError(f"--task: {model} is a run of {job.task}; omit --task")
        if job.trains and not ((run.state / "train.json").is_file() and (run.model / "config.json").is_file()):
            raise UsageError(f"RUN: {model} has no trained model; finish its training first: finetune run")
        # A gate decides about endpoints: on this machine the user does.
        return job.model_copy(update={"name": run.root.name, "evaluation": None}), run.root.parent
    uri = model_uri(model)
    source = {"name": "serve", "task": task or task_of(uri), "model": {"uri": uri}}
    try:
        return TrainerJob.model_validate(source), folder
    except ValidationError as error:
        raise UsageError(f"--task: unknown task {task!r}; use one of {', '.join(_tasks())}") from error


def _job_of_base(alone: AdapterFolder, base: str | None, task: str | None) -> TrainerJob:
    """Return the job of an adapter's base model."""
    from pydantic import ValidationError

    from finetune_contract.trainer_job import TrainerJob

    source = alone.base() if base is None else {"uri": model_uri(base)}
    wanted = task or alone.task or task_of(source["uri"])
    note(f"adapter {alone.name} on {source['uri']}")
    try:
        return TrainerJob.model_validate({"name": "serve", "task": wanted, "model": source})
    except ValidationError as error:
        raise UsageError(f"--task: unknown task {wanted!r}; use one of {', '.join(_tasks())}") from error


def _tasks() -> tuple[str, ...]:
    from finetune_contract.choices import Task

    return get_args(Task)


def _with_serving(
    job: TrainerJob,
    optimization: str,
    batch_tokens: int | None,
    adapters: Sequence[AdapterFolder],
    alone: AdapterFolder | None,
) -> TrainerJob:
    """Return the job with its server. `alone`: adapter that was given in place of a model, which is not served then."""
    from pydantic import ValidationError

    from finetune_contract.choices import BackendName
    from finetune_contract.inference_settings import CPU_BATCH_TOKENS, Serving

    name = "measured" if optimization == "auto" else optimization
    if adapters and name != "none":
        raise UsageError("--optimization: must be none for adapters, as it converts a model without them; omit it")
    model_name = "base" if adapters and not job.trains else job.name
    names = [model_name, *(one.name for one in adapters)]
    if len(set(names)) < len(names):
        raise UsageError(f"--adapter: the names must differ; found {', '.join(names)}")
    served: dict[str, Any] = {"adapters": [{"name": one.name, "uri": one.uri} for one in adapters]}
    served |= {"serves_model": alone is None, "model_name": model_name}
    try:
        serving = Serving.model_validate(
            {**served, "device": "cpu", "optimization": name, "max_batch_tokens": batch_tokens or CPU_BATCH_TOKENS}
        )
    except ValidationError as error:
        known = ", ".join(("auto", *get_args(BackendName)))
        raise UsageError(f"--optimization: unknown optimization {optimization!r}; use one of {known}") from error
    return job.model_copy(update={"serving": serving})


def _check_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"--port: cannot listen on {host}:{port}: {reason}; choose another one") from error


def _run(job: TrainerJob, file: Path, workspace: Path, host: str, port: int) -> int:
    from finetune_contract.python_command import module_command
    from finetune_operator.cli.local.environment import usable_cores
    from finetune_operator.cli.local.measure import TRAINER, trainer_is_installed

    if not trainer_is_installed():
        raise UsageError(
            "serve requires the package finetune-trainer in this environment: pip install 'finetune-trainer[serve]'"
        )
    file.write_text(job.to_json(), encoding="utf-8")
    command = module_command(TRAINER, "serve", "--job", str(file), "--workspace", str(workspace))
    environment = {"OMP_NUM_THREADS": str(usable_cores()), **os.environ, "DS_ACCELERATOR": "cpu"}
    # A session of its own: a terminal's Ctrl-C comes to this command, which has the server drain.
    server = subprocess.Popen([*command, "--host", host, "--port", str(port)], env=environment, start_new_session=True)
    shown = "127.0.0.1" if host == "0.0.0.0" else host
    url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"
    assert job.serving is not None
    print_line(f"{job.name} ({job.task}) is served at {url} once the log shows Ready; press Ctrl-C to stop. Try:")
    body = json.dumps({"inputs": _EXAMPLE_INPUTS.get(job.task, "A text to try the model with.")})
    print_line(f"  curl {url}/ -H 'Content-Type: application/json' -d '{body}'")
    if job.serving is not None and job.serving.adapters:
        names = ", ".join(adapter.name for adapter in job.serving.adapters)
        print_line(f"{url}/models/NAME answers with an adapter ({names})")

    def stop(number: int, frame: object) -> None:
        note("stopping after the accepted requests are answered")
        server.send_signal(signal.SIGINT)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return server.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if server.poll() is None:
            server.kill()
            server.wait()
