"""Asks the CUDA build of torch that runs this, on the card that `card.c` plays: see README.md.

python ask.py FOLDER writes FOLDER/VERSION-sm_CARD.json: for each call and each fused backend an empty
text where it can run, "silent" where it refuses without a message, else `function@file:line`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import torch
import torch._subclasses.fake_tensor as fake
from torch.backends import cuda

sys.path.insert(0, str(Path(__file__).parents[1]))
from cases import cases
from generated import calls, tensors

SEED, COUNT = 2, 600  # as test_answers.py draws them again
BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
ASK = (cuda.can_use_flash_attention, cuda.can_use_efficient_attention, cuda.can_use_cudnn_attention)
MESSAGE = re.compile(r"\[W\S+ \S+ (\S+)\] Warning: .*? \(function (\S+)\)", re.DOTALL)


def answers(call) -> list[str]:
    query, key, value, mask = tensors(call, "cuda")
    with torch.set_grad_enabled(call.grad_mode):
        asked = cuda.SDPAParams(
            query, key, value, mask, call.dropout_p, call.is_causal, call.enable_gqa
        )
        return [_answer(can_use, asked) for can_use in ASK]


def _answer(can_use, asked) -> str:
    """PyTorch writes its reason to the process's standard error, past Python."""
    with tempfile.TemporaryFile() as captured:
        before = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            usable = can_use(asked, True)
        finally:
            os.dup2(before, 2)
            os.close(before)
        captured.seek(0)
        found = MESSAGE.search(captured.read().decode())
    if usable:
        return ""
    return f"{found[2]}@{found[1]}" if found else "silent"


def main() -> None:
    for name in ("init_gpu_context", "init_cuda_context"):  # up to 2.12 they allocate on the card
        if hasattr(fake, name):
            setattr(fake, name, lambda *_, **__: None)
    with fake.FakeTensorMode(allow_non_fake_inputs=True):
        one = torch.empty(1, 1, 8, 8, device="cuda", dtype=torch.float16)
        torch._fused_sdp_choice(one, one, one)  # fixes the order
        order = [BACKENDS[number] for number in torch._C._get_sdp_priority_order()]
        named = {name: answers(call) for name, call in cases().items()}
        generated = [answers(call) for call in calls(SEED, COUNT)]
        torch.use_deterministic_algorithms(True)
        named["deterministic_base_f16"] = answers(cases()["base_f16"])
    version, card = torch.__version__.partition("+")[0], os.environ["CARD"]
    found = {
        "version": version,
        "architectures": torch._C._cuda_getArchFlags(),
        "cudnn": torch.backends.cudnn.version(),
        "card": card,
        "order": order,
        "cases": named,
        "generated": generated,
    }
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    (folder / f"{version}-sm_{card}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
