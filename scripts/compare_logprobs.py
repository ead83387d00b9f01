"""Per-token log-probabilities of one trained model under several buffers, side by side.

    torchrun --standalone --nproc-per-node 2 scripts/compare_logprobs.py out/a3b/checkpoints
    python scripts/compare_logprobs.py out/one/checkpoints --backends embedded      # on a CPU too

Loads the newest checkpoint of ``examples/pretrain.py`` and scores fixed windows of the standard library's text.
Differences are to the first combination, over all tokens of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import checkpointing
import parallel
from moe_model import ModelConfig, MoELanguageModel
from text_data import Windows, read_text

from megatron_moe_v2 import close_buffers, prepare_buffer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--backends", default="deepep_v2,deepep_v1,embedded")
    parser.add_argument("--layouts", default="token,expert")
    parser.add_argument("--windows", type=int, default=4, help="a rank")
    parser.add_argument("--seq-len", type=int, default=512)
    args = parser.parse_args()
    ranks = parallel.start("auto")
    found = checkpointing.complete(args.checkpoints)
    if not found:
        parser.error(f"no finished checkpoint in {args.checkpoints}")
    path = found[-1]
    config = ModelConfig(**json.loads((path / checkpointing.DESCRIPTION).read_text())["model"])
    share = {"global_batch": args.windows * ranks.world, "seq_len": args.seq_len, "seed": 1}
    batch = Windows(read_text(None), rank=ranks.rank, world=ranks.world, **share).batch(0)
    inputs, targets = batch.inputs.to(ranks.device), batch.targets.to(ranks.device)
    scores: dict[str, Tensor] = {}
    for backend in args.backends.split(","):
        os.environ["MCORE_DEEPEP_V2_BACKEND"] = backend
        tokens = args.windows * args.seq_len
        entry = prepare_buffer(hidden=config.hidden, num_topk=config.top_k, num_max_tokens_per_rank=tokens)
        if ranks.is_first:
            print(entry.describe())
        for layout in args.layouts.split(","):
            model = MoELanguageModel(
                config,
                rank=ranks.rank,
                seed=0,
                compute_dtype=torch.float32 if ranks.device.type == "cpu" else torch.bfloat16,
                device=ranks.device,
                layout=layout,
            )
            checkpointing.load_model(path, model)
            with torch.no_grad():
                logits, _ = model(inputs)
            logprobs = logits.float().log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
            scores[f"{backend}, {layout} layout"] = logprobs.flatten().cpu()
        close_buffers()
    if ranks.is_first:
        report(scores, bytes(targets.flatten()[:12].tolist()))
    dist.destroy_process_group()


def report(scores: dict[str, Tensor], first: bytes) -> None:
    base = next(iter(scores.values()))
    print(f"\n{len(base)} tokens; the first are {first!r}\n")
    print("| | mean log-probability | mean difference | largest | first tokens |\n|---|---|---|---|---|")
    for name, score in scores.items():
        apart = (score - base).abs()
        head = " ".join(f"{value:.4f}" for value in score[:6].tolist())
        print(f"| {name} | {score.mean():.5f} | {apart.mean():.1e} | {apart.max():.1e} | {head} |")


if __name__ == "__main__":
    main()
