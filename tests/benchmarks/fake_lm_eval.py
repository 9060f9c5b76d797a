"""Takes lm_eval's flags, asks the server a few questions and writes files as lm_eval does."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--accuracy", type=float, default=0.5)
parser.add_argument("--answer", help="instead of the server's")
parser.add_argument("--fail", action="store_true")
for name in ("model", "model_args", "tasks", "output_path", "gen_kwargs", "include_path"):
    parser.add_argument(f"--{name}")
for name in ("num_fewshot", "batch_size", "limit"):
    parser.add_argument(f"--{name}", type=int)
parser.add_argument("--log_samples", action="store_true")
args = parser.parse_args()
if args.fail:
    sys.exit("lm_eval has had enough")
assert args.model == "local-completions"
assert args.log_samples
if args.include_path is not None:
    task = json.loads((Path(args.include_path) / f"{args.tasks}.yaml").read_text())
    assert task["task"] == args.tasks
    assert all(Path(path).is_file() for path in task["dataset_kwargs"]["data_files"].values())
model_args = dict(pair.split("=", 1) for pair in args.model_args.split(","))


def ask(number: int) -> str:
    body = {"model": model_args["model"], "prompt": "one two one two one", "max_tokens": 24}
    body |= {"temperature": 0, "seed": number, "ignore_eos": True}
    request = urllib.request.Request(
        model_args["base_url"], json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return str(json.load(response)["choices"][0]["text"])


folder = Path(args.output_path) / "model"
folder.mkdir(parents=True)
with (folder / f"samples_{args.tasks}_2026.jsonl").open("w") as samples:
    for number in range(args.limit):
        answer = args.answer or ask(number)
        for name in ("strict-match", "flexible-extract"):
            sample = {"doc_id": number, "filter": name, "resps": [[answer]]}
            samples.write(json.dumps(sample) + "\n")
metrics = {
    "alias": args.tasks,
    "exact_match,strict-match": args.accuracy / 2,
    "exact_match,flexible-extract": args.accuracy,
}
(folder / "results_2026.json").write_text(json.dumps({"results": {args.tasks: metrics}}))
