"""Where kernels run: on which device, and whether at all.

A launcher launches on a GPU, and in Triton's interpreter, which tests use. Anywhere else it takes
`kernels.reference`, which is right and slow.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

INTERPRETER = "interpreter"


def can_launch(tensor: Tensor) -> bool:
    """Whether a kernel may be launched on this tensor."""
    return tensor.is_cuda or bool(triton.knobs.runtime.interpret)


def arch(device: torch.device) -> str:
    """What the compiler calls the device: "sm_90", "gfx942"."""
    return _facts(device)[0] if device.type == "cuda" else INTERPRETER


def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors, or compute units."""
    return _facts(device)[1] if device.type == "cuda" else 1


@cache
def _facts(device: torch.device) -> tuple[str, int]:
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
    else:
        name = f"sm_{properties.major}{properties.minor}"
    return name, properties.multi_processor_count
