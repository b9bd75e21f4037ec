"""A platform for verl on a machine without GPUs: for tests alone.

verl has none, since nobody trains on CPUs. Ray's GPU count is only a label, so verl places its
worker groups as on a machine with GPUs, and they compute in CPU memory.

`VERL_USE_EXTERNAL_MODULES=verl_on_cpu VERL_PLATFORM=cpu` loads it into every process of a run.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import ModuleType

import torch
import torch.distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _Device(ModuleType):
    """`torch.cpu` with the functions of `torch.cuda` that verl calls unconditionally."""

    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = staticmethod(
        lambda *_: 0
    )
    mem_get_info = staticmethod(lambda *_: (1 << 30, 1 << 30))
    empty_cache = ipc_collect = synchronize = set_device = staticmethod(lambda *_, **__: None)
    reset_peak_memory_stats = staticmethod(lambda *_: None)
    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)
    get_device_name = staticmethod(lambda *_: "CPU")
    is_available = staticmethod(lambda: False)

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class Cpu(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("torch.cpu")

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")  # verl moves tensors to it

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


_init_process_group = torch.distributed.init_process_group


def _init_without_duplicates(backend=None, *args, **kwargs):
    """Remove the repeated backend: verl names one for the CPU and one for the device."""
    if backend is not None:
        backend = ",".join(dict.fromkeys(backend.split(",")))
    return _init_process_group(backend, *args, **kwargs)


torch.distributed.init_process_group = _init_without_duplicates
