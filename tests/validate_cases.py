"""What breaks ``examples/validate.py``: modules that are imported before it, and a made sysfs tree."""

from __future__ import annotations

from pathlib import Path

FAULTS = {
    "class": """
        import megatron_moe_v2.buffers.embedded as embedded
        class EmbeddedElasticBuffer(embedded.EmbeddedElasticBuffer):
            pass
        embedded.EmbeddedElasticBuffer = EmbeddedElasticBuffer
    """,
    "method": """
        import megatron_moe_v2.buffers.embedded as embedded
        original = embedded.EmbeddedElasticBuffer.combine
        embedded.EmbeddedElasticBuffer.combine = lambda self, *args, **kwargs: original(self, *args, **kwargs)
    """,
    "wraps": """
        import functools
        import megatron_moe_v2.buffers.embedded as embedded
        original = embedded.EmbeddedElasticBuffer.combine
        @functools.wraps(original)
        def combine(self, *args, **kwargs):
            return original(self, *args, **kwargs)
        embedded.EmbeddedElasticBuffer.combine = combine
    """,
    "payload": """
        import torch.distributed as dist
        original = dist.all_to_all_single
        def flipped(got, sent, rows_in=None, *args, **kwargs):
            work = original(got, sent, rows_in, *args, **kwargs)
            if rows_in is not None and RANK == 1 and len(got) > 3:
                if work is not None:
                    work.wait()
                got[3, 7] += 1
            return work
        dist.all_to_all_single = flipped
    """,
    "raises": """
        import pretrain
        original = pretrain.Trainer.step
        def step(self, number, stop):
            if RANK == 1 and number == 3:
                raise OverflowError("made to fail")
            return original(self, number, stop)
        pretrain.Trainer.step = step
    """,
    "hangs": """
        import time, pretrain
        original = pretrain.Trainer.step
        def step(self, number, stop):
            if RANK == 1 and number == 3:
                time.sleep(1000)
            return original(self, number, stop)
        pretrain.Trainer.step = step
    """,
    "start": """
        import parallel
        original = parallel.start
        def start(device, **more):
            if RANK == 1:
                raise RuntimeError("made to fail")
            return original(device, **more)
        parallel.start = start
    """,
    "stopped": """
        import os, signal, threading, parallel
        original = parallel.start
        def start(device, **more):
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
            return original(device, **more)
        parallel.start = start
    """,
    "destroy": """
        import torch.distributed as dist
        original = dist.destroy_process_group
        def destroy(group=None):
            if RANK == 1:
                raise RuntimeError("made to fail")
            original(group)
        dist.destroy_process_group = destroy
    """,
    "first-dies": """
        import os, signal, pretrain
        original = pretrain.Trainer.step
        def step(self, number, stop):
            if RANK == 0 and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, number, stop)
        pretrain.Trainer.step = step
    """,
    "second-dies-first-blocks": """
        import datetime, os, signal, pretrain
        from torch.distributed import HashStore
        original = pretrain.Trainer.step
        def step(self, number, stop):
            if RANK == 1 and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            if RANK == 0 and number == 3:
                HashStore().wait(["never"], datetime.timedelta(seconds=1000))
            return original(self, number, stop)
        pretrain.Trainer.step = step
    """,
    "loss": """
        import pretrain
        pretrain.learning_rate = lambda step, **schedule: -1e-3
    """,
    "sources": """
        import validate_provenance
        validate_provenance.source_digest = lambda: RANK
    """,
    "deep_ep": """
        import deep_ep
        class Buffer:
            def dispatch(self): ...
            def combine(self): ...
        deep_ep.Buffer = Buffer
    """,
    "deep_ep-late": """
        from megatron_moe_v2.probe import probe
        import deep_ep
        probe()
        deep_ep.ElasticBuffer = type("ElasticBuffer", (deep_ep.ElasticBuffer,), {})
    """,
}
"""By name, the source of a module. ``RANK`` stands before it."""


def made_sysfs(root: Path, kind: str, sent: int = 1000) -> Path:
    """One fabric port and two interfaces; returns the fabric's counter."""
    device = root / "class" / "infiniband" / ("rdmap0s6" if kind == "efa" else "mlx5_0") / "ports" / "1"
    counter = device / ("hw_counters/tx_bytes" if kind == "efa" else "counters/port_xmit_data")
    counter.parent.mkdir(parents=True)
    counter.write_text(f"{sent}\n")
    for interface, count in (("eth0", 50), ("lo", 7)):
        statistics = root / "class" / "net" / interface / "statistics"
        statistics.mkdir(parents=True)
        (statistics / "tx_bytes").write_text(f"{count}\n")
    return counter
