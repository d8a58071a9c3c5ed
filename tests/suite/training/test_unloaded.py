"""A run without torch's compiler does not load it, and whoever asks for it gets the real one."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import inspect
import sys
import tempfile
import torch
import torch.distributed as dist
from mlhpc.suite.training.devices import keep_compiler_unloaded

keep_compiler_unloaded()
stand_in = sys.modules["torch._dynamo"]
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    inner = torch.nn.Linear(3, 1)
    model = torch.nn.parallel.DistributedDataParallel(inner)
    optimizers = [
        torch.optim.AdamW(inner.parameters(), fused=True),
        torch.optim.Adam(inner.parameters(), fused=True),
        torch.optim.SGD(inner.parameters(), lr=0.1),
    ]
    for optimizer in optimizers:
        before = inner.weight.detach().clone()
        optimizer.zero_grad(set_to_none=True)
        model(torch.ones(2, 3)).sum().backward()
        torch.nn.utils.clip_grad_norm_(inner.parameters(), 1.0)
        optimizer.step()
        assert not torch.equal(before, inner.weight)
    inspect.getmodule(inspect.currentframe())  # looks at every module
    dist.destroy_process_group()
loaded = [name for name in sys.modules if name.startswith("torch._dynamo.") or name == "sympy"]
assert not loaded, loaded
assert sys.modules["torch._dynamo"] is stand_in is torch._dynamo

import torch._dynamo.config
assert sys.modules["torch._dynamo"] is torch._dynamo is not stand_in
assert torch._dynamo.utils.get_optimize_ddp_mode() == stand_in.utils.get_optimize_ddp_mode()
assert stand_in.explain is torch._dynamo.explain and stand_in.utils.counters is torch._dynamo.utils.counters
real = torch._dynamo
keep_compiler_unloaded()
assert sys.modules["torch._dynamo"] is real
optimizers[0].zero_grad()
print("done")
"""


def test_optimizers_and_ddp_leave_torchs_compiler_unloaded_until_it_is_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr
