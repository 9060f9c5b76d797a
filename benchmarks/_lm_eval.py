"""lm_eval as a child process: its command, its task files, and what it wrote."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _accuracy_entries import Entry

LOCAL_GSM8K = "gsm8k_local"
_TAIL_CHARACTERS = 2000


class LMEvalError(RuntimeError):
    """lm_eval failed or wrote no results; the message holds the end of its output."""


@dataclass(frozen=True)
class Outcome:
    """Attributes:
    metrics: the task's, such as `exact_match,strict-match`.
    outputs: what the model answered, by filter and question.
    """

    metrics: dict[str, float]
    outputs: dict[str, Any]


def write_local_gsm8k(folder: Path, data: Path) -> str:
    """Write lm_eval's GSM8K task over local files; returns the task's name.

    The prompts, the stop strings and both filters are those of its own task `gsm8k`, version 3.

    Args:
        folder: for --include_path.
        data: holds train.jsonl and test.jsonl.

    Raises:
        LMEvalError: when a file is missing.
    """
    files = {split: (data / f"{split}.jsonl").resolve() for split in ("train", "test")}
    if missing := [str(path) for path in files.values() if not path.is_file()]:
        raise LMEvalError(f"--data-dir should hold train.jsonl and test.jsonl; no {missing[0]}")
    task = {
        "task": LOCAL_GSM8K,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {split: str(path) for split, path in files.items()}},
        "output_type": "generate_until",
        "training_split": "train",
        "fewshot_split": "train",
        "test_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "ignore_punctuation": False,
                "regexes_to_ignore": [",", "\\$", "(?s).*#### ", "\\.$"],
            }
        ],
        "generation_kwargs": {
            "until": ["Question:", "</s>", "<|im_end|>"],
            "do_sample": False,
            "temperature": 0.0,
        },
        "repeats": 1,
        "num_fewshot": 5,
        "filter_list": [
            _filter("strict-match", regex_pattern="#### (\\-?[0-9\\.\\,]+)"),
            _filter(
                "flexible-extract",
                group_select=-1,
                regex_pattern="(-?[$0-9.,]{2,})|(-?[0-9]+)",
            ),
        ],
        "metadata": {"version": 3.0},
    }
    # JSON is YAML, and needs no further package.
    (folder / f"{LOCAL_GSM8K}.yaml").write_text(json.dumps(task, indent=2), encoding="utf-8")
    return LOCAL_GSM8K


def _filter(name: str, **regex: Any) -> dict[str, Any]:
    return {"name": name, "filter": [{"function": "regex", **regex}, {"function": "take_first"}]}


def lm_eval_command(
    program: str, entry: Entry, task: str, url: str, model: str, folder: Path, include: Path | None
) -> list[str]:
    """The command line of one evaluation.

    Args:
        program: `lm_eval`, or words that start it.
        model: what the server calls its model.
        folder: for the results.
        include: a folder with more tasks.
    """
    arguments = {
        "model": model,
        "base_url": f"{url}/v1/completions",
        "num_concurrent": entry.concurrency,
        "max_retries": 1,
        "timeout": 3600,
        # Text is sent as it is: the server has the tokenizer.
        "tokenizer_backend": "None",
        "tokenized_requests": False,
    }
    command = [*shlex.split(program), "--model", "local-completions", "--model_args"]
    command += [",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--tasks", task, "--num_fewshot", str(entry.num_fewshot)]
    command += ["--batch_size", "1", "--output_path", str(folder), "--log_samples"]
    command += ["--limit", str(entry.limit)] if entry.limit else []
    command += ["--gen_kwargs", entry.gen_kwargs] if entry.gen_kwargs else []
    command += ["--include_path", str(include)] if include is not None else []
    return command


def run_lm_eval(command: Sequence[str], log: Path, *, offline: bool) -> None:
    """Run it to its end, its output to a file.

    Args:
        offline: the questions are here, so it need not look for them on the hub.

    Raises:
        LMEvalError: when it cannot be started or fails.
    """
    try:
        with log.open("w", encoding="utf-8") as output:
            done = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **({"HF_HUB_OFFLINE": "1"} if offline else {})},
            )
    except OSError as error:
        raise LMEvalError(
            f"cannot run {command[0]}: {error}; install it with pip install 'lm_eval[api]', or "
            "name it with --lm-eval"
        ) from error
    if done.returncode:
        tail = log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARACTERS:].strip()
        raise LMEvalError(f"lm_eval ended with status {done.returncode}:\n{tail}")


def read_outcome(folder: Path, task: str) -> Outcome:
    """What lm_eval wrote into its output folder.

    Raises:
        LMEvalError: when results or samples are missing.
    """
    results = sorted(folder.rglob("results_*.json"))
    samples = sorted(folder.rglob(f"samples_{task}_*.jsonl"))
    if len(results) != 1 or len(samples) != 1:
        raise LMEvalError(
            f"expected one results_*.json and one samples_{task}_*.jsonl in {folder}, found "
            f"{len(results)} and {len(samples)}"
        )
    table: Mapping[str, Any] = json.loads(results[0].read_text(encoding="utf-8"))["results"]
    if task not in table:
        raise LMEvalError(f"{results[0]} has no results of {task}; it has {', '.join(table)}")
    metrics = {k: float(v) for k, v in table[task].items() if _is_number(v)}
    outputs = {}
    for line in samples[0].read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        outputs[f"{sample.get('filter', 'none')}/{sample['doc_id']}"] = sample["resps"]
    return Outcome(metrics, outputs)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
