"""The baseline of the demo: one process with plain transformers and PEFT, without Symbiosis.

It chats, then fine-tunes for a few steps: the demo measures the memory of both. Then it generates with adapters of the server.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from symbiosis.cli.chat import ChatSampling

STEPS = 4


def run_plain_baseline(
    reports: Any, data: Path, settings: dict[str, Any], questions: Mapping[Path, str], sampling: ChatSampling
) -> None:
    """Entry point of the process. It ignores Ctrl-C, which the parent handles. Puts reports on the queue."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _chat_and_train(reports, data, settings, sampling)
        _generate(reports, questions, sampling)
    except Exception as error:  # noqa: BLE001  # the parent reports any failure
        reports.put({"what": "failed", "who": "plain", "reason": f"{type(error).__name__}: {error}"})


def _chat_and_train(reports: Any, data: Path, settings: dict[str, Any], sampling: ChatSampling) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from symbiosis.cli.local_chat import LocalChat
    from symbiosis.cli.local_finetune import FinetuneConfig, StepReport, finetune, read_samples
    from symbiosis.models.default_model import default_model_folder

    disable_progress_bar()  # the demo has its own progress display
    folder = default_model_folder()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    LocalChat(model, tokenizer).reply([{"role": "user", "content": "Why is the sky blue?"}], sampling)
    reports.put({"what": "chat"})
    steps: list[StepReport] = []
    with tempfile.TemporaryDirectory() as out:
        config = FinetuneConfig(**settings, steps=STEPS)
        finetune(model, tokenizer, read_samples(data), Path(out), config, steps.append)
    warm = steps[1:]  # the first step allocates
    reports.put({"what": "plain", "steps_per_s": len(warm) / sum(step.seconds for step in warm)})


def _generate(reports: Any, questions: Mapping[Path, str], sampling: ChatSampling) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from symbiosis.cli.local_chat import LocalChat, with_adapter
    from symbiosis.models.default_model import default_model_folder

    folder = default_model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for adapter, question in questions.items():
        tuned = with_adapter(AutoModelForCausalLM.from_pretrained(folder), adapter)
        text = LocalChat(tuned, tokenizer).reply([{"role": "user", "content": question}], sampling)
        reports.put({"what": "text", "who": adapter.name, "text": text})
